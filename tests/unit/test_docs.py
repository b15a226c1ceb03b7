"""The documents say what the code does."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import impress_sglang
from impress_sglang.config import OPTIONS, ImpressConfig, Option

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.field)
def test_readme_has_each_flag_and_its_default(option: Option) -> None:
    rows = (ROOT / "README.md").read_text().splitlines()
    (row,) = [row for row in rows if row.startswith(f"| `{option.flag}` |")]
    default = getattr(ImpressConfig(), option.field)
    shown = ("off", "on")[default] if isinstance(default, bool) else default
    cell = row.split("|")[2].strip().strip("`")
    assert cell == (f"{shown:g}" if isinstance(shown, float) else str(shown) or "none")


def test_one_version_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    released = re.findall(r"^## \[(\d.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert impress_sglang.__version__ == project["version"] == released[0]


def test_links_between_documents_lead_somewhere() -> None:
    for document in [ROOT / "README.md", *ROOT.glob("docs/*.md"), ROOT / "patches/README.md"]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_the_tests_that_reliability_names_exist() -> None:
    """A row without its test would be a promise that nobody keeps."""
    text = (ROOT / "docs/reliability.md").read_text()
    paths = list((ROOT / "tests").rglob("test_*.py"))
    files = {path.name for path in paths}
    found = (re.findall(r"def (test_\w+)", path.read_text()) for path in paths)
    functions = "\n".join(name for names in found for name in names)
    for name in set(re.findall(r"\btest_\w+\.py", text)):
        assert name in files, name
    for name in set(re.findall(r"\b(test_\w+)(?!\w*\.py)\b", re.sub(r"test_\w+\.py", "", text))):
        assert name in functions, name
    for part in set(re.findall(r"…(\w+)", text)):
        assert part in functions, part
    cells = [row.rstrip(" |").split("|")[-1].strip() for row in text.splitlines() if row[:1] == "|"]
    for cell in cells:
        headline = cell == "test" or not cell.strip("-")
        assert headline or re.search(r"test_|^(unit|serving)|the same", cell), cell
