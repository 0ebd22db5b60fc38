"""``unsharded()`` with ``compute_dtype``: params show their fp32 values, and a forward sees what these round to.

Params of a bucket are in one of three states inside the context::

    guarded      what reads or writes one calls show() first; dtype and size are fp32's
    shown        plain, views of whole fp32 values
    computing    plain, views of the bucket, which holds what fp32 values round to: in forward and backward

The first use of a bucket outside of a forward reads its fp32 values from the other ranks, one-sided. An evaluation uses
none, and takes no memory for them. The end writes this rank's slices, if anything was written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

from ..kernels import codecs
from ..partition.comm.together import Relay
from ..rules.rule import EMA
from .agreement import agreed

if TYPE_CHECKING:
    from .domain import Domain
    from .param import ParamRecord
    from .shard import Shard


class ExactParams:
    """The params of a domain that were handed over in fp32, while they are whole."""

    def __init__(self, domain: Domain, shows_averages: bool = False):
        """Collective where ranks cannot read each other's values, which are then gathered at once, and with a disk.

        Args:
            shows_averages: buckets hold rounded averages, and masters follow the weights that were put away.

        Raises:
            OffloadError: a rank could not read or write its own; raised on all ranks, and params are as before.
        """
        self._domain, self._shows_averages, shards = domain, shows_averages, _cast_shards(domain)
        try:
            with nullcontext() if domain.store.is_final else agreed("the beginning of unsharded()", domain.mesh.world):
                for shard in shards if not shows_averages else ():
                    shard.show_exact()
            self._buckets = [_ExactBucket(domain, each, shows_averages) for each in shards]
        except BaseException:
            for shard in shards:
                shard.shows_exact = False
            raise
        self.rest()

    def compute(self) -> None:
        """A forward or backward begins: params are what fp32 values round to."""
        for each in self._buckets:
            each.compute()

    def rest(self) -> None:
        """Forward and backward have ended: what uses a param gets fp32 values."""
        for each in self._buckets:
            each.guard()

    @torch.no_grad()
    def end(self) -> None:
        """Collective: writes this rank's slices of what was written, and shows params as the buckets have them.

        Raises:
            OffloadError: a rank could not read or write its own; raised on all ranks.
        """
        try:
            self.compute()
            if not self._shows_averages:
                self._write()
        finally:
            for each in self._buckets:
                each.shard.shows_exact = False

    def written(self) -> ParamRecord | None:
        """Returns a param that differs in this rank's slice from what is kept, if any."""
        for each in self._buckets:
            if each.is_written():
                return each.written()
        return None

    def _write(self) -> None:
        domain, world = self._domain, self._domain.mesh.world
        relay = Relay()  # masters may lie on a disk
        written = relay.attempt(lambda: [each for each in self._buckets if each.is_written()])
        # Behind this exchange nobody reads the old values any more.
        told = world.exchange([bool(written) or relay.problem is not None], "leaving unsharded()")
        if not any(any(row) for row in told):
            return
        if domain.sharded is not None:
            domain.gatherer.writes.before_write(domain.sharded.transport)
        with agreed("the end of unsharded()", world), domain.epoch.loading(), domain.all_or_nothing():
            relay.check()
            for each in written or ():
                each.write()


