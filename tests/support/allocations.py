"""Memory that runs out at a chosen moment: the n-th allocation raises MemoryError.

::

    with failing(at=3) as meter:      # the third tensor, array or mapping that is made in this thread
        optimizer.step()
    meter.count                       # how many were made; 3 if the third one raised

Counted are operations of torch that return new memory, NumPy's arrays and anonymous mappings, in the thread that asks.
With ``least=1024`` those below a KiB are not: a rank that cannot even allocate the few words of a message has no way to
tell the others, who then wait for their deadline.
"""

import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MESSAGE = "no memory is left, says the test"


class Meter:
    """Counts allocations, and lets one of them fail."""

    def __init__(self, at: int | None, least: int) -> None:
        self.count, self._at, self._least, self._thread = 0, at, least, threading.get_ident()

    def allocate(self, nbytes: int) -> None:
        if threading.get_ident() == self._thread and nbytes >= self._least:
            self.count += 1
            if self.count == self._at:
                raise MemoryError(MESSAGE)

    @property
    def has_failed(self) -> bool:
        return self._at is not None and self.count >= self._at


class _Mode(TorchDispatchMode):
    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _is_new(func):  # what it returned is dropped by the error
            tensors = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
            self._meter.allocate(sum(each.numel() * each.element_size() for each in tensors))
        return result


def _is_new(func: Any) -> bool:
    """Whether an operation on tensors, no collective, returns one that shares nothing with its arguments."""
    tensors = [each for each in func._schema.returns if "Tensor" in str(each.type)]
    return func.namespace == "aten" and any(each.alias_info is None for each in tensors)


def _mapping(meter: Meter) -> type[mmap.mmap]:
    """The class, as others subclass it and ask for instances of it."""

    class Mapping(mmap.mmap):
        def __new__(cls, *arguments: Any, **keywords: Any) -> "Mapping":
            made = super().__new__(cls, *arguments, **keywords)
            meter.allocate(len(made))
            return made

    return Mapping


@contextmanager
def failing(at: int | None, least: int = 0) -> Iterator[Meter]:
    """A context in which allocation ``at`` of ``least`` bytes or more fails; None: none does, all are counted."""
    meter = Meter(at, least)

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def allocates(*arguments: Any, **keywords: Any) -> Any:
            result = function(*arguments, **keywords)
            meter.allocate(result.nbytes)
            return result

        return allocates

    with ExitStack() as stack:
        for owner, name in ((np, "zeros"), (np, "empty")):
            stack.enter_context(patch.object(owner, name, counted(getattr(owner, name))))
        stack.enter_context(patch.object(mmap, "mmap", _mapping(meter)))
        stack.enter_context(_Mode(meter))
        yield meter
