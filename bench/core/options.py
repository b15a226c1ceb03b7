"""Options of benchmarks, declared as data: one parser reads them all."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """An option `--name`; its default gives the type of its value.

    False is a flag, a tuple is values between commas, a path belongs to this machine and is left
    out of the recorded command. `parse` replaces the default's type (of one value, in a tuple),
    `quick` the default with `--quick`; a `repeated` option gathers a list.
    """

    name: str
    default: Any
    help: str
    quick: Any = None
    parse: Callable[[str], Any] | None = None
    repeated: bool = False

    @property
    def key(self) -> str:
        """Its attribute."""
        return self.name.replace("-", "_")

    @property
    def is_path(self) -> bool:
        """Whether its value is a place on this machine."""
        return self.parse is Path

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Declare it; the default is filled in later, when it is known whether the run is quick."""
        flag, told = f"--{self.name}", f"{self.help}{self._shown_default()}"
        if self.default is False:
            parser.add_argument(flag, action="store_true", help=told)
        elif self.repeated:
            parser.add_argument(flag, action="append", type=self.parse, help=told, metavar="X")
        else:
            parser.add_argument(flag, type=self._value, help=told, metavar="X")

    def _value(self, text: str) -> Any:
        if not isinstance(self.default, tuple):
            return self._one(text)
        return tuple(dict.fromkeys(self._one(part) for part in text.split(",")))

    def _one(self, text: str) -> Any:
        several = isinstance(self.default, tuple)
        value = (self.parse or type(self.default[0] if several else self.default))(text)
        if isinstance(value, int) and value < 0:
            raise argparse.ArgumentTypeError("must not be negative")
        return value

    def _shown_default(self) -> str:
        if self.default is None or self.default is False or self.default == () or self.repeated:
            return ""
        quick = "" if self.quick is None else f", with --quick {_shown(self.quick)}"
        return f" ({_shown(self.default)}{quick})".replace("%", "%%")


QUICK = Option("quick", False, "small and short: whether it works, not how fast it is")
JSON = Option("json", None, "write all figures to this file", parse=Path)
KEEP = Option("keep", None, "work in this empty folder, and keep it with all logs", parse=Path)
SEED = Option("seed", 1, "of all that is drawn")
DATA = Option("data", None, "folder of data sets, DIR/NAME/*.jsonl (the excerpts)", parse=Path)
MODEL = Option("model", None, "folder of a model (the demo's)", parse=Path)
DTYPE = Option("dtype", "float32", "of the model")
SERVER_FLAG = Option("server-flag", None, "one more flag for our server", repeated=True)
# Of what asks a server for data sets.
ASKING = (SERVER_FLAG, DATA, MODEL, DTYPE, SEED, KEEP)


def one_of(known: Collection[str]) -> Callable[[str], str]:
    """Takes these names."""

    def parse(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(known)}")
        return text

    return parse


def bounds(text: str) -> tuple[int, int]:
    """`LOW-HIGH`, or one number for both."""
    low, _, high = text.partition("-")
    found = int(low), int(high or low)
    if not 1 <= found[0] <= found[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is no range of positive numbers")
    return found


def parse(
    name: str, description: str | None, options: Sequence[Option], given: Sequence[str]
) -> argparse.Namespace:
    """The values of all options; `command` gives the same run on any machine."""
    options = [QUICK, *options, JSON]
    parser = argparse.ArgumentParser(
        prog=f"python -m bench {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for option in options:
        option.add_to(parser)
    args = parser.parse_args(given)
    for option in options:
        if getattr(args, option.key) is None:
            setattr(args, option.key, _default(option, args.quick))
    places = {f"--{option.name}" for option in options if option.is_path}
    args.command = " ".join([f"python -m bench {name}", *_portable(given, places)])
    return args


def _default(option: Option, quick: bool) -> Any:
    if option.repeated:
        return []
    return option.quick if quick and option.quick is not None else option.default


def _portable(given: Sequence[str], places: set[str]) -> list[str]:
    """The words of a command without options whose values are paths."""
    kept, words = [], iter(given)
    for word in words:
        flag, equals, _ = word.partition("=")
        if flag not in places:
            kept.append(word if word.isascii() and " " not in word else repr(word))
        elif not equals:
            next(words, None)
    return kept


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
