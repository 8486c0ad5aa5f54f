"""Versions that are published while a model is trained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from persia._serving.publish import Publisher
from persia.errors import CheckpointError, ConfigError
from persia.serving import Predictor, current_version, set_current, versions
from tests.serving.models import arrays, make_ctx, train


def test_a_version_is_begun_when_it_is_due_and_a_failure_waits_for_the_end() -> None:
    now, begun = [0.0], []

    def begin() -> object:
        begun.append(now[0])

        def write() -> int:
            if len(begun) == 2:
                raise CheckpointError("disk is full")
            return len(begun)

        return write

    publisher = Publisher(10, begin, lambda: now[0])  # type: ignore[arg-type]
    for now[0] in (5, 10, 11, 20, 21):
        publisher.note_step()
        publisher.wait(30)
    assert begun == [10, 20]
    assert publisher.stats() == {"published": 1, "failed": 1, "version": 1}
    with pytest.raises(CheckpointError, match="disk is full"):
        publisher.close()
    with pytest.raises(ConfigError, match="every_s"):
        Publisher(0, begin)  # type: ignore[arg-type]


def test_an_end_before_the_first_version_is_said(caplog: pytest.LogCaptureFixture) -> None:
    def begin() -> object:
        return lambda: 1

    publisher = Publisher(10, begin, lambda: 0.0)  # type: ignore[arg-type]
    publisher.note_step()
    publisher.close()
    assert "no version was published: training ended before" in caplog.text
    caplog.clear()
    publisher = Publisher(10, begin, lambda: 0.0)  # type: ignore[arg-type]
    publisher.publish()
    publisher.close()
    assert not caplog.text


def test_a_model_that_cannot_be_copied_stops_no_training() -> None:
    now = [0.0]

    def begin() -> object:
        raise RuntimeError("only tensors created explicitly support deepcopy")

    publisher = Publisher(10, begin, lambda: now[0])  # type: ignore[arg-type]
    now[0] = 10
    publisher.note_step()
    assert publisher.stats()["failed"] == 1
    with pytest.raises(RuntimeError, match="deepcopy"):
        publisher.close()


def test_what_a_block_raises_leaves_it_though_a_version_failed(tmp_path: Path) -> None:
    def leave() -> None:
        with make_ctx() as ctx:
            train(ctx, np.random.default_rng(0), 1)
            ctx.publish(tmp_path / "clicks")
            ctx._publisher._note_failure(CheckpointError("disk is full"))  # type: ignore[union-attr]
            raise KeyError("own")

    with pytest.raises(KeyError, match="own"):
        leave()


@pytest.mark.slow
def test_training_publishes_and_an_older_version_comes_back(tmp_path: Path) -> None:
    rng, folder = np.random.default_rng(0), tmp_path / "clicks"
    with make_ctx() as ctx:
        train(ctx, rng, 2)
        ctx.publish(folder, every_s=1e-3, keep_last=2)
        for _ in range(3):
            train(ctx, rng, 1)
            ctx._publisher.wait(120)  # type: ignore[union-attr]
        with pytest.raises(ConfigError, match="publishes already"):
            ctx.publish(folder)
    there = versions(folder)
    assert len(there) == 2
    assert current_version(folder) == there[-1]
    given = arrays(rng, 4)
    for version in there:
        predictor = Predictor(folder / str(version))
        assert predictor(given)["output"].shape == (4, 1)
        predictor.close()
    set_current(folder, there[0])
    assert current_version(folder) == there[0]
    with pytest.raises(CheckpointError, match="expected one of the versions"):
        set_current(folder, 99)
