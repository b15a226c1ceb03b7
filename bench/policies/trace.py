"""The trace that all policies answer: shared prefixes, and who asks when.

A prefix is few-shot examples of one data set. A request is a prefix and a question of the same data
set that is not among any prefix's examples. Which prefix it takes is drawn from a normal
distribution over the prefixes, as in section 6.1 of the paper. Equal options give equal traces.
"""

from __future__ import annotations

import argparse
import itertools
import string
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bench.core.data import SEPARATOR, Question, Tokenize
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
    pools = []
    for name, rows in sorted(datasets.items()):
        shuffled = [rows[i] for i in rng.permutation(len(rows))]
        cut = int(len(shuffled) * _ASKED_SHARE)
        texts = (tuple(tokenize(SEPARATOR + question.text)) for question in shuffled[:cut])
        # They come round again when all were asked.
        questions = itertools.cycle([text for text in texts if len(text) <= MAX_QUESTION_TOKENS])
        pools.append((name, shuffled[cut:], questions))
    takes = [pools[number % len(pools)] for number in range(args.prefixes)]
    prefixes = []
    for number, (name, shown, _) in enumerate(takes):
        # It begins like no other, so that prefixes have not even one token in common.
        heading = string.ascii_letters[number % 52] * (1 + number // 52)
        prefix = tokenize(f"{heading}. Examples of {name}")
        for place in rng.permutation(len(shown)):
            more = tokenize(SEPARATOR + shown[place].shot)
            if len(prefix) + len(more) > args.prefix_tokens:
                break
            prefix += more
        else:
            raise BenchFailed(f"{name} has too few rows for --prefix-tokens {args.prefix_tokens}")
        prefixes.append(tuple(prefix))
    parts = (args.warmup, args.settle, args.requests)
    draws = draw_prefixes(sum(parts), args.prefixes, args.sigma, rng)
    asked = iter([prefixes[i] + next(takes[i][2]) for i in draws])
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
