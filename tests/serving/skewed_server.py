"""Beside `faulty_server`: a rule can also strike jobs and matches of a rank, and the server tells
what its ranks have:

    POST /tests/ranks {"prompts": [[1, 2, 3]]}

Of each rank a digest of SGLang's tree, of free slots, and of whether each pass found it idle; how
much of each prompt its store has; and since the start: passes of the scheduler, votes in them,
nanoseconds of CPU time and of time of the scheduler's thread, and of its votes.

The operations are `job`, on the loader's thread before it opens what a job reads, and `match`, on
the scheduler's; their paths are as if of segments.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

from fastapi import Body
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from impress_sglang.plugin.admin import VERBS
from impress_sglang.plugin.request_tracker import as_tokens, namespace_of
from impress_sglang.plugin.routes import send
from impress_sglang.plugin.tree_cache import ImpressTreeCache
from impress_sglang.serving.load_jobs import LoadJob
from impress_sglang.serving.ranks import Agreement
from impress_sglang.storage.files import installed
from impress_sglang.store.store import PrefixStore
from impress_sglang.store.stored import StoredMatch
from tests.faults import FaultyFileSystem

_open, _match, _agree = LoadJob.open, PrefixStore.match, Agreement.agree
_poll = ImpressTreeCache.check_hicache_events
_cost = Counter[str]()
_idle = hashlib.sha256()


def _enter(store: PrefixStore, operation: str) -> str | None:
    files = installed()
    assert isinstance(files, FaultyFileSystem)
    return files.enter(operation, Path(store.summary()["directory"], "segments", operation))


def _open_skewed(job: LoadJob) -> Any:
    _enter(job.store, "job")
    return _open(job)


def _match_skewed(store: PrefixStore, namespace: str, tokens: Any, **quality: Any) -> StoredMatch:
    """With an error, half of what is stored is found."""
    found = _match(store, namespace, tokens, **quality)
    try:
        _enter(store, "match")
    except OSError:
        return StoredMatch(found.slice(0, found.num_tokens // 2))
    return found


def _agree_counted(agreement: Agreement, *votes: Any) -> Any:
    _cost["votes"] += 1
    began, wall = time.thread_time_ns(), time.perf_counter_ns()
    try:
        return _agree(agreement, *votes)
    finally:
        _cost["vote_ns"] += time.thread_time_ns() - began
        _cost["vote_wall_ns"] += time.perf_counter_ns() - wall


def _poll_counted(tree: ImpressTreeCache) -> None:
    _cost["passes"] += 1
    _idle.update(bytes([tree.loads.jobs._pool.is_idle()]))
    _cost["ns"] = time.thread_time_ns()
    _cost["wall_ns"] = time.perf_counter_ns()
    _poll(tree)


def _tell(tree: ImpressTreeCache, asked: Any) -> list[Any]:
    nodes, waiting = [], [tree.root_node]
    for node in waiting:
        waiting += node.children.values()
        for part in node.component_data:
            value = None if part.value is None else [*map(int, part.value)]
            nodes.append((list(node.key or ()), value, part.lock_ref))
    free = tree.token_to_kv_pool_allocator.available_size()
    state = json.dumps([nodes, free, _idle.hexdigest()], default=str)
    store = tree.service.store
    space = namespace_of(asked)
    found = [_match(store, space, as_tokens(prompt)).num_tokens for prompt in asked.value]
    tree_digest = hashlib.sha256(state.encode()).hexdigest()
    told = {"tree": tree_digest, "stored": found, "cost": dict(_cost)}
    return [json.loads(text) for text in tree.ranks.all_gather(json.dumps(told))]


def _add_routes(*_: Any, **__: Any) -> None:
    from sglang.srt.entrypoints.http_server import app

    @app.post("/tests/ranks")
    async def ranks(prompts: Annotated[list[list[int]], Body(embed=True)]) -> list[Any]:
        told: list[Any] = await send("tests_ranks", value=prompts)
        return told


LoadJob.open = _open_skewed  # type: ignore[method-assign]
PrefixStore.match = _match_skewed  # type: ignore[method-assign, assignment]
Agreement.agree = _agree_counted  # type: ignore[method-assign, assignment]
ImpressTreeCache.check_hicache_events = _poll_counted  # type: ignore[method-assign]
VERBS["tests_ranks"] = _tell
HookRegistry.register(
    "sglang.srt.entrypoints.http_server._setup_and_run_http_server", _add_routes, HookType.BEFORE
)
