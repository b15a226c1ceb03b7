"""What a read touches, where it is found and what it costs: all of a read but its data.

Stage: load. A `PrefixPlanner` asks the placement where the chunks of the wanted rows stand, says
which blocks must come from SSD, and counts. `SegmentSource` carries its plans out; a trace can be
replayed with the planner alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from impress_sglang.storage.layout import PROBE, KVShape, Stream
from impress_sglang.tiers.placement import Access, Placement, Tier
from impress_sglang.transfer.plan import (
    Indices,
    RowPlan,
    SourceSpan,
    StagedRun,
    block_runs,
    plan_probe,
    plan_rows,
    wanted_blocks,
)

_T = TypeVar("_T", bound=np.generic)
_SSD, _HOST, _DEVICE = int(Tier.SSD), int(Tier.HOST), int(Tier.DEVICE)


@dataclasses.dataclass(slots=True)
class ReadStats:
    """What reading a prefix took; bytes, and accesses to chunks by the tier where they were found.

    `ssd_needed_bytes` are the rows that were asked of SSD: `ssd_bytes` over it is the read
    amplification. `h2d_bytes` are rows that were not on the device, and whole chunks that moved
    there. `important_bytes` are the KVs of selected tokens, `important_device_bytes` those that
    were found on the device. `selected_chunks` leaves out the chunks of probe streams, which every
    probe reads.
    """

    ssd_bytes: int = 0
    ssd_needed_bytes: int = 0
    h2d_bytes: int = 0
    device_chunks: int = 0
    host_chunks: int = 0
    ssd_chunks: int = 0
    selected_chunks: int = 0
    important_bytes: int = 0
    important_device_bytes: int = 0

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

    def as_dict(self) -> dict[str, int]:
        """All counters, with those that follow from others."""
        return {
            **dataclasses.asdict(self),
            "chunks_accessed": self.chunks_accessed,
            "chunks_loaded": self.chunks_loaded,
        }


@dataclasses.dataclass(frozen=True, slots=True)
class ReadPart:
    """One stream of one span in a read.

    `ids`, `tiers`, `pages` and `kept` are those of the chunks of `plan`, as in `Access`. The chunks
    that are found on SSD are staged one after another, `stride` bytes each; `runs` are the blocks
    to read.
    """

    plan: RowPlan
    stream: Stream
    ids: Indices
    tiers: npt.NDArray[np.uint8]
    pages: npt.NDArray[np.int32]
    kept: npt.NDArray[np.bool_]
    staged_position: Indices  # of each SSD chunk; undefined for others
    runs: list[StagedRun]

    @property
    def stride(self) -> int:
        """Staged bytes of a chunk."""
        return self.plan.span.segment.layout.chunk_stride(self.stream)

    @property
    def staged_bytes(self) -> int:
        """Memory that the chunks from SSD take."""
        return int((self.tiers == _SSD).sum()) * self.stride

    @property
    def read_bytes(self) -> int:
        """Bytes that come from SSD."""
        return sum(run.stop - run.start for run in self.runs)


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedRead:
    """Rows of several streams of a layer; `parts` go by stream, then by span."""

    parts: list[ReadPart]
    access: Access


class PrefixPlanner:
    """Plans the reads of one request over consecutive spans of segments.

    A read is a mapping from streams to the tokens that are wanted of them: ascending, counted from
    the start of the prefix, None for all. The probe stream is always read whole.
    """

    def __init__(
        self, shape: KVShape, spans: Sequence[SourceSpan], placement: Placement, page_bytes: int
    ) -> None:
        self.num_tokens = sum(len(span) for span in spans)
        self.stats = ReadStats()
        self._shape = shape
        self._spans = tuple(spans)
        self._placement = placement
        self._page_bytes = page_bytes
        # Per stream since the last selection: which of its rows were on the device.
        self._on_device: dict[Stream, npt.NDArray[np.bool_]] = {}

    def plan(
        self, layer: int, wanted: Mapping[Stream, Indices | None], gap_bytes: int
    ) -> PlannedRead:
        """Decide how rows are read, and where their chunks stand from now on; `count` follows.

        Args:
            layer: from 0.
            wanted: streams and tokens.
            gap_bytes: gap on SSD that is not worth skipping.
        """
        pairs = self._row_plans(layer, wanted)
        ids = [plan.chunk_ids(layer, stream) for stream, plan in pairs]
        shares = [plan.shares() for _, plan in pairs]
        access = self._placement.access(_joined(ids, np.int64), _joined(shares, np.float64))
        parts, first = [], 0
        for (stream, plan), own in zip(pairs, ids, strict=True):
            found = slice(first, first + len(own))
            parts.append(_part(layer, plan, stream, own, access, found, gap_bytes))
            first = found.stop
        return PlannedRead(parts, access)

    def note_selection(
        self, layer: int, selected: Sequence[Indices], importance: Tensor | None
    ) -> None:
        """Say which tokens the layer uses; updates the averages.

        Args:
            layer: from 0.
            selected: ascending, of each lane.
            importance: scores [H, m] of all query heads, or of those of the probe heads; None if
                the tokens were not chosen by scores.
        """
        self._count_important(selected)
        for lane, tokens in enumerate(selected):
            scores = None if importance is None else self._lane_scores(lane, importance)
            first = 0
            for span, own in self._by_span(tokens):
                stop = first + len(span)
                part = None if scores is None else scores[:, first:stop]
                span.history.note(layer, lane, span.start, len(span), own, part)
                first = stop

    def note_whole(self, layer: int) -> None:
        """Say that the layer uses all tokens."""
        everything = np.arange(self.num_tokens)
        self.note_selection(layer, [everything] * self._shape.num_lanes, None)

    def _lane_scores(self, lane: int, importance: Tensor) -> Tensor:
        if self._shape.num_lanes == 1:
            return importance
        return importance.view(self._shape.num_lanes, -1, importance.shape[1])[lane]

    def _count_important(self, selected: Sequence[Indices]) -> None:
        """Count which KVs of the tokens that a layer uses were found on the device."""
        for stream, on_device in self._on_device.items():
            tokens = selected[0 if stream == PROBE else self._shape.lane_of(stream)]
            hits = on_device[tokens] if len(on_device) == self.num_tokens else on_device
            assert len(hits) == len(tokens)
            row_bytes = self._shape.row_bytes(stream)
            self.stats.important_bytes += len(tokens) * row_bytes
            self.stats.important_device_bytes += int(hits.sum()) * row_bytes
        self._on_device.clear()

    def _row_plans(
        self, layer: int, wanted: Mapping[Stream, Indices | None]
    ) -> list[tuple[Stream, RowPlan]]:
        """The plans of each stream and span; keys and values of the same tokens share theirs."""
        known: dict[tuple[int, int], list[RowPlan]] = {}
        pairs = []
        for stream, tokens in wanted.items():
            if not self._shape.heads(stream):
                continue
            if stream == PROBE:
                plans = [plan_probe(span) for span in self._spans]
            else:
                lane = self._shape.lane_of(stream)
                place = lane, id(tokens)
                if place not in known:
                    known[place] = self._lane_plans(layer, lane, tokens)
                plans = known[place]
            pairs += [(stream, plan) for plan in plans]
        return pairs

    def _lane_plans(self, layer: int, lane: int, tokens: Indices | None) -> list[RowPlan]:
        wanted = np.arange(self.num_tokens) if tokens is None else tokens
        return [
            plan_rows(span, layer, lane, own + span.start)
            for span, own in self._by_span(wanted)
            if len(own)
        ]

    def _by_span(self, tokens: Indices) -> Iterator[tuple[SourceSpan, Indices]]:
        """The tokens of each span, counted from its start."""
        first = 0
        for span in self._spans:
            low, high = np.searchsorted(tokens, [first, first + len(span)])
            yield span, tokens[low:high] - first
            first += len(span)

    def count(self, read: PlannedRead) -> None:
        """The read was carried out: count it."""
        stats = self.stats
        on_device: dict[Stream, list[npt.NDArray[np.bool_]]] = {}
        for part in read.parts:
            row_bytes = self._shape.row_bytes(part.stream)
            rows = np.bincount(part.tiers, part.plan.counts, len(Tier)).astype(np.int64)
            chunks = np.bincount(part.tiers, minlength=len(Tier))
            num_bytes = part.read_bytes
            stats.ssd_bytes += num_bytes
            stats.ssd_needed_bytes += int(rows[_SSD]) * row_bytes
            stats.h2d_bytes += int(rows[_SSD] + rows[_HOST]) * row_bytes
            stats.ssd_chunks += int(chunks[_SSD])
            stats.host_chunks += int(chunks[_HOST])
            stats.device_chunks += int(chunks[_DEVICE])
            if part.stream != PROBE:
                stats.selected_chunks += int(chunks.sum())
                part.plan.span.history.ssd_bytes += num_bytes
            if part.stream in self._shape.kv_streams:
                found = (part.tiers == _DEVICE)[part.plan.chunk_of_row]
                on_device.setdefault(part.stream, []).append(found)
        for stream, parts in on_device.items():
            self._on_device[stream] = np.concatenate(parts)
        moved = (move for move in read.access.moves if move.target == _DEVICE)
        stats.h2d_bytes += sum(len(move.target_pages) for move in moved) * self._page_bytes


def _part(
    layer: int,
    plan: RowPlan,
    stream: Stream,
    ids: Indices,
    access: Access,
    found: slice,
    gap_bytes: int,
) -> ReadPart:
    tiers, kept = access.tiers[found], access.kept[found]
    on_ssd = tiers == _SSD
    position = np.cumsum(on_ssd) - 1
    runs = []
    if on_ssd.any():
        layout = plan.span.segment.layout
        chosen = np.flatnonzero(on_ssd[plan.chunk_of_row])
        wanted = wanted_blocks(
            layout,
            stream,
            plan.chunks[on_ssd],
            (kept | (plan.counts == layout.chunk_tokens))[on_ssd],
            position[plan.chunk_of_row[chosen]],
            plan.offset_of_row[chosen],
        )
        runs = block_runs(layout, layer, stream, plan.chunks[on_ssd], wanted, gap_bytes)
    return ReadPart(plan, stream, ids, tiers, access.pages[found], kept, position, runs)


def _joined(parts: Sequence[npt.NDArray[_T]], dtype: type[_T]) -> npt.NDArray[_T]:
    return np.concatenate(parts) if parts else np.empty(0, dtype)
