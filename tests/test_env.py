"""What is read from the environment, and when."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from persia import env
from persia.ctx import BaseCtx
from persia.errors import ConfigError
from tests.support.fixtures import Log, Monkey

pytestmark = pytest.mark.usefixtures("no_job")


def place() -> tuple[int | None, ...]:
    return (
        env.get_world_size(),
        env.get_rank(),
        env.get_local_rank(),
        env.get_replica_size(),
        env.get_replica_index(),
    )


def set_rank(monkeypatch: Monkey, rank: str, local_rank: str, world_size: str) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setenv("WORLD_SIZE", world_size)


def test_a_process_has_a_rank_or_a_replica_number_until_reloaded(monkeypatch: Monkey) -> None:
    assert place() == (None, None, None, 1, 0)
    monkeypatch.setenv("REPLICA_SIZE", "4")
    monkeypatch.setenv("REPLICA_INDEX", "3")
    monkeypatch.setenv("RANK", "")
    assert place() == (None, None, None, 1, 0)
    env.reload_env()
    assert place() == (None, None, None, 4, 3)
    set_rank(monkeypatch, "5", "1", "8")
    env.reload_env()
    assert place() == (8, 5, 1, None, None)


def test_set_env_wins_and_leaves_the_rest_none(monkeypatch: Monkey) -> None:
    set_rank(monkeypatch, "0", "0", "1")
    env.set_env(replica_size=2, replica_index=1)
    assert place() == (None, None, None, 2, 1)
    env.set_env(world_size=2, rank=1, local_rank=0)
    assert place() == (2, 1, 0, None, None)


@pytest.mark.parametrize(
    ("rank", "local_rank", "world_size", "message"),
    [
        ("0", "0", "", "RANK is set to 0, so WORLD_SIZE must be set too"),
        ("0", "", "2", "WORLD_SIZE is 2, but embedded mode has one rank"),
        ("0", "", "", "so LOCAL_RANK and WORLD_SIZE must be set too"),
        ("x", "0", "1", "environment variable RANK must be an integer, got 'x'"),
        ("-1", "0", "1", "RANK must be at least 0, got -1"),
        ("0", "0", "0", "WORLD_SIZE must be at least 1, got 0"),
        ("2", "0", "2", "RANK must be below WORLD_SIZE 2, got 2"),
    ],
)
def test_w44_bad_ranks_are_named(
    monkeypatch: Monkey, rank: str, local_rank: str, world_size: str, message: str
) -> None:
    set_rank(monkeypatch, rank, local_rank, world_size)
    with pytest.raises(ConfigError, match=message):
        env.get_world_size()


def test_a_bad_reload_changes_nothing(monkeypatch: Monkey) -> None:
    env.set_env(replica_size=2, replica_index=1)
    monkeypatch.setenv("REPLICA_INDEX", "7")
    with pytest.raises(ConfigError, match="REPLICA_INDEX must be below REPLICA_SIZE 1, got 7"):
        env.reload_env()
    assert place() == (None, None, None, 2, 1)


@pytest.mark.parametrize(
    "name",
    [
        *("PERSIA_EMBEDDING_PARAMETER_SERVERS", "PERSIA_EMBEDDING_WORKERS"),
        *("EMBEDDING_WORKER_SERVICE", "PERSIA_NN_WORKERS", "PERSIA_NATS_URL"),
        *("PERSIA_NATS_IP", "PERSIA_LAUNCHED"),
    ],
)
def test_servers_named_is_services_with_any_world_size(monkeypatch: Monkey, name: str) -> None:
    assert env.get_mode() == "embedded"
    monkeypatch.setenv(name, "1")
    set_rank(monkeypatch, "0", "0", "2")
    assert env.get_mode() == "services"
    monkeypatch.setenv(name, "")
    with pytest.raises(ConfigError, match="WORLD_SIZE is 2"):
        env.get_mode()


def test_embedded_refuses_a_world_size_without_a_rank(monkeypatch: Monkey) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="a table of its own"):
        env.get_mode()
    env.set_env(world_size=1, rank=0, local_rank=0)
    assert env.get_mode() == "embedded"


def test_flags_are_read_at_each_use(monkeypatch: Monkey) -> None:
    for text, want in (("", False), ("0", False), ("1", True), ("true", True)):
        monkeypatch.setenv("PERSIA_SKIP_CHECK_DATA", text)
        monkeypatch.setenv("PERSIA_LAUNCHER_VERBOSE", text)
        assert (want, want) == (env.PERSIA_SKIP_CHECK_DATA, env.PERSIA_LAUNCHER_VERBOSE)
    monkeypatch.setenv("PERSIA_SKIP_CHECK_DATA", "perhaps")
    with pytest.raises(ConfigError, match="_SKIP_CHECK_DATA must be 0 or 1, got 'perhaps'"):
        env.skip_check_data()
    with pytest.raises(AttributeError, match="no attribute 'PERSIA_NOTHING'"):
        _ = env.PERSIA_NOTHING


def test_paths_and_texts(monkeypatch: Monkey) -> None:
    paths = (env.global_config_path, env.embedding_config_path, env.data_dir)
    for variable in (*paths, env.nn_worker_entry, env.data_loader_entry, env.isa):
        assert variable() is None
        monkeypatch.setenv(variable.name, "x")
        assert variable() == ("x" if variable is env.isa else Path("x"))


def test_the_folder_of_native_code_is_named_to_children(
    monkeypatch: Monkey, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CACHED_CPP_EXTENSION_BUILD_DIR", raising=False)
    assert env.extension_cache_folder() == tmp_path / ".cached_cpp_extensions"
    monkeypatch.chdir("/")  # the first choice holds
    assert env.extension_cache_folder() == tmp_path / ".cached_cpp_extensions"
    name = "CACHED_CPP_EXTENSION_BUILD_DIR"
    assert env.of_child()[name] == str(tmp_path / ".cached_cpp_extensions")
    monkeypatch.setenv(name, "relative")
    assert env.extension_cache_folder() == Path("/relative")


def test_variables_of_compilers_and_the_search_path(monkeypatch: Monkey) -> None:
    before = env.of_compilers()
    monkeypatch.setenv("CPATH", "/include")
    monkeypatch.setenv("LIBRARY_PATH", "")
    found = env.of_compilers()
    assert found["CPATH"] == "/include"
    assert "LIBRARY_PATH" not in found
    assert set(found) - {"CPATH"} <= set(before)
    monkeypatch.setenv("PATH", "/one:/two")
    assert env.search_path() == "/one:/two"


def test_a_change_is_undone(monkeypatch: Monkey) -> None:
    monkeypatch.setenv("MASTER_ADDR", "before")
    monkeypatch.setenv("PERSIA_ISA", "avx2")
    env.set_env(replica_size=2, replica_index=1)
    with env.changed(MASTER_ADDR="within", PERSIA_ISA=None, PERSIA_NN_WORKERS="a:1,b:2"):
        assert env.master_address() == "within"
        assert env.isa() is None
        assert env.nn_worker_addresses() == ["a:1", "b:2"]
        assert env.get_replica_index() == 1
    assert (env.master_address(), env.isa()) == ("before", "avx2")
    assert env.nn_worker_addresses() == ["127.0.0.1:23457"]


def test_levels_of_the_log(monkeypatch: Monkey) -> None:
    levels = {"": "INFO", "warn": "WARNING", "Debug": "DEBUG", "what=x": "INFO"}
    for text, want in levels.items():
        monkeypatch.setenv("LOG_LEVEL", text)
        assert logging.getLevelName(env.log_level()) == want


def test_an_unknown_level_is_warned_of(monkeypatch: Monkey, caplog: Log) -> None:
    monkeypatch.setenv("LOG_LEVEL", "verbose")
    env.log_level()
    (line,) = caplog.messages
    assert line.startswith(
        "LOG_LEVEL 'verbose' is not known, info is taken; levels are trace, "
    )


def test_addresses_have_commas_between_them(monkeypatch: Monkey) -> None:
    for text in ("a:1 b:2", "a:1, b:2 c:3", "ipc:///a ipc:///b", "tcp://a:1\tb:2"):
        monkeypatch.setenv("PERSIA_EMBEDDING_WORKERS", text)
        with pytest.raises(ConfigError, match=r"WORKERS must be .* separated by commas, got"):
            env.embedding_worker_addresses()
    monkeypatch.setenv("PERSIA_EMBEDDING_WORKERS", "ipc:///my folder/a, b:2")
    assert env.embedding_worker_addresses() == ["ipc:///my folder/a", "b:2"]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("ps-{0..2}.job:8888", ["ps-0.job:8888", "ps-1.job:8888", "ps-2.job:8888"]),
        ("a:1,h{08..10}:2", ["a:1", "h08:2", "h09:2", "h10:2"]),
        ("h{1..2}:{5..6}", ["h1:5", "h1:6", "h2:5", "h2:6"]),
        ("ipc:///tmp/{3..3}/s", ["ipc:///tmp/3/s"]),
        ("{a..b}:1", ["{a..b}:1"]),
    ],
)
def test_a_range_stands_for_its_addresses(
    monkeypatch: Monkey, text: str, want: list[str]
) -> None:
    monkeypatch.setenv("PERSIA_NN_WORKERS", text)
    assert env.nn_worker_addresses() == want


@pytest.mark.parametrize("text", ["h{3..1}:1", "h{0..99999999999}:1", "h{0..999}:{0..999}"])
def test_a_range_that_cannot_be_meant_names_its_variable(
    monkeypatch: Monkey, text: str
) -> None:
    monkeypatch.setenv("PERSIA_NN_WORKERS", text)
    with pytest.raises(
        ConfigError, match=r"PERSIA_NN_WORKERS must be a list of addresses, such as"
    ):
        env.nn_worker_addresses()


def test_where_ranks_meet_is_read_from_torchrun_and_slurm(monkeypatch: Monkey) -> None:
    assert (env.master_address(), env.num_nodes(), env.node_rank()) == (None, 1, 0)
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "4")
    monkeypatch.setenv("SLURM_NODEID", "3")
    for nodes, first in {
        "gpu[03-05,9],cpu1": "gpu03",
        "rack2-n[7,9]-ib,a": "rack2-n7-ib",
        "r[1-2]n[0-3]": "r1n0",
        "alone": "alone",
        "a.x,b": "a.x",
    }.items():
        monkeypatch.setenv("SLURM_STEP_NODELIST", nodes)
        assert env.master_address() == first
    assert (env.num_nodes(), env.node_rank()) == (4, 3)
    # Kubeflow Trainer's, and torchrun's own, come before it.
    monkeypatch.setenv("PET_NNODES", "2")
    monkeypatch.setenv("PET_NODE_RANK", "1")
    monkeypatch.setenv("PET_MASTER_ADDR", "job-node-0-0.job")
    monkeypatch.setenv("PET_MASTER_PORT", "29500")
    assert (env.num_nodes(), env.node_rank()) == (2, 1)
    assert (env.master_address(), env.master_port()) == ("job-node-0-0.job", 29500)
    monkeypatch.setenv("MASTER_ADDR", "[::1]")
    assert env.master_address() == "[::1]"
    monkeypatch.setenv("PET_NNODES", "1:4")
    with pytest.raises(ConfigError, match=r"PET_NNODES must be an integer, got '1:4'"):
        env.num_nodes()


def test_a_run_is_called_as_its_variable_or_its_folder(
    tmp_path: Path, monkeypatch: Monkey
) -> None:
    (tmp_path / "clicks").mkdir()
    monkeypatch.chdir(tmp_path / "clicks")
    assert env.run_name() == "clicks"
    monkeypatch.setenv("PERSIA_RUN_ID", "monday")
    assert env.run_name() == "monday"


def test_misspelled_variables_are_warned_of_once(monkeypatch: Monkey, caplog: Log) -> None:
    monkeypatch.setenv("PERSIA_RPC_TIMOUT", "5")
    monkeypatch.setenv("PERSIA_RPC_TIMEOUT", "5")
    monkeypatch.setenv("PERSIA_OF_SOMETHING_ELSE", "1")
    env.warn_of_misspelled.cache_clear()
    for _ in range(2):
        BaseCtx()
    assert caplog.messages == [
        "environment variable PERSIA_RPC_TIMOUT is not known, did you mean "
        "'PERSIA_RPC_TIMEOUT'?"
    ]
    assert list(env.unknown_names()) == ["PERSIA_OF_SOMETHING_ELSE", "PERSIA_RPC_TIMOUT"]
