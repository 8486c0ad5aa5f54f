"""The original's public names and signatures, frozen.

Each entry is a signature as the original has it. Ours must take every call that fits it: the
same parameters in the same places, with the same defaults; what we add must be optional. A
change here is a change for every user.
"""

from __future__ import annotations

import ast
import inspect
import re
from pkgutil import resolve_name
from typing import Any

import pytest

REQUIRED = inspect.Parameter.empty

# Adagrad's accumulator began with 0.01, at which rows hardly move; a log line says so.
# The original's ports of PersiaServiceCtx were numbers; None is a socket that no other job can
# take.
CALLS = """
persia.embedding:EmbeddingConfig(emb_initialization=(-0.01, 0.01), admit_probability=1.0,
    weight_bound=10)
persia.embedding:get_default_embedding_config()
persia.embedding.data:IDTypeFeature(name, data)
persia.embedding.data:IDTypeFeatureWithSingleID(name, data)
persia.embedding.data:NdarrayDataBase(data, name=None)
persia.embedding.data:Label(data, name=None)
persia.embedding.data:NonIDTypeFeature(data, name=None)
persia.embedding.data:PersiaBatch(id_type_features, non_id_type_features=None,
    labels=None, batch_size=None, requires_grad=True, meta=None)
persia.embedding.data:PersiaBatch.to_bytes(self)
persia.embedding.optim:Optimizer.apply(self)
persia.embedding.optim:SGD(lr, momentum=0.0, weight_decay=0.0)
persia.embedding.optim:Adam(lr=0.001, betas=(0.9, 0.999), weight_decay=0, eps=1e-08)
persia.embedding.optim:Adagrad(lr=0.01, initial_accumulator_value=0, weight_decay=0,
    g_square_momentum=1, eps=1e-10, vectorwise_shared=False)
persia.env:reload_env()
persia.env:set_env(replica_size=None, replica_index=None, world_size=None, rank=None,
    local_rank=None)
persia.env:get_world_size()
persia.env:get_rank()
persia.env:get_local_rank()
persia.env:get_replica_size()
persia.env:get_replica_index()
persia.distributed:DistributedBaseOption(master_port, master_addr=None)
persia.distributed:DDPOption(initialization_method='tcp', backend='nccl')
persia.distributed:BaguaDistributedOption(algorithm)
persia.distributed:DDPOption.convert2distributed_model(self, model, world_size, rank_id,
    device_id=None, master_addr=None, optimizer=None)
persia.distributed:DDPOption.init_with_env_file(self)
persia.distributed:get_default_distributed_option(device_id=None)
persia.logger:levelFilter(level)
persia.logger:setLogger(name, log_level=10, log_filename='train.log',
    enable_file_logger=False, err_redirect_filepath='error.log', enable_err_redirect=False,
    err_redirect_level=20)
persia.logger:get_logger(name)
persia.logger:get_default_logger(name=None)
persia.utils:setup_seed(seed)
persia.utils:load_yaml(filepath)
persia.utils:dump_yaml(content, filepath)
persia.utils:run_command(cmd, env=None)
persia.utils:resolve_binary_execute_path(binary_name)
persia.utils:find_free_port(port=10000, interval=1)
persia.service:get_embedding_worker_services()
persia.helper:PersiaServiceCtx(data_loader_func=None, nn_worker_func=None,
    embedding_config=None, embedding_config_path=None, global_config=None,
    global_config_path=None, data_loader_replica_num=1, nproc_per_node=1,
    embedding_worker_replica_num=1, embedding_parameter_replica_num=1,
    embedding_worker_port=None, embedding_parameter_server_port=None, nats_server_port=None)
persia.helper:ensure_persia_service()
persia.prelude:check_pyarray_dtype_valid(array, dtype, name=None)
persia.ctx:BaseCtx(threadpool_worker_size=10, device_id=None)
persia.ctx:EmbeddingCtx(preprocess_mode, model=None, embedding_config=None)
persia.ctx:EmbeddingCtx.configure_embedding_parameter_servers(self, embedding_config)
persia.ctx:EmbeddingCtx.forward(self, batch)
persia.ctx:EmbeddingCtx.prepare_features(self, batch)
persia.ctx:EmbeddingCtx.get_embedding_size(self)
persia.ctx:EmbeddingCtx.clear_embeddings(self)
persia.ctx:EmbeddingCtx.get_embedding_from_data(self, persia_batch, device_id=None)
persia.ctx:EmbeddingCtx.get_embedding_from_bytes(self, data, device_id=None)
persia.ctx:TrainCtx(embedding_optimizer, dense_optimizer, grad_scalar_update_factor=4,
    backward_buffer_size=10, backward_workers_size=8, grad_update_buffer_size=60,
    lookup_emb_directly=True)
persia.ctx:TrainCtx.backward(self, loss, embedding_gradient_check_frequency=20)
persia.ctx:TrainCtx.wait_servers_ready(self)
persia.ctx:cnt_ctx()
persia.data:IterableDatasetBase(buffer_size=10)
persia.data:IterableDataset(buffer_size=10)
persia.data:DataLoader(dataset, forward_buffer_size=10, timeout_ms=600000, num_workers=10,
    reproducible=False, embedding_staleness=None)
"""


