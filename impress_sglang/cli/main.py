"""The command line `impress`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from impress_sglang.cli.bench import measure
from impress_sglang.cli.outcome import (
    DAMAGED,
    DONE,
    EXIT_STATUS,
    INTERRUPTED,
    REFUSED,
    UNREACHABLE,
    Refused,
    Unreachable,
)
from impress_sglang.cli.server import Server
from impress_sglang.config import DEFAULT_SSD_DIR
from impress_sglang.options import BOTH, CODES, USUAL_BITS

URL = "http://127.0.0.1:30000"
KEY_VARIABLE = "IMPRESS_KEY"
# Orders about prefixes; a directory takes these as well, except the first two.
_ORDERS = {
    "why": "say how much of a prompt is stored, and why no more",
    "warm": "store a prefix now, or load it",
    "pin": "never evict a stored prefix",
    "unpin": "unpin prefixes that begin like this one",
    "purge": "remove a prefix and all that begin with it, or a namespace",
}
_ONLY_OF_SERVERS = ("why", "warm")
# The answer of a server that has found nothing wrong.
_SOUND = {"integrity": "ok"}
_IDS = "its token ids, separated by commas"
_MORE = "; may be given several times"
_SEGMENT = "its last segment, as ls shows it"


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    status = "; ".join(f"{code}: {meaning}" for code, meaning in EXIT_STATUS.items())
    top = argparse.ArgumentParser(
        "impress",
        description="Inspect and manage stored prefixes.",
        epilog=f"Exit status is {status}.".replace("`", ""),
    )
    commands = top.add_subparsers(dest="command", required=True)

    def add(name: str, told: str, *, server: bool, directory: bool) -> argparse.ArgumentParser:
        own = commands.add_parser(name, help=told, description=told[0].upper() + told[1:] + ".")
        own.add_argument("--json", action="store_true", help="print JSON")
        if directory:
            default = None if server else DEFAULT_SSD_DIR
            where = "an --impress-ssd-dir that no server uses"
            shown = f"{where}; default: {default}" if default else f"{where}, in place of a server"
            own.add_argument("--dir", type=Path, default=default, help=shown)
        if server:
            own.add_argument("--url", default=URL, help=f"running server; default: {URL}")
            own.add_argument(
                "--key", default=os.environ.get(KEY_VARIABLE), help=f"default: {KEY_VARIABLE}"
            )
        return own

    add("stat", "say how much is stored", server=True, directory=True)
    add("ls", "list stored segments, the most recently used first", server=True, directory=True)
    add("verify", "check a server, or read all files in a directory", server=True, directory=True)
    add("rebuild", "rebuild indexes from all files", server=False, directory=True)
    gc = add("gc", "remove files that nobody can use", server=False, directory=True)
    gc.add_argument("--dry-run", action="store_true", help="only list them")
    clear = add("clear", "remove everything that is stored", server=True, directory=True)
    clear.add_argument("--yes", action="store_true", required=True, help="it cannot be undone")
    sizes = add(
        "plan",
        "compute the space and time that prefixes of a model take",
        server=False,
        directory=False,
    )
    sizes.add_argument("--model", type=Path, required=True, help="its folder or config.json")
    sizes.add_argument("--prefixes", type=int, required=True, help="number of prefixes to keep")
    sizes.add_argument("--tokens", type=int, required=True, help="tokens per prefix")
    sizes.add_argument(
        "--bits", type=float, default=USUAL_BITS, help="as --impress-bits; default: 6"
    )
    sizes.add_argument("--basis", type=Path, help="of --impress-basis")
    sizes.add_argument(
        "--keep", choices=(CODES, BOTH), default=CODES, help="of --impress-keep; default: codes"
    )
    sizes.add_argument(
        "--drive-gbps", type=float, default=3.0, help="read speed of the drive; default: 3"
    )
    sizes.add_argument("--per-day", type=int, default=0, help="new prefixes per day; default: 0")
    tried = add("bench", "measure whether the store pays on a server", server=True, directory=False)
    tried.add_argument("--prefixes", type=int, default=8, help="number of prefixes; default: 8")
    tried.add_argument(
        "--prefix-tokens", type=int, default=2000, help="tokens per prefix; default: 2000"
    )
    tried.add_argument("--text", type=Path, help="file to take them from; default: random tokens")
    tried.add_argument("--clients", type=int, default=1, help="concurrent clients; default: 1")
    tried.add_argument("--flush", action="store_true", help="empty SGLang's pool, for everybody")
    tried.add_argument("--api-key", help="key of requests, if it differs from --key")
    fitted = add("calibrate", "fit a basis to a model", server=False, directory=False)
    fitted.add_argument("--model", type=Path, required=True, help="its folder")
    fitted.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="to write the basis to"
    )
    fitted.add_argument(
        "--text",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="one per kind of text; default: those of the package",
    )
    fitted.add_argument("--tokens", type=int, default=1500, help="per text; default: 1500")
    for name, told in _ORDERS.items():
        own = add(name, told, server=True, directory=name not in _ONLY_OF_SERVERS)
        which = own.add_mutually_exclusive_group(required=name != "purge")
        which.add_argument("--text", help="text of the prefix")
        which.add_argument(
            "--file",
            type=Path,
            action="append" if name == "warm" else "store",
            help=f"file with the text of the prefix; -: stdin{_MORE if name == 'warm' else ''}",
        )
        which.add_argument("--ids", help=_IDS)
        if name not in _ONLY_OF_SERVERS:
            which.add_argument("--segment", help=f"{_SEGMENT}; only with --dir")
        _add_namespace(own)
        if name == "purge":
            own.add_argument(
                "--older-than",
                type=float,
                metavar="SECONDS",
                help="written at least so long ago; alone: any prefix",
            )
    export = add("export", "write a namespace to a new file", server=False, directory=True)
    export.add_argument("path", type=Path, metavar="FILE", help="safetensors file")
    export.add_argument("--store", help="its name as ls shows it, if there are several")
    which = export.add_mutually_exclusive_group()
    which.add_argument("--ids", help=f"a prefix instead of a namespace: {_IDS}")
    which.add_argument("--segment", help=f"the same by {_SEGMENT}")
    _add_namespace(export)
    taken = add("import", "store what was exported elsewhere", server=False, directory=True)
    taken.add_argument("path", type=Path, metavar="FILE", help="written by impress export")
    _add_namespace(taken)
    return top


def _add_namespace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--extra-key", help="extra_key of the requests")
    parser.add_argument("--cache-salt", help="cache_salt of the requests")


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry a command out; returns the exit status."""
    args = parser().parse_args(arguments)
    try:
        found = _carry_out(args)
    except Refused as error:
        return _fail(error, REFUSED)
    except Unreachable as error:
        return _fail(error, UNREACHABLE)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    try:
        print(json.dumps(found, indent=2) if args.json else _as_text(found))
    except BrokenPipeError:
        # As in `| head`, which stops reading.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return DAMAGED if args.command == "verify" and found not in ([], _SOUND) else DONE


