"""``persia-launcher top``: of processes that answer, are silent, gone, or other programs."""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, suppress
from pathlib import Path
from xml.etree import ElementTree

import pytest

from persia._cli.top import Scraper, ScrapeTarget, frame_of, list_targets
from persia._metrics.definitions import LOADER, SERVER, TRAINER, WORKER
from persia._metrics.top_view import Watched
from persia.errors import ConfigError
from tests.cli.pictures import draw_doctor, draw_top, whole_frame
from tests.cluster.place import hosts_of
from tests.metrics.job import text_of, training_job
from tests.support import web
from tests.support.fixtures import Monkey
from tests.support.processes import ROOT, loopback_host, run
from tests.support.waiting import until

HOST = loopback_host()
SHORT_S, LONG_S = 0.2, 30.0


def answering(text: Callable[[str], str], status: int = 200) -> AbstractContextManager[int]:
    return web.answering(lambda path, _: text(path), status, HOST)


def asked(*places: ScrapeTarget, times: int = 1) -> Scraper:
    scraper = Scraper(places, LONG_S)
    for _ in range(times):
        scraper.request_all()
        scraper.wait(LONG_S)
    return scraper


def ask(*places: ScrapeTarget) -> list[Watched]:
    return asked(*places).processes()


def test_who_answers_says_who_it_is_and_rates_are_between_two_answers() -> None:
    counts = iter([100.0, 300.0])

    def text(path: str) -> str:
        assert path == "/metrics"
        return text_of(SERVER, 3, persia_lookups_total=next(counts))

    with answering(text) as port:
        found = asked(ScrapeTarget(WORKER, 0, HOST, port), times=2).processes()
    assert [(one.role, one.replica, one.problem) for one in found] == [(SERVER, 3, "")]
    assert found[0].span is not None
    assert found[0].span.delta("persia_lookups_total") == 200


NOT_READY = text_of(WORKER, 0).replace(" 1.0\nprocess", " 0.0\nprocess")


@pytest.mark.parametrize(
    ("status", "text", "has_answered", "says"),
    [
        (200, NOT_READY, True, "no server answers"),  # what /readyz says
        (404, "no such page", False, "another program answers there: HTTP status 404"),
        (200, "hello", False, "metrics of a process of PERSIA"),
    ],
)
def test_what_is_wrong_with_a_process_that_answers(
    status: int, text: str, has_answered: bool, says: str
) -> None:
    def page(path: str) -> str:
        return "no server answers\n" if path == "/readyz" else text

    with answering(page, status) as port:
        (found,) = ask(ScrapeTarget(WORKER, 0, HOST, port))
    assert (found.span is not None) == has_answered
    assert says in found.problem


def test_a_process_that_two_addresses_lead_to_is_shown_once() -> None:
    """In a container of the job one is its service's name, and the other is loopback."""

    def text(path: str) -> str:
        return text_of(TRAINER, 0, process_start_time_seconds=17.5)

    with answering(text) as port, answering(text) as same:
        found = ask(ScrapeTarget(TRAINER, 0, HOST, port), ScrapeTarget(LOADER, 0, HOST, same))
    assert [(one.role, one.replica) for one in found] == [(TRAINER, 0)]


def test_of_a_name_of_several_hosts_no_port_behind_is_expected(monkeypatch: Monkey) -> None:
    hosts = [HOST, f"{HOST.rpartition('.')[0]}.99"]
    hosts_of(monkeypatch, {"workers": hosts, **{host: [host] for host in hosts}})
    with answering(lambda _: text_of(WORKER, 0)) as port:
        found = ask(ScrapeTarget(WORKER, 0, "workers", port))
    # The second host does not answer, and counts as silent; the next ports are not expected.
    assert [(one.place, one.span is None) for one in found] == [
        (f"workers:{port}", False),
        (f"{hosts[1]}:{port}", True),
    ]


