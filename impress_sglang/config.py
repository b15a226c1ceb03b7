"""The configuration: one frozen, validated value, built once and passed down.

It is built from the command line (`from_options`), or for `sglang.Engine` users, who have no
argument parser, from the environment variable `IMPRESS_CONFIG` (`from_environment`), which
`enable_for_engine` sets after validating. No other module reads the environment.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from impress_sglang.errors import ConfigError
from impress_sglang.options import (
    AUTO,
    AUTO_FLOOR,
    BITS_TEXT,
    BOTH,
    CODED_POLICIES,
    CODES,
    EXACTLY,
    IO_ENGINES,
    KEEPS,
    LOADS,
    MEANINGS,
    OFF,
    ON,
    PART_POLICIES,
    POLICIES,
    REORDER_KEYS,
    SCHEDULES,
    USUAL,
    USUAL_BITS,
    Option,
    Rule,
    above,
    at_least,
    between,
    is_bits,
    is_blend,
    is_bucket,
    is_number,
    is_truncation,
    number_of_bits,
    one_of,
)

CONFIG_VARIABLE = "IMPRESS_CONFIG"
DEFAULT_SSD_DIR = "~/.cache/impress-sglang/kv"


def _option(default: Any, rule: Rule) -> Any:
    """A field of the configuration."""
    return dataclasses.field(default=default, metadata={"rule": rule})


@dataclasses.dataclass(frozen=True, slots=True)
class ImpressConfig:
    """All options of the extension: defaults, and which values are right; see `MEANINGS`.

    Raises:
        ConfigError: a value is out of range.
    """

    ssd_dir: str = _option(DEFAULT_SSD_DIR, Rule("a directory", lambda text: bool(text.strip())))
    ssd_gb: float = _option(32.0, above(0))
    min_free_gb: float = _option(2.0, at_least(0))
    namespace_gb: float = _option(0.0, at_least(0))
    write_gb_per_day: float = _option(0.0, at_least(0))
    write_after: int = _option(2, between(1, 255))
    ttl: float = _option(0.0, at_least(0))
    store: str = _option("", Rule("s3://bucket/prefix", is_bucket))
    store_gb: float = _option(0.0, at_least(0))
    retention: float | str = _option(
        1.0, Rule(f"0 < r <= 1, or {AUTO}", lambda r: r == AUTO or (is_number(r) and 0 < r <= 1))
    )
    min_retention: float = _option(0.05, between(0, 1))
    bits: float | str = _option(
        USUAL,
        Rule(
            f"{BITS_TEXT}, {EXACTLY}, {AUTO} or {USUAL}",
            lambda bits: is_bits(bits) or bits in (AUTO, USUAL),
        ),
    )
    basis: str = _option("", Rule("anything", lambda value: True))
    keep: str = _option(AUTO, one_of(KEEPS))
    probe_heads: int = _option(3, at_least(1))
    alpha: float = _option(0.6, Rule("0 < alpha <= 1", lambda alpha: 0 < alpha <= 1))
    chunk_tokens: int = _option(
        64, Rule("a multiple of 8 between 8 and 4096", lambda n: 8 <= n <= 4096 and n % 8 == 0)
    )
    min_prefix_tokens: int = _option(256, at_least(1))
    policy: str = _option("impress", one_of(POLICIES))
    io_engine: str = _option("auto", one_of(IO_ENGINES))
    io_depth: int = _option(128, between(1, 1024))
    readahead: float = _option(0.2, at_least(0))
    lookahead: str = _option("on", one_of((ON, OFF)))
    schedule: str = _option("off", one_of(SCHEDULES))
    load: str = _option("faster", one_of(LOADS))
    approximation_depth: int = _option(8, at_least(0))
    blend: float | str = _option("off", Rule(f"0 to 1, {AUTO} or {OFF}", is_blend))
    blend_min_tokens: int = _option(512, at_least(1))
    blend_seconds: float = _option(
        5.0, Rule("more than 0, and 60 at most", lambda value: 0 < value <= 60)
    )
    truncate: float | str = _option("off", Rule(f"between 0 and 1, or {OFF}", is_truncation))
    io_timeout: float = _option(10.0, above(0))
    device_gb: float = _option(0.5, at_least(0))
    host_gb: float = _option(3.0, at_least(0))
    buffer_gb: float = _option(1.0, above(0))
    half_life: float = _option(200.0, at_least(0))
    reorder_interval: float = _option(60.0, at_least(0))
    reorder_key: str = _option("selected", one_of(REORDER_KEYS))
    show_prompts: str = _option("off", one_of((ON, OFF)))

    def __post_init__(self) -> None:
        for option in OPTIONS:
            value = getattr(self, option.field)
            # type() and not isinstance(): True is an int to isinstance.
            if type(value) not in option.types:
                raise ConfigError(f"{option.flag} has a value of the wrong type: {value!r}")
            if not option.rule.holds(value):
                raise ConfigError(f"{option.flag} must be {option.rule.expected}, got {value!r}")
        most = 1.0 if self.auto_retention else self.usual_retention
        if self.min_retention > most:
            raise ConfigError(
                f"--impress-min-retention must be at most {most:g}, the retention, "
                f"got {self.min_retention!r}"
            )
        if self.retention != 1 and not self.needs_parts:
            raise ConfigError(
                f"--impress-retention {self.retention} needs --impress-policy paper or another of "
                f"{', '.join(PART_POLICIES[1:])}: {self.policy} uses prefixes whole"
            )
        if self.schedule != OFF and self.needs_parts:
            raise ConfigError(
                f"--impress-schedule {self.schedule} needs a policy that loads before a request "
                f"runs, and {self.policy} loads in its pass"
            )
        coded = {
            f"--impress-blend {self.blend}": self.blend != OFF,
            f"--impress-keep {self.keep}": self.keep in (CODES, EXACTLY),
            "--impress-basis": self.basis,
        }
        for flag, is_given in coded.items():
            if is_given and self.policy not in CODED_POLICIES:
                raise ConfigError(f"{flag} needs --impress-policy impress, got {self.policy!r}")
        if self.keep == CODES and self._loads_exact:
            raise ConfigError(
                f"--impress-bits {self.bits} loads nothing that --impress-keep {CODES} has written"
            )
        if self.keep == EXACTLY and (self.basis or self.blend != OFF):
            raise ConfigError(
                f"--impress-keep {EXACTLY} writes no codes, which --impress-basis and "
                "--impress-blend need"
            )
        if self.blend != OFF and self.code_bits < USUAL_BITS:
            # Nothing shows which of the reused tokens matter.
            raise ConfigError(f"--impress-blend needs --impress-bits {USUAL_BITS:g} or more")

    @property
    def ssd_path(self) -> Path:
        """Directory of the SSD store, with `~` resolved."""
        return Path(self.ssd_dir).expanduser()

    @property
    def kept(self) -> str:
        """What is written of a prefix if it may have codes: `BOTH`, `CODES` or `EXACTLY`."""
        if self.keep != AUTO:
            return self.keep
        if self.policy not in CODED_POLICIES:
            return EXACTLY
        # Blended text is reused from codes, after it was computed behind exact KVs.
        if self.bits == AUTO or self.blend != OFF or (self._loads_exact and self.basis):
            return BOTH
        return EXACTLY if self._loads_exact else CODES

    @property
    def code_bits(self) -> float:
        """The rate of codes without a basis, which those by a basis are as good as.

        They serve requests for so many bits, or fewer; others get exact KVs.
        """
        return min(self.usual_bits, USUAL_BITS)

    @property
    def _loads_exact(self) -> bool:
        """Whether usual requests load exact KVs."""
        return self.usual_bits > self.code_bits

    @property
    def auto_retention(self) -> bool:
        """Whether each request gets the retention whose loading hides behind computing."""
        return self.retention == AUTO

    @property
    def usual_retention(self) -> float:
        """The retention of a request that sets none; with auto, the least that it gets."""
        if self.auto_retention:
            return max(AUTO_FLOOR, self.min_retention)
        return float(self.retention)

    @property
    def usual_bits(self) -> float:
        """Bits per element for a request that sets none; with auto, the least that it gets."""
        return number_of_bits(self.bits)

    @property
    def usual_blend(self) -> float | str:
        """What a request that does not set it blends: a share, `AUTO` or `OFF`."""
        return self.blend if self.blend in (AUTO, OFF) else float(self.blend)

    def without_codes(self, why: str) -> ImpressConfig:
        """The configuration where KVs are not coded: all are exact, and `why` says the reason.

        Raises:
            ConfigError: codes were asked for by name.
        """
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

    @property
    def needs_parts(self) -> bool:
        """Whether requests may use parts of prefixes, which are loaded within the model's pass."""
        return self.policy in PART_POLICIES

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


