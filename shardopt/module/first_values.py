"""The values that training begins with: all ranks take rank 0's, and what is on the meta device gets some."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..domain.agreement import checksum
from ..domain.members import plain_tensors, tensors_of
from ..errors import BindingError
from ..tensors.unsharded_guard import is_sharded
from .materialize import give_devices, give_values
from .running import in_backward

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..domain.called import CalledModule
    from ..partition.comm.group import Ranks
    from .coverage import Coverage
    from .materialize import DeferredInit


class FirstValues:
    """The values of a module's params and buffers while it is bound.

    Attributes:
        fresh: params and buffers that were on the meta device and have no values yet.
    """

    def __init__(self, called: Sequence[CalledModule], coverage: Coverage):
        self._module, self._called, self._coverage = coverage.module, called, coverage
        self.fresh: frozenset[torch.Tensor] = frozenset()

    def give_devices(self, ranks: Ranks) -> None:
        """Moves params and buffers from the meta device to the training device; they are fresh from now on."""
        self.fresh |= frozenset(give_devices(self._module, ranks))

    def give(self, init: DeferredInit) -> None:
        """Collective: gives fresh tensors their values, on all ranks or none. See :func:`materialize.give_values`."""
        give_values(self._module, list(self.fresh), self._coverage.domains[0], init)
        self.fresh = frozenset()

    def check_given(self) -> None:
        """Raises BindingError if a forward would use what has no values."""
        if self.fresh:
            raise BindingError(
                "call optimizer.bind() again, on every rank: it failed before all params that were on the meta device "
                "had values, and this forward would compute with zeros."
            )

    def describe(self) -> dict[str, Any]:
        """Returns what ranks must have in common before values are shared; JSON-able."""
        named = (*self._module.named_parameters(), *self._module.named_buffers())
        experts = self._coverage.domains[1:]
        apart = {tensor for domain in experts for tensor in tensors_of(self._module, domain.members)}
        apart |= self._coverage.of_each_rank()
        shown = ((name, tensor) for name, tensor in named if tensor not in apart and not is_sharded(tensor))
        return {name: [list(tensor.shape), str(tensor.dtype)] for name, tensor in shown}

    def describe_bits(self) -> dict[str, int]:
        """Returns what ranks must have in common if a backward binds: no rank may get other values in it."""
        if not in_backward() or all(called.ddp for called in self._called):
            return {}
        own = tensors_of(self._module, self._coverage.domains[0].members)
        params = {tensor for tensor in own if isinstance(tensor, nn.Parameter) and not is_sharded(tensor)}
        named = ((name, param) for name, param in self._module.named_parameters() if param in params)
        shown = ((name, [each for each in plain_tensors(param) if each.element_size() > 1]) for name, param in named)
        return {name: sum(checksum(each.detach().reshape(-1)) for each in inner) for name, inner in shown}

    def share(self) -> None:
        """Collective: broadcasts rank 0's params and buffers, as DDP does when it wraps a module.

        Those of experts are broadcast by the first rank that holds them.
        """
        if in_backward() or all(called.ddp for called in self._called):
            return
        apart = self._coverage.of_each_rank()
        for domain in self._coverage.domains:
            # Another optimizer may have sharded some params at stage 3: their values agree already.
            tensors = tensors_of(self._module, domain.members)
            own = [tensor for tensor in tensors if not is_sharded(tensor) and tensor not in apart]
            inner = [each for tensor in own for each in plain_tensors(tensor)]
            domain.mesh.world.broadcast(inner, "sharing rank 0's params")
