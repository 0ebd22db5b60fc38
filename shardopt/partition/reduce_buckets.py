"""A bucket as it is reduced: where gradients lie in its buffer, what is summed, and what becomes of the sum."""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

import torch

from ..tensors.strides import in_storage_order
from .comm.all_gather import Window
from .comm.reduce_scatter import Job
from .comm.transport import Transport
from .layout import BucketLayout
from .memory import zeros
from .mesh import Mesh
from .streams import last_used


class FilledBucket:
    """Where the gradients of one bucket lie in the buffer that they are reduced in."""

    def __init__(self, layout: BucketLayout, dtype: torch.dtype, device: torch.device):
        """``dtype`` of the reduction."""
        self.dtype, self.device = dtype, device
        self.offsets, self.buffer_numel = layout.offsets, layout.numel

    @property
    def num_params(self) -> int:
        return len(self.offsets) - 1

    def is_filled_by(self, grad: torch.Tensor, strides: tuple[int, ...]) -> bool:
        """Whether the gradient's own memory is what the buffer would be: the bucket's only param, in its order."""
        return (
            grad.numel() == self.buffer_numel
            and self.num_params == 1
            and grad.dtype is self.dtype
            and in_storage_order(grad, strides) is grad
        )

    def expect(self) -> None:
        """The next round of this bucket will add to its sum: what takes time to get there may begin."""

    def settle(self) -> None:
        """At the end of a round, waits until its sum is where it is kept."""

    def leave(self) -> None:
        """The round was given up; no reduction of this bucket goes on."""


class KeptBucket(FilledBucket):
    """A bucket whose sum is kept, and added to by later backwards.

    Attributes:
        total: 1D [shard_numel], this rank's slice of the sum over ranks and backwards; the same memory for life. To be
            read and written between rounds.
        at_rest: whether that is in host memory beside a device.
    """

    takes_more = True  # what comes when the bucket has left
    at_rest = False
    total: torch.Tensor

    def __init__(self, numels: Sequence[int], shard_numel: int, dtype: torch.dtype, device: torch.device, mesh: Mesh):
        """As of :class:`ReducedBucket`."""
        super().__init__(BucketLayout(tuple(numels), mesh.first.size), dtype, device)
        self._mesh, self._shard_numel = mesh, shard_numel

    @property
    def sums(self) -> list[torch.Tensor]:
        """What is allocated."""
        raise NotImplementedError

    def _own(self, index: int) -> slice:
        """What the slice holds of one param."""
        start = self._mesh.shard.rank * self._shard_numel
        first, last = (max(offset - start, 0) for offset in self.offsets[index : index + 2])
        return slice(first, last)

    def window(self, replicas: Transport) -> Window | None:
        """Collective: on the sum, for the other holders of the same slice."""
        raise NotImplementedError

    def zero(self, index: int) -> None:
        """In a round, forgets what the slice holds of one param."""
        raise NotImplementedError

    def job(self, buffer: torch.Tensor, add: bool) -> Job:
        """The reduction of a full buffer over the first direction of the mesh."""
        raise NotImplementedError

    def use(self, job: Job, arrived: AbstractSet[int]) -> None:
        """The job is done; ``arrived`` are the params that this rank had in it."""
        raise NotImplementedError


class ReducedBucket(KeptBucket):
    """A bucket whose sum is kept where it is reduced."""

    def __init__(
        self,
        numels: Sequence[int],
        shard_numel: int,
        dtype: torch.dtype,
        kept: torch.dtype,
        device: torch.device,
        mesh: Mesh,
    ):
        """
        Args:
            numels: of the params.
            shard_numel: of this rank's slice.
            dtype: in which gradients travel.
            kept: in which their sum is kept: fp32, or what that is rounded to after each reduction.
        """
        super().__init__(numels, shard_numel, dtype, device, mesh)
        # The holders of one slice sum it in parts of equal length, so it is as long as a whole number of them.
        parts = BucketLayout((shard_numel,), mesh.replicate.size)
        self.part_numel, self.part = parts.shard_numel, parts.shard_slice(mesh.replicate.rank)
        self.padded = zeros(parts.numel, kept, device)
        self.total = self.padded[:shard_numel]
        # The sum within one copy of the states, where there are several copies of several slices: all of it in fp32, as
        # the sum over copies is yet to come.
        self._partial = zeros(parts.numel, torch.float32, device) if mesh.is_hybrid else None

    @property
    def sums(self) -> list[torch.Tensor]:
        return [self.padded] if self._partial is None else [self.padded, self._partial]

    def zero(self, index: int) -> None:
        self.total[self._own(index)].zero_()

    def window(self, replicas: Transport) -> Window | None:
        return replicas.open(self.padded, self.part_numel)

    def use(self, job: Job, arrived: AbstractSet[int]) -> None:
        """Nothing: the sum stays where it is."""

    def job(self, buffer: torch.Tensor, add: bool) -> Job:
        if self._partial is not None:
            return Job(buffer, self._partial[: self._shard_numel], add=False)
        return Job(buffer, self.total if self._mesh.shard.size > 1 else self.padded[self.part], add)

    def job_across(self, add: bool) -> Job:
        """The reduction over the second direction, behind the first."""
        assert self._partial is not None
        return Job(self._partial, self.padded[self.part], add)


class PassingBucket(FilledBucket):
    """A bucket whose sum is used as soon as it is there, and kept by nobody.

    One rank's sum is the buffer itself, in its own dtype; that of several ranks is fp32.
    """

    takes_more = False  # the sum was used
    sums: Sequence[torch.Tensor] = ()

    # Takes a sum, 1D, as long as this rank's slice at least, and which params this rank had in it.
    on_sum: Callable[[torch.Tensor, AbstractSet[int]], None]

    def __init__(self, numels: Sequence[int], shard_numel: int, dtype: torch.dtype, device: torch.device, mesh: Mesh):
        """As of :class:`ReducedBucket`; ``on_sum`` is to be set before the first round."""
        super().__init__(BucketLayout(tuple(numels), mesh.shard.size), dtype, device)
        assert not mesh.is_hybrid
        self._sum_numel = shard_numel if mesh.shard.size > 1 else self.buffer_numel
        self._is_alone = mesh.world.size == 1

    def window(self, replicas: Transport) -> Window | None:
        return None

    def use(self, job: Job, arrived: AbstractSet[int]) -> None:
        self.on_sum(job.target, arrived)
        last_used(job.target)

    def job(self, buffer: torch.Tensor, add: bool) -> Job:
        """The reduction of a full buffer."""
        assert not add
        total = buffer if self._is_alone else torch.empty(self._sum_numel, dtype=torch.float32, device=self.device)
        return Job(buffer, total, add)
