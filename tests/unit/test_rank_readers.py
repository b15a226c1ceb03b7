"""Every place in the scheduler's path that reads what ranks may see differently, and why it may.

Slots, tree and queue of SGLang must be the same on all ranks of a model (`serving.ranks`). A new
reader of a clock, a store's state, a thread's progress or a random number fails this test, until
somebody has thought about what follows from it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import impress_sglang

PACKAGE = Path(impress_sglang.__file__).parent
MODULES = sorted(path for unit in ("plugin", "serving") for path in (PACKAGE / unit).glob("*.py"))
CLOCKS = {"time", "uuid", "random", "secrets"}
# What a store or a thread says: attributes, called or not.
LOCAL = {
    *("in_use", "opened", "suspended", "suspended_by", "store", "is_set", "done", "is_alive"),
    *("estimator", "readers", "health", "writes", "error", "seconds_left", "_clock", "_now"),
}

# Modules of which nothing reaches slots, tree or queue but by the functions below.
OUTSIDE = {
    "plugin.early_admission": "never with several ranks: its passes might fail on one",
    "plugin.self_test": "before the first request",
    "serving.load_jobs": "the loader's thread: all ranks vote on the end of its jobs",
    "serving.metrics": "only tells",
    "serving.report": "only tells",
    "serving.scheduling": "refused with several ranks",
    "serving.service": "its state and store are read by the functions below",
    "serving.why": "only tells",
}
READERS: dict[str, tuple[str, ...]] = {
    "it is what a rank votes, or the vote": (
        "plugin.prefix_loads.PrefixLoads.plan",
        "plugin.prefix_loads.PrefixLoads._slow_jobs",
        "serving.load_planner.LoadPlanner._estimate",
        "serving.load_planner.LoadPlanner.state_spans",
        "serving.load_planner.LoadPlanner.looks_up",
        "serving.load_planner.LoadPlanner.match",
        "serving.load_planner.LoadPlanner.plan",
        "serving.load_planner.LoadPlanner.usable_tokens",
        "serving.ranks.Agreement.__init__",
        "serving.ranks.Agreement.now",
        "serving.ranks.Agreement._votes",
    ),
    "its clock is that of the vote": ("serving.job_queue.JobQueue._has_waited",),
    "all ranks do the same, and each tells its own store of it": (
        "plugin.prefix_loads.PrefixLoads._begin",
        "plugin.prefix_loads.PrefixLoads._on_job_end",
        "plugin.prefix_loads.PrefixLoads.end_waiting",
    ),
    "it decides what this rank writes; locks are the same on all, until none writes": (
        "plugin.prefix_saves.PrefixSaves._may_store",
        "plugin.prefix_saves.PrefixSaves._offer",
        "plugin.prefix_saves.PrefixSaves._reusable_tokens",
        "plugin.prefix_saves.PrefixSaves.expect",
        "plugin.prefix_saves.PrefixSaves.count_prompt",
        "serving.pool_reader.PoolLayerReader.__call__",
        "serving.prefix_frequency.new_memory",
        "serving.prefix_frequency.shared_memory",
    ),
    "it waits, and then all ranks are alike": (
        "plugin.prefix_loads.PrefixLoads.end_pass",
        "plugin.prefix_saves.PrefixSaves.abandon",
        "plugin.prefix_saves.PrefixSaves.finish",
        "serving.job_queue.JobQueue.wait_for_loader",
    ),
    "ranks agree before or after it, within the message": (
        "plugin.tree_cache.ImpressTreeCache._check_steps",
        "plugin.tree_cache.ImpressTreeCache._go_on",
        "plugin.admin._store",
        "plugin.weights.WeightWatch._suspend",
        "plugin.weights.WeightWatch.begin",
    ),
    "it is only told": (
        "serving.load_planner.LoadPlanner._miss",
        "plugin.admin._overview",
        "plugin.admin._row",
        "plugin.prefix_loads.PrefixLoads._replan",
        "plugin.request_tracker.RequestTracker.count",
    ),
    "it never happens with several ranks": (
        "plugin.prefix_loads.PrefixLoads._serving",
        "serving.load_planner.LoadPlanner.choose",
    ),
    "it is in the process of the HTTP server": ("plugin.routes._purge",),
}


def readers() -> Iterator[str]:
    for path in MODULES:
        name = f"{path.parent.name}.{path.stem}"
        body = [] if name in OUTSIDE else ast.parse(path.read_text()).body
        classes = [node for node in body if isinstance(node, ast.ClassDef)]
        for place, nodes in ((name, body), *((f"{name}.{it.name}", it.body) for it in classes)):
            for node in nodes:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _reads(node):
                    yield f"{place}.{node.name}"


def _reads(function: ast.AST) -> bool:
    loads = (
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    )
    return any(
        node.attr in LOCAL or (isinstance(node.value, ast.Name) and node.value.id in CLOCKS)
        for node in loads
    )


def test_every_reader_is_known() -> None:
    known = [name for names in READERS.values() for name in names]
    assert set(readers()) == set(known)
    assert OUTSIDE.keys() <= {f"{path.parent.name}.{path.stem}" for path in MODULES}
