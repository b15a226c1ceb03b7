"""What `bench accuracy` sends to a server, and what it takes from the answers.

A question with options is one request per option, scored by the log-probabilities of the option's
tokens; any other is one greedy generation. Each answer must say that it came about as was asked
(`check_path`): a prefix that was not read from SSD, or another number of tokens, ends the run.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests

from bench.core.servers import REQUEST_SECONDS, BenchFailed
from bench.quality.tasks import Item, Task
from impress_sglang.options import EXACTLY

Report = dict[str, Any]


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


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """Answer to an item.

    Attributes:
        logliks: log-likelihood of each option in nats; empty where the answer was generated.
        text: what was generated, else empty.
        reports: `meta_info["impress"]` of each of its requests.
        milliseconds: mean time of its requests.
    """

    logliks: list[float]
    text: str
    reports: list[Report]
    milliseconds: float


class QualityClient:
    """Sends the requests of a task to one server, several at a time."""

    def __init__(self, url: str, concurrency: int) -> None:
        self._url = f"{url}/generate"
        self._concurrency = concurrency
        self._local = threading.local()

    def store(self, prefix: Sequence[int], retention: float | None) -> None:
        """Let the server compute a prefix, and so store it.

        Args:
            prefix: token ids.
            retention: 1 where the system would use a part of a stored beginning of the prefix,
                since what is computed after that is not stored; None for exact systems.

        Raises:
            BenchFailed: the request failed.
        """
        params = _sampling(1, (), retention, None)
        self._post({"input_ids": list(prefix), "sampling_params": params})

    def ask(self, task: Task, asked: Asked, on_done: Callable[[], None]) -> list[Answer]:
        """Answers to all items of a task, in order.

        Raises:
            BenchFailed: a request failed, or was not served as asked.
        """
        with ThreadPoolExecutor(self._concurrency) as pool:
            pending = [pool.submit(self._answer, task, item, asked) for item in task.items]
            try:
                answers = []
                for future in pending:
                    answers.append(future.result())
                    on_done()
                return answers
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _answer(self, task: Task, item: Item, asked: Asked) -> Answer:
        prefix = task.prefixes[item.prefix]
        if task.generates:
            orders = [generation_order(prefix, item, asked, task.new_tokens, task.stop)]
        else:
            orders = [option_order(prefix, item, option, asked) for option in item.options]
        began = time.monotonic()
        answers = [self._post(order) for order in orders]
        elapsed_ms = (time.monotonic() - began) * 1e3
        reports = [report_of(answer["meta_info"]) for answer in answers]
        for report in reports:
            check_path(report, len(prefix), asked)
        pairs = zip(answers, item.options, strict=True) if item.options else ()
        return Answer(
            logliks=[option_loglik(answer["meta_info"], option) for answer, option in pairs],
            text=answers[0]["text"] if task.generates else "",
            reports=reports,
            milliseconds=elapsed_ms / len(orders),
        )

    def _post(self, order: Mapping[str, Any]) -> dict[str, Any]:
        try:
            response = self._session().post(self._url, json=order, timeout=REQUEST_SECONDS)
            if not response.ok:
                raise BenchFailed(f"a request failed: {response.status_code} {response.text[:500]}")
            answer: dict[str, Any] = response.json()
        except requests.RequestException as error:
            raise BenchFailed(f"a request failed: {error}") from error
        reason = answer["meta_info"]["finish_reason"] or {}
        if reason.get("type") not in ("length", "stop"):
            raise BenchFailed(f"a request did not finish: {reason}")
        return answer

    def _session(self) -> requests.Session:
        if not hasattr(self._local, "session"):
            self._local.session = requests.Session()
            # A proxy of the environment does not know this machine's loopback.
            self._local.session.trust_env = False
        session: requests.Session = self._local.session
        return session


def option_order(
    prefix: Sequence[int], item: Item, option: Sequence[int], asked: Asked
) -> dict[str, Any]:
    """Body of `POST /generate` that scores one option."""
    return {
        "input_ids": [*prefix, *item.question, *option],
        "sampling_params": _sampling(1, (), asked.retention, asked.bits),
        "return_logprob": True,
        # The first entry belongs to the last token of the question and has no value. An earlier
        # start would also keep SGLang from using the whole prefix.
        "logprob_start_len": len(prefix) + len(item.question) - 1,
    }


def generation_order(
    prefix: Sequence[int], item: Item, asked: Asked, new_tokens: int, stop: Sequence[str]
) -> dict[str, Any]:
    """Body of `POST /generate` for a greedy answer."""
    return {
        "input_ids": [*prefix, *item.question],
        "sampling_params": _sampling(new_tokens, stop, asked.retention, asked.bits),
    }


def option_loglik(meta_info: Mapping[str, Any], option: Sequence[int]) -> float:
    """Log-likelihood of an option in nats, from the answer to `option_order`.

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


def report_of(meta_info: Mapping[str, Any]) -> Report:
    """What the extension says of a request.

    Raises:
        BenchFailed: it says nothing, so it is not active.
    """
    try:
        return dict(meta_info["impress"])
    except KeyError as error:
        raise BenchFailed("an answer has no meta_info['impress']; is the extension on?") from error


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
        right = report["approximate"] and stored >= prefix_tokens
        if not right or report["bits_mean"] < asked.bits - 0.5:
            raise BenchFailed(f"{asked.system}: asked for all tokens in few bits, got {came}")
        return
    assert asked.retention is not None
    # The same rounding as the server's, which forgives 0.1 * 30 > 3.
    wanted = max(1, math.ceil(asked.retention * stored - 1e-9))
    if path != "ssd" or stored < prefix_tokens or loaded != wanted:
        raise BenchFailed(
            f"{asked.system}, retention {asked.retention:g}: asked for path ssd with "
            f"{wanted} of {max(stored, prefix_tokens)} tokens, got {came}; does this server "
            "support impress_retention in custom_params?"
        )


def _sampling(
    new_tokens: int, stop: Sequence[str], retention: float | None, bits: float | None
) -> dict[str, Any]:
    params: dict[str, Any] = {"temperature": 0, "max_new_tokens": new_tokens}
    if stop:
        params["stop"] = list(stop)
    if retention is not None:
        own: dict[str, Any] = {"impress_retention": retention}
        if bits is not None or retention >= 1.0:
            own["impress_bits"] = EXACTLY if bits is None else bits
        params["custom_params"] = own
    return params
