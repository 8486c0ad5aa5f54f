"""What a pod is allowed, what it mounts, and when it counts as ready."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from persia._k8s.plan import Owner, plan_job
from persia._k8s.pods import disruption_budget, metadata, network_policy, pod_template
from persia._k8s.spec import read_job
from persia.config import ParameterServerConfig
from tests.k8s.specs import jobs, original
from tests.support.profiles import tries


def template(document: dict[str, Any], role: str, number: int | None = 1) -> Any:
    plan = plan_job(read_job(document))
    (found,) = (one for one in plan.roles if one.kind.role == role)
    return pod_template(plan, found, number)


def container(document: dict[str, Any], role: str, number: int | None = 1) -> Any:
    return template(document, role, number)["spec"]["containers"][0]


def test_a_pod_of_a_server() -> None:
    pod = template(original(restartPolicy=None), "embedding-parameter-server")["spec"]
    assert (pod["hostname"], pod["subdomain"]) == (
        "adult-income-embedding-ps-1",
        "adult-income-embedding-ps",
    )
    assert pod["restartPolicy"] == "OnFailure"
    (one,) = pod["containers"]
    assert (one["name"], one["command"]) == ("emb-server", ["persia-launcher"])
    assert one["args"] == ["embedding-parameter-server"]
    values = {given["name"]: given.get("value") for given in one["env"]}
    assert (values["REPLICA_INDEX"], values["REPLICA_SIZE"]) == ("1", "2")
    assert {mount["mountPath"] for mount in one["volumeMounts"]} == {
        "/data",
        "/tmp",
        "/dev/shm",
    }
    assert one["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": 9400}


@pytest.mark.parametrize("number", [1, None])
def test_rows_outlive_the_container_of_a_server(number: int | None) -> None:
    document = original(restartPolicy="OnFailure")
    document["spec"]["embeddingParameterServer"]["shmSize"] = "20Gi"
    pod = template(document, "embedding-parameter-server", number)["spec"]
    (one,) = pod["containers"]
    # Started again in its pod, by the same name of the run and at the same address, a server
    # looks for its rows where the pod's memory is.
    assert pod["restartPolicy"] == "OnFailure"
    settings = ParameterServerConfig()
    assert settings.keep_state
    (mount,) = (m for m in one["volumeMounts"] if m["mountPath"] == settings.state_dir)
    (volume,) = (v for v in pod["volumes"] if v["name"] == mount["name"])
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "20Gi"}
    assert "readOnly" not in mount
    values = {given["name"]: given.get("value") for given in one["env"]}
    assert values["PERSIA_RUN_ID"] == "adult-income"
    assert values["PERSIA_SUPERVISED"] == "1"
    assert "PERSIA_STATE_DIRECTORY" not in values


def test_trainers_that_go_on_from_checkpoints_are_started_again() -> None:
    resumes = {"name": "PERSIA_RESUME_FROM", "value": "s3://bucket/run"}
    for policy, restarted in (("OnFailure", "OnFailure"), ("Never", "Never")):
        document = original(restartPolicy=policy, env=[resumes])
        document["spec"]["nnWorker"]["terminationGracePeriodSeconds"] = 90
        pod = template(document, "nn-worker")["spec"]
        assert pod["restartPolicy"] == restarted
        values = {one["name"]: one.get("value") for one in pod["containers"][0]["env"]}
        assert float(values["PERSIA_GRACE_PERIOD"]) < pod["terminationGracePeriodSeconds"]
        # The data-loader begins its script again by it.
        loader = container(document, "data-loader")["env"]
        assert resumes in loader
    own = original(restartPolicy="OnFailure")
    own["spec"]["nnWorker"]["env"] = [resumes]
    assert template(own, "nn-worker")["spec"]["restartPolicy"] == "OnFailure"


def test_pods_of_trainers_know_where_they_meet_and_are_not_restarted() -> None:
    pod = template(original(restartPolicy="Always"), "nn-worker")["spec"]
    assert pod["restartPolicy"] == "Never"
    (one,) = pod["containers"]
    assert one["args"] == [
        *("nn-worker", "--nproc-per-node", "2", "--nnodes", "2", "--node-rank", "1"),
    ]
    values = {given["name"]: given.get("value") for given in one["env"]}
    assert values["MASTER_ADDR"] == "adult-income-nn-worker-0.adult-income-nn-worker"
    assert "REPLICA_INDEX" not in values
    # The script may take its time before there is anything to ask.
    assert not {"startupProbe", "livenessProbe"} & one.keys()
    assert [port["containerPort"] for port in one["ports"]] == [23457, 9400, 23458, 9401]
    args = container(original(), "nn-worker", None)["args"]
    assert args[-2:] == ["--node-rank", "$(JOB_COMPLETION_INDEX)"]


def test_a_quantity_is_a_text_as_the_api_keeps_it() -> None:
    resources = container(original(), "nn-worker")["resources"]
    assert resources == {"limits": {"nvidia.com/gpu": "2"}}


def test_a_command_of_the_user_stands_alone() -> None:
    document = original()
    document["spec"]["dataloader"] |= {"command": ["sh", "-c"], "args": ["sleep 1"]}
    document["spec"]["nnWorker"]["args"] = ["--lr", "3"]
    one = container(document, "data-loader")
    assert (one["command"], one["args"]) == (["sh", "-c"], ["sleep 1"])
    assert container(document, "nn-worker")["args"][-2:] == ["--lr", "3"]


def test_the_last_of_a_variable_counts_at_its_place() -> None:
    document = original(env=[{"name": "A", "value": "1"}, {"name": "B", "value": "$(A)"}])
    document["spec"]["dataloader"]["env"] = [{"name": "A", "value": "$(B)2"}]
    env = [(one["name"], one["value"]) for one in container(document, "data-loader")["env"]]
    assert env[-1] == ("A", "$(B)2")
    assert env.index(("B", "$(A)")) < len(env) - 1
    assert len(dict(env)) == len(env)


@given(jobs())
@tries(60)
def test_every_pod_is_restricted_and_has_what_it_mounts(document: dict[str, Any]) -> None:
    """Pod Security "restricted", as far as it is not the user who asks for less."""
    plan = plan_job(read_job(document), keys_secret="keys")
    for role in plan.roles:
        pod = pod_template(plan, role)["spec"]
        (one,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert one["securityContext"]["allowPrivilegeEscalation"] is False
        assert one["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        places = [mount["mountPath"].rstrip("/") for mount in one["volumeMounts"]]
        assert len(set(places)) == len(places)
        assert {"/tmp", "/etc/persia/keys"} <= set(places)
        volumes = [volume["name"] for volume in pod["volumes"]]
        assert len(set(volumes)) == len(volumes)
        assert {mount["name"] for mount in one["volumeMounts"]} <= set(volumes)
        names = [given["name"] for given in one["env"]]
        assert len(set(names)) == len(names)


def test_metrics_are_for_all_only_where_they_are_enabled() -> None:
    plan = plan_job(read_job(original(enableMetrics=True)))
    among, metrics = network_policy(plan)["spec"]["ingress"]
    assert among == {"from": [{"podSelector": {"matchLabels": {"persia_job": "adult-income"}}}]}
    assert [port["port"] for port in metrics["ports"]] == [9400, 9401]
    annotations = template(original(enableMetrics=True), "nn-worker")["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == "9400"
    assert len(network_policy(plan_job(read_job(original())))["spec"]["ingress"]) == 1
    assert "annotations" not in template(original(), "nn-worker")["metadata"]


@pytest.mark.parametrize(
    ("version", "group"), [((1, 20), "policy/v1beta1"), ((1, 21), "policy/v1")]
)
def test_a_budget_keeps_servers_and_trainers(version: tuple[int, int], group: str) -> None:
    budget = disruption_budget(plan_job(read_job(original())), version)
    assert budget is not None
    assert budget["apiVersion"] == group
    assert budget["spec"]["minAvailable"] == 4
    loaders = original(embeddingParameterServer=None, nnWorker=None)
    assert disruption_budget(plan_job(read_job(loaders)), version) is None


def test_children_of_a_job_in_a_cluster_name_their_owner_and_start() -> None:
    job = read_job(original())
    assert metadata(plan_job(job), "x", is_run=True) == {
        "name": "x",
        "namespace": "default",
        "labels": {"persia_job": "adult-income"},
    }
    plan = plan_job(job, owner=Owner("uid-1", attempt=2))
    found = metadata(plan, "x", {"persia_job": "other"}, is_run=True)
    assert found["labels"] == {"persia_job": "adult-income", "persia_attempt": "2"}
    assert found["annotations"] == {"persia.com/spec": plan.spec_hash}
    (owner,) = found["ownerReferences"]
    assert (owner["uid"], owner["controller"]) == ("uid-1", True)
    # Without it, no rights to finalizers of PersiaJobs are needed.
    assert "blockOwnerDeletion" not in owner
