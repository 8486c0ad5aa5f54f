"""What contexts that read one embedding-worker share: its updates, its stream of batches."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from persia import env
from persia.errors import (
    ConfigError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from persia._files.writer_lock import JobFolders
    from persia._report.recorder import Recorder
    from persia._rpc.messages import EmbeddingWorker
    from persia._training.backward import BackwardPipeline
    from persia._training.resume import Plain
    from persia._training.step_barrier import StepBarrier
    from persia._training.stream import Stream


class Embeddings:
    """An embedding-worker, and the updates that reads of it must wait for.

    There is one per worker: an evaluation context that is inside a TrainCtx, or is given its
    worker, shares it.
    """

    def __init__(self, worker: EmbeddingWorker, is_untrained: bool = False) -> None:
        self.worker = worker
        self.is_untrained = is_untrained  # built for reading only: it needs no optimizer
        self.engine: BackwardPipeline | None = None  # while the TrainCtx is entered
        self.halts: StepBarrier | None = None  # of several ranks, while it is
        self.folders: JobFolders | None = None  # that it has dumped into, while it is
        self.stream: Stream | None = None  # of data-loaders, from the first that is read
        self.reported: Mapping[str, float] = {}  # replaced whole: others read it
        self.recorder: Recorder | None = None  # of a TrainCtx that was asked for a report

    def open_stream(self, capacity: int, resumed: Plain | None = None) -> Stream:
        """Return the batches of data-loaders; there is one stream, whoever reads it.

        Args:
            capacity: Batches held.
            resumed: What a run before this one has trained of its first pass.

        Raises:
            ConfigError: If there can be none: no script, or an address in use.
        """
        if self.stream is None:
            from persia._training.stream import ChildStream, Stream

            if env.get_mode() == "embedded":
                self.stream = ChildStream(self.worker, capacity, data_loader_script(), resumed)
            else:
                from persia._cluster.connect import listening_address

                rank, world_size = env.get_rank() or 0, env.get_world_size() or 1
                address = listening_address("nn-worker", rank)
                self.stream = Stream(rank, world_size, capacity, address, resumed)
        return self.stream

    def close(self) -> None:
        """Close the stream."""
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.close()

    def flush(self) -> None:
        """Wait until this rank's updates are acknowledged; raise what one of them raised."""
        if self.engine is not None:
            self.engine.flush()

    @contextlib.contextmanager
    def at_step(self) -> Iterator[tuple[int, list[Plain]]]:
        """Hold training between two steps: all updates so far of all ranks are in.

        Yields:
            The step, and the states of the ranks other than this one.
        """
        self.flush()
        step = 0 if self.engine is None else self.engine.steps
        if self.halts is None:
            yield step, []
            return
        with self.halts.at(step) as states:
            yield step, states

    def wait(self) -> None:
        """Wait as ``flush`` does, in a thread where nobody could see what is raised."""
        if self.engine is not None:
            self.engine.wait()


# By id of the worker, which an entry keeps alive: whoever is given a worker that a TrainCtx
# updates must wait for those updates before it reads.
_known: weakref.WeakValueDictionary[int, Embeddings] = weakref.WeakValueDictionary()
_known_lock = threading.Lock()


def embeddings_of(worker: EmbeddingWorker, is_untrained: bool = False) -> Embeddings:
    """Return the one ``Embeddings`` of a worker."""
    with _known_lock:
        embeddings = _known.get(id(worker))
        if embeddings is None:
            embeddings = _known[id(worker)] = Embeddings(worker, is_untrained)
        return embeddings


def data_loader_script() -> Path:
    """Return the script that feeds a StreamingDataset in embedded mode.

    Raises:
        ConfigError: If there is none.
    """
    named = env.data_loader_entry()
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    beside = Path(main).resolve().parent if main else Path.cwd()
    script = named or beside / "data_loader.py"
    if not script.is_file():
        source = "PERSIA_DATALOADER_ENTRY" if named else "by default"
        raise ConfigError(
            f"StreamingDataset in embedded mode runs a data-loader script, {source} {script}, "
            "which does not exist: write one that sends batches by persia.ctx.DataCtx, or feed "
            "the TrainCtx from a persia.data.IterableDataset in this process"
        )
    return script
