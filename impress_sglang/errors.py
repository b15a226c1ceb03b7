"""Exceptions that a caller or the environment can cause.

    ImpressError
    ├── ConfigError          an option has a wrong value, or options do not fit together
    ├── UnsupportedError     model, SGLang version or another feature does not fit us
    ├── BasisUnreadable      the file of a basis is missing, damaged or of another version
    ├── NotCodable           KVs that have no codes: infinite, not a number, or too large
    └── StoreError
        ├── StoreInUseError  another process serves from the same SSD directory
        └── PrefixUnreadable a stored prefix cannot be had: a miss, never an answer
            ├── SegmentUnreadable   bytes are missing, short or corrupt; a second look decides
            └── StoreUnavailable  nothing can be read now; what is stored is kept

A shortage that is expected (quota, free space, write queue full) is a value, not an exception.
"""

from __future__ import annotations


class ImpressError(Exception):
    """Base of all exceptions of this package."""


class ConfigError(ImpressError, ValueError):
    """An option has a value that cannot work; the message names the option and what to do."""


class UnsupportedError(ImpressError):
    """This model, SGLang version or SGLang option cannot be served with IMPRESS."""


class BasisUnreadable(ImpressError):
    """A basis cannot be read; the message says what to do."""


class NotCodable(ImpressError, ValueError):
    """KVs are infinite, not a number, or too large."""


class StoreError(ImpressError):
    """The SSD store cannot do what was asked."""


class StoreInUseError(StoreError):
    """Another process holds the lock of this store."""


class PrefixUnreadable(StoreError):
    """KVs of a segment cannot be read; whoever needs them computes them."""

    def __init__(self, segment_id: str, detail: str) -> None:
        super().__init__(f"segment {segment_id}: {detail}")
        self.segment_id = segment_id
        self.detail = detail


class SegmentUnreadable(PrefixUnreadable):
    """Bytes of a segment are missing, short or do not match their checksum."""


class StoreUnavailable(PrefixUnreadable):
    """A segment cannot be read now: an error of the medium or the machine, or no answer in time."""
