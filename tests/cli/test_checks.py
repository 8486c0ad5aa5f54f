"""Findings of the checks, on settings, data, addresses and machines that a test chooses."""

from __future__ import annotations

import errno
import socket
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from persia import env
from persia._cli import checks
from persia._cli.checks import (
    Finding,
    check_files,
    check_machine,
    check_memory,
    check_network,
    check_procfile,
    check_sample,
    check_servers,
    check_variables,
    forecast,
    read_sample,
)
from persia._cluster.embedded import build_embedding_worker
from persia._metrics.definitions import TRAINER
from persia._rpc.client import Client
from persia._rpc.codec import FLOAT32
from persia._rpc.messages import IDFeatures
from persia._rpc.methods import Hello, Role
from persia._training.stream_source import Stream
from persia.config import EmbeddingSchema, GlobalConfig
from persia.embedding import EmbeddingConfig
from persia.embedding.data import (
    IDTypeFeature,
    IDTypeFeatureWithSingleID,
    NonIDTypeFeature,
    PersiaBatch,
)
from persia.embedding.optim import Adam
from persia.errors import ConfigError, DataError
from persia.utils import total_memory_bytes
from persia.version import __version__
from tests.support.fixtures import Log, Monkey
from tests.support.processes import loopback_host
from tests.support.streams import Background
from tests.support.waiting import PATIENCE_S

SCHEMA = EmbeddingSchema.load({"slots_config": {"user": {"dim": 8}, "item": {"dim": 32}}})


def bad(findings: list[Finding]) -> list[tuple[str, str]]:
    assert all(one.todo for one in findings if one.status != "ok")
    return [(one.status, one.text) for one in findings if one.status != "ok"]


# --- files ------------------------------------------------------------------------------------


def test_what_is_wrong_in_a_file_has_file_and_line(tmp_path: Path) -> None:
    slots, common = tmp_path / "slots.yml", tmp_path / "global.yml"
    slots.write_text("slots_config:\n  item:\n    dimm: 8\n")
    common.write_text("common_config:\n  a: [1\n")
    findings, schema, config = check_files(slots, common)
    assert (schema, config) == (None, GlobalConfig())
    (status, unknown), (_, no_yaml) = bad(findings)
    assert (status, "\n" in unknown) == ("error", False)
    assert unknown.startswith(f"{slots}:3: slots_config.item.dimm: unknown key")
    assert no_yaml.startswith(f"{common}:3: expected")
    for wrong, says in ((tmp_path / "nowhere.yml", "found none"), (tmp_path, "found a folder")):
        (found,), _, _ = check_files(wrong, None)
        assert found.text.endswith(says)
        assert found.todo == "correct the path"


def test_variables_that_cannot_be_read(monkeypatch: Monkey) -> None:
    monkeypatch.setenv("PERSIA_RPC_TIMEOUT", "abc")
    monkeypatch.setenv("PERSIA_NN_WORKRS", "a:1")
    monkeypatch.setenv("PERSIA_SOURCE", "/persia")
    found = bad([*check_variables()])
    assert dict(found) == {
        "error": "environment variable PERSIA_RPC_TIMEOUT must be a positive number of "
        "seconds, got 'abc'",
        "warning": "PERSIA_NN_WORKRS: unknown variable, did you mean 'PERSIA_NN_WORKERS'?",
    }
    assert {"PERSIA_RPC_TIMEOUT", "PERSIA_KEYS", "PERSIA_RUN_ID"} < env.VARIABLES.keys()


def test_old_spellings_and_keys_without_effect_are_warnings(tmp_path: Path) -> None:
    slots, common = tmp_path / "slots.yml", tmp_path / "global.yml"
    slots.write_text("slot_configs:\n  user: {dim: 8}\n")
    common.write_text("\ncommon_config:\n  job_type: Eval\n")
    findings, schema, _ = check_files(slots, common)
    assert schema is not None
    assert [status for status, _ in bad(findings)] == ["warning", "warning"]
    assert "slot_configs" in bad(findings)[0][1]


# --- memory -----------------------------------------------------------------------------------


