"""The attention lab is exact, and `bench.similarity` counts what it says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import similarity
from bench.attention_lab import (
    AttentionLab,
    PrefixKV,
    attending,
    attention_after,
    causal_attention,
    compute_prefix,
    question_scores,
)
from bench.examples import Example, TraceError
from bench.servers import BenchFailed
from bench.similarity import Heads, jaccard_matrix, main, make_material, measure
from impress_sglang.importance.selection import mean_jaccard, similarity_threshold, top_tokens

transformers = pytest.importorskip("transformers")

VOCABULARY = 256
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 1024,
}


def make_llama(**changes: Any) -> Any:
    config = {**SIZES, "intermediate_size": 64, "num_key_value_heads": 2, **changes}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))


def make_qwen3() -> Any:
    config = {**SIZES, "intermediate_size": 64, "num_key_value_heads": 3, "head_dim": 16}
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**config))


def make_opt() -> Any:
    config = transformers.OPTConfig(**SIZES, ffn_dim=64, word_embed_proj_dim=48)
    return transformers.OPTForCausalLM(config)


FAMILIES = pytest.mark.parametrize("make", [make_llama, make_qwen3, make_opt])


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(5)


def sharpened(make: Callable[[], Any]) -> Any:
    """A random model whose attention is not almost uniform."""
    model = make().eval()
    for name, parameter in model.named_parameters():
        if "q_proj.weight" in name or "k_proj.weight" in name:
            parameter.data.mul_(20)
    return model


def some_tokens(count: int) -> list[int]:
    tokens: list[int] = torch.randint(3, VOCABULARY, (count,)).tolist()
    return tokens


def logits_of(model: Any, tokens: list[int], implementation: str) -> Tensor:
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.tensor([tokens])).logits[0]
    return logits


@FAMILIES
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_lab_gives_what_the_model_gives(make: Callable[[], Any], implementation: str) -> None:
    model, tokens = sharpened(make), some_tokens(50)
    expected = logits_of(model, tokens, implementation)
    lab = AttentionLab(model)
    torch.testing.assert_close(lab.logits(tokens), expected, atol=1e-4, rtol=0)


@FAMILIES
def test_a_question_after_a_prefix_gives_what_both_together_give(make: Callable[[], Any]) -> None:
    model, tokens = sharpened(make), some_tokens(50)
    expected = logits_of(model, tokens, "eager")[35:]
    lab = AttentionLab(model)
    prefix = compute_prefix(lab, tokens[:35])

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        return attention_after(prefix.keys[layer], prefix.values[layer], q, k, v, scaling)

    with attending(attend):
        found = lab.logits(tokens[35:], first_position=35)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


@FAMILIES
def test_scores_are_column_sums_of_the_models_own_attention(make: Callable[[], Any]) -> None:
    model, tokens = sharpened(make), some_tokens(50)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        output = model(input_ids=torch.tensor([tokens]), output_attentions=True)
    expected = torch.stack([weights[0, :, 35:, :35].sum(1) for weights in output.attentions])
    lab = AttentionLab(model)
    scores = question_scores(lab, compute_prefix(lab, tokens[:35]), tokens[35:])
    assert scores.shape == (2, 6, 35)
    torch.testing.assert_close(scores, expected, atol=1e-4, rtol=1e-4)


def test_prefix_kvs_are_tokens_by_heads_and_the_same_for_a_shorter_prefix() -> None:
    lab, tokens = AttentionLab(sharpened(make_llama)), some_tokens(20)
    long, short = compute_prefix(lab, tokens), compute_prefix(lab, tokens[:8])
    assert isinstance(long, PrefixKV) and long.num_tokens == 20
    assert [key.shape for key in long.keys] == [(20, 2, 8)] * 2
    for a, b in zip([*long.keys, *long.values], [*short.keys, *short.values], strict=True):
        torch.testing.assert_close(a[:8], b, atol=1e-5, rtol=1e-4)


def test_attention_is_causal_again_after_an_experiment() -> None:
    lab, tokens = AttentionLab(make_llama()), some_tokens(10)
    usual = lab.hidden_states(tokens)
    with pytest.raises(ZeroDivisionError), attending(lambda *_: 1 // 0):
        lab.hidden_states(tokens)
    torch.testing.assert_close(lab.hidden_states(tokens), usual)
    with attending(lambda layer, q, k, v, s: 2 * causal_attention(layer, q, k, v, s)):
        assert not torch.allclose(lab.hidden_states(tokens), usual)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("MistralConfig", "sliding_attention"),
        ("Gemma3TextConfig", "sliding_attention"),
        ("DeepseekV3Config", "multi-head latent attention"),
        ("T5Config", "an encoder"),
    ],
)
def test_models_with_another_attention_are_refused(config: str, words: str, tmp_path: Path) -> None:
    getattr(transformers, config)().save_pretrained(tmp_path)
    with pytest.raises(BenchFailed, match=words):
        AttentionLab.load(tmp_path)


def test_what_the_hook_would_leave_out_is_refused() -> None:
    gemma = transformers.Gemma2Config(
        **{**SIZES, "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8},
        layer_types=["full_attention"] * 2,
    )
    lab = AttentionLab(transformers.Gemma2ForCausalLM(gemma))
    with pytest.raises(BenchFailed, match="softcap"):
        lab.hidden_states([3, 4])
    bloom = transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=48, n_layer=2, n_head=6)
    with pytest.raises(BenchFailed, match=r"bloom.*AttentionInterface"):
        compute_prefix(AttentionLab(transformers.BloomForCausalLM(bloom)), [3, 4])


def test_impossible_inputs_are_refused(tmp_path: Path) -> None:
    lab = AttentionLab(make_llama(max_position_embeddings=16))
    with pytest.raises(BenchFailed, match="17 tokens"):
        lab.hidden_states([3] * 7, first_position=10)
    with pytest.raises(BenchFailed, match="no tokens"):
        lab.hidden_states([])
    with pytest.raises(BenchFailed, match="no model"):
        AttentionLab.load(tmp_path)


def scores_of(sets: list[list[set[int]]], num_tokens: int) -> Tensor:
    """[Q, 1, H, m] scores whose highest are the given sets of each question and head."""
    scores = torch.rand(len(sets), 1, len(sets[0]), num_tokens)
    for question, heads in enumerate(sets):
        for head, tokens in enumerate(heads):
            scores[question, 0, head, list(tokens)] += 10 + head
    return scores


def test_each_kind_of_pairs_has_its_own_mean() -> None:
    a, b, c = {0, 1, 2, 3}, {0, 1, 2, 4}, {0, 5, 6, 7}
    # a with b: 3 of 5; a with c, b with c: 1 of 7. Groups: heads 0 and 1, heads 2 and 3.
    near, far = 3 / 5, 1 / 7
    scores = scores_of([[a, b, c, c]], 20)
    found = measure(scores, Heads(4, 2, (0,)), ratio=0.2, alpha=0.5)
    assert found.k == 4
    means = {kind: float(values.mean()) for kind, values in found.values.items()}
    assert means["within"] == pytest.approx((near + 1) / 2)
    assert means["across"] == pytest.approx(far)
    assert means["all"] == pytest.approx((near + 1 + 4 * far) / 6)
    # Head 1 has the larger scores, and tokens of both heads the largest: 0, 1, 2, 4.
    assert means["kv_heads"] == pytest.approx(far)
    assert means["probe"] == pytest.approx(near)
    assert "questions" not in means and "questions_kv" not in means
    other_probe = measure(scores, Heads(4, 2, (1,)), ratio=0.2, alpha=0.5)
    assert float(other_probe.values["probe"].mean()) == 1
    expected = [[1, near, far, far], [near, 1, far, far], [far, far, 1, 1], [far, far, 1, 1]]
    torch.testing.assert_close(found.heads[0], torch.tensor(expected))


def test_sets_of_one_head_are_compared_between_questions() -> None:
    a, b, c = {0, 1, 2, 3}, {0, 1, 2, 4}, {0, 5, 6, 7}
    found = measure(scores_of([[a, c], [b, c], [c, c]], 20), Heads(2, 2, (0, 1)), 0.2, 0.6)
    assert found.values["questions"].shape == (1, 3)
    pairs = [(3 / 5 + 1) / 2, (1 / 7 + 1) / 2, (1 / 7 + 1) / 2]
    assert found.values["questions"][0].tolist() == pytest.approx(pairs)
    # Without groups, KV heads are query heads and no two share one.
    torch.testing.assert_close(found.values["questions_kv"], found.values["questions"])
    torch.testing.assert_close(found.values["kv_heads"], found.values["all"])
    assert "within" not in found.values
    assert found.values["all"].tolist()[0] == pytest.approx([1 / 7, 1 / 7, 1])


def test_kinds_without_pairs_are_absent() -> None:
    found = measure(torch.rand(1, 2, 4, 30), Heads(4, 1, (0,)), 0.3, 0.6)
    assert list(found.values) == ["all", "within", "probe"]
    alone = measure(torch.rand(1, 2, 4, 30), Heads(4, 4, (0,)), 0.3, 0.6)
    assert list(alone.values) == ["all", "across", "kv_heads"]


def test_the_matrix_agrees_with_the_mean_that_the_server_takes() -> None:
    sets = top_tokens(torch.rand(5, 40), 9)
    upper = torch.triu_indices(5, 5, offset=1)
    mean = float(jaccard_matrix(sets, 40)[upper[0], upper[1]].mean())
    assert mean == pytest.approx(mean_jaccard(sets, 40))


def test_random_sets_are_as_alike_as_expected_and_rarely_above_the_threshold() -> None:
    scores = torch.rand(4, 3, 6, 1000)
    found = measure(scores, Heads(6, 3, (0, 1)), ratio=0.25, alpha=0.6)
    assert found.random == pytest.approx(1 / 7)
    assert found.threshold == similarity_threshold(250, 1000, 0.6) == pytest.approx(7**-0.6)
    for kind, values in found.values.items():
        assert float(values.mean()) == pytest.approx(found.random, abs=0.02), kind
        assert found.as_dict()["kinds"][kind]["share_above"] == 0


def test_the_share_above_the_threshold_counts_layers_and_questions() -> None:
    same, other = {0, 1, 2, 3}, {10, 11, 12, 13}
    scores = scores_of([[same, same], [same, other], [same, same], [same, same]], 20)
    row = measure(scores, Heads(2, 1, (0,)), 0.2, 0.6).as_dict()["kinds"]["all"]
    assert row == {"mean": 0.75, "share_above": 0.75, "layers": [0.75]}


class Words:
    """A tokenizer for which a word is a token; prefixes begin with token 0."""

    def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, Any]:
        start = [0] if add_special_tokens else []
        return {"input_ids": start + [int(word) for word in text.split()]}


def test_a_prefix_of_passages_and_questions_about_them() -> None:
    examples = [
        Example(f"{100 * passage + i}", "1", f"{passage} " * 10)
        for passage in range(1, 30)
        for i in range(5)
    ]
    material = make_material(examples, Words(), prefix_tokens=105, questions=20, seed=1)
    assert material.prefix[0] == 0 and len(material.prefix) == 101
    shown = set(material.prefix[1:])
    assert len(shown) == 10
    assert {question[0] // 100 for question in material.questions} <= shown
    assert len({question[0] for question in material.questions}) == 20
    assert material == make_material(examples, Words(), 105, 20, seed=1)
    assert material != make_material(examples, Words(), 105, 20, seed=2)
    with pytest.raises(TraceError, match="50 questions"):
        make_material(examples, Words(), 105, 51, seed=1)


def test_a_prefix_of_examples_and_questions_of_others() -> None:
    examples = [Example(f"{i}", "0") for i in range(1, 50)]
    material = make_material(examples, Words(), prefix_tokens=61, questions=10, seed=1)
    assert len(material.prefix) == 61
    asked = {question[0] for question in material.questions}
    assert len(asked) == 10 and not asked & set(material.prefix)
    with pytest.raises(TraceError, match="79 tokens, not 100"):
        make_material(examples, Words(), 100, 10, seed=1)


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A tiny model whose tokens are bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    folder = tmp_path / "model"
    make_llama().save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def test_a_run_writes_json_tables_and_figures(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "run.json"
    options = ["--dataset=made", "--prefix-tokens=600", "--questions=3", "--ratios=10,40"]
    paths = [f"--model={model_folder}", f"--json={out}", f"--plot={tmp_path / 'figures'}"]
    assert main([*options, *paths, f"--threads={torch.get_num_threads()}"]) == 0
    printed = capsys.readouterr().out
    assert "10% of the tokens" in printed and "40% of the tokens" in printed
    for name in similarity.KINDS.values():
        assert name in printed
    result = json.loads(out.read_text())
    assert "/" not in result["command"] and "--ratios 10,40" in result["command"]
    assert result["machine"]["cores"] and result["model"] == "model"
    assert 540 <= result["prefix_tokens"] <= 600
    assert (result["layers"], result["query_heads"], result["kv_heads"]) == (2, 6, 2)
    assert result["probe_query_heads"] == [0, 1, 2]
    assert [row["ratio"] for row in result["ratios"]] == [0.1, 0.4]
    for row in result["ratios"]:
        assert list(row["kinds"]) == list(similarity.KINDS)
        assert all(len(kind["layers"]) == 2 for kind in row["kinds"].values())
    figures = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert figures == [
        f"similarity-made-{what}.{kind}" for what in ("heads", "layers") for kind in ("png", "svg")
    ]
    assert all(path.stat().st_size > 5000 for path in (tmp_path / "figures").iterdir())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--dataset=made", "--prefix-tokens=2000"], "more than the model's 1024"),
        (["--dataset=made", "--layer=2"], "no layer 2"),
        (["--dataset=rte"], "no data set"),
    ],
)
def test_a_run_that_cannot_be_says_why(
    options: list[str],
    words: str,
    model_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    threads = f"--threads={torch.get_num_threads()}"
    assert main([f"--model={model_folder}", f"--data={tmp_path}", threads, *options]) == 1
    assert words in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("text", ["0", "10,120", "-5"])
def test_ratios_are_percentages(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([f"--ratios={text}"])
    assert "percentages" in capsys.readouterr().err


def test_probe_heads_are_those_that_share_the_probed_kv_heads() -> None:
    assert Heads(8, 4, (0, 2)).probe == [0, 1, 4, 5]
    assert Heads(8, 4, ()).group == 2
