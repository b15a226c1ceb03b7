"""What a request asks of this extension, in the `custom_params` of its sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from impress_sglang.config import ImpressConfig
from impress_sglang.options import (
    AUTO,
    BITS_TEXT,
    EXACTLY,
    OFF,
    is_bits,
    is_blend,
    is_number,
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
# Keys with this prefix are ours; any other than the known ones is refused.
_OURS = "impress_"
_KNOWN = {
    *(BITS_KEY, RETENTION_KEY, BLEND_KEY, TRUNCATE_KEY, KEEP_KEY),
    *(STORE_KEY, TTL_KEY, PRIORITY_KEY),
}
_PRIORITIES = {own.name.lower(): own for own in Priority}


def check_custom_params(custom_params: object, config: ImpressConfig) -> None:
    """Check what a request asks of this extension against what the server offers.

    Raises:
        ValueError: a wrong value; SGLang answers with status 400.
    """
    if not isinstance(custom_params, dict):
        return
    _check_keys(custom_params)
    retention = custom_params.get(RETENTION_KEY, 1.0)
    if not is_number(retention) or not 0.0 < retention <= 1.0:
        raise ValueError(
            f"custom_params {RETENTION_KEY} must be a number above 0 and at most 1, "
            f"got {retention!r}"
        )
    bits = custom_params.get(BITS_KEY, EXACTLY)
    if not is_bits(bits) and bits != AUTO:
        raise ValueError(
            f"custom_params {BITS_KEY} must be {BITS_TEXT}, {EXACTLY!r} or {AUTO!r}, got {bits!r}"
        )
    if type(store := custom_params.get(STORE_KEY, True)) is not bool:
        raise ValueError(f"custom_params {STORE_KEY} must be true or false, got {store!r}")
    if not _is_ttl(ttl := custom_params.get(TTL_KEY, 1)):
        raise ValueError(
            f"custom_params {TTL_KEY} must be a number of seconds above 0 and at most "
            f"{LONGEST_TTL:g}, got {ttl!r}"
        )
    # A value that is not a string may be unhashable.
    priority = custom_params.get(PRIORITY_KEY, "normal")
    if not isinstance(priority, str) or priority not in _PRIORITIES:
        raise ValueError(
            f"custom_params {PRIORITY_KEY} must be one of {', '.join(_PRIORITIES)}, "
            f"got {priority!r}"
        )
    blend = custom_params.get(BLEND_KEY, OFF)
    if not is_blend(blend):
        raise ValueError(
            f"custom_params {BLEND_KEY} must be a number from 0 to 1, {AUTO!r} or {OFF!r}, "
            f"got {blend!r}"
        )
    if blend != OFF and config.blend == OFF:
        raise ValueError(
            f"custom_params {BLEND_KEY}: this server does not blend; start it with --impress-blend"
        )
    if retention < 1.0 and not config.needs_parts:
        raise ValueError(
            "custom_params: this server uses prefixes whole (see --impress-policy); set "
            f"{RETENTION_KEY} to 1"
        )


def _check_keys(custom_params: Mapping[Any, Any]) -> None:
    """Refuse keys with our prefix that we do not know: they would be silently ignored."""
    for key in custom_params:
        # The key that the server sets for itself is checked in `check_truncation`.
        ours = isinstance(key, str) and key.startswith(_OURS) and key != TRUNCATED_KEY
        if ours and key not in _KNOWN:
            known = ", ".join(sorted(_KNOWN))
            raise ValueError(f"custom_params {key} is unknown; there are {known}")


def store_wish_of(sampling_params: Any) -> bool | None:
    """Whether a request is to be stored: at first sight (True), never (False), as usual (None)."""
    wish = params_of(sampling_params).get(STORE_KEY)
    return wish if isinstance(wish, bool) else None


def ttl_of(sampling_params: Any) -> float:
    """For how many seconds a request's prefix may stay stored; 0: as long as the server says."""
    ttl = params_of(sampling_params).get(TTL_KEY)
    return float(ttl) if _is_ttl(ttl) else 0.0


def priority_of(sampling_params: Any) -> Priority:
    """The priority of what a request stores: lower priorities leave the SSD before it."""
    wish = params_of(sampling_params).get(PRIORITY_KEY)
    return _PRIORITIES.get(wish, Priority.NORMAL) if isinstance(wish, str) else Priority.NORMAL


def load_options_of(sampling_params: Any, config: ImpressConfig) -> LoadOptions:
    """What a request asks for, else the server's defaults; at least its floor of the retention."""
    return _load_options(params_of(sampling_params), config)


def _is_ttl(value: Any) -> TypeGuard[float]:
    return is_number(value) and 0.0 < value <= LONGEST_TTL


def _load_options(params: Mapping[str, Any], config: ImpressConfig) -> LoadOptions:
    own, bits = params.get(RETENTION_KEY), params.get(BITS_KEY, config.bits)
    retention = config.usual_retention if own is None else max(float(own), config.min_retention)
    return LoadOptions(
        retention,
        number_of_bits(bits),
        chosen=own is not None,
        auto_bits=bits == AUTO,
        blend=params.get(BLEND_KEY, config.usual_blend),
    )
