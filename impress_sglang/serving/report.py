"""Reports for users: of a request in `meta_info["impress"]`, of all in `/impress/stats`.

And of the latest requests, on the page.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from impress_sglang.cost import Estimate
from impress_sglang.serving import why
from impress_sglang.storage.segment import Tokens
from impress_sglang.store.prefix_hashes import BLOCK_TOKENS, PrefixHashes
from impress_sglang.transfer.sources import ReadStats

DECISIONS = ("none", "load", "recompute")
PATHS = ("ssd", "device", "computed")
_FLAGS = ("prefetched", "approximate")
# The fields of a report about a decision before there is one.
NO_ESTIMATE: dict[str, object] = {
    "decision": DECISIONS[0],
    "retention": None,
    "bits": None,
    "estimated_load_ms": None,
    "estimated_recompute_ms": None,
}
# Sources of the tokens of a prompt: SGLang's pool, slots that other requests loaded, the store,
# stored after other text, left out where a part of a prefix is used, or computed.
SOURCES = ("resident", "shared", "loaded", "blended", "unused", "computed")

Row: TypeAlias = dict[str, Any]

MAX_REQUESTS = 200
PERIOD_SECONDS = 10
MAX_PERIODS = 180
MAX_WORDS = 32
# Fields of a report that the page shows, besides the split of the prompt's tokens.
_SHOWN = (
    *("path", "why", "decision", "approximate", "bits_mean", "used_tokens", "blended_tokens"),
    *("ssd_bytes", "wait_ms", "prefetched", "not_stored"),
    *("estimated_load_ms", "estimated_recompute_ms"),
)


def split_tokens(num_tokens: int, **sources: int) -> dict[str, int]:
    """Split the tokens of a prompt by their sources; the rest, beyond `sources`, is computed.

    The prefix of a retracted request may extend into its answer, which is not counted.
    """
    split, left = {}, num_tokens
    for source in SOURCES[:-1]:
        split[source] = min(sources.get(source, 0), left)
        left -= split[source]
    return split | {SOURCES[-1]: left}


def split_reported(report: Mapping[str, Any], **sources: int) -> dict[str, int]:
    """Split the tokens of a report's prompt again, by other sources."""
    return split_tokens(sum(report["tokens"].values()), **sources)


def new_report(policy: str, resident_len: int, num_tokens: int = 0) -> dict[str, object]:
    """The `meta_info["impress"]` of a request before any stored prefix is used.

    docs/api.md describes each field. Lengths are in tokens, times in milliseconds; the
    counters of reads are those of `ReadStats`. `probe_ms` and `load_ms` are the host's time: on an
    accelerator they include waiting for the device, which may still be computing earlier layers.
    """
    return {
        "policy": policy,
        "path": "device" if resident_len else "computed",
        "tokens": split_tokens(num_tokens, resident=resident_len),
        "prefix_tokens": resident_len,
        "used_tokens": resident_len,
        "resident_tokens": resident_len,
        "stored_tokens": 0,
        "loaded_tokens": 0,
        "shared_tokens": 0,
        "blended_tokens": 0,
        "truncated_tokens": 0,
        "approximate": False,
        "layers_by_probe": 0,
        "layers_by_fallback": 0,
        "layers_whole": 0,
        "bits_mean": None,
        **ReadStats().as_dict(),
        "probe_ms": 0.0,
        "load_ms": 0.0,
        "attention_ms": 0.0,
        "prefetched": False,
        **NO_ESTIMATE,
        "not_served": None,
        "not_stored": None,
        "why": None,
    }


def unused_report(policy: str, truncated_tokens: int) -> dict[str, object]:
    """The report of a request that ended before it was admitted: it has no path, and no tokens."""
    report, reason = new_report(policy, 0), why.why_of(why.Reason.NOT_ADMITTED)
    return report | {"path": None, "truncated_tokens": truncated_tokens, "why": reason}


def estimate_fields(estimate: Estimate, *, loads: bool) -> dict[str, object]:
    """The fields of a report about the decision between loading and computing.

    `loads`: the decision. The estimates include all reads, also those done while the request
    waited. Before the server has seen a long pass, the estimate of loading is None, and that of
    computing an upper bound.
    """
    load, recompute = (
        None if seconds is None else round(seconds * 1e3, 3)
        for seconds in (estimate.load, estimate.recompute)
    )
    return {
        "decision": "load" if loads else "recompute",
        "retention": round(estimate.retention, 4),
        "bits": round(estimate.bits, 3),
        "estimated_load_ms": load,
        "estimated_recompute_ms": recompute,
    }


