"""What the API would refuse: schemas of Kubernetes, JobSet and Trainer, and rules in CEL.

Fields that a schema lacks are refused, as kubectl's strict validation does. A rule that
compares with an older object (``oldSelf``) is of updates, and is not evaluated.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from persia import env
from tests.support.processes import ROOT

kubernetes_validate = pytest.importorskip("kubernetes_validate.utils")
jsonschema_rs = pytest.importorskip("jsonschema_rs")
cel = pytest.importorskip("cel")

_FILES = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
# Of `make k8s-schemas`: versions that the package has no more.
_OLD_FILES = ROOT / "build" / "k8s-schemas"
OLD = tuple(
    one
    for one in (f"1.{minor}.0" for minor in range(20, 25))
    if (_OLD_FILES / f"v{one}-local-strict").is_dir()
)
VERSIONS: tuple[str, ...] = tuple(kubernetes_validate.all_versions())
_RESOURCES = {
    "JobSet": "jobset.x-k8s.io_jobsets",
    "TrainJob": "trainer.kubeflow.org_trainjobs",
    "TrainingRuntime": "trainer.kubeflow.org_trainingruntimes",
}


def check(rendered: Mapping[str, Any], versions: tuple[str, ...] = ()) -> None:
    """Fail unless an object is valid: for each of these versions, or by its resource."""
    if rendered["kind"] in _RESOURCES:
        check_custom(rendered, _custom_schema(_RESOURCES[rendered["kind"]]))
        return
    for version in versions or VERSIONS:
        errors = list(
            _validator(version, rendered["apiVersion"], rendered["kind"]).iter_errors(rendered)
        )
        assert not errors, (version, rendered["metadata"]["name"], *map(str, errors))


@functools.cache
def _validator(version: str, api_version: str, kind: str) -> Any:
    group, _, number = api_version.rpartition("/")
    name = "-".join(filter(None, (kind, group.partition(".")[0], number))).lower()
    folder = (_OLD_FILES if version in OLD else _FILES) / f"v{version}-local-strict"
    schema = _read(folder / f"{name}.json") | _read(folder / "_definitions.json")
    # An older draft has other names, and none that its validator would have to fetch.
    for key in ("$id", "$schema"):
        schema.pop(key, None)
    return jsonschema_rs.validator_for(schema)


@functools.cache
def _read(path: Path) -> dict[str, Any]:
    """Return a schema whose references are to definitions within it."""
    text = path.read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(re.sub(r"(/api/)?_definitions\.json#/", "#/", text))
    return found


@functools.cache
def _custom_schema(name: str) -> Any:
    folder = env.data_dir()
    path = folder and folder / "kubernetes" / f"{name}.yaml"
    if path is None or not path.is_file():
        pytest.skip(f"PERSIA_DATA_DIR has no kubernetes/{name}.yaml")
    with path.open(encoding="utf-8") as file:
        crd = yaml.load(file, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def check_custom(document: Mapping[str, Any], schema: Mapping[str, Any]) -> None:
    """Fail unless a document is valid by the schema of its CustomResourceDefinition."""
    errors = list(_strict_validator(_key(schema)).iter_errors(document))
    assert not errors, [str(error) for error in errors]
    broken = list(_broken_rules(document, schema, ""))
    assert not broken


_schemas: dict[int, Mapping[str, Any]] = {}


def _key(schema: Mapping[str, Any]) -> int:
    _schemas[id(schema)] = schema  # kept, so that the number stays its own
    return id(schema)


@functools.cache
def _strict_validator(key: int) -> Any:
    return jsonschema_rs.validator_for(strict(_schemas[key], is_top=True))


def strict(schema: Mapping[str, Any], *, is_top: bool = False) -> dict[str, Any]:
    """Return the JSON schema of a structural one, which refuses unknown fields."""
    found = {
        key: value
        for key, value in schema.items()
        if not key.startswith("x-") and key not in ("nullable", "default", "format")
    }
    if schema.get("x-kubernetes-int-or-string"):
        found.pop("type", None)
    if schema.get("nullable") and "type" in found:
        found["type"] = [found["type"], "null"]
    for key in ("properties", "patternProperties"):
        if key in schema:
            found[key] = {name: strict(below) for name, below in schema[key].items()}
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), Mapping):
            found[key] = strict(schema[key])
    is_open = schema.get("x-kubernetes-preserve-unknown-fields")
    if "properties" in schema and not is_open and "additionalProperties" not in schema:
        found["additionalProperties"] = False
    if is_top:  # every resource has these
        found["properties"] |= {
            "apiVersion": {"type": "string"},
            "metadata": {"type": "object"},
        }
    return found


def _broken_rules(value: Any, schema: Mapping[str, Any], where: str) -> Iterator[str]:
    for rule in schema.get("x-kubernetes-validations", ()):
        text = rule["rule"]
        if "oldSelf" not in text and not cel.evaluate(text, {"self": value}):
            yield f"{where}: {text}"
    if isinstance(value, Mapping):
        for key, below in value.items():
            inner = schema.get("properties", {}).get(key) or schema.get("additionalProperties")
            if isinstance(inner, Mapping):
                yield from _broken_rules(below, inner, f"{where}.{key}")
    elif isinstance(value, list) and isinstance(schema.get("items"), Mapping):
        for number, below in enumerate(value):
            yield from _broken_rules(below, schema["items"], f"{where}[{number}]")
