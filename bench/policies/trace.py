"""The trace that all policies answer: shared prefixes, and who asks when.

A prefix is few-shot examples of one data set. A request is a prefix and a question of the same data
set that is not among any prefix's examples. Which prefix it takes is drawn from a normal
distribution over the prefixes, as in section 6.1 of the paper. Equal options give equal traces.
"""

from __future__ import annotations

import argparse
import itertools
import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bench.core.data import SEPARATOR, Question, Tokenize, fitting_shots
from bench.core.session import BenchFailed

# What is new in a request is stored too, as a chunk of its own, unless it is shorter than one.
MAX_QUESTION_TOKENS = 63
# Below it nearly all requests would be for one prefix.
MIN_SIGMA = 0.25
# Share of a data set's examples that are asked and never shown.
_ASKED_SHARE = 0.3
Tokens = tuple[int, ...]


class Trace(NamedTuple):
    """Prefixes and requests as tokens, these in their order: warm-up, second warm-up, measured."""

    prefixes: list[Tokens]
    warmup: list[Tokens]
    settle: list[Tokens]
    measured: list[Tokens]

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest request."""
        return max(map(len, (*self.warmup, *self.settle, *self.measured)))

    def describe(self) -> dict[str, Any]:
        """What a result says of its trace."""
        # No two prefixes begin alike.
        counts = Counter(tokens[0] for tokens in self.measured)
        return {
            "prefix_lengths": [len(prefix) for prefix in self.prefixes],
            "longest_prompt": self.longest_prompt,
            "measured_requests_per_prefix": [counts[prefix[0]] for prefix in self.prefixes],
        }


def make_trace(
    datasets: Mapping[str, Sequence[Question]], tokenize: Tokenize, args: argparse.Namespace
) -> Trace:
    """Build the trace; prefix i is of data set i modulo their number.

    Args:
        datasets: by name.
        tokenize: by the model's tokenizer.
        args: the options `prefixes`, `prefix_tokens`, `warmup`, `settle`, `requests` (how many of
            each), `sigma` (in prefixes) and `seed`.

    Raises:
        BenchFailed: there are too few examples, or no two prefixes to take turns.
    """
    if args.prefixes < 2 or args.sigma < MIN_SIGMA:
        raise BenchFailed(f"a trace needs two prefixes and a sigma of at least {MIN_SIGMA}")
    rng = np.random.default_rng(args.seed)
    pools = [_Pool(name, rows, tokenize, rng) for name, rows in sorted(datasets.items())]
    takes = [pools[number % len(pools)] for number in range(args.prefixes)]
    prefixes = [own.make_prefix(i, args.prefix_tokens) for i, own in enumerate(takes)]
    total = args.warmup + args.settle + args.requests
    draws = draw_prefixes(total, args.prefixes, args.sigma, rng)
    asked = iter([prefixes[i] + next(takes[i].questions) for i in draws])
    parts = (args.warmup, args.settle, args.requests)
    return Trace(prefixes, *(list(itertools.islice(asked, count)) for count in parts))


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
        self.questions: Iterator[Tokens] = itertools.cycle(short)

    def make_prefix(self, number: int, length: int) -> tuple[int, ...]:
        """A heading, and as many examples as fit into `length` tokens."""
        # It begins like no other, so that prefixes have not even one token in common.
        heading = string.ascii_letters[number % 52] * (1 + number // 52)
        tokens = self._tokenize(f"{heading}. Examples of {self._name}")
        drawn = (self._shown[i] for i in self._rng.permutation(len(self._shown)))
        for question in fitting_shots(drawn, self._tokenize, length - len(tokens)):
            tokens = tokens + self._tokenize(SEPARATOR + question.shot)
        return tuple(tokens)
