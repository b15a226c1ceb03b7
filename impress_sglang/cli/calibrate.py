"""Fits a basis to a model, with KVs and gradients of diverse texts. Needs transformers, no server.

Each text is cut into two prompts. The basis is fitted to both; its reported quality is that of a
basis fitted to the first prompts and evaluated on the second ones.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from impress_sglang.cli import CommandError
from impress_sglang.codes.rotation import KeyRotation
from impress_sglang.codes.rows.basis import RATES, Basis
from impress_sglang.codes.rows.coder import encode_layer, kvs_of
from impress_sglang.codes.rows.fit import SINK_TOKENS, Fit, Moments
from impress_sglang.store.identity import weights_digest

# Share of a prompt, its last part, on whose predictions errors are evaluated.
_EVALUATED_SHARE = 0.25
_MIN_TOKENS = 64
_SEED = 1
# Gradients per prompt, each for other tokens that the model samples.
_DRAWS = 4
# Largest difference between keys of equal tokens in the first layer, rotated back, as a share of
# the largest key.
_MAX_ROTATION_ERROR = 1e-2
_BITS = 16
# Keys, rotated back to position 0, and values of each layer, both [t, G, D].
KVs = list[tuple[Tensor, Tensor]]


def calibrate(
    model: Path, out: Path, texts: Sequence[Path], tokens: int, tp_sizes: Sequence[int] = (1,)
) -> dict[str, Any]:
    """Fit bases to the model in a Hugging Face folder, and write them to `out`.

    `texts`: files, one per kind of text; those of the package if empty. At most `tokens` tokens of
    each are read. For each of `tp_sizes`, every rank gets a basis for its heads.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not out.parent.is_dir():
        raise CommandError(f"there is no directory {out.parent}")
    if out.is_dir() or not os.access(out.parent, os.W_OK):
        raise CommandError(f"{out} cannot be written")
    contents = _read(texts)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        causal_model = AutoModelForCausalLM.from_pretrained(
            model, local_files_only=True, dtype=torch.float32
        )
    except Exception as error:  # damaged files and missing packages raise many types
        raise CommandError(f"{model} cannot be loaded: {error}") from error
    ids = {
        kind: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][:tokens]
        for kind, text in contents.items()
    }
    begin = time.monotonic()
    result: dict[str, Any] = {"basis": str(out)}
    for bases in calibrated(Prompts(causal_model.to(device).eval()), ids, tp_sizes):
        for basis in bases:
            basis.save(out)
        result |= {f"tp_{len(bases)}": _figures_of(bases)} if len(bases) > 1 else _figures_of(bases)
    return result | {"seconds": round(time.monotonic() - begin)}


