"""Prefixes of one store for another: bit for bit, once, and nothing of a file with damage."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from impress_sglang.cli import DONE, REFUSED, UNREACHABLE, export_import
from impress_sglang.cli.directory import check_file
from impress_sglang.cli.export_import import CONTENTS
from impress_sglang.cli.main import main
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.layout import KVShape
from impress_sglang.storage.segment import encode_header, read_header
from impress_sglang.store.prefix_hashes import namespace_text
from impress_sglang.transfer.basis_codec import shape_by
from tests.unit.codes_factory import codec_for
from tests.unit.kv_factory import IDENTITY, as_tokens, flip_byte, make_shape
from tests.unit.store_factory import COARSE, OTHER_IDENTITY, Workbench, check_rows, length, prompt

Said = pytest.CaptureFixture[str]
SHAPES = {
    "probe heads": make_shape(),
    "codes": make_shape(dtype=torch.float16, probe=(), value_dim=16, coded=True),
    "basis": make_shape(dtype=torch.bfloat16, probe=(), coded=True),
}
CODEC = codec_for(SHAPES["basis"])
SHAPES["basis"] = dataclasses.replace(shape_by(CODEC.basis, SHAPES["basis"]), exact=False)
LONG = prompt(1, 200)
EARLY, APPROXIMATE = (*LONG[:150], 7, 8, 9), (*LONG, *prompt(3, 30))
NONE, TENANT = namespace_text(None, None), namespace_text("tenant", None)
# So that files of both stores have one layout.
OPTIONS = {"chunk_tokens": 64}


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> KVShape:
    return SHAPES[request.param]


@pytest.fixture
def source(tmp_path: Path, shape: KVShape) -> Workbench:
    """A conversation, a prompt that leaves it early, what approximates it, and another tenant's."""
    bench = Workbench(tmp_path / "source", shape, CODEC if shape.basis else None)
    store = bench.open(**OPTIONS)
    bench.put(store, LONG[:100], namespace=NONE)
    bench.put(store, LONG, namespace=NONE)
    bench.put(store, EARLY, namespace=NONE)
    bench.put(store, APPROXIMATE, namespace=NONE, quality=COARSE)
    bench.put(store, prompt(2, 70), namespace=TENANT)
    bench.close(store)
    return bench


@pytest.fixture
def target(tmp_path: Path, shape: KVShape) -> Iterator[Workbench]:
    bench = Workbench(tmp_path / "target", shape)
    yield bench
    bench.close_all()


@pytest.fixture
def file(source: Workbench, capsys: Said) -> Path:
    path = source.root.parent / "prefixes"
    assert run(capsys, "export", path, source)["segments"] == 4
    return path


def run(said: Said, command: str, path: Path, bench: Workbench, *options: str) -> Any:
    """What a command prints as JSON, or its exit status if that is not 0."""
    status = main([command, str(path), "--dir", str(bench.root), "--json", *options])
    out = said.readouterr().out
    return json.loads(out) if status == DONE else status


def contents(bench: Workbench) -> set[tuple[bytes, bytes]]:
    """Of all files tokens, and what stands behind the header."""
    paths = bench.root.glob("*/segments/*/*")
    infos = {path: read_header(path, FileSystem()).info for path in paths}
    return {
        (info.tokens.tobytes(), path.read_bytes()[info.layout().header_bytes :])
        for path, info in infos.items()
    }


def test_all_of_it_arrives(source: Workbench, file: Path, target: Workbench, capsys: Said) -> None:
    done = run(capsys, "import", file, target)
    assert (done["segments"], done["known"], done["store"]) == (4, 0, IDENTITY)

    left = contents(source) - contents(target)
    assert [tokens for tokens, _ in left] == [as_tokens(prompt(2, 70)).tobytes()]
    store = target.open(**OPTIONS)
    for tokens in (LONG, EARLY):
        assert length(store, tokens, namespace=NONE) == len(tokens)
        if target.shape.exact:
            check_rows(store, tokens, namespace=NONE)
    assert length(store, APPROXIMATE, namespace=NONE) == len(LONG)
    assert length(store, APPROXIMATE, namespace=NONE, quality=COARSE) == len(APPROXIMATE)
    assert not length(store, prompt(2, 70), namespace=TENANT)
    target.close(store)
    # What is stored is not stored again.
    before = target.files()
    done = run(capsys, "import", file, target)
    assert (done["segments"], done["known"], done["bytes"]) == (0, 4, 0)
    assert target.files() == before


