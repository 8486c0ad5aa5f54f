"""Names, addresses and variables of a job's pods, by every engine."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from persia import env
from persia._cluster.addresses import split
from persia._k8s.plan import ENGINES, KINDS, Owner, Plan, plan_job, spec_hash
from persia._k8s.spec import read_job
from persia.errors import ConfigError
from tests.k8s.specs import jobs, original
from tests.support.fixtures import Monkey
from tests.support.profiles import tries


def variables(document: dict[str, Any], engine: str, role: str) -> dict[str, str]:
    plan = plan_job(read_job(document), engine)
    (found,) = (one for one in plan.roles if one.kind.role == role)
    return {one["name"]: one["value"] for one in found.env if "value" in one}


def run_ids(plan: Plan, variable: str = env.run_id.name) -> set[str]:
    return {one["value"] for role in plan.roles for one in role.env if one["name"] == variable}


def job_ids(plan: Plan) -> set[str]:
    return run_ids(plan, env.job_id.name)


@pytest.mark.parametrize(
    ("engine", "servers", "trainers"),
    [
        (
            "native",
            "j-embedding-ps-{0..1}.j-embedding-ps:8888",
            "j-nn-worker-{0..1}.j-nn-worker:23457",
        ),
        ("jobset", "j-embedding-ps-0-{0..1}.j:8888", "j-nn-worker-0-{0..1}.j:23457"),
        ("trainjob", "j-embedding-ps-0-{0..1}.j:8888", "j-node-0-{0..1}.j:23457"),
    ],
)
def test_addresses_are_ranges_of_the_engine_s_names(
    engine: str, servers: str, trainers: str
) -> None:
    document = original()
    document["metadata"]["name"] = "j"
    found = variables(document, engine, "data-loader")
    assert found["PERSIA_EMBEDDING_PARAMETER_SERVERS"] == servers
    assert found["PERSIA_NN_WORKERS"] == trainers


def test_each_start_of_each_job_is_a_run_of_its_own() -> None:
    job = read_job(original())
    owners = Owner("0123456789"), Owner("0123456789", 2), Owner("9876543210")
    assert [run_ids(plan_job(job, owner=owner)) for owner in owners] == [
        {"adult-income-01234567-0"},
        {"adult-income-01234567-2"},
        {"adult-income-98765432-0"},
    ]
    assert run_ids(plan_job(job, run_id="monday")) == {"monday"}
    # What a JobSet does by itself its pods know: tests/k8s/test_jobset.py.
    for engine in ("jobset", "trainjob"):
        found = run_ids(plan_job(job, engine, run_id="monday"))
        assert found == {"monday-$(JOBSET_UID)-$(JOBSET_RESTART)"}


@pytest.mark.parametrize("engine", ["native", "jobset"])
def test_all_starts_of_a_job_have_one_name_for_it(engine: str) -> None:
    job = read_job(original())
    owners = Owner("0123456789"), Owner("0123456789", 2), Owner("9876543210")
    assert [job_ids(plan_job(job, engine, owner=owner)) for owner in owners] == [
        {"adult-income-01234567"},
        {"adult-income-01234567"},
        {"adult-income-98765432"},
    ]
    rendered = job_ids(plan_job(job, engine, run_id="monday"))
    assert rendered == {"monday" if engine == "native" else "monday-$(JOBSET_UID)"}


@pytest.mark.parametrize("engine", ENGINES)
@given(document=jobs(needs_trainer=True))
@tries(60)
def test_each_listening_pod_is_one_address_that_its_processes_read(
    engine: str, document: dict[str, Any]
) -> None:
    plan = plan_job(read_job(document), engine)
    for role in plan.roles:
        assert len(role.host_of(role.replicas - 1)) <= 63
        assert all(len(name) <= 15 for name in role.ports)
        assert len(set(role.ports.values())) == len(role.ports)
        if not role.kind.variable:
            continue
        (listed,) = {
            one["value"] for one in plan.roles[0].env if one["name"] == role.kind.variable
        }
        with env.changed(**{role.kind.variable: listed}):
            read: Any = env.VARIABLES[role.kind.variable]()
        assert [split(f"tcp://{address}") for address in read] == [
            (f"{role.host_of(number)}.{role.domain}", role.kind.port)
            for number in range(role.replicas)
        ]


def test_later_variables_come_after_those_of_the_job() -> None:
    found = variables(
        original(env=[{"name": "LOG_LEVEL", "value": "x"}]), "native", "nn-worker"
    )
    assert found["LOG_LEVEL"] == "x"
    assert found["PERSIA_NN_WORKER_ENTRY"] == "/home/train.py"
    assert found["PERSIA_LISTEN_WITHOUT_KEYS"] == "1"
    found = variables(original(keysSecret="s"), "native", "embedding-worker")
    assert "PERSIA_NN_WORKER_ENTRY" not in found
    assert "PERSIA_LISTEN_WITHOUT_KEYS" not in found
    assert found["PERSIA_KEYS"] == "/etc/persia/keys"


def test_every_variable_that_is_set_is_one_that_processes_read(monkeypatch: Monkey) -> None:
    plan = plan_job(read_job(original(env=[])))
    for role in plan.roles:
        for one in role.env:
            assert one["name"] in env.VARIABLES
            monkeypatch.setenv(one["name"], one["value"])
    assert not env.unknown_names()
    assert (env.metrics_port(), env.is_supervised()) == (9400, True)


@pytest.mark.parametrize(("engine", "most"), [("native", 44), ("jobset", 36), ("trainjob", 36)])
def test_a_name_too_long_for_its_pods_is_refused_with_its_limit(engine: str, most: int) -> None:
    document = original()
    document["metadata"]["name"] = "x" * most
    plan_job(read_job(document), engine)
    document["metadata"]["name"] += "x"
    with pytest.raises(
        ConfigError, match=rf"metadata.name: expected at most {most} characters"
    ):
        plan_job(read_job(document), engine)


def test_variables_that_nothing_reads_are_noted_once() -> None:
    extra = [{"name": name, "value": ""} for name in ("PERSIA_SOCKET_IFNAME", "A")]
    document = original()
    document["spec"]["nnWorker"]["env"] = extra
    document["spec"]["dataloader"]["env"] = extra
    notes = plan_job(read_job(document)).notes
    assert [(note.reason, note.message) for note in notes] == [
        ("VariableIgnored", "PERSIA_NATS_URL is ignored: there is no broker any more"),
        ("VariableUnknown", "PERSIA_SOCKET_IFNAME is no variable that PERSIA reads"),
    ]


def test_a_digest_is_of_what_takes_effect_at_a_start() -> None:
    first = spec_hash(read_job(original()).spec)
    same = original(suspend=True, maxRestarts=3, ttlSecondsAfterFinished=5, schedulerName=None)
    assert spec_hash(read_job(same).spec) == first
    assert spec_hash(read_job(original(logLevel="info")).spec) != first


def test_roles_have_keys_for_what_they_do() -> None:
    files = {kind.role: set(kind.keys) for kind in KINDS}
    assert files["data-loader"] == {"data.secret", "server.public"}
    for role in files.keys() - {"data-loader"}:
        assert "data.secret" not in files[role]
        assert {"server.secret", "control.secret", "data.public"} <= files[role]
