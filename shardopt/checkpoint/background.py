"""Saving in the background: the handle, and the thread that writes during training."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..offload.pinned import Pages, register_with_cuda
from ..partition.memory import zeros
from .elements import READ_BYTES, reader_of

if TYPE_CHECKING:
    from .plan_save import WriteItem
    from .write import RankWriter

_ALIGNMENT = 64


class Saving:
    """A checkpoint that is being written, or was.

    Attributes:
        path: of the checkpoint, once :meth:`wait` has returned.
    """

    def __init__(self, path: Path, thread: threading.Thread | None = None):
        self.path = path
        self._thread = thread
        self._problem: BaseException | None = None
        self._was_waited_for = False

    @property
    def done(self) -> bool:
        """True if :meth:`wait` returns, or raises, at once."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Waits until the checkpoint is published, on this rank alone. Returns its path.

        Raises:
            CheckpointError: some rank could not save it; the checkpoints before it are whole.
        """
        if self._thread is not None:
            self._thread.join()
        self._was_waited_for = True
        if self._problem is not None:
            raise self._problem
        return self.path

    def __repr__(self) -> str:
        state = "being written" if not self.done else "failed" if self._problem is not None else "published"
        return f"Saving({str(self.path)!r}, {state})"


class Background:
    """Writes a module's checkpoints in a thread, one at a time.

    A checkpoint is written from staging memory: one buffer as large as what this rank saves, kept for the next save.
    """

    def __init__(self) -> None:
        self._pages: Pages | None = None  # above the buffer: memory is unpinned before it is freed
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._saving: Saving | None = None

    def wait(self) -> None:
        """Waits until nothing is being written; the staging memory can then be used again."""
        saving, self._saving = self._saving, None
        if saving is None or saving._thread is None:
            return
        saving._thread.join()
        if saving._problem is not None and not saving._was_waited_for:
            warnings.warn(
                f"the last asynchronous checkpoint failed and wait() was not called: {saving._problem}", stacklevel=3
            )

    def start(self, writer: RankWriter) -> Saving:
        def work() -> None:
            try:
                writer.run()
            except BaseException as error:
                saving._problem = error

        # Not a daemon thread: at its end the interpreter waits until the checkpoint is written.
        thread = threading.Thread(target=work, name="shardopt-checkpoint")
        saving = Saving(writer.target.published, thread)
        self._saving = saving
        thread.start()
        return saving

    def copy(self, items: Sequence[WriteItem], device: torch.device) -> list[WriteItem]:
        """Returns the same items with their present values, copied to staging memory, which the next call overwrites.

        Args:
            device: of the params; memory is pinned for a GPU.
        """
        starts, end = [], 0
        for item in items:
            starts.append(end)
            end += -(-item.nbytes // _ALIGNMENT) * _ALIGNMENT
        if end > self._buffer.numel():
            self._grow(end, device)
        copied, devices = [], set()
        for item, start in zip(items, starts, strict=True):
            values = self._buffer[start : start + item.nbytes].view(item.tensor.dtype)
            step = READ_BYTES // item.tensor.dtype.itemsize
            for first in range(0, item.numel, step):
                last = min(first + step, item.numel)
                source = item.read(first, last)
                values[first:last].copy_(source, non_blocking=source.is_cuda)
                devices.add(source.device)
            copied.append(replace(item, read=reader_of(values)))
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # the copies must end before the next step writes to their sources
        return copied

    def _grow(self, nbytes: int, device: torch.device) -> None:
        # Not torch's pinned memory, which is rounded up to a power of two: up to twice what is saved. Test:
        # test_staging_memory_is_no_larger_than_what_is_saved in tests/checkpoint/test_checkpoint_background.py.
        if self._pages is None:
            register = register_with_cuda if device.type == "cuda" else None
            self._pages = Pages(lambda numel, dtype: zeros(numel, dtype, torch.device("cpu")), register, device)
        self._pages.give_back([self._buffer])
        self._buffer = torch.empty(0, dtype=torch.uint8)  # the old memory is freed before more is allocated
        self._buffer = self._pages.zeros(nbytes, torch.uint8)
