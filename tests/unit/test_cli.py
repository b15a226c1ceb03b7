"""The command line: of a directory, of a server, and how it ends."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from impress_sglang.cli import DAMAGED, DONE, EXIT_STATUS, REFUSED, UNREACHABLE
from impress_sglang.cli.main import main
from impress_sglang.serving.report import RequestTotals
from impress_sglang.storage.directory import MARKER
from impress_sglang.storage.segment import FORMAT_VERSION
from impress_sglang.store.prefix_hashes import namespace_text
from tests.unit.kv_factory import IDENTITY, flip_byte
from tests.unit.store_factory import (
    OTHER_IDENTITY,
    Workbench,
    check_rows,
    index_in,
    length,
    look_up,
    prompt,
    three_prefixes,
    use,
)
from tests.unit.stub_server import StubServer

NONE, TENANT = namespace_text(None, None), namespace_text("tenant", None)
CONVERSATION = prompt(1, 128)
STORES = (IDENTITY, OTHER_IDENTITY)
Said = pytest.CaptureFixture[str]
STATS = {
    "identity": "abc",
    "suspended": None,
    "store": {"segments": 3, "used_bytes": 12345, "health": {"state": "ok"}},
    "pins": {"prefixes": 1, "bytes": 2000},
    "totals": {"requests": 7, "requests_why": RequestTotals()["requests_why"] | {"loaded": 4}},
}


class Stub(StubServer):
    """Has one answer to everything."""

    status, answer = 200, json.dumps(STATS).encode()

    def reply(self, path: str, body: Any) -> tuple[int, bytes]:
        return self.status, self.answer


@pytest.fixture
def stub() -> Iterator[Stub]:
    with Stub().serving() as stub:
        yield stub


@pytest.fixture
def left(bench: Workbench) -> Path:
    store = bench.open()
    bench.put(store, prompt(1))
    bench.put(store, prompt(1, 20), namespace="salt")
    use(store, prompt(1))
    bench.close(store)
    other = bench.open(OTHER_IDENTITY)
    bench.put(other, prompt(2))
    bench.close(other)
    return bench.root


def run(said: Said, *arguments: object) -> tuple[int, Any]:
    """Exit status, and what was printed as JSON."""
    status = main([*map(str, arguments), "--json"])
    return status, json.loads(said.readouterr().out)


def test_what_is_in_a_directory(left: Path, capsys: Said) -> None:
    status, stores = run(capsys, "stat", "--dir", left)
    assert status == DONE and [store["store"] for store in stores] == sorted(STORES)
    counts = ("segments", "tokens", "quarantined")
    assert [[store[count] for count in counts] for store in stores] == [[2, 28, 0], [1, 8, 0]]
    sizes = [path.stat().st_size for path in left.glob(f"{IDENTITY}/segments/*/*")]
    assert stores[0]["bytes"] == sum(sizes)

    status, segments = run(capsys, "ls", "--dir", left)
    assert status == DONE and [segment["tokens"] for segment in segments] == [8, 20, 8]
    assert segments[0]["hits"] == 1 and len({segment["namespace"] for segment in segments[:2]}) == 2
    assert "salt" not in json.dumps(segments)


def test_damage_is_found_and_left_alone(left: Path, capsys: Said) -> None:
    assert run(capsys, "verify", "--dir", left) == (DONE, [])
    (path, cut, _) = sorted(left.glob("*/segments/*/*"))
    flip_byte(path, path.stat().st_size - 4096)
    cut.write_bytes(cut.read_bytes()[:100])

    status, found = run(capsys, "verify", "--dir", left)

    assert status == DAMAGED and {segment["segment"] for segment in found} == {path.stem, cut.stem}
    assert any("fails its checksum" in segment["error"] for segment in found)
    assert path.exists() and cut.exists()


def test_a_directory_is_cleared(left: Path, capsys: Said) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["clear", "--dir", str(left)])
    assert refused.value.code == REFUSED and len(list(left.iterdir())) == 2
    capsys.readouterr()
    status, removed = run(capsys, "clear", "--dir", left, "--yes")
    assert status == DONE and sum(store["segments"] for store in removed) == 3
    assert list(left.iterdir()) == []
    assert main(["stat", "--dir", str(left)]) == UNREACHABLE


@pytest.mark.parametrize(
    "command",
    [
        ["stat"],
        ["ls"],
        ["verify"],
        ["gc"],
        ["clear", "--yes"],
        ["purge", "--older-than=0"],
    ],
)
def test_nothing_is_touched_beside_a_server(
    bench: Workbench, left: Path, capsys: Said, command: list[str]
) -> None:
    """Nor in the store that comes before the one that is used."""
    bench.open(OTHER_IDENTITY)
    (left / IDENTITY / "quarantine" / f"{'9' * 32}.kv").write_bytes(bytes(200))
    before = sorted(left.rglob("*.kv*"))
    assert main([*command, "--dir", str(left)]) == UNREACHABLE
    said = capsys.readouterr().err
    assert "serves a running server" in said and "--url" in said
    assert sorted(left.rglob("*.kv*")) == before


def test_what_is_no_store_is_not_made_one(tmp_path: Path, capsys: Said) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        assert main(["stat", "--dir", str(path)]) == UNREACHABLE
        assert "no store" in capsys.readouterr().err
    (tmp_path / IDENTITY).mkdir()
    assert main(["clear", "--yes", "--dir", str(tmp_path)]) == UNREACHABLE
    assert [*tmp_path.rglob("*")] == [tmp_path / IDENTITY]


def test_a_server_says_how_it_is(stub: Stub, capsys: Said) -> None:
    status, found = run(capsys, "stat", "--url", stub.url + "/", "--key", "secret")
    assert status == DONE and found["state"] == "ok" and found["why"] == {"loaded": 4}
    assert stub.asked == [("GET", "/impress/stats", None, "Bearer secret")]
    assert main(["stat", "--url", stub.url]) == DONE
    assert "used_bytes: 12,345\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "verb", "body"),
    [
        (["pin", "--text", "abc"], "pin", {"text": "abc"}),
        (["unpin", "--ids", "1,2, 3"], "unpin", {"input_ids": [1, 2, 3]}),
        (["warm", "--file", "-"], "warm", {"text": "of stdin"}),
        (["purge", "--extra-key", "t"], "purge", {"extra_key": "t"}),
        (
            ["purge", "--text", "a", "--cache-salt", "s", "--older-than", "60"],
            "purge",
            {"text": "a", "cache_salt": "s", "older_than": 60.0},
        ),
        (["purge", "--older-than", "60"], "purge", {"all": True, "older_than": 60.0}),
        (["clear", "--yes"], "purge", {"all": True}),
    ],
)
def test_orders_reach_a_server(
    stub: Stub,
    capsys: Said,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    verb: str,
    body: dict[str, Any],
) -> None:
    stub.answer = b'{"tokens": 64}'
    monkeypatch.setattr(sys, "stdin", io.StringIO("of stdin"))
    assert run(capsys, *arguments, "--url", stub.url) == (DONE, {"tokens": 64})
    assert stub.asked == [("POST", f"/impress/{verb}", body, None)]


@pytest.mark.parametrize(
    ("code", "answer", "status", "said"),
    [
        (400, b'{"error": "which prefix?"}', REFUSED, "which prefix?"),
        (401, b"", REFUSED, "--key"),
        (404, b"", UNREACHABLE, "no IMPRESS"),
        (500, b"oops", UNREACHABLE, "500"),
        (200, b"oops", UNREACHABLE, "as expected"),
    ],
)
def test_what_a_server_refuses(
    stub: Stub, capsys: Said, code: int, answer: bytes, status: int, said: str
) -> None:
    stub.status, stub.answer = code, answer
    assert main(["pin", "--text", "a", "--url", stub.url]) == status
    captured = capsys.readouterr()
    assert said in captured.err and not captured.out


@pytest.mark.parametrize(("integrity", "status"), [("ok", DONE), ("failed", DAMAGED)])
def test_a_server_is_checked(stub: Stub, capsys: Said, integrity: str, status: int) -> None:
    stub.answer = json.dumps({"integrity": integrity}).encode()
    found = run(capsys, "verify", "--url", stub.url, "--key", "k")
    assert found == (status, {"integrity": integrity})
    assert stub.asked == [("POST", "/impress/check", None, "Bearer k")]


def test_exit_codes_are_in_the_help_and_in_the_documentation(capsys: Said) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    page = (Path(__file__).parents[2] / "docs/operation.md").read_text()
    for code, meaning in EXIT_STATUS.items():
        assert f"{code}: {meaning.replace('`', '')}" in said
        assert f"| {code} | {meaning} |" in page


def test_asking_a_server_needs_no_torch() -> None:
    code = (
        "import sys; from impress_sglang.cli.main import main\n"
        "assert main(['stat', '--url', 'http://127.0.0.1:9']) == 3\n"
        "print([m for m in ('torch', 'numpy', 'sglang') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


LLAMA = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}


def test_what_prefixes_take(tmp_path: Path, capsys: Said) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    asked = ["plan", "--prefixes=100", "--tokens=4096", "--per-day=10", "--json"]
    assert main([*asked, f"--model={tmp_path}", "--bits=5"]) == DONE
    few = json.loads(capsys.readouterr().out)
    assert main([*asked, f"--model={tmp_path / 'config.json'}", "--bits=6"]) == DONE
    many = json.loads(capsys.readouterr().out)
    assert few["kv_bytes_per_token"] == 131_072
    # Ranges of keys and values come on top of their bits.
    assert 5 / 16 < few["read_share"] < 6 / 16 and 6 / 16 < many["read_share"] < 7 / 16
    assert few["ssd_gb"] == pytest.approx(0.1 * few["file_mb"], abs=0.1)
    exact_mb = 4096 * 131_072 / 1e6
    assert few["file_mb"] == pytest.approx(exact_mb * few["read_share"], rel=2e-3)
    assert main([*asked, f"--model={tmp_path}", "--keep=both"]) == DONE
    both = json.loads(capsys.readouterr().out)["file_mb"]
    assert both == pytest.approx(exact_mb + many["file_mb"], rel=1e-3)
    assert few["read_exact_ms"] == pytest.approx(exact_mb / 3, rel=1e-3)
    assert few["written_gb_per_day"] == pytest.approx(0.01 * few["file_mb"], abs=0.1)


@pytest.fixture
def tenants(bench: Workbench) -> Workbench:
    """A conversation of each of two tenants, of whom one gives no name, and another model's."""
    store = bench.open()
    for namespace in (NONE, TENANT):
        bench.put(store, CONVERSATION[:64], namespace=namespace)
        bench.put(store, CONVERSATION, namespace=namespace)
    bench.put(store, prompt(9, 64), namespace=NONE)
    bench.close(store)
    other = bench.open(OTHER_IDENTITY)
    bench.put(other, CONVERSATION, namespace=NONE)
    bench.close(other)
    return bench


