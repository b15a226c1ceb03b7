"""The ranks of a model, over process groups of SGLang's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.distributed.parallel_state import get_world_group
from torch import distributed

from impress_sglang.errors import UnsupportedError
from impress_sglang.serving.prefix_frequency import Memory, memory_at, shared_memory
from impress_sglang.serving.ranks import ALONE, Ranks
from impress_sglang.store.identity import rank_identity

# Survives the pickling of server arguments to child processes, like the configuration.
_COUNTS_ATTRIBUTE = "_impress_counts"


def ranks_of(context: Any) -> Ranks:
    """Return the ranks that run the same batches, of SGLang's `TreeCacheBuildContext`, by stage and
    head.

    With DP attention, these are some of the ranks that share the model's experts.
    """
    group, batches = context.params.tp_cache_group, 1
    size = 1 if context.tp_size == 1 else distributed.get_world_size(group)
    if context.params.pp_size > 1:
        group, size = get_world_group().cpu_group, get_world_group().world_size
        batches = context.params.pp_size + context.server_args.pp_async_batch_depth
    if size == 1:
        return ALONE

    def begin(numbers: Sequence[int]) -> Callable[[], Sequence[int]]:
        votes = torch.tensor(numbers, dtype=torch.int64)
        reduce_min = distributed.ReduceOp.MIN
        work = distributed.all_reduce(votes, op=reduce_min, group=group, async_op=True)

        def wait() -> Sequence[int]:
            work.wait()
            agreed: list[int] = votes.tolist()
            return agreed

        return wait

    gather, rank = _gathering(group, size), distributed.get_rank(group)
    return Ranks(rank, size, begin, gather, batches)


def identity_reader(context: Any, ranks: Ranks, read: Callable[[], str]) -> Callable[[], str]:
    """Return a function that reads the store identity of this rank, as `identity_of_rank` does.

    With DP attention, ranks with other experts run other batches, and all ranks synchronize only at
    startup: later, weights must be those of the start.
    """
    if ranks.size == context.tp_size * context.params.pp_size:
        return lambda: identity_of_rank(ranks, read)
    gather = _gathering(context.tp_group.cpu_group, context.tp_size)
    everyone = Ranks(ranks.rank, context.tp_size, all_gather=gather)
    everyone.head_replicas = ranks.head_replicas
    read_once = functools.cache(read)
    identity = identity_of_rank(everyone, read_once)
    own_identity = identity_of_rank(ranks, read_once)

    def read_again() -> str:
        if identity_of_rank(ranks, read) != own_identity:
            raise UnsupportedError(
                "with DP attention other weights have a store only after a restart"
            )
        return identity

    return read_again


def share_counts(server_args: Any, options: Any) -> None:
    """Let replicas count prompts together, in memory of this process, which will start them.

    `options`: the resolved view. Ranks with DP attention are replicas in SGLang 0.5.22 only.
    """
    if options.dp_size > 1 and not options.enable_dp_attention:
        place = shared_memory(options.tp_size * options.pp_size)
        setattr(server_args, _COUNTS_ATTRIBUTE, place)


def counts_of(context: Any) -> Memory | None:
    """Return the memory in which replicas of this rank count prompts together; None: alone.

    Raises `UnsupportedError` if this process may not read the one that started it.
    """
    place = getattr(context.server_args, _COUNTS_ATTRIBUTE, None)
    if place is None:
        return None
    try:
        return memory_at(place, context.params.pp_rank * context.tp_size + context.tp_rank)
    except OSError as error:
        raise UnsupportedError(
            f"replicas count prompts in memory of the process that starts them: {error}; let all "
            "have one user, or start servers of one replica on one --impress-ssd-dir"
        ) from error


def _gathering(group: Any, size: int) -> Callable[[str], Sequence[str]]:
    def gather(text: str) -> Sequence[str]:
        texts = [""] * size
        distributed.all_gather_object(texts, text, group=group)
        return texts

    return gather


def identity_of_rank(ranks: Ranks, read: Callable[[], str]) -> str:
    """Return the store identity of this rank, from the weights that all ranks read.

    Raises `UnsupportedError` if another rank could not read them.
    """
    try:
        identity, failure = read(), None
    except Exception as error:
        identity, failure = "", error
    identities = ranks.all_gather(identity)
    if failure is not None:
        raise failure
    if not all(identities):
        raise UnsupportedError("the weights of another rank have no identity")
    return rank_identity(identities, ranks.rank // ranks.head_replicas)
