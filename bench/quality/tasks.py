"""Tasks: shared prefixes, and questions whose answer is one of some options.

A prompt is T(prefix) + T(question) + T(" " + option), each tokenised on its own, so that all
prompts of a prefix begin with the same tokens. Questions are never shots, of any prefix of a task.
Everything is drawn by the seed.

    piqa, rte, copa, openbookqa   few-shot multiple choice (the paper's tasks)
    squad                         passages, then a question; 4 answers to questions on them
    completion, signature         a file of Python's standard library, then what follows some lines
                                  of its rest, of 4 lines of the file, or the parameters of a
                                  function, of 4 functions of the file
"""

from __future__ import annotations

import argparse
import ast
import random
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.core.data import READERS, SEPARATOR, Question, Row, Tokenize, read_rows
from bench.core.session import BenchFailed

SQUAD, SQUAD_DATA = "squad", "squad_xquad_en"
COMPLETION, SIGNATURE = "completion", "signature"
TASKS = ("piqa", "rte", "copa", "openbookqa", SQUAD, COMPLETION, SIGNATURE)
# Their log-likelihoods are divided by the options' bytes.
NORMALISED = ("piqa", "openbookqa")
# Examples of a prefix, and passages of one of squad.
SHOTS, PASSAGES = 10, 10
SQUAD_INTRODUCTION = "Answer the questions about these passages."
OPTIONS = 4
# Solved questions that are never asked (their place in the drawn order).
SQUAD_SHOTS = 3
# Of a file that is a prefix, and of a line or parameters that can be told from others.
CODE_CHARACTERS, TELLING = 7000, 12
# Lines before the one that is asked for.
CODE_LINES = 8
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
        args: the options `data`, `seed`, `examples` and `prefixes`.

    Raises:
        BenchFailed: the data is missing or too small, or a prefix is too short to be stored.
    """
    dataset = SQUAD_DATA if name == SQUAD else name
    rng = random.Random(f"{dataset} {args.seed}")
    if name in (COMPLETION, SIGNATURE):
        groups = _code_groups(name, rng, args)
    elif name == SQUAD:
        groups = _squad_groups(read_rows(args.data, dataset), rng, args)
    else:
        drawn = [READERS[name](row) for row in _shuffled(read_rows(args.data, dataset), rng)]
        groups = _few_shot_groups(drawn, args)
    prefixes, items = [], []
    for place, (text, questions) in enumerate(groups):
        prefixes.append(prefix := tokenize(text))
        if len(prefix) < MIN_PREFIX_TOKENS:
            raise BenchFailed(
                f"{name}: a prefix has {len(prefix)} tokens, and none shorter than "
                f"{MIN_PREFIX_TOKENS} is stored"
            )
        for question in questions:
            options = tuple(tokenize(f" {option}") for option in question.options)
            sizes = tuple(len(option.encode()) for option in question.options)
            items.append(Item(place, tokenize(question.text), options, sizes, question.gold))
    return Task(name, prefixes, items)


def _few_shot_groups(drawn: Sequence[Question], args: argparse.Namespace) -> list[_Group]:
    """Prefixes of shots, with questions that are no shots."""
    if len(drawn) < args.examples + args.prefixes * SHOTS:
        raise BenchFailed(f"{len(drawn)} rows are too few for so many --examples and --prefixes")
    asked, count, groups = drawn[: args.examples], args.prefixes, list[_Group]()
    for i in range(count):
        shots = drawn[args.examples + i * SHOTS :][:SHOTS]
        part = asked[len(asked) * i // count : len(asked) * (i + 1) // count]
        groups.append(("".join(question.shot + SEPARATOR for question in shots), part))
    return groups


def _squad_groups(
    rows: Sequence[Row], rng: random.Random, args: argparse.Namespace
) -> list[_Group]:
    """Passages, with questions on them."""
    of_passage: dict[str, list[Row]] = {}
    for row in rows:
        of_passage.setdefault(row["context"], []).append(row)
    contexts = _shuffled([*of_passage], rng)

    def groups() -> Iterator[_Group]:
        for start in range(0, len(contexts) - PASSAGES + 1, PASSAGES):
            chosen = contexts[start : start + PASSAGES]
            on_them = [row for context in chosen for row in of_passage[context]]
            drawn = [_squad_question(row, on_them, rng) for row in _shuffled(on_them, rng)]
            yield SEPARATOR.join([SQUAD_INTRODUCTION, *chosen, ""]), drawn[SQUAD_SHOTS:]

    return _enough(groups(), SQUAD, args)


def _enough(groups: Iterable[_Group], name: str, args: argparse.Namespace) -> list[_Group]:
    """As many as have all questions; more than asked if some have too few."""
    found, missing = list[_Group](), args.examples
    each = -(-args.examples // args.prefixes)
    for text, questions in groups:
        found.append((text, questions[: min(each, missing)]))
        missing -= len(found[-1][1])
        if not missing:
            return found
    raise BenchFailed(f"{name} has {missing} questions less than {args.examples} --examples")


def _code_groups(name: str, rng: random.Random, args: argparse.Namespace) -> list[_Group]:
    """Beginnings of files, with questions on them."""
    folder = Path(sysconfig.get_path("stdlib"))
    questions_of = _completions if name == COMPLETION else _signatures

    def groups() -> Iterator[_Group]:
        for path in _shuffled(sorted(folder.glob("*.py")), rng):
            text = path.read_text(encoding="utf-8")
            end = text.find("\n", CODE_CHARACTERS) + 1
            if end > 0 and (questions := questions_of(text[:end], text[end:], rng)):
                yield text[:end], questions

    return _enough(groups(), name, args)


def _completions(shown: str, rest: str, rng: random.Random) -> list[Question]:
    """Which line follows some lines of the rest of a file."""
    known: dict[int, set[str]] = {}
    for line in shown.splitlines():
        known.setdefault(len(line) - len(line.lstrip()), set()).add(line.strip())
    lines, found = rest.splitlines(), []
    for place in _shuffled(range(CODE_LINES, len(lines)), rng):
        gold = lines[place].strip()
        depth = len(lines[place]) - len(lines[place].lstrip())
        before = "\n".join(lines[place - CODE_LINES : place])
        others = {line for line in known.get(depth, ()) if len(line) >= TELLING} - {gold}
        if depth and len(gold) >= TELLING and len(others) >= OPTIONS:
            # The option brings the last space.
            text = f"{before}\n{' ' * (depth - 1)}"
            found.append(_one_of(text, gold, others, rng))
    return found


def _signatures(shown: str, rest: str, rng: random.Random) -> list[Question]:
    """Which parameters a function of the shown part of a file has."""
    nodes = [
        node for node in ast.walk(ast.parse(shown + rest)) if isinstance(node, ast.FunctionDef)
    ]
    last = shown.count("\n")
    told = [(node.name, f"({ast.unparse(node.args)})") for node in nodes if node.lineno < last]
    names = [name for name, _ in told]
    return [
        _one_of(f"\n\n# The parameters of {name}() above are:", gold, others, rng)
        for name, gold in _shuffled(told, rng)
        if names.count(name) == 1
        and len(gold) >= TELLING
        and len(others := {other for _, other in told if len(other) >= TELLING} - {gold}) >= OPTIONS
    ]


def _one_of(text: str, gold: str, others: Iterable[str], rng: random.Random) -> Question:
    options = [gold, *rng.sample(sorted(others), OPTIONS - 1)]
    rng.shuffle(options)
    return Question(text, tuple(options), options.index(gold))


def _squad_question(row: Row, on_them: Sequence[Row], rng: random.Random) -> Question:
    gold = row["answers"][0]
    others = {other["answers"][0].lower(): other["answers"][0] for other in on_them}
    for answer in row["answers"]:
        others.pop(answer.lower(), None)
    return _one_of(f"Question: {row['question']}\nAnswer:", gold, others.values(), rng)


def _shuffled(values: Sequence[Any], rng: random.Random) -> list[Any]:
    return rng.sample(list(values), len(values))
