"""Whose rows, in which order, from which batch on; and trained exactly once by two runs."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia.ctx import eval_ctx
from persia.data import DataLoader, StreamingDataset
from persia.errors import DataError
from persia.readers import ParquetReader
from persia.readers._order import Span
from persia.readers._reader import PieceReader
from tests.meta.sources import ROOT
from tests.readers.support import COLUMNS, rows_of, table, write_folder
from tests.support.fixtures import Monkey
from tests.training.conftest import Net, new_ctx


@dataclass(frozen=True, slots=True)
class Rows(Span):
    """Rows in memory, read a few at a time."""

    def read(self) -> Iterator[Any]:
        yield from table(self.begin, self.end - self.begin).to_batches(max_chunksize=5)


@dataclass(frozen=True, slots=True)
class Unreadable(Rows):
    """Rows behind which there are others that cannot be read."""

    def read(self) -> Iterator[Any]:
        yield from Rows.read(self)
        raise DataError(f"row {self.end} cannot be read")


def plain_order(
    pieces: list[list[int]],
    batch_size: int,
    seed: int | None,
    buffer: int | None,
    epoch: int,
    shard: tuple[int, int],
) -> list[list[int]]:
    """The batches of a shard in an epoch; checkpoints count them, so it stays as it is."""
    index, count = shard
    if seed is not None:
        order = np.random.default_rng([seed, epoch]).permutation(len(pieces))
        pieces = [pieces[number] for number in order]
    rows = list(itertools.chain(*pieces))
    rows = rows[index * len(rows) // count : (index + 1) * len(rows) // count]
    if seed is not None and buffer not in (None, 1):
        size = -(-buffer // batch_size) * batch_size
        windows = [rows[begin : begin + size] for begin in range(0, len(rows), size)]
        for number, window in enumerate(windows):
            rng = np.random.default_rng([seed, epoch, index, count, number])
            windows[number] = [window[place] for place in rng.permutation(len(window))]
        rows = list(itertools.chain(*windows))
    return [rows[begin : begin + batch_size] for begin in range(0, len(rows), batch_size)]


@given(
    sizes=st.lists(st.integers(0, 40), max_size=6),
    batch_size=st.integers(1, 20),
    seed=st.none() | st.integers(0, 3),
    buffer=st.none() | st.integers(1, 70),
    epoch=st.integers(0, 2),
    count=st.integers(1, 5),
    drop_last=st.booleans(),
)
def test_the_order_is_that_of_a_plain_model(
    sizes: list[int],
    batch_size: int,
    seed: int | None,
    buffer: int | None,
    epoch: int,
    count: int,
    drop_last: bool,
) -> None:
    edges = list(itertools.accumulate(sizes, initial=0))
    pieces = [list(range(*pair)) for pair in itertools.pairwise(edges)]
    seen: list[int] = []
    for index in range(count):
        shard = index, count
        given_buffer = None if seed is None else buffer
        reader = PieceReader(COLUMNS, batch_size, seed, given_buffer, drop_last, shard)
        reader._pieces = [Rows(*pair) for pair in itertools.pairwise(edges)]
        reader.epoch, reader.allow_empty = epoch, True
        want = plain_order(pieces, batch_size, seed, buffer, epoch, shard)
        seen += itertools.chain(*want)
        if drop_last:
            want = [batch for batch in want if len(batch) == batch_size]
        assert [rows_of([batch]) for batch in reader] == want
        assert len(reader) == reader.num_batches() == len(want)
        for first in {1, 2, len(want) // 2, len(want) - 1, len(want) + 1} - {-1}:
            assert [rows_of([batch]) for batch in reader.iter_from(first)] == want[first:]
    assert sorted(seen) == list(range(sum(sizes)))


@pytest.mark.parametrize("seed", [None, 1])
def test_what_reads_ahead(seed: int | None) -> None:
    """It ends with its iterator, and its errors are the caller's."""

    def threads() -> int:
        return sum(each.name.startswith("persia-read-ahead") for each in threading.enumerate())

    buffer = None if seed is None else 8
    reader = PieceReader(COLUMNS, 4, seed, buffer, False, (0, 1))
    reader._pieces = [Rows(0, 40)]
    assert threads() == 0
    batches = iter(reader)
    next(batches)
    assert threads() == 1
    del batches
    assert threads() == 0
    reader._pieces = [Unreadable(0, 8)]
    reader.epoch = 1
    batches = iter(reader)
    assert [next(batches).batch_size, next(batches).batch_size] == [4, 4]
    with pytest.raises(DataError, match="row 8 cannot be read"):
        next(batches)
    assert threads() == 0


