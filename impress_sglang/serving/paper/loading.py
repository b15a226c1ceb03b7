"""Loads the layers of a request's prefix into its slots; a class for each kind of source.

Stage: load. All implementations keep one contract (`Loading`); a request has one of them at a time.
"""

from __future__ import annotations

import dataclasses
from typing import Generic, Protocol, TypeVar

from impress_sglang.management.policies import Policy
from impress_sglang.management.store import PrefixStore
from impress_sglang.storage.layout import KVShape
from impress_sglang.transfer.coded import CodedSource
from impress_sglang.transfer.loader import LayerInputs, LoadStats, PrefixLoader
from impress_sglang.transfer.memory import MemorySource
from impress_sglang.transfer.read_planner import ReadStats
from impress_sglang.transfer.selective import SelectiveLoader
from impress_sglang.transfer.slots import LayerSlots
from impress_sglang.transfer.source import SegmentSource

_Source = TypeVar("_Source", bound=SegmentSource | CodedSource)


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


@dataclasses.dataclass(frozen=True, slots=True)
class Loaders:
    """One loader of each kind; all requests share them and the memory that they keep."""

    exact: PrefixLoader
    selective: SelectiveLoader

    @classmethod
    def of(cls, shape: KVShape, policy: Policy) -> Loaders:
        """Make the loaders of a policy."""
        return cls(PrefixLoader(shape, policy.selector), SelectiveLoader(shape))


class SourceLoading(Generic[_Source]):
    """Loads from a source of the request's own, which is given back to its store."""

    def __init__(self, store: PrefixStore, source: _Source) -> None:
        self._store = store
        self._source = source

    def end_layer(self, layer: int) -> None:
        """See `Loading.end_layer`."""
        self._source.end_layer(layer)

    def close(self) -> ReadStats:
        """See `Loading.close`; what was read ahead is counted when the source is closed."""
        self._store.close_source(self._source)
        return self._source.stats


class ExactLoading(SourceLoading[SegmentSource]):
    """Loads from chunks of exact KVs: all tokens, or the important ones."""

    def __init__(self, loader: PrefixLoader, store: PrefixStore, source: SegmentSource) -> None:
        """`source` is given back to `store`."""
        super().__init__(store, source)
        self._loader = loader

    def load(self, layer: int, inputs: LayerInputs, slots: LayerSlots, stats: LoadStats) -> None:
        """See `Loading.load`."""
        self._loader.load(layer, self._source, inputs, slots, stats)


class SelectiveLoading(SourceLoading[CodedSource]):
    """Loads from codes: the important tokens, or all of them."""

    def __init__(self, loader: SelectiveLoader, store: PrefixStore, source: CodedSource) -> None:
        """`source` is given back to `store`."""
        super().__init__(store, source)
        self._loader = loader
        loader.begin()

    def load(self, layer: int, inputs: LayerInputs, slots: LayerSlots, stats: LoadStats) -> None:
        """See `Loading.load`."""
        self._loader.load(layer, self._source, inputs, slots, stats)

    def close(self) -> ReadStats:
        """See `Loading.close`."""
        self._loader.end()
        return super().close()


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
