"""Imports go one way, only packages called `plugin` know SGLang, and nothing grows for ever."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import impress_sglang

PACKAGE = Path(impress_sglang.__file__).parent
MODULES = {
    ".".join(("impress_sglang", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
TREES = {module: ast.parse(path.read_text(), str(path)) for module, path in MODULES.items()}

# A unit is a package or a module right below impress_sglang. It may import itself and units of
# lower levels; units of one level do not know each other.
LEVELS = (
    {"errors", "loops", "threads"},
    {"config", "triton", "codes"},
    {"cost"},
    {"storage"},
    {"tiers"},
    {"transfer"},
    {"store"},
    {"cli", "hicache", "serving"},
    {"blend", "paper"},
    {"plugin"},
)
# What the package itself imports: its public names.
PUBLIC = {"errors", "config"}
# Parts that not every server has, and the one module that chooses whether a server has them.
OPTIONAL = {"paper": "impress_sglang.plugin.entry", "blend": "impress_sglang.plugin.factory"}


def unit_of(module: str) -> str:
    """`blend.plugin` and `paper.plugin` are what these need of SGLang."""
    if ".plugin." in f"{module}.":
        return "plugin"
    return module.removeprefix("impress_sglang").lstrip(".").split(".")[0]


def imports_of(module: str) -> Iterator[str]:
    """Full names that a module imports anywhere, also inside functions and by a string."""
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in ("import_module", "__import__", "find_spec"):
                yield str(node.args[0].value)


def module_of(name: str) -> str:
    """The module that an imported name is, or is in."""
    return name if name in MODULES else name.rpartition(".")[0]


# What each module imports of this project.
IMPORTS = {
    module: set(map(module_of, imports_of(module))) & MODULES.keys() - {module}
    for module in MODULES
}


def test_only_packages_called_plugin_import_sglang() -> None:
    importing = {
        unit_of(module)
        for module in MODULES
        if any(name.split(".")[0] == "sglang" for name in imports_of(module))
    }
    assert importing == {"plugin"}


def test_modules_import_only_from_below() -> None:
    allowed, below = {"": PUBLIC}, set[str]()
    for level in LEVELS:
        allowed |= {unit: {unit, *below} for unit in level}
        below |= level
    assert {*map(unit_of, MODULES)} <= allowed.keys(), "give a new unit a level in this test"
    upwards = [
        f"{module} imports {name}"
        for module in MODULES
        for name in IMPORTS[module]
        if unit_of(name) not in allowed[unit_of(module)]
    ]
    assert not upwards


@pytest.mark.parametrize("part", OPTIONAL)
def test_a_part_that_not_every_server_has_is_imported_where_it_is_chosen(part: str) -> None:
    """In functions of one module: a server without it loads nothing of it."""
    chooser = OPTIONAL[part]
    inside = {module for module in MODULES if f".{part}." in f"{module}."}
    assert len(inside) > 5
    importing = {module for module in MODULES.keys() - inside if IMPORTS[module] & inside}
    assert importing == {chooser}
    top = [node for node in TREES[chooser].body if isinstance(node, ast.ImportFrom)]
    assert not any(f".{part}." in f".{node.module}." for node in top)


def test_kernels_of_the_paper_are_loaded_by_nobody_else() -> None:
    kernels = "impress_sglang.triton.scores"
    importing = [module for module in MODULES if kernels in IMPORTS[module]]
    assert importing == ["impress_sglang.paper.request"]


def test_there_is_no_import_cycle() -> None:
    TopologicalSorter(IMPORTS).prepare()


MAX_LINES = 450
MAX_PUBLIC_METHODS = 15
# What is larger today. Nothing may be added here, and what gets smaller leaves.
# `ImpressTreeCache` overrides methods of SGLang's class.
WIDE_CLASSES = {"SegmentReaders", "KVShape", "FileSystem", "ImpressTreeCache"}


def test_files_are_short() -> None:
    lines = {module: path.read_text().count("\n") for module, path in MODULES.items()}
    assert [module for module, count in lines.items() if count > MAX_LINES] == []


def public_methods(node: ast.ClassDef) -> set[str]:
    functions = (function for function in node.body if isinstance(function, ast.FunctionDef))
    return {function.name for function in functions if not function.name.startswith("_")}


def test_classes_have_few_public_methods() -> None:
    nodes = (node for tree in TREES.values() for node in ast.walk(tree))
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    wide = {node.name for node in classes if len(public_methods(node)) > MAX_PUBLIC_METHODS}
    assert wide == WIDE_CLASSES
