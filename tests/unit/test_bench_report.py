"""The arithmetic, table, JSON and figures of `bench serving`."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.core import plots
from bench.core.servers import POLICIES, BenchFailed, Tiers, policy_flags
from bench.policies import report
from bench.policies.serving_options import command_of, parse_arguments

BEFORE = {"totals": {name: 10 * i for i, name in enumerate(report.COUNTERS)}}
COUNTED = {
    "requests": 4,
    "requests_ssd": 4,
    "ssd_bytes": 8_000_000,
    "ssd_needed_bytes": 2_000_000,
    "h2d_bytes": 4_000_000,
    "chunks_accessed": 200,
    "device_chunks": 20,
    "host_chunks": 50,
    "ssd_chunks": 130,
    "chunks_loaded": 180,
    "selected_chunks": 90,
    "important_bytes": 1000,
    "important_device_bytes": 250,
    "probe_ms": 12.5,
    "load_ms": 400.0,
    "wait_ms": 300.0,
    "ahead_bytes": 3_000_000,
    "ahead_used_bytes": 2_000_000,
    "attention_ms": 50.0,
}
AFTER = {"totals": {name: BEFORE["totals"][name] + COUNTED[name] for name in report.COUNTERS}}
TTFT_MS = [100.0, 200.0, 300.0, 400.0]
NOTHING = {**dict.fromkeys(report.COUNTERS, 0), "requests": 4}


def row_of(policy: str, scale: float = 1.0) -> report.Row:
    counted = NOTHING if policy == "recompute" else report.difference(BEFORE, AFTER)
    return report.make_row(policy, [scale * ms for ms in TTFT_MS], counted)


def rows_of(*policies: str) -> list[report.Row]:
    rows = [row_of(policy, 1 + place) for place, policy in enumerate(policies)]
    report.add_speedups(rows)
    return rows


def text_of(table: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(table)
    return out.getvalue()


def test_counters_are_differences_of_two_snapshots() -> None:
    assert report.difference(BEFORE, AFTER) == COUNTED


def test_a_missing_total_is_named() -> None:
    totals = {k: v for k, v in AFTER["totals"].items() if k != "h2d_bytes"}
    with pytest.raises(BenchFailed, match="h2d_bytes"):
        report.difference(BEFORE, {"totals": totals})


def test_figures_of_a_row() -> None:
    row = row_of("as")
    assert (row["ttft_ms_mean"], row["ttft_ms_p50"], row["ttft_ms_p99"]) == (250, 250, 397)
    assert row["io_share"] == 0.3
    assert row["device_hit_ratio"] == 0.1
    assert row["host_hit_ratio"] == 0.25
    assert row["ssd_ratio"] == 0.65
    assert row["important_device_hit_ratio"] == 0.25
    assert row["read_amplification"] == 4
    assert row["ssd_bytes"] == 8_000_000
    assert row["chunks_loaded"] == row["host_chunks"] + row["ssd_chunks"]


def test_ratios_of_nothing_are_none() -> None:
    row = row_of("recompute")
    for name in ("device_hit_ratio", "important_device_hit_ratio", "read_amplification"):
        assert row[name] is None


def test_requests_of_others_are_noticed() -> None:
    with pytest.raises(BenchFailed, match="counted 4 requests, not 3"):
        report.make_row("as", TTFT_MS[:3], COUNTED)


def test_a_row_has_the_keys_that_readers_of_the_json_use() -> None:
    (row,) = rows_of("as")
    assert set(row) >= {
        "policy",
        "ttft_ms_mean",
        "ttft_ms_p50",
        "ttft_ms_p99",
        "ssd_bytes",
        "h2d_bytes",
        "chunks_loaded",
        "device_hit_ratio",
        "host_hit_ratio",
        "io_share",
        "important_device_hit_ratio",
        "read_amplification",
        "speedup_over_best_baseline",
    }
    assert json.loads(json.dumps(row)) == row


def test_the_recorded_command_has_no_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["--quick", "--data=/a/b", "--model=/c/d", "--json=/e", "--policies=as,impress"]
    monkeypatch.setattr("sys.argv", ["serving", *given])
    command = command_of(parse_arguments(None))
    assert "/" not in command
    assert "--policies as,impress" in command and "--prefix-tokens 512" in command


def test_speed_up_is_over_the_fastest_baseline() -> None:
    as_like, lfu, impress = rows_of("as", "as+h2o+lfu", "impress")
    assert as_like["speedup_over_best_baseline"] == 1
    assert lfu["speedup_over_best_baseline"] == 0.5
    assert impress["speedup_over_best_baseline"] == pytest.approx(1 / 3, abs=1e-3)
    (alone,) = rows_of("impress")
    assert alone["speedup_over_best_baseline"] is None


def test_requests_off_the_compared_path_are_told() -> None:
    row = {**row_of("as"), "requests_ssd": 3}
    (warning,) = report.warnings_of([row, row_of("recompute")])
    assert "as" in warning and "3 of 4" in warning


def test_table_has_a_line_per_policy_and_says_that_the_ssd_is_emulated() -> None:
    text = text_of(report.make_table(rows_of(*POLICIES), report.emulation_note(60)))
    for policy in POLICIES:
        assert policy in text
    assert "emulated, 60 MB/s" in text
    assert "real" in report.emulation_note(None)


def test_bytes_in_the_table_are_per_request() -> None:
    (line,) = [
        line
        for line in text_of(report.make_table([*rows_of("as")], "")).splitlines()
        if line.strip().startswith("as ")
    ]
    assert line.split()[6:9] == ["2.0", "1.0", "45"]


def test_only_reordering_policies_are_told_when_to_reorder() -> None:
    told = [
        policy
        for policy in POLICIES
        if "--impress-reorder-interval=0" in policy_flags(policy, Path("kv"), 0.25, Tiers(1, 2, 3))
    ]
    assert told == ["paper+itf+reorder", "paper"]


def test_sizes_of_caches_are_given_in_gb() -> None:
    flags = policy_flags("as", Path("kv"), 0.25, Tiers(device_mb=5.5, host_mb=11, ssd_mbps=60))
    assert "--impress-device-gb=0.005500" in flags
    assert "--impress-host-gb=0.011000" in flags


def test_figures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files, left_out = plots.write_figures(rows_of(*POLICIES), "a note", tmp_path / "figures")
    assert left_out == []
    assert sorted(file.suffix for file in files) == [".png"] * 4 + [".svg"] * 4
    for file in files:
        data = file.read_bytes()
        assert data.startswith(b"\x89PNG") or b"<svg" in data


def test_figures_of_policies_that_were_not_run_are_left_out(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files, left_out = plots.write_figures(rows_of("as", "impress"), "a note", tmp_path)
    assert {file.stem for file in files} == {"figure16-ttft", "figure21-device-hits"}
    assert len(left_out) == 2 and "paper+itf" in left_out[1]


def test_without_matplotlib_one_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(BenchFailed, match=r"pip install .*impress-sglang\[bench\]"):
        plots.require_matplotlib()