def order(said: Said, bench: Workbench, *arguments: object) -> dict[str, Any]:
    status, rows = run(said, *arguments, "--dir", bench.root)
    assert status == DONE
    return {row.pop("store"): row for row in rows}


def test_purging_without_a_server(tenants: Workbench, capsys: Said) -> None:
    def purged(*options: object) -> tuple[int, int]:
        done = order(capsys, tenants, "purge", *options)
        return tuple(done.get(name, {"segments": -1})["segments"] for name in STORES)  # type: ignore[return-value]

    ids = ",".join(map(str, CONVERSATION[:70]))
    assert purged("--ids", ids, "--extra-key", "nobody") == (0, 0)
    assert purged("--older-than", 3600) == (0, 0)
    assert purged("--ids", ids) == (2, 1)
    assert len(tenants.files()) == 3
    _, rows = run(capsys, "ls", "--dir", tenants.root)
    (above,) = (row["segment"] for row in rows if row["from_token"])
    assert purged("--segment", above) == (1, -1)
    assert purged("--extra-key", "tenant") == (1, 0)
    store = tenants.reopen(tenants.open())
    assert length(store, prompt(9, 64), namespace=NONE) == 64 and len(store.tree) == 1
    tenants.close(store)
    assert purged("--older-than", 0) == (1, 0) and not tenants.files()


