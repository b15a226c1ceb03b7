"""The command line: an argument group, and how parsed arguments become an `ImpressConfig`."""

from __future__ import annotations

import argparse
from typing import Any

from impress_sglang.config import OPTIONS, ImpressConfig
from impress_sglang.errors import ConfigError

# ServerArgs drops unknown arguments; underscore attributes survive its pickling to child processes.
CONFIG_ATTRIBUTE = "_impress_config"
FROM_CLI_ATTRIBUTE = "_impress_from_cli"
# Of the worker that a tree cache is built for.
DRAFTS_ATTRIBUTE = "impress_draft_worker"
_DEST_PREFIX = "impress_"


def add_flags(parser: argparse.ArgumentParser, enable: type[argparse.Action]) -> None:
    """Add the `--enable-impress` group to SGLang's parser; `enable` is that flag's action."""
    defaults = ImpressConfig()
    group = parser.add_argument_group("IMPRESS: importance-informed prefix storage")
    group.add_argument(
        "--enable-impress",
        action=enable,
        nargs=0,
        default=False,
        help="Keep prefixes on SSD, and load them in few bits.",
    )
    for option in OPTIONS:
        default = getattr(defaults, option.field)
        shown = ("off", "on")[default] if isinstance(default, bool) else default
        group.add_argument(
            option.flag,
            dest=_DEST_PREFIX + option.field,
            type=option.parse,
            choices=option.rule.choices,
            default=None,
            help=f"{option.help} Default: {shown}.",
        )


def config_from_arguments(args: argparse.Namespace) -> ImpressConfig | None:
    """The configuration that the command line asks for, or None.

    Raises `ConfigError` for a wrong value, or an option without `--enable-impress`.
    """
    values = {own: getattr(args, _DEST_PREFIX + own.field, None) for own in OPTIONS}
    given = {own: value for own, value in values.items() if value is not None}
    if getattr(args, "enable_impress", False):
        return ImpressConfig.from_options({own.field: value for own, value in given.items()})
    if given:
        flags = ", ".join(own.flag for own in given)
        raise ConfigError(f"{flags} needs --enable-impress")
    return None


def config_of(server_args: Any) -> ImpressConfig | None:
    """The configuration that travels with SGLang's server arguments, or None if IMPRESS is off.

    Without a parsed command line (`sglang.Engine`) it is read from the environment, once, and kept
    with the arguments, which child processes get. That raises `ConfigError` for a wrong value.
    """
    config: ImpressConfig | None = getattr(server_args, CONFIG_ATTRIBUTE, None)
    if config is None and (config := ImpressConfig.from_environment()) is not None:
        setattr(server_args, CONFIG_ATTRIBUTE, config)
    return config
