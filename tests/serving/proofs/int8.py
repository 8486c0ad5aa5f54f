"""What rows of fewer bits cost in AUC, and what rows of int8 save in memory.

    python -m tests.serving.proofs.int8 [--samples 60000]

The models of the examples, each trained once for an epoch and exported: UCI Adult (of
PERSIA_DATA_DIR) and a generated log in Criteo's layout. The test file is scored by the same
version with its rows held in each dtype. Bytes of a row are with its part of the index: those
of a store of training, Adagrad in float32 and dim 16, and of a table of int8.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from persia import env
from persia._core.kernels.initial import Initializer
from persia._core.kernels.optim import RowOptimizer
from persia._core.store.store import EmbeddingStore
from persia._core.table.row_table import DTYPES, RowTable
from persia.embedding.data import PersiaBatch
from persia.metrics import AUC
from persia.readers import Columns, CriteoReader
from persia.serving import Predictor
from tests.examples.loading import EXAMPLES, load
from tests.serving.proofs.support import Lines

MOST_LOSS, MOST_SHARE = 3e-4, 0.35
DIM, CHUNK = 16, 10_000
Batches = Callable[[bool], Iterable[PersiaBatch]]  # of the training file, or of the test file


def load_example(name: str) -> Any:
    """Return the example; the process that traces its net finds its modules, too."""
    path = str(EXAMPLES / name)
    if path not in sys.path:
        sys.path.append(path)
    return load(name)


def adult() -> tuple[Any, Any, Batches]:
    """Return the context, the loss and the batches of UCI Adult."""
    example = load_example("adult_income")
    train, test = example.load()
    return (
        example.build_ctx(example.Options(quiet=True)),
        example.torch.nn.BCELoss(),
        lambda trains: example.batches(train if trains else test, requires_grad=trains),
    )


def criteo(folder: Path, samples: int) -> tuple[Any, Any, Batches]:
    """Return those of a generated log of ``samples`` lines."""
    example = load_example("criteo")
    sys.modules["criteo_log"].generate(folder, samples)

    def batches(trains: bool) -> Iterable[PersiaBatch]:
        columns = Columns(
            [f"C{number}" for number in range(1, 27)],
            [f"I{number}" for number in range(1, 14)],
            ["label"],
            strings="hex",
            requires_grad=trains,
        )
        part = folder / ("train" if trains else "test")
        return CriteoReader(part, example.BATCH_SIZE, columns, shard=(0, 1))

    ctx = example.build_ctx(example.Options(quiet=True))
    return ctx, example.torch.nn.BCEWithLogitsLoss(), batches


def aucs(folder: Path, ctx: Any, loss: Any, batches: Batches) -> dict[str, float]:
    """Train an epoch, export, and return the AUC of the test file by dtype of the rows."""
    with ctx:
        for batch in batches(True):
            output, labels = ctx.forward(ctx.get_embedding_from_data(batch))
            ctx.backward(loss(output, labels[0]))
        version = ctx.export(folder)
    found = {}
    for dtype in DTYPES:
        predictor = Predictor(folder / str(version), row_dtype=dtype)
        metric = AUC(bins=None, sync_on_compute=False)
        for batch in batches(False):
            data = np.frombuffer(batch.to_bytes(), np.uint8)
            metric.update(predictor({"batch": data})["output"], batch.labels[0].data)
        predictor.close()
        found[dtype] = float(metric.compute())
    return found


def bytes_of_rows(num_rows: int) -> list[tuple[float, float]]:
    """Return bytes of a row with its index, of training and of int8, as both grow.

    From half of the rows to all of them: an index that has just grown is half empty.
    """
    store = EmbeddingStore(2 * num_rows)
    store.configure(RowOptimizer("adagrad"))
    table = RowTable([DIM], "int8")
    begins = Initializer("uniform", lower=-0.01, upper=0.01)
    rows, hints = np.empty((CHUNK, DIM), np.float32), np.empty(CHUNK, np.uint32)
    found = []
    for first in range(0, num_rows, CHUNK):
        signs = np.arange(first, first + CHUNK, dtype=np.uint64)
        store.lookup_train(signs, begins, 1.0, first, rows, hints)
        table.write(0, signs, rows)
        if 2 * len(table) >= num_rows:
            found.append((store.stats()["bytes"] / len(store), table.num_bytes / len(table)))
    return found


def run(folder: Path, samples: int, num_rows: int) -> int:
    """Measure; returns the status to exit with."""
    lines = Lines("rows of fewer bits", judges_times=True)
    made: dict[str, Callable[[], tuple[Any, Any, Batches]]] = {
        "generated Criteo": lambda: criteo(folder / "log", samples)
    }
    if env.data_dir() is not None:
        made["UCI Adult"] = adult
    else:
        print("  UCI Adult is left out: PERSIA_DATA_DIR names no data")
    for name, make in made.items():
        found = aucs(folder / name.split()[-1].lower(), *make())
        exact = found["float32"]
        lines.show(f"{name}: AUC, float32", f"{exact:.6f}", "above 0.6", holds=exact > 0.6)
        for dtype in DTYPES:
            loss = exact - found[dtype]
            if dtype == "int8":
                bound = f"at most {MOST_LOSS:g}"
                lines.show(
                    f"{name}: lost by int8", f"{loss:.6f}", bound, holds=loss <= MOST_LOSS
                )
            elif dtype != "float32":
                lines.show(f"{name}: lost by {dtype}", f"{loss:.6f}")
    grown = bytes_of_rows(num_rows)
    trained, served = grown[-1]
    lines.show("bytes of a row: training, int8", f"{trained:.1f}, {served:.1f}")
    lines.show("most while rows come", f"{max(one for _, one in grown):.1f}")
    share, bound = served / trained, f"at most {MOST_SHARE:g}"
    lines.show("share of training's bytes", f"{share:.3f}", bound, holds=share <= MOST_SHARE)
    worst = max(one / other for other, one in grown)
    lines.show("most while rows come", f"{worst:.3f}", bound, holds=worst <= MOST_SHARE)
    return lines.end()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--samples", type=int, default=60_000, help="lines of the log")
    parser.add_argument("--rows", type=int, default=630_000, help="of which bytes are counted")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="persia-int8-") as name:
        return run(Path(name), given.samples, given.rows)


if __name__ == "__main__":
    sys.exit(main())