@pytest.mark.parametrize("shape", [SHAPES["codes"]])
def test_what_is_stored_in_other_pieces_stays(file: Path, target: Workbench, capsys: Said) -> None:
    """What was exported has no place behind these, but for the end of another prompt."""
    store = target.open(**OPTIONS)
    target.put(store, LONG[:150], namespace=NONE)
    target.close(store)
    done = run(capsys, "import", file, target)
    assert (done["segments"], done["known"], done["left_out"]) == (1, 1, 2)
    store = target.open(**OPTIONS)
    check_rows(store, EARLY, namespace=NONE)
    assert length(store, LONG, namespace=NONE) == 150


def test_some_of_it(source: Workbench, target: Workbench, capsys: Said, tmp_path: Path) -> None:
    """One prefix by its tokens or its last segment, or another namespace."""
    assert main(["ls", "--dir", str(source.root), "--json"]) == DONE
    rows = json.loads(capsys.readouterr().out)
    (last,) = (row["segment"] for row in rows if row["tokens"] == 3)
    ids = ",".join(map(str, LONG))
    for path, option, argument, wanted in (
        (tmp_path / "ids", "--ids", ids, (2, 2)),
        (tmp_path / "segment", "--segment", last, (3, 1)),
    ):
        exported = run(capsys, "export", path, source, option, argument)["segments"]
        assert (exported, run(capsys, "import", path, target)["segments"]) == wanted
    path = tmp_path / "tenant"
    tenant = ["--extra-key", "tenant"]
    assert run(capsys, "export", path, source, *tenant)["segments"] == 1
    assert run(capsys, "import", path, target) == REFUSED
    assert run(capsys, "import", path, target, *tenant)["segments"] == 1
    store = target.open(**OPTIONS)
    assert length(store, prompt(2, 70), namespace=TENANT) == 70
    assert length(store, EARLY, namespace=NONE) == len(EARLY)
    assert not any(b"tenant" in file.read_bytes() for file in path.iterdir())
    assert path.stat().st_mode & 0o777 == 0o700


