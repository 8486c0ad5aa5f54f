"""The original's public names and signatures, frozen.

Each entry is a signature as the original has it. Ours must take every call that fits it: the
same parameters in the same places, with the same defaults; what we add must be optional. A
change here is a change for every user.
"""

from __future__ import annotations

import inspect
import logging
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest

REQUIRED = inspect.Parameter.empty

# Modules whose own tests freeze more are listed here all the same: this is the one list.
SIGNATURES: dict[str, dict[str, Any]] = {
    "persia.embedding:EmbeddingConfig": {
        "emb_initialization": (-0.01, 0.01),
        "admit_probability": 1.0,
        "weight_bound": 10,
    },
    "persia.embedding:get_default_embedding_config": {},
    "persia.embedding.data:IDTypeFeature": {"name": REQUIRED, "data": REQUIRED},
    "persia.embedding.data:IDTypeFeatureWithSingleID": {"name": REQUIRED, "data": REQUIRED},
    "persia.embedding.data:NdarrayDataBase": {"data": REQUIRED, "name": None},
    "persia.embedding.data:Label": {"data": REQUIRED, "name": None},
    "persia.embedding.data:NonIDTypeFeature": {"data": REQUIRED, "name": None},
    "persia.embedding.data:PersiaBatch": {
        "id_type_features": REQUIRED,
        "non_id_type_features": None,
        "labels": None,
        "batch_size": None,
        "requires_grad": True,
        "meta": None,
    },
    "persia.embedding.data:PersiaBatch.to_bytes": {"self": REQUIRED},
    "persia.embedding.optim:Optimizer.apply": {"self": REQUIRED},
    "persia.embedding.optim:SGD": {"lr": REQUIRED, "momentum": 0.0, "weight_decay": 0.0},
    "persia.embedding.optim:Adam": {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "weight_decay": 0,
        "eps": 1e-8,
    },
    "persia.embedding.optim:Adagrad": {
        "lr": 1e-2,
        "initial_accumulator_value": 1e-2,
        "weight_decay": 0,
        "g_square_momentum": 1,
        "eps": 1e-10,
        "vectorwise_shared": False,
    },
    "persia.env:reload_env": {},
    "persia.env:set_env": {
        "replica_size": None,
        "replica_index": None,
        "world_size": None,
        "rank": None,
        "local_rank": None,
    },
    "persia.env:get_world_size": {},
    "persia.env:get_rank": {},
    "persia.env:get_local_rank": {},
    "persia.env:get_replica_size": {},
    "persia.env:get_replica_index": {},
    "persia.distributed:DistributedBaseOption": {"master_port": REQUIRED, "master_addr": None},
    "persia.distributed:DDPOption": {"initialization_method": "tcp", "backend": "nccl"},
    "persia.distributed:BaguaDistributedOption": {"algorithm": REQUIRED},
    "persia.distributed:DDPOption.convert2distributed_model": {
        "self": REQUIRED,
        "model": REQUIRED,
        "world_size": REQUIRED,
        "rank_id": REQUIRED,
        "device_id": None,
        "master_addr": None,
        "optimizer": None,
    },
    "persia.distributed:DDPOption.init_with_env_file": {"self": REQUIRED},
    "persia.distributed:get_default_distributed_option": {"device_id": None},
    "persia.logger:levelFilter": {"level": REQUIRED},
    "persia.logger:setLogger": {
        "name": REQUIRED,
        "log_level": logging.DEBUG,
        "log_filename": "train.log",
        "enable_file_logger": False,
        "err_redirect_filepath": "error.log",
        "enable_err_redirect": False,
        "err_redirect_level": logging.INFO,
    },
    "persia.logger:get_logger": {"name": REQUIRED},
    "persia.logger:get_default_logger": {"name": None},
    "persia.utils:setup_seed": {"seed": REQUIRED},
    "persia.utils:load_yaml": {"filepath": REQUIRED},
    "persia.utils:dump_yaml": {"content": REQUIRED, "filepath": REQUIRED},
    "persia.utils:run_command": {"cmd": REQUIRED, "env": None},
    "persia.utils:resolve_binary_execute_path": {"binary_name": REQUIRED},
    "persia.utils:find_free_port": {"port": 10000, "interval": 1},
    "persia.service:get_embedding_worker_services": {},
    # The original's ports were numbers; None is a socket that no other job can take.
    "persia.helper:PersiaServiceCtx": {
        "data_loader_func": None,
        "nn_worker_func": None,
        "embedding_config": None,
        "embedding_config_path": None,
        "global_config": None,
        "global_config_path": None,
        "data_loader_replica_num": 1,
        "nproc_per_node": 1,
        "embedding_worker_replica_num": 1,
        "embedding_parameter_replica_num": 1,
        "embedding_worker_port": None,
        "embedding_parameter_server_port": None,
        "nats_server_port": None,
    },
    "persia.helper:ensure_persia_service": {},
    "persia.prelude:check_pyarray_dtype_valid": {
        "array": REQUIRED,
        "dtype": REQUIRED,
        "name": None,
    },
    "persia.ctx:BaseCtx": {"threadpool_worker_size": 10, "device_id": None},
    "persia.ctx:EmbeddingCtx": {
        "preprocess_mode": REQUIRED,
        "model": None,
        "embedding_config": None,
    },
    "persia.ctx:EmbeddingCtx.configure_embedding_parameter_servers": {
        "self": REQUIRED,
        "embedding_config": REQUIRED,
    },
    "persia.ctx:EmbeddingCtx.forward": {"self": REQUIRED, "batch": REQUIRED},
    "persia.ctx:EmbeddingCtx.prepare_features": {"self": REQUIRED, "batch": REQUIRED},
    "persia.ctx:EmbeddingCtx.get_embedding_size": {"self": REQUIRED},
    "persia.ctx:EmbeddingCtx.clear_embeddings": {"self": REQUIRED},
    "persia.ctx:EmbeddingCtx.get_embedding_from_data": {
        "self": REQUIRED,
        "persia_batch": REQUIRED,
        "device_id": None,
    },
    "persia.ctx:EmbeddingCtx.get_embedding_from_bytes": {
        "self": REQUIRED,
        "data": REQUIRED,
        "device_id": None,
    },
    "persia.ctx:TrainCtx": {
        "embedding_optimizer": REQUIRED,
        "dense_optimizer": REQUIRED,
        "grad_scalar_update_factor": 4,
        "backward_buffer_size": 10,
        "backward_workers_size": 8,
        "grad_update_buffer_size": 60,
        "lookup_emb_directly": True,
    },
    "persia.ctx:TrainCtx.backward": {
        "self": REQUIRED,
        "loss": REQUIRED,
        "embedding_gradient_check_frequency": 20,
    },
    "persia.ctx:TrainCtx.wait_servers_ready": {"self": REQUIRED},
    "persia.ctx:cnt_ctx": {},
    "persia.data:IterableDatasetBase": {"buffer_size": 10},
    "persia.data:IterableDataset": {"buffer_size": 10},
    "persia.data:DataLoader": {
        "dataset": REQUIRED,
        "forward_buffer_size": 10,
        "timeout_ms": 600000,
        "num_workers": 10,
        "reproducible": False,
        "embedding_staleness": None,
    },
}

