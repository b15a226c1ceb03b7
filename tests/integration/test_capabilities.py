"""What is known not to work is refused: options, models by their configuration, loaded models; and
what keeps prefixes apart of what works.

`test_refusals.py` has what a whole command line is told.
"""

from __future__ import annotations

import ast
import inspect
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from sglang.srt import environ
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.models import llama, mistral, qwen2, qwen3
from sglang.srt.server_args import ServerArgs

from impress_sglang.blend.plugin.steps import BLENDED
from impress_sglang.config import AUTO, EXACTLY, USUAL, ImpressConfig
from impress_sglang.errors import ConfigError, UnsupportedError
from impress_sglang.plugin import factory, unsupported
from impress_sglang.plugin.compat import NEWEST, sglang_version
from impress_sglang.plugin.factory import _architecture, _scaling, draft_runners, kv_shape
from impress_sglang.plugin.pools import kv_format_of
from impress_sglang.plugin.request_tracker import namespace_of_request
from impress_sglang.plugin.unsupported import check_layers, check_model, check_options
from impress_sglang.store.policies import make_policy
from impress_sglang.store.prefix_hashes import namespace_text
from tests.integration.tiny_model import write_config
from tests.unit.kv_factory import make_shape


def options(**changed: Any) -> Any:
    """SGLang's, at their defaults but for some."""
    usual: dict[str, Any] = {"device": "cpu"}
    for field in msgspec.structs.fields(ServerArgs):
        if field.name not in usual:
            made = field.default_factory is not msgspec.NODEFAULT
            usual[field.name] = field.default_factory() if made else field.default
    return SimpleNamespace(**(usual | changed))


REFUSED = [name for names in unsupported._OFF.values() for name in names.split()]
VALUES = [
    name
    for rules in (unsupported._VALUES, unsupported._WEIGHTS_SEEN)
    for names, _ in rules.values()
    for name in names.split()
]


@pytest.mark.parametrize("name", REFUSED + VALUES)
def test_options_that_are_known_not_to_work(name: str) -> None:
    config = ImpressConfig()
    check_options(config, options())
    assert hasattr(options(), name) or sglang_version() != NEWEST, "a name that SGLang has not"
    with pytest.raises(UnsupportedError, match=f"drop --{name.replace('_', '-')} "):
        check_options(config, options(**{name: 7 if name.endswith("size") else "on"}))


def test_options_that_change_kvs_are_part_of_the_identity() -> None:
    plain = unsupported.identity_of_options(options())
    for name in unsupported._IDENTITY + unsupported._ALSO:
        assert hasattr(options(), name)
        assert unsupported.identity_of_options(options(**{name: "other"})) != plain
    assert plain.keys().isdisjoint(f"--{name}" for name in unsupported._ALSO)


def test_overrides_of_the_model_are_part_of_the_identity(tmp_path: Path) -> None:
    """--json-model-override-args changes RoPE, say, and is in no weight."""
    path = str(write_config(tmp_path))
    plain = _architecture(ModelConfig(path).hf_text_config)
    changed = ModelConfig(path, model_override_args='{"rope_theta": 5e5, "rms_norm_eps": 0.1}')
    assert _architecture(changed.hf_text_config) != plain


@pytest.mark.parametrize("name", unsupported._ENVIRONMENT)
def test_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unsupported.check_environment()
    monkeypatch.setenv(name, "1")
    if hasattr(environ.envs, name):
        with pytest.raises(UnsupportedError, match=f"unset {name}"):
            unsupported.check_environment()


@pytest.mark.parametrize("name", unsupported._NOT_CAUSAL)
def test_configurations(name: str, tmp_path: Path) -> None:
    config = ModelConfig(str(write_config(tmp_path)))
    check_model(config, ImpressConfig())
    setattr(config, name, 1)
    with pytest.raises(UnsupportedError, match=f"models with {name}"):
        check_model(config, ImpressConfig())


LONG_ROPE = {"rope_type": "longrope", "short_factor": [1.0] * 64, "long_factor": [2.0] * 64}


CHUNKED = {"num_hidden_layers": 1, "layer_types": ["chunked_attention"]}


@pytest.mark.parametrize(
    ("kind", "fields", "word"),
    [
        ("Gemma2", {}, "attn_logit_softcapping"),
        ("Llama", CHUNKED, "of type chunked"),
        ("Llama", {"rope_scaling": LONG_ROPE}, r"this model has .*longrope"),
        ("Cohere2", {"rope_parameters": {"sliding_attention": LONG_ROPE}}, "longrope"),
    ],
)
def test_models(tmp_path: Path, kind: str, fields: dict[str, Any], word: str) -> None:
    model = ModelConfig(str(write_config(tmp_path, kind, **fields)))
    with pytest.raises(UnsupportedError, match=word):
        check_model(model, ImpressConfig())


