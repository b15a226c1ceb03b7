"""Damaged segments, kept for whoever wants to find out what happened to them."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from impress_sglang.errors import SegmentUnreadable
from impress_sglang.storage.directory import QUARANTINE, StoreDirectory, quarantined_files

logger = logging.getLogger(__name__)

MOST_FILES = 4


class Quarantine:
    """The quarantine of one store; used by one thread."""

    def __init__(self, directory: StoreDirectory) -> None:
        """Begin with 0 bytes; files of an earlier process count from the first `tidy` on."""
        self._directory = directory
        self._files = directory.files
        self._must_go = False
        self.num_bytes = 0
        """Bytes of its files."""

    @property
    def is_stuck(self) -> bool:
        """Whether it must be emptied and the disk has refused that so far."""
        return self._must_go

    def take(self, error: SegmentUnreadable) -> None:
        """Set the file of a damaged segment aside.

        Raises:
            OSError: the disk has failed; the file may have been moved nevertheless.
        """
        path = self._directory.segment_path(error.segment_id)
        target = self._directory.quarantine_path(error.segment_id)
        self._files.rename(path, target)
        try:
            # Otherwise a power loss could bring it back beside its replacement.
            for folder in (target.parent, path.parent):
                self._files.sync_directory(folder)
        finally:
            self._limit(MOST_FILES)
        logger.error("%s; set aside in quarantine", error)

    def empty(self) -> None:
        """Remove all files; if the disk refuses, `tidy` does it later.

        Raises:
            OSError: the disk refuses.
        """
        self._must_go = True
        self.tidy()

    def tidy(self) -> None:
        """Keep only the latest files, or none if `empty` has failed before.

        Raises:
            OSError: the disk refuses.
        """
        self._limit(0 if self._must_go else MOST_FILES)
        self._must_go = False

    def _limit(self, most: int) -> None:
        paths = quarantined_files(self._files, self._directory.path)
        sizes = [self._files.stat(path).st_size for path in paths]
        # Counted first, so that it is right even if a file cannot be removed.
        self.num_bytes = sum(sizes)
        for path, size in list(zip(paths, sizes, strict=True))[: max(len(paths) - most, 0)]:
            self._files.unlink(path)
            self.num_bytes -= size


def unremoved(undeleted: Mapping[str, int], quarantine: Quarantine) -> frozenset[str]:
    """Names of what could not be removed so far: it counts as present when room is made."""
    return frozenset([*undeleted, *([QUARANTINE] if quarantine.is_stuck else [])])
