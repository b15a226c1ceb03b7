"""What plans blends in these tests: a store with documents, and all that weighs its use."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from impress_sglang.blend.job import BlendJob
from impress_sglang.blend.planner import BlendPlanner
from impress_sglang.codes.rotation import KeyRotation
from impress_sglang.cost import Estimator
from impress_sglang.serving.kv_class import KVClass
from impress_sglang.store.policies import LoadOptions, make_policy
from tests.unit.kv_factory import as_tokens, make_shape
from tests.unit.store_factory import Workbench, make_config

SHAPE = make_shape(probe=(), coded=True)
OPTIONS: dict[str, Any] = {
    "policy": "impress",
    "blend": 0.0,
    "blend_min_tokens": 100,
    "load": "always",
}
APPROXIMATE = LoadOptions(bits=6.0, blend=0.0)
DOCUMENTS = [
    np.random.default_rng(seed).integers(0, 1000, 200 + seed).tolist() for seed in range(4)
]


def texts(*numbers: int) -> list[int]:
    return [token for number in numbers for token in DOCUMENTS[number]]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Workbench]:
    bench = Workbench(tmp_path / "kv", SHAPE)
    yield bench
    bench.close_all()


def table(rows: int) -> Tensor:
    angles = torch.arange(rows)[:, None] * 50.0 ** (-torch.arange(0, 8, 2) / 8)
    return torch.cat([angles.cos(), angles.sin()], -1)


ROTATION = KeyRotation(table, halves=True)


class Desk:
    def __init__(
        self,
        bench: Workbench,
        *stored: tuple[int, ...],
        page_size: int = 1,
        block: int = 10_000,
        **options: Any,
    ) -> None:
        """`stored` are prompts of documents."""
        options = OPTIONS | options
        self.config = make_config(bench.root, **options)
        self.store = bench.open(**options)
        self.estimator = Estimator(64)
        for numbers in stored:
            bench.put(self.store, texts(*numbers))
        service: Any = SimpleNamespace(
            config=self.config,
            shape=bench.shape,
            store=self.store,
            in_use=True,
            estimator=self.estimator,
        )
        self.policy = make_policy(self.config)
        self.blending = BlendPlanner(service, ROTATION, page_size, block, lambda spans: None)
        self.why: Any = None
        """Why the last request does not blend."""

    def plan(
        self,
        tokens: Sequence[int],
        resident: int = 0,
        namespace: str = "",
        wanted: LoadOptions = APPROXIMATE,
        usual: Any = None,
    ) -> BlendJob | None:
        kv_class = self.class_of(wanted)
        found = self.blending.plan(
            namespace, (None, None), as_tokens(tokens), resident, usual, kv_class, wanted.blend
        )
        self.why = None if isinstance(found, BlendJob) else found
        return found if isinstance(found, BlendJob) else None

    def class_of(self, wanted: LoadOptions) -> KVClass:
        """As `Service.class_of`."""
        return KVClass.of(dataclasses.replace(wanted, bits=self.policy.bits(wanted)))

    def planned(self, *arguments: Any, **how: Any) -> BlendJob:
        """Of a request that does blend."""
        plan = self.plan(*arguments, **how)
        assert plan is not None
        return plan

    def reading_takes(self, seconds: float) -> None:
        segments: Any = self.store.segments
        segments.seconds_to_read = lambda num_bytes: seconds

    def passes_take(self, seconds: float, times: int = 8) -> None:
        """For 1,000 new tokens."""
        for _ in range(times):
            self.estimator.computing.observe(1000, 500_500.0, seconds)

    def job(self, plan: BlendJob) -> BlendJob:
        """One with slots of its own."""
        plan.begin_at(plan.start)
        generator = torch.Generator().manual_seed(1)
        plan.slots = plan.target = torch.randperm(len(plan), generator=generator)
        return plan
