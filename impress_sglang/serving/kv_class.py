"""Classes of KVs: what a request accepts is part of the key of SGLang's tree.

Within a class, what was loaded and what was computed behind it mix, and requests share it. A
request of another class never sees any of it. The usual class of a server has no mark, so that its
keys are those of stock SGLang.
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

    `share`: the least share of text reused behind other text that was computed again; 1.0: nothing
    is reused there.
    """

    bits: float = EXACT_BITS
    share: float = 1.0

    @classmethod
    def of(cls, wanted: LoadOptions) -> KVClass:
        """The class of what a request asks for."""
        if wanted.bits == EXACT_BITS:
            return cls()
        return cls(wanted.bits, 1.0 if wanted.blend == OFF else wanted.share)

    @property
    def exact(self) -> bool:
        """Whether its KVs are those that were computed, behind exact ones."""
        return self.bits == EXACT_BITS

    @property
    def name(self) -> str:
        """Its name in keys and reports."""
        bits = "exact" if self.exact else f"{self.bits:g}"
        # All digits: names of different classes differ. Adding 0.0 leaves one name for 0.
        return bits if self.share == 1.0 else f"{bits}/{self.share + 0.0!r}"

    def worst(self, depth: int) -> Quality:
        """The worst stored quality that it accepts, if KVs may rest on `depth` approximations."""
        if self.exact or not depth:
            return EXACT
        return Quality(depth, self.bits, self.share)


def marked(extra_key: str | None, kv_class: KVClass, usual: KVClass) -> str | None:
    """The `extra_key` of a class in SGLang's tree; different for different arguments."""
    if kv_class == usual and not (extra_key or "").startswith(_MARK):
        return extra_key
    return f"{_MARK}{kv_class.name}" + ("" if extra_key is None else f"|{extra_key}")


def unmarked(key: str | None) -> str | None:
    """The `extra_key` of a request, from that of its class in SGLang's tree."""
    if key is None or not key.startswith(_MARK):
        return key
    _, separator, extra_key = key.partition("|")
    return extra_key if separator else None
