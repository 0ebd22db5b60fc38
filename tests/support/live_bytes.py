"""Bytes of tensors that are alive: of all that operations have made since, whoever holds them, views counted once.

::

    with LiveBytes() as live:
        loss = model(batch)
    live.now()                  # what forward left behind for backward, and the loss
"""

import gc
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Remembers the memory that each operation has made, and keeps none of it."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[StorageWeakRef, int] = {}
        self._before: set[StorageWeakRef] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [each for each in tree_leaves((args, kwargs)) if type(each) is torch.Tensor]
        self._before.update(ref for ref in map(_ref, given) if ref not in self._sizes)
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if type(each) is torch.Tensor and (ref := _ref(each)) not in self._before:
                self._sizes[ref] = each.untyped_storage().nbytes()
        return result

    def now(self) -> int:
        gc.collect()
        return sum(size for ref, size in self._sizes.items() if not ref.expired())


def _ref(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())
