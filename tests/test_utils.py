"""Seeds, YAML, programs, ports and limits of memory."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable
from math import inf
from pathlib import Path

import numpy as np
import pytest
import torch

from persia import utils
from persia.errors import ConfigError


def test_setup_seed() -> None:
    def draws() -> tuple[float, float, float]:
        utils.setup_seed(3)
        return random.random(), float(np.random.rand()), float(torch.rand(1))

    try:
        assert draws() == draws()
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_yaml_round_trip_keeps_order(tmp_path: Path) -> None:
    content = {
        "z": [1, 2.5, None, "1e-3", 1e-7, "1e", "no"],
        "a": {"text": "caf\u00e9", "flag": True},
    }
    path = tmp_path / "file.yml"
    utils.dump_yaml(content, str(path))
    assert utils.load_yaml(str(path)) == content
    assert list(utils.load_yaml(path)) == ["z", "a"]
    with pytest.raises(FileNotFoundError, match=r"none\.yml"):
        utils.load_yaml(tmp_path / "none.yml")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"a: 1\nb:\n  c: 1\n  c: 2\n",
            ":4: key 'c' is given twice, first in line 3",
        ),
        (b"a: [1\n", ":2: expected YAML: while parsing a flow sequence expected"),
        (b"a: \xff\n", "expected YAML"),
        (b"a: 2021-13-45\n", "expected YAML: month must be in 1..12"),
        (b"[" * 5000, "expected YAML, got collections nested too deep"),
        (b"!!python/object/apply:os.getcwd []\n", "expected YAML"),
        (b"? [a]\n: 1\n", "expected YAML"),
    ],
)
def test_load_yaml_of_what_is_none(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "file.yml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        utils.load_yaml(path)
    assert str(caught.value).startswith(f"{path}:")
    assert message in str(caught.value)


def test_keys_that_were_merged_are_not_given_twice(tmp_path: Path) -> None:
    path = tmp_path / "file.yml"
    # b reaches base before base, which lies deeper, has been built.
    path.write_text(
        "root: &root {dim: 4}\na: {x: &base {<<: *root, dim: 8}}\nb: {<<: *base, y: 1}\n"
    )
    content = utils.load_yaml(path)
    assert content["a"] == {"x": {"dim": 8}}
    assert content["b"] == {"dim": 8, "y": 1}


def test_a_number_in_powers_of_ten_needs_no_dot(tmp_path: Path) -> None:
    path = tmp_path / "file.yml"
    path.write_text("[1e-3, -1E5, 1.5e3, .5e1, '1e-3', e5, 1e]")
    assert utils.load_yaml(path) == [1e-3, -1e5, 1500.0, 5.0, "1e-3", "e5", "1e"]


def test_run_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out"
    code = "import os, sys; open(sys.argv[1], 'w').write(os.environ.get('WORD', '-'))"
    monkeypatch.setenv("WORD", "inherited")
    utils.run_command([sys.executable, "-c", code, target])
    assert target.read_text() == "inherited"
    utils.run_command([sys.executable, "-c", code, target], env={"WORD": "given"})
    assert target.read_text() == "given"
    with pytest.raises(subprocess.CalledProcessError) as caught:
        utils.run_command([sys.executable, "-c", "raise SystemExit(3)"])
    assert caught.value.returncode == 3
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("PERSIA_LAUNCHER_VERBOSE", "1")
    utils.run_command([sys.executable, "-c", "pass"])
    assert f"execute command: {sys.executable} -c pass" in capsys.readouterr().err


def test_resolve_binary_execute_path() -> None:
    python = Path(sys.executable)
    assert Path(utils.resolve_binary_execute_path(python.name)) == python
    with pytest.raises(FileNotFoundError, match="'no-such-program-here'"):
        utils.resolve_binary_execute_path("no-such-program-here")


def test_find_free_port() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        if port + 2 > utils.MAXIMUM_LOCAL_PORT_NUM:
            pytest.skip("the system gave its last port")
        assert utils.find_free_port(port) > port
        with pytest.raises(ConfigError, match="all are taken"):
            utils.find_free_port(port, interval=utils.MAXIMUM_LOCAL_PORT_NUM)
    with pytest.raises(ValueError, match="expected a free port in 65536"):
        utils.find_free_port(65536)
    with pytest.raises(ConfigError, match="port must be at least 1, got 0"):
        utils.find_free_port(0)
    with pytest.raises(ConfigError, match="interval must be at least 1, got 0"):
        utils.find_free_port(interval=0)


HOST = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
V1, CFS = "memory/x/memory", "cpu/x/cpu.cfs"
CPU, NO_LIMIT = "4:cpu,cpuacct:/x\n", "9223372036854771712\n"


def cgroups(root: Path, lines: str, limits: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(lines)
    for path, text in limits.items():
        file = root / "sys/fs/cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


TOTAL, FREE, QUOTA = utils.total_memory_bytes, utils.free_memory_bytes, utils.processor_quota


@pytest.mark.parametrize(
    ("ask", "lines", "files", "want"),
    [
        # Version 2: the lowest limit on the way up counts.
        (TOTAL, "0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "4096\n"}, 4096),
        (TOTAL, "0::/a/b\n", {"a/b/memory.max": "1024\n", "a/memory.max": "4096\n"}, 1024),
        # In a container: its own group is the mount point, the path may be the host's.
        (TOTAL, "0::/\n", {"memory.max": "2048\n"}, 2048),
        (TOTAL, "0::/kubepods/pod1\n", {"memory.max": "2048\n"}, 2048),
        # Version 1, where no limit is a number near 2**63.
        (
            TOTAL,
            "9:cpu:/x\n5:memory:/x\n",
            {f"{V1}.limit_in_bytes": "512\n", "memory/memory.limit_in_bytes": NO_LIMIT},
            512,
        ),
        (TOTAL, "5:memory:/\n", {"memory/memory.limit_in_bytes": NO_LIMIT}, HOST),
        (TOTAL, "0::/a\n", {"a/memory.max": "max\n"}, HOST),
        (TOTAL, "4:cpu,cpuacct:/a\nname=systemd\n", {"a/memory.max": "1\n"}, HOST),
        (TOTAL, "", {}, HOST),
        (FREE, "", {}, 4096 * 1024),
        # Version 2: what is used by files that can go is free.
        (
            FREE,
            "0::/a\n",
            {
                "a/memory.max": "4096\n",
                "a/memory.current": "3000\n",
                "a/memory.stat": "anon 9\nactive_file 7\ninactive_file 1000\n",
            },
            2096,
        ),
        (FREE, "0::/a\n", {"a/memory.max": "4096\n", "a/memory.current": "5000\n"}, 0),
        (
            FREE,
            "5:memory:/x\n",
            {f"{V1}.limit_in_bytes": "512\n", f"{V1}.usage_in_bytes": "99\n"},
            413,
        ),
        (
            QUOTA,
            "0::/a/b\n",
            {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "250000 100000\n"},
            2.5,
        ),
        (QUOTA, "0::/pod\n", {"cpu.max": "50000 100000\n"}, 0.5),
        (QUOTA, CPU, {f"{CFS}_quota_us": "200000\n", f"{CFS}_period_us": "100000\n"}, 2.0),
        (QUOTA, CPU, {f"{CFS}_quota_us": "-1\n", f"{CFS}_period_us": "100000\n"}, inf),
        (QUOTA, "", {}, inf),
    ],
)
def test_memory_and_processors_are_those_of_the_control_group(
    tmp_path: Path, ask: Callable[[Path], float], lines: str, files: dict[str, str], want: float
) -> None:
    root = cgroups(tmp_path, lines, files)
    (root / "proc/meminfo").write_text("MemFree: 1 kB\nMemAvailable:    4096 kB\n")
    assert ask(root) == want


def test_memory_where_nothing_is_said_is_the_hosts(tmp_path: Path) -> None:
    assert utils.total_memory_bytes(tmp_path) == HOST
    assert utils.free_memory_bytes(tmp_path) == 0
    assert 0 < utils.total_memory_bytes() <= HOST
