"""A checksum of 64 bits of a tensor's bytes: it tells whether two ranks, or two moments, have the same values.

On a CPU it is the one of the disk tier, at the speed of memory. On other devices it is a sum of products. Both see a
change within one word always, and any other with all but 1 in 2**33 at most.
"""

import numpy as np
import torch

from .disk.checksum import checksum as checksum_of_words
from .sum_of_products import sum_of_products

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
