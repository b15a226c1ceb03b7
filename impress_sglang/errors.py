"""Exceptions that a caller or the environment can cause.

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
    """KVs of a segment cannot be read: a miss; requests that need them compute them."""

    def __init__(self, segment_id: str, detail: str) -> None:
        super().__init__(f"segment {segment_id}: {detail}")
        self.segment_id = segment_id
        self.detail = detail


class SegmentUnreadable(PrefixUnreadable):
    """Bytes of a segment are missing, short or corrupt; reading again decides."""


class StoreUnavailable(PrefixUnreadable):
    """Nothing can be read now: the medium or the machine fails, or does not answer in time."""
