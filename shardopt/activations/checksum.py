"""A checksum of 64 bits of a tensor's bytes, by which ranks find out that they hold the same values.

On a CPU it is the one of the disk tier, at the speed of memory. On other devices it is a sum of products. Both see a
change within one word always, and any other with all but 1 in 2**33 at most.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from ..offload.disk.checksum import checksum as checksum_of_words
from ..offload.sum_of_products import sum_of_products

_GRAIN = 32  # bytes: the checksum of the disk tier takes whole multiples
_WORDS = {1: torch.uint8, 2: torch.int16}


def checksum(values: torch.Tensor, itemsize: int) -> int | torch.Tensor:
    """Returns the checksum of these bytes.

    Args:
        values: uint8, 1D.
        itemsize: bytes of an element, at a multiple of which the values begin.

    Returns:
        A number on a CPU. Elsewhere an int64 tensor of no dimension; the host has not waited for it.
    """
    if values.device.type == "cpu":
        return _on_cpu(values)
    words = values.view(_WORDS.get(itemsize, torch.int32))
    return sum_of_products(words)


def _on_cpu(values: torch.Tensor) -> int:
    if values.data_ptr() % 8:
        values = values.clone()
    data = values.numpy()
    whole = len(data) // _GRAIN * _GRAIN
    rest = np.zeros(_GRAIN, dtype=np.uint8)
    rest[: len(data) - whole] = data[whole:]
    sums = np.zeros(_GRAIN // 8, dtype=np.uint64)
    sums[0], sums[1] = checksum_of_words(data[:whole].view(np.uint64)), checksum_of_words(rest.view(np.uint64))
    return int(np.uint64(checksum_of_words(sums)).astype(np.int64))


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
