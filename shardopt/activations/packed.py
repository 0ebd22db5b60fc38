"""The two ways to keep a tensor until backward: whole, as autograd does, or 1/N of it on each of N ranks."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..errors import DisagreementError
from .channel import Act, Channel, Row
from .tensor_meta import TensorMeta


class WholeActivation:
    """The tensor itself. As without hooks, backward refuses it once it was written to.

    Attributes:
        nbytes: of memory, on this rank.
        tier: where it lies: "device", which is a CPU for a tensor of a CPU, or "host".
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
class Fingerprint:
    """The facts by which ranks know that they gather the same tensor."""

    position: int
    meta: TensorMeta
    options: int  # digest
    checksum: Callable[[], int]  # waits for it, where a device computes it

    def row(self, act: Act) -> Row:
        return Row(act, self.position, self.meta.numel, self.meta.nbytes, self.checksum(), self.options)


class PartitionedActivation:
    """This rank's slice. All ranks unpack in the same order: that of backward."""

    def __init__(
        self, channel: Channel, fingerprint: Fingerprint, shard: torch.Tensor, on_difference: Callable[[], None]
    ):
        """
        Args:
            on_difference: is called on all ranks if the slices turn out to be of tensors that are not the same.
        """
        self._channel, self._fingerprint = channel, fingerprint
        self._shard, self._on_difference = shard, on_difference

    @property
    def nbytes(self) -> int:
        return self._shard.nbytes

    @property
    def tier(self) -> str:
        return "device" if self._shard.device == self._fingerprint.meta.device else "host"

    @torch.no_grad()
    def unpack(self) -> torch.Tensor:
        """Collective: gathers the tensor. Its slice stays, for a graph that is retained.

        Raises:
            DisagreementError: the ranks gather different tensors, or kept slices of different values.
            CommunicationError: a rank died, or does not run this backward.
        """
        meta = self._fingerprint.meta
        rows = self._channel.exchange_rows(self._fingerprint.row(Act.GATHER))
        if len({row.checksum for row in rows}) > 1:
            self._on_difference()
            raise self._are_different(rows)
        size = self._shard.numel() * self._channel.ranks.size
        memory = torch.empty(meta.lead_bytes + size, dtype=torch.uint8, device=meta.device)
        self._channel.gather(self._shard, memory[meta.lead_bytes :])
        return meta.restore(memory)

    def _are_different(self, rows: list[Row]) -> DisagreementError:
        meta, others = (
            self._fingerprint.meta,
            [rank for rank, row in enumerate(rows) if row.checksum != rows[0].checksum],
        )
        return DisagreementError(
            "call zero_grad() and take this step again: the tensor stays whole from now on. Or give "
            "partition_activations(check=True), which compares each tensor before it is partitioned. "
            f"Tensor {self._fingerprint.position} that the `with` kept, {meta.dtype} of {meta.shape}, was "
            f"the same on all ranks when they compared it, and now differs between rank 0 and rank {others[0]}: "
            "backward would have used a mixture."
        )


PackedActivation = WholeActivation | PartitionedActivation  # what autograd holds in place of a tensor
