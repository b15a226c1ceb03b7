"""The configuration: one frozen, validated value, built once and passed down.

It is built from the command line (`plugin.entry`), or for `sglang.Engine` users, who have no
argument parser, from the environment variable `IMPRESS_CONFIG` (`from_environment`), which
`enable_for_engine` sets after validating. No other module reads the environment. Wrong values raise
a `ConfigError`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from impress_sglang.errors import ConfigError

# Policies that load prefixes from codes.
CODED_POLICIES = ("impress", "impress+lfu", "impress+lru")
# Policies that use a part of a prefix, selected by the question within the model's pass.
PART_POLICIES = ("paper", "paper+itf+reorder", "paper+itf", "as+h2o+lfu", "as+h2o+lru")
POLICIES = (*CODED_POLICIES, *PART_POLICIES, "as", "recompute")
REORDER_KEYS = ("selected", "importance")
IO_ENGINES = ("auto", "aio", "threads")
LOADS = ("faster", "always")
# The value of --impress-retention, --impress-bits and --impress-blend that leaves the choice to the
# server. It chooses at least `AUTO_FLOOR` (retention) and `AUTO_SHARE` (of a blend).
AUTO = "auto"
# The value of --impress-bits if none is given: `USUAL_BITS`, or `EXACTLY` where KVs are not coded.
USUAL = "usual"
AUTO_FLOOR = 0.25
AUTO_SHARE = 0.15
# The value of --impress-bits for KVs as they were computed, and the number for it, for any dtype.
# Other values are the rate of codes without a basis, in bits per element.
EXACTLY = "exact"
EXACT_BITS = 16.0
# Representations of a prefix that are written.
BOTH, CODES = "both", "codes"
KEEPS = (AUTO, BOTH, CODES, EXACTLY)
BITS = (5.0, 6.0)
BITS_TEXT = ", ".join(f"{bits:g}" for bits in BITS)
# Bits of requests without the option, and of codes for `AUTO` or `EXACTLY`.
USUAL_BITS = 6.0
ON, OFF = "on", "off"
CLASSES, SHORTEST = "classes", "shortest"
SCHEDULES = (OFF, CLASSES, SHORTEST)


def is_bucket(text: str) -> bool:
    """Whether this is a bucket with or without a prefix, or empty."""
    return not text or re.fullmatch(r"s3://[^/\s]+(/\S*)?", text) is not None


def is_number(value: object) -> TypeGuard[float]:
    """Whether this is an int or a float; isinstance would also accept True."""
    return type(value) in (int, float)


def is_bits(value: object) -> bool:
    """Whether this is a precision: bits per element, or `EXACTLY`."""
    return value == EXACTLY or (is_number(value) and value in BITS)


def number_of_bits(bits: float | str) -> float:
    """Return the number for `EXACTLY` or `USUAL`, the minimum of `AUTO`, or the number itself."""
    if bits in (AUTO, USUAL):
        return USUAL_BITS
    return EXACT_BITS if bits == EXACTLY else float(bits)


def is_blend(value: object) -> bool:
    """Whether this is a share of reused tokens to recompute, `AUTO` or `OFF`."""
    return value in (AUTO, OFF) or (is_number(value) and 0.0 <= value <= 1.0)


def is_truncation(value: object) -> bool:
    """Whether this is the share of a conversation that one cut removes, or `OFF`."""
    return value == OFF or (type(value) is float and 0.0 < value < 1.0)


@dataclasses.dataclass(frozen=True, slots=True)
class OptionRule:
    """Valid values of an option, besides its type; `expected` describes them in messages."""

    expected: str
    holds: Callable[[Any], bool]
    choices: tuple[str, ...] | None = None


def one_of(names: tuple[str, ...]) -> OptionRule:
    return OptionRule(f"one of {', '.join(names)}", lambda value: value in names, names)


def at_least(minimum: float) -> OptionRule:
    return OptionRule(f"{minimum:g} or more and finite", lambda value: minimum <= value < math.inf)


def above(bound: float) -> OptionRule:
    return OptionRule(f"more than {bound:g} and finite", lambda value: bound < value < math.inf)


def between(minimum: float, maximum: float) -> OptionRule:
    return OptionRule(f"{minimum:g} to {maximum:g}", lambda value: minimum <= value <= maximum)


CONFIG_VARIABLE = "IMPRESS_CONFIG"
DEFAULT_SSD_DIR = "~/.cache/impress-sglang/kv"


def _option(default: Any, rule: OptionRule, help: str) -> Any:
    return dataclasses.field(default=default, metadata={"rule": rule, "help": help})


@dataclasses.dataclass(frozen=True, slots=True)
class ImpressConfig:
    """All options of the extension, with their defaults, valid values and meanings.

    Flags and the table in docs/options.md are generated from it.
    """

    # fmt: off
    ssd_dir: str = _option(DEFAULT_SSD_DIR,
        OptionRule("a directory", lambda text: bool(text.strip())),
        "Directory of the SSD store.")
    ssd_gb: float = _option(32.0, above(0), "Quota of the SSD store, in GB (10^9 bytes).")
    min_free_gb: float = _option(2.0, at_least(0), "Free space to leave on its file system, in GB.")
    namespace_gb: float = _option(0.0, at_least(0),
        "Quota of each namespace (cache_salt, extra_key), in GB. A full one evicts its own "
        "prefixes. 0: no quota.")
    write_gb_per_day: float = _option(0.0, at_least(0),
        "Daily write budget, in GB. Once it is spent, nothing is stored until it refills. 0: no "
        "limit.")
    write_after: int = _option(2, between(1, 255),
        "A prefix is stored when it is requested for this many times, counted at every 64th "
        "token. 1: every prompt is stored at once.")
    ttl: float = _option(0.0, at_least(0),
        "Seconds after which a stored prefix is removed, used or not. 0: no limit.")
    store: str = _option("", OptionRule("s3://bucket/prefix", is_bucket),
        "Object store that servers share, s3://bucket/prefix. The directory is then a cache.")
    store_gb: float = _option(0.0, at_least(0),
        "Quota of the object store, in GB. The oldest objects go. 0: no quota.")
    retention: float | str = _option(1.0,
        OptionRule(f"0 < r <= 1, or {AUTO}", lambda r: r == AUTO or (is_number(r) and 0 < r <= 1)),
        "Policies paper* and as+h2o*: fraction of a stored prefix that each layer attends to. "
        f"auto: the largest whose I/O hides behind compute, at least {AUTO_FLOOR:g}.")
    min_retention: float = _option(0.05, between(0, 1),
        "Floor under the retention that a request asks for.")
    bits: float | str = _option(USUAL,
        OptionRule(f"{BITS_TEXT}, {EXACTLY}, {AUTO} or {USUAL}",
             lambda bits: is_bits(bits) or bits in (AUTO, USUAL)),
        "Bits per element of codes, for all requests that ask for no more. exact: KVs as they "
        f"were computed. usual: {USUAL_BITS:g}, or exact where codes would not save (KVs in fp8). "
        f"auto: exact KVs where they take hardly longer than {USUAL_BITS:g} bits.")
    basis: str = _option("", OptionRule("anything", lambda value: True),
        "File made by `impress calibrate` for this model. KVs are coded by it in fewer bytes, as "
        "accurately as in 6 bits without it, or in 5 with --impress-bits 5.")
    keep: str = _option(AUTO, one_of(KEEPS),
        "What is written of a prefix. codes: KVs in few bits; requests for exact KVs compute "
        "them. exact: KVs as they were computed. both: three to five times the bytes of codes. "
        "auto: what --impress-bits may load.")
    probe_heads: int = _option(3, at_least(1),
        "Policies paper*: probe heads N of a multi-head model. With G KV heads, max(1, round(N * "
        "G / 32)) of them.")
    alpha: float = _option(0.6, OptionRule("0 < alpha <= 1", lambda alpha: 0 < alpha <= 1),
        "Policies paper*: exponent of the similarity threshold t = j**alpha.")
    chunk_tokens: int = _option(64,
        OptionRule("a multiple of 8 between 8 and 4096", lambda n: 8 <= n <= 4096 and n % 8 == 0),
        "Tokens per chunk, the unit of caching.")
    min_prefix_tokens: int = _option(256, at_least(1),
        "Shortest prefix to store, and shortest part of one to load.")
    policy: str = _option("impress", one_of(POLICIES),
        "impress: prefixes in few bits. Baselines: impress+lfu, impress+lru (other caches), paper "
        "(IMPRESS as published), paper+itf+reorder (LFU caches), paper+itf (nor reordering), "
        "as+h2o+lru, as+h2o+lfu (all keys, important values), as (whole prefixes, like "
        "AttentionStore), recompute (no store).")
    io_engine: str = _option("auto", one_of(IO_ENGINES),
        "aio: Linux native AIO. threads: a pool of threads. auto: aio where the kernel has it.")
    io_depth: int = _option(128, between(1, 1024), "Reads in flight.")
    readahead: float = _option(0.2, at_least(0),
        "0: no prefetching. Any other number: what is certain to be wanted is read before its "
        "layer asks.")
    lookahead: str = _option("on", one_of((ON, OFF)),
        "on: what queued requests will use is evicted last from SGLang's pool, the caches and the "
        "SSD. off: only SGLang's pool protects it.")
    schedule: str = _option("off", one_of(SCHEDULES),
        "How the first 16 queued requests of equal priority change places. classes: ready ones go "
        "before those to compute, these before those to read. shortest: the shortest prefill, "
        "among those that need not wait for the drive.")
    load: str = _option("faster", one_of(LOADS),
        "faster: a stored prefix is loaded if that is estimated to be faster than computing it. "
        "always: whenever it is stored.")
    approximation_depth: int = _option(8, at_least(0),
        "How many approximations a stored KV may rest on. 0: only exact KVs are stored. 1: also "
        "what is computed behind exact KVs in few bits, and so on.")
    blend: float | str = _option("off", OptionRule(f"0 to 1, {AUTO} or {OFF}", is_blend),
        "Reuse stored text where it is no prefix, which is approximate. A number: this share of "
        "its tokens is computed again. auto: the largest share that hardly takes longer than "
        f"{AUTO_SHARE:g}.")
    blend_min_tokens: int = _option(512, at_least(1),
        "Fewest tokens of a prompt that are worth blending.")
    blend_seconds: float = _option(5.0,
        OptionRule("more than 0, and 60 at most", lambda value: 0 < value <= 60),
        "Most seconds of computing that a blend may take. A request that would need more is "
        "computed instead.")
    truncate: float | str = _option("off", OptionRule(f"between 0 and 1, or {OFF}", is_truncation),
        "A prompt too long for the context is cut instead of refused: the system prompt stays, "
        "and this share of the room for the conversation is left out at once, the oldest first "
        "(AttentionStore: 0.5).")
    io_timeout: float = _option(10.0, above(0),
        "Seconds without progress after which a read or write is given up, and the store set "
        "aside until the disk answers again.")
    device_gb: float = _option(0.5, at_least(0),
        "Chunk cache on the device, in GB, beside SGLang's pools. 0: none.")
    host_gb: float = _option(3.0, at_least(0),
        "Chunk cache in CPU memory (pinned with CUDA), in GB. 0: none.")
    buffer_gb: float = _option(1.0, above(0),
        "Read buffers in CPU memory (pinned with CUDA), in GB. A prefix of which no layer fits is "
        "computed.")
    half_life: float = _option(200.0, at_least(0),
        "Requests after which an access counts half in a chunk's score. 0: accesses do not age.")
    reorder_interval: float = _option(60.0, at_least(0),
        "Policies that reorder: seconds between searches for prefixes worth reordering. 0: only "
        "on POST /impress/reorder.")
    reorder_key: str = _option("selected", one_of(REORDER_KEYS),
        "Average by which tokens are reordered. selected: how often a token was. importance: its "
        "attention column sum, as in the paper.")
    show_prompts: str = _option("off", one_of((ON, OFF)),
        "on: GET /impress shows the first words of prompts instead of digests.")
    # fmt: on

    def __post_init__(self) -> None:
        for option in OPTIONS:
            value = getattr(self, option.field)
            # type() and not isinstance(): True is an int to isinstance.
            if type(value) not in option.types:
                raise ConfigError(f"{option.flag} has a value of the wrong type: {value!r}")
            if not option.rule.holds(value):
                raise ConfigError(f"{option.flag} must be {option.rule.expected}, got {value!r}")
        max_retention = 1.0 if self.retention == AUTO else self.default_retention
        uncoded, blends = self.policy not in CODED_POLICIES, self.blend != OFF
        needs_codes = f"needs --impress-policy impress, got {self.policy!r}"
        conflicts = {
            f"--impress-min-retention must be at most {max_retention:g}, the retention, "
            f"got {self.min_retention!r}": self.min_retention > max_retention,
            f"--impress-retention {self.retention} needs --impress-policy paper or another of "
            f"{', '.join(PART_POLICIES[1:])}: {self.policy} uses prefixes whole": (
                self.retention != 1 and not self.needs_parts
            ),
            f"--impress-schedule {self.schedule} needs a policy that loads before a request runs, "
            f"and {self.policy} loads in its pass": self.schedule != OFF and self.needs_parts,
            f"--impress-blend {self.blend} {needs_codes}": blends and uncoded,
            f"--impress-keep {self.keep} {needs_codes}": (
                self.keep in (CODES, EXACTLY) and uncoded
            ),
            f"--impress-basis {needs_codes}": self.basis and uncoded,
            f"--impress-bits {self.bits} loads nothing that --impress-keep {CODES} has written": (
                self.keep == CODES and self._loads_exact
            ),
            f"--impress-keep {EXACTLY} writes no codes, which --impress-basis and --impress-blend "
            "need": self.keep == EXACTLY and (self.basis or blends),
            # Nothing shows which of the reused tokens matter.
            f"--impress-blend needs --impress-bits {USUAL_BITS:g} or more": (
                blends and self.code_bits < USUAL_BITS
            ),
        }
        for message, is_wrong in conflicts.items():
            if is_wrong:
                raise ConfigError(message)

    @property
    def ssd_path(self) -> Path:
        """Directory of the SSD store, with `~` resolved."""
        try:
            return Path(self.ssd_dir).expanduser()
        except RuntimeError as error:
            raise ConfigError(f"--impress-ssd-dir {self.ssd_dir}: {error}") from error

    @property
    def kept(self) -> str:
        """Representation of a prefix that may have codes: `BOTH`, `CODES` or `EXACTLY`."""
        if self.keep != AUTO:
            return self.keep
        if self.policy not in CODED_POLICIES:
            return EXACTLY
        # Blended text is reused from codes, after it was computed after exact KVs.
        if self.bits == AUTO or self.blend != OFF or (self._loads_exact and self.basis):
            return BOTH
        return EXACTLY if self._loads_exact else CODES

    @property
    def code_bits(self) -> float:
        """Rate of codes without a basis; codes by a basis have equal quality.

        They serve requests for this many bits or fewer; others get exact KVs.
        """
        return min(self.default_bits, USUAL_BITS)

    @property
    def _loads_exact(self) -> bool:
        return self.default_bits > self.code_bits

    @property
    def default_retention(self) -> float:
        """Retention of requests without the option; with auto, its minimum."""
        if self.retention == AUTO:
            return max(AUTO_FLOOR, self.min_retention)
        return float(self.retention)

    @property
    def default_bits(self) -> float:
        """Bits per element of requests without the option; with auto, their minimum."""
        return number_of_bits(self.bits)

    @property
    def needs_parts(self) -> bool:
        """Whether requests may use parts of prefixes, loaded within the model's pass."""
        return self.policy in PART_POLICIES

    def without_codes(self, why: str) -> ImpressConfig:
        """Return the configuration without codes; `why` begins the message of a `ConfigError`."""
        asked = {
            "bits": self.bits not in (USUAL, AUTO, EXACTLY),
            "keep": self.keep in (BOTH, CODES),
            "basis": self.basis,
            "blend": self.blend != OFF,
        }
        for name, is_asked in asked.items():
            if is_asked:
                raise ConfigError(f"{why}: drop --impress-{name} {getattr(self, name)}")
        return dataclasses.replace(self, bits=EXACTLY, keep=AUTO)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> ImpressConfig:
        known = {option.field for option in OPTIONS}
        if unknown := sorted(set(options) - known):
            raise ConfigError(
                f"unknown IMPRESS option {', '.join(unknown)}; known are {', '.join(sorted(known))}"
            )
        return cls(**options)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> ImpressConfig | None:
        """The configuration in `IMPRESS_CONFIG` (a JSON object), or None when it is not set."""
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


