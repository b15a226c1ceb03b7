"""Numbers that a user can see: `meta_info["impress"]`, `GET /impress/stats`, `/server_info`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from impress_sglang.integration.radix_cache import REPORT_KEY, ImpressRadixCache

STATS_ROUTE = "/impress/stats"
_STATE_ATTRIBUTE = "_impress_report"


def add_totals(result: Any, scheduler: Any, *_: Any, **__: Any) -> Any:
    """After `Scheduler.get_internal_state`: add our totals to what the scheduler says."""
    cache = scheduler.tree_cache
    if isinstance(cache, ImpressRadixCache):
        result.internal_state[REPORT_KEY] = cache.summary()
    return result


def keep_report_as_object(
    original: Callable[..., None],
    meta_info: dict[str, Any],
    state: Any,
    key: str,
    values: list[Any],
) -> None:
    """Around `TokenizerManager._accumulate_request_meta_info`: one object, not one per token.

    SGLang slices such values by output token; ours belongs to the request and came with the first.
    """
    if key != REPORT_KEY:
        original(meta_info, state, key, values)
        return
    report = next((value for value in values if value is not None), None)
    if report is not None:
        setattr(state, _STATE_ATTRIBUTE, report)
    report = getattr(state, _STATE_ATTRIBUTE, None)
    if report is not None:
        meta_info[REPORT_KEY] = report


def add_stats_route(*_: Any, **__: Any) -> None:
    """Before the HTTP server starts: add `GET /impress/stats`."""
    from fastapi import APIRouter
    from sglang.srt.entrypoints import http_server

    router = APIRouter()

    @router.get(STATS_ROUTE)
    async def impress_stats() -> dict[str, Any]:
        manager = http_server.get_global_state().tokenizer_manager
        states = await manager.get_internal_state()
        stats: dict[str, Any] = states[0][REPORT_KEY]
        return stats

    http_server.app.include_router(router)
