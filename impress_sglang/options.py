"""Words and rules for the values of options; `config.ImpressConfig` is the table of all."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any, TypeGuard

# Policies that load prefixes from codes.
CODED_POLICIES = ("impress", "impress+lfu", "impress+lru")
# Those that use a part of a prefix, which they choose by the question, within the model's pass.
PART_POLICIES = ("paper", "paper+itf+reorder", "paper+itf", "as+h2o+lfu", "as+h2o+lru")
POLICIES = (*CODED_POLICIES, *PART_POLICIES, "as", "recompute")
REORDER_KEYS = ("selected", "importance")
IO_ENGINES = ("auto", "aio", "threads")
LOADS = ("faster", "always")
# The value of --impress-retention, --impress-bits and --impress-blend that leaves the choice to the
# server, and the least that it chooses.
AUTO = "auto"
# The value of --impress-bits if none is given: `USUAL_BITS`, or `EXACTLY` where KVs are not coded.
USUAL = "usual"
AUTO_FLOOR = 0.25
AUTO_SHARE = 0.15
# The value of --impress-bits for KVs as they were computed, and the number that stands for it,
# whatever their dtype has. Otherwise it is the rate of codes without a basis, in bits per element.
EXACTLY = "exact"
EXACT_BITS = 16.0
# What is written of a prefix.
BOTH, CODES = "both", "codes"
KEEPS = (AUTO, BOTH, CODES, EXACTLY)
BITS = (5.0, 6.0)
BITS_TEXT = ", ".join(f"{bits:g}" for bits in BITS)
# Of a request that asks for none, and of codes where `AUTO` or `EXACTLY` is asked for.
USUAL_BITS = 6.0
ON, OFF = "on", "off"
CLASSES, SHORTEST = "classes", "shortest"
SCHEDULES = (OFF, CLASSES, SHORTEST)


def is_bucket(text: str) -> bool:
    """Whether this is a bucket with or without a prefix, or empty."""
    return not text or re.fullmatch(r"s3://[^/\s]+(/\S*)?", text) is not None


def is_number(value: object) -> TypeGuard[float]:
    """Whether this is an int or a float; to isinstance True is one, too."""
    return type(value) in (int, float)


def is_bits(value: object) -> bool:
    """Whether this is a precision: bits per element, or `EXACTLY`."""
    return value == EXACTLY or (is_number(value) and value in BITS)


def number_of_bits(bits: float | str) -> float:
    """What `EXACTLY` stands for, `USUAL`, the least that `AUTO` gives, else the number itself."""
    if bits in (AUTO, USUAL):
        return USUAL_BITS
    return EXACT_BITS if bits == EXACTLY else float(bits)


def is_blend(value: object) -> bool:
    """Whether this is a share of reused tokens to compute again, `AUTO` or `OFF`."""
    return value in (AUTO, OFF) or (is_number(value) and 0.0 <= value <= 1.0)


def is_truncation(value: object) -> bool:
    """Whether this is a share of a conversation to cut at once, or `OFF`."""
    return value == OFF or (type(value) is float and 0.0 < value < 1.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """Which values an option may have, of its type; `expected` says it in a message."""

    expected: str
    holds: Callable[[Any], bool]
    choices: tuple[str, ...] | None = None


def one_of(names: tuple[str, ...]) -> Rule:
    """One of some names."""
    return Rule(f"one of {', '.join(names)}", lambda value: value in names, names)


def at_least(least: float) -> Rule:
    """A finite number that is not less."""
    return Rule(f"{least:g} or more and finite", lambda value: least <= value < math.inf)


def above(least: float) -> Rule:
    """A finite number that is more."""
    return Rule(f"more than {least:g} and finite", lambda value: least < value < math.inf)


def between(least: float, most: float) -> Rule:
    """A number from the one to the other."""
    return Rule(f"{least:g} to {most:g}", lambda value: least <= value <= most)
