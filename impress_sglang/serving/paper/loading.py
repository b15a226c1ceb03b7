"""Loads the layers of a request's prefix into its slots; a class for each kind of source.

Stage: load. All implementations keep one contract (`Loading`); a request has one of them at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from impress_sglang.errors import SegmentUnreadable
from impress_sglang.management.policies import Policy
from impress_sglang.management.store import PrefixStore
from impress_sglang.management.stored import StoredSpan
from impress_sglang.storage.layout import KVShape
from impress_sglang.timeline import Timeline
from impress_sglang.transfer.coded import CodedSource
from impress_sglang.transfer.coded_loader import CodedLoader
from impress_sglang.transfer.loader import LayerInputs, LoadStats, PrefixLoader
from impress_sglang.transfer.memory import MemorySource
from impress_sglang.transfer.read_planner import ReadStats
from impress_sglang.transfer.resident import PartLoad, PartUse, ResidentPart, parts_to_read
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

    def close(self) -> Sequence[ReadStats]:
        """End loading; returns stats of its own reads, and of shared ones if it is last to end."""


@dataclasses.dataclass(frozen=True, slots=True)
class Loaders:
    """One loader of each kind; all requests share them and the memory that they keep."""

    exact: PrefixLoader
    coded: CodedLoader
    selective: SelectiveLoader

    @classmethod
    def of(cls, shape: KVShape, policy: Policy) -> Loaders:
        """Make the loaders of a policy."""
        return cls(PrefixLoader(shape, policy.selector), CodedLoader(), SelectiveLoader(shape))


class SourceLoading(Generic[_Source]):
    """Loads from a source of the request's own, which is given back to its store."""

    def __init__(self, store: PrefixStore, source: _Source) -> None:
        self._store = store
        self._source = source

    def end_layer(self, layer: int) -> None:
        """See `Loading.end_layer`."""
        self._source.end_layer(layer)

    def close(self) -> Sequence[ReadStats]:
        """See `Loading.close`; what was read ahead is counted when the source is closed."""
        self._store.close_source(self._source)
        return [self._source.stats]


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
    """Loads the important tokens from codes into private slots."""

    def __init__(self, loader: SelectiveLoader, store: PrefixStore, source: CodedSource) -> None:
        """`source` is given back to `store`."""
        super().__init__(store, source)
        self._loader = loader
        self._uses: list[PartUse] | None = None

    def load(self, layer: int, inputs: LayerInputs, slots: LayerSlots, stats: LoadStats) -> None:
        """See `Loading.load`."""
        if self._uses is None:
            self._uses = self._loader.begin(self._source, slots.keys.pool.device)
        self._loader.load(layer, self._source, self._uses, inputs, slots, stats)

    def close(self) -> Sequence[ReadStats]:
        """See `Loading.close`."""
        if self._uses is not None:
            self._uses = None
            self._loader.end()
        return super().close()


class CompleteLoading:
    """Loads nothing: all that the request wants is in slots that requests share."""

    def __init__(self, uses: Sequence[PartUse]) -> None:
        """`uses`: parts that have it."""
        self._uses = uses

    @property
    def intact(self) -> bool:
        """Whether nobody has failed to raise its parts further."""
        return not any(use.part.broken for use in self._uses)

    def load(self, layer: int, inputs: LayerInputs, slots: LayerSlots, stats: LoadStats) -> None:
        """See `Loading.load`."""
        stats.layers_whole += 1
        for use in self._uses:
            use.part.check()
            stats.note_planes(use.part.levels(layer), len(use.units))

    def end_layer(self, layer: int) -> None:
        """See `Loading.end_layer`."""

    def close(self) -> Sequence[ReadStats]:
        """See `Loading.close`."""
        return []


def loads_nothing(loading: Loading | None) -> bool:
    """Whether all that a request uses is in its slots as it is."""
    return isinstance(loading, CompleteLoading) and loading.intact


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

    def close(self) -> Sequence[ReadStats]:
        """See `Loading.close`."""
        return []


