"""The names of 2021, for scripts that were written then: each warns once where it is used.

    July 2021      PyPersiaBatchData, init_backend, TrainCtx(sparse_optimizer=, grad_scaler=)
    August         Dataloder, PersiaDataset, ctx.backend
    September      persia_launcher, TrainCtx(torch_distributed_port=)
    November       PersiaBatch.add_id_type_features and the like

The tables below map each old name to today's; what the older classes do is in the modules
beside this one. ``docs/moving-from-old-persia.md`` shows each name with what to write today.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from persia import _deprecated

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["OLD_KEYWORDS", "OLD_NAMES", "OldName", "find", "form_of", "warn"]


class OldName(NamedTuple):
    """What became of a name."""

    today: str  # what to write, as the warning says it
    found: str = ""  # ``module:name`` of what it still gives; empty if it is gone


EVERYTHING = "*"  # stands for any name of a module that is gone
_STREAM = OldName(
    "persia.data.StreamingDataset and persia.data.DataLoader, which receive the batches"
)
_CONTEXT = OldName("persia.ctx.TrainCtx, which has its methods")
_BATCH = OldName(
    "persia.embedding.data.PersiaBatch(id_type_features, non_id_type_features, labels)",
    "persia.compat.data:PyPersiaBatchData",
)
_BACKEND = (
    "`with persia.ctx.DataCtx() as ctx: ctx.send_data(batch)` in a data-loader; in a trainer "
    "the methods of persia.ctx.TrainCtx"
)
_LOADER = OldName("persia.data.DataLoader", "persia.compat.data:Dataloader")
_INIT, _GET = (OldName(_BACKEND, f"persia.compat.backend:{n}_backend") for n in ("init", "get"))
_OPTIMIZERS = {
    name: OldName(f"persia.embedding.optim.{name}", f"persia.embedding.optim:{name}")
    for name in ("SGD", "Adam", "Adagrad", "Optimizer")
}

OLD_NAMES: Mapping[str, Mapping[str, OldName]] = {
    "persia.prelude": {
        "PyPersiaBatchData": _BATCH,
        "PersiaBatch": _BATCH,
        "_PersiaBatch": _BATCH,
        "PyPersiaCommonContext": _CONTEXT,
        "PersiaCommonContext": _CONTEXT,
        "PersiaTrainingBatch": OldName(
            "`output, labels = ctx.forward(batch)` with persia.ctx.TrainCtx, or "
            "`ctx.prepare_features(batch)` for the tensors of a batch"
        ),
        "Tensor": OldName("torch.Tensor: every batch has PyTorch's own"),
        "Forward": OldName("persia.data.DataLoader, which looks batches up ahead of the loop"),
        "Backward": OldName("`ctx.backward(loss)` of persia.ctx.TrainCtx"),
        "PersiaBatchDataChannel": _STREAM,
        "PersiaBatchDataSender": OldName("`ctx.send_data(batch)` of persia.ctx.DataCtx"),
        "PersiaBatchDataReceiver": _STREAM,
        "initialize_dataflow": _STREAM,
        "PersiaMessageQueueServer": OldName("a message queue of your own, such as zmq's PULL"),
        "PersiaMessageQueueClient": OldName("a message queue of your own, such as zmq's PUSH"),
    },
    "persia.backend": {"init_backend": _INIT, "get_backend": _GET},
    "persia.ctx": {
        "init_backend": _INIT,
        "get_backend": _GET,
        "inference_ctx": OldName("persia.ctx.InferCtx", "persia.ctx:InferCtx"),
    },
    "persia.data": {
        "StreamDataset": OldName(
            "persia.data.StreamingDataset", "persia.data:StreamingDataset"
        ),
        "PersiaDataset": OldName(
            "persia.data.IterableDataset, which yields batches in __iter__",
            "persia.compat.data:PersiaDataset",
        ),
        "Dataloader": _LOADER,
        "Dataloder": _LOADER,
        "DataLoder": _LOADER,
    },
    "persia.sparse.optim": _OPTIMIZERS,
    "persia.sparse.emb": {
        EVERYTHING: OldName("a slot in the embedding config, under slots_config")
    },
    "persia.error": {
        "PersiaRuntimeException": OldName(
            "persia.errors.PersiaError", "persia.errors:PersiaError"
        ),
        "FileNotFoundException": OldName("FileNotFoundError", "builtins:FileNotFoundError"),
    },
    "persia.wrapper": {"persia_ctx": OldName("`with persia.ctx.TrainCtx(...) as ctx:`")},
    "persia.utils": {
        "block": OldName(
            "nothing: leaving persia.ctx.DataCtx waits until the data was trained on"
        )
    },
}

# Keywords of TrainCtx and EmbeddingCtx, and what to write for each.
OLD_KEYWORDS: Mapping[str, str] = {
    "sparse_optimizer": "embedding_optimizer=",
    "grad_scaler": "mixed_precision=True",
    "emb_initialization": "embedding_config=EmbeddingConfig(emb_initialization=)",
    "admit_probability": "embedding_config=EmbeddingConfig(admit_probability=)",
    "weight_bound": "embedding_config=EmbeddingConfig(weight_bound=)",
    "checkpoint_dir": "ctx.load_checkpoint(checkpoint_dir)",
    "is_training": "eval_ctx() for evaluation",
    "enable_backward": "eval_ctx() for evaluation",
    "backend_worker_size": "threadpool_worker_size=",
    "middleware_services": "PERSIA_EMBEDDING_WORKERS in the environment",
    "output_addrs": "PERSIA_NN_WORKERS in the environment",
    "wait_server_ready": "nothing: entering the context waits",
    "init_output": "DataCtx() in the data-loader",
    "forward_buffer_size": "DataLoader(forward_buffer_size=)",
    "deserialize_buffer_size": "DataLoader(num_workers=)",
    "data_queue_size": "StreamingDataset(buffer_size=)",
    "port": "PERSIA_NN_WORKERS in the environment",
    "torch_distributed_port": "distributed_option=DDPOption(master_port=)",
}


def warn(old: str, today: str, stacklevel: int = 2) -> None:
    """Warn of an old name with what to write today; ``stacklevel`` as of ``warnings.warn``."""
    _deprecated.used.add(old)
    warnings.warn(
        f"{old} is an old name; write {today} (docs/moving-from-old-persia.md)",
        DeprecationWarning,
        stacklevel=stacklevel + 1,
    )


def find(module: str, name: str) -> Any:
    """Return what a module's old name is today, with a warning.

    Raises:
        AttributeError: If the module never had it.
        ImportError: If it is gone; the text says what to write.
    """
    names = OLD_NAMES.get(module, {})
    known = names.get(name) or names.get(EVERYTHING)
    if known is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    if not known.found:
        # ``from module import name`` replaces the text of an AttributeError by its own.
        raise ImportError(f"{module}.{name} is gone; write {known.today}")
    warn(f"{module}.{name}", known.today, stacklevel=3)
    place, _, attribute = known.found.partition(":")
    return getattr(import_module(place), attribute)


def form_of(cls: type, given: Mapping[str, object]) -> type:
    """Return the class that takes these keywords: ``cls`` or, warned of, its form of then."""
    older = [name for name in given if name in OLD_KEYWORDS]
    forms = {"TrainCtx": ("RenamedCtx", "LooseCtx"), "EmbeddingCtx": ("OldEmbeddingCtx",) * 2}
    if not older or cls.__name__ not in forms:
        return cls
    instead = ", ".join(f"{OLD_KEYWORDS[name]} for {name}=" for name in older)
    warn(f"{cls.__name__}({', '.join(f'{name}=' for name in older)})", instead, stacklevel=3)
    form = forms[cls.__name__][given.get("model") is None]
    found: type = getattr(import_module("persia.compat.contexts"), form)
    return found


def launcher() -> None:
    """Run ``persia-launcher``, under its name of 2021, ``persia_launcher``."""
    warn("persia_launcher", "persia-launcher")
    import_module("persia.launcher").cli()
