"""What both codecs share: a layer in codes, and the rule by which it becomes that."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Coding(NamedTuple):
    """A layer in codes: `groups` uint8 [groups, group_bytes], which with a basis are rows of
    tokens, and `fit` then is `codes.rows.coder.fit_of` them."""

    groups: Tensor
    fit: float = 0.0


# Codes a layer, given its number, keys [t, G, Dk] and values [t, G, Dv]. It may raise `NotCodable`.
CodingRule = Callable[[int, Tensor, Tensor], Coding]