class SharedLoading:
    """Loads all tokens from codes into slots that requests share; joins loads of others."""

    def __init__(
        self,
        loader: CodedLoader,
        store: PrefixStore,
        uses: Sequence[PartUse],
        planes: int,
        timeline: Timeline,
        source: CodedSource | None = None,
    ) -> None:
        """Join the loads of parts that are being read, and begin to read the other parts.

        Args:
            loader: the server's loader.
            store: where the parts are stored.
            uses: the tokens of parts that the request uses.
            planes: how many it wants.
            timeline: the request's timeline.
            source: a source for the parts that nobody reads, if one is open already.

        Raises:
            PrefixUnreadable: a segment is gone or cannot be opened.
        """
        self._loader = loader
        self._store = store
        self._uses = uses
        self._planes = planes
        self._timeline = timeline
        self._left: list[ReadStats] = []
        self._loads = self._join(source)

    def load(self, layer: int, inputs: LayerInputs, slots: LayerSlots, stats: LoadStats) -> None:
        """See `Loading.load`."""
        if not layer:
            self._renew()
        stats.layers_whole += 1
        self._loader.load(layer, self._uses, self._planes, slots, stats, self._timeline)

    def end_layer(self, layer: int) -> None:
        """See `Loading.end_layer`."""
        for load in self._loads:
            load.end_layer(layer)

    def close(self) -> Sequence[ReadStats]:
        """See `Loading.close`; reads of several requests are reported by the last one to end."""
        loads, self._loads = self._loads, []
        for load in loads:
            self._leave(load)
        left, self._left = self._left, []
        return left

    def _join(self, source: CodedSource | None = None, planes: int = 0) -> list[PartLoad]:
        """`planes`: how many others want that will join what is opened."""
        fresh = parts_to_read(self._uses, self._planes)
        if fresh:
            if source is None:
                source = self._open(fresh, max(planes, self._planes))
            source.timeline = self._timeline
            PartLoad(source, fresh)
            self._store.ahead.join(source)
        loads = list(dict.fromkeys(use.part.load[0] for use in self._uses if use.part.load))
        for load in loads:
            load.pending += 1
            load.planes = max(load.planes, self._planes)
            if load.source.layer < 0:
                load.source.want(self._planes)
        self._store.ahead.top_up()
        return loads

    def _open(self, parts: Sequence[ResidentPart], planes: int) -> CodedSource:
        spans = []
        for part in parts:
            segment = self._store.tree.get(part.segment_id)
            if segment is None:
                raise SegmentUnreadable(part.segment_id, "was removed after it was matched")
            spans.append(StoredSpan(segment, part.start, part.stop))
        return self._store.open_coded(spans, [part.in_slots for part in parts], planes)

    def _renew(self) -> None:
        """As a pass begins, replace joined loads from which another pass has read already.

        Raises:
            PrefixUnreadable: a segment is gone or cannot be opened.
        """
        # A pass that failed may have read from the first layer only, before others joined.
        stale = [
            load
            for load in self._loads
            if load.source.layer > 0 or load.source.planes < load.planes
        ]
        for load in stale:
            self._loads.remove(load)
            if not self._leave(load):
                # Others go on with it, but nobody joins it any more.
                for part in load.parts:
                    if part.load is not None and part.load[0] is load:
                        part.load = None
        if stale:
            own = {id(load) for load in self._loads}
            # Others of this pass may join when it has been read from.
            joined = self._join(planes=max(load.planes for load in stale))
            for load in joined:
                load.pending -= id(load) in own
            self._loads = joined

    def _leave(self, load: PartLoad) -> bool:
        """Leave a load, and close it if nobody else reads it; returns whether it was closed."""
        if not load.leave():
            return False
        self._store.close_source(load.source)
        self._left.append(load.source.stats)
        return True
