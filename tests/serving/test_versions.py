"""Versions of models: what is loaded, what answers, and what a failure leaves as it was."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from persia._serving.servable import Inputs, Outputs
from persia._serving.versions import ModelRepository, VersionPolicy
from persia._serving.warmup import FILE_NAME, WarmupRecorder, write_requests
from persia.errors import (
    ConfigError,
    DataError,
    PersiaError,
    ServiceTimeout,
    ServiceUnavailable,
    UnknownModel,
)
from tests.support.waiting import PATIENCE_S, until

INPUT = {"name": "x", "datatype": "INT64", "shape": [-1]}


class FakeModel:
    """Answers with its version; an answer after ``close`` is an error."""

    is_batch_independent = True

    def __init__(
        self,
        version: int,
        inputs: list[dict[str, Any]] | None = None,
        outputs: list[dict[str, Any]] | None = None,
    ) -> None:
        self.version = version
        self.inputs, self.outputs = inputs or [INPUT], outputs or []
        self.is_closed = False
        self.seen: list[Inputs] = []
        self.fails = False

    def __call__(self, inputs: Inputs) -> Outputs:
        if self.is_closed:
            raise AssertionError("called after close")
        if self.fails:
            raise ValueError("no answer")
        if set(inputs) != {"x"}:
            raise DataError(f"expected x, got {sorted(inputs)}")
        self.seen.append(inputs)
        return {"version": np.full(len(inputs["x"]), self.version)}

    def metadata(self) -> dict[str, Any]:
        return {"name": "m", "versions": [], "inputs": self.inputs, "outputs": self.outputs}

    def close(self) -> None:
        if self.is_closed:
            raise AssertionError("closed twice")
        self.is_closed = True


class Loader:
    """Loads fakes; makes loads fail, wait for a gate, or have other inputs."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.failing: dict[tuple[str, int], Exception] = {}
        self.gates: dict[tuple[str, int], threading.Event] = {}
        self.inputs: dict[tuple[str, int], list[dict[str, Any]]] = {}
        self.outputs: dict[tuple[str, int], list[dict[str, Any]]] = {}
        self.dumb: set[tuple[str, int]] = set()
        self.made: list[FakeModel] = []
        self.loads: list[tuple[str, int]] = []

    def __call__(self, folder: Path) -> FakeModel:
        key = folder.parent.name, int(folder.name)
        with self.lock:
            self.loads.append(key)
        gate = self.gates.get(key)
        if gate is not None and not gate.wait(PATIENCE_S):
            raise AssertionError("the gate was never opened")
        if key in self.failing:
            raise self.failing[key]
        model = FakeModel(key[1], self.inputs.get(key), self.outputs.get(key))
        model.fails = key in self.dumb
        with self.lock:
            self.made.append(model)
        return model


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def publish(root: Path, version: int, model: str = "m", text: str = "") -> Path:
    folder = root / model / str(version)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "persia-model.json").write_text(text)
    return folder


def point(root: Path, version: object, model: str = "m") -> None:
    (root / model / "current.json").write_text(json.dumps({"version": version}))


def settle(repository: ModelRepository) -> None:
    """Look until nothing is being loaded or closed."""
    repository.poll()
    while True:
        until(
            lambda: (
                not any(one.state in ("LOADING", "UNLOADING") for one in repository.index())
            ),
            details=lambda: repository.index(),
        )
        before = repository.stats()["loads"]
        repository.poll()
        if repository.stats()["loads"] == before:
            return


def answer(repository: ModelRepository, version: int | str | None = None) -> int:
    with repository.use("m", version) as servable:
        return int(servable({"x": np.zeros(1, np.int64)})["version"][0])


@pytest.fixture
def loader() -> Loader:
    return Loader()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def repository(tmp_path: Path, loader: Loader, clock: Clock) -> Iterator[ModelRepository]:
    made = ModelRepository(tmp_path, load=loader, clock=clock)
    yield made
    for gate in loader.gates.values():
        gate.set()
    assert made.close(PATIENCE_S)
    assert all(model.is_closed for model in loader.made)


