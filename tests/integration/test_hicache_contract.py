"""Our backend as SGLang's HiCache makes and calls it, with host pools of SGLang's."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from sglang.srt.mem_cache import hicache_storage
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host import base
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory

from impress_sglang.cli.main import HICACHE
from impress_sglang.errors import ConfigError, UnsupportedError
from impress_sglang.hicache import pages as pages_module
from impress_sglang.hicache.plugin import backend as backend_module
from impress_sglang.hicache.plugin.backend import PageStoreGuard
from impress_sglang.plugin import compat
from impress_sglang.plugin.entry import _around_init
from impress_sglang.storage.files import FileSystem

PAGE, LAYERS, TOKENS = 16, 3, 256
LAYOUTS = ("layer_first", "page_first", "page_first_direct")
HASHES = [f"{number:064x}" for number in range(8)]
ALONE = hicache_storage.HiCacheStorageConfig(
    tp_rank=0,
    tp_size=1,
    pp_rank=0,
    pp_size=1,
    attn_cp_rank=0,
    attn_cp_size=1,
    is_mla_model=False,
    enable_storage_metrics=True,
    is_page_first_layout=False,
    model_name="a name that says nothing",
)
Make = Callable[..., Any]


def host_pool(
    layout: str, kind: str = "MHA", dtype: torch.dtype = torch.bfloat16, page: int = PAGE
) -> Any:
    """With KVs that are told apart."""
    how: dict[str, Any] = {"layout": layout, "pin_memory": False, "page_size": page}
    how |= {"host_to_device_ratio": 2.0, "host_size": 0}
    device: Any
    if kind == "MHA":
        device = MHATokenToKVPool(TOKENS, page, dtype, 2, 16, LAYERS, "cpu", False)
        host: Any = MHATokenToKVPoolHost
    else:
        device = MLATokenToKVPool(TOKENS, page, dtype, 32, 8, LAYERS, "cpu", False)
        host = functools.partial(MLATokenToKVPoolHost, target_layer_num=LAYERS)
    if hasattr(device, "get_device_pool_infos"):
        (info,) = device.get_device_pool_infos()
        how |= {"device_capacity_tokens": TOKENS, "start_layer": 0, "end_layer": LAYERS}
        pool = host(info.buffer_info, **how)
    else:  # before SGLang 0.5.23
        pool = getattr(host, "func", host)(device, **how)
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape))
    return pool


def slots(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def page_of(pool: Any, page: int) -> torch.Tensor:
    return pool.get_data_page(page * PAGE).clone()


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch) -> PageStoreGuard:
    """Of a scheduler that is noted."""
    guard = backend_module.remember_scheduler(SimpleNamespace())
    guard.__dict__["context"] = SimpleNamespace(
        server_args=SimpleNamespace(enable_dp_attention=False)
    )
    guard.identity = "ab" * 16
    monkeypatch.setattr(backend_module, "_guard", guard)
    return guard


@pytest.fixture
def make(
    tmp_path: Path, weights: PageStoreGuard, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Make]:
    """Makes backends as HiCache does."""
    monkeypatch.setattr(base, "HICACHE_HOST_MEMORY_RESERVE_BYTES", 0)
    monkeypatch.setattr(pages_module, "SCAN_SECONDS", -1.0)
    made = []

    def make_backend(pool: Any, **how: Any) -> Any:
        extra = HICACHE | {"ssd_dir": str(tmp_path), "ssd_gb": 1} | how.pop("extra", {})
        config = dataclasses.replace(ALONE, extra_config=extra, **how)
        backend = StorageBackendFactory.create_backend("dynamic", config, pool)
        made.append(backend)
        backend.register_mem_pool_host(pool)
        backend.register_mem_host_pool_v2(pool, PoolName.KV)
        if hasattr(backend, "on_host_pools_registered"):  # since SGLang 0.5.23
            backend.on_host_pools_registered()
        return backend

    yield make_backend
    for backend in made:
        backend.close()


@pytest.mark.parametrize("kind", ["MHA", "MLA"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_of_all_layouts_come_back(make: Make, layout: str, kind: str) -> None:
    pool = host_pool(layout, kind)
    backend = make(pool)
    wanted = [page_of(pool, page) for page in (2, 5, 3)]
    assert backend.batch_set_v1(HASHES[:3], slots(2, 5, 3)) == [True] * 3
    assert backend.batch_exists(HASHES) == 3
    untouched = page_of(pool, 7)
    # To other pages, with one that is not there.
    assert backend.batch_get_v1([*HASHES[:2], HASHES[6], HASHES[2]], slots(9, 1, 7, 4)) == [
        *(True, True, False, True)
    ]
    for page, expected in zip((9, 1, 4), wanted, strict=True):
        assert torch.equal(page_of(pool, page), expected)
    assert torch.equal(page_of(pool, 7), untouched)
    stats = backend.get_stats()
    assert stats.backup_pgs == [3] and stats.prefetch_pgs == [3]
    assert backend.get_stats().backup_pgs == []
    backend.clear()
    assert backend.batch_exists(HASHES) == 0


def test_pages_of_another_form_are_others(make: Make) -> None:
    """Of other layouts, dtypes and pools, under the same hashes."""
    backend = make(pool := host_pool("layer_first"))
    backend.batch_set_v1(HASHES, slots(*range(8)))
    for other in (host_pool("page_first"), host_pool("layer_first", dtype=torch.float16)):
        assert make(other).batch_exists(HASHES) == 0
    assert make(pool).batch_exists(HASHES) == 8


def test_other_pools_of_a_model(make: Make) -> None:
    pool, draft = host_pool("layer_first"), host_pool("layer_first")
    backend = make(pool)
    backend.register_mem_host_pool_v2(draft, PoolName.DRAFT)
    backend.batch_set_v1(HASHES, slots(*range(8)))
    wanted = page_of(draft, 2)

    def transfer(hashes: list[str], pages: tuple[int, ...]) -> list[PoolTransfer]:
        return [PoolTransfer(PoolName.DRAFT, host_indices=slots(*pages), keys=hashes)]

    def hits(policy: PoolHitPolicy, count: int = 1) -> Any:
        asked = PoolTransfer(PoolName.DRAFT, keys=HASHES[:count], hit_policy=policy)
        return backend.batch_exists_v2(HASHES, [asked])

    assert hits(PoolHitPolicy.ALL_PAGES).kv_hit_pages == 0
    stored = transfer([HASHES[0], HASHES[1], HASHES[4], HASHES[5]], (2, 3, 4, 5))
    assert backend.batch_set_v2(stored) == {PoolName.DRAFT: [True] * 4}
    every = hits(PoolHitPolicy.ALL_PAGES)
    assert every.kv_hit_pages == 2
    assert every.extra_pool_hit_pages == {PoolName.KV: 8, PoolName.DRAFT: 2}
    last = hits(PoolHitPolicy.TRAILING_PAGES, 2)
    assert last.kv_hit_pages == 6 and last.restorable_prefix_pages == [1, 2, 6]
    assert backend.batch_exists_v2(HASHES).kv_hit_pages == 8
    found = backend.batch_get_v2(transfer([HASHES[0], HASHES[2]], (9, 10)))
    assert found == {PoolName.DRAFT: [True, False]}
    assert torch.equal(page_of(draft, 9), wanted)
    # Fewer slots than pages.
    assert backend.batch_get_v2(transfer(HASHES[:2], (9,))) == {PoolName.DRAFT: [False] * 2}


def test_ranks_share_latent_pages_and_no_others(make: Make) -> None:
    """Of latent KVs HiCache lets the first rank write, which all have; of heads, each."""
    for kind, shared in (("MLA", 2), ("MHA", 0)):
        pool, how = host_pool("layer_first", kind), {"tp_size": 2, "is_mla_model": kind == "MLA"}
        make(pool, tp_rank=0, **how).batch_set_v1(HASHES[:2], slots(0, 1))
        assert make(pool, tp_rank=1, **how).batch_exists(HASHES) == shared


def test_pages_are_set_aside_while_weights_change(
    make: Make, weights: PageStoreGuard, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make(host_pool("layer_first"))
    backend.batch_set_v1(HASHES[:2], slots(0, 1))
    weights.suspended_by = "update_weights"
    assert backend.batch_exists(HASHES) == 0
    assert backend.batch_exists_v2(HASHES).kv_hit_pages == 0
    assert backend.batch_get_v1(HASHES[:2], slots(0, 1)) == [False] * 2
    assert backend.batch_set_v1(HASHES[2:3], slots(2)) == [False]
    weights.resume()
    assert backend.batch_exists(HASHES) == 2
    weights.reopen("cd" * 16)
    assert backend.batch_exists(HASHES) == 0
    with monkeypatch.context() as patch:
        patch.setattr(FileSystem, "make_directory", mock.Mock(side_effect=OSError))
        weights.reopen("ab" * 16)
    assert weights.identity == "" and backend.batch_exists(HASHES) == 0, "a flush tries again"
    weights.reopen("ab" * 16)
    assert backend.batch_exists(HASHES) == 2


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_pages_in_few_bits(make: Make, layout: str, dtype: torch.dtype) -> None:
    """They are near, apart from exact ones, and the first tokens of each are as they were."""
    pool = host_pool(layout, dtype=dtype, page=64)
    exact, backend = make(pool), make(pool, extra={"bits": 6})

    def kvs() -> torch.Tensor:
        buffer = pool.kv_buffer if layout == "layer_first" else pool.kv_buffer.transpose(1, 2)
        pages = buffer.float().reshape(2, LAYERS, -1, 2, 16)[:, :, :128]
        return pages.unflatten(2, (2, 64)).clone()

    wanted = kvs()
    assert backend.batch_set_v1(HASHES[:2], torch.arange(128)) == [True] * 2
    assert exact.batch_exists(HASHES) == 0
    pool.kv_buffer.zero_()
    assert backend.batch_get_v1(HASHES[:2], torch.arange(128)) == [True] * 2
    error = (wanted - kvs()).abs()
    assert not error[:, :, :, :4].any() and 0 < error.max() < 0.25 and error.mean() < 0.03
    stats = backend.get_stats()
    assert stats.backup_pgs == [2] and stats.prefetch_pgs == [2]
    # What no range holds is not stored; the page beside it is.
    pool.set_from_flat_data_page(64, torch.full_like(pool.get_data_page(64), torch.inf))
    assert backend.batch_set_v1(HASHES[2:4], torch.arange(128)) == [True, False]


# What is asked for, of which pool, and why it is refused.
REFUSED = [
    ({"extra": {"ssd_tb": 1}}, "MHA", r"unknown .*: ssd_tb"),
    ({"extra": {"ssd_gb": 0}}, "MHA", "ssd-gb must be"),
    ({"extra": {"interface_v1": 0}}, "MHA", "interface_v1: .impress hicache-config. prints it"),
    ({"extra": {"bits": 4}}, "MHA", "one of 5, 6"),
    ({"extra": {"bits": 6}}, "MHA", "multiple of 64 tokens"),
    ({"extra": {"bits": 6}}, "MLA", r"MLA.* drop bits"),
    ({"pp_size": 2}, "MHA", "drop --pp-size 2"),
    ({}, "MHA", "tells no weights"),
]


@pytest.mark.parametrize(("how", "kind", "why"), REFUSED)
def test_what_is_refused(
    make: Make, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any], kind: str, why: str
) -> None:
    if not how:
        monkeypatch.setattr(backend_module, "_guard", None)
    with pytest.raises((ConfigError, UnsupportedError), match=why):
        make(host_pool("layer_first", kind), **how)


def test_adapters_are_refused(make: Make, weights: PageStoreGuard) -> None:
    """Others of the same name and path would have the same pages."""
    weights.context.server_args.enable_lora = True
    with pytest.raises(UnsupportedError, match="drop --enable-lora"):
        make(host_pool("layer_first"))


def test_none_is_attached_to_a_running_server(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of another one: nobody has watched the weights since the start."""
    monkeypatch.setattr(compat, "scheduler", None)
    arguments = SimpleNamespace(device="cuda", hicache_storage_backend="dynamic")
    _around_init(lambda *_: None, SimpleNamespace(tree_cache=None), arguments)
    with pytest.raises(UnsupportedError, match="from the start"):
        make(host_pool("layer_first"))
