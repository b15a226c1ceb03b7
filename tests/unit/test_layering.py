"""Imports go one way, only packages called `plugin` know SGLang, and nothing grows for ever."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

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
    "options": 0,
    "threads": 0,
    "config": 1,
    "cost": 1,
    "triton": 1,
    "codes": 1,
    "storage": 2,
    "tiers": 3,
    "transfer": 4,
    "store": 5,
    "cli": 6,
    "hicache": 6,
    "serving": 6,
    "blend": 7,
    "paper": 7,
    "plugin": 8,
}
# The one module that chooses between kinds of servers.
CHOOSES = "impress_sglang.plugin.entry"
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
    found = {(own, name) for own in core for name in imports_of(own)}
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


def is_of_the_paper(module: str) -> bool:
    return ".paper." in f"{module}."


def test_only_the_plugin_imports_the_modes_of_the_paper() -> None:
    """They may import the rest of their package; servers without them load nothing of theirs."""
    rest = [module for module in MODULES if not is_of_the_paper(module)]
    assert len(rest) > 100 and len(MODULES) - len(rest) > 10
    found = {
        (module, name) for module in rest for name in own_imports(module) if is_of_the_paper(name)
    }
    assert {module for module, _ in found} == {CHOOSES}


def test_the_plugin_imports_them_where_they_are_chosen() -> None:
    """In functions: every process of SGLang's imports the plugin."""
    tree = ast.parse(MODULES[CHOOSES].read_text())
    functions = [own for own in ast.walk(tree) if isinstance(own, ast.FunctionDef)]
    within = {node for own in functions for node in ast.walk(own)}
    imports = [own for own in ast.walk(tree) if isinstance(own, ast.ImportFrom)]
    ours = [own for own in imports if is_of_the_paper(own.module or "")]
    assert ours and within.issuperset(ours)


def test_what_blends_is_imported_in_one_place() -> None:
    """Beside its own package, where a server is made that blends."""
    blends = [module for module in MODULES if ".blend." in f"{module}."]
    found = {own for own in MODULES if own not in blends and own_imports(own) & {*blends}}
    assert len(blends) > 5 and found == {"impress_sglang.plugin.tree_cache_factory"}


IMPORT_PLUGIN = """
import importlib, sys, types
from importlib.machinery import ModuleSpec

class Anything:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "sglang":
            return ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: type(name, (), {})
        return module
    def exec_module(self, module):
        pass

sys.meta_path.insert(0, Anything())
for module in sys.argv[1:]:
    importlib.import_module(module)
print("blends", *(name for name in sys.modules if name.startswith("impress_sglang.blend")))
"""


def test_servers_that_do_not_blend_load_nothing_of_it() -> None:
    """All that the others import; of SGLang, which is not there, any name is a class."""
    rest = [
        *(module for module in MODULES if module.startswith("impress_sglang.serving.")),
        "impress_sglang.plugin.tree_cache_factory",
        "impress_sglang.plugin.admin",
        "impress_sglang.plugin.entry",
    ]

    def loaded(*modules: str) -> list[str]:
        command = [sys.executable, "-c", IMPORT_PLUGIN, *modules]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    assert loaded(*rest) == ["blends"]
    assert "impress_sglang.blend.job" in loaded("impress_sglang.blend.plugin.blends")


DEFAULT_STORE = """
import sys, tempfile, torch
from impress_sglang.config import ImpressConfig
from impress_sglang.serving.service import Service
from impress_sglang.storage.layout import KVShape
from impress_sglang.transfer import warm_up

shape = KVShape(1, 2, 1, 16, 16, torch.float32, (), 6.0)
with tempfile.TemporaryDirectory() as folder:
    config = ImpressConfig(ssd_dir=folder, device_gb=0.0, host_gb=0.001, min_free_gb=0.0)
    service = Service(config, shape, "0" * 32, torch.device("cpu"), 16)
    assert service.store.match("", torch.arange(9).numpy().astype("int32")).num_tokens == 0
    service.close()
print(*(name for name in sys.modules if ".paper" in name or name.endswith("triton.scores")))
"""


def test_a_default_server_loads_nothing_of_the_paper() -> None:
    result = subprocess.run(
        [sys.executable, "-c", DEFAULT_STORE], capture_output=True, text=True, timeout=120
    )

    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


def test_there_is_no_import_cycle() -> None:
    """The error names it."""
    TopologicalSorter({module: own_imports(module) for module in MODULES}).prepare()


IMPORT_ALL = """
import importlib, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "sglang":
            raise ImportError("sglang must not be imported: " + name)

sys.meta_path.insert(0, Blocker())
import impress_sglang.paper.runtime
for module in sys.argv[1:]:
    importlib.import_module(module)
assert not any(name.split(".")[0] == "sglang" for name in sys.modules)
print("imported", len(sys.argv) - 1)
"""


def test_every_core_module_can_be_imported_without_sglang() -> None:
    core = [
        module
        for module in MODULES
        if unit_of(module) != "plugin" and not module.endswith("__main__")
    ]

    result = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *core], capture_output=True, text=True, timeout=120
    )

    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["imported", str(len(core))]


MOST_LINES = 450
MOST_PUBLIC_METHODS = 15
# What is larger today. Nothing may be added here; who makes one of them smaller takes it out.
# `ImpressTreeCache` and `ImpressStorage` override methods of SGLang's classes.
WIDE_CLASSES = {"OpenSegments", "KVShape", "FileSystem", "SegmentLayout", "StoredTree"} | {
    "ImpressTreeCache",
    "ImpressStorage",
}


def public_methods(node: ast.ClassDef) -> set[str]:
    functions = (own for own in node.body if isinstance(own, ast.FunctionDef))
    return {own.name for own in functions if not own.name.startswith("_")}


def test_files_are_short() -> None:
    lines = {path: path.read_text().count("\n") for path in PACKAGE.rglob("*.py")}
    long = {str(path.relative_to(PACKAGE)) for path, own in lines.items() if own > MOST_LINES}
    assert not long


def test_classes_have_few_public_methods() -> None:
    trees = [ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")]
    classes = [own for tree in trees for own in ast.walk(tree) if isinstance(own, ast.ClassDef)]
    wide = {own.name for own in classes if len(public_methods(own)) > MOST_PUBLIC_METHODS}
    assert wide <= WIDE_CLASSES
