"""Time to first token of each way a prefix can come: computed, resident, whole or in part from SSD.

    python -m bench.first_token [--prefix 4000 --new 64 --repeat 5] [--json FILE]

One server per policy, one after another, on the same model, prompts and SSD directory. Each request
has the same prefix and other new tokens. TTFT is the time of a request that generates one token,
over HTTP; the reported figure is the median.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.equality import make_prompts
from bench.machine import describe_machine
from demo.model import model_path
from tests.serving.harness import Server, running


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="default: the demo model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prefix", type=int, default=4000)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model = args.model or model_path()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        rows = _measure(args, model, Path(folder))
    computed = rows[0]["ttft_ms"]
    for row in rows:
        row["computed_over_this"] = round(computed / row["ttft_ms"], 1)
    result = {
        "command": "python -m bench.first_token",
        "machine": describe_machine(),
        "dtype": args.dtype,
        "rows": rows,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


def _measure(args: argparse.Namespace, model: Path, folder: Path) -> list[dict[str, Any]]:
    texts = make_prompts(model, 3 * args.repeat + 3, args.prefix)
    prefix = texts[-1]
    questions = [text[: args.new] for text in texts[:-1]]
    rows = []
    for policy in ("impress", "as"):
        with running(
            model,
            folder / f"{policy}.log",
            f"--dtype={args.dtype}",
            f"--max-total-tokens={3 * args.prefix + 4000}",
            "--enable-impress",
            "--impress-load=always",
            f"--impress-ssd-dir={folder / 'kv'}",
            f"--impress-policy={policy}",
            # Everything comes from SSD, each time.
            "--impress-device-gb=0",
            "--impress-host-gb=0",
            zygote=None,
        ) as server:
            server.generate(questions[-1], 1)
            if policy == "impress":
                rows.append(_row("computed", [_timed(server, [*prefix, *questions[0]])]))
                resident = [_timed(server, [*prefix, *q]) for q in questions[1 : args.repeat + 1]]
                rows.append(_row("device", resident))
            # The first answer of a fresh path also grows buffers; it is not counted.
            hits = [_ssd_hit(server, prefix, q) for q in questions[args.repeat : -1]][1:]
            rows.append(_row(f"ssd, {policy}", hits[: args.repeat]))
            server.assert_quiet()
    return rows


def _ssd_hit(server: Server, prefix: list[int], question: list[int]) -> tuple[float, Any]:
    server.flush()
    return _timed(server, [*prefix, *question])


def _timed(server: Server, prompt: list[int]) -> tuple[float, Any]:
    began = time.perf_counter()
    answer = server.generate(prompt, 1)
    return (time.perf_counter() - began) * 1e3, answer["meta_info"]["impress"]


def _row(name: str, runs: list[tuple[float, dict[str, Any]]]) -> dict[str, Any]:
    reports = [report for _, report in runs]
    assert {report["path"] for report in reports} == {name.split(",")[0]}
    medians = {
        key: round(statistics.median(report[key] for report in reports), 1)
        for key in (
            "prefix_tokens",
            "used_tokens",
            "ssd_bytes",
            "layers_by_probe",
            "layers_by_fallback",
            "probe_ms",
            "load_ms",
            "attention_ms",
        )
    }
    ttft = round(statistics.median(ms for ms, _ in runs), 1)
    return {"path": name, "ttft_ms": ttft, "runs": len(runs), **medians}


if __name__ == "__main__":
    main()
