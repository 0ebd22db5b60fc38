"""Sharded params while they are not gathered: they keep shape, dtype and gradient, and refuse to be read.

A read of freed memory would crash the process or, worse, train on stale numbers. While a param's bucket is released,
the param's class is :class:`ReleasedParameter`. A change of class costs a tenth of a microsecond.
"""

import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import ReleasedError, StateError


class SliceKeeper(Protocol):
    """The keeper of this rank's slices of sharded params; a protocol, since domains lie above this folder.

    Attributes:
        is_dropped: its optimizer was dropped without ``close()``.
    """

    is_dropped: bool

    def read(self, param: torch.nn.Parameter) -> torch.Tensor:
        """Answers ``detach()`` of the released param: returns this rank's slice as a part."""

    def write(self, param: torch.nn.Parameter, whole: torch.Tensor) -> None:
        """Answers ``copy_(whole)``: writes this rank's slice of a whole tensor. Collective."""

    def gather_for(self, param: torch.nn.Parameter, is_read: bool) -> bool:
        """Gathers the param for an operation in the model's own code, else returns False.

        ``is_read`` is False for an operation that only the forward of a module may gather for: a write, or
        ``detach()``, which a part answers.
        """

    def computes(self) -> bool:
        """True while a forward, a backward or another method of the model runs."""

    def name_of(self, param: torch.nn.Parameter) -> str | None:
        """Returns the param's name in the module."""


# Sharded param -> keeper of its slices. This is a table of the process because an attribute of the param would
# travel: torch.save() and copies of a module take a param's attributes with them. The keeper holds the param; a strong
# reference would keep both for as long as the process lives (test_taken_over_and_given_back).
_SHARDED: WeakIdKeyDictionary = WeakIdKeyDictionary()


def mark_sharded(param: torch.nn.Parameter, keeper: SliceKeeper) -> None:
    """Says that ``param`` is sharded. The table holds ``keeper`` weakly."""
    _SHARDED[param] = weakref.ref(keeper)


def is_sharded(param: torch.Tensor) -> bool:
    """True if an optimizer keeps ``param`` in slices, gathered at this moment or not."""
    return param in _SHARDED


def _keeper_of(param: torch.Tensor) -> SliceKeeper | None:
    """Returns who keeps the slices of a param; None once both the optimizer and the module are gone."""
    reference = _SHARDED.get(param)
    keeper: SliceKeeper | None = None if reference is None else reference()
    return keeper


def mark_whole(param: torch.nn.Parameter) -> None:
    """Says that ``param`` is not sharded any more."""
    _SHARDED.pop(param, None)


_Tensor = torch.Tensor


# Properties and methods that read no values.
_PROPERTIES = """
    shape dtype device layout grad requires_grad is_leaf grad_fn ndim names is_sparse is_cuda is_cpu is_meta
    is_quantized is_mkldnn is_nested _version _backward_hooks _post_accumulate_grad_hooks grad_dtype itemsize
    nbytes retains_grad
"""
_METHODS = """
    size stride dim numel nelement element_size is_contiguous is_floating_point is_complex storage_offset
    register_hook register_post_accumulate_grad_hook requires_grad_ __hash__ is_shared is_signed ndimension
    get_device data_ptr untyped_storage new_empty new_full new_ones new_tensor new_zeros
"""
# The functions that a guarded param answers: none of them reads values.
READS_NO_VALUES = {
    *(getattr(getattr(_Tensor, name, None), "__get__", None) for name in _PROPERTIES.split()),
    *(getattr(getattr(_Tensor, name, None), "__set__", None) for name in ("grad", "requires_grad", "grad_dtype")),
    *(getattr(getattr(_Tensor, name, None), "__delete__", None) for name in ("grad",)),
    *(getattr(_Tensor, name, None) for name in _METHODS.split()),
    torch.is_floating_point,
    torch.is_complex,
    torch.is_same_size,
    torch._has_compatible_shallow_copy_type,  # Module.to() asks it
    torch.numel,
    torch.empty_like,
    torch.zeros_like,
    torch.ones_like,
    torch.autograd.grad,  # these only say whose gradient is asked for
    torch.autograd.backward,
    _Tensor.backward,
} - {None}


# These read the shape of what they are given, and the values of what they are called on.
_READS_SHAPE = {_Tensor.view_as, _Tensor.reshape_as, _Tensor.expand_as}
# ``param.grad`` in C. Of a released param it is asked within ``DisableTorchFunctionSubclass``.
_GRAD: Any = _Tensor.grad
gradient_in: Callable[[torch.Tensor], Any] = _GRAD.__get__
_gradient_unguarded: Callable[..., Any] = partial(torch._C._disabled_torch_function_impl, gradient_in, ())


def _gradient(param: torch.Tensor) -> Any:
    return _gradient_unguarded((param,))


_DETACHES = {_Tensor.detach, torch.detach, _Tensor.data.__get__}  # type: ignore[attr-defined]