def test_who_is_listed_and_gone_is_shown_and_others_are_not() -> None:
    with closing(socket.create_server((HOST, 0))) as server:
        port = server.getsockname()[1]
    (found,) = ask(ScrapeTarget(SERVER, 1, HOST, port))
    assert (found.replica, found.problem) == (1, "not running: connection refused")
    assert ask(ScrapeTarget(LOADER, 0, HOST, port, is_listed=False)) == []
    (found,) = ask(ScrapeTarget(SERVER, 1, "no-such-host.invalid", port))
    assert found.problem.startswith("its name cannot be resolved")


def test_a_silent_process_is_shown_within_its_deadline_and_holds_up_nobody() -> None:
    """One accepts and says nothing; one says a byte now and then and never ends."""
    ended = threading.Event()

    def trickle(server: socket.socket) -> None:
        server.settimeout(SHORT_S)
        while not ended.is_set():
            # Again, if this thread had no processor for so long that the other side gave up.
            with suppress(TimeoutError, ConnectionError), closing(server.accept()[0]) as one:
                one.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
                while not ended.wait(SHORT_S / 4):
                    one.sendall(b"#")

    with (
        closing(socket.create_server((HOST, 0))) as silent,
        closing(socket.create_server((HOST, 0))) as slow,
        answering(lambda _: text_of(SERVER, 0)) as port,
    ):
        thread = threading.Thread(target=trickle, args=(slow,))
        thread.start()
        try:
            ports = port, silent.getsockname()[1], slow.getsockname()[1]
            places = [ScrapeTarget(SERVER, i, HOST, where) for i, where in enumerate(ports)]
            scraper = Scraper(places, SHORT_S)
            found: dict[int, Watched] = {}

            def is_shown() -> bool:
                scraper.request_all()
                scraper.wait(3 * SHORT_S)  # the one that trickles never ends
                found.update((one.replica, one) for one in scraper.processes())
                return found[0].span is not None and "answer for" in found[2].problem

            until(is_shown, details=lambda: found)
            assert found[1].problem.startswith("no answer")
            assert found[2].problem.startswith("no answer for")
            scraper.request_all()
            scraper.wait(SHORT_S)
            assert {one.replica for one in scraper.processes()} == {0, 1, 2}
        finally:
            ended.set()
            thread.join()


def test_places_are_those_of_the_lists(monkeypatch: Monkey) -> None:
    def places(*named: str) -> set[tuple[str, int, str, int, bool]]:
        return {
            (one.role, one.index, one.host, one.port, one.is_listed)
            for one in list_targets(named)
        }

    for name in ("PERSIA_METRICS_PORT", "PERSIA_METRICS_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PERSIA_EMBEDDING_WORKERS", "ipc:///tmp/x,w.example:8887")
    monkeypatch.setenv("PERSIA_EMBEDDING_PARAMETER_SERVERS", "127.0.0.1:8888,localhost:8889")
    monkeypatch.setenv("PERSIA_NN_WORKERS", "a.example:23457,a.example:23458,b.example:23457")

    def trainers(port: int) -> set[tuple[str, int, str, int, bool]]:
        hosts = (("a.example", port), ("a.example", port + 1), ("b.example", port))
        return {(TRAINER, rank, *where, True) for rank, where in enumerate(hosts)}

    assert places() == trainers(9700) | {
        (WORKER, 0, "127.0.0.1", 9500, True),
        (WORKER, 1, "w.example", 9501, True),
        (SERVER, 0, "127.0.0.1", 9600, True),
        (SERVER, 1, "127.0.0.1", 9601, True),
        (LOADER, 0, "127.0.0.1", 9400, False),
    }
    assert places("loaders:9403") - places() == {(LOADER, 0, "loaders", 9403, True)}
    monkeypatch.setenv("PERSIA_METRICS_PORT", "9100")
    monkeypatch.setenv("PERSIA_METRICS_HOST", "0.0.0.0")
    monkeypatch.setenv("PERSIA_EMBEDDING_PARAMETER_SERVERS", "server:8888")
    assert places() == trainers(9100) | {
        (WORKER, 0, "127.0.0.1", 9100, True),
        (WORKER, 1, "w.example", 9100, True),
        (SERVER, 0, "server", 9100, True),
    }
    monkeypatch.setenv("PERSIA_METRICS_PORT", "0")
    assert len(places("[::1]:9403")) == 1
    with pytest.raises(ConfigError, match="persia-launcher top HOST:PORT"):
        places()
    with pytest.raises(ConfigError, match="expected HOST:PORT"):
        places("here")


