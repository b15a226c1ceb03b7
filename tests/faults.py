"""A file system that fails by rules, under a store that does not know.

`FaultyFileSystem` stands where `impress_sglang.storage.files.FileSystem` does. A `Rule` names the
operations and paths that it strikes, what goes wrong, and how often; rules may be added and removed
while the store runs. Every fault is counted by its rule, so that a test can insist that it happened
(`injected`).

Operations: open, open-write (may change the file), close, read, write, sync, sync_directory,
rename, unlink, make_directory, remove_directory, list, stat, free_bytes, engine, start and finish
(calls of a block engine), and block (one read of a block engine).

Faults:
  <errno>      any name of `errno`: raised as OSError, and minus the number as the result of a block
  short        a read ends early: EOFError, or fewer bytes for a block
  torn         the first part of a write lands, then EIO
  torn-silent  the first part of a write lands, and nobody is told
  torn-kill    the first part of a write lands, then the process is killed
  flip         one bit is wrong: in memory after a read or block, on disk after a write
  delay        it takes `seconds` longer
  hang         it does not return until the rule is removed
  raise        an exception that is no OSError (for a block: EIO)
  kill         the process is killed before the operation
  full         free_bytes says 0
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fnmatch
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from impress_sglang.storage.engines import BlockEngine
from impress_sglang.storage.files import AlignedBuffer, FileSystem
from tests.durability import Journal
from tests.faulty_engine import FaultyEngine

READS = "open|read|block"
INDEX = "*/journal*"
"""Paths of the index of a store."""
POLL_SECONDS = 0.005

# Faults that are no errno, and where they can strike.
_APPLIES = {
    "short": "read|block",
    **dict.fromkeys(("torn", "torn-silent", "torn-kill"), "write"),
    "flip": "read|write|block",
    "full": "free_bytes",
    **dict.fromkeys(("delay", "hang", "raise", "kill"), "*"),
}


class Unforeseen(RuntimeError):
    """What the fault `raise` raises: nobody may have planned for it."""


class Killed(BaseException):
    """This process would be dead now: raised by a file system whose process was killed."""


@dataclasses.dataclass
class Rule:
    """What goes wrong, where and how often.

    `operations` are patterns with | between them, `path` is a pattern for the whole path. Of the
    operations that match, the first `after` go well, then each fails with `probability` until
    `count` have failed. `hits` counts these.
    """

    fault: str
    operations: str = "*"
    path: str = "*"
    count: int | None = None
    after: int = 0
    probability: float = 1.0
    seconds: float = 0.05
    name: str = ""
    hits: int = dataclasses.field(default=0, compare=False)
    seen: int = dataclasses.field(default=0, compare=False)

    def __post_init__(self) -> None:
        if self.fault not in _APPLIES and not hasattr(errno, self.fault):
            raise ValueError(f"there is no fault {self.fault!r}")
        self.name = self.name or f"{self.fault} {self.operations} {self.path}"

    @property
    def waits(self) -> bool:
        return self.fault in ("delay", "hang")

    def strikes(self, operation: str, path: str, chance: Callable[[], float]) -> bool:
        """Whether this operation fails; counts it."""
        if not (
            _matches(operation, self.operations)
            and _matches(operation, _APPLIES.get(self.fault, "*"))
            and fnmatch.fnmatchcase(path, self.path)
        ):
            return False
        self.seen += 1
        spent = self.count is not None and self.hits >= self.count
        if spent or self.seen <= self.after or chance() >= self.probability:
            return False
        self.hits += 1
        return True


def read_only() -> list[Rule]:
    """What a file system does that was mounted again read-only."""
    return [Rule("EROFS", "open-write|write|rename|unlink|make_directory|remove_directory")]


def dead_disk(error: str = "EIO") -> list[Rule]:
    """What a disk does that has gone: nothing works."""
    return [Rule(error)]


class Faults:
    """The rules in force; used by all threads of a process."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._lock = threading.RLock()
        self._rules: dict[str, Rule] = {}
        self._chances: dict[str, random.Random] = {}
        self.hits: Counter[str] = Counter()
        self.operations: Counter[str] = Counter()

    def add(self, *rules: Rule) -> None:
        """Those of the same name are replaced."""
        with self._lock:
            for rule in rules:
                self._rules[rule.name] = rule
                self._chances.setdefault(rule.name, random.Random(f"{self._seed} {rule.name}"))

    def clear(self) -> None:
        """What hangs by them goes on."""
        with self._lock:
            self._rules.clear()

    @contextlib.contextmanager
    def injected(self, *rules: Rule) -> Iterator[None]:
        """Rules for the time of a `with` block, each of which must have struck in it."""
        before = {rule.name: self.hits[rule.name] for rule in rules}
        self.add(*rules)
        try:
            yield
        finally:
            with self._lock:
                for rule in rules:
                    self._rules.pop(rule.name, None)
        missed = [name for name, hits in before.items() if self.hits[name] == hits]
        assert not missed, f"faults that never happened: {missed}; {dict(self.operations)}"

    def active(self, rule: Rule) -> bool:
        self.refresh()
        return self._rules.get(rule.name) is rule

    def pick(self, operation: str, path: str) -> list[Rule]:
        """The rules that strike this operation: delays and hangs, then at most one other."""
        self.refresh()
        with self._lock:
            self.operations[operation] += 1
            waits, others = list[Rule](), list[Rule]()
            for name, rule in self._rules.items():
                chance = self._chances[name].random
                if (rule.waits or not others) and rule.strikes(operation, path, chance):
                    self.hits[name] += 1
                    (waits if rule.waits else others).append(rule)
        if waits or others:
            self.noted()
        return waits + others

    def refresh(self) -> None:
        """Look whether the rules have changed outside; see `tests.serving.faulty_server`."""

    def noted(self) -> None:
        """Something was hit."""


