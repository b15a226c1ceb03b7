"""Chromium without a screen, where there is one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

_CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_browser = pytest.mark.skipif(_CHROMIUM is None, reason="there is no Chromium")


def shown(url: str, folder: Path) -> str:
    """The elements of a page, as HTML, after two seconds and a half of its own time."""
    assert _CHROMIUM is not None
    command = [
        *(_CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *(f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=2500", "--dump-dom"),
    ]
    done = subprocess.run([*command, url], capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode()