def _fail(error: Exception | str, status: int) -> int:
    print(f"impress: {error}", file=sys.stderr)
    return status


def _carry_out(args: argparse.Namespace) -> Any:
    if args.command == "plan":
        # Only here: it imports torch.
        from impress_sglang.cli.plan import plan

        sizes = args.prefixes, args.tokens, args.bits, args.drive_gbps, args.per_day
        return plan(args.model, *sizes, args.basis, args.keep)
    if args.command == "calibrate":
        # Only here: it imports torch.
        from impress_sglang.cli.calibrate import calibrate

        return calibrate(args.model, args.out, args.text, args.tokens)
    if getattr(args, "dir", None) is not None:
        # Only here: it imports torch.
        from impress_sglang.cli.directory import Directory

        directory = Directory(args.dir)
        if args.command in _ORDERS:
            return directory.order(args.command, _prefix_of(args))
        if args.command == "export":
            return directory.export(_prefix_of(args), args.path, args.store)
        if args.command == "import":
            return directory.import_(_prefix_of(args), args.path)
        if args.command == "gc":
            return directory.gc(dry_run=args.dry_run)
        return getattr(directory, args.command)()
    if getattr(args, "segment", None) is not None:
        raise Refused("--segment names a prefix in a directory: give --dir")
    server = Server(args.url, args.key)
    if args.command == "bench":
        return _measured(args)
    if args.command == "ls":
        return _listed(server.overview())
    if args.command == "verify":
        return server.check()
    if args.command == "stat":
        return _shown(server.stats())
    if args.command == "clear":
        return server.order("purge", {"all": True})
    found = server.order(args.command, _prefix_of(args))
    if isinstance(found, list):
        return [{"file": str(own), **row} for own, row in zip(args.file, found, strict=True)]
    return found


def _measured(args: argparse.Namespace) -> dict[str, Any]:
    text = None if args.text is None else _read(args.text)
    return measure(
        Server(args.url, args.key, args.api_key),
        prefixes=args.prefixes,
        tokens=args.prefix_tokens,
        clients=args.clients,
        text=text,
        flush=args.flush,
    )


def _read(path: Path) -> str:
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise Refused(f"{path} cannot be read: {error}") from error


def _prefix_of(args: argparse.Namespace) -> dict[str, Any]:
    """The body of an order."""
    told = vars(args)
    names = ("text", "extra_key", "cache_salt", "segment", "older_than")
    body = {name: told[name] for name in names if told.get(name) is not None}
    if isinstance(told.get("file"), list):
        texts = [_read(own) for own in args.file]
        body |= {"text": texts[0]} if len(texts) == 1 else {"texts": texts}
    elif told.get("file") is not None:
        body["text"] = _read(args.file)
    if told.get("ids") is not None:
        try:
            body["input_ids"] = [int(own) for own in args.ids.split(",")]
        except ValueError as error:
            raise Refused(f"--ids must be numbers with commas between them: {error}") from error
    # An age alone means all prefixes of that age.
    return {**body, "all": True} if body.keys() == {"older_than"} else body


def _listed(overview: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The segments that were used last, in the same rows as for a directory."""
    stats, found = overview["stats"], overview["segments"]
    count = (stats["store"] or {}).get("segments", 0)
    if count > len(found):
        print(f"impress: {len(found)} of {count:,} segments, used last", file=sys.stderr)
    names = ("segment", "namespace", "from_token", "tokens")
    return [
        {"store": stats["identity"]}
        | {name: own[name] for name in names}
        | {"bytes": own["ssd_bytes"], "hits": own["hits"]}
        | {name: own[name] for name in ("priority", "exact")}
        for own in found
    ]


def _shown(stats: Mapping[str, Any]) -> dict[str, Any]:
    """The statistics that one looks at first."""
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
    """Format rows as a table, or fields as a line each."""
    if isinstance(found, list):
        return _table(found) if found else "nothing"
    if "ways" in found:
        return f"{_table(found['ways'])}\n{found['conclusion']}"
    return "\n".join(f"{name}: {_cell(value)}" for name, value in found.items())


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    cells = [list(rows[0]), *([_cell(own) for own in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = (" ".join(map(str.ljust, row, widths)) for row in cells)
    return "\n".join(line.rstrip() for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_cell(own)}" for name, own in value.items()) or "none"
    return f"{value:,}" if type(value) is int else str(value)
