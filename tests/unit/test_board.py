"""The Grafana board and the alerts ask for what a server tells, and for nothing else."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from impress_sglang.serving.metrics import COUNTERS, GAUGES, HISTOGRAMS, PREFIX
from scripts import board

FOLDER = Path(__file__).parents[2] / "examples/monitoring"
BOARD = json.loads(board.BOARD.read_text())
ALERTS = yaml.safe_load((FOLDER / "alerts.yaml").read_text())
# By the name of each time series that a server tells: its labels. A test of a real server sees that
# it tells these (`test_prometheus_is_told_what_the_statistics_say`).
TOLD = {series.name: set(series.labels) for series in (*COUNTERS, *GAUGES)} | {
    f"{name}_{part}": {"le"} if part == "bucket" else set()
    for _, name, _, _ in HISTOGRAMS
    for part in ("bucket", "sum", "count")
}
QUERIES = {
    **{
        f"{p['title']}: {t['legendFormat']}": t["expr"]
        for p in BOARD["panels"]
        for t in p["targets"]
    },
    **{rule["alert"]: rule["expr"] for group in ALERTS["groups"] for rule in group["rules"]},
}


def metrics_of(query: str) -> list[str]:
    return re.findall(rf"{PREFIX}(\w+)", query)


def test_the_board_is_made_from_its_rows() -> None:
    assert board.BOARD.read_text() == board.text(), "python -m scripts.board --write makes it"


@pytest.mark.parametrize("name", QUERIES)
def test_a_query_asks_for_what_is_told(name: str) -> None:
    query = QUERIES[name]
    metrics = metrics_of(query)
    assert metrics and set(metrics) <= TOLD.keys()
    labels = {"instance"}.union(*(TOLD[metric] for metric in metrics))
    grouped = {
        label for found in re.findall(r"by \(([\w, ]+)\)", query) for label in found.split(", ")
    }
    assert grouped <= labels
    selected = set(re.findall(r"(\w+)=~?\"", query))
    assert selected <= labels
    shown = set(re.findall(r"{{(\w+)}}", name))
    assert shown <= grouped, "its legend would be empty"


def mounted(service: Any) -> list[str]:
    return [volume.split(":")[0] for volume in service["volumes"]]


def test_what_compose_mounts_is_there() -> None:
    compose = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    for service in compose["services"].values():
        for path in mounted(service):
            assert (FOLDER / path).is_file()
    prometheus = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    assert [(FOLDER / path).is_file() for path in prometheus["rule_files"]] == [True]
    datasource = yaml.safe_load((FOLDER / "grafana/datasource.yaml").read_text())
    (source,) = datasource["datasources"]
    assert source["isDefault"] and source["type"] == board.DATASOURCE["type"]


needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="there is no promtool: apt-get install prometheus"
)


@needs_promtool
def test_prometheus_accepts_the_rules_and_queries(tmp_path: Path) -> None:
    """As rules, with what Grafana puts into queries."""
    asked = [query.replace("$__rate_interval", "1m") for query in QUERIES.values()]
    rules = [{"record": f"own_{number}", "expr": query} for number, query in enumerate(asked)]
    (tmp_path / "queries").write_text(yaml.dump({"groups": [{"name": "a", "rules": rules}]}))
    for path in (FOLDER / "alerts.yaml", tmp_path / "queries"):
        groups = yaml.safe_load(path.read_text())["groups"]
        count = sum(len(group["rules"]) for group in groups)
        assert f"{count} rules found" in promtool("check", "rules", path)


def promtool(*arguments: object) -> str:
    command = ["promtool", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# What a server tells each minute, and when which alert is about it.
BUDGET = 'sglang:impress_offers_refused_total{instance="a", reason="budget"}'
WRITTEN = 'sglang:impress_ssd_written_bytes_total{instance="a"}'
DAY = 'sglang:impress_write_budget_bytes{instance="a", kind="day"}'
STORIES = {
    "refused for want of a budget": ("ImpressWriteBudgetSpent", {BUDGET: "0+1x120"}, "60m", True),
    "stored": ("ImpressWriteBudgetSpent", {BUDGET: "7x120"}, "60m", False),
    **{
        name: (
            "ImpressWearsTheDrive",
            {WRITTEN: f"0+{new}x1440", DAY: f"{day}x1440"},
            "1440m",
            over,
        )
        for name, new, day, over in (
            ("more written than allowed", 10**6, 10**9, True),
            ("less written than allowed", 10**6, 2 * 10**9, False),
            ("nothing is said of what is allowed", 10**9, 0, False),
        )
    },
}


@needs_promtool
@pytest.mark.parametrize(("alert", "series", "when", "fires"), STORIES.values(), ids=STORIES)
def test_an_alert_fires_when_it_should(
    alert: str, series: dict[str, str], when: str, fires: bool, tmp_path: Path
) -> None:
    rules = {rule["alert"]: rule for group in ALERTS["groups"] for rule in group["rules"]}
    summary = rules[alert]["annotations"]["summary"]
    expected = {"exp_labels": {"instance": "a"}, "exp_annotations": {"summary": summary}}
    story = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [
            {"alertname": alert, "eval_time": when, "exp_alerts": [expected] if fires else []}
        ],
    }
    file = tmp_path / "story.yaml"
    file.write_text(yaml.dump({"rule_files": [str(FOLDER / "alerts.yaml")], "tests": [story]}))
    promtool("test", "rules", file)
