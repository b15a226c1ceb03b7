"""Chromium without a screen, where there is one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

_CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WIDTH, HEIGHT = 1440, 1086
needs_browser = pytest.mark.skipif(_CHROMIUM is None, reason="there is no Chromium")


def shown(url: str, folder: Path) -> str:
    """The elements of a page, as HTML, after two seconds and a half of its own time."""
    return _run(url, folder, "--dump-dom").decode()


def pictured(url: str, folder: Path) -> Path:
    """The page as a person sees it, a PNG file below the folder, at the same time."""
    picture = folder / "page.png"
    _run(url, folder, f"--screenshot={picture}", f"--window-size={WIDTH},{HEIGHT}")
    return picture


def _run(url: str, folder: Path, *options: str) -> bytes:
    assert _CHROMIUM is not None
    command = [
        *(_CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *(f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=2500", *options),
    ]
    done = subprocess.run([*command, url], capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout
