"""The ranks of a model, over the group of processes that SGLang gives its tree caches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed

from impress_sglang.errors import UnsupportedError
from impress_sglang.serving.ranks import ALONE, Ranks
from impress_sglang.store.identity import rank_identity


def ranks_of(context: Any) -> Ranks:
    """The ranks that run the same batches, of SGLang's `TreeCacheBuildContext`.

    With DP attention, these are some of the ranks that share the model's experts.
    """
    group = context.params.tp_cache_group
    size = 1 if context.tp_size == 1 else distributed.get_world_size(group)
    if size == 1:
        return ALONE

    def least(numbers: Sequence[int]) -> Sequence[int]:
        votes = torch.tensor(numbers, dtype=torch.int64)
        distributed.all_reduce(votes, op=distributed.ReduceOp.MIN, group=group)
        agreed: list[int] = votes.tolist()
        return agreed

    return Ranks(distributed.get_rank(group), size, least, _gathering(group, size))


def identity_reader(context: Any, ranks: Ranks, read: Callable[[], str]) -> Callable[[], str]:
    """What reads the name of the store of this rank, as `identity_of_rank` does.

    With DP attention the other experts are with ranks of other batches, and nothing but a start is
    done by all of them together: later, weights must be those of then.
    """
    if ranks.size == context.tp_size:
        return lambda: identity_of_rank(ranks, read)
    gather = _gathering(context.tp_group.cpu_group, context.tp_size)
    everyone = Ranks(ranks.rank, context.tp_size, gather=gather)
    read_once = functools.cache(read)
    identity = identity_of_rank(everyone, read_once)
    own = identity_of_rank(ranks, read_once)

    def read_again() -> str:
        if identity_of_rank(ranks, read) != own:
            raise UnsupportedError(
                "with DP attention other weights have a store only after a restart"
            )
        return identity

    return read_again


def _gathering(group: Any, size: int) -> Callable[[str], Sequence[str]]:
    def gather(text: str) -> Sequence[str]:
        texts = [""] * size
        distributed.all_gather_object(texts, text, group=group)
        return texts

    return gather


def identity_of_rank(ranks: Ranks, read: Callable[[], str]) -> str:
    """The name of the store of this rank, from what each of them reads of its weights.

    Raises:
        UnsupportedError: another rank could not read them.
    """
    try:
        own, failure = read(), None
    except Exception as error:
        own, failure = "", error
    identities = ranks.gather(own)
    if failure is not None:
        raise failure
    if not all(identities):
        raise UnsupportedError("the weights of another rank have no identity")
    return rank_identity(identities, ranks.rank)
