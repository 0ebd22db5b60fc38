"""A bucket whose sum rests where it is not reduced: in host memory, beside a device.

::

    device   | sum 0 | sum 1 | sum 2 |            the first backward of a step: sums go down as they are made
    down             | 0     | 1     | 2

    up       | 0     | 1     | 2     |            a later one: each comes up while the bucket before it is summed,
    device           | += 0  | += 1  | += 2       is added to there, as if it had never left, and goes down again
    down                     | 0     | 1     | 2

Within a round a sum is in a slot on the device, which the next one takes behind the copy. A round is over when all
sums are down: between rounds they are plain tensors in host memory, and nobody who looks at one has anything to wait
for.
"""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Generic, Protocol, TypeVar

import torch

from .comm.reduce_scatter import Job
from .comm.transport import Transport
from .mesh import Mesh
from .reduce_buckets import KeptBucket


class Loan(Protocol):
    """A slot on the device.

    Attributes:
        here: 1D, as long as the sum that it was lent for.
    """

    here: torch.Tensor


LoanT = TypeVar("LoanT", bound=Loan)


class Landing(Protocol[LoanT]):
    """Where sums rest, and the slots in which they are made."""

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """1D: where a sum will rest."""

    def lend(self, resting: torch.Tensor) -> LoanT:
        """A slot for a sum such as this one. It holds anything, and kernels from now on may write to it."""

    def bring(self, resting: torch.Tensor) -> LoanT:
        """A slot with a copy of a sum that is at rest; for kernels behind ``arrive``."""

    def arrive(self, loan: LoanT, /) -> None:
        """Kernels from now on find in the slot what was brought."""

    def take(self, loan: LoanT, resting: torch.Tensor, /) -> None:
        """Copies what kernels so far made in the slot to where it rests. The slot is lent no more."""

    def settle(self) -> None:
        """The host waits until nothing is copied."""


class RestingBucket(KeptBucket, Generic[LoanT]):
    """A bucket whose sum rests where a landing keeps it, and is added to by later backwards."""

    at_rest = True

    # Takes each sum, 1D [shard_numel] on the device, before it leaves.
    on_sum: Callable[[torch.Tensor], None]

    def __init__(
        self,
        numels: Sequence[int],
        shard_numel: int,
        dtype: torch.dtype,
        kept: torch.dtype,
        device: torch.device,
        mesh: Mesh,
        landing: Landing[LoanT],
    ):
        """As of :class:`ReducedBucket`; ``on_sum`` is to be set before the first round.

        Args:
            mesh: of one copy of the states: several would read each other's sums while they are reduced.
        """
        assert mesh.replicate.size == 1
        super().__init__(numels, shard_numel, dtype, device, mesh)
        self._landing = landing
        self.total = landing.zeros(shard_numel, kept)
        self._loan: LoanT | None = None  # while the sum is on the device

    @property
    def sums(self) -> list[torch.Tensor]:
        return [self.total]

    def window(self, replicas: Transport) -> None:
        return None

    def expect(self) -> None:
        if self._loan is None:
            self._loan = self._landing.bring(self.total)

    def _held(self) -> torch.Tensor:
        """The sum of earlier rounds, on the device."""
        self.expect()
        assert self._loan is not None
        self._landing.arrive(self._loan)
        return self._loan.here

    def zero(self, index: int) -> None:
        self._held()[self._own(index)].zero_()

    def job(self, buffer: torch.Tensor, add: bool) -> Job:
        if add:
            return Job(buffer, self._held(), add)
        self._loan = self._landing.lend(self.total)
        return Job(buffer, self._loan.here, add)

    def use(self, job: Job, arrived: AbstractSet[int]) -> None:
        loan, self._loan = self._loan, None
        assert loan is not None
        self.on_sum(loan.here)
        self._landing.take(loan, self.total)

    def settle(self) -> None:
        self._landing.settle()

    def leave(self) -> None:
        # What is copied to a slot must not outlive it.
        self._landing.settle()
        self._loan = None
