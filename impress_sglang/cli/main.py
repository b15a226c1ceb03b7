"""The command line `impress`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from impress_sglang.cli import DAMAGED, DONE, EXIT_STATUS, INTERRUPTED, CommandError, Unreachable
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


def _folder(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from error


def _required(name: str, kind: Callable[[str], Any], text: str, **options: Any) -> Option:
    return name, {"type": kind, "required": True, "help": text, **options}


def _optional(name: str, kind: type, text: str, default: Any = None, **options: Any) -> Option:
    text = text if default in (None, []) else f"{text}; default: {default}"
    return name, {"type": kind, "default": default, "help": text, **options}


def _flag(name: str, text: str, **options: Any) -> Option:
    return name, {"action": "store_true", "help": text, **options}


_NAMESPACE = (
    _optional("--extra-key", str, "extra_key of the requests"),
    _optional("--cache-salt", str, "cache_salt of the requests"),
)
_FILE, _IDS = "file with the text of the prefix; -: stdin", "its token ids, separated by commas"
_SEGMENT = "its last segment, as ls shows it"
_TEXT, _ONE_FILE = _optional("--text", str, "text of the prefix"), _optional("--file", Path, _FILE)
_FILES = _optional("--file", Path, f"{_FILE}; may be given several times", action="append")
_PROMPT = (_TEXT, _ONE_FILE, _optional("--ids", str, _IDS))
_PREFIX = (*_PROMPT, _optional("--segment", str, f"{_SEGMENT}; only with --dir"), *_NAMESPACE)
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
            _required("--model", Path, "its folder or config.json"),
            _required("--prefixes", int, "number of prefixes to keep"),
            _required("--tokens", int, "tokens per prefix"),
            _optional("--bits", float, "as --impress-bits", USUAL_BITS),
            _optional("--basis", Path, "of --impress-basis"),
            _optional("--keep", str, "of --impress-keep", CODES, choices=(CODES, BOTH)),
            _optional("--drive-gbps", float, "read speed of the drive", 3.0),
            _optional("--per-day", int, "new prefixes per day", 0),
        ),
    ),
    "bench": (
        _SERVER,
        "measure whether the store pays on a server",
        (
            _optional("--prefixes", int, "number of prefixes", 8),
            _optional("--prefix-tokens", int, "tokens per prefix", 2000),
            _optional("--text", Path, "file to take them from; default: random tokens"),
            _optional("--clients", int, "concurrent clients", 1),
            _flag("--flush", "empty SGLang's pool, for everybody"),
            _optional("--api-key", str, "key of requests, if it differs from --key"),
        ),
    ),
    "calibrate": (
        (),
        "fit a basis to a model",
        (
            _required("--model", Path, "its folder"),
            _required("--out", Path, "to write the basis to", metavar="FILE"),
            _optional("--text", Path, "one per kind; default: those of the package", [], nargs="+"),
            _optional("--tokens", int, "per text", 1500),
            _optional("--tp-size", int, "of servers: a basis for each rank", [1], nargs="+"),
        ),
    ),
    "hicache-config": (
        (),
        "print what makes SGLang's HiCache store its pages here: the value of "
        "--hicache-storage-backend-extra-config",
        (
            _required("--ssd-dir", _folder, "directory of the pages"),
            _required("--ssd-gb", float, "quota of all pages in it, in GB (10^9 bytes)"),
            _optional("--bits", float, "of each number; default: exact", choices=BITS),
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
        (*_PREFIX, _optional("--older-than", float, _AGE, metavar="SECONDS")),
    ),
    "export": (
        _DIR,
        "write a namespace to a new folder",
        (
            ("path", {"type": Path, "metavar": "FOLDER", "help": "new folder"}),
            _optional("--store", str, "its name as ls shows it, if there are several"),
            _optional("--ids", str, f"a prefix instead of a namespace: {_IDS}"),
            _optional("--segment", str, f"the same by {_SEGMENT}"),
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
_PREFIX_OPTIONS = ("--text", "--file", "--ids", "--segment")
_BY_PREFIX = ("why", "warm", "pin", "unpin")


def parser() -> argparse.ArgumentParser:
    status = "; ".join(f"{code}: {meaning}" for code, meaning in EXIT_STATUS.items())
    top = argparse.ArgumentParser(
        "impress",
        description="Inspect and manage stored prefixes.",
        epilog=f"Exit status is {status}.".replace("`", ""),
    )
    commands = top.add_subparsers(dest="command", required=True)
    for name, (targets, text, options) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        command.add_argument("--json", action="store_true", help="print JSON")
        if "--dir" in targets:
            default = None if "--url" in targets else DEFAULT_SSD_DIR
            instead = f"default: {default}" if default else "in place of a server"
            dir_help = f"an --impress-ssd-dir that no server uses; {instead}"
            command.add_argument("--dir", type=_folder, default=default, help=dir_help)
        if "--url" in targets:
            key = os.environ.get(KEY_VARIABLE)
            command.add_argument("--url", default=URL, help=f"running server; default: {URL}")
            command.add_argument("--key", default=key, help=f"default: {KEY_VARIABLE}")
        named = _PREFIX_OPTIONS if "--ids" in dict(options) else ()
        group = (
            command.add_mutually_exclusive_group(required=name in _BY_PREFIX) if named else command
        )
        for option, keywords in options:
            (group if option in named else command).add_argument(option, **keywords)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out a command; return the exit status."""
    args = parser().parse_args(arguments)
    try:
        result = _run(args)
    except (CommandError, Unreachable, KeyboardInterrupt) as error:
        print(f"impress: {str(error) or 'interrupted'}", file=sys.stderr)
        return getattr(error, "status", INTERRUPTED)
    try:
        as_json = args.json or args.command == "hicache-config"
        print(json.dumps(result, indent=2) if as_json else _as_text(result))
    except BrokenPipeError:
        # The reader has stopped, as in `| head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return DAMAGED if args.command == "verify" and result not in ([], {"integrity": "ok"}) else DONE


