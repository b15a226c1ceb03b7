"""Accuracy when only a part of a prefix is used, in real SGLang servers.

    python -m bench accuracy --quick
    python -m bench accuracy --json run.json --plot figures
    python -m bench accuracy --tasks squad,squad-f1,bbh --systems paper,random --retentions 0.25,1
    python -m bench accuracy --join one.json other.json --plot figures

Each system gets a server with an empty store, which computes the prefixes and stores them; then the
device pool is emptied, and questions are asked that read their prefix back from SSD. Options are
scored by log-likelihood, answers to the other questions are generated. A request that did not use
its prefix as asked ends the run. Chunk caches are off, so bytes are those of the store.
With `--bits` all of a prefix is used in so many bits; requests share it in the device pool, and the
bytes are those of the first one of each prefix. The name of such a system ends with @ and the bits.
Accuracies, agreement with `recompute`, and byte shares have a row per system, retention and task,
with paired bootstrap intervals. System `random` is the negative control: a rule that does not
agree with `recompute` more than random tokens do (column "over random") has found nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.core.machine import describe_machine
from bench.core.plots import require_matplotlib
from bench.core.servers import SPARE_TOKENS, BenchFailed, Server, Setup, running, server_environment
from bench.core.session import interrupt_on_signals, load_tokenize, work_folder
from bench.core.zygote import Zygote
from bench.policies.comparison import step
from bench.quality import plots as quality_plots
from bench.quality import report as quality_report
from bench.quality.check import check_scores
from bench.quality.client import Asked, QualityClient
from bench.quality.merge import read_results
from bench.quality.multi_head import kv_bytes_per_token, kv_heads_of, multi_head_form, read_config
from bench.quality.options import System, command_of, parse_arguments
from bench.quality.report import Measured, ModelSize
from bench.quality.tasks import Task, TaskOptions, make_task
from demo.model import DemoModelMissing, model_path


def main() -> int:
    """Run the benchmark; returns the exit status."""
    args = parse_arguments(__doc__)
    interrupt_on_signals()
    out = Console(width=None if sys.stdout.isatty() else 170, highlight=False)
    progress = Console(stderr=True, highlight=False)
    try:
        result = read_results(args.join) if args.join else _run(args, progress)
        _publish(args, result, out)
    except KeyboardInterrupt:
        progress.print("interrupted", style="red")
        return 130
    except (BenchFailed, DemoModelMissing) as error:
        progress.print(f"benchmark failed: {error}", style="red", markup=False)
        return 1
    return 0


class Comparison:
    """One run: tasks, and a server for each system."""

    def __init__(
        self, setup: Setup, tasks: Sequence[Task], zygote: Zygote, folder: Path, console: Console
    ) -> None:
        self._setup = setup
        self._tasks = tasks
        self._zygote = zygote
        self._folder = folder
        self._console = console

    def measure(
        self,
        system: System,
        retentions: Sequence[float],
        bits: Sequence[float],
        extra_flags: list[str],
    ) -> list[Measured]:
        """Ask one system all questions at each retention, and before the last in all bits.

        Retentions must not decrease.

        Raises:
            BenchFailed: a request failed, or was not served as asked.
        """
        store = self._folder / f"store-{system.name}"
        log = self._folder / f"{system.name}.log"
        flags = system.server_flags(store, extra_flags)
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, store, ignore_errors=True)
            with step(self._console, f"{system.name}: starting a server"):
                server = stack.enter_context(running(self._zygote, self._setup, log, flags))
            client = QualityClient(server.url, self._setup.concurrency)
            self._store(system, server, client)
            measured = []
            for asked in _ways(system, retentions, bits):
                for task in self._tasks:
                    measured.append(self._ask(client, asked, task))
            return measured

    def _store(self, system: System, server: Server, client: QualityClient) -> None:
        # The same prefix may belong to two tasks.
        prefixes = {tuple(prefix) for task in self._tasks for prefix in task.prefixes}
        with step(self._console, f"{system.name}: computing prefixes", len(prefixes)) as tick:
            for prefix in sorted(prefixes):
                client.store(prefix, None if system.exact else 1.0)
                # Waits for the write, and empties the device pool.
                server.flush()
                tick()

    def _ask(self, client: QualityClient, asked: Asked, task: Task) -> Measured:
        kept = "" if asked.retention is None else f" {asked.retention:.0%}"
        text = f"{asked.system}{kept}: {task.name}"
        with step(self._console, text, len(task.items)) as tick:
            return quality_report.measure(asked, task, client.ask(task, asked, tick))


def _ways(system: System, retentions: Sequence[float], bits: Sequence[float]) -> list[Asked]:
    if system.exact:
        return [Asked(system.name, None, approximate=False)]
    parts = [Asked(system.name, r, approximate=True) for r in retentions if r < 1]
    coded = [Asked(f"{system.name}@{b:g}", 1.0, approximate=True, bits=b) for b in bits]
    return [
        *parts,
        *coded,
        *(Asked(system.name, r, approximate=False) for r in retentions[-1:] if r == 1),
    ]


def _run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Everything but the output; servers and temporary files are gone when it returns."""
    if args.plot:
        require_matplotlib()
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(work_folder(args.keep, "bench-accuracy"))
        zygote = Zygote(server_environment())
        stack.callback(zygote.close)
        with step(console, "building the tasks"):
            model = (args.model or model_path()).resolve()
            if args.multi_head:
                model = multi_head_form(model)
            options = _task_options(args)
            tokenize = load_tokenize(model)
            tasks = [make_task(name, args.data, tokenize, options) for name in args.tasks]
        comparison = Comparison(_setup(args, model, tasks), tasks, zygote, folder, console)
        measured: list[Measured] = []
        difference = None
        for system in args.systems:
            measured += comparison.measure(system, args.retentions, args.bits, args.server_flag)
            if difference is None and args.check:
                with step(console, "comparing scores with transformers"):
                    scored = [(m.task, m.answers) for m in measured]
                    difference = check_scores(model, args.dtype, scored, args.check)
    config = read_config(model)
    size = ModelSize(config["num_hidden_layers"], kv_bytes_per_token(model, args.dtype))
    with step(console, "intervals"):
        rows = quality_report.make_rows(measured, size, args.seed)
    return {
        "command": command_of(args),
        "machine": describe_machine(),
        "model": model.name,
        "kv_heads": kv_heads_of(config),
        "kv_bytes_per_token": size.kv_bytes_per_token,
        "seconds": round(time.monotonic() - began),
        "seed": args.seed,
        "max_nats_from_transformers": difference,
        "options": dataclasses.asdict(options),
        "systems": {system.name: [*system.flags, *args.server_flag] for system in args.systems},
        "tasks": [_describe(task) for task in tasks],
        "rows": rows,
        "answers": quality_report.answers_of(measured),
    }


