"""The order in which the elements of a dense tensor lie in memory, and views that follow it."""

import torch

from ..errors import BindingError


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's strides if its elements fill a range of storage without gaps, else those of a contiguous copy.

    Raises:
        BindingError: elements share memory (an expanded tensor): an update in place would be applied several times.
    """
    expected = 1
    for size, stride in sorted(
        ((size, stride) for size, stride in zip(tensor.size(), tensor.stride(), strict=True) if size > 1),
        key=lambda pair: pair[1],
    ):
        if stride == 0:
            raise BindingError(
                f"a param of shape {tuple(tensor.shape)} has strides {tensor.stride()}: several of its elements are "
                "one place in memory, so that one update would be applied to it several times. Make it a tensor of its "
                "own: nn.Parameter(param.detach().clone())."
            )
        if stride != expected:
            return torch.empty(tensor.size(), device="meta").stride()
        expected *= size
    return tensor.stride()


def in_storage_order(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """``tensor`` itself where it has these strides, else a copy that does: its memory is then in storage order."""
    # The stride of a dimension of one element says nothing.
    if all(
        size == 1 or own == wanted for size, own, wanted in zip(tensor.size(), tensor.stride(), strides, strict=True)
    ):
        return tensor
    return torch.empty_strided(tensor.size(), strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def with_own_storage(view: torch.Tensor) -> torch.Tensor:
    """The same elements in the same memory, in a storage that begins and ends with them and keeps the memory."""
    if not view.numel():
        return torch.empty_strided(view.size(), view.stride(), dtype=view.dtype, device=view.device)
    capsule = torch._C._to_dlpack(flattened(view))
    alias: torch.Tensor = torch._C._from_dlpack(capsule)
    return alias.as_strided(view.size(), view.stride())


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """1D view of a dense tensor's memory, in storage order."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
