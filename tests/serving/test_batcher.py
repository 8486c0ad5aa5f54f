"""The queue, and joining and splitting of requests."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from persia._serving.batcher import (
    InferJob,
    ModelThreads,
    batch_shape,
    join_inputs,
    split_outputs,
)
from persia._serving.request import DecodedRequest
from persia.errors import ServiceBusy, ServiceUnavailable
from tests.support.waiting import PATIENCE_S


def job(num_bytes: int = 1) -> tuple[InferJob, threading.Event]:
    done = threading.Event()
    made = InferJob(
        lambda job: DecodedRequest({}),
        lambda outcome: outcome,
        lambda job: done.set(),
        time.monotonic() + PATIENCE_S,
        num_bytes,
    )
    return made, done


def shape_of(**inputs: Any) -> Any:
    return batch_shape(
        DecodedRequest(
            {name.replace("__", "."): np.asarray(one) for name, one in inputs.items()}
        )
    )


def test_requests_alike_have_one_signature() -> None:
    one = shape_of(user=[1], item=[1, 2, 3], dense=np.zeros((3, 2)))
    other = shape_of(user=[7, 8], item=[1, 2], dense=np.zeros((2, 2)))
    assert one is not None
    assert other is not None
    assert one.signature == other.signature
    assert (one.num_rows, other.num_rows) == (3, 2)


@pytest.mark.parametrize(
    "inputs",
    [
        {"user": [1], "item": [1.0, 2.0]},  # another dtype
        {"user": [1], "item": [[1], [2]]},  # another rank
        {"user": [1], "items": [1, 2]},  # another name
        {"user": [1], "item": [1, 2], "item__pad": [0]},  # a pad
    ],
)
def test_requests_that_differ_have_another_signature(inputs: dict[str, Any]) -> None:
    found = shape_of(**inputs)
    usual = shape_of(user=[1], item=[1, 2])
    assert found is None or usual is None or found.signature != usual.signature


@pytest.mark.parametrize(
    "inputs",
    [
        {"batch": np.array([b"x"], object)},
        {"a": [1, 2], "b": [1, 2, 3]},
        {"a": np.int64(1)},
        {"a": np.zeros(0)},
        {"a__values": [1, 2], "a__offsets": [0, 3]},  # beyond the values
        {"a__values": [1, 2], "a__offsets": [0, 2, 1, 2]},
        {"a__values": [1, 2], "a__offsets": [1, 2]},
        {"a__values": [1, 2], "a__offsets": [0, 2], "a__weights": [1.0]},
        {"a__values": 5, "a__offsets": [0, 1]},
        {},
        # A history that would be repeated for each of the candidates.
        {"a": np.zeros((1, 1 << 17)), "b": np.zeros(9)},
        {"a__values": np.zeros(1 << 17), "a__offsets": [0, 1 << 17], "b": np.zeros(9)},
    ],
)
def test_what_could_move_rows_of_others_stays_alone(inputs: dict[str, Any]) -> None:
    assert shape_of(**inputs) is None


def test_a_body_that_is_not_read_yet_stays_alone() -> None:
    assert batch_shape(DecodedRequest({}, read_raw=lambda about: {})) is None


def test_a_request_wakes_a_thread_though_another_waits_for_the_end() -> None:
    entered, go_on = threading.Event(), threading.Event()

    def serve(job: InferJob) -> None:
        if job.num_bytes:
            entered.set()
            assert go_on.wait(PATIENCE_S)
        job.answer = "done"
        threads.mark_finished()
        job.notify(job)

    threads = ModelThreads(serve, num_threads=2)
    threads.submit(job(1)[0])
    assert entered.wait(PATIENCE_S)
    # Both wait: for the end, and for a request; which of them began first is chance.
    waiting = [
        threading.Thread(target=threads.drain, args=(PATIENCE_S,), daemon=True)
        for _ in range(8)
    ]
    for one in waiting:
        one.start()
    for _ in range(20):
        asked, was_run = job(0)
        threads.submit(asked)
        assert was_run.wait(PATIENCE_S)
    go_on.set()
    for one in waiting:
        one.join(PATIENCE_S)
    assert threads.close(PATIENCE_S)


def test_joined_inputs_are_those_of_one_request() -> None:
    first = {
        "user": np.array([5]),
        "item": np.array([1, 2]),
        "past.values": np.array([7, 8]),
        "past.offsets": np.array([0, 2]),  # of the one user
    }
    second = {
        "user": np.array([6]),
        "item": np.array([3]),
        "past.values": np.array([9]),
        "past.offsets": np.array([0, 1]),
    }
    joined = join_inputs([first, second], [2, 1])
    assert {name: one.tolist() for name, one in joined.items()} == {
        "user": [5, 5, 6],
        "item": [1, 2, 3],
        "past.values": [7, 8, 7, 8, 9],
        "past.offsets": [0, 2, 4, 5],
    }
    assert joined["past.offsets"].dtype == first["past.offsets"].dtype
    parts = split_outputs({"y": np.array([[0], [1], [2]])}, [2, 1])
    assert parts is not None
    assert [one["y"].tolist() for one in parts] == [[[0], [1]], [[2]]]
    assert split_outputs({"y": np.zeros((2, 3))}, [2, 1]) is None


def test_the_queue_is_bounded_by_number_and_bytes() -> None:
    entered, go_on = threading.Event(), threading.Event()

    def serve(job: InferJob) -> None:
        entered.set()
        assert go_on.wait(PATIENCE_S)
        job.answer = "done"
        threads.mark_finished()
        job.notify(job)

    threads = ModelThreads(serve, num_threads=1, max_waiting=2, max_waiting_bytes=10)
    running, was_run = job()
    threads.submit(running)
    assert entered.wait(PATIENCE_S)
    threads.submit(job(6)[0])
    with pytest.raises(ServiceBusy, match="full"):
        threads.submit(job(5)[0])
    threads.submit(job(4)[0])
    with pytest.raises(ServiceBusy, match="full"):
        threads.submit(job(0)[0])
    assert (threads.num_waiting, threads.num_in_flight) == (2, 3)
    assert not threads.drain(0.01)
    go_on.set()
    assert threads.drain(PATIENCE_S)
    assert was_run.is_set()
    assert threads.close(PATIENCE_S)
    with pytest.raises(ServiceUnavailable):
        threads.submit(job()[0])


def test_a_thread_outlives_an_exception_and_close_answers_what_waits() -> None:
    entered, go_on = threading.Event(), threading.Event()

    def serve(job: InferJob) -> None:
        entered.set()
        assert go_on.wait(PATIENCE_S)
        raise ValueError("unforeseen")

    threads = ModelThreads(serve, num_threads=1)
    first, first_done = job()
    second, second_done = job()
    threads.submit(first)
    assert entered.wait(PATIENCE_S)
    threads.submit(second)
    assert threads.take_waiting() is second
    threads.put_back(second)
    assert not threads.close(0.01)
    assert second_done.is_set()
    assert isinstance(second.error, ServiceUnavailable)
    go_on.set()
    assert first_done.wait(PATIENCE_S)
    assert threads.close(PATIENCE_S)
