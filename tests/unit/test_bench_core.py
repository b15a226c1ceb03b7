"""One parser, one report, what `python -m bench` lists, and benchmarks that need no model."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import re
import socket
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.core.cli import MODULES, main
from bench.core.data import EXCERPTS, READERS, read_rows
from bench.core.options import parse
from bench.core.report import Result, Table, interval, publish
from bench.core.session import ROOT, BenchFailed, ReservedPort
from bench.micro import gpu
from bench.policies import capacity
from bench.policies.capacity import KINDS, LLAMA, Ask, Model, Store, bound, lru, replay
from impress_sglang.config import ImpressConfig
from impress_sglang.storage.layout import KVShape, SegmentLayout
from tests.unit.store_checks import check_tree


def read(*arguments: str) -> argparse.Namespace:
    return parse("capacity", "", capacity.OPTIONS, arguments)


def test_without_a_name_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    overview = capsys.readouterr().out
    for name, path in MODULES.items():
        assert re.search(rf"^  {name} +(\S+ ){{4}}.*\.$", overview, re.MULTILINE)
        module = importlib.import_module(path)
        args = parse(name, module.__doc__, module.OPTIONS, ["--quick"])
        assert callable(module.run) and args.command == f"python -m bench {name} --quick"
    assert main(["nothing"]) == 2


def test_a_result_is_printed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"policy": "as", "ttft_ms": None, "all": [1, 2]}]
    result = Result({"rows": rows}, [Table(rows, caption="below")])
    args = read("--json", str(tmp_path / "run.json"))

    publish(args, result, seconds=7)

    written = json.loads((tmp_path / "run.json").read_text())
    assert written["rows"] == rows and written["seconds"] == 7
    assert written["machine"]["cores"] > 0 and written["command"] == "python -m bench capacity"
    out = capsys.readouterr().out
    assert out.splitlines() == ["policy  ttft ms", "------  -------", "as            -", "below"]


def test_intervals_cover_the_mean_as_often_as_they_say() -> None:
    rng, covered = np.random.default_rng(0), 0
    for _ in range(200):
        low, high = interval([(rng.random(60) < 0.7).astype(float)], 1)
        covered += low <= 0.7 <= high
    assert 180 <= covered <= 198


def test_excerpts_can_be_read_and_are_described() -> None:
    """With their sizes and licences."""
    readme = (EXCERPTS / "README.md").read_text()
    described = re.findall(r"^\| `(\w+)` \| (\d+) \|.*\| \[.+\)[^|]* \|$", readme, re.MULTILINE)
    names = [path.name for path in EXCERPTS.iterdir() if path.is_dir()]
    assert sorted(described) == sorted((name, str(len(read_rows(None, name)))) for name in names)
    for name in READERS.keys() & set(names):
        assert all(READERS[name](row).answer for row in read_rows(None, name))


def test_a_reserved_port_is_its_servers_and_nobody_elses() -> None:
    with closing(ReservedPort()) as port:
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port.number))
        server = socket.create_server(("127.0.0.1", port.number))
        with server, socket.create_connection(server.getsockname()):
            pass


def test_steps_on_a_gpu_are_benchmarks_and_tests() -> None:
    for step in gpu.STEPS:
        for _, kind, *rest in filter(None, (step.command.split(), step.quick.split())):
            paths = [ROOT / word for word in rest if word.startswith("tests/")]
            known = rest[0] in MODULES if kind == "bench" else paths
            assert known and all(path.exists() for path in paths)


def test_a_step_that_fails_is_reported_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = f'-c \'open("{tmp_path}/out/good.json", "w").write("{{}}")\''
    steps = (
        gpu.Step("bad", "", "-m bench nothing", 0),
        gpu.Step("long", good, "", 0),
        gpu.Step("absent", "", good, 0, "no_such_package"),
        gpu.Step("good", "", good, 0),
    )
    monkeypatch.setattr(gpu, "STEPS", steps)
    args = parse("gpu", "", gpu.OPTIONS, ["--quick", f"--out={tmp_path / 'out'}"])
    with pytest.raises(BenchFailed, match="bad has failed"):
        gpu.run(args)
    rows = json.loads((tmp_path / "out" / "summary.json").read_text())["steps"]
    states = ["failed", "not with --quick", "no no_such_package", "done"]
    assert [row["state"] for row in rows] == states
    assert (tmp_path / "out" / "good.json").exists()


def test_a_step_ends_with_the_time(tmp_path: Path) -> None:
    sleeping = gpu.Step("it", "-c 'print(1, flush=True); import time; time.sleep(600)'", "", 3)
    assert gpu.take(sleeping, False, time.monotonic() + 2, tmp_path)["state"] == "no time left"
    # On a loaded machine it takes longer to begin.
    for seconds in (2, 60):
        deadline = time.monotonic() + seconds
        row = gpu.take(sleeping._replace(least=0), False, deadline, tmp_path)
        assert row["state"] == "out of time"
        if row["told"]:
            break
    assert row["told"] == "1\n"


def ask(*blocks: int, size: int = 512) -> Ask:
    count = len(blocks) * size
    return Ask(0.0, np.array(blocks), size, count, count)


def test_shares_of_bytes_are_those_of_files() -> None:
    shape = KVShape(32, 32, 8, 128, 128, torch.bfloat16, (), 6.0, exact=False)
    assert shape.num_layers * shape.token_bytes == LLAMA.token_bytes
    share = SegmentLayout(shape, 64, 8192, 0).file_bytes / (8192 * LLAMA.token_bytes)
    assert KINDS["6 bits alone"][:2] == pytest.approx((share, share), abs=0.01)


@pytest.mark.parametrize(
    ("ssd_gb", "texts", "loaded", "crowded", "written"),
    [(1.0, "123 123 124", 55.6, 0, 4 / 9), (0.005, "12 34 12 12", 25.0, 2, 3 / 4)],
    ids=["all are stored once", "one leaves for the next"],
)
def test_prompts_are_replayed(
    ssd_gb: float, texts: str, loaded: float, crowded: int, written: float
) -> None:
    """Texts of blocks; those that leave give up their places in the cache."""
    config = ImpressConfig(ssd_gb=ssd_gb, host_gb=0.01, min_free_gb=0.0, write_after=1)
    model = Model(token_bytes=4096, per_second=1e4)
    store = Store(config, model, KINDS["exact"])
    row = replay([ask(*map(int, text)) for text in texts.split()], store, model)
    assert (row["loaded"], row["crowded"]) == (loaded, crowded)
    assert row["written"] == pytest.approx(4096 * written, rel=0.02)
    check_tree(store.tree)


@pytest.mark.parametrize(
    ("room", "best", "by_lru"), [(1, 64, 0), (2, 128, 64), (math.inf, 128, 128)]
)
def test_no_choice_finds_more_than_the_bound(room: float, best: int, by_lru: int) -> None:
    asks = [ask(block, size=64) for block in (1, 2, 3, 2, 1)]
    assert (bound(asks, room), lru(asks, room)[0]) == (best, by_lru)


def test_all_kinds_and_sizes_have_a_row() -> None:
    args = read("--quick", "--kinds=exact,basis alone", "--tb=0.01,1")
    rows = capacity.run(args).figures["rows"]
    assert [(row["kind"], row["tb"]) for row in rows] == [
        (kind, tb) for kind in ("exact", "basis alone") for tb in (0.01, 1.0)
    ]
    assert all(row["loaded"] <= row["bound"] for row in rows)
    assert rows[0]["bound"] < rows[1]["bound"]
