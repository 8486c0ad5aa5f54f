"""Importing compiled modules by their file, and finding those that a wheel has brought."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import json
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

from persia._build import toolchain
from persia._build.builders import Builder, build_module
from persia.errors import ConfigError, ExtensionError

_loaded: dict[str, tuple[Path, ModuleType]] = {}
_lock = threading.Lock()


def load_module(name: str, path: Path) -> ModuleType:
    """Return the module that a file holds, imported once in a process.

    It is found by ``import name`` afterwards, unless that name is another module's.

    Raises:
        ExtensionError: If the file cannot be imported, or another build of the module has
            been: two would both register their types.
    """
    path = path.absolute()
    with _lock:
        if name in _loaded:
            before, module = _loaded[name]
            if before != path:
                raise ExtensionError(
                    f"{name}: this process has loaded {before}, and {path}, of other sources "
                    "or flags, cannot be loaded beside it: start the process again"
                )
            return module
        loader = importlib.machinery.ExtensionFileLoader(name, str(path))
        spec = importlib.util.spec_from_file_location(name, path, loader=loader)
        if spec is None:
            raise ExtensionError(f"{name}: {path} is no file that Python imports")
        other = sys.modules.get(name)
        try:
            module = importlib.util.module_from_spec(spec)
            loader.exec_module(module)
        except ImportError as exc:
            raise ExtensionError(f"{name}: {path} cannot be imported: {exc}") from exc
        # Python itself sets the name, if the module is initialized in one phase.
        sys.modules[name] = module if other is None else other
        _loaded[name] = (path, module)
        return module


@dataclass(frozen=True, slots=True)
class PrebuiltRecord:
    """What a module in a wheel was built with, beside it as JSON: a file name has no room.

    ``torch`` is a version, or empty if the module does not use torch.
    """

    module: str
    abi: str
    torch: str = ""

    @classmethod
    def of_this_process(cls, module: str, needs_torch: bool) -> PrebuiltRecord:
        """Return the record of a module that is built here and now."""
        version = ""
        if needs_torch:
            import torch

            version = str(torch.__version__)
        return cls(module, toolchain.python_abi(), version)

    def write(self, module_path: Path) -> None:
        """Write it beside a module's file."""
        text = json.dumps(asdict(self), indent=1) + "\n"
        _record_of(module_path).write_text(text, encoding="utf-8")


def _record_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def find_prebuilt(place: Path, name: str) -> tuple[Path | None, str]:
    """Return the file that fits this interpreter and torch, or None, and why none does.

    Args:
        place: The folder of the file, or the file.
        name: The module's name.
    """
    expected = toolchain.module_file(name)
    if place.is_dir():
        candidates = sorted(
            (path for path in place.glob(f"{name}.*") if path.suffix == ".so"),
            key=lambda path: (path.name != expected, path.name),
        )
    else:
        candidates = [place] if place.is_file() else []
    reasons = []
    for path in candidates:
        reason = _why_unfit(path, name)
        if not reason:
            return path, ""
        reasons.append(f"{path.name} {reason}")
    version = sys.version_info
    return None, (
        f"expected {expected} (tag cp{version[0]}{version[1]}, ABI {toolchain.python_abi()}) "
        f"in {place if not place.is_file() else place.parent}, found "
        f"{'; '.join(reasons) or 'none'}"
    )


def _why_unfit(path: Path, name: str) -> str:
    tag = path.name.removeprefix(name)
    if tag not in importlib.machinery.EXTENSION_SUFFIXES:
        return f"of another interpreter (ABI {tag.strip('.').removesuffix('.so')})"
    try:
        record = PrebuiltRecord(**json.loads(_record_of(path).read_bytes()))
    except FileNotFoundError:  # by another tool: what the name says is all that is known
        return ""
    except (OSError, ValueError, TypeError) as exc:
        return f"with a record that cannot be read ({exc})"
    if record.module != name:
        return f"of another module ({record.module})"
    if record.abi != toolchain.python_abi() and tag != ".abi3.so":
        return f"of another interpreter (ABI {record.abi})"
    return _why_other_torch(record.torch)


def _why_other_torch(built: str) -> str:
    """Torch keeps its C++ interface within a minor version, for one set of libraries."""
    if not built:
        return ""
    try:
        import torch
    except ImportError:
        return f"for torch {built}, which is not installed"

    def interface(version: str) -> tuple[list[str], str]:
        release, _, local = version.partition("+")
        # +cpu and no suffix are both torch without CUDA's code in what an extension links to.
        return re.findall(r"\d+", release)[:2], local if local.startswith(
            ("cu", "rocm")
        ) else ""

    here = str(torch.__version__)
    return "" if interface(here) == interface(built) else f"for torch {built}, here is {here}"


@dataclass(frozen=True, slots=True)
class BuiltForWheel:
    """A module that was built while a wheel is made, and the folder where it belongs."""

    place: Path
    path: Path
    record: PrebuiltRecord


_for_wheel: list[BuiltForWheel] | None = None


@contextlib.contextmanager
def collected_for_wheel() -> Iterator[list[BuiltForWheel]]:
    """Have modules built, portably, whatever is prebuilt; yields what was."""
    global _for_wheel
    _for_wheel = []
    try:
        yield _for_wheel
    finally:
        _for_wheel = None


def load_prebuilt_or_build(
    place: Path | None,
    name: str,
    builder: Builder | None,
    *,
    sources: Sequence[str | Path],
    python_include_path: str | Path | None,
    need_cuda: bool,
    library_path: str,
    timeout_s: float,
) -> ModuleType:
    """Return a module from a wheel, or built here; see ``cached_load_prebuilt_extension``."""
    if not name.isidentifier():
        raise ConfigError(f"module_name must be a Python identifier, got {name!r}")
    why = "external_prebuilded_path names none"
    if place is not None and _for_wheel is None:
        found, why = find_prebuilt(place, name)
        if found is not None:
            try:
                return load_module(name, found)
            except ExtensionError as exc:  # of another libc or libstdc++, say
                if builder is None or name in _loaded:
                    raise
                why = str(exc)
    if builder is None:
        raise ExtensionError(f"{name}: no prebuilt module fits, and there is no builder: {why}")
    if not callable(builder):
        kind = type(builder).__name__
        raise ConfigError(f"builder must be a callable that returns a path, got {kind}")
    try:
        path = build_module(
            builder,
            name,
            sources=sources,
            python_include_path=python_include_path,
            need_cuda=need_cuda,
            is_portable=_for_wheel is not None,
            library_path=library_path,
            timeout_s=timeout_s,
        )
    except ExtensionError as exc:
        raise ExtensionError(f"{exc}\n{name}: no prebuilt module fits either: {why}") from exc
    if _for_wheel is not None:
        if place is None:
            raise ConfigError(f"{name}: a wheel needs external_prebuilded_path, a folder in it")
        needs_torch = bool(getattr(builder, "needs_torch", False))
        record = PrebuiltRecord.of_this_process(name, needs_torch)
        _for_wheel.append(BuiltForWheel(place, path, record))
    return load_module(name, path)
