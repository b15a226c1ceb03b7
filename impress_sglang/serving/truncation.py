"""Decides where a prompt that is too long for the context is cut.

Stage: arrive. The beginning of a conversation stays, and of the rest the oldest part is left out
(AttentionStore, 3.4). The place of the cut depends only on the beginning and on how many cuts are
needed, so that the prompts after a cut begin alike and find each other's prefix.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

from impress_sglang.config import ImpressConfig
from impress_sglang.options import OFF

# Keys of `sampling_params.custom_params`: the share that a request wants to be cut by, and how many
# first tokens stay.
TRUNCATE_KEY = "impress_truncate"
KEEP_KEY = "impress_keep_tokens"
# Set there by the server itself: how many tokens were cut.
TRUNCATED_KEY = "impress_truncated_tokens"
# First tokens that stay if the request does not say how many, and no system prompt is known.
KEEP_TOKENS = 16
# The first tokens that stay must leave this share of the context free, or nothing is cut.
LEAST_ROOM = 0.25


def share_of(params: Mapping[str, Any], config: ImpressConfig) -> float | None:
    """By what share of the conversation a request is cut at once; None if it is not to be cut."""
    share = params.get(TRUNCATE_KEY, config.truncate)
    return None if share == OFF else float(share)


def params_of(sampling_params: Any) -> dict[str, Any]:
    """The `custom_params` of a request; empty if it has none."""
    params = getattr(sampling_params, "custom_params", None)
    return params if isinstance(params, dict) else {}


def truncated_tokens_of(sampling_params: Any) -> int:
    """How many tokens of a request were cut."""
    tokens: int = params_of(sampling_params).get(TRUNCATED_KEY, 0)
    return tokens


def find_cut(
    tokens: Sequence[int], limit: int, share: float, keep: int, openers: Container[int]
) -> range | None:
    """Find which tokens of a prompt to leave out, so that at most `limit` of them are left.

    The first `keep` tokens stay. Cuts are made in steps, each a share of what `limit` leaves to the
    conversation, so that none is needed for some requests after a cut. If the conversation begins
    with a token of `openers`, which begin messages, what is left of it does as well where such a
    token is near.

    Returns None for a prompt that fits, and if `keep` leaves too little room for the conversation.
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
