"""Figures of a run of `bench accuracy`, as PNG and SVG.

figure15-accuracy    the paper's Figure 15: accuracy over retention, per task and system
figure19-loaded      in the manner of Figure 19: share of the prefix's KVs that is loaded, and
                     of layers that fell back to all keys (means over layers)
accuracy-over-bytes, agreement-over-bytes
                     what a system gets for the bytes that it reads
figure11-22-alpha    Figures 11 and 22: accuracy and loaded share over alpha, the exponent of
                     the similarity threshold, if systems differ in --impress-alpha only
sensitivity-NAME     the same over any other number that systems differ in
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.core.plots import require_matplotlib
from bench.quality.options import REFERENCE
from bench.quality.report import Row, averaged_tasks

Draw = Callable[[Any, Sequence[Row]], None]
_NUMBER_FLAG = re.compile(r"--impress-([\w-]+)=(\d+(?:\.\d+)?)")
_STYLES = ("o-", "s-", "^-", "D-", "v--", "x--", "+--", "*-.")


def write_figures(
    rows: Sequence[Row], systems: Mapping[str, Sequence[str]], folder: Path
) -> list[Path]:
    """Draw the figures that the rows give; returns the files.

    Args:
        rows: of `quality_report.make_rows`.
        systems: server flags of each system.
        folder: where to write them.

    Raises:
        BenchFailed: matplotlib is not installed.
    """
    require_matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    title, averaged = averaged_tasks(tasks)
    # The mean stands for the tasks that are in it.
    overview = [task for task in tasks if task not in averaged] if title in tasks else tasks
    files = _save(folder / "figure15-accuracy", rows, tasks, _draw_accuracy)
    files += _save(folder / "figure19-loaded", rows, overview, _draw_loaded)
    for what in ("accuracy", "agreement"):
        for counted, stem in (("read", "bytes"), ("needed", "needed-bytes")):
            draw = _over_bytes(what, counted)
            files += _save(folder / f"{what}-over-{stem}", rows, overview, draw)
    for name, values in varied_flags(systems).items():
        stem = "figure11-22-alpha" if name == "alpha" else f"sensitivity-{name}"
        chosen = [row for row in rows if row["system"] in (*values, REFERENCE)]
        files += _save(folder / stem, chosen, overview, _over_flag(name, values))
    return files


def varied_flags(systems: Mapping[str, Sequence[str]]) -> dict[str, dict[str, float]]:
    """Numeric flags in which systems differ that are otherwise the same.

    Args:
        systems: server flags of each system.

    Returns:
        For each flag, without its prefix, the value of each system; the largest such group.
    """
    groups: dict[tuple[str, tuple[str, ...]], dict[str, float]] = {}
    for system, flags in systems.items():
        for flag in flags:
            found = _NUMBER_FLAG.fullmatch(flag)
            if found:
                rest = tuple(sorted(other for other in flags if other != flag))
                groups.setdefault((found[1], rest), {})[system] = float(found[2])
    varied: dict[str, dict[str, float]] = {}
    for (name, _), values in groups.items():
        if len(set(values.values())) > max(1, len(varied.get(name, ()))):
            varied[name] = values
    return varied


def _save(stem: Path, rows: Sequence[Row], tasks: Sequence[str], draw: Draw) -> list[Path]:
    """One figure with a panel per task."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(3, len(tasks))
    lines = -(-len(tasks) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.4 * lines + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    labels: dict[str, Any] = {}
    for place, task in enumerate(tasks):
        axes = figure.add_subplot(lines, columns, place + 1)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(task, fontsize=10)
        draw(axes, [row for row in rows if row["task"] == task])
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            labels.setdefault(label, handle)
    figure.legend(
        list(labels.values()),
        list(labels),
        loc="outside lower center",
        ncols=3 if columns == 1 else 5,
        fontsize=8,
    )
    files = [Path(f"{stem}.png"), Path(f"{stem}.svg")]
    for file in files:
        figure.savefig(file, dpi=150)
    return files


def _draw_accuracy(axes: Any, rows: Sequence[Row]) -> None:
    _draw_reference(axes, rows)
    for place, (system, mine) in enumerate(_approximate(rows).items()):
        kept = [100 * row["retention"] for row in mine]
        values = [100 * row["accuracy"] for row in mine]
        axes.plot(kept, values, _STYLES[place % len(_STYLES)], label=system, markersize=4)
    axes.set_xscale("log")
    ticks = sorted({100 * row["retention"] for row in rows if row["retention"] < 1})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.invert_xaxis()
    axes.set(xlabel="retention (%)", ylabel="accuracy (%)")


def _draw_loaded(axes: Any, rows: Sequence[Row]) -> None:
    for place, (system, mine) in enumerate(_approximate(rows).items()):
        kept = [100 * row["retention"] for row in mine]
        colour = f"C{place}"
        needed = [100 * row["needed"] for row in mine]
        axes.plot(kept, needed, "o-", color=colour, label=system, markersize=4)
        if any(row["fallback_share"] for row in mine):
            fallback = [100 * row["fallback_share"] for row in mine]
            label = f"{system}: layers that fell back"
            axes.plot(kept, fallback, ":", color=colour, label=label)
    axes.set(xlabel="retention (%)", ylabel="share (%)", ylim=(0, None))


def _over_bytes(what: str, counted: str) -> Draw:
    def draw(axes: Any, rows: Sequence[Row]) -> None:
        if what == "accuracy":
            _draw_reference(axes, rows)
        for place, (system, mine) in enumerate(_approximate(rows).items()):
            low, high = _bounds(mine, what)
            axes.errorbar(
                [100 * row[counted] for row in mine],
                [100 * row[what] for row in mine],
                yerr=[low, high],
                fmt=_STYLES[place % len(_STYLES)],
                label=system,
                markersize=4,
                elinewidth=0.6,
            )
        axes.set(xlabel=f"{counted}, of the prefix's bytes (%)", ylabel=_AXES[what])

    return draw


def _over_flag(name: str, values: Mapping[str, float]) -> Draw:
    def draw(axes: Any, rows: Sequence[Row]) -> None:
        _draw_reference(axes, rows)
        other = axes.twinx()
        other.set_ylabel("loaded, of the prefix's KVs (%)")
        approximate = [row for row in rows if row["system"] in values and row["retention"] < 1]
        for place, kept in enumerate(sorted({row["retention"] for row in approximate})):
            mine = sorted(
                (row for row in approximate if row["retention"] == kept),
                key=lambda row: values[row["system"]],
            )
            at = [values[row["system"]] for row in mine]
            accuracy = [100 * row["accuracy"] for row in mine]
            loaded = [100 * row["needed"] for row in mine]
            axes.plot(at, accuracy, "o-", color=f"C{place}", label=f"accuracy, {kept:.0%} kept")
            axes.plot([], [], "x:", color=f"C{place}", label=f"loaded, {kept:.0%} kept")
            other.plot(at, loaded, "x:", color=f"C{place}")
        axes.set(xlabel=name, ylabel="accuracy (%)")

    return draw


def _bounds(rows: Sequence[Row], what: str) -> tuple[list[float], list[float]]:
    """Distances to the ends of the intervals; an accuracy's is that of its difference."""
    name, scale = ("difference_points", 1) if what == "accuracy" else (what, 100)
    low = [scale * (row[name] - row[f"{name}_interval"][0]) for row in rows]
    high = [scale * (row[f"{name}_interval"][1] - row[name]) for row in rows]
    return [max(0.0, value) for value in low], [max(0.0, value) for value in high]


def _draw_reference(axes: Any, rows: Sequence[Row]) -> None:
    for row in rows:
        if row["system"] == REFERENCE:
            axes.axhline(100 * row["accuracy"], color="0.4", linestyle="--", label=REFERENCE)


def _approximate(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows of each system that has retentions below 1, by rising retention."""
    chosen: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["retention"]):
        if row["retention"] < 1:
            chosen.setdefault(row["system"], []).append(row)
    order = dict.fromkeys(row["system"] for row in rows)
    return {system: chosen[system] for system in order if system in chosen}


_AXES = {"accuracy": "accuracy (%)", "agreement": "same answer as recompute (%)"}
