"""This run's versions of the paper's Figures 16, 18, 20 and 21, as PNG and SVG."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.core.servers import BenchFailed
from bench.policies.report import Row

_REFERENCE = "as+h2o+lfu"
_STEPS = {
    _REFERENCE: "AS+H2O+LFU",
    "paper+itf": "+ITF",
    "paper+itf+reorder": "+RO",
    "paper": "All",
}
_COLOUR = "#4c72b0"


def require_matplotlib() -> None:
    """Fail early where figures cannot be drawn.

    Raises:
        BenchFailed: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise BenchFailed('--plot needs matplotlib: pip install "impress-sglang[bench]"') from error


def write_figures(rows: Sequence[Row], note: str, folder: Path) -> tuple[list[Path], list[str]]:
    """Draw each figure whose policies were run; returns the files, and what was left out and why.

    Raises:
        BenchFailed: matplotlib is not installed.
    """
    require_matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    by_policy = {row["policy"]: row for row in rows}
    files: list[Path] = []
    left_out: list[str] = []
    for name, (needed, draw) in _FIGURES.items():
        missing = [policy for policy in needed if policy not in by_policy]
        if missing:
            left_out.append(f"{name}: {', '.join(missing)} was not run")
        else:
            files += _save(folder / name, draw, by_policy, note)
    return files, left_out


def _save(
    stem: Path, draw: Callable[[Any, Mapping[str, Row]], None], rows: Mapping[str, Row], note: str
) -> list[Path]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    draw(axes, rows)
    figure.supxlabel(note, fontsize=8, color="0.35")
    files = [Path(f"{stem}.png"), Path(f"{stem}.svg")]
    for file in files:
        figure.savefig(file, dpi=150)
    return files


def _draw_ttft(axes: Any, rows: Mapping[str, Row]) -> None:
    """Figure 16: mean TTFT of each system."""
    chosen = {name: row for name, row in rows.items() if name not in list(_STEPS)[1:3]}
    _bars(axes, list(chosen), [row["ttft_ms_mean"] for row in chosen.values()], "{:,.0f}")
    axes.set(ylabel="mean TTFT (ms)", title="Time to first token (Figure 16)")


def _draw_steps(axes: Any, rows: Mapping[str, Row]) -> None:
    """Figure 18: what each optimization adds."""
    reference = rows[_REFERENCE]["ttft_ms_mean"]
    values = [rows[policy]["ttft_ms_mean"] / reference for policy in _STEPS]
    _bars(axes, list(_STEPS.values()), values, "{:.2f}")
    axes.set(ylabel="normalized TTFT", title="Impact of each optimization (Figure 18)")


def _draw_chunks(axes: Any, rows: Mapping[str, Row]) -> None:
    """Figure 20: chunks that a request loads, by logical and by reordered chunks."""
    pair = [rows["paper+itf"], rows["paper+itf+reorder"]]
    values = [row["chunks_loaded"] / row["requests"] for row in pair]
    _bars(axes, ["without reordering", "with reordering"], values, "{:,.0f}")
    axes.set(ylabel="loaded chunks per request", title="Impact of reordering (Figure 20)")


def _draw_hits(axes: Any, rows: Mapping[str, Row]) -> None:
    """Figure 21: important KVs that were in the device cache."""
    chosen = {
        name: row for name, row in rows.items() if row["important_device_hit_ratio"] is not None
    }
    values = [100 * row["important_device_hit_ratio"] for row in chosen.values()]
    _bars(axes, list(chosen), values, "{:.0f}%")
    axes.set(ylabel="device hits of important KVs (%)", title="Device hit ratio (Figure 21)")


def _bars(axes: Any, labels: Sequence[str], values: Sequence[float], form: str) -> None:
    bars = axes.bar(range(len(values)), values, color=_COLOUR, width=0.6)
    axes.bar_label(bars, labels=[form.format(value) for value in values], padding=2, fontsize=8)
    # Long names stand on several lines, a line for each "+" but a leading one.
    lines = [label[0] + label[1:].replace("+", "\n+") for label in labels]
    axes.set_xticks(range(len(labels)), lines, fontsize=8)
    axes.margins(y=0.12)


_FIGURES: dict[str, tuple[tuple[str, ...], Callable[[Any, Mapping[str, Row]], None]]] = {
    "figure16-ttft": ((), _draw_ttft),
    "figure18-steps": (tuple(_STEPS), _draw_steps),
    "figure20-chunks": (("paper+itf", "paper+itf+reorder"), _draw_chunks),
    "figure21-device-hits": ((), _draw_hits),
}
