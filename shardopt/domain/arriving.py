"""What a step left behind: buckets whose updated params are under way, each waited for when it is needed.

While the module's forward runs, a bucket is waited for by itself: by the hooks of :mod:`shardopt.module.arrivals`
before a module that needs it, or by the guard of the param that is read. Anything else that reads or writes a param
(the script, a checkpoint, an evaluation, the next step) waits for all of them, and so does the end of the forward:
there, and not in the midst of other code, a rank hears that another one could not make its shards.
"""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import util
from typing import TYPE_CHECKING

from ..errors import CommunicationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ..partition.bucket import Bucket
    from ..partition.comm.late_gather import LateGather
    from .shard import Shard
    from .timings import Clock

_HALF_WAY = "Params are those of a part of the last step: do not go on training from here; restart from a checkpoint."


class Arriving:
    """The buckets of one gather that have not arrived.

    Attributes:
        is_in_forward: True while the module's forward runs, which waits for one bucket at a time.
        is_over: all of them are here.
    """

    def __init__(self, gather: LateGather, shards: Sequence[Shard], clock: Clock, on_error: Callable[[str], None]):
        """
        Args:
            shards: whose buckets are gathered.
            on_error: is called with what kept a bucket from arriving.
        """
        self._gather, self._clock, self._on_error = gather, clock, on_error
        self._left: dict[Bucket, Shard] = {shard.bucket: shard for shard in shards}
        self._lock = threading.RLock()  # whoever reads a param, in whatever thread
        self.is_in_forward = self.is_over = False
        self.on_end: Callable[[], None] = lambda: None
        for bucket in self._left:
            bucket.expect(partial(self._read, bucket))
        _watch(self)

    def _read(self, bucket: Bucket) -> None:
        """A param of the bucket is read or written."""
        if self.is_in_forward:
            self.wait_for((bucket,))
        else:
            self.settle()

    def wait_for(self, buckets: Sequence[Bucket]) -> None:
        """Waits until these buckets have arrived."""
        with self._lock:
            for bucket in buckets:
                if bucket in self._left:
                    with self._clock.phase("gather"), self._told():
                        self._gather.wait(self._left[bucket].window)
                    del self._left[bucket]
                    bucket.arrived()

    def settle(self) -> None:
        """Waits until all is here, and every rank has said that it could make its shards.

        Raises:
            CommunicationError: a rank failed, died or is late; also whenever it is called again.
        """
        with self._lock:
            if self.is_over:
                return
            self.wait_for(tuple(self._left))
            with self._told():
                self._gather.finish()
            self.is_over, self.is_in_forward = True, False
            self.on_end()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except CommunicationError as error:
            self._on_error(f"CommunicationError: {error}")
            raise CommunicationError(f"{error} {_HALF_WAY}") from error


# -- the process -------------------------------------------------------------------------------------------------------

# What is under way in this process. Shards of this rank's travel too: it must not end before they are sent.
_LIVE: weakref.WeakSet[Arriving] = weakref.WeakSet()
_watching: set[int] = set()  # processes that settle before they end


def _watch(arriving: Arriving) -> None:
    _LIVE.add(arriving)
    if os.getpid() not in _watching:  # a forked process forgets what its parent's end was to call
        _watching.add(os.getpid())
        util.Finalize(None, _settle_all, exitpriority=100)  # unlike atexit, also in processes of multiprocessing


def _settle_all() -> None:
    for each in list(_LIVE):
        with suppress(CommunicationError):  # raised where a param is read
            each.settle()


# A forked process (a worker of a DataLoader) has a copy of the memory in which nothing arrives any more.
os.register_at_fork(before=_settle_all)
