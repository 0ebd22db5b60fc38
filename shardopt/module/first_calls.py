"""The calls that come before a module is bound: its forward binds it, and so does any other method that trains.

A script may never call ``model(x)``: an agent has ``get_value()``, a fused loss reads the head's weight itself. The
first module within the model that runs with gradients binds, ahead of what it computes, as the model's own forward
does. A method that calls no module of the model, and reads params only, binds with the first gradient of its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from .hooks import ModuleHook, call_while_alive, remove_all
from .running import in_backward

Arguments = tuple[Any, dict[str, Any]]


class FirstCalls:
    """The hooks that notice a first call of another method than forward; removed once the module is bound.

    Attributes:
        is_on: the module is not bound yet.
    """

    def __init__(
        self,
        inner: Iterable[nn.Module],
        on_call: Callable[[nn.Module, Any, dict[str, Any]], Arguments | None],
        on_gradient: Callable[[], None],
    ):
        """
        Args:
            inner: the modules within those that a script calls.
            on_call: binds, and returns the inputs of the module that is about to run if they were replaced.
            on_gradient: binds in a backward.
        """
        self._on_call, self._on_gradient = on_call, on_gradient
        hook = ModuleHook(self._called)
        self._hooks: list[Any] = [
            module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True) for module in inner
        ]
        self.is_on = True

    def watch(self, params: Iterable[nn.Parameter]) -> None:
        """Binds with the first gradient of one of these params, before autograd accumulates it."""
        arrives = call_while_alive(FirstCalls._arrives, self)
        watched = dict.fromkeys(param for param in params if param.requires_grad and param.is_leaf)
        self._hooks += [param.register_hook(arrives) for param in watched]

    def _called(self, module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> Arguments | None:
        if self.is_on and torch.is_grad_enabled() and not in_backward():
            return self._on_call(module, arguments, keywords)
        return None

    def _arrives(self, _: torch.Tensor) -> None:
        # False inside of torch.autograd.grad(), which accumulates nothing.
        if self.is_on and torch.autograd.Variable._execution_engine.is_checkpoint_valid():
            self._on_gradient()

    def end(self) -> None:
        """Removes the hooks: the module is bound, or the optimizer is closed."""
        remove_all(self._hooks)
        self.is_on = False
