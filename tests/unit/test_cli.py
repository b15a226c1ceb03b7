"""The command line: of a directory, of a server, and how it ends."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from impress_sglang.cli.main import main
from impress_sglang.cli.outcome import DAMAGED, DONE, EXIT_STATUS, REFUSED, UNREACHABLE
from impress_sglang.serving.report import RequestTotals
from tests.unit import store_factory
from tests.unit.kv_factory import IDENTITY, flip_byte
from tests.unit.store_factory import OTHER_IDENTITY, Workbench, prompt, use

bench = store_factory.bench
Said = pytest.CaptureFixture[str]
STATS = {
    "identity": "abc",
    "suspended": None,
    "store": {"segments": 3, "used_bytes": 12345, "health": {"state": "ok"}},
    "pins": {"prefixes": 1, "bytes": 2000},
    "totals": {"requests": 7, "requests_why": RequestTotals().requests_why | {"loaded": 4}},
}


class Stub(ThreadingHTTPServer):
    """Answers like a server, and notes what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, str, Any, str | None]] = []
        self.status, self.answer = 200, json.dumps(STATS).encode()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        stub = self.server
        assert isinstance(stub, Stub)
        text = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = json.loads(text) if text else None
        stub.asked.append((self.command, self.path, body, self.headers.get("Authorization")))
        self.send_response(stub.status)
        self.end_headers()
        self.wfile.write(stub.answer)

    do_POST = do_GET

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def stub() -> Iterator[Stub]:
    with Stub() as stub:
        thread = threading.Thread(target=stub.serve_forever)
        thread.start()
        yield stub
        stub.shutdown()
        thread.join()


@pytest.fixture
def left(bench: Workbench) -> Path:
    """A directory that a server has left."""
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
    assert status == DONE and [store["store"] for store in stores] == sorted(
        [IDENTITY, OTHER_IDENTITY]
    )
    assert [(store["segments"], store["tokens"], store["quarantined"]) for store in stores] == [
        (2, 28, 0),
        (1, 8, 0),
    ]
    sizes = [path.stat().st_size for path in left.glob(f"{IDENTITY}/segments/*/*")]
    assert stores[0]["bytes"] == sum(sizes)

    status, segments = run(capsys, "ls", "--dir", left)
    assert status == DONE and [segment["tokens"] for segment in segments] == [8, 20, 8]
    assert segments[0]["hits"] == 1 and len({segment["namespace"] for segment in segments[:2]}) == 2
    assert "salt" not in json.dumps(segments)


def test_a_table_for_who_reads_it(left: Path, capsys: Said) -> None:
    assert main(["ls", "--dir", str(left)]) == DONE
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and lines[0].split()[:2] == ["store", "segment"]
    assert main(["verify", "--dir", str(left)]) == DONE
    assert capsys.readouterr().out == "nothing\n"


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


@pytest.mark.parametrize("command", [["stat"], ["ls"], ["verify"], ["clear", "--yes"]])
def test_nothing_is_touched_beside_a_server(
    bench: Workbench, left: Path, capsys: Said, command: list[str]
) -> None:
    bench.open()
    before = bench.files()
    assert main([*command, "--dir", str(left)]) == UNREACHABLE
    assert "--url" in capsys.readouterr().err and bench.files() == before


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


def test_what_cannot_be_asked(capsys: Said, tmp_path: Path) -> None:
    assert main(["stat", "--url", "http://127.0.0.1:9"]) == UNREACHABLE
    assert main(["pin", "--ids", "1,x"]) == REFUSED
    assert main(["pin", "--file", str(tmp_path / "missing")]) == REFUSED
    for wrong in (["pin"], ["pin", "--text", "a", "--ids", "1"], ["ls", "--url", "x"], []):
        with pytest.raises(SystemExit) as refused:
            main(wrong)
        assert refused.value.code == REFUSED


def test_exit_codes_are_in_the_help(capsys: Said) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    for code, meaning in EXIT_STATUS.items():
        assert f"{code}: {meaning.replace('`', '')}" in said


def test_asking_a_server_needs_no_torch() -> None:
    code = (
        "import sys; from impress_sglang.cli.main import main\n"
        "assert main(['stat', '--url', 'http://127.0.0.1:9']) == 3\n"
        "print([m for m in ('torch', 'numpy', 'sglang') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


def test_exit_codes_are_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs/operation.md").read_text()
    for code, meaning in EXIT_STATUS.items():
        assert f"| {code} | {meaning} |" in page


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
    assert main([*asked, f"--model={tmp_path}", "--bits=4"]) == DONE
    few = json.loads(capsys.readouterr().out)
    assert main([*asked, f"--model={tmp_path / 'config.json'}", "--bits=8"]) == DONE
    many = json.loads(capsys.readouterr().out)
    assert few["kv_bytes_per_token"] == 131_072
    # Ranges of keys and values come on top of their bits.
    assert 4 / 16 < few["read_share"] < 5 / 16 and 8 / 16 < many["read_share"] < 9 / 16
    assert few["ssd_gb"] == many["ssd_gb"] == pytest.approx(0.1 * few["file_mb"], abs=0.1)
    exact_mb = 4096 * 131_072 / 1e6
    assert few["file_mb"] == pytest.approx(exact_mb * (1 + many["read_share"]), rel=1e-3)
    assert few["read_exact_ms"] == pytest.approx(exact_mb / 3, rel=1e-3)
    assert few["written_gb_per_day"] == pytest.approx(0.01 * few["file_mb"], abs=0.1)


@pytest.mark.parametrize(
    "config", [{}, [], {**LLAMA, "kv_lora_rank": 512}, {**LLAMA, "torch_dtype": "float17"}]
)
def test_a_model_that_says_nothing_of_its_kvs(tmp_path: Path, capsys: Said, config: Any) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert main(["plan", f"--model={path}", "--prefixes=1", "--tokens=1"]) == REFUSED
    assert main(["plan", f"--model={tmp_path / 'none'}", "--prefixes=1", "--tokens=1"]) == REFUSED
    path.write_text(json.dumps(LLAMA))
    assert main(["plan", f"--model={path}", "--prefixes=0", "--tokens=1"]) == REFUSED
    assert main(["plan", f"--model={path}", "--prefixes=1", "--tokens=1", "--bits=3"]) == REFUSED
    assert "impress: " in capsys.readouterr().err
