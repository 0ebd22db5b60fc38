"""Params that others than an update wrote, and what of masters and averages follows them."""

from collections import defaultdict
from collections.abc import Iterable

from ..kernels import codecs
from ..partition.memory import return_free_pages
from .domain import Domain
from .param import ParamRecord
from .shard import IsRounded, Shard


def follow_written_params(domain: Domain) -> None:
    """Masters follow params whose version moved: weights were loaded, clamped or averaged in place."""
    begin_averages(domain)
    written = [entry for entry in domain.entries.values() if entry.param._version != entry.version]
    # Halves of masters that were just loaded and fitted their params are those of these params.
    _refresh(
        domain,
        (
            entry
            for entry in written
            if entry.shard.has_whole_masters or entry.version is not None or entry.index in entry.shard.awaiting
        ),
    )


def begin_averages(domain: Domain) -> None:
    """Averages that were not loaded with their states begin with the weights, which may be loaded after these."""
    late = [e for e in domain.entries.values() if e.begins_average and e.param._version != e.version]
    if late:
        with domain.all_or_nothing():
            for entry in late:
                entry.shard.begin_average(entry.index)


def refresh_masters(domain: Domain) -> None:
    """All of them, whether their params are known to have been written or not."""
    with domain.epoch.loading():
        _refresh(domain, domain.entries.values())


def _refresh(domain: Domain, entries: Iterable[ParamRecord]) -> None:
    written: dict[tuple[Shard, IsRounded], list[int]] = defaultdict(list)
    awaiting: list[ParamRecord] = []
    for entry in entries:
        if entry.index in entry.shard.awaiting:
            awaiting.append(entry)
        else:
            # A master that was loaded may have been a ``split`` one, whose ties are rounded away from zero. A step
            # rounds the ties of fp32 masters to even: where the param is the other neighbour, somebody wrote it.
            is_rounded: IsRounded = codecs.rounds_to if entry.version is None else codecs.rounds_to_even
            written[entry.shard, is_rounded].append(entry.index)
    if not written and not awaiting:
        return
    with domain.all_or_nothing():
        for (shard, is_rounded), indices in written.items():
            shard.refresh_masters(indices, is_rounded)
        for entry in awaiting:
            entry.shard.settle_master(entry.index)
    for entry in awaiting:
        del entry.shard.awaiting[entry.index]
    if not domain.store.is_final:
        return_free_pages()  # of the chunks that came to be compared


def settle_masters(domain: Domain) -> None:
    """What is kept of masters that were loaded is that of the weights of now; others may still be loaded."""
    if any(shard.awaiting for shard in domain.shards):
        with domain.all_or_nothing():
            for shard in domain.shards:
                for index in shard.awaiting:
                    shard.settle_master(index)
