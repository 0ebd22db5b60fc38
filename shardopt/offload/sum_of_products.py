"""A checksum of 64 bits of values on a device, by torch's own operations: the host does not wait.

It is a sum of products in integers of 64 bits: each word of up to 32 bits times a random odd number of its place. It
sees a change within one word always, and any other with all but 1 in 2**33 at most.
"""

from functools import cache

import torch

_PLACES = 1 << 16  # words of a row, each with a number of its own
_ROWS = 16  # whose products are in memory at a time
_SEED = 0x51AB5EED  # any number: all ranks draw the same factors


def sum_of_products(words: torch.Tensor) -> torch.Tensor:
    """Returns the checksum of these integers, 1D, as int64 of no dimension on their device."""
    numbers = _numbers(words.device)
    while True:
        sums = []
        for part in words.split(_PLACES * _ROWS):
            full = part.numel() // _PLACES * _PLACES
            sums.append((part[:full].view(-1, _PLACES) * numbers).sum(1))
            sums.append((part[full:] * numbers[: part.numel() - full]).sum().view(1))
        words = torch.cat(sums)
        if words.numel() <= _PLACES:
            return (words * numbers[: words.numel()]).sum()


@cache
def _numbers(device: torch.device) -> torch.Tensor:
    drawn = torch.randint(-(2**63), 2**63 - 1, (_PLACES,), generator=torch.Generator().manual_seed(_SEED))
    return (drawn | 1).to(device)
