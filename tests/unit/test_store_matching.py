"""Finding prefixes in the store, and reading them."""

from __future__ import annotations

import pytest
import torch

from impress_sglang.errors import SegmentUnreadable
from impress_sglang.management.store import PrefixStore
from tests.unit import store_factory as stores
from tests.unit.kv_factory import columns_of, head_groups_of, heads_of
from tests.unit.reading import read_rows

bench = stores.bench
store = stores.store


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (3, 20), (8, 16), (19, 30), (29, 30)])
def test_a_part_of_a_match_can_be_opened(
    bench: stores.Workbench, store: PrefixStore, start: int, stop: int
) -> None:
    """Tokens before `start` are still in the device pool; the part crosses two segments."""
    bench.put(store, stores.prompt(1, 13))
    bench.put(store, stores.prompt(1, 30))

    stores.check_rows(store, stores.prompt(1, 30), start=start, stop=stop)


def test_stats_count_what_was_written_and_read(
    bench: stores.Workbench, store: PrefixStore, no_gaps: None
) -> None:
    bench.put(store, stores.prompt(1, 40))
    source = stores.open_source(store, stores.look_up(store, stores.prompt(1, 40)), 0, 40)
    head_groups = head_groups_of(bench.shape)
    read_rows(source, 0, None, keys=False)
    read_rows(source, 0, torch.tensor([0, 39]).expand(head_groups, -1), keys=False)
    assert source.stats.ssd_chunks == 7 * head_groups
    read_rows(source, 1, torch.tensor([0, 39]).expand(head_groups, -1), keys=False)
    assert source.stats.ssd_chunks == 9 * head_groups
    store.close_source(source)

    # 5 chunks of a disk block in each column that has heads.
    columns = sum(bool(heads_of(bench.shape, column)) for column in columns_of(bench.shape))
    size = 4096 * (1 + 2 * 5 * columns)
    assert store.stats.segments_written == 1
    assert store.stats.bytes_written == size
    # What is there is not read again, but another layer is.
    assert store.stats.bytes_read == (5 + 2) * head_groups * 4096
    summary = store.summary()
    assert summary["segments"] == 1
    assert summary["used_bytes"] == size
    assert summary["writes_pending"] == 0
    (path,) = bench.root.rglob("*.kv")
    assert path.stat().st_size == size


def test_a_match_may_be_older_than_an_eviction(bench: stores.Workbench) -> None:
    """Between the match and its use other requests are served, and their offers evict."""
    store = bench.open(ssd_gb=stores.gb(bench.one))
    bench.put(store, stores.prompt(1))
    match = stores.look_up(store, stores.prompt(1))
    bench.put(store, stores.prompt(2))

    with pytest.raises(SegmentUnreadable) as caught:
        stores.open_source(store, match, 0, 8)

    store.report(caught.value)
    store.check_integrity()
    stores.check_rows(store, stores.prompt(2))


def test_a_match_may_be_older_than_a_loss(bench: stores.Workbench, store: PrefixStore) -> None:
    """Another request has found that a segment is damaged, or only thinks so."""
    bench.put(store, stores.prompt(1))
    match = stores.look_up(store, stores.prompt(1))
    store.report(SegmentUnreadable(match.spans[0].segment.segment_id, "a test"))

    with pytest.raises(SegmentUnreadable) as caught:
        stores.open_source(store, match)
    store.report(caught.value)

    assert store.stats.segments_unreadable == 1
    stores.look_again(store)
    store.close_source(stores.open_source(store, match))
    stores.lose(bench, store, match.spans[0].segment.segment_id)
    with pytest.raises(SegmentUnreadable) as caught:
        stores.open_source(store, match)
    store.report(caught.value)
    store.check_integrity()
