"""Fitting a basis to a model: what is read of it, and the command."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from impress_sglang.cli import DONE, REFUSED, CommandError
from impress_sglang.cli.calibrate import Prompts, calibrated
from impress_sglang.cli.main import main
from impress_sglang.codes.rows.basis import RATES, Basis

VOCABULARY = 256
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
KINDS = ("Llama", "Qwen2")


def make_model(kind: str = "Llama", seed: int = 1) -> Any:
    """Weights that are large enough for predictions to differ, and biases of keys and values."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**SIZES, initializer_range=0.3)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=3.0)
    return model


def ids(tokens: int, seed: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(VOCABULARY // 4) for _ in range(tokens)]


TEXTS = {"one": ids(300, 1), "two": ids(300, 2)}


@pytest.mark.parametrize("kind", KINDS)
def test_keys_are_what_they_were_before_rotation(kind: str) -> None:
    model, seen = make_model(kind), []
    for layer in model.model.layers:
        layer.self_attn.k_proj.register_forward_hook(lambda _, __, out: seen.append(out[0]))
    kvs, slopes = Prompts(model).gradients(ids(40, 1))
    assert [keys.shape for keys, _ in kvs] == [(40, 2, 8)] * 3
    assert [keys.shape for keys, _ in slopes[0]] == [(30, 2, 8)] * 3
    for layer, (keys, _) in enumerate(kvs):
        # The prompt was computed in two parts.
        exact = torch.cat([seen[layer], seen[layer + 3]])
        torch.testing.assert_close(keys.flatten(1), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_tell_what_errors_cost(kind: str) -> None:
    """The KL of small errors is half their product with Fisher's information."""
    prompts, prompt = Prompts(make_model(kind)), ids(60, 2)
    draws = [draw for _ in range(5) for draw in prompts.gradients(prompt)[1]]
    held, size, generator = 45, 0.003, torch.Generator().manual_seed(1)
    keys, values = prompts._prefix(prompt[:held])

    def logp(noisy: int | None) -> torch.Tensor:
        parts = [[rows.clone() for rows in stream] for stream in (keys, values)]
        for rows in parts[noisy] if noisy is not None else ():
            rows += size * torch.randn(rows.shape, generator=generator)
        with torch.no_grad():
            return prompts._follow(parts[0], parts[1], prompt[held:])[0].double().log_softmax(-1)

    exact = logp(None)
    for stream in range(2):
        runs = [(exact.exp() * (exact - logp(stream))).sum() for _ in range(20)]
        squares = [layer[stream].square().sum() for layer in itertools.chain(*draws)]
        cost = size**2 / 2 * float(torch.stack(squares).sum()) / len(draws)
        assert float(torch.stack(runs).mean()) == pytest.approx(cost, rel=0.35)


@pytest.mark.parametrize("kind", KINDS)
def test_more_bits_change_predictions_less(kind: str) -> None:
    """The same each time, and for each model."""
    ((basis,),), ((again,),), ((other,),) = (
        calibrated(Prompts(make_model(kind, seed)), TEXTS) for seed in (1, 1, 2)
    )
    few, many = (basis.notes["kl"][rate] for rate in ("5", "6"))
    assert set(few) == set(many) == set(TEXTS)
    assert all(many[text] < few[text] / 2.5 for text in TEXTS)
    assert again.digest == basis.digest
    assert basis.model.startswith(f"{kind}ForCausalLM ") and other.model != basis.model


@pytest.mark.parametrize("name", ["o_proj", "q_proj"])
def test_a_layer_may_be_without_effect(name: str) -> None:
    """Such as one that was added to a model; or its keys only are."""
    model = make_model()
    getattr(model.model.layers[1].self_attn, name).weight.data.zero_()
    ((basis,),) = calibrated(Prompts(model), TEXTS)
    assert max(basis.notes["kl"]["6"].values()) < 0.01


def test_ranks_are_as_good_in_more_bits() -> None:
    """More ranks than heads share them."""
    whole, split = calibrated(Prompts(make_model()), TEXTS, [1, 2, 4])
    assert [basis.part for basis in split] == [(0, 2), (1, 2)] and len(whole) == 1
    assert {basis.shapes for basis in split} == {((1, 8), (1, 8))}
    assert split[0].digest != split[1].digest and split[0].notes == split[1].notes
    for keeps, rate in RATES.items():
        one, two = (sum(bases[0].notes["kl"][f"{keeps:g}"].values()) for bases in (whole, split))
        assert 0.7 * one < two < 1.4 * one
        assert all(rate + 0.3 < basis.keeping(keeps).rate < rate + 1.0 for basis in split)
    for size in (3, 0, -2):
        with pytest.raises(CommandError, match=f"{size} ranks cannot share 2"):
            calibrated(Prompts(make_model()), TEXTS, [size])


def test_models_that_are_not_understood_are_refused() -> None:
    sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 2}
    plain = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    with pytest.raises(CommandError, match="no rotary"):
        Prompts(plain)
    for kind in ("Gemma2", "Qwen3Next"):
        with pytest.raises(CommandError, match=r"layers of type \w+_attention"):
            Prompts(make_model(kind))
    # It pairs neighbours.
    with pytest.raises(CommandError, match="unknown way"):
        Prompts(make_model("Cohere")).gradients(ids(40, 1))
    with pytest.raises(CommandError, match="short"):
        calibrated(Prompts(make_model()), {"long": ids(128, 1), "short": ids(127, 1)})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokens are bytes."""
    found = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(found)
    make_model("Qwen2").save_pretrained(found)
    return found


def test_command_with_texts_of_the_package(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "own.basis"
    order = ["calibrate", "--model", str(folder), "--out", str(out), "--json"]
    assert main([*order, "--tokens", "200", "--tp-size", "1", "2"]) == DONE
    told = json.loads(capsys.readouterr().out)
    basis, parts = Basis.load(out), [Basis.load(out, (rank, 2)) for rank in range(2)]
    assert told["tp_2"]["bits_6"]["digest"] == " ".join(part.digest for part in parts)
    assert told["tp_2"]["bits_6"]["token_bytes"] == sum(part.token_bytes for part in parts)
    for keeps, rate in RATES.items():
        kept, said = basis.keeping(keeps), told[f"bits_{keeps:g}"]
        assert said["digest"] == kept.digest and said["kl"] == basis.notes["kl"][f"{keeps:g}"]
        assert {"prose", "german", "python", "chinese", "json"} <= set(said["kl"])
        assert said["rate"] == pytest.approx(rate, abs=0.02)
        assert rate / 16 < said["share"] < rate / 10


def test_command_with_own_texts(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = tmp_path / "mine.txt", tmp_path / "own.basis"
    text.write_text("So it goes, and so it went on. " * 9)
    cut = shutil.copytree(folder, tmp_path / "cut")
    os.truncate(cut / "model.safetensors", 10_000)
    order = ["calibrate", "--model", str(folder), "--out", str(out), "--text", str(text)]
    assert main(order) == DONE
    assert "mine " in capsys.readouterr().out
    for wrong, why in (
        (["--text", str(tmp_path / "none")], "cannot be read"),
        (["--text", str(text), str(text)], "two texts"),
        (["--out", str(tmp_path / "none" / "b")], "no directory"),
        (["--out", str(folder)], "cannot be written"),
        (["--model", str(tmp_path)], "cannot be loaded"),
        (["--model", str(cut)], "cannot be loaded"),
        (["--tokens", "60"], "fewer than"),
    ):
        out.unlink(missing_ok=True)
        assert main([*order, *wrong]) == REFUSED
        assert why in capsys.readouterr().err
        assert not out.exists()
