"""Requests whose KVs are not those of their tokens leave nothing behind and are served nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serving.compare import assert_same, paths
from tests.serving.damage import segments
from tests.serving.harness import Server
from tests.serving.tiny_models import random_tokens

TOLERANCE = 1e-4
PLACEHOLDER = 999
HIDDEN = 128
OVERRIDE = {
    "query_embed_overrides": [[3.0 * (-1) ** j for j in range(HIDDEN)]] * 300,
    "embed_override_token_id": PLACEHOLDER,
}
STAYS_WHOLE = "roomy"


def score(server: Server, query: list[int], **fields: Any) -> list[float]:
    """How likely two labels are after a query, compared to each other."""
    labels = {"label_token_ids": [11, 12], "apply_softmax": True, "model": "m"}
    response = server.post("/v1/score", query=query, items=[[7]], **labels, **fields)
    response.raise_for_status()
    scores: list[float] = response.json()["scores"][0]
    return scores


def with_placeholders(seed: int) -> list[int]:
    """700 tokens, of which 300 near the end stand for embeddings."""
    tokens = [token % PLACEHOLDER for token in random_tokens(700, seed)]
    tokens[395:695] = [PLACEHOLDER] * 300
    return tokens


def stored(server: Server) -> int:
    """How many segments are published; a flush waits for what is being written."""
    server.flush()
    return len(segments(server))


def test_embedding_overrides_do_not_poison_the_store(stock: Server, roomy: Server) -> None:
    """The same token ids with other embeddings: nothing is stored for those who come later, and
    they are served nothing of others."""
    queries = [with_placeholders(7000 + number) for number in range(2)]
    overridden = [score(stock, query, **OVERRIDE) for query in queries]

    def assert_overridden() -> None:
        for query, scores in zip(queries, overridden, strict=True):
            assert score(roomy, query, **OVERRIDE) == pytest.approx(scores, abs=TOLERANCE)

    plain = score(stock, queries[0])
    assert plain != pytest.approx(overridden[0], abs=1e-3), "the control: overrides matter"
    before = stored(roomy)
    assert_overridden()
    assert stored(roomy) == before
    expected = [stock.generate(query, 16, return_logprob=True) for query in queries]
    for path in ("computed", "ssd"):
        actual = [roomy.generate(query, 16, return_logprob=True) for query in queries]
        assert_same(expected, actual)
        assert paths(actual) == [path] * len(queries)
        assert stored(roomy) == before + len(queries), "the control: plain requests are stored"
    earlier = roomy.stats()["totals"]
    assert_overridden()
    totals = roomy.stats()["totals"]
    assert totals["requests_ssd"] == earlier["requests_ssd"]
    for use in ("requests_not_served", "requests_not_stored"):
        refused = totals[use]["positional_embed_overrides"]
        assert refused == len(queries) + earlier[use]["positional_embed_overrides"]
        # SGLang sets no field of ordinary requests that is not known.
        assert totals[use].keys() <= {"positional_embed_overrides", "impress_store"}
