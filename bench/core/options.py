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

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Declare it; the default is filled in later, when it is known whether the run is quick."""
        told, how = self.help, {"type": self._value, "metavar": "X"}
        if self.repeated:
            how["action"] = "append"
        elif self.default is False:
            how = {"action": "store_true"}
        elif self.default not in (None, ()):
            quick = "" if self.quick is None else f", with --quick {_shown(self.quick)}"
            told += f" ({_shown(self.default)}{quick})".replace("%", "%%")
        parser.add_argument(f"--{self.name}", help=told, **how)

    def _value(self, text: str) -> Any:
        if isinstance(self.default, tuple):
            return tuple(dict.fromkeys(map(self._one, text.split(","))))
        return self._one(text)

    def _one(self, text: str) -> Any:
        several = isinstance(self.default, tuple)
        kind = self.parse or (str if self.repeated else None)
        value = (kind or type(self.default[0] if several else self.default))(text)
        if isinstance(value, int) and value < 0:
            raise argparse.ArgumentTypeError("must not be negative")
        return value


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
        key = option.name.replace("-", "_")
        if getattr(args, key) is None:
            quick = args.quick and option.quick is not None
            default = option.quick if quick else option.default
            setattr(args, key, [] if option.repeated else default)
    kept, words = [f"python -m bench {name}"], iter(given)
    places = {f"--{option.name}" for option in options if option.parse is Path}
    for word in words:
        flag, equals, _ = word.partition("=")
        if flag not in places:
            kept.append(word if word.isascii() and " " not in word else repr(word))
        elif not equals:
            next(words, None)
    args.command = " ".join(kept)
    return args


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
