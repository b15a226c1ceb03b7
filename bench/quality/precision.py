"""What few bits of a prefix do to what a model says after it, without a server.

The model computes each prefix exactly, its KVs are rounded by a rule, and the model goes on from
there, for each question or text by itself. Rules, and the bits of their names per element:

    coded 5      as the store codes prefixes without a basis
    basis 4      by the basis of --basis at this rate, which `impress calibrate` made

The first tokens of a prefix, which are attention sinks, stay exact.

bytes     of codes and ranges, over those in 16 bits
KL        of the next tokens' distributions, of text that follows prefixes of wikitext2, or of the
          files of --text, each of one kind, in nats; its first tokens, a question, do not count

What it does to answers to questions is in `python -m bench accuracy`.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.core.data import load_tokenize, model_folder, read_rows
from bench.core.options import DATA, MODEL, Option
from bench.core.report import Result, Row, Table
from bench.core.session import BenchFailed, step
from impress_sglang.cli.calibrate import KVs, Prompts, coded_kvs
from impress_sglang.codes.groups import slots
from impress_sglang.codes.groups.codec import GROUP_TOKENS, GroupLayout, encode_layer
from impress_sglang.codes.groups.energy import MEASURED_QUERIES
from impress_sglang.codes.rows.basis import RATES, Basis
from impress_sglang.codes.rows.fit import SINK_TOKENS
from impress_sglang.config import BITS

# Of the text that follows, what is the question.
QUESTION_TOKENS = 24


class Rule(NamedTuple):
    """How KVs are rounded, and bits per element."""

    kind: str
    bits: float

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Read `KIND BITS`."""
        kind, bits = text.split()
        return cls(kind, float(bits))

    def __str__(self) -> str:
        return f"{self.kind} {self.bits:g}"


OPTIONS = (
    Option(
        "rules",
        tuple(Rule("coded", bits) for bits in BITS),
        "coded or basis, with bits",
        quick=(Rule("coded", BITS[0]),),
        parse=Rule.parse,
    ),
    Option("prefixes", 5, "of each text", quick=1),
    Option("prefix-tokens", 1500, "of text", quick=300),
    Option("follow-tokens", 144, "of the text that follows; 24 of them do not count", quick=40),
    Option("seed", 5, "draws prefixes"),
    Option("text", (), "files of text, each of one kind, in place of wikitext2", parse=Path),
    DATA,
    MODEL,
    Option("basis", (), "files of bases for rules `basis`", parse=Path),
)


def run(args: argparse.Namespace) -> Result:
    """Measure all rules."""
    torch.set_grad_enabled(False)
    folder = model_folder(args.model)
    rates = (basis.keeping(bits) for basis in map(Basis.load, args.basis) for bits in RATES)
    bases = {round(basis.rate, 2): basis for basis in rates}
    known = {*(Rule("coded", bits) for bits in BITS), *(Rule("basis", rate) for rate in bases)}
    if unknown := {*args.rules} - known:
        raise BenchFailed(f"no rule {', '.join(map(str, unknown))}; --basis gives its rates")
    reader = Reader(folder, bases)
    with step("text"):
        found = divergences(args, folder, reader)
    rows: list[Row] = [
        {
            "rule": str(rule),
            "bytes": reader.bytes_of(rule),
            "KL": round(statistics.fmean(means[rule] for means in found.values()), 5),
            "KL_of": {kind: round(means[rule], 5) for kind, means in found.items()},
        }
        for rule in args.rules
    ]
    shown = Table(rows, ("rule", "bytes", "KL", "KL_of"), folder.name)
    return Result({"model": folder.name, "rows": rows}, [shown])


