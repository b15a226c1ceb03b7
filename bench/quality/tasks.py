"""Tasks: shared prefixes, and questions whose answer is one of some options.

A prompt is T(prefix) + T(question) + T(" " + option), each tokenised on its own, so that all
prompts of a prefix begin with the same tokens. Questions are never shots, of any prefix of a task.
Everything is drawn by the seed.

    piqa, rte, copa, openbookqa   few-shot multiple choice (the paper's tasks)
    squad                         passages, then a question; 4 answers to questions on them
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from bench.core.data import READERS, SEPARATOR, Question, Row, Tokenize, read_rows
from bench.core.session import BenchFailed

SQUAD, SQUAD_DATA = "squad", "squad_xquad_en"
TASKS = ("piqa", "rte", "copa", "openbookqa", SQUAD)
# Their log-likelihoods are divided by the options' bytes.
NORMALISED = ("piqa", "openbookqa")
SQUAD_INTRODUCTION = "Answer the questions about these passages."
SQUAD_OPTIONS = 4
# Solved questions that are never asked (their place in the drawn order).
SQUAD_SHOTS = 3
# Shortest prefix that the servers store.
MIN_PREFIX_TOKENS = 64


class Item(NamedTuple):
    """A question as token ids; `prefix` is the place of its prefix in `Task.prefixes`."""

    prefix: int
    question: list[int]
    options: tuple[list[int], ...]
    option_bytes: tuple[int, ...]
    gold: int


class Task(NamedTuple):
    """Prefixes (token ids) and items, those of a prefix together."""

    name: str
    prefixes: list[list[int]]
    items: list[Item]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with one more."""
        return 1 + max(
            len(self.prefixes[item.prefix]) + len(item.question) + max(map(len, item.options))
            for item in self.items
        )


# A prefix as text, and the questions to it.
_Group = tuple[str, Sequence[Question]]


def make_task(name: str, tokenize: Tokenize, args: argparse.Namespace) -> Task:
    """Draw one of `TASKS`.

    Args:
        name: of the task.
        tokenize: by the model's tokenizer.
        args: the options `data`, `seed`, `examples`, `prefixes`, `shots` and `passages`.

    Raises:
        BenchFailed: the data is missing or too small, or a prefix is too short to be stored.
    """
    dataset = SQUAD_DATA if name == SQUAD else name
    rows, rng = read_rows(args.data, dataset), random.Random(f"{dataset} {args.seed}")
    if name == SQUAD:
        groups = _squad_groups(rows, rng, args)
    else:
        drawn = [READERS[name](row) for row in _shuffled(rows, rng)]
        groups = _few_shot_groups(drawn, args)
    prefixes, items = [], []
    for place, (text, questions) in enumerate(groups):
        prefixes.append(prefix := tokenize(text))
        if len(prefix) < MIN_PREFIX_TOKENS:
            raise BenchFailed(
                f"{name}: a prefix has {len(prefix)} tokens, and none shorter than "
                f"{MIN_PREFIX_TOKENS} is stored; give more --shots"
            )
        for own in questions:
            options = tuple(tokenize(f" {option}") for option in own.options)
            sizes = tuple(len(option.encode()) for option in own.options)
            items.append(Item(place, tokenize(own.text), options, sizes, own.gold))
    return Task(name, prefixes, items)


def _few_shot_groups(drawn: Sequence[Question], args: argparse.Namespace) -> list[_Group]:
    """Prefixes of shots, with questions that are no shots."""
    if len(drawn) <= args.examples:
        raise BenchFailed(f"{len(drawn)} rows are too few for {args.examples} examples")
    asked, shots, count = drawn[: args.examples], iter(drawn[args.examples :]), args.prefixes
    parts = (asked[len(asked) * i // count : len(asked) * (i + 1) // count] for i in range(count))
    return [(_few_shot_text(shots, args.shots), part) for part in parts]


def _few_shot_text(shots: Iterator[Question], count: int) -> str:
    if len(chosen := list(itertools.islice(shots, count))) < count:
        raise BenchFailed("too few rows for so many --examples, --prefixes and --shots")
    return "".join(question.shot + SEPARATOR for question in chosen)


def _squad_groups(
    rows: Sequence[Row], rng: random.Random, args: argparse.Namespace
) -> list[_Group]:
    """Passages, with questions on them; more prefixes than asked if they have too few questions."""
    of_passage: dict[str, list[Row]] = {}
    for row in rows:
        of_passage.setdefault(row["context"], []).append(row)
    contexts, groups, missing = _shuffled([*of_passage], rng), list[_Group](), args.examples
    each = -(-args.examples // args.prefixes)
    for start in range(0, len(contexts) - args.passages + 1, args.passages):
        chosen = contexts[start : start + args.passages]
        on_them = [row for context in chosen for row in of_passage[context]]
        drawn = [_squad_question(row, on_them, rng) for row in _shuffled(on_them, rng)]
        questions = drawn[SQUAD_SHOTS:][: min(each, missing)]
        groups.append((SEPARATOR.join([SQUAD_INTRODUCTION, *chosen, ""]), questions))
        missing -= len(questions)
        if not missing:
            return groups
    raise BenchFailed(f"squad has {missing} questions less than {args.examples} --examples")


def _squad_question(row: Row, on_them: Sequence[Row], rng: random.Random) -> Question:
    gold = row["answers"][0]
    others = {other["answers"][0].lower(): other["answers"][0] for other in on_them}
    for answer in row["answers"]:
        others.pop(answer.lower(), None)
    if len(others) < SQUAD_OPTIONS - 1:
        raise BenchFailed("squad: too few different answers on these passages; more --passages")
    options = [gold, *rng.sample(sorted(others.values()), SQUAD_OPTIONS - 1)]
    rng.shuffle(options)
    return Question(f"Question: {row['question']}\nAnswer:", tuple(options), options.index(gold))


def _shuffled(values: Sequence[Any], rng: random.Random) -> list[Any]:
    return rng.sample(list(values), len(values))
