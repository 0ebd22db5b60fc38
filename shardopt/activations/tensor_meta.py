"""The metadata of a saved tensor: gives its elements as bytes without gaps, and restores the tensor from them.

What comes back has the strides that the tensor had, and starts as far from an address that all allocations share. Both
decide which kernel a matrix product takes, and so the last bits of what is recomputed.
"""

from dataclasses import dataclass

import torch

from ..domain.dtensors import Spec, with_spec

# torch's allocations begin at a multiple of 64 bytes on a CPU, of 512 on a GPU: a tensor's own place is modulo these.
_ALIGNED = 512


@dataclass(frozen=True)
class TensorMeta:
    """The metadata of a strided tensor. No elements share memory, but for those of an expanded dimension."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # elements
    lead: int  # elements between an aligned address and the first one
    is_dense: bool  # no gaps: the bytes are those in memory, in the order of memory
    spec: Spec | None = None  # of the DTensor of which it is the local tensor

    @staticmethod
    def of(tensor: torch.Tensor, spec: Spec | None = None) -> "TensorMeta | None":
        """Returns the tensor's metadata; None if elements overlap otherwise than by ``expand()``."""
        steps = sorted((step, size) for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
        extent, count = 1, 1  # elements of memory, and of the tensor, that the dimensions so far span
        for step, size in steps:
            if step == 0:
                continue
            if step < extent:
                return None
            extent += step * (size - 1)
            count *= size
        lead = int(tensor.storage_offset()) % max(_ALIGNED // tensor.element_size(), 1)
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        return TensorMeta(tensor.dtype, tensor.device, shape, stride, lead, extent == count, spec)

    @property
    def _core(self) -> tuple[int, ...]:
        """The shape without what expanded dimensions repeat."""
        return tuple(size if step else min(size, 1) for size, step in zip(self.shape, self.stride, strict=True))

    @property
    def numel(self) -> int:
        """Elements that differ in memory."""
        return torch.Size(self._core).numel()

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def lead_bytes(self) -> int:
        return self.lead * self.dtype.itemsize

    def bytes_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor's elements as uint8 [nbytes]: a view where the tensor is dense, else a copy."""
        tensor = tensor.detach()
        if self.is_dense:
            return tensor.as_strided((self.numel,), (1,)).view(torch.uint8)
        return tensor.as_strided(self._core, self.stride).contiguous().view(-1).view(torch.uint8)

    def restore(self, memory: torch.Tensor) -> torch.Tensor:
        """Returns the tensor again; a DTensor if it was the local tensor of one.

        Args:
            memory: uint8, 1D, of an allocation of its own. ``nbytes`` from ``lead_bytes`` on are the elements. The
                tensor is a view of it if it is dense.
        """
        flat = memory[self.lead_bytes : self.lead_bytes + self.nbytes].view(self.dtype)
        if not self.is_dense:
            core = self._core
            span = 1 + sum(step * (size - 1) for size, step in zip(core, self.stride, strict=True))
            sparse = torch.empty(self.lead + span, dtype=self.dtype, device=self.device)
            sparse.as_strided(core, self.stride, self.lead).copy_(flat.view(core))
            flat = sparse
        tensor = flat.as_strided(self.shape, self.stride, self.lead)
        return tensor if self.spec is None else with_spec(tensor, self.spec)
