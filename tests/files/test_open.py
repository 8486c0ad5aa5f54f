"""Where a path or URL leads, and which folders a server opens (W-71)."""

from __future__ import annotations

import logging
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from persia._cluster import process
from persia._files.open import ANYWHERE, AllowedRoots, RemoteStorage, open_storage
from persia._rpc.messages import LoadRequest, WriteRequest
from persia.config import ParameterServerConfig
from persia.errors import CheckpointError, ConfigError
from tests.files.support import check_catalog, check_promises
from tests.support.fixtures import Monkey
from tests.support.services import make_servers


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A root with a way out, and something beside it."""
    (tmp_path / "root/job").mkdir(parents=True)
    (tmp_path / "roots").mkdir()
    (tmp_path / "root/out").symlink_to("../roots")
    (tmp_path / "root/in").symlink_to(tmp_path / "root/job")
    (tmp_path / "alias").symlink_to(tmp_path / "root")
    return tmp_path


@pytest.mark.parametrize(
    "url",
    [
        "{}/root",
        "{}/root/",
        "{}/root/job/new/er",
        "{}/root/job/../in/x",
        "{}/alias/job",
        "file://{}/root/job",
        "local://{}/root/job",
        "file://{}/roo%74/job",
        "s3://bucket/persia",
        "s3://bucket/persia/a/b",
        "memory://x",
    ],
)
def test_w71_what_is_below_a_root_is_allowed(place: Path, url: str) -> None:
    roots = AllowedRoots([f"{place}/root", "s3://bucket/persia/", "memory://x"])
    roots.check(url.format(place))


@pytest.mark.parametrize(
    "url",
    [
        "{}",
        "{}/roots",
        "{}/roots/root",
        "{}/root/../roots",
        "{}/root/out",
        "{}/root/out/new",
        "file://{}/root/out",
        "file://{}/root/%2e%2e/roots",
        "local://{}/root/..",
        "/etc",
        "relative",
        "",
        "s3://bucket",
        "s3://bucket/persia2",
        "s3://bucket/persia/../other",
        "s3://bucket/persia//../..",
        "s3://bucket/persia/./x",
        "s3://bucket/persia/%2e%2e/other",
        "s3://bucket/persia?versionId=1",
        "s3://other/persia",
        "s3a://bucket/persia",
        "simplecache::s3://bucket/persia",
        "s3://bucket/persia::file:///etc",
        "http://bucket/persia",
        "memory://",
    ],
)
def test_w71_what_is_outside_is_refused_with_its_name(place: Path, url: str) -> None:
    url = url.format(place)
    roots = AllowedRoots([f"{place}/root", "s3://bucket/persia", "memory://x"])
    with pytest.raises(CheckpointError, match="PERSIA_CHECKPOINT_ROOTS") as caught:
        roots.check(url)
    assert url in str(caught.value)
    assert f"{place}/root, s3://bucket/persia, memory://x" in str(caught.value)


def test_a_root_may_be_a_link_or_everything(place: Path) -> None:
    AllowedRoots([f"{place}/alias"]).check(f"{place}/root/job")
    AllowedRoots(["/"]).check("/etc")
    AllowedRoots(["file:///"]).check("relative")
    ANYWHERE.check("/etc")
    with pytest.raises(CheckpointError, match="null byte"):
        AllowedRoots(["/"]).check("/etc\0")
    with pytest.raises(CheckpointError, match=r"\(none\)"):
        AllowedRoots([]).check(str(place))
    with pytest.raises(ConfigError, match="nosuch://x: cannot be opened"):
        open_storage("nosuch://x")


def test_w71_a_server_stays_inside_its_roots(place: Path, monkeypatch: Monkey) -> None:
    (server,) = make_servers(1)
    server._roots = AllowedRoots([f"{place}/root"])
    for url, prefix in ((f"{place}/roots", "a"), (f"{place}/root", "../roots/a")):
        with pytest.raises(CheckpointError, match="expected a folder below"):
            server.write_cut(WriteRequest(1, url, prefix))
        with pytest.raises(CheckpointError, match="expected a folder below"):
            server.load(LoadRequest(1, "verify", url, prefix, None))
    assert list((place / "roots").iterdir()) == []
    # With a name behind it, what is opened looks like something else.
    for here, url, prefix in (
        ("roots", "", f"{place}/root"[1:]),
        ("root", "memory://", "a"),
        ("root", "s3:/", "/a"),
    ):
        monkeypatch.chdir(place / here)
        with pytest.raises(CheckpointError, match="expected a folder below"):
            server.write_cut(WriteRequest(1, url, prefix))
    # Below the root it is only not there.
    with pytest.raises(CheckpointError, match="no snapshot 1"):
        server.write_cut(WriteRequest(1, f"{place}/root", "a"))
    assert open_storage(f"{place}/root/job").list() == []


@pytest.mark.parametrize(
    ("address", "said", "allows"),
    [
        ("tcp://127.0.0.1:1", None, True),
        ("ipc:///tmp/x", None, True),
        ("tcp://0.0.0.0:1", None, False),
        ("tcp://0.0.0.0:1", "{},s3://b/c", True),
        ("tcp://127.0.0.1:1", "/nowhere", False),
    ],
)
def test_w71_who_can_be_reached_from_elsewhere_has_no_roots_by_itself(
    place: Path, monkeypatch: Monkey, address: str, said: str | None, allows: bool
) -> None:
    if said is not None:
        monkeypatch.setenv("PERSIA_CHECKPOINT_ROOTS", said.format(place))
    roots = process._roots(ParameterServerConfig(), address)
    with nullcontext() if allows else pytest.raises(CheckpointError):
        roots.check(str(place / "x"))


def test_changes_are_written_below_a_root_too(place: Path, monkeypatch: Monkey) -> None:
    settings = ParameterServerConfig(
        enable_incremental_update=True, incremental_dir=f"{place}/root/out"
    )
    process._roots(settings, "tcp://0.0.0.0:1")  # the operator's own word
    monkeypatch.setenv("PERSIA_CHECKPOINT_ROOTS", f"{place}/root")
    with pytest.raises(CheckpointError, match=r"this one leads to .*roots"):
        process._roots(settings, "ipc:///tmp/x")
    monkeypatch.setenv("PERSIA_CHECKPOINT_ROOTS", f"{place}/root,,")
    with pytest.raises(ConfigError, match="a list of folders with commas"):
        process._roots(settings, "ipc:///tmp/x")


def test_local_files_need_no_fsspec() -> None:
    program = (
        "import sys; sys.modules['fsspec'] = None; from persia._files import catalog, rows; "
        "from persia._files.open import open_storage; "
        "assert catalog.ids(open_storage('/nowhere')) == []"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=60)


def test_an_object_is_held_once_until_it_is_sent(monkeypatch: Monkey) -> None:
    sent: list[int] = []
    monkeypatch.setattr(RemoteStorage, "_put", lambda self, path, data: sent.append(len(data)))
    piece = bytes(1 << 20)
    tracemalloc.start()
    try:
        open_storage("memory://once").write("a", [piece] * 32)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sent == [32 << 20]
    assert most < 40 << 20  # it grows by an eighth


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, Any]]:
    """A server on loopback that speaks S3."""
    server = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # a line for each request
    running = server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield {
        "key": "k",
        "secret": "s",
        "client_kwargs": {"endpoint_url": f"http://{host}:{port}", "region_name": "us-east-1"},
    }
    running.stop()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of botocore
def test_w20_s3(s3: dict[str, Any]) -> None:
    import s3fs

    s3fs.S3FileSystem(**s3).call_s3("create_bucket", Bucket="bucket")
    storage = open_storage("s3://bucket/promises", **s3)
    check_promises(storage)
    check_catalog(open_storage("s3://bucket/a/catalog", **s3))
    assert not open_storage("s3://bucket/nothing", **s3).list()
