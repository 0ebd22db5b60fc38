"""``param.grad`` where shardopt reduces: a part of the mean gradient.

Each rank keeps its slice of the sum over ranks, in fp32 or as ``gradient_format`` says (:class:`GradientSlice`). Every
rank also knows the norms of the whole gradient (:class:`Norms`), and each in-place operation updates them. So clipping,
unscaling, zeroing and reading a norm need no communication and give the same result on every rank::

    clip_grad_norm_, get_total_norm   norms, then mul_ of each slice
    clip_grad_value_                  clamp_ of each slice; the norms are unknown afterwards
    GradScaler.unscale_               found_inf from the count of Inf and NaN, mul_ of each slice
    zero_grad(set_to_none=False)      zero_
    gradient accumulation             add_, which passes the full local gradient to the reducer
    other edits by elements           each rank changes its slice (:mod:`.gradient_edits`); the norms are unknown

What else is asked is answered of the whole, which a rank reads from the others by itself.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter, is_, setitem
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils._foreach_utils import _foreach_supported_types
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import StateError
from .fetched_view import as_views, is_collective, makes_views, writes_to
from .gradient_edits import edit, edit_whole
from .gradient_slice import clamp, divide, multiply, negate, norms_of, zero
from .part import Part, refusal
from .pipelining import is_called_by_pipeline
from .unsharded_guard import dtype_in_forward

if TYPE_CHECKING:
    from .gradient_slice import GradientSlice
    from .gradient_views import GradientSource
    from .mask import Mask
    from .norm_table import Norms

aten = torch.ops.aten
_SLICE, _PART, _PENDING = map(attrgetter, ("gradient_slice", "part", "pending"))  # read of many at once, in C


class GradientPart(Part):
    """The mean gradient of one param, of which this rank holds a slice.

    With ``Offload(gradients="cpu")`` the slice is in host memory, and so are ``local`` and views. All other results,
    copies and norms included, are on the param's device.

    The part can be changed in place by elements. Its
    norms of order 2 and inf are known: fp32 unless a dtype is given; NaN if any element is Inf or NaN. ``isfinite``,
    ``isinf`` and ``isnan`` return a mask with ``all()`` and ``any()``. ``detach()`` and ``.data`` return the same
    gradient, ``clone()`` and casts return copies of the slice.

    The dtype is the param's, but float32 for a float16 param: ``torch.amp.GradScaler`` unscales no float16 gradient.
    """

    # Slots are found before torch's own descriptors, which go through __torch_function__: a scaler reads device and
    # dtype of every param.
    __slots__ = ("_origin", "_param_dtype", "device", "dtype", "gradient_slice", "views", "whole_numel")
    is_sparse = False
    is_shown = True
    # Part's method would fetch the whole. torch.compile calls it only to distinguish tensors
    # (test_compiled_model_accumulates).
    untyped_storage = Tensor.untyped_storage
    tolist, numpy = Tensor.tolist, Tensor.numpy  # answered early, and of a whole as memory of the gradient

    gradient_slice: GradientSlice
    whole_numel: int
    views: GradientSource | None
    _origin: GradientPart | None  # the part that this is an alias of
    _param_dtype: torch.dtype  # torch checks it when the part is assigned to param.grad

    @staticmethod
    def __new__(cls, gradient_slice: GradientSlice, like: Tensor) -> GradientPart:
        """Returns the part that shows the slice for the param ``like`` from now on; older parts become stale."""
        assert gradient_slice.gather is not None or gradient_slice.total.numel() == like.numel()
        part = gradient_slice.part = cls._showing(gradient_slice, like, dtype_in_forward(like), None)
        return part

    @classmethod
    def _showing(
        cls, gradient_slice: GradientSlice, like: Tensor, param_dtype: torch.dtype, origin: GradientPart | None
    ) -> GradientPart:
        device = like.device
        part = cls._wrapper(like, param_dtype, device)
        part.gradient_slice, part.device, part.whole_numel = gradient_slice, device, like.numel()
        part._origin, part._param_dtype, part.views = origin, param_dtype, None
        part.dtype = torch.float32 if param_dtype is torch.float16 else param_dtype
        return part

    @property
    def is_stale(self) -> bool:
        """True if the slice shows another gradient by now, or none."""
        return self.gradient_slice.part is not (self if self._origin is None else self._origin)

    def live_slice(self) -> GradientSlice:
        """Returns the slice if it still holds this gradient.

        Raises:
            StateError: it does not.
        """
        if self.is_stale:
            raise StateError(
                f"read param.grad again, and clone what is to be kept: {self!r} was kept from an earlier backward, and "
                "its memory now holds another step's gradient, or none."
            )
        return self.gradient_slice

    def whole_slice(self) -> GradientSlice:
        """Returns the slice if it holds all of this gradient.

        Raises:
            StateError: it does not.
        """
        gradient_slice = self.live_slice()
        if gradient_slice.pending is not None:
            raise StateError(
                "run the last backward before gradients are used outside of no_sync(), or call zero_grad(): "
                f"{self!r} is not all of the gradient. A later backward under no_sync() added this rank's gradient, "
                "which is not reduced yet: scaling or reading the part alone would miss it."
            )
        return gradient_slice

    @property
    def local(self) -> Tensor:
        """1D, this rank's slice of the mean, in the slice's dtype, to be read: a write to it makes norms unknown."""
        return self.whole_slice().lend()

    @property
    def start(self) -> int:  # type: ignore[override]
        return self.gradient_slice.start

    def elements(self) -> Tensor:
        own = self.whole_slice()
        own.show_mean()
        return own.total.to(self.device, self.dtype)

    @property
    def words(self) -> str:  # type: ignore[override]
        own = self.gradient_slice
        return f"gradient {own.number} of round {own.round} after {own.edit_count} changes"

    @property
    def _fetch(self) -> Callable[[], Tensor] | None:  # type: ignore[override]
        """Reads the whole mean of now, later too: ranks keep their slices of now while somebody refers to this."""
        own = self.whole_slice()
        if own.fetch is None:
            return None
        from .later import OfMoment

        form = self.size(), self.stride(), self.dtype
        return OfMoment(own.fetch, own.moment, own.copied(), *form, own.fetch.steps)

    @property
    def draws(self) -> Callable[[], str | None] | None:  # type: ignore[override]
        return self.gradient_slice.draws

    @property
    def _gather_slices(self) -> Callable[[Tensor], Tensor] | None:  # type: ignore[override]
        return self.gradient_slice.gather

    def _memory(self, asked: str) -> NoReturn:
        raise refusal(asked)

    def full_tensor(self) -> Tensor:
        """Collective: returns the whole mean. Every rank must make this call, for the same parts in the same order."""
        gradient_slice = self.whole_slice()
        if gradient_slice.gather is None:
            return self.whole().clone()
        gradient_slice.show_mean()
        return gradient_slice.gather(gradient_slice.total).to(self.dtype)

    def read_whole(self) -> Tensor:
        """Returns the whole mean in host memory; this rank alone reads it from the others."""
        gradient_slice = self.whole_slice()
        if gradient_slice.gather is None:
            return self.whole().cpu()
        if gradient_slice.fetch is None:
            raise refusal("read_whole()")
        return self.shaped(gradient_slice.read_whole()).to(self.dtype)

    def whole(self) -> Tensor:
        """Returns the mean, if this rank holds all of it: the slice's own memory where device and dtype allow."""
        self.gradient_slice.show_mean()
        return self.shaped(self.gradient_slice.total.to(self.device)).to(self.dtype)

    def shaped(self, total: Tensor) -> Tensor:
        """Returns a view with the param's shape of all the param's elements, 1D in storage order."""
        return total.as_strided(self.size(), self.stride())

    def share_memory_(self) -> Self:
        raise StateError(
            f"call optimizer.close() before module.share_memory(): {self!r} lies in memory of the optimizer, and its "
            "steps would no longer reach the params that other processes see."
        )

    def _refused_write(self, call: str) -> StateError:
        return _unwritable(call)

    def set_(self, source: Any = None, *arguments: Any) -> Self:
        """Takes the values of a tensor like this one; it does not show that tensor's memory from then on."""
        if arguments or not isinstance(source, Tensor):
            raise _unwritable("set_() of a storage")
        self._take(source, "set_()")
        return self

    def _take(self, values: Tensor, call: str) -> None:
        if (values.size(), values.dtype, values.device) != (self.size(), self.dtype, self.device):
            raise StateError(
                "move and cast the model before its first forward, or after optimizer.close(); and assign gradients of "
                f"the param's own shape, dtype and device: {call} of another one ({values.dtype} of shape "
                f"{tuple(values.shape)} on {values.device}) came to a gradient that is sharded over ranks "
                f"({self.dtype} of shape {tuple(self.shape)} on {self.device})."
            )
        with torch.no_grad():
            self.copy_(values)

    def __setitem__(self, index: Any, value: Any) -> None:
        if self.whole_slice().gather is None:
            super().__setitem__(index, value)
        else:
            edit_whole(self, "setitem", setitem, (index, value))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        end = self.start + self.gradient_slice.total.numel()
        return (
            f"GradientPart(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, "
            f"local=[{self.start}:{end}]{', stale' if self.is_stale else ''})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saves the whole, as a plain tensor."""
        gradient_slice = self.whole_slice()
        if gradient_slice.gather is not None and gradient_slice.fetch is None:
            raise refusal("torch.save")
        return self.read_whole().clone().__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, arguments: Any = (), keywords: Any = None) -> Any:
        answer = _EARLY.get(function)
        if answer is not None and arguments and isinstance(arguments[0], (GradientPart, list)):
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


