"""Questions with options, asked of a server: one request per option, and what comes of it.

Each answer must say that it came about as was asked (`check_path`): a prefix that was not read from
SSD, or another number of tokens, ends the run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from bench.core.report import Row
from bench.core.servers import Server
from bench.core.session import BenchFailed
from bench.quality.tasks import NORMALISED, Item, Task
from impress_sglang.options import BITS, EXACTLY


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """How a system is asked; `retention` None leaves it to the server.

    `approximate` systems must read the prefix from SSD and use a part of it, or all of it in so
    many `bits`, which requests share.
    """

    system: str
    retention: float | None
    approximate: bool
    bits: float | None = None

    @property
    def custom(self) -> dict[str, Any]:
        """The request's `custom_params`."""
        if self.retention is None:
            return {}
        custom: dict[str, Any] = {"impress_retention": self.retention}
        if self.bits is None and self.retention >= 1.0:
            custom["impress_bits"] = EXACTLY
        elif self.bits in BITS:
            # Those of a basis are what a server gives that has one.
            custom["impress_bits"] = self.bits
        return custom


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """Log-likelihood of each option in nats, and `meta_info["impress"]` of each request."""

    logliks: list[float]
    reports: list[Row]


def ask(server: Server, task: Task, asked: Asked, concurrency: int) -> list[Answer]:
    """Answers to all items of a task, in order.

    Raises:
        BenchFailed: a request failed, or was not served as asked.
    """
    with ThreadPoolExecutor(concurrency) as pool:
        return list(
            pool.map(
                lambda item: _answer(server, task.prefixes[item.prefix], item, asked), task.items
            )
        )


def _answer(server: Server, prefix: Sequence[int], item: Item, asked: Asked) -> Answer:
    logliks, reports = [], []
    for option in item.options:
        answer = server.generate(
            [*prefix, *item.question, *option],
            custom=asked.custom,
            return_logprob=True,
            # The first entry belongs to the last token of the question and has no value. An
            # earlier start would also keep SGLang from using the whole prefix.
            logprob_start_len=len(prefix) + len(item.question) - 1,
        )
        meta = answer["meta_info"]
        logliks.append(option_loglik(meta, option))
        check_path(meta["impress"], len(prefix), asked)
        reports.append(meta["impress"])
    return Answer(logliks, reports)


def option_loglik(meta_info: Mapping[str, Any], option: Sequence[int]) -> float:
    """Log-likelihood of an option in nats.

    Raises:
        BenchFailed: the log-probabilities are not those of the option's tokens.
    """
    entries = meta_info["input_token_logprobs"][1:]
    tokens = [entry[1] for entry in entries]
    if tokens != list(option):
        raise BenchFailed(f"asked for log-probabilities of {list(option)}, got those of {tokens}")
    total = math.fsum(entry[0] for entry in entries)
    if not math.isfinite(total):
        raise BenchFailed(f"the log-probabilities of an option sum up to {total}")
    return total


def chosen_option(task: str, item: Item, logliks: Sequence[float]) -> int:
    """Place of the most likely option, the first of equals; per byte if the task is normalised."""
    sizes = item.option_bytes if task in NORMALISED else (1,) * len(logliks)
    values = [value / max(1, size) for value, size in zip(logliks, sizes, strict=True)]
    return values.index(max(values))


def centred_shift(
    logliks: Sequence[Sequence[float]], reference: Sequence[Sequence[float]]
) -> float:
    """Mean absolute difference of centred option log-likelihoods, in nats.

    Args:
        logliks: [n][options] of a system.
        reference: [n][options] of the same questions.
    """
    shifts = [
        float(np.abs((one - one.mean()) - (other - other.mean())).mean())
        for one, other in zip(map(np.array, logliks), map(np.array, reference), strict=True)
    ]
    return float(np.mean(shifts))


def check_path(report: Mapping[str, Any], prefix_tokens: int, asked: Asked) -> None:
    """Check that a request used its prefix as the system must.

    Raises:
        BenchFailed: it did not; the message says what came instead.
    """
    path, stored, loaded = (report[name] for name in ("path", "stored_tokens", "loaded_tokens"))
    came = f"path {path}, {loaded} of {stored} stored tokens, prefix of {prefix_tokens}"
    if report["recomputed"]:
        raise BenchFailed(f"{asked.system}: a stored prefix was recomputed ({came})")
    if not asked.approximate:
        if report["approximate"] or (path == "ssd" and loaded != stored):
            raise BenchFailed(f"{asked.system}: an exact request was answered inexactly ({came})")
        return
    if asked.bits is not None:
        # Of its class: who finds the prefix resident, or the beginning that it shares with others,
        # has loaded no more than the rest.
        right = report["approximate"] and stored + report["resident_tokens"] >= prefix_tokens
        if not right or report["bits"] < asked.bits - 0.5:
            raise BenchFailed(f"{asked.system}: asked for all tokens in few bits, got {came}")
        return
    assert asked.retention is not None
    # The same rounding as the server's, which forgives 0.1 * 30 > 3.
    wanted = max(1, math.ceil(asked.retention * stored - 1e-9))
    if path != "ssd" or stored < prefix_tokens or loaded != wanted:
        raise BenchFailed(
            f"{asked.system}, retention {asked.retention:g}: asked for path ssd with {wanted} of "
            f"{max(stored, prefix_tokens)} tokens, got {came}"
        )
