"""The CustomResourceDefinition of PersiaJobs, made of the classes of ``spec``.

Values that Kubernetes defines keep all of their fields, and are checked when pods are made of
them; their whole schema would be thousands of lines.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from persia._k8s.spec import GROUP, KIND, PLURAL, VERSION, JobSpec
from persia.config.document import Expect

_ANY_OBJECT = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_SCALARS: Mapping[Any, dict[str, Any]] = {
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer", "format": "int32"},
}
REPLICA_COUNTS = ("desired", "running", "ready", "succeeded", "failed", "restarts")
# What the operator writes.
_COUNT = {"type": "integer", "format": "int32"}
_TIME = {"type": "string", "format": "date-time"}
_STATUS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "phase": {"type": "string", "description": "Where the job is, in one word."},
        "message": {"type": "string", "description": "What it waits for, or failed of."},
        "observedGeneration": {"type": "integer", "format": "int64"},
        "restarts": {**_COUNT, "description": "How often the whole job was started again."},
        "suspensions": {**_COUNT, "description": "How often the job was suspended."},
        "startTime": _TIME,
        "completionTime": _TIME,
        "replicaStatuses": {
            "type": "object",
            "additionalProperties": {
                "type": "object",
                "properties": dict.fromkeys(REPLICA_COUNTS, _COUNT),
            },
        },
        "conditions": {
            "type": "array",
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["type"],
            "items": {
                "type": "object",
                "required": ["type", "status"],
                "properties": {
                    "type": {"type": "string"},
                    "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
                    "reason": {"type": "string"},
                    "message": {"type": "string"},
                    "lastTransitionTime": _TIME,
                },
            },
        },
    },
}
_COLUMNS = (
    ("Phase", "string", ".status.phase"),
    ("Restarts", "integer", ".status.restarts"),
    ("Message", "string", ".status.message"),
    ("Age", "date", ".metadata.creationTimestamp"),
)


def crd() -> dict[str, Any]:
    """Return the CustomResourceDefinition."""
    schema = {
        "type": "object",
        "description": "A training job of PERSIA.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": _of_class(JobSpec),
            "status": _STATUS,
        },
    }
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path} for name, kind, path in _COLUMNS
        ],
        "schema": {"openAPIV3Schema": schema},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["pj"],
            },
            "versions": [version],
        },
    }


def _of_class(cls: Any) -> dict[str, Any]:
    hints = get_type_hints(cls, include_extras=True)
    fields = dataclasses.fields(cls)
    required = [
        one.name
        for one in fields
        if one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
    ]
    properties = {
        one.name: {**_of_hint(hints[one.name]), "description": one.metadata["doc"]}
        for one in fields
    }
    for name in properties.keys() - set(required):
        properties[name]["nullable"] = True  # as in the original's: a key without a value
    found: dict[str, Any] = {"type": "object", "properties": properties}
    return {**found, "required": required} if required else found


def _of_hint(hint: Any) -> dict[str, Any]:
    """Return the schema of a field's type; None in a union is a key that is not given."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is typing.Annotated:
        found = _of_hint(arguments[0])
        for extra in arguments[1:]:
            if isinstance(extra, Expect):
                found |= {
                    {"ge": "minimum", "le": "maximum", "pattern": "pattern"}[key]: value
                    for key, value in extra.constraints.items()
                }
        return found
    if origin in (Union, types.UnionType):
        (hint,) = (one for one in arguments if one is not type(None))
        return _of_hint(hint)
    if origin is Literal:
        # No enum: kubectl refuses the null that a key without a value needs there.
        return {"type": "string", "pattern": f"^({'|'.join(arguments)})$"}
    if origin is tuple:
        return {"type": "array", "items": _of_hint(arguments[0])}
    if origin is dict:
        value = arguments[1]
        if value is Any:
            return dict(_ANY_OBJECT)
        return {"type": "object", "additionalProperties": _of_hint(value)}
    if dataclasses.is_dataclass(hint):
        return _of_class(hint)
    return dict(_SCALARS[hint])
