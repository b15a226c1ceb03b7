"""Beam search beside offset rows: a beam's rows never pass through extend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving.compare import paths
from tests.serving.conftest import impress_flags
from tests.serving.harness import Server, Zygote, running
from tests.serving.tiny_models import random_tokens

BEAM_WIDTH = 6
ROWS = 16


@pytest.fixture(scope="module")
def partial(workdir: Path, tiny_llama: Path, zygote: Zygote) -> Iterator[Server]:
    """A server that loads a quarter of a stored prefix, so that rows start late."""
    with running(
        tiny_llama,
        workdir / "beam.log",
        *impress_flags(
            workdir / "store-beam", "--impress-retention=0.25", "--max-total-tokens=60000"
        ),
        zygote=zygote,
    ) as server:
        yield server
        server.assert_quiet()


def search(server: Server, prompt: list[int]) -> list[dict[str, Any]]:
    """The sequences that beam search finds, best first."""
    sampling = {"beam_width": BEAM_WIDTH, "n": BEAM_WIDTH}
    answer = server.generate(prompt, 12, sampling_params=sampling)
    sequences: list[dict[str, Any]] = answer["meta_info"]["beam_results"]
    assert len(sequences) == BEAM_WIDTH
    return sequences


def leave_late_starts(server: Server, seed: int) -> None:
    """Every row of the pool has been a offset row."""
    stored = random_tokens(900, seed=seed)
    server.generate(stored, 1)
    server.flush()
    prompts = [[*stored, *random_tokens(20, seed=seed + 1 + i)] for i in range(ROWS)]
    answers = server.generate_together(prompts, 24)
    assert paths(answers) == ["ssd"] * ROWS


def test_beams_take_rows_that_were_sink_rows(stock: Server, partial: Server) -> None:
    """Of a prefix that is resident: nothing of an earlier request's row is left."""
    prompt = random_tokens(400, seed=7)
    expected = search(stock, prompt)
    leave_late_starts(partial, seed=20)
    before = partial.generate(prompt, 1)
    assert paths([before]) == ["computed"]
    assert paths([partial.generate(prompt, 1)]) == ["device"]
    actual = search(partial, prompt)
    assert [own["output_ids"] for own in actual] == [own["output_ids"] for own in expected]