def signatures() -> dict[str, dict[str, Any]]:
    """Return the defaults of each parameter, by its place."""
    found = {}
    for line in re.sub(r"\n +", " ", CALLS.strip()).splitlines():
        place, _, rest = line.partition("(")
        (function,) = ast.parse(f"def call({rest}: ...").body
        assert isinstance(function, ast.FunctionDef)
        given = function.args
        names = [one.arg for one in given.args]
        defaults = [ast.literal_eval(one) for one in given.defaults]
        required = [REQUIRED] * (len(names) - len(defaults))
        found[place] = dict(zip(names, [*required, *defaults], strict=True))
    return found


SIGNATURES = signatures()

# Defaults of today that differ from those of the original.
CHANGED = {("persia.data:DataLoader", "embedding_staleness"): "auto"}

# Names that are no functions, or whose signature is *args and **kwargs.
OTHERS = {
    "persia.ctx": ("PreprocessMode", "eval_ctx"),
    "persia.env": ("PERSIA_LAUNCHER_VERBOSE", "PERSIA_SKIP_CHECK_DATA"),
    "persia.logger": (
        *("COLOR_FORMATTER", "DEFAULT_LOGGER_NAME", "FILE_LOG_FORMAT", "FORMATTER"),
        "STREAM_LOG_FORMAT",
    ),
    "persia.prelude": ("OptimizerBase", "is_cuda_feature_available"),
}


@pytest.mark.parametrize("place", SIGNATURES)
def test_signature_takes_the_original_calls(place: str) -> None:
    want = SIGNATURES[place]
    parameters = list(inspect.signature(resolve_name(place)).parameters.values())
    ours = parameters[: len(want)]
    assert [parameter.name for parameter in ours] == list(want)
    for parameter in ours:
        assert parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        expected = CHANGED.get((place, parameter.name), want[parameter.name])
        assert parameter.default == expected, parameter
    for parameter in parameters[len(want) :]:
        is_rest = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        assert is_rest or parameter.default is not REQUIRED, f"{parameter} must be optional"


def test_other_names_and_constants() -> None:
    for module, names in OTHERS.items():
        for name in names:
            assert resolve_name(f"{module}:{name}") is not None
    assert resolve_name("persia.embedding.data:MAX_BATCH_SIZE") == 65535
    assert resolve_name("persia.utils:MAXIMUM_LOCAL_PORT_NUM") == 65535
    assert resolve_name("persia.logger:LOG_COLOR") == {
        "DEBUG": "cyan",
        "INFO": "green",
        "WARNING": "yellow",
        "ERROR": "red",
        "CRITICAL": "red,bg_white",
    }
