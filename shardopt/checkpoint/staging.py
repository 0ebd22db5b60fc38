"""Host memory for a copy of the values of one moment: training goes on while the copy is written."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from ..partition.memory import zeros
from .elements import READ_BYTES, reader_of
from .plan_save import Piece

_ALIGNMENT = 64


class Staging:
    """One buffer as large as what this rank saves, kept from one save to the next. At most one copy is in it."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        return self._buffer.numel()

    def copy(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Returns the same pieces with the values of now, which the next call overwrites."""
        starts, end = [], 0
        for piece in pieces:
            starts.append(end)
            end += -(-piece.nbytes // _ALIGNMENT) * _ALIGNMENT
        if end > self.nbytes:
            self._buffer = _host_bytes(end)
        copied, devices = [], set()
        for piece, start in zip(pieces, starts, strict=True):
            values = self._buffer[start : start + piece.nbytes].view(piece.tensor.dtype)
            step = READ_BYTES // piece.tensor.dtype.itemsize
            for first in range(0, piece.numel, step):
                last = min(first + step, piece.numel)
                source = piece.read(first, last)
                values[first:last].copy_(source, non_blocking=source.is_cuda)
                devices.add(source.device)
            copied.append(replace(piece, read=reader_of(values)))
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # the copies must end before the next step writes to their sources
        return copied


def _host_bytes(nbytes: int) -> torch.Tensor:
    if torch.cuda.is_available():
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return zeros(nbytes, torch.uint8, torch.device("cpu"))
