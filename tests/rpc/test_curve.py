"""CURVE: known keys are served, strangers are counted and dropped, control has its own key."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock, patch

import numpy as np
import pytest
import zmq
from click.testing import CliRunner
from zmq.utils import z85

from persia._rpc import zmq_socket, zmq_transport
from persia._rpc.client import Client
from persia._rpc.curve import Keys, make_keys
from persia._rpc.messages import (
    FeatureScan,
    IDsRequest,
    LookupRequest,
    RowsRequest,
    ScanRequest,
    TableSigns,
)
from persia._rpc.methods import Role, embedding_worker, nn_worker, parameter_server
from persia._rpc.server import Server
from persia._rpc.zmq_transport import ZmqTransport, is_local
from persia.errors import ConfigError, NotAllowed, ServiceUnavailable
from persia.launcher import cli
from tests.rpc.support import ToyService, Wire, raw_peer, tcp_of
from tests.support.fixtures import Log, Monkey
from tests.support.services import features, make_servers, make_worker
from tests.support.waiting import PATIENCE_S, until


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("keys")
    make_keys(directory)
    make_keys(directory, ["loader-7", "serve-7"])
    return directory


def only(keys: Path, into: Path, *names: str) -> Path:
    """A directory with some of the keys."""
    into.mkdir()
    for name in names:
        (into / name).write_bytes((keys / name).read_bytes())
    return into


@pytest.fixture
def stranger(keys: Path, tmp_path: Path) -> Path:
    """A directory with a key that the server does not know."""
    own = only(keys, tmp_path / "stranger", "server.public")
    make_keys(own, ["data"])
    return own


ANY_PORT = "tcp://127.0.0.1:0"


@contextlib.contextmanager
def serving(keys: Path | None, address: str = ANY_PORT) -> Iterator[Server]:
    with contextlib.closing(Wire("", Path(), keys=keys)) as wire:
        yield wire.serve(ToyService(), address)


def assert_refused(
    keys: Path | None, server: Server, has_come: Callable[[], object] = lambda: True
) -> None:
    """Refused although it goes on to try, until the server ``has_come`` to look at it."""
    with connected(keys, server) as stranger:
        with pytest.raises(ServiceUnavailable, match="no connection within"):
            stranger.hello(0.3)
        until(has_come)


def more_strangers(server: Server) -> Callable[[], bool]:
    """Return what says whether the server has dropped one more than now."""
    name = "dropped.stranger"
    before = server.stats().get(name, 0)
    return lambda: server.stats().get(name, 0) > before


@contextlib.contextmanager
def connected(
    keys: Path | None, server: Server, timeout_s: float = PATIENCE_S
) -> Iterator[Client]:
    with contextlib.closing(Wire("", Path(), keys=keys)) as wire:
        yield wire.client(server, timeout_s=timeout_s)


@pytest.mark.parametrize("address", [ANY_PORT, "ipc://{}/a"])
def test_who_has_the_control_key_may_do_everything(
    keys: Path, tmp_path: Path, address: str
) -> None:
    with serving(keys, address.format(tmp_path)) as server, connected(keys, server) as client:
        big = TableSigns(3, np.arange(1 << 18, dtype=np.uint64))
        (back,) = client.call("echo", [big])
        assert np.array_equal(back.signs, big.signs)
        assert client.call("add", 7) == 7
        client.call("clear_embeddings")
        assert client.call("add", 0) == 0
        client.call("finish_job", 3, True)
        assert server.job.status == 3


@pytest.mark.parametrize("name", ["data", "loader-7"])
def test_w71_a_data_key_gives_and_asks_but_controls_nothing(
    keys: Path, tmp_path: Path, name: str
) -> None:
    own = only(keys, tmp_path / "own", f"{name}.secret", "server.public")
    with serving(keys) as server, connected(own, server) as client:
        assert client.call("add", 0) == 0
        assert client.call("job_status", "me") is None
        for method, arguments in (("clear_embeddings", ()), ("finish_job", (0, True))):
            with pytest.raises(NotAllowed, match=f"{method} needs the control key.*{name}'s"):
                client.call(method, *arguments)
        assert client.call("add", 0) == 0
        assert server.job.status is None
        assert server.stats()["bad.key"] == 2


def test_w71_every_method_that_tells_a_server_what_to_do_needs_the_control_key() -> None:
    for role, data in (
        (
            parameter_server(),
            "count_rows get_embedding_size lookup read_embedding read_rows ready_for_serving "
            "scan_rows stats update",
        ),
        (
            embedding_worker(),
            "count_rows feature_order feature_stats get_embedding_size lookup lookup_direct "
            "read_rows ready_for_serving register release scan_rows server_stats stats "
            "table_info tables_at_rate update",
        ),
        (nn_worker(), "deliver end_stream open_stream poll relocate"),
    ):
        without = {name for name, one in role.methods.items() if not one.needs_control}
        assert without == {*data.split(), "hello", "job_status"}


def state_methods(role: str) -> str:
    """What a key for serving may ask besides lookups."""
    own = " feature_order feature_stats server_stats tables_at_rate"
    return "hello get_embedding_size ready_for_serving stats" + own * (role != SERVER_ROLE)


SERVER_ROLE = parameter_server().name
# Of rows: allowed, but for those that change rows or have the optimizer's state too.
LOOKUPS = ("lookup", "lookup_direct", "read_rows", "scan_rows", "count_rows", "table_info")


@pytest.mark.parametrize("name", ["serve", "serve-7"])
@pytest.mark.parametrize("role", [parameter_server(), embedding_worker(), nn_worker()])
def test_a_key_for_serving_looks_up_and_every_other_method_is_refused(
    keys: Path, tmp_path: Path, name: str, role: Role
) -> None:
    own = only(keys, tmp_path / "own", f"{name}.secret", "server.public")
    # Refused before its arguments are read, so none are needed.
    bare = {x: dataclasses.replace(one, arguments=()) for x, one in role.methods.items()}
    allowed = {"hello"} if role is nn_worker() else set(state_methods(role.name).split())
    may_look_up = {one for one in LOOKUPS if one in role.methods}
    if role is embedding_worker():
        may_look_up.remove("lookup")  # of a batch that was registered
    if role is nn_worker():
        may_look_up.clear()
    servers = make_servers()
    services = {SERVER_ROLE: servers[0], embedding_worker().name: make_worker(servers)}
    with (
        contextlib.closing(Wire("", Path(), keys=keys)) as wire,
        contextlib.closing(Wire("", Path(), keys=own)) as far,
    ):
        server = wire.serve(services.get(role.name), ANY_PORT, role=role, replica_index=0)
        bare_client = far.client(server, role=Role(role.name, bare))
        for method in sorted(role.methods.keys() - allowed - may_look_up):
            with pytest.raises(NotAllowed, match=f"{method} needs the control .*{name}'s"):
                bare_client.call(method)
        refused = len(role.methods) - len(allowed | may_look_up)
        assert server.stats()["bad.key"] == refused
        assert server.job.status is None
        ask = far.client(server, role=role)
        for method in allowed:
            ask.call(method, *[None] * len(role.methods[method].arguments))
        if may_look_up:
            check_lookups(ask)
            assert server.stats()["bad.key"] == refused + 3
        assert servers[0].get_embedding_size() == 0


def check_lookups(client: Client) -> None:
    if client.role == SERVER_ROLE:
        tables = (TableSigns(0, np.arange(3, dtype=np.uint64)),)
        (found,) = client.call("lookup", LookupRequest(0, False, tables)).tables
        assert not found.rows.any()
        with pytest.raises(NotAllowed, match="lookup for training needs"):
            client.call("lookup", LookupRequest(0, True, tables))
        signs = np.arange(3, dtype=np.uint64)
        assert not client.call("read_rows", RowsRequest(0, signs, False, False)).found.any()
        assert client.call("scan_rows", ScanRequest(0, 0, 0, 9, False)).cursor is None
        assert client.call("count_rows", 0, 0) == 0
        with pytest.raises(NotAllowed, match=r"read_rows with the .*state needs"):
            client.call("read_rows", RowsRequest(0, signs, True, False))
        with pytest.raises(NotAllowed, match=r"scan_rows with the .*state needs"):
            client.call("scan_rows", ScanRequest(0, 0, 0, 9, True))
        return
    asked = features({"sum": [[1]]}, requires_grad=False)
    assert client.call("lookup_direct", asked).ref is None
    with pytest.raises(NotAllowed, match="lookup_direct for training needs"):
        client.call("lookup_direct", features({"sum": [[1]]}))
    ids = np.arange(3, dtype=np.uint64)
    assert client.call("table_info", "sum").dim == 4
    assert not client.call("read_rows", IDsRequest("sum", ids, False, False)).found.any()
    assert client.call("scan_rows", FeatureScan("sum", 0, 0, 9, False)).cursor is None
    assert client.call("count_rows", "sum") == [0]
    with pytest.raises(NotAllowed, match=r"read_rows with the .*state needs"):
        client.call("read_rows", IDsRequest("sum", ids, True, False))
    with pytest.raises(NotAllowed, match=r"scan_rows with the .*state needs"):
        client.call("scan_rows", FeatureScan("sum", 0, 0, 9, True))


# --- strangers ----------------------------------------------------------------------------


def test_strangers_are_counted_and_dropped(
    keys: Path, stranger: Path, tmp_path: Path, caplog: Log
) -> None:
    """No ZeroMQ, no key, an unknown one, another server's: none gets in or disturbs."""
    other = tmp_path / "other"
    make_keys(other)
    with serving(keys) as server, connected(keys, server) as client:
        assert client.call("add", 0) == 0
        # Cut off as well, though libzmq does not report a peer that speaks no ZeroMQ at all.
        with tcp_of(server) as peer, contextlib.suppress(ConnectionResetError):
            peer.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(64))
            assert b"PERSIA" not in b"".join(iter(lambda: peer.recv(1 << 16), b""))
        for place in (None, other):
            assert_refused(place, server, more_strangers(server))
        line, is_dropped = "does not know this process's key", more_strangers(server)
        assert_refused(stranger, server, lambda: is_dropped() and line in caplog.text)
        with raw_peer(server.address) as raw:
            raw.call(1, "add", 0)
        assert server.stats().get("calls", 0) == 1
        assert client.call("add", 0) == 0
        assert client.stats().get("lost", 0) == 0
    lines = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert sum("no key that is known here" in one for one in lines) == 1
    assert any(line in one for one in lines)


