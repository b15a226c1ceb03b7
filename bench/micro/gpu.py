"""All that a machine with one GPU and no network can show, most worthwhile first, in a given time.

Each step is a process of its own, with what is left of --minutes as its limit, and leaves its log
and figures in --out; `summary.json` there is written again after each step, so that a machine that
is taken away leaves what was done. Steps that need what is not there are left out and say so.

  tests     the Triton kernels on the card, against their references
  kernels   their speed, against the card's memory, its bus and its products of matrices
  host      a model of Llama-3-8B's shape, prefixes of 8,000 tokens in host memory: TTFT of few
            bits, of exact KVs and computed
  drive     the same from the drive, without caches
  servers   SGLang's servers with exact answers, few bits and weights that change

torch, Triton, NumPy, xxhash, safetensors and pytest are enough for all but `servers`, which needs
SGLang, and Numba for `host` and `drive` where there is no GPU. --quick is the same in small, on a
CPU as well, where kernels are interpreted: whether the command works.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

from bench.core.options import Option
from bench.core.report import Result, Row, Table, describe_machine
from bench.core.session import ROOT, BenchFailed, step, work_folder

CUDA = torch.cuda.is_available()
OPTIONS = (
    Option("minutes", 25.0, "for all steps"),
    Option("out", None, "an empty folder for logs and figures (a temporary one)", parse=Path),
)
_ENGINE = (
    "engine --models=llama-3-8b --prefixes=2 --prefix-tokens=8000 --new-tokens=64 --warmup=6 "
    "--policies=recompute,as,impress --device-share=0"
)
_SMALL = "--quick --policies=as,impress --requests=2 --warmup=4"


class Step(NamedTuple):
    """Arguments of Python, also with --quick, where it is left out if there are none.

    Attributes:
        least: minutes below which it is not worth beginning.
        needs: a package beside a GPU, or `cuda` for that alone; empty: nothing.
    """

    name: str
    command: str
    quick: str
    least: float
    needs: str = ""

    def why_not(self, quick: bool, minutes: float) -> str:
        """Why it is left out; empty if it is not."""
        if quick and not self.quick:
            return "not with --quick"
        if self.needs not in ("", "cuda") and find_spec(self.needs) is None:
            return f"no {self.needs}"
        if self.needs and not CUDA:
            return "no GPU"
        return "no time left" if minutes < (0 if quick else self.least) else ""


_TESTS = f"-m pytest -q --device={'cuda' if CUDA else 'cpu'} tests/"
_FILES = ("exact", "bits", "weights")
_SERVERS = _TESTS + " tests/".join(f"serving/test_{name}.py" for name in _FILES)
STEPS = (
    Step("tests", f"{_TESTS}unit/triton", f"{_TESTS}unit/triton/test_kernels.py", 1),
    Step("kernels", "-m bench kernels", "-m bench kernels --quick", 1, "cuda"),
    Step("host", f"-m bench {_ENGINE} --host-share=1.5", f"-m bench engine {_SMALL}", 3),
    Step("drive", f"-m bench {_ENGINE} --host-share=0", "", 3, "cuda"),
    Step("servers", _SERVERS, "", 4, "sglang"),
)


def run(args: argparse.Namespace) -> Result:
    """Take all steps, one after the other.

    Raises:
        BenchFailed: one has failed; the others were done all the same.
    """
    deadline = time.monotonic() + 60 * args.minutes
    with work_folder(args.out) as out:
        rows: list[Row] = []
        for planned in STEPS:
            rows.append(take(planned, args.quick, deadline, out))
            summary = {"machine": describe_machine(), "steps": rows}
            (out / "summary.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")
        found = {path.stem: json.loads(path.read_text()) for path in sorted(out.glob("*.json"))}
        if failed := [row for row in rows if row["state"] == "failed"]:
            raise BenchFailed(
                "\n".join(f"{row['step']} has failed:\n{row['told']}" for row in failed)
            )
    del found["summary"]
    table = Table(rows, ("step", "state", "seconds"))
    return Result({"steps": rows, "figures": found}, [table])


def take(planned: Step, quick: bool, deadline: float, out: Path) -> Row:
    """Take a step within what time is left."""
    left = deadline - time.monotonic()
    if reason := planned.why_not(quick, left / 60):
        return {"step": planned.name, "state": reason, "seconds": 0, "told": ""}
    began = time.monotonic()
    path, command = (
        out / f"{planned.name}.log",
        shlex.split(planned.quick if quick else planned.command),
    )
    if "bench" in command:
        command.append(f"--json={out / planned.name}.json")
    with step(planned.name), path.open("w") as log:
        try:
            done = subprocess.run(
                [sys.executable, *command], cwd=ROOT, stdout=log, stderr=log, timeout=left
            )
            state = "failed" if done.returncode else "done"
        except subprocess.TimeoutExpired:
            state = "out of time"
    seconds, told = round(time.monotonic() - began, 1), path.read_text(errors="replace")[-2000:]
    return {"step": planned.name, "state": state, "seconds": seconds, "told": told}
