"""The units that are gathered, or on their way, and their memory. What is gathered, and when, is the gatherer's.

::

    start      memory, this rank's slice, the others' are sent for
    wait       ................................................ the others' are here
    drop                                                                              memory goes     time ->
"""

from __future__ import annotations

from collections.abc import Callable, Container
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING

from ..errors import CommunicationError, DisagreementError
from ..partition.comm.tags import GatherKind
from ..profiler import labelled
from .unit import Stay, UnitState

if TYPE_CHECKING:
    from ..partition.comm.all_gather import AllGather, Window
    from ..partition.comm.transport import Transport
    from ..partition.memory import Memory
    from .slice_writes import SliceWrites
    from .stray_writes import StrayWrites
    from .unit import Unit

# How long a gather waits for a rank that does not join it, where the user set no deadline. The process group's own
# timeout, half an hour, is long to wait for a rank whose control flow differs. Test:
# test_a_gather_that_a_rank_never_joins in tests/partition/test_ranks_apart.py.
GATHER_TIMEOUT = timedelta(minutes=5)


class GatheredUnits:
    """The units that are not sharded.

    Attributes:
        order: all of them, the least recently used first.
        writes: the order between gathers and writes of slices.
        strays: finds writes to gathered params that would be lost.
        waits_for_others: True if a rank that gathers some unit waits until the others gather it.
        alone: in one rank's ``unsharded(alone=True)``, returns the all-gather of a unit in which no other rank takes
            part.
        held: the units that were gathered when that began.
        unsharded_contexts: contexts that are open in which all units are gathered.
        freed: memory whose pages are kept, by this use; the next gather takes them.
    """

    def __init__(
        self, writes: SliceWrites, strays: StrayWrites, waiting: Callable[[str], AbstractContextManager[object]]
    ):
        """``waiting``: the context of a wait for a unit of this name."""
        self.order: dict[Unit, None] = {}
        self.writes, self.strays, self.waits_for_others = writes, strays, False
        self.alone: Callable[[Unit], AllGather] | None = None
        self.held: frozenset[Unit] = frozenset()
        self.unsharded_contexts = 0
        self._waiting = waiting
        self.freed: list[Memory] = []

    def connect(self, transport: Transport, holds_parts: bool = False) -> None:
        """Adds a transport by which units will be gathered.

        Args:
            holds_parts: ranks keep parts of what was gathered, so that others wait until these are there.
        """
        self.writes.transports.append(transport)
        self.waits_for_others = self.waits_for_others or transport.overlaps or holds_parts

    def start(self, unit: Unit, may_be_coded: bool = False, kind: GatherKind = GatherKind.SCHEDULED) -> None:
        """Starts to gather a unit, if it is not on its way. It is now the most recently used.

        Args:
            may_be_coded: True in what trains. What is evaluated, read, saved or written back is exact.
            kind: what the gather is for.
        """
        self.order[unit] = self.order.pop(unit, None)
        if unit.outlives_backward and unit.stays is Stay.NO:
            unit.stays = Stay.GATHERED
        is_sharded = unit.state is UnitState.SHARDED
        if not is_sharded:
            if may_be_coded or not unit.is_coded:
                return
            self.wait(unit)  # and then the exact values follow, into the same memory
        trains, holders = may_be_coded and self.alone is None, unit.holders
        is_coded, is_held, keeps_at = trains and unit.has_code, False, None
        if holders is not None and trains and kind is GatherKind.SCHEDULED:  # parts of it may lie on some ranks alone
            now = self.writes.count[unit.transport]
            is_held = unit.held_at == now
            keeps_at = None if is_held else now
        if is_held and holders is not None:
            gathering = holders.all_gather(unit.phase, GATHER_TIMEOUT)
        elif self.alone is not None:
            gathering = self.alone(unit)
        else:
            if kind not in unit.all_gathers:
                unit.all_gathers[kind] = unit.transport.all_gather(unit.phase, GATHER_TIMEOUT, kind)
            gathering = unit.all_gathers[kind]
        windows: tuple[Window, ...] = ()
        try:
            for each in unit.buckets:
                if is_sharded:
                    memory = each.bucket.memory
                    memory.allocate(self._pages_for(memory) if self.freed else None)
                if is_held:
                    each.put_part()
                else:
                    each.param_shard.read(each.own)
                    if is_coded:
                        each.encode()
                windows += (each.parts or each.messages or each.window,)
        except BaseException:  # the slice is read from a disk
            if is_sharded:
                for each in unit.buckets:
                    each.bucket.drop()
                self.order.pop(unit)
            raise
        # Set before the gather starts: after an error in the middle, memory is freed only once what was started has
        # arrived.
        unit.gathering, unit.state, unit.is_coded = gathering, UnitState.UNSHARDING, is_coded
        unit.keeps_at = keeps_at
        unit.transport.traffic.params += labelled("gather", unit.display_name, gathering.start_all, windows)

    def wait(self, unit: Unit) -> None:
        """Waits until a unit that is on its way holds whole values."""
        if unit.state is not UnitState.UNSHARDING:
            return
        assert unit.gathering is not None
        try:
            if unit.gathering.ends:  # none on one rank
                with self._waiting(unit.display_name):
                    unit.gathering.finish()
            if unit.keeps_at is not None:
                for each in unit.buckets:
                    each.keep_part()
                unit.held_at, unit.keeps_at = unit.keeps_at, None
            if unit.is_coded or unit.holders is not None:
                for each in unit.buckets:
                    each.decode()
        except BaseException as error:
            # The memory is not freed: what other ranks have sent may still arrive there. Unless ranks ran apart.
            unit.gathering, unit.state = None, UnitState.SHARDED
            self.order.pop(unit)
            for each in unit.buckets:
                each.messages = each.parts = None
                if isinstance(error, DisagreementError):
                    each.bucket.drop()
            if isinstance(error, CommunicationError) and self.waits_for_others and self.alone is None:
                raise CommunicationError(
                    "run as many forwards and backwards on every rank, and what ranks do on their own (generate(), an "
                    "evaluation of other lengths) in `with optimizer.unsharded():`, or what one of them does (`if rank "
                    f"== 0:`) in `with optimizer.unsharded(alone=True):`. {error}"
                ) from error
            raise
        unit.gathering, unit.state = None, UnitState.UNSHARDED

    def drop(self, unit: Unit, keeps_pages: bool = False) -> None:
        """Reshards a unit.

        Args:
            keeps_pages: the next gather takes its pages, or :meth:`give_pages_back` gives them to the system.
        """
        if unit.state is UnitState.UNSHARDING:  # other ranks, or the backend, may write to the memory until then
            self.wait(unit)
        if unit.state is UnitState.SHARDED:
            return
        if unit in self.strays.watched:
            self.strays.look(unit)
            self.strays.forget(unit)
        unit.state = UnitState.SHARDED
        self.order.pop(unit)
        for each in unit.buckets:
            if each.bucket.drop(keeps_pages):
                self.freed.append(each.bucket.memory)

    def drop_all_but(self, names: Container[str], keeps_pages: bool = False) -> None:
        """Reshards the units that nothing keeps, but for those of these names."""
        for unit in tuple(self.order):
            if not (unit.users or unit.name in names) and unit.stays is Stay.NO:
                self.drop(unit, keeps_pages)

    def free(self, unit: Unit) -> None:
        """Reshards a unit whatever kept it."""
        unit.users, unit.stays = 0, Stay.NO
        self.drop(unit)

    def _pages_for(self, memory: Memory) -> Memory:
        """Takes what was freed for this use: the memory's own pages, or if possible those of one of its size."""
        if memory in self.freed:  # if it stayed in the list, another bucket would take pages that are in use
            self.freed.remove(memory)
            return memory
        for at, each in enumerate(self.freed):
            if each.nbytes == memory.nbytes:
                return self.freed.pop(at)
        return self.freed.pop(0)

    def give_pages_back(self) -> None:
        """Gives the pages to the system that no gather has taken."""
        for each in self.freed:
            each.give_pages_back()
        self.freed.clear()
