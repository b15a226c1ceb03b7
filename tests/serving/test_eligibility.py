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
    """The same token ids with other embeddings: nothing is stored for those who come later."""
    queries = [with_placeholders(7000 + i) for i in range(5)]
    before = stored(roomy)
    for query in queries:
        plain = score(stock, query)
        overridden = score(stock, query, **OVERRIDE)
        assert plain != pytest.approx(overridden, abs=1e-3), "the control: overrides matter"
        assert score(roomy, query, **OVERRIDE) == pytest.approx(overridden, abs=TOLERANCE)
    left = stored(roomy)
    expected = [stock.generate(query, 16, return_logprob=True) for query in queries]
    actual = [roomy.generate(query, 16, return_logprob=True) for query in queries]
    assert_same(expected, actual, TOLERANCE)
    assert left == before
    assert paths(actual) == ["computed"] * 5
    assert stored(roomy) == before + 5, "the control: plain requests are stored"
    again = [roomy.generate(query, 16, return_logprob=True) for query in queries]
    assert_same(expected, again, TOLERANCE)
    assert paths(again) == ["ssd"] * 5


def test_stored_prefixes_are_not_served_to_overrides(stock: Server, roomy: Server) -> None:
    query = with_placeholders(7010)
    roomy.generate(query, 1)
    roomy.flush()
    before = roomy.stats()["totals"]
    expected = score(stock, query, **OVERRIDE)
    assert score(roomy, query, **OVERRIDE) == pytest.approx(expected, abs=TOLERANCE)
    totals = roomy.stats()["totals"]
    assert totals["requests_ssd"] == before["requests_ssd"]
    for use in ("requests_not_served", "requests_not_stored"):
        refused = totals[use]["positional_embed_overrides"]
        assert refused == 1 + before[use].get("positional_embed_overrides", 0)


def test_ordinary_requests_are_like_plain_ones(roomy: Server) -> None:
    """SGLang sets no field for them that is not known."""
    totals = roomy.stats()["totals"]
    for use in ("requests_not_served", "requests_not_stored"):
        assert totals[use].keys() <= {"positional_embed_overrides", "impress_store"}
