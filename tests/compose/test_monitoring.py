"""Dashboard and alerts: they use metrics that exist, and a real Prometheus evaluates them."""

from __future__ import annotations

import json
import os
import re
import shutil
import urllib.parse
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from persia._metrics.definitions import METRICS
from tests.metrics.job import StandingJob, fetch, standing_job
from tests.support.processes import ROOT, Process, run
from tests.support.waiting import until

PLACE = ROOT / "compose/monitoring"
DASHBOARD = PLACE / "grafana/dashboards/persia.json"
DEADLINE_S = 30.0

_WORDS = {
    *("abs", "and", "avg", "by", "count", "histogram_quantile", "increase", "max_over_time"),
    *("or", "rate", "sum", "Inf"),
}


def panels() -> dict[str, list[str]]:
    """The expressions of each panel, by title."""
    board = json.loads(DASHBOARD.read_text())
    return {
        panel["title"]: [target["expr"] for target in panel["targets"]]
        for panel in board["panels"]
        if panel["type"] != "row"
    }


def alerts() -> dict[str, str]:
    groups = yaml.safe_load((PLACE / "rules.yml").read_text())["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


def names_in(expression: str) -> set[str]:
    """The metrics that a PromQL expression asks for."""
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|by \([^)]*\)|'[^']*'|\"[^\"]*\"", " ", expression)
    return set(re.findall(r"[a-zA-Z_]\w*", bare)) - _WORDS


def known() -> set[str]:
    """Every series of the catalogue, and those of the library and of Prometheus."""
    found = {"up", "process_resident_memory_bytes", "process_cpu_seconds_total"}
    for metric in METRICS.values():
        found |= {metric.series}
        if metric.kind == "histogram":
            found |= {f"{metric.name}_{part}" for part in ("bucket", "sum", "count")}
    return found


def test_dashboard_and_alerts_ask_for_what_is_told() -> None:
    text = 'histogram_quantile(0.99, sum by (a, le) (rate(x_bucket{b="c"}[5m]))) > 1 or y == 0'
    assert names_in(text) == {"x_bucket", "y"}
    for title, expressions in {**panels(), "alerts": list(alerts().values())}.items():
        for expression in expressions:
            assert names_in(expression) <= known(), title


def test_grafana_can_show_every_panel() -> None:
    """What its schema asks for: numbers of their own, places that do not overlap, names."""
    board = json.loads(DASHBOARD.read_text())
    assert board["schemaVersion"] == 39  # Grafana 11's
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    places = [panel["gridPos"] for panel in board["panels"]]
    cells = [
        (p["x"] + x, p["y"] + y) for p in places for x in range(p["w"]) for y in range(p["h"])
    ]
    assert len(set(cells)) == len(cells)  # none lies over another
    assert max(x for x, _ in cells) < 24
    assert places == sorted(places, key=lambda p: p["y"])  # in the order in which they are read
    for panel in board["panels"]:
        if panel["type"] == "row":
            assert panel["panels"] == []
            continue
        assert panel["type"] == "timeseries", panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs) > 0, panel["title"]
        for target in panel["targets"]:
            named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert named <= labels_told(target["expr"]), (panel["title"], named)


def labels_told(expression: str) -> set[str]:
    """The labels of what an expression comes to: those it groups by, or the metrics' own."""
    grouped = re.findall(r"\bby \(([^)]*)\)", expression)
    if grouped:
        return set(re.findall(r"\w+", grouped[0]))
    if re.match(r"sum\(", expression):
        return set()
    found = {"role", "replica", "job", "instance"}
    for metric in METRICS.values():
        if any(name.startswith(metric.name) for name in names_in(expression)):
            found |= set(metric.labels)
    return found


def test_every_original_panel_is_there() -> None:
    board = json.loads(DASHBOARD.read_text())
    assert (board["title"], board["uid"]) == ("Persia", "plbyJbK7z")
    assert {title.lower() for title in panels()} >= {
        *("staleness", "num pending batches", "batch unique indices rate", "index miss ratio"),
        *("index miss count", "gradient id miss count", "lookup from hashmap time"),
        *("lookup preprocess time", "lookup rpc time", "update gradient time"),
        *("lookup postprocess time", "lookup total time"),
    }


