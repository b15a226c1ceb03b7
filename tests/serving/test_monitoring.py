"""The board and the alerts in a real Prometheus, which looks at a real server."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

from bench.core.session import ReservedPort
from scripts import board
from tests.serving.conftest import Serve
from tests.serving.harness import Server, tail
from tests.serving.tiny_models import random_tokens
from tests.unit.waiting import wait_until

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None,
    reason="there is no prometheus: apt-get install prometheus, and stop its service",
)

FOLDER = Path(__file__).parents[2] / "examples/monitoring"
RATE_INTERVAL = "20s"
PATIENCE_SECONDS = 180
# Each query once, by the panel and what it is called there.
QUERIES = {
    f"{panel['title']}: {target['legendFormat']}": target["expr"]
    for panel in board.board()["panels"]
    for target in panel["targets"]
}


class Prometheus:
    """What looks at a server every second."""

    def __init__(self, url: str, instance: str) -> None:
        self._url, self.instance = url, instance

    def get(self, route: str, **parameters: str) -> Any:
        """The data of an answer."""
        response = requests.get(f"{self._url}/api/v1/{route}", params=parameters, timeout=30)
        told = response.json()
        assert told["status"] == "success", told
        return told["data"]

    def ready(self) -> bool:
        with contextlib.suppress(requests.ConnectionError):
            return requests.get(f"{self._url}/-/ready", timeout=30).ok
        return False

    def seen(self) -> list[tuple[str, str]]:
        """Of each server that was looked at its health, and what went wrong."""
        targets = self.get("targets")["activeTargets"]
        return [(own["health"], own["lastError"]) for own in targets if own["health"] != "unknown"]

    def has_data(self, query: str) -> bool:
        """Whether a query of the board has a value now, with what Grafana puts into it."""
        query = query.replace("$instance", self.instance)
        query = query.replace("$__rate_interval", RATE_INTERVAL)
        assert "$" not in query
        found = self.get("query", query=query)["result"]
        return any(math.isfinite(float(own["value"][1])) for own in found)


@pytest.fixture(scope="module")
def server(serve: Serve) -> Iterator[Server]:
    """One request at a time, so that others wait and are read ahead; caches are too small."""
    flags = (
        *("--enable-metrics", "--max-running-requests=1", "--max-total-tokens=9000"),
        *("--impress-device-gb=0.0005", "--impress-host-gb=0.001"),
        "--impress-write-gb-per-day=100",
    )
    with serve("monitored", *flags) as server:
        yield server
        server.assert_whole()


@pytest.fixture(scope="module")
def prometheus(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """As `examples/monitoring` configures it, but more often."""
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    config["global"] |= {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(FOLDER / path) for path in config["rule_files"]]
    (scrape,) = config["scrape_configs"]
    instance = f"127.0.0.1:{server.port}"
    scrape["static_configs"] = [{"targets": [instance]}]
    (folder / "prometheus.yaml").write_text(yaml.dump(config))
    port = ReservedPort()
    address, log = f"127.0.0.1:{port.number}", folder / "log"
    with log.open("wb") as output:
        child = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        own = Prometheus(f"http://{address}", instance)
        wait_until(lambda: child.poll() is not None or own.ready(), 60)
        assert child.poll() is None, tail(log.read_text())
        yield own
    finally:
        child.terminate()
        child.wait(30)
        port.close()


def ask_around(server: Server, number: int) -> None:
    """New prompts are stored, and old ones loaded while others wait for them."""
    prompts = [random_tokens(900, seed=5000 + 10 * number + own) for own in range(4)]
    server.generate_together(prompts, 1)
    server.flush()
    server.generate_together([[*prompt, *random_tokens(9, seed=number)] for prompt in prompts], 1)
    server.flush()


def test_each_query_of_the_board_has_data(server: Server, prometheus: Prometheus) -> None:
    missing, number, end = dict(QUERIES), 0, time.monotonic() + PATIENCE_SECONDS
    while missing and time.monotonic() < end:
        ask_around(server, number)
        number += 1
        missing = {own: query for own, query in missing.items() if not prometheus.has_data(query)}
    print(f"{len(QUERIES) - len(missing)} of {len(QUERIES)} queries have data, {number} rounds")
    assert not missing, f"{sorted(missing)}: {prometheus.seen()}"
    metric = f"{board.PREFIX}store_segments"
    assert prometheus.get("label/instance/values", **{"match[]": metric}) == [prometheus.instance]


def test_alerts_are_evaluated_and_silent(server: Server, prometheus: Prometheus) -> None:
    server.generate(random_tokens(300, seed=7), 1)

    def rules() -> list[dict[str, Any]]:
        return [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]

    wait_until(lambda: all(rule["health"] != "unknown" for rule in rules()), 30)
    names = {rule["name"]: rule["health"] for rule in rules()}
    expected = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    assert names == {rule["alert"]: "ok" for group in expected for rule in group["rules"]}
    firing = [own for own in prometheus.get("alerts")["alerts"] if own["state"] == "firing"]
    assert firing == [], json.dumps(firing)
