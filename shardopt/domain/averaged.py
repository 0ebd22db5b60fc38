"""A context in which params show the moving average of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

from ..errors import ShardoptError
from ..partition.comm.together import Relay
from ..rules.rule import EMA
from .agreement import agree_on, agreed
from .exact_params import exact_averages
from .masters import begin_averages, take_sources
from .shard import Shard

if TYPE_CHECKING:
    from .domain import Domain
    from .param import ParamRecord

Slices = dict[Shard, torch.Tensor]  # 1D, as long as the shard and of its params' dtype


@contextmanager
def averaged(domain: Domain) -> Iterator[None]:
    """A context, collective at both ends: inside, every param is its average; afterwards it has its weights again.

    Params that were never updated (frozen, unused) have no average and stay what they are. Takes memory for two copies
    of this rank's slices.

    Raises:
        OffloadError: a rank cannot read its own slices; nothing changed.
        ShardoptError: at the end, on all ranks: a param was written inside. The weights are back, without the write.
    """
    with torch.no_grad():
        take_sources(domain)
        begin_averages(domain)
    shards = [shard for shard in domain.shards if EMA in shard.states]
    weights: Slices = {}
    averages: Slices = {}

    def read() -> None:
        weights.update({shard: shard.params(0, shard.numel).clone() for shard in shards})
        averages.update({shard: _average(domain, shard, weights[shard]) for shard in shards})

    _on_all(domain, read)
    followed = [entry for entry in domain.entries.values() if entry.version == entry.param._version]
    written: Exception | None = None
    is_over = False
    try:
        domain.is_averaged = bool(shards)
        for shard in shards:
            shard.saved_weights = weights[shard]
        _put(domain, averages)
        with (
            domain.sharded.unsharded() if domain.sharded is not None else nullcontext(),
            exact_averages(domain) as written_in_fp32,
        ):
            yield
            relay = Relay()  # averages may lie on a disk
            found = relay.attempt(written_in_fp32)
            written = relay.problem if found is None else _written(found)
        is_over = True
    finally:
        if is_over:
            written = written or _written_inside(domain, averages)
        try:
            _put(domain, weights, exact=False)
        except BaseException as error:
            domain.mark_broken(f"while putting weights back in the place of their average: {error}")
            raise
        finally:
            domain.is_averaged = False
            for shard in shards:
                shard.saved_weights = None
        for entry in followed:  # writes inside are gone: masters need not follow them
            entry.follow_param()
    agree_on("the end of unsharded(ema=True)", domain.mesh.world, written)


def _written_inside(domain: Domain, averages: Slices) -> Exception | None:
    """Returns the error for a param of this rank's slices that no longer shows its average; None without one."""
    for entry in domain.entries.values():
        own = averages.get(entry.shard)
        where = entry.shard.slice_of(entry.index).local
        if own is not None and not _same_bits(entry.shard.params(where.start, where.stop), own[where]):
            return _written(entry)
    return None


def _written(entry: ParamRecord) -> ShardoptError:
    return ShardoptError(
        f"write to params outside of `with optimizer.unsharded(ema=True):`: {entry.name} was written inside, where "
        "params are averages. The weights are back as they were before, without the write."
    )


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    kind = torch.int16 if one.element_size() == 2 else torch.int32
    return torch.equal(one.view(kind), other.view(kind))


def has_average(domain: Domain) -> bool:
    """True if averages are kept and any param was updated; the same on all ranks of the domain."""
    return domain.rule.average is not None and any(entry.step for entry in domain.entries.values())


def _average(domain: Domain, shard: Shard, weights: torch.Tensor) -> torch.Tensor:
    own, shown = shard.whole(EMA), weights.clone()
    for entry in _updated(domain, shard):
        where = shard.slice_of(entry.index).local
        shown[where] = own[where].to(shown.dtype)
    return shown


def _updated(domain: Domain, shard: Shard) -> list[ParamRecord]:
    return [entry for entry in domain.entries.values() if entry.shard is shard and entry.step]


@torch.no_grad()
def _put(domain: Domain, values: Slices, exact: bool = True) -> None:
    """Collective: writes these slices of each rank, and gathers params that are whole on every rank."""
    if domain.sharded is not None:
        domain.gatherer.before_writes()

    def write() -> None:
        for shard, own in values.items():
            shard.write_chunk("param", 0, own)
            if shard.exact_slice is not None:
                shard.exact_slice.is_ahead = True

    _on_all(domain, write)
    if domain.sharded is not None:
        domain.gatherer.writes.after_writes()  # until all ranks have written theirs
    from .shown_params import show  # no more is loaded than is used

    show(domain, [shard for shard in values if shard.gathered is None], exact, "gathering averaged params")


def _on_all(domain: Domain, act: Callable[[], None]) -> None:
    """Calls ``act``. Collective if it can fail on one rank alone (with a disk): it then fails on all ranks."""
    with nullcontext() if domain.store.is_final else agreed("average", domain.mesh.world):
        act()