def share_of_rank(config: ImpressConfig, size: int, copies: int = 1) -> ImpressConfig:
    """The options of one of `size` ranks of a model, which share disk and memory of the host.

    `copies` of them have one store.
    """
    parts = dict.fromkeys(
        ("ssd_gb", "namespace_gb", "write_gb_per_day", "store_gb"), size // copies
    )
    parts |= dict.fromkeys(("host_gb", "buffer_gb"), size)
    shares = {name: getattr(config, name) / own for name, own in parts.items()}
    return dataclasses.replace(config, **shares)


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


def _number_or_word(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


# By the type of a field: how its text is read, and which types its values have.
_READ: dict[str, tuple[Callable[[str], Any], tuple[type, ...]]] = {
    "str": (str, (str,)),
    "float": (float, (float, int)),
    "float | str": (_number_or_word, (float, int, str)),
    "int": (int, (int,)),
}
OPTIONS = tuple(
    Option(own.name, *_READ[str(own.type)], own.metadata["rule"], MEANINGS[own.name])
    for own in dataclasses.fields(ImpressConfig)
)
"""The options, one for each field of the configuration."""


def bytes_of(gigabytes: float) -> int:
    """The bytes of an option in GB (10^9 bytes)."""
    return int(gigabytes * 1e9)
