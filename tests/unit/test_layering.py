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

# A unit is a package or a module right below impress_sglang. It may import itself and units of a
# lower level; units of one level do not know each other.
LEVELS = {
    "errors": 0,
    "loops": 0,
    "threads": 0,
    "config": 1,
    "cost": 2,
    "triton": 1,
    "codes": 1,
    "storage": 3,
    "tiers": 4,
    "transfer": 5,
    "store": 6,
    "cli": 7,
    "hicache": 7,
    "serving": 7,
    "blend": 8,
    "paper": 8,
    "plugin": 9,
}
# Parts that not every server has, and the one module that chooses whether a server has them.
OPTIONAL = {
    "paper": "impress_sglang.plugin.entry",
    "blend": "impress_sglang.plugin.factory",
}
EXCEPTIONS = {
    "": {"errors", "config"}  # the package itself: its public names
}


def unit_of(module: str) -> str:
    """`blend.plugin` and `paper.plugin` are what these need of SGLang."""
    if ".plugin." in f"{module}.":
        return "plugin"
    return module.removeprefix("impress_sglang").lstrip(".").split(".")[0]


def imports_of(module: str) -> Iterator[str]:
    """Full names that a module imports anywhere, also inside functions and by a string."""
    path = MODULES[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *(node.module or "").split(".")]).rstrip(".")
            yield from (f"{source}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in ("import_module", "__import__", "find_spec"):
                yield str(node.args[0].value)


def own_module(name: str) -> str | None:
    """The module of this project that an imported name stands in."""
    while name:
        if name in MODULES:
            return name
        name = name.rpartition(".")[0]
    return None


def own_imports(module: str) -> set[str]:
    found = {own_module(name) for name in imports_of(module)}
    return {name for name in found if name is not None and name != module}


def test_the_reader_of_imports_finds_them() -> None:
    """Guards the tests below: an `imports_of` that finds nothing would let them all pass."""
    assert len(MODULES) > 20
    assert "impress_sglang.storage.layout" in own_imports("impress_sglang.storage.segment")
    assert any(
        name.split(".")[0] == "sglang"
        for module in MODULES
        if unit_of(module) == "plugin"
        for name in imports_of(module)
    )


def test_no_module_outside_plugin_imports_sglang() -> None:
    core = [module for module in MODULES if unit_of(module) != "plugin"]
    found = {(module, name) for module in core for name in imports_of(module)}
    assert [pair for pair in found if pair[1].split(".")[0] == "sglang"] == []


def test_modules_import_only_from_below() -> None:
    units = {unit_of(module) for module in MODULES}
    assert units <= LEVELS.keys() | EXCEPTIONS.keys(), "give a new unit a level in this test"
    allowed = EXCEPTIONS | {
        unit: {lower for lower in LEVELS if LEVELS[lower] < LEVELS[unit]} for unit in LEVELS
    }
    upwards = [
        f"{module} imports {name}"
        for module in MODULES
        for name in own_imports(module)
        if unit_of(name) not in allowed[unit_of(module)] | {unit_of(module)}
    ]
    assert not upwards


@pytest.mark.parametrize("part", OPTIONAL)
def test_a_part_that_not_every_server_has_is_imported_where_it_is_chosen(part: str) -> None:
    """In functions of one module: a server without it loads nothing of it."""
    chooser = OPTIONAL[part]
    inside = {module for module in MODULES if f".{part}." in f"{module}."}
    assert len(inside) > 5
    found = {module for module in MODULES if module not in inside and own_imports(module) & inside}
    assert found == {chooser}
    tree = ast.parse(MODULES[chooser].read_text())
    functions = [function for function in ast.walk(tree) if isinstance(function, ast.FunctionDef)]
    within = {node for function in functions for node in ast.walk(function)}
    imports = [statement for statement in ast.walk(tree) if isinstance(statement, ast.ImportFrom)]
    ours = [statement for statement in imports if f".{part}." in f".{statement.module}."]
    assert ours and within.issuperset(ours)


def test_kernels_of_the_paper_are_loaded_by_nobody_else() -> None:
    found = {module for module in MODULES if "impress_sglang.triton.scores" in own_imports(module)}
    assert found == {"impress_sglang.paper.request"}


def test_there_is_no_import_cycle() -> None:
    """The error names it."""
    TopologicalSorter({module: own_imports(module) for module in MODULES}).prepare()


MOST_LINES = 450
MOST_PUBLIC_METHODS = 15
# What is larger today. Nothing may be added here; who makes one of them smaller takes it out.
# `ImpressTreeCache` and `ImpressStorage` override methods of SGLang's classes.
WIDE_CLASSES = {"SegmentReaders", "KVShape", "FileSystem", "SegmentLayout", "StoredTree"} | {
    "ImpressTreeCache",
    "ImpressStorage",
}


def public_methods(node: ast.ClassDef) -> set[str]:
    functions = (function for function in node.body if isinstance(function, ast.FunctionDef))
    return {function.name for function in functions if not function.name.startswith("_")}


def test_files_are_short() -> None:
    lines = {path: path.read_text().count("\n") for path in PACKAGE.rglob("*.py")}
    long = {str(path.relative_to(PACKAGE)) for path, count in lines.items() if count > MOST_LINES}
    assert not long


def test_classes_have_few_public_methods() -> None:
    trees = [ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    wide = {node.name for node in classes if len(public_methods(node)) > MOST_PUBLIC_METHODS}
    assert wide <= WIDE_CLASSES
