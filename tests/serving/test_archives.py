"""Files of programs that call what is no operator on tensors, or lead out of their folder."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from persia._serving.archives import check_archive, check_native, check_script
from persia._serving.program import load_program, processor_name, trace
from persia.errors import CheckpointError
from tests.serving.test_program import LAYOUT, SAMPLES, Linear


@pytest.fixture(scope="module")
def data() -> bytes:
    return trace(Linear(), LAYOUT, SAMPLES, "export").data


def edited(data: bytes, edit: Callable[[dict[str, Any]], object]) -> bytes:
    """Return a program whose first node is another one."""
    source, target = zipfile.ZipFile(io.BytesIO(data)), io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for one in source.infolist():
            content = source.read(one)
            if one.filename.endswith("models/model.json"):
                graph = json.loads(content)
                edit(graph["graph_module"]["graph"]["nodes"][0])
                content = json.dumps(graph).encode()
            archive.writestr(one.filename, content)
    return target.getvalue()


def test_a_graph_calls_operators_on_tensors_only(data: bytes, tmp_path: Path) -> None:
    check_archive(data, "here")
    made = tmp_path / "made"
    inputs = [
        {"name": "filename", "arg": {"as_string": str(made)}, "kind": 1},
        {"name": "shared", "arg": {"as_bool": True}, "kind": 2},
        {"name": "size", "arg": {"as_int": 8}, "kind": 2},
    ]
    for target in (
        *("torch.ops.aten.from_file.default", "torch.ops.aten.save.default", "torch.os.mkdir"),
        *("torch.ops.aten.from_file.default\n", "torch.ops.other.op.default", "_operator.call"),
        *("torch.load", "math.__loader__", "#other", "torch.ops.higher_order.call_torchbind"),
    ):
        changed = edited(data, lambda node: node.update(target=target, inputs=inputs))  # noqa: B023
        with pytest.raises(CheckpointError, match="expected an operator"):
            load_program(changed, "export")
    argument = {"name": "f", "arg": {"as_operator": "torch.os.system"}, "kind": 1}
    with pytest.raises(CheckpointError, match=r"torch\.os\.system"):
        load_program(edited(data, lambda node: node["inputs"].append(argument)), "export")
    assert not made.exists()


def scripted(function: Any) -> bytes:
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(function), file)
    return file.getvalue()


def reads(x: torch.Tensor) -> torch.Tensor:
    return x + torch.from_file("/etc/hostname", False, 1)


def adds(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_torchscript_opens_no_files() -> None:
    good = scripted(adds)
    check_script(good, "here")
    with pytest.raises(CheckpointError, match="got from_file"):
        load_program(scripted(reads), "torchscript")
    for bad in (b"", b"PK", good[:-30]):
        with pytest.raises(CheckpointError):
            check_script(bad, "here")
    grown = io.BytesIO(good)
    with zipfile.ZipFile(grown, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/code/y.py", b" " * (65 << 20))
    with pytest.raises(CheckpointError, match="larger"):
        check_script(grown.getvalue(), "here")


def test_machine_code_is_allowed_by_name_only() -> None:
    assert processor_name().count(" ") == 1
    with pytest.raises(CheckpointError, match="--allow-native"):
        load_program(b"", "aot")
    with pytest.raises(CheckpointError, match="expected a package"):
        load_program(b"", "aot", allow_native=True)
    for name in ("../x", "/x", "a/../../x", "a\\x"):
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr(name, b"")
        with pytest.raises(CheckpointError, match="no package"):
            check_native(file.getvalue(), "here")
    empty = io.BytesIO()
    zipfile.ZipFile(empty, "w").close()
    with pytest.raises(CheckpointError, match=r"compiled for mips, this is \w+"):
        load_program(empty.getvalue(), "aot", allow_native=True, processor="mips")
