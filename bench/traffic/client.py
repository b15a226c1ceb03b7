"""SGLang's own client, `bench_serving`, against stock SGLang, HiCache and IMPRESS.

Its data set `generated-shared-prefix` has --groups with a system prompt each, behind which
--prompts are asked in a random order, with --turns each: what was said is part of the next prompt.
The device pool has room for --pool-share of them all, and memory on the host is as large.

Columns: median TTFT in ms and its 99th percentile; prompt and answer tokens per second; p99 of the
time between tokens in ms; share of the prompt tokens that were cached; MB read and written; median
and mean TTFT as multiples of the first system's (paired bootstrap over requests).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.core.data import model_folder
from bench.core.options import Option
from bench.core.report import Result, Row, Table
from bench.core.servers import Server
from bench.core.session import BenchFailed
from bench.traffic.systems import OPTIONS as SYSTEMS
from bench.traffic.systems import PAGE_TOKENS, measure

OPTIONS = (
    Option("groups", 12, "system prompts", quick=3),
    Option("prompts", 8, "of each group", quick=3),
    Option("turns", 1, "of each prompt"),
    Option("system-tokens", 1500, "of a system prompt", quick=300),
    Option("question-tokens", 64, "of a question", quick=32),
    Option("answer-tokens", 16, "of an answer", quick=8),
    Option("at-once", 4, "requests under way"),
    Option("pool-share", 0.25, "room of the device pool, and as much on the host"),
    Option("client-flag", None, "one more flag for the client", repeated=True),
    *SYSTEMS,
)
# The pool holds what is under way at least, and its answers.
SPARE = 1.3


def run(args: argparse.Namespace) -> Result:
    """Ask all systems, at all rates."""
    model = model_folder(args.model)
    turn = args.question_tokens + args.answer_tokens
    prompt = args.system_tokens + args.turns * turn
    whole = args.groups * (args.system_tokens + args.prompts * args.turns * turn)
    room = int(max(args.pool_share * whole, SPARE * args.at_once * prompt))
    room += PAGE_TOKENS - room % PAGE_TOKENS
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(args, model, room, lambda server: ask(args, server, Path(folder), model))
    return Result(figures, [Table(figures["rows"])])


def ask(args: argparse.Namespace, server: Server, folder: Path, model: Path) -> Row:
    """One run of the client; TTFTs are in the order of the requests."""
    found = folder / "client.jsonl"
    found.unlink(missing_ok=True)
    # Turns are a chat's.
    backend = "sglang" if args.turns == 1 else "sglang-oai-chat"
    command = [sys.executable, "-m", "sglang.bench_serving", f"--backend={backend}"]
    command += [f"--base-url={server.url}", f"--model={model}", f"--output-file={found}"]
    command += ["--dataset-name=generated-shared-prefix", f"--gsp-num-groups={args.groups}"]
    command += [f"--gsp-prompts-per-group={args.prompts}", f"--gsp-num-turns={args.turns}"]
    command += [f"--gsp-system-prompt-len={args.system_tokens}", "--output-details"]
    command += [f"--gsp-question-len={args.question_tokens}", "--cache-report", "--disable-tqdm"]
    command += [f"--gsp-output-len={args.answer_tokens}", f"--max-concurrency={args.at_once}"]
    command += ["--warmup-requests=0", f"--seed={args.seed}", *args.client_flag]
    # It keeps its prompts under its home.
    variables = os.environ | {"HOME": str(folder), "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    if ended.returncode or not found.exists():
        raise BenchFailed(f"bench_serving failed: {(ended.stderr or ended.stdout)[-2000:]}")
    told: dict[str, Any] = json.loads(found.read_text())
    if any(told["errors"]):
        raise BenchFailed(f"a request failed: {next(filter(None, told['errors']))}")
    return {
        "requests": told["completed"],
        "ttft_p50": round(told["median_ttft_ms"], 1),
        "ttft_p99": round(told["p99_ttft_ms"], 1),
        "tokens_per_s": round(told["total_throughput"], 1),
        "itl_p99": round(told["p99_itl_ms"], 1),
        "cached": round(told["cache_report"]["cache_hit_rate_pct"] / 100, 4),
        "ttfts": [round(ttft * 1e3, 2) for ttft in told["ttfts"]],
    }