# Id of a living one-element tensor -> the tensor, its version when it was read, its number, and the slices that were
# multiplied by it. Without the slices a collective's write, which changes no version, would go unnoticed. Tests:
# test_clipping_reads_its_factor_once and test_a_factor_that_changes_is_read_again in tests/tensors/test_gradient.py.
_READ: dict[int, tuple[weakref.ref[Tensor], int, Any, set[int]]] = {}


def _number(operand: Any, slices: Sequence[GradientSlice]) -> Any:
    """Returns a factor, a divisor or a bound as a plain number.

    A script's own clipping multiplies one gradient after the other by one tensor, and on a GPU each read of it waits
    for the device. So it is read once, and again where it may have changed: a collective writes to it without a new
    version.
    """
    if not isinstance(operand, Tensor):
        return operand
    if type(operand) is not Tensor or operand.is_inference():  # the latter counts no versions
        return operand.item()
    key, ids = id(operand), set(map(id, slices))
    read = _READ.get(key)
    if read is None or read[1] != operand._version or not read[3].isdisjoint(ids):
        gone = weakref.ref(operand, lambda _: _READ.pop(key, None))
        read = _READ[key] = gone, operand._version, operand.item(), set()
    read[3].update(ids)
    return read[2]


def _is_number(operand: Any) -> bool:
    """True for a number, and for a tensor that holds one."""
    return not isinstance(operand, Tensor) or (operand.numel() == 1 and not isinstance(operand, Part))


