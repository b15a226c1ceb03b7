"""What a read touches, where it is found and what it costs: all of a read but its data.

Stage: load. A `PrefixPlanner` asks the placement where the chunks of the wanted rows stand, says
which blocks must come from SSD, and counts. `SegmentSource` carries its plans out; a trace can be
replayed with the planner alone.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from impress_sglang.storage.layout import KVShape
from impress_sglang.tiers.placement import Access, Placement, Tier
from impress_sglang.transfer.plan import (
    Flags,
    Indices,
    RowPlan,
    SourceSpan,
    StreamGroup,
    divided,
    plan_rows,
)

_T = TypeVar("_T", bound=np.generic)
_SSD, _HOST, _DEVICE = int(Tier.SSD), int(Tier.HOST), int(Tier.DEVICE)


@dataclasses.dataclass(slots=True)
class ReadStats:
    """What reading a prefix took; bytes, and accesses to chunks by the tier where they were found.

    `ssd_needed_bytes` are the rows that were asked of SSD: `ssd_bytes` over it is the read
    amplification. Of `ssd_bytes`, `ahead_bytes` were read before their layer asked, and of these
    `ahead_used_bytes` were wanted. `h2d_bytes` are rows that were not on the device, and whole
    chunks that moved there. `important_bytes` are the KVs of selected tokens,
    `important_device_bytes` those that were found on the device. `selected_chunks` leaves out the
    chunks of probe streams, which every probe reads. `wait_ms` is how long the request waited for
    bytes from SSD, in milliseconds.
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
        """Count what another source has read."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name) + getattr(other, field.name)
            setattr(self, field.name, value)

    def as_dict(self) -> dict[str, float]:
        """All counters, with those that follow from others."""
        return {
            **dataclasses.asdict(self),
            "wait_ms": round(self.wait_ms, 3),
            "chunks_accessed": self.chunks_accessed,
            "chunks_loaded": self.chunks_loaded,
        }


@dataclasses.dataclass(frozen=True)
class GroupPart:
    """The chunks of one group of streams that a read of a span touches.

    `chunks` are lane * chunks of a stream + chunk, ascending; `counts` the rows wanted of each;
    `ids`, `tiers`, `pages` and `kept` are those of `Access`. `blocks` [blocks of the group] says
    which hold wanted rows, wherever they are found; None if nobody asks.
    """

    group: StreamGroup
    blocks: Flags | None
    chunks: Indices
    counts: Indices
    ids: Indices
    tiers: npt.NDArray[np.uint8]
    pages: npt.NDArray[np.int32]
    kept: npt.NDArray[np.bool_]

    @functools.cached_property
    def by_tier(self) -> tuple[list[int], list[int]]:
        """Wanted rows, and touched chunks, by the tier where they were found."""
        chunks = np.bincount(self.tiers, minlength=len(Tier)).tolist()
        if max(chunks) == len(self.tiers):
            total = int(self.counts.sum())
            return [total if own else 0 for own in chunks], chunks
        rows = np.bincount(self.tiers, self.counts, len(Tier))
        return rows.astype(np.int64).tolist(), chunks

    def is_values(self, span: SourceSpan) -> bool:
        """Whether the group has values."""
        return self.group is span.geometry.values

    def by_chunk(self, flags: Flags) -> Flags:
        """Flags of the touched chunks as flags of all chunks of the group."""
        everything = np.zeros(self.group.lanes * self.group.chunks, np.bool_)
        everything[self.chunks] = flags
        return everything


@dataclasses.dataclass(frozen=True, slots=True)
class SpanRead:
    """What a read wants of a span.

    `rows` is None where the probe stream is read. `blocks` says which blocks of the layer must come
    from SSD, None if none.
    """

    span: SourceSpan
    rows: RowPlan | None
    parts: list[GroupPart]
    blocks: Flags | None


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedRead:
    """A read of the probe stream, or of keys or values or both, of one layer.

    `whole`: all tokens are wanted, not only those that the layer uses.
    """

    layer: int
    spans: list[SpanRead]
    access: Access
    whole: bool


@dataclasses.dataclass(frozen=True, slots=True)
class _Wish:
    """What a read wants of a span, before it is known where the chunks stand."""

    span: SourceSpan
    rows: RowPlan | None
    groups: tuple[StreamGroup, ...]
    chunks: Indices  # of each of the groups
    counts: Indices


@dataclasses.dataclass(frozen=True, slots=True)
class _Tokens:
    """Tokens of a span, counted from the start of its segment, and their lanes and positions."""

    span: SourceSpan
    first: int  # of the span, counted from the start of the prefix
    positions: Indices | None
    lanes: Indices
    tokens: Indices


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
        """`learns`: what is wanted teaches the spans which blocks are likely to be."""
        self.num_tokens = sum(len(span) for span in spans)
        self.stats = ReadStats()
        self._shape = shape
        self._spans = tuple(spans)
        self._placement = placement
        self._page_bytes = page_bytes
        self._learns = learns
        # What was read since the last selection, and whether for all tokens.
        self._found: list[tuple[SpanRead, GroupPart, bool]] = []

    def plan_probe(self, layer: int) -> PlannedRead:
        """Decide how the probe stream is read, and where its chunks stand from now on."""
        wishes = []
        for span in self._spans:
            group = span.geometry.probe
            chunks, counts = span.probe_chunks
            assert group is not None
            wishes.append(_Wish(span, None, (group,), chunks, counts))
        return self._decide(layer, wishes, whole=True)

    def plan(
        self, layer: int, tokens: Indices | None, *, keys: bool = True, values: bool = True
    ) -> PlannedRead:
        """Decide how rows are read, and where their chunks stand from now on; `count` follows.

        Args:
            layer: from 0.
            tokens: [lanes, k], ascending in each lane, counted from the start of the prefix; None
                for all.
            keys: whether keys are wanted, of the heads that the probe stream does not have.
            values: whether values are wanted.
        """
        wishes = []
        for own in self._by_span(self._everything() if tokens is None else tokens):
            if not len(own.tokens):
                continue
            plan = plan_rows(own.span, layer, own.lanes, own.tokens, own.positions)
            geometry = own.span.geometry
            chunks = np.flatnonzero(plan.counts)
            both = ((geometry.keys, keys), (geometry.values, values))
            groups = tuple(group for group, wanted in both if wanted and group is not None)
            wishes.append(_Wish(own.span, plan, groups, chunks, plan.counts[chunks]))
        return self._decide(layer, wishes, whole=tokens is None)

    def missing(
        self, layer: int, span: SourceSpan, *, probe: bool, layers: int | None = None
    ) -> Flags:
        """Blocks of the probe stream, or else of keys and values, that are in no cache.

        Only blocks that may hold tokens of the span; nothing is decided.

        Returns:
            bool [layers, blocks of a layer], of `layers` layers from `layer` on, None for all.
        """
        geometry = span.geometry
        layers = self._shape.num_layers - layer if layers is None else layers
        first = span.base + layer * geometry.num_chunks
        on_ssd = self._placement.tiers(first, layers * geometry.num_chunks) == _SSD
        possible = span.probe_blocks if probe else span.kv_blocks
        by_block = on_ssd.reshape(layers, -1)[:, geometry.chunk_of_block]
        blocks: Flags = by_block & possible
        return blocks

    def note_selection(self, layer: int, selected: Indices, importance: Tensor | None) -> None:
        """Say which tokens the layer uses; updates the averages.

        Args:
            layer: from 0.
            selected: [lanes, k], ascending in each lane.
            importance: scores [H, m] of all query heads, or of those of the probe heads; None if
                the tokens were not chosen by scores.
        """
        rows = list(self._by_span(selected))
        self._count_important(layer, selected, rows)
        for own in rows:
            span = own.span
            part = None if importance is None else importance[:, own.first : own.first + len(span)]
            tokens = own.tokens - span.start if span.start else own.tokens
            span.history.note(layer, span.start, len(span), own.lanes, tokens, part)

    def note_whole(self, layer: int) -> None:
        """Say that the layer uses all tokens."""
        self.note_selection(layer, self._everything(), None)

    def count(self, read: PlannedRead) -> None:
        """The read was carried out: count it. Bytes from SSD are counted by who reads them."""
        stats = self.stats
        for own in read.spans:
            span = own.span
            for part in own.parts:
                row_bytes = part.group.row_bytes
                rows, chunks = part.by_tier
                stats.ssd_needed_bytes += rows[_SSD] * row_bytes
                stats.h2d_bytes += (rows[_SSD] + rows[_HOST]) * row_bytes
                stats.ssd_chunks += chunks[_SSD]
                stats.host_chunks += chunks[_HOST]
                stats.device_chunks += chunks[_DEVICE]
                if own.rows is not None:
                    stats.selected_chunks += len(part.tiers)
                    if self._learns:
                        assert part.blocks is not None
                        span.blocks.note(
                            read.layer,
                            values=part.is_values(span),
                            blocks=part.group.blocks,
                            wanted=part.blocks,
                        )
                if own.rows is not None or not self._shape.sketch_bits:
                    self._found.append((own, part, read.whole))
        moved = (move for move in read.access.moves if move.target == _DEVICE)
        stats.h2d_bytes += sum(len(move.target_pages) for move in moved) * self._page_bytes

    def _everything(self) -> Indices:
        return np.broadcast_to(np.arange(self.num_tokens), (self._shape.num_lanes, self.num_tokens))

    def _decide(self, layer: int, wishes: Sequence[_Wish], *, whole: bool) -> PlannedRead:
        ids, shares = [], []
        for wish in wishes:
            base = wish.span.base + layer * wish.span.segment.layout.layer_chunks
            for group in wish.groups:
                ids.append(wish.chunks + (base + group.first_chunk))
                shares.append(wish.counts / group.rows_of_chunk[wish.chunks])
        access = self._placement.access(_joined(ids, np.int64), _joined(shares, np.float64))
        ends = list(itertools.accumulate((len(own) for own in ids), initial=0))
        places = zip(ids, (slice(*pair) for pair in itertools.pairwise(ends)), strict=True)
        reads = []
        for wish in wishes:
            found = [(group, *next(places)) for group in wish.groups]
            on_ssd = self._learns or any((access.tiers[place] == _SSD).any() for *_, place in found)
            blocks = _wanted_blocks(wish) if on_ssd else [None] * len(found)
            parts = [
                GroupPart(
                    group,
                    own,
                    wish.chunks,
                    wish.counts,
                    group_ids,
                    access.tiers[place],
                    access.pages[place],
                    access.kept[place],
                )
                for own, (group, group_ids, place) in zip(blocks, found, strict=True)
            ]
            reads.append(SpanRead(wish.span, wish.rows, parts, _blocks_from_ssd(wish, parts)))
        return PlannedRead(layer, reads, access, whole)

    def _by_span(self, tokens: Indices) -> Iterator[_Tokens]:
        """The tokens [lanes, k] of each span, token after token and lane by lane."""
        num_lanes, k = tokens.shape
        flat = tokens.T.reshape(-1)
        lanes = _lanes(num_lanes, k)
        if len(self._spans) == 1:
            span = self._spans[0]
            yield _Tokens(span, 0, None, lanes, flat + span.start if span.start else flat)
            return
        first = 0
        for span in self._spans:
            positions = np.flatnonzero((flat >= first) & (flat < first + len(span)))
            own = flat[positions] + (span.start - first)
            yield _Tokens(span, first, positions, lanes[positions], own)
            first += len(span)

    def _count_important(self, layer: int, selected: Indices, rows: Sequence[_Tokens]) -> None:
        """Count which KVs of the tokens that a layer uses were found on the device."""
        everything = selected.shape[1] == self.num_tokens
        by_span = {id(own.span): own for own in rows}
        stats = self.stats
        for read, part, whole in self._found:
            if whole and not everything:
                on_device = part.by_chunk(part.tiers == _DEVICE)
                chunks = _chunks_of(layer, read, part, by_span[id(read.span)])
                wanted, hits = len(chunks), int(on_device[chunks].sum())
            else:
                found, _ = part.by_tier
                wanted, hits = sum(found), found[_DEVICE]
            stats.important_bytes += wanted * part.group.row_bytes
            stats.important_device_bytes += hits * part.group.row_bytes
        self._found.clear()


def _chunks_of(layer: int, read: SpanRead, part: GroupPart, own: _Tokens) -> Indices:
    """The chunk of each of some tokens in a group whose rows were all read."""
    if read.rows is None:
        return divided(own.tokens, part.group.chunk_rows)
    return plan_rows(own.span, layer, own.lanes, own.tokens, None).chunks


def _wanted_blocks(wish: _Wish) -> list[Flags | None]:
    """For each group which of its blocks hold wanted rows; keys and values are often alike."""
    blocks: list[Flags | None] = []
    for group in wish.groups:
        if wish.rows is None:
            blocks.append(wish.span.probe_blocks[group.blocks])
        elif group.looks_like(wish.span.geometry.values):
            blocks.append(wish.rows.blocks)
        else:
            blocks.append(group.blocks_of_rows(wish.rows.lanes, wish.rows.rows))
    return blocks


def _blocks_from_ssd(wish: _Wish, parts: Sequence[GroupPart]) -> Flags | None:
    """Blocks of the layer that must come from SSD: of wanted rows, and all that will be cached."""
    blocks = None
    for part in parts:
        on_ssd = part.tiers == _SSD
        if not on_ssd.any():
            continue
        if blocks is None:
            blocks = np.zeros(wish.span.geometry.num_blocks, np.bool_)
        assert part.blocks is not None
        group = part.group
        own = part.blocks & part.by_chunk(on_ssd)[group.chunk_of_block]
        if part.kept.any():
            own |= part.by_chunk(part.kept)[group.chunk_of_block]
        blocks[group.blocks] = own
    return blocks


@functools.lru_cache(maxsize=64)
def _lanes(num_lanes: int, k: int) -> Indices:
    """The lane of each of k tokens per lane, token after token; not to be changed."""
    return np.tile(np.arange(num_lanes), k)


def _joined(parts: Sequence[npt.NDArray[_T]], dtype: type[_T]) -> npt.NDArray[_T]:
    return np.concatenate(parts) if parts else np.empty(0, dtype)