def test_models_that_are_not_there_at_the_first_look_are_said(
    tmp_path: Path, loader: Loader, caplog: pytest.LogCaptureFixture
) -> None:
    all_of_it = ModelRepository(tmp_path, load=loader)
    for _ in range(2):
        all_of_it.poll()
    assert [one.message for one in caplog.records] == [
        f"{tmp_path} has no model yet, so that no request is answered"
    ]
    caplog.clear()
    publish(tmp_path, 1)
    policies = {"q": VersionPolicy.parse("all")}
    settle(
        named := ModelRepository(tmp_path, load=loader, models=["m", "n"], policies=policies)
    )
    warnings = [one.message for one in caplog.records if one.levelname == "WARNING"]
    assert warnings == [
        f"model {name} is not in {tmp_path} yet, whose models are: m" for name in "nq"
    ]
    assert named.close(PATIENCE_S)


def test_an_empty_folder_of_another_model_leaves_the_server_ready(
    tmp_path: Path, loader: Loader, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "new").mkdir()
    settle(every := ModelRepository(tmp_path, load=loader))
    assert not every.is_ready()  # there is nothing else
    publish(tmp_path, 1)
    settle(every)
    assert every.is_ready()
    assert not every.is_ready("new")
    assert f"model new: {tmp_path / 'new'} has no version yet" in caplog.messages
    caplog.clear()
    settle(one := ModelRepository(tmp_path, load=loader, models=["m"]))
    assert one.is_ready()
    assert not [each for each in caplog.records if each.levelname == "WARNING"]
    settle(named := ModelRepository(tmp_path, load=loader, models=["m", "new"]))
    assert not named.is_ready()
    for each in (every, one, named):
        assert each.close(PATIENCE_S)


# --- policies ---------------------------------------------------------------------------------


def test_the_latest_answers_and_current_names_an_older_one(
    tmp_path: Path, repository: ModelRepository
) -> None:
    publish(tmp_path, 1)
    publish(tmp_path, 2)
    assert not repository.is_ready()
    settle(repository)
    assert repository.is_ready()
    assert repository.versions("m") == [2]
    assert answer(repository) == answer(repository, 2) == answer(repository, "2") == 2
    with pytest.raises(UnknownModel):
        answer(repository, 1)
    publish(tmp_path, 10)
    settle(repository)
    assert answer(repository) == 10
    point(tmp_path, 1)
    settle(repository)
    assert answer(repository) == 1
    publish(tmp_path, 11)  # published, but not pointed at
    settle(repository)
    assert answer(repository) == 1
    assert repository.metadata("m")["versions"] == ["1"]


@pytest.mark.parametrize(
    "content", ["{", '{"version": "3"}', '{"version": true}', "[]", '{"version": 0}']
)
def test_a_damaged_current_changes_nothing_and_is_named(
    tmp_path: Path, repository: ModelRepository, content: str
) -> None:
    publish(tmp_path, 1)
    publish(tmp_path, 2)
    point(tmp_path, 1)
    settle(repository)
    (tmp_path / "m" / "current.json").write_text(content)
    settle(repository)
    assert answer(repository) == 1
    with pytest.raises(ServiceUnavailable, match=r"current\.json"):
        repository.load("m")
    assert answer(repository) == 1


def test_current_names_a_version_that_is_not_there(
    tmp_path: Path, repository: ModelRepository
) -> None:
    publish(tmp_path, 1)
    publish(tmp_path, 9)
    point(tmp_path, 5)
    settle(repository)
    assert answer(repository) == 1  # below the wanted one, never above
    with pytest.raises(ServiceUnavailable, match="names version 5"):
        repository.load("m")
    publish(tmp_path, 5)
    settle(repository)
    assert answer(repository) == 5


def test_all_and_specific(tmp_path: Path, loader: Loader) -> None:
    for version in (1, 2, 3):
        publish(tmp_path, version, "a")
        publish(tmp_path, version, "b")
    policies = {"a": VersionPolicy.parse("all"), "b": VersionPolicy.parse("3, 1")}
    repository = ModelRepository(tmp_path, load=loader, policies=policies)
    settle(repository)
    assert repository.versions("a") == [1, 2, 3]
    assert repository.versions("b") == [1, 3]
    point(tmp_path, 2, "a")
    shutil.rmtree(tmp_path / "a" / "3")
    settle(repository)
    assert repository.versions("a") == [1, 2]
    with repository.use("a") as servable:
        assert servable.version == 2
    with repository.use("b") as servable:
        assert servable.version == 3
    assert [one.version for one in repository.index(ready=True) if one.is_default] == [2, 3]
    assert repository.close(PATIENCE_S)


