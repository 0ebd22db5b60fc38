"""One call of a module that needs units of stage 3: its hooks on the graph, which say when its backward needs them.

When that is, :mod:`.forward` tells.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from ..errors import ReleasedError
from .running import frame_of_call

if TYPE_CHECKING:
    from ..partition.readable import Readable
    from ..units.unit import Unit


_MOMENTS = itertools.count()  # of beginnings and ends of calls in forward, which are told apart by their order alone


class Backwards(Protocol):
    """Begins and ends the backwards of calls: the hooks of all modules, which lie above."""

    backwards: int
    is_closed: bool

    def pre_backward(self, call: ModuleCall) -> None: ...

    def post_backward(self, call: ModuleCall) -> None: ...


class NodeHook:
    """The one hook on a node of the graph: where a call's output ends, and other calls begin with it."""

    __slots__ = ("_arrived", "done")

    def __init__(self, arrived: Callable[[], None] | None):
        self._arrived = arrived
        self.done: list[tuple[ModuleCall, int]] = []  # whose inputs the node is, with the number of each

    def __call__(self, _: Any) -> None:
        if self._arrived is not None:
            self._arrived()
        for call, number in self.done:
            if call.is_open:
                call.input_done(number)


class ModuleCall:
    """One call of a module.

    Attributes:
        units: that are gathered for it.
        devices: of these units.
        shown: the params of these that its code reads, with their versions when the forward began to read them.
        reads: how often its code read a param that is of no module of the call's.
        frame: of the module's call, until the forward ends.
        starts: the nodes of its inputs from before the call, with their hooks, if they have some.
        began, ended: the moments of its forward.
        is_open: True from the first output to the last input, in a backward.
        task: of autograd, that runs this backward.
    """

    # None of these is asked for before it is set, but in a backward that comes to a call whose forward did not end.
    is_open, reads, _inputs = False, 0, 0
    _backward = task = -1
    ended: float = math.inf

    def __init__(self, forward: Backwards, module: nn.Module, own: Collection[Any]):
        """
        Args:
            own: nodes of inputs that no other call shares. They show whether backward ran through this call.
        """
        # Weak: hooks of the graph hold this call, and a loss that the user keeps must not keep the optimizer.
        self._forward, self.module, self._own = weakref.ref(forward), module, own
        self.units: dict[Unit, None] = {}
        self.devices: frozenset[torch.device] = frozenset()
        self.shown: list[tuple[Readable, list[int]]] = []
        self.frame = frame_of_call()
        self.starts: dict[Any, NodeHook | None] = {}
        self._left: set[int] = set()  # the incomplete ones of its inputs
        self.began = next(_MOMENTS)

    def show(self, readable: Readable) -> None:
        """Lets the call's code read these params, which are gathered."""
        readable.show()
        self.shown += ((readable, readable.versions()),)

    def register_hooks(self, outputs: Iterable[torch.Tensor]) -> dict[Any, NodeHook]:
        """Puts hooks on the nodes of the call's inputs and outputs, at its end. Returns those of the outputs."""
        ends: dict[Any, NodeHook] = {}
        for each in outputs:
            for node in (each.grad_fn, None if each._base is None else each._base.grad_fn):
                if node is not None and node not in self.starts and node not in ends:
                    ends[node] = NodeHook(self.output_arrived)
                    node.register_prehook(ends[node])
        for node in self._own:
            node.register_prehook(self._check_opened)
        if ends:
            self._inputs = len(self.starts)
            for number, (node, hook) in enumerate(self.starts.items()):
                if hook is None:
                    hook = NodeHook(None)
                    node.register_prehook(hook)
                hook.done.append((self, number))
        self.ended = next(_MOMENTS)
        # The graph's hooks hold this call: the nodes would keep themselves alive in a cycle.
        self.starts, self._own = {}, ()
        return ends

    def output_arrived(self) -> None:
        """Is called when the gradient of an output has arrived; for several outputs, one after the other."""
        forward = self._forward()
        if forward is None or forward.is_closed:
            raise ReleasedError(
                "run the backward before close(), or the forward again: backward reached a "
                f"{type(self.module).__name__} whose params were released after its forward, and the optimizer that "
                "gathers them was closed or dropped meanwhile. Gradients would be computed with memory that holds "
                "something else."
            )
        if not (self.is_open and self._backward == forward.backwards):
            self._left, self.is_open, self._backward = set(range(self._inputs)), True, forward.backwards
            self.task = torch._C._current_graph_task_id()
            forward.pre_backward(self)

    def _check_opened(self, _: Any) -> None:
        """Raises ReleasedError if backward ran through the call, and came to none of its outputs."""
        forward = self._forward()
        was_opened = forward is None or self._backward == forward.backwards
        if not (was_opened or all(unit.is_here for unit in self.units)):
            raise ReleasedError(
                f"return from the forward of {type(self.module).__name__} every tensor that a loss is made of (what a "
                "hook or an attribute of the module kept, say), or keep its params whole by Tuning(keep=...): a "
                "backward ran through this call from none of its outputs, so its frozen params were read while they "
                "were resharded, and gradients are wrong."
            )

    def input_done(self, number: int) -> None:
        """Is called when the gradient of an input is complete, once or twice."""
        forward = self._forward()
        if forward is not None and self.is_open and self._backward == forward.backwards:
            self._left.discard(number)
            if not self._left:
                self.is_open = False
                forward.post_backward(self)


def tensors_within(values: Any, depth: int = 3) -> Iterable[torch.Tensor]:
    """Returns the tensors in nested values, and in objects that pytree does not know (dataclasses, a library's output
    classes), ``depth`` levels deep."""
    if type(values) is torch.Tensor or isinstance(values, torch.Tensor):  # nearly always; a search takes far longer
        return (values,)
    if type(values) is tuple and {torch.Tensor}.issuperset(map(type, values)):
        return values
    leaves = torch.utils._pytree.tree_leaves(values)
    found = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    for leaf in leaves if depth else ():
        if not isinstance(leaf, (torch.Tensor, nn.Module, type)):
            names = getattr(leaf, "__dict__", getattr(leaf, "__slots__", ()))
            found += tensors_within([getattr(leaf, name, None) for name in names], depth - 1)
    return found


def with_own_nodes(given: Any, own: set[Any]) -> Any:
    """Returns the arguments of a call. Tensors among them get autograd nodes of their own, which are added to ``own``.

    What the call may write to (a list, a cache) stays what it is, with the tensors that it holds.
    """
    if isinstance(given, torch.Tensor) and given.requires_grad:
        view = given.view_as(given)
        own.add(view.grad_fn)
        return view
    if type(given) is tuple:
        return tuple(with_own_nodes(each, own) for each in given)
    return given
