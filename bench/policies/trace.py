"""The trace that all policies answer: shared prefixes, and who asks when.

A prefix is few-shot examples of one data set. A request is a prefix and a question of the same data
set that is not among any prefix's examples. Which prefix it takes is drawn from a normal
distribution over the prefixes, as in section 6.1 of the paper. Equal options give equal traces.
"""

from __future__ import annotations

import dataclasses
import itertools
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bench.core.data import SEPARATOR, Question, Tokenize, fitting_shots
from bench.core.session import BenchFailed

# What is new in a request is stored too, as a chunk of its own, unless it is shorter than one.
MAX_QUESTION_TOKENS = 63
# Below it nearly all requests would be for one prefix.
MIN_SIGMA = 0.25
# Share of a data set's examples that are asked and never shown.
_ASKED_SHARE = 0.3


@dataclasses.dataclass(frozen=True, slots=True)
class TraceOptions:
    """What determines a trace, beside its data; `sigma` is in prefixes."""

    prefixes: int
    prefix_tokens: int
    warmup: int
    settle: int
    requests: int
    sigma: float
    seed: int


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """A prefix by its number, and all tokens of a question after it."""

    prefix: int
    tokens: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Trace:
    """Prefixes as tokens, and the requests in their order: warm-up, second warm-up, measured."""

    prefixes: list[tuple[int, ...]]
    warmup: list[Request]
    settle: list[Request]
    measured: list[Request]

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest request."""
        asked = (*self.warmup, *self.settle, *self.measured)
        return max(len(request.tokens) for request in asked)

    def describe(self) -> dict[str, Any]:
        """What a result says of its trace."""
        counts = Counter(request.prefix for request in self.measured)
        return {
            "prefix_lengths": [len(prefix) for prefix in self.prefixes],
            "longest_prompt": self.longest_prompt,
            "measured_requests_per_prefix": [counts[i] for i in range(len(self.prefixes))],
        }


def make_trace(
    datasets: Mapping[str, Sequence[Question]], tokenize: Tokenize, options: TraceOptions
) -> Trace:
    """Build the trace; prefix i is of data set i modulo their number.

    Raises:
        BenchFailed: there are too few examples, or no two prefixes to take turns.
    """
    if options.prefixes < 2 or options.sigma < MIN_SIGMA:
        raise BenchFailed(f"a trace needs two prefixes and a sigma of at least {MIN_SIGMA}")
    rng = np.random.default_rng(options.seed)
    pools = [_Pool(name, rows, tokenize, rng) for name, rows in sorted(datasets.items())]
    prefixes = [
        pools[i % len(pools)].make_prefix(i, options.prefix_tokens) for i in range(options.prefixes)
    ]
    total = options.warmup + options.settle + options.requests
    draws = draw_prefixes(total, options.prefixes, options.sigma, rng)
    asked = [Request(i, prefixes[i] + next(pools[i % len(pools)].questions)) for i in draws]
    first, second = options.warmup, options.warmup + options.settle
    return Trace(prefixes, asked[:first], asked[first:second], asked[second:])


def draw_prefixes(count: int, prefixes: int, sigma: float, rng: np.random.Generator) -> list[int]:
    """Numbers of prefixes, normal around the middle one; what falls outside is drawn again.

    So is what equals the draw before it: the device pool holds the last request's prefix, and a
    repeat would not be loaded at all.
    """
    draws: list[int] = []
    while len(draws) < count:
        drawn = round(rng.normal((prefixes - 1) / 2, sigma))
        if 0 <= drawn < prefixes and (not draws or drawn != draws[-1]):
            draws.append(drawn)
    return draws


class _Pool:
    """The examples of a data set: some are shown in prefixes, the others are asked."""

    def __init__(
        self, name: str, examples: Sequence[Question], tokenize: Tokenize, rng: np.random.Generator
    ) -> None:
        self._name = name
        self._tokenize = tokenize
        self._rng = rng
        shuffled = [examples[i] for i in rng.permutation(len(examples))]
        cut = int(len(shuffled) * _ASKED_SHARE)
        self._shown = shuffled[cut:]
        asked = (tuple(tokenize(SEPARATOR + example.text)) for example in shuffled[:cut])
        short = [tokens for tokens in asked if len(tokens) <= MAX_QUESTION_TOKENS]
        if not short:
            raise BenchFailed(
                f"data set {name} has no question of at most {MAX_QUESTION_TOKENS} tokens to ask"
            )
        # They come round again when all were asked.
        self.questions = itertools.cycle(short)

    def make_prefix(self, number: int, length: int) -> tuple[int, ...]:
        """A heading, and as many examples as fit into `length` tokens."""
        # It begins like no other, so that prefixes have not even one token in common.
        heading = string.ascii_letters[number % 52] * (1 + number // 52)
        tokens = self._tokenize(f"{heading}. Examples of {self._name}")
        drawn = (self._shown[i] for i in self._rng.permutation(len(self._shown)))
        for question in fitting_shots(drawn, self._tokenize, length - len(tokens)):
            tokens = tokens + self._tokenize(SEPARATOR + question.shot)
        return tuple(tokens)