def test_pins_without_a_server_hold_in_one(tenants: Workbench, capsys: Said) -> None:
    pinned = prompt(9, 64)
    ids = ",".join(map(str, pinned))
    assert order(capsys, tenants, "pin", "--ids", ids)[IDENTITY]["prefixes"] == 1
    store = tenants.open()
    (span,) = look_up(store, pinned, NONE).spans
    name = span.segment.segment_id
    assert name in store.pins
    tenants.close(store)
    assert order(capsys, tenants, "unpin", "--ids", ids)[IDENTITY] == {"unpinned": 1}
    assert order(capsys, tenants, "pin", "--segment", name)[IDENTITY]["prefixes"] == 1
    assert order(capsys, tenants, "purge", "--segment", name)[IDENTITY]["unpinned"] == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["purge"], "which prefix"),
        (["purge", "--text", "hello"], "no tokenizer"),
        (["unpin", "--segment", "abc"], "no segment abc"),
        (["pin", "--ids", ",".join(["7"] * 64)], "0 of its 64 tokens are stored"),
        (["pin", "--ids", ",".join(["7"] * 63)], "at least 64 tokens"),
        (["purge", "--ids", ",".join([str(2**31)] * 64)], "2^31"),
    ],
)
def test_wrong_orders_change_nothing(
    tenants: Workbench, capsys: Said, arguments: list[str], said: str
) -> None:
    before = tenants.files()
    assert main([*arguments, "--dir", str(tenants.root)]) == REFUSED
    assert said in capsys.readouterr().err and tenants.files() == before


