"""What an earlier process has left in the folder of a store."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from pathlib import Path

from impress_sglang.errors import SegmentUnreadable, StoreUnavailable
from impress_sglang.storage.catalog import Catalog, CatalogEntry
from impress_sglang.storage.directory import StoreDirectory, segment_files
from impress_sglang.storage.files import FileSystem
from impress_sglang.storage.segment import read_header

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class Survey:
    """What segments an earlier process has left; `anew`: rebuild the index from their files."""

    anew: bool
    entries: list[CatalogEntry] = dataclasses.field(default_factory=list)
    """Entries of files that can be used."""
    adopted: list[CatalogEntry] = dataclasses.field(default_factory=list)
    """Those of these entries that the index does not have."""
    missing: list[str] = dataclasses.field(default_factory=list)
    """Segments that only the index has."""
    unfinished: list[Path] = dataclasses.field(default_factory=list)
    damaged: list[SegmentUnreadable] = dataclasses.field(default_factory=list)
    """What is wrong with files that can never be used."""
    unread: int = 0
    """Files that cannot be read now; nobody knows what builds on them."""
    unread_bytes: int = 0


def survey(
    directory: StoreDirectory, catalog: Catalog, identity: str, *, anew: bool = False
) -> Survey:
    """Compare the files of an identity with their rows in the index; changes no file.

    With `anew`, the headers of files that have rows are read as well; of these rows, only the
    uses of segments are taken.

    Raises:
        OSError: the directory cannot be read.
        sqlite3.Error: the index can neither be read nor made anew.
    """
    files, known, found = directory.files, catalog.entries(), Survey(anew)
    for segment_id, path, finished in segment_files(files, directory.path):
        if not finished:
            found.unfinished.append(Path(path))
            continue
        row = known.pop(segment_id, None)
        try:
            entry = _entry(files, segment_id, path, None if anew else row)
            if entry.info.identity != identity:
                raise SegmentUnreadable(segment_id, "belongs to another model")
        except SegmentUnreadable as error:
            # A new error: the traceback of the old one would keep all that is found here alive,
            # for ever where garbage collection is off.
            found.damaged.append(SegmentUnreadable(segment_id, error.detail))
            continue
        except (OSError, StoreUnavailable) as error:
            if row is None:
                found.unread += 1
                with contextlib.suppress(OSError):
                    found.unread_bytes += files.stat(path).st_size
                logger.warning("%s stays where it is, unused: %s", path, error)
                continue
            # A segment that the index knows is verified when it is opened.
            entry = row
        if row is None:
            found.adopted.append(entry)
        elif anew:
            entry = CatalogEntry(entry.info, entry.file_bytes, *row.use[1:])
        found.entries.append(entry)
    found.missing.extend(known)
    return found


def _entry(files: FileSystem, segment_id: str, path: str, row: CatalogEntry | None) -> CatalogEntry:
    """The entry of a file, which its header has if no row does.

    Raises:
        SegmentUnreadable: it can never be used.
        StoreUnavailable, OSError: it cannot be read now.
    """
    if row is None:
        info = read_header(Path(path), files).info
        if info.segment_id != segment_id:
            raise SegmentUnreadable(segment_id, f"is a copy of segment {info.segment_id}")
        row = CatalogEntry(info, info.layout().file_bytes)
    if files.stat(path).st_size != row.file_bytes:
        raise SegmentUnreadable(segment_id, "has the wrong size")
    return row