def _run(args: argparse.Namespace) -> Any:
    # Modules that import torch are imported by commands that need them.
    match args.command:
        case "plan":
            from impress_sglang.cli.plan import plan

            return plan(args)
        case "calibrate":
            from impress_sglang.cli.calibrate import calibrate

            return calibrate(args.model, args.out, args.text, args.tokens, args.tp_size)
        case "hicache-config":
            bits = {} if args.bits is None else {"bits": args.bits}
            return HICACHE | {"ssd_dir": str(args.ssd_dir.absolute()), "ssd_gb": args.ssd_gb} | bits
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
            sizes = args.prefixes, args.prefix_tokens, args.clients
            return measure(server, *sizes, text=text, flush=args.flush)
        case "ls":
            return _segment_rows(server.overview())
        case "verify":
            return server.order("check")
        case "stat":
            return _summary_of(server.stats())
        case "clear":
            return server.order("purge", {"all": True})
    result = server.order(args.command, _prefix_of(args))
    if isinstance(result, list):
        return [{"file": str(path), **row} for path, row in zip(args.file, result, strict=True)]
    return result


def _read(path: Path) -> str:
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CommandError(f"{path} cannot be read: {error}") from error


def _prefix_of(args: argparse.Namespace) -> dict[str, Any]:
    values = vars(args)
    names = ("text", "extra_key", "cache_salt", "segment", "older_than")
    body = {name: values[name] for name in names if values.get(name) is not None}
    if isinstance(values.get("file"), list):
        texts = [_read(path) for path in args.file]
        body |= {"text": texts[0]} if len(texts) == 1 else {"texts": texts}
    elif values.get("file") is not None:
        body["text"] = _read(args.file)
    if values.get("ids") is not None:
        try:
            body["input_ids"] = [int(number) for number in args.ids.split(",")]
        except ValueError as error:
            problem = f"--ids must be numbers with commas between them: {error}"
            raise CommandError(problem) from error
    # An age alone selects all prefixes of that age.
    return {**body, "all": True} if body.keys() == {"older_than"} else body


def _segment_rows(overview: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the most recently used segments, in the same rows as for a directory."""
    stats, segments = overview["stats"], overview["segments"]
    count = (stats["store"] or {}).get("segments", 0)
    if count > len(segments):
        print(f"impress: {len(segments)} of {count:,} segments, used last", file=sys.stderr)
    names = "segment namespace from_token tokens ssd_bytes hits priority exact"
    return [
        {"store": stats["identity"]}
        | {name.removeprefix("ssd_"): row[name] for name in names.split()}
        for row in segments
    ]


def _summary_of(stats: Mapping[str, Any]) -> dict[str, Any]:
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


def _as_text(result: Any) -> str:
    if isinstance(result, list):
        return _table(result) if result else "nothing"
    if "ways" in result:
        return f"{_table(result['ways'])}\n{result['conclusion']}"
    return "\n".join(f"{name}: {_cell(value)}" for name, value in result.items())


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    cells = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = (" ".join(map(str.ljust, row, widths)) for row in cells)
    return "\n".join(line.rstrip() for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_cell(count)}" for name, count in value.items()) or "none"
    return f"{value:,}" if type(value) is int else str(value)
