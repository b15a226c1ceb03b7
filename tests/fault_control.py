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

from tests.faults import INDEX, READS, Faults, Rule, dead_disk, read_only

# Path of the control file, for `tests.serving.faulty_server`.
CONTROL_VARIABLE = "IMPRESS_TEST_FAULTS"
# What a randomised run draws from.
FAULTS: dict[str, tuple[Rule, ...]] = {
    "reads fail": (Rule("EIO", READS, probability=0.3),),
    "blocks fail": (Rule("EIO", "block", probability=0.05),),
    "blocks time out": (Rule("ETIMEDOUT", "block", probability=0.05),),
    "blocks are short": (Rule("short", "block", probability=0.05),),
    "blocks are wrong": (Rule("flip", "block", probability=0.05),),
    "blocks are late": (Rule("delay", "block", probability=0.3, seconds=0.03),),
    "blocks hang": (Rule("hang", "block", count=3),),
    "reads are wrong": (Rule("flip", "read", probability=0.5),),
    "no descriptors": (Rule("EMFILE", "open|open-write", probability=0.7),),
    "writes fail": (Rule("EIO", "write", probability=0.3),),
    "writes are torn": (Rule("torn", "write", probability=0.3),),
    "writes are torn and nobody knows": (Rule("torn-silent", "write", count=2),),
    "writes are wrong": (Rule("flip", "write", count=2),),
    "writes hang": (Rule("hang", "write", count=1),),
    "disk full": (Rule("ENOSPC", "write|open-write"), Rule("full", "free_bytes")),
    "syncs fail": (Rule("EIO", "sync|sync_directory", probability=0.5),),
    "renames fail": (Rule("EIO", "rename", probability=0.5),),
    "index fails": (Rule("EIO", "write|rename|open-write", INDEX, probability=0.5),),
    "index torn": (Rule("torn", "write", INDEX, probability=0.5),),
    "read-only": tuple(read_only()),
    "slow disk": (Rule("delay", "*", probability=0.5, seconds=0.01),),
    "dead disk": tuple(dead_disk()),
    "no such device": tuple(dead_disk("ENODEV")),
    "a writer dies": (Rule("raise", "write", count=1),),
    "an engine dies": (Rule("raise", "start|finish", count=1),),
}


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
