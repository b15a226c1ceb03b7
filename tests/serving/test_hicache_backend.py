"""SGLang's HiCache with its pages in our files: found again, verified, of these weights only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.core.servers import HICACHE
from impress_sglang.cli.main import main
from impress_sglang.cli.outcome import DONE
from impress_sglang.hicache.packs import SUFFIX
from tests.serving.conftest import TINY_FLAGS
from tests.serving.harness import Server, Zygote, running
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


def test_pages_are_kept_verified_and_of_these_weights(
    workdir: Path, tiny_llama: Path, zygote: Zygote, capsys: pytest.CaptureFixture[str]
) -> None:
    store = workdir / "hicache"
    assert main(["hicache-config", "--ssd-dir", str(store), "--ssd-gb", "1"]) == DONE
    told = capsys.readouterr().out

    @contextmanager
    def serving(name: str, model: Path) -> Iterator[Server]:
        config = f"--hicache-storage-backend-extra-config={told}"
        log = workdir / f"{name}.log"
        with running(model, log, *FLAGS, config, zygote=zygote, preload=HICACHE) as server:
            yield server
            server.assert_quiet()

    prompt = random_tokens(20 * PAGE + 5, seed=31)
    whole = 20 * PAGE
    with serving("hicache-first", tiny_llama) as server:
        computed = server.generate(prompt, 8)
        assert stored_by(computed) == 0
        wait_until(lambda: list(store.glob(f"hicache/*/*{SUFFIX}")))
        # Of memory on the host as well.
        server.flush()
        again = server.generate(prompt, 8)
        assert stored_by(again) == whole
        assert again["output_ids"] == computed["output_ids"]
    with serving("hicache-restarted", tiny_llama) as server:
        again = server.generate(prompt, 8)
        assert stored_by(again) == whole
        assert again["output_ids"] == computed["output_ids"]
        server.flush()
        (pack,) = store.glob(f"hicache/*/*{SUFFIX}")
        content = bytearray(pack.read_bytes())
        content[len(content) // 2] ^= 1
        pack.write_bytes(content)
        again = server.generate(prompt, 8)
        assert 0 < stored_by(again) < whole, "pages before the damaged one are whole"
        assert again["output_ids"] == computed["output_ids"]
        assert "fails a checksum" in server.log_text()
        # What was computed is stored again, in another pack.
        wait_until(lambda: pack not in store.glob(f"hicache/*/*{SUFFIX}"))
    other = make_model("llama", workdir / "of-the-same-name" / "llama", initializer_range=0.1)
    with serving("hicache-others", other) as server:
        assert stored_by(server.generate(prompt, 8)) == 0