class RequestTotals(dict[str, Any]):
    """Totals over all requests since start: sums of the figures in their reports, and counts."""

    def __init__(self) -> None:
        super().__init__(
            requests=0,
            **{f"requests_{name}": 0 for name in (*PATHS, "declined", *_FLAGS)},
            requests_decision=dict.fromkeys(DECISIONS, 0),
            requests_not_served={},
            requests_not_stored={},
            requests_why={reason.value: 0 for reason in why.Reason},
            prompt_tokens=dict.fromkeys(SOURCES, 0),
        )
        figures = new_report("", 0).items()
        # Not isinstance(): it takes a flag for an int.
        self._summed = [name for name, value in figures if type(value) in (int, float)]
        self.update(dict.fromkeys(self._summed, 0))

    def add(self, report: dict[str, Any]) -> None:
        """Count a finished request by its report."""
        self["requests"] += 1
        self[f"requests_{report['path']}"] += 1
        self["requests_declined"] += report["decision"] == "recompute"
        for name in _FLAGS:
            self[f"requests_{name}"] += bool(report[name])
        keys = {name: report[name] for name in ("decision", "not_served", "not_stored")}
        for name, key in (keys | {"why": (report["why"] or {}).get("reason")}).items():
            if key is not None:
                counts = self[f"requests_{name}"]
                counts[key] = counts.get(key, 0) + 1
        for source, count in report["tokens"].items():
            self["prompt_tokens"][source] += count
        for name in self._summed:
            self[name] += report[name]


class RecentRequests:
    """The latest requests of one scheduler, in fixed memory; one thread."""

    def __init__(self, *, show_prompts: bool = False) -> None:
        self._show_prompts = show_prompts
        self._rows: deque[Row] = deque(maxlen=MAX_REQUESTS)
        self._periods: deque[list[int]] = deque(maxlen=MAX_PERIODS)
        self._count = 0
        self._hashes = PrefixHashes()
        self.since = time.time()
        """When counting began."""

    def record(
        self,
        rid: str,
        namespace: str,
        tokens: Sequence[int] | Tokens,
        report: Mapping[str, Any],
        **seconds: float,
    ) -> None:
        """Record a finished request; `namespace` is as in the store.

        `seconds`: `waited` for others; `loading` its prefix, in the queue or in the pass; and
        `computing`, the rest, until its first token.
        """
        first = np.array(tokens[:BLOCK_TOKENS], np.int32)
        self._count += 1
        self._rows.append(
            {
                "number": self._count,
                "ended": round(time.time(), 3),
                "rid": rid[:64],
                "begins": self.digest(namespace, first),
                "words": self.words(first),
                "tokens": report["tokens"],
                **{f"{name}_ms": round(took * 1e3, 1) for name, took in seconds.items()},
                **{name: report[name] for name in _SHOWN},
            }
        )
        begin = int(time.time()) // PERIOD_SECONDS * PERIOD_SECONDS
        if not self._periods or self._periods[-1][0] != begin:
            self._periods.append([begin, *(0 for _ in SOURCES)])
        for place, source in enumerate(SOURCES, start=1):
            self._periods[-1][place] += report["tokens"][source]

    def digest(self, namespace: str, tokens: Tokens) -> str:
        """Digest of the first of these tokens, int32 [n]; differs by process; "" if too short."""
        hashes = self._hashes.of(namespace, tokens[:BLOCK_TOKENS])
        return "".join(f"{value:016x}" for value in hashes.tolist())

    def words(self, tokens: Tokens) -> list[int] | None:
        """The first tokens of a prompt; None unless prompts may be shown."""
        return tokens[:MAX_WORDS].tolist() if self._show_prompts else None

    def since_number(self, number: int) -> list[Row]:
        """Return the requests that ended after number `number`, the latest first."""
        return list(itertools.takewhile(lambda row: row["number"] > number, reversed(self._rows)))

    def periods(self) -> list[list[int]]:
        """Start of each period with requests, and its tokens by `SOURCES`, earliest first.

        Periods last ten seconds; the last half hour's worth of periods with requests is kept.
        """
        return list(self._periods)
