"""Host memory, updated on the device or on the CPU: both are tried in the first steps, then the faster one is used.

Both give the same bits, so each rank may choose for itself.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from .cpu_step import CpuStepStore
from .ring import RingStore
from .store import Store

if TYPE_CHECKING:
    from .host import HostStore
    from .store import Chunk, Fetched, ShardStorage
    from .streams import CopyStreams

TRIALS = 3  # steps on each device; the least time counts, as the first step compiles kernels and makes slots

_log = logging.getLogger("shardopt")

_Updater = RingStore | CpuStepStore


class MeasuredStore(Store):
    """The storages of a host store, and two stores around it that can update them."""

    tier = "host"

    def __init__(
        self, streams: CopyStreams, host: HostStore, updaters: Mapping[str, _Updater], seconds: dict[str, list[float]]
    ):
        """
        Args:
            updaters: by the names that ``Offload.step`` gives them.
            seconds: of each of their steps, as a store before this one measured them; this one goes on there.
        """
        self._streams, self._host, self._updaters = streams, host, dict(updaters)
        self._homes: weakref.WeakSet[ShardStorage] = weakref.WeakSet()
        self._seconds = seconds
        for name in updaters:
            seconds.setdefault(name, [])
        self._now = next(iter(updaters))
        self._began: float | None = None  # start of the pass that is measured
        self._took = 0.0  # seconds of this step's passes so far
        self._set_ahead(False)  # a step that is measured loads all that it needs
        self._choose()

    @property
    def _updater(self) -> _Updater:
        return self._updaters[self._now]

    def home(self, numel: int, dtype: torch.dtype, device: torch.device) -> ShardStorage:
        home = self._host.home(numel, dtype, device)
        self._homes.add(home)
        self._updater.update_here(home)
        return home

    # -- a step ----------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Counts the step before, and chooses where this one runs.

        All passes of a step run in one place, since what the first ones measure and the last one reads lies there.
        Adafactor crashed on a GPU when the place changed in mid-step (test_all_passes_of_a_step_run_in_one_place).
        """
        if self._took and self._began is None:  # else its last pass failed
            self._seconds[self._now].append(self._took)
            self._choose()
            if self.note is not None:
                self._host.pages.free_spare()  # the buffers of the way that is not taken
        self._took, self._began = 0.0, None
        self._updater.begin_step()

    def prefetch(self, chunks: Sequence[Chunk]) -> None:
        if self.note is None:  # no choice is made yet
            self._streams.synchronize(self._streams.now())  # kernels of backward are no part of the step
            self._began = time.perf_counter()
        self._updater.prefetch(chunks)

    def fetch(self, chunk: Chunk) -> Fetched:
        return self._updater.fetch(chunk)

    def write_back(self, chunk: Chunk) -> None:
        self._updater.write_back(chunk)

    def flush(self) -> None:
        self._updater.flush()
        if self._began is not None:
            self._updater.wait_for_copies()
            self._streams.synchronize(self._streams.now())
            self._took += time.perf_counter() - self._began
            self._began = None

    def _choose(self) -> None:
        least = {name: min(seconds) for name, seconds in self._seconds.items() if len(seconds) == TRIALS}
        if len(least) == len(self._updaters):
            now = min(least, key=lambda name: least[name])
            took = ", ".join(f"{name} {1e3 * seconds:.3f} ms" for name, seconds in least.items())
            self.note = f"updates of offloaded states run with step={now!r}: the fastest of {TRIALS} steps took {took}"
            _log.info("shardopt: %s", self.note)
            for name in self._updaters.keys() - {now}:
                self._updaters[name].free_buffers()
            self._set_ahead(True)
        else:
            now = next(name for name in self._updaters if name not in least)
        if now != self._now:
            self._now = now
            for home in self._homes:
                self._updater.update_here(home)

    def _set_ahead(self, loads_ahead: bool) -> None:
        for each in self._updaters.values():
            if isinstance(each, RingStore):
                each.loads_ahead = loads_ahead

    # -- the rest --------------------------------------------------------------------------------------------------

    @property
    def buffer_bytes(self) -> Mapping[str, int]:
        found: dict[str, int] = {}
        for updater in self._updaters.values():
            for tier, nbytes in updater.buffer_bytes.items():
                found[tier] = found.get(tier, 0) + nbytes
        return found

    def close(self) -> None:
        for updater in self._updaters.values():
            updater.free_buffers()
        self._host.close()