TEXT = ("GptOss", "Gemma3Text", "Olmo3", "Cohere2", "Qwen3Next")
MEDIA = {"architectures": ["Qwen3_5MoeForConditionalGeneration"]}
SPARSE = {"architectures": ["DeepseekV32ForCausalLM"], "index_topk": 64}
SPARSE |= {"index_head_dim": 16, "index_n_heads": 4}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        *((kind, {}) for kind in (*TEXT, "DeepseekV2")),
        ("Qwen3_5Moe", MEDIA),
        ("DeepseekV3", SPARSE),
    ],
)
def test_models_that_keep_other_things_than_kvs_of_all_tokens(
    tmp_path: Path, kind: str, fields: dict[str, Any]
) -> None:
    """Windows, states, media or latent vectors, by what the library says of them."""
    model = ModelConfig(str(write_config(tmp_path, kind, **fields)))
    check_model(model, ImpressConfig())
    others = [] if "Deepseek" in kind else [{"blend": 0.2}, {"basis": "some"}]
    word = "layers attend to all tokens" if others else "which models with MLA do not keep"
    for options in ({"policy": "paper"}, *others):
        with pytest.raises(UnsupportedError, match=word):
            check_model(model, ImpressConfig(**options))


def test_a_pool_for_windows_beside_what_it_is_not_restored_for() -> None:
    unsupported.check_extra_pools(options(speculative_algorithm="NGRAM", tp_size=2), "windows")
    for name, value in ({"pp_size": 2} | DRAFTS | PREFILL).items():
        with pytest.raises(UnsupportedError, match=f"drop --{name.replace('_', '-')} {value}"):
            unsupported.check_extra_pools(options(**{name: value}), "windows")


@pytest.mark.parametrize("module", [llama, mistral, qwen2, qwen3])
def test_blended_models_have_keys_for_attention_of_prefill(module: Any) -> None:
    """Else text could not be blended: some paths write keys to the pool and pass none on."""
    tree = ast.parse(inspect.getsource(module))
    entries = module.EntryClass if isinstance(module.EntryClass, list) else [module.EntryClass]
    assert {entry.__name__ for entry in entries} & BLENDED
    without = {
        function.name
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Return)
        and isinstance(node.value, ast.Tuple)
        and ast.unparse(node.value.elts[0]) == "q"
        and any(ast.unparse(element) == "None" for element in node.value.elts)
    }
    # On ROCm, and while decoding only.
    assert all(name.startswith("forward_prepare_aiter_fused") for name in without)
    assert not without or "and forward_batch.forward_mode.is_decode()" in ast.unparse(tree)


class Layers(torch.nn.Module):
    def __init__(self, ids: tuple[int, ...] = (0, 1)) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(attention(layer_id) for layer_id in ids)


class ImprovedAttention(RadixAttention):
    pass


class ScaledPool(MHATokenToKVPool):
    """Keeps a factor of each token beside its KVs."""

    def get_kv_size_bytes(self) -> Any:
        return *super().get_kv_size_bytes(), 4 * self.size


def attention(layer_id: int, **fields: Any) -> RadixAttention:
    return RadixAttention(8, 16, 0.25, num_kv_heads=2, layer_id=layer_id, **fields)


def runner(model: torch.nn.Module, pool: Any = None) -> Any:
    config = SimpleNamespace(dtype=torch.float32, num_attention_heads=8, is_multimodal=False)
    return SimpleNamespace(model=model, token_to_kv_pool=pool or make_pool(), model_config=config)


def make_pool(dtype: Any = torch.float32, dim: int = 16, **changed: Any) -> MHATokenToKVPool:
    pool = MHATokenToKVPool(64, 1, dtype, 2, dim, 2, "cpu", enable_memory_saver=False)
    for name, value in changed.items():
        setattr(pool, name, value)
    return pool


def test_media_without_tokens_of_their_own() -> None:
    media_runner = runner(Layers())
    media_runner.model_config.is_multimodal = True
    with pytest.raises(UnsupportedError, match="media from text"):
        check_layers(media_runner)


