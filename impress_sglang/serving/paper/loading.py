"""Loads the layers of a request's prefix into its slots; a class for each kind of source.

Stage: load. All implementations keep one contract (`Loading`); a request has one of them at a time.
"""

from __future__ import annotations

from typing import Protocol

from impress_sglang.management.store import PrefixStore
from impress_sglang.transfer.loader import LayerInputs, LoadStats, PrefixLoader
from impress_sglang.transfer.memory import MemorySource
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


class RecomputedLoading:
    """Loads KVs from host memory that were computed because they could not be read."""

    def __init__(self, loader: PrefixLoader, source: MemorySource) -> None:
        """`source` has the layers that are not loaded yet."""
        self._loader = loader
        self._source = source

    @property
    def held_bytes(self) -> int:
        """Bytes of host memory that it still holds."""
        return self._source.held_bytes

    def load(self, layer: int, inputs: LayerInputs, slots: LayerSlots, stats: LoadStats) -> None:
        """See `Loading.load`."""
        self._loader.load(layer, self._source, inputs, slots, stats)

    def end_layer(self, layer: int) -> None:
        """See `Loading.end_layer`."""

    def close(self) -> ReadStats:
        """See `Loading.close`."""
        return ReadStats()
