"""What `pip install` puts into an environment."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from impress_sglang import __version__

ROOT = Path(__file__).parents[2]
# Of a process that finds the standard library and what was installed, and nothing else.
CODE = """
import sys; sys.path.insert(0, sys.argv[1])
import impress_sglang, importlib.metadata as metadata
(entry,) = metadata.entry_points(group="sglang.srt.plugins")
print(impress_sglang.__version__, metadata.version("impress-sglang"), entry.value)
"""


def run(*command: object, cwd: Path) -> str:
    words = list(map(str, command))
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_has_the_package_and_works(tmp_path: Path) -> None:
    """Built from what git has, so that the checkout gets no build folder."""
    source, installed = tmp_path / "source", tmp_path / "installed"
    listed = run("git", "ls-files", "-z", cwd=ROOT).split("\0")
    names = [name for name in listed if (ROOT / name).is_file()]
    for name in names:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "wheel", ".", *options, cwd=source)
    with zipfile.ZipFile(*source.glob("*.whl")) as wheel:
        packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
        wheel.extractall(installed)

    assert packed == {name for name in names if name.startswith("impress_sglang/")}
    output = run(sys.executable, "-I", "-S", "-c", CODE, installed, cwd=tmp_path).split()
    assert output == [__version__, __version__, "impress_sglang.plugin.entry:activate"]
