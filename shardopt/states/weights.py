"""The weights of a module by name, in the order of its state dict, and where each of them lies."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..arguments import texts
from ..domain.dtensors import is_dtensor, local_tensor, shown_as
from ..domain.param_names import without_wrappers
from ..errors import ShardoptError
from ..tensors.inner_tensors import is_packed, is_wrapper, named_inside, saved_beside
from ..tensors.unsharded_guard import is_sharded

if TYPE_CHECKING:
    from ..domain.domain import Domain
    from ..domain.param import Group
    from ..domain.shard import Shard
    from ..partition.comm.transport import Transport


@dataclass(frozen=True, eq=False)
class Place:
    """The shard that a param is cut into, and the ranks that have its slices."""

    shard: Shard
    index: int
    transport: Transport


@dataclass(frozen=True, eq=False)
class Weight:
    """One param or persistent buffer.

    Attributes:
        tensor: as the module has it.
        dtype: of what is given out.
        place: None if this rank has it whole.
        inside: of a quantized weight that is sharded: its inner tensors, each as a weight.
    """

    name: str
    tensor: torch.Tensor
    dtype: torch.dtype
    place: Place | None
    inside: Mapping[torch.Tensor, Weight] = field(default_factory=dict)

    @property
    def parts(self) -> Sequence[Weight]:
        """What is gathered of it."""
        return tuple(self.inside.values()) or (self,)

    @property
    def nbytes(self) -> int:
        if self.inside:
            return sum(each.nbytes for each in self.inside.values())
        return self.tensor.numel() * self.dtype.itemsize

    @property
    def told(self) -> list[str]:
        """What ranks compare of it."""
        own = [str(tuple(self.tensor.shape)), str(self.dtype), str(self.place is not None)]
        return own + [word for each in self.inside.values() for word in each.told]

    def meta(self) -> torch.Tensor:
        """Returns shape and dtype, as a tensor without values."""
        return torch.empty(self.tensor.shape, dtype=self.dtype, device="meta")

    def whole(self, local: torch.Tensor | None) -> torch.Tensor:
        """Returns a copy that this rank keeps. Collective over the mesh of a DTensor.

        Args:
            local: what was gathered; None: this rank's own.
        """
        if local is None:
            own = local_tensor(self.tensor.detach())
            if type(own) is not torch.Tensor and type(own) is not nn.Parameter:
                return own  # values of a subclass lie in other tensors: it goes out as it is
            local = own.to(self.dtype, copy=True)
        if is_dtensor(self.tensor):
            found: torch.Tensor = shown_as(self.tensor, local).full_tensor()  # type: ignore[attr-defined]
            return found
        return local


def weights_of(
    module: nn.Module | None,
    groups: Sequence[Group],
    domains: Sequence[Domain],
    dtype: torch.dtype | None,
    names: object,
    as_they_are: Collection[str] = (),
) -> list[Weight]:
    """Returns the weights that are asked for, tied ones once, under their first name.

    Args:
        module: None: the params of named groups, and no buffers.
        domains: of all optimizers of the module.
        dtype: of those of floating point; None: their own.
        as_they_are: names of those that keep their dtype; with fp32 those that ``compute_dtype`` rounds have all bits.

    Raises:
        ShardoptError: params have no names.
        TypeError, ValueError: ``dtype`` is none of floating point, or ``names`` has others than the module.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"weights(dtype=) takes a dtype of floating point (torch.bfloat16), or None, found {dtype!r}.")
    coded: set[torch.Tensor] = set()
    named = dict(_named_in(groups) if module is None else _named(module, coded))
    asked = named if names is None else _asked(texts(names, "weights(names=)", '["head.weight"]'), named)

    def dtype_of(name: str, each: torch.Tensor) -> torch.dtype | None:
        if not _is_cast(each) or each in coded:
            return None
        keeps = name in as_they_are and not (dtype is torch.float32 and _is_rounded(each, domains))
        return None if keeps else dtype

    return [_weight(name, each, dtype_of(name, each), domains) for name, each in named.items() if name in asked]


