"""Explains why a request got its prefix where it did, or got none: one reason, one sentence.

Decided once, when a request is admitted, and only from what is known of its own namespace: what
another tenant has stored is treated as if nobody had. A hit costs nothing; for a miss the tokens
are hashed once more.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from impress_sglang.config import ImpressConfig
from impress_sglang.serving.served_store import ServedStore
from impress_sglang.storage.quality import ANYTHING, Quality
from impress_sglang.storage.segment import Tokens
from impress_sglang.store.policies import LoadOptions
from impress_sglang.store.store import PrefixStore
from impress_sglang.store.stored import SegmentState, StoredMatch

Why: TypeAlias = dict[str, str | None]
"""`reason`, `text`, and `rest`: why a request that has a prefix has no longer one, else None."""


class Reason(enum.StrEnum):
    """What decided which prefix a request got; `meaning` says it in words."""

    meaning: str

    def __new__(cls, value: str, meaning: str = "") -> Reason:
        """One line: name, value, meaning."""
        own = str.__new__(cls, value)
        own._value_, own.meaning = value, meaning
        return own

    LOADED = "loaded", "its stored prefix was loaded"
    SHARED = "shared", "its stored prefix was loaded for other requests"
    BLENDED = "blended", "text stored behind other text was reused (--impress-blend)"
    RESIDENT = "resident", "its prefix was in SGLang's pool"
    STORED = "stored", "it is stored"
    NEVER_STORED = "never_stored", "nothing that begins like it is stored, or was recently"
    SEEN_TOO_SELDOM = "seen_too_seldom", "it was requested too seldom (--impress-write-after)"
    BEING_WRITTEN = "being_written", "it is being written"
    EVICTED = "evicted", "it was stored, and removed from SSD to make room"
    NO_ROOM = "no_room", "it was not stored: no room could be made"
    WRITE_BUDGET = "write_budget", "it was not stored: --impress-write-gb-per-day is used up"
    NOT_CODABLE = "not_codable", "it was not stored: few bits say too little of it, or nothing"
    PURGED = "purged", "it was stored, and purged by an administrator"
    EXPIRED = "expired", "it was stored, and has expired (--impress-ttl or impress_ttl)"
    TOO_SHORT = "too_short", "what may be stored of it is shorter than --impress-min-prefix-tokens"
    COMPUTED_FASTER = "computed_faster", "loading it was estimated to be slower than computing it"
    COMPUTED_TO_LEARN = (
        "computed_to_learn",
        "reading is slow, so the server learns what computing is",
    )
    BLEND_TOO_SHORT = (
        "blend_too_short",
        "too little is stored elsewhere (--impress-blend-min-tokens)",
    )
    BLEND_SLOWER = "blend_slower", "blending it was estimated to be slower than not blending"
    BLEND_TOO_LONG = "blend_too_long", "blending takes too much computing (--impress-blend-seconds)"
    BLEND_UNSUPPORTED = "blend_unsupported", "this server cannot blend it"
    QUALITY = "quality", "it is stored, but less exactly than the request asks for"
    DAMAGED = "damaged", "it was stored, but could not be read as it was written"
    NOT_OPENED = "not_opened", "it is stored, but slots or files were not available"
    NO_BUFFERS = "no_buffers", "it is stored, but none of its layers fits into --impress-buffer-gb"
    NO_STATE = "no_state", "it is stored, but no state or window with which to go on behind it"
    NOT_SERVED = "not_served", "the request has a feature that rules out the store"
    NOT_ADMITTED = "not_admitted", "it ended before it was admitted, and used nothing"
    OTHER_WEIGHTS = "other_weights", "the store is aside: weights change, or it is being opened"
    DEGRADED = "degraded", "the disk does not answer, and the store is not used until it does"
    NO_STORE = "no_store", "--impress-policy stores nothing"


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
        self.usable: Callable[[StoredMatch], int] | None = None
        """How many of the first tokens that are stored can be used."""

    def explain(self, asked: Asked, *, admitted: bool = True) -> Why:
        """Say what a prompt has, if anything, and why it lacks the rest, if that is long enough.

        If it is not `admitted`, the report's prefix is what is stored of it.
        """
        stored = int(asked.report["prefix_tokens"])
        hit = (Reason.STORED, f"{stored:,} tokens") if stored else None
        if admitted:
            # So few tokens are only how other prompts happen to begin.
            hit = _hit(asked.report, min(self._config.min_prefix_tokens, len(asked.tokens) / 2))
        rest = len(asked.tokens) - int(asked.report["prefix_tokens"])
        if hit is not None and rest < max(self._config.min_prefix_tokens, 1):
            return say(*hit)
        reason, detail = self._miss(asked) if asked.opened else (Reason.NOT_OPENED, "")
        if hit is None:
            return say(reason, detail)
        text = f"{_sentence(*hit)} Of its other {rest:,} tokens: {_sentence(reason, detail)}"
        return {"reason": hit[0], "text": text, "rest": reason}

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
        match = StoredMatch()
        if quality is not None:
            match = store.tree.match(name, tokens, least=quality)
        have = match.num_tokens
        if have - report["prefix_tokens"] >= least:
            usable = have if self.usable is None else self.usable(match)
            lacks = usable - report["prefix_tokens"] < least
            return Reason.NO_STATE if lacks else Reason.NO_BUFFERS, ""
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
        if known.num_tokens - have >= least:
            ends = itertools.accumulate(map(len, known.spans))
            beyond = next(own for own, end in zip(known.spans, ends, strict=True) if end > have)
            if (reason := _UNREADY.get(beyond.segment.state)) is not None:
                return reason, ""
        loss = store.losses.find(name, tokens, have)
        if loss is None or loss.num_tokens < least:
            return None
        # Each cause has the name of its reason.
        return Reason[loss.cause.name], f"{loss.num_tokens:,} tokens, {loss.seconds:.0f} s ago"


def say(reason: Reason, detail: str = "") -> Why:
    """The answer that has this one reason."""
    return {"reason": reason, "text": _sentence(reason, detail), "rest": None}


def _hit(report: Mapping[str, Any], least_resident: float) -> Detail | None:
    """What the prefix of a request was, if it has one."""
    for reason in (Reason.BLENDED, Reason.LOADED, Reason.SHARED, Reason.RESIDENT):
        tokens = report[f"{reason}_tokens"]
        if tokens and (reason is not Reason.RESIDENT or tokens >= least_resident):
            bits = f" in {report['bits']:g} bits" if reason is Reason.LOADED else ""
            return reason, f"{tokens:,} tokens{bits}"
    return None


def _sentence(reason: Reason, detail: str) -> str:
    # Not `capitalize`, which makes the rest small.
    text = reason.meaning[0].upper() + reason.meaning[1:]
    return f"{text}: {detail}." if detail else f"{text}."
