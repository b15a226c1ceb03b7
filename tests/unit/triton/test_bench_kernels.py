"""What benchmarks ask of kernels can be asked of them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench.core.options import parse
from bench.micro import kernels


class Watch(kernels.Watch):
    """Runs what it is to time; each takes 2 microseconds."""

    def __init__(self) -> None: ...

    def microseconds(self, work: Callable[[], object]) -> float:
        work()
        return 2.0

    host_microseconds = microseconds


def test_a_layer_is_restored_by_a_basis(device: str) -> None:
    given = ["--tokens=70", "--kv-heads=2", "--dim=18"]
    args = parse("kernels", "", kernels.OPTIONS, given)
    watch = Watch()
    found = kernels.by_a_basis(args, watch, {"memory_gbps": 10.0}, torch.device(device))
    size, components = 72, 64
    assert found["shape"]["components"] == components
    assert found["tflops"] == round(2 * 70 * (components + size) * size / 2e6, 2)
    assert found["over_product"] == 1 and found["share_of_card"] == round(found["gbps"] / 10, 3)
