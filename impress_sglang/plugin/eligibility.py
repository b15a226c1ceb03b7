"""Decides which requests may use the store: those whose KVs follow from what they are found by.

A request is compared with a plain one of SGLang's own making: but for fields that are known to be
harmless (`request_fields.py`), all must have the values of that. So a field that a later release
adds keeps only requests from the store that set it. Both predicates return None for yes, and for no
the name of the field, which is counted and reported.
"""

from __future__ import annotations

import functools
import logging
from array import array
from typing import Any

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from impress_sglang.errors import UnsupportedError
from impress_sglang.plugin.request_fields import REQUEST, SAMPLING
from impress_sglang.serving.custom_params import STORE_KEY, store_wish_of

logger = logging.getLogger(__name__)

# What is looked up by slot is not there for what was loaded; its KVs are those of any request.
_STORED_ONLY = frozenset({"return_routed_experts", "return_indexer_topk"})
# Says only where KVs are kept, so that other fields tell more.
_LAST = "skip_radix_cache_insert"
_MISSING = object()


def store_refusal(req: Any) -> str | None:
    """Why the KVs of a request may not be stored; None if they may. `req` is SGLang's `Req`."""
    if store_wish_of(req.sampling_params) is False:
        return STORE_KEY
    return _refusal(req, _STORED_ONLY)


def serve_refusal(req: Any) -> str | None:
    """Why a request may not be served from the store; None if it may.

    Such a request is not matched, and nothing is read ahead for it.
    """
    return _refusal(req, frozenset())


def _refusal(req: Any, allowed: frozenset[str]) -> str | None:
    fields, plain = vars(req), plain_fields()
    # Nearly all that is left is the very same: None or False.
    found = [
        name
        for name in fields.keys() - REQUEST
        if fields[name] is not plain.get(name, _MISSING)
        and name not in allowed
        and not _is_plain(name, fields[name], plain.get(name, _MISSING))
    ]
    if found:
        return min(found, key=lambda name: (name == _LAST, name))
    params, usual = req.sampling_params, SamplingParams()
    for name in _sampling_fields():
        if not _is_plain(name, getattr(params, name), getattr(usual, name)):
            return name
    return None


def _is_plain(name: str, value: Any, plain: Any) -> bool:
    try:
        if type(value) is type(plain) and bool(value == plain):
            return True
    except (RuntimeError, TypeError, ValueError):
        # Tensors, say, which have no one answer.
        return False
    # A session that does not stream is its earlier turns as a prompt; a beam of one is none.
    if name == "session":
        return getattr(value, "streaming", None) is False
    return name == "beam_width" and type(value) is int and value == 1


def check_plain() -> None:
    """Warn if the release keeps plain requests from the store, by a field that nobody knows.

    Raises:
        UnsupportedError: it makes requests in another way.
    """
    try:
        plain_fields.cache_clear()
        refusal = serve_refusal(_plain())
    except Exception as error:
        raise UnsupportedError(
            f"IMPRESS does not know requests of this SGLang: {error!r}"
        ) from error
    if refusal is not None:
        logger.warning("requests run without the store: nobody knows their field %s", refusal)


def _plain() -> Any:
    return Req("", "", array("q", [0]), SamplingParams())


@functools.cache
def plain_fields() -> dict[str, Any]:
    """The fields of a request that asks for nothing special; not to be changed."""
    return vars(_plain())


@functools.cache
def _sampling_fields() -> list[str]:
    return sorted(frozenset(SamplingParams.__struct_fields__) - SAMPLING)
