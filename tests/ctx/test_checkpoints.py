"""What a run continues from, over ranks; whole checkpoints are in tests/training."""

from __future__ import annotations

import random

import pytest

from persia._training.progress import Progress
from persia.ctx.checkpoints import TrainerState, _on_all_ranks
from persia.errors import CheckpointError
from tests.training.fakes import SpyRanks


def test_a_failure_of_one_rank_is_one_of_all() -> None:
    with _on_all_ranks(None):
        pass
    one = SpyRanks(others_failed=True)
    with pytest.raises(CheckpointError, match="another rank"), _on_all_ranks(one):
        pass
    with pytest.raises(KeyError, match="own"), _on_all_ranks(one):
        raise KeyError("own")


def test_another_number_of_ranks_starts_over(caplog: pytest.LogCaptureFixture) -> None:
    saved = TrainerState(0, 1).of_all(7, None, Progress(), [], [])
    saved["ranks"][0]["progress"]["next_number"] = 5
    before = random.getstate()
    assert TrainerState(1, 2).restore(saved, Progress()) == 5
    assert "the checkpoint is of 1 ranks and there are 2" in caplog.text
    assert random.getstate() == before


def test_a_rank_that_is_asked_gives_the_generators_of_its_last_step() -> None:
    state = TrainerState(1, 2)
    assert not state.of_rank(Progress())["random"]
    state.note_step()
    assert state.of_rank(Progress())["random"]
