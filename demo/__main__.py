"""`python -m demo`: one shared prefix, six ways to get it, on a CPU, offline.

Starts SGLang three times on one SSD directory, asks questions about the same handbook, and prints
the time to the first token by where the handbook's KVs came from. Takes a few minutes, most of
them for starting servers.
Leaves `build/demo.json` and `build/demo-server.log` in the current directory.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from demo import report
from demo.handbook import prompt
from demo.model import DemoModelMissing, model_path
from demo.report import Case, DemoFailed, Row
from demo.server import Server, free_port

BUILD_DIR = Path("build")
NEW_TOKENS = 24
# Shares no first token with the prompts, so that it leaves nothing for them to find.
WARM_UP = "Once upon a time"


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
        rows = report.in_order(_Scenario(console, model, ssd_dir, log, arguments.port).rows())
    report.write_json(rows, path)
    console.print(report.make_table(rows))
    console.print(f"{time.monotonic() - began:.0f} s in all; rows in {path}, server log in {log}")


class _Scenario:
    """The servers and requests of the demo, in the order they are made."""

    def __init__(self, console: Console, model: Path, ssd_dir: Path, log: Path, port: int) -> None:
        self._console = console
        self._model = model
        self._ssd_dir = ssd_dir
        self._log = log
        self._port = port

    def rows(self) -> list[Row]:
        """Make all requests.

        Raises:
            DemoFailed: a request was not served as its case says.
        """
        rows = self._fill()
        rows.append(self._ask_new_server(report.RESTARTED, "2 of 3", "impress"))
        rows.append(self._ask_new_server(report.WHOLE, "3 of 3", "as"))
        return rows

    def _fill(self) -> list[Row]:
        with self._server("1 of 3", "impress") as server:
            rows = [self._ask(server, report.COMPUTED), self._ask(server, report.DEVICE)]
            with _step(self._console, "Emptying the device pool"):
                server.flush_cache()
            rows.append(self._ask(server, report.FEW_BITS))
            rows.append(self._ask(server, report.SHARED))
        return rows

    def _ask_new_server(self, case: Case, number: str, policy: str) -> Row:
        with self._server(number, policy) as server:
            return self._ask(server, case)

    @contextmanager
    def _server(self, number: str, policy: str) -> Iterator[Server]:
        options = ["--impress-ssd-dir", str(self._ssd_dir), "--impress-policy", policy]
        server = Server(self._model, options, free_port(self._port), self._log)
        try:
            with _step(self._console, f"Starting server {number} (policy {policy})"):
                server.wait_ready()
                server.generate(WARM_UP, max_new_tokens=4)
            yield server
            with _step(self._console, f"Stopping server {number}"):
                server.stop()
        finally:
            server.kill()

    def _ask(self, server: Server, case: Case) -> Row:
        with _step(self._console, f"Request: {case.path}"):
            answer = server.generate(prompt(case.question), NEW_TOKENS)
        return report.make_row(case, answer.ttft_ms, answer.text, answer.meta_info)


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
