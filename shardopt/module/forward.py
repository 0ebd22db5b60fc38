"""Stage 3: params are gathered before the module that owns them runs, forward and backward.

Every module that owns sharded params directly has hooks. In the forward its buckets are needed from before its call
until behind it. In the backward they are needed from when the gradient of an output arrives until the gradients of all
of its inputs are complete::

    node of an input  <-  nodes of the call  <-  node of an output          backward runs to the left

Autograd runs, of the nodes that are ready, the one that was made last. All nodes of a call were made after those of its
inputs, so when the last of these is about to run, none of the call's is left that ever will. A call without
differentiable inputs (an embedding's) has no such mark: its buckets stay until backward ends, which is soon.

Nodes of inputs are those from before the call, which may write to its inputs in place. An output that is a view has two
marks: a later write to it in place takes its own node out of the graph, but not that of what it is a view of.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo

from ..domain.domain import Domain
from ..errors import ReleasedError
from ..partition.gatherer import GatheredBucket, Gatherer
from ..tensors.strides import with_own_storage
from ..tensors.unsharded_guard import keep_pattern

# These read the params of their children without calling them.
_READS_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


class Forward:
    """The hooks on all modules that own sharded params."""

    def __init__(self, domain: Domain, root: nn.Module):
        self._domain = domain
        self._root = root
        self._hooks: list[Any] = []
        self._buckets: dict[nn.Module, tuple[GatheredBucket, ...]] = {}
        self._running: list[_Call] = []  # in forward, from the outermost
        self._using: Counter[GatheredBucket] = Counter()  # calls that are on their way through backward
        self.backwards = 0  # that have ended
        self.is_closed = False

    @property
    def _gatherer(self) -> Gatherer:
        return self._domain.gatherer

    def attach(self) -> None:
        """Puts hooks on modules whose params were bound since the last call."""
        self._remove()
        owned = {module: self._owned(module) for module in self._root.modules()}
        self._buckets = {module: buckets for module, buckets in owned.items() if buckets}
        for module in self._buckets:
            if module is not self._root:  # that one is entered by the handover, which may only then have bound it
                hook = module.register_forward_pre_hook(ModuleHook(self.enter), prepend=True, with_kwargs=True)
                self._hooks.append(hook)
            # Also behind an exception: the module's params are then needed no more.
            leave = ModuleHook(self._leave)
            self._hooks.append(module.register_forward_hook(leave, with_kwargs=True, always_call=True))
            self._hooks.append(module.register_state_dict_post_hook(ModuleHook(self._part_storages)))

    def _owned(self, module: nn.Module) -> tuple[GatheredBucket, ...]:
        assert self._domain.sharded is not None
        where = self._domain.sharded.where
        params = module.parameters(recurse=isinstance(module, _READS_CHILDREN))
        return tuple(dict.fromkeys(where[param] for param in params if param in where))

    def _part_storages(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
        """What state_dict() shows of gathered params is like that of whole ones; see Bucket."""
        buckets = self._buckets.get(module, ())
        for name in module._parameters:
            shown = state_dict.get(prefix + name)
            if type(shown) is torch.Tensor and any(each.bucket.lends_memory_to(shown) for each in buckets):
                state_dict[prefix + name] = with_own_storage(shown)

    def _remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @property
    def holds_params(self) -> bool:
        return bool(self._buckets) and not self.is_closed

    def close(self) -> None:
        self._remove()
        self.is_closed = True

    # -- forward ---------------------------------------------------------------------------------------------------

    def enter(self, module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> None:
        """A call of the module begins."""
        if module is self._root and self._buckets and not self._running:
            self._gatherer.begin_pass()
        buckets = self._buckets.get(module)
        if buckets is None:  # a deep copy of a module has its hooks as well
            return
        inputs = tensors_within((arguments, keywords) if keywords else arguments, 0) if torch.is_grad_enabled() else ()
        starts = {tensor.grad_fn for tensor in inputs if tensor.grad_fn is not None}
        call = _Call(self, module, starts)
        self._running.append(call)
        self._gatherer.need_all(buckets)
        call.buckets = buckets
        call.versions = [version for bucket in buckets for version in bucket.bucket.versions()]

    def _leave(self, module: nn.Module, arguments: Any, keywords: dict[str, Any], output: Any) -> Any:
        if not self._running or self._running[-1].module is not module:
            return None
        call = self._running.pop()
        tensors = tensors_within(output)
        if any(bucket.bucket.lends_memory_to(each) for bucket in call.buckets for each in tensors):
            # A param or a view of one: it would be read when the memory is gone.
            output = torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, output)
            tensors = tensors_within(output)
        if torch.is_grad_enabled():
            call.watch(tensors)
        written = next((param for param, version in call.versions if param._version != version), None)
        call.versions = []
        try:
            if written is not None:
                self._keep_written(module, written, call.buckets)
        finally:
            for bucket in call.buckets:
                self._gatherer.done(bucket)
        return output

    def _keep_written(self, module: nn.Module, param: nn.Parameter, buckets: Iterable[GatheredBucket]) -> None:
        """A module wrote to this param of its own while it ran. What is gathered is a copy, and will be dropped.

        Raises:
            ReleasedError: other ranks have slices of it. When they write theirs, and what, nobody knows here.
        """
        sharded = self._domain.sharded
        if sharded is None or sharded.shown:  # what is shown whole is written back when that ends
            return
        if not self._gatherer.is_alone:
            name = sharded.name_of(param)
            raise ReleasedError(
                f"construct the optimizer with {keep_pattern(name)} so that the param stays whole: the forward of "
                f"{type(module).__name__} wrote to {name}, of which each rank keeps a slice at stage 3, and what it "
                "wrote would be lost with the gathered copy. Every rank must then write the same. Or write it after "
                "step(), in `with optimizer.unsharded():`."
            )
        for bucket in buckets:
            self._gatherer.write_back(bucket)

    # -- backward --------------------------------------------------------------------------------------------------

    def begin(self, buckets: Iterable[GatheredBucket]) -> None:
        for bucket in buckets:
            self._gatherer.need(bucket)
            # With create_graph=True the graph of the backward itself saves params: they stay until the step.
            if not torch.is_grad_enabled():
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
        self.backwards += 1


class _Call:
    """One call of a module."""

    def __init__(self, forward: Forward, module: nn.Module, starts: set[Any]):
        self._forward, self.module = weakref.ref(forward), module
        self.buckets: tuple[GatheredBucket, ...] = ()  # once they are here
        self.versions: list[tuple[nn.Parameter, int]] = []  # of their params when the forward began
        self._starts = starts  # nodes of its inputs
        self._inputs = len(starts)
        self._left, self._backward = 0, -1  # inputs that are not complete, in which backward

    def watch(self, outputs: Iterable[torch.Tensor]) -> None:
        """The call is over: its nodes are known."""
        nodes = [
            node for each in outputs for node in (each.grad_fn, None if each._base is None else each._base.grad_fn)
        ]
        ends = {node for node in nodes if node is not None and node not in self._starts}
        for node in ends:
            node.register_prehook(self.begin)
        for node in self._starts if ends else ():
            node.register_prehook(self.input_done)
        self._starts = set()  # hooks of a graph must not keep it

    def begin(self, _: Any) -> None:
        """The gradient of an output has arrived; of several outputs, one after the other."""
        forward = self._forward()
        if forward is None or forward.is_closed:
            raise ReleasedError(
                f"backward reached a {type(self.module).__name__} whose params were released when its graph was made, "
                "and the optimizer that gathers them was closed or dropped meanwhile: gradients would be computed with "
                "memory that holds something else. Run the backward before close(), or the forward again."
            )
        if not (self._left and self._backward == forward.backwards):
            self._left, self._backward = self._inputs or -1, forward.backwards
            forward.begin(self.buckets)

    def input_done(self, _: Any) -> None:
        """The gradient of an input is complete."""
        forward = self._forward()
        if forward is not None and self._left and self._backward == forward.backwards:
            self._left -= 1
            if not self._left:
                forward.end(self.buckets)


def tensors_within(values: Any, depth: int = 3) -> Iterable[torch.Tensor]:
    """Also those in objects that pytree does not know (dataclasses, a library's classes of outputs), ``depth`` deep."""
    if isinstance(values, torch.Tensor):  # nearly always, and looking for more takes ten times as long
        return (values,)
    if isinstance(values, tuple) and all(isinstance(each, torch.Tensor) for each in values):
        return values
    leaves = torch.utils._pytree.tree_leaves(values)
    found = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    for leaf in leaves if depth else ():
        if not isinstance(leaf, (torch.Tensor, nn.Module, type)):
            names = getattr(leaf, "__dict__", getattr(leaf, "__slots__", ()))
            found += tensors_within([getattr(leaf, name, None) for name in names], depth - 1)
    return found


class ModuleHook:
    """A method as the hook of a module, which may outlive it, be copied and be saved: only then nothing is called.

    torch.compile leaves it out of its graphs: it talks to other ranks.
    """

    def __init__(self, method: Callable[..., Any]):
        # A weak reference: a module keeps its hooks, and must not keep an optimizer that was dropped.
        self._method = weakref.WeakMethod(method)

    @_disable_dynamo
    def __call__(self, *arguments: Any) -> Any:
        method = self._method()
        return None if method is None else method(*arguments)

    def __reduce__(self) -> Any:
        return _no_hook, ()


def _no_hook() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_: Any) -> None:
    pass
