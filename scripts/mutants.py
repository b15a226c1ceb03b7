"""Mutation testing: small changes to the product, each of which some test should notice.

    python scripts/mutants.py --count 200 --seed 1

A mutant is one change in a function: a comparison, an operator, a number, a condition, a result or
a statement left out. One process collects all tests but those of servers and notes which functions
each calls. For each mutant a fork of it gets the changed code and runs tests that call the
function, one of each test function first and then more of those that are quick, until one fails.
One whose tests do not end is killed, too: without it they took less than a third of the time that
it is given. A mutant is drawn by the hash of its place, so one seed draws nearly the same ones from
two versions of the code. A run takes half an hour on one core; tests in processes of their own do
not see a mutant.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import gc
import hashlib
import itertools
import json
import math
import os
import signal
import sys
import tempfile
import threading
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
# What is changed: storage, tiers, reading of codes, load jobs, matching, quota, admission, saving.
TARGETS = (
    "storage/*",
    "tiers/*",
    "transfer/sources",
    "transfer/wanted",
    "serving/job_queue",
    "serving/load_jobs",
    "serving/ranks",
    "store/tree",
    "store/stored",
    "store/store",
    "store/writing",
    "store/quota",
    "store/health",
    "paper/request",
    "paper/plugin/part_cache",
    "plugin/prefix_saves",
)
SWAPS = {
    old: new
    for pair in (
        (ast.Lt, ast.LtE),
        (ast.Gt, ast.GtE),
        (ast.Eq, ast.NotEq),
        (ast.Is, ast.IsNot),
        (ast.In, ast.NotIn),
        (ast.And, ast.Or),
        (ast.Add, ast.Sub),
        (ast.Mult, ast.FloorDiv),
        (ast.BitAnd, ast.BitOr),
    )
    for old, new in (pair, pair[::-1])
}
# Seconds: of a mutant's tests as they were timed, and of a mutant, which is killed then.
TESTS_SECONDS, MUTANT_SECONDS = 20, 60


class Mutant(NamedTuple):
    """The `number`-th thing that can be changed in a module, and the function that has it."""

    path: str
    number: int
    function: str
    place: str


def targets() -> Iterator[Path]:
    """Files that are changed."""
    for pattern in TARGETS:
        found = sorted((ROOT / "impress_sglang").glob(f"{pattern}.py"))
        assert found, f"there is no {pattern}.py"
        yield from found


def candidates(tree: ast.Module) -> Iterator[tuple[ast.AST, str, str]]:
    """What can be changed, with the outermost function that has it and its statement."""

    def walk(node: ast.AST, names: str, function: str, where: str) -> Iterator[Any]:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names = f"{names}.{node.name}".lstrip(".")
            if isinstance(node, ast.FunctionDef):
                function = function or names
        elif isinstance(node, ast.stmt):
            where = ast.unparse(node).splitlines()[0]
        if function and is_changeable(node):
            yield node, function, f"{names}: {where} [{type(node).__name__}]"
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "returns", "decorator_list", "defaults", "kw_defaults"):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST) and not is_left_alone(child):
                        yield from walk(child, names, function, where)

    yield from walk(tree, "", "", "")


def is_left_alone(node: ast.AST) -> bool:
    """Assertions, and what is said in logs and errors."""
    said = isinstance(node, ast.Expr) and "log" in ast.unparse(node).partition(".")[0].lower()
    return said or isinstance(node, ast.Assert | ast.Raise | ast.JoinedStr)


def is_changeable(node: ast.AST) -> bool:
    """Whether `change` knows what to do with it."""
    if isinstance(node, ast.Compare):
        return len(node.ops) == 1
    if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign):
        return type(node.op) in SWAPS
    if isinstance(node, ast.Constant):
        return isinstance(node.value, bool | int)
    if isinstance(node, ast.Expr):
        # Without `super()` a function has another closure, which it cannot be given.
        return isinstance(node.value, ast.Call) and "super()" not in ast.unparse(node)
    if isinstance(node, ast.Assign):
        return isinstance(node.targets[0], ast.Attribute | ast.Subscript)
    if isinstance(node, ast.Return):
        return node.value is not None
    return isinstance(node, ast.If | ast.While | ast.IfExp)


def change(node: ast.AST) -> None:
    """Make a node its mutant, in place."""
    if isinstance(node, ast.Compare):
        node.ops = [SWAPS[type(node.ops[0])]()]
    elif isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign):
        node.op = SWAPS[type(node.op)]()
    elif isinstance(node, ast.Constant):
        node.value = not node.value if isinstance(node.value, bool) else int(node.value) + 1
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.Assign | ast.Expr | ast.Return):
        node.value = ast.Constant(None)
        if isinstance(node, ast.Assign):
            node.targets = [ast.Name("_", ast.Store())]


def draw(count: int, seed: int, only: str) -> list[Mutant]:
    """The first mutants by their hashes, of files whose paths contain `only`."""
    found, seen = [], Counter[str]()
    for path in (path for path in targets() if only in str(path)):
        name = str(path.relative_to(ROOT))
        for number, (_, function, where) in enumerate(candidates(ast.parse(path.read_text()))):
            seen[f"{name} {where}"] += 1
            place = f"{name} {where} #{seen[f'{name} {where}']}"
            found.append(Mutant(name, number, function, place))

    def chance(mutant: Mutant) -> bytes:
        return hashlib.sha256(f"{seed} {mutant.place}".encode()).digest()

    return sorted(found, key=chance)[:count]


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """It and all that is defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)


