"""The plain tensors in which the values of a quantized weight lie: several of them, beside or inside of the param.

==============================================  ================================================================
a param                                         its inner tensors
==============================================  ================================================================
a plain tensor, a DTensor                       none: it is one
a subclass with ``__tensor_flatten__``          those that this names, and those inside of them (torchao's weights)
another subclass of ``nn.Parameter``            itself, and what its module saves beside params and buffers: the scales
                                                of packed codes (bitsandbytes' ``absmax`` and ``SCB``)
==============================================  ================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


@dataclass(frozen=True, eq=False)
class Inner:
    """Of an inner tensor that is sharded: its param, and what shows its values beside it."""

    owner: nn.Parameter
    beside: tuple[Any, ...] = ()


def is_wrapper(tensor: Any) -> bool:
    """True of a subclass whose values lie in other tensors: a DTensor too."""
    return is_traceable_wrapper_subclass(tensor)


def named_inside(tensor: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the plain tensors inside of a wrapper, by dotted names; of any other tensor itself."""
    if not is_wrapper(tensor):
        yield name, tensor
        return
    for inner in tensor.__tensor_flatten__()[0]:
        value = getattr(tensor, inner)
        if isinstance(value, torch.Tensor):  # a DTensor lists its mesh too
            yield from named_inside(value, f"{name}.{inner}" if name else inner)


def with_inside(tensor: Any, value_of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Returns a wrapper like this one with other plain tensors inside; of any other tensor ``value_of(tensor)``."""
    if not is_wrapper(tensor):
        return value_of(tensor)
    from .unsharded_guard import own_class

    names, context = tensor.__tensor_flatten__()
    inside = {name: with_inside(getattr(tensor, name), value_of) for name in names}
    size, stride = tensor.size(), tensor.stride()
    made: torch.Tensor = own_class(tensor).__tensor_unflatten__(inside, context, size, stride)  # type: ignore[attr-defined]
    return made


def saved_beside(module: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the tensors that a module saves beside params and buffers, by their names in its state dict.

    Only of a module that owns a frozen param of a class of its own: the class that reads them.
    """
    if not any(each is not None and is_packed(each) for each in module._parameters.values()):
        return {}
    owned = {id(each) for each in (*module._parameters.values(), *module._buffers.values())}
    return {name: each for name, each in _saved(module).items() if id(each) not in owned}


def kept_beside(module: nn.Module) -> dict[str, torch.Tensor]:
    """Returns those of :func:`saved_beside` that the module keeps: others are made for a state dict, anew each time."""
    once = saved_beside(module)
    again = saved_beside(module) if once else {}
    return {name: tensor for name, tensor in once.items() if again.get(name) is tensor}


def is_packed(param: torch.Tensor) -> bool:
    """True of a frozen param whose class says what its values mean: no wrapper, and no plain ``nn.Parameter``."""
    from .unsharded_guard import own_class

    kind = own_class(param)
    return not (param.requires_grad or kind in _PLAIN or is_wrapper(param))


_PLAIN = (nn.Parameter, torch.Tensor, nn.parameter.UninitializedParameter)


def _saved(module: nn.Module) -> dict[str, torch.Tensor]:
    found: dict[str, Any] = {}
    try:
        module._save_to_state_dict(found, "", keep_vars=True)
    except NotImplementedError:  # bitsandbytes' embeddings cannot be saved
        return {}
    extra = nn.modules.module._EXTRA_STATE_KEY_SUFFIX
    return {name: each for name, each in found.items() if isinstance(each, torch.Tensor) and not name.endswith(extra)}


def views_of(module: nn.Module, param: torch.Tensor) -> list[torch.Tensor]:
    """Returns other tensors with the memory and the shape of a param, which it or its module keeps as attributes.

    bitsandbytes' int8 layers read such a one, first from the param and then from an object of the module.
    """
    memory = param.untyped_storage().data_ptr()
    if not memory:
        return []
    holders: list[Any] = [param, *(each for each in vars(module).values() if hasattr(each, "__dict__"))]
    held = (value for holder in holders if not isinstance(holder, nn.Module) for value in vars(holder).values())
    return [
        each
        for each in {id(value): value for value in held if type(value) is torch.Tensor}.values()
        if each.layout is torch.strided and each.untyped_storage().data_ptr() == memory and each.shape == param.shape
    ]
