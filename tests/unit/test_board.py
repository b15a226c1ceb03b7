"""The Grafana board and the alerts ask for what a server tells, and for nothing else."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from impress_sglang.serving.metrics import COUNTERS, GAUGES, HISTOGRAMS, PREFIX
from scripts import board

FOLDER = Path(__file__).parents[2] / "examples/monitoring"
BOARD = json.loads(board.BOARD.read_text())
ALERTS = {
    rule["alert"]: rule
    for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
}
# Labels by time series. That a server has these is tested with a real one
# (`test_prometheus_is_told_what_the_statistics_say`).
LABELS = {series.name: set(series.labels) for series in (*COUNTERS, *GAUGES)} | {
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
    **{name: rule["expr"] for name, rule in ALERTS.items()},
}


def test_the_board_is_made_from_its_rows() -> None:
    assert board.BOARD.read_text() == board.text(), "python -m scripts.board --write makes it"


@pytest.mark.parametrize("name", QUERIES)
def test_a_query_asks_for_what_is_told(name: str) -> None:
    query = QUERIES[name]
    metrics = re.findall(rf"{PREFIX}(\w+)", query)
    assert metrics and set(metrics) <= LABELS.keys()
    labels = {"instance"}.union(*(LABELS[metric] for metric in metrics))
    grouped = set(re.findall(r"\w+", " ".join(re.findall(r"by \(([\w, ]+)\)", query))))
    selected = set(re.findall(r"(\w+)=~?\"", query))
    assert grouped | selected <= labels
    shown = set(re.findall(r"{{(\w+)}}", name))
    assert shown <= grouped, "its legend would be empty"


def test_what_compose_mounts_is_there() -> None:
    compose, prometheus, datasources = (
        yaml.safe_load((FOLDER / name).read_text())
        for name in ("compose.yaml", "prometheus.yaml", "grafana/datasource.yaml")
    )
    services = compose["services"].values()
    mounted = [volume.split(":")[0] for service in services for volume in service["volumes"]]
    for path in (*mounted, *prometheus["rule_files"]):
        assert (FOLDER / path).is_file(), path
    (source,) = datasources["datasources"]
    assert source["isDefault"] and source["type"] == board.DATASOURCE["type"]


needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="there is no promtool: apt-get install prometheus"
)


def promtool(*arguments: object) -> str:
    command = ["promtool", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_promtool
def test_prometheus_accepts_the_alerts_and_queries(tmp_path: Path) -> None:
    """Queries as rules, with what Grafana puts into them."""
    rules = [
        {"record": f"query_{number}", "expr": query.replace("$__rate_interval", "1m")}
        for number, query in enumerate(QUERIES.values())
    ]
    path = tmp_path / "queries"
    path.write_text(yaml.dump({"groups": [{"name": "a", "rules": rules}]}))
    assert f"{len(QUERIES)} rules found" in promtool("check", "rules", path)
    assert f"{len(ALERTS)} rules found" in promtool("check", "rules", FOLDER / "alerts.yaml")


# What a server reports each minute, and whether an alert fires at a time.
REFUSED = 'sglang:impress_offers_refused_total{instance="a", reason="budget"}'
WRITTEN = 'sglang:impress_ssd_written_bytes_total{instance="a"}'
PER_DAY = 'sglang:impress_write_budget_bytes{instance="a", kind="day"}'
SPENT, WEARS = "ImpressWriteBudgetSpent", "ImpressWearsTheDrive"


@needs_promtool
@pytest.mark.parametrize(
    ("alert", "when", "series", "fires"),
    [
        (SPENT, "60m", {REFUSED: "0+1x120"}, True),
        (SPENT, "60m", {REFUSED: "7x120"}, False),
        (WEARS, "1440m", {WRITTEN: "0+1000000x1440", PER_DAY: "1000000000x1440"}, True),
        (WEARS, "1440m", {WRITTEN: "0+1000000x1440", PER_DAY: "2000000000x1440"}, False),
        (WEARS, "1440m", {WRITTEN: "0+1000000000x1440", PER_DAY: "0x1440"}, False),
    ],
    ids=["budget spent", "budget left", "more than allowed", "less than allowed", "no limit"],
)
def test_an_alert_fires_when_it_should(
    alert: str, when: str, series: dict[str, str], fires: bool, tmp_path: Path
) -> None:
    summary = ALERTS[alert]["annotations"]["summary"]
    expected = {"exp_labels": {"instance": "a"}, "exp_annotations": {"summary": summary}}
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [
            {"alertname": alert, "eval_time": when, "exp_alerts": [expected] if fires else []}
        ],
    }
    path = tmp_path / "test.yaml"
    path.write_text(yaml.dump({"rule_files": [str(FOLDER / "alerts.yaml")], "tests": [test]}))
    promtool("test", "rules", path)
