"""Stage 3: params are unsharded (all-gathered) before the module that owns them runs, in forward and backward.

Every module that owns sharded params directly has hooks. In the forward, its buckets are needed from the beginning of
its call to the end. In the backward, its buckets are needed from the arrival of the gradient of an output until the
gradients of all inputs are complete::

    node of an input  <-  nodes of the call  <-  node of an output          backward runs to the left

Of the nodes that are ready, autograd runs the one that was made last. All nodes of a call were made after the nodes of
its inputs. So once the last input's node is about to run, no node of the call will run any more. A call without
differentiable inputs (of an embedding) has no such node: its buckets stay until backward ends, which is soon.

The call may write to its inputs in place, so their nodes are those from before the call. An output that is a view has
two nodes with hooks: a later write in place to the view takes the view's own node out of the graph, but not the node of
its base.
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

# These modules read the params of their children without calling them.
_READS_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


class Forward:
    """The hooks on all modules that own sharded params."""

    def __init__(self, domain: Domain, root: nn.Module):
        self._domain = domain
        self._root = root
        self._hooks: list[Any] = []
        self._buckets: dict[nn.Module, tuple[GatheredBucket, ...]] = {}
        self._running: list[_Call] = []  # calls in forward, from the outermost
        self._using: Counter[GatheredBucket] = Counter()  # number of calls in backward that need a bucket
        self.backwards = 0  # number of backwards that have ended
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
            if module is not self._root:  # ModuleTakeover calls pre_forward() for the root, after it has bound params
                hook = module.register_forward_pre_hook(ModuleHook(self.pre_forward), prepend=True, with_kwargs=True)
                self._hooks.append(hook)
            # always_call: after an exception too, the module's params are needed no more.
            post = ModuleHook(self._post_forward)
            self._hooks.append(module.register_forward_hook(post, with_kwargs=True, always_call=True))
            self._hooks.append(module.register_state_dict_post_hook(ModuleHook(self._part_storages)))

    def _owned(self, module: nn.Module) -> tuple[GatheredBucket, ...]:
        assert self._domain.sharded is not None
        where = self._domain.sharded.where
        params = module.parameters(recurse=isinstance(module, _READS_CHILDREN))
        return tuple(dict.fromkeys(where[param] for param in params if param in where))

    def _part_storages(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
        """Gives gathered params in a state dict storages of their own, as whole params have; see ``Bucket``."""
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
        """True if params of the module are sharded."""
        return bool(self._buckets) and not self.is_closed

    def close(self) -> None:
        """Removes all hooks; a backward through an older graph raises from now on."""
        self._remove()
        self.is_closed = True

    # -- forward ---------------------------------------------------------------------------------------------------

    def pre_forward(self, module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> None:
        """Gathers the module's params: a call of the module begins."""
        if module is self._root and self._buckets and not self._running:
            self._gatherer.begin_pass()
        buckets = self._buckets.get(module)
        if buckets is None:  # a deep copy of a module has the module's hooks
            return
        inputs = tensors_within((arguments, keywords) if keywords else arguments, 0) if torch.is_grad_enabled() else ()
        starts = {tensor.grad_fn for tensor in inputs if tensor.grad_fn is not None}
        call = _Call(self, module, starts)
        self._running.append(call)
        self._gatherer.need_all(buckets)
        call.buckets = buckets
        call.versions = [version for bucket in buckets for version in bucket.bucket.versions()]

    def _post_forward(self, module: nn.Module, arguments: Any, keywords: dict[str, Any], output: Any) -> Any:
        if not self._running or self._running[-1].module is not module:
            return None
        call = self._running.pop()
        tensors = tensors_within(output)
        if any(bucket.bucket.lends_memory_to(each) for bucket in call.buckets for each in tensors):
            # An output is a param or a view of one: without a copy it would be read after its memory is freed.
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
        """Writes back a param that its own module wrote to in its forward: the gathered copy will be dropped.

        Raises:
            ReleasedError: other ranks have slices of the param, and may write something else.
        """
        sharded = self._domain.sharded
        if sharded is None or sharded.shown:  # unsharded() writes all params back when it ends
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

    def pre_backward(self, buckets: Iterable[GatheredBucket]) -> None:
        """Gathers the params of a call whose backward begins."""
        for bucket in buckets:
            self._gatherer.need(bucket)
            # With create_graph=True the graph of the backward itself saves params: they stay gathered until the step.
            if not torch.is_grad_enabled():
                self._using[bucket] += 1

    def post_backward(self, buckets: Iterable[GatheredBucket]) -> None:
        """Reshards the params of a call whose backward is complete."""
        for bucket in buckets:
            if self._using[bucket]:  # end_backward() may have come before
                self._using[bucket] -= 1
                self._gatherer.done(bucket, drop=True)

    def end_backward(self) -> None:
        """Reshards all params: backward has ended, or was abandoned."""
        for bucket, calls in self._using.items():
            for _ in range(calls):
                self._gatherer.done(bucket, drop=True)
        self._using.clear()
        self.backwards += 1


class _Call:
    """One call of a module."""

    def __init__(self, forward: Forward, module: nn.Module, starts: set[Any]):
        self._forward, self.module = weakref.ref(forward), module
        self.buckets: tuple[GatheredBucket, ...] = ()  # once they are gathered
        self.versions: list[tuple[nn.Parameter, int]] = []  # versions of the params when the forward began
        self._starts = starts  # nodes of the inputs
        self._inputs = len(starts)
        self._left, self._backward = 0, -1  # number of incomplete inputs, and the number of the backward they are of

    def watch(self, outputs: Iterable[torch.Tensor]) -> None:
        """Puts hooks on the nodes of the call's inputs and outputs, at the end of the call."""
        nodes = [
            node for each in outputs for node in (each.grad_fn, None if each._base is None else each._base.grad_fn)
        ]
        ends = {node for node in nodes if node is not None and node not in self._starts}
        for node in ends:
            node.register_prehook(self.output_arrived)
        for node in self._starts if ends else ():
            node.register_prehook(self.input_done)
        self._starts = set()  # the graph's hooks hold this call: the nodes would keep themselves alive in a cycle

    def output_arrived(self, _: Any) -> None:
        """Is called when the gradient of an output has arrived; for several outputs, one after the other."""
        forward = self._forward()
        if forward is None or forward.is_closed:
            raise ReleasedError(
                "run the backward before close(), or the forward again: backward reached a "
                f"{type(self.module).__name__} whose params were released after its forward, and the optimizer that "
                "gathers them was closed or dropped meanwhile. Gradients would be computed with memory that holds "
                "something else."
            )
        if not (self._left and self._backward == forward.backwards):
            self._left, self._backward = self._inputs or -1, forward.backwards
            forward.pre_backward(self.buckets)

    def input_done(self, _: Any) -> None:
        """Is called when the gradient of an input is complete."""
        forward = self._forward()
        if forward is not None and self._left and self._backward == forward.backwards:
            self._left -= 1
            if not self._left:
                forward.post_backward(self.buckets)


def tensors_within(values: Any, depth: int = 3) -> Iterable[torch.Tensor]:
    """Returns the tensors in nested values, and in objects that pytree does not know (dataclasses, a library's output
    classes), ``depth`` levels deep."""
    if isinstance(values, torch.Tensor):  # nearly always; a search takes ten times as long
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
    """A method as the hook of a module. The hook holds the method's object weakly, and does nothing once that object is
    gone, or in a copied or unpickled module.

    torch.compile omits the hook from its graphs: the hook communicates with other ranks.
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
