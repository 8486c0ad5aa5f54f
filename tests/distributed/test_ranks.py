"""Ranks in step: agreement, turns, and what a rank learns of one that has gone."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from persia._training.ranks import DEFAULT_TIMEOUT_S, LEAVE_S, Ranks
from persia.errors import ConfigError
from tests.distributed.conftest import launch

# What follows an event at once may take this long on a loaded machine; the groups wait 60 s.
AT_ONCE_S = 15.0


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return launch("meetings.py", tmp_path_factory.mktemp("ranks"))


def test_what_ranks_hear_of_each_other(found: Any) -> None:
    assert found["agreement"] == [[[-10, -9], [0, 1], [10, 11]]] * 2
    assert found["either"] == [[False, True, True]] * 2
    # Turns are in rank order and do not overlap, nor wait for an agreement.
    assert found["turns"] == [[1, 3, 5], [2, 4, 6]]
    assert found["turns_at_once_with_agreement"] == [[True, [[7, 7]]]] * 2


@pytest.mark.parametrize("failing", [0, 1])
def test_a_turn_that_fails_is_told_to_the_others(found: Any, failing: int) -> None:
    ranks = [turns[failing] for turns in found["failing_turn"]]
    own, other = ranks[failing][0], ranks[1 - failing][0]
    assert (own["type"], own["text"]) == ("KeyError", "'lost'")
    assert (other["type"], other["replica"]) == ("ServiceError", failing)
    assert other["text"].startswith(f"the turn to update of rank {failing} of 2 failed")
    # No rank hangs, and the ranks are in step still.
    assert [rank[1]["result"] for rank in ranks] == ["again", "again"]


def test_a_rank_that_leaves_says_so(found: Any) -> None:
    staying, leaving = found["leaving"]
    for outcome, purpose in zip(
        staying,
        ["to agree on the next batch", "to end rank 0's turn to update", "to end the step"],
        strict=True,
    ):
        assert (outcome["type"], outcome["replica"]) == ("ServiceUnavailable", 1)
        assert outcome["text"] == (
            f"rank 0 of 2 waited for rank 1 {purpose}, but the job was left by rank 1"
        )
        assert outcome["seconds"] < AT_ONCE_S
    assert leaving["type"] == "ServiceUnavailable"
    assert "the ranks have parted already" in leaving["text"]


def test_a_rank_that_hangs(found: Any) -> None:
    waiting, hanging = found["timeout"]
    assert waiting["type"] == "ServiceTimeout"
    assert "s for rank 1 to agree on the next batch, and not all came" in waiting["text"]
    # It finds that the other has given up, and is not kept from closing.
    assert hanging["type"] == "ServiceUnavailable"
    assert "a connection broke: a rank has ended or given up" in hanging["text"]
    assert max(waiting["closing"], hanging["closing"]) < LEAVE_S


def test_a_rank_that_ends(found: Any) -> None:
    (in_turn, agree, closing) = found["death"][0]
    assert in_turn["type"] == agree["type"] == "ServiceUnavailable"
    assert "rank 1 to end rank" in in_turn["text"]
    assert "a connection broke: a rank has ended" in agree["text"]
    assert max(in_turn["seconds"], agree["seconds"], closing["closing"]) < AT_ONCE_S


def test_cycles_leave_no_threads_and_files(found: Any) -> None:
    for after_2, after_22 in found["cycles"]:
        # One more of each may be on its way out.
        assert all(many <= few + 2 for few, many in zip(after_2, after_22, strict=True))


def test_one_rank_needs_no_group() -> None:
    with closing(Ranks(1, 0)) as ranks:
        assert ranks.agree(3) == [3]
        assert ranks.in_turn(lambda: "done") == "done"
        assert ranks.any(True) is True
        with pytest.raises(ZeroDivisionError):
            ranks.in_turn(lambda: 1 // 0)
    assert DEFAULT_TIMEOUT_S >= 600  # one rank may evaluate meanwhile


def test_ranks_need_a_process_group() -> None:
    with pytest.raises(ConfigError, match="where this is rank 0 of 2, got none"):
        Ranks(2, 0)
