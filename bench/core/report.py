"""The one report of all benchmarks: tables for the terminal, JSON, intervals."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
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
class Column:
    """A column: of each row a key, or what is computed from the row, in a form; None is a dash."""

    heading: str
    value: str | Callable[[Row], Any]
    form: str = "{}"

    def cell(self, row: Row) -> str:
        """What stands in a row."""
        value = row.get(self.value) if isinstance(self.value, str) else self.value(row)
        return "-" if value is None else self.form.format(value)


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """Rows under columns, the first of which is aligned to the left, and a caption below."""

    columns: Sequence[Column]
    rows: Sequence[Row]
    caption: str = ""

    def __str__(self) -> str:
        lines = [[column.heading for column in self.columns]]
        lines += [[column.cell(row) for column in self.columns] for row in self.rows]
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
    notes: Sequence[str] = ()


def plain(*keys: str, **forms: str) -> list[Column]:
    """Columns whose headings are their keys; `forms` by key."""
    return [Column(key.replace("_", " "), key, forms.get(key, "{}")) for key in keys]


def publish(args: argparse.Namespace, result: Result, *, seconds: int) -> None:
    """Print the tables and notes, and write the JSON that was asked for."""
    whole = {
        "command": args.command,
        "machine": describe_machine(),
        "seconds": seconds,
        **result.figures,
    }
    if args.json:
        args.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    print("\n\n".join(map(str, [*result.tables, *result.notes])))


def describe_machine() -> dict[str, object]:
    """Processor, cores, memory, GPU and versions, for the record beside every figure."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found: dict[str, object] = {
        "cpu": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30),
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
    }
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


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
