"""Several runs of `bench accuracy` as one: runs take hours, and systems can be asked one by one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.core.servers import BenchFailed

Result = dict[str, Any]


def read_results(files: Sequence[Path]) -> Result:
    """Read the results of runs and join them.

    Raises:
        BenchFailed: a file cannot be read, or see `merge_results`.
    """
    results = []
    for file in files:
        try:
            results.append(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise BenchFailed(f"{file}: no result of bench.quality.accuracy: {error}") from error
    return merge_results(results)


def merge_results(results: Sequence[Result]) -> Result:
    """Join runs of one model; what several of them measured, as the reference, is taken once.

    Raises:
        BenchFailed: the runs are of different models, a task has other questions in another run,
            or two runs gave one name to different systems.
    """
    first = results[0]
    for key in ("model", "kv_heads", "kv_bytes_per_token"):
        if any(result[key] != first[key] for result in results):
            raise BenchFailed(f"the runs differ in {key}: they cannot be joined")
    tasks = _joined(results, lambda result: {t["name"]: t for t in result["tasks"]}, "task")
    # A mean over other tasks is another mean.
    same_tasks = all(_task_names(result) == _task_names(first) for result in results)
    kept = {row["task"] for row in first["rows"]} if same_tasks else set(tasks)
    return {
        **first,
        "command": [result["command"] for result in results],
        "seconds": sum(result["seconds"] for result in results),
        "max_nats_from_transformers": max(
            (d for r in results if (d := r["max_nats_from_transformers"]) is not None), default=None
        ),
        "options": [result["options"] for result in results],
        "systems": _joined(results, lambda result: result["systems"], "system"),
        "tasks": list(tasks.values()),
        "rows": [row for row in _unique(results, "rows") if row["task"] in kept],
        "answers": _unique(results, "answers"),
    }


def _task_names(result: Result) -> set[str]:
    return {task["name"] for task in result["tasks"]}


def _joined(results: Sequence[Result], part: Any, what: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for result in results:
        for name, value in part(result).items():
            if found.setdefault(name, value) != value:
                raise BenchFailed(f"{what} {name} is not the same in all runs")
    return found


def _unique(results: Sequence[Result], part: str) -> list[dict[str, Any]]:
    rows: dict[tuple[str, float, str], dict[str, Any]] = {}
    for result in results:
        for row in result[part]:
            rows.setdefault((row["system"], row["retention"], row["task"]), row)
    return list(rows.values())
