"""The layers of docs/design.md: a module imports from its own row or below.

Imports inside functions and under ``TYPE_CHECKING`` count as all others do.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from tests.meta.sources import (
    ROOT,
    Import,
    _cython_imports,
    _python_imports,
    cython_files,
    imports_of,
    module_name,
    module_names,
    python_files,
)
from tests.support.processes import run

# From the bottom up.
ROWS = (
    {"errors", "logger", "version", "_deprecated", "_replica_index"},
    {"_core"},
    {"_metrics", "env", "utils", "_process_exit", "_build"},
    {"_rpc", "config"},
    {"_files", "_foreign", "embedding", "_context_stack"},
    {"_rows"},
    {"_server", "_worker", "_training"},
    {"_loader", "_cluster", "_report", "_serving", "distributed", "metrics", "service"},
    {"data", "readers", "sampling", "serving", "tables", "ctx", "prelude", "cpp_extension"},
    {"_modules"},
    {"ops"},
    {"nn", "optim"},
    {"launcher", "helper", "_cli", "_k8s", "compat"}
    | {"backend", "error", "k8s_utils", "sparse", "wrapper"},
)
ROW = {room: number for number, rooms in enumerate(ROWS) for room in rooms}
# Rooms of one row that do not import each other: roles meet in the messages.
ROLES = {"_server", "_worker", "_training"}
# The only modules that name a role's class: to make a process of it, and to read its counts.
COMPOSERS = {f"persia._cluster.{name}" for name in ("embedded", "process_metrics", "process")}
# A served model looks its ids up in its own process.
COMPOSERS.add("persia._serving.lookup")
# Folders of the core, from the bottom up.
CORE_FOLDERS = ("base", "ids", "kernels", "shard", "store", "table")
# Rooms in which torch may be imported when a module is loaded. Elsewhere only inside functions.
TORCH_ROOMS = {"_training", "_report", "_serving", "ctx", "data", "distributed", "metrics"} | {
    *("serving", "_modules", "ops", "nn", "optim")
}
# What the compiled core may use beside the standard library.
CORE_IMPORTS = {"numpy", "cython", "libc", "cpython"}


def room(module: str) -> str:
    """Of ``persia._core.base.cpu`` it is ``_core``; of the package itself the empty string."""
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


def test_imports_point_down_and_only_composers_name_a_role() -> None:
    unknown = {name for name in module_names() if room(name) and room(name) not in ROW}
    assert not unknown, "give these a row in docs/design.md and here"
    services = {"persia._server.service", "persia._worker.service"}
    wrong = []
    for found in internal_imports():
        here, there = room(found.importer), room(found.module)
        if here == there:
            continue
        is_upward = bool(here and there) and ROW[there] > ROW[here]
        is_a_role = found.module in services and found.importer not in COMPOSERS
        if is_upward or is_a_role or {here, there} <= ROLES:
            wrong.append(str(found))
    assert not wrong


def test_folders_of_the_core_import_leftwards() -> None:
    wrong = []
    for found in internal_imports():
        here, there = found.importer.split("."), found.module.split(".")
        if len(here) < 4 or len(there) < 4 or {here[1], there[1]} != {"_core"}:
            continue
        if CORE_FOLDERS.index(there[2]) > CORE_FOLDERS.index(here[2]):
            wrong.append(str(found))
    assert not wrong


def test_no_circle_of_imports() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b -> c -> b"]
    assert not circles({"a": {"b", "c"}, "b": {"c"}})
    graph: dict[str, set[str]] = {}
    for found in internal_imports():
        if found.module != found.importer:
            graph.setdefault(found.importer, set()).add(found.module)
    assert not circles(graph)


def circles(graph: dict[str, set[str]]) -> list[str]:
    """Return one circle for each module that a depth-first search finds on its own path."""
    done: set[str] = set()
    found: list[str] = []

    def visit(name: str, path: list[str]) -> None:
        if name in path:
            found.append(" -> ".join([*path[path.index(name) :], name]))
        elif name not in done:
            for target in sorted(graph.get(name, ())):
                # A package's own imports of its modules make no circle with theirs of it:
                # Python has loaded the package's name by then.
                if not name.startswith(f"{target}."):
                    visit(target, [*path, name])
            done.add(name)

    for name in sorted(graph):
        visit(name, [])
    return found


ROOMS_OF = {
    "zmq": {"_rpc"},
    "msgpack": {"_rpc"},
    "pydantic": {"config", "_files"},
    "jinja2": {"_report"},
    "click": {"launcher", "_cli", "k8s_utils"},
    "cloudpickle": {"_cli", "_serving", "helper"},
    "starlette": {"_serving", "_k8s"},
    "uvicorn": {"_serving", "_k8s"},
    "kopf": {"_k8s"},
    "aiohttp": {"_k8s"},
    "grpc": {"_serving"},
    "google": {"_serving"},
    "orjson": {"_serving"},
    "filelock": {"_build"},
    "setuptools": {"_build"},
}


def test_libraries_stay_in_their_rooms_and_the_core_has_numpy_and_errors_alone() -> None:
    # Torch is imported above the line, or inside functions.
    of_core = CORE_IMPORTS | set(sys.stdlib_module_names)
    wrong = []
    for found in all_imports():
        library, here = found.module.split(".")[0], room(found.importer)
        rooms = ROOMS_OF.get(library, {here})
        if library == "torch" and found.at_load:
            rooms = TORCH_ROOMS
        is_ours = found.module.startswith(("persia._core", "persia.errors"))
        if here == "_core" and not is_ours and library not in of_core:
            rooms = set()
        if here not in rooms:
            wrong.append(str(found))
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
    above = TORCH_ROOMS | {"prelude", "compat"}
    modules = [
        module_name(path)
        for path in [*python_files(), *(p for p in cython_files() if p.suffix == ".pyx")]
        if room(module_name(path)) not in above
    ]
    assert "persia._worker.service" in modules
    # ``from persia.ctx import DataCtx`` is a data-loader's, and its tests' start as fast.
    modules += ["persia.ctx", "persia.data"]
    modules += ["tests.faults.batches", "tests.distributed.batches"]
    ran = run("-c", WITHOUT_TORCH, *modules)
    assert ran.returncode == 0, ran.stderr


# --- the readers above are tests too: what they cannot see, they cannot forbid ------------


def test_the_reader_sees_every_kind_of_import() -> None:
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
    module = "persia._core.store.store"
    read = _cython_imports(ROOT / "persia/_core/store/store.pyx", module, text)
    assert [i.module for i in read] == ["persia._core.base.types", "numpy", "numpy"]
