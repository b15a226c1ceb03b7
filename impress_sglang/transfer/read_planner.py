"""Plans what a read touches, where that is found and what it costs: all of a read but its data.

Stage: load. A `PrefixPlanner` asks the placement where the chunks of the wanted rows are, decides
which blocks must come from SSD, and counts. `SegmentSource` carries its plans out; a trace can be
replayed with the planner alone.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from impress_sglang import loops
from impress_sglang.loops.types import Flags, Floats, Indices
from impress_sglang.storage.layout import KVShape
from impress_sglang.tiers.placement import Access, Placement, Tier
from impress_sglang.transfer.geometry import (
    NO_MAPPING,
    ColumnGroup,
    RowPlan,
    SourceSpan,
    plan_rows,
)

_T = TypeVar("_T", bound=np.generic)
_SSD, _HOST, _DEVICE = int(Tier.SSD), int(Tier.HOST), int(Tier.DEVICE)


@dataclasses.dataclass(slots=True)
class ReadStats:
    """What reading a prefix took: bytes, and accesses to chunks by the tier where they were found.

    `ssd_needed_bytes` are wanted rows that came from SSD; `ssd_bytes` divided by it is the read
    amplification. Of `ssd_bytes`, `ahead_bytes` were read before their layer asked, and of these
    `ahead_used_bytes` were wanted. `h2d_bytes` are rows that were not on the device, and whole
    chunks that moved there. `important_bytes` are the KVs of selected tokens, and
    `important_device_bytes` those of them that were found on the device. `selected_chunks` leaves
    out the chunks of probe columns, which every probe reads. `wait_ms` is how long the request
    waited for bytes from SSD, in milliseconds.
    """

    ssd_bytes: int = 0
    ssd_needed_bytes: int = 0
    ahead_bytes: int = 0
    ahead_used_bytes: int = 0
    h2d_bytes: int = 0
    device_chunks: int = 0
    host_chunks: int = 0
    ssd_chunks: int = 0
    selected_chunks: int = 0
    important_bytes: int = 0
    important_device_bytes: int = 0
    wait_ms: float = 0.0

    @property
    def chunks_accessed(self) -> int:
        """Accesses to chunks, wherever they were found."""
        return self.device_chunks + self.host_chunks + self.ssd_chunks

    @property
    def chunks_loaded(self) -> int:
        """Accesses to chunks that were not on the device."""
        return self.host_chunks + self.ssd_chunks

    def add(self, other: ReadStats) -> None:
        """Add the counters of another source."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name) + getattr(other, field.name)
            setattr(self, field.name, value)

    def as_dict(self) -> dict[str, float]:
        """All counters, and those that are derived from them."""
        return {
            **dataclasses.asdict(self),
            "wait_ms": round(self.wait_ms, 3),
            "chunks_accessed": self.chunks_accessed,
            "chunks_loaded": self.chunks_loaded,
        }


@dataclasses.dataclass(slots=True)
class GroupPart:
    """The chunks of one group of columns that a read of a span touches.

    `chunks` are head group * chunks of a column + chunk, ascending; `counts` the wanted rows of
    each; `ids`, `tiers`, `pages` and `kept` are those of `Access`. `blocks` [blocks of the group]
    says which hold wanted rows, wherever they are found. `rows_by_tier` and `chunks_by_tier` are
    how many wanted rows and touched chunks were found in each tier.
    """

    group: ColumnGroup
    blocks: Flags
    chunks: Indices
    counts: Indices
    ids: Indices
    tiers: npt.NDArray[np.uint8]
    pages: npt.NDArray[np.int32]
    kept: npt.NDArray[np.bool_]
    rows_by_tier: tuple[int, int, int]
    chunks_by_tier: tuple[int, int, int]

    def is_values(self, span: SourceSpan) -> bool:
        """Whether the group holds values."""
        return self.group is span.geometry.values

    def place_of_chunk(self) -> Indices:
        """For each chunk of the group its index in `chunks` if it is touched, else 0."""
        places = np.zeros(self.group.head_groups * self.group.chunks, np.int64)
        places[self.chunks] = np.arange(len(self.chunks))
        return places

    def found_in(self, tier: int) -> Flags:
        """For each chunk of the group, whether it is touched and was found in `tier`."""
        everything = np.zeros(self.group.head_groups * self.group.chunks, np.bool_)
        everything[self.chunks[self.tiers == tier]] = True
        return everything


@dataclasses.dataclass(slots=True)
class SpanRead:
    """What a read wants of a span, which begins `first` tokens after the start of the prefix.

    `rows` is None for a read of the probe column. `blocks` says which blocks of the layer must come
    from SSD, None if none; not to be changed.
    """

    span: SourceSpan
    first: int
    rows: RowPlan | None
    parts: list[GroupPart]
    blocks: Flags | None


@dataclasses.dataclass(slots=True)
class PlannedRead:
    """A read of the probe column, or of keys or values or both, of one layer.

    `whole`: all tokens are wanted, not only those that the layer uses.
    """

    layer: int
    spans: list[SpanRead]
    access: Access
    whole: bool


