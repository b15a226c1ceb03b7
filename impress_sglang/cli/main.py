"""The command line `impress`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from impress_sglang.cli import (
    DAMAGED,
    DONE,
    EXIT_STATUS,
    INTERRUPTED,
    CommandError,
    Unreachable,
)
from impress_sglang.cli.bench import measure
from impress_sglang.cli.server import Server
from impress_sglang.config import BITS, BOTH, CODES, DEFAULT_SSD_DIR, USUAL_BITS

URL = "http://127.0.0.1:30000"
KEY_VARIABLE = "IMPRESS_KEY"
# The class that SGLang's HiCache instantiates; `interface_v1`: it passes the places of pages in
# its host memory.
HICACHE = {
    "backend_name": "impress",
    "module_path": "impress_sglang.hicache.plugin.backend",
    "class_name": "ImpressStorage",
    "interface_v1": 1,
}
Option = tuple[str, dict[str, Any]]


def _need(name: str, kind: type, told: str, **how: Any) -> Option:
    return name, {"type": kind, "required": True, "help": told, **how}


def _may(name: str, kind: type, told: str, default: Any = None, **how: Any) -> Option:
    told = told if default in (None, []) else f"{told}; default: {default}"
    return name, {"type": kind, "default": default, "help": told, **how}


def _flag(name: str, told: str, **how: Any) -> Option:
    return name, {"action": "store_true", "help": told, **how}


_NAMESPACE = (
    _may("--extra-key", str, "extra_key of the requests"),
    _may("--cache-salt", str, "cache_salt of the requests"),
)
_FILE, _IDS = "file with the text of the prefix; -: stdin", "its token ids, separated by commas"
_SEGMENT = "its last segment, as ls shows it"
_TEXT, _ONE_FILE = _may("--text", str, "text of the prefix"), _may("--file", Path, _FILE)
_FILES = _may("--file", Path, f"{_FILE}; may be given several times", action="append")
_PROMPT = (_TEXT, _ONE_FILE, _may("--ids", str, _IDS))
_PREFIX = (*_PROMPT, _may("--segment", str, f"{_SEGMENT}; only with --dir"), *_NAMESPACE)
_AGE = "written at least so long ago; alone: any prefix"
_SERVER, _DIR = ("--url", "--key"), ("--dir",)
_BOTH = (*_SERVER, *_DIR)

COMMANDS: dict[str, tuple[tuple[str, ...], str, tuple[Option, ...]]] = {
    "stat": (_BOTH, "say how much is stored", ()),
    "ls": (_BOTH, "list stored segments, the most recently used first", ()),
    "verify": (_BOTH, "check a server, or read all files in a directory", ()),
    "gc": (_DIR, "remove files that nobody can use", ()),
    "clear": (
        _BOTH,
        "remove everything that is stored",
        (_flag("--yes", "it cannot be undone", required=True),),
    ),
    "plan": (
        (),
        "compute the space and time that prefixes of a model take",
        (
            _need("--model", Path, "its folder or config.json"),
            _need("--prefixes", int, "number of prefixes to keep"),
            _need("--tokens", int, "tokens per prefix"),
            _may("--bits", float, "as --impress-bits", USUAL_BITS),
            _may("--basis", Path, "of --impress-basis"),
            _may("--keep", str, "of --impress-keep", CODES, choices=(CODES, BOTH)),
            _may("--drive-gbps", float, "read speed of the drive", 3.0),
            _may("--per-day", int, "new prefixes per day", 0),
        ),
    ),
    "bench": (
        _SERVER,
        "measure whether the store pays on a server",
        (
            _may("--prefixes", int, "number of prefixes", 8),
            _may("--prefix-tokens", int, "tokens per prefix", 2000),
            _may("--text", Path, "file to take them from; default: random tokens"),
            _may("--clients", int, "concurrent clients", 1),
            _flag("--flush", "empty SGLang's pool, for everybody"),
            _may("--api-key", str, "key of requests, if it differs from --key"),
        ),
    ),
    "calibrate": (
        (),
        "fit a basis to a model",
        (
            _need("--model", Path, "its folder"),
            _need("--out", Path, "to write the basis to", metavar="FILE"),
            _may("--text", Path, "one per kind; default: those of the package", [], nargs="+"),
            _may("--tokens", int, "per text", 1500),
            _may("--tp-size", int, "of servers: a basis for each rank", [1], nargs="+"),
        ),
    ),
    "hicache-config": (
        (),
        "print what makes SGLang's HiCache store its pages here: the value of "
        "--hicache-storage-backend-extra-config",
        (
            _need("--ssd-dir", Path, "directory of the pages"),
            _need("--ssd-gb", float, "quota of all pages in it, in GB (10^9 bytes)"),
            _may("--bits", float, "of each number; default: exact", choices=BITS),
        ),
    ),
    "why": (
        _SERVER,
        "say how much of a prompt is stored, and why no more",
        (*_PROMPT, *_NAMESPACE),
    ),
    "warm": (_SERVER, "store a prefix now, or load it", (_TEXT, _FILES, _PROMPT[2], *_NAMESPACE)),
    "pin": (_BOTH, "never evict a stored prefix", _PREFIX),
    "unpin": (_BOTH, "unpin prefixes that begin like this one", _PREFIX),
    "purge": (
        _BOTH,
        "remove a prefix and all that begin with it, or a namespace",
        (*_PREFIX, _may("--older-than", float, _AGE, metavar="SECONDS")),
    ),
    "export": (
        _DIR,
        "write a namespace to a new folder",
        (
            ("path", {"type": Path, "metavar": "FOLDER", "help": "new folder"}),
            _may("--store", str, "its name as ls shows it, if there are several"),
            _may("--ids", str, f"a prefix instead of a namespace: {_IDS}"),
            _may("--segment", str, f"the same by {_SEGMENT}"),
            *_NAMESPACE,
        ),
    ),
    "import": (
        _DIR,
        "store what was exported elsewhere",
        (
            ("path", {"type": Path, "metavar": "FOLDER", "help": "written by impress export"}),
            *_NAMESPACE,
        ),
    ),
}
# Options of which a command takes one, and commands that need one.
_WHICH, _ONE = ("--text", "--file", "--ids", "--segment"), ("why", "warm", "pin", "unpin")


def parser() -> argparse.ArgumentParser:
    status = "; ".join(f"{code}: {meaning}" for code, meaning in EXIT_STATUS.items())
    top = argparse.ArgumentParser(
        "impress",
        description="Inspect and manage stored prefixes.",
        epilog=f"Exit status is {status}.".replace("`", ""),
    )
    commands = top.add_subparsers(dest="command", required=True)
    for name, (where, told, options) in COMMANDS.items():
        command = commands.add_parser(name, help=told, description=told[0].upper() + told[1:] + ".")
        command.add_argument("--json", action="store_true", help="print JSON")
        if "--dir" in where:
            default = None if "--url" in where else DEFAULT_SSD_DIR
            instead = f"default: {default}" if default else "in place of a server"
            shown = f"an --impress-ssd-dir that no server uses; {instead}"
            command.add_argument("--dir", type=Path, default=default, help=shown)
        if "--url" in where:
            key = os.environ.get(KEY_VARIABLE)
            command.add_argument("--url", default=URL, help=f"running server; default: {URL}")
            command.add_argument("--key", default=key, help=f"default: {KEY_VARIABLE}")
        named = _WHICH if "--ids" in dict(options) else ()
        which = command.add_mutually_exclusive_group(required=name in _ONE) if named else command
        for option, how in options:
            (which if option in named else command).add_argument(option, **how)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out a command; return the exit status."""
    args = parser().parse_args(arguments)
    try:
        found = _carry_out(args)
    except (CommandError, Unreachable, KeyboardInterrupt) as error:
        print(f"impress: {str(error) or 'interrupted'}", file=sys.stderr)
        return getattr(error, "status", INTERRUPTED)
    try:
        as_json = args.json or args.command == "hicache-config"
        print(json.dumps(found, indent=2) if as_json else _as_text(found))
    except BrokenPipeError:
        # The reader has stopped, as in `| head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return DAMAGED if args.command == "verify" and found not in ([], {"integrity": "ok"}) else DONE


