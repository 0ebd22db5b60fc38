"""Tensors on the device: CPU tensors that say "cuda:0", what makes them, and what moves values there and back."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.utils._python_dispatch import _disable_current_modes

from shardopt.tensors.held import HeldTensor

from .book import Book

CARD = torch.device("cuda", 0)
_HOST = torch.device("cpu")
_FACTORIES = ("empty", "zeros", "ones", "full", "arange", "empty_strided", "scalar_tensor")
_LIKE = ("empty_like", "zeros_like", "ones_like", "full_like")
_NEW = ("new_empty", "new_zeros", "new_full", "new_tensor")


def transfer(book: Book, tensor: Tensor, to_device: bool, blocking: bool = True) -> Tensor:
    """Returns a copy on the other side."""
    with _disable_current_modes(), torch.no_grad():
        copy = tensor.detach().clone()
    book.region(tensor)
    book.region(copy, to_device)
    book.copy(copy, tensor, blocking)
    return copy


def _is_card(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _factory(book: Book, make: Callable[..., Any]) -> Callable[..., Any]:
    def making(*arguments: Any, device: Any = None, pin_memory: bool = False, **keywords: Any) -> Any:
        if device is not None and not _is_card(device):
            keywords["device"] = device
        with book.making(on_device=_is_card(device)):
            made = make(*arguments, **keywords)
        if pin_memory:
            book.region(made, is_device=False).is_pinned = True
        return made

    return making


def _like(book: Book, make: Callable[..., Any]) -> Callable[..., Any]:
    """As ``_factory``, but without a device it is that of the first tensor."""
    with_device = _factory(book, make)

    def making(*arguments: Any, **keywords: Any) -> Any:
        return (make if keywords.get("device") is None else with_device)(*arguments, **keywords)

    return making


def _moves(book: Book) -> dict[str, Callable[..., Any]]:
    to, tolist, numpy = Tensor.to, Tensor.tolist, Tensor.numpy

    def moved(tensor: Tensor, *arguments: Any, **keywords: Any) -> Any:
        if isinstance(tensor, HeldTensor):  # it has no memory of its own
            tensor = tensor.plain()
        if arguments and isinstance(arguments[0], Tensor):
            return moved(tensor, arguments[0].device, arguments[0].dtype)
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*arguments, **keywords)
        if device is None or device.type == "meta":
            return to(tensor, *arguments, **keywords)
        cast = tensor if dtype in (None, tensor.dtype) else to(tensor, dtype)
        if _is_card(device) == book.is_on_device(tensor):
            return cast
        source = book.region(cast)
        is_sent = non_blocking and (source.is_device or source.is_pinned)  # the host waits for other memory of its own
        if is_sent and source.is_pinned:
            source.recorded.append(book.stream)  # as torch's allocator of pinned memory does
        return transfer(book, cast, _is_card(device), not is_sent)

    def pinned(tensor: Tensor) -> Tensor:
        with _disable_current_modes(), torch.no_grad():
            copy = tensor.detach().clone()
        book.region(copy, is_device=False).is_pinned = True
        return copy

    def listed(tensor: Tensor) -> Any:
        if book.is_on_device(tensor):
            book.host_waits(book.stream.clock)
        return tolist(tensor)

    def as_numpy(tensor: Tensor, *arguments: Any, **keywords: Any) -> Any:
        if book.is_on_device(tensor):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
        return numpy(tensor, *arguments, **keywords)

    return {
        "to": moved,
        "pin_memory": pinned,
        "cpu": lambda tensor, **_: moved(tensor, _HOST),
        "cuda": lambda tensor, **_: moved(tensor, CARD),
        "tolist": listed,
        "numpy": as_numpy,
    }


def _facts(book: Book) -> dict[str, Any]:
    """What a tensor says of itself, and what it tells its allocator."""
    device, wrapper = torch._C.TensorBase.device, Tensor._make_wrapper_subclass  # type: ignore[attr-defined]

    def device_of(tensor: Tensor) -> torch.device:
        with torch._C.DisableTorchFunction():
            real: torch.device = device.__get__(tensor)
        return CARD if real.type == "cpu" and book.is_on_device(tensor) else real

    def record_stream(tensor: Tensor, stream: Any) -> None:
        book.region(tensor).recorded.append(stream)

    def make_wrapper(*arguments: Any, device: Any = None, **keywords: Any) -> Any:
        made = wrapper(*arguments, **keywords, device=_HOST if _is_card(device) else device)
        if _is_card(device):
            storage = torch._C.TensorBase.untyped_storage(made)
            book.regions.add(storage, True, book.stream, has_memory=False)
        return made

    return {
        "device": property(device_of),
        "is_cuda": property(lambda tensor: device_of(tensor).type == "cuda"),
        "record_stream": record_stream,
        "_make_wrapper_subclass": staticmethod(make_wrapper),
    }


@contextmanager
def on_card(book: Book) -> Iterator[None]:
    """Within, tensors may be on the device."""
    tensor, resize = torch.tensor, torch.UntypedStorage.resize_
    group_tensors = clip_grad._group_tensors_by_device_and_dtype

    def from_values(*arguments: Any, device: Any = None, **keywords: Any) -> Any:
        made = tensor(*arguments, **keywords)
        return transfer(book, made, to_device=True) if _is_card(device) else made

    def grouped(*arguments: Any, **keywords: Any) -> Any:  # by torch's C++, which sees the CPU
        found = group_tensors(*arguments, **keywords)
        return {(of[0][0].device, dtype): (of, indices) for (_, dtype), (of, indices) in found.items()}

    def resized(storage: torch.UntypedStorage, nbytes: int) -> None:
        book.regions.resize(storage, book.stream, lambda: resize(storage, nbytes))

    with ExitStack() as stack:
        replace = lambda of, name, value: stack.enter_context(patch.object(of, name, value))  # noqa: E731
        for name in _FACTORIES:
            replace(torch, name, _factory(book, getattr(torch, name)))
        for name in _LIKE:
            replace(torch, name, _like(book, getattr(torch, name)))
        for name in _NEW:
            replace(Tensor, name, _like(book, getattr(Tensor, name)))
        for name, value in {**_moves(book), **_facts(book)}.items():
            replace(Tensor, name, value)
        replace(torch, "tensor", from_values)
        replace(clip_grad, "_group_tensors_by_device_and_dtype", grouped)
        replace(torch.UntypedStorage, "resize_", resized)
        yield


__all__ = ["CARD", "on_card", "transfer"]
