"""One request's stored prefix while it is served, and what the user is told of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from impress_sglang.config import EXACT_BITS, EXACTLY, LEAST_BITS, MOST_BITS, ImpressConfig, is_bits
from impress_sglang.integration.clocks import Stopwatch
from impress_sglang.management.estimate import Estimate
from impress_sglang.management.policies import Wish
from impress_sglang.management.readers import AnySource
from impress_sglang.precision.codec import NUM_PLANES
from impress_sglang.storage.layout import BLOCK_BYTES
from impress_sglang.storage.quality import EXACT, Quality
from impress_sglang.timeline import NO_TIMELINE, RequestTimeline, Timeline
from impress_sglang.transfer.loader import LoadStats
from impress_sglang.transfer.memory import MemorySource
from impress_sglang.transfer.planner import ReadStats
from impress_sglang.transfer.resident import PartLoad, PartUse, UsedUnits

# Of `sampling_params.custom_params`: the retention and the bits that a request asks for.
RETENTION_KEY = "impress_retention"
BITS_KEY = "impress_bits"


def check_custom_params(
    custom_params: object, config: ImpressConfig, parts_refusal: str | None = None
) -> None:
    """Check what a request says to this extension, against what the server has.

    `parts_refusal` is why that has no parts of prefixes, in half a sentence; None if it has.

    Raises:
        ValueError: a wrong value; SGLang answers with status 400.
    """
    if not isinstance(custom_params, dict):
        return
    retention = custom_params.get(RETENTION_KEY, 1.0)
    # type() and not isinstance(): True is an int to isinstance.
    if type(retention) not in (int, float) or not 0.0 < retention <= 1.0:
        raise ValueError(
            f"custom_params {RETENTION_KEY} must be a number above 0 and at most 1, "
            f"got {retention!r}"
        )
    bits = custom_params.get(BITS_KEY, EXACTLY)
    if not is_bits(bits):
        raise ValueError(
            f"custom_params {BITS_KEY} must be a number from {LEAST_BITS:g} to {MOST_BITS:g}, or "
            f"{EXACTLY!r}, got {bits!r}"
        )
    wish = _wish(custom_params, config)
    if not config.serves(wish.retention, wish.bits):
        raise ValueError(
            f"custom_params: this server has a part of a prefix in {LEAST_BITS:g} to {MOST_BITS:g} "
            f"bits only; with {BITS_KEY} {EXACTLY!r} set {RETENTION_KEY} to 1"
        )
    if parts_refusal is not None and config.uses_part(wish.retention):
        raise ValueError(f"custom_params: {parts_refusal}; set {RETENTION_KEY} to 1")


def wish_of(sampling_params: Any, config: ImpressConfig) -> Wish:
    """What a request asks for, and the server's usual for the rest; at least the server's floor."""
    params = getattr(sampling_params, "custom_params", None)
    return _wish(params if isinstance(params, dict) else {}, config)


def _wish(params: Mapping[str, Any], config: ImpressConfig) -> Wish:
    own, bits = params.get(RETENTION_KEY), params.get(BITS_KEY, config.usual_bits)
    retention = config.usual_retention if own is None else max(float(own), config.min_retention)
    return Wish(
        retention,
        EXACT_BITS if bits == EXACTLY else float(bits),
        chosen=own is not None,
        bits_chosen=BITS_KEY in params,
    )


@dataclasses.dataclass(eq=False, slots=True)
class PrefixRequest:
    """A request that runs with `k` tokens of a stored prefix of `m` tokens (a sink row).

    The row is `start` zeros, the resident slots, `k` private slots, the slots of new tokens:

        |<- start = m - k ->|<- resident ->|<- k ->|<- new ... ->|

    Of a prefix in codes that is all there, k = m, the slots are those of the parts that it `uses`
    with other requests (`transfer.resident`), read from `loads`. If k < m all of it is `restored`
    elsewhere, layer by layer (`transfer.selective`).

    Invariants: the k slots of others are private (counted as protected by the tree) until
    `adopted`; layers below `layers_loaded` are in them, zeros if the request has `failed`.
    `loading` is there while a pass loads all layers.
    """

    rid: str
    token_ids: Tensor  # int64 [resident + m], CPU: the whole prefix, for a recompute
    resident_slots: Tensor  # int64 [resident]
    slots: Tensor  # int64 [k]
    num_tokens: int
    bits: float  # of the prefix, per element on average
    quality: Quality  # of what is computed after the prefix
    source: AnySource | MemorySource | None
    report: dict[str, object]
    units: UsedUnits | None = None  # of a prefix in codes, all of it
    loads: list[PartLoad] = dataclasses.field(default_factory=list)
    restored: UsedUnits | None = None
    new_tokens: int = 0
    timeline: Timeline = NO_TIMELINE
    stats: LoadStats = dataclasses.field(default_factory=LoadStats)
    layers_loaded: int = 0
    loading: Stopwatch | None = None
    attention_ms: float = 0.0
    reads: ReadStats = dataclasses.field(default_factory=ReadStats)
    recomputed: bool = False  # the stored KVs could not be read
    failed: bool = False  # nor computed: it ends with an error
    adopted: bool = False

    @property
    def approximate(self) -> bool:
        """Whether the stored KVs, or our selection of them, are not the full prefix."""
        return self.quality != EXACT

    @property
    def uses(self) -> tuple[PartUse, ...]:
        """Resident parts; none if the slots are private."""
        return () if self.units is None else self.units.uses

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

    @property
    def undisturbed(self) -> bool:
        """Whether its times say what loading takes."""
        return not (self.recomputed or self.failed)

    def finish_timeline(self) -> None:
        """The prompt is computed: what comes later is not what a timeline is about."""
        if isinstance(self.timeline, RequestTimeline):
            self.timeline.finish()

    def publish(self) -> None:
        """Write what is known by now into the report that goes out with the first token."""
        self.report.update(
            layers_by_probe=self.stats.layers_by_probe,
            layers_by_fallback=self.stats.layers_by_fallback,
            layers_whole=self.stats.layers_whole,
            bits_mean=round(self.stats.mean_bits, 3),
            base_bytes=self.stats.base_bytes,
            plane_bytes=[count * BLOCK_BYTES for count in self.stats.planes],
            **self.reads.as_dict(),
            probe_ms=round(self.stats.probe_ms, 3),
            load_ms=round(self.stats.load_ms, 3),
            attention_ms=round(self.attention_ms, 3),
            recomputed=self.recomputed,
        )


def new_report(policy: str, resident_len: int) -> dict[str, object]:
    """The `meta_info["impress"]` of a request before any stored prefix is used.

    `prefetched` says that reading began while the request waited. `path` is computed, device or ssd
    (a stored prefix, whichever tier its chunks were in); lengths are in tokens, times in
    milliseconds; the counters of reads are those of `ReadStats`. `shared_tokens` of a stored prefix
    were in slots already, for other requests. `bits_mean` are bits per element of what was loaded
    of a stored prefix (16: as it was computed), also of tokens that no layer uses; `base_bytes` and
    `plane_bytes` what of its codes was restored, from whichever tier. `not_served` and `not_stored`
    are what keeps a request from the store (`eligibility.py`).

    `probe_ms` and `load_ms` are the host's time. On an accelerator that includes waiting for the
    device, which may still be computing the layers before.
    """
    return {
        "policy": policy,
        "path": "device" if resident_len else "computed",
        "prefix_tokens": resident_len,
        "used_tokens": resident_len,
        "resident_tokens": resident_len,
        "stored_tokens": 0,
        "loaded_tokens": 0,
        "shared_tokens": 0,
        "approximate": False,
        "layers_by_probe": 0,
        "layers_by_fallback": 0,
        "layers_whole": 0,
        "bits_mean": None,
        "base_bytes": 0,
        "plane_bytes": [0] * NUM_PLANES,
        **ReadStats().as_dict(),
        "probe_ms": 0.0,
        "load_ms": 0.0,
        "attention_ms": 0.0,
        "recomputed": False,
        "prefetched": False,
        "decision": "none",
        "retention": None,
        "bits": None,
        "estimated_load_ms": None,
        "estimated_recompute_ms": None,
        "not_served": None,
        "not_stored": None,
    }


def estimate_fields(estimate: Estimate) -> dict[str, object]:
    """What a report says of the decision between loading and computing.

    `decision` is load or recompute, or none where nothing was stored; the estimates are None before
    the server has seen how fast it computes.
    """

    def milliseconds(seconds: float | None) -> float | None:
        return None if seconds is None else round(seconds * 1e3, 3)

    return {
        "decision": "load" if estimate.loads_faster else "recompute",
        "retention": round(estimate.retention, 4),
        "bits": round(estimate.bits, 3),
        "estimated_load_ms": milliseconds(estimate.load),
        "estimated_recompute_ms": milliseconds(estimate.recompute),
    }
