"""How well the blocks that a layer will need can be told before it runs, on real attention.

    python -m bench.prediction
    python -m bench.prediction --prefixes 2 --questions 16 --json run.json

Each KV head of each layer selects its top tokens for a question, by exact attention; the blocks of
16 tokens (4 KiB of float32 rows of 64 elements) that hold one of them are *needed*. A predictor
ranks the blocks of all layers, KV heads and questions by one score, from the first `--histories`
questions about the prefix, from what the layers above selected for the same question, or from both:

    history, blocks     share of the history's questions that needed the block
    history, tokens     1 - prod(1 - p) over its tokens, p the share of them that selected a token
    history, wider      the same, with a little of the share over all layers and KV heads added to p
    above n, max        largest share s of KV heads of the n layers above that selected a token
    above n, any        1 - prod(1 - s) over its tokens
    surprise n, w       1 - prod(1 - p - w (s - the history's mean s)) over its tokens
    place               how often other prefixes needed a block of that layer and KV head there
    fitted above        logistic regression, fitted on other prefixes, on "place" and both "any"
    fitted history      the same on "place", those of the history, and "any" of the history
    fitted both         the same on all of them
    random              of nothing

Columns: `found w%` is the share of needed blocks among the guessed ones when wrong guesses are w%
of the number of needed blocks; `equal` that when as many are guessed as are needed (recall, and
precision too). The order of tokens is logical, or by how often the history selected them. The first
layers, which have too few above them, are left out for all predictors. No server runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from bench.attention_lab import AttentionLab, compute_prefix, question_scores
from bench.comparison import step
from bench.machine import describe_machine
from bench.quality_tasks import TASKS, Task, TaskOptions, make_task
from bench.servers import BenchFailed
from bench.serving_options import DEFAULT_DATA
from bench.session import load_tokenize
from demo.model import DemoModelMissing, model_path
from impress_sglang.importance.selection import per_head_tokens, retained_tokens

BLOCK_TOKENS = 16
# Layers above that predictors look at; as many layers at the top are not measured.
DEPTHS = (1, 2)
FIRST_LAYER = max(DEPTHS)
WEIGHTS = (0.25, 0.5, 1.0)
# Wrong guesses as a share of the number of needed blocks.
WRONG_SHARES = (0.1, 0.2, 0.3)
# No token is surer than that, or one of them would hide all others of its block.
_SUREST = 0.99
# Of the frequency over all layers and KV heads, beside the KV head's own.
_WIDER_WEIGHT = 0.25
# Blocks that a regression is fitted on.
_FIT_BLOCKS = 60_000
_RECORDED = (
    "task",
    "prefixes",
    "prefix_tokens",
    "passages",
    "questions",
    "histories",
    "ratios",
    "seed",
    "threads",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """What one prefix's questions selected, and in which order its tokens are stored.

    `past` [N, L, G, m] and `asked` [T, L, G, m] say whether a token is selected; N may be 0.
    `order` [L, G, m] are the tokens of each KV head in the order of the disk.
    """

    past: Tensor
    asked: Tensor
    order: Tensor

    @classmethod
    def of(cls, past: Tensor, asked: Tensor, reordered: bool) -> Setting:
        """In logical order, or by descending frequency of selection in the past."""
        frequency = past.float().sum(0)
        if not reordered:
            frequency = torch.zeros_like(frequency)
        order = torch.sort(frequency, stable=True, dim=-1, descending=True).indices
        return cls(past, asked, order)

    def blocks(self, values: Tensor) -> Tensor:
        """Values [..., L, G, m] of tokens as [..., L', G, B, 16]; padded with zeros."""
        stored = values.gather(-1, self.order.expand(values.shape))[..., FIRST_LAYER:, :, :]
        padded = functional.pad(stored, (0, -stored.shape[-1] % BLOCK_TOKENS))
        return padded.unflatten(-1, (-1, BLOCK_TOKENS))

    def needed(self) -> Tensor:
        """Whether each block is needed: [T, L', G, B]."""
        return self.blocks(self.asked).any(-1)

    def frequency(self) -> Tensor:
        """Share of the past's questions that selected each token: [L, G, m]."""
        return self.past.float().mean(0)


# Scores of blocks, [T, L', G, B] or without T.
Predictor = Callable[[Setting], Tensor]


def select(
    lab: AttentionLab,
    token_ids: Sequence[int],
    questions: Sequence[Sequence[int]],
    ratios: Sequence[float],
) -> dict[float, Tensor]:
    """By ratio, whether a question selects each token of a prefix: bool [Q, L, G, m]."""
    prefix = compute_prefix(lab, token_ids)
    chosen: dict[float, list[Tensor]] = {ratio: [] for ratio in ratios}
    for question in questions:
        scores = question_scores(lab, prefix, question)
        for ratio, selected in chosen.items():
            k = retained_tokens(prefix.num_tokens, ratio)
            layers = [_selected(layer, lab.group_size, k) for layer in scores]
            selected.append(torch.stack(layers))
    return {ratio: torch.stack(selected) for ratio, selected in chosen.items()}


def _selected(scores: Tensor, group_size: int, k: int) -> Tensor:
    tokens = per_head_tokens(scores, group_size, k)
    selected = torch.zeros(len(tokens), scores.shape[1], dtype=torch.bool)
    return selected.scatter_(1, tokens, True)


def any_of(shares: Tensor) -> Tensor:
    """1 - prod(1 - share) over the last dimension, as the logarithm that ranks alike."""
    return -torch.log1p(-shares.clamp(0.0, _SUREST)).sum(-1)


def shares_above(selected: Tensor, depth: int) -> Tensor:
    """Share of KV heads of the `depth` layers above that selected a token, as [..., L, G, m]."""
    by_layer = selected.float().mean(-2, keepdim=True)
    above = torch.zeros_like(by_layer)
    for distance in range(1, depth + 1):
        above[..., distance:, :, :] += by_layer[..., :-distance, :, :] / depth
    return above.expand(selected.shape)


def by_needed_blocks(setting: Setting) -> Tensor:
    """See "history, blocks"."""
    return setting.blocks(setting.past).any(-1).float().mean(0)


def by_tokens(setting: Setting) -> Tensor:
    """See "history, tokens"."""
    return any_of(setting.blocks(setting.frequency()))


def by_tokens_of_all(setting: Setting) -> Tensor:
    """See "history, wider": tokens of equal frequency are told apart by those of other KV heads."""
    frequency = setting.frequency()
    overall = frequency.mean((0, 1)).expand(frequency.shape)
    return any_of(setting.blocks(frequency + _WIDER_WEIGHT * overall))


def above_max(depth: int) -> Predictor:
    """See "above, max"."""
    return lambda setting: setting.blocks(shares_above(setting.asked, depth)).amax(-1)


def above_any(depth: int) -> Predictor:
    """See "above, any"."""
    return lambda setting: any_of(setting.blocks(shares_above(setting.asked, depth)))


def above_before(depth: int) -> Predictor:
    """What `above_any` was in the past, on average: what is usual."""
    return lambda setting: any_of(setting.blocks(shares_above(setting.past, depth))).mean(0)


def surprise(depth: int, weight: float) -> Predictor:
    """See "surprise"."""

    def predict(setting: Setting) -> Tensor:
        usual = shares_above(setting.past, depth).mean(0)
        unusual = shares_above(setting.asked, depth) - usual
        return any_of(setting.blocks(setting.frequency() + weight * unusual))

    return predict


def at_random(setting: Setting) -> Tensor:
    """See "random"."""
    return torch.rand(setting.needed().shape, generator=torch.Generator().manual_seed(0))


WITHOUT_HISTORY: dict[str, Predictor] = {
    **{f"above {depth}, max": above_max(depth) for depth in DEPTHS},
    **{f"above {depth}, any": above_any(depth) for depth in DEPTHS},
    "random": at_random,
}
WITH_HISTORY: dict[str, Predictor] = {
    "history, blocks": by_needed_blocks,
    "history, tokens": by_tokens,
    "history, wider": by_tokens_of_all,
    **{
        f"surprise {depth}, {weight:g}": surprise(depth, weight)
        for depth in DEPTHS
        for weight in WEIGHTS
    },
}
_HISTORY_FEATURES: tuple[Predictor, ...] = (
    by_needed_blocks,
    by_tokens,
    by_tokens_of_all,
    *(above_before(depth) for depth in DEPTHS),
)
_ABOVE_FEATURES = tuple(above_any(depth) for depth in DEPTHS)
FITTED: dict[str, tuple[Predictor, ...]] = {
    "fitted above": _ABOVE_FEATURES,
    "fitted history": _HISTORY_FEATURES,
    "fitted both": _HISTORY_FEATURES + _ABOVE_FEATURES,
}


def predict_all(settings: Sequence[Setting]) -> Iterator[tuple[str, list[Tensor]]]:
    """Each predictor's scores [T, L', G, B] for some prefixes."""
    has_history = len(settings[0].past) > 0
    predictors = WITHOUT_HISTORY | (WITH_HISTORY if has_history else {})
    for name, predict in predictors.items():
        yield name, [predict(setting).expand(setting.needed().shape) for setting in settings]
    if len(settings) == 1:
        return
    by_place = predict_by_place(settings)
    yield "place", by_place
    for name, features in FITTED.items():
        if has_history or features == _ABOVE_FEATURES:
            yield name, predict_fitted(settings, by_place, features)


def predict_by_place(settings: Sequence[Setting]) -> list[Tensor]:
    """Scores for each prefix: how often blocks are needed at the same relative place of others."""
    needed = [setting.needed() for setting in settings]
    shares = [own.float().mean(0) for own in needed]
    scores = []
    for place, own in enumerate(needed):
        others = shares[:place] + shares[place + 1 :]
        stretched = [
            functional.interpolate(share, own.shape[-1], mode="linear", align_corners=True)
            for share in others
        ]
        scores.append(torch.stack(stretched).mean(0).expand(own.shape))
    return scores


def predict_fitted(
    settings: Sequence[Setting], by_place: Sequence[Tensor], features: Sequence[Predictor]
) -> list[Tensor]:
    """Scores for each prefix by a logistic regression that is fitted on the others."""
    needed = [setting.needed() for setting in settings]
    inputs = []
    for setting, own, share in zip(settings, needed, by_place, strict=True):
        values = [feature(setting).expand(own.shape) for feature in features]
        inputs.append(torch.stack([torch.logit(share, 1 - _SUREST), *values], -1))
    scores = []
    for left_out, own in enumerate(inputs):
        rest = [place for place in range(len(inputs)) if place != left_out]
        slopes = fit_logistic(
            torch.cat([inputs[place].flatten(0, -2) for place in rest]),
            torch.cat([needed[place].flatten() for place in rest]),
        )
        scores.append(own @ slopes)
    return scores


def fit_logistic(inputs: Tensor, outcomes: Tensor) -> Tensor:
    """Slopes [F] of a logistic regression of `outcomes` [n] on `inputs` [n, F]."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randperm(len(inputs), generator=generator)[:_FIT_BLOCKS]
    spread = inputs[drawn].std(0).clamp_min(1e-6)
    scaled, wanted = inputs[drawn] / spread, outcomes[drawn].float()
    slopes = torch.zeros(inputs.shape[1], requires_grad=True)
    intercept = torch.zeros((), requires_grad=True)
    optimizer = torch.optim.LBFGS([slopes, intercept], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        logits = scaled @ slopes + intercept
        loss = functional.binary_cross_entropy_with_logits(logits, wanted)
        loss.backward()
        return loss

    optimizer.step(closure)
    return slopes.detach() / spread


def figures(scores: Tensor, needed: Tensor) -> dict[str, float]:
    """What guessing blocks in the order of their scores finds; scores and needed are flat.

    Of blocks with the same score, a part is guessed at random.
    """
    values, group = scores.unique(return_inverse=True)
    sizes = torch.bincount(group, minlength=len(values)).flip(0).double()
    hits = torch.bincount(group, needed.double(), len(values)).flip(0)
    total = float(hits.sum())
    found, guessed = hits.cumsum(0) / total, sizes.cumsum(0) / total
    wrong = guessed - found
    shares = {
        f"found_{share:.0%}".rstrip("%"): _interpolate(wrong, found, share)
        for share in WRONG_SHARES
    }
    return {**shares, "equal": _interpolate(guessed, found, 1.0)}


def _interpolate(rising: Tensor, values: Tensor, place: float) -> float:
    """Value at `place` of a curve that begins at (0, 0) and stays what it is at its end."""
    after = int(torch.searchsorted(rising, torch.tensor(place).double(), right=True))
    if after == len(rising):
        return round(float(values[-1]), 4)
    x0, y0 = (float(rising[after - 1]), float(values[after - 1])) if after else (0.0, 0.0)
    x1, y1 = float(rising[after]), float(values[after])
    return round(y0 + (y1 - y0) * (place - x0) / (x1 - x0), 4)


def study(selected: Sequence[Tensor], history: int, reordered: bool, first: int) -> list[Any]:
    """A row per predictor, all prefixes together.

    Args:
        selected: [Q, L, G, m] of each prefix.
        history: questions that predictors, and the order, know of.
        reordered: see `Setting.of`.
        first: the first question that is measured.
    """
    settings = [Setting.of(own[:history], own[first:], reordered) for own in selected]
    needed = [setting.needed().flatten() for setting in settings]
    pooled = torch.cat(needed)
    rows = []
    for name, scores in predict_all(settings):
        flat = [score.flatten() for score in scores]
        row = {"predictor": name, **figures(torch.cat(flat), pooled)}
        by_prefix = [figures(*pair)["equal"] for pair in zip(flat, needed, strict=True)]
        rows.append({**row, "equal_by_prefix": by_prefix})
    return [{"needed": round(float(pooled.double().mean()), 4), **row} for row in rows]


def study_all(
    by_ratio: Mapping[float, Sequence[Tensor]], histories: Sequence[int]
) -> list[dict[str, Any]]:
    """Rows of all retentions, histories and orders."""
    rows = []
    for ratio, selected in by_ratio.items():
        for history in histories:
            for reordered in (False, True) if history else (False,):
                setting = {
                    "retention": ratio,
                    "order": "reordered" if reordered else "logical",
                    "history": history,
                }
                found = study(selected, history, reordered, max(histories))
                rows += [{**setting, **row} for row in found]
    return rows


def make_tables(rows: Sequence[Mapping[str, Any]]) -> Iterator[Table]:
    """A table per retention, order and history."""
    keys = ("retention", "order", "history", "needed")
    shown = [key for key in rows[0] if key.startswith("found") or key == "equal"]
    for case in dict.fromkeys(tuple(row[key] for key in keys) for row in rows):
        retention, order, history, needed = case
        title = f"retention {retention:.0%}, {order}, history {history}: {needed:.1%} needed"
        table = Table(box=box.SIMPLE, title=title, title_justify="left", padding=(0, 1))
        table.add_column("predictor", no_wrap=True)
        for key in shown:
            heading = key.replace("_", " ") + ("%" if key != "equal" else "")
            table.add_column(heading, justify="right")
        for row in rows:
            if tuple(row[key] for key in keys) == case:
                table.add_row(row["predictor"], *(f"{row[key]:.3f}" for key in shown))
        yield table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    args = _parse(arguments)
    progress = Console(stderr=True, highlight=False)
    try:
        result = _run(args, progress)
    except KeyboardInterrupt:
        progress.print("interrupted", style="red")
        return 130
    except (BenchFailed, DemoModelMissing) as error:
        progress.print(f"benchmark failed: {error}", style="red", markup=False)
        return 1
    out = Console(width=None if sys.stdout.isatty() else 110, highlight=False)
    for table in make_tables(result["predictors"]):
        out.print(table)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


def _run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    began = time.monotonic()
    model = (args.model or model_path()).resolve()
    with step(console, "loading the model"):
        lab = AttentionLab.load(model, args.threads)
        task = _make_task(args, model)
    by_ratio: dict[float, list[Tensor]] = {ratio: [] for ratio in args.ratios}
    asked = []
    for place, token_ids in enumerate(task.prefixes):
        questions = [item.question for item in task.items if item.prefix == place]
        if len(questions) <= max(args.histories):
            raise BenchFailed(f"prefix {place} has only {len(questions)} questions")
        asked.append(len(questions) - max(args.histories))
        with step(console, f"prefix {place}: {len(token_ids)} tokens, {len(questions)} questions"):
            for ratio, selected in select(lab, token_ids, questions, args.ratios).items():
                by_ratio[ratio].append(selected)
    with step(console, "predicting"):
        rows = study_all(by_ratio, args.histories)
    return {
        "command": _command_of(args),
        "machine": describe_machine(),
        "model": model.name,
        "seconds": round(time.monotonic() - began),
        "prefix_lengths": [len(prefix) for prefix in task.prefixes],
        "measured_questions": asked,
        "first_layer": FIRST_LAYER,
        "block_tokens": BLOCK_TOKENS,
        "predictors": rows,
    }


def _make_task(args: argparse.Namespace, model: Path) -> Task:
    options = TaskOptions(
        prefixes=args.prefixes,
        shots=0,
        prefix_tokens=args.prefix_tokens,
        passages=args.passages,
        examples=args.prefixes * (max(args.histories) + args.questions),
        seed=args.seed,
    )
    return make_task(args.task, args.data, load_tokenize(model), options)


def _command_of(args: argparse.Namespace) -> str:
    words = ["python -m bench.prediction"]
    for name in _RECORDED:
        value = getattr(args, name)
        shown = ",".join(f"{part:g}" for part in value) if isinstance(value, list) else value
        words.append(f"--{name.replace('_', '-')} {shown}")
    return " ".join(words)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="folder of a model (default: the demo's)")
    parser.add_argument("--data", default=str(DEFAULT_DATA), help="folder with the data sets")
    parser.add_argument("--task", choices=sorted(TASKS), default="squad")
    parser.add_argument("--prefixes", type=int, default=4)
    parser.add_argument("--prefix-tokens", type=int, default=2000, help="of few-shot tasks")
    parser.add_argument("--passages", type=int, default=12, help="of squad")
    parser.add_argument("--questions", type=int, default=40, help="measured, per prefix")
    parser.add_argument(
        "--histories",
        type=lambda text: [int(count) for count in text.split(",")],
        default=[0, 1, 3, 8],
        help="questions that are known (default: 0,1,3,8); the most are left out of the measured",
    )
    parser.add_argument(
        "--ratios",
        type=lambda text: [float(ratio) for ratio in text.split(",")],
        default=[0.1, 0.25],
        help="retentions (default: 0.1,0.25)",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the result to this file")
    args = parser.parse_args(arguments)
    if min(args.histories) < 0 or args.questions < 1:
        parser.error("--histories must be at least 0, --questions at least 1")
    return args


if __name__ == "__main__":
    sys.exit(main())
