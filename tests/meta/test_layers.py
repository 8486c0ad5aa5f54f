"""The import direction of docs/decisions/0002: a module imports from its own row or below."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.meta.sources import (
    ROOT,
    Import,
    cython_files,
    imports_of,
    module_name,
    module_names,
    python_files,
)

ROWS = [
    {"errors", "env", "_ends", "_older", "_replica", "logger", "utils", "version"},
    {"config", "_core", "_files", "_metrics"},
    {"_rpc"},
    {"_services"},
    {"_training"},
    {
        *("embedding", "service", "distributed", "metrics", "data", "ctx", "prelude"),
        *("_contexts", "readers"),
    },
    {"_launch", "helper", "launcher", "compat", "backend", "error", "sparse", "wrapper"},
]
ROW = {room: number for number, rooms in enumerate(ROWS) for room in rooms}
ROW_OF_RPC = ROW["_rpc"]
# Inside the row of public names the order is this; prelude only passes their names on.
PUBLIC_ORDER = {
    "embedding": 0,
    "service": 0,
    "distributed": 0,
    "metrics": 0,
    "_contexts": 1,
    "ctx": 2,
    "data": 3,
    "readers": 3,
    "prelude": 4,
}
# Rooms in which torch may be imported when a module is loaded. Elsewhere only inside functions.
TORCH_ROOMS = {"_training", "_contexts", "ctx", "data", "distributed", "metrics"}
# What the compiled core may use beside the standard library.
CORE_IMPORTS = {"numpy", "cython", "libc", "cpython"}


def room(module: str) -> str:
    """``persia._core.store.store`` -> ``_core``; the top-level package itself is the empty room."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def all_imports() -> Iterator[Import]:
    for path in [*python_files(), *cython_files()]:
        yield from imports_of(path)


def internal_imports() -> Iterator[Import]:
    names = module_names()
    for found in all_imports():
        if found.module.split(".")[0] != "persia":
            continue
        # ``from persia.data import DataLoader`` was read as persia.data.DataLoader.
        target = found.module
        while target not in names:
            target = target.rpartition(".")[0]
        yield Import(found.importer, found.path, found.line, target, found.at_load)


def test_every_module_has_a_row() -> None:
    unknown = {name for name in module_names() if room(name) and room(name) not in ROW}
    assert not unknown, "give these a row in docs/decisions/0002 and here"


def test_imports_point_down() -> None:
    wrong = []
    for found in internal_imports():
        here, there = room(found.importer), room(found.module)
        if here == there or not here or not there:
            continue
        upwards = ROW[there] > ROW[here]
        siblings = ROW[there] == ROW[here] and PUBLIC_ORDER.get(there, 0) > PUBLIC_ORDER.get(
            here, 0
        )
        past_rpc = here == "embedding" and ROW[there] > ROW_OF_RPC
        if upwards or siblings or past_rpc:
            wrong.append(str(found))
    assert not wrong


def test_the_package_itself_loads_only_its_version() -> None:
    wrong = [
        str(found)
        for found in internal_imports()
        if found.importer == "persia" and found.at_load and found.module != "persia.version"
    ]
    assert not wrong


def test_services_and_training_meet_only_in_messages() -> None:
    pair = {"_services", "_training"}
    wrong = [
        str(found)
        for found in internal_imports()
        if {room(found.importer), room(found.module)} == pair
    ]
    assert not wrong


def test_core_imports_only_numpy_and_errors() -> None:
    allowed = CORE_IMPORTS | set(sys.stdlib_module_names)
    wrong = []
    for found in all_imports():
        if room(found.importer) != "_core":
            continue
        ours = found.module.startswith(("persia._core", "persia.errors"))
        if not ours and found.module.split(".")[0] not in allowed:
            wrong.append(str(found))
    assert not wrong


@pytest.mark.parametrize("library", ["zmq", "msgpack", "click", "cloudpickle"])
def test_libraries_stay_in_their_rooms(library: str) -> None:
    rooms = {
        "zmq": {"_rpc"},
        "msgpack": {"_rpc"},
        "click": {"launcher", "_launch"},
        "cloudpickle": {"_launch", "helper"},
    }[library]
    wrong = [
        str(found)
        for found in all_imports()
        if found.module.split(".")[0] == library and room(found.importer) not in rooms
    ]
    assert not wrong


def test_torch_is_imported_above_the_line_or_inside_functions() -> None:
    wrong = [
        str(found)
        for found in all_imports()
        if found.module.split(".")[0] == "torch"
        and found.at_load
        and room(found.importer) not in TORCH_ROOMS
    ]
    assert not wrong


# Loads each module named on the command line in a process in which torch does not exist.
WITHOUT_TORCH = """
import importlib, sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError(f"{name} is imported while {loading} is loaded")

sys.meta_path.insert(0, NoTorch())
for loading in sys.argv[1:]:
    importlib.import_module(loading)
"""


def test_servers_and_loaders_start_without_torch() -> None:
    free = {
        "",
        "errors",
        "env",
        "_older",
        "logger",
        "utils",
        "version",
        "config",
        "_core",
        "_files",
        "_rpc",
    }
    free |= {"_services", "embedding", "service", "_launch", "launcher", "helper"}
    free |= {"backend", "error", "sparse", "wrapper", "readers"}
    modules = [
        module_name(path)
        for path in [*python_files(), *(p for p in cython_files() if p.suffix == ".pyx")]
        if room(module_name(path)) in free
    ]
    assert "persia._services" in modules
    # A data-loader of a test is to start as fast as a user's.
    modules += ["tests.faults.batches", "tests.distributed.batches"]
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *modules],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr


# --- the readers above are tests too: what they cannot see, they cannot forbid ------------


def test_the_reader_sees_every_kind_of_import() -> None:
    from tests.meta.sources import _cython_imports, _python_imports

    path = ROOT / "persia" / "data.py"
    text = (
        "import torch.nn as nn, zmq\n"
        "from . import ctx\n"
        "from ._rpc.messages import Bag\n"
        "if TYPE_CHECKING:\n"
        "    import msgpack\n"
        "def f():\n"
        "    from persia.launcher import cli\n"
    )
    got = [(i.line, i.module, i.at_load) for i in _python_imports(path, "persia.data", text)]
    assert got == [
        (1, "torch.nn", True),
        (1, "zmq", True),
        (2, "persia.ctx", True),
        (3, "persia._rpc.messages.Bag", True),
        (5, "msgpack", False),
        (7, "persia.launcher.cli", False),
    ]
    text = "from persia._core.base.types cimport sign_t\ncimport numpy as cnp\nimport numpy\n"
    read = _cython_imports(
        ROOT / "persia/_core/store/store.pyx", "persia._core.store.store", text
    )
    assert [i.module for i in read] == ["persia._core.base.types", "numpy", "numpy"]
