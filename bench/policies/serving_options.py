"""The options of `python -m bench serving`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bench.core.servers import MIN_PREFIX_TOKENS, POLICIES, is_policy
from bench.core.zygote import ROOT
from bench.policies.examples import READERS
from bench.policies.trace import MIN_SIGMA

SIZES = {
    "full": {
        "prefixes": 8,
        "prefix_tokens": 1500,
        # Two thirds of them, eight per prefix, are what an order is found from.
        "warmup": 96,
        "requests": 40,
        "recompute_requests": 6,
    },
    "quick": {
        "prefixes": 4,
        "prefix_tokens": 512,
        "warmup": 6,
        "requests": 5,
        "recompute_requests": 2,
    },
}
# Shares of all stored KVs that the caches hold unless their sizes are given.
DEVICE_SHARE = 0.10
HOST_SHARE = 0.15
DEFAULT_DATA = ROOT.parent / "shared" / "data"
DATASETS = "rte,piqa,openbookqa,copa"
# What of the options makes a result; the others are paths.
RECORDED = (
    "policies",
    "datasets",
    "prefixes",
    "prefix_tokens",
    "sigma",
    "seed",
    "warmup",
    "requests",
    "recompute_requests",
    "concurrency",
    "retention",
    "device_mb",
    "host_mb",
    "ssd_mbps",
    "dtype",
)


def parse_arguments(description: str | None) -> argparse.Namespace:
    """The options of the command line, with those that depend on others filled in."""
    parser = argparse.ArgumentParser(
        prog="python -m bench serving",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="few short requests: 3 minutes")
    parser.add_argument(
        "--policies",
        type=_policies,
        default=list(POLICIES),
        metavar="A,B",
        help=f"what to compare (default: all of {', '.join(POLICIES)}); "
        "also impress@BITS (4 to 8, or exact) and even@BITS, which spreads them evenly",
    )
    group = parser.add_argument_group("trace")
    group.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="folder of data sets, DIR/NAME/*.jsonl (default: ../shared/data beside this "
        "repository, or made text if there is none)",
    )
    group.add_argument(
        "--datasets",
        default=DATASETS,
        metavar="A,B",
        help=f"data sets to take prefixes from, of {', '.join(READERS)} (default: {DATASETS})",
    )
    _add_size(group, "--prefixes", "number of shared prefixes")
    _add_size(group, "--prefix-tokens", "tokens of each prefix, about")
    _add_size(
        group, "--warmup", "requests that fill the caches first, a third of them after reordering"
    )
    _add_size(group, "--requests", "requests that are measured")
    _add_size(
        group, "--recompute-requests", "how many of these policy recompute runs, the first ones"
    )
    group.add_argument(
        "--sigma",
        type=float,
        help="width of the popularity of prefixes, in prefixes (default: a quarter of them)",
    )
    group.add_argument("--seed", type=int, default=1, help="of the trace (default: 1)")
    group.add_argument(
        "--write-trace",
        type=Path,
        metavar="FILE",
        help="also write the measured requests as a data set of sglang.bench_serving "
        "(--dataset-name custom)",
    )
    group = parser.add_argument_group("servers")
    group.add_argument("--model", type=Path, help="folder of a model (default: the demo model)")
    group.add_argument("--dtype", default="float32", help="(default: float32)")
    group.add_argument("--retention", type=float, default=0.25, help="(default: 0.25)")
    group.add_argument(
        "--device-mb",
        type=float,
        help=f"device cache of chunks (default: {DEVICE_SHARE:.0%}% of all stored KVs)",
    )
    group.add_argument(
        "--host-mb",
        type=float,
        help=f"host cache of chunks (default: {HOST_SHARE:.0%}% of all stored KVs)",
    )
    group.add_argument(
        "--ssd-mbps",
        type=float,
        default=30,
        help="bandwidth of the emulated SSD in MB/s; 0 = the real SSD (default: 30)",
    )
    group.add_argument(
        "--concurrency", type=_positive, default=1, help="requests under way (default: 1)"
    )
    group = parser.add_argument_group("output")
    group.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    group.add_argument(
        "--plot",
        type=Path,
        metavar="DIR",
        help="draw the paper's Figures 16, 18, 20 and 21 from this run",
    )
    group.add_argument(
        "--record",
        type=Path,
        metavar="DIR",
        help="also write what each request selected, one folder per policy, for replay",
    )
    group.add_argument(
        "--keep",
        type=Path,
        metavar="DIR",
        help="work in this empty folder and keep stores and server logs (default: a temporary "
        "folder in the current directory, removed in the end)",
    )
    args = parser.parse_args()
    for key, value in SIZES["quick" if args.quick else "full"].items():
        if getattr(args, key) is None:
            setattr(args, key, value)
    if args.prefix_tokens < 2 * MIN_PREFIX_TOKENS:
        parser.error(f"--prefix-tokens must be at least {2 * MIN_PREFIX_TOKENS}")
    if args.sigma is None:
        args.sigma = max(MIN_SIGMA, args.prefixes / 4)
    return args


def command_of(args: argparse.Namespace) -> str:
    """A command that gives the same run; paths of this machine are left out."""
    options = []
    for name in RECORDED:
        value = getattr(args, name)
        if value is not None:
            shown = ",".join(value) if isinstance(value, list) else value
            options.append(f"--{name.replace('_', '-')} {shown}")
    return " ".join(["python -m bench serving", *options])


def _add_size(group: Any, name: str, what: str) -> None:
    key = name.removeprefix("--").replace("-", "_")
    full, quick = SIZES["full"][key], SIZES["quick"][key]
    shown = f"{what} (default: {full}, with --quick {quick})"
    group.add_argument(name, type=_positive, metavar="N", help=shown)


def _policies(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if not is_policy(name):
            known = ", ".join(POLICIES)
            raise argparse.ArgumentTypeError(
                f"{name!r} is not one of {known}, impress@BITS and even@BITS"
            )
    return names


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value
