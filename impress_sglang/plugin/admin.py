"""Admin requests, in the scheduler's process.

SGLang's channel to that process passes numbers only, so a request travels as text in the id of a
message, and so does its answer. `routes.py` checks it, and converts text to tokens.
"""

from __future__ import annotations

import itertools
import json
import logging
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

from sglang.srt.mem_cache.radix_cache import RadixKey

from impress_sglang.plugin.hooks import impress_cache_of
from impress_sglang.plugin.request_tracker import as_tokens, namespace_of
from impress_sglang.plugin.tree_cache import ImpressTreeCache
from impress_sglang.serving.custom_params import load_options_of
from impress_sglang.serving.ranks import ALONE
from impress_sglang.serving.report import RecentRequests, new_report
from impress_sglang.storage.quality import ANYTHING, EXACT
from impress_sglang.store.orders import Purge
from impress_sglang.store.policies import LoadOptions
from impress_sglang.store.prefix_hashes import BLOCK_TOKENS
from impress_sglang.store.store import PrefixStore
from impress_sglang.store.stored import StoredSegment
from impress_sglang.tiers.placement import Tier

logger = logging.getLogger(__name__)

MESSAGE = {"impress": 1}
"""`server_args` of a message whose `rid` is a request: a JSON object of `verb` and its fields."""
_FIELDS: dict[str, Any] = dict.fromkeys(("input_ids", "extra_key", "cache_salt", "older_than"))
_FIELDS |= {"everything": False, "name": "", "begin": False}
MAX_SEGMENTS = 100
FAULT = {"error": "the request could not be carried out; the server's log says why", "status": 500}


class AdminError(Exception):
    """A request cannot be carried out; the message says why in one sentence."""


def around_message(original: Callable[..., Any], scheduler: Any, message: Any) -> Any:
    """Around `Scheduler.set_internal_state`, which handles all other messages itself."""
    if message.server_args != MESSAGE:
        return original(scheduler, message)
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    cache = impress_cache_of(scheduler.tree_cache)

    def answer() -> None:
        text = None if cache is None else handle(cache, message.rid)
        output = SetInternalStateReqOutput(updated=cache is not None, rid=text)
        # SGLang 0.5.22 has no method for it.
        send = getattr(scheduler, "send_control_output", None)
        (send or scheduler.ipc_channels.send_to_tokenizer.send_output)(output, message)

    (ALONE if cache is None else cache.ranks).run_in_lockstep(answer)
    return None


def handle(cache: ImpressTreeCache, text: str | None) -> str:
    """Carry out a request on the scheduler thread; returns the answer as JSON. Raises nothing."""
    try:
        fields = json.loads(text or "")
        return json.dumps(VERBS[fields["verb"]](cache, SimpleNamespace(**(_FIELDS | fields))))
    except AdminError as error:
        return json.dumps({"error": str(error)})
    except Exception:
        # Whatever the error, client requests are still served.
        logger.exception("a request of an administrator could not be carried out")
        return json.dumps(FAULT)


def _store(cache: ImpressTreeCache) -> PrefixStore:
    mine = cache.service.in_use
    if not cache.ranks.all(mine):
        why = "that of another rank is not open" if mine else cache.service.suspended
        raise AdminError(f"no store is in use: {why or 'by policy'}")
    return cache.service.store


def _reorder(cache: ImpressTreeCache, _: Any) -> Any:
    _store(cache)
    return cache.service.reorder()


def _explain_prompt(cache: ImpressTreeCache, asked: Any) -> dict[str, Any]:
    """Return what is stored of a prompt, and why no more; for `warm`, exact KVs only."""
    _store(cache)
    service, namespace, tokens = cache.service, namespace_of(asked), as_tokens(asked.input_ids)
    exactly = asked.verb == "warm"
    options = LoadOptions() if exactly else load_options_of(None, service.config)
    min_quality = EXACT if exactly else service.min_quality(options)
    stored = cache.planner.match(namespace, tokens, min_quality).num_tokens
    report = new_report(service.policy.name, stored, len(tokens))
    frequency = cache.frequency
    seen = None if frequency is None else frequency.count_prefix(namespace, tokens, count=False)
    why = cache.planner.explain(report, namespace, tokens, options, seen, admitted=False)
    return {"tokens": len(tokens), "stored_tokens": stored, "why": why}


def _whole(cache: ImpressTreeCache, input_ids: list[int]) -> list[int]:
    """Cut a prompt to what may be stored: whole blocks and whole pages."""
    length = len(input_ids) // BLOCK_TOKENS * BLOCK_TOKENS
    length = length // cache.page_size * cache.page_size
    if not length:
        raise AdminError(f"a prefix has {BLOCK_TOKENS} tokens at least")
    return input_ids[:length]