def _alone(
    change: Callable[..., None], slice_of: Callable[[GradientPart], GradientSlice] = GradientPart.whole_slice
) -> Any:
    """Returns the answer to a method that changes one part.

    Args:
        change: makes the change by numbers to many slices.
    """

    def answer(function: Any, part: GradientPart, *operands: Any) -> Any:
        if not all(map(_is_number, operands)):
            return NotImplemented
        slices = [slice_of(part)]
        change(slices, *(_number(each, slices) for each in operands))
        return part

    return answer


def _divide(function: Any, part: GradientPart, other: Any) -> Any:
    if not _is_number(other):
        return NotImplemented
    gradient_slice = part.live_slice()
    pending = gradient_slice.pending
    if pending is not None and not is_called_by_pipeline():
        gradient_slice = part.whole_slice()
    divisor = _number(other, [gradient_slice])
    if pending is not None:  # scale_grads() of a zero-bubble schedule
        gradient_slice.pending = pending / divisor
    divide([gradient_slice], divisor)
    return part


def _from_above(slices: Sequence[GradientSlice], high: float) -> None:
    clamp(slices, high=high)


def _accumulate(function: Any, part: GradientPart, other: Any, *, alpha: float = 1) -> Any:
    """Answers ``param.grad += grad``, as autograd does in a second backward."""
    gradient_slice = part.live_slice()
    if torch._C._current_graph_task_id() < 0 and not is_called_by_pipeline():
        return NotImplemented
    is_gradient = isinstance(other, Tensor) and not isinstance(other, Part) and other.size() == part.size()
    if not (is_gradient and alpha == 1):
        raise StateError(
            "add the term to the loss, or to the gradient after backward: only autograd, whose gradients are summed "
            f"over ranks, adds to {part!r} in a backward. This would be added on some ranks and not on others."
        )
    gradient_slice.receive(other)
    return part


