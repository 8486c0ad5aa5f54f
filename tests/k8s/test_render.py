"""Any valid job becomes objects that an API accepts, by every engine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given

from persia._k8s.pods import keys_secret
from persia._k8s.render import WRITERS, as_yaml, render
from persia._k8s.spec import read_job
from persia._rpc.curve import make_keys
from persia.errors import ConfigError
from tests.k8s.schemas import OLD, VERSIONS, check
from tests.k8s.specs import jobs, original
from tests.support.profiles import tries

FROM_1_21 = (*(one for one in OLD if one != "1.20.0"), *VERSIONS)


def test_versions_of_kubernetes_are_those_that_are_promised() -> None:
    assert {"1.25.0", "1.37.0"} <= set(VERSIONS)


@pytest.mark.parametrize("engine", WRITERS)
@given(document=jobs(needs_trainer=True))
@tries(60)
def test_any_valid_job_renders_valid_objects(engine: str, document: dict[str, Any]) -> None:
    plan, objects = render(read_job(document), engine, run_id="monday")
    for one in objects:
        check(one, FROM_1_21)  # for which it is if none is given
    names = [(one["kind"], one["metadata"]["name"]) for one in objects]
    assert len(set(names)) == len(names)
    # The same document is the same objects: applied again it changes nothing.
    assert render(read_job(document), engine, run_id="monday") == (plan, objects)


@pytest.mark.parametrize("engine", WRITERS)
def test_jobs_that_are_rendered_twice_are_two_runs(engine: str) -> None:
    """Of a JobSet's pods its uid is part of the run: tests/k8s/test_jobset.py."""
    texts = [as_yaml(render(read_job(original()), engine)[1]) for _ in range(2)]
    assert (texts[0] == texts[1]) == (engine != "native")
    runs = [set(re.findall(r"name: PERSIA_RUN_ID\n *value: (.+)", text)) for text in texts]
    assert all(len(one) == 1 for one in runs)
    assert len(set.union(*runs)) == (2 if engine == "native" else 1)


@pytest.mark.parametrize("engine", WRITERS)
def test_what_is_printed_is_what_was_rendered(engine: str) -> None:
    awkward = [
        {"name": "A", "value": text} for text in ("on", "1e3", "#", "a: b\n", "\u00e9", "")
    ]
    _, objects = render(read_job(original(env=awkward[:1])), engine)
    assert list(yaml.safe_load_all(as_yaml(objects))) == objects
    assert [yaml.safe_load(as_yaml([one])) for one in awkward] == awkward


@pytest.mark.skipif(not OLD, reason="no schemas: `make k8s-schemas` fetches them")
@given(document=jobs(needs_trainer=True))
@tries(60)
def test_any_valid_job_renders_valid_objects_for_1_20(document: dict[str, Any]) -> None:
    for one in render(read_job(document), "native", kubernetes=(1, 20))[1]:
        check(one, OLD)


@given(jobs())
@tries(25)
def test_a_job_without_trainers_renders_where_servers_are_enough(
    document: dict[str, Any],
) -> None:
    for engine in ("native", "jobset"):
        for one in render(read_job(document), engine)[1]:
            check(one)


def test_an_unknown_field_and_a_wrong_type_are_refused_by_the_oracle() -> None:
    for engine in WRITERS:
        (*_, last) = render(read_job(original()), engine)[1]
        check(last)
        with pytest.raises(AssertionError):
            check({**last, "spec": {**last["spec"], "paralelism": 1}})
    (job,) = (
        one
        for one in render(read_job(original()))[1]
        if one["kind"] == "Job" and one["metadata"]["name"].endswith("ps-1")
    )
    job["spec"]["template"]["spec"]["containers"][0]["ports"][0]["containerPort"] = "x"
    with pytest.raises(AssertionError):
        check(job)


def test_keys_of_a_folder_become_a_secret_that_pods_mount(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    job = read_job(original())
    plan, objects = render(job, keys=tmp_path / "keys")
    assert objects[0] == keys_secret(
        plan, {path.name: path.read_bytes() for path in (tmp_path / "keys").iterdir()}
    )
    check(objects[0])
    assert "serve.secret" not in objects[0]["data"]
    # A job that names a Secret has its own.
    named = read_job(original(keysSecret="mine"))
    plan, objects = render(named, keys=tmp_path / "keys")
    assert plan.keys_secret == "mine"
    assert "Secret" not in {one["kind"] for one in objects}
    with pytest.raises(ConfigError, match="--keys: expected the files of persia-launcher keys"):
        render(job, keys=tmp_path)
