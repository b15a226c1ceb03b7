"""Classes of KVs: the quality that a request accepts is part of its key in SGLang's tree.

Within a class, loaded KVs and KVs computed after them mix, and requests share them. Requests of
other classes never see them. The usual class of a server has no mark, so its keys are those of
stock SGLang.
"""

from __future__ import annotations

import dataclasses

from impress_sglang.config import EXACT_BITS, OFF
from impress_sglang.storage.quality import EXACT, Quality
from impress_sglang.store.policies import LoadOptions

_MARK = "impress-class:"


@dataclasses.dataclass(frozen=True, slots=True)
class KVClass:
    """How exact the KVs of a prefix are: bits per element when they were loaded.

    `recompute_ratio`: lowest recomputed share of text that is reused after other text; 1.0 if no
    text is reused there.
    """

    bits: float = EXACT_BITS
    recompute_ratio: float = 1.0

    @classmethod
    def of(cls, options: LoadOptions) -> KVClass:
        """The class for the options of a request."""
        if options.bits == EXACT_BITS:
            return cls()
        return cls(options.bits, 1.0 if options.blend == OFF else options.share)

    @property
    def exact(self) -> bool:
        """Whether its KVs are used as they were computed, after exact ones."""
        return self.bits == EXACT_BITS

    @property
    def name(self) -> str:
        """Name in keys and reports."""
        bits = "exact" if self.exact else f"{self.bits:g}"
        # All digits: names of different classes differ. Adding 0.0 leaves one name for 0.
        return bits if self.recompute_ratio == 1.0 else f"{bits}/{self.recompute_ratio + 0.0!r}"

    def worst(self, depth: int) -> Quality:
        """Worst stored quality that it accepts, if KVs may rest on `depth` approximations."""
        if self.exact or not depth:
            return EXACT
        return Quality(depth, self.bits, self.recompute_ratio)


def class_extra_key(extra_key: str | None, kv_class: KVClass, default_class: KVClass) -> str | None:
    """Return the `extra_key` of a class in SGLang's tree; different for different arguments."""
    if kv_class == default_class and not (extra_key or "").startswith(_MARK):
        return extra_key
    return f"{_MARK}{kv_class.name}" + ("" if extra_key is None else f"|{extra_key}")


def request_extra_key(key: str | None) -> str | None:
    """Return the `extra_key` of a request, given that of its class in SGLang's tree."""
    if key is None or not key.startswith(_MARK):
        return key
    _, separator, extra_key = key.partition("|")
    return extra_key if separator else None
