"""The two ways to keep a tensor until backward: whole, as autograd does, or 1/N of it on each of N ranks."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..domain.dtensors import Spec, with_spec
from ..errors import DisagreementError
from .channel import Act, Channel, Row
from .checksum import Sums
from .geometry import Geometry


class Whole:
    """The tensor itself. As without hooks, backward refuses it once it was written to.

    Attributes:
        nbytes: of memory, on this rank.
        tier: where it rests: "device", which is a CPU for a tensor of a CPU, or "host".
    """

    tier = "device"

    def __init__(self, tensor: torch.Tensor, nbytes: int = 0):
        """``nbytes``: of its elements' memory; 0: not counted."""
        self.nbytes = nbytes
        # Not the tensor where an operation made it: the operation saves it, and would keep itself alive.
        self._tensor = tensor if tensor.is_leaf else tensor.detach()
        self._version = tensor._version

    def unpack(self) -> torch.Tensor:
        """Returns the tensor, for backward."""
        if self._tensor._version != self._version:
            # torch checks this only for tensors that no hook has packed.
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{type(self._tensor).__name__} {list(self._tensor.shape)} is at version {self._tensor._version}; "
                f"expected version {self._version} instead. Write to a copy of it, or after backward."
            )
        return self._tensor


@dataclass(frozen=True, eq=False)
class Name:
    """By which ranks know that they gather the same tensor."""

    position: int
    options: int  # digest
    sums: Sums
    sum_index: int  # of the tensor's checksum

    def row(self, act: Act, geometry: Geometry) -> Row:
        """Waits for the checksum, where a device computes it."""
        return Row(act, self.position, geometry.numel, geometry.nbytes, self.sums.read(self.sum_index), self.options)


class Sharded:
    """This rank's slice. All ranks unpack in the same order: that of backward."""

    def __init__(
        self,
        channel: Channel,
        name: Name,
        geometry: Geometry,
        spec: Spec | None,
        shard: torch.Tensor,
        differed: Callable[[], None],
    ):
        """
        Args:
            spec: of the DTensor whose local tensor it is, if it is one's.
            differed: is called on all ranks if the slices turn out to be of tensors that are not the same.
        """
        self._channel, self._name, self._geometry, self._spec = channel, name, geometry, spec
        self._shard, self._differed = shard, differed

    @property
    def nbytes(self) -> int:
        return self._shard.nbytes

    @property
    def tier(self) -> str:
        return "device" if self._shard.device == self._geometry.device else "host"

    @torch.no_grad()
    def unpack(self) -> torch.Tensor:
        """Collective: gathers the tensor. Its slice stays, for a graph that is retained.

        Raises:
            DisagreementError: the ranks gather different tensors, or kept slices of different values.
            CommunicationError: a rank died, or does not run this backward.
        """
        geometry = self._geometry
        rows = self._channel.meet(self._name.row(Act.GATHER, geometry))
        if len({row.checksum for row in rows}) > 1:
            self._differed()
            raise self._are_different(rows)
        size = self._shard.numel() * self._channel.ranks.size
        memory = torch.empty(geometry.lead_bytes + size, dtype=torch.uint8, device=geometry.device)
        self._channel.gather(self._shard, memory[geometry.lead_bytes :])
        tensor = geometry.laid_out(memory)
        return tensor if self._spec is None else with_spec(tensor, self._spec)

    def _are_different(self, rows: list[Row]) -> DisagreementError:
        others = [rank for rank, row in enumerate(rows) if row.checksum != rows[0].checksum]
        return DisagreementError(
            "call zero_grad() and take this step again: the tensor stays whole from now on. Or give "
            "partition_activations(check=True), which compares each tensor before it is partitioned. "
            f"Tensor {self._name.position} that the `with` kept, {self._geometry.dtype} of {self._geometry.shape}, was "
            f"the same on all ranks when they compared it, and now differs between rank 0 and rank {others[0]}: "
            "backward would have used a mixture."
        )


Kept = Whole | Sharded  # what autograd holds in place of a tensor
