"""What survives: a restart, other flags, new weights."""

from __future__ import annotations

from pathlib import Path

from impress_sglang.cli import DONE
from impress_sglang.cli.main import main
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.segment import read_header
from tests.serving.compare import paths, report
from tests.serving.conftest import Serve
from tests.serving.tiny_models import random_tokens
from tests.unit.waiting import wait_until


def test_whole_prefix_policy_other_flags_and_new_weights(
    workdir: Path, serve: Serve, other_llama: Path
) -> None:
    """`as` reads each byte once; the next server has another chunk size, then other weights.

    It has what was exported from the store of the first one, which is gone.
    """
    store = workdir / "store-as"
    prompt = random_tokens(1000, seed=11)
    question = [*prompt, *random_tokens(10, seed=12)]
    flags = ("--max-total-tokens=8000", "--impress-policy=as")
    with serve("as", *flags, stops=True) as server:
        server.store_prompts(prompt)
        (segment,) = store.glob("*/segments/*/*.kv")
        answer = server.generate(question, 4)
        said = report(answer)
        assert said["path"] == "ssd" and said["layers_whole"] == 3
        assert said["used_tokens"] == 1000 and said["approximate"] is False
        layout = read_header(segment, FileSystem()).info.layout()
        kv_bytes = layout.columns.num_bytes
        assert said["ssd_bytes"] == 3 * kv_bytes, "an `as` hit reads each key and value once"
        assert paths([server.generate(question, 1)]) == ["device"]
    file, at = workdir / "prefixes", ["--dir", str(store)]
    assert main(["export", str(file), *at]) == main(["clear", "--yes", *at]) == DONE
    assert not segment.exists()
    assert main(["import", str(file), *at]) == DONE
    with serve("as", *flags, "--impress-chunk-tokens=16") as server:
        assert paths([server.generate(question, 1)]) == ["ssd"]
        fresh = random_tokens(300, seed=13)
        server.store_prompts(fresh)
        assert paths([server.generate([*fresh, 7, 8], 1)]) == ["ssd"]
        changed = server.post("/update_weights_from_disk", model_path=str(other_llama))
        assert changed.ok and changed.json()["success"]
        assert paths([server.generate(question, 1)]) == ["computed"]


def test_a_server_that_is_refused_ends(serve: Serve) -> None:
    """In one sentence; `tests/integration/test_refusals.py` has what is refused."""
    with serve("refused", "--disable-radix-cache", waits=False, quiet=False) as server:
        wait_until(lambda: not server.process.is_alive(), 60)
    assert "the radix cache: drop --disable-radix-cache" in server.log_text()
    assert "Traceback" not in server.log_text()
