"""Question-and-answer examples for few-shot prompts: from data sets on disk, or made.

A data set is a folder with JSONL files, `DIR/NAME/*.jsonl`; the names are those of `READERS`. Made
examples need no files: short stories with a sum, from a seed.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

MADE = "made"
SEPARATOR = "\n\n"

_NAMES = ("Ada", "Bruno", "Chiara", "Dmitri", "Elena", "Farid", "Greta", "Hassan")
_TOWNS = (
    "Aldermoor",
    "Brackwater",
    "Castelrosso",
    "Dunhaven",
    "Eastlake",
    "Fairmont",
    "Grenholm",
    "Harrowgate",
)
_PLACES = ("attic", "barn", "cellar", "depot", "garage", "harbour", "kiosk", "library")
_THINGS = ("apples", "bells", "candles", "drums", "eggs", "flags", "gloves", "hats")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August")


class TraceError(ValueError):
    """The data cannot give the trace that was asked for; the message says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Example:
    """A question, which ends where its answer begins; only a shot repeats the context."""

    question: str
    answer: str
    context: str = ""

    @property
    def shot(self) -> str:
        """The example as one of a few-shot prompt."""
        return f"{self.context}{self.question} {self.answer}"


def read_examples(folder: Path, name: str) -> list[Example]:
    """All examples of the data set `folder/name`.

    Raises:
        TraceError: there is no such data set, or it is of no known kind.
    """
    files = sorted((folder / name).glob("*.jsonl"))
    if name not in READERS or not files:
        raise TraceError(
            f"no data set {name!r} in {folder}; it must be one of {', '.join(READERS)} "
            "and a folder with .jsonl files"
        )
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return [READERS[name](json.loads(line)) for line in lines if line.strip()]


def make_examples(count: int, seed: int) -> list[Example]:
    """Made examples, all different, the same for the same seed."""
    rng = random.Random(f"examples {seed}")
    made: dict[str, Example] = {}
    while len(made) < count:
        example = _make_example(rng)
        made[example.question] = example
    return list(made.values())


def _make_example(rng: random.Random) -> Example:
    name, other = rng.sample(_NAMES, 2)
    thing, town, place = rng.choice(_THINGS), rng.choice(_TOWNS), rng.choice(_PLACES)
    day, month = rng.choice(_DAYS), rng.choice(_MONTHS)
    many, few = rng.randint(40, 99), rng.randint(2, 39)
    story, answer = rng.choice(
        [
            (
                f"On {day}, {name} left {many} {thing} in the {place} of {town}, and {other} took "
                f"{few} of them in {month}. How many {thing} are left?",
                many - few,
            ),
            (
                f"{name} from {town} sells {few} {thing} every {day} and keeps the rest, {many}, "
                f"in a {place}. How many {thing} did {name} have before the first {day}?",
                many + few,
            ),
            (
                f"The {place} in {town} has room for {many} boxes. {name} and {other} fill {few} "
                f"of them with {thing} in {month}. How many boxes stay empty?",
                many - few,
            ),
            (
                f"{other} paid {few} coins for {thing} at the {place}; {name} paid {many} coins on "
                f"a {day} in {month}. How many coins did both pay in {town}?",
                many + few,
            ),
        ]
    )
    return Example(f"Question: {story}\nAnswer:", str(answer))


def _read_rte(row: Mapping[str, Any]) -> Example:
    answer = "True" if row["label"] == "entailment" else "False"
    return Example(
        f"{row['premise']}\nQuestion: {row['hypothesis']} True or False?\nAnswer:", answer
    )


def _read_piqa(row: Mapping[str, Any]) -> Example:
    return Example(f"Question: {row['goal']}\nAnswer:", row[f"sol{row['label'] + 1}"])


def _read_openbookqa(row: Mapping[str, Any]) -> Example:
    return Example(f"Question: {row['question']}\nAnswer:", row["choices"][row["label"]])


def _read_copa(row: Mapping[str, Any]) -> Example:
    because = {"cause": "because", "effect": "therefore"}[row["question"]]
    choice: str = row[f"choice{row['label'] + 1}"]
    return Example(f"{row['premise'].rstrip('.')} {because}", choice[0].lower() + choice[1:])


def _read_squad(row: Mapping[str, Any]) -> Example:
    context = f"Passage: {row['context']}\n"
    return Example(f"Question: {row['question']}\nAnswer:", row["answers"][0], context)


READERS: dict[str, Callable[[Mapping[str, Any]], Example]] = {
    "rte": _read_rte,
    "piqa": _read_piqa,
    "openbookqa": _read_openbookqa,
    "copa": _read_copa,
    "squad_xquad_en": _read_squad,
}