@pytest.mark.parametrize("text", ["", "0", "-1", "newest", "1,,2", "01", "1.5"])
def test_a_policy_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match="version policy"):
        VersionPolicy.parse(text)


# --- names and links --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["..", ".", "", "a/b", "../m", ".hidden", "x" * 101, "a\0b", "m "]
)
def test_names_that_are_no_models(repository: ModelRepository, name: str) -> None:
    with pytest.raises(UnknownModel), repository.use(name):
        pass
    with pytest.raises(UnknownModel):
        repository.load(name)
    assert not repository.is_ready(name)


@pytest.mark.parametrize("version", ["0", "-1", "01", "1/../1", "x", 0, "9" * 30])
def test_versions_that_are_none(
    tmp_path: Path, repository: ModelRepository, version: int | str
) -> None:
    publish(tmp_path, 1)
    settle(repository)
    with pytest.raises(UnknownModel):
        answer(repository, version)
    assert not repository.is_ready("m", version)


def test_links_out_of_the_root_are_not_followed(tmp_path: Path, loader: Loader) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    publish(outside, 1)
    publish(outside, 7, "n")
    publish(root, 1, "n")
    (root / "linked").symlink_to(outside / "m")
    (root / "n" / "7").symlink_to(outside / "n" / "7")
    (root / "inside").symlink_to(root / "n")
    (outside / "current.json").write_text('{"version": 7}')
    (root / "n" / "current.json").symlink_to(outside / "current.json")
    repository = ModelRepository(root, load=loader)
    settle(repository)
    assert repository.models() == ["inside", "n"]
    assert repository.versions("n") == [1]
    assert repository.close(PATIENCE_S)


# --- failures ---------------------------------------------------------------------------------


def test_a_failed_load_leaves_the_old_one_and_is_tried_again(
    tmp_path: Path, repository: ModelRepository, loader: Loader, clock: Clock
) -> None:
    publish(tmp_path, 1)
    settle(repository)
    loader.failing["m", 2] = OSError(24, "Too many open files")
    publish(tmp_path, 2)
    settle(repository)
    assert answer(repository) == 1
    (failed,) = [one for one in repository.index() if one.version == 2]
    assert failed.state == "UNAVAILABLE"
    assert "Too many open files" in failed.reason
    with pytest.raises(ServiceUnavailable, match="Too many open files"):
        answer(repository, 2)
    num_loads = len(loader.loads)
    settle(repository)  # not again before its time
    assert len(loader.loads) == num_loads
    clock.now += 1.1
    settle(repository)
    clock.now += 1.1  # the pause is doubled
    settle(repository)
    assert len(loader.loads) == num_loads + 1
    del loader.failing["m", 2]
    publish(tmp_path, 2, text="changed")  # at once
    settle(repository)
    assert answer(repository) == 2
    assert repository.stats()["failed_loads"] == 2
    assert all(one.reason == "" for one in repository.index())


def test_a_new_server_falls_back_to_an_older_version(
    tmp_path: Path, repository: ModelRepository, loader: Loader, clock: Clock
) -> None:
    for version in (1, 2, 3):
        publish(tmp_path, version)
    loader.failing["m", 3] = MemoryError()
    settle(repository)
    assert answer(repository) == 2
    with pytest.raises(ServiceUnavailable, match="version 3: MemoryError"):
        repository.load("m")
    del loader.failing["m", 3]
    clock.now += 100.0
    settle(repository)
    assert answer(repository) == 3
    assert ("m", 1) not in loader.loads


def test_a_hanging_load_blocks_neither_other_models_nor_other_versions(
    tmp_path: Path, loader: Loader, clock: Clock
) -> None:
    repository = ModelRepository(tmp_path, load=loader, clock=clock, load_timeout_s=10.0)
    publish(tmp_path, 1)
    settle(repository)
    gate = loader.gates["m", 2] = threading.Event()
    publish(tmp_path, 2)
    publish(tmp_path, 1, "other")
    repository.poll()
    until(lambda: repository.is_ready("other"))
    assert answer(repository) == 1
    clock.now += 10.0
    repository.poll()
    publish(tmp_path, 3)
    settle(repository)
    assert answer(repository) == 3
    clock.now += 1000.0
    settle(repository)
    assert loader.loads.count(("m", 2)) == 1  # not again while it hangs
    assert not repository.close(0.0)
    gate.set()
    assert repository.close(PATIENCE_S)
    assert all(model.is_closed for model in loader.made)
    assert repository.stats()["hung_loads"] == 1


