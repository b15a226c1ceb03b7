"""Lets SGLang admit requests that are queued behind one that is held back.

A request is held back for a pass while another one brings its prefix into SGLang's tree. SGLang
stops at the first request that it cannot admit, so that all behind it would wait as well.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS, AddReqResult

from impress_sglang.integration.paper.radix_cache import ImpressRadixCache


def let_others_pass(result: Any, adder: Any, req: Any) -> Any:
    """Return the result with which SGLang goes on after it has tried to admit `req`.

    The tokens and the row of a request that is held back stay free for it. A request behind it for
    which there is no room is tried again in the next pass: with SGLang's own result no request, not
    even the one that is held back, would be admitted until a running one ends.
    """
    cache = adder.tree_cache
    if not isinstance(cache, ImpressRadixCache):
        return result
    if result == AddReqResult.OTHER and req.rid in cache.held_back:
        tokens = len(req.full_untruncated_fill_ids) - req.prefix_len - req.host_hit_length
        new_tokens = min(req.sampling_params.max_new_tokens, CLIP_MAX_NEW_TOKENS)
        adder.memory_budget.total_offset += tokens + new_tokens
        limit, running = adder.prefill_max_requests, len(adder.running_batch.reqs)
        rows = max(adder.max_running_requests - running - len(cache.held_back), 0)
        adder.prefill_max_requests = rows if limit is None else min(limit, rows)
        return AddReqResult.CONTINUE
    if result == AddReqResult.NO_TOKEN and cache.held_back:
        return AddReqResult.OTHER
    return result
