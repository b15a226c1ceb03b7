"""A server that benchmarks and tests can slow down and command, by routes beside SGLang's.

    POST /bench/ssd_mbps {"mbps": 30}     read from SSD no faster than that; 0: as fast as it goes
    POST /bench/reorder                   reorder every prefix that was selected from

The module level code runs in the main process and again in each spawned child, before plugins are
loaded there. What it installs is this process's; nothing of it is in the product.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from bench.core.emulation import SlowFileSystem
from impress_sglang.paper.store import PartStore
from impress_sglang.plugin.admin import VERBS
from impress_sglang.plugin.routes import send
from impress_sglang.plugin.tree_cache import ImpressTreeCache
from impress_sglang.storage.files import install

_FILES = SlowFileSystem()


def _set_ssd_mbps(cache: ImpressTreeCache, asked: Any) -> Any:
    _FILES.set_rate(asked.value)
    # There is none while weights change.
    return cache.summary()["store"] or {}


def _reorder_all(cache: ImpressTreeCache, _: Any) -> Any:
    store = cache.service.store
    assert isinstance(store, PartStore)
    store.enqueue_rewrites(force=True)
    store.poll()
    return cache.summary()["reorder"]


def _add_routes(*_: Any, **__: Any) -> None:
    from fastapi import Body
    from sglang.srt.entrypoints.http_server import app

    @app.post("/bench/ssd_mbps")
    async def ssd_mbps(mbps: float = Body(ge=0, embed=True)) -> dict[str, Any]:
        return await send("bench_ssd_mbps", value=mbps)

    @app.post("/bench/reorder")
    async def reorder() -> dict[str, Any]:
        return await send("bench_reorder")


install(_FILES)
VERBS["bench_ssd_mbps"] = _set_ssd_mbps
VERBS["bench_reorder"] = _reorder_all
HookRegistry.register(
    "sglang.srt.entrypoints.http_server._setup_and_run_http_server", _add_routes, HookType.BEFORE
)
