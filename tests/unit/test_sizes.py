"""Nothing of the package grows until nobody sees through it."""

from __future__ import annotations

import ast
from pathlib import Path

import impress_sglang

PACKAGE = Path(impress_sglang.__file__).parent
MOST_LINES = 450
MOST_PUBLIC_METHODS = 15
# What is larger today. Nothing may be added here; who makes one of them smaller takes it out.
LONG_FILES: set[str] = set()
WIDE_CLASSES = {"CodeLayout", "FileSystem", "SegmentLayout"}


def public_methods(node: ast.ClassDef) -> set[str]:
    functions = (own for own in node.body if isinstance(own, ast.FunctionDef))
    return {own.name for own in functions if not own.name.startswith("_")}


def test_files_are_short() -> None:
    lines = {path: path.read_text().count("\n") for path in PACKAGE.rglob("*.py")}
    long = {str(path.relative_to(PACKAGE)) for path, own in lines.items() if own > MOST_LINES}
    assert long <= LONG_FILES


def test_classes_have_few_public_methods() -> None:
    trees = [ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")]
    classes = [own for tree in trees for own in ast.walk(tree) if isinstance(own, ast.ClassDef)]
    wide = {own.name for own in classes if len(public_methods(own)) > MOST_PUBLIC_METHODS}
    assert wide <= WIDE_CLASSES
