"""Local params: the plain tensor of each DTensor param, which is all that buckets, shards and kernels see.

A tensor-parallel plan (``parallelize_module``) makes params DTensors: each rank of a tensor mesh holds a local tensor
of its own. States are sharded over the data-parallel ranks that hold the *same* local tensor, so to an optimizer it is
a param like any other. This module knows the mesh: which gradients must be summed first, which rank counts an element
that several ranks hold, and how a state looks from outside.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..errors import BindingError, ShardoptError, StateError
from ..tensors.local_tensor import set_local
from ..tensors.part import Part
from ..tensors.strides import with_own_storage

if TYPE_CHECKING:
    from .hyperparameters import Group

DTensor = Any  # torch's: see :func:`is_dtensor`
Spec = Any  # torch's DTensorSpec: the mesh, the placements, and the shape and strides of the whole; hashable


def is_dtensor(value: Any) -> bool:
    """True if ``value`` is a DTensor. Does not import DTensor, which takes long, unless the program did."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def any_dtensor(values: Iterable[Any]) -> bool:
    """True if one of ``values`` is a DTensor. Every step asks this of all params, so it looks the module up once."""
    module = sys.modules.get("torch.distributed.tensor")
    kinds = set(map(type, values))
    if module is None or kinds <= {torch.nn.Parameter}:
        return False
    return any([issubclass(kind, module.DTensor) for kind in kinds])


@dataclass(eq=False)
class _LocalParam:
    """A DTensor param and its local param, each of which may be written: the other one then follows."""

    param: DTensor  # the user's
    local: torch.nn.Parameter
    # The DTensor's local tensor when the two were last compared, a view of ``local``. Weak: a bucket that replaces it
    # frees its memory.
    last_local: weakref.ref[torch.Tensor]
    versions: tuple[int, int]  # of ``param`` and ``local``, when they were last compared
    gradient: torch.Tensor | None = None  # its local tensor; a copy if it has to be summed over the mesh
    sums: Sequence[int] = ()  # the dimensions of the mesh over which it is to be summed
    is_bound: bool = False  # this optimizer moves and updates it; of others' params it only knows them

    def update_local(self) -> None:
        """Makes the local param follow the DTensor, which may have been moved, cast, loaded or frozen."""
        if self.param._local_tensor is not self.last_local():
            self.local.data = self.param._local_tensor
        if self.param._version != self.versions[0]:
            torch.autograd.graph.increment_version([self.local])
        self.local.requires_grad_(self.param.requires_grad)
        self._note_versions()

    def update_dtensor(self) -> None:
        """Makes the DTensor follow the local param, which may have moved to or from a bucket, or have been updated.

        Where another optimizer has bound the param, the DTensor follows that one's.
        """
        if not self.is_bound:
            return
        if self.local.data_ptr() != self.param._local_tensor.data_ptr():
            # It shares the version counter, so that a write to to_local() is noticed.
            set_local(self.param, self.local.detach())
        if self.local._version != self.versions[1]:
            torch.autograd.graph.increment_version([self.param])
        self._note_versions()

    def _note_versions(self) -> None:
        self.versions = self.param._version, self.local._version
        self.last_local = weakref.ref(self.param._local_tensor)


