"""One request's stored prefix while it is served. Only its methods change it."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from impress_sglang.options import EXACT_BITS
from impress_sglang.paper.loader import LoadStats
from impress_sglang.paper.source import PartSource
from impress_sglang.paper.store import PartStore
from impress_sglang.storage.quality import EXACT, Quality


@dataclasses.dataclass(eq=False, slots=True)
class StoredRequest:
    """A request that runs with `k` tokens of a stored prefix of `m` tokens.

    If k < m, its row begins with an offset, and attention sees only what comes after it:

        |<- start = m - k ->|<- resident ->|<- k ->|<- new ... ->|

    Invariants: the k slots are private (counted as protected by the tree) until `adopted`; layers
    below `layers_loaded` are in them, or zeros if the request has `failed`.
    """

    rid: str
    resident_slots: Tensor  # int64 [resident]
    slots: Tensor  # int64 [k]
    num_tokens: int
    quality: Quality  # of what is computed after the prefix
    store: PartStore
    source: PartSource
    report: dict[str, object]
    stats: LoadStats = dataclasses.field(default_factory=LoadStats)
    layers_loaded: int = 0
    loading: bool = True  # the source is open
    failed: bool = False  # they could not be loaded: SGLang drops what its pass computes
    adopted: bool = False  # its slots belong to SGLang's tree

    @property
    def approximate(self) -> bool:
        """Whether the stored KVs, or our selection of them, are not the full prefix."""
        return self.quality != EXACT

    @property
    def k(self) -> int:
        """Tokens of the stored prefix that each layer uses."""
        return len(self.slots)

    @property
    def start(self) -> int:
        """First entry of the row that attention sees."""
        return self.num_tokens - self.k

    @property
    def resident_len(self) -> int:
        """Tokens of the prefix that are in the device pool."""
        return len(self.resident_slots)

    @property
    def prefix_len(self) -> int:
        """Tokens of the prompt that are not computed: resident and stored."""
        return self.resident_len + self.num_tokens

    def end_layer(self) -> None:
        """Note that the next layer is in its slots; after the last one, end loading."""
        if self.loading:
            self.source.end_layer(self.layers_loaded)
        self.layers_loaded += 1
        if self.layers_loaded == self.source.num_layers:
            self.end_loading()

    def end_loading(self) -> None:
        """Close the source, and write what is known so far into the report; may be called again."""
        if self.loading:
            self.loading = False
            # What was read ahead is counted then.
            self.store.close_source(self.source)
        stats = self.stats
        self.report.update(
            layers_by_probe=stats.layers_by_probe,
            layers_by_fallback=stats.layers_by_fallback,
            layers_whole=stats.layers_whole,
            bits_mean=EXACT_BITS,
            **self.source.stats.as_dict(),
            probe_ms=round(stats.probe_ms, 3),
            load_ms=round(stats.load_ms, 3),
            attention_ms=round(stats.attention_ms, 3),
        )

    def fail(self) -> None:
        """End the prefix, which cannot be loaded."""
        self.failed = True
        self.end_loading()
