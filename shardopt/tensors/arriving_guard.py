"""Params whose values are still under way: whatever reads or writes one waits for its values first.

A step may return before its gather has ended (``Tuning(overlap_gather=True)``). Until a bucket has arrived, its params
are of class :class:`ArrivingParameter`, as resharded ones are of ``ReleasedParameter``. Shape, dtype and gradient are
there; the first call that needs values waits, and params are plain again. So a wait costs one call of each bucket, and
nothing afterwards.

PyTorch shows Python every call but those that C++ code makes without it: ``torch.func.grad(f)(param)``, a scripted
function, an extension. Such a call finds NaN in what has not arrived, never older values, see
:class:`shardopt.partition.comm.async_gather.AsyncGather`.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from ..uncompiled import uncompiled
from .unsharded_guard import READS_NO_VALUES, AnswersInFp32, guard_class

_Tensor = torch.Tensor
# These hand out the memory itself, so they wait although they read no values.
_SHOWS_MEMORY = {_Tensor.data_ptr, _Tensor.untyped_storage, _Tensor.is_shared}
_ALLOWED = READS_NO_VALUES - _SHOWS_MEMORY


@dataclass(eq=False)
class GatherHandle:
    """The gather that the params of one bucket wait for.

    The table below refers to a handle and not to the bucket: the table is weak in its keys alone, and a bucket, which
    holds the params, would keep them alive for as long as the process lives.

    Attributes:
        wait: returns once the params of the bucket hold their values and have their own classes; None between gathers.
    """

    wait: Callable[[], None] | None = None


# A table of the process, like that of sharded params: an attribute of the param would travel with copies and files.
_HANDLES: WeakIdKeyDictionary = WeakIdKeyDictionary()


def mark_arriving(param: torch.nn.Parameter, own: type, handle: GatherHandle, is_exact: bool) -> None:
    """Says that calls that need the values of ``param``, of class ``own``, call ``handle.wait`` first."""
    if _HANDLES.get(param) is not handle:
        _HANDLES[param] = handle
    param.__class__ = arriving_class(own, is_exact)


@cache
def arriving_class(own: type, is_exact: bool = False) -> type:
    """Returns the class of an arriving param of class ``own``: a subclass of it and of :class:`ArrivingParameter`.

    Args:
        is_exact: its values will be fp32, and it is rounded now.
    """
    guard: type = ExactParameter if is_exact else ArrivingParameter
    if hasattr(own, "_local_tensor"):
        guard = guard_class(guard, ArrivingDTensor, f"{guard.__name__}OfDTensor") if is_exact else ArrivingDTensor
    return guard if own is torch.nn.Parameter else guard_class(guard, own, f"{guard.__name__}Of{own.__name__}")


class ArrivingParameter(torch.nn.Parameter):
    """An ``nn.Parameter`` that holds its values only once the other ranks' shards have arrived."""

    _is_guard = True  # see ``own_class``

    @classmethod
    @uncompiled("it waits for other ranks")
    def __torch_function__(
        cls,
        function: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function in _ALLOWED:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        for each in tree_leaves((args, kwargs)):
            _wait_for_values(each)
        return function(*args, **(kwargs or {}))  # they are plain params now

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _wait_for_values(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _wait_for_values(self)
        return self.__reduce_ex__(protocol)

    def __format__(self, spec: str) -> str:
        _wait_for_values(self)
        return format(self, spec)


class ArrivingDTensor(ArrivingParameter):
    """The methods by which a DTensor hands out what is inside, where ``__torch_function__`` is not asked."""

    def to_local(self, **keywords: Any) -> Any:
        _wait_for_values(self)
        return self.to_local(**keywords)

    def full_tensor(self, **keywords: Any) -> Any:
        _wait_for_values(self)
        return self.full_tensor(**keywords)

    def redistribute(self, *arguments: Any, **keywords: Any) -> Any:
        _wait_for_values(self)
        return self.redistribute(*arguments, **keywords)


class ExactParameter(AnswersInFp32, ArrivingParameter):
    """A rounded ``nn.Parameter`` inside of ``unsharded()``, which shows fp32 values once they are used."""


def _wait_for_values(value: Any) -> None:
    """Waits for the values of a param that has not arrived; does nothing for any other value."""
    if not isinstance(value, ArrivingParameter):
        return
    wait = _HANDLES[value].wait
    if wait is not None:  # another thread may have waited meanwhile
        wait()
