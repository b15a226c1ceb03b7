"""Tasks: shared prefixes, and questions whose answer is one of some options.

A prompt is T(prefix) + T(question) + T(" " + option), each tokenised on its own, so that all
prompts of a prefix begin with the same tokens. Questions are never shots, of any prefix of a task.
Everything is drawn by the seed.

    piqa, rte, copa, openbookqa   few-shot multiple choice (the paper's tasks)
    squad                         passages, then a question; 4 answers to questions on them
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from bench.core.data import READERS, SEPARATOR, Question, Row, Tokenize, fitting_shots, read_rows
from bench.core.session import BenchFailed

_T = TypeVar("_T")
PAPER_TASKS = ("piqa", "rte", "copa", "openbookqa")
SQUAD, SQUAD_DATA = "squad", "squad_xquad_en"
TASKS = (*PAPER_TASKS, SQUAD)
# Their log-likelihoods are divided by the options' bytes.
NORMALISED = ("piqa", "openbookqa")
SQUAD_INTRODUCTION = "Answer the questions about these passages."
SQUAD_OPTIONS = 4
# Solved questions that are never asked (their place in the drawn order).
SQUAD_SHOTS = 3
# Shortest prefix that the servers store.
MIN_PREFIX_TOKENS = 64


@dataclasses.dataclass(frozen=True, slots=True)
class TaskOptions:
    """Size of a task; `prefix_tokens`, if given, decides the number of shots instead of `shots`."""

    prefixes: int
    shots: int
    prefix_tokens: int | None
    passages: int
    examples: int
    seed: int


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """A question as token ids; `prefix` is the place of its prefix in `Task.prefixes`."""

    prefix: int
    question: list[int]
    options: tuple[list[int], ...]
    option_bytes: tuple[int, ...]
    gold: int


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
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
_Group = tuple[str, list[Question]]


def make_task(name: str, data: Path | None, tokenize: Tokenize, options: TaskOptions) -> Task:
    """Draw one of `TASKS`.

    Raises:
        BenchFailed: the data is missing or too small, or a prefix is too short to be stored.
    """
    dataset = SQUAD_DATA if name == SQUAD else name
    rows, rng = read_rows(data, dataset), random.Random(f"{dataset} {options.seed}")
    if name == SQUAD:
        groups = _squad_groups(rows, rng, options)
    else:
        drawn = [READERS[name](row) for row in _shuffled(rows, rng)]
        groups = _few_shot_groups(drawn, tokenize, options)
    prefixes, items = [], []
    for place, (text, questions) in enumerate(groups):
        prefix = tokenize(text)
        if len(prefix) < MIN_PREFIX_TOKENS:
            raise BenchFailed(
                f"{name}: a prefix has {len(prefix)} tokens, and none shorter than "
                f"{MIN_PREFIX_TOKENS} is stored; give more --shots"
            )
        prefixes.append(prefix)
        items += [_item(place, question, tokenize) for question in questions]
    return Task(name, prefixes, items)


def _item(prefix: int, question: Question, tokenize: Tokenize) -> Item:
    return Item(
        prefix=prefix,
        question=tokenize(question.text),
        options=tuple(tokenize(f" {option}") for option in question.options),
        option_bytes=tuple(len(option.encode()) for option in question.options),
        gold=question.gold,
    )


def _few_shot_groups(
    drawn: Sequence[Question], tokenize: Tokenize, options: TaskOptions
) -> list[_Group]:
    """Prefixes of shots, with questions that are no shots."""
    if len(drawn) <= options.examples:
        raise BenchFailed(f"{len(drawn)} rows are too few for {options.examples} examples")
    shots = iter(drawn[options.examples :])
    asked, count = drawn[: options.examples], options.prefixes
    return [
        (
            _few_shot_text(shots, tokenize, options),
            list(asked[len(asked) * i // count : len(asked) * (i + 1) // count]),
        )
        for i in range(count)
    ]


def _few_shot_text(shots: Iterator[Question], tokenize: Tokenize, options: TaskOptions) -> str:
    if options.prefix_tokens is not None:
        chosen = fitting_shots(shots, tokenize, options.prefix_tokens)
    elif len(chosen := list(itertools.islice(shots, options.shots))) < options.shots:
        raise BenchFailed("too few rows for so many --examples, --prefixes and --shots")
    return "".join(question.shot + SEPARATOR for question in chosen)


def _squad_groups(rows: Sequence[Row], rng: random.Random, options: TaskOptions) -> list[_Group]:
    """Passages, with questions on them; more prefixes than asked if they have too few questions."""
    of_passage: dict[str, list[Row]] = {}
    for row in rows:
        of_passage.setdefault(row["context"], []).append(row)
    contexts = _shuffled(list(of_passage), rng)
    each = -(-options.examples // options.prefixes)
    groups: list[_Group] = []
    missing = options.examples
    for start in range(0, len(contexts) - options.passages + 1, options.passages):
        chosen = contexts[start : start + options.passages]
        on_them = [row for context in chosen for row in of_passage[context]]
        drawn = [_squad_question(row, on_them, rng) for row in _shuffled(on_them, rng)]
        questions = drawn[SQUAD_SHOTS:][: min(each, missing)]
        groups.append((SEPARATOR.join([SQUAD_INTRODUCTION, *chosen, ""]), questions))
        missing -= len(questions)
        if not missing:
            return groups
    raise BenchFailed(f"squad has {missing} questions less than {options.examples} --examples")


def _squad_question(row: Row, on_them: Sequence[Row], rng: random.Random) -> Question:
    gold = row["answers"][0]
    others = {other["answers"][0].lower(): other["answers"][0] for other in on_them}
    for answer in row["answers"]:
        others.pop(answer.lower(), None)
    if len(others) < SQUAD_OPTIONS - 1:
        raise BenchFailed(
            "squad: too few different answers on these passages; give more --passages"
        )
    options = [gold, *rng.sample(sorted(others.values()), SQUAD_OPTIONS - 1)]
    rng.shuffle(options)
    return Question(f"Question: {row['question']}\nAnswer:", tuple(options), options.index(gold))


def _shuffled(values: Sequence[_T], rng: random.Random) -> list[_T]:
    return rng.sample(list(values), len(values))
