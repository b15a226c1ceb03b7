"""The one report of all benchmarks: tables for the terminal, JSON, intervals."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

Row = dict[str, Any]
RESAMPLES = 10_000
# Resamples at once, which bounds memory.
_BLOCK = 500
PACKAGES = ("torch", "sglang", "impress-sglang", "numpy", "numba", "triton")


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """Rows, of which these columns are shown, or all but lists and dicts, and a caption below.

    The first column is aligned to the left; None, and what a row lacks, is a dash.
    """

    rows: Sequence[Row]
    columns: Sequence[str] = ()
    caption: str = ""

    def __str__(self) -> str:
        cells = (cell for row in self.rows for cell in row.items())
        plain = (key for key, value in cells if not isinstance(value, list | dict))
        keys = self.columns or list(dict.fromkeys(plain))
        lines = [[key.replace("_", " ") for key in keys]]
        found = ([row.get(key) for key in keys] for row in self.rows)
        lines += [["-" if cell is None else str(cell) for cell in row] for row in found]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        shown = [
            "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip()
            for line in lines
        ]
        shown.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join([*shown, *([self.caption] if self.caption else [])])


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """What a benchmark found: `figures` go to the JSON as they are."""

    figures: Mapping[str, Any]
    tables: Sequence[Table] = ()


def publish(args: argparse.Namespace, result: Result, *, seconds: int) -> None:
    """Print the tables, and write the JSON that was asked for."""
    whole = {
        "command": args.command,
        "machine": describe_machine(),
        "seconds": seconds,
        **result.figures,
    }
    if args.json:
        args.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    print("\n\n".join(map(str, result.tables)))


def describe_machine() -> dict[str, object]:
    """Processor, cores, memory, GPU and versions, for the record beside every figure."""
    cpu = re.search("model name\\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found: dict[str, object] = {
        "cpu": cpu[1] if cpu else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30),
        "python": platform.python_version(),
    }
    installed = importlib.metadata.distributions()
    found |= {package.name: package.version for package in installed if package.name in PACKAGES}
    import torch

    if torch.cuda.is_available():
        found["gpu"], found["cuda"] = torch.cuda.get_device_name(), torch.version.cuda
    return found


def ratio(part: float, whole: float) -> float | None:
    """A share in four digits; None of nothing."""
    return round(part / whole, 4) if whole else None


def interval(
    strata: Sequence[ArrayLike], seed: int = 0, of: Callable[..., Any] = np.mean
) -> tuple[float, float]:
    """A 95% interval of the mean over strata of the mean of each, or of what `of` is, by bootstrap.

    Values are drawn with replacement within their stratum. The same sizes and seed draw the same
    places, so differences of two systems on the same questions make it a paired bootstrap.

    Args:
        strata: values [n] of each.
        seed: of the draws.
        of: along an axis, as `np.median`.
    """
    rng = np.random.default_rng(seed)

    def resampled(values: Any) -> list[Any]:
        draws = (
            rng.integers(0, len(values), (_BLOCK, len(values))) for _ in range(RESAMPLES // _BLOCK)
        )
        return [of(values[drawn], axis=1) for drawn in draws]

    means = np.mean([resampled(np.asarray(values)) for values in strata], axis=0)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)
