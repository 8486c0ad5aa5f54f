"""What a context saves: checkpoints, dense files, and versions that can be served."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from persia._training import checkpoint
from persia.ctx import exporting
from persia.ctx.base import BaseCtx
from persia.embedding.data import PersiaBatch
from persia.errors import ConfigError

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from persia._serving.publish import Publisher
    from persia._training.progress import Plain
    from persia._training.ranks import Ranks
    from persia.ctx.session import Session


class SavingCtx(BaseCtx):
    """Dumps and loads the embeddings and the model of a context, and exports them."""

    model: Any
    _ranks: Ranks | None
    _publisher: Publisher | None  # of versions, while a TrainCtx is entered

    def _connected(self) -> Session:
        """Return the connection to the servers, made if there is none yet."""
        raise NotImplementedError

    def dump_checkpoint(
        self,
        dst_dir: str | os.PathLike[str],
        dense_filename: str = "dense.pt",
        jit_dense_filename: str = "jit_dense.pt",
        blocking: bool = True,
        with_jit_model: bool = False,
        *,
        keep_last: int = 1,
    ) -> None:
        """Write the embeddings and the model, all of one moment.

        Every server writes its share itself, so the folder must be shared between machines,
        or an object store.

        Args:
            dst_dir: Folder, or a URL that fsspec knows, such as ``s3://bucket/folder``.
            dense_filename: Name of the model's state dict.
            jit_dense_filename: Name of the scripted model.
            blocking: Wait until the checkpoint is there. Otherwise
                ``wait_for_dump_embedding`` waits, and raises what went wrong, as does leaving.
            with_jit_model: Write the model as TorchScript too, for serving.
            keep_last: How many checkpoints of this folder to keep.

        Raises:
            CheckpointError: If a file cannot be written, or there is nothing to write.
            ServiceError: If a server is gone.
        """
        to_script = {jit_dense_filename: self.model} if with_jit_model else {}
        self._dump(dst_dir, {dense_filename: self._own_model()}, to_script, blocking, keep_last)

    def load_checkpoint(
        self,
        src_dir: str | os.PathLike[str],
        map_location: Any = None,
        dense_filename: str = "dense.pt",
        blocking: bool = True,
        *,
        features: Iterable[str] | None = None,
    ) -> None:
        """Load embeddings and model, in place of those held, if all of it can be loaded.

        The number of servers and the order of features may have changed since.

        Args:
            src_dir: Folder or URL; its latest checkpoint.
            map_location: As of ``torch.load``.
            dense_filename: Name of the model's state dict.
            blocking: Wait until the rows are there; else ``wait_for_load_embedding`` does.
            features: Load the rows of these only, and keep all others.

        Raises:
            CheckpointError: If there is none that fits, or a file is damaged.
            ConfigError: In the middle of a pass over a ``DataLoader``.
        """
        dense = {dense_filename: self._own_model()}
        self._load(src_dir, map_location, dense, blocking, features)

    def dump_embedding(
        self, dst_dir: str | os.PathLike[str], blocking: bool = True, *, keep_last: int = 1
    ) -> None:
        """Write the embeddings alone; otherwise as ``dump_checkpoint``."""
        self._dump(dst_dir, {}, {}, blocking, keep_last)

    def load_embedding(
        self,
        src_dir: str | os.PathLike[str],
        blocking: bool = True,
        *,
        features: Iterable[str] | None = None,
    ) -> None:
        """Load the embeddings alone; otherwise as ``load_checkpoint``."""
        self._load(src_dir, None, {}, blocking, features)

    def wait_for_dump_embedding(self) -> None:
        """Wait for a dump with ``blocking=False``; raise what it raised, once."""
        self._connected().checkpoints.writer.wait()

    def wait_for_load_embedding(self) -> None:
        """Wait for a load with ``blocking=False``; raise what it raised, once."""
        self._connected().checkpoints.reader.wait()

    def _own_model(self) -> Any:
        if self.model is None:
            raise ConfigError(
                f"{type(self).__name__}: a checkpoint has a model, and model= is None; "
                "dump_embedding and load_embedding do without"
            )
        return self.model

    def _dump(
        self,
        dst_dir: str | os.PathLike[str],
        dense: Mapping[str, Any],
        to_script: Mapping[str, Any],
        blocking: bool,
        keep_last: int,
    ) -> None:
        if self._publisher is not None:
            self._publisher.wait()  # servers write one cut at a time
        self._connected().checkpoints.dump(
            dst_dir, dense, to_script, self._trainer_state, blocking, keep_last
        )

    def _trainer_state(self, others: list[Plain]) -> Plain | None:
        """Return what a checkpoint keeps beside the model, to continue from it."""
        return None

    def _load(
        self,
        src_dir: str | os.PathLike[str],
        map_location: Any,
        dense: Mapping[str, Any],
        blocking: bool,
        features: Iterable[str] | None,
    ) -> None:
        session = self._connected()
        session.check_between_passes()
        trainer = session.checkpoints.load(
            src_dir, map_location, dense, blocking, features, self._ranks
        )
        if trainer is not None:
            self._resume(trainer)

    def _resume(self, trainer: Plain) -> None:
        """Continue where the checkpoint was made; TrainCtx does."""

    def export(
        self,
        dst: str | os.PathLike[str],
        inputs: PersiaBatch | None = None,
        **options: Any,
    ) -> int:
        """Write the model and its embeddings, of one moment, as a version that can be served.

        ``persia.serving.Predictor`` scores with it. With several ranks, rank 0's call is for
        all of them, and a call of another does nothing and returns 0.

        Args:
            dst: Folder of the model in a repository of models, such as ``models/clicks``; the
                version is a folder in it, and is served from then on (``current.json``).
            inputs: A batch like those that will be scored; None takes the one prepared last.
            **options: ``format``, ``outputs``, ``missing``, ``on_delete``, ``keep_last`` and
                ``tolerance``, as ``persia.serving.ExportOptions`` has them.

        Returns:
            The number of the version.

        Raises:
            ConfigError: If the model cannot be exported, or its program differs from it.
            CheckpointError: If a file cannot be written.
        """
        return exporting.export(self, dst, inputs, options)

    def dump_torch_state_dict(
        self,
        torch_instance: Any,
        dst_dir: str | os.PathLike[str],
        file_name: str,
        is_jit: bool = False,
    ) -> None:
        """Write the state dict of a model or optimizer, or with ``is_jit`` a scripted model.

        The file appears whole or not at all; a CheckpointError if it cannot be written.
        """
        checkpoint.save_dense(torch_instance, dst_dir, file_name, is_jit)

    def load_torch_state_dict(
        self, torch_instance: Any, src_dir: str | os.PathLike[str], map_location: Any = None
    ) -> None:
        """Load a file, ``src_dir``, into a model or optimizer; CheckpointError if it cannot."""
        checkpoint.load_dense(torch_instance, src_dir, map_location)
