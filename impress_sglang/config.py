"""The configuration: one frozen, validated value, built once and passed down.

It is built from the command line (`from_options`), or for `sglang.Engine` users, who have no
argument parser, from the environment variable `IMPRESS_CONFIG` (`from_environment`), which
`enable_for_engine` sets after validating. No other module reads the environment.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from impress_sglang.errors import ConfigError
from impress_sglang.options import (
    AUTO,
    AUTO_FLOOR,
    BOTH,
    CODED_POLICIES,
    CODES,
    EXACTLY,
    OFF,
    OPTIONS,
    PART_POLICIES,
    USUAL,
    USUAL_BITS,
    number_of_bits,
)

CONFIG_VARIABLE = "IMPRESS_CONFIG"
DEFAULT_SSD_DIR = "~/.cache/impress-sglang/kv"


@dataclasses.dataclass(frozen=True, slots=True)
class ImpressConfig:
    """All options of the extension; see `OPTIONS` for what each one means and its unit.

    Raises:
        ConfigError: a value is out of range.
    """

    ssd_dir: str = DEFAULT_SSD_DIR
    ssd_gb: float = 32.0
    min_free_gb: float = 2.0
    namespace_gb: float = 0.0
    write_gb_per_day: float = 0.0
    write_after: int = 2
    ttl: float = 0.0
    store: str = ""
    store_gb: float = 0.0
    retention: float | str = 1.0
    min_retention: float = 0.05
    bits: float | str = USUAL
    basis: str = ""
    keep: str = AUTO
    probe_heads: int = 3
    alpha: float = 0.6
    chunk_tokens: int = 64
    min_prefix_tokens: int = 256
    policy: str = "impress"
    io_engine: str = "auto"
    io_depth: int = 128
    readahead: float = 0.2
    lookahead: str = "on"
    schedule: str = "off"
    load: str = "faster"
    approximation_depth: int = 8
    blend: float | str = "off"
    blend_min_tokens: int = 512
    blend_seconds: float = 5.0
    truncate: float | str = "off"
    io_timeout: float = 10.0
    device_gb: float = 0.5
    host_gb: float = 3.0
    buffer_gb: float = 1.0
    half_life: float = 200.0
    reorder_interval: float = 60.0
    reorder_key: str = "selected"
    show_prompts: str = "off"

    def __post_init__(self) -> None:
        types = {field.name: _ACCEPTED_TYPES[str(field.type)] for field in dataclasses.fields(self)}
        for option in OPTIONS:
            value = getattr(self, option.field)
            # type() and not isinstance(): True is an int to isinstance.
            if type(value) not in types[option.field]:
                raise ConfigError(f"{option.flag} has a value of the wrong type: {value!r}")
            if (wrong := option.check(value)) is not None:
                raise ConfigError(wrong)
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
    def basis_path(self) -> Path:
        """File of the basis, with `~` resolved."""
        return Path(self.basis).expanduser()

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
    def part_retention(self) -> float:
        """The retention expected of a request that uses a part of a prefix."""
        return min(self.usual_retention, AUTO_FLOOR)

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


def share_of_rank(config: ImpressConfig, size: int) -> ImpressConfig:
    """The options of one of `size` ranks of a model, which share disk and memory of the host."""
    shared = "ssd_gb", "namespace_gb", "write_gb_per_day", "store_gb", "host_gb", "buffer_gb"
    return dataclasses.replace(config, **{name: getattr(config, name) / size for name in shared})


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


_ACCEPTED_TYPES: dict[str, set[type]] = {
    "str": {str},
    "float": {float, int},
    "float | str": {float, int, str},
    "int": {int},
}


def bytes_of(gigabytes: float) -> int:
    """The bytes of an option in GB (10^9 bytes)."""
    return int(gigabytes * 1e9)
