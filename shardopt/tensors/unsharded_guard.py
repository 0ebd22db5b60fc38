"""Params whose values lie on other ranks: they keep shape, dtype and gradient, and refuse to be read.

Reading memory that was given back would crash the process or, worse, train on stale numbers. While a param's bucket is
released its class is :class:`ReleasedParameter`, which costs a tenth of a microsecond to change.
"""

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import ReleasedError

Read = Callable[[], torch.Tensor]
Write = Callable[[torch.Tensor], None]
Name = Callable[[], str | None]

# What a released param can be asked for all the same: its slice as a part, to take this rank's slice of a tensor, and
# its name in the module.
_STANDINS: WeakIdKeyDictionary = WeakIdKeyDictionary()


def stand_in(param: torch.nn.Parameter, read: Read, write: Write, name: Name) -> None:
    """Says how a released ``param`` answers ``detach()``, how it takes ``copy_(whole)``, and what it is called."""
    _STANDINS[param] = read, write, name


def is_sharded(param: torch.Tensor) -> bool:
    """Whether some optimizer keeps ``param`` in slices, be it gathered at this moment or not."""
    return param in _STANDINS


def forget(param: torch.nn.Parameter) -> None:
    """It is whole from now on."""
    _STANDINS.pop(param, None)


_Tensor = torch.Tensor


def _names(text: str) -> list[str]:
    return text.split()


_PROPERTIES = [
    "shape",
    "dtype",
    "device",
    "layout",
    "grad",
    "requires_grad",
    "is_leaf",
    "grad_fn",
    "ndim",
    "names",
    "is_sparse",
    "is_cuda",
    "is_cpu",
    "is_meta",
    "is_quantized",
    "is_mkldnn",
    "is_nested",
    "_version",
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
    "grad_dtype",
    "itemsize",
    "nbytes",
    "retains_grad",
]
_METHODS = [
    "size",
    "stride",
    "dim",
    "numel",
    "nelement",
    "element_size",
    "is_contiguous",
    "is_floating_point",
    "is_complex",
    "storage_offset",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "requires_grad_",
    "__hash__",
    "is_shared",
    "is_signed",
    "ndimension",
    "get_device",
    "data_ptr",
    "untyped_storage",
    "new_empty",
    "new_full",
    "new_ones",
    "new_tensor",
    "new_zeros",
]
_ALLOWED = {
    *(getattr(getattr(_Tensor, name, None), "__get__", None) for name in _PROPERTIES),
    *(getattr(getattr(_Tensor, name, None), "__set__", None) for name in ("grad", "requires_grad", "grad_dtype")),
    *(getattr(getattr(_Tensor, name, None), "__delete__", None) for name in ("grad",)),
    *(getattr(_Tensor, name, None) for name in _METHODS),
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


_CLASSES: dict[type, type] = {}


def released_class(own: type) -> type:
    """What a param of this class is while it is released: :class:`ReleasedParameter`, and of its own class as well."""
    if own is torch.nn.Parameter or issubclass(own, ReleasedParameter):
        return ReleasedParameter
    if own not in _CLASSES:
        body: dict[str, Any] = {"__slots__": ()}  # or it would not be of the same layout
        _CLASSES[own] = types.new_class(
            f"Released{own.__name__}", (ReleasedParameter, own), {}, lambda of: of.update(body)
        )
    return _CLASSES[own]


class ReleasedParameter(torch.nn.Parameter):
    """An ``nn.Parameter`` of which this rank holds its slice only, at this moment."""

    @classmethod
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
        first = args[0] if args else None
        if isinstance(first, ReleasedParameter) and _leaves_it(function, first, args[1:], kwargs or {}):
            return first  # module.to(...) of where it is: as torch, which then hands back the tensor itself
        if isinstance(first, ReleasedParameter) and first in _STANDINS:
            read, write, _ = _STANDINS[first]
            if function in (_Tensor.detach, torch.detach, _Tensor.data.__get__):  # type: ignore[attr-defined]
                return read()
            if function is _Tensor.copy_ and not isinstance(args[1], ReleasedParameter):
                write(args[1])
                return first
        found = next((each for each in (*args, *(kwargs or {}).values()) if isinstance(each, ReleasedParameter)), first)
        raise _refusal(getattr(function, "__name__", str(function)), found)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        raise _refusal("deepcopy", self)

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ReleasedParameter(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


_CASTS = {
    _Tensor.float: torch.float32,
    _Tensor.double: torch.float64,
    _Tensor.half: torch.float16,
    _Tensor.bfloat16: torch.bfloat16,
}
_MOVES = (_Tensor.cpu, _Tensor.cuda, _Tensor.to, *_CASTS)


def _leaves_it(function: Any, param: torch.Tensor, args: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    """Whether the call would move or cast a param to where and what it is, or assign its data to itself.

    Raises:
        ReleasedError: it would change it.
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
        f"a param of shape {tuple(param.shape)}, {param.dtype} on {param.device}, was to become {dtype or param.dtype} "
        f"on {device or param.device}, but this rank holds a slice of it only (stage 3). Move and cast the model "
        "before the first forward, or call optimizer.close() on every rank, which gives it back whole; a copy of one "
        "param is made in `with optimizer.unsharded():`."
    )


def keep_pattern(name: str | None) -> str:
    """What to pass to the optimizer so that a param of this name stays whole."""
    return f'tuning=Tuning(keep=("{name}",))' if name else "tuning=Tuning(keep=...), which takes its name,"


def _refusal(call: str, param: Any) -> ReleasedError:
    if param not in _STANDINS:
        shape = tuple(param.shape) if isinstance(param, _Tensor) else "?"
        name, whose = None, f"a param of shape {shape}"
    else:
        name = _STANDINS[param][-1]()
        whose = f"{name or 'a param'} of shape {tuple(param.shape)}"
    return ReleasedError(
        f"{call} was called on {whose}, whose values are sharded over the ranks at this moment (stage 3). Construct "
        f"the optimizer with {keep_pattern(name)} and it stays whole on every rank; or put the call in "
        "`with optimizer.unsharded():`, which every rank must enter and leave. It is gathered by itself only while its "
        "own module runs forward or backward."
    )
