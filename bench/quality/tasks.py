"""Tasks of `bench accuracy`: shared prefixes, and questions with options or reference answers.

A prompt is T(prefix) + T(question) + T(" " + option), each tokenised on its own, so that all
prompts of a prefix begin with the same tokens. Questions are never shots, of any prefix of a task.
Everything is drawn by the seed.

    piqa, rte, copa, openbookqa   few-shot multiple choice (the paper's tasks)
    squad                         passages, then a question; 4 answers to questions on them
    squad-f1                      the same, after a few solved ones; the answer is generated
    bbh, gsm8k                    few-shot chain of thought; the answer is generated
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from bench.core.servers import BenchFailed
from bench.quality.data import Row, read_rows
from bench.quality.formats import (
    Question,
    read_bbh,
    read_copa,
    read_gsm8k,
    read_openbookqa,
    read_piqa,
    read_rte,
)

Tokenize = Callable[[str], list[int]]
_T = TypeVar("_T")
PAPER_TASKS = ("piqa", "rte", "copa", "openbookqa")
SEPARATOR = "\n\n"
SQUAD_INTRODUCTION = "Answer the questions about these passages."
SQUAD_OPTIONS = 4
# Solved questions after the passages, without which a small model gives no answer at all.
SQUAD_SHOTS = 3
GSM8K_SHOTS = 8
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
    references: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """Prefixes (token ids) and items, those of a prefix together."""

    name: str
    prefixes: list[list[int]]
    items: list[Item]
    normalised: bool = False
    new_tokens: int = 0
    stop: tuple[str, ...] = ()

    @property
    def generates(self) -> bool:
        """Whether answers are generated, not chosen."""
        return self.new_tokens > 0

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with what it generates."""
        tails = [
            (item, max((len(option) for option in item.options), default=0)) for item in self.items
        ]
        return max(
            len(self.prefixes[item.prefix]) + len(item.question) + tail + max(1, self.new_tokens)
            for item, tail in tails
        )


# A prefix as text, and the questions to it.
_Group = tuple[str, list[Question]]


def make_task(name: str, data: str, tokenize: Tokenize, options: TaskOptions) -> Task:
    """Draw a task.

    Args:
        name: a key of `TASKS`.
        data: a folder or `hf:NAME`, see `bench data`.
        tokenize: text to token ids, without special tokens.
        options: its size and seed.

    Raises:
        BenchFailed: the data is missing or too small, or a prefix is too short to be stored.
    """
    spec = TASKS[name]
    rows = read_rows(data, spec.dataset)
    rng = random.Random(f"{spec.dataset} {options.seed}")
    groups = spec.groups(rows, tokenize, rng, options)
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
    return Task(name, prefixes, items, spec.normalised, spec.new_tokens, spec.stop)


def _item(prefix: int, question: Question, tokenize: Tokenize) -> Item:
    return Item(
        prefix=prefix,
        question=tokenize(question.text),
        options=tuple(tokenize(f" {option}") for option in question.options),
        option_bytes=tuple(len(option.encode()) for option in question.options),
        gold=question.gold,
        references=question.references,
    )


def _few_shot_groups(read: Callable[[Row], Question]) -> Callable[..., list[_Group]]:
    """Prefixes of shots, with questions that are no shots."""

    def groups(
        rows: Sequence[Row], tokenize: Tokenize, rng: random.Random, options: TaskOptions
    ) -> list[_Group]:
        drawn = [read(row) for row in _shuffled(rows, rng)]
        if len(drawn) <= options.examples:
            raise BenchFailed(f"{len(drawn)} rows are too few for {options.examples} examples")
        shots = iter(drawn[options.examples :])
        return [
            (_few_shot_text(shots, tokenize, options), questions)
            for questions in _split(drawn[: options.examples], options.prefixes)
        ]

    return groups


def _few_shot_text(shots: Iterator[Question], tokenize: Tokenize, options: TaskOptions) -> str:
    text, count, tokens = "", 0, 0
    while (
        count < options.shots if options.prefix_tokens is None else tokens < options.prefix_tokens
    ):
        shot = next(shots, None)
        if shot is None:
            raise BenchFailed("too few rows for so many --examples, --prefixes and --shots")
        added = shot.shot + SEPARATOR
        text, count, tokens = text + added, count + 1, tokens + len(tokenize(added))
    return text