def test_a_frame_says_of_which_run_it_is(monkeypatch: Monkey) -> None:
    monkeypatch.delenv("PERSIA_RUN_ID", raising=False)
    with (
        answering(lambda _: text_of(WORKER, 0, "ours")) as one,
        answering(lambda _: text_of(SERVER, 0, "theirs")) as other,
    ):
        scraper = asked(
            ScrapeTarget(WORKER, 0, HOST, one), ScrapeTarget(SERVER, 0, HOST, other)
        )
        title = "run ours, theirs: 2 of 2 processes answer (of one job? PERSIA_RUN_ID names it)"
        assert frame_of(scraper).title == title
        monkeypatch.setenv("PERSIA_RUN_ID", "ours")
        frame = frame_of(scraper)
    assert frame.title == "run ours: 1 of 2 processes answer"
    assert [one.problem for one in frame.processes] == [
        "",
        "is of another run, theirs, and PERSIA_RUN_ID is ours",
    ]


# --- beside a job of real processes ---------------------------------------------------------

ROLES = ("data-loader", "embedding-worker", "parameter-server", "nn-worker")
NUM_PROCESSES = 2 + 1 + 2 + 1


@pytest.mark.slow
def test_top_shows_a_job_and_who_stands_still() -> None:
    with training_job() as cluster:

        def top(*words: str) -> subprocess.CompletedProcess[str]:
            command = ("-m", "persia.launcher", "top", "--once", "--interval")
            return run(*command, *words, env=cluster.environment)

        whole_frame(cluster)  # all are there
        ran = top("0.5", "--timeout", "60")
        assert ran.returncode == 0, ran.stderr + cluster.logs()
        lines = ran.stdout.splitlines()
        assert f"{NUM_PROCESSES} of {NUM_PROCESSES} processes answer" in lines[0]
        assert "samples/s" in lines[1]
        assert "accuracy 0." in ran.stdout
        assert "slowest: " in ran.stdout
        tables = [line.split()[0] for line in lines if " state " in line]
        assert tuple(tables) == ROLES
        assert ran.stdout.count(" ready ") == NUM_PROCESSES

        server = cluster.processes["embedding-parameter-server-1"]
        server.send_signal(signal.SIGSTOP)
        try:
            others = f"{NUM_PROCESSES - 1} of {NUM_PROCESSES} processes answer"

            def is_shown() -> bool:
                nonlocal ran
                ran = top("0.1", "--timeout", "4")
                assert ran.returncode == 0, ran.stderr
                return others in ran.stdout  # unless another one was too slow

            until(is_shown, details=lambda: ran.stdout)
        finally:
            server.send_signal(signal.SIGCONT)
        assert "embedding-parameter-server 1 at " in ran.stdout
        assert "no answer" in ran.stdout

        cluster.kill("embedding-parameter-server-0")
        assert "not running: connection refused" in top("0.1").stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draw", "words"),
    [
        (draw_top, (*ROLES, "slowest:", "samples/s", "accuracy", "6 of 6 processes answer")),
        (draw_doctor, ("torch", "huge pages", "feature school of the config", "bytes a row")),
    ],
)
def test_pictures_are_of_real_runs(
    tmp_path: Path, draw: Callable[[Path], Path], words: tuple[str, ...]
) -> None:
    made = draw(tmp_path)
    for path in (made, ROOT / "docs/images" / made.name):
        root = ElementTree.parse(path).getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert not root.findall(".//{*}script")
        text = "\n".join(root.itertext()).replace("\xa0", " ")
        assert f"persia-launcher {made.stem}" in text
        for word in words if path == made else ():
            assert word in text
