"""Damaged segments, kept for who wants to know what happened to them."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from impress_sglang.errors import SegmentUnreadable
from impress_sglang.storage.directory import QUARANTINE, StoreDirectory, quarantined_files

logger = logging.getLogger(__name__)

MOST_FILES = 4


class Quarantine:
    """Used by one thread."""

    def __init__(self, directory: StoreDirectory) -> None:
        """Of a store; what an earlier process has set aside counts from the first `tidy` on."""
        self._directory = directory
        self._files = directory.files
        self._must_go = False
        self.num_bytes = 0
        """Of its files."""

    @property
    def is_stuck(self) -> bool:
        """Whether it has to go, and the disk has not let it go so far."""
        return self._must_go

    def take(self, error: SegmentUnreadable) -> None:
        """Set the file of a damaged segment aside.

        Raises:
            OSError: the disk refuses; perhaps it is done.
        """
        path = self._directory.segment_path(error.segment_id)
        target = self._directory.quarantine_path(error.segment_id)
        self._files.rename(path, target)
        try:
            # Else a power loss could bring it back beside what is stored in its place by then.
            for folder in (target.parent, path.parent):
                self._files.sync_directory(folder)
        finally:
            self._limit(MOST_FILES)
        logger.error("%s; set aside in quarantine", error)

    def empty(self) -> None:
        """Remove all; where the disk refuses, `tidy` does it later.

        Raises:
            OSError: it does.
        """
        self._must_go = True
        self.tidy()

    def tidy(self) -> None:
        """Keep the latest ones, or none that had to go before.

        Raises:
            OSError: the disk refuses.
        """
        self._limit(0 if self._must_go else MOST_FILES)
        self._must_go = False

    def _limit(self, most: int) -> None:
        paths = quarantined_files(self._files, self._directory.path)
        sizes = [self._files.stat(path).st_size for path in paths]
        # Right also where a file cannot be removed.
        self.num_bytes = sum(sizes)
        for path, size in list(zip(paths, sizes, strict=True))[: max(len(paths) - most, 0)]:
            self._files.unlink(path)
            self.num_bytes -= size


def unremoved(undeleted: Mapping[str, int], quarantine: Quarantine) -> frozenset[str]:
    """What could not be removed so far, by name: who makes room counts it as still there."""
    return frozenset([*undeleted, *([QUARANTINE] if quarantine.is_stuck else [])])
