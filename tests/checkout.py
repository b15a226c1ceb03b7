"""A run of the tests leaves nothing behind in the checkout."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


class Checkout:
    """Compares what git does not know before and after; a run that adds something fails."""

    def __init__(self) -> None:
        self._before = self._unknown()

    def _unknown(self) -> set[str]:
        if not (ROOT / ".git").exists() or shutil.which("git") is None:
            return set()
        command = ["git", "status", "--porcelain", "--untracked-files=all"]
        lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return {line[3:] for line in lines.stdout.splitlines() if line.startswith("??")}

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.left = sorted(self._unknown() - self._before)
        if self.left and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for path in self.left:
            terminalreporter.write_line(f"the tests have left {path} in the checkout", red=True)
