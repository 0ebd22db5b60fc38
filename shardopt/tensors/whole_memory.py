"""Host memory for the whole of a part, for those who ask where a tensor lies. Values come when they are read.

Libraries that save files ask for the storage of every tensor, its address and its size, to find those that share one.
That must not read the model: memory is reserved, of which the system has given no page. Whoever reads it at the
tensor's own address, or asks the storage for more, gets the values.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any, cast

import torch


class WholeMemory:
    """The memory of a whole, which lives as long as the parts that show it."""

    def __init__(self, fetch: Callable[[], torch.Tensor], like: torch.Tensor):
        """
        Args:
            fetch: reads the whole from the other ranks.
            like: has its size, strides and dtype.
        """
        self._fetch = fetch
        self._whole = _reserved(like)
        self.is_filled = False

    def filled(self) -> torch.Tensor:
        """Returns the whole."""
        if not self.is_filled:
            self._whole.copy_(self._fetch())
            self.is_filled = True
        return self._whole

    @property
    def storage(self) -> torch.UntypedStorage:
        """The storage. Before the values are read, it only tells its address and size, and anything else reads them."""
        found = self._whole.untyped_storage()
        return found if self.is_filled else cast(torch.UntypedStorage, _UnreadStorage(self, found))


def _reserved(like: torch.Tensor) -> torch.Tensor:
    # A mapping of its own: malloc() writes to the first page of what it returns, which may be a huge one.
    last = sum((size - 1) * stride for size, stride in zip(like.size(), like.stride(), strict=True))
    if not like.numel():
        return torch.empty_strided(like.size(), like.stride(), dtype=like.dtype)
    memory = mmap.mmap(-1, (last + 1) * like.dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=like.dtype).as_strided(like.size(), like.stride())


class _UnreadStorage:
    def __init__(self, memory: WholeMemory, storage: torch.UntypedStorage):
        self._memory, self._storage = memory, storage

    def nbytes(self) -> int:
        return self._storage.nbytes()

    def data_ptr(self) -> int:
        return self._storage.data_ptr()

    def __len__(self) -> int:
        return len(self._storage)

    def __getitem__(self, index: Any) -> Any:
        return self._memory.filled().untyped_storage()[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory.filled().untyped_storage(), name)
