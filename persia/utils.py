"""Seeds, YAML, command lines, programs, ports and the limits of this machine."""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import yaml

from persia import env as _env
from persia._deprecated import names_of
from persia.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

MAXIMUM_LOCAL_PORT_NUM = 65535

if not TYPE_CHECKING:  # where any name would be taken for one
    __getattr__ = names_of(__name__)


def setup_seed(seed: int) -> None:
    """Seed Python's, NumPy's and PyTorch's generators and ask for deterministic kernels.

    On CUDA, cuBLAS needs ``CUBLAS_WORKSPACE_CONFIG=:4096:8`` in the environment besides.
    """
    import random

    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)


class _UniqueKeyLoader(yaml.SafeLoader):
    """Safe YAML that refuses duplicate keys, which PyYAML accepts against YAML's rules.

    ``1e-3`` is a number, as in YAML 1.2 and JSON; PyYAML requires a dot in it.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Before ``<<`` is merged, which puts keys of other nodes in front of a node's own.
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: dict[str, int] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue  # SafeLoader itself refuses a key that cannot be hashed
            key, mark = key_node.value, key_node.start_mark
            if key in seen:
                raise ConfigError(
                    f"{mark.name}:{mark.line + 1}: key {key!r} is given twice, first in line "
                    f"{seen[key]}"
                )
            seen[key] = mark.line + 1
        return node


class _Dumper(yaml.SafeDumper):
    """Safe YAML that quotes texts which the loader above would read as numbers."""


for _cls in (_UniqueKeyLoader, _Dumper):
    _cls.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?(?:\d+|\d*\.\d+|\d+\.)[eE][-+]?\d+\Z"),
        list("-+.0123456789"),
    )


def load_yaml(filepath: str | os.PathLike[str]) -> Any:
    """Read one YAML document; None for an empty file.

    Raises:
        FileNotFoundError: If there is no such file.
        ConfigError: If the file is not YAML, or a mapping gives a key twice.
    """
    path = Path(filepath)
    if not path.is_file():
        found = "a folder" if path.is_dir() else "none"
        if not path.is_absolute():
            found += f" in {Path.cwd()}"
        raise FileNotFoundError(f"expected a YAML file at {path}, found {found}")
    return parse_yaml(path.read_bytes(), str(path))


def parse_yaml(data: bytes, path: str) -> Any:
    """Read one YAML document that is ``path``'s; errors as ``load_yaml``."""
    try:
        loader = _UniqueKeyLoader(data.decode())
        loader.name = path  # for its marks
        return loader.get_single_data()
    except ConfigError:
        raise
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        place = f"{path}:{mark.line + 1}" if mark else path
        problem = " ".join(filter(None, (exc.context, exc.problem, exc.note)))
        if r"'\t'" in problem:
            problem += "; indent by spaces"
        raise ConfigError(f"{place}: expected YAML: {problem}") from None
    except (yaml.YAMLError, ValueError) as exc:
        # ValueError: bytes that are not UTF-8, and dates such as 2021-13-45.
        raise ConfigError(f"{path}: expected YAML: {exc}") from None
    except RecursionError:
        raise ConfigError(f"{path}: expected YAML, got collections nested too deep") from None


def dump_yaml(content: Any, filepath: str | os.PathLike[str]) -> None:
    """Write plain data as YAML, mappings in their own order."""
    with Path(filepath).open("w", encoding="utf-8") as file:
        yaml.dump(content, file, Dumper=_Dumper, sort_keys=False)


