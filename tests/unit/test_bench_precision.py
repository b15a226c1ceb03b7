"""The benchmark of precision rounds what it says, and a model reads on behind that."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from bench.quality.precision import Reader, Rule
from impress_sglang.cli.calibrate import KVs, Prompts, calibrated
from impress_sglang.codes.rows.basis import Basis
from tests.serving.tiny_models import make_model, random_tokens

RULES = ("coded 5", "coded 6", "basis 4")
PREFIX, TEXT = random_tokens(200, seed=1), random_tokens(30, seed=2)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    folder = Path(tmp_path_factory.mktemp("model"))
    with torch.no_grad():
        return Reader(make_model("llama", folder), {4.0: fitted_to(folder)})


def fitted_to(folder: Path) -> Basis:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts = {str(seed): random_tokens(400, seed=seed) for seed in range(30, 34)}
    with torch.enable_grad():
        return calibrated(Prompts(model), texts)[0][0]


def read(reader: Reader, rule: str) -> tuple[KVs, Tensor]:
    """What a rule makes of the prefix, and what is read behind it."""
    with torch.no_grad():
        kvs = reader.rounded(Rule.parse(rule), *reader.prefix(PREFIX))
        return kvs, reader.follow(kvs, TEXT)


def divergence(reader: Reader, rule: str) -> float:
    exact, found = exactly(reader), read(reader, rule)[1]
    return float((exact.exp() * (exact - found)).sum(-1).mean())


def exactly(reader: Reader) -> Tensor:
    with torch.no_grad():
        return reader.follow(reader.prefix(PREFIX)[0], TEXT)


def test_behind_exact_kvs_it_reads_as_in_one_pass(reader: Reader) -> None:
    with torch.no_grad():
        whole = reader.model(torch.tensor([[*PREFIX, *TEXT]])).logits[0, len(PREFIX) :]
    torch.testing.assert_close(exactly(reader), whole.log_softmax(-1), rtol=0, atol=1e-3)


def test_more_bits_are_nearer(reader: Reader) -> None:
    found = {rule: divergence(reader, rule) for rule in RULES}
    assert 0 <= found["coded 6"] < found["coded 5"] and 0 < found["basis 4"] < found["coded 5"] * 9