def test_a_slow_load_is_used_when_it_ends_after_all(
    tmp_path: Path, repository: ModelRepository, loader: Loader, clock: Clock
) -> None:
    gate = loader.gates["m", 1] = threading.Event()
    publish(tmp_path, 1)
    repository.poll()
    clock.now += 601.0
    repository.poll()
    with pytest.raises(ServiceUnavailable, match="longer than 600 s"):
        answer(repository)
    gate.set()
    until(lambda: repository.is_ready("m"))
    assert answer(repository) == 1


def test_another_version_in_the_folder_is_refused(
    tmp_path: Path, repository: ModelRepository, loader: Loader
) -> None:
    publish(tmp_path, 1)

    class Wrong(Loader):
        def __call__(self, folder: Path) -> FakeModel:
            return FakeModel(8)

    other = ModelRepository(tmp_path, load=Wrong())
    settle(other)
    with pytest.raises(ServiceUnavailable, match="expected version 1, got 8"):
        answer(other)
    assert other.close(PATIENCE_S)


def test_a_named_version_that_fails_brings_back_none_that_was_rolled_back(
    tmp_path: Path, repository: ModelRepository, loader: Loader
) -> None:
    for version in (5, 6):
        publish(tmp_path, version)
    point(tmp_path, 5)
    settle(repository)
    loader.failing["m", 7] = OSError("broken")
    publish(tmp_path, 7)
    point(tmp_path, 7)
    settle(repository)
    assert answer(repository) == 5
    assert ("m", 6) not in loader.loads


def test_a_root_that_was_never_there_is_not_ready(tmp_path: Path, loader: Loader) -> None:
    repository = ModelRepository(tmp_path / "root", load=loader)
    repository.poll()
    assert not repository.is_ready()
    publish(tmp_path / "root", 1)
    settle(repository)
    assert repository.is_ready()
    assert repository.close(PATIENCE_S)


def test_a_root_that_is_away_unloads_nothing(
    tmp_path: Path, loader: Loader, clock: Clock
) -> None:
    root = tmp_path / "root"
    publish(root, 1)
    repository = ModelRepository(root, load=loader, clock=clock)
    settle(repository)
    root.rename(tmp_path / "away")
    repository.poll()
    assert answer(repository) == 1
    root.mkdir()  # an empty folder where the disk was
    repository.poll()
    assert answer(repository) == 1
    publish(root, 1, "other")  # this one says that the root is there, and the model is not
    settle(repository)
    with pytest.raises(UnknownModel):
        answer(repository)
    assert repository.models() == ["other"]
    assert repository.close(PATIENCE_S)


# --- schema and warm-up -----------------------------------------------------------------------


@pytest.mark.parametrize("is_allowed", [False, True])
def test_other_inputs_are_refused_unless_allowed(
    tmp_path: Path, loader: Loader, is_allowed: bool
) -> None:
    recorder = WarmupRecorder(every=1)
    repository = ModelRepository(
        tmp_path, load=loader, allow_schema_change=is_allowed, recorder=recorder
    )
    publish(tmp_path, 1)
    settle(repository)
    recorder.record("m", {"x": np.zeros(1, np.int64)})
    loader.inputs["m", 2] = [INPUT, {"name": "y", "datatype": "FP32", "shape": [-1, 3]}]
    publish(tmp_path, 2)
    settle(repository)
    assert answer(repository) == (2 if is_allowed else 1)
    reasons = [one.reason for one in repository.index() if one.version == 2]
    assert ("y: none before" in reasons[0]) is not is_allowed
    # Requests of the form before would be wrong ones now.
    assert bool(recorder.requests("m")) is not is_allowed
    assert repository.close(PATIENCE_S)


