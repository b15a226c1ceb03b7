"""Servers of several clones of this repository in one run, for figures before and after a change.

Each clone forks its servers from a process of its own, which runs in that clone's folder and so
imports its `impress_sglang` and its `bench.core`; that it does is checked. What asks the servers is
this clone's.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench.core.options import Option
from bench.core.servers import Servers, servers_in
from bench.core.session import ROOT, BenchFailed, work_folder

CHECKOUT = Option(
    "checkout", None, "a clone whose servers are measured (this one)", parse=Path, repeated=True
)


@dataclasses.dataclass(frozen=True, slots=True)
class Checkout:
    """A clone, by the name of its folder, and what is checked out there."""

    name: str
    root: Path
    commit: str | None

    def describe(self) -> dict[str, str | None]:
        """What a result says of it."""
        return {"name": self.name, "commit": self.commit}


def find_checkouts(given: Sequence[Path]) -> list[Checkout]:
    """Those that are given, or this clone.

    Raises:
        BenchFailed: one is no clone, or two have the same name.
    """
    found = [_find(path.resolve()) for path in given or [ROOT]]
    names = [own.name for own in found]
    if len(set(names)) != len(names):
        raise BenchFailed(f"clones must differ by the names of their folders: {', '.join(names)}")
    return found


@contextlib.contextmanager
def servers_of(
    args: argparse.Namespace, environment: Mapping[str, str] | None = None
) -> Iterator[dict[Checkout, Servers]]:
    """What starts servers of each `--checkout`, with a folder each, in the order in which given."""
    checkouts = find_checkouts(args.checkout)
    with work_folder(args.keep) as folder, contextlib.ExitStack() as stack:
        found = {}
        for own in checkouts:
            (folder / own.name).mkdir()
            pool = servers_in(folder / own.name, root=own.root, environment=environment)
            found[own] = stack.enter_context(pool)
        yield found


def _find(root: Path) -> Checkout:
    if not (root / "bench" / "core" / "zygote.py").is_file():
        raise BenchFailed(f"{root} is no clone of this repository")
    git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = None
    return Checkout(root.name, root, commit)