def test_the_forecast_is_what_rows_take() -> None:
    config = GlobalConfig.load({"embedding_parameter_server_config": {"memory_limit": "1GiB"}})
    found = {one.feature: one for one in forecast(SCHEMA, config, "adam", {"user": 10})}
    worker = build_embedding_worker(SCHEMA, GlobalConfig())
    with closing(worker):
        worker.configure(EmbeddingConfig().settings())
        worker.register_optimizer(Adam().settings())
        ids = np.random.default_rng(1).integers(0, 1 << 50, 100_000, dtype=np.uint64)
        (before,) = worker.server_stats()
        features = (IDTypeFeatureWithSingleID("item", ids).feature_batch,)
        worker.lookup_direct(IDFeatures(features, 0, True))
        (after,) = worker.server_stats()
    real = (after["bytes"] - before["bytes"]) / after["rows"]
    assert found["item"].row_bytes == pytest.approx(real, rel=0.1)
    assert found["item"].row_bytes > 3 * 4 * 32
    small = EmbeddingSchema.load({"slots_config": {"a": {"dim": 16}}})
    (sgd,) = forecast(small, config, "sgd", {})
    half = {"slots_config": {"a": {"dim": 16}}, "group_settings": {"a": {"dtype": "float16"}}}
    (found_half,) = forecast(EmbeddingSchema.load(half), config, "sgd", {})
    assert (found_half.dtype, found_half.row_bytes) == ("float16", sgd.row_bytes - 32)
    assert sgd.row_bytes == pytest.approx(92, abs=1)  # as docs/operations.md says
    assert found["item"].fit == int(2**30 / found["item"].row_bytes)
    assert found["user"].row_bytes < found["item"].row_bytes
    assert (found["user"].rows, found["item"].rows) == (10, 0)
    with pytest.raises(ConfigError, match=r"usr is no feature .* did you mean 'user'\?"):
        forecast(SCHEMA, config, "adam", {"usr": 1})


def _found_of_memory(rows: dict[str, int], **settings: object) -> list[Finding]:
    of_server = {"keep_state": False, **settings}
    config = GlobalConfig.load({"embedding_parameter_server_config": of_server})
    return [*check_memory(config, forecast(SCHEMA, config, "sgd", rows))]


def _memory(rows: dict[str, int], **settings: object) -> list[tuple[str, str]]:
    return bad(_found_of_memory(rows, **settings))


def test_memory_that_is_not_there_is_found(monkeypatch: Monkey) -> None:
    monkeypatch.delenv("PERSIA_EMBEDDING_PARAMETER_SERVERS", raising=False)
    assert _memory({}) == []
    assert _memory({"user": 1000}, memory_limit="1GiB") == []
    assert _memory({}, memory_limit=2 * total_memory_bytes())[0][0] == "error"
    assert "memory_limit is 0" in _memory({}, memory_limit=0)[0][1]
    text = _found_of_memory({}, capacity=10**6)[1].text
    assert "1,000,000 rows on, by capacity, and needs 0.1 GiB for them" in text
    assert "rows will be evicted" in _memory({"user": 10**8}, memory_limit="1GiB")[0][1]
    assert "rows will be evicted" in _memory({"user": 10}, capacity=5)[0][1]
    both = "127.0.0.1:8888,127.0.0.1:8889"
    monkeypatch.setenv("PERSIA_EMBEDDING_PARAMETER_SERVERS", both)
    assert "2 parameter server(s) here" in _memory({})[0][1]
    nowhere = {"keep_state": True, "state_dir": "/nowhere", "memory_limit": "1GiB"}
    assert "cannot be written" in _memory({}, **nowhere)[0][1]


# --- data -------------------------------------------------------------------------------------


def _sample(path: Path) -> list[tuple[str, str]]:
    return bad([*check_sample(SCHEMA, read_sample(path), path.name)])


def test_a_batch_has_the_features_of_the_config(tmp_path: Path) -> None:
    ids = np.arange(4, dtype=np.uint64)
    path = tmp_path / "batch"

    def write(*features: IDTypeFeatureWithSingleID | IDTypeFeature, dense: float = 0.0) -> None:
        batch = PersiaBatch(
            [*features],
            non_id_type_features=[NonIDTypeFeature(np.full((4, 1), dense, np.float32))],
            requires_grad=False,
        )
        path.write_bytes(batch.to_bytes())

    user, item = (IDTypeFeatureWithSingleID(name, ids) for name in ("user", "item"))
    write(user, item)
    assert _sample(path) == []
    write(user, IDTypeFeatureWithSingleID("itm", ids), dense=np.nan)
    assert [status for status, _ in _sample(path)] == ["error", "error", "warning"]
    texts = "\n".join(text for _, text in _sample(path))
    assert "feature item of the config is not in the data" in texts
    assert "feature itm is not in the config" in texts
    assert "not finite" in texts
    write(user, IDTypeFeature("item", [ids << np.uint64(60)] * 4))
    assert "is the largest" in _sample(path)[0][1]
    path.write_bytes(b"nothing")
    with pytest.raises(DataError, match="batch"):
        read_sample(path)


