"""The documents say what the code does."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

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
    """Of those that have left it is said in which commit they are."""
    left = r"(?!\s+of commit| \|)"
    for name, given in re.findall(
        rf"`python -m bench ([a-z]\w*)([^`]*)`{left}", document.read_text()
    ):
        parse(name, "", importlib.import_module(MODULES[name]).OPTIONS, shlex.split(given))


def test_the_site_has_every_document() -> None:
    def pages(item: object) -> Iterator[str]:
        if isinstance(item, str):
            yield item
        else:
            for inner in item if isinstance(item, list) else item.values():  # type: ignore[attr-defined]
                yield from pages(inner)

    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert sorted(pages(nav)) == [name_of(path) for path in DOCUMENTS]


def test_the_functions_that_the_walk_passes_exist() -> None:
    packages = "|".join(path.stem for path in PACKAGE.iterdir() if path.stem[:1] != "_")
    text = (ROOT / "docs/architecture.md").read_text()
    names = re.findall(rf"`((?:{packages})\.[\w.]+)`", text)
    assert len(names) > 50, "the walk names each function that it passes"
    assert [name for name in names if not is_defined(name)] == []


def is_defined(name: str) -> bool:
    """Whether `package.module.Class.function` and the like is there, as it is written."""
    path, parts = PACKAGE, name.split(".")
    while parts and (path / parts[0]).is_dir():
        path = path / parts.pop(0)
    if not parts:
        return True
    path = path / f"{parts.pop(0)}.py"
    if not path.is_file():
        return False
    scope: ast.AST = ast.parse(path.read_text())
    for part in parts:
        inner = [node for node in ast.iter_child_nodes(scope) if part in names_in(node)]
        if not inner:
            return False
        scope = inner[0]
    return True


def names_in(node: ast.AST) -> list[str]:
    """What a statement defines."""
    targets = node.targets if isinstance(node, ast.Assign) else [node]
    return [getattr(target, "name", getattr(target, "id", "")) for target in targets]


def test_who_looks_for_functions_finds_them() -> None:
    """Guards the test above."""
    assert is_defined("config.ImpressConfig.from_options")
    assert is_defined("storage.files")
    assert not is_defined("config.ImpressConfig.from_nowhere")
    assert not is_defined("storage.nowhere.FileSystem")


def test_the_tests_that_documents_name_exist() -> None:
    """A row without its test would be a promise that nobody keeps."""
    reliability = (ROOT / "docs/reliability.md").read_text()
    text = reliability + (ROOT / "docs/operation.md").read_text()
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
    cells = [
        row.rstrip(" |").split("|")[-1].strip()
        for row in reliability.splitlines()
        if row[:1] == "|"
    ]
    for cell in cells:
        headline = cell == "test" or not cell.strip("-")
        assert headline or re.search(r"test_|^(unit|serving)|the same", cell), cell
