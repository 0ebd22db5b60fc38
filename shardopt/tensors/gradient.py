"""``param.grad`` where shardopt reduces: a part of the mean gradient.

Each rank keeps its slice of the sum over ranks, in fp32 or as ``gradient_format`` says (:class:`GradientSlice`). Of the
whole, every rank knows a few numbers (:class:`Norms`) that follow all that is done to it in place. So clipping,
unscaling, zeroing and reading a norm need no communication and give the same on every rank::

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
from .gradient_slice import GradientSlice, Norms, divide_
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
    __slots__ = ("_origin", "_param_dtype", "device", "dtype", "gradient_slice", "whole_numel")
    is_sparse = False
    # Torch's own, which shows no memory: torch.compile asks for it to tell tensors apart.
    untyped_storage = Tensor.untyped_storage

    gradient_slice: GradientSlice
    whole_numel: int
    _origin: "GradientPart | None"  # of which this is an alias
    _param_dtype: torch.dtype  # as assignment to param.grad wants it

    @staticmethod
    def __new__(cls, gradient_slice: GradientSlice, like: Tensor) -> "GradientPart":
        """The part that shows ``gradient_slice`` from now on, for the param ``like``; older ones become stale."""
        assert gradient_slice.gather is not None or gradient_slice.total.numel() == like.numel()
        part = gradient_slice.part = cls._showing(gradient_slice, like, like.dtype, None)
        return part

    @classmethod
    def _showing(
        cls, gradient_slice: GradientSlice, like: Tensor, param_dtype: torch.dtype, origin: "GradientPart | None"
    ) -> "GradientPart":
        device = like.device
        part = cls._wrapper(like, param_dtype, device)
        part.gradient_slice, part.device, part.whole_numel = gradient_slice, device, like.numel()
        part._origin, part._param_dtype = origin, param_dtype
        part.dtype = torch.float32 if param_dtype is torch.float16 else param_dtype
        return part

    @property
    def is_stale(self) -> bool:
        """True if the slice shows another gradient by now, or none."""
        return self.gradient_slice.part is not (self if self._origin is None else self._origin)

    def live_slice(self) -> GradientSlice:
        """The slice, if it still holds this gradient.

        Raises:
            StateError: it does not.
        """
        if self.is_stale:
            raise StateError(
                f"{self!r} was kept from an earlier backward: its memory now holds another step's gradient, or none. "
                "Read param.grad again, and clone what is to be kept."
            )
        return self.gradient_slice

    def whole_slice(self) -> GradientSlice:
        """The slice, if it holds all of this gradient.

        Raises:
            StateError: it does not.
        """
        gradient_slice = self.live_slice()
        if gradient_slice.pending is not None:
            raise StateError(
                f"{self!r} is not all of the gradient: a later backward under no_sync() added this rank's own to it, "
                "which is not reduced yet. Scaling or reading the part alone would have missed that. Leave no_sync() "
                "for the last backward before gradients are used, or call zero_grad()."
            )
        return gradient_slice

    @property
    def local(self) -> Tensor:
        """1D, this rank's slice of the mean as it is kept, to be read: a write to it makes norms unknown."""
        return self.whole_slice().lend()

    @property
    def start(self) -> int:  # type: ignore[override]
        return self.gradient_slice.start

    def full_tensor(self) -> Tensor:
        """The whole mean, on every rank. Every rank must make this call, for the same parts in the same order."""
        gradient_slice = self.whole_slice()
        if gradient_slice.gather is None:
            return self.whole().clone()
        gradient_slice.show_mean()
        return gradient_slice.gather(gradient_slice.total).to(self.dtype)

    def whole(self) -> Tensor:
        """The mean where this rank holds all of it: the slice's own memory where device and dtype allow."""
        self.gradient_slice.show_mean()
        return self.shaped(self.gradient_slice.total.to(self.device)).to(self.dtype)

    def shaped(self, total: Tensor) -> Tensor:
        """A view with the param's shape of all its elements in storage order."""
        return total.as_strided(self.size(), self.stride())

    def share_memory_(self) -> Self:
        raise StateError(
            f"call optimizer.close() before module.share_memory(): {self!r} lies in memory of the optimizer, and its "
            "steps would no longer reach the params that other processes see."
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        end = self.start + self.gradient_slice.total.numel()
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
    gradient_slice, factor = part.whole_slice(), _number(function, other)
    gradient_slice.divide()
    gradient_slice.total.mul_(factor)
    gradient_slice.edits.append(["mul_", factor])
    gradient_slice.norms = gradient_slice.norms and gradient_slice.norms.times(
        factor, part.whole_numel, gradient_slice.rounded
    )
    return part


def _divide(function: Any, part: GradientPart, other: Any) -> GradientPart:
    gradient_slice, divisor = part.whole_slice(), _number(function, other)
    gradient_slice.divide()
    divide_(gradient_slice.total, divisor)
    gradient_slice.edits.append(["div_", divisor])
    gradient_slice.norms = gradient_slice.norms and gradient_slice.norms.over(
        divisor, part.whole_numel, gradient_slice.rounded
    )
    return part


def _negate(function: Any, part: GradientPart) -> GradientPart:
    gradient_slice = part.whole_slice()
    gradient_slice.total.neg_()
    if gradient_slice.undivided is not None:
        gradient_slice.undivided.neg_()
    gradient_slice.edits.append(["neg_"])
    return part


def _zero(function: Any, part: GradientPart) -> GradientPart:
    gradient_slice = part.live_slice()
    gradient_slice.total.zero_()
    gradient_slice.edits = [["zero_"]]
    gradient_slice.pending = gradient_slice.undivided = None
    gradient_slice.norms = Norms(0.0, 0.0, 0)
    return part


def _clamp(function: Any, part: GradientPart, *bounds: Any, **named_bounds: Any) -> GradientPart:
    gradient_slice = part.whole_slice()
    gradient_slice.divide()
    function(gradient_slice.total, *bounds, **named_bounds)
    gradient_slice.edits.append([function._schema.name.removeprefix("aten::"), *bounds, *named_bounds.values()])
    gradient_slice.norms = None
    return part


def _accumulate(function: Any, part: GradientPart, other: Any, *, alpha: float = 1) -> GradientPart:
    """``param.grad += grad``, as autograd does it in a second backward."""
    gradient_slice = part.live_slice()
    in_backward = torch._C._current_graph_task_id() >= 0
    is_gradient = isinstance(other, Tensor) and not isinstance(other, Part) and other.size() == part.size()
    if not (in_backward and is_gradient and alpha == 1):
        raise StateError(
            f"{part!r} was added to: only a backward can do that, whose gradients are summed over ranks; this would "
            "have been added on some ranks and not on others. Add the term to the loss, or gather the gradient with "
            "full_tensor() on every rank."
        )
    gradient_slice.receive(other)
    return part


def _each(name: str) -> Callable[..., None]:
    """The ``_foreach_`` form of a method, for lists in which parts and plain tensors may be mixed."""

    check = GradientPart.live_slice if name == "zero_" else GradientPart.whole_slice

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
    counts = [_known(part).nonfinite if part.whole_slice().gather else None for part in parts]
    plain = [tensor for tensor in tensors if not isinstance(tensor, GradientPart)]
    if plain:
        function(plain, found_inf, inverse)
    factor = inverse.item() if parts else 1.0  # read once: on a GPU, each time is a wait
    for part, count in zip(parts, counts, strict=True):
        if count or (count is None and not part.gradient_slice.lend().isfinite().all()):
            found_inf.fill_(1.0)
        _multiply(function, part, factor)


# -- reading -----------------------------------------------------------------------------------------------------------


def _known(part: GradientPart) -> Norms:
    norms = part.whole_slice().norms
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
    gradient_slice, dtype = part.whole_slice(), dtype or torch.float32
    is_scalar = not keepdim and (not dim or len(set(dim)) == part.dim())
    if ord not in (2, math.inf) or not is_scalar or not dtype.is_floating_point or out:
        if gradient_slice.gather is None:
            return NotImplemented
        raise StateError(
            f"a norm of order {ord}, dim {dim}, keepdim {keepdim}, dtype {dtype} was asked of {part!r}: of the whole, "
            "only those of order 2 and inf over all elements are known, as new 0-d tensors of a float dtype. Call "
            "full_tensor() on every rank for any other."
        )
    if gradient_slice.gather is None and gradient_slice.norms is None:
        return torch.linalg.vector_norm(gradient_slice.lend(), ord, dtype=dtype).to(part.device)
    norms = _known(part)
    value = math.nan if norms.nonfinite else norms.two if ord == 2 else norms.largest
    return torch.scalar_tensor(value, dtype=dtype, device=part.device)


def _foreach_norm(_: Any, tensors: list[Tensor], ord: Any = 2, dtype: Any = None) -> list[Tensor]:
    return [torch.linalg.vector_norm(tensor, ord, dtype=dtype) for tensor in tensors]


def _is_finite(function: Any, part: GradientPart) -> Any:
    gradient_slice = part.whole_slice()
    if gradient_slice.gather is None:
        return part.shaped(gradient_slice.lend().isfinite().to(part.device))
    nonfinite = _known(part).nonfinite
    return Mask(
        gradient_slice.total.isfinite().to(part.device),
        gradient_slice.start,
        part,
        nonfinite == 0,
        nonfinite < part.whole_numel,
    )


def _is_inf_or_nan(function: Any, part: GradientPart) -> Any:
    gradient_slice = part.whole_slice()
    if gradient_slice.gather is None:
        return part.shaped(function(gradient_slice.lend()).to(part.device))
    if _known(part).nonfinite:
        raise StateError(
            f"{function} was called on {part!r}, which holds Inf or NaN; which of them is not known without the other "
            "ranks' slices. Ask torch.isfinite, or call full_tensor() on every rank."
        )
    return Mask(
        function(gradient_slice.total).to(part.device), gradient_slice.start, part, part.whole_numel == 0, False
    )


def _alias(function: Any, part: GradientPart) -> GradientPart:
    origin = part if part._origin is None else part._origin
    return GradientPart._showing(part.live_slice(), part, part._param_dtype, origin)


def _copy(function: Any, part: GradientPart, *, memory_format: Any = None, **keywords: Any) -> Any:
    """A copy of the slice, as a part of its own; of a whole gradient, a plain tensor."""
    gradient_slice = part.whole_slice()
    if gradient_slice.gather is None:
        return NotImplemented
    gradient_slice.show_mean()
    dtype = keywords.get("dtype") or part.dtype
    return Part(function(gradient_slice.total.to(part.device), **keywords), gradient_slice.start, part, dtype=dtype)


# -- everything else ---------------------------------------------------------------------------------------------------


def _of_whole(function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Whatever only reads, where this rank holds everything.

    The result has the part's dtype. A view shows the slice's own memory and has its dtype: no write to it is lost.
    """
    if writes_to(GradientPart, function, arguments, keywords):
        raise _unwritable(function)
    for part in tree_leaves((arguments, keywords)):
        if isinstance(part, Part) and not (isinstance(part, GradientPart) and part.whole_slice().gather is None):
            raise refusal(function)

    def unwrap(part: GradientPart) -> Tensor:
        return part.shaped(part.gradient_slice.alias()) if function.is_view else part.whole()

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
    if part.whole_slice().gather is not None:
        raise refusal(function)
    return function(part.shaped(part.gradient_slice.alias()).to(part.dtype), *arguments, **keywords)


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
