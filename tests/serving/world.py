"""What is known of a server under random traffic, and whether an answer fits to it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

from tests.serving.harness import Server
from tests.serving.traffic import NEW_TOKENS, Answer, Ask, Catalogue, read_answer

# Disturbances. KILL: requests may fail. MIXED: resident KVs are of other weights than the server's.
KILL = "kill"
MIXED = "mixed"


@dataclasses.dataclass
class Span:
    """From when to when something was the case."""

    what: str
    began: float
    ended: float = math.inf

    def overlaps(self, began: float, ended: float) -> bool:
        return self.began <= ended and began <= self.ended


class World:
    """The server that clients talk to, what is done to it, and what was found; thread-safe."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self.server: Server | None = None
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.operations: deque[str] = deque(maxlen=200)
        self.only_reported = False
        """Whether nothing may be asked but what is answered with one report each."""
        self.retracts = False
        """Whether the server takes requests out and puts them back."""
        self.outcome = threading.Lock()
        """Held while weights change: what that does to answers is known when it is over."""
        self._lock = threading.RLock()
        self._began = time.monotonic()
        self._disturbances: list[Span] = []
        self._weights: list[Span] = []
        self._calm = threading.Condition()
        self._under_way = 0
        self._paused = False

    # Requests and those who want none under way

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Around each request: waits while the world is paused."""
        with self._calm:
            self._calm.wait_for(lambda: not self._paused)
            self._under_way += 1
        try:
            yield
        finally:
            with self._calm:
                self._under_way -= 1
                self._calm.notify_all()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Nothing is asked for the time of a `with` block."""
        with self._calm:
            self._paused = True
            calm = self._calm.wait_for(lambda: not self._under_way, timeout=180)
        try:
            if not calm:
                self.problem("requests do not end")
            yield
        finally:
            with self._calm:
                self._paused = False
                self._calm.notify_all()

    # What happens

    def note(self, text: str) -> None:
        """Remember an operation, for who reads about a failure."""
        with self._lock:
            self.operations.append(f"{time.monotonic() - self._began:8.2f} {text}")

    def count(self, what: str, by: int = 1) -> None:
        with self._lock:
            self.counts[what] += by

    def problem(self, text: str) -> None:
        with self._lock:
            self.problems.append(text)
            self.note(f"PROBLEM {text}")

    @contextlib.contextmanager
    def disturbed(self, kind: str, began: float | None = None) -> Iterator[None]:
        """A disturbance until the end of a `with` block, from its beginning or from `began` on."""
        span = Span(kind, time.monotonic() if began is None else began)
        with self._lock:
            self._disturbances.append(span)
        try:
            yield
        finally:
            span.ended = time.monotonic()

    def may_have(self, weights: str) -> Span:
        """From now on the server may have these weights, beside those that it had."""
        span = Span(weights, time.monotonic())
        with self._lock:
            self._weights.append(span)
        return span

    def must_have(self, weights: str) -> None:
        """From now on the server has these weights and no others."""
        now = time.monotonic()
        with self._lock:
            for span in self._weights:
                span.ended = min(span.ended, now)
            self._weights.append(Span(weights, now))

    def weights_since(self, began: float) -> set[str]:
        """Weights that the server may have had since then."""
        now = time.monotonic()
        with self._lock:
            return {span.what for span in self._weights if span.overlaps(began, now)}

    # What is right

    def judge(self, ask: Ask, told: Any, began: float, *, exact: bool) -> None:
        # After a retraction stock SGLang 0.5.23, too, mixes up the prompts' log-probabilities of a
        # batch. Those of generated tokens are right.
        start = -NEW_TOKENS if self.retracts and ask.kind == "logprob" else 0
        stock = {w: [a] for (name, w), a in self.catalogue.answers.items() if name == ask.name}
        sequences = told if isinstance(told, list) else [told]
        self.judge_answer(
            ask.name,
            [read_answer(ask, told).since(start)],
            {
                weights: [answer.since(start) for answer in right]
                for weights, right in stock.items()
            },
            began,
            exact=exact,
            said=str([sequence.get("meta_info", {}).get("impress") for sequence in sequences]),
        )
        if exact:
            self.count(f"compared {ask.kind}")

    def judge_answer(
        self,
        name: str,
        answers: list[Answer],
        stock: dict[str, list[Answer]],
        began: float,
        *,
        exact: bool,
        said: str = "",
    ) -> None:
        """Compare answers with stock's, by the weights that the server may have had.

        `said` is what the server told of where the answer came from.
        """
        ended = time.monotonic()
        if not exact or self.is_disturbed(MIXED, began):
            self._check_form(name, answers, next(iter(stock.values())))
            return
        found = {w: _difference(stock[w], answers) for w in self.weights_since(began)}
        if not all(found.values()):
            return
        with self.outcome:
            mixed = self.is_disturbed(MIXED, began, ended)
        if not mixed:
            self.problem(f"{name} differs: {found} {said}")

    def is_disturbed(self, kind: str, began: float, ended: float | None = None) -> bool:
        """Whether something was going on since a request began; `ended`: None for now."""
        ended = time.monotonic() if ended is None else ended
        with self._lock:
            return any(s.what == kind and s.overlaps(began, ended) for s in self._disturbances)

    def _check_form(self, name: str, answers: list[Answer], like: list[Answer]) -> None:
        """An answer is of the right kind, whatever it says."""
        shapes = [(len(answer.tokens), len(answer.scores)) for answer in answers]
        expected = [(len(answer.tokens), len(answer.scores)) for answer in like]
        numbers = [number for answer in answers for number in (*answer.numbers, *answer.scores)]
        if shapes != expected or any(math.isnan(number) for number in numbers):
            self.problem(f"{name} is malformed: {answers}")
        self.count("looked at only")


def _difference(expected: list[Answer], answers: list[Answer]) -> str:
    if len(expected) != len(answers):
        return f"{len(answers)} answers instead of {len(expected)}"
    differences = [a.difference(b) for a, b in zip(expected, answers, strict=True)]
    return "; ".join(difference for difference in differences if difference)
