"""Explains why a request got its prefix where it did, or got none: one reason, one sentence.

Decided once, when a request is admitted, and only from what is known of its own namespace: what
another tenant has stored is treated as if nobody had. A hit costs nothing; for a miss the tokens
are hashed once more.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from impress_sglang.config import ImpressConfig
from impress_sglang.serving.served_store import ServedStore
from impress_sglang.storage.quality import ANYTHING, Quality
from impress_sglang.storage.segment import Tokens
from impress_sglang.store.losses import Loss
from impress_sglang.store.policies import LoadOptions
from impress_sglang.store.store import PrefixStore
from impress_sglang.store.stored import SegmentState, StoredMatch

Why: TypeAlias = dict[str, str | None]
"""`reason`, `text`, and `rest`: why a request that has a prefix has no longer one, else None."""


class Reason(enum.StrEnum):
    """What decided which prefix a request got."""

    LOADED = enum.auto()
    SHARED = enum.auto()
    BLENDED = enum.auto()
    RESIDENT = enum.auto()
    STORED = enum.auto()
    NEVER_STORED = enum.auto()
    SEEN_TOO_SELDOM = enum.auto()
    BEING_WRITTEN = enum.auto()
    EVICTED = enum.auto()
    NO_ROOM = enum.auto()
    WRITE_BUDGET = enum.auto()
    READ_ONLY = enum.auto()
    BUSY = enum.auto()
    NOT_CODABLE = enum.auto()
    PURGED = enum.auto()
    EXPIRED = enum.auto()
    TOO_SHORT = enum.auto()
    COMPUTED_FASTER = enum.auto()
    COMPUTED_TO_LEARN = enum.auto()
    BLEND_TOO_SHORT = enum.auto()
    BLEND_SLOWER = enum.auto()
    BLEND_TOO_LONG = enum.auto()
    BLEND_UNSUPPORTED = enum.auto()
    QUALITY = enum.auto()
    DAMAGED = enum.auto()
    NOT_OPENED = enum.auto()
    NO_BUFFERS = enum.auto()
    NOT_SERVED = enum.auto()
    NOT_ADMITTED = enum.auto()
    OTHER_WEIGHTS = enum.auto()
    DEGRADED = enum.auto()
    NO_STORE = enum.auto()


MEANINGS = {
    Reason.LOADED: "its stored prefix was loaded",
    Reason.SHARED: "its stored prefix was loaded for other requests",
    Reason.BLENDED: "text stored behind other text was reused (--impress-blend)",
    Reason.RESIDENT: "its prefix was in SGLang's pool",
    Reason.STORED: "it is stored",
    Reason.NEVER_STORED: "nothing that begins like it is stored, or was recently",
    Reason.SEEN_TOO_SELDOM: "it was requested less often than --impress-write-after asks",
    Reason.BEING_WRITTEN: "it is being written",
    Reason.EVICTED: "it was stored, and removed from SSD to make room",
    Reason.NO_ROOM: "it was not stored: no room could be made",
    Reason.WRITE_BUDGET: "it was not stored: --impress-write-gb-per-day is used up",
    Reason.READ_ONLY: "it was not stored: the disk accepted no writes",
    Reason.BUSY: "it was not stored: other writes held half of the pool",
    Reason.NOT_CODABLE: "it was not stored: few bits say too little of it, or nothing",
    Reason.PURGED: "it was stored, and purged by an administrator",
    Reason.EXPIRED: "it was stored, and has expired (--impress-ttl or impress_ttl)",
    Reason.TOO_SHORT: "what may be stored of it is shorter than --impress-min-prefix-tokens",
    Reason.COMPUTED_FASTER: "loading it was estimated to be slower than computing it",
    Reason.COMPUTED_TO_LEARN: "reading is slow here, so this server learns what computing takes",
    Reason.BLEND_TOO_SHORT: "too little of it is stored elsewhere (--impress-blend-min-tokens)",
    Reason.BLEND_SLOWER: "blending it was estimated to be slower than not blending",
    Reason.BLEND_TOO_LONG: "blending it would take too much computing (--impress-blend-seconds)",
    Reason.BLEND_UNSUPPORTED: "this server cannot blend it",
    Reason.QUALITY: "it is stored, but less exactly than the request asks for",
    Reason.DAMAGED: "it was stored, but could not be read as it was written",
    Reason.NOT_OPENED: "it is stored, but slots or files were not available",
    Reason.NO_BUFFERS: "it is stored, but none of its layers fits into --impress-buffer-gb",
    Reason.NOT_SERVED: "the request has a feature that rules out the store",
    Reason.NOT_ADMITTED: "it ended before it was admitted, and used nothing",
    Reason.OTHER_WEIGHTS: "the store is set aside: weights are changing, or it is being opened",
    Reason.DEGRADED: "the disk does not answer, and the store is not used until it does",
    Reason.NO_STORE: "--impress-policy stores nothing",
}
Detail: TypeAlias = tuple[Reason, str]
"""A reason, and the figures for its sentence."""
_UNREADY = {
    SegmentState.PENDING: Reason.BEING_WRITTEN,
    SegmentState.SUSPECT: Reason.DAMAGED,
    SegmentState.READY: Reason.QUALITY,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """A prompt to explain.

    Attributes:
        report: the report of its request so far.
        namespace: its namespace.
        tokens: as far as a prefix may reach, int32 [n].
        wanted: what its request asks for.
        seen: how many of its first tokens were asked for often enough; None if not counted.
        opened: False if it was sent back because its prefix could not be opened.
        blend: why it does not blend, if it would accept that.
    """

    report: Mapping[str, Any]
    namespace: str
    tokens: Tokens
    wanted: LoadOptions
    seen: int | None
    opened: bool = True
    blend: Detail | None = None


class Explainer:
    """Finds the reasons for prefixes and misses; on the scheduler's thread."""

    def __init__(
        self,
        config: ImpressConfig,
        served: ServedStore,
        least: Callable[[LoadOptions], Quality | None],
    ) -> None:
        """`least` returns the worst quality that a request takes, if it takes what is stored."""
        self._config = config
        self._served = served
        self._least = least

    def explain(self, asked: Asked) -> Why:
        """Explain the prefix of a request that is admitted."""
        hit, resident = _hit(asked.report), int(asked.report["resident_tokens"])
        least = min(self._config.min_prefix_tokens, len(asked.tokens) / 2)
        if hit is not None and hit[0] is Reason.RESIDENT and resident < least:
            # So few tokens are only how other prompts happen to begin.
            hit = None
        return self._answer(hit, asked)

    def foretell(self, asked: Asked) -> Why:
        """Explain a prompt that is not being served; the report's prefix is what is stored."""
        stored = int(asked.report["prefix_tokens"])
        return self._answer((Reason.STORED, f"{stored:,} tokens") if stored else None, asked)

    def _answer(self, hit: Detail | None, asked: Asked) -> Why:
        """Say what a prompt has, if anything, and why it lacks the rest, if that is long enough."""
        rest = len(asked.tokens) - int(asked.report["prefix_tokens"])
        if hit is not None and rest < self._config.min_prefix_tokens:
            return _say(*hit)
        return _say_both(hit, rest, self._miss(asked) if asked.opened else (Reason.NOT_OPENED, ""))

    def _miss(self, asked: Asked) -> Detail:
        """Why no more was used than the prefix in the report."""
        config, least = self._config, self._config.min_prefix_tokens
        report, tokens = asked.report, asked.tokens
        if report["not_served"] is not None:
            return Reason.NOT_SERVED, str(report["not_served"])
        if not self._served.stores:
            return Reason.NO_STORE, config.policy
        if self._served.suspended is not None:
            return Reason.OTHER_WEIGHTS, self._served.suspended
        store = self._served.store
        if not store.health.readable:
            return Reason.DEGRADED, ""
        if len(tokens) < least:
            return Reason.TOO_SHORT, f"{len(tokens)} of {least} tokens"
        if report["decision"] == "recompute":
            load, compute = report["estimated_load_ms"], report["estimated_recompute_ms"]
            if load is None:
                return Reason.COMPUTED_TO_LEARN, f"{compute:.1f} ms at most"
            return Reason.COMPUTED_FASTER, f"{load:.1f} ms and {compute:.1f} ms"
        # Not `store.match`, which also does work that is due.
        name, quality = store.namespace(asked.namespace), self._least(asked.wanted)
        have = 0 if quality is None else store.tree.match(name, tokens, least=quality).num_tokens
        if have - report["prefix_tokens"] >= least:
            return Reason.NO_BUFFERS, ""
        have = max(have, report["resident_tokens"], report["prefix_tokens"])
        if (found := self._stored_otherwise(store, name, tokens, have)) is not None:
            return found
        if asked.blend is not None:
            return asked.blend
        if asked.seen is not None and asked.seen - have < least:
            return Reason.SEEN_TOO_SELDOM, f"{config.write_after} times"
        return Reason.NEVER_STORED, ""

    def _stored_otherwise(
        self, store: PrefixStore, name: str, tokens: Tokens, have: int
    ) -> Detail | None:
        """Why what was stored beyond `have` tokens of a prompt cannot be used; None if none was."""
        least = self._config.min_prefix_tokens
        known = store.tree.match(name, tokens, least=ANYTHING, only_ready=False)
        if known.num_tokens - have >= least and (reason := _unready(known, have)) is not None:
            return reason, ""
        loss = store.losses.find(name, tokens, have)
        return None if loss is None or loss.num_tokens < least else _lost(loss)


