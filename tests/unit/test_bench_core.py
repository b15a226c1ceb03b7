"""One parser, one report, what `python -m bench` lists, and benchmarks that need no model."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import socket
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.core.cli import MODULES, main
from bench.core.data import EXCERPTS, READERS, read_rows
from bench.core.options import DATA, SEED, Option, one_of, parse
from bench.core.report import Result, Table, interval, publish
from bench.core.session import ROOT, BenchFailed, ReservedPort
from bench.micro import gpu
from bench.policies import capacity
from bench.policies.capacity import KINDS, LLAMA, Ask, Model, Store, bound, lru, replay
from impress_sglang.config import ImpressConfig
from impress_sglang.storage.layout import KVShape, SegmentLayout
from tests.unit.store_checks import check_tree

OPTIONS = (
    Option("sizes", (1, 2), "some", quick=(3,)),
    Option("share", 0.5, "one", quick=0.25),
    Option("way", "fast", "how", parse=one_of(("fast", "slow"))),
    Option("tokens", None, "some", parse=int),
    Option("flag", None, "more", repeated=True),
    DATA,
    SEED,
)


def read(*given: str) -> argparse.Namespace:
    return parse("some", "What it is.", OPTIONS, given)


def test_defaults_are_of_full_and_quick_runs() -> None:
    full, quick = read(), read("--quick")
    assert (full.sizes, full.share, full.flag, full.quick) == ((1, 2), 0.5, [], False)
    assert (quick.sizes, quick.share, quick.way, quick.tokens) == ((3,), 0.25, "fast", None)
    assert full.data is None and full.seed == 1


def test_without_a_name_all_are_listed_with_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in MODULES:
        (line,) = [line for line in lines if line.startswith(f"  {name} ")]
        assert line.rstrip().endswith(".") and len(line.split()) > 4
    assert main(["nothing"]) == 2


@pytest.mark.parametrize("name", MODULES)
def test_each_is_a_module_with_options_and_a_run(name: str) -> None:
    module = importlib.import_module(MODULES[name])
    args = parse(name, module.__doc__, module.OPTIONS, ["--quick"])
    assert callable(module.run) and args.command == f"python -m bench {name} --quick"
    names = [option.name for option in module.OPTIONS]
    assert len(set(names)) == len(names)


def test_a_result_is_printed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"policy": "as", "ttft_ms": None, "all": [1, 2]}]
    result = Result({"rows": rows}, [Table(rows, caption="below")])
    args = read("--json", str(tmp_path / "run.json"))

    publish(args, result, seconds=7)

    found = json.loads((tmp_path / "run.json").read_text())
    assert found["rows"] == rows and found["seconds"] == 7 and found["machine"]["cores"] > 0
    assert found["command"] == "python -m bench some"
    out = capsys.readouterr().out
    assert out.splitlines() == ["policy  ttft ms", "------  -------", "as            -", "below"]


def test_intervals_cover_the_mean_as_often_as_they_say() -> None:
    rng, covered = np.random.default_rng(0), 0
    for _ in range(200):
        low, high = interval([(rng.random(60) < 0.7).astype(float)], 1)
        covered += low <= 0.7 <= high
    assert 180 <= covered <= 198


@pytest.mark.parametrize("name", sorted(path.name for path in EXCERPTS.iterdir() if path.is_dir()))
def test_excerpts_can_be_read_and_are_described(name: str) -> None:
    rows = read_rows(None, name)
    lines = (EXCERPTS / "README.md").read_text().splitlines()
    (row,) = [line for line in lines if f"| `{name}` |" in line]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert len(rows) == int(cells[1]) and cells[-1]
    if name in READERS:
        assert all(READERS[name](row).answer for row in rows)


def test_a_reserved_port_is_its_servers_and_nobody_elses() -> None:
    with closing(ReservedPort()) as port, closing(ReservedPort()) as other:
        assert port.number != other.number
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port.number))
        server = socket.create_server(("127.0.0.1", port.number))
        with server, socket.create_connection(server.getsockname()):
            pass


SLEEPS = "-c 'print(1, flush=True); import time; time.sleep(60)'"
NONE = gpu.Step("none", SLEEPS, "", 3)


def test_steps_are_benchmarks_and_tests() -> None:
    for step in gpu.STEPS:
        for _, kind, *rest in filter(None, (step.command.split(), step.quick.split())):
            paths = [ROOT / word for word in rest if word.startswith("tests/")]
            known = rest[0] in MODULES if kind == "bench" else paths
            assert known and all(path.exists() for path in paths)


@pytest.mark.parametrize(
    ("changed", "quick", "minutes", "reason"),
    [
        ({}, False, 5, ""),
        ({}, False, 2, "no time left"),
        ({}, True, 5, "not with --quick"),
        ({"needs": "no_such_package"}, False, 5, "no no_such_package"),
    ],
)
def test_why_a_step_is_left_out(
    changed: dict[str, str], quick: bool, minutes: float, reason: str
) -> None:
    assert NONE._replace(**changed).why_not(quick, minutes) == reason


def test_a_step_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    row = gpu.take(NONE._replace(least=0), False, time.monotonic() + 2, tmp_path)
    assert row["state"] == "out of time" and row["told"] == "1\n"


def test_what_fails_is_told_and_what_was_done_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = f'-c \'open("{tmp_path}/out/good.json", "w").write("{{}}")\''
    steps = gpu.Step("bad", "", "-m bench nothing", 0), gpu.Step("good", "", good, 0)
    monkeypatch.setattr(gpu, "STEPS", steps)
    args = parse("gpu", "", gpu.OPTIONS, ["--quick", f"--out={tmp_path / 'out'}"])
    with pytest.raises(BenchFailed, match="bad has failed"):
        gpu.run(args)
    told = json.loads((tmp_path / "out" / "summary.json").read_text())["steps"]
    assert [row["state"] for row in told] == ["failed", "done"]
    assert (tmp_path / "out" / "good.json").exists()


MODEL = Model(4096, 1e4)


def ask(*blocks: int, at: float = 0.0, size: int = 512) -> Ask:
    count = len(blocks) * size
    return Ask(at, np.array(blocks), size, count, count)


def store(kind: str = "exact", **options: Any) -> Store:
    given = {"ssd_gb": 1.0, "min_free_gb": 0.0, "write_after": 1, "host_gb": 0.0} | options
    return Store(ImpressConfig(**given), MODEL, KINDS[kind])


def test_shares_of_bytes_are_those_of_files() -> None:
    shape = KVShape(32, 32, 8, 128, 128, torch.bfloat16, (), 6.0, exact=False)
    assert shape.num_layers * shape.token_bytes == LLAMA.token_bytes
    layout = SegmentLayout(shape, 64, 8192, 0)
    exact = 8192 * LLAMA.token_bytes
    share = layout.file_bytes / exact
    assert share == pytest.approx(KINDS["6 bits alone"].read, abs=0.01)
    assert share == pytest.approx(KINDS["6 bits alone"].file, abs=0.01)


def test_a_stored_prompt_is_loaded_and_written_once() -> None:
    row = replay([ask(1, 2, 3), ask(1, 2, 3), ask(1, 2, 4)], replayed := store(), MODEL)
    assert row["loaded"] == pytest.approx(100 * 5 / 9, abs=0.1) and row["crowded"] == 0
    assert row["written"] == pytest.approx(4096 * 4 / 9, rel=0.02)
    check_tree(replayed.tree)


def test_what_does_not_fit_leaves_and_takes_its_places_in_the_cache_along() -> None:
    replayed = store(ssd_gb=0.005, host_gb=0.01)
    row = replay([ask(1, 2), ask(3, 4), ask(1, 2), ask(1, 2)], replayed, MODEL)
    assert row["loaded"] == 25.0 and row["crowded"] == 2
    check_tree(replayed.tree)


@pytest.mark.parametrize(("room", "found"), [(1, 64), (2, 128), (math.inf, 128)])
def test_no_choice_finds_more_than_the_bound(room: float, found: int) -> None:
    asks = [ask(1, size=64), ask(2, size=64), ask(3, size=64), ask(2, size=64), ask(1, size=64)]
    assert bound(asks, room) == found
    assert lru(asks, room)[0] <= found


def test_all_kinds_and_rooms_have_a_row() -> None:
    given = ["--quick", "--kinds=exact,basis alone", "--tb=0.01,1"]
    rows = capacity.run(parse("capacity", "", capacity.OPTIONS, given)).figures["rows"]
    assert [(row["kind"], row["tb"]) for row in rows] == [
        (kind, tb) for kind in ("exact", "basis alone") for tb in (0.01, 1.0)
    ]
    assert all(row["loaded"] <= row["bound"] for row in rows)
    assert rows[0]["bound"] < rows[1]["bound"]
