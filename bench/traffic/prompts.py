"""What is asked: the demo's handbook with questions, and random tokens."""

from __future__ import annotations

import random
from pathlib import Path

from bench.core.data import load_tokenize
from demo.handbook import prompt

QUESTIONS = (
    "When does the workshop open?",
    "Where are wicks woven?",
    "What is the company dog called?",
    "How is silver polished?",
    "Where are bicycles parked?",
    "When does the doctor come?",
    "Who carries the order books in case of fire?",
    "How long does the winter model burn?",
)
# Ids of ordinary words of the demo's model.
FIRST_ID, LAST_ID = 100, 40000


def draw(chance: random.Random, count: int) -> list[int]:
    """So many token ids."""
    return chance.choices(range(FIRST_ID, LAST_ID), k=count)


class Handbook:
    """Prompts about the handbook, of about 3,000 tokens, in the chat form of the demo's model."""

    def __init__(self, model: Path) -> None:
        self._tokenize = load_tokenize(model)

    def ask(self, question: str) -> list[int]:
        """All tokens of a question."""
        return self._tokenize(prompt(question))

    def go_on(self, question: str) -> list[int]:
        """What comes after an answer to ask another question."""
        return self._tokenize(
            f"<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        )