class DTensorLocals:
    """The local params of one optimizer, each made at its first use. A plain param is its own local param."""

    def __init__(self) -> None:
        self._table: dict[torch.nn.Parameter, _LocalParam] = {}
        self._outer: dict[torch.Tensor, torch.nn.Parameter] = {}  # by local param

    @property
    def are_none(self) -> bool:
        """True if no param was a DTensor so far."""
        return not self._table

    def outer_of(self, local: Any) -> Any:
        """Returns the DTensor param of this local param; a plain param itself."""
        return self._outer.get(local, local)

    def bind(self, locals_: Iterable[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        """Returns the params as the model has them. DTensors among them follow their local params from now on."""
        outers = [self.outer_of(local) for local in locals_]
        for outer in outers:
            if outer in self._table:
                self._table[outer].is_bound = True
        return outers

    def forget(self, local: torch.nn.Parameter) -> None:
        """Forgets a local param that is bound no more."""
        self._table.pop(self._outer.pop(local, local), None)

    def of(self, param: torch.nn.Parameter) -> torch.nn.Parameter:
        if not is_dtensor(param):
            return param
        found = self._table.get(param)
        if found is None:
            values: DTensor = param
            tensor = values._local_tensor
            local = torch.nn.Parameter(tensor.detach(), requires_grad=param.requires_grad)
            versions = param._version, local._version
            self._table[param] = found = _LocalParam(param, local, weakref.ref(tensor), versions)
            self._outer[local] = param
        else:
            found.update_local()
        return found.local

    def of_group(self, group: Group) -> Group:
        """Returns the group with local params; the same object if all params are plain."""
        if not any_dtensor(group["params"]):
            return group
        return {**group, "params": [self.of(param) for param in group["params"]]}

    def update_dtensors(self) -> None:
        """Makes all DTensors follow their local params."""
        for each in self._table.values():
            each.update_dtensor()

    # -- gradients -------------------------------------------------------------------------------------------------

    def prepare_gradients(self) -> None:
        """Checks gradients and allocates the memory of their sums: on this rank alone, before ranks agree.

        Raises:
            ShardoptError: a gradient is not a DTensor of the param's mesh.
        """
        for each in self._table.values():
            if each.param.grad is not None:
                _check_gradient(each.param)
                each.sums = _sums_to_make(each.param)
                each.gradient = each.param.grad._local_tensor
                if isinstance(each.gradient, Part):  # of the module that was handed over, reduced already
                    continue
                each.gradient = each.param.grad.to_local().detach()
                if each.sums:
                    each.gradient = each.gradient.clone()

    def set_local_gradients(self, sum_over: Callable[[DeviceMesh, int, torch.Tensor], None]) -> None:
        """Sets the gradients of local params. Collective over the tensor mesh for those that must be summed over it.

        Called after :meth:`prepare_gradients` and an agreement. A rank that failed here would leave its mates waiting,
        so it allocates nothing, but for a gradient with unusual placements.

        Args:
            sum_over: sums in place over one dimension of a mesh.
        """
        for each in self._table.values():
            for dim in each.sums:
                assert each.gradient is not None
                sum_over(each.param.device_mesh, dim, each.gradient)
            if each.gradient is not None and not each.sums and each.param.grad.placements != each.param.placements:
                each.gradient = local_tensor(placed_gradient(each.param)).detach()
            each.local.grad = each.gradient

    def drop_gradients(self) -> None:
        for each in self._table.values():
            each.local.grad, each.gradient, each.sums = None, None, ()

    # -- states outside --------------------------------------------------------------------------------------------

    @staticmethod
    def outside(param: Any, state: Mapping[str, Any], margins: Collection[str] = ()) -> dict[str, Any]:
        """Returns a state as ``torch.optim`` has it for a DTensor param: DTensors with the placements of the param.

        Args:
            margins: states that every rank holds whole: DTensors of copies.
        """
        if not is_dtensor(param):
            return dict(state)
        found = dict(state)
        for name, tensor in state.items():
            if name in margins:
                found[name] = _copied_over(param.device_mesh, tensor)
            elif isinstance(tensor, torch.Tensor) and tensor.shape == param._local_tensor.shape and name != "step":
                found[name] = shown_as(param, tensor)
        return found

    @staticmethod
    def inside(
        param: torch.nn.Parameter, state: Mapping[str, Any], name: str, margins: Collection[str] = ()
    ) -> dict[str, Any]:
        """Returns the local tensors of a state that :meth:`outside` or a torch class made.

        Raises:
            StateError: its placements are not those of the param; or that of a margin, is not of copies.
        """
        found: dict[str, Any] = {}
        for key, value in state.items():
            if not is_dtensor(value):
                found[key] = value
                continue
            here = place_of(param) or "a plain tensor"
            fits = not cut_dims(value) if key in margins else _place(value) == here
            if not fits:
                wanted = "needed whole on every rank, Replicate()" if key in margins else f"the param is {here}"
                raise StateError(
                    "load at the same tensor-parallel size and plan, on the rank that saved the state, or "
                    f"redistribute() it first: {key} of {name} is a DTensor {_place(value)}, {wanted}. "
                    "Otherwise each rank would take other elements than its own, so nothing was loaded."
                )
            found[key] = value._local_tensor
        return found


def shown_as(param: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Returns the DTensor with the local tensor ``tensor`` and the placements of ``param``; of a plain param it."""
    if not is_dtensor(param):
        return tensor
    if tensor.storage_offset():  # torch.save fails for a DTensor whose local tensor is a view
        tensor = with_own_storage(tensor)
    meta = param._spec.tensor_meta._replace(dtype=tensor.dtype)
    return with_spec(tensor, replace(param._spec, tensor_meta=meta))


def with_spec(local: torch.Tensor, spec: Spec) -> torch.Tensor:
    """Returns the DTensor of this spec with the local tensor ``local``."""
    kind = sys.modules["torch.distributed.tensor"].DTensor  # a param's own class may be that of a guard
    found: torch.Tensor = kind(local, spec, requires_grad=False)
    return found


def _copied_over(mesh: DeviceMesh, tensor: torch.Tensor) -> torch.Tensor:
    """Returns a DTensor of which every rank of the mesh holds this copy."""
    module = sys.modules["torch.distributed.tensor"]
    found: torch.Tensor = module.DTensor.from_local(tensor, mesh, [module.Replicate()] * mesh.ndim, run_check=False)
    return found


def place_of(param: Any) -> str | None:
    """Returns the placement of a param, in words that ranks and files can compare; None for a plain tensor."""
    return _place(param) if is_dtensor(param) else None


def _place(tensor: DTensor) -> str:
    mesh = tensor.device_mesh
    shape, coordinate = tuple(tensor.shape), tuple(mesh.get_coordinate() or ())
    return f"of shape {shape}, placed {tuple(tensor.placements)} at {coordinate} of a mesh of {tuple(mesh.shape)}"


def is_counted_here(param: DTensor) -> bool:
    """True if this rank counts the elements of a DTensor: the first one of those that hold a copy."""
    pairs = zip(param.placements, param.device_mesh.get_coordinate(), strict=True)
    return all(coordinate == 0 or not placement.is_replicate() for placement, coordinate in pairs)


def cut_dims(param: DTensor) -> list[int]:
    """Returns the dimensions of its mesh along which a DTensor is cut: other ranks hold other elements there."""
    return [dim for dim, placement in enumerate(param.placements) if not placement.is_replicate()]


def box_of(param: Any, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns which elements of a param this rank holds: the first index in each dimension, and how many there are.

    Raises:
        BindingError: which elements a rank holds of a DTensor is unknown.
    """
    shape = tuple(param.shape)
    offsets, sizes = [0] * len(shape), list(shape)
    if not is_dtensor(param):
        return tuple(offsets), shape
    mesh = param.device_mesh
    for size, coordinate, placement in zip(mesh.shape, mesh.get_coordinate(), param.placements, strict=True):
        if placement.is_replicate():
            continue
        if type(placement) is not torch.distributed.tensor.Shard:
            raise BindingError(
                f"redistribute() {name} to Shard(...) or Replicate() placements first: it is placed {placement} of "
                f"{tuple(param.placements)}, whose ranks hold elements that do not form a box of the param."
            )
        dim = placement.dim % len(shape)
        first, sizes[dim] = chunk_of(sizes[dim], size, coordinate)
        offsets[dim] += first
    local = tuple(param._local_tensor.shape)
    if local != tuple(sizes):
        raise BindingError(
            f"make {name} by distribute_tensor(), or cut it as torch.chunk does: this rank holds a tensor of shape "
            f"{local}, and {tuple(param.placements)} of {shape} would be {tuple(sizes)} here. It cannot be told which "
            "elements these are."
        )
    return tuple(offsets), tuple(sizes)


def chunk_of(length: int, ranks: int, rank: int) -> tuple[int, int]:
    """Returns the first index and the length of a rank's chunk of a dimension, as ``torch.chunk`` divides it."""
    step = -(-length // ranks)
    first = min(rank * step, length)
    return first, min(step, length - first)


def slice_number(param: DTensor, apart: int | None = None) -> int:
    """Returns the number of this rank's slice of a DTensor; ranks that hold copies have the same number.

    Args:
        apart: of an expert, the first rank that holds it: ranks with other experts have other numbers. It differs
            between copies on the mesh, so these go without.
    """
    mesh, number = param.device_mesh, 0
    if apart is not None and not any(placement.is_replicate() for placement in param.placements):
        number = apart
    for size, coordinate, placement in zip(mesh.shape, mesh.get_coordinate(), param.placements, strict=True):
        if not placement.is_replicate():
            number = number * size + coordinate
    return number


def mesh_of(param: DTensor, name: str) -> DeviceMesh:
    """Returns the mesh of a DTensor.

    Raises:
        BindingError: its ranks hold parts of a sum, and none holds its values.
    """
    if any(placement.is_partial() for placement in param.placements):
        raise BindingError(
            f"give a param that is sharded or replicated: {name} is a DTensor with placements {param.placements}, "
            "whose ranks hold parts of a sum. Updates of parts do not add up to the update of the sum."
        )
    mesh: DeviceMesh = param.device_mesh
    return mesh


def local_tensor(tensor: Any) -> torch.Tensor:
    """Returns this rank's tensor of a DTensor; any other tensor itself."""
    found: torch.Tensor = tensor._local_tensor if is_dtensor(tensor) else tensor
    return found


def local_gradient(param: torch.nn.Parameter) -> torch.Tensor | None:
    """Returns this rank's tensor of the param's gradient, summed or not; None without a gradient."""
    return None if param.grad is None else local_tensor(param.grad)


def _check_gradient(param: DTensor) -> None:
    """Raises ShardoptError if it is unknown which elements of a gradient are this rank's."""
    grad = param.grad
    if not is_dtensor(grad) or grad.device_mesh != param.device_mesh:
        found = f"of mesh {grad.device_mesh}" if is_dtensor(grad) else type(grad).__name__
        raise ShardoptError(
            f"assign a DTensor with the param's mesh: the gradient of a DTensor param of shape {tuple(param.shape)} is "
            f"a {found}, and which of its elements are this rank's is not known."
        )


def _sums_to_make(param: DTensor) -> list[int]:
    """Returns the dimensions of the mesh over which a gradient is to be summed; none if it must be redistributed."""
    pairs = list(zip(param.grad.placements, param.placements, strict=True))
    dims = [dim for dim, (found, wanted) in enumerate(pairs) if found != wanted]
    plain = all(pairs[dim][0].is_partial("sum") and pairs[dim][1].is_replicate() for dim in dims)
    return dims if plain else []


@torch.no_grad()
def placed_as(param: Any, tensor: Any) -> torch.Tensor:
    """Returns the tensor as ``param`` is placed. Collective over the mesh if it is a DTensor placed otherwise."""
    found: torch.Tensor = tensor
    if is_dtensor(tensor) and not is_dtensor(param):
        found = tensor.full_tensor()
    elif is_dtensor(tensor) and tensor.placements != param.placements:
        found = tensor.redistribute(param.device_mesh, param.placements)
    return found


def placed_gradient(param: DTensor) -> torch.Tensor:
    """Returns the gradient of a DTensor param, placed as the param. Collective over the mesh if its placements differ.

    Raises:
        ShardoptError: the gradient is not a DTensor of the param's mesh.
    """
    _check_gradient(param)
    return placed_as(param, param.grad)
