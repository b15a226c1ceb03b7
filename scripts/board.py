"""The Grafana board of `examples/monitoring`, made from the rows below.

python -m scripts.board            prints it
python -m scripts.board --write    puts it into its place
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from impress_sglang.serving.metrics import PREFIX

BOARD = Path(__file__).parents[1] / "examples/monitoring/grafana/impress.json"
# What is chosen on the board; at first the default, so that any Grafana can show it.
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT, COLUMNS = 8, 8, 24
# Of one server, or of all that Prometheus knows; metrics are named without their prefix.
SERVER = 'instance=~"$instance"'


@dataclasses.dataclass(frozen=True, slots=True)
class Panel:
    """A graph: its queries by their legends, `#` before each metric, and the unit of its axis."""

    title: str
    told: str
    queries: dict[str, str]
    unit: str = "short"
    stacked: bool = False


def rate(metric: str, by: str = "") -> str:
    """The rate of a counter, summed up to the values of a label."""
    return f"sum{f' by ({by})' if by else ''} (rate(#{metric}{{{SERVER}}}[$__rate_interval]))"


def gauge(metric: str, by: str = "", only: str = "") -> str:
    """A gauge, or only its value for one value of one of its labels."""
    selector = f"{SERVER}, {only}" if only else SERVER
    return f"sum{f' by ({by})' if by else ''} (#{metric}{{{selector}}})"


def quantile(share: float, metric: str) -> str:
    """A quantile of a histogram."""
    return f"histogram_quantile({share}, {rate(f'{metric}_bucket', 'le')})"


PANELS = (
    Panel(
        "Requests by path",
        "Where prefixes were: on SSD, on the device, or nowhere.",
        {"{{path}}": rate("requests_total", "path")},
        "reqps",
        stacked=True,
    ),
    Panel(
        "Why",
        "What decided about the prefix of each request; docs/api.md has all reasons.",
        {"{{reason}}": rate("requests_why_total", "reason")},
        "reqps",
        stacked=True,
    ),
    Panel(
        "Prompt tokens by source",
        "Tokens of prompts per second: from SGLang's pool, from slots that other requests loaded, "
        "from the store, from there behind other text, left out of a prefix in part, or computed.",
        {"{{source}}": rate("prompt_tokens_total", "source")},
        stacked=True,
    ),
    Panel(
        "Decisions",
        "Whether stored prefixes were loaded, or computed because that was estimated to be faster; "
        "none where nothing was stored.",
        {"{{decision}}": rate("requests_decision_total", "decision")},
        "reqps",
        stacked=True,
    ),
    Panel(
        "Exact answers, and retention",
        "Share of requests whose answer rests on exact KVs of the whole prefix; share of tokens of "
        "prefixes that attention saw.",
        {
            "exact": f"1 - {rate('requests_approximate_total')} / {rate('requests_total')}",
            "retention": f"{rate('used_tokens_total')} / {rate('prefix_tokens_total')}",
        },
        "percentunit",
    ),
    Panel(
        "Chunks by tier",
        "Where the chunks were that requests wanted.",
        {"{{tier}}": rate("chunks_total", "tier")},
        stacked=True,
    ),
    Panel(
        "Time of loading",
        "Of requests that loaded a stored prefix, with what of it was waiting for the drive.",
        {
            "loading, median": quantile(0.5, "load_seconds"),
            "loading, 99%": quantile(0.99, "load_seconds"),
            "waiting, 99%": quantile(0.99, "wait_seconds"),
        },
        "s",
    ),
    Panel(
        "Bits per element",
        "Mean bits of loaded prefixes.",
        {"bits": f"{rate('bits_sum')} / {rate('bits_count')}"},
    ),
    Panel(
        "SSD traffic",
        "Bytes that were read for requests and written for later ones.",
        {"read": rate("ssd_read_bytes_total"), "written": rate("ssd_written_bytes_total")},
        "Bps",
    ),
    Panel(
        "Read amplification",
        "Bytes read per byte wanted; and what share of prefetched bytes nobody wanted.",
        {
            "read per wanted": f"{rate('ssd_read_bytes_total')} / {rate('ssd_needed_bytes_total')}",
            "prefetched in vain": f"1 - {rate('prefetched_used_bytes_total')} / "
            f"{rate('prefetched_bytes_total')}",
        },
    ),
    Panel(
        "Wear: bytes written in a day",
        "Beside what --impress-write-gb-per-day allows, if it is given, and what of that is left.",
        {
            "written": f"sum (increase(#ssd_written_bytes_total{{{SERVER}}}[1d]))",
            "allowed": gauge("write_budget_bytes", only='kind="day"') + " > 0",
            "left": gauge("write_budget_bytes", only='kind="left"') + " > 0",
        },
        "bytes",
    ),
    Panel(
        "Bytes on SSD", "Used of the quota.", {"{{kind}}": gauge("store_bytes", "kind")}, "bytes"
    ),
    Panel(
        "Segments",
        "What happened to them, per second.",
        {"{{event}}": rate("segments_total", "event")},
    ),
    Panel(
        "Chunk caches",
        "Share of their capacity that is used.",
        {
            "{{tier}}": gauge("cache_bytes", "tier", 'kind="used"')
            + " / "
            + gauge("cache_bytes", "tier", 'kind="capacity"')
        },
        "percentunit",
    ),
    Panel(
        "Score of the last evicted chunk",
        "Uses, each half as much per --impress-half-life since, times the share that was wanted: "
        "what a newcomer has to beat. Far above 0 means that a cache is too small.",
        {"{{tier}}": f"max by (tier) (#cache_evicted_score{{{SERVER}}})"},
    ),
    Panel(
        "Slots of the pool",
        "The size of SGLang's pool, and what of it stored prefixes and writes have.",
        {"{{kind}}": gauge("pool_tokens", "kind")},
    ),
    Panel(
        "Failures of the disk",
        "What it could not do, and how often it was used again, in an hour.",
        {
            "failures": f"sum (increase(#disk_failures_total{{{SERVER}}}[1h]))",
            "recoveries": f"sum (increase(#disk_recoveries_total{{{SERVER}}}[1h]))",
            "suspect segments": gauge("store_suspects"),
        },
    ),
    Panel(
        "Prompts that were not stored",
        "For want of room, of a disk that takes them, or of --impress-write-gb-per-day.",
        {"{{reason}}": rate("offers_refused_total", "reason")},
        "reqps",
        stacked=True,
    ),
    Panel(
        "State of the store",
        "1 for the state in which it is; anything but ok wants a look at the log.",
        {"{{state}}": gauge("store_state", "state")},
    ),
)


def board() -> dict[str, Any]:
    """As Grafana reads it."""
    return {
        "title": "IMPRESS: prefixes on SSD",
        "uid": "impress-sglang",
        "schemaVersion": 39,
        "tags": ["sglang"],
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "10s",
        "templating": {"list": [_datasources(), _instances()]},
        "panels": [_panel(number, panel) for number, panel in enumerate(PANELS)],
    }


def _datasources() -> dict[str, Any]:
    return {
        "name": "datasource",
        "type": "datasource",
        "query": "prometheus",
        "current": {"text": "default", "value": "default"},
    }


def _instances() -> dict[str, Any]:
    return {
        "name": "instance",
        "type": "query",
        "datasource": DATASOURCE,
        "query": f"label_values({PREFIX}store_segments, instance)",
        "includeAll": True,
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    per_row = COLUMNS // WIDTH
    custom = {"fillOpacity": 10, "stacking": {"mode": "normal" if panel.stacked else "none"}}
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.told,
        "datasource": DATASOURCE,
        "gridPos": {
            "x": number % per_row * WIDTH,
            "y": number // per_row * HEIGHT,
            "w": WIDTH,
            "h": HEIGHT,
        },
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": custom},
            "overrides": [],
        },
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": DATASOURCE,
                "expr": query.replace("#", PREFIX),
                "legendFormat": legend,
            }
            for place, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def text() -> str:
    """The file."""
    return json.dumps(board(), indent=2) + "\n"


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        BOARD.write_text(text(), encoding="utf-8")
    else:
        print(text(), end="")