class FaultyFileSystem(FileSystem):
    """Fails by the rules of `faults`, and can lose power.

    Args:
        journal: a directory beside the store's, on the same file system, for what power loss takes
            back; without it there is no `power_loss`.
        kill: ends the process; the default ends only what goes through this file system: from then
            on everything raises `Killed`, and what it had open is closed, as if the process had
            gone.
    """

    def __init__(
        self,
        faults: Faults | None = None,
        *,
        journal: Path | None = None,
        kill: Callable[[], None] | None = None,
    ) -> None:
        self.faults = Faults() if faults is None else faults
        self.kill_process = kill or self.kill
        self._journal = None if journal is None else Journal(journal)
        self._lock = threading.RLock()
        self._paths: dict[int, Path] = {}
        self._killed = False

    # Files

    def open(self, path: Path, flags: int) -> int:
        changes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        self.enter("open-write" if changes else "open", path)
        with self._lock:
            new = bool(flags & os.O_CREAT) and not path.exists()
            descriptor = super().open(path, flags)
            self._paths[descriptor] = path
            if new and self._journal is not None:
                self._journal.created(path)
        return descriptor

    def close(self, descriptor: int) -> None:
        with self._lock:
            path = self._paths.pop(descriptor, None)
            if path is None and self._killed:
                # It was closed with the process, and its number may be another file's by now.
                return
        super().close(descriptor)
        self.enter("close", path)

    def read(self, descriptor: int, offset: int, target: memoryview) -> None:
        fault = self.enter("read", self.path_of(descriptor))
        if fault == "short":
            super().read(descriptor, offset, target[: _half(len(target))])
            raise EOFError(f"expected {len(target)} bytes at {offset}, and half of them came")
        super().read(descriptor, offset, target)
        if fault == "flip":
            target[len(target) // 2] ^= 1

    def write(self, descriptor: int, offset: int, source: memoryview) -> None:
        fault = self.enter("write", self.path_of(descriptor))
        if fault == "flip":
            source = _flipped(source)
        if fault is not None and fault.startswith("torn"):
            source = source[: _half(len(source))]
        if self._journal is not None:
            self._journal.write(descriptor, offset, len(source))
        super().write(descriptor, offset, source)
        if fault == "torn":
            raise OSError(errno.EIO, "injected: a torn write")
        if fault == "torn-kill":
            self.kill_process()

    def set_mtime(self, descriptor: int, written_ns: int) -> None:
        self.enter("date", self.path_of(descriptor))
        super().set_mtime(descriptor, written_ns)

    def sync(self, descriptor: int) -> None:
        self.enter("sync", self.path_of(descriptor))
        super().sync(descriptor)
        if self._journal is not None:
            self._journal.synced(descriptor)

    # Names

    def sync_directory(self, path: Path) -> None:
        self.enter("sync_directory", path)
        super().sync_directory(path)
        if self._journal is not None:
            self._journal.directory_synced(path)

    def rename(self, source: Path, target: Path) -> None:
        self.enter("rename", source)
        journal = self._journal
        with journal.rename(source, target) if journal else contextlib.nullcontext():
            super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self.enter("unlink", path)
        if self._journal is not None:
            self._journal.unlink(path)
        super().unlink(path)

    def make_directory(self, path: Path, *, parents: bool = False) -> None:
        self.enter("make_directory", path)
        super().make_directory(path, parents=parents)

    def remove_directory(self, path: Path) -> None:
        self.enter("remove_directory", path)
        super().remove_directory(path)

    def list(self, path: Path) -> list[str]:
        self.enter("list", path)
        return super().list(path)

    def stat(self, path: Path | str) -> os.stat_result:
        self.enter("stat", path)
        return super().stat(path)

    def free_bytes(self, path: Path) -> int:
        return 0 if self.enter("free_bytes", path) == "full" else super().free_bytes(path)

    # Engines

    def engine(self, name: str, depth: int) -> BlockEngine:
        self.enter("engine", None)
        return FaultyEngine(super().engine(name, depth), self)

    # What fails

    def path_of(self, descriptor: int) -> Path | None:
        with self._lock:
            return self._paths.get(descriptor)

    def enter(self, operation: str, path: Path | str | None) -> str | None:
        """Begin an operation: wait or raise as the rules say; the fault that the caller does."""
        self.check_alive()
        for rule in self.faults.pick(operation, str(path or "")):
            if not rule.waits:
                return self._strike(rule, operation, path)
            if rule.fault == "delay":
                time.sleep(rule.seconds)
            while rule.fault == "hang" and self.faults.active(rule):
                self.check_alive()
                time.sleep(POLL_SECONDS)
        return None

    def check_alive(self) -> None:
        """Raise `Killed` if the process would be gone."""
        if self._killed:
            raise Killed

    def _strike(self, rule: Rule, operation: str, path: Path | str | None) -> str:
        if rule.fault == "raise":
            raise Unforeseen(f"injected into {operation} of {path}")
        if rule.fault == "kill":
            self.kill_process()
        if hasattr(errno, rule.fault):
            number = getattr(errno, rule.fault)
            raise OSError(number, f"injected: {os.strerror(number)}", str(path))
        return rule.fault

    # Ends

    def kill(self) -> None:
        """As if the process were killed: what it had open is closed, and nothing works any more."""
        with self._lock:
            self._killed = True
            open_files, self._paths = list(self._paths), {}
            # Whoever kills it as well comes back to files that are closed.
            for descriptor in open_files:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        raise Killed

    def power_loss(self, *, everything: bool = True, seed: int = 0) -> None:
        """Kill, and take back what was not durable.

        `everything`: all that was not synced is gone; else each unsynced write is kept, lost,
        zeroed or torn, and some of the last unsynced renames are undone, by `seed`.
        """
        assert self._journal is not None, "power_loss needs a journal"
        with contextlib.suppress(Killed):
            self.kill()
        self._journal.power_loss(None if everything else random.Random(seed))


def _matches(word: str, patterns: str) -> bool:
    return any(fnmatch.fnmatchcase(word, pattern) for pattern in patterns.split("|"))


def _half(size: int) -> int:
    """About half of a read or write; of whole blocks whole blocks, as O_DIRECT wants."""
    return size // 2 if size % 4096 else size // 2 // 4096 * 4096


def _flipped(source: memoryview) -> memoryview:
    """A copy with one wrong bit, aligned as O_DIRECT wants."""
    copy = AlignedBuffer().view(len(source))
    copy[:] = source
    copy[len(copy) // 2] ^= 1
    return copy