def _pin(cache: ImpressTreeCache, asked: Any) -> dict[str, Any]:
    store, tokens = _store(cache), as_tokens(_whole(cache, asked.input_ids))
    name, done = store.namespace(namespace_of(asked)), dict[str, Any]()
    if cache.planner.states:
        # It is only loadable with the state at its end, which need not be the end of a block.
        tokens = as_tokens(asked.input_ids)
        if asked.verb == "unpin":
            length = store.pins.longest(name, tokens) or len(tokens)
        else:
            length = cache.planner.match(namespace_of(asked), tokens, ANYTHING).num_tokens
        tokens = tokens[: cache.ranks.all_reduce_min([length])[0]]
        if not len(tokens):
            raise AdminError("no state of it is stored: warm it first")
    if asked.verb == "unpin":
        done["unpinned"] = store.pins.unpin(name, tokens)
    else:
        refusal = store.pins.refusal(name, tokens)
        if not cache.ranks.all(refusal is None):
            raise AdminError(refusal or "another rank cannot pin it: warm it first")
        store.pins.pin(name, tokens)
        done["tokens"] = len(tokens)
    return done | {"pins": store.pins.summary()}


def _purge(cache: ImpressTreeCache, asked: Any) -> dict[str, Any]:
    """Take a step of a purge; its `name` distinguishes it from another one with the same body."""
    store, tokens, key = _store(cache), None, None
    namespace = None if asked.everything else namespace_of(asked)
    if asked.input_ids is not None:
        ids = _whole(cache, asked.input_ids)
        tokens = as_tokens(ids)
        key = RadixKey(array("q", ids), asked.extra_key, cache_salt=asked.cache_salt)
    text, name = repr(asked), None if namespace is None else store.namespace(namespace)
    purge = cache.service.purges.get_or_begin(text, lambda: Purge(name, tokens, asked.older_than))
    failure: Exception | None = None
    purged, pool, more = Counter[str](), 0, False
    try:
        purged = purge.step(store)
    except Exception as error:
        # Other ranks wait for this rank below.
        failure = error
    if asked.older_than is None:
        # Writes of purged tokens have been given up, and lock nothing any more.
        pool, more = cache.sweeps.step(text, namespace, key)
    unfinished = cache.ranks.any(purge.unfinished) or more
    if failure is not None:
        raise failure
    # Results remain, as other replicas may have more to do.
    names = ("segments", "tokens", "bytes", "writes", "unpinned")
    return {field: purged[field] for field in names} | {"pool_tokens": pool, "left": unfinished}


def _overview(cache: ImpressTreeCache, asked: Any) -> dict[str, Any]:
    """Return the data of the page, in time that does not grow with the store.

    Requests up to number `after` are left out. With a segment `below`, only the segments that build
    on it are returned.
    """
    recent, store, below = cache.service.recent, cache.service.opened, asked.below
    candidates: Iterable[StoredSegment] = ()
    if store is not None and below is None:
        candidates = store.tree.order.latest()
    elif store is not None and (segment := store.tree.get(str(below))) is not None:
        candidates = store.tree.children_of(segment)
    shown = itertools.islice(candidates, MAX_SEGMENTS)
    segments = [] if store is None else [_row(recent, store, segment) for segment in shown]
    if below is not None:
        return {"segments": segments}
    return {
        "since": recent.since,
        "now": time.time(),
        "stats": cache.summary(),
        "requests": recent.since_number(asked.after),
        "periods": recent.periods(),
        "segments": segments,
    }


def _row(recent: RecentRequests, store: PrefixStore, segment: StoredSegment) -> dict[str, Any]:
    info, cached = segment.info, store.readers.cached_bytes(segment.segment_id)
    parent, begins = segment.parent, None
    if info.prefix_len < BLOCK_TOKENS:
        # Requests that begin like it have the same digest; other segments continue a prompt.
        begins = recent.digest(info.namespace, segment.prompt())
    return {
        "segment": segment.segment_id,
        "on": None if parent is None else parent.segment_id,
        "namespace": info.namespace,
        "begins": begins,
        "words": recent.words(info.prompt_tokens),
        "from_token": info.prefix_len,
        "tokens": len(info.prompt_tokens),
        "ssd_bytes": segment.file_bytes,
        "host_bytes": int(cached[Tier.HOST]),
        "device_bytes": int(cached[Tier.DEVICE]),
        "hits": segment.hits,
        "uses_ago": store.tree.order.now - segment.last_access,
        "pinned": segment.segment_id in store.pins,
        "state": segment.state.value,
        "priority": info.priority.name.lower(),
        "exact": info.quality == EXACT,
        "builders": segment.num_dependents,
    }


VERBS: dict[str, Callable[[ImpressTreeCache, Any], Any]] = {
    "stats": lambda cache, _: cache.summary(),
    "overview": _overview,
    "check": lambda cache, asked: {"integrity": cache.check(begin=asked.begin)},
    "reorder": _reorder,
    "why": _explain_prompt,
    "warm": _explain_prompt,
    "pin": _pin,
    "unpin": _pin,
    "purge": _purge,
}
"""Handler of each verb; benchmarks add theirs."""
