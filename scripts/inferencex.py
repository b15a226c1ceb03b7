"""Which of InferenceX's configurations of SGLang start with IMPRESS, and what others are told.

    python scripts/inferencex.py FOLDER

FOLDER has `nvidia-master.yaml` and `amd-master.yaml` of SemiAnalysisAI/InferenceX's `configs/`. A
configuration is a row of a search space of a framework with SGLang. Options are judged by the
plugin itself. Models are not to be had without a network: what their layers keep is a table here,
and the sentence is that of `check_model`. HiCache's own offloading is taken to be left out.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from impress_sglang.config import ImpressConfig
from impress_sglang.errors import UnsupportedError
from impress_sglang.plugin.unsupported import check_extra_pools, check_options

# What the layers of a family keep, by the start of the family's name in InferenceX; None: MLA, with
# or without sparse attention, or plain keys and values.
FAMILIES = {
    "dsr1": None,
    "dsv4": "keeps compressed KVs and index keys of sparse attention (DeepSeek-V4)",
    "glm5": None,
    "qwen3.5": None,
}
STATEFUL = "qwen3.5"


def configurations(folder: Path) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Name, entry and row of each configuration of SGLang."""
    for path in sorted(folder.glob("*-master.yaml")):
        for name, entry in yaml.safe_load(path.read_text()).items():
            if "sglang" in entry["framework"]:
                for scenarios in entry["scenarios"].values():
                    for scenario in scenarios:
                        for row in scenario["search-space"]:
                            yield name, entry, row


def verdict(name: str, entry: dict[str, Any], row: dict[str, Any]) -> str:
    """The first sentence with which IMPRESS refuses it; empty if it starts."""
    kept = next(what for family, what in FAMILIES.items() if name.startswith(family))
    # Those that decode run without IMPRESS.
    worker = row.get("prefill", row)
    options = SimpleNamespace(
        tp_size=worker["tp"],
        pp_size=1,
        enable_dp_attention=worker.get("dp-attn", False),
        speculative_algorithm="EAGLE" if row.get("spec-decoding") == "mtp" else None,
        disaggregation_mode="prefill" if "prefill" in row else "null",
        kv_cache_dtype="fp8_e4m3" if entry["precision"] in ("fp4", "fp8") else "auto",
        enable_lora=False,
        lora_paths=None,
        schedule_policy="fcfs",
        allow_auto_truncate=False,
    )
    try:
        check_options(ImpressConfig(ssd_dir="kv"), options)
        if name.startswith(STATEFUL):
            check_extra_pools(options, "states beside KVs")
    except UnsupportedError as error:
        return str(error)
    return kept or ""


def main() -> None:
    """Count and print."""
    verdicts: collections.Counter[tuple[str, str]] = collections.Counter()
    for name, entry, row in configurations(Path(sys.argv[1])):
        verdicts[name.split("-")[0], verdict(name, entry, row)] += 1
    print(f"{sum(verdicts.values())} configurations")
    for (family, sentence), count in verdicts.most_common():
        print(f"{count:4} {family:8} {sentence or 'starts'}")


if __name__ == "__main__":
    main()
