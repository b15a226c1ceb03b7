"""Decides which requests may use the store: those known to be handled right, and no others.

Both predicates return None for yes and a short reason for no, which is counted and reported.
"""

from __future__ import annotations

from typing import Any

from impress_sglang.integration.judged import (
    REQUEST_FIELDS,
    REQUEST_GUARDS,
    REQUEST_OURS,
    SAMPLING_GUARDS,
    Guard,
)
from impress_sglang.serving.custom_params import STORE_KEY, store_wish_of

UNJUDGED = "unjudged"
_KNOWN = REQUEST_FIELDS | REQUEST_OURS
# Stands for a field that a request lacks, so that no guard holds for it.
_GONE = object()


def store_refusal(req: Any) -> str | None:
    """Why the KVs of a request may not be stored; None if they may.

    `req` is SGLang's `Req`. The reason is the field that forbids it, or `unjudged:` and an
    attribute that no table of `judged.py` knows.
    """
    if store_wish_of(req.sampling_params) is False:
        return STORE_KEY
    return _refusal(req, "stores")


def serve_refusal(req: Any) -> str | None:
    """Why a request may not be served from the store; None if it may.

    Such a request is not matched, and nothing is read ahead for it.
    """
    return _refusal(req, "serves")


def _refusal(req: Any, use: str) -> str | None:
    attributes = vars(req).keys()
    if not attributes <= _KNOWN:
        return f"{UNJUDGED}:{min(attributes - _KNOWN)}"
    return _broken(REQUEST_GUARDS, req, use) or _broken(SAMPLING_GUARDS, req.sampling_params, use)


def _broken(guards: dict[str, Guard], subject: Any, use: str) -> str | None:
    """The first field whose guard does not hold."""
    for field, guard in guards.items():
        if not getattr(guard, use) and not guard.holds(getattr(subject, field, _GONE)):
            return field
    return None