def test_the_stack_gives_each_image_its_files() -> None:
    services = yaml.safe_load((ROOT / "compose/stack.yml").read_text())["services"]
    for name in ("prometheus", "grafana"):
        mounted = [one.split(":") for one in services[name]["volumes"] if one.startswith(".")]
        assert mounted
        for source, target, mode in mounted:
            assert (ROOT / source).exists(), source
            assert target.startswith("/etc/")
            assert mode == "ro"
    source = yaml.safe_load(
        (PLACE / "grafana/provisioning/datasources/prometheus.yml").read_text()
    )["datasources"][0]
    provider = yaml.safe_load(
        (PLACE / "grafana/provisioning/dashboards/persia.yml").read_text()
    )
    folder = provider["providers"][0]["options"]["path"]
    assert (
        f"./compose/monitoring/grafana/dashboards:{folder}:ro" in services["grafana"]["volumes"]
    )
    assert source["url"] == "http://prometheus:9090"
    used = {
        panel["datasource"]["uid"]
        for panel in json.loads(DASHBOARD.read_text())["panels"]
        if "datasource" in panel
    }
    assert used == {source["uid"]}
    settings = (ROOT / "compose/.docker.env").read_text()
    port = int(re.findall(r"^PERSIA_METRICS_PORT=(\d+)$", settings, re.MULTILINE)[0])
    for job in yaml.safe_load((PLACE / "prometheus.yml").read_text())["scrape_configs"]:
        (found,) = job["dns_sd_configs"]
        assert found["port"] == port
        assert found["names"] == [job["job_name"].replace("-", "_")]
        assert found["names"][0] in services


# --- with a real Prometheus -------------------------------------------------------------------


def need(command: str) -> str:
    found = shutil.which(command)
    if found is None:
        pytest.skip(f"no {command} here: Debian's package prometheus has it")
    return found


def test_promtool_takes_configuration_and_rules() -> None:
    for kind, name in (("config", "prometheus.yml"), ("rules", "rules.yml")):
        done = run(need("promtool"), "check", kind, PLACE / name)
        assert done.returncode == 0, done.stderr


# By alert: series that let it fire, with a value every 30 s, as promtool writes them.
WRONG = {
    "PersiaDown": {'up{job="nn-worker", instance="a:9400"}': "0x40"},
    "PersiaGone": {
        'persia_info{role="nn-worker", replica="0"}': "1x40",
        'persia_info{role="nn-worker", replica="1"}': "1x30 stale",
    },
    "PersiaUnhealthy": {"persia_healthy": "0x40"},
    "PersiaNotReady": {"persia_ready": "0x40"},
    "PersiaServerRestarted": {"persia_server_restarts_total": "0x30 1x9"},
    "PersiaStandsStill": {"persia_steps_total": "7x40"},
    "PersiaBatchesLost": {'persia_batches_total{outcome="failed"}': "0x30 1x9"},
    "PersiaNotFinite": {'nan_count_total{feat="user"}': "0x30 3x9"},
    "PersiaLossNotFinite": {"persia_loss": " ".join(["NaN"] * 41)},
    "PersiaWaitsForData": {"get_train_batch_time_cost_more_than_1ms_sec_sum": "0+20x40"},
    "PersiaGradientsMissRows": {
        "gradient_id_miss_count_total": "0+10x40",
        "persia_looked_up_ids_total": "0+100x40",
    },
    "PersiaMemoryFull": {"persia_rows_bytes": "99x40", "persia_memory_limit_bytes": "100x40"},
    "PersiaEvicts": {'persia_evicted_rows_total{replica="0"}': "0+5x40"},
    "PersiaSlowCalls": {
        'persia_rpc_served_seconds_bucket{method="lookup", le="1.0"}': "0x40",
        'persia_rpc_served_seconds_bucket{method="lookup", le="2.0"}': "0+10x40",
        'persia_rpc_served_seconds_bucket{method="lookup", le="+Inf"}': "0+10x40",
    },
    "PersiaBusy": {"persia_rpc_busy_total": "0+60x40"},
    "PersiaConnectionsBreak": {"persia_rpc_lost_connections_total": "0+1x40"},
    "PersiaCheckpointOld": {"persia_checkpoint_age_seconds": "100000x40"},
}
RIGHT = {
    'up{job="nn-worker", instance="a:9400"}': "1x40",
    'persia_info{role="nn-worker", replica="0"}': "1x40",
    "persia_healthy": "1x40",
    "persia_ready": "1x40",
    "persia_server_restarts_total": "3x40",
    "persia_steps_total": "0+100x40",
    'persia_batches_total{outcome="failed"}': "2x40",
    "persia_loss": "0.5x40",
    "get_train_batch_time_cost_more_than_1ms_sec_sum": "0+1x40",
    "gradient_id_miss_count_total": "0x40",
    "persia_looked_up_ids_total": "0+100x40",
    "persia_rows_bytes": "50x40",
    "persia_memory_limit_bytes": "100x40",
    'persia_rpc_served_seconds_bucket{method="lookup", le="1.0"}': "0+10x40",
    'persia_rpc_served_seconds_bucket{method="lookup", le="+Inf"}': "0+10x40",
    "persia_rpc_busy_total": "5x40",
    "persia_rpc_lost_connections_total": "3x40",
    "persia_checkpoint_age_seconds": "600x40",
}


