"""Objects behind a URL: memory, and a store that speaks S3."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest

from persia._files.object_store import RemoteStorage
from persia._files.open import open_storage
from tests.files.support import (
    check_catalog,
    check_promises,
)


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
