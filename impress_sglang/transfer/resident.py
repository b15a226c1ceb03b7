"""Parts: stored tokens that are in slots in codes, for all requests that use them.

Stage: load. A part is loaded once; a request that wants more bits of it adds the planes that it
lacks, so the precision of a part only rises. A request that comes while a part is being loaded
joins in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from impress_sglang.errors import SegmentUnreadable
from impress_sglang.precision.codec import GROUP_TOKENS
from impress_sglang.precision.floors import Floors
from impress_sglang.precision.layout import CodeLayout
from impress_sglang.precision.tokens import CodedTokens
from impress_sglang.transfer.coded import CodedSource
from impress_sglang.transfer.coded_span import Planes, levels_of


@dataclasses.dataclass(eq=False, slots=True)
class PartLoad:
    """A source that several requests read from, in the same pass of the model.

    `parts` belong to the source's spans, one each. `pending` requests have joined and have not
    loaded their last layer; `ended` of them are done with `layer`. Who has joined wants `planes` at
    most, and the source reads them, except for who joins when it has been read from.
    """

    source: CodedSource
    parts: Sequence[ResidentPart]
    pending: int = 0
    planes: int = 0
    layer: int = -1
    ended: int = 0

    def __post_init__(self) -> None:
        for number, part in enumerate(self.parts):
            part.load = self, number
            if not part.loaded:
                # Who began has failed.
                part.restart()

    def loads(self, part: ResidentPart) -> bool:
        """Whether one of its parts is still to be loaded by it."""
        return part.load is not None and part.load[0] is self and not part.broken

    def end_layer(self, layer: int) -> None:
        """Note that a request is done with a layer; the last request lets the source drop it."""
        self.ended = self.ended + 1 if layer == self.layer else 1
        self.layer = layer
        if self.ended == self.pending:
            self.source.end_layer(layer)

    def leave(self) -> bool:
        """Note that a request is done with this load; returns whether it was the last one."""
        self.pending -= 1
        if self.pending:
            return False
        for part in self.parts:
            if part.load is not None and part.load[0] is self:
                part.load = None
        return True


@dataclasses.dataclass(eq=False)
class ResidentPart:
    """The tokens [start, stop) of a stored segment, and the slots that hold them in codes.

    Invariants: layers below `layers_loaded` are in the slots, each with `planes` uint8 [L] planes
    above the `floors` uint8 [L, G] of its heads. A unit at the edge of a part belongs to it only as
    far as the part has its tokens.
    """

    segment_id: str
    layout: CodeLayout
    num_layers: int
    start: int
    stop: int
    slots: Tensor  # int64 [stop - start]
    layers_loaded: int = 0
    users: int = 0
    last_access: float = 0.0
    broken: bool = False
    """Whether a layer could not be read, so that no other request may use the part."""
    lasting: bool = True
    """Whether planes can be added to a layer after the next is loaded: all ranges are kept."""
    alone: bool = False
    """Whether no other request may join: another part has slots in the same pages, and one request
    uses both parts and gives both back; or its segment is to be forgotten."""
    load: tuple[PartLoad, int] | None = None
    """The load that reads it now, and the number of its span there."""

    def __post_init__(self) -> None:
        assert 0 <= self.start < self.stop <= self.layout.num_tokens
        assert len(self.slots) == len(self)
        self.planes: Planes = np.zeros(self.num_layers, np.uint8)
        shape = self.num_layers, self.layout.num_heads
        self.floors: npt.NDArray[np.uint8] = np.zeros(shape, np.uint8)
        # Those of all layers, or of the last one: uint8 [L or 1, groups, group_range_bytes].
        self._ranges: Tensor | None = None

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def loaded(self) -> bool:
        """Whether all layers are in the slots."""
        return self.layers_loaded == self.num_layers

    @property
    def in_slots(self) -> Planes | None:
        """What a source need not read, see `CodedSpan`; nothing unless all layers are there."""
        return self.planes if self.loaded else None

    def restart(self) -> None:
        """Begin again with the first layer."""
        self.layers_loaded = 0
        self.planes[:] = 0

    def check(self) -> None:
        """Check that its slots hold what its levels say.

        Raises:
            SegmentUnreadable: it is broken.
        """
        if self.broken:
            raise SegmentUnreadable(self.segment_id, "could not be read for another request")

    def levels(self, layer: int) -> Floors:
        """How many planes each head has in a loaded layer, uint8 [G]."""
        return levels_of(self.floors[layer], int(self.planes[layer]))

    def lacking(self, planes: int, brought: int = 0) -> npt.NDArray[np.float64]:
        """In which share of its layers it lacks each of the first planes, float64 [planes].

        `brought`: so many are being loaded in any case.
        """
        there = np.maximum(self.planes, np.uint8(brought))
        return (there[:, None] <= np.arange(planes)).mean(0)

    def has(self, planes: int) -> bool:
        """Whether it is loaded, with so many planes."""
        return self.loaded and bool((self.planes >= planes).all())

    def tokens(self, layer: int) -> CodedTokens:
        """The part's codes in a loaded layer; only the ranges of their bytes are present."""
        assert self._ranges is not None and layer < self.layers_loaded
        assert self.lasting or layer == self.layers_loaded - 1
        ranges = self._ranges[layer if self.lasting else 0]
        return CodedTokens(self.layout, ranges, self.start, self.slots)

    def begin_layer(self, layer: int, groups: Tensor, floors: Floors) -> CodedTokens:
        """Begin the next layer with its base, uint8 [groups, group_bytes]; keeps the ranges.

        `floors` uint8 [G]: how many planes belong to the base of each head.
        """
        assert layer == self.layers_loaded
        assert len(groups) == -(-self.stop // GROUP_TOKENS) - self.start // GROUP_TOKENS
        if self._ranges is None:
            # Of all layers at once: what lasts must not lie between what is freed at once.
            layers = self.num_layers if self.lasting else 1
            size = self.layout.group_range_bytes
            self._ranges = groups.new_empty(layers, len(groups), size)
        # A copy, because the bytes that were read belong to the source.
        own = self._ranges[layer if self.lasting else 0]
        own.copy_(groups[:, : self.layout.group_range_bytes])
        self.floors[layer] = floors
        self.layers_loaded += 1
        return CodedTokens(self.layout, groups, self.start, self.slots)

    def cut(self, token: int) -> ResidentPart:
        """Split the tokens from `token` on into a new part; nobody may be using or loading this."""
        assert self.loaded and not self.users and self.load is None
        rest = ResidentPart(
            self.segment_id,
            self.layout,
            self.num_layers,
            token,
            self.stop,
            self.slots[token - self.start :],
            self.num_layers,
            last_access=self.last_access,
        )
        rest.planes, rest.floors = self.planes.copy(), self.floors
        group = self.start // GROUP_TOKENS
        if self._ranges is not None:
            rest._ranges = self._ranges[:, token // GROUP_TOKENS - group :]
            self._ranges = self._ranges[:, : -(-token // GROUP_TOKENS) - group]
        self.slots, self.stop = self.slots[: token - self.start], token
        return rest


@dataclasses.dataclass(frozen=True, slots=True)
class PartUse:
    """The tokens [start, stop) of a part's segment that a request uses."""

    part: ResidentPart
    start: int
    stop: int

    def __post_init__(self) -> None:
        assert self.part.start <= self.start < self.stop <= self.part.stop

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def units(self) -> range:
        """The units of a head that have some of the tokens."""
        size = self.part.layout.unit_tokens
        return range(self.start // size, -(-self.stop // size))

    @property
    def slots(self) -> Tensor:
        """int64 [stop - start]."""
        return self.part.slots[self.start - self.part.start : self.stop - self.part.start]


def have_planes(uses: Sequence[PartUse], planes: int) -> bool:
    """Whether parts have so many planes, so that nothing is left to load."""
    return all(use.part.has(planes) for use in uses)


def parts_to_read(uses: Sequence[PartUse], planes: int) -> list[ResidentPart]:
    """The parts that lack some of so many planes and that nobody reads, each once, in order."""
    parts = dict.fromkeys(use.part for use in uses)
    return [part for part in parts if part.load is None and not part.has(planes)]


def parts_alone(source: CodedSource, slots: Tensor) -> list[PartUse]:
    """Make unshared parts for all tokens of a source, and their load.

    Args:
        source: a source none of whose base is in slots.
        slots: int64 [m], for all tokens.
    """
    parts = [
        ResidentPart(
            span.segment.segment_id,
            span.layout,
            source.num_layers,
            span.start,
            span.stop,
            own,
            lasting=False,
        )
        for span, own in zip(
            source.spans, slots.split([len(span) for span in source.spans]), strict=True
        )
    ]
    PartLoad(source, parts, pending=1)
    return [PartUse(own, own.start, own.stop) for own in parts]