@dataclasses.dataclass(slots=True)
class _Wish:
    """What a read wants of a span, before it is known where the chunks are.

    `groups` come with the blocks that are wanted of each; the other fields apply to all of them.
    """

    span: SourceSpan
    first: int
    rows: RowPlan | None
    groups: Sequence[tuple[ColumnGroup, Flags]]
    chunks: Indices
    counts: Indices
    shares: Floats


class PrefixPlanner:
    """Plans the reads of one request over consecutive spans of segments."""

    def __init__(
        self,
        shape: KVShape,
        spans: Sequence[SourceSpan],
        placement: Placement,
        page_bytes: int,
        *,
        learns: bool = False,
    ) -> None:
        """`learns`: the spans learn from what is wanted which blocks are likely to be wanted."""
        self.num_tokens = sum(len(span) for span in spans)
        self.stats = ReadStats()
        self._shape = shape
        firsts = itertools.accumulate((len(span) for span in spans[:-1]), initial=0)
        self._spans = tuple(zip(firsts, spans, strict=True))
        self._placement = placement
        self._page_bytes = page_bytes
        self._learns = learns
        # Plans of the rows of whole spans, by their first tokens.
        self._whole: dict[int, RowPlan] = {}
        # Reads since the last selection, and whether they were of all tokens.
        self._found: list[tuple[SpanRead, GroupPart, bool]] = []

    def plan_probe(self, layer: int) -> PlannedRead:
        """Decide how the probe column is read, and where its chunks are from now on."""
        return self._decide(layer, self._probe_wishes, whole=True)

    def plan(
        self, layer: int, tokens: Indices | None, *, keys: bool = True, values: bool = True
    ) -> PlannedRead:
        """Decide how rows are read, and where their chunks are from now on; `count` must follow.

        Args:
            layer: from 0.
            tokens: [head groups, k], ascending in each head group, counted from the start of the
                prefix; None for all.
            keys: whether to read keys, of the heads that the probe column does not have.
            values: whether to read values.
        """
        wanted = self._everything if tokens is None else np.ascontiguousarray(tokens)
        alone = len(self._spans) == 1
        wishes = []
        for first, span in self._spans:
            rows = self._plan_rows(layer, span, wanted, first, alone, whole=tokens is None)
            if not len(rows.rows):
                continue
            geometry, groups = span.geometry, []
            if keys and geometry.keys is not None:
                assert rows.key_blocks is not None
                groups.append((geometry.keys, rows.key_blocks))
            if values:
                groups.append((geometry.values, rows.value_blocks))
            wishes.append(_Wish(span, first, rows, groups, rows.chunks, rows.counts, rows.shares))
        return self._decide(layer, wishes, whole=tokens is None)

    def missing(
        self, layer: int, span: SourceSpan, *, probe: bool, layers: int | None = None
    ) -> Flags:
        """Find the blocks of the probe column, or of keys and values, that are in no cache.

        Only blocks that may hold tokens of the span; placement does not change.

        Returns:
            bool [layers, blocks of a layer], for `layers` layers from `layer` on, None for all.
        """
        geometry = span.geometry
        layers = self._shape.num_layers - layer if layers is None else layers
        first = span.base + layer * geometry.num_chunks
        tiers = self._placement.tiers(first, layers * geometry.num_chunks)
        possible = span.probe_blocks if probe else span.kv_blocks
        by_layer = tiers.reshape(layers, geometry.num_chunks)
        return loops.missing_blocks(by_layer, geometry.chunk_of_block, possible, _SSD)

    def note_selection(self, layer: int, selected: Indices, importance: Tensor | None) -> None:
        """Note which tokens the layer uses; updates the averages.

        Args:
            layer: from 0.
            selected: [head groups, k], ascending in each head group.
            importance: scores [H, m] of all query heads, or of those of the probe heads; None if
                the tokens were not chosen by scores.
        """
        selected = np.ascontiguousarray(selected)
        self._count_important(layer, selected)
        for first, span in self._spans:
            part = None if importance is None else importance[:, first : first + len(span)]
            span.history.note(layer, span.start, len(span), selected, first, part)

    def note_whole(self, layer: int) -> None:
        """Note that the layer uses all tokens."""
        self.note_selection(layer, self._everything, None)

    def count(self, read: PlannedRead) -> None:
        """Count a read that was carried out, except bytes from SSD: their reader counts these."""
        stats = self.stats
        for own in read.spans:
            span = own.span
            for part in own.parts:
                row_bytes = part.group.row_bytes
                rows, chunks = part.rows_by_tier, part.chunks_by_tier
                stats.ssd_needed_bytes += rows[_SSD] * row_bytes
                stats.h2d_bytes += (rows[_SSD] + rows[_HOST]) * row_bytes
                stats.ssd_chunks += chunks[_SSD]
                stats.host_chunks += chunks[_HOST]
                stats.device_chunks += chunks[_DEVICE]
                if own.rows is not None:
                    stats.selected_chunks += len(part.chunks)
                    if self._learns:
                        span.blocks.note(
                            read.layer,
                            values=part.is_values(span),
                            blocks=part.group.blocks,
                            wanted=part.blocks,
                        )
                self._found.append((own, part, read.whole))
        pages = read.access.moves.pages_moved()[:, _DEVICE].sum()
        stats.h2d_bytes += int(pages) * self._page_bytes

    def _plan_rows(
        self, layer: int, span: SourceSpan, tokens: Indices, first: int, alone: bool, *, whole: bool
    ) -> RowPlan:
        if not whole or span.segment.mapping is not None:
            return plan_rows(span, layer, tokens, first, alone=alone)
        # The same for all layers.
        if first not in self._whole:
            rows = plan_rows(span, layer, tokens, first, alone=alone)
            self._whole[first] = dataclasses.replace(rows, start=span.start)
        return self._whole[first]

    @functools.cached_property
    def _everything(self) -> Indices:
        return np.tile(np.arange(self.num_tokens), (self._shape.num_head_groups, 1))

    @functools.cached_property
    def _probe_wishes(self) -> list[_Wish]:
        """The same for all layers."""
        wishes = []
        for first, span in self._spans:
            group = span.geometry.probe
            assert group is not None
            blocks = span.probe_blocks[group.blocks]
            wishes.append(_Wish(span, first, None, ((group, blocks),), *span.probe_chunks))
        return wishes

    def _decide(self, layer: int, wishes: Sequence[_Wish], *, whole: bool) -> PlannedRead:
        ids, shares = [], []
        for wanted in wishes:
            geometry = wanted.span.geometry
            base = wanted.span.base + layer * geometry.num_chunks
            for group, _ in wanted.groups:
                ids.append(wanted.chunks + (base + group.first_chunk))
                shares.append(wanted.shares)
        access = self._placement.access(_joined(ids, np.int64), _joined(shares, np.float64))
        groups, start, reads = iter(ids), 0, []
        for wanted in wishes:
            parts = []
            for group, blocks in wanted.groups:
                place = slice(start, start := start + len(wanted.chunks))
                tiers = access.tiers[place]
                *found, on_ssd, on_host, on_device = loops.tally(tiers, wanted.counts)
                parts.append(
                    GroupPart(
                        group,
                        blocks,
                        wanted.chunks,
                        wanted.counts,
                        next(groups),
                        tiers,
                        access.pages[place],
                        access.kept[place],
                        (found[0], found[1], found[2]),
                        (on_ssd, on_host, on_device),
                    )
                )
            blocks_read = _blocks_from_ssd(wanted.span, parts, bool(len(access.moves)))
            reads.append(SpanRead(wanted.span, wanted.first, wanted.rows, parts, blocks_read))
        return PlannedRead(layer, reads, access, whole)

    def _count_important(self, layer: int, selected: Indices) -> None:
        """Count the KVs of the tokens that a layer uses, and those of them found on the device."""
        everything = selected.shape[1] == self.num_tokens
        stats = self.stats
        for read, part, whole in self._found:
            if whole and not everything:
                wanted, hits = _hits(layer, selected, read, part)
            else:
                wanted, hits = sum(part.rows_by_tier), part.rows_by_tier[_DEVICE]
            stats.important_bytes += wanted * part.group.row_bytes
            stats.important_device_bytes += hits * part.group.row_bytes
        self._found.clear()