class ArgumentParser(argparse.ArgumentParser):
    """Parser of a script: help ends with an example, errors are one line.

    Args:
        doc: The script's docstring; its first line is the description.
        example: A command line that works.

    Example:
        >>> parser = ArgumentParser(__doc__, "python train.py --epochs 3")
        >>> _ = parser.add_argument("--epochs", type=int, default=1)
        >>> parser.parse_args(["--epochs", "2"]).epochs
        2
    """

    def __init__(self, doc: str | None, example: str) -> None:
        self._example = example
        super().__init__(
            description=(doc or "").split("\n")[0],
            epilog=f"Example: {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        """Print one line, and exit with 2."""
        self.exit(2, f"{self.prog}: {message.rstrip('.')}. Example: {self._example}\n")


def at_least(low: int) -> Callable[[str], int]:
    """Return a type for argparse, as in ``add_argument("--size", type=at_least(1))``."""

    def read(text: str) -> int:
        try:
            number = int(text)
            if number >= low:
                return number
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"expected an integer of at least {low}, got {text!r}")

    return read


def run_command(cmd: Sequence[object], env: Mapping[str, str] | None = None) -> None:
    """Run a command, each word as its ``str``, and wait for it.

    Args:
        cmd: The program and its arguments.
        env: Its whole environment; this process's own if not given.

    Raises:
        subprocess.CalledProcessError: If the command exits with another status than 0.
    """
    words = [str(word) for word in cmd]
    if _env.launcher_verbose():
        print(f"execute command: {' '.join(words)}", file=sys.stderr)
    subprocess.check_call(words, env=None if env is None else dict(env))


def resolve_binary_execute_path(binary_name: str) -> str:
    """Find a program beside the running Python, or else on the search path."""
    beside = Path(sys.executable).parent
    found = shutil.which(binary_name, path=str(beside)) or shutil.which(binary_name)
    if found is None:
        raise FileNotFoundError(
            f"expected the program {binary_name!r} in {beside} or on PATH, found none"
        )
    return found


def sleep(seconds: float) -> None:
    """Wait; Ctrl-C, or another signal whose handler raises, ends it."""
    time.sleep(seconds)


def find_free_port(port: int = 10000, interval: int = 1) -> int:
    """Return the first free port from ``port`` on, in steps of ``interval``.

    Another process may take it before the caller does. Where that matters, bind to port 0
    and ask the socket instead.

    Raises:
        ConfigError: If there is none up to 65535; it is a ValueError, as in the original.
    """
    for name, number in (("port", port), ("interval", interval)):
        if number < 1:
            raise ConfigError(f"{name} must be at least 1, got {number}")
    for candidate in range(port, MAXIMUM_LOCAL_PORT_NUM + 1, interval):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("", candidate))
            except OSError:
                continue
            return candidate
    raise ConfigError(
        f"expected a free port in {port}..{MAXIMUM_LOCAL_PORT_NUM}, all are taken"
    )


def total_memory_bytes(root: str | os.PathLike[str] = "/") -> int:
    """Return the bytes of memory this process may use: its cgroup's limit, or the host's.

    ``root``, here and below, has ``proc`` and ``sys``; it is another one only in tests.
    """
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([host, *(limit for limit, _ in _memory_limits(Path(root)))])


def free_memory_bytes(root: str | os.PathLike[str] = "/") -> int:
    """Return the bytes of memory that this process could still get; 0 if not known."""
    free = [_number_in(Path(root) / "proc/meminfo", r"MemAvailable: +(\d+) kB") * 1024]
    for limit, folder in _memory_limits(Path(root)):
        used = sum(
            _number_in(folder / name, r"(\d+)")
            for name in ("memory.current", "memory.usage_in_bytes")  # of versions 2 and 1
        )
        # Inactive pages of files are reclaimed before the limit kills.
        cached = _number_in(folder / "memory.stat", r"inactive_file (\d+)")
        free.append(limit - used + min(cached, used))
    return max(0, min(free))


def processor_quota(root: str | os.PathLike[str] = "/") -> float:
    """Return the number of processors whose time this process may take; may be infinite."""
    quotas = [math.inf]
    for folder, version in _cgroup_folders(Path(root), "cpu"):
        names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        texts = " ".join(_text_in(folder / name) for name in names).split()
        # No limit is "max" in version 2, and -1 in version 1.
        if len(texts) == 2 and all(text.isdecimal() and int(text) for text in texts):
            quotas.append(int(texts[0]) / int(texts[1]))
    return min(quotas)


def _text_in(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number_in(path: Path, pattern: str) -> int:
    """Return the number on the first line that matches; 0 if there is none."""
    match = re.search(f"^{pattern}", _text_in(path), re.MULTILINE)
    return int(match[1]) if match else 0


def _memory_limits(root: Path) -> Iterator[tuple[int, Path]]:
    """Yield the memory limits of every group above this process, and their folders."""
    for folder, version in _cgroup_folders(root, "memory"):
        name = "memory.max" if version == 2 else "memory.limit_in_bytes"
        text = _text_in(folder / name).strip()
        # No limit is "max" in version 2, and a number near 2**63 in version 1.
        if text.isdecimal():
            yield int(text), folder


def _cgroup_folders(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Yield the folder and version of each group above this process, its own first."""
    for line in _text_in(root / "proc/self/cgroup").splitlines():
        # hierarchy:controllers:path; version 2 is hierarchy 0 without controllers.
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if number == "0" and not controllers:
            mount, version = root / "sys/fs/cgroup", 2
        elif controller in controllers.split(","):
            mount, version = root / "sys/fs/cgroup" / controller, 1
        else:
            continue
        # In a container the path may be the host's, which is not mounted here. Its parents up
        # to the mount point, which is then the container's own group, are read anyway.
        here = mount / group.strip("/")
        for folder in (here, *here.parents):
            if not folder.is_relative_to(mount):
                break
            yield folder, version
