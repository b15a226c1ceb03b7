"""Option scores of a server against transformers' own forward pass over the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.core.servers import BenchFailed
from bench.quality.client import Answer
from bench.quality.tasks import Task

# Largest difference of an option's log-likelihood in nats that is rounding.
TOLERANCE = {"float32": 0.01, "bfloat16": 1.0, "float16": 1.0}


def check_scores(
    model: Path, dtype: str, answers: Sequence[tuple[Task, list[Answer]]], questions: int
) -> float:
    """Compare the first questions of each task with options.

    Args:
        model: folder of the model.
        dtype: of the server.
        answers: tasks and exact answers to all of their items.
        questions: how many of each task to compare.

    Returns:
        The largest difference in nats.

    Raises:
        BenchFailed: it is more than rounding.
    """
    import torch
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    largest = 0.0
    for task, given in answers:
        if task.generates:
            continue
        for item, answer in list(zip(task.items, given, strict=True))[:questions]:
            context = [*task.prefixes[item.prefix], *item.question]
            for option, loglik in zip(item.options, answer.logliks, strict=True):
                expected = loglik_of(loaded, context, option)
                largest = max(largest, abs(expected - loglik))
    if largest > TOLERANCE[dtype]:
        raise BenchFailed(f"option scores differ from transformers' by {largest:.3f} nats")
    return largest


def loglik_of(model: Any, context: Sequence[int], option: Sequence[int]) -> float:
    """Log-likelihood of an option after a context, in nats, by a model of transformers."""
    import torch

    with torch.inference_mode():
        logits = model(torch.tensor([[*context, *option]])).logits[0, len(context) - 1 : -1]
        logprobs = logits.double().log_softmax(dim=-1)
        return float(logprobs.gather(1, torch.tensor(option)[:, None]).sum())
