"""What leaves the SSD, and in which order: each row is a history of a store."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from impress_sglang.paper.source import PartSource
from impress_sglang.paper.store import PartStore
from impress_sglang.storage.segment import Priority
from impress_sglang.store.lookahead import LookAhead
from impress_sglang.store.stored import StoredMatch
from impress_sglang.store.writing import StoreOutcome
from tests.unit import store_factory as stores
from tests.unit.kv_factory import as_tokens
from tests.unit.store_factory import Workbench, gb, length, look_up, prompt

LOW, NORMAL, HIGH = Priority
SIGNS = {"-": LOW, "": NORMAL, "+": HIGH}
# By what is shown: for how many segments of 8 tokens there is room, and what happens. A number is a
# prompt of 8 tokens that is stored; `b3` is one of tenant b, `+3` one of high, `-3` one of low
# priority, `3/16` has 16 tokens, of which `3` are the first. Those that are `brief` are there until
# they `expire`, and the files of those that are missed are gone. After `left` there are these, and
# no others that were named before.
HISTORIES = {
    "what was used least recently goes, and only reading is use": (
        3,
        "1, 2, 3, read 1, look 2, 4, left 1 3 4, read 3, 5, left 3 4 5",
    ),
    "what is served from SGLang's pool is offered, never read, and stays": (
        3,
        "1, 2, 3, known 1, 4, known 1, 5, left 1 4 5",
    ),
    "low goes before normal, which goes before high, and if nothing else does, high goes": (
        3,
        "+1, 2, -3, read 3, 4, left 1 2 4, 5, left 1 4 5, 6/24, left 6/24",
    ),
    "priorities outlast a restart": (3, "+1, 2, -3, read 3, restart, 4, left 1 2 4"),
    "and the index": (3, "+1, 2, -3, read 3, rebuild, 4, left 1 2 4"),
    "a tenant gives up what it used least recently, and nothing if that is too little": (
        9,
        "limit 2, b1, a2, a3, read a2, a4, left b1 a2 a4, refused a5/40, left b1 a2 a4",
    ),
    "a tenant gives up its own low ones first": (
        9,
        "limit 2, -b9, a1, -a2, +a3, a4, left b9 a3 a4",
    ),
    "a tenant does not give up what is being read": (9, "limit 2, a2, a4, open a2, a6, left a2 a6"),
    "who has more than it may goes first, and not for more than is too much": (
        4,
        "b1, a2, a3, a4, limit 2, c5, left b1 a3 a4 c5, c6, left a3 a4 c5 c6",
    ),
    "what was set aside leaves before anything else": (
        3,
        "1, 2, 3, lose 1, lose 2, 4, 5, left 3 4 5, 6, left 4 5 6",
    ),
    "what a request waits for stays": (
        2,
        "1, 2, wait 1, 3, left 1 3, wait 3, refused 4, go 1, 4, left 3 4",
    ),
    "also across a restart": (2, "1, 2, wait 1, restart, 3, left 1 3, go 1, 4, 5, left 4 5"),
    "what is pinned stays": (
        4,
        "1, 2, pin 1, 50, 51, 52, 53, left 1 51 52 53, unpin 1, 70, 71, 72, 73, left 70 71 72 73",
    ),
    "a prompt does not replace another of which it shares most": (1, "1, refused 1~6, left 1"),
    "what a high one builds on goes no sooner, but as soon as that has expired": (
        5,
        "-1, -2, brief +2/16, 3, 4, 5, 6, left 2 2/16 4 5 6, expire, left 2 4 5 6, 7, 8, "
        "left 4 5 6 7 8",
    ),
    "a low one goes at once with the last that builds on it": (
        4,
        "-1, -1/16, +1/24, +2, +3/32, left 3/32",
    ),
    "also where there is a hole between them": (
        4,
        "-1, -1/16, +1/24, +2, miss 1/16, +3/32, left 3/32",
    ),
}
PROMPT = re.compile(r"([-+]?)([a-z]?)(\d+)(?:/(\d+)|~(\d+))?")


class History:
    def __init__(self, bench: Workbench, room: int) -> None:
        self.bench, self.lookahead = bench, LookAhead()
        self.options: dict[str, Any] = {"ssd_gb": gb(room * bench.one), "lookahead": self.lookahead}
        self.store: PartStore = bench.open(**self.options)
        self.named: set[str] = set()
        self.sources: list[PartSource] = []

    def step(self, step: str) -> None:
        verb, *names = step.split()
        if verb[-1].isdigit():
            verb, names = "put", [verb]
        if verb == "left":
            assert {name for name in self.named if self.has(name)} == set(names)
        elif verb == "expire":
            self.store.expire(time.time() + 20)
        elif verb in ("restart", "rebuild", "limit"):
            if verb == "limit":
                self.options["namespace_gb"] = gb(int(names[0]) * self.bench.one)
            self.bench.close(self.store)
            if verb == "rebuild":
                next(self.bench.root.glob("*/journal")).unlink()
            self.store = self.bench.open(**self.options)
        else:
            self.of_prompt(verb, names[0])

    def of_prompt(self, verb: str, name: str) -> None:
        sign, tenant, tokens = parsed(name)
        place = self.store.namespace(tenant), as_tokens(tokens)
        refusals = {"refused": StoreOutcome.NO_SPACE, "known": StoreOutcome.ALREADY_STORED}
        if verb in ("put", "brief"):
            options = {"namespace": tenant, "priority": SIGNS[sign]}
            self.bench.put(self.store, tokens, ttl=10 * (verb == "brief"), **options)
            self.named.add(name.lstrip("+-"))
        elif verb in refusals:
            outcome = self.bench.offer(self.store, tokens, namespace=tenant)
            assert outcome is refusals[verb]
        elif verb == "pin":
            assert self.store.pins.pin(*place) is None
        elif verb == "unpin":
            assert self.store.pins.unpin(*place) == 1
        elif verb == "go":
            self.lookahead.stop_waiting(name)
        else:
            self.of_match(verb, name, look_up(self.store, tokens, tenant))

    def of_match(self, verb: str, name: str, match: StoredMatch) -> None:
        if verb == "wait":
            self.lookahead.set_expected(name, match.spans)
        elif verb in ("lose", "miss"):
            segment = match.spans[-1].segment
            stores.lose(self.bench, self.store, segment.segment_id, gone=verb == "miss")
        elif verb != "look":
            self.sources.append(stores.open_source(self.store, match))
            if verb == "read":
                self.store.close_source(self.sources.pop())

    def has(self, name: str) -> bool:
        _, tenant, tokens = parsed(name)
        return length(self.store, tokens, namespace=tenant) == len(tokens)


def parsed(name: str) -> tuple[str, str, tuple[int, ...]]:
    """Sign, tenant and tokens."""
    found = PROMPT.fullmatch(name)
    assert found is not None
    sign, tenant, number, count, shared = found.groups()
    tokens = prompt(int(number), int(count or 8))
    return sign, tenant, tokens if shared is None else (*tokens[: int(shared)], 1, 2)


@pytest.mark.parametrize("shown", HISTORIES)
def test_what_leaves_and_what_stays(bench: Workbench, shown: str) -> None:
    room, steps = HISTORIES[shown]
    history = History(bench, room)
    for step in steps.split(", "):
        history.step(step)
    for source in history.sources:
        history.store.close_source(source)
    if not re.search("lose|miss|expire|restart|rebuild|limit", steps):
        left = sum(map(history.has, history.named))
        assert history.store.stats.segments_evicted == len(history.named) - left
