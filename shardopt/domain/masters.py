"""Makes masters in halves, and averages, follow params that something other than an update wrote.

Weights and states may be loaded in either order. :class:`shardopt.domain.param.MasterState` says what each event makes
of a master. A whole fp32 master needs nothing here: whatever loads it compares it to its param, the kernels and
``Shard.read_chunk`` alike; but with ``Tuning(compare_masters=False)`` the kernels do not, and what loads and version
counters show is carried over here. A split one that does not round to its param waits in ``Shard.unmatched_masters``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..partition.memory import return_free_pages
from .param import MasterState

if TYPE_CHECKING:
    from .domain import Domain
    from .param import ParamRecord
    from .shard import Shard


def follow_written_params(domain: Domain) -> None:
    """Makes halves of masters follow params whose version moved: weights were loaded, clamped or averaged in place.

    Those of a master that fitted its param when it was loaded are kept.
    """
    begin_averages(domain)
    written = [entry for entry in domain.entries.values() if entry.param._version != entry.version]
    _refresh(domain, (entry for entry in written if entry.master_state is not MasterState.LOADED))
    loaded = [entry for entry in domain.entries.values() if entry.index in entry.shard.loaded_masters]
    _settle(domain, [*written, *loaded])


def take_sources(domain: Domain) -> None:
    """Takes the tensors that were assigned to ``param.data`` since the last step, before params are read."""
    for shard in domain.shards:
        if shard.takes_sources:
            shard.bucket.take_sources()


def begin_averages(domain: Domain) -> None:
    """Starts the averages that a loaded state lacks with the weights, which may be loaded after the states."""
    late = [e for e in domain.entries.values() if e.begins_average and e.param._version != e.version]
    if late:
        with domain.all_or_nothing():
            for entry in late:
                entry.shard.begin_average(entry.index)


def refresh_masters(domain: Domain) -> None:
    """Makes all masters follow their params: those that were loaded, and exactly those in halves."""
    with domain.epoch.loading():
        _refresh(domain, domain.entries.values())
        _settle(domain, domain.entries.values())
        for shard in domain.shards:
            shard.loaded_masters = dict.fromkeys(shard.loaded_masters, True)


def _settle(domain: Domain, entries: Iterable[ParamRecord]) -> None:
    """Makes whole masters follow their params where updates do not compare them."""
    left_alone = [each for each in entries if each.shard.has_whole_masters and not each.shard.formats.compares]
    if left_alone:
        with domain.all_or_nothing():
            for entry in left_alone:
                entry.shard.settle(entry.index)


def _refresh(domain: Domain, entries: Iterable[ParamRecord]) -> None:
    written: dict[Shard, list[int]] = defaultdict(list)
    unmatched: list[ParamRecord] = []
    for entry in entries:
        if entry.master_state is MasterState.UNMATCHED:
            unmatched.append(entry)
        elif entry.shard.masters and not entry.shard.has_whole_masters:
            written[entry.shard].append(entry.index)
    if not written and not unmatched:
        return
    with domain.all_or_nothing():
        for shard, indices in written.items():
            shard.drop_low_bits(indices)
        for entry in unmatched:
            entry.shard.keep_low_bits(entry.index)
    for entry in unmatched:  # once the store keeps them: an error before loses nothing
        entry.drop_unmatched_master()
    if not domain.store.is_final:
        return_free_pages()  # of the chunks that came to be compared


def keep_low_bits(domain: Domain) -> None:
    """Stores the low bits of each unmatched master for the present weights; other weights may still be loaded."""
    if any(shard.unmatched_masters for shard in domain.shards):
        with domain.all_or_nothing():
            for shard in domain.shards:
                for index in shard.unmatched_masters:
                    shard.keep_low_bits(index)
