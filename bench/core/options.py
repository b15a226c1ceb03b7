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

    A tuple is values between commas, a path belongs to this machine and is left out of the
    recorded command. `parse` replaces the default's type (of one value, in a tuple), `quick` the
    default with `--quick`; a `repeated` option gathers a list.
    """

    name: str
    default: Any
    help: str
    quick: Any = None
    parse: Callable[[str], Any] | None = None
    repeated: bool = False

    def add_to(self, parser: argparse.ArgumentParser, quick: bool) -> None:
        """Declare it, for a quick run or a full one."""
        told, how = self.help, dict[str, Any]()
        if self.repeated:
            how |= {"action": "append", "default": [], "metavar": "X"}
        else:
            value = self.quick if quick and self.quick is not None else self.default
            how |= {"type": self._value, "default": value, "metavar": "X"}
            if value not in (None, ()):
                shown = ",".join(map(str, value)) if isinstance(value, tuple) else value
                told = f"{told} ({shown})".replace("%", "%%")
        parser.add_argument(f"--{self.name}", help=told, **how)

    def _value(self, text: str) -> Any:
        several = isinstance(self.default, tuple)
        kind = self.parse or type(self.default[0] if several else self.default)
        return tuple(dict.fromkeys(map(kind, text.split(",")))) if several else kind(text)


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


def parse(
    name: str, description: str | None, options: Sequence[Option], given: Sequence[str]
) -> argparse.Namespace:
    """The values of all options; `command` gives the same run on any machine."""
    options = [*options, JSON]
    parser = argparse.ArgumentParser(
        prog=f"python -m bench {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    quick = "small and short: whether it works, not how fast it is"
    parser.add_argument("--quick", action="store_true", help=quick)
    for option in options:
        option.add_to(parser, "--quick" in given)
    args = parser.parse_args(given)
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