def test_who_says_nothing_is_cut_off_and_delays_nobody(keys: Path, monkeypatch: Monkey) -> None:
    """So a flood of connections holds descriptors for the time of a handshake only."""
    monkeypatch.setattr(zmq_transport, "_HANDSHAKE_MS", 200)
    with serving(keys) as server, connected(keys, server) as client:
        assert client.call("add", 0) == 0
        strangers = [tcp_of(server) for _ in range(100)]
        assert client.call("add", 0) == 0
        for stranger in strangers:
            with stranger, contextlib.suppress(ConnectionResetError):
                while stranger.recv(64):  # its greeting, and then the end
                    pass
        assert client.call("add", 0) == 0
        assert client.stats().get("lost", 0) == 0


def test_keys_come_and_go_while_a_server_runs(tmp_path: Path, caplog: Log) -> None:
    """The users are read at each handshake; while that fails, no peer is admitted."""
    place, own = tmp_path / "keys", tmp_path / "own"
    make_keys(place)
    with serving(place) as server:
        make_keys(place, ["late"])
        only(place, own, "late.secret", "server.public")
        with connected(own, server) as client:
            assert client.call("add", 0) == 0
            (place / "late.public").rename(place / "late.away")
            assert_refused(own, server, more_strangers(server))
            # Whose connection stands is not cut off.
            assert client.call("add", 0) == 0
        (place / "odd.public").write_text("no key")
        assert_refused(place, server, more_strangers(server))
        (place / "odd.public").unlink()
        with connected(place, server) as known:
            assert known.call("add", 0) == 0
    lines = [text for text in caplog.messages if text.startswith("users that may connect")]
    with_late, without = "control, data, late, serve", "control, data, serve"
    assert [text.partition(": ")[2] for text in lines[:2]] == [with_late, without]
    assert f"none: {place}/odd.public: expected a key" in lines[2]