class Reader:
    """A model that reads on behind prefixes whose KVs were rounded."""

    def __init__(self, folder: Path, bases: Mapping[float, Basis]) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.masking_utils import sdpa_mask

        def attend(module: Any, query: Tensor, *more: Any, **how: Any) -> Any:
            self._queries.append(query[0, :, -MEASURED_QUERIES:])
            return sdpa_attention_forward(module, query, *more, **how)

        AttentionInterface.register("noting", attend)
        AttentionMaskInterface.register("noting", sdpa_mask)
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="noting"
        ).eval()
        self._prompts, self._bases = Prompts(self.model), bases
        # Of each layer of the last pass, those of its last tokens, [Hq, n, D].
        self._queries: list[Tensor] = []
        self._sizes = 0, 0, 0

    def prefix(self, tokens: Sequence[int]) -> tuple[KVs, list[Tensor]]:
        """Keys and values of each layer of a prefix, [m, G, D], and the mean square of its last
        queries in each channel of a KV head, [G, D]."""
        cache, _ = self._read((), tokens)
        kvs = [
            (layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1))
            for layer in cache.layers
        ]
        heads, key_dim, value_dim = *kvs[0][0].shape[1:], kvs[0][1].shape[2]
        self._sizes = heads, key_dim, value_dim
        return kvs, [
            queries.unflatten(0, (heads, -1)).square().mean((1, 2)) for queries in self._queries
        ]

    def rounded(self, rule: Rule, kvs: KVs, energies: Sequence[Tensor]) -> KVs:
        """What KVs of a prefix are restored to by a rule; sinks are exact."""
        if rule.kind == "basis":
            rotated = [(self._prompts.rotated(keys, back=True), values) for keys, values in kvs]
            found = coded_kvs(self._bases[rule.bits], rotated)
            return [(self._prompts.rotated(keys, back=False), values) for keys, values in found]
        found, bits = [], int(rule.bits)
        for (keys, values), energy in zip(kvs, energies, strict=True):
            layout = GroupLayout(*keys.shape[1:], values.shape[2], bits)
            restored = torch.empty_like(keys), torch.empty_like(values)
            groups = encode_layer(layout, keys, values, energy)
            slots.restore(layout, groups, 0, torch.arange(len(keys)), *restored)
            for left, right in zip(restored, (keys, values), strict=True):
                left[:SINK_TOKENS] = right[:SINK_TOKENS]
            found.append(restored)
        return found

    def follow(self, kvs: KVs, tokens: Sequence[int]) -> Tensor:
        """Log-probabilities of the tokens behind each of these, [n, vocabulary]."""
        return self._read(kvs, tokens)[1][0].log_softmax(-1)

    def bytes_of(self, rule: Rule) -> float:
        """Bytes of a whole group of tokens, over those in 16 bits."""
        if rule.kind == "basis":
            basis = self._bases[rule.bits]
            features = sum(heads * dim for heads, dim in basis.shapes) * basis.num_layers
            return round(basis.token_bytes / (2 * features), 4)
        heads, key_dim, value_dim = self._sizes
        elements = GROUP_TOKENS * heads * (key_dim + value_dim)
        return round(GroupLayout(*self._sizes, int(rule.bits)).group_bytes / (2 * elements), 4)

    def _read(self, kvs: KVs | tuple[()], tokens: Sequence[int]) -> tuple[Any, Tensor]:
        from transformers import DynamicCache

        self._queries.clear()
        cache = DynamicCache()
        for layer, rows in enumerate(kvs):
            keys, values = (one.transpose(0, 1)[None].contiguous() for one in rows)
            cache.update(keys, values, layer)
        return cache, self.model(torch.tensor([list(tokens)]), past_key_values=cache).logits


def divergences(
    args: argparse.Namespace, folder: Path, reader: Reader
) -> dict[str, dict[Rule, float]]:
    """Of each kind of text the mean divergence of each rule."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in args.text}
    if not texts:
        texts["wikitext2"] = "\n".join(row["text"] for row in read_rows(args.data, "wikitext2"))
    tokenize, means = load_tokenize(folder), {}
    length = args.prefix_tokens + args.follow_tokens
    for kind, whole in texts.items():
        tokens = tokenize(whole)
        if len(tokens) < length:
            raise BenchFailed(f"{kind} has only {len(tokens)} tokens; give more of it")
        found: dict[Rule, list[float]] = {rule: [] for rule in args.rules}
        rng = random.Random(args.seed)
        for _ in range(args.prefixes):
            start = rng.randrange(len(tokens) - length + 1)
            kvs, energies = reader.prefix(tokens[start:][: args.prefix_tokens])
            text = tokens[start + args.prefix_tokens : start + length]
            exact = reader.follow(kvs, text)[QUESTION_TOKENS:]
            for rule, losses in found.items():
                other = reader.follow(reader.rounded(rule, kvs, energies), text)[QUESTION_TOKENS:]
                losses.append(float((exact.exp() * (exact - other)).sum(-1).mean()))
        means[kind] = {rule: statistics.fmean(losses) for rule, losses in found.items()}
    return means
