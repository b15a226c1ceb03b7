"""The command line: of a directory, of a server, and how it ends."""

from __future__ import annotations

import io
import json
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from impress_sglang.cli import DAMAGED, DONE, EXIT_STATUS, REFUSED, UNREACHABLE, directory
from impress_sglang.cli.main import main
from impress_sglang.serving.report import RequestTotals
from impress_sglang.storage.directory import MARKER
from impress_sglang.storage.segment import FORMAT_VERSION
from impress_sglang.store.prefix_hashes import namespace_text
from tests.unit import store_factory
from tests.unit.kv_factory import IDENTITY, flip_byte
from tests.unit.store_factory import OTHER_IDENTITY, Workbench, check_rows, prompt, three_prefixes
from tests.unit.stub_server import StubServer

NONE, TENANT = namespace_text(None, None), namespace_text("tenant", None)
CONVERSATION = prompt(1, 128)
Output = pytest.CaptureFixture[str]


@pytest.fixture
def stub() -> Iterator[StubServer]:
    with StubServer().serving() as stub:
        yield stub


@pytest.fixture
def left(bench: Workbench) -> Workbench:
    """What servers of two models have left."""
    store = three_prefixes(bench)
    store_factory.use(store, prompt(1, 13))
    bench.close(store)
    other = bench.open(OTHER_IDENTITY)
    bench.put(other, prompt(2))
    bench.close(other)
    return bench


def run(output: Output, *arguments: object) -> tuple[int, Any]:
    """Exit status, and what was printed as JSON."""
    status = main([*map(str, arguments), "--json"])
    return status, json.loads(output.readouterr().out)


def test_what_is_in_a_directory(left: Workbench, capsys: Output) -> None:
    status, stores = run(capsys, "stat", "--dir", left.root)
    names = ("store", "segments", "tokens", "quarantined")
    rows = [[store[name] for name in names] for store in stores]
    assert status == DONE and rows == [[IDENTITY, 3, 48, 0], [OTHER_IDENTITY, 1, 8, 0]]
    for store in stores:
        files = left.root.glob(f"{store['store']}/segments/*/*")
        assert store["bytes"] == sum(path.stat().st_size for path in files)

    status, segments = run(capsys, "ls", "--dir", left.root)
    assert status == DONE
    first, *_ = ours = [segment for segment in segments if segment["store"] == IDENTITY]
    assert (first["tokens"], first["hits"]) == (13, 2)
    assert sorted(segment["tokens"] for segment in segments) == [8, 8, 13, 27]
    assert len({segment["namespace"] for segment in ours}) == 2
    assert "salt" not in json.dumps(segments)


def test_damage_is_found_and_left_alone(left: Workbench, capsys: Output) -> None:
    assert run(capsys, "verify", "--dir", left.root) == (DONE, [])
    path, cut, *_ = sorted(left.root.glob("*/segments/*/*"))
    flip_byte(path, path.stat().st_size - 4096)
    cut.write_bytes(cut.read_bytes()[:100])

    status, damaged = run(capsys, "verify", "--dir", left.root)

    assert status == DAMAGED
    assert {segment["segment"] for segment in damaged} == {path.stem, cut.stem}
    assert any("fails its checksum" in segment["error"] for segment in damaged)
    assert path.exists() and cut.exists()


def test_a_directory_is_cleared(left: Workbench, capsys: Output) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["clear", "--dir", str(left.root)])
    assert refused.value.code == REFUSED and len(list(left.root.iterdir())) == 2
    capsys.readouterr()
    status, stores = run(capsys, "clear", "--dir", left.root, "--yes")
    assert status == DONE and sum(store["segments"] for store in stores) == 4
    assert list(left.root.iterdir()) == []
    assert main(["stat", "--dir", str(left.root)]) == UNREACHABLE


@pytest.mark.parametrize(
    "command", ["stat", "ls", "verify", "gc", "clear --yes", "purge --older-than=0"]
)
def test_nothing_is_touched_beside_a_server(left: Workbench, capsys: Output, command: str) -> None:
    """Nor in the store that comes before the one that is used."""
    left.open(OTHER_IDENTITY)
    (left.root / IDENTITY / "quarantine" / f"{'9' * 32}.kv").write_bytes(bytes(200))
    before = sorted(left.root.rglob("*.kv*"))
    assert main([*command.split(), "--dir", str(left.root)]) == UNREACHABLE
    message = capsys.readouterr().err
    assert "serves a running server" in message and "--url" in message
    assert sorted(left.root.rglob("*.kv*")) == before


def test_what_is_no_store_is_not_made_one(tmp_path: Path, capsys: Output) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        assert main(["stat", "--dir", str(path)]) == UNREACHABLE
        assert "no store" in capsys.readouterr().err
    (tmp_path / IDENTITY).mkdir()
    assert main(["clear", "--yes", "--dir", str(tmp_path)]) == UNREACHABLE
    assert [*tmp_path.rglob("*")] == [tmp_path / IDENTITY]