def test_each_alert_fires_for_its_fault_and_no_other(tmp_path: Path) -> None:
    assert WRONG.keys() == alerts().keys()
    firing = 'count by (alertname) (ALERTS{alertstate="firing"})'
    tests = []
    for name, given in {**WRONG, "all is well": RIGHT}.items():
        series = [{"series": key, "values": values} for key, values in given.items()]
        fires = [{"labels": f'{{alertname="{name}"}}', "value": 1}] if name in WRONG else []
        then = {"expr": firing, "eval_time": "19m30s", "exp_samples": fires}
        of_all = {"name": name, "interval": "30s", "input_series": series}
        tests.append({**of_all, "promql_expr_test": [then]})
    path = tmp_path / "tests.yml"
    rules = {"rule_files": [str(PLACE / "rules.yml")], "evaluation_interval": "30s"}
    path.write_text(yaml.safe_dump({**rules, "tests": tests}))
    done = run(need("promtool"), "test", "rules", path)
    assert done.returncode == 0, done.stdout + done.stderr


class Prometheus:
    """Debian's, with the project's configuration; only where the targets are is another."""

    def __init__(self, job: StandingJob, directory: Path) -> None:
        config = yaml.safe_load((PLACE / "prometheus.yml").read_text())
        for scraped in config["scrape_configs"]:
            del scraped["dns_sd_configs"]
            urls = [
                url for name, url in job.urls.items() if name.startswith(scraped["job_name"])
            ]
            targets = [url.removeprefix("http://") for url in urls]
            scraped["static_configs"] = [{"targets": targets}]
        config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        shutil.copy(PLACE / "rules.yml", directory)
        words = [
            need("prometheus"),
            f"--config.file={directory}/prometheus.yml",
            f"--storage.tsdb.path={directory}/data",
            "--web.listen-address=127.0.0.1:0",
        ]
        self.url = ""
        self._process = Process(words, dict(os.environ), directory / "log")

    def ask(self, path: str, **query: str) -> Any:
        status, text = fetch(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}")
        answer = json.loads(text)
        assert (status, answer["status"]) == (200, "success"), f"{query}: {text}"
        return answer["data"]

    def values(self, expression: str) -> list[float]:
        """Return the numbers that an expression has now; NaN is none."""
        # Far longer than the test takes: nothing happens any more.
        result = self.ask("query", query=expression.replace("$__rate_interval", "1h"))["result"]
        return [x for x in (float(one["value"][1]) for one in result) if x == x]

    def wait_for(self, what: str, *expressions: str) -> None:
        missing = list(expressions)

        def has_all() -> bool:
            missing[:] = [one for one in missing if not self.values(one)]
            return not missing

        until(has_all, DEADLINE_S, look_s=0.2, details=lambda: f"{what}: no data for {missing}")

    def start(self) -> None:
        def is_ready() -> bool:
            found = re.search(r'Listening on" address=(\S+)', self._process.printed())
            self.url = f"http://{found[1]}" if found else ""
            return bool(self.url) and fetch(f"{self.url}/-/ready")[0] == 200

        until(is_ready, DEADLINE_S, look_s=0.1, details=self._process.printed)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(DEADLINE_S)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    need("prometheus")
    place = tmp_path_factory.mktemp("prometheus")
    with standing_job(num_servers=2) as job:
        with closing(Prometheus(job, place)) as server:
            server.start()
            # Rates are of what happens between two scrapes.
            server.wait_for("targets", f"count(up == 1) == {len(job.urls)}")
            server.wait_for("rules", "count_over_time(persia_steps_total[1m]) >= 2")
            job.train_more()
            yield server
        assert set(job.go_on().values()) == {0}, job.cluster.logs()


@pytest.mark.slow
def test_no_panel_is_without_data(prometheus: Prometheus) -> None:
    prometheus.wait_for("dashboard", *(one for all_of in panels().values() for one in all_of))


@pytest.mark.slow
def test_alerts_are_evaluated_and_silent(prometheus: Prometheus) -> None:
    groups = prometheus.ask("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert {rule["name"] for rule in rules} == set(alerts())
    assert {rule["health"] for rule in rules} <= {"ok", "unknown"}
    firing = [rule["name"] for rule in rules if rule["state"] == "firing"]
    assert firing == []
    prometheus.wait_for("alerts", *{x for one in alerts().values() for x in names_in(one)})