def guard_class(guard: type, own: type, name: str) -> type:
    """Returns a class ``name`` with the methods of ``guard`` ahead of those of ``own``, for ``param.__class__``.

    A param keeps its own class as a base, so ``isinstance`` answers as before.
    """
    # Without __slots__ the layout would differ, and Python would refuse the assignment to __class__.
    body: dict[str, Any] = {"__slots__": ()}
    return types.new_class(name, (guard, own), {}, lambda space: space.update(body))


@cache
def released_class(own: type, is_exact: bool = False) -> type:
    """Returns the class of a released param of class ``own``: a subclass of it and of :class:`ReleasedParameter`.

    Args:
        is_exact: the slices of the param are fp32, and what is gathered is rounded.
    """
    guard: type = ReleasedExact if is_exact else ReleasedParameter
    if own is torch.nn.Parameter or issubclass(own, ReleasedParameter):
        return guard
    if hasattr(own, "_local_tensor"):
        guard = ReleasedDTensor if guard is ReleasedParameter else guard_class(guard, ReleasedDTensor, "ExactDTensor")
    return guard_class(guard, own, f"Released{own.__name__}")


def own_class(tensor: torch.Tensor) -> type:
    """Returns the class of a tensor, of a guarded one that which it has otherwise."""
    kind = type(tensor)
    while getattr(kind, "_is_guard", False):  # some guards are classes of others
        kind = kind.__bases__[-1]
    return kind