def _describe(task: Task) -> dict[str, Any]:
    return {
        "name": task.name,
        "prefix_tokens": [len(prefix) for prefix in task.prefixes],
        "prefix_of_question": [item.prefix for item in task.items],
        "gold": [list(item.references) if task.generates else item.gold for item in task.items],
    }


def _task_options(args: argparse.Namespace) -> TaskOptions:
    names = [field.name for field in dataclasses.fields(TaskOptions)]
    return TaskOptions(**{name: getattr(args, name) for name in names})


def _setup(args: argparse.Namespace, model: Path, tasks: Sequence[Task]) -> Setup:
    # Every request under way may have its prefix for itself.
    pool_tokens = (args.concurrency + 1) * max(task.longest for task in tasks) + SPARE_TOKENS
    return Setup(model, args.dtype, 1.0, pool_tokens, args.concurrency)


def _publish(args: argparse.Namespace, result: dict[str, Any], console: Console) -> None:
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    lengths = ", ".join(
        f"{task['name']} {min(task['prefix_tokens'])}-{max(task['prefix_tokens'])}"
        for task in result["tasks"]
    )
    caption = (
        f"{result['model']}, {result['kv_heads']} KV heads; tokens of prefixes: {lengths}; "
        f"seed {result['seed']}; {result['seconds']} s in all\n"
        "[..] are 95% paired bootstrap intervals over questions. bench/README.md explains the "
        "columns."
    )
    console.print(quality_report.make_table(result["rows"], caption.replace("[", "\\[")))
    if args.plot:
        files = quality_plots.write_figures(result["rows"], result["systems"], args.plot)
        console.print(f"{len(files)} files in {args.plot}", markup=False)


if __name__ == "__main__":
    sys.exit(main())
