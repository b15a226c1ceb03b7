"""What options may be, and what they mean; `config.ImpressConfig` has them, and their rules.

docs/options.md is made from both.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any, TypeGuard

POLICIES = (
    "impress",
    "impress+lfu",
    "impress+lru",
    "paper",
    "paper+itf+reorder",
    "paper+itf",
    "as+h2o+lfu",
    "as+h2o+lru",
    "as",
    "recompute",
)
# Those that load prefixes from codes.
CODED_POLICIES = ("impress", "impress+lfu", "impress+lru")
# Those that use a part of a prefix, which they choose by the question, within the model's pass.
PART_POLICIES = ("paper", "paper+itf+reorder", "paper+itf", "as+h2o+lfu", "as+h2o+lru")
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


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """One field of the configuration, as users see it."""

    field: str
    parse: Callable[[str], Any]
    types: tuple[type, ...]
    rule: Rule
    help: str

    @property
    def flag(self) -> str:
        """Its name on the command line."""
        return "--impress-" + self.field.replace("_", "-")


MEANINGS = {
    "ssd_dir": "Directory of the SSD store.",
    "ssd_gb": "Quota of the SSD store, in GB (10^9 bytes).",
    "min_free_gb": "Free space to leave on its file system, in GB.",
    "namespace_gb": "Quota of each namespace (cache_salt, extra_key), in GB. A full one evicts "
    "its own prefixes. 0: no quota.",
    "write_after": "A prefix is stored when it is requested for this many times, counted at every "
    "64th token. 1: every prompt is stored at once.",
    "write_gb_per_day": "Daily write budget, in GB. Once it is spent, nothing is stored until it "
    "refills. 0: no limit.",
    "ttl": "Seconds after which a stored prefix is removed, used or not. 0: no limit.",
    "store": "Object store that servers share, s3://bucket/prefix. The directory is then a cache.",
    "store_gb": "Quota of the object store, in GB. The oldest objects go. 0: no quota.",
    "retention": "Policies paper* and as+h2o*: fraction of a stored prefix that each layer "
    f"attends to. auto: the largest whose I/O hides behind compute, at least {AUTO_FLOOR:g}.",
    "min_retention": "Floor under the retention that a request asks for.",
    "bits": "Bits per element of codes, for all requests that ask for no more. exact: KVs as they "
    f"were computed. usual: {USUAL_BITS:g}, or exact where codes would not save (KVs in fp8). "
    f"auto: exact KVs where they take hardly longer than {USUAL_BITS:g} bits.",
    "basis": "File made by `impress calibrate` for this model. KVs are coded by it in fewer "
    "bytes, as accurately as in 6 bits without it, or in 5 with --impress-bits 5.",
    "keep": "What is written of a prefix. codes: KVs in few bits; requests for exact KVs compute "
    "them. exact: KVs as they were computed. both: three to five times the bytes of codes. auto: "
    "what --impress-bits may load.",
    "probe_heads": "Policies paper*: probe heads N of a multi-head model. With G KV heads, max(1, "
    "round(N * G / 32)) of them.",
    "alpha": "Policies paper*: exponent of the similarity threshold t = j**alpha.",
    "chunk_tokens": "Tokens per chunk, the unit of caching.",
    "min_prefix_tokens": "Shortest prefix to store, and shortest part of one to load.",
    "policy": "impress: prefixes in few bits. Baselines: impress+lfu, impress+lru (other caches), "
    "paper (IMPRESS as published), paper+itf+reorder (LFU caches), paper+itf (nor reordering), "
    "as+h2o+lru, as+h2o+lfu (all keys, important values), as (whole prefixes, like "
    "AttentionStore), recompute (no store).",
    "io_engine": "aio: Linux native AIO. threads: a pool of threads. auto: aio where the kernel "
    "has it.",
    "io_depth": "Reads in flight.",
    "io_timeout": "Seconds without progress after which a read or write is given up, and the "
    "store set aside until the disk answers again.",
    "readahead": "0: no prefetching. Any other number: what is certain to be wanted is read before "
    "its layer asks.",
    "lookahead": "on: what queued requests will use is evicted last from SGLang's pool, the "
    "caches and the SSD. off: only SGLang's pool protects it.",
    "schedule": "How the first 16 queued requests of equal priority change places. classes: ready "
    "ones go before those to compute, these before those to read. shortest: the shortest prefill, "
    "among those that need not wait for the drive.",
    "load": "faster: a stored prefix is loaded if that is estimated to be faster than computing "
    "it. always: whenever it is stored.",
    "approximation_depth": "How many approximations a stored KV may rest on. 0: only exact KVs "
    "are stored. 1: also what is computed behind exact KVs in few bits, and so on.",
    "blend": "Reuse stored text where it is no prefix, which is approximate. A number: this share "
    "of its tokens is computed again. auto: the largest share that hardly takes longer than "
    f"{AUTO_SHARE:g}.",
    "blend_min_tokens": "Fewest tokens of a prompt that are worth blending.",
    "blend_seconds": "Most seconds of computing that a blend may take. A request that would need "
    "more is computed instead.",
    "truncate": "A prompt too long for the context is cut instead of refused: the system prompt "
    "stays, and this share of the room for the conversation is left out at once, the oldest first "
    "(AttentionStore: 0.5).",
    "device_gb": "Chunk cache on the device, in GB, beside SGLang's pools. 0: none.",
    "host_gb": "Chunk cache in CPU memory (pinned with CUDA), in GB. 0: none.",
    "buffer_gb": "Read buffers in CPU memory (pinned with CUDA), in GB. A prefix of which no "
    "layer fits is computed.",
    "half_life": "Requests after which an access counts half in a chunk's score. 0: accesses do "
    "not age.",
    "reorder_interval": "Policies that reorder: seconds between searches for prefixes worth "
    "reordering. 0: only on POST /impress/reorder.",
    "reorder_key": "Average by which tokens are reordered. selected: how often a token was. "
    "importance: its attention column sum, as in the paper.",
    "show_prompts": "on: GET /impress shows the first words of prompts instead of digests.",
}
"""What each option means, by its field."""
