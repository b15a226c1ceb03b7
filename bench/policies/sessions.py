"""Workloads of `bench simulate`: sessions of several turns, and requests over shared prefixes.

No data is read: lengths are drawn from distributions that were fitted to published statistics.

`sharegpt` follows what AttentionStore tells of 90,000 conversations (its sections 2.3 and 4.2,
Figure 2): 73% have more than one turn, 5.75 turns in the mean (geometric from the second turn on),
47% of the conversations are longer than 2,048 tokens and 30% longer than 4,096. Tokens of a turn
are log-normal, with a factor of the session: median 371, and a standard deviation of the logarithm
of 0.9 for the session and as much for the turn. Questions have 32% of them, by the 161 and 338
tokens of questions and answers that vLLM's paper tells (SOSP'23, Figure 11).

`mtbench101` has the turns of the 1,388 dialogues of that data set, and lengths in SmolLM2's tokens:
questions with a median of 13, answers of 51.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt


@dataclasses.dataclass(slots=True, eq=False)
class Item:
    """All KVs of a session or of a shared prefix, with what policies know of them.

    `level` is that of the tier where it is, or None; it is there from the time `ready` on. An item
    that is `held` stays. `waiting` has the requests for it in the order of the queue, and `inside`
    counts those in the window of a policy.
    """

    number: int
    bytes: int = 0
    level: int | None = None
    ready: float = 0.0
    held: bool = False
    entered: float = 0.0
    used: float = 0.0
    uses: int = 0
    log_score: float = -math.inf
    next_use: float = math.inf
    waiting: deque[Request] = dataclasses.field(default_factory=deque)
    inside: int = 0
    version: int = 0


@dataclasses.dataclass(slots=True, eq=False)
class Request:
    """A request for an item's `history` of tokens, a question and an answer; times in seconds.

    `kept` are the tokens of its item once it has ended; `next_use` is when the item is wanted
    again, unless that depends on the end of this request.
    """

    item: Item
    arrival: float
    history: int
    question: int
    answer: int
    kept: int
    next_use: float = math.inf
    # What a simulation notes: its place among all that were queued, how often it was overtaken and
    # by how many seconds, how many waited when it was admitted, where its history came from.
    position: int = -1
    queued: bool = False
    inside: bool = False
    overtaken: int = 0
    waited: float = 0.0
    behind: int = 0
    source: str | None = None
    admitted: float = 0.0
    first_token: float = 0.0


class Workload(Protocol):
    """The contract of what a simulation serves."""

    def first(self) -> Iterator[Request]:
        """Requests that wait for no answer, in any order."""
        ...

    def after(self, request: Request, now: float) -> Request | None:
        """What a client asks after an answer that ended at `now`."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Talk:
    """How people talk: chances of 1, 2, ... turns, medians of tokens, deviations of logarithms."""

    turns: tuple[float, ...]
    question: float
    answer: float
    turn_sigma: float
    session_sigma: float


_LAST = 1 / 6.5
TALKS = {
    "sharegpt": Talk(
        (0.27, *(0.73 * _LAST * (1 - _LAST) ** more for more in range(39))), 120, 251, 0.9, 0.9
    ),
    "mtbench101": Talk((0, 459, 554, 259, 107, 6, 3), 13, 51, 0.75, 0.0),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Sessions:
    """Sessions that begin as a Poisson process, and go on a while after each answer.

    `rate` is in sessions per second; pauses are exponential with the mean `think_seconds`. When a
    turn does not fit into the model's `window`, the older half of the history is dropped; the KVs
    of the rest stay valid, as in AttentionStore's section 3.4. A question takes at most a quarter
    of the window, and so does an answer.
    """

    talk: Talk
    count: int
    rate: float
    think_seconds: float
    window: int
    seed: int = 1
    _left: dict[int, list[tuple[int, int, float]]] = dataclasses.field(default_factory=dict)

    def first(self) -> Iterator[Request]:
        """The first turn of each session."""
        rng = np.random.default_rng(self.seed)
        chances = np.array(self.talk.turns) / sum(self.talk.turns)
        starts = np.cumsum(rng.exponential(1 / self.rate, self.count))
        turns = rng.choice(len(chances), self.count, p=chances) + 1
        for number, start in enumerate(starts.tolist()):
            factors = np.exp(
                self.talk.session_sigma * rng.normal()
                + self.talk.turn_sigma * rng.normal(size=(turns[number], 1))
            )
            medians = np.array([[self.talk.question, self.talk.answer]])
            lengths = np.clip(np.rint(medians * factors), 1, self.window // 4).astype(int)
            pauses = rng.exponential(self.think_seconds, turns[number])
            self._left[number] = [
                (*turn, pause)
                for turn, pause in zip(lengths.tolist(), pauses.tolist(), strict=True)
            ]
            question, answer, _ = self._left[number].pop()
            yield Request(Item(number), start, 0, question, answer, question + answer)

    def after(self, request: Request, now: float) -> Request | None:
        """The next turn of the session, if there is one."""
        left = self._left[request.item.number]
        if not left:
            return None
        question, answer, pause = left.pop()
        history = request.kept
        while history + question + answer > self.window:
            history //= 2
        kept = history + question + answer
        return Request(request.item, now + pause, history, question, answer, kept)


def zipf_weights(count: int, exponent: float) -> npt.NDArray[np.float64]:
    """How popular each of some prefixes is, by Zipf's law, the first one most; not normalized."""
    weights: npt.NDArray[np.float64] = (np.arange(count) + 1.0) ** -exponent
    return weights


@dataclasses.dataclass(frozen=True, slots=True)
class Shared:
    """Single requests over shared prefixes, a Poisson process of `rate` per second.

    Which prefix follows a Zipf law with the exponent `zipf`, or, if that is None, a normal
    distribution around the middle one with `sigma` in prefixes; a share of the requests, `unknown`,
    has a prefix that nobody has had and nobody will have.
    """

    requests: int
    prefixes: int
    rate: float
    zipf: float | None = 1.0
    sigma: float = 1.0
    unknown: float = 0.0
    prefix_tokens: int = 2000
    question: int = 60
    answer: int = 200
    seed: int = 1

    def first(self) -> Iterator[Request]:
        """All requests in their order."""
        rng = np.random.default_rng(self.seed)
        ranks = np.arange(self.prefixes)
        if self.zipf is not None:
            weights = zipf_weights(self.prefixes, self.zipf)
        else:
            weights = np.exp(-0.5 * ((ranks - (self.prefixes - 1) / 2) / self.sigma) ** 2)
        drawn = rng.choice(self.prefixes, self.requests, p=weights / weights.sum())
        arrivals = np.cumsum(rng.exponential(1 / self.rate, self.requests)).tolist()
        fresh = rng.random(self.requests) < self.unknown
        known = [Item(number) for number in range(self.prefixes)]
        items = [
            Item(self.prefixes + number) if fresh[number] else known[drawn[number]]
            for number in range(self.requests)
        ]
        lengths = (self.prefix_tokens, self.question, self.answer, self.prefix_tokens)
        next_use: dict[Item, float] = {}
        requests = []
        for item, arrival in zip(reversed(items), reversed(arrivals), strict=True):
            requests.append(Request(item, arrival, *lengths, next_use.get(item, math.inf)))
            next_use[item] = arrival
        return reversed(requests)

    def after(self, request: Request, now: float) -> Request | None:
        """Nothing."""
        return None