def _carry_out(args: argparse.Namespace) -> Any:
    # Modules that import torch are imported by commands that need them.
    match args.command:
        case "plan":
            from impress_sglang.cli.plan import plan

            return plan(args)
        case "calibrate":
            from impress_sglang.cli.calibrate import calibrate

            return calibrate(args.model, args.out, args.text, args.tokens, args.tp_size)
        case "hicache-config":
            few = {} if args.bits is None else {"bits": args.bits}
            return HICACHE | {"ssd_dir": str(args.ssd_dir.absolute()), "ssd_gb": args.ssd_gb} | few
    if getattr(args, "dir", None) is not None:
        from impress_sglang.cli import directory, export_import

        match args.command:
            case "pin" | "unpin" | "purge":
                return directory.order(args.dir, args.command, _prefix_of(args))
            case "export":
                return export_import.export(args.dir, _prefix_of(args), args.path, args.store)
            case "import":
                return export_import.import_(args.dir, _prefix_of(args), args.path)
        return getattr(directory, args.command)(args.dir)
    if getattr(args, "segment", None) is not None:
        raise CommandError("--segment names a prefix in a directory: give --dir")
    server = Server(args.url, args.key, getattr(args, "api_key", None))
    match args.command:
        case "bench":
            text = None if args.text is None else _read(args.text)
            many = args.prefixes, args.prefix_tokens, args.clients
            return measure(server, *many, text=text, flush=args.flush)
        case "ls":
            return _listed(server.overview())
        case "verify":
            return server.order("check")
        case "stat":
            return _shown(server.stats())
        case "clear":
            return server.order("purge", {"all": True})
    found = server.order(args.command, _prefix_of(args))
    if isinstance(found, list):
        return [{"file": str(path), **row} for path, row in zip(args.file, found, strict=True)]
    return found


