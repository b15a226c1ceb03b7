"""`python -m demo`: one shared prefix, six ways to get it, on a CPU, offline.

Starts SGLang twice on one SSD directory, asks the same questions about the same handbook in every
way, and prints the time to the first token by where the handbook's KVs came from. Takes about two
minutes, half of them for starting servers, which are forked from one process that has imported
SGLang. Leaves `build/demo.json` in the clone.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from bench.core.servers import Server, Servers, servers
from bench.core.session import ROOT, BenchFailed, interrupt_on_signals
from demo import report
from demo.handbook import prompt, warm_up_prompt
from demo.model import DemoModelMissing, model_path
from demo.report import CROWD, QUESTIONS, AtOnce, DemoFailed, Reply, Way

RESULT = ROOT / "build" / "demo.json"
NEW_TOKENS = 16
OPTIONS = (
    "--max-total-tokens=8192",
    "--max-running-requests=8",
    "--enable-impress",
    # So that exact KVs can be shown beside it.
    "--impress-keep=both",
    "--impress-write-after=1",
    # Caches that hold the prefix would answer in place of the SSD.
    "--impress-device-gb=0",
    "--impress-host-gb=0",
    "--impress-load=always",
)
EXACT = "exact"
AUTO = "auto"


def main() -> int:
    """Run the demo; returns the exit status."""
    arguments = _parse_arguments()
    interrupt_on_signals()
    # Where nobody looks at a terminal, its default width of 80 would break the table.
    console = Console(width=None if sys.stdout.isatty() else 120)
    try:
        _run(arguments, console)
    except KeyboardInterrupt:
        console.print("interrupted", style="red")
        return 130
    except (BenchFailed, DemoFailed, DemoModelMissing) as error:
        console.print(f"demo failed: {error}", style="red", markup=False)
        return 1
    return 0


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="DIR",
        help="keep the SSD directory and the logs in this empty folder (default: a temporary one)",
    )
    parser.add_argument(
        "--basis",
        metavar="FILE",
        help="code by this basis, which `impress calibrate` has made for the demo's model",
    )
    return parser.parse_args()


def _run(arguments: argparse.Namespace, console: Console) -> None:
    began = time.monotonic()
    RESULT.parent.mkdir(exist_ok=True)
    # A run that fails leaves no rows of an earlier one.
    RESULT.unlink(missing_ok=True)
    flags = (f"--impress-basis={arguments.basis}",) if arguments.basis else ()
    scenario = _Scenario(console, flags)
    with scenario.step("Model SmolLM2-135M-Instruct (converted on first use)"):
        model = model_path()
    with servers(arguments, scenario.step) as pool:
        replies, at_once = scenario.replies(pool, model)
    rows = report.make_rows(replies)
    report.write_json(rows, replies, at_once, RESULT)
    console.print(report.make_table(rows))
    console.print(str(at_once))
    console.print(f"{time.monotonic() - began:.0f} s in all; figures in {RESULT}")


class _Scenario:
    """The servers and requests of the demo, in the order they are made."""

    def __init__(self, console: Console, flags: Sequence[str]) -> None:
        """`flags`: more of them for servers."""
        self._console = console
        self._flags = flags
        self._replies: list[Reply] = []

    def replies(self, pool: Servers, model: Path) -> tuple[list[Reply], AtOnce]:
        """Make all requests: one at a time, and many at once.

        Raises:
            BenchFailed: a server failed.
            DemoFailed: a request was not served as its way says.
        """
        with self._server(pool, model, "1 of 2") as server:
            with self.step(f"Prefix from: {report.COMPUTED.name}"):
                self._ask(server, report.COMPUTED, QUESTIONS[0])
            self._read(server, report.WHOLE, report.DEVICE, bits=EXACT)
            self._read(server, report.FEW_BITS, report.SHARED)
            self._read(server, report.AUTO_BITS, bits=AUTO)
            with self.step(f"{len(CROWD)} questions at once"):
                at_once = _ask_at_once(server)
            with self.step("1 of 2: stopping the server"):
                server.stop()
        with self._server(pool, model, "2 of 2") as server:
            self._read(server, report.RESTARTED)
        return self._replies, at_once

    @contextmanager
    def step(self, text: str) -> Iterator[None]:
        """Show a step with its elapsed time while it runs, and leave a line when it is done."""
        began = time.monotonic()
        columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        hidden = not self._console.is_terminal
        with Progress(*columns, console=self._console, transient=True, disable=hidden) as progress:
            progress.add_task(text, total=None)
            yield
        seconds = time.monotonic() - began
        self._console.print(f"[green]✓[/green] {text} [dim]{seconds:.1f} s[/dim]", highlight=False)

    def _read(
        self, server: Server, first: Way, then: Way | None = None, bits: str | None = None
    ) -> None:
        """Each question `first` to an empty device pool, and the next one `then` after it."""
        with self.step(f"Prefix from: {first.name}{f'; {then.name}' if then else ''}"):
            for number, question in enumerate(QUESTIONS, start=1):
                server.flush()
                self._ask(server, first, question, bits)
                if then is not None:
                    self._ask(server, then, QUESTIONS[number % len(QUESTIONS)], bits)

    @contextmanager
    def _server(self, pool: Servers, model: Path, name: str) -> Iterator[Server]:
        store = f"--impress-ssd-dir={pool.folder / 'kv'}"
        # bfloat16 is very slow on CPUs without AMX.
        flags = (*OPTIONS, *self._flags)
        with pool.running(name, model, "float32", *flags, store, preload=None) as server:
            with self.step(f"{name}: warming up, with another prefix"):
                # In each way: first requests take longer than others.
                for bits in (None, None, EXACT, AUTO, AUTO, AUTO):
                    _generate(server, warm_up_prompt(), 4, bits)
                    server.flush()
            yield server

    def _ask(self, server: Server, way: Way, question: str, bits: str | None = None) -> None:
        ttft_ms, text, meta_info = _generate(server, prompt(question), NEW_TOKENS, bits)
        self._replies.append(report.make_reply(way, question, ttft_ms, text, meta_info))


def _ask_at_once(server: Server) -> AtOnce:
    """All questions of the crowd, with the prefix on SSD and then with it in slots."""
    server.flush()
    with ThreadPoolExecutor(len(CROWD)) as pool:

        def ask() -> tuple[float, int]:
            began = time.perf_counter()
            answers = pool.map(
                lambda question: _generate(server, prompt(question), NEW_TOKENS), CROWD
            )
            ssd_bytes = sum(meta_info["impress"]["ssd_bytes"] for _, _, meta_info in answers)
            return round(time.perf_counter() - began, 3), ssd_bytes

        loaded_s, ssd_bytes = ask()
        resident_s, _ = ask()
    return AtOnce(len(CROWD), loaded_s, resident_s, ssd_bytes)


def _generate(
    server: Server, text: str, max_new_tokens: int, bits: str | None = None
) -> tuple[float, str, dict[str, Any]]:
    """Complete a text greedily; `bits` asks for a precision in place of the server's.

    Returns:
        Milliseconds until the first text, the whole text, SGLang's `meta_info`.
    """
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": max_new_tokens}
    if bits is not None:
        sampling["custom_params"] = {"impress_bits": bits}
    body = {"text": text, "sampling_params": sampling, "stream": True}
    began = time.perf_counter()
    ttft_ms, last = None, dict[str, Any]()
    try:
        with server.request("POST", "/generate", json=body, stream=True) as response:
            for line in response.iter_lines():
                if not line.startswith(b"data: {"):
                    continue
                last = json.loads(line.removeprefix(b"data: "))
                if "error" in last:
                    raise DemoFailed(f"the server answered with an error: {last['error']}")
                if ttft_ms is None and last["text"]:
                    ttft_ms = (time.perf_counter() - began) * 1e3
    except requests.RequestException as error:
        raise DemoFailed(f"an answer broke off: {error}") from error
    if ttft_ms is None:
        raise DemoFailed("the server sent no text")
    return ttft_ms, last["text"], last["meta_info"]


if __name__ == "__main__":
    sys.exit(main())
