"""The contexts of 2021: other keywords, and before September another loop.

RenamedCtx   TrainCtx with keywords that were renamed, and today's methods
LooseCtx     without model=: the script calls the model, and in July its optimizer too:

    (dense, sparse), target = ctx.prepare_features(batch)
    loss = loss_fn(model((dense, sparse)), target)
    scaler.scale(loss).backward()
    is_finite = ctx.on_after_backward(scaler.get_scale(), batch_idx)
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from typing import TYPE_CHECKING, Any

from persia import env
from persia.compat import OLD_KEYWORDS, warn
from persia.compat.backend import Backend, get_backend
from persia.ctx import EmbeddingCtx, TrainCtx
from persia.embedding import EmbeddingConfig
from persia.errors import ConfigError, DataError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    import torch

    from persia._training.batch import PersiaTrainingBatch
    from persia.data import DataLoader

__all__ = ["LooseCtx", "OldEmbeddingCtx", "RenamedCtx"]

# Replaced by variables of the environment or not needed any more: without effect.
_WITHOUT_EFFECT = (
    "middleware_services",
    "output_addrs",
    "wait_server_ready",
    "init_output",
    "deserialize_buffer_size",
    "port",
)
_OF_EMBEDDINGS = ("emb_initialization", "admit_probability", "weight_bound")


def _translate(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return today's keywords for those of both contexts."""
    new = {name: value for name, value in given.items() if name not in _WITHOUT_EFFECT}
    if "backend_worker_size" in new:
        new["threadpool_worker_size"] = new.pop("backend_worker_size")
    settings = {name: new.pop(name) for name in _OF_EMBEDDINGS if name in new}
    if settings:
        config = new.get("embedding_config")
        if not isinstance(config, EmbeddingConfig):
            config = EmbeddingConfig(schema=config)
        new["embedding_config"] = dataclasses.replace(config, **settings)
    return new


