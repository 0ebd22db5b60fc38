"""The gradients of one bucket in a round: counted as they arrive, and handed to the reducer together.

A gradient rests in ``param.grad`` until the last one of its bucket is there. Then all of them go into the bucket's
buffer by one copy::

    hook    3 2 1 0                     5 4 3 2 1 0               the count of each bucket
    copy           | bucket 0                      | bucket 1     time ->

So a hook only counts. At most one bucket of gradients more than needed is held meanwhile. The gradient of a param that
is a large part of its bucket goes there as it arrives. So does every gradient that is not like the others: of another
stream, of a unit that is not here, of a bucket that was reduced before (it is late then).

The count is never too high, so no bucket waits for a gradient that is there. It is too low if one gradient arrives
twice (reentrant checkpointing; autograd adds the two up in ``param.grad``): then the bucket finds at zero that some are
missing, and counts them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from operator import attrgetter
from types import NoneType
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..errors import ShardoptError
from ..gpu_stream import call_on, stream_of_thread
from ..tensors.gradient import GradientPart
from ..tensors.unsharded_guard import gradient_in
from ..units.unit import UnitState

if TYPE_CHECKING:
    import numpy as np

    from ..domain.param import ParamRecord
    from ..domain.shard import Shard
    from ..partition.reducer import Reducer
    from ..tensors.gradient_slice import GradientSlice
    from ..units.unit import Unit


# In C: of many gradients at once.
_LAYOUT = attrgetter("layout")


class Taker(Protocol):
    """The rounds, which lie above."""

    def take_gradient(self, arrivals: Arrivals, entry: ParamRecord) -> None:
        """Takes a gradient that is not like the others."""

    def take_all(self, arrivals: Arrivals) -> None:
        """Takes the gradients of a bucket, the last of which has just come to rest."""


class Arrivals:
    """The gradients of one bucket.

    Attributes:
        entries: the bucket's params.
        numbers: 1D [params] int64, by index in the bucket: the number of each param among those of its domain.
        missing: how many gradients the bucket waits for in this round; 0 if none is counted, as no round is open or the
            bucket has its gradients.
        unit: of stage 3 that the bucket belongs to in this round; gradients that rest come while it is here.
        stream: on which the gradients that rest were made; None on a CPU.
        handle: of that stream, by which each hook knows it.
        reducer: that reduces them, from the first round on.
        taker: returns the rounds, which take what is to be handed over; None once they are gone.
    """

    reducer: Reducer

    def __init__(
        self, taker: Taker, shard: Shard, entries: Sequence[ParamRecord], numbers: np.ndarray[Any, np.dtype[np.int64]]
    ):
        self.shard, self.entries, self.numbers, self.missing = shard, entries, numbers, 0
        self.taker = weakref.ref(taker)  # weak: a cycle would outlive the optimizer
        self._is_in_order = shard.device.type == "cpu"  # which has no streams
        self._index = shard.device.index  # of the GPU
        self.unit: Unit | None = None
        resting = frozenset(shard.bucket.layout.resting)
        self._resting = [entry for entry in entries if entry.outer is entry.param and entry.index in resting]
        self._params = [entry.param for entry in self._resting]
        self._indices = [entry.index for entry in self._resting]
        self._rests = frozenset(self._indices)
        self._every = frozenset(entry.index for entry in entries)
        self.by_param = {id(entry.outer): entry for entry in entries}
        self.stream: torch.cuda.Stream | None = None
        self.handle: int | None = None

    def attach(self) -> list[Any]:
        """Registers the hooks of the params. Returns their handles."""
        rests, arrives = _hook(self, self._is_in_order, True), _hook(self, self._is_in_order, False)
        return [_registered(entry.outer, rests if entry.index in self._rests else arrives) for entry in self.entries]

    def begin(self, missing: int, reducer: Reducer) -> None:
        """A round begins, in which the bucket waits for this many gradients."""
        gathered = self.shard.gathered
        self.missing, self.stream, self.handle = missing, None, None
        self.unit = None if gathered is None else gathered.unit
        self.reducer = reducer

    def rests(self, entry: ParamRecord) -> bool:
        """True if the gradient that has just arrived may stay in ``param.grad`` until the last one."""
        return self.missing > 0 and entry.index in self._rests and self.may_rest()

    def may_rest(self) -> bool:
        """True if a gradient that arrives now is like those that rest."""
        if self.unit is not None and self.unit.state is not UnitState.UNSHARDED:
            return False
        if self._is_in_order:
            return True
        stream = stream_of_thread(self._index)
        if self.stream is None:
            self.stream, self.handle = stream, torch._C._cuda_getCurrentRawStream(self._index)
        # One copy reads all of them, on this stream. Test: tests/partition/test_stream_order.py.
        return stream is self.stream

    def take(self) -> dict[int, torch.Tensor] | None:
        """Takes the gradients that rest, by the indices of their params.

        None, and nothing is taken, if one of them is not like the others: sparse, say, or added to an earlier sum.
        """
        found = list(map(gradient_in, self._params))
        grads, kinds = dict(zip(self._indices, found, strict=True)), {*map(type, found)}
        if NoneType in kinds:
            kinds -= {NoneType}
            grads = {index: grad for index, grad in grads.items() if grad is not None}
            found = list(grads.values())
        if kinds == {torch.Tensor}:
            if {*map(_LAYOUT, found)} != {torch.strided}:
                return None
            for param in self._params:
                param.grad = None
            return grads
        return {} if not grads else self._take_pending(grads)

    def _take_pending(self, grads: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor] | None:
        """Takes what autograd added to parts, which ``param.grad`` shows."""
        taken = {}
        for entry in self._resting:
            own, grad = entry.gradient_slice, grads.get(entry.index)
            if own is None or type(grad) is not GradientPart or own.part is not grad or own.pending is None:
                return None
            taken[entry.index] = own.pending
        if {type(grad) for grad in taken.values()} != {torch.Tensor}:
            return None
        for entry in self._resting:
            entry.gradient_slice.pending = None  # type: ignore[union-attr]
        return taken

    def numbers_of(self, indices: AbstractSet[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Returns the numbers of some of its params."""
        return self.numbers if indices == self._every else self.numbers[list(indices)]

    # -- to the reducer --------------------------------------------------------------------------------------------

    def hand_over(self) -> None:
        """Delivers the gradients that rest, and counts those that are still missing."""
        grads, number, reducer = self.take(), self.shard.number, self.reducer
        if grads:
            its, stream = (number, grads, self.shard.all_strides), self.stream
            self.missing = reducer.deliver(*its) if stream is None else call_on(stream, reducer.deliver, *its)
            return
        for entry in self.entries if grads is None else ():
            if entry.outer.grad is not None and (shown_slice(entry) is None or is_pending(entry)):
                call_on(self.stream, self.deliver, entry)
        self.missing = reducer.num_awaited(number)

    def deliver(self, entry: ParamRecord) -> None:
        """Delivers the gradient of one param."""
        grad, own = entry.grad, shown_slice(entry)
        if own is not None:
            grad, own.pending = own.pending, None
        else:
            entry.outer.grad = None
        if grad is None:
            raise ShardoptError(
                "remove a hook that sets param.grad to None in backward, or let one thread at a time run forward and "
                f"backward of this module (a lock around both): the gradient of {entry.name} was gone before it was "
                "reduced."
            )
        if grad.layout is not torch.strided:
            raise ShardoptError(
                "build the embedding with sparse=False, or give this param to torch.optim.SparseAdam and another "
                f"module to DDP: the gradient of {entry.name} is sparse ({grad.layout}), and only dense ones are "
                "reduced."
            )
        self.reducer.deliver(self.shard.number, {entry.index: grad}, self.shard.all_strides)

    def abandon(self) -> None:
        """Drops the gradients that rest: those of the other buckets are lost, too."""
        if self.missing:
            self.missing = 0
            for param in self._params:
                if type(param.grad) is torch.Tensor:
                    param.grad = None


