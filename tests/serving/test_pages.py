"""Prefixes on servers whose pool gives slots in pages: whole pages are loaded, shared and freed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.serving.compare import Answer, assert_same, paths, report
from tests.serving.conftest import Serve
from tests.serving.harness import Server
from tests.serving.tiny_models import random_tokens

TOLERANCE = 1e-4
PAGE, POOL = 64, 9024
LOGPROBS: dict[str, Any] = {"return_logprob": True}
STAYS_WHOLE = "paged"


@pytest.fixture(scope="module")
def paged(serve: Serve) -> Iterator[Server]:
    """It evicts soon, and keeps nothing in memory beside the pool."""
    flags = (
        f"--page-size={PAGE}",
        f"--max-total-tokens={POOL}",
        "--chunked-prefill-size=1024",
        "--impress-host-gb=0",
        "--impress-device-gb=0",
    )
    with serve("pages", *flags) as server:
        yield server


def branches(seed: int, page: int = PAGE) -> list[list[int]]:
    """Prompts that leave a trunk inside of pages, and once at the end of one."""
    trunk = random_tokens(900, seed)
    cuts = (900, 650, 333, 5 * page, 81)
    return [[*trunk[:cut], *random_tokens(210, seed + cut)] for cut in cuts]


def even_branches() -> list[list[int]]:
    """The same, with lengths of which all is stored with pages of 64."""
    return [prompt[: len(prompt) // 64 * 64] for prompt in branches(200, page=16)]


def questions() -> list[list[int]]:
    return [[*prompt, *random_tokens(37, seed=8)] for prompt in even_branches()]


def test_exact_answers_are_those_of_stock(paged: Server, stock: Server) -> None:
    prompts = branches(100)
    paged.store_prompts(*prompts)
    asked = [[*prompt, *random_tokens(37, seed=7)] for prompt in prompts]
    expected = stock.generate_together(asked, 24, return_logprob=True)

    def ask() -> list[Answer]:
        return paged.generate_together(asked, 24, return_logprob=True, impress_bits="exact")

    from_ssd, resident = ask(), ask()
    assert_same(expected, from_ssd, TOLERANCE)
    assert_same(from_ssd, resident, TOLERANCE)
    assert "ssd" in paths(from_ssd) and set(paths(resident)) == {"device"}
    for prompt, answer in zip(prompts, from_ssd, strict=True):
        assert answer["meta_info"]["cached_tokens"] == len(prompt) // PAGE * PAGE
        assert report(answer)["approximate"] is False


def test_codes_are_those_of_any_page_size(paged: Server, serve: Serve) -> None:
    """However they come into slots, by whom and in what order, the answers are the same."""
    # Of its own: codes depend on the queries that a server has seen.
    with serve("no-pages") as server:
        server.store_prompts(*even_branches())
        without_pages = [server.generate(question, 8, **LOGPROBS) for question in questions()]
    paged.store_prompts(*even_branches())
    alone = [paged.generate(question, 8, **LOGPROBS) for question in questions()]
    together = paged.generate_together(questions(), 8, **LOGPROBS)
    for answers in (alone, together):
        assert_same(without_pages, answers, TOLERANCE)
        assert all(report(answer)["approximate"] for answer in answers)
    assert "ssd" in paths(alone) and set(paths(together)) == {"device"}


def test_those_who_wait_share_whole_pages(paged: Server) -> None:
    """Also one in which two segments meet."""
    first = random_tokens(703, seed=1)
    second = [*first[:550], *random_tokens(500, seed=2)]
    paged.store_prompts(first, second)
    asked = [[*second, *random_tokens(20, seed=20 + number)] for number in range(8)]
    told = [report(answer) for answer in paged.generate_together(asked, 4)]
    stored = len(second) // PAGE * PAGE
    assert {own["prefix_tokens"] for own in told} == {stored}
    assert sum(own["loaded_tokens"] for own in told) == stored
    # Of a shorter one only the pages are loaded that the longer ones do not have.
    other = report(paged.generate([*first, *random_tokens(20, seed=30)], 4))
    assert other["resident_tokens"] == 550 // PAGE * PAGE
    assert other["loaded_tokens"] == (703 - 550 // PAGE * PAGE) // PAGE * PAGE


def test_what_is_resident_gives_way_in_whole_pages(paged: Server) -> None:
    prefixes = [paged.store(2501, seed=30 + number) for number in range(5)]
    for number, prefix in enumerate(prefixes):
        said = report(paged.generate([*prefix, *random_tokens(20, seed=40 + number)], 4))
        assert said["loaded_tokens"] == 2501 // PAGE * PAGE
    last = report(paged.generate([*prefixes[-1], *random_tokens(20, seed=50)], 4))
    assert last["loaded_tokens"] == 0 and last["resident_tokens"] == 2501 // PAGE * PAGE
    # A shorter prompt uses a part of it.
    short = report(paged.generate([*prefixes[-1][:1000], *random_tokens(20, seed=51)], 4))
    assert (short["resident_tokens"], short["loaded_tokens"]) == (1000 // PAGE * PAGE, 0)
