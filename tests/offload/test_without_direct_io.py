"""On file systems without direct I/O files go through the page cache: the same bits, and what was written is synced."""

import errno
import os
import threading
from pathlib import Path

import pytest
import torch
from torch.nn import Parameter

from shardopt import OffloadError, ShardedAdamW, Tuning
from tests.offload.test_offload_faults import System, system
from tests.support.training import raises, raw

DIRECT = getattr(os, "O_DIRECT", 0)
pytestmark = pytest.mark.skipif(not DIRECT, reason="direct I/O is Linux's")


class WithoutDirect(System):
    """Refuses direct I/O: at "open", at "open, once it is made", or at each "transfer". Counts what is not synced."""

    def __init__(self, refuses_at: str):
        self.refuses_at, self.syncs, self.fails_to_sync = refuses_at, 0, False
        self._lock, self._unsynced = threading.Lock(), dict[int, int]()

    def open(self, name: str, flags: int, mode: int, folder: int) -> int:
        if flags & DIRECT and self.refuses_at != "transfer":
            if self.refuses_at == "open, once it is made":
                os.close(super().open(name, flags & ~DIRECT, mode, folder))
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().open(name, flags, mode, folder)

    def _check(self, fd: int) -> None:
        import fcntl

        if fcntl.fcntl(fd, fcntl.F_GETFL) & DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        self._check(fd)
        return super().read(fd, buffer, offset)

    def write(self, fd: int, buffer: memoryview, offset: int) -> int:
        self._check(fd)
        with self._lock:
            self._unsynced[fd] = self._unsynced.get(fd, 0) + 1
        return super().write(fd, buffer, offset)

    def sync(self, fd: int) -> None:
        if self.fails_to_sync:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().sync(fd)
        with self._lock:
            self._unsynced.pop(fd, None)
            self.syncs += 1

    @property
    def unsynced(self) -> int:
        return sum(self._unsynced.values())


def make(folder: Path | None) -> tuple[list[Parameter], ShardedAdamW]:
    params = [Parameter(torch.linspace(-1, 1, numel)) for numel in (700, 2300, 1)]
    return params, ShardedAdamW(params, lr=1e-2, offload=folder, tuning=Tuning(chunk_bytes=8192, bucket_bytes=4000))


def step(params: list[Parameter], optimizer: ShardedAdamW, number: int) -> None:
    for param in params:
        param.grad = torch.cos(param.detach() + number)
    optimizer.step()


@pytest.mark.parametrize("refuses_at", ["open", "open, once it is made", "transfer"])
def test_the_same_bits_through_the_page_cache(refuses_at: str, tmp_path: Path) -> None:
    cached = WithoutDirect(refuses_at)
    expected, in_memory = make(None)
    with system(cached):
        params, optimizer = make(tmp_path)
        for number in range(3):
            step(expected, in_memory, number)
            step(params, optimizer, number)
            assert not cached.unsynced  # or an error of the disk would be told to nobody
        assert [raw(param) for param in params] == [raw(param) for param in expected]
        assert cached.syncs
        cached.fails_to_sync = True
        weights = [raw(param) for param in params]
        with raises(OffloadError, "page cache"):
            step(params, optimizer, 3)
        assert [raw(param) for param in params] == weights
        cached.fails_to_sync = False
        step(params, optimizer, 3)
        step(expected, in_memory, 3)
        assert [raw(param) for param in params] == [raw(param) for param in expected]
        optimizer.close()