class _ExactBucket:
    """A bucket of rounded params, and their fp32 values.

    Attributes:
        whole: 1D fp32, laid out as the bucket; None until they are used.
    """

    def __init__(self, domain: Domain, shard: Shard, shows_averages: bool = False):
        self._domain, self.shard, self._bucket = domain, shard, shard.bucket
        self._is_shown = False
        # The params that show their averages: those that were updated.
        entries = domain.entries.values() if shows_averages and EMA in shard.states else ()
        self._averaged = [entry for entry in entries if entry.shard is shard and entry.step]
        self.whole: torch.Tensor | None = None
        if domain.mesh.shard.size > 1 and domain.remote is None:
            self.whole = self._gather()

    def guard(self) -> None:
        if not self._is_shown:
            self._bucket.start_arriving(self.show, is_exact=True)

    @torch.no_grad()
    def show(self) -> None:
        """Makes params views of their fp32 values."""
        self._bucket.end_arriving()
        if self.whole is None:
            self.whole = self._read()
        else:  # what a forward wrote counts
            self.whole.copy_(codecs.follow(self.whole, self._bucket.flat, ties=True))
        self._bucket.show_values(self.whole)
        self._is_shown = True

    def _gather(self) -> torch.Tensor:
        domain, shard = self._domain, self.shard
        whole = domain.gather(shard, shard.exact)
        averages = domain.gather(shard, EMA) if self._averaged else whole
        for entry in self._averaged:
            view = self._bucket.view(whole, entry.index, entry.param)
            view.copy_(self._bucket.view(averages, entry.index, entry.param))
        return whole

    def _read(self) -> torch.Tensor:
        shard, bucket = self.shard, self._bucket
        whole = torch.zeros(bucket.layout.numel, dtype=torch.float32, device=bucket.device)
        averaged = {entry.index for entry in self._averaged}
        for index in bucket.present:
            fetch = self._domain.fetcher(shard, index, EMA if index in averaged else shard.exact)
            assert fetch is not None
            bucket.view(whole, index, bucket.params[index]).copy_(fetch())
        return whole

    @torch.no_grad()
    def compute(self) -> None:
        """Makes params views of the bucket, with what their fp32 values round to."""
        if not self._is_shown:
            self._bucket.end_arriving()
            return
        assert self.whole is not None
        self._bucket.take_values(self.whole)
        flat = self._bucket.flat
        for own, low in zip(codecs.pieces(self.whole), codecs.pieces(flat), strict=True):
            fits = codecs.rounds_to(own, low, ties=True)
            if not fits.all():
                low.copy_(torch.where(fits, low, own.to(low.dtype)))
        self._bucket.show_values(None)
        self._is_shown = False

    def is_written(self) -> bool:
        """True if this rank's slice differs from what is kept; params are views of the bucket."""
        if self.whole is None:
            return False
        self.whole.copy_(codecs.follow(self.whole, self._bucket.flat, ties=True))
        return not _same(self._kept(), self._own())

    def written(self) -> ParamRecord | None:
        """Returns a param of this rank's slice that was written; :meth:`is_written` was asked."""
        kept, own = self._kept(), self._own()
        for entry in self._domain.entries.values():
            where = self.shard.slice_of(entry.index).local if entry.shard is self.shard else slice(0, 0)
            if not _same(kept[where], own[where]):
                return entry
        return None

    def _kept(self) -> torch.Tensor:
        """This rank's slice as it is kept."""
        kept = self.shard.whole(self.shard.exact)
        if self._averaged:
            kept, averages = kept.clone(), self.shard.whole(EMA)
            for entry in self._averaged:
                where = self.shard.slice_of(entry.index).local
                kept[where] = averages[where]
        return kept.to(self._own().device)

    def write(self) -> None:
        """Writes this rank's slice."""
        self.shard.write_chunk(self.shard.exact, 0, self._own())
        for param in self._bucket.params:
            entry = self._domain.entries.get(param)
            if entry is not None:  # not frozen
                entry.note_replaced()

    def _own(self) -> torch.Tensor:
        assert self.whole is not None
        return self.whole[self._bucket.layout.shard_slice(self._domain.mesh.shard.rank)]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def _cast_shards(domain: Domain) -> list[Shard]:
    return [each for each in (*domain.shards, *domain.frozen_shards) if each.is_cast and each.exact_slice is None]


@contextmanager
def exact_params(domain: Domain) -> Iterator[None]:
    """A context of ``unsharded()``, collective at its end if the domain has params of ``compute_dtype``."""
    if not _cast_shards(domain) or domain.exact is not None or domain.is_averaged:
        yield
        return
    domain.exact = ExactParams(domain)
    try:
        yield
    finally:
        exact, domain.exact = domain.exact, None
        if exact is not None:
            exact.end()


@contextmanager
def exact_averages(domain: Domain) -> Iterator[Callable[[], ParamRecord | None]]:
    """The same of ``unsharded(ema=True)``, whose end writes nothing. Yields what returns a param that was written."""
    if not _cast_shards(domain):
        yield lambda: None
        return
    exact = domain.exact = ExactParams(domain, shows_averages=True)

    def written() -> ParamRecord | None:
        exact.compute()
        return exact.written()

    try:
        yield written
    finally:
        domain.exact = None
        exact.end()


@contextmanager
def put_away(domain: Domain) -> Iterator[None]:
    """A context, collective at its start inside of ``unsharded()``: params are as outside, and were written."""
    if domain.exact is None:
        yield
        return
    exact, domain.exact = domain.exact, None
    exact.end()
    try:
        yield
    finally:
        domain.finish_gather()
        domain.exact = ExactParams(domain)