def _training(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return today's keywords for those of ``TrainCtx`` alone."""
    new = dict(given)
    for name in ("is_training", "enable_backward"):
        if not new.pop(name, True):
            raise ConfigError(
                f"TrainCtx({name}=False): expected a context that trains; write "
                "persia.ctx.eval_ctx() for one that does not"
            )
    if "sparse_optimizer" in new:
        new.setdefault("embedding_optimizer", new.pop("sparse_optimizer"))
    port = new.pop("torch_distributed_port", None)
    if port is not None and (env.get_world_size() or 1) > 1:
        from persia.distributed import DDPOption

        device_id = new.get("device_id")
        backend = "gloo" if device_id is None or device_id < 0 else "nccl"
        new.setdefault("distributed_option", DDPOption(backend=backend, master_port=port))
    return new


def _signature(init: Callable[..., None]) -> inspect.Signature:
    """Return what ``help()`` shows of ``__init__``: that of ``TrainCtx``, and old keywords."""
    today = inspect.signature(TrainCtx.__init__).parameters.values()
    named = inspect.signature(init).parameters
    keyword = inspect.Parameter.KEYWORD_ONLY
    older = [
        named.get(name) or inspect.Parameter(name, keyword, default=None)
        for name in OLD_KEYWORDS
    ]
    return inspect.Signature([*today, *older])


class OldEmbeddingCtx(EmbeddingCtx):
    """``EmbeddingCtx`` with the settings of embeddings one by one, and what it loads first."""

    def __init__(self, *args: Any, checkpoint_dir: str | None = None, **given: Any) -> None:
        super().__init__(*args, **_translate(given))
        self._checkpoint_dir = checkpoint_dir

    def _open(self, stack: contextlib.ExitStack) -> None:
        super()._open(stack)
        if self._checkpoint_dir is not None:
            self.load_embedding(self._checkpoint_dir)


class RenamedCtx(OldEmbeddingCtx, TrainCtx):
    """``TrainCtx`` with keywords of before 2022, or today's.

    A ``grad_scaler`` that is enabled is mixed precision, by a scaler of the context's own;
    ``forward_buffer_size`` and ``data_queue_size`` are for ``data_loader``.
    """

    def __init__(
        self,
        *args: Any,
        grad_scaler: Any = None,
        forward_buffer_size: int = 10,
        data_queue_size: int = 5,
        **given: Any,
    ) -> None:
        new = _training(given)
        if grad_scaler is not None:
            new.setdefault("mixed_precision", grad_scaler.is_enabled())
        super().__init__(*args, **new)
        self._forward_buffer_size = forward_buffer_size
        self._data_queue_size = data_queue_size

    # Of the function: one of the class would be shown of subclasses with another __init__.
    __init__.__signature__ = _signature(__init__)  # type: ignore[attr-defined]

    @property
    def backend(self) -> Backend:
        """What speaks to the servers."""
        warn("ctx.backend", "the context's own methods")
        return get_backend()

    def data_loader(
        self, port: int = 8000, data_queue_size: int | None = None, timeout: int = 600000
    ) -> DataLoader:
        """Return a loader of what data-loaders send; the environment has the port."""
        from persia.data import DataLoader, StreamingDataset

        warn("ctx.data_loader()", "persia.data.DataLoader(StreamingDataset())")
        size = self._data_queue_size if data_queue_size is None else data_queue_size
        return DataLoader(StreamingDataset(size), self._forward_buffer_size, timeout)


class LooseCtx(RenamedCtx):
    """A context that has no model: the script keeps it, and calls it.

    With a dense optimizer (August) ``ctx.backward(loss)`` steps it and ``prepare_features``
    returns dense, sparse, target. Without one (July) the script does both, and it returns
    (dense, sparse), target.

    ``grad_scaler`` is the script's own, and without effect; ``device_id`` None is 0 where there
    is a CUDA device; ``mixed_precision`` is for ``backward``. There is one rank.
    """

    def __init__(
        self,
        embedding_optimizer: Any = None,
        dense_optimizer: torch.optim.Optimizer | None = None,
        grad_scaler: Any = None,
        device_id: int | None = None,
        mixed_precision: bool = False,
        **given: Any,
    ) -> None:
        import torch

        if (env.get_world_size() or 1) > 1:
            raise ConfigError(
                f"TrainCtx without model=: expected one rank, got {env.get_world_size()}; "
                "give it model= and dense_optimizer="
            )
        self._own_loop = dense_optimizer is None
        if device_id is None and torch.cuda.is_available():
            device_id = 0
        nothing = torch.nn.Module()
        nothing.weight = torch.nn.Parameter(torch.zeros(1))  # an optimizer must have something
        given.pop("model", None)
        if embedding_optimizer is not None:
            given["embedding_optimizer"] = embedding_optimizer
        super().__init__(
            dense_optimizer=dense_optimizer or torch.optim.SGD(nothing.parameters(), lr=0.0),
            model=nothing,
            device_id=device_id,
            mixed_precision=mixed_precision,
            **given,
        )

    def forward(self, batch: PersiaTrainingBatch) -> tuple[Any, list[torch.Tensor] | None]:
        """Refuse: there is no model here."""
        raise ConfigError("TrainCtx.forward needs model=, and this context has none")

    def prepare_features(self, batch: PersiaTrainingBatch, is_training: bool = True) -> Any:
        """Return the first dense tensor (or None), embeddings, and the only label."""
        tensors, embeddings, labels = super().prepare_features(batch)
        if is_training and len(labels or ()) != 1:
            raise DataError(
                f"prepare_features: expected one label in batch {batch.batch_id}, got "
                f"{len(labels or ())}"
            )
        dense = tensors[0] if tensors else None
        label = labels[0] if is_training and labels else None
        if self._own_loop:
            return (dense, embeddings), label
        return dense, embeddings, label

    def on_after_backward(
        self, loss_scale: float, batch_idx: int, emb_grad_check_interval: int = 20
    ) -> bool:
        """Send the embedding gradients of the batch, after ``loss.backward()``.

        Every step is checked (W-02). Returns whether all of them are finite; if not, none is
        sent: lower the scale, which is what the loss was multiplied with.
        """
        session = self._connected()
        engine = self._engine("on_after_backward")
        if self.update_times == 0:
            warn("ctx.on_after_backward()", "ctx.backward(loss), which does all of the step")
        engine.raise_failure()
        current = self._checks.to_train(self.current_batch, session.tracker)
        updates = engine.collect([current], current)
        self._prepared.pop(id(current), None)
        is_finite = all(update.is_finite() for update in updates)
        if is_finite:
            engine.submit(updates, loss_scale)
        else:
            engine.skip(updates)
        self.update_times += 1
        engine.end_step(self.update_times)
        return is_finite

    def dump_checkpoint(  # type: ignore[override]  # the arguments of August 2021
        self,
        dst_dir: str | os.PathLike[str],
        model: Any = None,
        optimizer: Any = None,
        default_filename: str = "dense.pt",
        blocking: bool = True,
    ) -> None:
        """Write the embeddings, and the model and optimizer that are given."""
        dense = _given({default_filename: model, "opt.pt": optimizer})
        self._dump(dst_dir, dense, {}, blocking, 1)

    def load_checkpoint(  # type: ignore[override]  # as above
        self,
        src_dir: str | os.PathLike[str],
        model: Any = None,
        optimizer: Any = None,
        default_filename: str = "dense.pt",
        map_location: Any = None,
    ) -> None:
        """Load the embeddings, and the model and optimizer that are given."""
        dense = _given({default_filename: model, "opt.pt": optimizer})
        self._load(src_dir, map_location, dense, True, None)


def _given(dense: Mapping[str, Any]) -> dict[str, Any]:
    return {name: what for name, what in dense.items() if what is not None}