def _hits(layer: int, selected: Indices, read: SpanRead, part: GroupPart) -> tuple[int, int]:
    """For a group whose rows were all read: how many are selected, and how many on the device."""
    span, group = read.span, part.group
    return loops.chunk_hits(
        selected,
        read.first,
        read.first + len(span),
        span.start,
        NO_MAPPING if read.rows is None else span.mapping(layer),
        span.segment.layout.num_tokens,
        group.chunk_rows,
        part.found_in(_DEVICE),
    )


def _blocks_from_ssd(span: SourceSpan, parts: Sequence[GroupPart], moves: bool) -> Flags | None:
    """Blocks of the layer that must come from SSD: those with wanted rows, and all to be cached.

    `moves`: whether any chunk will move to a cache.
    """
    blocks = None
    for part in parts:
        if not part.chunks_by_tier[_SSD]:
            continue
        if blocks is None:
            blocks = np.zeros(span.geometry.num_blocks, np.bool_)
        own = blocks[part.group.blocks]
        if part.chunks_by_tier[_SSD] == len(part.chunks) and not moves:
            own[:] = part.blocks
        else:
            loops.add_cached_blocks(
                own,
                part.blocks,
                part.group.chunk_of_block,
                part.chunks,
                part.tiers,
                part.kept,
                _SSD,
            )
    return blocks


def _joined(parts: Sequence[npt.NDArray[_T]], dtype: type[_T]) -> npt.NDArray[_T]:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, dtype)
