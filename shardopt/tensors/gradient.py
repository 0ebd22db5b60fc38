"""``param.grad`` where shardopt reduces: a part of the mean gradient.

Each rank keeps its slice of the sum over ranks, in fp32 or as ``gradient_format`` says (:class:`Slot`). Of the whole,
every rank knows a few numbers (:class:`Norms`) that follow all that is done to it in place. So clipping, unscaling,
zeroing and reading a norm need no communication and give the same on every rank::

    clip_grad_norm_, get_total_norm   norms, then mul_ of each slice
    clip_grad_value_                  clamp_ of each slice; nobody knows the norms afterwards
    GradScaler.unscale_               found_inf from the count of Inf and NaN, mul_ of each slice
    zero_grad(set_to_none=False)      zero_
    a second backward                 add_, which hands the full local gradient to the reducer

Where one rank holds everything, whatever only reads is answered as well.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import StateError
from .gradient_slice import Norms, Slot, divide_
from .part import Mask, Part, refusal, writes_to

aten = torch.ops.aten


class GradientPart(Part):
    """The mean gradient of one param, of which this rank holds a slice.

    With ``Offload(gradients="cpu")`` that is in host memory, where ``local`` and views show it. Whatever else is read
    of it, copies and norms too, is on the param's device.

    In place, it can be scaled (``mul_``, ``div_`` by one number, ``neg_``), zeroed and clamped by numbers. Its norms of
    order 2 and inf are known, fp32 unless a dtype is asked for; NaN if any element is Inf or NaN (which is not known).
    ``isfinite``, ``isinf`` and ``isnan`` have ``all()`` and ``any()``. ``detach()`` and ``.data`` are the same
    gradient, ``clone()`` and casts are copies of the slice.

    Its dtype is the param's, but float32 for a float16 one: ``torch.amp.GradScaler`` unscales no float16 gradient.
    """

    # Found before torch's own descriptors, which go through __torch_function__; a scaler reads them for every param.
    __slots__ = ("_origin", "_param_dtype", "device", "dtype", "slot", "whole_numel")
    is_sparse = False
    # Torch's own, which shows no memory: torch.compile asks for it to tell tensors apart.
    untyped_storage = Tensor.untyped_storage

    slot: Slot
    whole_numel: int
    _origin: "GradientPart | None"  # of which this is an alias
    _param_dtype: torch.dtype  # as assignment to param.grad wants it

    @staticmethod
    def __new__(cls, slot: Slot, like: Tensor) -> "GradientPart":
        """The part that shows ``slot`` from now on, for the param ``like``; older ones become stale."""
        assert slot.gather is not None or slot.total.numel() == like.numel()
        part = slot.part = cls._showing(slot, like, like.dtype, None)
        return part

    @classmethod
    def _showing(
        cls, slot: Slot, like: Tensor, param_dtype: torch.dtype, origin: "GradientPart | None"
    ) -> "GradientPart":
        device = like.device
        part = cls._wrapper(like, param_dtype, device)
        part.slot, part.device, part.whole_numel = slot, device, like.numel()
        part._origin, part._param_dtype = origin, param_dtype
        part.dtype = torch.float32 if param_dtype is torch.float16 else param_dtype
        return part

    @property
    def is_stale(self) -> bool:
        """Whether the slot shows another gradient by now, or none."""
        return self.slot.part is not (self if self._origin is None else self._origin)

    def live_slot(self) -> Slot:
        """The slot, if it still holds this gradient.

        Raises:
            StateError: it does not.
        """
        if self.is_stale:
            raise StateError(
                f"{self!r} was kept from an earlier backward: its memory now holds another step's gradient, or none. "
                "Read param.grad again, and clone what is to be kept."
            )
        return self.slot

    def whole_slot(self) -> Slot:
        """The slot, if it holds all of this gradient.

        Raises:
            StateError: it does not.
        """
        slot = self.live_slot()
        if slot.pending is not None:
            raise StateError(
                f"{self!r} is not all of the gradient: a later backward under no_sync() added this rank's own to it, "
                "which is not reduced yet. Scaling or reading the part alone would have missed that. Leave no_sync() "
                "for the last backward before gradients are used, or call zero_grad()."
            )
        return slot

    @property
    def local(self) -> Tensor:
        """1D, this rank's slice of the mean as it is kept, to be read: a write to it makes norms unknown."""
        return self.whole_slot().lend()

    @property
    def start(self) -> int:  # type: ignore[override]
        return self.slot.start

    def full_tensor(self) -> Tensor:
        """The whole mean, on every rank. Every rank must make this call, for the same parts in the same order."""
        slot = self.whole_slot()
        if slot.gather is None:
            return self.whole().clone()
        slot.look()
        return slot.gather(slot.total).to(self.dtype)

    def whole(self) -> Tensor:
        """The mean where this rank holds all of it: the slot's own memory where device and dtype allow."""
        self.slot.look()
        return self.shaped(self.slot.total.to(self.device)).to(self.dtype)

    def shaped(self, total: Tensor) -> Tensor:
        """A view with the param's shape of all its elements in storage order."""
        return total.as_strided(self.size(), self.stride())

    def share_memory_(self) -> Self:
        raise StateError(
            f"call optimizer.close() before module.share_memory(): {self!r} lies in memory of the optimizer, and its "
            "steps would no longer reach the params that other processes see."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        end = self.start + self.slot.total.numel()
        return (
            f"GradientPart(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, "
            f"local=[{self.start}:{end}]{', stale' if self.is_stale else ''})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError(
            f"{self!r} holds this rank's slice only, and a file of it would silently lack the rest. Save what "
            "full_tensor() returns; every rank must call it."
        )

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, arguments: Any = (), keywords: Any = None) -> Any:
        answer = _EARLY.get(function)
        if answer is not None and arguments and isinstance(arguments[0], GradientPart):
            found = answer(function, *arguments, **(keywords or {}))
            if found is not NotImplemented:
                return found
        return torch._C._disabled_torch_function_impl(function, kinds, arguments, keywords or {})

    @classmethod
    def _answer(cls, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        answer = _ANSWERS.get(function)
        if answer is not None and isinstance(arguments[0], (GradientPart, list)):
            found = answer(function, *arguments, **keywords)
            if found is not NotImplemented:
                return found
        return _of_whole(function, arguments, keywords)


# -- in place ----------------------------------------------------------------------------------------------------------


def _number(function: Any, operand: Any) -> Any:
    if not isinstance(operand, Tensor):
        return operand
    if operand.numel() != 1:
        raise _unwritable(function)
    return operand.item()


def _multiply(function: Any, part: GradientPart, other: Any) -> GradientPart:
    slot, factor = part.whole_slot(), _number(function, other)
    slot.settle()
    slot.total.mul_(factor)
    slot.edits.append(["mul_", factor])
    slot.norms = slot.norms and slot.norms.times(factor, part.whole_numel, slot.rounded)
    return part


def _divide(function: Any, part: GradientPart, other: Any) -> GradientPart:
    slot, divisor = part.whole_slot(), _number(function, other)
    slot.settle()
    divide_(slot.total, divisor)
    slot.edits.append(["div_", divisor])
    slot.norms = slot.norms and slot.norms.over(divisor, part.whole_numel, slot.rounded)
    return part


def _negate(function: Any, part: GradientPart) -> GradientPart:
    slot = part.whole_slot()
    slot.total.neg_()
    if slot.kept is not None:
        slot.kept.neg_()
    slot.edits.append(["neg_"])
    return part


def _zero(function: Any, part: GradientPart) -> GradientPart:
    slot = part.live_slot()
    slot.total.zero_()
    slot.edits = [["zero_"]]
    slot.pending = slot.kept = None
    slot.norms = Norms(0.0, 0.0, 0)
    return part


def _clamp(function: Any, part: GradientPart, *bounds: Any, **named_bounds: Any) -> GradientPart:
    slot = part.whole_slot()
    slot.settle()
    function(slot.total, *bounds, **named_bounds)
    slot.edits.append([function._schema.name.removeprefix("aten::"), *bounds, *named_bounds.values()])
    slot.norms = None
    return part


def _accumulate(function: Any, part: GradientPart, other: Any, *, alpha: float = 1) -> GradientPart:
    """``param.grad += grad``, as autograd does it in a second backward."""
    slot = part.live_slot()
    in_backward = torch._C._current_graph_task_id() >= 0
    is_gradient = isinstance(other, Tensor) and not isinstance(other, Part) and other.size() == part.size()
    if not (in_backward and is_gradient and alpha == 1):
        raise StateError(
            f"{part!r} was added to: only a backward can do that, whose gradients are summed over ranks; this would "
            "have been added on some ranks and not on others. Add the term to the loss, or gather the gradient with "
            "full_tensor() on every rank."
        )
    slot.receive(other)
    return part


def _each(name: str) -> Callable[..., None]:
    """The ``_foreach_`` form of a method, for lists in which parts and plain tensors may be mixed."""

    check = GradientPart.live_slot if name == "zero_" else GradientPart.whole_slot

    def answer(function: Any, tensors: list[Tensor], *operand: Any) -> None:
        for tensor in tensors:
            if isinstance(tensor, GradientPart):
                check(tensor)  # before any of them is changed
        of_each = zip(operand[0]) if operand and isinstance(operand[0], list) else itertools.repeat(operand)
        for tensor, each in zip(tensors, of_each, strict=False):
            getattr(tensor, name)(*each)

    return answer


def _unscale(function: Any, tensors: list[Tensor], found_inf: Tensor, inverse: Tensor) -> None:
    """``found_inf`` is 1 on every rank if any element on any rank is Inf or NaN."""
    parts = [tensor for tensor in tensors if isinstance(tensor, GradientPart)]
    counts = [_known(part).nonfinite if part.whole_slot().gather else None for part in parts]
    plain = [tensor for tensor in tensors if not isinstance(tensor, GradientPart)]
    if plain:
        function(plain, found_inf, inverse)
    factor = inverse.item() if parts else 1.0  # read once: on a GPU, each time is a wait
    for part, count in zip(parts, counts, strict=True):
        if count or (count is None and not part.slot.lend().isfinite().all()):
            found_inf.fill_(1.0)
        _multiply(function, part, factor)


# -- reading -----------------------------------------------------------------------------------------------------------


def _known(part: GradientPart) -> Norms:
    norms = part.whole_slot().norms
    if norms is None:
        raise StateError(
            f"the norms of {part!r} are not known: since its last backward it was clamped, written to through .local, "
            "or scaled out of its range, of which every rank sees its own slice only. Read norms, unscale and look "
            "for Inf and NaN before that, or call full_tensor() on every rank."
        )
    return norms


def _norm(
    _: Any, part: GradientPart, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, **out: Any
) -> Any:
    slot, dtype = part.whole_slot(), dtype or torch.float32
    is_scalar = not keepdim and (not dim or len(set(dim)) == part.dim())
    if ord not in (2, math.inf) or not is_scalar or not dtype.is_floating_point or out:
        if slot.gather is None:
            return NotImplemented
        raise StateError(
            f"a norm of order {ord}, dim {dim}, keepdim {keepdim}, dtype {dtype} was asked of {part!r}: of the whole, "
            "only those of order 2 and inf over all elements are known, as new 0-d tensors of a float dtype. Call "
            "full_tensor() on every rank for any other."
        )
    if slot.gather is None and slot.norms is None:
        return torch.linalg.vector_norm(slot.lend(), ord, dtype=dtype).to(part.device)
    norms = _known(part)
    value = math.nan if norms.nonfinite else norms.two if ord == 2 else norms.largest
    return torch.scalar_tensor(value, dtype=dtype, device=part.device)


def _foreach_norm(_: Any, tensors: list[Tensor], ord: Any = 2, dtype: Any = None) -> list[Tensor]:
    return [torch.linalg.vector_norm(tensor, ord, dtype=dtype) for tensor in tensors]


def _is_finite(function: Any, part: GradientPart) -> Any:
    slot = part.whole_slot()
    if slot.gather is None:
        return part.shaped(slot.lend().isfinite().to(part.device))
    nonfinite = _known(part).nonfinite
    return Mask(slot.total.isfinite().to(part.device), slot.start, part, nonfinite == 0, nonfinite < part.whole_numel)


def _is_inf_or_nan(function: Any, part: GradientPart) -> Any:
    slot = part.whole_slot()
    if slot.gather is None:
        return part.shaped(function(slot.lend()).to(part.device))
    if _known(part).nonfinite:
        raise StateError(
            f"{function} was called on {part!r}, which holds Inf or NaN; which of them is not known without the other "
            "ranks' slices. Ask torch.isfinite, or call full_tensor() on every rank."
        )
    return Mask(function(slot.total).to(part.device), slot.start, part, part.whole_numel == 0, False)


def _alias(function: Any, part: GradientPart) -> GradientPart:
    origin = part if part._origin is None else part._origin
    return GradientPart._showing(part.live_slot(), part, part._param_dtype, origin)


def _copy(function: Any, part: GradientPart, *, memory_format: Any = None, **keywords: Any) -> Any:
    """A copy of the slice, as a part of its own; of a whole gradient, a plain tensor."""
    slot = part.whole_slot()
    if slot.gather is None:
        return NotImplemented
    slot.look()
    dtype = keywords.get("dtype") or part.dtype
    return Part(function(slot.total.to(part.device), **keywords), slot.start, part, dtype=dtype)


# -- everything else ---------------------------------------------------------------------------------------------------


def _of_whole(function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Whatever only reads, where this rank holds everything.

    What it computes has the part's dtype. A view is of the slot's own memory, so in its dtype: no write to it is lost.
    """
    if writes_to(GradientPart, function, arguments, keywords):
        raise _unwritable(function)
    for part in tree_leaves((arguments, keywords)):
        if isinstance(part, Part) and not (isinstance(part, GradientPart) and part.whole_slot().gather is None):
            raise refusal(function)

    def unwrap(part: GradientPart) -> Tensor:
        return part.shaped(part.slot.alias()) if function.is_view else part.whole()

    arguments, keywords = tree_map_only(GradientPart, unwrap, (arguments, keywords))
    return function(*arguments, **keywords)


def _unwritable(function: Any) -> StateError:
    return StateError(
        f"{function} would change a gradient that is spread over ranks. In place it can be multiplied or divided by "
        "one number, negated, zeroed, and clamped by numbers; for anything else, change the loss, or the gradients "
        "that hooks of the param see in backward."
    )


def _to_host(function: Any, part: GradientPart, *arguments: Any, **keywords: Any) -> Any:
    """``tolist()`` and ``numpy()``, which torch refuses for any subclass."""
    if part.whole_slot().gather is not None:
        raise refusal(function)
    return function(part.shaped(part.slot.alias()).to(part.dtype), *arguments, **keywords)


_IN_LISTS = {
    "mul_": ("Scalar", "Tensor", "List", "ScalarList"),
    "div_": ("Scalar", "Tensor", "List", "ScalarList"),
    "neg_": ("default",),
    "zero_": ("default",),
    "clamp_min_": ("Scalar",),
    "clamp_max_": ("Scalar",),
}
_ANSWERS: dict[Any, Callable[..., Any]] = {
    aten.mul_.Tensor: _multiply,
    aten.div_.Tensor: _divide,
    aten.neg_.default: _negate,
    aten.zero_.default: _zero,
    aten.clamp_.default: _clamp,
    aten.clamp_min_.default: _clamp,
    aten.clamp_max_.default: _clamp,
    aten.add_.Tensor: _accumulate,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    aten.linalg_vector_norm.default: _norm,
    aten._foreach_norm.Scalar: _foreach_norm,
    aten.isfinite.default: _is_finite,
    aten.isinf.default: _is_inf_or_nan,
    aten.isnan.default: _is_inf_or_nan,
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.clone.default: _copy,
    aten._to_copy.default: _copy,
} | {
    getattr(getattr(aten, f"_foreach_{name}"), overload): _each(name)
    for name, overloads in _IN_LISTS.items()
    for overload in overloads
}
# Before __torch_dispatch__: what torch takes apart or refuses on the way there; and, as the way takes longer than the
# answer, what clipping asks of every part.
_EARLY: dict[Any, Callable[..., Any]] = {
    torch.isfinite: _is_finite,
    Tensor.isfinite: _is_finite,
    Tensor.tolist: _to_host,
    Tensor.numpy: _to_host,
    Tensor.__array__: _to_host,
    torch.linalg.vector_norm: _norm,
    Tensor.mul_: _multiply,
}