def put_in_place(mutant: Mutant, functions: Sequence[types.FunctionType]) -> None:
    """Give the functions of its module their changed code, in this process."""
    path = ROOT / mutant.path
    tree = ast.parse(path.read_text())
    change(next(itertools.islice(candidates(tree), mutant.number, None))[0])
    module = compile(ast.fix_missing_locations(tree), str(path), "exec", dont_inherit=True)
    changed = {(code.co_qualname, code.co_firstlineno): code for code in codes_in(module)}
    for function in functions:
        code = function.__code__
        if code.co_filename == str(path):
            function.__code__ = changed[code.co_qualname, code.co_firstlineno]


class Calls:
    """Notes for each test that passes which functions of the targets it calls, and its time."""

    def __init__(self) -> None:
        self._files = {str(path): str(path.relative_to(ROOT)) for path in targets()}
        self._codes: dict[int, types.CodeType] = {}
        # Of each test: its seconds and its functions.
        self.found: dict[str, tuple[float, list[str]]] = {}

    def _note(self, frame: types.FrameType, event: str, _: object) -> None:
        if event == "call":
            self._codes[id(frame.f_code)] = frame.f_code

    def run(self, item: pytest.Item, following: pytest.Item | None) -> None:
        """Run a test and take notes."""
        self._codes, began, failed = {}, time.monotonic(), item.session.testsfailed
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        run_test(item, following)
        sys.setprofile(None)
        names = {
            f"{self._files[code.co_filename]} {code.co_qualname.partition('.<locals>')[0]}"
            for code in list(self._codes.values())
            if code.co_filename in self._files and item.session.testsfailed == failed
        }
        self.found[item.nodeid] = time.monotonic() - began, sorted(names)


def run_test(item: pytest.Item, following: pytest.Item | None) -> None:
    """One test, in this process."""
    item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)


def in_fork(work: Callable[[], int], seconds: float) -> int | None:
    """What `work` gives in a fork of this process; none if it takes longer."""
    with tempfile.TemporaryDirectory() as folder:
        return _in_fork(work, seconds, folder)


