"""Writes a model as a folder that Triton's Python backend serves."""

from __future__ import annotations

import json
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from persia.errors import ConfigError

# What the backend loads by default: the class that takes a bundle's folder.
PREDICTOR = "persia.serving:Predictor"

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_DATATYPES = frozenset(
    ("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64")
) | {"FP16", "FP32", "FP64", "BYTES"}


def write_triton(
    repository: Path,
    metadata: Mapping[str, Any],
    *,
    version: int = 1,
    factory: str = PREDICTOR,
    python_path: Sequence[str | Path] = (),
    instances: int = 1,
    bundle: Path | None = None,
) -> Path:
    """Write ``<repository>/<name>/config.pbtxt`` and ``<version>/model.py``.

    A bundle that lies in the version's folder already stays as it is.

    Of an id feature Triton gets every form but texts: ``name``, a table [B, L], with
    ``name.pad``, and ``name.values``, ``name.offsets`` and ``name.weights``.

    Args:
        repository: Triton's ``--model-repository``.
        metadata: ``name``, ``inputs`` and ``outputs``, as the Open Inference Protocol has them.
        version: Of the model, from 1.
        factory: ``module:name`` of what makes a callable of the version's folder.
        python_path: Folders with persia, torch and numpy, if Triton's Python has none.
        instances: Processes that Triton starts for the model.
        bundle: Folder of a version, which is copied to the one that Triton reads.

    Returns:
        The model's folder.

    Raises:
        ConfigError: A name, datatype or number that Triton cannot have, or a folder that
            cannot be written.
    """
    name = str(metadata["name"])
    if not _NAME.fullmatch(name):
        raise ConfigError(f"model name: expected letters, digits and ._-, got {name!r}")
    if version < 1 or instances < 1:
        raise ConfigError(
            f"model {name!r}: expected version and instances of at least 1, "
            f"got {version} and {instances}"
        )
    if not re.fullmatch(r"[\w.]+:\w+", factory):
        raise ConfigError(f"model {name!r}: expected a factory module:name, got {factory!r}")
    config = _format_config(metadata, {"factory": factory}, instances)
    folder = Path(repository) / name
    files = resources.files("persia._serving") / "triton_files"
    model = (files / "model.py.txt").read_text(encoding="utf-8")
    places = f"PYTHON_PATH = {json.dumps([str(place) for place in python_path])}"
    model = model.replace("PYTHON_PATH = []", places, 1)
    target = folder / str(version)
    try:
        if bundle is None:
            target.mkdir(parents=True, exist_ok=True)
            (target / "model.py").write_text(model, encoding="utf-8")
        else:
            _copy_bundle(bundle, target, model)
        (folder / "config.pbtxt").write_text(config, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written: {error.strerror or error}") from error
    return folder


def _copy_bundle(bundle: Path, target: Path, model: str) -> None:
    """Copy a version beside its place, so that Triton finds it whole or not at all."""
    if target.exists():
        raise ConfigError(f"{target}: expected no such folder, so that nothing is replaced")
    aside = target.with_name(f".new-{secrets.token_hex(8)}")
    try:
        shutil.copytree(bundle, aside)
        (aside / "model.py").write_text(model, encoding="utf-8")
        aside.rename(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _format_config(
    metadata: Mapping[str, Any], parameters: Mapping[str, str], instances: int
) -> str:
    # JSON's strings are protobuf's, too. Every input is optional: an id feature comes as
    # `name`, or as `name.values` and `name.offsets`; the model says which it lacks.
    lines = [
        f"name: {json.dumps(metadata['name'])}",
        'backend: "python"',
        "max_batch_size: 0",
        "version_policy { all { } }",
        f"instance_group {{ kind: KIND_CPU count: {instances} }}",
    ]
    inputs = [form for tensor in metadata["inputs"] for form in _forms(tensor)]
    batch = metadata.get("parameters", {}).get("batch_input")
    if batch:
        inputs.append({"name": batch, "datatype": "BYTES", "shape": [1]})
    for kind, tensors in (("input", inputs), ("output", metadata["outputs"])):
        for tensor in tensors:
            optional = " optional: true" if kind == "input" else ""
            lines.append(f"{kind} {{ {_format_tensor(tensor)}{optional} }}")
    for key, value in parameters.items():
        text = f"value {{ string_value: {json.dumps(value)} }}"
        lines.append(f"parameters {{ key: {json.dumps(key)} {text} }}")
    return "\n".join(lines) + "\n"


def _forms(tensor: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the inputs that an input may come as."""
    if tensor.get("parameters", {}).get("kind") != "id":
        return [tensor]
    whole, part = tensor["datatype"], {"shape": [-1]}
    more = {".pad": whole, ".values": whole, ".offsets": "INT64", ".weights": "FP32"}
    return [
        tensor,
        *({**part, "name": tensor["name"] + end, "datatype": one} for end, one in more.items()),
    ]


def _format_tensor(tensor: Mapping[str, Any]) -> str:
    datatype, shape = tensor["datatype"], [*tensor["shape"]]
    if datatype not in _DATATYPES:
        raise ConfigError(
            f"{tensor['name']}: expected a datatype of the Open Inference Protocol, "
            f"got {datatype!r}"
        )
    kind = "STRING" if datatype == "BYTES" else datatype
    return f"name: {json.dumps(tensor['name'])} data_type: TYPE_{kind} dims: {shape}"