@pytest.mark.parametrize("is_allowed", [False, True])
def test_a_version_that_lacks_an_output_is_refused_unless_allowed(
    tmp_path: Path, loader: Loader, is_allowed: bool
) -> None:
    repository = ModelRepository(tmp_path, load=loader, allow_schema_change=is_allowed)
    click, more = (
        {"name": one, "datatype": "FP32", "shape": [-1, 1]} for one in ("click", "b")
    )
    loader.outputs |= {("m", 1): [click], ("m", 2): [more, click], ("m", 3): [more]}
    for version in (1, 2):
        publish(tmp_path, version)
        settle(repository)
        assert answer(repository) == version  # one more is no difference
    publish(tmp_path, 3)
    settle(repository)
    assert answer(repository) == (3 if is_allowed else 2)
    reasons = [one.reason for one in repository.index() if one.version == 3]
    assert ("outputs of version 2" in reasons[0]) is not is_allowed
    assert ("click: ('FP32', -1, 1) before, none now" in reasons[0]) is not is_allowed
    assert repository.close(PATIENCE_S)


@pytest.mark.parametrize("is_allowed", [False, True])
def test_requests_of_the_inputs_before_refuse_a_version_unless_allowed(
    tmp_path: Path, loader: Loader, is_allowed: bool
) -> None:
    recorder = WarmupRecorder(every=1)
    repository = ModelRepository(
        tmp_path, load=loader, recorder=recorder, allow_schema_change=is_allowed
    )
    publish(tmp_path, 1)
    settle(repository)
    # As one that was answered by an older version while this one took its place.
    recorder.record("m", {"y": np.zeros(1, np.int64)})
    publish(tmp_path, 2)
    settle(repository)
    assert answer(repository) == (2 if is_allowed else 1)
    assert repository.close(PATIENCE_S)


def test_a_new_version_answers_recorded_requests_before_it_serves(
    tmp_path: Path, loader: Loader
) -> None:
    recorder = WarmupRecorder(tmp_path, every=1)
    repository = ModelRepository(tmp_path, load=loader, recorder=recorder)
    folder = publish(tmp_path, 1)
    write_requests(folder / FILE_NAME, [{"x": np.arange(3)}])
    settle(repository)
    recorder.record("m", {"x": np.arange(5)})
    publish(tmp_path, 2)
    settle(repository)
    assert [len(inputs["x"]) for inputs in loader.made[0].seen] == [3, 3]
    assert [len(inputs["x"]) for inputs in loader.made[1].seen] == [5, 5]
    assert (tmp_path / "m" / FILE_NAME).is_file()
    loader.dumb.add(("m", 3))
    (publish(tmp_path, 3) / FILE_NAME).write_bytes(b"damaged")  # a warning only
    settle(repository)
    assert answer(repository) == 2
    (failed,) = [one for one in repository.index() if one.version == 3]
    assert "recorded request 0: expected an answer, got ValueError" in failed.reason
    assert repository.close(PATIENCE_S)


# --- load and unload --------------------------------------------------------------------------


def test_models_are_loaded_when_asked_for(tmp_path: Path, loader: Loader) -> None:
    publish(tmp_path, 1)
    events: list[tuple[str, str, int]] = []
    repository = ModelRepository(
        tmp_path, load=loader, models=(), on_event=lambda *event: events.append(event)
    )
    settle(repository)
    assert repository.is_ready()  # of those asked for, none is missing
    assert not repository.is_ready("m")
    (line,) = repository.index()
    assert (line.version, line.state, line.reason) == (None, "UNAVAILABLE", "unloaded")
    with pytest.raises(UnknownModel):
        repository.load("none")
    repository.load("m", PATIENCE_S)
    assert answer(repository) == 1
    publish(tmp_path, 1, text="replaced under the same number")
    repository.load("m", PATIENCE_S)
    assert loader.loads == [("m", 1)] * 2
    with repository.use("m") as servable:
        with pytest.raises(ServiceTimeout, match="did not end"):
            repository.unload("m", 0.0)
        (line,) = repository.index()
        assert line.state == "UNLOADING"
        assert servable({"x": np.zeros(1)})["version"] == 1
    repository.unload("m", PATIENCE_S)
    with pytest.raises(ServiceUnavailable, match="unloaded"):
        answer(repository)
    repository.load("m", PATIENCE_S)
    assert answer(repository) == 1
    assert repository.close(PATIENCE_S)
    assert {event for event, _, _ in events} == {*("loaded", "switched", "retired", "closed")}
    with pytest.raises(ServiceUnavailable):
        answer(repository)
    with pytest.raises(ServiceUnavailable):
        repository.load("m")