def damaged() -> Why:
    """The answer for a request whose stored prefix turned out to be unreadable."""
    return _say(Reason.DAMAGED, "computed again")


def not_admitted() -> Why:
    """The answer for a request that ended before its first pass."""
    return _say(Reason.NOT_ADMITTED, "")


def _hit(report: Mapping[str, Any]) -> Detail | None:
    """What the prefix of a request was, if it has one."""
    loaded, shared = report["loaded_tokens"], report["shared_tokens"]
    if report["blended_tokens"]:
        return Reason.BLENDED, f"{report['blended_tokens']:,} tokens"
    if loaded:
        return Reason.LOADED, f"{loaded:,} tokens in {report['bits']:g} bits"
    if shared:
        return Reason.SHARED, f"{shared:,} tokens"
    resident = report["resident_tokens"]
    return (Reason.RESIDENT, f"{resident:,} tokens") if resident else None


def _unready(known: StoredMatch, have: int) -> Reason | None:
    """Why the first segment of a match with tokens beyond `have` is not used; None if unknown."""
    last = 0
    for span in known.spans:
        last += len(span)
        if last > have:
            return _UNREADY.get(span.segment.state)
    return None


def _lost(loss: Loss) -> Detail:
    # Each cause has the name of its reason.
    reason = Reason[loss.cause.name]
    return reason, f"{loss.num_tokens:,} tokens, {loss.seconds:.0f} s ago"


def _say(reason: Reason, detail: str) -> Why:
    return {"reason": reason, "text": _sentence(reason, detail), "rest": None}


def _say_both(hit: Detail | None, rest: int, miss: Detail) -> Why:
    """Say what a request has, if anything, and why it lacks the rest."""
    if hit is None:
        return _say(*miss)
    text = f"{_sentence(*hit)} Of its other {rest:,} tokens: {_sentence(*miss)}"
    return {"reason": hit[0], "text": text, "rest": miss[0]}


def _sentence(reason: Reason, detail: str) -> str:
    meaning = MEANINGS[reason]
    # Not `capitalize`, which makes the rest small.
    text = meaning[0].upper() + meaning[1:]
    return f"{text}: {detail}." if detail else f"{text}."