def _weight(name: str, tensor: torch.Tensor, dtype: torch.dtype | None, domains: Sequence[Domain]) -> Weight:
    if is_sharded(tensor) and is_wrapper(tensor) and not is_dtensor(tensor):
        inside = {each: _weight(inner, each, None, domains) for inner, each in named_inside(tensor, name)}
        return Weight(name, tensor, tensor.dtype, None, inside)
    return Weight(name, tensor, dtype or _dtype_seen(tensor, domains), _place_of(tensor, domains, dtype))


def _dtype_seen(tensor: torch.Tensor, domains: Sequence[Domain]) -> torch.dtype:
    """Returns the dtype in which a forward sees a param or buffer."""
    param: Any = tensor
    for domain in domains:
        if domain.sharded is not None and param in domain.sharded.where:
            return domain.sharded.where[param].bucket.dtype
        if param in domain.entries:
            return domain.entries[param].shard.bucket.dtype
    return tensor.dtype


def _is_rounded(tensor: torch.Tensor, domains: Sequence[Domain]) -> bool:
    """True of a param that ``compute_dtype`` rounds, and whose master has all bits."""
    param: Any = tensor
    is_cast = any(param in domain.entries and domain.entries[param].shard.is_cast for domain in domains)
    return is_cast or (tensor.dtype is torch.float32 and _dtype_seen(tensor, domains) is not torch.float32)


def _asked(names: Sequence[str], named: Collection[str]) -> Collection[str]:
    for name in names:
        if name not in named:
            near = ", ".join(get_close_matches(name, named, 3, 0.0))
            raise ValueError(
                f"weights(names=) takes names of optimizer.weights_metadata(), found {name!r}, which it does not have: "
                f"tied weights have their first name, and buffers that are not saved have none. Near: {near}."
            )
    return frozenset(names)


def _is_cast(tensor: torch.Tensor) -> bool:
    is_dense = tensor.is_floating_point() and tensor.layout is torch.strided
    return is_dense and (is_dtensor(tensor) or not is_wrapper(tensor))


def _named(module: nn.Module, coded: set[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields params, persistent buffers, and what modules save beside them, in the order of ``state_dict()``.

    Args:
        coded: the tensors that no dtype may change are added: codes, and their scales.
    """
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    seen: set[torch.Tensor] = set()
    for prefix, each in inner.named_modules():
        own: list[tuple[str, Any]] = [*each.named_parameters("", recurse=False)]
        own += [
            pair for pair in each.named_buffers("", recurse=False) if pair[0] not in each._non_persistent_buffers_set
        ]
        beside = saved_beside(each)
        if beside:
            own += beside.items()
            coded.update(param for param in each._parameters.values() if param is not None and is_packed(param))
            coded.update(beside.values())
        for name, tensor in own:
            if tensor not in seen:
                seen.add(tensor)
                yield without_wrappers(f"{prefix}.{name}" if prefix else name), tensor


def _named_in(groups: Sequence[Group]) -> Iterator[tuple[str, torch.Tensor]]:
    for group in groups:
        if "param_names" not in group:
            raise ShardoptError(
                "hand the module over (ShardedAdamW(model) or module=model), or give model.named_parameters(): weights "
                "go out by name, and the params of this optimizer have none. Nothing was gathered."
            )
        yield from zip(group["param_names"], group["params"], strict=True)


def _place_of(tensor: torch.Tensor, domains: Sequence[Domain], dtype: torch.dtype | None) -> Place | None:
    for domain in domains:
        sharded = domain.sharded
        found = None if sharded is None else sharded.place_of(tensor)
        if sharded is not None and found is not None:
            return Place(*found, sharded.transport)
        entry = domain.entries.get(tensor)  # type: ignore[call-overload]
        # The module has it rounded; masters have all its bits.
        is_cast = entry is not None and entry.shard.is_cast and entry.shard.exact_slice is None
        is_whole = domain.exact is not None or domain.is_averaged
        if entry is not None and is_cast and entry.shard.gathered is None and not is_whole:
            return None if dtype in (None, tensor.dtype) else Place(entry.shard, entry.index, domain.transport)
        if entry is not None and entry.shard.exact_slice is not None and not domain.is_averaged:
            return Place(entry.shard, entry.index, domain.transport)
    return None