class ReleasedParameter(torch.nn.Parameter):
    """An ``nn.Parameter`` of which this rank holds only its slice at this moment."""

    _is_guard = True  # see ``own_class``
    # Clipping asks each param for it four times, and torch takes five times as long to ask the guard.
    grad = property(_gradient, _GRAD.__set__, _GRAD.__delete__)

    @classmethod
    def __torch_function__(
        cls,
        function: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function in READS_NO_VALUES:
            return torch._C._disabled_torch_function_impl(function, types, tuple(args), dict(kwargs or {}))
        first: Any = args[0] if args else None
        if function in _READS_SHAPE and not isinstance(first, ReleasedParameter):
            return torch._C._disabled_torch_function_impl(function, types, tuple(args), dict(kwargs or {}))
        if isinstance(first, ReleasedParameter) and _changes_nothing(function, first, args[1:], kwargs or {}):
            return first  # module.to() returns the tensor itself, as torch does
        keeper = _keeper_of(first) if isinstance(first, ReleasedParameter) else None
        if keeper is not None and function is _Tensor.copy_ and not isinstance(args[1], ReleasedParameter):
            keeper.write(first, args[1])
            return first
        released = [each for each in tree_leaves((args, kwargs)) if isinstance(each, ReleasedParameter)]
        is_read = function not in _DETACHES and not _writes(function, kwargs or {})
        if released and all(_gathers(each, is_read) for each in released):
            return function(*args, **(kwargs or {}))  # they are plain params now
        if keeper is not None and function in _DETACHES:
            return keeper.read(first)
        raise _refusal(getattr(function, "__name__", str(function)), next(iter(released), first))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        keeper = _keeper_of(self)
        if keeper is None or keeper.is_dropped:
            raise _refusal("deepcopy", self)
        raise ReleasedError(
            "copy the model in `with optimizer.unsharded():`, which every rank must enter and leave, and the copy is a "
            "plain whole model; or let the optimizer average the weights (ema=0.999 at construction, and `with "
            "optimizer.unsharded(ema=True):` shows them). copy.deepcopy() came to "
            f"{keeper.name_of(self) or 'a param'}, of which this rank holds a slice (stage 3)."
        )

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ReleasedParameter(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


_FP32 = torch.float32
# What a param that was gathered in less would answer, and what one with fp32 slices answers.
_SIZES: dict[Any, Callable[[Any], Any]] = {
    _Tensor.dtype.__get__: lambda _: _FP32,  # type: ignore[attr-defined]
    _Tensor.element_size: lambda _: _FP32.itemsize,
    _Tensor.itemsize.__get__: lambda _: _FP32.itemsize,  # type: ignore[attr-defined]
    _Tensor.nbytes.__get__: lambda param: param.numel() * _FP32.itemsize,  # type: ignore[attr-defined]
}
# These make a tensor of the param's dtype, unless another one is given.
_MAKERS = {
    *(getattr(_Tensor, name) for name in ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")),
    *(torch.empty_like, torch.zeros_like, torch.ones_like),
}


class AnswersInFp32:
    """A guard's first base: what asks for a dtype gets fp32, which holds the values, and not what forward sees."""

    @staticmethod
    def answers_in_fp32(param: Any) -> bool:
        return True

    @classmethod
    def __torch_function__(
        cls,
        function: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        param = args[0] if args else (kwargs or {}).get("input")
        if (function in _SIZES or function in _MAKERS) and cls.answers_in_fp32(param):
            if function in _SIZES:
                return _SIZES[function](param)
            kwargs = {"dtype": _FP32, **(kwargs or {})}
        return super().__torch_function__(function, types, args, kwargs)  # type: ignore[misc]


class ReleasedExact(AnswersInFp32, ReleasedParameter):
    """A released param whose slices are fp32, although it is gathered in less: it answers as the slices do.

    To the model's own code, which casts its inputs to the dtype of a weight, it answers as what is gathered.
    """

    @staticmethod
    def answers_in_fp32(param: Any) -> bool:
        keeper = _keeper_of(param)
        return keeper is not None and not keeper.computes()


def dtype_in_forward(tensor: torch.Tensor) -> torch.dtype:
    """Returns the dtype in which a forward sees a param, released or not; of another tensor its own."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.dtype


class ReleasedDTensor(ReleasedParameter):
    """The methods by which a DTensor hands out what is inside, where ``__torch_function__`` is not asked."""

    def to_local(self, **keywords: Any) -> Any:
        return _gathered(self, "to_local").to_local(**keywords)

    def full_tensor(self, **keywords: Any) -> Any:
        return _gathered(self, "full_tensor").full_tensor(**keywords)

    def redistribute(self, *arguments: Any, **keywords: Any) -> Any:
        return _gathered(self, "redistribute").redistribute(*arguments, **keywords)


def _gathered(param: Any, call: str) -> Any:
    """Returns the param, which has its own class again."""
    if _gathers(param, is_read=True):
        return param
    raise _refusal(call, param)


def _gathers(param: Any, is_read: bool) -> bool:
    """Gathers a param for a call, unless one of its bucket was gathered just before; else returns False."""
    keeper = _keeper_of(param)
    return keeper is not None and keeper.gather_for(param, is_read)


_CASTS = {
    _Tensor.float: torch.float32,
    _Tensor.double: torch.float64,
    _Tensor.half: torch.float16,
    _Tensor.bfloat16: torch.bfloat16,
}
_MOVES = (_Tensor.cpu, _Tensor.cuda, _Tensor.to, *_CASTS)


def _writes(function: Any, keywords: Mapping[str, Any]) -> bool:
    """True if the call may write to a param: ``mul_``, ``__setitem__``, ``__iadd__``, or a call with ``out=``."""
    name = getattr(function, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in ("__set__", "__setitem__") or name.startswith("__i") or "out" in keywords


def _changes_nothing(function: Any, param: torch.Tensor, args: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    """True if the call would move or cast a param to its own device and dtype, or assign its data to itself.

    Raises:
        ReleasedError: the call would move or cast it to others.
    """
    if function == _Tensor.data.__set__:  # type: ignore[attr-defined]
        return args[0] is param
    if function not in _MOVES or not all(
        isinstance(each, torch.device | torch.dtype | str | bool | None) for each in args
    ):
        return False
    device, dtype = torch.device("cpu") if function is _Tensor.cpu else None, _CASTS.get(function)
    if function is _Tensor.cuda:
        device = torch.device("cuda")
    elif function is _Tensor.to:
        device, dtype, *_ = torch._C._nn._parse_to(*args, **keywords)
    stays = device is None or (device.type == param.device.type and device.index in (None, param.device.index))
    if stays and dtype in (None, param.dtype):
        return True
    raise ReleasedError(
        "move and cast the model before the first forward, or after optimizer.close() on every rank, which gives it "
        "back whole; copy a param in `with optimizer.unsharded():`. This rank holds a slice of it only (stage 3): a "
        f"param of shape {tuple(param.shape)}, {param.dtype} on {param.device}, was to become {dtype or param.dtype} "
        f"on {device or param.device}."
    )


def keep_pattern(name: str | None) -> str:
    """Returns the argument that makes the optimizer keep a param of this name whole."""
    return f'tuning=Tuning(keep=("{name}",))' if name else "tuning=Tuning(keep=...), which takes its name,"


ALONE = "unsharded(alone=True)"


def refused_alone(name: str | None) -> StateError:
    """Returns the error for a write to a param while one rank reads alone."""
    return StateError(
        f"write in `with optimizer.unsharded():`, on every rank: {name or 'a param'} was to be written in {ALONE}, on "
        "this rank alone. Ranks would hold different values."
    )


def _refusal(call: str, param: Any) -> ReleasedError:
    is_known = isinstance(param, _Tensor) and is_sharded(param)
    keeper = _keeper_of(param) if is_known else None
    shape = tuple(param.shape) if isinstance(param, _Tensor) else "?"
    if is_known and keeper is None:
        return ReleasedError(
            "call optimizer.close() on every rank before you drop the optimizer and the model: it makes params whole. "
            f"{call} was called on a param of shape {shape} (stage 3), whose slices went with both of them."
        )
    name = None if keeper is None else keeper.name_of(param)
    if keeper is not None and keeper.is_dropped:
        return ReleasedError(
            "build the model again, with the values that model.state_dict() still has: full_tensor() of each, on every "
            f"rank. {call} was called on {name or 'a param'} of shape {shape}, whose stage 3 optimizer was dropped "
            "without close(), which makes params whole, so nobody gathers it any more."
        )
    return ReleasedError(
        "put the call in `with optimizer.unsharded():`, which every rank must enter and leave; or construct the "
        f"optimizer with {keep_pattern(name)} and the param stays whole on every rank. {call} was called on "
        f"{name or 'a param'} of shape {shape}, whose values are sharded over the ranks at this moment (stage 3). "
        "Without a call it is gathered only while its own module runs forward or backward."
    )
