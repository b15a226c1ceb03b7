"""The configuration: defaults, ranges, and the two ways to build it."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from impress_sglang import config as config_module
from impress_sglang.config import AUTO, CONFIG_VARIABLE, EXACTLY, OPTIONS, ImpressConfig
from impress_sglang.errors import ConfigError

FIELDS = {field.name for field in dataclasses.fields(ImpressConfig)}
FLAG_OF = {option.field: option.flag for option in OPTIONS}


NO_NUMBER = float("nan")
NO_SIZE = (-0.001, NO_NUMBER, float("inf"))
NO_ROOM = (0.0, -1.0, NO_NUMBER, float("inf"))

# By field.
WRONG_VALUES: dict[str, Sequence[object]] = {
    "retention": (0.0, -0.25, 1.0001, NO_NUMBER, "", "0.5", "Auto", "auto ", "most"),
    "min_retention": (-0.001, 1.0001, NO_NUMBER),
    "bits": (0, 5.5, 7, 8.0, 16.0, -5.0, NO_NUMBER, float("inf"), "", "5", "Exact", "exact "),
    "keep": ("", "Codes", "none"),
    "probe_heads": (0, -3),
    "alpha": (0.0, 1.5, NO_NUMBER),
    "chunk_tokens": (0, 7, 12, 4104),
    "min_prefix_tokens": (0,),
    "namespace_gb": (-0.001,),
    "write_gb_per_day": (-1.0,),
    "io_depth": (0, 1025),
    "approximation_depth": (-1,),
    "io_engine": ("uring", ""),
    "load": ("never", ""),
    "lookahead": ("maybe",),
    "show_prompts": ("yes",),
    "schedule": ("sometimes",),
    "blend": (-0.01, 1.01, NO_NUMBER, "", "0.15", "on", "Auto"),
    "blend_min_tokens": (0,),
    "blend_seconds": (0.0, -1.0, 60.1, NO_NUMBER),
    "truncate": (0.0, 1.0, 1, -0.5, NO_NUMBER, "", "0.5", "on"),
    "write_after": (0, 256),
    "ttl": (-1.0,),
    "store": ("kv", "s3://", "s3:///prefix", "file:///kv"),
    "store_gb": (-1.0,),
    "policy": ("lru", ""),
    "ssd_dir": ("", "   "),
    "reorder_key": ("frequency", ""),
    **dict.fromkeys(("ssd_gb", "io_timeout", "buffer_gb"), NO_ROOM),
    **dict.fromkeys(("device_gb", "host_gb", "min_free_gb"), NO_SIZE),
    **dict.fromkeys(("half_life", "readahead", "reorder_interval"), NO_SIZE),
}

# A field of each type.
WRONG_TYPES: dict[str, Sequence[object]] = {
    "probe_heads": (3.0, True, "3"),
    "io_timeout": ("10", False, None),
    "retention": (None, b"auto", True, [0.5]),
    "ssd_dir": (Path("kv"), None, 1, True),
}

EDGE_VALUES: dict[str, Sequence[object]] = {
    "retention": (1, 0.05, AUTO),
    "min_retention": (0, 0.05),
    "bits": (6, *config_module.BITS, EXACTLY, AUTO),
    "alpha": (1.0, 5e-324),
    "probe_heads": (1,),
    "chunk_tokens": (8, 4096),
    "min_prefix_tokens": (1, 1 << 20),
    "min_free_gb": (0, 1e3),
    "io_depth": (1, 1024),
    "io_timeout": (0.001, 0.1 + 0.2),
    "approximation_depth": (0, 5),
    "blend": (0, 0.0, 0.15, 1, 1.0, "auto", "off"),
    "blend_min_tokens": (1,),
    "blend_seconds": (0.1, 5, 60.0),
    "truncate": (0.01, 0.5, 0.99, "off"),
    "ssd_dir": ("/kv", "\u00e9 \"'\n\\", "\U0001f4be"),
    **dict.fromkeys(("device_gb", "host_gb", "half_life"), (0,)),
    "readahead": (0, 7.5),
    "reorder_interval": (0, 0.001),
    "basis": ("",),
    **{option.field: option.rule.choices for option in OPTIONS if option.rule.choices},
}


def rows(table: dict[str, Sequence[object]]) -> list[tuple[str, object]]:
    return [(field, value) for field, values in table.items() for value in values]


def policy_for(field: str) -> str:
    """One to which an option means something."""
    return "paper" if field == "retention" else "impress"


@pytest.mark.parametrize(("field", "value"), rows(WRONG_VALUES) + rows(WRONG_TYPES))
def test_a_wrong_value_is_refused_and_the_message_names_the_flag(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        ImpressConfig(**{"policy": policy_for(field), field: value})

    assert FLAG_OF[field] in str(caught.value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(("field", "value"), rows(EDGE_VALUES))
def test_value_at_the_edge_of_its_range_is_taken(field: str, value: object) -> None:
    """And comes back from JSON as it was."""
    config = ImpressConfig(**{"policy": policy_for(field), field: value})
    assert getattr(config, field) == value
    text = json.dumps(dataclasses.asdict(config))
    assert ImpressConfig.from_environment({CONFIG_VARIABLE: text}) == config


def test_every_field_has_wrong_values_here_and_an_option_with_its_name_as_the_flag() -> None:
    assert WRONG_VALUES.keys() == FIELDS - {"basis"}
    assert sorted(option.field for option in OPTIONS) == sorted(FIELDS)
    for option in OPTIONS:
        assert option.flag == "--impress-" + option.field.replace("_", "-")
        assert option.help.endswith(".")


SHARES = (0.25, 0.999, AUTO)
WHOLE = [policy for policy in config_module.POLICIES if policy not in config_module.PART_POLICIES]
PARTS = [(policy, share) for policy in config_module.PART_POLICIES for share in SHARES]
# Options, what follows from them, and its value.
FOLLOWS: tuple[tuple[dict[str, Any], str, object], ...] = (
    *(({"retention": share}, "default_retention", float(share)) for share in (0.05, 0.3, 1)),
    # `auto` is never less than its floor, and than what is allowed.
    *(
        ({"retention": AUTO, "min_retention": floor}, "default_retention", config_module.AUTO_FLOOR)
        for floor in (0, 0.05)
    ),
    ({"retention": AUTO, "min_retention": 0.6}, "default_retention", 0.6),
    *(({"bits": bits}, "default_bits", float(bits)) for bits in (5, 6, 6.0)),
    *(({"bits": bits}, "code_bits", 6.0) for bits in (6, EXACTLY, AUTO)),
    ({"bits": 5}, "code_bits", 5.0),
    ({"bits": EXACTLY}, "default_bits", config_module.EXACT_BITS),
    ({"bits": AUTO}, "default_bits", config_module.USUAL_BITS),
    ({"bits": EXACTLY, "blend": 0.15}, "code_bits", 6.0),
    *(({"policy": policy, "retention": share}, "needs_parts", True) for policy, share in PARTS),
    *(({"policy": policy}, "needs_parts", False) for policy in WHOLE),
    # What bits may load is kept.
    ({}, "kept", "codes"),
    ({"bits": 5, "basis": "some"}, "kept", "codes"),
    ({"bits": 5}, "kept", "codes"),
    ({"blend": 0.15}, "kept", "both"),
    *(({"bits": bits, "basis": "some"}, "kept", "both") for bits in (EXACTLY, AUTO)),
    ({"bits": EXACTLY}, "kept", "exact"),
    ({"bits": EXACTLY, "blend": 0.15}, "kept", "both"),
    ({"bits": AUTO}, "kept", "both"),
    ({"policy": "as"}, "kept", "exact"),
    ({"keep": "both"}, "kept", "both"),
    ({"keep": "codes", "bits": AUTO}, "kept", "codes"),
)


@pytest.mark.parametrize(("options", "name", "value"), FOLLOWS)
def test_what_follows_from_options(options: dict[str, Any], name: str, value: object) -> None:
    policy = "paper" if "retention" in options else "impress"
    found = getattr(ImpressConfig(**{"policy": policy, **options}), name)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("retention", "0.25", 0.25),
        ("retention", "1", 1.0),
        ("bits", "5", 5.0),
        ("bits", "exact", EXACTLY),
        *((field, AUTO, AUTO) for field in ("retention", "bits")),
        *((name, str(value), value) for name, value in dataclasses.asdict(ImpressConfig()).items()),
    ],
)
def test_numbers_words_and_defaults_on_a_command_line(field: str, text: str, value: object) -> None:
    parse = next(option.parse for option in OPTIONS if option.field == field)
    assert parse(text) == value
    assert type(parse(text)) is type(value)


@pytest.mark.parametrize("text", ["", "  \n", None])
def test_unset_variable_means_no_configuration(text: str | None) -> None:
    environ = {} if text is None else {CONFIG_VARIABLE: text}
    assert ImpressConfig.from_environment(environ) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *((text, CONFIG_VARIABLE) for text in ("{", "[]", "1", "null", '"impress"')),
        ('{"bits": 5, "nonsense": 1, "also_wrong": 2}', "also_wrong, nonsense; .*retention"),
    ],
)
def test_a_wrong_variable_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ImpressConfig.from_environment({CONFIG_VARIABLE: text})


# Options that are wrong together, and what is said.
WRONG_TOGETHER: tuple[tuple[dict[str, Any], str], ...] = (
    # What would never be loaded is not kept.
    ({"keep": "codes", "bits": EXACTLY}, "--impress-keep"),
    ({"keep": "codes", "bits": EXACTLY, "basis": "some"}, "--impress-keep"),
    ({"keep": "codes", "policy": "paper"}, "--impress-keep"),
    ({"keep": "exact", "policy": "as"}, "--impress-keep"),
    ({"keep": "exact", "basis": "some"}, "--impress-keep"),
    ({"keep": "exact", "blend": 0.15}, "--impress-keep"),
    # Reused text needs as many bits as there are.
    ({"bits": 5, "blend": 0.15}, "--impress-blend needs --impress-bits 6"),
    # Only the paper's policies have parts.
    *(
        ({"policy": policy, "retention": share}, "--impress-retention .* needs --impress-policy")
        for policy in WHOLE
        for share in SHARES
    ),
)


@pytest.mark.parametrize(("options", "said"), WRONG_TOGETHER)
def test_options_that_are_wrong_together_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ImpressConfig(**options)


def test_enable_for_engine_sets_the_variable_that_children_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Set through monkeypatch first, so that it is removed again after the test.
    monkeypatch.setenv(CONFIG_VARIABLE, "{}")
    with pytest.raises(ConfigError):
        config_module.enable_for_engine(retention=7.0)
    assert os.environ[CONFIG_VARIABLE] == "{}", "a wrong value leaves it alone"

    config = config_module.enable_for_engine(ssd_dir="/nvme/kv", bits=5.0)

    assert (config.ssd_dir, config.bits) == ("/nvme/kv", 5.0)
    assert ImpressConfig.from_environment() == config


def test_a_home_that_nobody_has() -> None:
    with pytest.raises(ConfigError, match="--impress-ssd-dir ~nobody-at-all/kv"):
        _ = ImpressConfig(ssd_dir="~nobody-at-all/kv").ssd_path
