"""Stage 3: params are gathered before the module that owns them runs, forward and backward.

Every module that owns sharded params directly has hooks. In the forward its buckets are needed from before its call
until behind it. In the backward they are needed from when the gradient of an output arrives until the gradients of all
of its inputs are complete::

    node of an input  <-  nodes of the call  <-  node of an output          backward runs to the left

Autograd runs, of the nodes that are ready, the one that was made last. All nodes of a call were made after those of its
inputs, so when the last of these is about to run, none of the call's is left that ever will. A call without
differentiable inputs (an embedding's) has no such mark: its buckets stay until backward ends, which is soon.
"""

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from .binding import Binding
from .partition.gather import GatheredBucket, Gatherer

# These read the params of their children without calling them.
_READS_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


class Forward:
    """The hooks on all modules that own sharded params."""

    def __init__(self, binding: Binding, root: nn.Module):
        self._binding = binding
        self._root = root
        self._hooks: list[Any] = []
        self._buckets: dict[nn.Module, tuple[GatheredBucket, ...]] = {}
        self._using: Counter[GatheredBucket] = Counter()  # calls that are on their way through backward

    @property
    def _gatherer(self) -> Gatherer:
        return self._binding.gatherer

    def attach(self) -> None:
        """Puts hooks on modules whose params were bound since the last call."""
        self.remove()
        owned = {module: self._owned(module) for module in self._root.modules()}
        self._buckets = {module: buckets for module, buckets in owned.items() if buckets}
        me = weakref.ref(self)
        for module in self._buckets:
            self._hooks.append(module.register_forward_pre_hook(_Hook(me, "_enter"), prepend=True))
            # Also behind an exception: the module's params are then needed no more.
            self._hooks.append(module.register_forward_hook(_Hook(me, "_leave"), with_kwargs=True, always_call=True))

    def _owned(self, module: nn.Module) -> tuple[GatheredBucket, ...]:
        assert self._binding.sharded is not None
        where = self._binding.sharded.where
        params = module.parameters(recurse=isinstance(module, _READS_CHILDREN))
        return tuple(dict.fromkeys(where[param] for param in params if param in where))

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    # -- forward ---------------------------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, *_: Any) -> None:
        for bucket in self._buckets.get(module, ()):  # a deep copy of a module has its hooks as well
            self._gatherer.need(bucket)

    def _leave(self, module: nn.Module, arguments: Any, keywords: dict[str, Any], output: Any) -> None:
        buckets = self._buckets.get(module, ())
        for bucket in buckets:
            self._gatherer.done(bucket)
        if not buckets or not torch.is_grad_enabled():
            return
        ends = [tensor.grad_fn for tensor in _tensors(output) if tensor.grad_fn is not None]
        if not ends:
            return
        starts = {
            tensor.grad_fn
            for tensor in _tensors((arguments, keywords) if keywords else arguments)
            if tensor.grad_fn is not None
        }
        call = _Call(self, buckets, len(starts))
        for node in ends:
            node.register_prehook(call.begin)
        for node in starts:
            node.register_prehook(call.input_done)

    # -- backward --------------------------------------------------------------------------------------------------

    def begin(self, buckets: Iterable[GatheredBucket]) -> None:
        for bucket in buckets:
            self._gatherer.need(bucket)
            self._using[bucket] += 1

    def end(self, buckets: Iterable[GatheredBucket]) -> None:
        for bucket in buckets:
            if self._using[bucket]:  # backward_ended() may have come before
                self._using[bucket] -= 1
                self._gatherer.done(bucket, drop=True)

    def backward_ended(self) -> None:
        """No call is under way any more, whatever became of it."""
        for bucket, calls in self._using.items():
            for _ in range(calls):
                self._gatherer.done(bucket, drop=True)
        self._using.clear()


class _Call:
    """One call of a module, on its way through backward."""

    def __init__(self, forward: Forward, buckets: tuple[GatheredBucket, ...], inputs: int):
        self._forward, self._buckets = weakref.ref(forward), buckets
        self._inputs, self._left = inputs, 0

    def begin(self, _: Any) -> None:
        """The gradient of an output has arrived; of several outputs, one after the other."""
        forward = self._forward()
        if forward is not None and not self._left:
            self._left = self._inputs or -1
            forward.begin(self._buckets)

    def input_done(self, _: Any) -> None:
        """The gradient of an input is complete."""
        forward = self._forward()
        if forward is not None and self._left:
            self._left -= 1
            if not self._left:
                forward.end(self._buckets)


def _tensors(values: Any) -> Iterable[torch.Tensor]:
    if isinstance(values, torch.Tensor):  # nearly always, and looking for more takes ten times as long
        return (values,)
    if isinstance(values, tuple) and all(isinstance(each, torch.Tensor) for each in values):
        return values
    return [leaf for leaf in torch.utils._pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


class _Hook:
    """Calls a method of an object that it does not keep."""

    __slots__ = ("_method", "_owner")

    def __init__(self, owner: "weakref.ref[Forward]", method: str):
        self._owner, self._method = owner, method

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Hook":
        return self

    def __call__(self, *arguments: Any) -> None:
        owner = self._owner()
        if owner is not None:
            getattr(owner, self._method)(*arguments)