# Names that are no functions, or whose signature is *args and **kwargs.
OTHERS = {
    "persia.ctx": ("PreprocessMode", "eval_ctx"),
    "persia.embedding.data": ("MAX_BATCH_SIZE",),
    "persia.env": ("PERSIA_LAUNCHER_VERBOSE", "PERSIA_SKIP_CHECK_DATA"),
    "persia.logger": (
        "COLOR_FORMATTER",
        "DEFAULT_LOGGER_NAME",
        "FILE_LOG_FORMAT",
        "FORMATTER",
        "LOG_COLOR",
        "STREAM_LOG_FORMAT",
    ),
    "persia.prelude": ("OptimizerBase", "is_cuda_feature_available"),
    "persia.utils": ("MAXIMUM_LOCAL_PORT_NUM",),
}


def resolve(place: str) -> Any:
    module, _, path = place.partition(":")
    if find_spec(module) is None:
        pytest.skip(f"{module} is not part of this build")
    found: Any = import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("place", SIGNATURES)
def test_signature_takes_the_original_calls(place: str) -> None:
    want = SIGNATURES[place]
    parameters = list(inspect.signature(resolve(place)).parameters.values())
    ours = parameters[: len(want)]
    assert [parameter.name for parameter in ours] == list(want)
    for parameter in ours:
        assert parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        assert parameter.default == want[parameter.name], parameter
    for parameter in parameters[len(want) :]:
        is_rest = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        assert is_rest or parameter.default is not REQUIRED, f"{parameter} must be optional"


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, names in OTHERS.items() for name in names]
)
def test_name_is_there(module: str, name: str) -> None:
    assert resolve(f"{module}:{name}") is not None


def test_constants() -> None:
    assert resolve("persia.embedding.data:MAX_BATCH_SIZE") == 65535
    assert resolve("persia.utils:MAXIMUM_LOCAL_PORT_NUM") == 65535
    assert resolve("persia.logger:LOG_COLOR") == {
        "DEBUG": "cyan",
        "INFO": "green",
        "WARNING": "yellow",
        "ERROR": "red",
        "CRITICAL": "red,bg_white",
    }
