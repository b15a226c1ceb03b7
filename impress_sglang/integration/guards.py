"""Refuses at start what cannot be served, with one sentence each.

The checks run in the main process, on SGLang's resolved options and the model's configuration,
before any other process is started, and again in the scheduler, where they are final. What is known
is in tables (`judged_arguments.py`, `judged_models.py`); an option that is in none of them must
have its default.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from impress_sglang.config import ImpressConfig
from impress_sglang.errors import UnsupportedError
from impress_sglang.integration.judged_arguments import (
    HARMLESS,
    IDENTITY,
    INERT,
    RESTRICTED,
    SCHEDULED,
    is_off,
)
from impress_sglang.integration.judged_models import (
    CONFIG_UNSET,
    ENVIRONMENT,
    ENVIRONMENT_IDENTITY,
    LAYER_TYPES,
    MODEL_UNSET,
    ROPE_TYPES,
    ROPE_UNSET,
)
from impress_sglang.integration.layers import check_architecture
from impress_sglang.options import OFF

_Check = tuple[Callable[[Any], object], str]

MODEL_CHECKS: tuple[_Check, ...] = (
    (
        lambda m: m.attention_arch.name == "MLA",
        "IMPRESS needs keys per head, which MLA models do not keep",
    ),
    (
        lambda m: m.attention_arch.name != "MHA" or _has_linear_layers(m),
        "IMPRESS does not support hybrid models with state-space or linear attention layers",
    ),
    (
        lambda m: _sliding_window(m),
        "IMPRESS does not support sliding-window models: their window counts positions, which a "
        "partly loaded prefix does not have",
    ),
    (
        lambda m: getattr(m.hf_text_config, "attn_temperature_len", -1) > 0,
        "IMPRESS does not support attention whose temperature counts positions, which a partly "
        "loaded prefix does not have",
    ),
    (lambda m: m.is_encoder_decoder, "IMPRESS does not support encoder-decoder models"),
    (lambda m: m.is_multimodal, "IMPRESS does not support multimodal models yet"),
    (lambda m: not m.is_generation, "IMPRESS serves generation models only"),
)


def check_arguments(config: ImpressConfig, options: Any) -> None:
    """Refuse options, or combinations of options, that IMPRESS does not support.

    Raises:
        UnsupportedError: with one sentence.
    """
    check_options(options)
    check_schedule(config, options)
    check_truncation(config, options)


def check_options(options: Any) -> None:
    """Refuse SGLang options that cannot be combined with IMPRESS; `options` is the resolved view.

    Raises:
        UnsupportedError: with one sentence for the first option that does not fit.
    """
    for name, restriction in RESTRICTED.items():
        if not restriction.allows(getattr(options, name)):
            raise UnsupportedError(restriction.sentence)
    for name, default in option_defaults().items():
        if name in RESTRICTED or name in IDENTITY | HARMLESS | INERT:
            continue
        value = getattr(options, name)
        if value != default and not (is_off(value) and is_off(default)):
            flag = name.replace("_", "-")
            raise UnsupportedError(
                f"IMPRESS does not know what --{flag} {value} does to stored prefixes: drop "
                f"--{flag}"
            )


def option_defaults() -> dict[str, Any]:
    """All fields of SGLang's `ServerArgs` and their defaults; None for mandatory fields."""
    import msgspec
    from sglang.srt.server_args import ServerArgs

    def default(field: Any) -> Any:
        if field.default_factory is not msgspec.NODEFAULT:
            return field.default_factory()
        return None if field.default is msgspec.NODEFAULT else field.default

    return {field.name: default(field) for field in msgspec.structs.fields(ServerArgs)}


def identity_of_options(options: Any) -> dict[str, object]:
    """The options and environment variables that change KVs, for `model_identity`."""
    from sglang.srt.environ import envs

    arguments = {f"--{name}": getattr(options, name) for name in IDENTITY}
    return arguments | {name: getattr(envs, name).get() for name in ENVIRONMENT_IDENTITY}


def check_environment() -> None:
    """Refuse SGLang's environment variables that change how KVs are laid out or requests checked.

    Raises:
        UnsupportedError: with one sentence that names the variable.
    """
    from sglang.srt.environ import envs

    for name, (right, why) in ENVIRONMENT.items():
        if getattr(envs, name).get() != right:
            raise UnsupportedError(f"{why}: unset {name}")


def check_schedule(config: ImpressConfig, options: Any) -> None:
    """Refuse to reorder the queue of a schedule policy for which that was not judged.

    Raises:
        UnsupportedError: with one sentence.
    """
    if config.schedule != OFF and options.schedule_policy not in SCHEDULED:
        raise UnsupportedError(
            f"--impress-schedule changes places in the orders {', '.join(SCHEDULED)}, not in that "
            f"of --schedule-policy {options.schedule_policy}: choose one of them, or drop it"
        )


def check_truncation(config: ImpressConfig, options: Any) -> None:
    """Refuse to cut prompts at both ends.

    Raises:
        UnsupportedError: with one sentence.
    """
    if config.truncate != OFF and options.allow_auto_truncate:
        raise UnsupportedError(
            "--impress-truncate cuts the oldest part of a prompt that is too long, and "
            "--allow-auto-truncate its end: drop one of them"
        )


def check_model(model_config: Any) -> None:
    """Refuse models whose attention was not judged to be right; `model_config` is SGLang's.

    Raises:
        UnsupportedError: with one sentence for the first reason.
    """
    for is_unsupported, sentence in MODEL_CHECKS:
        if is_unsupported(model_config):
            raise UnsupportedError(sentence)
    config = model_config.hf_text_config
    for name in model_config.hf_config.architectures or ["a model without a name"]:
        check_architecture(name)
    for subject, names in ((config, CONFIG_UNSET), (model_config, MODEL_UNSET)):
        if found := [name for name in sorted(names) if getattr(subject, name, None)]:
            raise UnsupportedError(f"IMPRESS does not support models with {found[0]}")
    unknown = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    if unknown:
        raise UnsupportedError(f"IMPRESS does not know layers of type {', '.join(sorted(unknown))}")
    _check_rope(config)


def _check_rope(config: Any) -> None:
    for name in ("rope_parameters", "rope_scaling"):
        rope = getattr(config, name, None) or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        nested = [key for key, value in rope.items() if isinstance(value, dict)]
        if kind not in ROPE_TYPES or nested or ROPE_UNSET & rope.keys():
            raise UnsupportedError(
                f"IMPRESS needs positions that count tokens, and knows RoPE of types "
                f"{', '.join(sorted(ROPE_TYPES))}; this model has {rope}"
            )


def _has_linear_layers(model_config: Any) -> bool:
    from sglang.srt.configs.hybrid_arch import mambaish_config

    layer_types = getattr(model_config.hf_text_config, "layer_types", None) or ()
    return mambaish_config(model_config) is not None or any("linear" in t for t in layer_types)


def _sliding_window(model_config: Any) -> bool:
    config = model_config.hf_text_config
    layer_types = getattr(config, "layer_types", None) or ()
    if model_config.is_hybrid_swa or any("sliding" in kind for kind in layer_types):
        return True
    # Qwen2 configurations have a window that the model does not use.
    window = getattr(config, "sliding_window", None)
    return bool(window) and getattr(config, "use_sliding_window", True) and not layer_types
