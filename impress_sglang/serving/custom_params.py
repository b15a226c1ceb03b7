"""Options of this extension in the `custom_params` of a request's sampling parameters."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

from impress_sglang.config import (
    AUTO,
    BITS_TEXT,
    EXACTLY,
    OFF,
    ImpressConfig,
    OptionRule,
    is_bits,
    is_blend,
    is_number,
    is_truncation,
    number_of_bits,
    one_of,
)
from impress_sglang.storage.segment import Priority
from impress_sglang.store.policies import LoadOptions

# Keys of `sampling_params.custom_params`: requested retention, bits and blending.
RETENTION_KEY = "impress_retention"
BITS_KEY = "impress_bits"
BLEND_KEY = "impress_blend"
# Whether the request is stored, and for how many seconds.
STORE_KEY = "impress_store"
TTL_KEY = "impress_ttl"
# Its eviction priority on SSD.
PRIORITY_KEY = "impress_priority"
# The share of an over-long prompt that one cut removes, and the number of first tokens that stay.
TRUNCATE_KEY = "impress_truncate"
KEEP_KEY = "impress_keep_tokens"
# Set by the server itself: number of tokens that were cut.
TRUNCATED_KEY = "impress_truncated_tokens"
# First tokens that stay if the request gives no number, and no system prompt is known.
KEEP_TOKENS = 16
# The first tokens that stay must leave this share of the context free, or nothing is cut.
MIN_ROOM = 0.25
# Thirty years: a file's expiry time has to be a finite number.
MAX_TTL = 1e9
_RULES = {
    BITS_KEY: OptionRule(
        f"{BITS_TEXT}, {EXACTLY!r} or {AUTO!r}", lambda value: is_bits(value) or value == AUTO
    ),
    BLEND_KEY: OptionRule(f"a number from 0 to 1, {AUTO!r} or {OFF!r}", is_blend),
    # type() and not isinstance(): True is an int to isinstance.
    KEEP_KEY: OptionRule("a number of tokens", lambda value: type(value) is int and value >= 0),
    PRIORITY_KEY: one_of(tuple(priority.name.lower() for priority in Priority)),
    RETENTION_KEY: OptionRule(
        "a number above 0 and at most 1", lambda value: is_number(value) and 0.0 < value <= 1.0
    ),
    STORE_KEY: OptionRule("true or false", lambda value: type(value) is bool),
    TRUNCATE_KEY: OptionRule(f"a number between 0 and 1, or {OFF!r}", is_truncation),
    TTL_KEY: OptionRule(
        f"a number of seconds above 0 and at most {MAX_TTL:g}",
        lambda value: is_number(value) and 0.0 < value <= MAX_TTL,
    ),
}


def check_custom_params(custom_params: object, config: ImpressConfig) -> None:
    """Check the options of a request against those that the server supports.

    Raises:
        ValueError: a wrong value, or a key with our prefix that is none of ours and would be
            ignored silently; SGLang answers with status 400.
    """
    if not isinstance(custom_params, dict):
        return
    for key, value in custom_params.items():
        if not isinstance(key, str) or not key.startswith("impress_"):
            continue
        if key == TRUNCATED_KEY:
            raise ValueError(f"custom_params {key} is for the server to say")
        if key not in _RULES:
            raise ValueError(f"custom_params {key} is unknown; there are {', '.join(_RULES)}")
        rule = _RULES[key]
        if not rule.holds(value):
            raise ValueError(f"custom_params {key} must be {rule.expected}, got {value!r}")
    if custom_params.get(BLEND_KEY, OFF) != OFF and config.blend == OFF:
        raise ValueError(
            f"custom_params {BLEND_KEY}: this server does not blend; start it with --impress-blend"
        )
    if custom_params.get(RETENTION_KEY, 1.0) < 1.0 and not config.needs_parts:
        raise ValueError(
            "custom_params: this server uses prefixes whole (see --impress-policy); set "
            f"{RETENTION_KEY} to 1"
        )


def params_of(sampling_params: Any) -> dict[str, Any]:
    """Return the `custom_params` of a request, already checked; empty if it has none."""
    params = getattr(sampling_params, "custom_params", None)
    return params if isinstance(params, dict) else {}


def load_options_of(sampling_params: Any, config: ImpressConfig) -> LoadOptions:
    """Return a request's options, with the server's defaults and its minimum retention."""
    params = params_of(sampling_params)
    share, bits = params.get(RETENTION_KEY), params.get(BITS_KEY, config.bits)
    retention = (
        config.default_retention if share is None else max(float(share), config.min_retention)
    )
    return LoadOptions(
        retention,
        number_of_bits(bits),
        chosen=share is not None,
        auto_bits=bits == AUTO,
        blend=params.get(BLEND_KEY, config.blend),
    )


def recompute_ratio_of(params: Mapping[str, Any], config: ImpressConfig) -> float | None:
    """Share of the conversation that one cut removes from a request; None if it must not be cut."""
    share = params.get(TRUNCATE_KEY, config.truncate)
    return None if share == OFF else float(share)


def find_cut(
    tokens: Sequence[int], limit: int, share: float, keep: int, openers: Container[int]
) -> range | None:
    """Find the tokens to remove from a prompt so that at most `limit` of them remain.

    The first `keep` tokens stay, and the oldest part of the rest is removed (AttentionStore, 3.4).
    Cuts are made in steps, each a share of the room that `limit` leaves to the conversation, so
    that some requests after a cut need none. The position of the cut depends only on the beginning
    and on the number of cuts: prompts after a cut begin alike and share their prefix. If the
    conversation begins with a token of `openers`, which begin messages, so does the remaining part
    if such a token is near.

    Returns None if the prompt fits, or if `keep` leaves too little room for the conversation.
    """
    room, over = limit - keep, len(tokens) - limit
    if over <= 0 or room < max(MIN_ROOM * limit, 1):
        return None
    step = max(round(share * room), 1)
    start = keep + -(-over // step) * step
    if tokens[keep] in openers:
        # At least half of the tokens that a cut leaves remain.
        near = tokens[start : start + min(step, room - step) // 2 + 1]
        start += near.index(tokens[keep]) if tokens[keep] in near else 0
    return range(keep, start)