def calibrated(
    prompts: Prompts, ids: Mapping[str, Sequence[int]], tp_sizes: Sequence[int] = (1,)
) -> list[list[Basis]]:
    """Fit bases with all `RATES` to the tokens of each kind of text; a list of ranks per size."""
    short = [kind for kind, tokens in ids.items() if len(tokens) < 2 * _MIN_TOKENS]
    if short:
        raise CommandError(f"texts with fewer than {2 * _MIN_TOKENS} tokens: {', '.join(short)}")
    heads = prompts.num_kv_heads
    for size in tp_sizes:
        # If there are more ranks than heads, several ranks have the same head.
        if size < 1 or max(size, heads) % min(size, heads):
            raise CommandError(f"{size} ranks cannot share {heads} KV heads")
    first = {kind: tokens[: len(tokens) // 2] for kind, tokens in ids.items()}
    second = {kind: tokens[len(tokens) // 2 :] for kind, tokens in ids.items()}
    sample = _Sample(prompts)
    sample.read(first)
    features = sum(heads * dim for heads, dim in sample.moments.shapes)
    if sample.moments.count < features:
        # With fewer, other text would be too unlike these tokens.
        raise CommandError(
            f"a basis for this model needs texts with more than {2 * features} tokens in all: "
            "give more of them, or raise --tokens"
        )
    sizes = list(dict.fromkeys(min(size, heads) for size in tp_sizes))
    checked = sample.bases(sizes)
    sample.read(second)
    whole = sample.bases(sizes, prompts.name())
    for size, bases in checked.items():
        lost: dict[str, dict[str, float]] = {f"{rate:g}": {} for rate in RATES}
        for kind, tokens in second.items():
            for rate in RATES:
                _log(f"judging {kind} in the place of {rate:g} bits, --tp-size {size}")
                loss = prompts.divergence(tokens, [basis.keeping(rate) for basis in bases])
                lost[f"{rate:g}"][kind] = round(loss, 6)
        notes = {
            "texts": hashlib.sha256(repr(sorted(ids.items())).encode()).hexdigest()[:16],
            "metric": "fish",
            "tokens": sample.moments.count,
            "kl": lost,
        }
        whole[size] = [dataclasses.replace(basis, notes=notes) for basis in whole[size]]
    return list(whole.values())


def _figures_of(bases: Sequence[Basis]) -> dict[str, Any]:
    features = sum(heads * dim for basis in bases for heads, dim in basis.shapes)
    exact, figures = features * bases[0].num_layers * _BITS / 8, {}
    for keeps in RATES:
        kept = [basis.keeping(keeps) for basis in bases]
        size = sum(basis.token_bytes for basis in kept)
        figures[f"bits_{keeps:g}"] = {
            "digest": " ".join(basis.digest for basis in kept),
            "rate": round(sum(basis.rate for basis in kept) / len(kept), 3),
            "token_bytes": size,
            "share": round(size / exact, 4),
            "kl": bases[0].notes["kl"][f"{keeps:g}"],
        }
    return figures


class _Sample:
    """Collects KVs of prompts and gradients with respect to them, and fits bases.

    Errors are weighted by Fisher's information: mean products of the gradients of each head's keys
    and values. A few tokens of a few prompts have by far the largest gradients, so each prompt is
    scaled by the geometric mean, over layers and streams, of its products.
    """

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts
        self.moments = Moments()
        # By layer and stream, float64 [G, D, D]; their common scale has no meaning.
        self._metric: list[list[Tensor]] = []

    def read(self, ids: Mapping[str, Sequence[int]]) -> None:
        for kind, prompt in ids.items():
            _log(f"reading {kind}")
            kvs, draws = self._prompts.gradients(prompt)
            self.moments.add(kvs)
            layers = range(len(kvs))
            costs = [[_products([draw[i][j] for draw in draws]) for j in range(2)] for i in layers]
            sizes = [matrix.diagonal(dim1=1, dim2=2).sum() for layer in costs for matrix in layer]
            # No prediction may depend on a layer that was added to a model or cut out of it.
            size = torch.stack([size for size in sizes if size > 0]).log2().mean().exp2()
            if not self._metric:
                self._metric = [[torch.zeros_like(matrix) for matrix in layer] for layer in costs]
            for sums, layer in zip(self._metric, costs, strict=True):
                for total, matrix in zip(sums, layer, strict=True):
                    total += matrix / size

    def bases(self, sizes: Sequence[int], model: str = "") -> dict[int, list[Basis]]:
        """Fit a basis for each rank of each size, all as good as the basis for all heads."""
        metric, heads = self._metric, self.moments.shapes[0][0]
        whole = Fit(self.moments, metric)
        thresholds, bases = whole.thresholds(RATES), dict[int, list[Basis]]()
        for ranks in sizes:
            bases[ranks], count = [], heads // ranks
            for rank in range(ranks):
                heads_of_rank = slice(rank * count, (rank + 1) * count)
                costs = [[matrices[heads_of_rank] for matrices in layer] for layer in metric]
                solved = whole if ranks == 1 else Fit(self.moments.of_heads(heads_of_rank), costs)
                bases[ranks].append(solved.basis(thresholds, model=model, part=(rank, ranks)))
        return bases


class Prompts:
    """Computes KVs, gradients and predictions of prompts with a transformers model, in float32."""

    def __init__(self, model: Any) -> None:
        """Use a causal model.

        Raises:
            CommandError: it has no rotary embeddings, or layers that do not attend to all tokens.
        """
        self._model = model
        self._generator = torch.Generator(model.device).manual_seed(_SEED)
        rotary = [module for name, module in model.named_modules() if name.endswith("rotary_emb")]
        if not rotary:
            raise CommandError(f"{type(model).__name__} has no rotary embeddings")
        kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
        if others := kinds - {"full_attention", "attention"}:
            raise CommandError(
                f"{type(model).__name__} has layers of type {', '.join(sorted(others))}: servers "
                "use a basis only where all layers attend to all tokens"
            )

        @torch.no_grad()
        def table(positions: int) -> Tensor:
            ids = torch.arange(positions, device=model.device)[None]
            cos, sin = rotary[0](torch.zeros(1, device=model.device), ids)
            half = cos.shape[-1] // 2
            return torch.cat([cos[0, :, :half], sin[0, :, :half]], -1)

        self._rotation = KeyRotation(table, halves=True)

    def name(self) -> str:
        """Return the model's class and a digest of its weights."""
        weights = weights_digest(self._model.named_parameters())
        return f"{type(self._model).__name__} {weights[:16]}"

    @functools.cached_property
    def num_kv_heads(self) -> int:
        return self._prefix([0])[0][0].shape[1]

    def gradients(self, ids: Sequence[int]) -> tuple[KVs, list[KVs]]:
        """Return KVs of a prompt, and gradients with respect to those before its last part.

        KVs are [t, G, D]. Each of several gradients is that of the log-probability of tokens that
        the model samples in the last part.
        """
        cut = _prefix_length(ids)
        keys, values = self._prefix(ids[:cut])
        leaves = [tensor.requires_grad_() for tensor in (*keys, *values)]
        with torch.enable_grad():
            logits, after = self._follow(keys, values, ids[cut:])
            logp = logits.log_softmax(-1)
            slopes = []
            for draw in range(_DRAWS):
                sampled = torch.multinomial(logp.detach().exp(), 1, generator=self._generator)
                sampled_logp, keep_graph = logp.gather(1, sampled).sum(), draw < _DRAWS - 1
                slopes.append(torch.autograd.grad(sampled_logp, leaves, retain_graph=keep_graph))
        layers = len(keys)
        kvs = [(layer.keys.detach(), layer.values.detach()) for layer in after.layers]
        return self._rotated_back(kvs, ids), [
            self._rotated_back(zip(slope[:layers], slope[layers:], strict=True)) for slope in slopes
        ]

    @torch.no_grad()
    def divergence(self, ids: Sequence[int], bases: Sequence[Basis]) -> float:
        """Return the mean KL of predictions in the last part of a prompt after coded KVs.

        `bases`: of all ranks, in order.
        """
        cut = _prefix_length(ids)
        keys, values = self._prefix(ids[:cut])
        exact = self._follow(keys, values, ids[cut:])[0].log_softmax(-1)
        kvs, begin, parts = self._rotated_back(zip(keys, values, strict=True)), 0, []
        for basis in bases:
            heads = slice(begin, begin := begin + basis.shapes[0][0])
            parts.append(coded_kvs(basis, [(k[:, heads], v[:, heads]) for k, v in kvs]))
        coded = [
            [torch.cat(part, 1) for part in zip(*layer, strict=True)]
            for layer in zip(*parts, strict=True)
        ]
        rotated = [self.rotated(k, back=False).transpose(0, 1)[None] for k, _ in coded]
        plain = [v.transpose(0, 1)[None] for _, v in coded]
        logp = self._follow(rotated, plain, ids[cut:])[0].log_softmax(-1)
        return float((exact.exp() * (exact - logp)).sum(-1).mean())

    @torch.no_grad()
    def _prefix(self, ids: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        from transformers import DynamicCache

        cache = DynamicCache()
        self._model(self._batch(ids), past_key_values=cache, logits_to_keep=1)
        return [layer.keys for layer in cache.layers], [layer.values for layer in cache.layers]

    def _follow(
        self, keys: Sequence[Tensor], values: Sequence[Tensor], ids: Sequence[int]
    ) -> tuple[Tensor, Any]:
        """Compute tokens after KVs [1, G, t, D]: logits, float32 [n, vocabulary], and the cache."""
        from transformers import DynamicCache

        cache = DynamicCache()
        for layer, (layer_keys, layer_values) in enumerate(zip(keys, values, strict=True)):
            cache.update(layer_keys, layer_values, layer)
        return self._model(self._batch(ids), past_key_values=cache).logits[0].float(), cache

    def _batch(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor([list(ids)], device=self._model.device)

    def _rotated_back(self, layers: Any, ids: Sequence[int] | None = None) -> KVs:
        """Rotate keys, or their gradients, of layers [1, G, t, D] back to position 0.

        Returns them and the values as [t, G, D]. `ids`: check that keys of equal ids are equal.
        """
        kvs = [
            (self.rotated(k[0].transpose(0, 1), back=True), v[0].transpose(0, 1)) for k, v in layers
        ]
        if ids is not None:
            keys = kvs[0][0]
            first_places = torch.tensor([ids.index(token) for token in ids], device=keys.device)
            if (keys - keys[first_places]).abs().max() > _MAX_ROTATION_ERROR * keys.abs().max():
                raise CommandError(f"{type(self._model).__name__} rotates keys in an unknown way")
        return kvs

    def rotated(self, keys: Tensor, *, back: bool) -> Tensor:
        """Rotate keys [t, G, D] of tokens 0, 1, ... back to position 0, or from there."""
        positions, zeros = torch.arange(len(keys)), torch.zeros(len(keys), dtype=torch.int64)
        factors = self._rotation.factors(*((positions, zeros) if back else (zeros, positions)))
        return self._rotation.move(keys, factors)


def coded_kvs(basis: Basis, layers: KVs) -> KVs:
    """Code KVs of a prompt and restore them, on their device; its first tokens stay exact."""
    below, kvs = None, []
    for layer, exact in enumerate(layers):
        # The coder's loops need a CPU.
        _, below = encode_layer(basis, layer, below, [x.cpu() for x in exact])
        keys, values = (
            torch.cat([x[:SINK_TOKENS], coded[SINK_TOKENS:].to(x.device)])
            for coded, x in zip(kvs_of(basis, layer, below), exact, strict=True)
        )
        kvs.append((keys, values))
    return kvs


def _products(draws: Sequence[Tensor]) -> Tensor:
    """Return sums over tokens, without sinks, of products in each head: float64 [G, D, D]."""
    heads = torch.cat([draw[SINK_TOKENS:] for draw in draws]).transpose(0, 1)
    return (heads.mT @ heads).double()


def _prefix_length(ids: Sequence[int]) -> int:
    """Return the number of tokens before the last part of a prompt."""
    return len(ids) - int(len(ids) * _EVALUATED_SHARE)


def _read(texts: Sequence[Path]) -> dict[str, str]:
    """Return texts by kind, which is the stem of the file's name."""
    contents: dict[str, str] = {}
    folder = resources.files("impress_sglang.codes.rows") / "texts"
    bundled: Iterable[Any] = (path for path in folder.iterdir() if path.name.endswith(".txt"))
    for path in texts or sorted(bundled, key=lambda path: path.name):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CommandError(f"{path} cannot be read: {error}") from error
        kind = path.name.partition(".")[0]
        if kind in contents:
            raise CommandError(f"there are two texts named {kind}")
        contents[kind] = text
    return contents


def _log(message: str) -> None:
    print(f"impress: {message}", file=sys.stderr, flush=True)
