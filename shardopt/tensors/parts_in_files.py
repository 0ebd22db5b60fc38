"""Parts in safetensors files: each is read as its bytes are written, so that no rank holds the model.

``safetensors.torch.save_file()`` asks for the address of every tensor of a file before it writes the first one: this
rank would read all of them into memory. The library has no hook for that, so two functions that its ``save_file()``
calls are wrapped. ``save_pretrained()`` of Transformers and PEFT, the Trainer and ``Accelerator.save_model()`` save
through it, whichever name they imported it by.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from .part import Part
from .safetensors_format import NAME_OF_DTYPE, bytes_of, header

_ADDRESSES, _WRITES, _BYTES, _CHECK = "_flatten_as_ptr", "serialize_file", "serialize", "_evaluate_tensors_for_save"


def stream_parts() -> None:
    """Makes ``safetensors.torch.save_file()`` stream parts from now on."""
    from safetensors import torch as library

    found = [getattr(library, name, None) for name in (_ADDRESSES, _WRITES, _BYTES, _CHECK)]
    if any(each is None for each in found) or isinstance(found[0], _Addresses):
        return  # done before; or a release that works otherwise, for which parts have addresses
    addresses, writes, to_bytes, check = found
    assert addresses is not None and writes is not None and to_bytes is not None and check is not None
    setattr(library, _ADDRESSES, _Addresses(addresses, check))
    setattr(library, _WRITES, _Writes(writes))
    setattr(library, _BYTES, _Bytes(to_bytes))


class _Parts(dict[str, torch.Tensor]):
    """The tensors of a file, some of them parts, in place of their addresses.

    Attributes:
        addresses: reads them all, and returns the addresses.
    """

    addresses: Callable[[], Any]


@dataclass(frozen=True)
class _Addresses:
    """The library's function that returns where the tensors of a file lie."""

    addresses: Callable[..., Any]
    check: Callable[[Any], None]

    def __call__(self, tensors: Any, *arguments: Any, **keywords: Any) -> Any:
        if not isinstance(tensors, Mapping) or not any(isinstance(each, Part) for each in tensors.values()):
            return self.addresses(tensors, *arguments, **keywords)
        self.check(tensors)
        if not all(_is_plain(each) for each in tensors.values()):
            return self.addresses(tensors, *arguments, **keywords)
        parts = _Parts(tensors)
        parts.addresses = partial(self.addresses, tensors, *arguments, **keywords)
        return parts


@dataclass(frozen=True)
class _Writes:
    """The library's function that writes a file."""

    writes: Callable[..., None]

    def __call__(self, tensors: Any, filename: Any, metadata: Mapping[str, str] | None = None) -> None:
        if isinstance(tensors, _Parts):
            _write(tensors, os.fspath(filename), metadata)
        else:
            self.writes(tensors, filename, metadata)


@dataclass(frozen=True)
class _Bytes:
    """The library's function that returns a file as bytes: those of all parts are in memory then anyway."""

    to_bytes: Callable[..., bytes]

    def __call__(self, tensors: Any, *arguments: Any, **keywords: Any) -> bytes:
        return self.to_bytes(tensors.addresses() if isinstance(tensors, _Parts) else tensors, *arguments, **keywords)


def _is_plain(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, Part) or (
        tensor.layout is torch.strided and tensor.dtype in NAME_OF_DTYPE and not hasattr(tensor, "__tensor_flatten__")
    )


def _write(tensors: Mapping[str, torch.Tensor], filename: str, metadata: Mapping[str, str] | None) -> None:
    """Writes a file, which takes its name once it is whole: several ranks may write the same one."""
    # In the library's order: what has more bytes an element first, so that all of them are aligned.
    named = sorted(tensors.items(), key=lambda each: (-each[1].dtype.itemsize, each[0]))
    filename = os.path.realpath(filename)
    made = f"{filename}.part-{secrets.token_hex(4)}"
    try:
        with open(made, "xb") as file:
            file.write(header([(name, each.dtype, each.shape) for name, each in named], metadata))
            for _, each in named:
                whole = each.read_whole() if isinstance(each, Part) else each.detach().cpu()
                file.write(bytes_of(whole.contiguous().reshape(-1)))
                del whole
        os.replace(made, filename)
    except BaseException:
        with suppress(OSError):
            os.remove(made)
        raise
