"""The configuration: one frozen, validated value, built once and passed down.

It is built from the command line (`from_options`), or for `sglang.Engine` users, who have no
argument parser, from the environment variable `IMPRESS_CONFIG` (`from_environment`), which
`enable_for_engine` sets after validating. No other module reads the environment.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from impress_sglang.errors import ConfigError

CONFIG_VARIABLE = "IMPRESS_CONFIG"
POLICIES = (
    "impress",
    "paper",
    "paper+itf+reorder",
    "paper+itf",
    "as+h2o+lfu",
    "as+h2o+lru",
    "as",
    "recompute",
)
# Those that never use a part of a prefix, whatever the retention.
WHOLE_POLICIES = ("as", "recompute")
REORDER_KEYS = ("selected", "importance")
IO_ENGINES = ("auto", "aio", "threads")
LOADS = ("faster", "always")
# The value of --impress-retention and of --impress-bits that leaves the choice to the server, and
# the least that it chooses.
AUTO = "auto"
AUTO_FLOOR = 0.25
AUTO_BITS = 5.0
# The value of --impress-bits for KVs as they were computed, and the number that stands for it,
# whatever their dtype has; else the bits of the base, and of base and planes (`precision.codec`).
EXACTLY = "exact"
EXACT_BITS = 16.0
LEAST_BITS, MOST_BITS = 4.0, 8.0
ALLOCATIONS = ("query", "even", "random")
DEFAULT_SSD_DIR = "~/.cache/impress-sglang/kv"


def is_bits(value: object) -> bool:
    """Whether this is a precision: bits per element on average, or `EXACTLY`."""
    # type() and not isinstance(): True is an int to isinstance.
    number = type(value) in (int, float)
    return value == EXACTLY or (number and LEAST_BITS <= float(str(value)) <= MOST_BITS)


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """How one field of the configuration looks on the command line."""

    field: str
    flag: str
    parse: Callable[[str], Any]
    help: str
    choices: tuple[str, ...] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ImpressConfig:
    """All options of the extension; see `OPTIONS` for what each one means and its unit.

    Raises:
        ConfigError: a value is out of range.
    """

    ssd_dir: str = DEFAULT_SSD_DIR
    ssd_gb: float = 32.0
    min_free_gb: float = 2.0
    retention: float | str = 1.0
    min_retention: float = 0.05
    bits: float | str = 5.0
    base_error: float = 0.33
    allocate: str = "query"
    probe_heads: int = 3
    alpha: float = 0.6
    chunk_tokens: int = 64
    min_prefix_tokens: int = 256
    policy: str = "impress"
    io_engine: str = "auto"
    io_depth: int = 32
    readahead: float = 0.2
    load: str = "faster"
    approximation_depth: int = 8
    io_timeout: float = 10.0
    device_gb: float = 0.5
    host_gb: float = 3.0
    buffer_gb: float = 1.0
    recompute_gb: float = 5.0
    half_life: float = 200.0
    reorder_interval: float = 60.0
    reorder_key: str = "selected"
    trace_dir: str = ""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _require_type(field.name, str(field.type), getattr(self, field.name))
        rules = f"0 < r <= 1, or {AUTO}"
        number = not isinstance(self.retention, str)
        _require(number or self.auto_retention, "retention", self.retention, rules)
        fixed = 0.0 if self.auto_retention else self.usual_retention
        _require(self.auto_retention or 0.0 < fixed <= 1.0, "retention", self.retention, rules)
        most = 1.0 if self.auto_retention else self.usual_retention
        _require(
            0.0 <= self.min_retention <= most,
            "min_retention",
            self.min_retention,
            f"between 0 and {most:g}, the retention",
        )
        rules = f"{LEAST_BITS:g} to {MOST_BITS:g}, {EXACTLY} or {AUTO}"
        _require(is_bits(self.bits) or self.bits == AUTO, "bits", self.bits, rules)
        rules = f"one of {', '.join(ALLOCATIONS)}"
        _require(self.allocate in ALLOCATIONS, "allocate", self.allocate, rules)
        _require(self.probe_heads >= 1, "probe_heads", self.probe_heads, "at least 1")
        _require(0.0 < self.alpha <= 1.0, "alpha", self.alpha, "0 < alpha <= 1")
        _require(
            8 <= self.chunk_tokens <= 4096 and self.chunk_tokens % 8 == 0,
            "chunk_tokens",
            self.chunk_tokens,
            "a multiple of 8 between 8 and 4096",
        )
        _require(self.min_prefix_tokens >= 1, "min_prefix_tokens", self.min_prefix_tokens, ">= 1")
        _require(0 < self.ssd_gb < math.inf, "ssd_gb", self.ssd_gb, "more than 0 and finite")
        _require(
            0 <= self.min_free_gb < math.inf,
            "min_free_gb",
            self.min_free_gb,
            "0 or more and finite",
        )
        _require(
            0 < self.buffer_gb < math.inf, "buffer_gb", self.buffer_gb, "more than 0 and finite"
        )
        engines = f"one of {', '.join(IO_ENGINES)}"
        _require(self.io_engine in IO_ENGINES, "io_engine", self.io_engine, engines)
        _require(1 <= self.io_depth <= 1024, "io_depth", self.io_depth, "1 to 1024")
        _require(
            0 < self.io_timeout < math.inf, "io_timeout", self.io_timeout, "more than 0 and finite"
        )
        depth = self.approximation_depth
        _require(depth >= 0, "approximation_depth", depth, "0 or more")
        _require(self.load in LOADS, "load", self.load, f"one of {', '.join(LOADS)}")
        _require(self.policy in POLICIES, "policy", self.policy, f"one of {', '.join(POLICIES)}")
        _require(bool(self.ssd_dir.strip()), "ssd_dir", self.ssd_dir, "a directory")
        for name in (
            "device_gb",
            "host_gb",
            "recompute_gb",
            "half_life",
            "readahead",
            "reorder_interval",
            "base_error",
        ):
            value = getattr(self, name)
            _require(0 <= value < math.inf, name, value, "0 or more and finite")
        keys = f"one of {', '.join(REORDER_KEYS)}"
        _require(self.reorder_key in REORDER_KEYS, "reorder_key", self.reorder_key, keys)
        if not self.serves(self.usual_retention, self.usual_bits):
            raise ConfigError(
                f"--impress-bits {EXACTLY} with --impress-retention {self.retention} is nothing "
                "that --impress-policy impress has: give bits from "
                f"{LEAST_BITS:g} to {MOST_BITS:g}, retention 1, or another policy"
            )

    @property
    def ssd_path(self) -> Path:
        """Directory of the SSD store, with `~` resolved."""
        return Path(self.ssd_dir).expanduser()

    @property
    def ssd_bytes(self) -> int:
        """Quota of the SSD store in bytes (1 GB = 10^9 bytes)."""
        return int(self.ssd_gb * 1e9)

    @property
    def min_free_bytes(self) -> int:
        """Free space that the store leaves on its file system, in bytes."""
        return int(self.min_free_gb * 1e9)

    @property
    def device_bytes(self) -> int:
        """Size of the device chunk cache in bytes."""
        return int(self.device_gb * 1e9)

    @property
    def host_bytes(self) -> int:
        """Size of the host chunk cache in bytes."""
        return int(self.host_gb * 1e9)

    @property
    def recompute_bytes(self) -> int:
        """Host memory that computing an unreadable prefix again may take, in bytes."""
        return int(self.recompute_gb * 1e9)

    @property
    def buffer_bytes(self) -> int:
        """Host memory that reads from SSD fill, in bytes."""
        return int(self.buffer_gb * 1e9)

    @property
    def auto_retention(self) -> bool:
        """Whether each request gets the retention whose loading hides behind computing."""
        return self.retention == AUTO

    @property
    def usual_retention(self) -> float:
        """The retention of a request that asks for none; with auto the least that it gets."""
        if self.auto_retention:
            return max(AUTO_FLOOR, self.min_retention)
        return float(self.retention)

    @property
    def part_retention(self) -> float:
        """The retention that is expected of a request that uses a part of a prefix."""
        return min(self.usual_retention, AUTO_FLOOR)

    @property
    def auto_bits(self) -> bool:
        """Whether each request gets the bits whose loading hides behind computing."""
        return self.bits == AUTO

    @property
    def usual_bits(self) -> float:
        """Bits per element of a request that asks for none; with auto the least that it gets."""
        if self.auto_bits:
            return AUTO_BITS
        return EXACT_BITS if self.bits == EXACTLY else float(self.bits)

    def depth(self, retention: float) -> int:
        """How many approximations what is stored may rest on, if so much of a prefix was used.

        Few bits add up to nothing over as many turns as the default allows (`bench drift`); of
        dropped tokens nobody has shown that.
        """
        return self.approximation_depth if retention >= 1.0 else min(1, self.approximation_depth)

    def serves(self, retention: float, bits: float) -> bool:
        """Whether there is such a prefix: `impress` takes a part of one from its codes only."""
        return self.policy != "impress" or retention >= 1.0 or bits < EXACT_BITS

    def uses_part(self, retention: float) -> bool:
        """Whether a request of this retention uses a part of a prefix."""
        return retention < 1.0 and self.policy not in WHOLE_POLICIES

    @property
    def needs_parts(self) -> bool:
        """Whether the server is for parts of prefixes: its usual retention, or its policy."""
        compared = self.policy not in (*WHOLE_POLICIES, "impress")
        return compared or self.uses_part(self.usual_retention)

    @property
    def trace_path(self) -> Path | None:
        """Directory for the timelines of requests, None if none are wanted."""
        return Path(self.trace_dir).expanduser() if self.trace_dir.strip() else None

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> ImpressConfig:
        """Build from a mapping of field names; unknown names are an error.

        Raises:
            ConfigError: an unknown field or a wrong value.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(options) - known)
        if unknown:
            raise ConfigError(
                f"unknown IMPRESS option {', '.join(unknown)}; known are {', '.join(sorted(known))}"
            )
        return cls(**options)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> ImpressConfig | None:
        """The configuration in `IMPRESS_CONFIG` (a JSON object), or None when it is not set.

        Raises:
            ConfigError: the variable is not a JSON object, or holds a wrong value.
        """
        text = environ.get(CONFIG_VARIABLE, "").strip()
        if not text:
            return None
        try:
            options = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{CONFIG_VARIABLE} is not valid JSON: {error}") from error
        if not isinstance(options, dict):
            raise ConfigError(f"{CONFIG_VARIABLE} must be a JSON object, got {text!r}")
        return cls.from_options(options)

    def to_json(self) -> str:
        """The configuration as `from_environment` reads it."""
        return json.dumps(dataclasses.asdict(self))


