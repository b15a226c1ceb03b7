"""SGLang's HiCache with its pages in our files: found again, verified, of these weights only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.core.servers import HICACHE
from impress_sglang.cli import DONE
from impress_sglang.cli.main import main
from impress_sglang.hicache.pages import SUFFIX
from tests.damage import flip_bit
from tests.serving.conftest import TINY_FLAGS, Serve
from tests.serving.harness import LATENT, Server
from tests.serving.tiny_models import make_model, random_tokens
from tests.unit.waiting import wait_until

PAGE = 64
FLAGS = (
    *TINY_FLAGS,
    "--max-total-tokens=8000",
    "--enable-hierarchical-cache",
    "--enable-cache-report",
    f"--page-size={PAGE}",
    "--hicache-ratio=1.1",
    "--hicache-io-backend=direct",
    "--hicache-mem-layout=layer_first",
    "--hicache-write-policy=write_through",
    "--hicache-storage-prefetch-policy=wait_complete",
    "--hicache-storage-backend=dynamic",
)


def stored_by(answer: dict[str, Any]) -> int:
    """Tokens of a prompt that came from the storage."""
    details = answer["meta_info"]["cached_tokens_details"]
    return int((details or {}).get("storage", 0))


@pytest.fixture
def serving(start: Serve, capsys: pytest.CaptureFixture[str]) -> Serve:
    """A server whose HiCache stores in a folder, by what the command line prints."""

    def serving(name: str, model: Path, store: Path, *more: str, **how: Any) -> Any:
        assert main(["hicache-config", "--ssd-dir", str(store), "--ssd-gb", "1", *more]) == DONE
        config = f"--hicache-storage-backend-extra-config={capsys.readouterr().out}"
        return start(name, *FLAGS, config, model=model, **{"preload": HICACHE, **how})

    return serving


def packs(store: Path) -> list[Path]:
    return list(store.glob(f"hicache/*/*{SUFFIX}"))


def test_pages_are_kept_and_verified(workdir: Path, tiny_llama: Path, serving: Serve) -> None:
    store = workdir / "hicache"
    prompt = random_tokens(20 * PAGE + 5, seed=31)
    whole = 20 * PAGE
    with serving("hicache-first", tiny_llama, store, stops=True) as server:
        computed = server.generate(prompt, 8)
        assert stored_by(computed) == 0
        wait_until(lambda: packs(store))
        # Of memory on the host as well.
        server.flush()
        again = server.generate(prompt, 8)
        assert stored_by(again) == whole
        assert again["output_ids"] == computed["output_ids"]
    with serving("hicache-restarted", tiny_llama, store) as server:
        again = server.generate(prompt, 8)
        assert stored_by(again) == whole
        assert again["output_ids"] == computed["output_ids"]
        server.flush()
        (pack,) = packs(store)
        flip_bit(pack, pack.stat().st_size // 2)
        again = server.generate(prompt, 8)
        assert 0 < stored_by(again) < whole, "pages before the damaged one are whole"
        assert again["output_ids"] == computed["output_ids"]
        assert "fails a checksum" in server.log_text()
        # What was computed is stored again, in another pack.
        wait_until(lambda: packs(store) and pack not in packs(store))


def test_few_bits_and_new_weights(
    workdir: Path, tiny_llama: Path, other_llama: Path, serving: Serve
) -> None:
    """Pages take half of their bytes, and follow the weights of a server that runs; each of two
    ranks has those of its own heads."""
    store, whole = workdir / "hicache-bits", 20 * PAGE
    prompt = random_tokens(whole + 5, seed=32)
    with serving("hicache-bits", tiny_llama, store, "--bits", "6", ranks=2) as server:
        for count in (1, 2):
            assert stored_by(server.generate(prompt, 1)) == 0
            wait_until(lambda count=count: len(packs(store)) == 2 * count)
            server.flush()
            assert stored_by(server.generate(prompt, 1)) == whole
            # Of a head of 16, keys and values, in three layers.
            exact_bytes = whole * 4 * 2 * 16 * 3
            assert all(pack.stat().st_size < exact_bytes * 0.5 for pack in packs(store))
            changed = server.post("/update_weights_from_disk", model_path=str(other_llama))
            assert changed.ok and changed.json()["success"]


def ask_until_stored(server: Server, prompt: list[int], whole: int) -> dict[str, Any]:
    """Ask until all ranks know of all pages, which may have been heard of by one alone."""
    answers: list[dict[str, Any]] = []

    def comes() -> bool:
        server.flush()
        answers.append(server.generate(prompt, 8))
        return stored_by(answers[-1]) == whole

    wait_until(comes)
    return answers[-1]


def test_latent_vectors_of_two_ranks(workdir: Path, serving: Serve) -> None:
    """The first one writes what both read."""
    store, whole = workdir / "hicache-ranks", 20 * PAGE
    model = make_model("deepseek_v2", workdir / "hicache-latent")
    prompt = random_tokens(whole + 5, seed=33)
    how = {"ranks": 2, "preload": f"{HICACHE},{LATENT}"}
    with serving("hicache-ranks", model, store, **how) as server:
        computed = server.generate(prompt, 8)

        def are_stored() -> bool:
            sizes = [pack.stat().st_size for pack in packs(store)]
            # A latent vector and what is rotated, in three layers.
            return len(sizes) == 1 and sum(sizes) >= whole * 4 * (64 + 16) * 3

        wait_until(are_stored)
        again = ask_until_stored(server, prompt, whole)
        assert again["output_ids"] == computed["output_ids"]
        # What one rank lacks neither uses.
        server.flush()
        damaged = max(packs(store))
        flip_bit(damaged, damaged.stat().st_size // 2)
        again = server.generate(prompt, 8)
        # None, if one has found that, and removed the file, before the other reads it.
        assert stored_by(again) < whole
        assert again["output_ids"] == computed["output_ids"]
