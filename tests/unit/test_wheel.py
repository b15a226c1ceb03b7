"""What `pip install` puts into an environment."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import impress_sglang

ROOT = Path(__file__).parents[2]


def run(*command: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from what git has, so that the checkout gets no build folder."""
    source = tmp_path_factory.mktemp("source")
    for name in run("git", "ls-files", "-z", cwd=ROOT).split("\0"):
        if name and (ROOT / name).is_file():
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", ".", "--no-deps", "--no-build-isolation", "--no-index", cwd=source)
    (built,) = source.glob("*.whl")
    return built


def test_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    files = {f"impress_sglang/{path.relative_to(ROOT / 'impress_sglang')}" for path in sources()}
    assert {name for name in names if ".dist-info/" not in name} == files


def sources() -> list[Path]:
    listed = run("git", "ls-files", "-z", "impress_sglang", cwd=ROOT).split("\0")
    return [path for name in listed if name and (path := ROOT / name).is_file()]


def test_wheel_works_in_an_environment_that_has_nothing_else(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path)
    python = tmp_path / "bin/python"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    run(*pip, "install", "--no-deps", "--no-index", wheel)
    code = (
        "import impress_sglang, importlib.metadata as m\n"
        "entry, = m.entry_points(group='sglang.srt.plugins')\n"
        "print(impress_sglang.__version__, m.version('impress-sglang'), entry.value)\n"
        "print(impress_sglang.__file__)"
    )
    # Isolated: neither this directory nor PYTHONPATH may stand in for what was installed.
    said = run(python, "-I", "-c", code, cwd=tmp_path).split()
    version = impress_sglang.__version__
    assert said[:3] == [version, version, "impress_sglang.plugin.entry:activate"]
    assert Path(said[3]).is_relative_to(tmp_path)
