"""Clients of the randomised run: each asks one thing after another, and judges the answers."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Sequence
from typing import Any

import requests

from tests.serving.traffic import MIXED, Ask, Talk, TalkFailed, have_talk
from tests.serving.world import KILL, World

PART = 0.25
# Longer than any fault lasts.
PATIENCE_SECONDS = 120
# How often each kind of request is asked, and each way to ask it.
KINDS = {
    "plain": 10,
    "logprob": 2,
    "many": 2,
    "json": 1,
    "beam": 3,
    "score": 1,
    "override": 2,
    "talk": 1,
}
# How a request ends whose prefix is damaged, where it is loaded in the pass.
ASK_AGAIN = "its prefix cannot be loaded; ask again"
# What is counted then.
ENDED_IN_PASS = "ended in the pass"
# Of these each request is answered, and its answer has its report.
REPORTED = ("plain", "logprob", "json")
WAYS = {"whole": 8, "part": 3, "bits": 2, "blend": 3, "abort": 1, "hang up": 1}
# What a request asks for: all as it was computed, a part in few bits, all in few bits, or
# with what is stored elsewhere.
WISHES: dict[str, dict[str, Any]] = {
    "whole": {"impress_retention": 1.0, "impress_bits": "exact"},
    "part": {"impress_retention": PART},
    "bits": {"impress_retention": 1.0, "impress_bits": 6},
    "blend": {"impress_retention": 1.0, "impress_bits": 6, "impress_blend": 0.15},
}

COUNTED = ("approximate", "prefix_tokens", "loaded_tokens", "blended_tokens", "ssd_bytes")

# What SGLang says when requests are retracted, which lives here do on purpose.
NOT_RETRACTED = "Beam groups cannot be retracted"


class Client(threading.Thread):
    """Asks until it is stopped.

    `usual` is what a request gets that asks for nothing, a key of `WISHES`; `without` are those of
    which the server has none.
    """

    def __init__(
        self,
        world: World,
        name: str,
        seed: str,
        usual: str,
        kinds: Sequence[str],
        without: Sequence[str],
    ) -> None:
        super().__init__(name=name)
        self._world, self._usual = world, usual
        self._ways = {way: often for way, often in WAYS.items() if way not in without}
        self._wishes = [way for way in self._ways if way in WISHES]
        self._chance = random.Random(seed)
        self._kinds = {kind: KINDS[kind] for kind in kinds}
        self._asked = 0
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.is_set():
            with self._world.request():
                try:
                    self._ask_something()
                except Exception as error:
                    self._world.problem(f"{self.name}: {type(error).__name__}: {error}")

    def _ask_something(self) -> None:
        if self.stopped.is_set():
            return
        kinds, ways = self._kinds, self._ways
        if self._world.only_reported:
            kinds = {kind: kinds.get(kind, 1) for kind in REPORTED}
            ways = {way: WAYS[way] for way in self._wishes}
        (kind,) = self._chance.choices(list(kinds), list(kinds.values()))
        (way,) = self._chance.choices(list(ways), list(ways.values()))
        self._asked += 1
        # An abort is for all ids that begin like its own.
        rid = f"{self.name}-{self._asked}."
        if kind == "talk":
            self._talk(self._chance.choice(self._world.catalogue.talks), rid)
            return
        asks = self._world.catalogue.of_kind(kind)
        if kind == "plain" and way == "blend":
            asks = [ask for ask in asks if ask.name.startswith(MIXED)]
        ask = self._chance.choice(asks)
        self._world.note(f"{rid} {way} {ask.name}")
        if way == "hang up" and ask.may_be_partial:
            self._hang_up(ask, rid)
        elif way == "abort" and ask.may_be_partial:
            self._ask(ask, rid, self._load_options(*self._wishes), give_up=True)
        else:
            self._ask(ask, rid, self._load_options(way if way in WISHES else "whole"))

    def _load_options(self, *ways: str) -> str | None:
        """What a request asks for: sometimes nothing, where that is the same."""
        way = self._chance.choice(ways)
        says_so = way != self._usual or self._chance.random() < 0.5
        return way if says_so else None

    def _is_exact(self, ask: Ask, wanted: str | None) -> bool:
        asked = wanted if ask.may_be_partial else None
        return (asked or self._usual) == "whole"

    def _ask(self, ask: Ask, rid: str, wanted: str | None, *, give_up: bool = False) -> None:
        """`give_up`: meanwhile; what is answered before is answered right."""
        began = time.monotonic()
        fields = {"rid": rid} if ask.kind not in ("many", "score", "override") else {}
        if give_up:
            seconds, abort = self._chance.random() * 0.4, ("/abort_request", began)
            late = threading.Timer(seconds, self._post, abort, {"rid": rid})
            late.start()
        response = self._post(ask.route, began, **ask.with_fields(_custom(wanted), **fields))
        if give_up:
            late.join()
        if response is None:
            return
        if give_up and "abort" in response.text.lower():
            self._world.count("aborted")
        elif ask.kind == "beam" and NOT_RETRACTED in response.text:
            self._world.count("beams that SGLang ended")
        elif ASK_AGAIN in response.text:
            self._world.count(ENDED_IN_PASS)
        elif not response.ok:
            self._world.problem(f"{rid} {ask.name}: {response.status_code} {response.text[:300]}")
        else:
            told = response.json()
            if ask.kind in REPORTED:
                self._world.count("answers")
                self._world.count("tokens sent", len(ask.body["input_ids"]))
            self._count_report(told)
            self._world.judge(ask, told, began, exact=self._is_exact(ask, wanted))

    def _hang_up(self, ask: Ask, rid: str) -> None:
        """Go away before the answer is complete."""
        assert self._world.server is not None
        wanted = self._load_options(*self._wishes)
        fields: dict[str, Any] = {"stream": True} if ask.kind in ("plain", "logprob") else {}
        patience = 0.02 + self._chance.random() * 0.3
        with (
            contextlib.suppress(requests.RequestException),
            requests.post(
                self._world.server.url + ask.route,
                json=ask.with_fields(_custom(wanted), **fields),
                stream=True,
                timeout=(PATIENCE_SECONDS, patience),
            ) as response,
        ):
            next(response.iter_content(64), None)
        self._world.count("hung up")

    def _talk(self, talk: Talk, session: str) -> None:
        began = time.monotonic()
        (way,) = self._chance.choices(self._wishes, [WAYS[way] for way in self._wishes])
        wanted = self._load_options(way)
        self._world.note(f"{session} {way} {talk.name}")
        try:
            answers = have_talk(self._must_post, talk, session, _custom(wanted))
        except (TalkFailed, requests.RequestException) as error:
            if ASK_AGAIN not in str(error) and not self._world.is_disturbed(KILL, began):
                self._world.problem(f"{session} {talk.name}: {error}")
            return
        exact = (wanted or self._usual) == "whole"
        # The second turn of other weights goes on from the answer of the first.
        exact = exact and len(self._world.weights_since(began)) == 1
        stock = {w: a for (name, w), a in self._world.catalogue.talked.items() if name == talk.name}
        self._world.judge_answer(talk.name, answers, stock, began, exact=exact)
        if exact:
            self._world.count("compared talk")

    def _must_post(self, route: str, **body: Any) -> requests.Response:
        assert self._world.server is not None
        url = self._world.server.url + route
        return requests.post(url, json=body, timeout=PATIENCE_SECONDS)

    def _post(self, route: str, began: float, **body: Any) -> requests.Response | None:
        """An answer, or None where the server was killed."""
        try:
            return self._must_post(route, **body)
        except requests.RequestException as error:
            if not self._world.is_disturbed(KILL, began):
                self._world.problem(f"{route}: {type(error).__name__}: {error}")
            return None

    def _count_report(self, told: Any) -> None:
        for sequence in told if isinstance(told, list) else [told]:
            report = sequence.get("meta_info", {}).get("impress", {})
            if report:
                self._world.count(f"path {report['path']}")
                for field in COUNTED:
                    self._world.count(field, int(report[field]))


def _custom(wanted: str | None) -> dict[str, Any] | None:
    return None if wanted is None else WISHES[wanted]