def test_plain_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of a release that adds an attribute to all of them."""
    model = Layers()
    model.layers[1].logit_cap = 0
    check_layers(runner(model))
    plain = RadixAttention.__init__

    def later(self: Any, *args: Any, **fields: Any) -> None:
        plain(self, *args, **fields)
        self.teleport = "off"

    monkeypatch.setattr(RadixAttention, "__init__", later)
    model = Layers()
    check_layers(runner(model))
    model.layers[0].teleport = "on"
    with pytest.raises(UnsupportedError, match="layer 0 has teleport on"):
        check_layers(runner(model))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"sliding_window_size": 128}, "sliding_window_size"),
        ({"logit_cap": 50.0}, "logit_cap"),
        ({"is_cross_attention": True}, "is_cross_attention"),
        ({"use_irope": True}, "use_irope"),
        ({"xai_temperature_len": 1024}, "xai_temperature_len"),
        ({"pos_encoding_mode": "ALIBI"}, "pos_encoding_mode"),
        ({"attn_type": AttentionType.DECODER_BIDIRECTIONAL}, "attn_type"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "attn_type"),
        ({"tp_k_head_num": 4}, "other heads"),
        ({"tp_q_head_num": 4}, "other heads"),
        ({"v_head_dim": 8}, "other widths"),
        ({"sinks": torch.nn.Parameter(torch.zeros(8))}, "sinks"),
        ({"teleport": 1}, "teleport"),
        ({"q_norm": torch.nn.Identity()}, "q_norm"),
        ({"__class__": ImprovedAttention}, "ImprovedAttention"),
    ],
)
def test_changed_layer(changes: dict[str, Any], word: str) -> None:
    model = Layers()
    for name, value in changes.items():
        setattr(model.layers[1], name, value)
    with pytest.raises(UnsupportedError, match=word):
        check_layers(runner(model))


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"head_num": 4}, "token by token"),
        ({"k_buffer": None}, "how MHATokenToKVPool keeps KVs"),
        ({"post_capture_active": True}, "does not grow"),
        ({"__class__": ScaledPool}, "keeps more than keys and values"),
    ],
)
def test_changed_pool(changed: dict[str, Any], word: str) -> None:
    pool = make_pool()
    assert not kv_format_of(pool, torch.float32).no_codes
    with pytest.raises(UnsupportedError, match=word):
        kv_format_of(make_pool(**changed), torch.float32)


@pytest.mark.parametrize(
    ("dtype", "dim", "why"),
    [
        (torch.float8_e4m3fn, 16, "KVs in torch.float8_e4m3fn .* four fifths"),
        (torch.float8_e5m2, 16, "KVs in torch.float8_e5m2 .* four fifths"),
        (torch.bfloat16, 16, "KVs in torch.bfloat16 stay so"),
        (torch.float32, 12, "a multiple of 8 elements"),
    ],
)
def test_kvs_that_are_not_coded(dtype: torch.dtype, dim: int, why: str) -> None:
    """By default they are exact; who names codes is told why there are none."""
    pool = make_pool(dtype, dim)
    config = ImpressConfig()
    policy, others = make_policy(config), runner(Layers())
    assert kv_shape(others, policy, config).code_bits == config.code_bits
    assert not kv_shape(runner(Layers(), pool), policy, config).coded
    no_codes = kv_format_of(pool, torch.float32).no_codes
    for bits in (USUAL, AUTO, EXACTLY):
        assert ImpressConfig(bits=bits).without_codes(no_codes).kept == EXACTLY
    asked = ({"bits": 6.0}, {"bits": 5.0}, {"keep": "both"}, {"basis": "b"}, {"blend": 0.2})
    for names in asked:
        with pytest.raises(ConfigError, match=f"{why}.*: drop --impress-{next(iter(names))}"):
            ImpressConfig(**names).without_codes(no_codes)


def test_dtypes_and_scales_of_kvs_are_part_of_the_identity() -> None:
    """And where there are scales, the backends: they differ in whether they divide by them."""
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float32):
        pool = make_pool(dtype)
        usual = _scaling(runner(Layers(), pool))
        assert usual.get("kv_dtype", "torch.float32") == str(dtype)
        model = Layers()
        model.layers[1].v_scale = 0.5
        found = [usual]
        for backend in ("triton", "torch_native"):
            scaled = runner(model, pool)
            scaled.prefill_attention_backend_str = backend
            scaled.decode_attention_backend_str = "triton"
            found.append(_scaling(scaled))
        assert all(one != other for one, other in itertools.combinations(found, 2))


PARTS, BLENDS, BASIS = {"policy": "paper"}, {"blend": 0.15}, {"basis": "a.basis"}
CLASSES = {"schedule": "classes"}
PREFILL, DRAFTS = {"disaggregation_mode": "prefill"}, {"speculative_algorithm": "EAGLE"}
# Options of ours and of SGLang's that do not go together, and what is said of that.
NOT_TOGETHER: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    *(
        (mine, {size: 2}, f"drop --{size.replace('_', '-')} 2, or --impress-{next(iter(mine))}")
        for mine in (PARTS, BLENDS, CLASSES, BASIS)
        for size in ("tp_size", "pp_size")
        # Each rank has a basis of its own.
        if (mine, size) != (BASIS, "tp_size")
    ),
    (PARTS, PREFILL, "no KVs to"),
    (BLENDS, PREFILL, "no KVs to"),
    (BLENDS, DRAFTS, "without drafts"),
    ({}, DRAFTS | {"pp_size": 2}, "knows no drafts of a pipeline"),
]


@pytest.mark.parametrize(("mine", "flags", "words"), NOT_TOGETHER)
def test_what_does_not_go_together(mine: dict[str, Any], flags: Any, words: str) -> None:
    """Each is served without the other."""
    check_options(ImpressConfig(**mine), options())
    for name, value in flags.items():
        check_options(ImpressConfig(), options(**{name: value}))
    with pytest.raises(UnsupportedError, match=words):
        check_options(ImpressConfig(**mine), options(**flags))


@pytest.mark.parametrize("mine", [{}, BASIS])
@pytest.mark.parametrize("flags", [{"enable_lora": True}, {"lora_paths": ["a"]}, DRAFTS])
def test_ranks_may_have_adapters_and_drafts(mine: dict[str, Any], flags: dict[str, Any]) -> None:
    check_options(ImpressConfig(**mine), options(tp_size=2, **flags))


def adapter(seed: int, scaling: float = 2.0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    weights = {"k_proj.lora_A.weight": torch.randn(4, 8, generator=generator)}
    fields = {"layers": [SimpleNamespace(weights=weights)], "scaling": scaling}
    return SimpleNamespace(**fields, embedding_layers={}, added_tokens_embeddings={})


def test_namespaces_of_adapters() -> None:
    """The same weights under any id, with what the request itself keeps apart."""
    loras = {"id": adapter(1), "same": adapter(1), "other": adapter(2), "scaled": adapter(1, 1.0)}
    manager = SimpleNamespace(loras=loras)

    def namespace(lora_id: str | None, extra_key: str | None, salt: str | None = None) -> str:
        key = extra_key if lora_id is None else (extra_key or "") + lora_id
        req = SimpleNamespace(lora_id=lora_id, extra_key=key, cache_salt=salt)
        return namespace_of_request(req, manager)

    assert namespace("id", None) == namespace("same", None)
    assert namespace("id", "alice", "salt") == namespace("same", "alice", "salt")
    adapters = (*loras, None)
    asked = [
        (name, key, salt) for name in adapters for key in (None, "alice") for salt in (None, "s")
    ]
    assert len({namespace(*one) for one in asked}) == len(asked) - 4
    assert namespace(None, "alice") == namespace_text("alice", None)
    loras["id"] = adapter(3)
    assert namespace("id", None) != namespace("same", None), "it was replaced"


def test_other_pools_are_part_of_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of drafts that have KVs, and of layers with windows."""
    monkeypatch.setattr(factory, "resolved_view", lambda options: options)
    monkeypatch.setattr(factory, "identity_of_options", lambda _: {})

    def drafting(seed: int, **config: int) -> Any:
        torch.manual_seed(seed)
        text = SimpleNamespace(to_dict=lambda: config)
        return SimpleNamespace(
            model=torch.nn.Linear(4, 4),
            model_config=SimpleNamespace(hf_text_config=text, dtype=torch.float32),
            token_to_kv_pool=SimpleNamespace(dtype=torch.float32),
            req_to_token_pool=None,
        )

    worker = SimpleNamespace(model_runner=drafting(1))
    context = SimpleNamespace(tp_worker=worker, server_args=None, tp_rank=0, tp_size=1)
    stages = [SimpleNamespace(pp_size=1, pp_rank=0)]
    stages += [SimpleNamespace(pp_size=2, pp_rank=rank) for rank in (1, 0)]
    found = []
    for context.params in reversed(stages):
        # Also if all layers were alike.
        found.insert(0, factory.identity_of(context, make_shape()))
    for draft in (drafting(2), drafting(3), drafting(3, rope_theta=1)):
        drafts = SimpleNamespace(_draft_model_runners=lambda draft=draft: [draft])
        runners = draft_runners(SimpleNamespace(draft_worker=drafts))
        assert runners == (draft,)
        found.append(factory.identity_of(context, make_shape(), runners))
    assert len(set(found)) == len(found)
    assert not draft_runners(SimpleNamespace(draft_worker=None))
    # With --disable-hybrid-swa-memory the same layers are stored in another order, and the first
    # tokens have all of them.
    monkeypatch.setattr(factory, "window_pool", lambda pool: pool)
    worker.model_runner.token_to_kv_pool.layers_mapping = {0: (0, True), 1: (0, False)}
    assert factory.identity_of(context, make_shape()) not in found
