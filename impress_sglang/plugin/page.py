"""The page for people: `GET /impress`, and its data, `GET /impress/overview`.

The page is three files beside this package, served as one self-contained document. Its data are
gathered on the scheduler's thread, in time that does not grow with the store; the HTTP process
turns tokens into text, if prompts may be shown at all.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from impress_sglang.plugin.served_cache import ServedCache
from impress_sglang.serving.report import RecentRequests
from impress_sglang.store.losses import prompt_of
from impress_sglang.store.prefix_hashes import BLOCK_TOKENS
from impress_sglang.store.store import PrefixStore
from impress_sglang.store.stored import StoredSegment
from impress_sglang.tiers.placement import Tier

PAGE_ROUTE = "/impress"
OVERVIEW_ROUTE = "/impress/overview"
MOST_SEGMENTS = 100
_MOST_LETTERS = 120
_FILES = Path(__file__).parents[1] / "page"


def overview(cache: ServedCache, after: int, below: str | None) -> dict[str, Any]:
    """Gather the data of the page on the scheduler's thread.

    `after`: leave out requests up to this number. If there is a segment `below`: only the segments
    that build on it.
    """
    recent, store = cache.service.recent, cache.service.served.opened
    found: Iterable[StoredSegment] = ()
    if store is not None and below is None:
        found = store.tree.order.latest()
    elif store is not None and (segment := store.tree.get(str(below))) is not None:
        found = store.tree.on_top(segment)
    shown = itertools.islice(found, MOST_SEGMENTS)
    segments = [] if store is None else [_row(recent, store, own) for own in shown]
    if below is not None:
        return {"segments": segments}
    return {
        "since": recent.since,
        "now": time.time(),
        "stats": cache.summary(),
        "requests": recent.after(after),
        "periods": recent.periods(),
        "segments": segments,
    }


def _row(recent: RecentRequests, store: PrefixStore, segment: StoredSegment) -> dict[str, Any]:
    info, cached = segment.info, store.segments.cached_bytes(segment.segment_id)
    parent, begins = segment.parent, None
    if info.prefix_len < BLOCK_TOKENS:
        # Requests that begin like it have the same digest; others only continue a prompt.
        begins = recent.digest(info.namespace, prompt_of(segment) if parent else info.tokens)
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
        "exact": not info.approximate,
        "builders": segment.num_dependents,
    }


def with_text(found: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Replace tokens by text; by None if they are hidden or there is no tokenizer."""
    for row in (*found.get("requests", ()), *found.get("segments", ())):
        tokens = row.pop("words")
        shown = tokens is not None and tokenizer is not None
        row["text"] = tokenizer.decode(tokens)[:_MOST_LETTERS] if shown else None
    return found


def document() -> tuple[str, str]:
    """The page, and a content security policy that lets a browser run only what belongs to it."""
    html, style, script = (
        (_FILES / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "page.js")
    )
    policy = (
        f"default-src 'none'; style-src {_source(style)}; script-src {_source(script)}; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return html.replace("/* page.css */", style).replace("/* page.js */", script), policy


def _source(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