def test_a_key_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    full = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    refused = pytest.raises(ConfigError, match="cannot write keys")
    with patch.object(Path, "write_bytes", full), refused:
        make_keys(tmp_path)
    assert list(tmp_path.iterdir()) == []
    make_keys(tmp_path)
    assert all(not path.name.startswith(".") for path in tmp_path.iterdir())


@pytest.mark.parametrize("client_has_keys", [True, False])
def test_who_met_the_wrong_server_finds_the_right_one(
    keys: Path,
    tmp_path: Path,
    monkeypatch: Monkey,
    caplog: Log,
    client_has_keys: bool,
) -> None:
    """libzmq gives an address up where the two ends have other mechanisms."""
    monkeypatch.setattr(zmq_socket, "_RECONNECT_S", 0.05)
    monkeypatch.setattr(zmq_socket, "_POLL_S", 0.05)
    own, other = (keys, None) if client_has_keys else (None, keys)
    address = f"ipc://{tmp_path}/a"
    with serving(other, address) as wrong, connected(own, wrong) as client:
        with pytest.raises(ServiceUnavailable):
            client.call("add", 0, timeout_s=0.3)
        assert "calls" not in wrong.stats()
        if client_has_keys:
            until(lambda: "only one side has keys" in caplog.text)
        wrong.stop()
        with serving(own, address):
            assert client.call("add", 0) == 0


