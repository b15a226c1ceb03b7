"""Tests with several parameters: pairs of values instead of all combinations.

Most faults need two values to meet, not five. So of a test's combinations some are chosen in which
each two values of any two parameters meet. `pytest --full-matrix` runs all, and so does whoever
names one.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

# One entry for each parameter; what is parametrised together in one table counts as one.
Row = tuple[tuple[int, ...], ...]


def select_pairs(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect combinations in which no two values meet for the first time."""
    if config.getoption("full_matrix") or any("[" in argument for argument in config.args):
        return
    combinations: dict[Any, dict[Row, pytest.Item]] = defaultdict(dict)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            combinations[item.parent, item.originalname][_row(item)] = item
    for test in combinations.values():
        for row in set(test) - set(pairwise(list(test))):
            items.remove(test[row])
            config.hook.pytest_deselected(items=[test[row]])


def _row(item: pytest.Function) -> Row:
    """Values are the same objects in all combinations."""
    values = item.callspec.params
    tables = [re.findall(r"\w+", str(mark.args[0])) for mark in item.iter_markers("parametrize")]
    alone = [[name] for name in values.keys() - set(itertools.chain(*tables))]
    return tuple(tuple(id(values[name]) for name in names) for names in [*tables, *sorted(alone)])


def pairwise(rows: Sequence[Row]) -> list[Row]:
    """Of rows with a value of each parameter few, in which all pairs are that are in any row."""
    missing = {pair for row in rows for pair in _pairs(row)}
    if not missing:
        return list(rows)
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(missing.intersection(_pairs(row))))
        missing.difference_update(_pairs(best))
        chosen.append(best)
    return chosen


def _pairs(row: Row) -> list[Any]:
    return list(itertools.combinations(enumerate(row), 2))
