"""The gather that a step did not wait for: the updated params of a bucket are waited for when they are needed.

While the module's forward runs, a bucket is waited for by itself: by the hooks of :mod:`shardopt.module.overlap_hooks`
before a module that needs it, or by the guard of the param that is read. Anything else that reads or writes a param
(the script, a checkpoint, an evaluation, the next step) waits for all of them, and so does the end of the forward.
There, and not in the middle of other code, a rank learns that another one could not make its shards.
"""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import util
from typing import TYPE_CHECKING

import torch

from ..errors import CommunicationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ..partition.bucket import Bucket
    from ..partition.comm.async_gather import AsyncGather
    from .shard import Shard
    from .timings import Clock

_HALF_WAY = "Params are those of a part of the last step: do not go on training from here; restart from a checkpoint."


class OverlappedGather:
    """One gather, and its buckets that have not arrived.

    Attributes:
        is_in_forward: True while the module's forward runs, which waits for one bucket at a time.
        is_over: all of them are here.
    """

    def __init__(
        self,
        gather: AsyncGather,
        shards: Sequence[Shard],
        clock: Clock,
        on_error: Callable[[str], None],
        on_end: Callable[[], None],
    ):
        """
        Args:
            shards: whose buckets are gathered.
            on_error: is called with the error of a gather that failed.
            on_end: is called once all of them are here.
        """
        self._gather, self._clock, self._on_error = gather, clock, on_error
        self._left: dict[Bucket, Shard] = {shard.bucket: shard for shard in shards}
        self._lock = threading.RLock()  # several threads may read params
        self.is_in_forward = self.is_over = False
        self._on_end = on_end
        for bucket in self._left:
            bucket.start_arriving(partial(self._wait_for_read, bucket))
        _finish_at_exit(self)

    def _wait_for_read(self, bucket: Bucket) -> None:
        """Waits because a param of the bucket is read or written."""
        if self.is_in_forward:
            self.wait_for((bucket,))
        else:
            self.finish()

    def wait_for(self, buckets: Sequence[Bucket]) -> None:
        """Waits until these buckets have arrived."""
        with self._lock:
            for bucket in buckets:
                if bucket in self._left:
                    with self._clock.phase("gather"), self._recording_errors(), torch._C._DisableFuncTorch():
                        self._gather.wait(self._left[bucket].window)
                    del self._left[bucket]
                    bucket.end_arriving()

    def finish(self) -> None:
        """Waits until all buckets have arrived, and every rank has sent that it could make its shards.

        Raises:
            CommunicationError: a rank failed, died or is late; also whenever it is called again.
        """
        with self._lock:
            if self.is_over:
                return
            self.wait_for(tuple(self._left))
            with self._recording_errors(), torch._C._DisableFuncTorch():
                self._gather.finish()
            self.is_over, self.is_in_forward = True, False
            self._on_end()

    @contextmanager
    def _recording_errors(self) -> Iterator[None]:
        try:
            yield
        except CommunicationError as error:
            self._on_error(f"CommunicationError: {error}")
            raise CommunicationError(f"{error} {_HALF_WAY}") from error


# -- the process -------------------------------------------------------------------------------------------------------

# The gathers under way in this process. They also send this rank's shards: the process must not end before.
_LIVE: weakref.WeakSet[OverlappedGather] = weakref.WeakSet()
_registered: set[int] = set()  # processes that finish their gathers before they end


def _finish_at_exit(gather: OverlappedGather) -> None:
    _LIVE.add(gather)
    if os.getpid() not in _registered:  # a forked process forgets the finalizers of its parent
        _registered.add(os.getpid())
        # Unlike atexit, it also runs in processes of multiprocessing. Test: test_a_rank_that_ends_has_sent_its_shards
        # in tests/module/test_arriving.py.
        util.Finalize(None, _finish_all, exitpriority=100)


def _finish_all() -> None:
    for each in list(_LIVE):
        with suppress(CommunicationError):  # raised where a param is read
            each.finish()


# A forked process (a worker of a DataLoader) has a copy of the memory in which nothing arrives any more.
os.register_at_fork(before=_finish_all)
