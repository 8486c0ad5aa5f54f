"""Rendering: a job's document in, the objects of an engine out, as YAML."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from persia._k8s import jobset, native, trainjob
from persia._k8s.plan import KEY_FILES, Plan, plan_job
from persia._k8s.pods import keys_secret
from persia._k8s.spec import PersiaJob
from persia.errors import ConfigError

# The oldest version of Kubernetes whose objects are written.
OLDEST = (1, 20)

Writer = Callable[[Plan, tuple[int, int]], list[dict[str, Any]]]
WRITERS: Mapping[str, Writer] = {
    "native": native.objects,
    "jobset": jobset.objects,
    "trainjob": trainjob.objects,
}


def render(
    job: PersiaJob,
    engine: str | None = None,
    *,
    kubernetes: tuple[int, int] = (1, 21),
    keys: Path | None = None,
    images: Mapping[str, str] | None = None,
    run_id: str | None = None,
) -> tuple[Plan, list[dict[str, Any]]]:
    """Return the plan of a job and the objects to apply.

    Args:
        job: The job.
        engine: ``native``, ``jobset`` or ``trainjob``; as the job says if not given.
        kubernetes: Version of the cluster; budgets of disruption had another before 1.21.
        keys: Folder of ``persia-launcher keys``, of which a Secret is made.
        images: By role, those of roles that name none.
        run_id: Name of the run. If not given it is the job's, and for ``native``, where
            nothing in the cluster distinguishes two starts, another one for each call.

    Raises:
        ConfigError: If the job cannot be planned, or a key cannot be read.
    """
    files = {} if keys is None else _read_keys(keys)
    name = f"{job.name}-keys" if files else None
    if run_id is None and (engine or job.spec.engine) == "native":
        run_id = f"{job.name}-{secrets.token_hex(4)}"
    plan = plan_job(job, engine, keys_secret=name, images=images, run_id=run_id)
    found = WRITERS[plan.engine.name](plan, kubernetes)
    if files and plan.keys_secret == name:
        found.insert(0, keys_secret(plan, files))
    return plan, found


def _read_keys(folder: Path) -> dict[str, bytes]:
    try:
        return {name: (folder / name).read_bytes() for name in KEY_FILES}
    except OSError as exc:
        raise ConfigError(
            f"--keys: expected the files of persia-launcher keys in {folder}: {exc}"
        ) from exc


def as_yaml(objects: Iterable[Mapping[str, Any]]) -> str:
    """Return objects as documents of one YAML file."""
    # What two places of an object share is written twice, not as an alias.
    plain = [json.loads(json.dumps(one)) for one in objects]
    text: str = yaml.safe_dump_all(plain, sort_keys=False, width=96)
    return text
