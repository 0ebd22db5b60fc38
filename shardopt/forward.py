"""Stage 3: params are gathered before the module that owns them runs, forward and backward.

Every module that owns sharded params directly has hooks. In the forward its buckets are needed from before its call
until behind it. In the backward they are needed from when the gradient of its output arrives::

    input.grad_fn  <-  nodes of the module's call  <-  output.grad_fn       backward runs to the left
    (no more use)                                      (first use)

until both the gradients of all of its inputs are complete (nothing of the call is left on the way to them) and the
gradients of its buckets' params have arrived (nothing is left on the way to those).
"""

import weakref
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from .binding import Binding, Entry
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
        self._open_calls: dict[GatheredBucket, int] = defaultdict(int)  # in this backward
        self._awaited: dict[GatheredBucket, set[Entry]] = {}  # gradients that this backward still has to bring
        self._trainable: dict[GatheredBucket, set[Entry]] = defaultdict(set)

    @property
    def _gatherer(self) -> Gatherer:
        assert self._binding.gatherer is not None
        return self._binding.gatherer

    def attach(self) -> None:
        """Puts hooks on modules whose params were bound since the last call."""
        self.remove()
        self._trainable.clear()
        for entry in self._binding.entries.values():
            if entry.shard.gathered is not None and entry.param.requires_grad:
                self._trainable[entry.shard.gathered].add(entry)
        owned = {module: self._owned(module) for module in self._root.modules()}
        self._buckets = {module: buckets for module, buckets in owned.items() if buckets}
        me = weakref.ref(self)
        for module in self._buckets:
            self._hooks.append(module.register_forward_pre_hook(_Hook(me, "_enter"), prepend=True))
            # Also behind an exception: the module's params are then needed no more.
            self._hooks.append(
                module.register_forward_hook(_Hook(me, "_leave"), with_kwargs=True, always_call=True)
            )

    def _owned(self, module: nn.Module) -> tuple[GatheredBucket, ...]:
        params = module.parameters(recurse=isinstance(module, _READS_CHILDREN))
        shards = [self._binding.entries[param].shard for param in params if param in self._binding.entries]
        return tuple(dict.fromkeys(shard.gathered for shard in shards if shard.gathered is not None))

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    # -- forward ---------------------------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, *_: Any) -> None:
        for bucket in self._buckets[module]:
            self._gatherer.need(bucket)

    def _leave(self, module: nn.Module, arguments: Any, keywords: dict[str, Any], output: Any) -> None:
        buckets = self._buckets[module]
        for bucket in buckets:
            self._gatherer.done(bucket)
        if not torch.is_grad_enabled():
            return
        ends = [tensor.grad_fn for tensor in _tensors(output) if tensor.grad_fn is not None]
        if not ends:
            return
        call = _Call(self, buckets)
        starts = {tensor.grad_fn for tensor in _tensors((arguments, keywords)) if tensor.grad_fn is not None}
        call.inputs = len(starts)
        for node in ends:
            node.register_prehook(call.begin)
        for node in starts:
            node.register_prehook(call.input_done)

    # -- backward --------------------------------------------------------------------------------------------------

    def begin(self, bucket: GatheredBucket) -> None:
        """A call that uses the bucket starts its backward."""
        if bucket not in self._awaited:
            self._awaited[bucket] = set(self._trainable[bucket])
            self._gatherer.need(bucket)
        elif not bucket.is_here:
            self._gatherer.need(bucket)
            self._gatherer.done(bucket)
        self._open_calls[bucket] += 1

    def end(self, bucket: GatheredBucket) -> None:
        """Nothing of such a call is left on the way to its inputs."""
        self._open_calls[bucket] -= 1
        self._drop_if_done(bucket)

    def taken(self, entry: Entry) -> None:
        """The gradient of a param has arrived."""
        bucket = entry.shard.gathered
        if bucket is not None and bucket in self._awaited:
            self._awaited[bucket].discard(entry)
            self._drop_if_done(bucket)

    def _drop_if_done(self, bucket: GatheredBucket) -> None:
        if not self._open_calls[bucket] and not self._awaited.get(bucket, True):
            del self._awaited[bucket]
            self._gatherer.done(bucket, drop=True)

    def backward_ended(self) -> None:
        """No call is under way any more, whatever became of it."""
        for bucket in list(self._awaited):
            self._gatherer.done(bucket, drop=True)
        self._awaited.clear()
        self._open_calls.clear()


class _Call:
    """One call of a module, on its way through backward."""

    def __init__(self, forward: Forward, buckets: tuple[GatheredBucket, ...]):
        self._forward, self._buckets = weakref.ref(forward), buckets
        self.inputs = 0  # whose gradients are not complete yet
        self._left = 0

    def begin(self, _: Any) -> None:
        """The gradient of an output has arrived; of several outputs, one after the other."""
        forward = self._forward()
        if forward is None or self._left:
            return
        # A call without differentiable inputs ends with the gradients of its params.
        self._left = self.inputs
        for bucket in self._buckets:
            forward.begin(bucket)
            if not self.inputs:
                forward.end(bucket)

    def input_done(self, _: Any) -> None:
        """The gradient of an input is complete."""
        forward = self._forward()
        if forward is None or not self._left:
            return
        self._left -= 1
        if not self._left:
            for bucket in self._buckets:
                forward.end(bucket)


def _tensors(values: Any) -> Iterable[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return (values,)
    return [leaf for leaf in torch.utils._pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


class _Hook:
    """Calls a method of an object that it does not keep."""

    __slots__ = ("_owner", "_method")

    def __init__(self, owner: "weakref.ref[Forward]", method: str):
        self._owner, self._method = owner, method

    def __call__(self, *arguments: Any) -> None:
        owner = self._owner()
        if owner is not None:
            getattr(owner, self._method)(*arguments)
