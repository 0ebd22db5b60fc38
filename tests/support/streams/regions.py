"""Regions of memory, on the device and on the host: who used which bytes, and whether two uses are a race."""

import weakref
from bisect import bisect_right, insort
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from .clocks import Agent, Clock, Hosts

_WORDS = {True: "writes", False: "reads"}


@dataclass(frozen=True, slots=True)
class Use:
    """Of the bytes [start, end)."""

    start: int
    end: int
    agent: Agent
    time: int  # of the agent
    is_write: bool
    what: str

    def touches(self, other: "Use") -> bool:
        return self.start < other.end and other.start < self.end

    def __str__(self) -> str:
        return f"{self.what} on {self.agent} {_WORDS[self.is_write]}"


@dataclass(eq=False)
class Region:
    """What one allocation made."""

    start: int
    end: int
    is_device: bool
    owner: Agent  # the stream that it was allocated on; a thread, if it is host memory
    uses: list[Use] = field(default_factory=list)  # that a later one may still race with
    recorded: list[Agent] = field(default_factory=list)  # streams that the allocator waits for
    is_pinned: bool = False  # by torch's allocator of pinned memory, to which each copy tells its stream


class Regions:
    """All memory that is in use.

    Attributes:
        races: what was found.
    """

    def __init__(self, hosts: Hosts) -> None:
        self.races: dict[str, None] = {}
        self._hosts = hosts
        self._starts: list[int] = []
        self._by_start: dict[int, Region] = {}
        self._by_storage: dict[int, Region] = {}  # by the address of torch's own record, which empty ones have too

    # -- where memory is -------------------------------------------------------------------------------------------

    def known(self, storage: torch.UntypedStorage) -> Region | None:
        found = self._by_storage.get(storage._cdata)
        return found if found is not None else self.at(storage.data_ptr())

    def at(self, address: int) -> Region | None:
        index = bisect_right(self._starts, address) - 1
        region = self._by_start[self._starts[index]] if index >= 0 else None
        return region if region is not None and address < region.end else None

    def add(self, storage: torch.UntypedStorage, is_device: bool, owner: Agent, has_memory: bool = True) -> Region:
        """New memory. It ends with the storage."""
        start = storage.data_ptr() if has_memory else 0
        region = Region(start, start + storage.nbytes() * has_memory, is_device, owner)
        self._by_storage[storage._cdata] = region
        self._show(region)
        self._allocate(region)
        weakref.finalize(storage, self._end_storage, storage._cdata).atexit = False
        return region

    def _show(self, region: Region) -> None:
        if region.end > region.start:
            insort(self._starts, region.start)
            self._by_start[region.start] = region

    def _allocate(self, region: Region) -> None:
        """The allocator hands out memory that its stream may still use: for others that is a write of that stream."""
        if region.is_device and region.end > region.start:
            owner = region.owner
            region.uses = [Use(region.start, region.end, owner, owner.tick(), True, "its allocation")]

    def _hide(self, region: Region) -> None:
        if region.end > region.start:
            self._starts.remove(region.start)
            del self._by_start[region.start]

    # -- freeing ---------------------------------------------------------------------------------------------------

    def _end_storage(self, key: int) -> None:
        self.free(self._by_storage.pop(key))

    def free(self, region: Region) -> None:
        """The memory goes back to the allocator, which knows its own stream, recorded ones, and what the host does."""
        self._hide(region)
        known: Clock = {}
        for agent in (region.owner, *region.recorded, self._hosts.here):
            for each, time in agent.clock.items():
                known[each] = max(known.get(each, 0), time)
        for use in region.uses:
            if use.agent is not region.owner and known.get(use.agent, 0) < use.time:
                self.races[f"memory of {region.owner} is freed, and nothing tells its allocator that {use} it"] = None
        region.uses, region.end = [], region.start

    def resize(self, storage: torch.UntypedStorage, owner: Agent, resize: Callable[[], None]) -> None:
        """Frees the memory of a storage and allocates as much as it has from then on."""
        region = self.known(storage)
        if region is None:
            resize()
            return
        if storage.nbytes():
            self.free(region)
        resize()
        region.start, region.owner, region.recorded = storage.data_ptr(), owner, []
        region.end = region.start + storage.nbytes()
        self._show(region)
        self._allocate(region)

    # -- using -----------------------------------------------------------------------------------------------------

    def use(self, region: Region, use: Use) -> None:
        kept = []
        for each in region.uses:
            is_before = use.agent.is_after(each.agent, each.time)
            if each.touches(use):
                if not is_before and (each.is_write or use.is_write):
                    self.races[f"{use} what {each}: nothing orders them"] = None
                covers = use.start <= each.start and each.end <= use.end
                if covers and is_before and (use.is_write or not each.is_write):
                    continue  # whatever comes after this use comes after that one
            kept.append(each)
        region.uses = [*kept, use]