# -- lists in place ----------------------------------------------------------------------------------------------------


def _whole_slices(parts: Sequence[GradientPart]) -> list[GradientSlice]:
    """Returns ``whole_slice()`` of each part: all or none, as an error in the middle would leave some changed."""
    slices = list(map(_SLICE, parts))
    if {*map(is_, map(_PART, slices), parts), *map(is_, map(_PENDING, slices), repeat(None))} != {True}:
        for part in parts:  # an alias, or an error
            part.whole_slice()
    return slices


def _apart(tensors: list[Tensor]) -> tuple[list[GradientPart], list[Tensor]]:
    """Returns the parts of a list, and the other tensors."""
    if {*map(type, tensors)} == {GradientPart}:  # nearly always
        return tensors, []  # type: ignore[return-value]
    return [each for each in tensors if isinstance(each, GradientPart)], [
        each for each in tensors if not isinstance(each, GradientPart)
    ]


def _live_slices(parts: Sequence[GradientPart]) -> list[GradientSlice]:
    return [part.live_slice() for part in parts]


def _at_once(
    name: str, change: Callable[..., None], slices_of: Callable[..., list[GradientSlice]] = _whole_slices
) -> Any:
    """Returns the ``_foreach_`` form of the method ``name``, for a list of parts and plain tensors.

    Args:
        change: makes the change by at most one number to many slices.
    """

    def answer(function: Any, tensors: list[Tensor], *operand: Any) -> None:
        parts, plain = _apart(tensors)
        slices = slices_of(parts)
        if operand and isinstance(operand[0], list):
            for tensor, each in zip(tensors, operand[0], strict=True):
                getattr(tensor, name)(each)
            return
        if plain:
            function(plain, *operand)
        numbers = [_number(each, slices) for each in operand] if slices else []
        for some in _in_turns(slices):
            change(some, *numbers)

    return answer


def _in_turns(slices: list[GradientSlice]) -> list[list[GradientSlice]]:
    """Returns lists in which each slice stands once: torch changes a gradient twice that is given twice."""
    distinct = list(dict.fromkeys(slices))
    if len(distinct) == len(slices):  # nearly always
        return [slices] if slices else []
    return [distinct, *_in_turns(list((Counter(slices) - Counter(distinct)).elements()))]