def test_what_a_peer_says_of_itself_ends_no_server() -> None:
    """The authenticator names a user; without keys a peer may send one that is no text."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\0" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x05READY"
    for name, value in ((b"Socket-Type", b"DEALER"), (b"User-Id", b"\xff")):
        ready += bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value
    with serving(None) as server:
        with tcp_of(server) as peer, peer.makefile("rb") as came:
            peer.sendall(greeting)
            assert len(came.read(64)) == 64
            # As any peer: a peer that sends a message before this is a stranger to libzmq.
            assert came.read(1) == b"\x04"
            assert came.read(came.read(1)[0]).startswith(b"\x05READY")
            peer.sendall(bytes([4, len(ready)]) + ready + b"\0\x01x")
            until(lambda: "bad.parts" in server.stats(), details=lambda: str(server.stats()))
        assert server.is_alive
        with connected(None, server) as client:
            assert client.call("add", 0) == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_server_whose_authenticator_has_failed_refuses_every_peer(
    keys: Path, stranger: Path, monkeypatch: Monkey
) -> None:
    """libzmq would: a server that cannot ask and has no domain takes every key."""
    failed: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: failed.append(args.exc_value))
    monkeypatch.setattr("persia._rpc.curve._REFUSED", None)
    with serving(keys) as server:
        with connected(keys, server) as client:
            assert client.call("add", 0) == 0
        assert_refused(stranger, server, lambda: failed)
        assert isinstance(failed[0], TypeError)
        assert_refused(keys, server)


# --- without keys ---------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "[::]"])
def test_w71_without_keys_only_this_machine_is_let_in(
    keys: Path, host: str, monkeypatch: Monkey, caplog: Log
) -> None:
    with contextlib.closing(ZmqTransport(keys=keys)) as guarded:
        guarded.listen("tcp://0.0.0.0:0").close(0.0)
    monkeypatch.delenv("PERSIA_LISTEN_WITHOUT_KEYS", raising=False)
    transport = ZmqTransport()
    with pytest.raises(ConfigError, match=r"PERSIA_KEYS.*PERSIA_LISTEN_WITHOUT_KEYS=1"):
        transport.listen(f"tcp://{host}:0")
    monkeypatch.setenv("PERSIA_LISTEN_WITHOUT_KEYS", "1")
    if host != "[::]":
        transport.listen(f"tcp://{host}:0").close(0.0)
        assert "without keys" in caplog.text
    transport.close()


def test_what_is_local() -> None:
    for host in ("127.0.0.1", "127.9.9.9", "[::1]", "localhost"):
        assert is_local(f"tcp://{host}:1"), host
    assert is_local("ipc:///tmp/x")
    for host in ("0.0.0.0", "*", "10.0.0.7", "[::]", "localhost.example"):
        assert not is_local(f"tcp://{host}:1"), host


# --- files --------------------------------------------------------------------------------


def test_the_command_makes_keys_for_their_owner_only(tmp_path: Path) -> None:
    place = tmp_path / "new/keys"
    done = CliRunner().invoke(cli, ["keys", str(place)])
    assert done.exit_code == 0, done.output
    names = ("server", "control", "data", "serve")
    assert {path.name for path in place.iterdir()} == {
        f"{name}.{kind}" for name in names for kind in ("public", "secret")
    }
    assert set(done.output.split()) == {str(path) for path in place.iterdir()}
    for name in names:
        secret = place / f"{name}.secret"
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
        assert stat.S_IMODE((place / f"{name}.public").stat().st_mode) == 0o644
        public = zmq.curve_public(secret.read_bytes().strip())
        assert public == (place / f"{name}.public").read_bytes().strip()
    before = {path: path.read_bytes() for path in place.iterdir()}
    again = CliRunner().invoke(cli, ["keys", str(place)])
    assert again.exit_code == 1
    assert "the key exists already" in again.output
    assert {path: path.read_bytes() for path in place.iterdir()} == before
    more = CliRunner().invoke(cli, ["keys", str(place), "--name", "loader-7"])
    assert more.exit_code == 0
    assert set(Keys(place).users().values()) == {"control", "data", "loader-7", "serve"}
    odd = CliRunner().invoke(cli, ["keys", str(place), "--name", "../x"])
    assert "expected a name of letters" in odd.output


def test_a_folder_that_cannot_be_read_is_named(monkeypatch: Monkey) -> None:
    """As where strangers hold all file descriptors: no peer is admitted meanwhile."""
    full = Mock(side_effect=OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
    monkeypatch.setattr(Path, "iterdir", full)
    with pytest.raises(ConfigError, match="PERSIA_KEYS: cannot read the folder"):
        Keys(Path("keys")).users()


def test_a_file_that_is_missing_or_no_key_is_named(keys: Path, tmp_path: Path) -> None:
    place = tmp_path / "some"
    place.mkdir()
    with (
        contextlib.closing(ZmqTransport(keys=place)) as transport,
        pytest.raises(ConfigError, match=r"expected a key at .*server\.secret"),
    ):
        transport.listen("tcp://127.0.0.1:0")
    with pytest.raises(ConfigError, match=r"one other secret key.*found none"):
        Keys(place).client_secret()
    with pytest.raises(ConfigError, match="s public key in"):
        Keys(place).users()
    for name in ("a", "b"):
        (place / f"{name}.secret").write_bytes((keys / "data.secret").read_bytes())
        (place / f"{name}.public").write_bytes((keys / "data.public").read_bytes())
    with pytest.raises(ConfigError, match="found a, b"):
        Keys(place).client_secret()
    with pytest.raises(ConfigError, match=r"b\.public.*it is a's"):
        Keys(place).users()
    for text in ("", "x" * 35, '"' * 40, "é", z85.encode(bytes(16)).decode()):
        (place / "server.public").write_text(text)
        with pytest.raises(ConfigError, match=r"server\.public: expected a key of"):
            Keys(place).server_public()