SLOTS = {"slots_config": {"user": {"dim": 2}, "items": {"dim": 2}}}
SENDS = """
from pathlib import Path
from persia.ctx import DataCtx
from persia.readers import ParquetReader
from tests.readers.support import COLUMNS

with DataCtx() as ctx:
    ParquetReader(Path(__file__).parent / "data", COLUMNS, 4, shuffle_seed=9).send(ctx)
"""


def train(source: Any, folder: Path, *, stop_after: int | None, resume: bool) -> list[int]:
    """Train, from a checkpoint if asked, to one if asked to stop; returns the rows trained."""
    seen: list[int] = []
    with new_ctx(Net(2, num_dense=1, dim=2), embedding_config=SLOTS) as ctx:
        if resume:
            ctx.load_checkpoint(folder)
        # Not in order: a checkpoint knows of each batch whether it was trained.
        for number, batch in enumerate(DataLoader(source, timeout_ms=120_000), start=1):
            output, labels = ctx.forward(batch)
            assert labels is not None
            ctx.backward(output.sum())
            seen += [int(row) for row in labels[0][:, 0]]
            if number == stop_after:
                ctx.dump_checkpoint(folder)
                break
    return seen


@pytest.mark.parametrize("is_streamed", [False, True])
def test_rows_are_trained_once(tmp_path: Path, monkeypatch: Monkey, is_streamed: bool) -> None:
    data, script = tmp_path / "data", tmp_path / "data_loader.py"
    num_rows = write_folder(data, [20, 1, 33, 14])
    if is_streamed:
        script.write_text(SENDS)
        monkeypatch.setenv("PERSIA_DATALOADER_ENTRY", str(script))
        monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def source() -> Any:
        if is_streamed:
            return StreamingDataset(4)
        return ParquetReader(data, COLUMNS, 4, shuffle_seed=9)

    checkpoint = tmp_path / "checkpoint"
    first = train(source(), checkpoint, stop_after=7, resume=False)
    rest = train(source(), checkpoint, stop_after=None, resume=True)
    assert len(first) == 7 * 4
    assert sorted(first + rest) == list(range(num_rows))


SENDS_EPOCHS = SENDS.replace(".send(ctx)", ".send(ctx, epochs=3, epoch_ends=True)")


def train_epochs(folder: Path, data: Path, stop_at: tuple[int, int] | None) -> list[list[int]]:
    """Train from the checkpoint, if there is one, to three epochs; return the rows of each.

    Or make one after some batches of an epoch, or, if these are none, just before it.
    """
    epochs: list[list[int]] = []
    with new_ctx(Net(2, num_dense=1, dim=2), embedding_config=SLOTS) as ctx:
        if folder.exists():
            ctx.load_checkpoint(folder)
        loader = DataLoader(StreamingDataset(4), timeout_ms=120_000)
        for epoch in range(ctx.resume_position.passes, 3):
            if (epoch, 0) == stop_at:
                ctx.dump_checkpoint(folder)
                break
            epochs.append([])
            for number, batch in enumerate(loader, start=1):
                output, labels = ctx.forward(batch)
                assert labels is not None
                ctx.backward(output.sum())
                epochs[-1] += [int(row) for row in labels[0][:, 0]]
                if (epoch, number) == stop_at:
                    ctx.dump_checkpoint(folder)
                    return epochs
            with eval_ctx(model=ctx.model) as validation:
                for batch in DataLoader(ParquetReader(data, COLUMNS, 16)):
                    validation.forward(batch)
    return epochs


def test_each_epoch_of_a_reader_is_a_loop(tmp_path: Path, monkeypatch: Monkey) -> None:
    data, script = tmp_path / "data", tmp_path / "data_loader.py"
    every = list(range(write_folder(data, [20, 1, 33, 14])))
    script.write_text(SENDS_EPOCHS)
    monkeypatch.setenv("PERSIA_DATALOADER_ENTRY", str(script))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    # Checkpoints in the middle of an epoch, and between two.
    middle, boundary = tmp_path / "middle", tmp_path / "boundary"
    first = train_epochs(middle, data, (1, 7))
    assert [sorted(rows) for rows in first[:1]] == [every]
    assert len(first[1]) == 7 * 4
    second = train_epochs(middle, data, None)
    assert [sorted(rows) for rows in (first[1] + second[0], second[1])] == [every] * 2
    assert second[1] != first[0]  # each has its own order
    first, second = [train_epochs(boundary, data, at) for at in ((2, 0), None)]
    assert [sorted(rows) for rows in first + second] == [every] * 3
