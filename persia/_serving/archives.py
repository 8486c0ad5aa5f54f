"""What a file of a dense net may hold: a program, and no code but calls of torch's operators.

Files of ``torch.export`` and TorchScript name what they call. torch finds it by that name among
all that it has, files and processes included, so that only names which are listed here pass.
"""

from __future__ import annotations

import functools
import io
import json
import re
import zipfile
from typing import Any

import torch

from persia._serving.bundle import MAX_JSON_BYTES, MAX_KEPT_BYTES, NUM_KEPT
from persia.errors import CheckpointError

# Members of a program's file; no other is taken, as one may be code.
_MEMBERS = re.compile(
    r"[^/]+/(archive_format|archive_version|byteorder|version|\.data/version"
    r"|\.data/serialization_id|data/(weights|constants)/(weight_[0-9]+|tensor_[0-9]+)"
    r"|data/(weights|constants)/model_(weights|constants)_config\.json"
    r"|models/model\.json|data/sample_inputs/model\.pt)"
)
# A size of a traced tensor: sums and products of symbols. torch evaluates it, so that nothing
# may be in it that can be called but these.
_EXPRESSION = re.compile(r"[\w\s'+\-*/(),.<>=&|~%]{0,10000}")
_FUNCTIONS = frozenset(
    (
        "Add",
        "Mul",
        "Pow",
        "Mod",
        "PythonMod",
        "FloorDiv",
        "CleanDiv",
        "CeilDiv",
        "Max",
        "Min",
        "Integer",
        "Symbol",
        "Eq",
        "Ne",
        "Lt",
        "Le",
        "Gt",
        "Ge",
        "And",
        "Or",
        "Not",
        "ModularIndexing",
        "Where",
        "ToFloat",
        "TruncToInt",
        "FloorToInt",
        "CeilToInt",
        "IntTrueDiv",
        "FloatTrueDiv",
    )
)

# What a node of a graph may call: operators on tensors, control flow, and sums of sizes.
_TARGET = re.compile(
    r"torch\.ops\.(aten|prims|quantized|quantized_decomposed)\.\w+(\.\w+)?"
    r"|torch\.ops\.persia\.served_lookup\.default"
    r"|torch\.ops\.higher_order\.(cond|while_loop|map_impl|scan|associative_scan"
    r"|wrap_with_set_grad_enabled|wrap_with_autocast)"
    r"|_operator\.(getitem|eq|ne|le|ge|lt|gt|neg|pos|mul|add|sub|floordiv|mod|pow|truediv|and_|or_"
    r"|lshift|rshift)"
    r"|math\.(trunc|ceil|floor)|torch\.sym_\w+"
)
# Operators that read or write files of the names that they are given, and, in TorchScript, what
# finds an attribute by a name that is not there to be seen.
_FILE_OPERATORS = re.compile(r"\b(from_file|save|load_tensor|getattr|hasattr)\b")
_MAX_SCRIPT_BYTES = 64 << 20


def check_archive(data: bytes, place: str) -> None:
    """Refuse a file of ``torch.export`` with pickles of objects, code, or unknown members."""
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
        members = archive.infolist()
        names = [one.filename for one in members]
        if len(set(names)) < len(names):
            raise CheckpointError(f"{place}: a member comes twice")
        # Stored, not packed: what is read is no more than the file's own bytes.
        if sum(one.file_size for one in members) > len(data):
            raise CheckpointError(f"{place}: expected members that are not compressed")
        for one in members:
            if not _MEMBERS.fullmatch(one.filename):
                raise CheckpointError(
                    f"{place}: {one.filename!a}: no program has such a member"
                )
            if one.filename.endswith(".json"):
                content = archive.read(one)
                try:
                    (_check_json if len(content) > MAX_KEPT_BYTES else _check_kept)(content)
                except CheckpointError as exc:
                    raise CheckpointError(f"{place}: {one.filename}: {exc}") from exc
            elif one.filename.endswith(".pt") and one.file_size:
                torch.load(io.BytesIO(archive.read(one)), map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as exc:
        raise CheckpointError(
            f"{place}: expected a file of torch.export: {exc!s:.200}"
        ) from exc


def _check_json(data: bytes) -> None:
    if len(data) > MAX_JSON_BYTES * 16:
        raise CheckpointError(f"expected at most {MAX_JSON_BYTES * 16} bytes")
    todo: list[Any] = [json.loads(data)]
    while todo:
        one = todo.pop()
        if isinstance(one, list):
            todo += one
        elif isinstance(one, dict):
            if one.get("use_pickle"):
                raise CheckpointError("expected plain tensors, got a pickle")
            if one.get("guards_code"):
                raise CheckpointError("expected no code")
            if isinstance(one.get("expr_str"), str):
                _check_expression(one["expr_str"])
            for key in ("target", "as_operator"):
                _check_target(one.get(key))
            todo += one.values()


_check_kept = functools.lru_cache(NUM_KEPT)(_check_json)


def _check_expression(text: str) -> None:
    called = re.findall(r"([A-Za-z_]\w*)\s*\(", text)
    is_plain = _EXPRESSION.fullmatch(text) and "__" not in text
    if not is_plain or re.search(r"[A-Za-z_)]\s*\.", text) or set(called) - _FUNCTIONS:
        raise CheckpointError(f"expected a size, got the expression {text!a:.200}")


def _check_target(name: object) -> None:
    """Refuse to call what is no operator; other targets are names in the program itself."""
    if not isinstance(name, str) or not name.startswith(("torch", "_operator", "math", "#")):
        return
    if not _TARGET.fullmatch(name) or _FILE_OPERATORS.search(name):
        raise CheckpointError(f"expected an operator on tensors, got {name!a:.200}")


def check_script(data: bytes, place: str) -> None:
    """Refuse a file of TorchScript that reads or writes other files."""
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
        members = archive.infolist()
        if len({one.filename for one in members}) < len(members):
            raise CheckpointError(f"{place}: a member comes twice")
        code = [one for one in members if "/code/" in one.filename]
        if sum(one.file_size for one in code) > _MAX_SCRIPT_BYTES or any(
            one.file_size > len(data) for one in members if one not in code
        ):
            raise CheckpointError(f"{place}: a member is larger than a program's")
        for one in code:
            if found := _FILE_OPERATORS.search(archive.read(one).decode("utf-8", "replace")):
                raise CheckpointError(
                    f"{place}: {one.filename!a}: expected operators on tensors, got {found[1]}"
                )
    except CheckpointError:
        raise
    except Exception as exc:
        raise CheckpointError(f"{place}: expected a file of TorchScript: {exc!s:.200}") from exc


def check_native(data: bytes, place: str) -> None:
    """Refuse a package whose members lead out of the folder that it is unpacked to."""
    try:
        names = zipfile.ZipFile(io.BytesIO(data)).namelist()
    except Exception as exc:
        raise CheckpointError(f"{place}: expected a package: {exc!s:.200}") from exc
    for name in names:
        if name.startswith("/") or ".." in name.split("/") or "\\" in name:
            raise CheckpointError(f"{place}: {name!a}: no package has such a member")
