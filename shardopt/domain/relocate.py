"""Masters and states move to another tier between two steps: on all ranks or on none."""

from collections.abc import Callable, Sequence
from contextlib import suppress

from ..errors import OffloadError
from ..offload.disk.pipeline import SLOTS
from ..offload.host import HostHome
from ..offload.store import Home, ResidentHome, Store
from ..partition.memory import return_free_pages
from .agreement import View, agree
from .domain import Domain
from .shard import Shard


def relocate(domain: Domain, tier: str, open_store: Callable[[], Store]) -> None:
    """Collective. What is read meanwhile by other ranks is read where it was.

    Raises:
        OffloadError: they cannot be kept there; nothing changed, on any rank.
    """
    store: Store | None = None
    homes: list[Home] = []
    problem: Exception | None = None
    view = {"tier to move masters and states to": tier, "calls of step()": domain.rounds}
    try:
        try:
            store = open_store()
            _copy(domain, store, homes)
        except Exception as error:
            problem = error
        agree(View(view, lambda: view, problem), domain.mesh.world, domain.device)
    except BaseException:
        if store is not None:
            _close(store)
        raise
    assert store is not None
    store.commit()
    before, left = domain.rest_in(store, homes)
    for home in left:
        home.release()
    _close(before)  # while its homes are there: what it keeps of them may still be on its way to the device
    return_free_pages()


def _close(store: Store) -> None:
    with suppress(OffloadError):  # a disk that hangs keeps its file open, as long as it does
        store.close()


def _copy(domain: Domain, store: Store, homes: list[Home]) -> None:
    store.begin()
    for shard in domain.resting:
        homes.append(store.home(shard.numel, shard.bucket.dtype, shard.device))
        _copy_streams(shard, homes[-1])
    store.flush()


def _copy_streams(shard: Shard, new: Home) -> None:
    old = shard.home
    bounds = [(0, shard.numel)]
    if isinstance(old, ResidentHome) and isinstance(new, ResidentHome):
        if not (isinstance(old, HostHome) or isinstance(new, HostHome)):
            new.streams.update(old.streams)  # it stays where it is
            new.planes.update(old.planes)
            return
    elif not (isinstance(old, ResidentHome) or isinstance(new, ResidentHome)):
        bounds = _few_at_a_time(new.chunks())  # they pass through memory
    new.ensure(old.planes)
    for name in old.names:
        for start, stop in bounds:
            if isinstance(new, ResidentHome):
                old.read_into(name, start, new.read(name, start, stop))
            else:
                new.write(name, start, old.read(name, start, stop))


def _few_at_a_time(chunks: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    runs = [chunks[first : first + SLOTS] for first in range(0, len(chunks), SLOTS)]
    return [(run[0][0], run[-1][1]) for run in runs]
