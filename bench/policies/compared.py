"""What is compared: policies by name, the stores that they read, and their flags."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from bench.core.report import Row, ratio
from impress_sglang.options import CODED_POLICIES, EXACTLY, is_bits
from impress_sglang.options import POLICIES as ALL_POLICIES

POLICIES = (
    "recompute",
    "as",
    "as+h2o+lru",
    "as+h2o+lfu",
    "paper+itf",
    "paper+itf+reorder",
    "paper",
    "impress",
)
BASELINES = POLICIES[:4]
REORDERING = ("paper+itf+reorder", "paper")
# `impress@BITS` loads prefixes in so many bits, `even@BITS` too, but spreads them evenly.
WITH_BITS = ("impress", "even")
# Appended to a policy: the queue does not say what its server evicts.
NO_LOOKAHEAD = "-off"
# Stores differ by whether they have probe heads; each is written by a policy that reads it.
STORED_BY = {"codes": "as", "paper": "paper"}
# Shorter than any prefix of a trace.
MIN_PREFIX_TOKENS = 128


def store_kind(policy: str) -> str:
    """A key of `STORED_BY`."""
    return "paper" if policy.startswith("paper") else "codes"


def ordinary(policy: str) -> str:
    """The same policy with look-ahead."""
    return policy.removesuffix(NO_LOOKAHEAD)


def policy(text: str) -> str:
    """A policy, or one of `WITH_BITS` with bits, perhaps `NO_LOOKAHEAD`; for `Option.parse`."""
    base, at, bits = ordinary(text).partition("@")
    known = base in ALL_POLICIES
    if at:
        known = base in WITH_BITS and bits == EXACTLY
        with contextlib.suppress(ValueError):
            known = known or (base in WITH_BITS and is_bits(float(bits)))
    if not known:
        names = ", ".join(ALL_POLICIES)
        raise argparse.ArgumentTypeError(
            f"{text!r} is not one of {names}, impress@BITS and even@BITS, with or without "
            f"{NO_LOOKAHEAD}"
        )
    return text


@dataclasses.dataclass(frozen=True, slots=True)
class Tiers:
    """Caches in MB in front of the SSD."""

    device_mb: float
    host_mb: float


NO_TIERS = Tiers(0, 0)


def policy_flags(policy: str, store: Path, retention: float, tiers: Tiers) -> list[str]:
    """Arguments of the extension for one policy; `impress` loads all tokens in few bits."""
    name, _, bits = ordinary(policy).partition("@")
    base = "impress" if name in WITH_BITS else name
    ours = base in CODED_POLICIES
    flags = ["--enable-impress", f"--impress-ssd-dir={store}", f"--impress-policy={base}"]
    if name == "recompute":
        return flags
    flags += [
        # What is compared is loading, so prefixes are stored at once and never computed instead.
        "--impress-write-after=1",
        "--impress-load=always",
        f"--impress-min-prefix-tokens={MIN_PREFIX_TOKENS}",
        f"--impress-retention={1.0 if ours else retention}",
        # A measured request leaves nothing behind.
        "--impress-approximation-depth=0",
        f"--impress-device-gb={tiers.device_mb / 1e3:.6f}",
        f"--impress-host-gb={tiers.host_mb / 1e3:.6f}",
    ]
    if policy.endswith(NO_LOOKAHEAD):
        flags.append("--impress-lookahead=off")
    if bits:
        flags.append(f"--impress-bits={bits}")
    if name == "even":
        flags.append("--impress-allocate=even")
    if name in REORDERING:
        flags.append("--impress-reorder-interval=0")
    return flags


def add_speedups(rows: Sequence[Row]) -> None:
    """Add to each row how many times faster it is than the fastest baseline of the run."""
    means = [row["ttft_ms_mean"] for row in rows if ordinary(row["policy"]) in BASELINES]
    for row in rows:
        row["speedup_over_best_baseline"] = ratio(min(means, default=0.0), row["ttft_ms_mean"])


def link_store(source: Path, target: Path) -> None:
    """Make a store with the same prefixes: segments, which never change, are hard links.

    The catalog is copied, since servers write to it; a lock belongs to one directory.
    """
    for path in sorted(source.rglob("*")):
        copy = target / path.relative_to(source)
        if path.is_dir():
            copy.mkdir(parents=True, exist_ok=True)
        elif "segments" in path.relative_to(source).parts:
            os.link(path, copy)
        elif path.name != "lock":
            shutil.copy2(path, copy)


def segment_sizes(store: Path) -> list[int]:
    """Bytes of each stored segment."""
    return [path.stat().st_size for path in store.glob("*/segments/*/*") if path.is_file()]