def test_a_server_says_how_it_is(stub: StubServer, capsys: Output) -> None:
    why = RequestTotals()["requests_why"] | {"loaded": 4}
    store = {"segments": 3, "used_bytes": 12345, "health": {"state": "ok"}}
    stats = {"identity": "abc", "suspended": None, "store": store, "pins": {"prefixes": 1}}
    stats["totals"] = {"requests": 7, "requests_why": why}
    stub.answer = json.dumps(stats).encode()
    status, row = run(capsys, "stat", "--url", stub.url + "/", "--key", "secret")
    assert status == DONE and row["state"] == "ok" and row["why"] == {"loaded": 4}
    assert stub.asked == [("GET", "/impress/stats", None, "Bearer secret")]
    assert main(["stat", "--url", stub.url]) == DONE
    assert "used_bytes: 12,345\n" in capsys.readouterr().out


def test_a_damaged_server_says_so(stub: StubServer, capsys: Output) -> None:
    stub.answer = b'{"integrity": "failed"}'
    assert run(capsys, "verify", "--url", stub.url) == (DAMAGED, {"integrity": "failed"})


@pytest.mark.parametrize(
    ("command", "verb", "body"),
    [
        ("pin --text abc", "pin", {"text": "abc"}),
        ("unpin --ids 1,2,3", "unpin", {"input_ids": [1, 2, 3]}),
        ("warm --file -", "warm", {"text": "of stdin"}),
        ("purge --extra-key t", "purge", {"extra_key": "t"}),
        (
            "purge --text a --cache-salt s --older-than 60",
            "purge",
            {"text": "a", "cache_salt": "s", "older_than": 60.0},
        ),
        ("purge --older-than 60", "purge", {"all": True, "older_than": 60.0}),
        ("clear --yes", "purge", {"all": True}),
        ("verify", "check", None),
    ],
)
def test_orders_reach_a_server(
    stub: StubServer,
    capsys: Output,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    verb: str,
    body: dict[str, Any] | None,
) -> None:
    stub.answer = b'{"integrity": "ok"}'
    monkeypatch.setattr(sys, "stdin", io.StringIO("of stdin"))
    assert run(capsys, *command.split(), "--url", stub.url) == (DONE, {"integrity": "ok"})
    assert stub.asked == [("POST", f"/impress/{verb}", body, None)]


@pytest.mark.parametrize(
    ("code", "answer", "status", "message"),
    [
        (400, b'{"error": "which prefix?"}', REFUSED, "which prefix?"),
        (401, b"", REFUSED, "--key"),
        (404, b"", UNREACHABLE, "no IMPRESS"),
        (500, b"oops", UNREACHABLE, "500"),
        (200, b"oops", UNREACHABLE, "as expected"),
        (200, b"null", UNREACHABLE, "as expected"),
    ],
)
def test_what_a_server_refuses(
    stub: StubServer, capsys: Output, code: int, answer: bytes, status: int, message: str
) -> None:
    stub.status, stub.answer = code, answer
    assert main(["pin", "--text", "a", "--url", stub.url]) == status
    captured = capsys.readouterr()
    assert message in captured.err and not captured.out


