"""Conversations whose oldest part is cut (`--impress-truncate`): what reuse costs and saves.

Perplexity: of each document the first tokens are computed, then cut as the server does, and the
tokens that follow are scored. `recompute` computes what is left of the text; each of `--shares`
reuses it with keys turned and computes so much of it again. Two controls come from the model in
this process: `unturned` reuses keys where they were, and `headless` does without the first tokens,
as AttentionStore prints it. `worse` is the perplexity against recompute, with a 95% interval over
documents (bootstrap).

TTFT: the first turn of conversations that outgrew the context of a server, which cuts them itself,
and the next one, which finds what that one has stored; medians, one at a time. Documents that are
too short are joined.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.core.data import SEPARATOR, Row, Tokenize, load_tokenize, model_folder, read_rows
from bench.core.options import DATA, DTYPE, KEEP, MODEL, SERVER_FLAG, Option
from bench.core.report import Result, Table, plain
from bench.core.servers import Server, servers
from bench.core.session import BenchFailed, step
from bench.quality.blend import interval
from impress_sglang.attention.rotation import KeyRotation
from impress_sglang.options import EXACTLY, OFF
from impress_sglang.serving.truncation import KEEP_TOKENS, find_cut

OPTIONS = (
    Option("documents", 1000, "at most", quick=2),
    Option("window", 1024, "their tokens before the cut", quick=640),
    Option("scored", 256, "tokens that follow and are scored", quick=64),
    Option("shares", (0.0, 0.15), "of reused tokens to compute again"),
    Option("conversations", 8, "whose TTFT is measured", quick=1),
    Option("context", 4096, "of the server, in tokens", quick=1024),
    Option("turn", 128, "tokens of a turn"),
    Option("set", "wikitext2", "data set with texts"),
    SERVER_FLAG,
    DATA,
    MODEL,
    DTYPE,
    KEEP,
)
SHARE = 0.5
# A request that gets one token is refused where its prompt is this much shorter than the context.
SPARE = 6
Scores = dict[str, list[float]]
"""Of each way the mean negative log-likelihood of each document, in nats per token."""


def run(args: argparse.Namespace) -> Result:
    """Perplexities, then times."""
    model = model_folder(args.model)
    rows, tokenize = read_rows(args.data, args.set), load_tokenize(model)
    length = args.window + args.scored
    texts = list(documents(rows, tokenize, length))[: args.documents]
    talks = list(documents(rows, tokenize, args.context + 2 * args.turn))
    talks = talks[: args.conversations + 1]
    if len(texts) < 2 or len(talks) < 2:
        raise BenchFailed(f"{args.set} is too short")
    flags = (
        "--max-total-tokens=20000",
        f"--context-length={args.context}",
        "--enable-impress",
        "--impress-write-after=1",
        "--impress-load=always",
        "--impress-blend=0.15",
        # However slow the machine is, what is behind a cut is blended.
        "--impress-blend-seconds=60",
        "--impress-blend-min-tokens=128",
        "--impress-min-prefix-tokens=64",
        f"--impress-truncate={SHARE}",
        *args.server_flag,
    )
    with servers(args) as pool:
        store = f"--impress-ssd-dir={pool.folder / 'kv'}"
        with pool.running("truncation", model, args.dtype, *flags, store) as server:
            with step(f"{len(texts)} documents"):
                scores = score(server, texts, args)
            with step(f"{len(talks)} conversations"):
                times = measure(server, talks, args)
            server.check_log()
    with step("controls"):
        scores |= Controls(model).score(texts, args)
    found = [_row(way, scores[way], scores["recompute"]) for way in scores]
    figures = {"model": model.name, "documents": len(texts), "rows": found, "times": times}
    return Result(
        figures,
        [
            Table(plain("way", "perplexity", "worse", "from", "to"), found),
            Table(plain("way", "TTFT", "times", "reused", "next", "next reused", "prompt"), times),
        ],
    )


def documents(rows: Sequence[Row], tokenize: Tokenize, length: int) -> Iterator[list[int]]:
    """The first tokens of texts, so many; one that is shorter goes on with the next one."""
    tokens: list[int] = []
    for row in rows:
        tokens += tokenize(row.get("text") or row["context"] + SEPARATOR)
        if len(tokens) >= length:
            yield tokens[:length]
            tokens = []


def cut_of(window: int) -> range:
    """What the server would leave out of a prompt that is longer than its context by one token."""
    cut = find_cut(range(window), window - 1, SHARE, KEEP_TOKENS, ())
    assert cut is not None
    return cut


def score(server: Server, texts: Sequence[list[int]], args: argparse.Namespace) -> Scores:
    """What a server says of the tokens behind the cut, which is made here: it scores no prompt that
    it cuts."""
    wishes: dict[str, dict[str, Any]] = {
        "recompute": {"impress_blend": OFF, "impress_bits": EXACTLY},
        **{f"reuse, {share:g} again": {"impress_blend": share} for share in args.shares},
    }
    scores: Scores = {way: [] for way in wishes}
    cut = cut_of(args.window)
    for text in texts:
        server.generate(text[: args.window], custom={"impress_blend": OFF})
        server.flush()
        for way, wish in wishes.items():
            meta = server.generate(
                [*text[: cut.start], *text[cut.stop :]],
                custom={**wish, "impress_store": False},
                return_logprob=True,
                logprob_start_len=args.window - len(cut) - 1,
            )["meta_info"]
            server.flush()
            if (meta["impress"]["blended_tokens"] > 0) != (way != "recompute"):
                raise BenchFailed(f"{way}: {meta['impress']}")
            entries = meta["input_token_logprobs"][1:]
            scores[way].append(-statistics.fmean(entry[0] for entry in entries))
    return scores


def measure(server: Server, talks: Sequence[list[int]], args: argparse.Namespace) -> list[Row]:
    """The turn that is too long and the next one, with and without reuse.

    The first conversation warms up. Ways have namespaces of their own.
    """
    ways = {"recompute": OFF} | {f"reuse, {share:g} again": share for share in args.shares}
    found: list[Row] = []
    for way, blend in ways.items():
        turns: list[list[tuple[float, Row]]] = [[], []]
        for talk in talks:
            before = talk[: args.context - args.turn]
            server.generate(before, custom={"impress_blend": OFF}, extra_key=way)
            for own, length in zip(turns, (-args.turn, len(talk)), strict=True):
                server.flush()
                own.append(_ask(server, talk[:length], blend, way))
            server.flush()
        first, following = ([seconds for seconds, _ in own[1:]] for own in turns)
        reports = [own[-1][1]["impress"] for own in turns]
        recompute = found[0]["TTFT"] if found else statistics.median(first)
        found.append(
            {
                "way": way,
                "TTFT": round(statistics.median(first), 4),
                "times": round(recompute / statistics.median(first), 2),
                "prompt": turns[0][-1][1]["prompt_tokens"],
                "reused": reports[0]["blended_tokens"],
                "next": round(statistics.median(following), 4),
                "next reused": reports[1]["blended_tokens"],
                "seconds": [round(seconds, 4) for seconds in first],
                "next seconds": [round(seconds, 4) for seconds in following],
            }
        )
    return found


def _ask(
    server: Server, talk: list[int], blend: float | str, namespace: str
) -> tuple[float, dict[str, Any]]:
    """A turn that must be cut: the seconds until its token, and what is said of it."""
    began = time.perf_counter()
    answer = server.generate(talk, custom={"impress_blend": blend}, extra_key=namespace)
    seconds, meta = time.perf_counter() - began, answer["meta_info"]
    if not meta["impress"]["truncated_tokens"]:
        raise BenchFailed(f"{namespace}: nothing was cut: {meta['impress']}")
    return seconds, meta


class Controls:
    """The model in this process, which reuses KVs wrongly on purpose."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model: Any = model.eval()
        self._rotation = KeyRotation(self._table, halves=True)

    @torch.inference_mode()
    def score(self, texts: Sequence[list[int]], args: argparse.Namespace) -> Scores:
        """Of each control."""
        cut, window = cut_of(args.window), args.window
        head, rest = torch.arange(cut.start), torch.arange(cut.stop, window - 1)
        whole = torch.cat([head, rest])
        scores: Scores = {"unturned": [], "headless": []}
        for text in texts:
            cache = self._model(torch.tensor([text[: window - 1]])).past_key_values
            pairs = [(layer.keys[0], layer.values[0]) for layer in cache.layers]
            scores["unturned"].append(self._behind(pairs, whole, whole, text[window - 1 :]))
            turned = torch.arange(len(rest))
            scores["headless"].append(self._behind(pairs, rest, turned, text[window - 1 :]))
        return scores

    def _behind(
        self, pairs: Sequence[Any], kept: torch.Tensor, places: torch.Tensor, text: list[int]
    ) -> float:
        """Negative log-likelihood of a text but its first token, behind the kept KVs."""
        from transformers import DynamicCache

        turns = self._rotation.turns(kept, places)
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(pairs):
            moved = self._rotation.move(keys[:, kept].transpose(0, 1), turns).transpose(0, 1)
            cache.update(moved[None], values[None][:, :, kept], layer)
        positions = torch.arange(len(kept), len(kept) + len(text) - 1)[None]
        logits = self._model(
            torch.tensor([text[:-1]]), past_key_values=cache, position_ids=positions
        ).logits
        return float(torch.nn.functional.cross_entropy(logits[0], torch.tensor(text[1:])))

    def _table(self, rows: int) -> torch.Tensor:
        probe = torch.zeros(1, 1, 1)
        own = self._model.model.rotary_emb(probe, torch.arange(rows)[None])
        return torch.cat([table[0].chunk(2, -1)[0] for table in own], -1)


def _row(way: str, found: Sequence[float], recomputed: Sequence[float]) -> Row:
    losses = [left - right for left, right in zip(found, recomputed, strict=True)]
    low, high = interval(losses)
    return {
        "way": way,
        "perplexity": round(math.exp(statistics.fmean(found)), 3),
        "worse": round(math.expm1(statistics.fmean(losses)), 4),
        "from": round(math.expm1(low), 4),
        "to": round(math.expm1(high), 4),
        "losses": [round(own, 5) for own in found],
    }
