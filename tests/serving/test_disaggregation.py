"""A server that prefills for others computes their prompts, so it stores and loads prefixes.

What it sends reaches nobody here, and the first token is its whole answer.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from tests.serving.compare import assert_same, report
from tests.serving.conftest import Serve
from tests.serving.damage import flip_value, segments
from tests.serving.harness import PREFILLING
from tests.serving.tiny_models import random_tokens

FLAGS = (
    *("--disaggregation-mode=prefill", "--disaggregation-transfer-backend=nixl"),
    # Otherwise it would wait for an event of a GPU.
    *("--disable-overlap-schedule", "--max-total-tokens=9000"),
    *("--impress-bits=exact", "--impress-keep=exact"),
)


def test_a_prefill_server_stores_and_loads(serve: Serve) -> None:
    prompt, rooms = random_tokens(1100, seed=1), itertools.count(1)
    with serve("prefill", *FLAGS, preload=PREFILLING) as server:

        def ask(prompt: Sequence[int], path: str) -> Any:
            answer = server.generate(prompt, 1, return_logprob=True, bootstrap_room=next(rooms))
            assert report(answer)["path"] == path
            return answer

        ask(prompt, "computed")
        resident = ask(prompt, "device")
        server.flush()
        assert_same([resident], [ask(prompt, "ssd")], 1e-4)
        before = segments(server)
        lost = random_tokens(900, seed=2)
        answer = ask(lost, "computed")
        server.flush()
        (stored,) = segments(server) - before
        flip_value(stored)
        assert_same([answer], [ask(lost, "computed")], 1e-4)
        server.assert_whole()