def _unscale(function: Any, tensors: list[Tensor], found_inf: Tensor, inverse: Tensor) -> None:
    """Unscales by ``inverse``; sets ``found_inf`` to 1 on every rank if any element on any rank is Inf or NaN."""
    parts, plain = _apart(tensors)
    slices = _whole_slices(parts)
    shared = [each for each in slices if each.gather is not None]
    norms = norms_of(shared)
    if norms is None:
        nonfinite = [_known(part).nonfinite for part in parts if part.gradient_slice.gather is not None]
    else:
        nonfinite = norms[2].tolist()
    if plain:
        function(plain, found_inf, inverse)
    # A rank that holds the whole gradient looks, and sees what the user wrote.
    alone = [each.lend() for each in slices if each.gather is None]
    is_spoilt = any(nonfinite) or any(each.is_spoilt_elsewhere for each in slices)
    if is_spoilt or not all(each.isfinite().all() for each in alone):
        found_inf.fill_(1.0)
    number = inverse.item() if slices else 1.0  # once for all parts: on a GPU, each item() waits for the device
    for some in _in_turns(slices):
        multiply(some, number)


# -- reading -----------------------------------------------------------------------------------------------------------


def _known(part: GradientPart) -> Norms:
    norms = part.whole_slice().norms
    if norms is None:
        if part.gradient_slice.fetch is not None:
            return part.gradient_slice.measure_anew()
        raise StateError(
            "read norms, unscale and look for Inf and NaN earlier, or call full_tensor() on every rank: the norms of "
            f"{part!r} are not known. After its last backward it was clamped, written to through .local or scaled out "
            "of range, and every rank sees only its own slice."
        )
    return norms


def _norm(
    _: Any, part: GradientPart, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, **out: Any
) -> Any:
    gradient_slice, dtype = part.whole_slice(), dtype or torch.float32
    is_scalar = not keepdim and (not dim or len(set(dim)) == part.dim())
    if ord not in (2, math.inf) or not is_scalar or not dtype.is_floating_point or out:
        if gradient_slice.gather is None or gradient_slice.fetch is not None:
            return NotImplemented
        raise StateError(
            "call full_tensor() on every rank and take the norm of that: only norms of order 2 and inf over all "
            "elements are known, as new 0-d tensors of a float dtype. Asked for: order "
            f"{ord}, dim {dim}, keepdim {keepdim}, dtype {dtype} of {part!r}."
        )
    if gradient_slice.gather is None and gradient_slice.norms is None:
        return torch.linalg.vector_norm(gradient_slice.lend(), ord, dtype=dtype).to(part.device)
    norms = _known(part)
    value = math.nan if norms.nonfinite else norms.two if ord == 2 else norms.largest
    return torch.scalar_tensor(value, dtype=dtype, device=part.device)


def _norms(function: Any, tensors: list[Tensor], ord: Any = 2, dtype: Any = None) -> list[Tensor]:
    """Returns the norm of each of a list of parts and plain tensors: one upload for all parts."""
    parts, plain = _apart(tensors)
    norms = None
    if ord in (2, math.inf) and (dtype is None or dtype.is_floating_point):
        norms = norms_of(_whole_slices(parts))
    if norms is None:
        return [torch.linalg.vector_norm(tensor, ord, dtype=dtype) for tensor in tensors]
    two, largest, nonfinite = norms
    values = np.where(nonfinite > 0, math.nan, two if ord == 2 else largest)
    host, device = torch.from_numpy(values).to(dtype or torch.float32), parts[0].device
    if device.type != "cpu":
        host = host.pin_memory()  # from pageable memory the host would wait for the copy
    known = host.to(device, non_blocking=True).unbind()
    if not plain:
        return list(known)
    of_parts, others = iter(known), iter(function(plain, ord, dtype=dtype))
    return [next(of_parts if isinstance(tensor, GradientPart) else others) for tensor in tensors]


def _is_finite(function: Any, part: GradientPart) -> Any:
    gradient_slice = part.whole_slice()
    if gradient_slice.gather is None:
        return part.shaped(gradient_slice.lend().isfinite().to(part.device))
    nonfinite = _known(part).nonfinite
    return _mask(torch.isfinite, part, nonfinite == 0, nonfinite < part.whole_numel)


