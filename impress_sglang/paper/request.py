"""One request's stored prefix while it is served. Only its methods change it."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from impress_sglang.options import EXACT_BITS
from impress_sglang.paper.loading import Loading
from impress_sglang.storage.quality import EXACT, Quality
from impress_sglang.transfer.loader import LayerInputs, LoadStats
from impress_sglang.transfer.read_planner import ReadStats
from impress_sglang.transfer.slots import LayerSlots


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
    loading: Loading | None
    report: dict[str, object]
    stats: LoadStats = dataclasses.field(default_factory=LoadStats)
    layers_loaded: int = 0
    reads: ReadStats = dataclasses.field(default_factory=ReadStats)
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

    def load_layer(self, layer: int, inputs: LayerInputs, slots: LayerSlots) -> None:
        """Fill slots with what a layer uses of the prefix; see `Loading.load`.

        Raises:
            PrefixUnreadable: a chunk is missing, short or corrupt.
        """
        assert self.loading is not None
        self.loading.load(layer, inputs, slots, self.stats)

    def end_layer(self) -> None:
        """Note that the next layer is in its slots."""
        if self.loading is not None:
            self.loading.end_layer(self.layers_loaded)
        self.layers_loaded += 1

    def end_loading(self) -> None:
        """End loading and add up what was read; may be called again."""
        loading, self.loading = self.loading, None
        if loading is not None:
            self.reads.add(loading.close())

    def fail(self) -> None:
        """End the prefix, which cannot be loaded."""
        self.failed = True
        self.end_loading()

    def adopt(self) -> None:
        """Note that the slots belong to SGLang's tree from now on."""
        self.adopted = True


def publish(request: StoredRequest) -> None:
    """Write what is known of a request so far into its report."""
    stats = request.stats
    request.report.update(
        layers_by_probe=stats.layers_by_probe,
        layers_by_fallback=stats.layers_by_fallback,
        layers_whole=stats.layers_whole,
        bits_mean=EXACT_BITS,
        **request.reads.as_dict(),
        probe_ms=round(stats.probe_ms, 3),
        load_ms=round(stats.load_ms, 3),
        attention_ms=round(stats.attention_ms, 3),
    )
