"""Host memory that the values of one moment are copied to, so that training goes on while they are written."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from ..partition.memory import zeros
from .elements import READ_BYTES, Flat
from .plan_save import Piece

_ALIGNMENT = 64


class Staging:
    """One buffer as large as what this rank saves, kept from one save to the next: at most one copy is under way."""

    def __init__(self) -> None:
        self._room = torch.empty(0, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        return self._room.numel()

    def copy(self, pieces: Sequence[Piece]) -> list[Piece]:
        """The same pieces with the values of now; they are overwritten by the next call."""
        starts, end = [], 0
        for piece in pieces:
            starts.append(end)
            end += -(-piece.nbytes // _ALIGNMENT) * _ALIGNMENT
        if end > self.nbytes:
            self._room = _host_bytes(end)
        copied, devices = [], set()
        for piece, start in zip(pieces, starts, strict=True):
            values = self._room[start : start + piece.nbytes].view(piece.tensor.dtype)
            step = READ_BYTES // piece.tensor.dtype.itemsize
            for first in range(0, piece.numel, step):
                last = min(first + step, piece.numel)
                source = piece.read(first, last)
                values[first:last].copy_(source, non_blocking=source.is_cuda)
                devices.add(source.device)
            copied.append(replace(piece, elements=Flat(values), offset=0))
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # the next step writes to what is still being read
        return copied


def _host_bytes(nbytes: int) -> torch.Tensor:
    if torch.cuda.is_available():
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return zeros(nbytes, torch.uint8, torch.device("cpu"))
