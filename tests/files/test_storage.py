"""Storages keep what they promise: files of this machine, memory, a store that speaks S3."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from persia._files.buffer_pool import BufferPool
from persia._files.catalog import ids, keep_last, latest, load
from persia._files.object_store import RemoteStorage
from persia._files.rows import compact, verify
from persia._files.storage import LocalStorage, Storage, open_storage
from persia.errors import CheckpointError, ConfigError
from tests.files.disk import Disk
from tests.files.support import rows_of
from tests.files.test_catalog import dump, loaded, row


@pytest.fixture(params=["local", "file", "memory", "failing disk"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    if request.param == "failing disk":
        # The fake that other tests break keeps the same promises while it is whole.
        yield LocalStorage("/some/folder", Disk())
        return
    urls = {"local": f"{tmp_path}/x y", "file": f"file://{tmp_path}/x%20y"}
    made = open_storage(urls.get(request.param, f"memory://{uuid.uuid4()}/x"))
    yield made
    made.remove_folder("")


def content(storage: Storage, path: str) -> bytes:
    return storage.read(path, 1 << 20).tobytes()


def check_promises(storage: Storage) -> None:
    assert storage.list() == []
    data = np.arange(70_000, dtype=np.uint8)
    storage.write("a/b/c", [b"head", data[:0].data, data.data, memoryview(b"tail")])
    storage.sync("a/b")
    assert content(storage, "a/b/c") == b"head" + data.tobytes() + b"tail"
    assert storage.size("a/b/c") == 70_008
    storage.write("empty", [])
    assert content(storage, "empty") == b""
    assert (storage.list(), storage.list("a"), storage.list("no")) == (
        ["a", "empty"],
        ["b"],
        [],
    )
    storage.publish("m.json", b"1")
    storage.publish("m.json", b"22")
    assert content(storage, "m.json") == b"22"
    assert storage.list() == ["a", "empty", "m.json"]
    with pytest.raises(CheckpointError, match=r"m\.json: expected at most 1 bytes, got 2"):
        storage.read("m.json", 1)
    with storage.open("a/b/c") as reader:
        piece = np.empty(6, np.uint8)
        reader.read_into(piece, 3)
        assert piece.tobytes() == b"d" + bytes(range(5))
        with pytest.raises(CheckpointError, match="a/b/c: "):
            reader.read_into(piece, 70_005)
    with pytest.raises(CheckpointError, match="gone: cannot read"):
        storage.size("gone")
    storage.remove("m.json")
    storage.remove("m.json")
    storage.remove_folder("a")
    storage.remove_folder("a")
    assert storage.list() == ["empty"]


def test_promises(storage: Storage) -> None:
    check_promises(storage)


def test_whoever_writes_may_breathe_between_pieces(storage: Storage) -> None:
    breaths: list[bool] = []
    storage.breathe = lambda: breaths.append(True)
    storage.write("a/b", [b"one", b"two", b"three"])
    assert len(breaths) == 3


def check_large(storage: Storage) -> None:
    """A file that begins with a block in memory, and one that does not, read either way."""
    memory = BufferPool()
    data = memory.take(600_123)
    data[:] = np.random.default_rng(1).integers(0, 256, len(data), dtype=np.uint8)
    for first in (0, 1):
        storage.write(f"large{first}", [data[first:300_000].data, data[300_000:].data])
        want = data[first:].tobytes()
        assert content(storage, f"large{first}") == want
        for start in (0, 1):
            target = memory.take(700_000)[start : start + len(want)]
            with storage.open(f"large{first}") as reader:
                reader.read_into(target, 0)
            assert target.tobytes() == want


def test_large_files(storage: Storage) -> None:
    check_large(storage)


def test_a_disk_that_refuses_what_it_let_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written and read through the page cache then, from where it is."""
    monkeypatch.setattr("tests.files.disk.BLOCK_BYTES", 1 << 30)
    check_large(LocalStorage("/some/folder", Disk()))


@pytest.mark.skipif(
    not (hasattr(os, "O_DIRECT") and hasattr(os, "RWF_NOWAIT")), reason="a system without"
)
@pytest.mark.parametrize("num_cached", [1, 65_536, 300_001, 1 << 20])
def test_what_is_in_the_cache_already_is_read_from_there(
    monkeypatch: pytest.MonkeyPatch, num_cached: int
) -> None:
    """All of a file, or its beginning; the rest comes past the cache where that ends well."""
    hits: list[int] = []
    disk = Disk()
    monkeypatch.setattr(disk, "from_cache", hits.append)
    disk.num_cached = num_cached
    check_large(LocalStorage("/some/folder", disk))
    assert 0 < max(hits) <= num_cached


def test_an_object_is_held_once_until_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    """A pipe would be waited for until somebody writes."""
    os.mkfifo(tmp_path / "00000001-00000000.json")
    (tmp_path / "folder").mkdir()
    storage = LocalStorage(tmp_path)
    with pytest.raises(CheckpointError, match=r"00000001-00000000\.json: expected a file"):
        load(storage)
    with pytest.raises(CheckpointError, match="folder: expected a file, got a folder"):
        storage.size("folder")


def check_catalog(storage: Storage) -> None:
    """A base, a delta with a deletion, compaction, the last one kept."""
    rows = {sign: row(sign, 1) for sign in range(20)}
    base = dump(storage, rows)
    rows[3] = row(3, 2)
    del rows[4]
    delta = dump(storage, {3: rows[3]}, base=base.id, deleted={4})
    assert loaded(storage) == rows_of(rows.values())
    whole = compact(storage)
    assert keep_last(storage, 1) == [base.id, delta.id]
    assert latest(storage) == whole.id
    assert ids(storage) == [whole.id]
    assert loaded(storage) == rows_of(rows.values())
    verify(storage)
    # W-20: other files come back byte by byte, from wherever they are.
    assert content(storage, whole.files["dense.pt"].path) == delta.id.encode()
    assert len(storage.list(whole.id)) == 3


def test_w20_a_catalog_is_the_same_everywhere(storage: Storage) -> None:
    check_catalog(storage)


def test_a_url_that_nothing_serves_is_an_error() -> None:
    with pytest.raises(ConfigError, match="nosuch://x: cannot be opened"):
        open_storage("nosuch://x")


def test_local_files_need_no_fsspec() -> None:
    program = (
        "import sys; sys.modules['fsspec'] = None; from persia._files import catalog, rows; "
    )
    program += "assert catalog.ids('/nowhere') == []"
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=60)


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, Any]]:
    """A server on loopback that speaks S3."""
    server = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
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
