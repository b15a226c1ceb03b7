"""What operators can see and order: our routes under `/impress`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from fastapi import Depends
from fastapi.responses import JSONResponse

from impress_sglang.plugin.checking import CHECK, GO_ON, RUNNING
from impress_sglang.plugin.page import LOOK, add_page, look
from impress_sglang.plugin.reports import REPORT_KEY
from impress_sglang.plugin.served_cache import ServedCache, served_cache_of
from impress_sglang.plugin.steering import (
    PAUSE_S,
    STEER,
    add_steering,
    no_store,
    obey,
    refuse_foreign,
    send,
    tokenizer_manager,
)

STATS_ROUTE = "/impress/stats"
REORDER_ROUTE = "/impress/reorder"
REORDER_ORDER = "impress_reorder"
CHECK_ROUTE = "/impress/check"

Order = Callable[[ServedCache, float], None]


def _reorder(cache: ServedCache, _: float) -> None:
    if cache.served.in_use:
        cache.served.store.reorders.enqueue()
        cache.served.store.poll()


def _check(cache: ServedCache, text: str | None) -> str:
    """Take a step of a check; returns its state as JSON. Raises nothing."""
    if text != GO_ON:
        cache.check.begin()
    cache.check.step()
    return json.dumps({"integrity": cache.check.state})


_orders: dict[str, Order] = {REORDER_ORDER: _reorder}


def add_order(name: str, order: Order) -> None:
    """Add an order that the scheduler's thread carries out when given this name; for benchmarks."""
    assert name not in _orders
    _orders[name] = order


def add_totals(result: Any, scheduler: Any, *_: Any, **__: Any) -> Any:
    """After `Scheduler.get_internal_state`: add our totals to the scheduler's state."""
    cache = served_cache_of(scheduler.tree_cache)
    if cache is not None:
        result.internal_state[REPORT_KEY] = cache.summary()
    return result


def take_order(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    """Around `Scheduler.set_internal_state`, by which orders reach the scheduler's process.

    SGLang lets only numbers through, so an order is a name and a number. Messages of SGLang's own
    route `/set_internal_state` arrive here, too. SGLang refuses what it does not know.
    """
    cache, orders = served_cache_of(scheduler.tree_cache), request.server_args
    asked = orders in (STEER, LOOK, CHECK)
    if not asked and (not orders or not orders.keys() <= _orders.keys()):
        return original(scheduler, request)
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    answer = None
    if cache is not None and asked:
        answers = obey if orders == STEER else look if orders == LOOK else _check
        answer = answers(cache, request.rid)
    elif cache is not None:
        for name, value in orders.items():
            _orders[name](cache, value)
    return SetInternalStateReqOutput(updated=cache is not None, rid=answer)


async def totals() -> dict[str, Any]:
    """What `GET /impress/stats` shows; called in the process of the HTTP server."""
    states = await tokenizer_manager().get_internal_state()
    report: dict[str, Any] = states[0][REPORT_KEY]
    return report


async def give_order(name: str, value: float = 1) -> dict[str, Any]:
    """Give the scheduler's process an order; returns the totals after it."""
    from sglang.srt.managers.io_struct import SetInternalStateReq

    await tokenizer_manager().set_internal_state(SetInternalStateReq(server_args={name: value}))
    return await totals()


async def check_all() -> dict[str, Any]:
    """Let the scheduler's process check everything, step by step; returns the outcome."""
    answer = await send(CHECK, "")
    while answer["integrity"] == RUNNING:
        await asyncio.sleep(PAUSE_S)
        answer = await send(CHECK, GO_ON)
    return answer


def add_routes(*_: Any, **__: Any) -> None:
    """Before the HTTP server starts: add our routes under `/impress`.

    They are added to the application itself: SGLang does not find the `auth_level` of a route in
    an included router, and would accept orders with any key, or none.
    """
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.utils.auth import AuthLevel, auth_level

    ours = [Depends(refuse_foreign)]

    @app.get(STATS_ROUTE)
    async def impress_stats() -> dict[str, Any]:
        return await totals()

    @app.post(REORDER_ROUTE, dependencies=ours)
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def impress_reorder() -> Any:
        told = await give_order(REORDER_ORDER)
        if told["suspended"] is not None:
            return JSONResponse({"error": no_store(told["suspended"])}, status_code=400)
        return told["reorder"]

    @app.post(CHECK_ROUTE, dependencies=ours)
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def impress_check() -> dict[str, Any]:
        return await check_all()

    add_steering(app)
    add_page(app)
