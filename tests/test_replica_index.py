"""``REPLICA_INDEX=auto``: the number in a host name, or in a name that the network has."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from persia import _replica_index, env
from persia._replica_index import name_of, name_server, own_number
from persia.errors import ConfigError
from tests.support.fixtures import Monkey
from tests.support.web import serving

# As the name server of a Compose network answers for 172.18.0.4.
QUESTION = b"\x014\x010\x0218\x03172\x07in-addr\x04arpa\x00\x00\x0c\x00\x01"
RECORD = QUESTION + b"\x00\x00\x02X\x00\x15\ncx-web_a-2\x08cx_inner\x00"
ANSWER = b"\x81\x80\x00\x01\x00\x01\x00\x00\x00\x00" + QUESTION + RECORD
# The same by pointers, behind a CNAME.
POINTED = (
    b"\x81\x80\x00\x01\x00\x02\x00\x00\x00\x00"
    + QUESTION
    + b"\xc0\x0c\x00\x05\x00\x01\x00\x00\x02X\x00\x02\xc0\x0c"
    + b"\xc0\x0c\x00\x0c\x00\x01\x00\x00\x02X\x00\x0b\x08worker-7\xc0\x1f"
)


def never(host: str) -> list[str]:
    raise AssertionError(f"expected no question about {host}")


@contextlib.contextmanager
def answering(answer: Callable[[bytes], list[bytes]]) -> Iterator[int]:
    """A name server on a port of its own, that sends what ``answer`` makes of a question."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            question, own = self.request
            for datagram in answer(question):
                own.sendto(datagram, self.client_address)

    with serving(socketserver.UDPServer(("127.0.0.1", 0), Handler)) as port:
        yield port


# --- host names -----------------------------------------------------------------------------


def test_the_number_in_a_host_name_and_that_of_a_container() -> None:
    assert own_number("embedding-worker-11", never) == 11
    # A pod of a StatefulSet; one of a JobSet: job 0, completion 2.
    assert own_number("servers-3.servers.default.svc.cluster.local", never) == 3
    assert own_number("job-embedding-worker-0-2", never) == 2
    for name, want in (("-1", 0), ("-12", 11), ("_3", 2)):
        names = ["759c68e30f36", f"persia_embedding_worker{name}.persia_cluster"]
        assert own_number("759c68e30f36", {"759c68e30f36": names}.__getitem__) == want


@pytest.mark.parametrize("names", [[], ["trainer.net-1"], ["host-0"], ["759c68e30f36.net"]])
def test_no_number_is_a_config_error(names: list[str]) -> None:
    known = ", ".join(names) or "nothing"
    with pytest.raises(ConfigError, match=rf"REPLICA_INDEX=auto: .*'759c68e30f36', .*{known}"):
        own_number("759c68e30f36", lambda _: names)


# --- the name server ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "want"), [(ANSWER, "cx-web_a-2.cx_inner"), (POINTED, "worker-7.arpa")]
)
def test_the_name_of_an_address(answer: bytes, want: str) -> None:
    asked: list[bytes] = []

    def reply(question: bytes) -> list[bytes]:
        asked.append(question)
        return [question[:2] + answer]

    with answering(reply) as port:
        assert name_of("172.18.0.4", "127.0.0.1", port) == want
    (question,) = asked
    assert question[2:] == struct.pack(">5H", 0x0100, 1, 0, 0, 0) + QUESTION


def test_a_lost_datagram_is_asked_for_again(monkeypatch: Monkey) -> None:
    monkeypatch.setattr(_replica_index, "_ATTEMPT_S", 0.05)
    left = [[], [b""]]  # the first is lost

    def reply(question: bytes) -> list[bytes]:
        return left.pop(0) and [question[:2] + ANSWER]

    with answering(reply) as port:
        assert name_of("172.18.0.4", "127.0.0.1", port) == "cx-web_a-2.cx_inner"
    monkeypatch.setattr(_replica_index, "_ATTEMPT_S", 0.01)
    with answering(lambda _: []) as port, pytest.raises(OSError, match="timed out"):
        name_of("172.18.0.4", "127.0.0.1", port)


@given(st.binary(max_size=80) | st.integers(0, len(ANSWER)).map(lambda end: ANSWER[:end]))
@example(b"\x81\x80\x00\x00\x00\x01\x00\x00\x00\x00\xc0\x0c" + bytes(10))  # a circle
def test_any_answer_is_a_name_or_a_value_error(answer: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(_replica_index._read_answer(b"\0\0" + answer, 0), str)


def test_the_first_name_server_is_asked(tmp_path: Path) -> None:
    config = tmp_path / "resolv.conf"
    config.write_text("search here\nnameserver 127.0.0.11\nnameserver 8.8.8.8\n")
    assert name_server(config) == "127.0.0.11"
    config.write_text("search here\n")
    with pytest.raises(OSError, match="names no name server"):
        name_server(config)


def test_every_address_of_the_host_is_asked_about(monkeypatch: Monkey) -> None:
    def name(address: str, server: str) -> str:
        if address == "10.0.0.1":
            raise TimeoutError
        return f"job-worker-5.net-of-{address}"

    hosts = [(0, 0, 0, "", (address, 0)) for address in ("10.0.0.1", "10.0.0.2")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: hosts)
    monkeypatch.setattr(_replica_index, "name_server", lambda: "127.0.0.11")
    monkeypatch.setattr(_replica_index, "name_of", name)
    assert own_number("759c68e30f36") == 4


# --- the environment ------------------------------------------------------------------------


def test_the_environment_says_auto(monkeypatch: Monkey) -> None:
    monkeypatch.setenv("REPLICA_INDEX", "auto")
    monkeypatch.setenv("REPLICA_SIZE", "3")
    monkeypatch.setattr(env, "own_number", lambda: 2)
    env.reload_env()
    assert (env.get_replica_index(), env.get_replica_size(), env.replica()) == (2, 3, (2, 3))
    monkeypatch.setattr(env, "own_number", lambda: 3)
    with pytest.raises(ConfigError, match="REPLICA_INDEX must be below REPLICA_SIZE 3, got 3"):
        env.reload_env()
    # A number needs no question.
    monkeypatch.setattr(env, "own_number", lambda: never(""))
    monkeypatch.setenv("REPLICA_INDEX", "1")
    monkeypatch.setenv("REPLICA_SIZE", "2")
    assert env.replica() == (1, 2)
    monkeypatch.delenv("REPLICA_INDEX")
    monkeypatch.delenv("REPLICA_SIZE")
    assert env.replica() == (0, 1)
