"""What a request would read of a stored prefix, by its tokens and bits, and how long that takes.

Stage: admit.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

from impress_sglang.management.forecast import CodedBytes, ReadForecast, StoredBytes
from impress_sglang.management.policies import Policy
from impress_sglang.management.residents import Cover, ResidentParts
from impress_sglang.management.stored import StoredSpan
from impress_sglang.options import EXACT_BITS
from impress_sglang.precision.allocation import mean_planes
from impress_sglang.precision.codec import NUM_PLANES


class Ahead(NamedTuple):
    """What is read while a request waits: the share that is done, and the planes read with codes.

    All of it is certain to be used.
    """

    there: float
    planes: int = 0


@dataclasses.dataclass(frozen=True)
class ExpectedReads:
    """The reads of spans that begin `start` tokens after the prompt's first.

    Each forecast is made once, when it is first needed.
    """

    spans: Sequence[StoredSpan]
    start: int
    forecast: ReadForecast
    policy: Policy
    residents: ResidentParts

    @functools.cached_property
    def covers(self) -> list[Cover]:
        """Where the tokens are, in codes."""
        return self.residents.cover(self.spans, self.start)

    @property
    def alone(self) -> bool:
        """Whether none of the tokens are in slots in codes."""
        return not any(cover.part for cover in self.covers)

    def seconds(
        self, retention: float, bits: float, planes: int, ahead: Ahead | None = None
    ) -> tuple[float, float]:
        """Seconds to read what can be read before a layer asks, and what cannot.

        Args:
            retention: share of the tokens that a layer uses.
            bits: per element on average.
            planes: how many all units get.
            ahead: what was read already, and need not be; None for nothing.
        """
        left = 1.0 if ahead is None else 1.0 - ahead.there
        if bits == EXACT_BITS:
            return self.forecast.seconds_to_read(left * self._exact_bytes(retention)), 0.0
        num_tokens = sum(map(len, self.spans))
        whole = self.policy.tokens_to_load(num_tokens, retention) == num_tokens
        coded = self._missing if whole else self._everything
        certain, picked = coded.parts(bits, planes if ahead is None else ahead.planes)
        lacking = 0.0
        for cover in self.covers if whole else ():
            more = self._lacking_bytes(cover, bits, planes)
            lacking, picked = lacking + more[0], picked + more[1]
        waits = self.forecast.seconds_to_read(lacking) + self.forecast.seconds_to_pick(picked)
        return self.forecast.seconds_to_read(left * certain), waits

    def _exact_bytes(self, retention: float) -> float:
        if retention >= 1.0:
            return self.forecast.exact_bytes(self.spans)
        all_keys = self.policy.selector.evidence == "keys"
        return self._stored.expected(retention, all_keys=all_keys)

    @functools.cached_property
    def _stored(self) -> StoredBytes:
        return self.forecast.stored_bytes(self.spans)

    @functools.cached_property
    def _missing(self) -> CodedBytes:
        spans = [cover.span for cover in self.covers if cover.part is None]
        return self.forecast.coded_bytes(spans)

    @functools.cached_property
    def _everything(self) -> CodedBytes:
        """A request that uses a part of a prefix shares nothing."""
        return self.forecast.coded_bytes(self.spans)

    def _lacking_bytes(self, cover: Cover, bits: float, planes: int) -> tuple[float, float]:
        """Bytes on SSD that a part lacks of the first planes, and of those that are chosen.

        What a load under way brings in any case is not counted.
        """
        part = cover.part
        if part is None or part.has(NUM_PLANES):
            return 0.0, 0.0
        brought = part.load[0].source.planes if part.load is not None else 0
        most = part.levels.size * NUM_PLANES
        certain = part.lacking(planes, brought)
        spared = 0.0 if part.whole else most * (1.0 - mean_planes(bits) / NUM_PLANES)
        chosen = max(part.lacking(NUM_PLANES, brought) - certain - spared, 0.0)
        if not certain and not chosen:
            return 0.0, 0.0
        each = self.forecast.coded_bytes([cover.span]).units / most
        return each * certain, each * chosen
