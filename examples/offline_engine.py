"""IMPRESS without a server: `sglang.Engine` in a Python program.

Run, here on a CPU with the demo's model:

    python examples/offline_engine.py --device cpu --dtype float32 \\
        --model-path "$(python -m demo.model)"

The second round asks after the device pool was emptied: the shared prefix comes back from SSD.
"""

from __future__ import annotations

import tempfile

import sglang
from options import engine_options

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
    args = engine_options("Ask about a harbour's logbook")
    with tempfile.TemporaryDirectory() as folder:
        # Before the engine is made, which reads it once.
        impress_sglang.enable_for_engine(
            ssd_dir=args.impress_ssd_dir or folder,
            bits=args.impress_bits,
            # Here to show it: as a rule, a prefix is computed where that is faster.
            load="always",
        )
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


def ask(engine: sglang.Engine, questions: list[str]) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 12}
    for question in questions:
        answer = engine.generate(f"{LOGBOOK}\nCopy of the logbook:\n{question}", sampling)
        report = answer["meta_info"]["impress"]
        print(f"  {question}{answer['text'].splitlines()[0]}")
        print(
            f"    path {report['path']}: {report['prefix_tokens']} prefix tokens, "
            f"{report['ssd_bytes'] / 1e6:.1f} MB read from SSD"
        )


# The engine starts processes that import this file again.
if __name__ == "__main__":
    main()
