"""Loads the layers of a request's prefix into its slots.

Stage: load.
"""

from __future__ import annotations

from typing import Protocol

from impress_sglang.store.store import PrefixStore
from impress_sglang.transfer.loader import LayerInputs, LoadStats, PrefixLoader
from impress_sglang.transfer.read_planner import ReadStats
from impress_sglang.transfer.slots import LayerSlots
from impress_sglang.transfer.source import SegmentSource


class Loading(Protocol):
    """Loads the prefix of one request, layer by layer in ascending order."""

    def load(self, layer: int, inputs: LayerInputs, slots: LayerSlots, stats: LoadStats) -> None:
        """Fill slots with the tokens of the prefix that a layer uses; changes `stats`.

        Raises:
            PrefixUnreadable: a chunk is missing, short or corrupt.
        """

    def end_layer(self, layer: int) -> None:
        """Note that a layer is in its slots."""

    def close(self) -> ReadStats:
        """End loading, once; returns what was read."""


class SourceLoading:
    """Loads all tokens or the important ones, from a source that is given back to its store."""

    def __init__(self, loader: PrefixLoader, store: PrefixStore, source: SegmentSource) -> None:
        """`source` is the request's own."""
        self._loader = loader
        self._store = store
        self._source = source

    def load(self, layer: int, inputs: LayerInputs, slots: LayerSlots, stats: LoadStats) -> None:
        """See `Loading.load`."""
        self._loader.load(layer, self._source, inputs, slots, stats)

    def end_layer(self, layer: int) -> None:
        """See `Loading.end_layer`."""
        self._source.end_layer(layer)

    def close(self) -> ReadStats:
        """See `Loading.close`; what was read ahead is counted when the source is closed."""
        self._store.close_source(self._source)
        return self._source.stats
