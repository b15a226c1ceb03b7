"""Models whose layers attend to the last tokens only, in SGLang's pools for these.

Of such layers prefixes are restored where all before the next token is stored, and no more of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.serving.compare import assert_same, paths, report
from tests.serving.conftest import Serve, long
from tests.serving.harness import WINDOWS
from tests.serving.test_pools import assert_comes_back, assert_comes_in_few_bits
from tests.serving.tiny_models import WINDOW, make_model, random_tokens

TOLERANCE = 1e-4
# A pool with rows for less than half of the slots.
CRAMPED = ("--max-total-tokens=5120", "--swa-full-tokens-ratio=0.3", "--chunked-prefill-size=512")


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        *(long("cohere2", 1), ("cohere2", 2)),
        *(long("olmo3", 1), long("olmo3", 2), ("gemma3", 1)),
    ],
)
def test_windows(serve: Serve, workdir: Path, family: str, ranks: int) -> None:
    """Also behind a fork, in few bits, and after a restart.

    The first family has a pool for layers with windows, the others one pool for all.
    """
    flags = ("--max-total-tokens=9000", "--impress-bits=exact")
    name, model = f"windows-{family}-{ranks}", make_model(family, workdir / family)
    how: dict[str, Any] = {"model": model, "preload": WINDOWS, "ranks": ranks}
    prompt = random_tokens(1500, seed=1)
    fork = [*prompt[:700], *random_tokens(100, seed=2)]
    with serve(name, *flags, **how) as server:
        computed = server.generate(fork, 16, return_logprob=True)
        server.store_prompts(prompt)
        assert_comes_back(server)
        assert_comes_in_few_bits(server)
    with serve(name, *flags, **how) as server:
        # What was stored of the fork is not what its beginning is loaded from.
        for _ in range(2):
            answer = server.generate([*prompt[:700], *fork[700:]], 16, return_logprob=True)
            assert_same([computed], [answer], TOLERANCE)
            assert report(answer)["path"] == "ssd" or report(answer)["path"] == "device"
        server.assert_whole()


@pytest.mark.parametrize("page", [1, 16])
def test_rows_for_few_tokens(serve: Serve, workdir: Path, page: int) -> None:
    """Prompts are computed in chunks, and what is behind a window is overwritten before the end."""
    model = make_model("cohere2", workdir / "cohere2")
    prompts = [random_tokens(900, seed=10 + number) for number in range(6)]
    flags = (*CRAMPED, "--impress-bits=exact", f"--page-size={page}")
    with serve(f"few-rows-{page}", *flags, model=model, preload=WINDOWS) as server:
        computed = [server.generate(prompt, 16, return_logprob=True) for prompt in prompts]
        server.flush()
        alone = [server.generate(prompt, 16, return_logprob=True) for prompt in prompts]
        assert_same(computed, alone, TOLERANCE)
        assert set(paths(alone)) == {"ssd"}
        assert {report(answer)["loaded_tokens"] for answer in alone} <= {896, 899}
        server.flush()
        # All together they need more rows than there are.
        together = server.generate_together([*prompts, *prompts], 16, return_logprob=True)
        assert_same([*computed, *computed], together, TOLERANCE)
        assert "ssd" in paths(together)
        # Of a part nothing is left but what is before the last tokens.
        for length, path in ((600, "computed"), (899, "ssd")):
            server.flush()
            part = [*prompts[0][:length], *random_tokens(40, seed=length)]
            assert report(server.generate(part, 1))["path"] == path
        server.abort_in_every_phase(prompts)
        server.assert_whole()
    assert WINDOW < 512
