"""Moves masters and states to another tier between two steps: on all ranks or on none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from ..errors import OffloadError, ShardoptError
from ..offload.disk.pipeline import SLOTS
from ..offload.host import HostStorage
from ..offload.store import ResidentStorage
from ..partition.memory import return_free_pages
from .agreement import agreed
from .tiers import check_offload, for_updates, make_near_store, make_store, tier_of

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
        return make_store(for_updates(rests, device, domain.options.release_gradients), tuning, device, domain.kept)

    open_near = partial(make_near_store, rests, device) if to is None and rests is not None else None
    relocate(domain, tier_of(rests), open_store, open_near)
    domain.is_away = to is not None
    return True


def relocate(
    domain: Domain, tier: str, open_store: Callable[[], Store], open_near: Callable[[Store], Store] | None = None
) -> None:
    """Collective: moves the masters and states of a domain. Other ranks that read them meanwhile read the old store.

    Args:
        open_near: opens the store of shards that stay on the device beside the new store; None: all of them move there.

    Raises:
        OffloadError: the new store cannot hold them; nothing changed, on any rank.
    """
    store, near = None, None
    storages: list[ShardStorage] = []
    view = {"tier to move masters and states to": tier, "calls of step()": domain.steps_agreed}
    try:
        with agreed(view, domain.mesh.world):
            store = open_store()
            if open_near is not None and any(shard.stays for shard in domain.stored_shards):
                near = open_near(store)
            _copy(domain, store, near, storages)
    except BaseException:
        if store is not None:
            _close(store)
        domain.kept.free_spare()  # there may have been no room
        raise
    assert store is not None
    store.commit()
    before, left = domain.move_to(store, near, storages)
    for storage in left:
        storage.release()
    _close(before)  # while `left` keeps its storages alive: buffers that go with them may still be copied to the device
    if tier == "disk":  # which is to free host memory
        domain.kept.free_spare()
    return_free_pages()


def _close(store: Store) -> None:
    with suppress(OffloadError):  # the file of a disk that hangs stays open as long as the disk hangs
        store.close()


def _copy(domain: Domain, store: Store, near: Store | None, storages: list[ShardStorage]) -> None:
    store.begin()
    for shard in domain.stored_shards:
        to = near if shard.stays and near is not None else store
        storages.append(to.home(shard.numel, shard.dtype, shard.device))
        copy_streams(shard, storages[-1])
    for each in storages:
        if isinstance(each, HostStorage):
            each.settle()
    store.flush()


def copy_streams(shard: Shard, new: ShardStorage) -> None:
    """Copies the masters and states of a shard from its home to another one, or moves the tensors.

    Copies from the device to host memory go on until the new storage is settled, and back until the old one is
    released. One stream for each is enough: its copies follow each other without a gap, and the host waits once.
    """
    old = shard.home
    bounds = [(0, shard.numel)]
    if _is_with_params(old) and _is_with_params(new):
        assert isinstance(old, ResidentStorage) and isinstance(new, ResidentStorage)
        new.take_streams(old)
        return
    goes = _is_with_params(old) and isinstance(new, HostStorage)
    comes = isinstance(old, HostStorage) and _is_with_params(new)
    if goes or comes:
        assert isinstance(old, ResidentStorage) and isinstance(new, ResidentStorage)
        new.fill(old)
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


def _is_with_params(home: ShardStorage) -> bool:
    return isinstance(home, ResidentStorage) and not isinstance(home, HostStorage)


def _few_at_a_time(chunks: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    runs = [chunks[first : first + SLOTS] for first in range(0, len(chunks), SLOTS)]
    return [(run[0][0], run[-1][1]) for run in runs]