def _is_inf_or_nan(function: Any, part: GradientPart) -> Any:
    gradient_slice = part.whole_slice()
    if gradient_slice.gather is None:
        return part.shaped(function(gradient_slice.lend()).to(part.device))
    if _known(part).nonfinite and gradient_slice.fetch is not None:
        return NotImplemented
    if _known(part).nonfinite:
        raise StateError(
            "call torch.isfinite, or full_tensor() on every rank: the number of Inf and NaN together is known, but not "
            f"of each. {function} was called on {part!r}, which holds some."
        )
    return _mask(function, part, part.whole_numel == 0, False)


def _mask(function: Any, part: GradientPart, every: bool, some: bool) -> Mask:
    from .expressions import Made
    from .mask import Mask

    own = part.gradient_slice
    later: Callable[[], Tensor] | None = None
    if own.fetch is not None:
        fetch = part._fetch if some and not every else None
        later = partial(torch.full, part.size(), every) if fetch is None else lambda: function(fetch())
    made = Made(later, f"{function.__name__}({part.words})")
    return Mask(function(own.total).to(part.device), part, made, every, some)


def _alias(function: Any, part: GradientPart) -> GradientPart:
    origin = part if part._origin is None else part._origin
    return GradientPart._showing(part.live_slice(), part, part._param_dtype, origin)


def _view(function: Any, part: GradientPart, size: Any) -> Any:
    """Answers a view of the same shape, which ``to_local()`` of a DTensor makes of what is inside."""
    return _alias(function, part) if tuple(size) == tuple(part.size()) else NotImplemented


# -- everything else ---------------------------------------------------------------------------------------------------


