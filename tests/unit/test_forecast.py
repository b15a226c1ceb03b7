"""How many bytes a request is expected to read of what is stored."""

from __future__ import annotations

from impress_sglang.store.forecast import CodedBytes


def test_coded_bytes_are_the_base_and_planes() -> None:
    found = CodedBytes(1000.0, (0.0, 400.0, 300.0))
    assert [found.expected(planes) for planes in range(4)] == [1000, 1000, 1400, 1700]
