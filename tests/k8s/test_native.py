"""Jobs, Services and what is beside them."""

from __future__ import annotations

from collections import Counter

from persia._k8s.native import BACKOFF_LIMIT, objects
from persia._k8s.plan import Owner, plan_job
from persia._k8s.spec import read_job
from tests.k8s.specs import original


def test_a_job_for_each_pod_and_a_service_for_each_role_that_listens() -> None:
    found = objects(plan_job(read_job(original())))
    assert Counter(one["kind"] for one in found) == {
        "NetworkPolicy": 1,
        "PodDisruptionBudget": 1,
        "Service": 3,
        "Job": 7,
    }
    names = [one["metadata"]["name"] for one in found if one["kind"] == "Job"]
    assert names == [
        *("adult-income-embedding-ps-0", "adult-income-embedding-ps-1"),
        *("adult-income-embedding-worker-0", "adult-income-embedding-worker-1"),
        *("adult-income-nn-worker-0", "adult-income-nn-worker-1", "adult-income-dataloader-0"),
    ]
    for service in (one for one in found if one["kind"] == "Service"):
        pods = [
            one["spec"]["template"]
            for one in found
            if one["kind"] == "Job"
            and one["spec"]["template"]["metadata"]["labels"].items()
            >= service["spec"]["selector"].items()
        ]
        # A pod's name is resolved where its subdomain is the Service's name.
        assert {pod["spec"]["subdomain"] for pod in pods} == {service["metadata"]["name"]}
        assert service["spec"]["publishNotReadyAddresses"]


def test_what_is_started_again() -> None:
    def limits(policy: str) -> dict[str, tuple[str, int]]:
        return {
            one["metadata"]["name"].rpartition("-")[0]: (
                one["spec"]["template"]["spec"]["restartPolicy"],
                one["spec"]["backoffLimit"],
            )
            for one in objects(plan_job(read_job(original(restartPolicy=policy))))
            if one["kind"] == "Job"
        }

    for policy in ("OnFailure", "Always"):
        found = limits(policy)
        assert found.pop("adult-income-nn-worker") == ("Never", 0)
        assert set(found.values()) == {("OnFailure", BACKOFF_LIMIT)}
    assert set(limits("Never").values()) == {("Never", 0)}


def test_a_suspended_job_has_no_jobs() -> None:
    found = objects(plan_job(read_job(original(suspend=True))))
    assert {one["kind"] for one in found} == {"NetworkPolicy", "PodDisruptionBudget", "Service"}


def test_ends_of_time_are_the_operator_s_where_there_is_one() -> None:
    job = read_job(original(ttlSecondsAfterFinished=60, activeDeadlineSeconds=10))
    for owner, want in ((None, {60}), (Owner("u"), {None})):
        found = [one for one in objects(plan_job(job, owner=owner)) if one["kind"] == "Job"]
        assert {one["spec"].get("ttlSecondsAfterFinished") for one in found} == want
        assert {one["spec"]["activeDeadlineSeconds"] for one in found} == {10}
