"""One rank reads the params alone, while the others wait for it: ``with optimizer.unsharded(alone=True):``.

Units are gathered as ever, before a module that needs them runs, but from the servers of the other ranks
(:mod:`.serve`), which need no call of those ranks. The others wait in their next collective, or end::

    rank 0   step k   evaluate: read . read . read          step k+1          time ->
    rank 1   step k   waits for rank 0 ...................  step k+1
             thread   beat . answer . beat . answer . beat

The beats say that rank 0 still reads: as long as they come, waits go on beyond their deadline. The values are those of
step k on all ranks, for no rank can take a step without this one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch

from ..errors import ShardoptError, StateError
from ..partition.comm.all_gather import AllGather
from ..tensors.unsharded_guard import ALONE

if TYPE_CHECKING:
    from ..partition.comm.all_gather import Window
    from .domain import Domain
    from .shard import Shard


@contextmanager
def read_alone(domains: Sequence[Domain]) -> Iterator[None]:
    """A context of one rank, in which its modules and reads of params gather from the servers of the other ranks.

    Args:
        domains: the main one first; empty before the first step. Where nothing is sharded, this rank has all.

    Raises:
        ShardoptError: the other ranks cannot be read, or could not wait.
        CommunicationError: a rank is gone.
        StateError: at the end: a param that every rank holds whole was written.
    """
    sharded = [domain for domain in domains if domain.sharded is not None]
    for domain in sharded:
        _check_readable(domain)
    with ExitStack() as stack:
        for domain in sharded:
            if domain.remote is not None:
                stack.enter_context(domain.remote.reading_alone())
        if sharded:
            assert sharded[0].sharded is not None
            readers = {each.sharded.transport: _Reader(each) for each in sharded if each.sharded is not None}
            stack.enter_context(
                sharded[0].sharded.gatherer.reading_alone(lambda unit: readers[unit.transport].gathering)
            )
        written = [(param, param._version) for domain in domains for param in _whole_params(domain)]
        yield
    found = next((param for param, version in written if param._version != version), None)
    if found is not None:
        name = next(filter(None, (domain.name_of(found) for domain in domains)), "a param")
        raise StateError(
            f"write in `with optimizer.unsharded():`, on every rank: {name} was written in {ALONE}, on this rank "
            "alone, so that ranks hold different values now."
        )


def _check_readable(domain: Domain) -> None:
    ranks = domain.mesh.shard
    if ranks.size == 1:
        return
    if ranks.has_collectives(domain.device):
        raise ShardoptError(
            f"evaluate on every rank, in `with optimizer.unsharded():`. {ALONE} needs ranks that wait on the host, and "
            f"here they wait in collectives of {domain.device.type}, which end with the backend's own timeout."
        )
    if domain.remote is None:
        raise ShardoptError(
            f"evaluate on every rank, in `with optimizer.unsharded():`. {ALONE} reads what other ranks serve, and some "
            "rank could open no socket."
        )


def _whole_params(domain: Domain) -> list[torch.nn.Parameter]:
    """The params that every rank holds whole."""
    sharded = domain.sharded
    return [param for param in domain.entries if sharded is None or param not in sharded.where]


class _Reader:
    """Reads the slices of one domain, as they are when it is made."""

    def __init__(self, domain: Domain):
        self._domain, self._moment = domain, domain.epoch.now("param")

    @property
    def gathering(self) -> AllGather:
        """An all-gather in which no other rank takes part."""
        return AllGather(lambda window: partial(self._fill, window))

    def _fill(self, window: Window) -> None:
        domain, ranks = self._domain, self._domain.mesh.shard
        shard = next(each for each in (*domain.shards, *domain.frozen_shards) if _has(each, window))
        for rank in range(ranks.size):
            if rank != ranks.rank:
                assert domain.remote is not None
                domain.remote.read_slice(shard, rank, self._moment, window.shard(rank))


def _has(shard: Shard, window: Window) -> bool:
    return shard.gathered is not None and shard.gathered.window is window


def check_not_alone(domain: Domain, call: str) -> None:
    """Raises StateError while this rank reads alone, before a call that needs the other ranks."""
    if domain.turn.alone is not None:
        raise StateError(
            f"leave `with optimizer.{ALONE}:` before {call}, which every rank makes: inside, the other ranks wait for "
            "this one."
        )