def enable_for_engine(**options: Any) -> ImpressConfig:
    """Turn IMPRESS on for every `sglang.Engine` that this process starts from now on.

    Example: `enable_for_engine(ssd_dir="/nvme/kv"); sglang.Engine(model_path=...)`.
    The options are the fields of `ImpressConfig`. Remove `IMPRESS_CONFIG` from the environment
    to turn it off again.

    Raises:
        ConfigError: an unknown option or a wrong value.
    """
    config = ImpressConfig.from_options(options)
    os.environ[CONFIG_VARIABLE] = config.to_json()
    return config


def _parse_retention(text: str) -> float | str:
    return AUTO if text == AUTO else float(text)


def _parse_bits(text: str) -> float | str:
    return text if text in (EXACTLY, AUTO) else float(text)


OPTIONS: tuple[Option, ...] = (
    Option("ssd_dir", "--impress-ssd-dir", str, "Directory of the SSD store."),
    Option("ssd_gb", "--impress-ssd-gb", float, "Quota of the SSD store, in GB (10^9 bytes)."),
    Option(
        "min_free_gb",
        "--impress-min-free-gb",
        float,
        "Free space to leave on the file system of the SSD store, in GB.",
    ),
    Option(
        "retention",
        "--impress-retention",
        _parse_retention,
        "Fraction of a stored prefix that each layer attends to. auto: the largest whose I/O hides "
        f"behind compute, at least {AUTO_FLOOR:g}. A request overrides it with custom_params "
        "impress_retention.",
    ),
    Option(
        "min_retention",
        "--impress-min-retention",
        float,
        "Floor under the retention that a request asks for.",
    ),
    Option(
        "bits",
        "--impress-bits",
        _parse_bits,
        "Policy impress: mean bits per element of a stored prefix when it is loaded, "
        f"{LEAST_BITS:g} to {MOST_BITS:g}, with more of them where the request attends. exact: "
        "KVs as they were computed. auto: the most bits whose I/O hides behind compute, at least "
        f"{AUTO_BITS:g}. A request overrides it with custom_params impress_bits.",
    ),
    Option(
        "base_error",
        "--impress-base-error",
        float,
        f"Relative error that {LEAST_BITS:g} bits may cause in the attention output of a KV head. "
        "A head above it, as measured when a prompt is stored, is always read in more bits. 0: "
        "nothing is measured.",
    ),
    Option(
        "allocate",
        "--impress-allocate",
        str,
        "Which part of a prefix gets additional bits. query: what the new tokens attend to. even, "
        "random: baselines.",
        ALLOCATIONS,
    ),
    Option(
        "probe_heads",
        "--impress-probe-heads",
        int,
        "Policies paper*: number of probe heads N of a multi-head model. A GQA model with G KV "
        "heads probes max(1, round(N * G / 32)) of them.",
    ),
    Option(
        "alpha",
        "--impress-alpha",
        float,
        "Policies paper*: exponent of the similarity threshold t = j**alpha. A larger one makes "
        "fewer layers fall back to reading all keys.",
    ),
    Option(
        "chunk_tokens",
        "--impress-chunk-tokens",
        int,
        "Tokens per chunk, the unit of storage, caching and scoring.",
    ),
    Option(
        "min_prefix_tokens",
        "--impress-min-prefix-tokens",
        int,
        "Shortest prefix to store, and shortest part of one to load, in tokens.",
    ),
    Option(
        "policy",
        "--impress-policy",
        str,
        "impress: prefixes in few bits, more of them where a request attends. Baselines: paper "
        "(IMPRESS as published: tokens found by probe heads, reordering, caches by score), "
        "paper+itf+reorder (the same with LFU caches), paper+itf (nor reordering), as+h2o+lru and "
        "as+h2o+lfu (all keys, important values), as (whole prefixes, LRU caches, like "
        "AttentionStore), recompute (no store).",
        POLICIES,
    ),
    Option(
        "io_engine",
        "--impress-io-engine",
        str,
        "How the SSD store is read. aio: Linux native AIO. threads: a pool of threads. auto: aio "
        "where the kernel has it.",
        IO_ENGINES,
    ),
    Option("io_depth", "--impress-io-depth", int, "Reads of the SSD store in flight."),
    Option(
        "io_timeout",
        "--impress-io-timeout",
        float,
        "Seconds without progress after which a read or write of the SSD store is given up. The "
        "store is then left alone until the disk answers again.",
    ),
    Option(
        "readahead",
        "--impress-readahead",
        float,
        "Prefetch waste budget: bytes that prefetching may read in vain, as a fraction of the "
        "bytes wanted. 0: no prefetching.",
    ),
    Option(
        "load",
        "--impress-load",
        str,
        "faster: a stored prefix is loaded if that is estimated to be faster than computing it. "
        "always: whenever it is stored.",
        LOADS,
    ),
    Option(
        "approximation_depth",
        "--impress-approximation-depth",
        int,
        "How many approximations a stored KV may rest on, one on top of the other. 0: only exact "
        "KVs are stored. 1: also what is computed after exact KVs in few bits. 2: also what is "
        "computed after that. Where part of a prefix was used, at most 1.",
    ),
    Option(
        "device_gb",
        "--impress-device-gb",
        float,
        "Chunk cache on the device, in GB, beside SGLang's own pools. 0: none.",
    ),
    Option(
        "host_gb",
        "--impress-host-gb",
        float,
        "Chunk cache in CPU memory (pinned with CUDA), in GB. 0: none.",
    ),
    Option(
        "buffer_gb",
        "--impress-buffer-gb",
        float,
        "Read buffers in CPU memory (pinned with CUDA), in GB, for all requests and for "
        "prefetching. A prefix is computed if not one of its layers fits.",
    ),
    Option(
        "recompute_gb",
        "--impress-recompute-gb",
        float,
        "CPU memory, in GB, for recomputing a stored prefix that turns out to be unreadable. A "
        "request that needs more ends with status 503. 0: all of them do.",
    ),
    Option(
        "half_life",
        "--impress-half-life",
        float,
        "Requests after which an access counts half in a chunk's score. 0: accesses do not age, as "
        "in the paper.",
    ),
    Option(
        "reorder_interval",
        "--impress-reorder-interval",
        float,
        "Policies that reorder: seconds between searches for prefixes worth reordering. 0: only on "
        "POST /impress/reorder.",
    ),
    Option(
        "reorder_key",
        "--impress-reorder-key",
        str,
        "Moving average by which tokens are reordered. selected: how often a token was selected. "
        "importance: its attention column sum, as in the paper.",
        REORDER_KEYS,
    ),
    Option(
        "trace_dir",
        "--impress-trace-dir",
        str,
        "Directory for a timeline of each request that loads a prefix, to be opened in "
        "ui.perfetto.dev. Empty: none is written.",
    ),
)


_ACCEPTED_TYPES: dict[str, set[type]] = {
    "str": {str},
    "float": {float, int},
    "float | str": {float, int, str},
    "int": {int},
}


def _flag(field: str) -> str:
    return next(option.flag for option in OPTIONS if option.field == field)


def _require(condition: bool, field: str, value: object, expected: str) -> None:
    if not condition:
        raise ConfigError(f"{_flag(field)} must be {expected}, got {value!r}")


def _require_type(field: str, annotation: str, value: object) -> None:
    # type() and not isinstance(): True is an int to isinstance.
    if type(value) not in _ACCEPTED_TYPES[annotation]:
        raise ConfigError(f"{_flag(field)} has a value of the wrong type: {value!r}")
