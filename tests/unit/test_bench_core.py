"""One parser, one report, and what `python -m bench` lists."""

from __future__ import annotations

import argparse
import importlib
import json
import socket
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from bench.core.cli import MODULES, ROOMS, main, overview
from bench.core.data import EXCERPTS, READERS, read_rows
from bench.core.options import DATA, SEED, Option, bounds, one_of, parse
from bench.core.report import Result, Table, interval, plain, publish
from bench.core.session import ReservedPort

OPTIONS = (
    Option("sizes", (1, 2), "some", quick=(3,)),
    Option("share", 0.5, "one", quick=0.25),
    Option("way", "fast", "how", parse=one_of(("fast", "slow"))),
    Option("tokens", None, "a range", parse=bounds),
    Option("flag", None, "more", repeated=True),
    Option("twice", False, "or not"),
    DATA,
    SEED,
)


def read(*given: str) -> argparse.Namespace:
    return parse("some", "What it is.", OPTIONS, given)


def test_defaults_are_of_full_and_quick_runs() -> None:
    full, quick = read(), read("--quick")
    assert (full.sizes, full.share, full.flag, full.twice) == ((1, 2), 0.5, [], False)
    assert (quick.sizes, quick.share, quick.way, quick.tokens) == ((3,), 0.25, "fast", None)
    assert full.data is None and full.seed == 1


def test_without_a_name_all_are_listed_with_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in MODULES:
        (line,) = [line for line in lines if line.startswith(f"  {name} ")]
        assert line.rstrip().endswith(".") and len(line.split()) > 4
    assert all(f"{room}: " in overview() for room in ROOMS)
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
    rows = [{"policy": "as"}]
    result = Result({"rows": rows}, [Table(plain("policy"), rows, "below")], ["a note"])
    args = read("--json", str(tmp_path / "run.json"))

    publish(args, result, seconds=7)

    found = json.loads((tmp_path / "run.json").read_text())
    assert found["rows"] == rows and found["seconds"] == 7 and found["machine"]["cores"] > 0
    assert found["command"] == "python -m bench some"
    out = capsys.readouterr().out
    assert "below" in out and "a note" in out


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
        assert all(READERS[name](own).answer for own in rows)


def test_a_reserved_port_is_its_servers_and_nobody_elses() -> None:
    with closing(ReservedPort()) as port, closing(ReservedPort()) as other:
        assert port.number != other.number
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port.number))
        server = socket.create_server(("127.0.0.1", port.number))
        with server, socket.create_connection(server.getsockname()):
            pass