def _squad_groups(with_options: bool) -> Callable[..., list[_Group]]:
    """Passages, with questions on them; more prefixes than asked if they have too few questions."""

    def groups(
        rows: Sequence[Row], tokenize: Tokenize, rng: random.Random, options: TaskOptions
    ) -> list[_Group]:
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
            text = SEPARATOR.join([SQUAD_INTRODUCTION, *chosen, ""])
            if not with_options:
                text += "".join(shot.shot + SEPARATOR for shot in drawn[:SQUAD_SHOTS])
                questions = [dataclasses.replace(q, options=()) for q in questions]
            groups.append((text, questions))
            missing -= len(questions)
            if not missing:
                return groups
        raise BenchFailed(f"squad has {missing} questions less than {options.examples} --examples")

    return groups


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
    text = f"Question: {row['question']}\nAnswer:"
    return Question(text, tuple(options), options.index(gold), tuple(row["answers"]))


def _bbh_groups(
    rows: Sequence[Row], tokenize: Tokenize, rng: random.Random, options: TaskOptions
) -> list[_Group]:
    prompts = {row["task"]: row["prompt"] for row in rows}
    names = rng.sample(sorted(prompts), min(options.prefixes, len(prompts)))
    groups: list[_Group] = []
    for name, share in zip(names, _split(range(options.examples), len(names)), strict=True):
        # Shots of the prompt may be rows of the test.
        unseen = [
            row for row in rows if row["task"] == name and row["input"].strip() not in prompts[name]
        ]
        if len(unseen) < len(share):
            raise BenchFailed(f"bbh: {name} has fewer than {len(share)} questions")
        questions = [read_bbh(row) for row in rng.sample(unseen, len(share))]
        groups.append((prompts[name].rstrip() + SEPARATOR, questions))
    return groups


def _gsm8k_groups(
    rows: Sequence[Row], tokenize: Tokenize, rng: random.Random, options: TaskOptions
) -> list[_Group]:
    first = GSM8K_SHOTS * options.prefixes
    if len(rows) < first + options.examples:
        raise BenchFailed(f"gsm8k: {len(rows)} rows are too few")
    drawn = rng.sample(list(rows[first:]), options.examples)
    groups: list[_Group] = []
    for place, chosen in enumerate(_split(drawn, options.prefixes)):
        shots = rows[GSM8K_SHOTS * place : GSM8K_SHOTS * (place + 1)]
        text = "".join(read_gsm8k(row).shot + SEPARATOR for row in shots)
        groups.append((text, [dataclasses.replace(read_gsm8k(row), options=()) for row in chosen]))
    return groups


def _shuffled(values: Sequence[_T], rng: random.Random) -> list[_T]:
    return rng.sample(list(values), len(values))


def _split(values: Sequence[_T], parts: int) -> list[list[_T]]:
    """Cut into consecutive parts of nearly the same length."""
    return [
        list(values[len(values) * i // parts : len(values) * (i + 1) // parts])
        for i in range(parts)
    ]


@dataclasses.dataclass(frozen=True, slots=True)
class TaskSpec:
    """A kind of task; `normalised` divides log-likelihoods by the options' bytes."""

    dataset: str
    groups: Callable[..., list[_Group]]
    normalised: bool = False
    new_tokens: int = 0
    stop: tuple[str, ...] = ()


TASKS: dict[str, TaskSpec] = {
    "piqa": TaskSpec("piqa", _few_shot_groups(read_piqa), normalised=True),
    "rte": TaskSpec("rte", _few_shot_groups(read_rte)),
    "copa": TaskSpec("copa", _few_shot_groups(read_copa)),
    "openbookqa": TaskSpec("openbookqa", _few_shot_groups(read_openbookqa), normalised=True),
    "squad": TaskSpec("squad_xquad_en", _squad_groups(True)),
    "squad-f1": TaskSpec("squad_xquad_en", _squad_groups(False), new_tokens=16, stop=("\n",)),
    "bbh": TaskSpec("bbh", _bbh_groups, new_tokens=96, stop=(SEPARATOR,)),
    "gsm8k": TaskSpec("gsm8k", _gsm8k_groups, new_tokens=96, stop=(SEPARATOR,)),
}