def _read(path: Path) -> str:
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CommandError(f"{path} cannot be read: {error}") from error


def _prefix_of(args: argparse.Namespace) -> dict[str, Any]:
    told = vars(args)
    names = ("text", "extra_key", "cache_salt", "segment", "older_than")
    body = {name: told[name] for name in names if told.get(name) is not None}
    if isinstance(told.get("file"), list):
        texts = [_read(path) for path in args.file]
        body |= {"text": texts[0]} if len(texts) == 1 else {"texts": texts}
    elif told.get("file") is not None:
        body["text"] = _read(args.file)
    if told.get("ids") is not None:
        try:
            body["input_ids"] = [int(number) for number in args.ids.split(",")]
        except ValueError as error:
            problem = f"--ids must be numbers with commas between them: {error}"
            raise CommandError(problem) from error
    # An age alone selects all prefixes of that age.
    return {**body, "all": True} if body.keys() == {"older_than"} else body


def _listed(overview: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the most recently used segments, in the same rows as for a directory."""
    stats, found = overview["stats"], overview["segments"]
    count = (stats["store"] or {}).get("segments", 0)
    if count > len(found):
        print(f"impress: {len(found)} of {count:,} segments, used last", file=sys.stderr)
    names = "segment namespace from_token tokens ssd_bytes hits priority exact"
    return [
        {"store": stats["identity"]}
        | {name.removeprefix("ssd_"): row[name] for name in names.split()}
        for row in found
    ]


def _shown(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Return the most important statistics."""
    store, totals = stats["store"] or {}, stats["totals"]
    names = ("segments", "used_bytes", "quota_bytes", "writes_pending", "bytes_written")
    return {
        "identity": stats["identity"],
        "state": stats["suspended"] or store["health"]["state"],
        **{name: store.get(name) for name in names},
        "pins": stats["pins"],
        "requests": totals["requests"],
        "why": {reason: count for reason, count in totals["requests_why"].items() if count},
    }


def _as_text(found: Any) -> str:
    if isinstance(found, list):
        return _table(found) if found else "nothing"
    if "ways" in found:
        return f"{_table(found['ways'])}\n{found['conclusion']}"
    return "\n".join(f"{name}: {_cell(value)}" for name, value in found.items())


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    cells = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = (" ".join(map(str.ljust, row, widths)) for row in cells)
    return "\n".join(line.rstrip() for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_cell(count)}" for name, count in value.items()) or "none"
    return f"{value:,}" if type(value) is int else str(value)
