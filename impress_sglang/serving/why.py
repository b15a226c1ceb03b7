"""Why a request got its prefix where it did, or got none: one reason, one sentence."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, TypeAlias

Why: TypeAlias = dict[str, str | None]
"""`reason`, `text`, and `rest`: why a request that has a prefix has no longer one, else None."""


class Reason(enum.StrEnum):
    """Reason why a request got its prefix, or none; `meaning` is the text for users."""

    meaning: str

    def __new__(cls, value: str, meaning: str = "") -> Reason:
        """One line: name, value, meaning."""
        member = str.__new__(cls, value)
        member._value_, member.meaning = value, meaning
        return member

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


def why_of(reason: Reason, detail: str = "") -> Why:
    """Return the answer with a single reason."""
    return {"reason": reason, "text": sentence_of(reason, detail), "rest": None}


def hit_of(report: Mapping[str, Any], least_resident: float) -> Detail | None:
    """Return the kind of a request's prefix, if any; resident only from `least_resident` tokens."""
    for reason in (Reason.BLENDED, Reason.LOADED, Reason.SHARED, Reason.RESIDENT):
        tokens = report[f"{reason}_tokens"]
        if tokens and (reason is not Reason.RESIDENT or tokens >= least_resident):
            bits = f" in {report['bits']:g} bits" if reason is Reason.LOADED else ""
            return reason, f"{tokens:,} tokens{bits}"
    return None


def sentence_of(reason: Reason, detail: str) -> str:
    # Not `capitalize`, which lowers the rest.
    text = reason.meaning[0].upper() + reason.meaning[1:]
    return f"{text}: {detail}." if detail else f"{text}."
