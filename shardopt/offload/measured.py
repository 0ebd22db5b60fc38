"""Host memory, stepped on the device or on the CPU: in the first steps by turns, then by what took less time.

Both have the same bits, so that each rank may choose for itself.
"""

import logging
import time
import weakref
from collections.abc import Mapping, Sequence

import torch

from .cpu_step import CpuStepStore
from .host import HostStore
from .ring import RingStore
from .store import Chunk, Fetched, FinalStore, ShardStorage
from .streams import CopyStreams

TRIALS = 3  # steps in each way; the first of them compiles kernels and makes slots, so the least time counts

_log = logging.getLogger("shardopt")

_Way = RingStore | CpuStepStore


class MeasuredStore(FinalStore):
    """The homes of a host store, with two stores around it that can have them updated."""

    tier = "host"

    def __init__(self, streams: CopyStreams, host: HostStore, ways: Mapping[str, _Way]):
        """``ways``: by the names that ``Offload.step`` gives them."""
        self._streams, self._host, self._ways = streams, host, dict(ways)
        self._homes: weakref.WeakSet[ShardStorage] = weakref.WeakSet()
        self._seconds: dict[str, list[float]] = {name: [] for name in ways}
        self._now = next(iter(ways))
        self._began: float | None = None  # the step that is measured
        self.note: str | None = None  # until it is known

    @property
    def _way(self) -> _Way:
        return self._ways[self._now]

    def home(self, numel: int, dtype: torch.dtype, device: torch.device) -> ShardStorage:
        home = self._host.home(numel, dtype, device)
        self._homes.add(home)
        self._way.step_here(home)
        return home

    # -- a step ----------------------------------------------------------------------------------------------------

    def prefetch(self, chunks: Sequence[Chunk]) -> None:
        if self.note is None:
            self._streams.synchronize(self._streams.now())  # what backward left to do is not the step's
            self._began = time.perf_counter()
        self._way.prefetch(chunks)

    def fetch(self, chunk: Chunk) -> Fetched:
        return self._way.fetch(chunk)

    def write_back(self, chunk: Chunk) -> None:
        self._way.write_back(chunk)

    def flush(self) -> None:
        self._way.flush()
        if self._began is not None:
            self._way.settle()
            self._streams.synchronize(self._streams.now())
            self._seconds[self._now].append(time.perf_counter() - self._began)
            self._began = None
            self._go_on()

    def _go_on(self) -> None:
        least = {name: min(seconds) for name, seconds in self._seconds.items() if len(seconds) == TRIALS}
        if len(least) == len(self._ways):
            now = min(least, key=lambda name: least[name])
            took = ", ".join(f"{name} {1e3 * seconds:.3f} ms" for name, seconds in least.items())
            self.note = f"updates of offloaded states run with step={now!r}: the least of {TRIALS} steps took {took}"
            _log.info("shardopt: %s", self.note)
            for name in self._ways.keys() - {now}:
                self._ways[name].drop_buffers()
        else:
            now = next(name for name in self._ways if name not in least)
        if now != self._now:
            self._now = now
            for home in self._homes:
                self._way.step_here(home)

    # -- the rest --------------------------------------------------------------------------------------------------

    @property
    def buffer_bytes(self) -> Mapping[str, int]:
        found: dict[str, int] = {}
        for way in self._ways.values():
            for tier, nbytes in way.buffer_bytes.items():
                found[tier] = found.get(tier, 0) + nbytes
        return found

    def close(self) -> None:
        for way in self._ways.values():
            way.drop_buffers()
        self._host.close()