def test_arrays_and_tables_are_samples(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.npz"
    np.savez(path, user=np.arange(3), item=np.arange(3.0), price=np.ones(3))
    assert [text for _, text in _sample(path)] == ["a.npz: item is float64, expected integers"]
    path = tmp_path / "a.parquet"
    lists = pyarrow.array([[1, 2], None, [3]], pyarrow.list_(pyarrow.int64()))
    table = pyarrow.table({"user": [1, 2, None], "item": lists, "title": ["a", "b", "c"]})
    parquet.write_table(table, path)
    assert _sample(path) == []
    assert set(read_sample(path).ids) == {"user", "item", "title"}
    # Texts are ids too, and where a name is absent another may be meant.
    texts = pyarrow.array([["a", "b"], None, []])
    for user in (pyarrow.array(["x", None, "y"]).dictionary_encode(), ["x", "y", "z"]):
        parquet.write_table(pyarrow.table({"user": user, "item": texts}), path)
        assert _sample(path) == []
    parquet.write_table(pyarrow.table({"user": user, "itm": texts, "title": user}), path)
    assert [text for _, text in _sample(path)] == [
        "a.parquet: feature item of the config is not in the data, did you mean 'itm'?"
    ]
    floats = pyarrow.array([[1.0, float("nan")], [], [2.0]])
    maps = pyarrow.array([[("a", 1)], [], []], pyarrow.map_(pyarrow.string(), pyarrow.int64()))
    prices = floats.cast(pyarrow.list_(pyarrow.float32()))
    table = pyarrow.table({"user": user, "item": floats, "price": prices, "m": maps})
    parquet.write_table(table, path)
    assert [text for _, text in _sample(path)] == [
        "a.parquet: item is float64, expected integers",
        "a.parquet: item holds values that are not finite",
        "a.parquet: price holds values that are not finite",
    ]


SCRIPT = """
import numpy as np
from persia.ctx import DataCtx
from persia.embedding.data import IDTypeFeatureWithSingleID, PersiaBatch

with DataCtx() as ctx:
    ctx.seek(ctx.resume_position)
    while True:
        ids = np.arange(4, dtype=np.uint64)
        features = [IDTypeFeatureWithSingleID(name, ids) for name in {names}]
        ctx.send_data(PersiaBatch(features, requires_grad=False))
"""


def test_a_script_is_run_up_to_its_first_batch(tmp_path: Path) -> None:
    script = tmp_path / "data_loader.py"
    script.write_text(SCRIPT.format(names=["user", "item"]))
    assert _sample(script) == []
    script.write_text("raise ValueError('no data here')\n")
    with pytest.raises(DataError, match="no data here"):
        read_sample(script)


def test_what_does_not_end_is_said_to_be_slow(tmp_path: Path, monkeypatch: Monkey) -> None:
    monkeypatch.setattr(checks, "_TORCH_S", 0.01)
    monkeypatch.setattr(checks, "_SCRIPT_S", 0.01)
    (slow,) = [one for one in check_machine(huge_pages=tmp_path) if one.check == "torch"]
    assert slow.text == "did not load within 0.01 s"
    assert slow.todo == "check the load of this machine and its disk"
    with pytest.raises(DataError, match="it sent no batch within"):
        read_sample(tmp_path / "data_loader.py")


# --- network ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("lists")
def test_ports_names_and_lists(monkeypatch: Monkey) -> None:
    findings = [*check_network("")]
    assert bad(findings) == []
    assert sum("not running yet" in one.text for one in findings) == 3
    host = loopback_host()
    with (
        closing(socket.create_server((host, 22888))),
        closing(socket.create_server((host, 9500))),
    ):
        found = bad([*check_network("")])
    assert [status for status, _ in found] == ["error", "warning"]
    assert "another program listens there" in found[0][1]
    assert "ports 9500 of" in found[1][1]
    monkeypatch.setenv("PERSIA_EMBEDDING_WORKERS", "no-such-host.invalid:8887")
    assert "cannot be resolved" in bad([*check_network("")])[0][1]
    monkeypatch.setenv("PERSIA_LISTEN_HOST", "0.0.0.0")
    assert "without keys" in bad([*check_network("")])[0][1]
    monkeypatch.setenv("PERSIA_NN_WORKERS", "here")
    ((status, text),) = bad([*check_network("")])
    assert (status, text.partition(":")[0]) == ("error", "PERSIA_NN_WORKERS")


@pytest.mark.usefixtures("lists")
def test_versions_and_configs_that_disagree(monkeypatch: Monkey) -> None:
    version, fingerprint = __version__, "{}"

    def hello(role: Role, address: str) -> Hello:
        return Hello(role.name, 0, 1, 7, version, fingerprint, FLOAT32)

    monkeypatch.setenv("PERSIA_METRICS_PORT", "9100")
    monkeypatch.setattr(checks, "_listen_errno", lambda address: errno.EADDRINUSE)
    monkeypatch.setattr(checks, "_say_hello", hello)
    assert bad([*check_network("{}")]) == []
    fingerprint = '{"slots":{}}'
    assert "another embedding config" in bad([*check_network("{}")])[0][1]
    version = "0.1"
    assert f"is PERSIA 0.1, and this is {__version__}" in bad([*check_network("")])[0][1]


def test_servers_elsewhere_are_asked_at_the_same_time(monkeypatch: Monkey) -> None:
    """As trainers that read no data-loaders, which are silent however long one waits."""
    monkeypatch.setattr(checks, "_FORWARDED_S", 2.0)
    events: list[str] = []
    begin = Client.begin

    def noted(client: Client, *call: Any) -> Any:
        events.append("asked")
        return begin(client, *call)

    monkeypatch.setattr(Client, "begin", noted)
    with ExitStack() as stack:
        servers = []
        for _ in range(3):
            silent = stack.enter_context(closing(socket.create_server(("127.0.0.1", 0))))
            silent.settimeout(PATIENCE_S)
            servers.append((silent, f"tcp://127.0.0.1:{silent.getsockname()[1]}"))

        def ask() -> None:
            given = [(TRAINER, f"rank {n}", at) for n, (_, at) in enumerate(servers)]
            events.extend(one.text for one in check_servers(given, ""))

        asking = Background(ask)
        for silent, _ in servers:
            stack.enter_context(closing(silent.accept()[0]))
        asking.result()
    why = "does not answer: no connection within 2 s, for hello"
    assert events == ["asked"] * 3 + [f"rank {number} {why}" for number in range(3)]


# --- machine ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_torch")
def test_huge_pages_and_kernels(tmp_path: Path, monkeypatch: Monkey) -> None:
    monkeypatch.delenv("PERSIA_ISA", raising=False)
    place = tmp_path / "enabled"
    for text, expected in (("always [madvise] never", 0), ("always madvise [never]", 1)):
        place.write_text(text)
        found = bad([*check_machine(huge_pages=place)])
        assert len(found) == expected
    monkeypatch.setenv("PERSIA_ISA", "mmx")
    found = bad([*check_machine(huge_pages=tmp_path / "nowhere")])
    assert [status for status, _ in found] == ["error"]


@pytest.mark.usefixtures("lists")
def test_a_probe_is_no_stranger_to_a_service(monkeypatch: Monkey, caplog: Log) -> None:
    monkeypatch.setattr(checks, "_ANSWER_S", PATIENCE_S)
    with closing(Stream(0, 1, 4, f"tcp://{loopback_host()}:0")) as stream:
        monkeypatch.setenv("PERSIA_NN_WORKERS", stream.address.removeprefix("tcp://"))
        assert bad([*check_network("")]) == []
        assert "dropped.stranger" not in stream.server.stats()
    assert not [one for one in caplog.records if "refused" in one.message]


# --- Procfile ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("sh -c 'a b'", ""),
        ("cd sub && nowhere", ""),
        ("A=1 exec nowhere", ""),
        ("env -u A nowhere", ""),
        ("A=1 -x", ""),
        ("A=$(cat x y) nowhere", ""),
        ("${COMMAND:-nowhere} x", ""),
        (". ./env.sh; nowhere", ""),
        ("A=1 B=2 honco", "no such command: honco"),
        ("exec env A=1 honco", "no such command: honco"),
    ],
)
def test_commands_of_a_procfile_exist(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "Procfile"
    path.write_text(f"# comment\n\nw: {line}\n")
    found = [*check_procfile(path)]
    assert bad(found) == ([("error", f"{path}:3: w: {says}")] if says else [])
    if not says:
        assert [one.text for one in found] == [f"{path}: its commands exist"]
