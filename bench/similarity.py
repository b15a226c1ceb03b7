"""How alike the important tokens of heads are: the paper's Figures 7(b) and 8 for any model.

    python -m bench.similarity
    python -m bench.similarity --dataset rte --questions 10 --json run.json --plot figures

A prefix is computed once; each question about it gives every query head a score per prefix token
(column sums of the attention weights). The share `--ratios` of a head's tokens with the highest
scores is its important set, and the Jaccard index says how alike two sets are. It is compared with
what two random sets have (j) and with the threshold that IMPRESS asks of its probe heads
(j**alpha). No server runs. With a data set of passages the prefix is passages and the questions are
about them; otherwise it is examples, and the questions are others of the same kind.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench import plots, similarity_plots
from bench.attention_lab import AttentionLab, compute_prefix, question_scores
from bench.comparison import step
from bench.examples import (
    MADE,
    READERS,
    SEPARATOR,
    Example,
    TraceError,
    make_examples,
    read_examples,
)
from bench.machine import describe_machine
from bench.servers import BenchFailed
from bench.serving_options import DEFAULT_DATA
from bench.session import Tokenize, tokenize_with
from demo.model import DemoModelMissing, model_path
from impress_sglang.importance.identify import probe_kv_heads
from impress_sglang.importance.selection import (
    mean_jaccard,
    retained_tokens,
    similarity_threshold,
    top_tokens,
)

# What is compared, and what the tables call it.
KINDS = {
    "all": "all query heads",
    "within": "within a KV group",
    "across": "across groups",
    "kv_heads": "KV heads, summed",
    "probe": "probe heads",
    "questions": "one query head, two questions",
    "questions_kv": "one KV head, two questions",
}
# A prefix may be shorter than asked by this share of it.
_SHORTFALL = 0.1
# What of the options makes a result; the others are paths.
_RECORDED = (
    "dataset",
    "prefix_tokens",
    "questions",
    "seed",
    "alpha",
    "probe_heads",
    "ratios",
    "threads",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Material:
    """Tokens of a prefix and of the questions that follow it."""

    prefix: list[int]
    questions: list[list[int]]


@dataclasses.dataclass(frozen=True, slots=True)
class Heads:
    """Query heads, KV heads, and the KV heads that are probed."""

    query: int
    kv: int
    probe_kv: tuple[int, ...]

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.query // self.kv

    @property
    def probe(self) -> list[int]:
        """The query heads that share the probed KV heads."""
        return [kv * self.group + i for kv in self.probe_kv for i in range(self.group)]


@dataclasses.dataclass(frozen=True, slots=True)
class Similarity:
    """How alike the sets are at one ratio.

    Attributes:
        ratio: share of the tokens that a set has.
        k: tokens of a set.
        random: expected Jaccard index of two random sets of k tokens.
        threshold: `random ** alpha`.
        values: for each of `KINDS`, float32 [L, N] mean Jaccard indices by layer, and by question
            (or pair of questions); absent where the model or the run has no such pairs.
        heads: float32 [L, Hq, Hq], Jaccard index of each pair of heads, mean over questions.
    """

    ratio: float
    k: int
    random: float
    threshold: float
    values: dict[str, Tensor]
    heads: Tensor

    def as_dict(self) -> dict[str, Any]:
        """For the JSON: means, shares of (layer, question) pairs above the threshold, layers."""
        return {
            "ratio": self.ratio,
            "k": self.k,
            "random": round(self.random, 4),
            "threshold": round(self.threshold, 4),
            "kinds": {kind: self._summary(kind) for kind in self.values},
        }

    def by_layer(self, kind: str) -> list[float]:
        """Mean Jaccard index of each layer."""
        means: list[float] = self.values[kind].mean(1).tolist()
        return means

    def _summary(self, kind: str) -> dict[str, Any]:
        values = self.values[kind]
        return {
            "mean": round(float(values.mean()), 4),
            "share_above": round(float((values > self.threshold).float().mean()), 4),
            "layers": [round(value, 4) for value in self.by_layer(kind)],
        }


def make_material(
    examples: Sequence[Example], tokenizer: Any, prefix_tokens: int, questions: int, seed: int
) -> Material:
    """Draw a prefix of at most `prefix_tokens` tokens, and questions.

    Examples with a context give a prefix of contexts and questions about them; others give a prefix
    of whole examples, and questions of examples that it does not show.

    Raises:
        TraceError: there are too few examples.
    """
    shuffled = list(examples)
    random.Random(f"similarity {seed}").shuffle(shuffled)
    if any(example.context for example in examples):
        pieces = list(dict.fromkeys(example.context.strip() for example in shuffled))
    else:
        pieces = [example.shot for example in shuffled[questions:]]

    tokenize = tokenize_with(tokenizer)
    chosen, prefix = _fill(pieces, tokenize, tokenizer("")["input_ids"], prefix_tokens)
    if any(example.context for example in examples):
        asked = [example for example in shuffled if example.context.strip() in chosen]
    else:
        asked = shuffled[:questions]
    if len(asked) < questions:
        raise TraceError(f"there are {len(asked)} questions about the prefix, not {questions}")
    return Material(prefix, [tokenize(SEPARATOR + e.question) for e in asked[:questions]])


def _fill(
    pieces: Sequence[str], tokenize: Tokenize, start: list[int], length: int
) -> tuple[set[str], list[int]]:
    """The pieces that fit into `length` tokens, in their order, and their tokens."""
    chosen: set[str] = set()
    tokens = list(start)
    for piece in pieces:
        more = tokenize(SEPARATOR + piece if chosen else piece)
        if len(tokens) + len(more) <= length:
            chosen.add(piece)
            tokens += more
    if len(tokens) < (1 - _SHORTFALL) * length:
        raise TraceError(f"there is text for a prefix of {len(tokens)} tokens, not {length}")
    return chosen, tokens


def measure(scores: Tensor, heads: Heads, ratio: float, alpha: float) -> Similarity:
    """Compare the important sets of heads.

    Args:
        scores: [Q, L, Hq, m], importance of each prefix token for each question.
        heads: the model's.
        ratio: share of the tokens in a set.
        alpha: exponent of the threshold.

    Returns:
        The values of all kinds of pairs that there are.
    """
    num_questions, num_layers, _, num_tokens = scores.shape
    k = retained_tokens(num_tokens, ratio)
    kv_scores = scores.unflatten(2, (heads.kv, heads.group)).sum(3)
    sets, kv_sets = top_tokens(scores, k), top_tokens(kv_scores, k)
    matrices = torch.stack(
        [
            torch.stack([jaccard_matrix(sets[q, layer], num_tokens) for q in range(num_questions)])
            for layer in range(num_layers)
        ]
    )
    values = {
        kind: matrices[..., pairs[:, 0], pairs[:, 1]].mean(-1)
        for kind, pairs in _pairs(heads).items()
        if len(pairs)
    }
    if heads.kv > 1:
        values["kv_heads"] = _means(kv_sets, num_tokens)
    if len(heads.probe) > 1:
        values["probe"] = _means(sets[:, :, heads.probe], num_tokens)
    if num_questions > 1:
        values["questions"] = _question_pairs(sets, num_tokens)
        values["questions_kv"] = _question_pairs(kv_sets, num_tokens)
    return Similarity(
        ratio,
        k,
        similarity_threshold(k, num_tokens, 1.0),
        similarity_threshold(k, num_tokens, alpha),
        {kind: values[kind] for kind in KINDS if kind in values},
        matrices.mean(1),
    )


def jaccard_matrix(token_sets: Tensor, num_tokens: int) -> Tensor:
    """Jaccard index of each two rows of int64 [H, k] index sets: float32 [H, H]."""
    num_sets, k = token_sets.shape
    members = torch.zeros(num_sets, num_tokens).scatter_(1, token_sets, 1.0)
    common = members @ members.T
    return common / (2 * k - common)


def _pairs(heads: Heads) -> dict[str, Tensor]:
    """Pairs of query heads, int64 [P, 2]: all, of one KV group, of two."""
    pairs = torch.combinations(torch.arange(heads.query))
    same = pairs[:, 0] // heads.group == pairs[:, 1] // heads.group
    return {"all": pairs, "within": pairs[same], "across": pairs[~same]}


def _means(sets: Tensor, num_tokens: int) -> Tensor:
    """Mean Jaccard index over all pairs of heads: int64 [Q, L, H, k] to float32 [L, Q]."""
    return torch.tensor(
        [
            [mean_jaccard(of_question, num_tokens) for of_question in of_layer]
            for of_layer in sets.transpose(0, 1)
        ]
    )


def _question_pairs(sets: Tensor, num_tokens: int) -> Tensor:
    """Jaccard index of one head's sets for two questions, mean over heads.

    Args:
        sets: int64 [Q, L, H, k].
        num_tokens: m.

    Returns:
        float32 [L, Q * (Q - 1) / 2].
    """
    first, second = torch.triu_indices(len(sets), len(sets), offset=1)
    rows = []
    for of_layer in sets.permute(1, 2, 0, 3):
        matrices = torch.stack([jaccard_matrix(of_head, num_tokens) for of_head in of_layer])
        rows.append(matrices.mean(0)[first, second])
    return torch.stack(rows)


def make_table(found: Similarity, alpha: float) -> Table:
    """The table of one ratio."""
    title = (
        f"{found.ratio:.0%} of the tokens ({found.k}): random sets {found.random:.3f}, "
        f"threshold {found.threshold:.3f} (alpha {alpha:g})"
    )
    table = Table(box=box.SIMPLE, title=title, title_justify="left", padding=(0, 1))
    table.add_column("Jaccard index of", no_wrap=True)
    for heading in ("mean", "over random", "above threshold", "lowest (layer)", "highest (layer)"):
        table.add_column(heading, justify="right", no_wrap=True)
    for kind, row in found.as_dict()["kinds"].items():
        layers = row["layers"]
        low, high = min(layers), max(layers)
        table.add_row(
            KINDS[kind],
            f"{row['mean']:.3f}",
            f"{row['mean'] / found.random:.1f}x",
            f"{row['share_above']:.0%}",
            f"{low:.3f} ({layers.index(low)})",
            f"{high:.3f} ({layers.index(high)})",
        )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    args = _parse(arguments)
    progress = Console(stderr=True, highlight=False)
    out = Console(width=None if sys.stdout.isatty() else 110, highlight=False)
    try:
        if args.plot:
            plots.require_matplotlib()
        record, found = _run(args, progress)
    except KeyboardInterrupt:
        progress.print("interrupted", style="red")
        return 130
    except (BenchFailed, TraceError, DemoModelMissing) as error:
        progress.print(f"benchmark failed: {error}", style="red", markup=False)
        return 1
    for similarity in found:
        out.print(make_table(similarity, args.alpha))
    _publish(args, record, found, out)
    return 0


def _run(args: argparse.Namespace, console: Console) -> tuple[dict[str, Any], list[Similarity]]:
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    began = time.monotonic()
    model = args.model or model_path()
    examples = _examples(args)
    with step(console, "loading the model"):
        lab = AttentionLab.load(model, args.threads)
        tokenizer = AutoTokenizer.from_pretrained(model)
    if args.layer is not None and not 0 <= args.layer < lab.num_layers:
        raise BenchFailed(f"there is no layer {args.layer}; the model has {lab.num_layers}, from 0")
    material = make_material(examples, tokenizer, args.prefix_tokens, args.questions, args.seed)
    with step(console, "computing the prefix"):
        prefix = compute_prefix(lab, material.prefix)
    with step(console, "asking", len(material.questions)) as tick:
        scores = []
        for question in material.questions:
            scores.append(question_scores(lab, prefix, question))
            tick()
    probe = probe_kv_heads(lab.num_query_heads, lab.num_kv_heads, args.probe_heads)
    heads = Heads(lab.num_query_heads, lab.num_kv_heads, probe)
    with step(console, "comparing sets"):
        stacked = torch.stack(scores)
        found = [measure(stacked, heads, ratio, args.alpha) for ratio in args.ratios]
    record = {
        "command": _command(args),
        "machine": describe_machine(),
        "model": model.resolve().name,
        "seconds": round(time.monotonic() - began),
        "dataset": args.dataset,
        "prefix_tokens": prefix.num_tokens,
        "questions": len(scores),
        "mean_question_tokens": round(sum(map(len, material.questions)) / len(scores), 1),
        "layers": lab.num_layers,
        "query_heads": heads.query,
        "kv_heads": heads.kv,
        "probe_query_heads": heads.probe,
        "alpha": args.alpha,
        "ratios": [similarity.as_dict() for similarity in found],
    }
    return record, found


def _publish(
    args: argparse.Namespace, record: dict[str, Any], found: Sequence[Similarity], console: Console
) -> None:
    note = (
        f"{record['model']}, {record['query_heads']} query heads on {record['kv_heads']} KV heads; "
        f"{record['dataset']}, prefix of {record['prefix_tokens']} tokens, "
        f"{record['questions']} questions"
    )
    console.print(f"{note}; {record['seconds']} s in all", markup=False)
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if args.plot:
        layer = record["layers"] // 2 if args.layer is None else args.layer
        files = similarity_plots.write_figures(
            found, KINDS, layer, note, args.plot, f"similarity-{args.dataset}"
        )
        console.print(f"{len(files)} files in {args.plot}", markup=False)


def _examples(args: argparse.Namespace) -> list[Example]:
    if args.dataset == MADE:
        return make_examples(args.questions + args.prefix_tokens // 8, args.seed)
    return read_examples(args.data, args.dataset)


def _command(args: argparse.Namespace) -> str:
    """A command that gives the same figures; paths of this machine are left out."""
    options = []
    for name in _RECORDED:
        value = getattr(args, name)
        if name == "ratios":
            value = ",".join(f"{100 * ratio:g}" for ratio in value)
        options.append(f"--{name.replace('_', '-')} {value}")
    return " ".join(["python -m bench.similarity", *options])


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.similarity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", type=Path, help="folder of a model (default: the demo model)")
    add(
        "--data",
        type=Path,
        default=DEFAULT_DATA,
        metavar="DIR",
        help="folder of data sets, DIR/NAME/*.jsonl (default: ../shared/data beside this "
        "repository)",
    )
    add(
        "--dataset",
        choices=[*READERS, MADE],
        default="squad_xquad_en",
        help=f"(default: squad_xquad_en; {MADE}: text that needs no files)",
    )
    add("--prefix-tokens", type=_positive, default=2000, metavar="N", help="(default: 2000)")
    add("--questions", type=_positive, default=20, metavar="N", help="(default: 20)")
    add("--seed", type=int, default=1, help="of what is drawn from the data set (default: 1)")
    add("--alpha", type=float, default=0.6, help="threshold = j**alpha (default: 0.6)")
    add("--probe-heads", type=_positive, default=3, metavar="N", help="(default: 3)")
    add(
        "--ratios",
        type=_ratios,
        default=[0.1, 0.25, 0.4, 0.5],
        metavar="A,B",
        help="percentages of the tokens that are important (default: 10,25,40,50)",
    )
    add("--threads", type=_positive, default=1, metavar="N", help="of torch (default: 1)")
    add("--json", type=Path, metavar="FILE", help="write all figures")
    add("--plot", type=Path, metavar="DIR", help="draw Figures 7(b) and 8 from this run")
    add("--layer", type=int, help="the layer of Figure 7(b), from 0 (default: the middle one)")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _ratios(text: str) -> list[float]:
    ratios = [float(part) / 100 for part in text.split(",")]
    if not all(0 < ratio <= 1 for ratio in ratios):
        raise argparse.ArgumentTypeError("must be percentages above 0, up to 100")
    return ratios


if __name__ == "__main__":
    sys.exit(main())
