"""Checksums of saved tensors, by which ranks find out that they hold the same values."""

from collections.abc import Callable
from functools import partial

import torch


class Checksums:
    """Checksums that are read when the first of them is needed. All of a device are read in one wait."""

    def __init__(self) -> None:
        self._sums: list[int | torch.Tensor] = []
        self._streams: list[torch.cuda.Stream | None] = []  # on which each was computed

    def add(self, found: int | torch.Tensor) -> Callable[[], int]:
        """Adds a checksum, and returns the call that reads it."""
        self._sums.append(found)
        self._streams.append(_stream_of(found))
        return partial(self._read, len(self._sums) - 1)

    def _read(self, index: int) -> int:
        found = self._sums[index]
        if isinstance(found, int):
            return found
        # Backward runs on the stream of its forward, and waits for that alone: those of other streams may be under way.
        ready = [each for each, stream in enumerate(self._streams) if stream == self._streams[index]]
        unread = [each for each in ready if isinstance(self._sums[each], torch.Tensor)]
        values = torch.stack([torch.as_tensor(self._sums[each]) for each in unread]).tolist()
        for each, value in zip(unread, values, strict=True):
            self._sums[each] = int(value)
        return int(self._sums[index])


def _stream_of(found: int | torch.Tensor) -> torch.cuda.Stream | None:
    is_cuda = isinstance(found, torch.Tensor) and found.device.type == "cuda"
    return torch.cuda.current_stream(found.device) if is_cuda else None  # type: ignore[union-attr]