def is_pending(entry: ParamRecord) -> bool:
    """True if autograd has added a gradient to the part that ``param.grad`` shows."""
    return entry.gradient_slice is not None and entry.gradient_slice.pending is not None


def shown_slice(entry: ParamRecord) -> GradientSlice | None:
    """Returns the slice of the param's reduced gradient if ``param.grad`` shows it."""
    found = entry.gradient_slice
    grad = entry.param.grad if entry.outer is entry.param else entry.grad  # each param asks several times a backward
    return found if found is not None and found.shows_in(grad) else None


Hook = Callable[[torch.Tensor], None]


def _registered(param: torch.nn.Parameter, hook: Callable[[torch.Tensor], None]) -> Any:
    """Registers the hook of a param, which may be frozen now and train later: torch refuses only to register it."""
    trains = param.requires_grad
    try:
        return param.requires_grad_(True).register_post_accumulate_grad_hook(hook)
    finally:
        param.requires_grad_(trains)


def _hook(arrivals: Arrivals, is_in_order: bool, rests: bool) -> Hook:
    """Returns the hook of many params of a bucket, which it holds weakly. It runs little code.

    Args:
        is_in_order: no device, which has streams.
        rests: gradients may rest; else they go to the buffer at once.
    """
    reference, unsharded, index = weakref.ref(arrivals), UnitState.UNSHARDED, arrivals.shard.device.index

    def hook(param: torch.Tensor) -> None:
        me = reference()
        if me is None:
            return
        is_here = me.unit is None or me.unit.state is unsharded
        if not (
            rests
            and me.missing
            and is_here
            and (is_in_order or torch._C._cuda_getCurrentRawStream(index) == me.handle or me.may_rest())
        ):
            taker = me.taker()
            if taker is not None:
                taker.take_gradient(me, me.by_param[id(param)])
            return
        me.missing -= 1
        if not me.missing:
            taker = me.taker()
            if taker is not None:
                taker.take_all(me)

    return hook
