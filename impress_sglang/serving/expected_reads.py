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
from impress_sglang.precision.codec import planes_of


class Ahead(NamedTuple):
    """What is read while a request waits: the share of layers that is done, and planes of codes."""

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

    def seconds(self, retention: float, bits: float, ahead: Ahead | None = None) -> float:
        """Seconds that reading takes.

        Args:
            retention: share of the tokens that a layer uses.
            bits: per element.
            ahead: what was read already, and need not be; None for nothing.
        """
        there = 0.0 if ahead is None else ahead.there
        if bits == EXACT_BITS:
            return self.forecast.seconds_to_read((1.0 - there) * self._exact_bytes(retention))
        num_tokens = sum(map(len, self.spans))
        whole = self.policy.tokens_to_load(num_tokens, retention) == num_tokens
        planes = planes_of(bits)
        if ahead is None:
            return self.forecast.seconds_to_read(self._coded_bytes(planes, whole=whole))
        most = self._coded_bytes(max(planes, ahead.planes), whole=whole)
        done = there * self._coded_bytes(ahead.planes, whole=whole)
        return self.forecast.seconds_to_read(most - done)

    def _coded_bytes(self, planes: int, *, whole: bool) -> float:
        if not whole:
            # A request that uses a part of a prefix shares nothing.
            return self._everything.expected(planes)
        lacking = sum(self._lacking_bytes(cover, planes) for cover in self.covers)
        return self._missing.expected(planes) + lacking

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
        return self.forecast.coded_bytes(self.spans)

    def _lacking_bytes(self, cover: Cover, planes: int) -> float:
        """Bytes on SSD that a part lacks, except what a load under way brings in any case."""
        part = cover.part
        if part is None or part.has(planes):
            return 0.0
        brought = 0 if part.load is None else part.load[0].source.planes
        lacking = part.lacking(planes, brought)
        if not lacking.any():
            return 0.0
        return float(lacking @ self.forecast.coded_bytes([cover.span]).planes[:planes])