@pytest.fixture
def upkept(bench: Workbench) -> Workbench:
    """A directory that a server has left: 13 tokens, 27 behind them, and 8 of another tenant."""
    bench.close(three_prefixes(bench))
    return bench


def removed(said: Said, bench: Workbench) -> list[tuple[int, int]]:
    """Files and bytes of each store."""
    assert main(["gc", "--dir", str(bench.root), "--json"]) == DONE
    return [(row["files"], row["bytes"]) for row in json.loads(said.readouterr().out)]


def segment_of(bench: Workbench, num_tokens: int) -> str:
    index = index_in(bench.root / IDENTITY)
    (found,) = (name for name, segment in index.items() if segment.info.num_tokens == num_tokens)
    return found


def test_what_nobody_can_use_is_removed(
    upkept: Workbench, capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = upkept.open()
    upkept.put(store, prompt(3, 9), ttl=1000.0)
    upkept.put(store, prompt(3, 20))
    upkept.put(store, prompt(4, 8))
    upkept.put(store, prompt(5, 10))
    upkept.close(store)
    assert removed(capsys, upkept) == [(0, 0)]
    index = index_in(upkept.root / IDENTITY)
    sizes = {segment.info.num_tokens: segment.file_bytes for segment in index.values()}
    first = upkept.file_of(segment_of(upkept, 13))
    first.unlink()
    first.with_name(f"{first.stem[:2]}{'0' * 30}.kv.tmp").write_bytes(bytes(100))
    (upkept.root / IDENTITY / "quarantine" / f"{'9' * 32}.kv").write_bytes(bytes(200))
    damaged = upkept.file_of(segment_of(upkept, 10))
    damaged.write_bytes(damaged.read_bytes()[:300])
    later = time.time() + 1001
    monkeypatch.setattr("time.time", lambda: later)

    assert removed(capsys, upkept) == [(5, 100 + 200 + 300 + sizes[9] + sizes[27])]

    # What builds on what has expired.
    assert removed(capsys, upkept) == [(1, sizes[11])]
    assert len(upkept.files()) == 2 and removed(capsys, upkept) == [(0, 0)]
    store = upkept.open()
    check_rows(store, prompt(4, 8))
    check_rows(store, prompt(2, 8), namespace="salt")


def test_stores_of_other_formats(upkept: Workbench, capsys: Said) -> None:
    sizes = [path.stat().st_size for path in upkept.root.glob("*/segments/*/*")]
    for identity, version in ((OTHER_IDENTITY, FORMAT_VERSION - 1), ("e" * 32, FORMAT_VERSION + 1)):
        folder = upkept.root / identity
        shutil.copytree(upkept.root / IDENTITY, folder)
        fields = json.loads((folder / MARKER).read_text())
        (folder / MARKER).write_text(json.dumps({**fields, "format": version}))
    assert sorted(removed(capsys, upkept)) == [(0, 0), (0, 0), (3, sum(sizes))]
    assert sorted(path.name for path in upkept.root.iterdir()) == [IDENTITY, "e" * 32]
