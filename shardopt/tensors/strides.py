"""The order in which the elements of a dense tensor lie in memory, and views that follow it."""

import torch

from ..errors import BindingError


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the tensor's strides if its elements fill storage without gaps, else the strides of a contiguous copy.

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
                "make it a tensor of its own (nn.Parameter(param.detach().clone())): several of its elements are one "
                "place in memory, and one update would be applied several times. A param of shape "
                f"{tuple(tensor.shape)} has strides {tensor.stride()}."
            )
        if stride != expected:
            return torch.empty(tensor.size(), device="meta").stride()
        expected *= size
    return tensor.stride()


def in_storage_order(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Returns ``tensor`` itself if it has these strides, else a copy that has: its memory is then in storage order."""
    # The stride of a dimension of one element is arbitrary.
    if all(
        size == 1 or own == wanted for size, own, wanted in zip(tensor.size(), tensor.stride(), strides, strict=True)
    ):
        return tensor
    return torch.empty_strided(tensor.size(), strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def with_own_storage(view: torch.Tensor) -> torch.Tensor:
    """Returns the same elements in the same memory, with a storage of their own that keeps the memory alive."""
    if not view.numel():
        return torch.empty_strided(view.size(), view.stride(), dtype=view.dtype, device=view.device)
    capsule = torch._C._to_dlpack(flattened(view))
    alias: torch.Tensor = torch._C._from_dlpack(capsule)
    return alias.as_strided(view.size(), view.stride())


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a 1D view of a dense tensor's memory, in storage order."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
