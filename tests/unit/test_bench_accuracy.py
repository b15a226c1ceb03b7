"""Tasks, scores, intervals, checks and figures of `bench accuracy`, without servers."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from bench.core.servers import BenchFailed
from bench.quality import multi_head
from bench.quality import plots as quality_plots
from bench.quality import report as quality_report
from bench.quality import scores as quality_scores
from bench.quality.check import check_scores, loglik_of
from bench.quality.client import (
    Answer,
    Asked,
    check_path,
    generation_order,
    option_loglik,
    option_order,
    report_of,
)
from bench.quality.data import hub_datasets, read_rows
from bench.quality.formats import read_copa, read_gsm8k, read_openbookqa, read_piqa, read_rte
from bench.quality.merge import merge_results, read_results
from bench.quality.options import SYSTEMS, System, command_of, parse_arguments
from bench.quality.report import Measured, ModelSize
from bench.quality.tasks import SQUAD_SHOTS, TASKS, Item, Task, TaskOptions, make_task

OPTIONS = TaskOptions(prefixes=2, shots=5, prefix_tokens=None, passages=3, examples=8, seed=3)
SIZE = ModelSize(layers=2, kv_bytes_per_token=100)
EXACT = Asked("as", None, approximate=False)
QUARTER = Asked("paper", 0.25, approximate=True)


def tokenize(text: str) -> list[int]:
    """One token per character, so that token ids can be read."""
    return [ord(character) for character in text]


def text_of(ids: list[int]) -> str:
    return "".join(map(chr, ids))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data")
    rows: dict[str, list[dict[str, Any]]] = {
        "piqa": [
            {"goal": f"goal {i}", "sol1": f"one {i}", "sol2": f"two {i}", "label": i % 2}
            for i in range(60)
        ],
        "rte": [
            {
                "premise": f"Premise {i}.",
                "hypothesis": f"Hypothesis {i}.",
                "label": ("entailment", "not_entailment")[i % 2],
            }
            for i in range(60)
        ],
        "copa": [
            {
                "premise": f"Premise {i}.",
                "question": ("cause", "effect")[i % 2],
                "choice1": f"It was {i}.",
                "choice2": f"He was {i}.",
                "label": i % 2,
            }
            for i in range(60)
        ],
        "openbookqa": [
            {"question": f"stem {i}", "choices": [f"{c}{i}" for c in "abcd"], "label": i % 4}
            for i in range(60)
        ],
        "squad_xquad_en": [
            {"context": f"Passage {i // 3}.", "question": f"what {i}?", "answers": [f"Answer {i}"]}
            for i in range(60)
        ],
        "gsm8k": [
            {"question": f"How many {i}?", "answer": f"It is <<1+{i}=2>>{i}.\n#### {i}"}
            for i in range(60)
        ],
        "bbh": [
            {"task": f"task{i % 3}", "input": f"input {i}.", "target": str(i)} for i in range(60)
        ],
    }
    for name, lines in rows.items():
        (folder / name).mkdir()
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / name / "test.jsonl").write_text(text)
    prompts = [
        {"task": f"task{i}", "prompt": f"Prompt {i}. Q: input {i}. " + "So the answer is 1. " * 5}
        for i in range(3)
    ]
    (folder / "bbh" / "cot_prompts.jsonl").write_text(
        "".join(json.dumps(p) + "\n" for p in prompts)
    )
    return str(folder)


def report(**changed: Any) -> dict[str, Any]:
    return {
        "path": "ssd",
        "stored_tokens": 100,
        "loaded_tokens": 25,
        "approximate": True,
        "recomputed": False,
        "ssd_bytes": 4000,
        "ssd_needed_bytes": 2500,
        "layers_by_fallback": 1,
        **changed,
    }


def choice_task(items: int, name: str = "rte", **how: Any) -> Task:
    item = Item(0, [1], ([2], [3]), (4, 8), 0, ())
    return Task(name, [list(range(100))], [item] * items, **how)


def measured(asked: Asked, logliks: list[list[float]], name: str = "rte") -> Measured:
    answers = [Answer(pair, "", [report(), report(path="device")], 10.0) for pair in logliks]
    return quality_report.measure(asked, choice_task(len(logliks), name), answers)


@pytest.mark.parametrize("name", TASKS)
def test_tasks_have_questions_that_no_prefix_shows(data: str, name: str) -> None:
    task = make_task(name, data, tokenize, OPTIONS)
    assert len(task.items) == OPTIONS.examples
    assert len(task.prefixes) >= OPTIONS.prefixes
    for item in task.items:
        question = text_of(item.question)
        for prefix in task.prefixes:
            assert question not in text_of(prefix)
    assert [item.prefix for item in task.items] == sorted(item.prefix for item in task.items)


@pytest.mark.parametrize("name", TASKS)
def test_a_seed_gives_one_task(data: str, name: str) -> None:
    again = make_task(name, data, tokenize, OPTIONS)
    assert make_task(name, data, tokenize, OPTIONS) == again
    other = make_task(name, data, tokenize, dataclasses.replace(OPTIONS, seed=4))
    assert other != again


def test_prefixes_of_a_task_share_no_shots(data: str) -> None:
    first, second = (text_of(p) for p in make_task("piqa", data, tokenize, OPTIONS).prefixes)
    assert first.count("Question:") == second.count("Question:") == OPTIONS.shots
    assert not set(first.split("\n\n")[:-1]) & set(second.split("\n\n")[:-1])


def test_shots_are_added_until_the_prefix_is_long_enough(data: str) -> None:
    longer = dataclasses.replace(OPTIONS, prefix_tokens=500)
    for prefix in make_task("piqa", data, tokenize, longer).prefixes:
        assert 500 <= len(prefix) < 550
    with pytest.raises(BenchFailed, match="too few rows"):
        make_task("piqa", data, tokenize, dataclasses.replace(OPTIONS, prefix_tokens=5000))


def test_a_prefix_too_short_to_be_stored_is_refused(data: str) -> None:
    with pytest.raises(BenchFailed, match="more --shots"):
        make_task("piqa", data, tokenize, dataclasses.replace(OPTIONS, shots=1))


def test_squad_options_are_answers_on_the_same_passages(data: str) -> None:
    task = make_task("squad", data, tokenize, OPTIONS)
    generated = make_task("squad-f1", data, tokenize, OPTIONS)
    assert generated.generates
    for passages, prefix in zip(task.prefixes, generated.prefixes, strict=True):
        assert prefix[: len(passages)] == passages
        assert text_of(prefix[len(passages) :]).count("Question:") == SQUAD_SHOTS
    for item, other in zip(task.items, generated.items, strict=True):
        options = [text_of(list(option)) for option in item.options]
        assert len(set(options)) == 4
        number = text_of(item.question).split("what ")[1].split("?")[0]
        assert options[item.gold] == f" Answer {number}"
        assert other.question == item.question and other.options == ()
        assert other.references == (f"Answer {number}",)
        for option in options:
            passage = int(option.split()[1]) // 3
            assert f"Passage {passage}." in text_of(task.prefixes[item.prefix])


def test_formats_and_gold_options() -> None:
    piqa = read_piqa({"goal": "g", "sol1": "x", "sol2": "y", "label": 1})
    assert piqa.shot == "Question: g\nAnswer: y"
    rte = read_rte({"premise": "P.", "hypothesis": "H.", "label": "entailment"})
    assert rte.shot == "P.\nQuestion: H. True or False?\nAnswer: True"
    row = {"premise": "It fell.", "choice1": "A b.", "choice2": "C d.", "label": 1}
    assert read_copa({**row, "question": "cause"}).shot == "It fell because c d."
    assert read_copa({**row, "question": "effect"}).text == "It fell therefore"
    book = read_openbookqa({"question": "q", "choices": list("abcd"), "label": 2})
    assert book.shot == "Question: q\nAnswer: c"
    gsm = read_gsm8k({"question": "q", "answer": "1+1=<<1+1=2>>2\n#### 2"})
    assert gsm.shot == "Question: q\nAnswer: 1+1=2 The answer is 2." and gsm.references == ("2",)


def test_data_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchFailed, match="no data set 'rte'"):
        read_rows(str(tmp_path), "rte")


HUB_ROWS: dict[str, dict[str, Any]] = {
    "ybisk/piqa": {"goal": "g", "sol1": "a", "sol2": "b", "label": 1},
    "allenai/openbookqa": {
        "question_stem": "q",
        "choices": {"text": ["x", "y"], "label": ["A", "B"]},
        "answerKey": "B",
    },
    "rajpurkar/squad": {"context": "c", "question": "q", "answers": {"text": ["a"], "start": [1]}},
    "aps/super_glue": {"premise": "p", "hypothesis": "h", "label": 1, "idx": 0},
}


def test_rows_of_the_hub_are_like_those_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(name: str, config: str | None, split: str) -> list[dict[str, Any]]:
        assert split and (config is None) == (name in ("ybisk/piqa", "rajpurkar/squad"))
        return [HUB_ROWS[name]]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert read_rows("hf:ybisk/piqa", "piqa") == [HUB_ROWS["ybisk/piqa"]]
    (rte,) = read_rows("hf:super_glue", "rte")
    assert rte["label"] == "not_entailment"
    (book,) = read_rows("hf:all", "openbookqa")
    assert book == {"question": "q", "choices": ["x", "y"], "label": 1}
    (squad,) = read_rows("hf:all", "squad_xquad_en")
    assert squad["answers"] == ["a"]
    assert hub_datasets("hf:super_glue") == ["rte", "copa"]
    with pytest.raises(BenchFailed, match="has no piqa"):
        read_rows("hf:openbookqa", "piqa")


def test_a_hub_that_cannot_be_used_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise ConnectionError("no network")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=offline))
    with pytest.raises(BenchFailed, match="no network"):
        read_rows("hf:all", "piqa")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(BenchFailed, match="pip install datasets"):
        read_rows("hf:all", "piqa")


def test_orders_ask_for_the_options_tokens_only() -> None:
    item = Item(0, [7, 8], ([5], [6, 9]), (1, 2), 0, ())
    order = option_order([1, 2, 3], item, item.options[1], QUARTER)
    assert order["input_ids"] == [1, 2, 3, 7, 8, 6, 9]
    assert order["logprob_start_len"] == 4
    asked = {"impress_retention": 0.25}
    assert order["sampling_params"]["custom_params"] == asked
    assert "custom_params" not in option_order([1], item, [5], EXACT)["sampling_params"]
    order = generation_order([1, 2, 3], item, EXACT, 16, ("\n",))
    assert order["input_ids"] == [1, 2, 3, 7, 8]
    assert order["sampling_params"] == {"temperature": 0, "max_new_tokens": 16, "stop": ["\n"]}


def test_an_options_score_is_the_sum_over_its_tokens() -> None:
    meta = {"input_token_logprobs": [[None, 8, None], [-1.5, 6, None], [-0.25, 9, None]]}
    assert option_loglik(meta, [6, 9]) == -1.75
    with pytest.raises(BenchFailed, match="log-probabilities"):
        option_loglik(meta, [9])
    meta["input_token_logprobs"][1][0] = float("-inf")
    with pytest.raises(BenchFailed, match="sum up to"):
        option_loglik(meta, [6, 9])


def test_approximate_answers_must_come_from_ssd_with_the_tokens_asked_for() -> None:
    check_path(report(), 100, QUARTER)
    check_path(report(stored_tokens=101, loaded_tokens=26), 100, QUARTER)
    check_path(report(stored_tokens=30, loaded_tokens=3), 30, Asked("paper", 0.1, True))
    for wrong in (
        report(path="device"),
        report(path="computed", stored_tokens=0, loaded_tokens=0),
        report(loaded_tokens=100),
        report(stored_tokens=64, loaded_tokens=16),
        report(recomputed=True),
    ):
        with pytest.raises(BenchFailed, match="paper"):
            check_path(wrong, 100, QUARTER)


def test_exact_answers_must_not_use_a_part() -> None:
    check_path(report(path="device", loaded_tokens=0, approximate=False), 100, EXACT)
    check_path(report(loaded_tokens=100, approximate=False), 100, EXACT)
    for wrong in (report(), report(approximate=False)):
        with pytest.raises(BenchFailed, match="inexactly"):
            check_path(wrong, 100, EXACT)


def test_a_server_without_the_extension_is_noticed() -> None:
    with pytest.raises(BenchFailed, match="extension"):
        report_of({"id": "x"})


def test_long_options_are_not_punished_where_scores_are_per_byte() -> None:
    item = choice_task(1).items[0]
    assert quality_scores.chosen_option(choice_task(1), item, [-4.0, -6.0]) == 0
    assert quality_scores.chosen_option(choice_task(1, normalised=True), item, [-4.0, -6.0]) == 1


@pytest.mark.parametrize(
    ("text", "reference", "f1", "same"),
    [
        ("The Cat!", "a cat", 1.0, True),
        ("the black cat", "cat", 2 / 3, False),
        ("dog", "cat", 0.0, False),
        ("", "cat", 0.0, False),
        ("cat cat", "cat", 2 / 3, False),
    ],
)
def test_squad_scores(text: str, reference: str, f1: float, same: bool) -> None:
    assert quality_scores.f1(text, reference) == pytest.approx(f1)
    assert quality_scores.same_text(text, reference) is same


def test_answers_at_the_end_of_a_chain_of_thought() -> None:
    assert quality_scores.final_answer("So. So the answer is (A).\nQ:") == "(A)"
    assert quality_scores.final_answer("The answer is 12.") == "12"
    assert quality_scores.final_answer("no idea") == ""
    assert quality_scores.last_number("1 and then $1,234.5.") == 1234.5
    assert quality_scores.last_number("none") is None


@pytest.mark.parametrize(
    ("name", "text", "value", "exact"),
    [
        ("squad-f1", "black cat", 2 / 3, False),
        ("bbh", "So the answer is cat.", 1.0, True),
        ("bbh", "cat", 0.0, False),
    ],
)
def test_generated_answers_are_scored(name: str, text: str, value: float, exact: bool) -> None:
    item = Item(0, [1], (), (), -1, ("dog", "cat") if name == "squad-f1" else ("cat",))
    scored = quality_scores.score(
        Task(name, [[1]], [item], new_tokens=4), item, Answer([], text, [], 0.0)
    )
    assert (scored.value, scored.exact, scored.choice) == (pytest.approx(value), exact, text)


def test_intervals_of_values_that_do_not_vary_have_no_width() -> None:
    assert quality_scores.mean_interval([np.zeros(20)], 1) == (0, 0)
    assert quality_scores.mean_interval([np.full(20, -100.0), np.zeros(10)], 1) == (-50, -50)


def test_intervals_are_those_of_the_normal_distribution() -> None:
    values = np.array([0.0, 1.0] * 200)
    low, high = quality_scores.mean_interval([values], 1)
    assert (low, high) == pytest.approx((0.5 - 1.96 * 0.025, 0.5 + 1.96 * 0.025), abs=0.004)
    assert quality_scores.mean_interval([values], 1) == (low, high)
    # Two tasks of the same size: the mean over both varies less, by the square root of two.
    both = quality_scores.mean_interval([values, values], 1)
    assert both[1] - both[0] == pytest.approx((high - low) / 2**0.5, rel=0.06)


def test_shift_does_not_see_what_all_options_gain() -> None:
    shift = quality_scores.centred_shift
    assert shift([[-1.0, -2.0]], [[-4.0, -5.0]]) == 0
    assert shift([[-1.0, -2.0], [0.0, 0.0]], [[-2.0, -2.0], [0.0, 0.0]]) == 0.25


REFERENCE_LOGLIKS = [[-1.0, -2.0]] * 6 + [[-2.0, -1.0]] * 2


def rows_of(*names: str) -> list[dict[str, Any]]:
    runs = []
    for name in names or ("rte",):
        runs += [
            measured(Asked("recompute", None, False), REFERENCE_LOGLIKS, name),
            measured(QUARTER, [[-1.0, -2.0]] * 8, name),
            measured(Asked("random", 0.25, True), [[-2.0, -1.0]] * 8, name),
        ]
    return quality_report.make_rows(runs, SIZE, 1)


def test_figures_of_a_row() -> None:
    reference, paper, random = rows_of()
    assert (reference["accuracy"], paper["accuracy"], random["accuracy"]) == (0.75, 1, 0)
    assert reference["difference_points_interval"] == [0, 0]
    assert reference["agreement"] == 1 and reference["shift_nats"] == 0
    assert paper["difference_points"] == 25
    assert paper["difference_points_interval"][0] <= 0 < paper["difference_points_interval"][1]
    assert (paper["agreement"], random["agreement"]) == (0.75, 0.25)
    assert paper["agreement_over_random_points"] == 50
    assert "agreement_over_random_points" not in random
    assert paper["shift_nats"] == 0.25
    assert (paper["read"], paper["needed"]) == (0.4, 0.25)
    assert paper["fallback_share"] == 0.5
    assert json.loads(json.dumps(paper)) == paper


def test_bytes_of_requests_that_found_the_prefix_on_the_device_do_not_count() -> None:
    run = measured(QUARTER, [[-1.0, -2.0]])
    assert quality_report.byte_shares(run, SIZE, "ssd_bytes") == 0.4
    run.answers[0].reports.pop(0)
    assert quality_report.byte_shares(run, SIZE, "ssd_bytes") is None


def test_the_mean_row_is_over_the_papers_tasks() -> None:
    rows = rows_of("piqa", "rte", "copa", "openbookqa", "squad")
    mean = rows[-2]
    assert (mean["system"], mean["task"], mean["n"]) == ("paper", "paper-4", 32)
    assert mean["difference_points"] == 25
    alone = next(row for row in rows if row["system"] == "paper")
    width = [row["difference_points_interval"] for row in (alone, mean)]
    assert width[1][1] - width[1][0] < width[0][1] - width[0][0]
    assert rows_of("rte", "squad")[-1]["task"] == "mean"


def test_every_answer_is_in_the_result() -> None:
    (found,) = quality_report.answers_of([measured(QUARTER, [[-1.0, -2.0], [-3.0, -1.0]])])
    assert found["choices"] == [0, 1] and found["scores"] == [1, 0]
    assert found["logliks"] == [[-1.0, -2.0], [-3.0, -1.0]]


def test_table_has_a_line_per_row() -> None:
    out = io.StringIO()
    Console(file=out, width=200).print(quality_report.make_table(rows_of(), "a caption"))
    assert "+25.0 [" in out.getvalue() and "a caption" in out.getvalue()
    assert all(name in out.getvalue() for name in ("recompute", "paper", "random"))


def test_figures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [measured(Asked("recompute", None, False), REFERENCE_LOGLIKS)]
    systems = {"recompute": ["--impress-policy=recompute"]}
    for alpha in ("0.3", "0.6"):
        systems[f"a{alpha}"] = ["--impress-policy=paper", f"--impress-alpha={alpha}"]
        for kept in (0.25, 0.5):
            runs.append(measured(Asked(f"a{alpha}", kept, True), REFERENCE_LOGLIKS))
    rows = quality_report.make_rows(runs, SIZE, 1)
    files = quality_plots.write_figures(rows, systems, tmp_path / "figures")
    assert {file.stem for file in files} == {
        "figure15-accuracy",
        "figure19-loaded",
        "accuracy-over-bytes",
        "agreement-over-bytes",
        "accuracy-over-needed-bytes",
        "agreement-over-needed-bytes",
        "figure11-22-alpha",
    }
    for file in files:
        content = file.read_bytes()
        assert content.startswith(b"\x89PNG") or b"<svg" in content


def test_only_flags_that_alone_differ_are_drawn_against() -> None:
    systems = {
        "a": ["--impress-policy=paper", "--impress-alpha=0.3"],
        "b": ["--impress-policy=paper", "--impress-alpha=0.6"],
        "c": ["--impress-policy=impress", "--impress-chunk-tokens=32"],
    }
    assert quality_plots.varied_flags(systems) == {"alpha": {"a": 0.3, "b": 0.6}}


def test_systems_and_their_flags() -> None:
    assert [name for name, flags in SYSTEMS.items() if System(name, flags).exact] == [
        "recompute",
        "as",
    ]
    flags = System("paper", SYSTEMS["paper"]).server_flags(Path("kv"), ["--impress-alpha=0.3"])
    assert "--impress-ssd-dir=kv" in flags and "--impress-approximation-depth=0" in flags
    assert flags[-1] == "--impress-alpha=0.3"


def test_more_systems_and_the_recorded_command() -> None:
    args = parse_arguments(
        None,
        [
            "--quick",
            "--data=/a/b",
            "--json=/c",
            "--systems=paper",
            "--system=a3=--impress-policy=paper,--impress-alpha=0.3",
            "--retentions=1,0.1",
        ],
    )
    assert [system.name for system in args.systems] == ["recompute", "paper", "a3"]
    assert args.systems[-1].flags == ("--impress-policy=paper", "--impress-alpha=0.3")
    assert args.retentions == [0.1, 1.0]
    command = command_of(args)
    assert "/" not in command
    assert "--systems recompute,paper " in command and "--retentions 0.1,1.0" in command
    assert "--system=a3=--impress-policy=paper,--impress-alpha=0.3" in command


def test_data_of_the_hub_decides_the_default_tasks() -> None:
    assert parse_arguments(None, ["--data=hf:super_glue"]).tasks == ["rte", "copa"]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model_class: Any = LlamaForCausalLM
    model = model_class(
        LlamaConfig(
            vocab_size=64,
            hidden_size=48,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=2,
        )
    )
    folder = tmp_path_factory.mktemp("models") / "tiny"
    model.save_pretrained(folder)
    return folder


def load(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    return model.eval()


def test_the_multi_head_form_computes_the_same(tiny_model: Path) -> None:
    import torch

    converted = multi_head.multi_head_form(tiny_model)
    assert converted.parent == tiny_model.parent
    ids = torch.randint(0, 64, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected, logits = load(tiny_model)(ids).logits, load(converted)(ids).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)
    # 3 times the KVs of 2 layers with 2 heads of 8.
    assert multi_head.kv_bytes_per_token(tiny_model, "float32") == 2 * 2 * 2 * 8 * 4
    assert multi_head.kv_bytes_per_token(converted, "bfloat16") == 2 * 2 * 6 * 8 * 2


def test_the_multi_head_form_is_written_once(tiny_model: Path) -> None:
    converted = multi_head.multi_head_form(tiny_model)
    (converted / "mark").touch()
    assert multi_head.multi_head_form(tiny_model) == converted
    assert (converted / "mark").exists()
    assert multi_head.multi_head_form(converted) == converted


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchFailed, match="no folder of a model"):
        multi_head.multi_head_form(tmp_path)


def test_scores_are_compared_with_transformers(tiny_model: Path) -> None:
    item = Item(0, [9, 10], ([11], [12, 13]), (1, 2), 0, ())
    task = Task("rte", [[3, 4, 5]], [item])
    model = load(tiny_model)
    logliks = [loglik_of(model, [3, 4, 5, 9, 10], option) for option in item.options]
    # The second option token by token.
    steps = loglik_of(model, [3, 4, 5, 9, 10], [12]) + loglik_of(model, [3, 4, 5, 9, 10, 12], [13])
    assert logliks[1] == pytest.approx(steps)
    given = Answer(logliks, "", [], 0.0)
    assert check_scores(tiny_model, "float32", [(task, [given])], 1) < 1e-4
    wrong = Answer([logliks[0], logliks[1] + 0.5], "", [], 0.0)
    with pytest.raises(BenchFailed, match="differ from transformers"):
        check_scores(tiny_model, "float32", [(task, [wrong])], 1)


def result_of(systems: list[str]) -> dict[str, Any]:
    """What a run writes, as far as joining looks at it."""
    rows = [{"system": name, "retention": 0.25, "task": "copa", "n": 4} for name in systems]
    return {
        "command": f"run {systems}",
        "machine": {},
        "model": "tiny",
        "kv_heads": 3,
        "kv_bytes_per_token": 100,
        "seconds": 7,
        "max_nats_from_transformers": None,
        "options": {},
        "systems": {name: [f"--{name}"] for name in systems},
        "tasks": [{"name": "copa", "gold": [0, 1, 0, 1]}],
        "rows": rows,
        "answers": rows,
    }


def test_runs_are_joined_and_the_reference_is_taken_once() -> None:
    runs = [result_of(["recompute", "impress"]), result_of(["recompute", "paper"])]
    joined = merge_results([runs[0], {**runs[1], "max_nats_from_transformers": 1e-5}])
    assert [row["system"] for row in joined["rows"]] == ["recompute", "impress", "paper"]
    assert list(joined["systems"]) == ["recompute", "impress", "paper"]
    assert joined["seconds"] == 14 and joined["max_nats_from_transformers"] == 1e-5
    assert len(joined["command"]) == 2 and len(joined["tasks"]) == 1


def test_means_of_different_tasks_are_not_joined() -> None:
    mean = {"system": "recompute", "retention": 1.0, "task": "mean", "n": 8}
    copa, rte = result_of(["recompute"]), result_of(["recompute"])
    copa["rows"] = [*copa["rows"], mean]
    rte["rows"] = [{**row, "task": "rte"} for row in rte["rows"]] + [{**mean, "n": 9}]
    rte["tasks"] = [{"name": "rte", "gold": [1]}]
    assert mean in merge_results([copa, copa])["rows"]
    assert [row["task"] for row in merge_results([copa, rte])["rows"]] == ["copa", "rte"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "other"}, "differ in model"),
        ({"kv_heads": 9}, "differ in kv_heads"),
        ({"tasks": [{"name": "copa", "gold": [1, 1, 0, 1]}]}, "task copa"),
        ({"systems": {"recompute": ["--x"]}}, "system recompute"),
    ],
)
def test_runs_that_do_not_belong_together_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(BenchFailed, match=message):
        merge_results([result_of(["recompute"]), {**result_of(["recompute"]), **changes}])


def test_a_file_that_is_no_result_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(BenchFailed, match=r"bad\.json"):
        read_results([tmp_path / "bad.json"])