def share_of_rank(config: ImpressConfig, size: int, copies: int = 1) -> ImpressConfig:
    """Return the options of one of `size` ranks of a model, which share the host's disk and memory.

    `copies`: number of ranks that share one store.
    """
    parts = dict.fromkeys(
        ("ssd_gb", "namespace_gb", "write_gb_per_day", "store_gb"), size // copies
    )
    parts |= dict.fromkeys(("host_gb", "buffer_gb"), size)
    shares = {name: getattr(config, name) / count for name, count in parts.items()}
    return dataclasses.replace(config, **shares)


def enable_for_engine(**options: Any) -> ImpressConfig:
    """Enable IMPRESS for every `sglang.Engine` that this process starts from now on.

    Example: `enable_for_engine(ssd_dir="/nvme/kv"); sglang.Engine(model_path=...)`.
    The options are the fields of `ImpressConfig`. Remove `IMPRESS_CONFIG` from the environment
    to turn it off again.

    Raises:
        ConfigError: an unknown option or a wrong value.
    """
    config = ImpressConfig.from_options(options)
    os.environ[CONFIG_VARIABLE] = json.dumps(dataclasses.asdict(config))
    return config


def _number_or_word(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """A field of the configuration as an option; `parse` reads its text."""

    field: str
    parse: Callable[[str], Any]
    types: tuple[type, ...]
    rule: OptionRule
    help: str

    @property
    def flag(self) -> str:
        return "--impress-" + self.field.replace("_", "-")


# Parser and types of values, by the type of a field.
_READ: dict[str, tuple[Callable[[str], Any], tuple[type, ...]]] = {
    "str": (str, (str,)),
    "float": (float, (float, int)),
    "float | str": (_number_or_word, (float, int, str)),
    "int": (int, (int,)),
}
OPTIONS = tuple(
    Option(field.name, *_READ[str(field.type)], **field.metadata)
    for field in dataclasses.fields(ImpressConfig)
)


def bytes_of(gigabytes: float) -> int:
    return int(gigabytes * 1e9)
