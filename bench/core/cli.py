"""`python -m bench NAME`: finds a benchmark, reads its options, runs it and publishes the result.

A benchmark is a module with a docstring, `OPTIONS`, and `run(args)`, which returns a `Result`.
"""

from __future__ import annotations

import ast
import importlib
import sys
import time
from collections.abc import Sequence
from typing import Any

from bench.core.options import parse
from bench.core.report import publish
from bench.core.session import ROOT, BenchFailed, interrupt_on_signals
from impress_sglang.errors import ImpressError

ROOMS = {
    "policies": ("serving", "capacity"),
    "traffic": ("beside", "bucket", "client", "trace"),
    "quality": ("accuracy", "blend", "precision"),
    "engine": ("engine",),
    "micro": ("overhead", "kernels", "gpu"),
}
MODULES = {name: f"bench.{room}.{name}" for room, names in ROOMS.items() for name in names}


def main(given: Sequence[str]) -> int:
    """Run the benchmark that is named first; returns the exit status."""
    name, *rest = given or [""]
    if name not in MODULES:
        print(overview())
        return 0 if name in ("", "-h", "--help") else 2
    interrupt_on_signals()
    began = time.monotonic()
    # Each imports what it needs, and no more: some run where there is neither SGLang nor Numba.
    module: Any = importlib.import_module(MODULES[name])
    args = parse(name, module.__doc__, module.OPTIONS, rest)
    try:
        result = module.run(args)
    except KeyboardInterrupt:
        return 130
    except (BenchFailed, ImpressError) as error:
        print(f"benchmark failed: {error}", file=sys.stderr)
        return 1
    publish(args, result, seconds=round(time.monotonic() - began))
    return 0


def overview() -> str:
    """What there is: the first sentence of each module's docstring, without importing it."""
    lines = ["python -m bench NAME [--quick] [--json FILE] [...]   (NAME --help)"]
    for name, module in MODULES.items():
        path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
        told = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        lines.append(f"  {name:12} {' '.join(told.split('.')[0].split())}.")
    return "\n".join(lines)