def _in_fork(work: Callable[[], int], seconds: float, folder: str) -> int | None:
    child = os.fork()
    if child == 0:
        os.setpgrp()
        # Folders of tests, which no fork removes at its end.
        os.environ["PYTEST_DEBUG_TEMPROOT"] = folder
        output = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(output, descriptor)
        try:
            os._exit(work())
        finally:
            # Else it would go on as this process, and end well.
            os._exit(2)
    deadline, ended, status = time.monotonic() + seconds, 0, 0
    while not ended and time.monotonic() < deadline:
        time.sleep(0.02)
        ended, status = os.waitpid(child, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not ended:
        os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) if ended else None


class Mutants:
    """The plugin: in place of running what was collected it looks which mutants that kills."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._functions: list[types.FunctionType] = []
        self.said: dict[str, str] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Instead of pytest's own."""
        files = {str(path) for path in targets()}
        # `tests/conftest.py` freezes what is imported, which `get_objects` then leaves out.
        gc.unfreeze()
        everything = gc.get_objects()
        functions = [function for function in everything if type(function) is types.FunctionType]
        self._functions = [call for call in functions if call.__code__.co_filename in files]
        assert self._functions, "nothing could be changed"
        gc.freeze()
        session.config.pluginmanager.unregister(name="terminalreporter")
        calls = self._calls(session.items)
        for mutant in draw(self._options.count, self._options.seed, self._options.only):
            items = self._items(session, calls, f"{mutant.path} {mutant.function}")
            began = time.monotonic()
            status = in_fork(lambda m=mutant, i=items: self._run(session, m, i), MUTANT_SECONDS)
            assert status != 2, f"{mutant.place} could not be tried"
            said = "survived" if status == 0 else "killed"
            self.said[mutant.place] = said if items else "never called"
            took = time.monotonic() - began
            print(f"{took:6.1f} s {self.said[mutant.place]} {mutant.place}", flush=True)
            self._options.json.write_text(json.dumps(self.said, indent=1))
        return True

    def _calls(self, items: Sequence[pytest.Item]) -> dict[str, tuple[float, list[str]]]:
        def note() -> int:
            calls = Calls()
            for item, following in itertools.zip_longest(items, items[1:]):
                calls.run(item, following)
            path.write_text(json.dumps(calls.found))
            return 0

        path = self._options.json.with_suffix(".calls.json")
        if not path.exists():
            assert in_fork(note, math.inf) == 0
        found: dict[str, tuple[float, list[str]]] = json.loads(path.read_text())
        return found

    def _items(
        self, session: pytest.Session, calls: dict[str, tuple[float, list[str]]], function: str
    ) -> list[pytest.Item]:
        """Tests that call a function, as many as a mutant may take."""
        turns: list[tuple[int, float, pytest.Item]] = []
        seen = Counter[str]()
        for item in session.items:
            seconds, names = calls[item.nodeid]
            if function in names:
                name = item.nodeid.partition("[")[0]
                turns.append((seen[name], seconds, item))
                seen[name] += 1
        # The rows of a quick table come before the next one of a slow test.
        turns.sort(key=lambda turn: (turn[0] * turn[1], turn[1]))
        spent = itertools.accumulate(seconds for _, seconds, _ in turns)
        return [turn[2] for turn, sum_ in zip(turns, spent, strict=True) if sum_ < TESTS_SECONDS]

    def _run(self, session: pytest.Session, mutant: Mutant, items: Sequence[pytest.Item]) -> int:
        put_in_place(mutant, self._functions)
        for item, following in itertools.zip_longest(items, items[1:]):
            run_test(item, following)
            if session.testsfailed:
                return 1
        return 0


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="such as serving/job_queue: part of a path")
    parser.add_argument("--json", type=Path, default=Path("build/mutants.json"))
    parser.add_argument("tests", nargs="*", default=["tests"])
    options = parser.parse_args()
    options.json.parent.mkdir(parents=True, exist_ok=True)
    plugin = Mutants(options)
    arguments = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout=0"]
    arguments += ["-m", "not serving", *options.tests]
    pytest.main(arguments, plugins=[plugin])
    counts = Counter(plugin.said.values())
    print(f"{counts['killed']} of {counts.total()} killed: {dict(counts)}")


if __name__ == "__main__":
    main()
