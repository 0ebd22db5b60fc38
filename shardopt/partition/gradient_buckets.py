"""The gradients of one bucket: their place in the buffer that is reduced, and what becomes of their sum.

======================  ================================================================================================
:class:`DeviceSum`      stays on the device where it is reduced, and later backwards add to it
:class:`HostSum`        the same, but offloaded to host memory between rounds (``domain/host_sum.py``)
:class:`PassingSum`     is used as soon as it is reduced (``release_gradients``), and then dropped
======================  ================================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Protocol

import torch

from ..tensors.strides import in_storage_order
from .comm.all_gather import Window
from .comm.reduce_scatter import Blank, CodedReduction, Reduction
from .layout import BucketLayout
from .memory import zeros
from .streams import last_used

if TYPE_CHECKING:
    from .comm.reduce_scatter import Code
    from .mesh import Mesh

Open = Callable[[torch.Tensor, int], Window]
"""See :meth:`Transport.open`."""


class Sink(Protocol):
    """Holds or uses the sum of one bucket's gradients. A sink that has nothing to do for a call inherits it.

    Attributes:
        accumulates: True if later backwards add to the sum.
        is_on_host: True if the sum lies in host memory between rounds, and params lie on a device.
        stays: True if the sum stays where it is reduced; else :attr:`Reducer.on_sum` takes it there.
    """

    accumulates: bool = True
    is_on_host: bool = False
    stays: bool = True

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """The tensors that stay allocated between rounds."""
        return ()

    def window(self, open_among_replicas: Open) -> Window | None:
        """Collective: opens a window on this sum for the ranks that replicate it. None: no rank reads it."""
        return None

    def prefetch(self) -> None:
        """Starts to load the sum to the device: the next reduction of this bucket adds to it."""
        return

    def zero(self, part: slice) -> None:
        """Zeroes a part of the sum within a round."""
        return

    def reduction(self, buffer: torch.Tensor, add: bool) -> Reduction:
        """Returns the reduction of a full buffer over the first direction of the mesh."""

    def use(self, reduction: Reduction) -> None:
        """Takes the result of a finished reduction."""
        return

    def wait_for_copies(self) -> None:
        """The host waits, at the end of a round, until the sum is in its memory."""
        return

    def abandon(self) -> None:
        """Forgets the round after an error; no reduction of this bucket goes on."""
        return


class DeviceSum(Sink):
    """Keeps the sum on the device where it is reduced.

    Attributes:
        total: 1D [shard_numel], this rank's slice of the sum over ranks and backwards. It may be read and written
            between rounds; its memory never moves.
    """

    def __init__(self, shard_numel: int, dtype: torch.dtype, device: torch.device, mesh: Mesh):
        """
        Args:
            shard_numel: elements of this rank's slice.
            dtype: of the sum between reductions: fp32, or the format that each reduction rounds it to.
        """
        self._mesh, self._shard_numel = mesh, shard_numel
        # Ranks that replicate one slice reduce it in parts of equal length: the sum is padded to whole parts.
        parts = BucketLayout((shard_numel,), mesh.replicate.size)
        self.part_numel, self._part = parts.shard_numel, parts.shard_slice(mesh.replicate.rank)
        self._padded = zeros(parts.numel, dtype, device)
        self.total = self._padded[:shard_numel]
        self._target = self.total if mesh.shard.size > 1 else self._padded[self._part]
        # Hybrid sharding: the sum within one copy of the states. All of it is fp32, as the sum over copies follows.
        self._partial = zeros(parts.numel, torch.float32, device) if mesh.is_hybrid else None

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        return [self._padded] if self._partial is None else [self._padded, self._partial]

    def zero(self, part: slice) -> None:
        self.total[part].zero_()

    def window(self, open_among_replicas: Open) -> Window | None:
        return open_among_replicas(self._padded, self.part_numel)

    def reduction(self, buffer: torch.Tensor, add: bool) -> Reduction:
        if self._partial is not None:
            return Reduction(buffer, self._partial[: self._shard_numel], add=False)
        return Reduction(buffer, self._target, add)

    @property
    def blank_across(self) -> Blank:
        """The size of the reduction over the second direction of the mesh."""
        return Blank(self._padded.numel(), self.part_numel, torch.float32, self._padded.device)

    def reduction_across(self, add: bool) -> Reduction:
        """Returns the reduction over the second direction of the mesh, which follows the first."""
        assert self._partial is not None
        return Reduction(self._partial, self._padded[self._part], add)


class PassingSum(Sink):
    """Keeps nothing: the sum is used as soon as it is reduced.

    The sum of one rank is the buffer itself, in the buffer's dtype. The sum of several ranks is fp32.
    """

    accumulates = stays = False

    def __init__(self, shard_numel: int, device: torch.device, mesh: Mesh):
        assert not mesh.is_hybrid
        self._shard_numel, self._device, self._mesh = shard_numel, device, mesh

    def use(self, reduction: Reduction) -> None:
        last_used(reduction.target)

    def reduction(self, buffer: torch.Tensor, add: bool) -> Reduction:
        assert not add
        if self._mesh.world.size == 1:
            return Reduction(buffer, buffer, add)
        numel = self._shard_numel if self._mesh.shard.size > 1 else buffer.numel()
        return Reduction(buffer, torch.empty(numel, dtype=torch.float32, device=self._device), add)


class GradientBucket:
    """The layout of one bucket's gradients in a reduction buffer, and the sink of their sum.

    Attributes:
        code: the form in which they travel; None: as they are.
    """

    def __init__(
        self,
        layout: BucketLayout,
        dtype: torch.dtype,
        device: torch.device,
        mesh: Mesh,
        sink: Sink,
        make_code: Callable[[BucketLayout], Code] | None = None,
    ):
        """
        Args:
            layout: of the params.
            dtype: of gradients in the buffer, and on the wire unless they are encoded.
            make_code: makes the form in which gradients travel, from the layout of the buffer's slices.
        """
        # Ranks that replicate all states reduce a sum that stays in slices, and spread it at the end of the round. They
        # reduce a sum that is used at once in full, as no rank could wait for the slices of others in mid-backward.
        num_slices = mesh.first.size if sink.accumulates else mesh.shard.size
        self._start = mesh.shard.rank * layout.shard_numel
        layout = layout.over(num_slices)
        self.dtype, self.device, self.sink = dtype, device, sink
        self.offsets, self.buffer_numel = layout.offsets, layout.numel
        self._slice_numel = layout.shard_numel
        self.code = None if make_code is None else make_code(layout)
        self.num_params = len(self.offsets) - 1

    def reduction(self, buffer: torch.Tensor, add: bool, arrived: AbstractSet[int]) -> Reduction:
        """Returns the reduction of a full buffer over the first direction of the mesh.

        Args:
            arrived: params of which this rank has a gradient in it.
        """
        own = buffer if buffer.shape[0] == self.buffer_numel else buffer[: self.buffer_numel]
        plain = self.sink.reduction(own, add)
        if self.code is None:
            return plain
        return CodedReduction(plain.buffer, plain.target, plain.add, self.code, arrived)

    @property
    def blank(self) -> Blank:
        """The size of the bucket's reduction over the first direction of the mesh."""
        if self.code is not None:
            numel, slices = self.code.message_bytes, self.buffer_numel // max(self._slice_numel, 1)
            return Blank(numel * slices, numel, torch.uint8, self.device)
        return Blank(self.buffer_numel, self._slice_numel, self.dtype, self.device)

    def is_filled_by(self, grad: torch.Tensor, stride: tuple[int, ...]) -> bool:
        """True if the only gradient can be the buffer, by its dtype and storage order."""
        is_alike = grad.numel() == self.buffer_numel and grad.dtype is self.dtype
        return is_alike and in_storage_order(grad, stride) is grad

    def zero(self, index: int) -> None:
        """Zeroes one param's elements in this rank's sum, within a round."""
        first, last = (max(offset - self._start, 0) for offset in self.offsets[index : index + 2])
        self.sink.zero(slice(first, last))
