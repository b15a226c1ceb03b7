"""What IMPRESS costs requests that have no use for it: throughput with and without.

    python -m bench overhead [--pairs 60] [--json bench/results/overhead-<machine>.json]

Two servers are up at the same time, stock SGLang and the same with --enable-impress, both with the
same rectangular attention on a CPU. The same fresh prompts go to one and then to the other, many
short rounds, in an order that is drawn for each pair, so that what else the machine does hits both.

  short    prompts below --impress-min-prefix-tokens: the store is never asked, nothing is stored
  unshared longer prompts of which no two begin alike: each is written to SSD at first sight

Printed are the median of the throughput with IMPRESS over that without, pair by pair, and a 95%
confidence interval of the median (bootstrap).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests

from bench.core.machine import describe_machine
from bench.core.servers import BenchFailed, Server, Setup, running, server_environment
from bench.core.session import interrupt_on_signals, work_folder
from bench.core.zygote import Zygote

STOCK = "bench.core.stock_server"
VOCAB = 4000
WARM_UP_ROUNDS = 4
RESAMPLES = 4000
REQUEST_SECONDS = 300


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """A round: so many requests with prompts of [shortest, longest] tokens and so many new ones."""

    name: str
    requests: int
    shortest: int
    longest: int
    new_tokens: int

    def prompts(self, chance: random.Random) -> list[list[int]]:
        """Token ids that nobody has seen before."""
        lengths = [chance.randint(self.shortest, self.longest) for _ in range(self.requests)]
        return [chance.choices(range(3, VOCAB), k=length) for length in lengths]


WORKLOADS = (
    Workload("short", requests=16, shortest=16, longest=120, new_tokens=16),
    Workload("unshared", requests=8, shortest=300, longest=600, new_tokens=16),
)


class Client:
    """Sends rounds of requests, some at a time."""

    def __init__(self, concurrency: int) -> None:
        self._pool = ThreadPoolExecutor(concurrency)
        self._sessions: dict[str, list[requests.Session]] = {}

    def seconds(self, server: Server, prompts: Sequence[list[int]], new_tokens: int) -> float:
        """How long it takes until all prompts are answered.

        Raises:
            BenchFailed: one was not.
        """
        began = time.perf_counter()
        for _ in self._pool.map(lambda p: self._ask(server.url, p, new_tokens), prompts):
            pass
        return time.perf_counter() - began

    def _ask(self, url: str, prompt: list[int], new_tokens: int) -> None:
        free = self._sessions.setdefault(url, [])
        session = free.pop() if free else requests.Session()
        session.trust_env = False
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling}
        answer = session.post(f"{url}/generate", json=body, timeout=REQUEST_SECONDS)
        if not answer.ok or answer.json()["meta_info"]["completion_tokens"] != new_tokens:
            raise BenchFailed(f"a request failed: {answer.text[:300]}")
        free.append(session)


def main() -> None:
    args = _parse_arguments()
    interrupt_on_signals()
    try:
        result = _measure(args)
    except BenchFailed as error:
        sys.exit(f"bench.micro.overhead: {error}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="default: a small one, see make_small_model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--pairs", type=int, default=60, help="rounds on each server")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--pool-tokens", type=int, default=16000)
    parser.add_argument("--seed", type=int, default=1)
    names = [workload.name for workload in WORKLOADS]
    parser.add_argument("--only", choices=names, help="one workload")
    parser.add_argument(
        "--stock-twice",
        action="store_true",
        help="compare stock with itself: what the method says where there is no difference",
    )
    parser.add_argument("--keep", type=Path, help="keep logs in this empty folder")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    return parser.parse_args()


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {
        "machine": describe_machine(),
        "options": {name: str(value) for name, value in vars(args).items()},
        "workloads": {},
    }
    with work_folder(args.keep, "overhead") as folder, _servers(args, folder) as servers:
        client = Client(args.concurrency)
        for workload in WORKLOADS:
            if args.only in (None, workload.name):
                found = _compare(args, client, servers, workload)
                result["workloads"][workload.name] = found
                print(json.dumps({workload.name: _brief(found)}), flush=True)
        if not args.stock_twice:
            _check_use(servers["impress"].stats(), result["workloads"])
    return result


def make_small_model(folder: Path) -> Path:
    """Save a model with random weights whose steps take about 10 ms on two cores.

    That is what a step of a large model takes on a GPU, so that what IMPRESS does on the
    scheduler's thread weighs as much as it does there.
    """
    import torch
    import transformers

    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=8192,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return folder


@contextlib.contextmanager
def _servers(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, Server]]:
    """Both servers, one with IMPRESS."""
    model = args.model or make_small_model(folder / "model")
    setup = Setup(model, args.dtype, 0.25, args.pool_tokens, args.concurrency)
    # There is no tokenizer, and nothing to say in text.
    both = [] if args.model else ["--skip-tokenizer-init"]
    flags = ["--enable-impress", f"--impress-ssd-dir={folder / 'store'}"]
    with contextlib.ExitStack() as stack:
        zygote = Zygote(server_environment())
        stack.callback(zygote.close)

        def start(name: str, flags: list[str], preload: str | None) -> Server:
            log = folder / f"{name}.log"
            flags = [*both, *flags]
            return stack.enter_context(running(zygote, setup, log, flags, preload=preload))

        second = start("second", [], STOCK) if args.stock_twice else start("impress", flags, None)
        yield {"stock": start("stock", [], STOCK), "impress": second}


def _compare(
    args: argparse.Namespace, client: Client, servers: dict[str, Server], workload: Workload
) -> dict[str, Any]:
    chance = random.Random(f"{args.seed} {workload.name}")
    seconds: dict[str, list[float]] = {name: [] for name in servers}
    for number in range(-WARM_UP_ROUNDS, args.pairs):
        prompts = workload.prompts(chance)
        order = sorted(servers)
        chance.shuffle(order)
        for name in order:
            taken = client.seconds(servers[name], prompts, workload.new_tokens)
            if number >= 0:
                seconds[name].append(taken)
    pairs = zip(seconds["stock"], seconds["impress"], strict=True)
    ratios = [stock / impress for stock, impress in pairs]
    low, high = confidence_interval(ratios, args.seed)
    return {
        "throughput_ratio": statistics.median(ratios),
        "interval_95": [low, high],
        "median_seconds": {name: statistics.median(taken) for name, taken in seconds.items()},
        "pairs": len(ratios),
        "ratios": [round(ratio, 4) for ratio in ratios],
    }


def confidence_interval(values: Sequence[float], seed: int) -> tuple[float, float]:
    """A 95% interval of the median, by bootstrap."""
    chance = random.Random(seed)
    medians = sorted(
        statistics.median(chance.choices(values, k=len(values))) for _ in range(RESAMPLES)
    )
    return medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)]


def _brief(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name != "ratios"}


def _check_use(stats: dict[str, Any], workloads: dict[str, Any]) -> None:
    """The workloads did with the store what they are said to do."""
    stored = int(stats["store"]["segments"])
    if ("unshared" in workloads) != (stored > 0):
        raise BenchFailed(f"{stored} segments were stored by {', '.join(workloads)}")


if __name__ == "__main__":
    main()
