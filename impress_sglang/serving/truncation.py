"""Where a prompt that is too long for the context is cut.

Stage: arrive. What is said first stays, and of the rest the oldest part is left out
(AttentionStore, 3.4). The place depends on the beginning of a conversation and on how many cuts it
needs, so that the turns after a cut begin alike and find each other's prefix.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

from impress_sglang.config import ImpressConfig
from impress_sglang.options import OFF, is_truncation

# Of `sampling_params.custom_params`: the share that a request wants to be cut, and how many first
# tokens stay.
TRUNCATE_KEY = "impress_truncate"
KEEP_KEY = "impress_keep_tokens"
# What the server tells itself there: how many tokens were cut.
TRUNCATED_KEY = "impress_truncated_tokens"
# First tokens that stay where a request does not say it and no system prompt is known.
KEEP_TOKENS = 16
# What stays first must leave this part of the context to the conversation, or nothing is cut.
LEAST_ROOM = 0.25


def check_truncation(params: Mapping[str, Any]) -> None:
    """Check what a request says about cuts.

    Raises:
        ValueError: a wrong value.
    """
    share = params.get(TRUNCATE_KEY, OFF)
    if not is_truncation(share):
        raise ValueError(
            f"custom_params {TRUNCATE_KEY} must be a number between 0 and 1, or {OFF!r}, "
            f"got {share!r}"
        )
    keep = params.get(KEEP_KEY, 0)
    # type() and not isinstance(): True is an int to isinstance.
    if type(keep) is not int or keep < 0:
        raise ValueError(f"custom_params {KEEP_KEY} must be a number of tokens, got {keep!r}")
    if TRUNCATED_KEY in params:
        raise ValueError(f"custom_params {TRUNCATED_KEY} is for the server to say")


def share_of(params: Mapping[str, Any], config: ImpressConfig) -> float | None:
    """What a request would be cut by at once, as a share of the conversation; None: it is not."""
    share = params.get(TRUNCATE_KEY, config.truncate)
    return None if share == OFF else float(share)


def params_of(sampling_params: Any) -> dict[str, Any]:
    """What a request says in its `custom_params`."""
    params = getattr(sampling_params, "custom_params", None)
    return params if isinstance(params, dict) else {}


def truncated_tokens_of(sampling_params: Any) -> int:
    """How many tokens of a request were cut."""
    tokens: int = params_of(sampling_params).get(TRUNCATED_KEY, 0)
    return tokens


def find_cut(
    tokens: Sequence[int], limit: int, share: float, keep: int, openers: Container[int]
) -> range | None:
    """Which tokens of a prompt to leave out, so that at most `limit` of them are left.

    The first `keep` stay. Cuts are made in steps, each a share of what `limit` leaves to the
    conversation, so that there is none for some turns after one. If the conversation begins with a
    token of `openers`, one that begins a message, so does what is left of it where such a token is
    near.

    Returns None for a prompt that fits, and where `keep` leaves too little to the conversation.
    """
    room, over = limit - keep, len(tokens) - limit
    if over <= 0 or room < max(LEAST_ROOM * limit, 1):
        return None
    step = max(round(share * room), 1)
    start = keep + -(-over // step) * step
    if tokens[keep] in openers:
        # At least half of what a cut leaves is left.
        near = tokens[start : start + min(step, room - step) // 2 + 1]
        start += near.index(tokens[keep]) if tokens[keep] in near else 0
    return range(keep, start)
