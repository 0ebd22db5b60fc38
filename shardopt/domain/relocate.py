"""Moves masters and states to another tier between two steps: on all ranks or on none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from ..errors import OffloadError, ShardoptError
from ..offload.disk.pipeline import SLOTS
from ..offload.store import ResidentStorage
from ..partition.memory import return_free_pages
from .agreement import agreed
from .tiers import check_offload, make_store, tier_of

if TYPE_CHECKING:
    from ..config import Offload
    from ..offload.store import ShardStorage, Store
    from .domain import Domain
    from .shard import Shard


def move_states(domains: Sequence[Domain], to: Offload | None) -> bool:
    """Collective: moves the masters and states of an optimizer, as :func:`relocate`. Returns false if there are none.

    Args:
        to: where they rest from now on; None: where the optimizer's options say.

    Raises:
        ShardoptError: there are several domains.
    """
    if len(domains) > 1:
        raise ShardoptError(
            "offload() and reload() move states on all ranks or on none, and this optimizer's params are shared by "
            "several process groups, which could not undo what one of them did. Give each its own optimizer."
        )
    if not domains or not domains[0].shards:
        return False
    (domain,) = domains
    rests, tuning, device = domain.options.offload_options if to is None else to, domain.options.tuning, domain.device

    def open_store() -> Store:
        check_offload(rests, device)
        return make_store(rests, tuning, device, domain.kept)

    relocate(domain, tier_of(rests), open_store)
    return True


def relocate(domain: Domain, tier: str, open_store: Callable[[], Store]) -> None:
    """Collective: moves the masters and states of a domain. Other ranks that read them meanwhile read the old store.

    Raises:
        OffloadError: the new store cannot hold them; nothing changed, on any rank.
    """
    store: Store | None = None
    storages: list[ShardStorage] = []
    view = {"tier to move masters and states to": tier, "calls of step()": domain.steps_agreed}
    try:
        with agreed(view, domain.mesh.world):
            store = open_store()
            _copy(domain, store, storages)
    except BaseException:
        if store is not None:
            _close(store)
        domain.kept.free_spare()  # there may have been no room
        raise
    assert store is not None
    store.commit()
    before, left = domain.move_to(store, storages)
    for storage in left:
        storage.release()
    _close(before)  # while `left` keeps its storages alive: buffers that go with them may still be copied to the device
    if tier == "disk":  # which is to free host memory
        domain.kept.free_spare()
    return_free_pages()


def _close(store: Store) -> None:
    with suppress(OffloadError):  # the file of a disk that hangs stays open as long as the disk hangs
        store.close()


def _copy(domain: Domain, store: Store, storages: list[ShardStorage]) -> None:
    store.begin()
    for shard in domain.stored_shards:
        storages.append(store.home(shard.numel, shard.dtype, shard.device))
        _copy_streams(shard, storages[-1])
    store.flush()


def _copy_streams(shard: Shard, new: ShardStorage) -> None:
    old = shard.home
    bounds = [(0, shard.numel)]
    if type(old) is ResidentStorage and type(new) is ResidentStorage:
        new.streams.update(old.streams)  # both where the params are: the tensors stay
        new.planes.update(old.planes)
        return
    if not (isinstance(old, ResidentStorage) or isinstance(new, ResidentStorage)):
        bounds = _few_at_a_time(new.chunks())  # from disk to disk: a few chunks at a time pass through memory
    new.ensure(old.planes)
    for name in old.names:
        for start, stop in bounds:
            if isinstance(new, ResidentStorage):
                old.read_into(name, start, new.read(name, start, stop))
            else:
                new.write(name, start, old.read(name, start, stop))


def _few_at_a_time(chunks: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    runs = [chunks[first : first + SLOTS] for first in range(0, len(chunks), SLOTS)]
    return [(run[0][0], run[-1][1]) for run in runs]
