"""The systems and options of `python -m bench accuracy`."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from pathlib import Path
from typing import Any

from bench.policies.serving_options import DEFAULT_DATA
from bench.quality.data import HUB_MARK, hub_datasets
from bench.quality.tasks import MIN_PREFIX_TOKENS, PAPER_TASKS, TASKS
from impress_sglang.options import LEAST_BITS, MOST_BITS, is_bits

REFERENCE = "recompute"
EXACT_POLICIES = ("recompute", "as")
_POLICY = "--impress-policy="
SYSTEMS: dict[str, tuple[str, ...]] = {
    REFERENCE: (f"{_POLICY}recompute",),
    "as": (f"{_POLICY}as",),
    "h2o": (f"{_POLICY}as+h2o+lru",),
    "paper": (f"{_POLICY}paper",),
    "impress": (f"{_POLICY}impress",),
    "even": (f"{_POLICY}impress", "--impress-allocate=even"),
    "random": (f"{_POLICY}impress", "--impress-allocate=random"),
}
# Bytes are those of the store, and what is stored are the prefixes only.
COMMON_FLAGS = (
    "--enable-impress",
    "--impress-load=always",
    "--impress-reorder-interval=0",
    "--impress-approximation-depth=0",
    f"--impress-min-prefix-tokens={MIN_PREFIX_TOKENS}",
    "--impress-device-gb=0",
    "--impress-host-gb=0",
)
SIZES: dict[str, dict[str, Any]] = {
    "full": {
        "systems": list(SYSTEMS),
        "tasks": [*PAPER_TASKS, "squad"],
        "retentions": [0.5, 0.25, 0.1, 0.05],
        "prefixes": 2,
        "examples": 100,
    },
    "quick": {
        "systems": [REFERENCE, "h2o", "paper", "impress"],
        "tasks": list(PAPER_TASKS),
        "retentions": [0.25],
        "prefixes": 1,
        "examples": 10,
    },
}
# What of the options makes a result; the others are paths.
RECORDED = (
    "systems",
    "tasks",
    "retentions",
    "bits",
    "prefixes",
    "shots",
    "prefix_tokens",
    "passages",
    "examples",
    "seed",
    "dtype",
    "concurrency",
)


@dataclasses.dataclass(frozen=True, slots=True)
class System:
    """A name and the server flags that make it."""

    name: str
    flags: tuple[str, ...]

    @property
    def exact(self) -> bool:
        """Whether its policy uses whole prefixes only, so that retention means nothing to it."""
        policies = [flag.removeprefix(_POLICY) for flag in self.flags if flag.startswith(_POLICY)]
        return bool(policies) and policies[-1] in EXACT_POLICIES

    def server_flags(self, store: Path, extra: list[str]) -> list[str]:
        """Arguments of the extension for this system; `extra` ones win over all others."""
        return [*COMMON_FLAGS, f"--impress-ssd-dir={store}", *self.flags, *extra]


def parse_arguments(description: str | None, given: list[str] | None = None) -> argparse.Namespace:
    """The options, with `systems` as `System`s, the reference first."""
    parser = _make_parser(description)
    args = parser.parse_args(given)
    sizes = dict(SIZES["quick" if args.quick else "full"])
    args.data = args.data or str(DEFAULT_DATA)
    if args.data.startswith(HUB_MARK):
        there = hub_datasets(args.data)
        sizes["tasks"] = [name for name in sizes["tasks"] if TASKS[name].dataset in there]
        if not there:
            parser.error(f"--data {args.data} names no known data set")
    for key, value in sizes.items():
        if getattr(args, key) is None:
            setattr(args, key, value)
    chosen = [System(name, SYSTEMS[name]) for name in args.systems if name != REFERENCE]
    args.systems = [System(REFERENCE, SYSTEMS[REFERENCE]), *chosen, *args.system]
    names = [system.name for system in args.systems]
    if len(set(names)) < len(names):
        parser.error(f"names of systems must differ: {', '.join(names)}")
    if args.examples < args.prefixes:
        parser.error("--examples must be at least --prefixes")
    # Exact answers of a server store more than the prefixes, so they come last.
    args.retentions = sorted(set(args.retentions))
    return args


def command_of(args: argparse.Namespace) -> str:
    """A command that gives the same run; paths of this machine are left out."""
    words = ["python -m bench accuracy"]
    added = {system.name for system in args.system}
    for name in RECORDED:
        value = getattr(args, name)
        if name == "systems":
            value = [system.name for system in value if system.name not in added]
        if value is not None and value != []:
            shown = ",".join(map(str, value)) if isinstance(value, list) else value
            words.append(f"--{name.replace('_', '-')} {shown}")
    words += [shlex.quote(f"--system={s.name}={','.join(s.flags)}") for s in args.system]
    words += [shlex.quote(f"--server-flag={flag}") for flag in args.server_flag]
    if args.data.startswith(HUB_MARK):
        words.append(f"--data {args.data}")
    if args.multi_head:
        words.append("--multi-head")
    return " ".join(words)


def _make_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench accuracy",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    full, quick = SIZES["full"], SIZES["quick"]
    parser.add_argument("--quick", action="store_true", help="few questions, one retention")
    group = parser.add_argument_group("systems")
    group.add_argument(
        "--systems",
        type=_names(tuple(SYSTEMS)),
        metavar="A,B",
        help=f"what to compare, of {', '.join(SYSTEMS)} (default: all, with --quick "
        f"{','.join(quick['systems'])}; {REFERENCE} always runs)",
    )
    group.add_argument(
        "--system",
        type=_system,
        action="append",
        default=[],
        metavar="NAME=FLAG,FLAG",
        help="one more system by its server flags, e.g. "
        "--system=a03=--impress-policy=paper,--impress-alpha=0.3",
    )
    group.add_argument(
        "--retentions",
        type=_retentions,
        metavar="R,R",
        help="shares of the prefix that are used; 1 is exact "
        f"(default: {','.join(map(str, full['retentions']))}, with --quick 0.25)",
    )
    group.add_argument(
        "--bits",
        type=_bits,
        default=[],
        metavar="B,B",
        help="ask for all of the prefix in so many bits, too (not of paper)",
    )
    _add_task_options(parser.add_argument_group("tasks"), full, quick)
    group = parser.add_argument_group("servers")
    group.add_argument("--model", type=Path, help="folder of a model (default: the demo model)")
    group.add_argument(
        "--multi-head",
        action="store_true",
        help="ask the model's multi-head form, which is written beside it once",
    )
    group.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="(float32)"
    )
    group.add_argument("--concurrency", type=_positive, default=4, help="requests under way (4)")
    group.add_argument(
        "--server-flag",
        action="append",
        default=[],
        metavar="FLAG",
        help="one more flag for all servers, e.g. --server-flag=--impress-chunk-tokens=32",
    )
    group.add_argument(
        "--check",
        type=int,
        default=1,
        metavar="N",
        help="compare the scores of N questions of each task with transformers' own forward pass "
        "on the CPU; 0 = do not (1)",
    )
    group = parser.add_argument_group("output")
    group.add_argument(
        "--join",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="ask no servers: join the --json files of earlier runs",
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="write all figures and answers")
    group.add_argument("--plot", type=Path, metavar="DIR", help="draw figures")
    group.add_argument(
        "--keep",
        type=Path,
        metavar="DIR",
        help="work in this empty folder and keep server logs (default: a temporary folder in the "
        "current directory, removed in the end)",
    )
    return parser


def _add_task_options(group: Any, full: dict[str, Any], quick: dict[str, Any]) -> None:
    group.add_argument(
        "--data",
        metavar="DIR",
        help="folder of data sets, DIR/NAME/*.jsonl, or hf:NAME[,NAME] or hf:all for the model "
        "hub's (default: ../shared/data beside this repository)",
    )
    group.add_argument(
        "--tasks",
        type=_names(tuple(TASKS)),
        metavar="A,B",
        help=f"of {', '.join(TASKS)} (default: {','.join(full['tasks'])}, with --quick "
        f"{','.join(quick['tasks'])})",
    )
    for name, text in (("prefixes", "prefixes per task"), ("examples", "questions per task")):
        group.add_argument(
            f"--{name}",
            type=_positive,
            metavar="N",
            help=f"{text} (default: {full[name]}, with --quick {quick[name]})",
        )
    group.add_argument("--shots", type=_positive, default=10, metavar="N", help="per prefix (10)")
    group.add_argument(
        "--prefix-tokens", type=_positive, metavar="N", help="add shots until N tokens instead"
    )
    group.add_argument(
        "--passages", type=_positive, default=10, metavar="N", help="per prefix of squad (10)"
    )
    group.add_argument("--seed", type=int, default=1, help="of tasks and intervals (1)")


def _names(known: tuple[str, ...]) -> Any:
    def names(text: str) -> list[str]:
        chosen = list(dict.fromkeys(text.split(",")))
        for name in chosen:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
        return chosen

    return names


def _system(text: str) -> System:
    name, _, flags = text.partition("=")
    if not name or not flags.startswith("--"):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=--FLAG,--FLAG")
    return System(name, tuple(flags.split(",")))


def _retentions(text: str) -> list[float]:
    values = [float(part) for part in text.split(",")]
    if not all(0 < value <= 1 for value in values):
        raise argparse.ArgumentTypeError("each must be more than 0 and at most 1")
    return values


def _bits(text: str) -> list[float]:
    values = sorted({float(part) for part in text.split(",")})
    if not all(map(is_bits, values)):
        raise argparse.ArgumentTypeError(f"each must be from {LEAST_BITS:g} to {MOST_BITS:g}")
    return values


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value
