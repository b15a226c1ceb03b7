"""IMPRESS without a server: `sglang.Engine` in a Python program.

Run, here on a CPU with the demo's model:

    python examples/offline_engine.py --device cpu --dtype float32 \\
        --model-path "$(python -m demo.model)"

The second round asks after the device pool was emptied: the shared prefix comes back from SSD.
"""

from __future__ import annotations

import argparse
import tempfile

import sglang

import impress_sglang

SHIPS = ("Albatross", "Borealis", "Cormorant", "Dolphin", "Esmeralda", "Fulmar", "Gannet", "Heron")
LOGBOOK = "Logbook of the harbour master.\n" + "".join(
    f"Day {day}. The {ship} arrived with {7 * day + place} barrels and left before dusk.\n"
    for day in range(1, 4)
    for place, ship in enumerate(SHIPS)
)
ROUNDS = {
    "first round": ["Day 1. The Heron arrived with", "Day 2. The Dolphin arrived with"],
    "after emptying the device pool": ["Day 3. The Fulmar arrived with"],
}


def main() -> None:
    args = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        # Before the engine is made, which reads it once.
        impress_sglang.enable_for_engine(ssd_dir=args.ssd_dir or folder, retention=args.retention)
        with sglang.Engine(
            model_path=args.model_path,
            device=args.device,
            dtype=args.dtype,
            max_total_tokens=16384,
            max_running_requests=8,
        ) as engine:
            for name, questions in ROUNDS.items():
                print(name)
                ask(engine, questions)
                engine.flush_cache()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Ask about a harbour's logbook")
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--ssd-dir", help="default: a temporary directory")
    parser.add_argument("--retention", type=float, default=0.25)
    return parser.parse_args()


def ask(engine: sglang.Engine, questions: list[str]) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 12}
    for question in questions:
        answer = engine.generate(f"{LOGBOOK}\nCopy of the logbook:\n{question}", sampling)
        report = answer["meta_info"]["impress"]
        print(f"  {question}{answer['text'].splitlines()[0]}")
        print(
            f"    path {report['path']}: used {report['used_tokens']} "
            f"of {report['prefix_tokens']} prefix tokens"
        )


# The engine starts processes that import this file again.
if __name__ == "__main__":
    main()
