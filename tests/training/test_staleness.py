"""The controller of permits: alone, and over pipelines in simulated time."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia._training.staleness import LONG_WINDOW, MOST, NUM_SHORT, WINDOW, PermitController

from .pipelines import Machine, Times, around

STEP = 0.010


def note(controller: PermitController, late_s: float, held_s: float = 1.0) -> None:
    """Note as many batches as a decision needs, those that are skipped included."""
    before = controller._num_windows
    while controller._num_windows == before:
        controller.note(STEP, late_s, held_s)


def test_it_begins_with_one_and_adds_at_most_one_in_a_window() -> None:
    controller = PermitController()
    seen = []
    for step in range(10 * LONG_WINDOW):
        controller.note(STEP, 20 * STEP / controller.permits, 1.0)  # late, and each one helps
        seen.append((step, controller.permits))
    assert all(permits <= 1 + step // (WINDOW - 1) for step, permits in seen)
    assert seen[-1][1] == MOST
    assert max(permits for _, permits in seen) == MOST


def test_waits_that_a_permit_does_not_shorten_take_it_back() -> None:
    controller = PermitController()
    permits = []
    for _ in range(60):
        note(controller, 2 * STEP)
        permits.append(controller.permits)
    assert permits[:2] == [2, 1]
    assert set(permits) == {1, 2}
    # It is tried again, and more and more rarely.
    trials = [place for place, num in enumerate(permits) if num == 2]
    gaps = [after - before for before, after in itertools.pairwise(trials)]
    assert gaps == sorted(gaps)
    assert gaps[-1] > 4 * gaps[0]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_steps_that_vary_do_not_take_back_what_shortens_waits_by_much(seed: int) -> None:
    rng = random.Random(seed)
    controller = PermitController()
    for _ in range(NUM_SHORT):
        busy_s = rng.uniform(0.8, 1.2) * STEP
        before = controller._num_windows
        while controller._num_windows == before:
            controller.note(busy_s, 2 * STEP * 0.45 ** (controller.permits - 1), 1.0)
    assert controller.permits >= 5


@pytest.mark.parametrize(("extra", "most"), [(1.3, 1.5), (1.6, 1.5)])
def test_waits_that_become_busy_time_are_worth_no_permits(extra: float, most: float) -> None:
    """As where a processor is shared, and what works ahead takes from it."""
    controller = PermitController()
    seen = []
    for _ in range(200):
        saved = 1 - 0.5 ** (controller.permits - 1)
        before = controller._num_windows
        while controller._num_windows == before:
            controller.note((1 + extra * saved) * STEP, (1 - saved) * STEP, 1.0)
        seen.append(controller.permits)
    assert sum(seen[100:]) / 100 < most


def test_a_permit_that_is_needed_is_not_given_up_for_a_trial() -> None:
    controller = PermitController()
    controller.permits, controller._goes_up = 2, False
    # A permit less would cost a whole step, one more saves 2 % of it.
    for _ in range(10):
        note(controller, 0.02 * STEP)
        assert controller.permits >= 2


def test_waits_for_the_dataset_are_worth_no_permit() -> None:
    controller = PermitController()
    for _ in range(20):
        note(controller, 5 * STEP, held_s=0.0)
    assert controller.permits == 1


@pytest.mark.parametrize(("slack", "permits"), [(0.5, 6), (1.5, 5), (4.5, 2), (8.0, 1)])
def test_rows_that_wait_cost_permits_at_once(slack: float, permits: int) -> None:
    controller = PermitController()
    controller.permits = 6
    note(controller, -slack * STEP)
    assert controller.permits == permits


def test_a_pause_of_the_loop_changes_nothing() -> None:
    controller = PermitController()
    controller.permits = 2
    for number in range(2 * WINDOW):
        paused = number == 5  # as an evaluation is
        controller.note(100.0 if paused else STEP, -100.0 if paused else -0.5 * STEP, 0.0)
    assert controller.permits == 2


NUMBERS = st.floats(0, 10)


@given(
    st.lists(st.tuples(NUMBERS, st.floats(-10, 10), NUMBERS), max_size=40), st.integers(2, 12)
)
def test_it_stays_in_its_bounds(notes: list[tuple[float, float, float]], most: int) -> None:
    controller = PermitController(most)
    for one in notes:
        for _ in range(WINDOW):
            controller.note(*one)
            assert 1 <= controller.permits <= most


# --- over a pipeline --------------------------------------------------------------------------


def never(seconds: float) -> Times:
    return lambda rng, step: seconds


@pytest.mark.parametrize(
    ("lookup", "update", "least", "most_lateness"),
    [
        (0.0001, 0.0001, 0.97, 1.0),  # next to no time: a permit or two
        (0.001, 0.001, 0.99, 1.05),
        (0.003, 0.003, 0.99, 1.5),
        (0.005, 0.0045, 0.98, 2.5),  # all but a step
        (0.010, 0.005, 0.96, 3.0),
        (0.040, 0.010, 0.90, 8.0),
    ],
)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_rows_arrive_just_before_they_are_needed(
    lookup: float, update: float, least: float, most_lateness: float, seed: int
) -> None:
    machine = Machine(around(STEP), around(lookup), around(update))
    auto = machine.run(2500, PermitController(), seed=seed)
    ten = machine.run(2500, None, fixed=MOST, seed=seed)
    assert ten.lateness(20) > 8.9
    # Behind the first steps, in which the number rises.
    assert auto.seconds <= ten.seconds / least + NUM_SHORT * WINDOW * (lookup + update)
    assert auto.lateness(0) <= most_lateness


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_what_servers_do_not_give_is_not_paid_for_with_lateness(seed: int) -> None:
    machine = Machine(around(STEP), around(0.02), around(0.01), lanes=1)
    auto = machine.run(2500, PermitController(), seed=seed)
    ten = machine.run(2500, None, fixed=MOST, seed=seed)
    assert auto.seconds < 1.04 * ten.seconds
    assert ten.lateness(20) > 8.9
    assert auto.lateness(0) < 2


@pytest.mark.parametrize("seed", [1, 2])
def test_a_slow_dataset_needs_no_permits(seed: int) -> None:
    machine = Machine(around(0.005), around(0.001), around(0.001), source=around(STEP))
    auto = machine.run(1500, PermitController(), seed=seed)
    ten = machine.run(1500, None, fixed=MOST, seed=seed)
    assert auto.seconds < 1.02 * ten.seconds
    assert auto.lateness(0) < 1


def test_it_follows_a_change_of_load() -> None:
    """Lookups take four steps for a while, and then a tenth of one again."""

    def lookup(rng: object, step: int) -> float:
        return 0.040 if 1000 <= step < 4000 else 0.001

    outcome = Machine(never(STEP), lookup, never(0.001)).run(7000, PermitController())
    assert set(outcome.permits[200:1000]) == {2}
    assert min(outcome.permits[2500:4000]) >= 5
    assert set(outcome.permits[6000:]) == {2}
