"""Conversations that outgrow the context, in real servers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving.conftest import BLENDS, Serve
from tests.serving.harness import Server
from tests.serving.tiny_models import make_model, random_tokens
from tests.serving.tiny_tokenizer import add_tokenizer

CONTEXT = 1024
BEGIN = 1
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
SYSTEM = {"role": "system", "content": "Be brief, and mind what was said first."}


@pytest.fixture(scope="module")
def truncating(workdir: Path, serve: Serve) -> Iterator[Server]:
    model = make_model("llama", workdir / "truncating")
    add_tokenizer(model, chat=TEMPLATE)
    flags = (
        f"--context-length={CONTEXT}",
        "--impress-truncate=0.5",
        "--enable-cache-report",
        *BLENDS,
    )
    with serve("truncating", *flags, model=model, words=True) as server:
        yield server
        assert server.stats()["integrity"] == "ok"


def complete(server: Server, messages: list[dict[str, str]], **fields: Any) -> dict[str, Any]:
    """The answer of a chat, with all that it can tell."""
    answer = server.post(
        "/v1/chat/completions",
        model="tiny",
        messages=messages,
        max_tokens=4,
        temperature=0,
        ignore_eos=True,
        return_prompt_token_ids=True,
        return_meta_info=True,
        return_cached_tokens_details=True,
        **fields,
    )
    answer.raise_for_status()
    told: dict[str, Any] = answer.json()
    return told


def chat(server: Server, turns: int, **custom: Any) -> tuple[list[int], dict[str, Any]]:
    """The prompt that was answered, and its report, after so many turns."""
    messages = [SYSTEM]
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{turn} asks {turn * 7919} " + "a" * 80})
        messages.append({"role": "assistant", "content": f"{turn} says {turn * 104729}"})
    told = complete(server, messages[:-1], custom_params=custom)
    (choice,) = told["choices"]
    tokens: list[int] = choice["prompt_token_ids"]
    assert told["usage"]["prompt_tokens"] == len(tokens)
    report: dict[str, Any] = choice["meta_info"]["impress"]
    return tokens, report


def test_a_conversation_outgrows_the_context(truncating: Server) -> None:
    """It is cut behind the system prompt and between messages, and what is left is reused."""
    turns = 1
    last, report = chat(truncating, turns)
    while not report["truncated_tokens"]:
        whole, turns = last, turns + 1
        last, report = chat(truncating, turns)
    assert report["blended_tokens"] > len(last) // 2
    system = last.index(BEGIN, 1)
    assert last[:system] == whole[:system]
    assert last[system] == BEGIN
    assert CONTEXT // 3 < len(last) < CONTEXT - 4

    truncating.flush()
    _, again = chat(truncating, turns + 1)
    assert again["blended_tokens"] == 0 and again["approximate"]
    assert again["prefix_tokens"] >= len(last) - 20, "the first turn has stored what it blended"
    _, exact = chat(truncating, turns, impress_blend="off")
    following, told = chat(truncating, turns + 1, impress_blend="off")

    assert following[: len(last) - 20] == last[:-20]
    assert told["truncated_tokens"] == exact["truncated_tokens"] == report["truncated_tokens"]
    assert told["prefix_tokens"] >= len(last) - 20


def test_openai_clients_are_told_what_was_cached(truncating: Server) -> None:
    """How many tokens, and that a storage of ours had them."""

    def ask(tenant: str) -> tuple[int, int, dict[str, Any], dict[str, Any]]:
        question = {"role": "user", "content": "What is cached? " + "b" * 400}
        custom = {"impress_blend": "off"}
        told = complete(truncating, [SYSTEM, question], custom_params=custom, cache_salt=tenant)
        usage, (choice,) = told["usage"], told["choices"]
        details = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
        said = (told.get("sglext") or {}).get("cached_tokens_details") or {}
        return usage["prompt_tokens"], details, said, choice["meta_info"]["impress"]

    length, cached, said, report = ask("one")
    assert (cached, said) == (report["prefix_tokens"], {}) == (0, {})
    assert report["tokens"]["computed"] == length > 400
    truncating.flush()
    _, cached, said, report = ask("one")
    # The last token of a prompt is computed in any case.
    assert cached == report["prefix_tokens"] == length - 1
    assert said == {"device": 0, "host": 0, "storage": cached, "storage_backend": "impress"}
    assert report["tokens"]["loaded"] == cached and report["tokens"]["computed"] == 1
    truncating.flush()
    _, cached, said, report = ask("another")
    assert (cached, said) == (0, {})
    _, cached, said, report = ask("another")
    assert cached == report["prefix_tokens"] == report["tokens"]["resident"] == length - 1
    # SGLang, which has a storage now, says that nothing came from there.
    nothing = {"storage": 0, "storage_backend": "impress"}
    assert said == {"device": cached, "host": 0, **nothing}, "this was in SGLang's pool"


@pytest.mark.parametrize("length", [CONTEXT - 6, 5 * CONTEXT])
def test_plain_prompts(truncating: Server, length: int) -> None:
    """What is refused else is cut, also a little below the context, and in a batch."""
    tokens = random_tokens(length, seed=length)
    off = {"sampling_params": {"custom_params": {"impress_truncate": "off"}}}
    assert truncating.post("/generate", input_ids=tokens, **off).status_code == 400
    sampling = {"max_new_tokens": 2, "custom_params": {"impress_keep_tokens": 40}, "n": 2}
    answer = truncating.post(
        "/generate",
        input_ids=[tokens, tokens[:100]],
        sampling_params=sampling,
        return_prompt_token_ids=True,
    )
    answer.raise_for_status()
    cut, again, short, _ = answer.json()
    told = cut["meta_info"]["impress"]["truncated_tokens"]
    assert cut["prompt_token_ids"] == [*tokens[:40], *tokens[40 + told :]]
    assert cut["meta_info"]["prompt_tokens"] == length - told < CONTEXT - 6
    assert again["meta_info"]["impress"]["truncated_tokens"] == told
    assert short["meta_info"]["impress"]["truncated_tokens"] == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"return_logprob": True, "logprob_start_len": 0},
        {"sampling_params": {"custom_params": {"impress_truncated_tokens": 5}}},
        {"sampling_params": {"custom_params": {"impress_keep_tokens": CONTEXT}}},
        {"sampling_params": {"max_new_tokens": CONTEXT}},
    ],
)
def test_what_is_refused_as_ever(truncating: Server, fields: dict[str, Any]) -> None:
    answer = truncating.post("/generate", input_ids=random_tokens(2 * CONTEXT, seed=1), **fields)
    assert answer.status_code == 400
