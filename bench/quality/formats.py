"""How a row of a data set becomes a question with options, or one whose answer is generated."""

from __future__ import annotations

import dataclasses
import re

from bench.quality.data import Row


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """A question as text; `options` are empty where the answer is generated."""

    text: str
    options: tuple[str, ...]
    gold: int
    references: tuple[str, ...] = ()

    @property
    def shot(self) -> str:
        """The question with its right answer."""
        return f"{self.text} {self.options[self.gold]}"


def read_gsm8k(row: Row) -> Question:
    """Chain of thought without calculator marks; the reference is the number."""
    reasoning, _, number = row["answer"].partition("####")
    steps = re.sub(r"<<.*?>>", "", reasoning).strip()
    answer = f"{steps} The answer is {number.strip()}."
    return Question(f"Question: {row['question']}\nAnswer:", (answer,), 0, (number.strip(),))


def read_piqa(row: Row) -> Question:
    """Two solutions of a goal."""
    options = (row["sol1"].strip(), row["sol2"].strip())
    return Question(f"Question: {row['goal']}\nAnswer:", options, row["label"])


def read_rte(row: Row) -> Question:
    """Whether the hypothesis follows from the premise."""
    text = f"{row['premise']}\nQuestion: {row['hypothesis']} True or False?\nAnswer:"
    return Question(text, ("True", "False"), int(row["label"] != "entailment"))


def read_copa(row: Row) -> Question:
    """Two causes or effects; the question is the sentence up to the conjunction."""
    because = {"cause": "because", "effect": "therefore"}[row["question"]]
    options = [row["choice1"], row["choice2"]]
    lowered = tuple(option[0].lower() + option[1:] for option in options)
    return Question(f"{row['premise'].strip().rstrip('.')} {because}", lowered, row["label"])


def read_openbookqa(row: Row) -> Question:
    """Four answers to a question."""
    return Question(f"Question: {row['question']}\nAnswer:", tuple(row["choices"]), row["label"])


def read_bbh(row: Row) -> Question:
    """A question whose answer is generated after a chain of thought."""
    text = f"Q: {row['input']}\nA: Let's think step by step.\n"
    return Question(text, (), -1, (row["target"],))
