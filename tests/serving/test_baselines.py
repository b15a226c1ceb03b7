"""Identification rules that only exist to be compared with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serving.compare import report
from tests.serving.conftest import impress_flags
from tests.serving.harness import Zygote, running
from tests.serving.tiny_models import random_tokens


@pytest.mark.parametrize("rule", ["recent", "random", "random-nosink"])
def test_baselines_use_as_many_tokens_and_leave_nothing_behind(
    rule: str, workdir: Path, tiny_llama: Path, zygote: Zygote
) -> None:
    """They read no probe stream, and with this flag approximate KVs are not stored."""
    flags = impress_flags(
        workdir / f"store-{rule}",
        f"--impress-identify={rule}",
        "--impress-retention=0.25",
        "--impress-approximation-depth=0",
        "--impress-min-prefix-tokens=64",
        "--max-total-tokens=4000",
    )
    with running(tiny_llama, workdir / f"{rule}.log", *flags, zygote=zygote) as server:
        prefix = random_tokens(500, seed=101)
        server.generate(prefix, 1)
        server.flush()
        longer = [*prefix, *random_tokens(200, seed=102)]
        said = report(server.generate(longer, 4))
        assert said["used_tokens"] == 125 and said["layers_by_fallback"] == 0
        assert said["ssd_chunks"] == said["selected_chunks"], "no probe stream was read"
        server.flush()
        assert report(server.generate([*longer, 5, 6], 1))["stored_tokens"] == 500
        server.assert_quiet()
