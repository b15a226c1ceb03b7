"""The documents say what the code does."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import impress_sglang
from bench.core.cli import MODULES
from bench.core.options import parse
from impress_sglang.serving.report import new_report
from scripts import tables

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "impress_sglang"
LISTED = subprocess.run(
    ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
)
DOCUMENTS = [ROOT / name for name in sorted(LISTED.stdout.split())]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("name", tables.TABLES)
def test_tables_are_made_from_the_code(name: str) -> None:
    page = tables.TABLES[name][0].read_text()
    assert page == tables.page_with_table(name, page), (
        "python -m scripts.tables --write puts them into their pages"
    )


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 600


def test_the_page_of_the_api_has_every_field_of_a_report() -> None:
    fields = set(new_report("impress", 0))
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    assert fields <= set(re.findall(r"`(\w+)`", " ".join(rows)))


def test_one_version_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    released = re.findall(r"^## \[(\d.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert impress_sglang.__version__ == project["version"] == released[0]


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", document.read_text()):
        path, _, anchor = target.partition("#")
        file = document.parent / path if path else document
        assert file.is_file(), target
        assert not anchor or anchor in anchors_of(file), target


def anchors_of(document: Path) -> set[str]:
    """What GitHub and the site make of the headings."""
    headings = re.findall(r"^#+ (.*)", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_benchmarks_that_documents_name_take_these_options(document: Path) -> None:
    """Those that were removed are named with the commit that has them."""
    pattern = r"`python -m bench ([a-z]\w*)([^`]*)`(?!\s+of commit| \|)"
    for name, options in re.findall(pattern, document.read_text()):
        parse(name, "", importlib.import_module(MODULES[name]).OPTIONS, shlex.split(options))


def test_the_site_has_every_document() -> None:
    pages = re.findall(r"^ +- .*?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(pages) == [name_of(path) for path in DOCUMENTS]


def test_the_functions_that_the_walk_passes_exist() -> None:
    packages = "|".join(path.stem for path in PACKAGE.iterdir() if path.stem[:1] != "_")
    text = (ROOT / "docs/architecture.md").read_text()
    names = re.findall(rf"`((?:{packages})\.[\w.]+)`", text)
    assert len(names) > 50, "the walk names each function that it passes"
    defined = {name for path in PACKAGE.rglob("*.py") for name in definitions(path)}
    assert [name for name in names if name not in defined] == []


def definitions(path: Path) -> Iterator[str]:
    """A module, what it defines, and methods, as `package.module.Class.method`."""
    yield (module := ".".join(path.relative_to(PACKAGE).with_suffix("").parts))
    pattern, outer = r"^(?:class |def )?(\w+)(?:[(:]| = )|^    def (\w+)", ""
    for name, method in re.findall(pattern, path.read_text(), re.MULTILINE):
        outer = name or outer
        yield f"{module}.{outer}.{method}" if method else f"{module}.{name}"


def test_the_tests_that_documents_name_exist() -> None:
    """A row without its test would be a promise that nobody keeps."""
    reliability = (ROOT / "docs/reliability.md").read_text()
    text = reliability + (ROOT / "docs/operation.md").read_text()
    paths = list((ROOT / "tests").rglob("test_*.py"))
    files = {path.name for path in paths}
    functions = re.findall(r"def (test_\w+)", "\n".join(path.read_text() for path in paths))
    for name in set(re.findall(r"\btest_\w+(?:\.py)?|(?<=…)\w+", text)):
        assert name in (files if name.endswith(".py") else "\n".join(functions)), name
    rows = [row for row in reliability.splitlines() if row[:1] == "|"]
    for cell in [row.rstrip(" |").split("|")[-1].strip() for row in rows]:
        headline = cell == "test" or not cell.strip("-")
        assert headline or re.search(r"test_|^(unit|serving)|the same", cell), cell