def test_the_thread_finds_a_new_version_and_waits_are_bounded(
    tmp_path: Path, loader: Loader
) -> None:
    loader.failing["m", 1] = ValueError("broken")
    publish(tmp_path, 1)
    with ModelRepository(tmp_path, load=loader, poll_s=0.005) as repository:
        until(lambda: repository.stats()["failed_loads"])
        with pytest.raises(ServiceTimeout, match="broken"):
            repository.wait_ready(0.1)
        publish(tmp_path, 2)
        repository.wait_ready(PATIENCE_S)
        assert answer(repository) == 2


# --- many users during many switches ----------------------------------------------------------


def test_every_answer_is_of_one_whole_version_and_old_ones_are_closed(
    tmp_path: Path, loader: Loader
) -> None:
    """A closed model that is called, or an error, ends a user's thread with a failure."""
    num_switches, stop, failures = 40, threading.Event(), list[BaseException]()
    seen: list[set[int]] = [set() for _ in range(6)]
    publish(tmp_path, 1)

    def use(mine: set[int]) -> None:
        last = 0
        try:
            while not stop.is_set():
                with served.use("m") as servable:
                    first = int(servable({"x": np.zeros(1)})["version"][0])
                    again = int(servable({"x": np.zeros(1)})["version"][0])
                assert first == again == servable.version
                assert first >= last
                last = first
                mine.add(first)
        except BaseException as error:
            failures.append(error)

    with ModelRepository(tmp_path, load=loader, poll_s=0.002) as served:

        def is_alone(version: int) -> bool:
            return served.versions("m") == [version] and any(version in one for one in seen)

        served.wait_ready(PATIENCE_S)
        threads = [threading.Thread(target=use, args=(mine,)) for mine in seen]
        for thread in threads:
            thread.start()
        for version in range(2, num_switches + 2):
            publish(tmp_path, version)
            until(partial(is_alone, version))
        until(lambda: sum(not model.is_closed for model in loader.made) == 1)
        stop.set()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert not failures
    assert all(model.is_closed for model in loader.made)
    assert set.union(*seen) - {1} == set(range(2, num_switches + 2))
    counts = served.stats()
    assert counts["switches"] == num_switches
    assert counts["closed"] == counts["retired"] == num_switches + 1
    assert counts["live"] == counts["in_use"] == 0


# --- against a plain model --------------------------------------------------------------------


