"""Faults of a server's processes, switched from outside.

The test writes rules to a JSON file; each process of the server looks at the file's time before
every operation, and writes what it has injected to a file of its own beside it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from tests.faults import Faults, Rule

# Path of the control file, for `tests.serving.faulty_server`.
CONTROL_VARIABLE = "IMPRESS_TEST_FAULTS"


class FaultControl:
    """The test's end."""

    def __init__(self, path: Path, seed: int = 0) -> None:
        self.path, self._seed = path, seed
        self.set()

    def set(self, *rules: Rule) -> None:
        """Let these rules be in force, and no others."""
        fresh = [dataclasses.replace(rule, hits=0, seen=0) for rule in rules]
        _write(self.path, {"seed": self._seed, "rules": [dataclasses.asdict(r) for r in fresh]})

    def hits(self) -> Counter[str]:
        """How often each rule has struck, in all processes there ever were, by its name."""
        total: Counter[str] = Counter()
        for path in self.path.parent.glob(f"{self.path.name}.hits.*"):
            with contextlib.suppress(FileNotFoundError):
                total.update(json.loads(path.read_text()))
        return total


class ControlledFaults(Faults):
    """The server's end: rules that follow the control file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._noting = threading.Lock()

    def refresh(self) -> None:
        stat = os.stat(self._path)
        if (stat.st_mtime_ns, stat.st_ino) == self._seen:
            return
        with self._lock:
            self._seen = stat.st_mtime_ns, stat.st_ino
            told = json.loads(self._path.read_text())
            self._seed = told["seed"]
            wanted = [Rule(**fields) for fields in told["rules"]]
            # A rule that stays keeps its count, and whoever hangs by it.
            kept = {rule.name: self._rules.get(rule.name) for rule in wanted}
            self.clear()
            self.add(*(rule if kept[rule.name] != rule else kept[rule.name] for rule in wanted))

    def noted(self) -> None:
        with self._noting:
            _write(self._path.with_name(f"{self._path.name}.hits.{os.getpid()}"), dict(self.hits))


def _write(path: Path, content: Any) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content))
    temporary.rename(path)