def test_damage_is_found_wherever_it_is(file: Path, target: Workbench, capsys: Said) -> None:
    """Also what somebody made up."""
    for path in file.glob("*.kv"):
        size = path.stat().st_size
        for offset in {0, 9, *range(40, size, size // 20), size - 1}:
            flip_byte(path, offset)
            assert run(capsys, "import", file, target) == REFUSED, offset
            flip_byte(path, offset)
        whole = path.read_bytes()
        for cut in (b"", whole[:5], whole[: size // 2], whole[:-1]):
            path.write_bytes(cut)
            assert run(capsys, "import", file, target) == REFUSED
        path.write_bytes(whole)
    contents = json.loads((file / CONTENTS).read_text())
    first, *rest = contents["segments"]
    made_up = [
        {"kind": "photos"},
        *({"key": key} for key in ("0", 7, None, "0" * 100)),
        {"namespace": None},
        *({"segments": some} for some in ([], rest, [first, first, *rest], "none")),
        *({"segments": [wrong, *rest]} for wrong in (["../elsewhere", None], first[:1])),
    ]
    texts = [json.dumps(contents | changes) for changes in made_up]
    namespace = contents.pop("namespace")
    for text in (*texts, json.dumps(contents), "[" * 100_000):
        (file / CONTENTS).write_text(text)
        assert run(capsys, "import", file, target) == REFUSED, text
    for path in (file / "missing", file / CONTENTS):
        assert run(capsys, "import", path, target) == REFUSED
    assert not target.root.exists()
    (file / CONTENTS).write_text(json.dumps(contents | {"namespace": namespace}))
    assert run(capsys, "import", file, target)["segments"] == 4


@pytest.mark.parametrize("shape", [SHAPES["codes"]])
def test_headers_that_somebody_made_up(file: Path, target: Workbench, capsys: Said) -> None:
    headers = {path: read_header(path, FileSystem()) for path in file.glob("*.kv")}
    before = set(target.root.parent.iterdir())
    for changes in (
        {"identity": "../outside"},
        {"identity": "0"},
        {"expires": "soon"},
        {"expires": 10**400},
    ):
        for path, header in headers.items():
            info = dataclasses.replace(header.info, **changes)
            body = path.read_bytes()[read_header(path, FileSystem()).info.layout().header_bytes :]
            path.write_bytes(encode_header(dataclasses.replace(header, info=info)) + body)
        assert run(capsys, "import", file, target) == REFUSED, changes
        assert set(target.root.parent.iterdir()) == before


def test_tokens_without_windows_stay_so(tmp_path: Path, capsys: Said) -> None:
    benches = [Workbench(tmp_path / name, SHAPES["codes"]) for name in ("one", "other")]
    store = benches[0].open(**OPTIONS)
    benches[0].put(store, LONG[:100], namespace=NONE, windows_from=30)
    benches[0].put(store, LONG, namespace=NONE, windows_from=150)
    benches[0].close(store)
    run(capsys, "export", tmp_path / "file", benches[0])
    assert run(capsys, "import", tmp_path / "file", benches[1])["segments"] == 2
    for bench in benches:
        headers = [read_header(path, FileSystem()) for path in bench.root.glob("*/segments/*/*")]
        assert sorted(header.info.windows_from for header in headers) == [30, 50]


@pytest.mark.parametrize("shape", [SHAPES["codes"]])
def test_what_is_removed_while_it_is_exported(
    source: Workbench, capsys: Said, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def open_gone(path: Path) -> None:
        path.unlink()
        check_file(path)

    monkeypatch.setattr(export_import, "check_file", open_gone)
    assert run(capsys, "export", tmp_path / "new", source) == REFUSED


def test_beside_a_server(file: Path, source: Workbench, target: Workbench, capsys: Said) -> None:
    source.open(), target.open()
    assert run(capsys, "export", file.with_name("new"), source) == UNREACHABLE
    assert run(capsys, "import", file, target) == UNREACHABLE
    source.close_all()
    assert not target.files() and not file.with_name("new").exists()


def test_what_is_not_exported(source: Workbench, file: Path, capsys: Said, tmp_path: Path) -> None:
    new = tmp_path / "new"
    assert run(capsys, "export", file, source) == REFUSED and len(list(file.iterdir())) == 5
    assert run(capsys, "export", new, source, "--extra-key", "nobody") == REFUSED
    assert run(capsys, "export", new, source, "--segment", "nothing") == REFUSED
    assert run(capsys, "export", new, source, "--ids", ",".join(["5"] * 64)) == REFUSED
    assert run(capsys, "export", new, source, "--store", OTHER_IDENTITY) == REFUSED
    assert run(capsys, "export", tmp_path / "no" / "folder", source) == UNREACHABLE
    for path in source.root.glob("*/segments/*/*"):
        flip_byte(path, read_header(path, FileSystem()).info.layout().header_bytes + 100)
    assert run(capsys, "export", new, source) == REFUSED
    assert not list(tmp_path.glob("new*"))


def test_no_more_than_there_is_room_for(
    file: Path, target: Workbench, capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FileSystem, "free_bytes", lambda *_: 2_000_000_000 + 10_000)
    assert run(capsys, "import", file, target) == REFUSED and not target.files()
    monkeypatch.setattr(FileSystem, "free_bytes", lambda *_: 2_100_000_000)
    assert run(capsys, "import", file, target)["segments"] == 4
