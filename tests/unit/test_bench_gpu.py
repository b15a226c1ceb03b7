"""Steps on a machine that may have a GPU, within some minutes."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from bench.core.cli import MODULES
from bench.core.options import parse
from bench.core.session import ROOT, BenchFailed
from bench.micro import gpu

NONE = gpu.Step("none", "kernels", None, 3)


def test_steps_are_benchmarks_and_tests() -> None:
    for own in gpu.STEPS:
        first = own.command.split()[0]
        tests = (ROOT / first).exists()
        assert tests or first in MODULES
        assert own.arguments(False, Path("x"))[:2] == ["-m", "pytest" if tests else "bench"]


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
    class Sleeper(gpu.Step):
        def arguments(self, quick: bool, out: Path) -> list[str]:
            return ["-c", "print('begun', flush=True); import time; time.sleep(60)"]

    slow = Sleeper("slow", "", None, 0)
    row = gpu.take(slow, False, time.monotonic() + 2, tmp_path)
    assert row["state"] == "out of time" and row["told"] == "begun\n"


def test_what_fails_is_told_and_what_was_done_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Good(gpu.Step):
        def arguments(self, quick: bool, out: Path) -> list[str]:
            return ["-c", f"open('{out}/good.json', 'w').write('{{}}')"]

    steps = gpu.Step("bad", "no-such-benchmark", "no-such-benchmark", 0), Good("good", "", "", 0)
    monkeypatch.setattr(gpu, "STEPS", steps)
    args = parse("gpu", "", gpu.OPTIONS, ["--quick", f"--out={tmp_path / 'out'}"])
    with pytest.raises(BenchFailed, match="bad has failed"):
        gpu.run(args)
    told = json.loads((tmp_path / "out" / "summary.json").read_text())["steps"]
    assert [row["state"] for row in told] == ["failed", "done"]
    assert (tmp_path / "out" / "good.json").exists()
    args = parse("gpu", "", gpu.OPTIONS, ["--quick"])
    monkeypatch.setattr(gpu, "STEPS", steps[1:])
    assert set(gpu.run(args).figures["figures"]) == {"good"}
