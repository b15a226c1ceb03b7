"""A server of `bench.core.server` whose blends take long: each block sleeps, as a large one would.

What is shown is how others fare meanwhile, whatever the machine.
"""

from __future__ import annotations

import time
from typing import Any

import bench.core.server  # noqa: F401
from impress_sglang.blend.plugin import steps as blend_steps

SECONDS = 0.05
# So many tokens at once, however fast they are.
TOKENS = 32

_run = blend_steps.BlendSteps._run


def _slow_run(steps: blend_steps.BlendSteps, block: Any) -> None:
    time.sleep(SECONDS)
    _run(steps, block)


def _set_size(size: Any, most: int) -> None:
    size.tokens = TOKENS


blend_steps.BlockSize.__init__ = _set_size  # type: ignore[method-assign, assignment]
blend_steps.BlockSize.note = lambda *_: None  # type: ignore[method-assign, assignment]
blend_steps.BlendSteps._run = _slow_run  # type: ignore[method-assign]
