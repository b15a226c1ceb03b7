"""The paper's Figures 7(b) and 8 from a run of `bench.similarity`, as PNG and SVG."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.plots import require_matplotlib

if TYPE_CHECKING:
    from bench.similarity import Similarity

_BARS = ("all", "#c9d3e6")
_LINES = {"within": "#4c72b0", "across": "#dd8452", "probe": "#55a868"}
_COLUMNS = 2
# More heads than this would be named too closely.
_NAMED_HEADS = 16


def write_figures(
    found: Sequence[Similarity],
    names: Mapping[str, str],
    layer: int,
    note: str,
    folder: Path,
    stem: str,
) -> list[Path]:
    """Draw both figures; returns the files.

    Args:
        found: a panel of each figure for each of these.
        names: what to call the kinds of pairs.
        layer: the layer of Figure 7(b), from 0.
        note: a line below the figures.
        folder: is made if need be.
        stem: what file names begin with.

    Raises:
        BenchFailed: matplotlib is not installed.
    """
    require_matplotlib()
    folder.mkdir(parents=True, exist_ok=True)

    def draw_heads(axes: Any, similarity: Similarity) -> Any:
        return _draw_heads(axes, similarity, layer)

    def draw_layers(axes: Any, similarity: Similarity) -> None:
        _draw_layers(axes, similarity, names)

    heads = f"Important tokens of two heads, layer {layer} (Figure 7(b))"
    return [
        *_save(folder / f"{stem}-heads", draw_heads, found, heads, note),
        *_save(folder / f"{stem}-layers", draw_layers, found, "Similarity (Figure 8)", note),
    ]


def _save(
    stem: Path,
    draw: Callable[[Any, Similarity], Any],
    found: Sequence[Similarity],
    title: str,
    note: str,
) -> list[Path]:
    """A panel for each ratio; what `draw` returns gets one scale of colours for all."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(_COLUMNS, len(found))
    rows = -(-len(found) // columns)
    figure = Figure(figsize=(4.6 * columns, 3.0 * rows + 0.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = [figure.add_subplot(rows, columns, i + 1) for i in range(len(found))]
    drawn = [draw(axes, similarity) for axes, similarity in zip(panels, found, strict=True)]
    if drawn[0] is None:
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper", fontsize=8, frameon=False)
    else:
        figure.colorbar(drawn[0], ax=panels, label="Jaccard index")
    figure.suptitle(title)
    figure.supxlabel(note, fontsize=8, color="0.35")
    files = [Path(f"{stem}.png"), Path(f"{stem}.svg")]
    for file in files:
        figure.savefig(file, dpi=150)
    return files


def _draw_heads(axes: Any, similarity: Similarity, layer: int) -> Any:
    """Figure 7(b): each pair of heads of a layer."""
    matrix = similarity.heads[layer].numpy()
    image = axes.imshow(matrix, cmap="Blues", vmin=0, vmax=1)
    if len(matrix) <= _NAMED_HEADS:
        axes.set_xticks(range(len(matrix)))
        axes.set_yticks(range(len(matrix)))
    axes.set_title(f"{similarity.ratio:.0%} of the tokens", fontsize=9)
    axes.set(xlabel="query head", ylabel="query head")
    return image


def _draw_layers(axes: Any, similarity: Similarity, names: Mapping[str, str]) -> None:
    """Figure 8: mean similarity of each layer."""
    kind, colour = _BARS
    if kind in similarity.values:
        means = similarity.by_layer(kind)
        axes.bar(range(len(means)), means, color=colour, label=names[kind])
    for kind, colour in _LINES.items():
        if kind in similarity.values:
            axes.plot(similarity.by_layer(kind), color=colour, lw=1.2, label=names[kind])
    axes.axhline(similarity.threshold, color="0.2", lw=1, ls="--", label="threshold")
    axes.axhline(similarity.random, color="0.2", lw=1, ls=":", label="random sets")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"{similarity.ratio:.0%} of the tokens", fontsize=9)
    axes.set(xlabel="layer", ylabel="mean Jaccard index", ylim=(0, 1))