@pytest.mark.parametrize("command", ["stat", "verify", "pin --text a"])
@pytest.mark.parametrize("said", ["SSH-2.0", "HTTP/1.1 200 OK", "HTTP/1.1 500 Oh"])
def test_what_is_no_answer(capsys: Output, command: str, said: str) -> None:
    """That of another protocol, or one that is cut off."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30)

        def answer() -> None:
            with server.accept()[0] as connection:
                connection.recv(1 << 16)
                connection.sendall(f"{said}\r\nContent-Length: 99\r\n\r\n{{".encode())

        with ThreadPoolExecutor(1) as pool:
            pool.submit(answer)
            url = f"http://127.0.0.1:{server.getsockname()[1]}"
            assert main([*command.split(), "--url", url]) == UNREACHABLE
    assert "as expected" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["stat", "ls"])
@pytest.mark.parametrize("answer", [b"{}", b"[]", b"7", None])
def test_who_is_no_server_of_ours(
    stub: StubServer, capsys: Output, command: str, answer: bytes | None
) -> None:
    stub.answer = answer or b""
    url = "http://127.0.0.1:port" if answer is None else stub.url
    assert main([command, "--url", url]) == UNREACHABLE
    assert "as expected" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["ls --dir", "hicache-config --ssd-gb=1 --ssd-dir"])
def test_a_home_that_nobody_has(capsys: Output, command: str) -> None:
    with pytest.raises(SystemExit) as refused:
        main([*command.split(), "~nobody-at-all/kv"])
    assert refused.value.code == REFUSED and "home directory" in capsys.readouterr().err


def test_exit_codes_are_in_the_help_and_in_the_documentation(capsys: Output) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    page = (Path(__file__).parents[2] / "docs/operation.md").read_text()
    for code, meaning in EXIT_STATUS.items():
        assert f"{code}: {meaning.replace('`', '')}" in text
        assert f"| {code} | {meaning} |" in page


def test_asking_a_server_needs_no_torch() -> None:
    code = (
        "import sys; from impress_sglang.cli.main import main\n"
        "assert main(['stat', '--url', 'http://127.0.0.1:9']) == 3\n"
        "print([m for m in ('torch', 'numpy', 'sglang') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


def test_what_prefixes_take(tmp_path: Path, capsys: Output) -> None:
    llama = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    llama_config = llama | {"hidden_size": 4096, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(llama_config))

    def plan(model: Path, option: str) -> dict[str, Any]:
        sizes = ("--prefixes=100", "--tokens=4096", "--per-day=10")
        status, row = run(capsys, "plan", f"--model={model}", *sizes, option)
        assert status == DONE
        return row

    few, many = plan(tmp_path, "--bits=5"), plan(tmp_path / "config.json", "--bits=6")
    assert few["kv_bytes_per_token"] == 131_072
    # Ranges of keys and values come on top of their bits.
    assert 5 / 16 < few["read_share"] < 6 / 16 < many["read_share"] < 7 / 16
    exact_mb = 4096 * 131_072 / 1e6
    assert few["file_mb"] == pytest.approx(exact_mb * few["read_share"], rel=2e-3)
    assert few["ssd_gb"] == pytest.approx(0.1 * few["file_mb"], abs=0.1)
    assert few["read_exact_ms"] == pytest.approx(exact_mb / 3, rel=1e-3)
    assert few["written_gb_per_day"] == pytest.approx(0.01 * few["file_mb"], abs=0.1)
    both = plan(tmp_path, "--keep=both")
    assert both["file_mb"] == pytest.approx(exact_mb + many["file_mb"], rel=1e-3)


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


def order(output: Output, bench: Workbench, *arguments: object) -> dict[str, Any]:
    """What was done, by store."""
    status, rows = run(output, *arguments, "--dir", bench.root)
    assert status == DONE
    return {row.pop("store"): row for row in rows}


def test_purging_without_a_server(tenants: Workbench, capsys: Output) -> None:
    def purged(*options: object) -> dict[str, int]:
        rows = order(capsys, tenants, "purge", *options)
        return {name: row["segments"] for name, row in rows.items()}

    ids = ",".join(map(str, CONVERSATION[:70]))
    assert not any(purged("--ids", ids, "--extra-key", "nobody").values())
    assert not any(purged("--older-than", 3600).values())
    assert purged("--ids", ids) == {IDENTITY: 2, OTHER_IDENTITY: 1}
    assert len(tenants.files()) == 3
    _, rows = run(capsys, "ls", "--dir", tenants.root)
    (last,) = (row["segment"] for row in rows if row["from_token"])
    assert purged("--segment", last) == {IDENTITY: 1}
    assert purged("--extra-key", "tenant")[IDENTITY] == 1
    store = tenants.reopen(tenants.open())
    assert store_factory.length(store, prompt(9, 64), namespace=NONE) == 64 and len(store.tree) == 1
    tenants.close(store)
    assert purged("--older-than", 0)[IDENTITY] == 1 and not tenants.files()


def test_pins_without_a_server_hold_in_one(tenants: Workbench, capsys: Output) -> None:
    pinned = prompt(9, 64)
    ids = ",".join(map(str, pinned))
    assert order(capsys, tenants, "pin", "--ids", ids)[IDENTITY]["prefixes"] == 1
    store = tenants.open()
    (span,) = store_factory.look_up(store, pinned, NONE).spans
    name = span.segment.segment_id
    assert name in store.pins
    tenants.close(store)
    assert order(capsys, tenants, "unpin", "--ids", ids)[IDENTITY] == {"unpinned": 1}
    assert order(capsys, tenants, "pin", "--segment", name)[IDENTITY]["prefixes"] == 1
    assert order(capsys, tenants, "purge", "--segment", name)[IDENTITY]["unpinned"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["purge"], "which prefix"),
        (["purge", "--text", "hello"], "no tokenizer"),
        (["unpin", "--segment", "abc"], "no segment abc"),
        (["pin", "--ids", ",".join(map(str, prompt(1, 192)))], "128 of its 192 tokens are stored"),
        (["pin", "--ids", ",".join(["7"] * 64)], "0 of its 64 tokens are stored"),
        (["pin", "--ids", ",".join(["7"] * 63)], "at least 64 tokens"),
        (["purge", "--ids", ",".join([str(2**31)] * 64)], "2^31"),
        *((["purge", f"--older-than={age}"], "--older-than") for age in ("-1", "nan", "inf")),
    ],
)
def test_wrong_orders_change_nothing(
    tenants: Workbench, capsys: Output, arguments: list[str], message: str
) -> None:
    before = tenants.files()
    assert main([*arguments, "--dir", str(tenants.root)]) == REFUSED
    assert message in capsys.readouterr().err and tenants.files() == before


def removed(output: Output, bench: Workbench) -> list[tuple[int, int]]:
    """Files and bytes of each store."""
    status, rows = run(output, "gc", "--dir", bench.root)
    assert status == DONE
    return [(row["files"], row["bytes"]) for row in rows]


def test_what_nobody_can_use_is_removed(
    bench: Workbench, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = three_prefixes(bench)
    bench.put(store, prompt(3, 9), ttl=1000.0)
    for kept in (prompt(3, 20), prompt(4), prompt(5, 10)):
        bench.put(store, kept)
    bench.close(store)
    assert removed(capsys, bench) == [(0, 0)]
    segments = store_factory.index_in(bench.root / IDENTITY).values()
    sizes = {segment.info.num_tokens: segment.file_bytes for segment in segments}
    paths = {segment.info.num_tokens: bench.file_of(segment.segment_id) for segment in segments}
    # The first of two, a file that was not finished, one in quarantine, and a damaged one.
    paths[13].unlink()
    paths[13].with_name(f"{paths[13].stem[:2]}{'0' * 30}.kv.tmp").write_bytes(bytes(100))
    (bench.root / IDENTITY / "quarantine" / f"{'9' * 32}.kv").write_bytes(bytes(200))
    paths[10].write_bytes(paths[10].read_bytes()[:300])
    later = time.time() + 1001
    monkeypatch.setattr("time.time", lambda: later)

    assert removed(capsys, bench) == [(5, 100 + 200 + 300 + sizes[9] + sizes[27])]

    # What builds on what has expired.
    assert removed(capsys, bench) == [(1, sizes[11])]
    assert len(bench.files()) == 2 and removed(capsys, bench) == [(0, 0)]
    store = bench.open()
    check_rows(store, prompt(4))
    check_rows(store, prompt(2), namespace="salt")


def test_stores_of_other_formats(left: Workbench, capsys: Output) -> None:
    older, newer = "d" * 32, "e" * 32
    for identity, version in ((older, FORMAT_VERSION - 1), (newer, FORMAT_VERSION + 1)):
        folder = left.root / identity
        shutil.copytree(left.root / IDENTITY, folder)
        fields = json.loads((folder / MARKER).read_text())
        (folder / MARKER).write_text(json.dumps({**fields, "format": version}))
    sizes = [path.stat().st_size for path in (left.root / older).glob("segments/*/*")]
    assert sorted(removed(capsys, left)) == [*[(0, 0)] * 3, (3, sum(sizes))]
    assert {path.name for path in left.root.iterdir()} == {IDENTITY, OTHER_IDENTITY, newer}


@pytest.mark.parametrize("command", ["pin", "unpin", "purge", "export", "verify"])
def test_what_another_version_has_stored_is_left_alone(
    bench: Workbench, capsys: Output, command: str, tmp_path: Path
) -> None:
    """This version understands neither its index nor its files."""
    store = bench.open()
    bench.put_all(store, *range(6))
    bench.close(store)
    folder, files = bench.root / IDENTITY, bench.files()
    for path in (folder / MARKER, *folder.rglob("*.kv")):
        old = re.compile(rf'("format"|"version"): {FORMAT_VERSION}'.encode())
        path.write_bytes(old.sub(rb"\1: 99", path.read_bytes()))
    (folder / "journal").write_bytes(b"of another version")
    target = [tmp_path / "out"] if command == "export" else []
    ids = [] if command == "verify" else ["--ids", ",".join(map(str, CONVERSATION))]
    arguments = [*map(str, (command, *target, *ids, "--dir", bench.root))]
    assert main(arguments) == UNREACHABLE
    assert "of this version" in capsys.readouterr().err
    other = bench.open(OTHER_IDENTITY)
    bench.put(other, CONVERSATION, namespace=NONE)
    bench.close(other)
    assert main(arguments) == DONE and bench.files() >= files


@pytest.mark.parametrize("command", ["clear --yes", "gc"])
def test_a_store_that_cannot_be_removed(
    left: Workbench, capsys: Output, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(f"{path} is immutable")

    marker = left.root / IDENTITY / MARKER
    marker.write_text(json.dumps({**json.loads(marker.read_text()), "format": 1}))
    monkeypatch.setattr(directory.FILES, "unlink", refuse)
    assert main([*command.split(), "--dir", str(left.root)]) == UNREACHABLE
    assert "cannot be removed" in capsys.readouterr().err