def _of_whole(function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Answers functions that only read, on a rank that holds the whole gradient.

    The result has the part's dtype. A view shows the slice's own memory and has its dtype: no write to it is lost.
    """
    if is_collective(function):
        from .collectives import call_collective

        return call_collective(function, arguments, keywords)
    if writes_to(GradientPart, function, arguments, keywords):
        found = NotImplemented if torch._C._current_graph_task_id() >= 0 else edit(function, arguments, keywords)
        if found is NotImplemented:
            raise _unwritable(function)
        return found
    parts = [each for each in tree_leaves((arguments, keywords)) if isinstance(each, Part)]
    if torch.Tag.nondeterministic_seeded in function.tags and arguments[0] is parts[0]:
        from .noise import noise_of

        if parts[0].gradient_slice.gather is None:
            noise = noise_of(function, arguments, keywords, parts[0])
            if noise is not None:
                return noise.whole(parts[0].size(), parts[0].stride(), parts[0].device)
    if not any(isinstance(part, GradientPart) and part.gradient_slice.gather is None for part in parts):
        if function is aten.add.Tensor and len(parts) == 1 and torch._C._current_graph_task_id() >= 0:
            raise refusal(function)  # a backward that keeps its graph adds a rank's own gradient so
        if makes_views(function) and isinstance(arguments[0], GradientPart):
            from .gradient_views import gradient_view

            return gradient_view(arguments[0], function, arguments[1:], keywords)
        from .expressions import expression

        found = expression(function, arguments, keywords)
        if found is not None:
            return found
    if not all(_is_readable(part) for part in parts):
        raise refusal(function)
    if not all(isinstance(part, GradientPart) and part.gradient_slice.gather is None for part in parts):
        arguments, keywords = tree_map_only(Part, lambda part: part.read_whole().to(part.device), (arguments, keywords))
        return as_views(function, function(*arguments, **keywords))

    def unwrap(part: GradientPart) -> Tensor:
        return part.shaped(part.gradient_slice.alias()) if makes_views(function) else part.whole()

    arguments, keywords = tree_map_only(GradientPart, unwrap, (arguments, keywords))
    if function is torch.ops.aten.as_strided.default and arguments[3:] and arguments[3] is not None:
        # A part begins at 0, and its slice somewhere in a bucket.
        arguments = (*arguments[:3], arguments[3] + arguments[0].storage_offset())
    return function(*arguments, **keywords)


def _is_readable(part: Part) -> bool:
    """True if this rank can read the whole by itself."""
    if not isinstance(part, GradientPart):
        return part._fetch is not None
    gradient_slice = part.whole_slice()
    return gradient_slice.gather is None or gradient_slice.fetch is not None


def _unwritable(function: Any) -> StateError:
    return StateError(
        "change the loss instead, or the gradient that full_tensor() returns on every rank, and assign that: "
        f"{function} would change a gradient that is sharded over ranks, in backward or by elements that this rank "
        "lacks. After backward, functions by elements change it: mul_, add_, clamp_, copy_, a mask, an index."
    )


def _dropout(_: Any, part: GradientPart, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if not training:
        return part
    found = part * (torch.rand_like(part) >= p) / (1 - p if p < 1 else 1)
    return part.copy_(found) if inplace else found


def _to_host(function: Any, part: GradientPart, *arguments: Any, **keywords: Any) -> Any:
    """Answers ``tolist()`` and ``numpy()``, which torch refuses for any subclass."""
    if part.whole_slice().gather is not None:
        if part.gradient_slice.fetch is None:
            raise refusal(function)
        found = function(part.read_whole(), *arguments, **keywords)
        if isinstance(found, np.ndarray):
            found.flags.writeable = False  # a write would be lost
        return found
    return function(part.shaped(part.gradient_slice.alias()).to(part.dtype), *arguments, **keywords)


_IN_LISTS: dict[str, tuple[Callable[..., None], tuple[str, ...]]] = {
    "mul_": (_at_once("mul_", multiply), ("Scalar", "Tensor", "List", "ScalarList")),
    "div_": (_at_once("div_", divide), ("Scalar", "Tensor", "List", "ScalarList")),
    "neg_": (_at_once("neg_", negate), ("default",)),
    "zero_": (_at_once("zero_", zero, _live_slices), ("default",)),
    "clamp_min_": (_at_once("clamp_min_", clamp), ("Scalar",)),
    "clamp_max_": (_at_once("clamp_max_", _from_above), ("Scalar",)),
}
_multiply = _alone(multiply)
_ANSWERS: dict[Any, Callable[..., Any]] = {
    aten.mul_.Tensor: _multiply,
    aten.div_.Tensor: _divide,
    aten.neg_.default: _alone(negate),
    aten.zero_.default: _alone(zero, GradientPart.live_slice),
    aten.clamp_.default: _alone(clamp),
    aten.clamp_min_.default: _alone(clamp),
    aten.clamp_max_.default: _alone(_from_above),
    aten.add_.Tensor: _accumulate,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    aten.linalg_vector_norm.default: _norm,
    aten._foreach_norm.Scalar: _norms,
    aten.isfinite.default: _is_finite,
    aten.isinf.default: _is_inf_or_nan,
    aten.isnan.default: _is_inf_or_nan,
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.view.default: _view,
} | {
    getattr(getattr(aten, f"_foreach_{name}"), overload): answer
    for name, (answer, overloads) in _IN_LISTS.items()
    for overload in overloads
}
# Answered before __torch_dispatch__: functions that torch decomposes or refuses on the way there. Also the functions
# that clipping calls for every part: the way to __torch_dispatch__ takes longer than the answer.
_EARLY: dict[Any, Callable[..., Any]] = {
    torch.isfinite: _is_finite,
    Tensor.isfinite: _is_finite,
    Tensor.tolist: _to_host,
    Tensor.numpy: _to_host,
    Tensor.__array__: _to_host,
    torch.linalg.vector_norm: _norm,
    torch._foreach_norm: _norms,
    torch._foreach_mul_: _IN_LISTS["mul_"][0],
    torch._foreach_div_: _IN_LISTS["div_"][0],
    Tensor.mul_: _multiply,
    torch.nn.functional.dropout: _dropout,
}

# As torch does for DTensors: else its clipping takes the way of one call for each gradient.
if GradientPart not in _foreach_supported_types:
    _foreach_supported_types.append(GradientPart)  # type: ignore[arg-type]