class Repositories(RuleBasedStateMachine):
    """Folders change, loads fail and hang, requests hold versions; rules say which answers."""

    @initialize(policy=st.sampled_from(["latest", "all", "2,4"]))
    def begin(self, policy: str) -> None:
        self.root = Path(tempfile.mkdtemp())
        (self.root / "other").mkdir()
        self.policy = VersionPolicy.parse(policy)
        self.loader, self.clock = Loader(), Clock()
        self.repository = ModelRepository(
            self.root,
            load=self.loader,
            default_policy=self.policy,
            clock=self.clock,
            load_timeout_s=50.0,
            models=["m"],
        )
        self.on_disk: set[int] = set()
        self.current: int | None = None
        self.is_wanted = True
        self.live: set[int] = set()
        self.default: int | None = None
        self.users: list[tuple[Any, int]] = []

    # What shall be served, after all loads that can have ended.
    def expect(self) -> None:
        broken = {version for _, version in self.loader.failing}
        broken |= {
            version for (_, version), gate in self.loader.gates.items() if not gate.is_set()
        }
        if not self.is_wanted or not self.folder().is_dir():
            self.live = set()
        elif self.policy.kind == "latest":
            self.expect_latest(broken)
        else:
            shall = self.on_disk - broken
            keep = set(self.on_disk) or self.live
            if self.policy.kind == "specific":
                shall &= set(self.policy.versions)
                keep = set(self.policy.versions)
            self.live = (self.live & keep) | shall
        if self.policy.kind == "latest":
            self.default = next(iter(self.live), None)
        elif self.current in self.live:
            self.default = self.current
        else:
            self.default = max(self.live, default=None)

    def expect_latest(self, broken: set[int]) -> None:
        order = sorted(self.on_disk, reverse=True)
        if self.current is not None:
            order = [version for version in order if version <= self.current]
        now = next(iter(self.live), None)
        if now in order:
            order = order[: order.index(now)]
        elif now is not None:
            order = order[:1]
        best = next((version for version in order if version not in broken), None)
        if best is not None:
            self.live = {best}

    def folder(self) -> Path:
        return self.root / "m"

    def settle(self) -> None:
        """Let time pass, so that what failed is tried again, and what hangs is given up."""
        for _ in range(7):
            # First: time passes for loads that hang, not for those that a thread just makes.
            until(self.is_quiet)
            self.clock.now += 100.0
            self.repository.poll()
        until(self.is_quiet)
        self.expect()

    def is_quiet(self) -> bool:
        model = self.repository._models["m"]
        hung = any(not self.hangs(version) for version in list(model.hung))
        loading = model.loading
        return not hung and (loading is None or self.hangs(loading.number))

    def hangs(self, version: int | None) -> bool:
        gate = self.loader.gates.get(("m", version or 0))
        return gate is not None and not gate.is_set()

    @rule(version=st.integers(1, 5), fails=st.sampled_from(["", "", "error", "hang"]))
    def publish(self, version: int, fails: str) -> None:
        if version in self.on_disk:
            return
        self.loader.failing.pop(("m", version), None)
        if fails == "error":
            self.loader.failing["m", version] = OSError(5, "Input/output error")
        elif fails == "hang" and ("m", version) not in self.loader.gates:
            self.loader.gates["m", version] = threading.Event()
        publish(self.root, version)
        self.on_disk.add(version)
        self.settle()

    @rule(version=st.integers(1, 5))
    def repair(self, version: int) -> None:
        self.loader.failing.pop(("m", version), None)
        gate = self.loader.gates.get(("m", version))
        if gate is not None:
            gate.set()
            until(lambda: not self.repository._models["m"].hung.get(version))
        self.settle()

    @rule(version=st.integers(1, 5))
    def remove(self, version: int) -> None:
        if version in self.on_disk:
            shutil.rmtree(self.folder() / str(version))
            self.on_disk.discard(version)
            self.settle()

    @rule(version=st.one_of(st.none(), st.integers(1, 5)))
    def set_current(self, version: int | None) -> None:
        self.folder().mkdir(exist_ok=True)
        (self.folder() / "current.json").unlink(missing_ok=True)
        self.current = version
        if version is not None:
            point(self.root, version)
        self.settle()

    @rule()
    def unload(self) -> None:
        self.is_wanted = False
        with contextlib.suppress(ServiceTimeout):
            self.repository.unload("m", 0.0)
        self.settle()

    @rule()
    def load(self) -> None:
        self.is_wanted = True
        with contextlib.suppress(PersiaError):
            self.repository.load("m", 0.0)
        self.settle()

    @rule()
    def enter(self) -> None:
        if self.default is None:
            with pytest.raises((UnknownModel, ServiceUnavailable)):
                answer(self.repository)
            return
        use = self.repository.use("m")
        assert use.__enter__().version == self.default
        self.users.append((use, self.default))

    @rule()
    def leave(self) -> None:
        if self.users:
            use, _ = self.users.pop(0)
            use.__exit__(None, None, None)

    @invariant()
    def it_serves_what_it_shall(self) -> None:
        if not hasattr(self, "repository"):
            return
        ready = {one.version for one in self.repository.index(ready=True)}
        assert ready == self.live
        for version in self.live:
            assert answer(self.repository, version) == version
        if self.default is not None:
            assert answer(self.repository) == self.default
        # What a request holds is open; what none holds and none shall get is closed.
        for use, version in self.users:
            assert int(use._live.servable({"x": np.zeros(1)})["version"][0]) == version
        held = {id(use._live.servable) for use, _ in self.users}
        held |= (
            {id(one.servable) for one in self.repository._models["m"].live.values()}
            if ("m" in self.repository._models)
            else set()
        )
        until(lambda: {id(one) for one in self.loader.made if not one.is_closed} == held)

    def teardown(self) -> None:
        if not hasattr(self, "repository"):
            return
        for gate in self.loader.gates.values():
            gate.set()
        for use, _ in self.users:
            use.__exit__(None, None, None)
        assert self.repository.close(PATIENCE_S)
        assert all(model.is_closed for model in self.loader.made)
        shutil.rmtree(self.root)


TestRepositories = Repositories.TestCase
TestRepositories.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
