"""What a user can see and order: `meta_info["impress"]`, `/impress/stats`, `/impress/reorder`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from impress_sglang.integration.radix_cache import REPORT_KEY, ImpressRadixCache

STATS_ROUTE = "/impress/stats"
REORDER_ROUTE = "/impress/reorder"
EMULATE_ROUTE = "/impress/emulate_ssd"
READAHEAD_ROUTE = "/impress/readahead"
REORDER_ORDER = "impress_reorder"
EMULATE_ORDER = "impress_ssd_mbps"
READAHEAD_ORDER = "impress_readahead"
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


def take_order(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    """Around `Scheduler.set_internal_state`, the way for orders to the scheduler's process.

    SGLang lets only numbers through, so an order is a name and a number.
    """
    orders = request.server_args
    if not orders.keys() & {REORDER_ORDER, EMULATE_ORDER, READAHEAD_ORDER}:
        return original(scheduler, request)
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    cache = scheduler.tree_cache
    taken = isinstance(cache, ImpressRadixCache)
    if taken and REORDER_ORDER in orders:
        cache.reorder(force=bool(orders[REORDER_ORDER]))
    if taken and EMULATE_ORDER in orders:
        cache.emulate_ssd(float(orders[EMULATE_ORDER]))
    if taken and READAHEAD_ORDER in orders:
        cache.set_readahead(float(orders[READAHEAD_ORDER]))
    return SetInternalStateReqOutput(updated=taken)


def add_routes(*_: Any, **__: Any) -> None:
    """Before the HTTP server starts: add our routes under `/impress`."""
    from fastapi import APIRouter, Body
    from sglang.srt.entrypoints import http_server
    from sglang.srt.managers.io_struct import SetInternalStateReq
    from sglang.srt.utils.auth import AuthLevel, auth_level

    router = APIRouter()

    async def stats() -> dict[str, Any]:
        manager = http_server.get_global_state().tokenizer_manager
        states = await manager.get_internal_state()
        report: dict[str, Any] = states[0][REPORT_KEY]
        return report

    @router.get(STATS_ROUTE)
    async def impress_stats() -> dict[str, Any]:
        return await stats()

    async def order(name: str, value: float) -> dict[str, Any]:
        manager = http_server.get_global_state().tokenizer_manager
        await manager.set_internal_state(SetInternalStateReq(server_args={name: value}))
        return await stats()

    @router.post(REORDER_ROUTE)
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def impress_reorder(force: bool = Body(default=False, embed=True)) -> dict[str, Any]:
        return (await order(REORDER_ORDER, int(force)))["reorder"]

    @router.post(EMULATE_ROUTE)
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def impress_emulate_ssd(mbps: float = Body(ge=0, embed=True)) -> dict[str, Any]:
        return (await order(EMULATE_ORDER, mbps))["store"]

    @router.post(READAHEAD_ROUTE)
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def impress_readahead(share: float = Body(ge=0, embed=True)) -> dict[str, Any]:
        return (await order(READAHEAD_ORDER, share))["store"]

    http_server.app.include_router(router)
