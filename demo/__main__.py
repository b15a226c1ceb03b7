"""`python -m demo`: one shared prefix, six ways to get it, on a CPU, offline.

Starts SGLang twice on one SSD directory, asks the same questions about the same handbook in every
way, and prints the time to the first token by where the handbook's KVs came from. Takes about two
minutes, most of them for starting servers.
Leaves `build/demo.json` and `build/demo-server.log` in the current directory.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from demo import report
from demo.handbook import prompt, warm_up_prompt
from demo.model import DemoModelMissing, model_path
from demo.report import CROWD, QUESTIONS, AtOnce, DemoFailed, Reply, Way
from demo.server import Server, free_port

BUILD_DIR = Path("build")
NEW_TOKENS = 16
# Caches that hold the prefix would answer in place of the SSD.
OPTIONS = (
    "--impress-device-gb=0",
    "--impress-host-gb=0",
    "--impress-load=always",
)
EXACT = "exact"


def main() -> int:
    """Run the demo; returns the exit status."""
    arguments = _parse_arguments()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _exit_on_signal)
    # Where nobody looks at a terminal, its default width of 80 would break the table.
    console = Console(width=None if sys.stdout.isatty() else 120)
    try:
        _run(arguments, console)
    except KeyboardInterrupt:
        console.print("interrupted", style="red")
        return 130
    except (DemoFailed, DemoModelMissing) as error:
        console.print(f"demo failed: {error}", style="red", markup=False)
        return 1
    return 0


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument(
        "--keep-ssd",
        type=Path,
        metavar="DIR",
        help="use this empty directory as SSD directory and keep it (default: a temporary one)",
    )
    parser.add_argument("--port", type=int, default=0, help="server port (default: any free one)")
    return parser.parse_args()


def _run(arguments: argparse.Namespace, console: Console) -> None:
    began = time.monotonic()
    BUILD_DIR.mkdir(exist_ok=True)
    log, path = BUILD_DIR / "demo-server.log", BUILD_DIR / "demo.json"
    log.write_bytes(b"")
    # A run that fails leaves no rows of an earlier one.
    path.unlink(missing_ok=True)
    with _step(console, "Model SmolLM2-135M-Instruct (converted on first use)"):
        model = model_path()
    with _ssd_directory(arguments.keep_ssd) as ssd_dir:
        scenario = _Scenario(console, model, ssd_dir, log, arguments.port)
        replies, at_once = scenario.replies()
    rows = report.make_rows(replies)
    report.write_json(rows, replies, at_once, path)
    console.print(report.make_table(rows))
    console.print(str(at_once))
    console.print(f"{time.monotonic() - began:.0f} s in all; figures in {path}, log in {log}")


class _Scenario:
    """The servers and requests of the demo, in the order they are made."""

    def __init__(self, console: Console, model: Path, ssd_dir: Path, log: Path, port: int) -> None:
        self._console = console
        self._model = model
        self._options = [*OPTIONS, "--impress-ssd-dir", str(ssd_dir)]
        self._log = log
        self._port = port
        self._replies: list[Reply] = []

    def replies(self) -> tuple[list[Reply], AtOnce]:
        """Make all requests: one at a time, and many at once.

        Raises:
            DemoFailed: a request was not served as its way says.
        """
        with self._server("1 of 2") as server:
            with _step(self._console, f"Prefix from: {report.COMPUTED.name}"):
                self._ask(server, report.COMPUTED, QUESTIONS[0])
            self._read(server, report.WHOLE, report.DEVICE, bits=EXACT)
            self._read(server, report.FEW_BITS, report.SHARED)
            with _step(self._console, f"{len(CROWD)} questions at once"):
                at_once = _ask_at_once(server)
            with _step(self._console, "Stopping server 1 of 2"):
                server.stop()
        with self._server("2 of 2") as server:
            self._read(server, report.RESTARTED)
        return self._replies, at_once

    def _read(
        self, server: Server, first: Way, then: Way | None = None, bits: str | None = None
    ) -> None:
        """Each question `first` to an empty device pool, and the next one `then` after it."""
        with _step(self._console, f"Prefix from: {first.name}{f'; {then.name}' if then else ''}"):
            for number, question in enumerate(QUESTIONS, start=1):
                server.flush_cache()
                self._ask(server, first, question, bits)
                if then is not None:
                    self._ask(server, then, QUESTIONS[number % len(QUESTIONS)], bits)

    @contextmanager
    def _server(self, number: str) -> Iterator[Server]:
        server = Server(self._model, self._options, free_port(self._port), self._log)
        try:
            with _step(self._console, f"Starting server {number}"):
                server.wait_ready()
            with _step(self._console, "Warming up, with another prefix"):
                _warm_up(server)
            yield server
        finally:
            server.kill()

    def _ask(self, server: Server, way: Way, question: str, bits: str | None = None) -> None:
        answer = server.generate(prompt(question), NEW_TOKENS, bits)
        self._replies.append(
            report.make_reply(way, question, answer.ttft_ms, answer.text, answer.meta_info)
        )


def _ask_at_once(server: Server) -> AtOnce:
    """All questions of the crowd, with the prefix on SSD and then with it in slots."""
    server.flush_cache()
    with ThreadPoolExecutor(len(CROWD)) as pool:

        def ask() -> tuple[float, int]:
            began = time.perf_counter()
            answers = pool.map(lambda own: server.generate(prompt(own), NEW_TOKENS), CROWD)
            ssd_bytes = sum(own.meta_info["impress"]["ssd_bytes"] for own in answers)
            return round(time.perf_counter() - began, 3), ssd_bytes

        loaded_s, ssd_bytes = ask()
        resident_s, _ = ask()
    return AtOnce(len(CROWD), loaded_s, resident_s, ssd_bytes)


def _warm_up(server: Server) -> None:
    """Compute another prefix, and read it in each way: first requests take longer than others."""
    for bits in (None, None, EXACT):
        server.generate(warm_up_prompt(), max_new_tokens=4, bits=bits)
        server.flush_cache()


@contextmanager
def _step(console: Console, text: str) -> Iterator[None]:
    """Show a step with its elapsed time while it runs, and leave a line when it is done."""
    began = time.monotonic()
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        progress.add_task(text, total=None)
        yield
    seconds = time.monotonic() - began
    console.print(f"[green]✓[/green] {text} [dim]{seconds:.1f} s[/dim]", highlight=False)


@contextmanager
def _ssd_directory(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        # Not the system's directory for temporary files, which may be in memory.
        with tempfile.TemporaryDirectory(prefix="demo-ssd-", dir=BUILD_DIR) as folder:
            yield Path(folder)
        return
    if keep.exists() and not (keep.is_dir() and not any(keep.iterdir())):
        raise DemoFailed(f"--keep-ssd {keep} must be an empty directory, or not exist")
    keep.mkdir(parents=True, exist_ok=True)
    yield keep


def _exit_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    """End as if by `sys.exit`, so that servers and temporary files are cleaned up."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
