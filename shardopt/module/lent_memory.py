"""Memory of a unit that leaves its module: a param that a forward returns, or a state dict shows.

The memory is freed once the unit is resharded, and all params of a bucket have one storage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..domain.dtensors import is_dtensor, local_tensor, shown_as
from ..domain.members import plain_tensors
from ..tensors.inner_tensors import is_wrapper, saved_beside, with_inside
from ..tensors.strides import with_own_storage
from .hooks import KeepingHook, ModuleHook, remove_all

if TYPE_CHECKING:
    from ..domain.sharded_params import ShardedParams
    from ..units.unit import Unit


def lend_memory(units: Iterable[Unit], tensors: Iterable[torch.Tensor]) -> bool:
    """True if one of the tensors is a param of these units, or a view of one."""
    for tensor in tensors:
        own = tensor if type(tensor) is torch.Tensor else local_tensor(tensor)
        if not torch._C._functorch.is_functorch_wrapped_tensor(own):  # in vmap() or grad() a tensor has no memory
            address = own.data_ptr()
            for unit in units:
                for each in unit.buckets:
                    if address and 0 <= address - each.bucket.flat.data_ptr() < each.bucket.memory.nbytes:
                        return True
    return False


class StateDictHooks:
    """The hooks on the modules that own sharded params."""

    def __init__(self) -> None:
        self._owners: dict[nn.Module, tuple[Unit, ...]] = {}  # the units of the params that a module owns itself
        self._hooks: list[Any] = []
        self._keeping: list[Any] = []  # hooks that keep the slices as long as the model

    def attach(self, root: nn.Module, every: Sequence[ShardedParams]) -> None:
        """Puts hooks on the modules that own some of these params, in place of those from before."""
        self.close()
        where = {param: gathered.unit for each in every for param, gathered in each.where.items()}
        for module in root.modules():
            owned = [where[param] for param in module.parameters(recurse=False) if param in where]
            if owned:
                self._owners[module] = tuple(dict.fromkeys(owned))
        for module in self._owners:
            self._hooks.append(module.register_state_dict_post_hook(ModuleHook(self._part_storages)))
            self._keeping.append(module.register_state_dict_post_hook(KeepingHook(every)))

    def _part_storages(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
        """Gives gathered params in a state dict storages of their own, as whole params have; see ``Bucket``."""
        for name in (*module._parameters, *saved_beside(module)):
            shown = state_dict.get(prefix + name)
            is_plain = type(shown) is torch.Tensor or is_wrapper(shown)
            if shown is None or not is_plain or not lend_memory(self._owners.get(module, ()), plain_tensors(shown)):
                continue
            if is_dtensor(shown):
                state_dict[prefix + name] = shown_as(shown, with_own_storage(local_tensor(shown)))
            else:
                state_dict[prefix + name] = with_inside(shown, with_own_storage)

    def leave_slices(self) -> None:
        """Leaves the slices to the model: :meth:`close` removes no hook that keeps them.

        Else they would be left to the threads that serve them, and lost once those end (dropped_at_stage_3).
        """
        self._keeping = []

    def close(self) -> None:
        """Removes the hooks."""
        remove_all(self._hooks)
        remove_all(self._keeping)
        self._owners = {}
