"""What a request asks of this extension, in the `custom_params` of its sampling parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from impress_sglang.config import ImpressConfig
from impress_sglang.options import (
    AUTO,
    BITS_TEXT,
    EXACTLY,
    OFF,
    is_bits,
    is_blend,
    is_number,
    is_truncation,
    number_of_bits,
)
from impress_sglang.serving.truncation import KEEP_KEY, TRUNCATE_KEY, TRUNCATED_KEY, params_of
from impress_sglang.storage.segment import Priority
from impress_sglang.store.policies import LoadOptions

# Keys of `sampling_params.custom_params`: the retention, bits and blending that a request asks for.
RETENTION_KEY = "impress_retention"
BITS_KEY = "impress_bits"
BLEND_KEY = "impress_blend"
# Whether the request is stored, and for how many seconds.
STORE_KEY = "impress_store"
TTL_KEY = "impress_ttl"
# Which other prefixes leave the SSD before its own.
PRIORITY_KEY = "impress_priority"
# Thirty years: a file's expiry time has to be a finite number.
LONGEST_TTL = 1e9
_PRIORITIES = {own.name.lower(): own for own in Priority}
# What a value must be, and whether it is.
_RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    BITS_KEY: (f"{BITS_TEXT}, {EXACTLY!r} or {AUTO!r}", lambda own: is_bits(own) or own == AUTO),
    BLEND_KEY: (f"a number from 0 to 1, {AUTO!r} or {OFF!r}", is_blend),
    # type() and not isinstance(): True is an int to isinstance.
    KEEP_KEY: ("a number of tokens", lambda own: type(own) is int and own >= 0),
    # A value that is not a string may be unhashable.
    PRIORITY_KEY: (
        f"one of {', '.join(_PRIORITIES)}",
        lambda own: isinstance(own, str) and own in _PRIORITIES,
    ),
    RETENTION_KEY: (
        "a number above 0 and at most 1",
        lambda own: is_number(own) and 0.0 < own <= 1.0,
    ),
    STORE_KEY: ("true or false", lambda own: type(own) is bool),
    TRUNCATE_KEY: (f"a number between 0 and 1, or {OFF!r}", is_truncation),
    TTL_KEY: (
        f"a number of seconds above 0 and at most {LONGEST_TTL:g}",
        lambda own: is_number(own) and 0.0 < own <= LONGEST_TTL,
    ),
}


def check_custom_params(custom_params: object, config: ImpressConfig) -> None:
    """Check what a request asks of this extension against what the server offers.

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
        expected, holds = _RULES[key]
        if not holds(value):
            raise ValueError(f"custom_params {key} must be {expected}, got {value!r}")
    if custom_params.get(BLEND_KEY, OFF) != OFF and config.blend == OFF:
        raise ValueError(
            f"custom_params {BLEND_KEY}: this server does not blend; start it with --impress-blend"
        )
    if custom_params.get(RETENTION_KEY, 1.0) < 1.0 and not config.needs_parts:
        raise ValueError(
            "custom_params: this server uses prefixes whole (see --impress-policy); set "
            f"{RETENTION_KEY} to 1"
        )


def _wish_of(sampling_params: Any, key: str) -> Any:
    """A right value that a request has for a key, else None."""
    value = params_of(sampling_params).get(key)
    return value if _RULES[key][1](value) else None


def store_wish_of(sampling_params: Any) -> bool | None:
    """Whether a request is to be stored: at first sight (True), never (False), as usual (None)."""
    wish: bool | None = _wish_of(sampling_params, STORE_KEY)
    return wish


def ttl_of(sampling_params: Any) -> float:
    """For how many seconds a request's prefix may stay stored; 0: as long as the server says."""
    return float(_wish_of(sampling_params, TTL_KEY) or 0.0)


def priority_of(sampling_params: Any) -> Priority:
    """The priority of what a request stores: lower priorities leave the SSD before it."""
    return _PRIORITIES[_wish_of(sampling_params, PRIORITY_KEY) or "normal"]


def load_options_of(sampling_params: Any, config: ImpressConfig) -> LoadOptions:
    """What a request asks for, else the server's defaults; at least its floor of the retention."""
    params = params_of(sampling_params)
    own, bits = params.get(RETENTION_KEY), params.get(BITS_KEY, config.bits)
    retention = config.usual_retention if own is None else max(float(own), config.min_retention)
    return LoadOptions(
        retention,
        number_of_bits(bits),
        chosen=own is not None,
        auto_bits=bits == AUTO,
        blend=params.get(BLEND_KEY, config.blend),
    )
