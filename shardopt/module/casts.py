"""Mixed precision around a module: floating inputs and outputs are cast by hooks of the module, and of those in fp32.

The hooks hold dtypes alone, so that they keep nothing alive, a copy of the module has them as well, and torch.compile
traces them.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..domain.dtensors import is_dtensor, local_tensor
from ..domain.precision import cast_buffers, kept_in_fp32
from ..tensors.local_tensor import set_local
from ..tensors.unsharded_guard import dtype_in_forward, is_sharded
from ..uncompiled import uncompiled
from .hooks import ModuleHook, remove_all
from .running import callers_of, in_backward

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..config import Precision
    from ..domain.domain import Domain


def cast_within(values: Any, dtype: torch.dtype) -> Any:
    """Returns nested values with all floating tensors in this dtype; the same object where nothing is to be cast."""
    if isinstance(values, torch.Tensor):
        return values.to(dtype) if values.is_floating_point() and values.dtype is not dtype else values
    if isinstance(values, Mapping):
        found = {key: cast_within(each, dtype) for key, each in values.items()}
        changed = {key: each for key, each in found.items() if each is not values[key]}
        made: Any = copy.copy(values) if changed else values  # a dict, or an object that is one (a library's output)
        for key, each in changed.items():
            made[key] = each
        return made
    if isinstance(values, list | tuple):
        cast = [cast_within(each, dtype) for each in values]
        if all(one is other for one, other in zip(cast, values, strict=True)):
            return values
        return type(values)(*cast) if hasattr(values, "_fields") else type(values)(cast)
    if dataclasses.is_dataclass(values) and not isinstance(values, type):
        fields = {field.name: getattr(values, field.name, None) for field in dataclasses.fields(values)}
        changed = {name: new for name, each in fields.items() if (new := cast_within(each, dtype)) is not each}
        made = copy.copy(values) if changed else values
        for name, each in changed.items():
            object.__setattr__(made, name, each)
        return made
    return values


class _Switch:
    """What the hooks of a module share.

    Attributes:
        is_on: params have their dtypes: until then the module runs in fp32.
        is_called: a forward of the module runs, whose inputs were cast.
    """

    is_on = False
    is_called = False


@dataclasses.dataclass(eq=False)
class CastInputs:
    """A hook before a forward: floating inputs become of one dtype."""

    dtype: torch.dtype
    switch: _Switch

    def __call__(self, module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> Any:
        if not self.switch.is_on:
            return None
        return cast_within(arguments, self.dtype), cast_within(keywords, self.dtype)


@dataclasses.dataclass(eq=False)
class CastMethodInputs(CastInputs):
    """The same of a module within, which another method than forward calls: what it calls gets what it gives."""

    def __call__(self, module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> Any:
        if self.switch.is_called or not self.switch.is_on or not self._is_outermost():
            return None
        return super().__call__(module, arguments, keywords)

    @uncompiled("it looks at the stack")
    def _is_outermost(self) -> bool:
        if in_backward():  # activation checkpointing, which has the inputs of the forward
            return False
        callers = callers_of(nn.Module._call_impl)
        next(callers)  # the call of the module itself
        hooks = (hook for each in callers for hook in each._forward_pre_hooks.values())
        return not any(isinstance(each, CastInputs) and each.switch is self.switch for each in hooks)


@dataclasses.dataclass(eq=False)
class CastOutputs:
    """A hook after a forward: floating outputs become of one dtype."""

    dtype: torch.dtype
    switch: _Switch

    def __call__(self, module: nn.Module, arguments: Any, output: Any) -> Any:
        return cast_within(output, self.dtype) if self.switch.is_on else None


class Casts:
    """The hooks that cast, on the modules that a script calls and on those that stay in fp32.

    In ``unsharded()`` params show fp32 values but for the calls of the module, and backward.
    """

    def __init__(self, module: nn.Module, called: Sequence[nn.Module], precision: Precision, domains: Sequence[Domain]):
        """
        Args:
            called: the modules that a script calls.
            domains: those of the module, once they are there.

        Raises:
            BindingError: ``keep_fp32`` has a pattern that names nothing.
        """
        self._module, self._precision, self._switch = module, precision, _Switch()
        self._domains = domains
        self._computes = False  # a call runs that began in ``unsharded()``
        self._hooks: list[Any] = []
        self._cast: set[nn.Parameter] = set()  # the frozen params that lost their low bits
        kept = kept_in_fp32(module, precision)
        cast_buffers(module, precision)
        self._low_buffers: dict[torch.Tensor, torch.Tensor] = {}  # those that lost their low bits -> what they were
        in_fp32 = _outermost(module, lambda inner: _is_kept(inner, kept))
        for each in in_fp32:
            self._add(each, torch.float32, precision.compute_dtype)
        inputs = precision.compute_dtype if precision.cast_inputs else None
        for each in called:
            self._add(each, inputs, precision.output_dtype)
        apart = {inner for each in (*called, *in_fp32) for inner in (each.modules() if each in in_fp32 else (each,))}
        for each in module.modules():
            if each not in apart:
                self._add(each, inputs, None, CastMethodInputs)
        for each in called:  # behind those that cast outputs
            self._hooks.append(each.register_forward_hook(ModuleHook(self._end_call), always_call=True))

    def _add(
        self,
        module: nn.Module,
        inputs: torch.dtype | None,
        outputs: torch.dtype | None,
        kind: type[CastInputs] = CastInputs,
    ) -> None:
        if inputs is not None:
            before = kind(inputs, self._switch)
            self._hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
        if outputs is not None:
            self._hooks.append(module.register_forward_hook(CastOutputs(outputs, self._switch)))

    # -- calls -----------------------------------------------------------------------------------------------------

    def begin_call(self) -> None:
        """A forward of the module begins."""
        self._computes, self._switch.is_called = self.compute(), True

    def _end_call(self, *_: Any) -> None:
        self._computes = self._switch.is_called = False
        self.rest()

    def begin_backward(self) -> None:
        """A backward begins."""
        if self.compute():
            later = torch.autograd.Variable._execution_engine.queue_callback
            later(lambda: later(self._rest))  # behind what the end of a backward does with gradients

    def compute(self) -> bool:
        """Shows a call or a backward in ``unsharded()`` params of ``compute_dtype``. Returns whether it did."""
        exact = [each.exact for each in self._domains if each.exact is not None]
        for each in exact:
            each.compute()
        self._switch.is_on |= bool(exact)
        return bool(exact)

    def rest(self) -> None:
        """Lets params show fp32 values in ``unsharded()``, unless a call or a backward runs."""
        if not in_backward():
            self._rest()

    def _rest(self) -> None:
        exact = [each.exact for each in self._domains if each.exact is not None]
        for each in exact if not self._computes else ():
            each.rest()
            self._switch.is_on = False

    # -- what stays cast -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def begin(self) -> None:
        """Casts frozen params, which have no master, and lets the hooks cast from now on; params were bound."""
        kept = kept_in_fp32(self._module, self._precision)
        for param in self._module.parameters():
            is_fp32 = dtype_in_forward(param) is torch.float32 and not is_sharded(param)  # inner ones stay
            if not param.requires_grad and is_fp32 and param not in kept:
                _cast(param, self._precision.compute_dtype)
                self._cast.add(param)
        for buffer in cast_buffers(self._module, self._precision):
            if buffer.dtype is not self._precision.compute_dtype:
                self._low_buffers[buffer] = buffer.data
                buffer.data = buffer.data.to(self._precision.compute_dtype)
        self._switch.is_on = True

    def undo(self) -> None:
        """Makes params fp32 again that were cast, and those that a script made in their place in ``compute_dtype``.

        Params that were bound have their fp32 values back.
        """
        kept = kept_in_fp32(self._module, self._precision)
        for param in self._module.parameters():
            is_low = dtype_in_forward(param) is self._precision.compute_dtype and param not in kept
            if is_low and (param.requires_grad or param in self._cast):
                _cast(param, torch.float32)
        self._cast.clear()
        self._switch.is_on = False
        self._give_buffers_back()

    def _give_buffers_back(self) -> None:
        for buffer, before in self._low_buffers.items():
            is_written = not torch.equal(before.to(buffer.dtype), buffer)
            buffer.data = buffer.data.to(before.dtype) if is_written else before
        self._low_buffers.clear()

    def close(self) -> None:
        """Removes the hooks, and makes frozen params fp32 again."""
        for param in self._cast:
            if not param.requires_grad and dtype_in_forward(param) is self._precision.compute_dtype:
                _cast(param, torch.float32)
        self._cast.clear()
        self._give_buffers_back()
        remove_all(self._hooks)


def _cast(param: nn.Parameter, dtype: torch.dtype) -> None:
    if is_dtensor(param):
        set_local(param, local_tensor(param).detach().to(dtype))
    else:
        param.data = param.data.to(dtype)


def _is_kept(module: nn.Module, kept: frozenset[torch.Tensor]) -> bool:
    """True if a module has params and all of them stay in fp32."""
    own = list(module.parameters())
    return bool(own) and all(param in kept for param in own)


def _outermost(module: nn.Module, is_found: Callable[[nn.Module], bool]) -> list[nn.Module]:
    """Returns the modules of which it is true, but for those inside of one."""
    if is_found(module) and not isinstance(module, nn.ModuleList | nn.ModuleDict):  # nobody calls these
        return [module]
    found = (each for child in module.children() for each in _outermost(child, is_found))
    return list(dict.fromkeys(found))  # modules may be shared
