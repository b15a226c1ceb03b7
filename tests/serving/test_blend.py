"""Stored text that is no prefix, reused by real servers.

`tests/integration/test_stored_blends.py` has what is computed between two passes, and by whom.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.serving.compare import assert_same, report
from tests.serving.conftest import BLENDS, CRAMPED, module_server
from tests.serving.damage import flip_code, segment_of
from tests.serving.harness import Server
from tests.serving.tiny_models import random_tokens

# All tokens are computed again, but not by way of SGLang's own pass.
ALL = 0.99999


# All is tight, as in `test_exact.py`; `test_pools.py` has roomy ones.
blending = module_server("blend", *BLENDS, *CRAMPED, retracts=True)


def documents(seed: int, *lengths: int) -> list[list[int]]:
    return [random_tokens(length, seed=1000 * seed + n) for n, length in enumerate(lengths)]


def joined(documents: Sequence[Sequence[int]], order: Sequence[int], seed: int) -> list[int]:
    """Documents in some order, something short between them, and a question."""
    prompt = random_tokens(5, seed=seed)
    for number in order:
        prompt += [*documents[number], *random_tokens(3, seed=seed + number)]
    return prompt + random_tokens(20, seed=seed)


def store(server: Server, *prompts: list[int]) -> None:
    """On SSD only."""
    for prompt in prompts:
        server.generate(prompt, 1, **asking("off"))
    server.flush()


def asking(blend: float | str, **fields: Any) -> dict[str, Any]:
    return {"return_logprob": True, "impress_blend": blend, **fields}


def test_all_computed_again_is_stock(stock: Server, blending: Server) -> None:
    """In batches and alone; documents come from several prompts, and reach over prefill chunks."""
    texts = documents(1, 300, 700, 200, 450)
    store(blending, joined(texts, [0, 1], 1), joined(texts, [2, 3, 0], 2))
    batch = [joined(texts, order, 3) for order in ([3, 1, 0, 2], [1, 2], [2, 1, 3])]
    expected = stock.generate_together(batch, 16, return_logprob=True)

    asked = asking(ALL, impress_store=False)
    together = blending.generate_together(batch, 16, **asked)
    blending.flush()
    alone = [blending.generate(prompt, 16, **asked) for prompt in batch]

    assert_same(expected, together)
    assert_same(expected, alone)
    for answer in (*together, *alone):
        told = report(answer)
        # Who was put back begins again behind what it had blended.
        assert told["path"] in ("ssd", "device") and told["approximate"], told
        assert told["blended_tokens"] or told["path"] == "device"


def test_of_several_documents_only_the_damaged_one_is_computed(blending: Server) -> None:
    """The request that finds that is planned again without it, as the next one is."""
    texts = documents(8, 540, 540)
    prompts = joined(texts, [0], 41), joined(texts, [1], 42)
    store(blending, *prompts)
    flip_code(segment_of(blending, prompts[0]))
    other = joined(texts, [1, 0], 43)
    asked = asking(0.0, impress_store=False)
    told = []
    for _ in range(2):
        told.append(report(blending.generate(other, 8, **asked)))
        blending.flush()
    assert [said["why"]["reason"] for said in told] == ["blended", "blended"]
    # No prompt began so before: the head is computed.
    assert [said["blended_tokens"] for said in told] == [540 - 11] * 2
