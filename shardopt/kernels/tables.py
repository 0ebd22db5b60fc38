"""The arguments of a kernel: the shard's streams, and small tables with one row a param.

``row_of_block`` gives each block of 256 elements a row. A row holds one param's scalars, the address of its gradient
and the end of the param in the shard. So params of several groups and step counts share one launch, gradients are read
where backward left them, and a skipped param is a row whose end is 0::

    shard          |  w1 w1 w1.. | w2.. | w3 w3.. |        one character a block, .. the padding of a last block
    row_of_block   |  0  0  0    | 1    | 2  2    |  int32
    rows           |  (grad_at, end) of w1, w2, w3   |  int64
    scalars        |  (beta2, step_size, ...) of w1, w2, w3   |  fp32
    noise          |  (key, key, first, phase) of w1, w2, w3   |  int32, where not everything is rounded to nearest
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

BLOCK = 256  # elements: the grain of layouts, norms, scalars and quantization


@dataclass(frozen=True)
class Gradients:
    """The addresses of the gradients of one shard.

    ``rows[r] = (grad_at, end)``: ``grad_at`` is the address that the gradient of the shard's element 0 would have if
    the param of row ``r`` reached that far (so element ``i`` is at ``grad_at + i * itemsize``), ``end`` the index in
    the shard of the first element after the param; 0 for a param that is skipped.
    """

    row_of_block: torch.Tensor  # 1D [num_blocks] int32
    rows: torch.Tensor  # 2D [num_rows, 2] int64
    aligned: bool  # True if every grad_at is a multiple of 16 bytes

    @property
    def num_blocks(self) -> int:
        return self.row_of_block.numel()

    @property
    def num_rows(self) -> int:
        return self.rows.shape[0]

    def part(self, start: int, stop: int, itemsize: int) -> "Gradients":
        """Returns the table of elements [start, stop) of the shard, as if these were all; ``start`` begins a block.

        The kernel's bits are those of the whole shard: nothing in a kernel depends on where a block lies.
        """
        if start == 0 and stop >= self.num_blocks * BLOCK:
            return self
        moved = torch.tensor([[start * itemsize, -start]], dtype=torch.int64, device=self.rows.device)
        row_of_block = blocks_of(self.row_of_block, start, stop)
        # A param that ends before the part gets an end of 0 or less, and so does a skipped one: kernels pass over both.
        return Gradients(row_of_block, self.rows + moved, self.aligned)


def blocks_of(row_of_block: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Returns the rows of the blocks of elements [start, stop); ``start`` begins a block."""
    part = row_of_block[start // BLOCK : -(-stop // BLOCK)]
    # Triton compiles another kernel, in mid-step, for an address that is no multiple of 16 bytes: a chunk may begin at
    # any block. Test: test_no_chunk_takes_another_kernel in tests/offload/test_ring.py.
    return part if part.data_ptr() % 16 == 0 else part.clone()


class Factors(NamedTuple):
    """The scaling of a gradient on its way to the rule: ``widen(grad) / divisor * unscale * clip``.

    In this order each quotient and product is rounded once to fp32; a factor of 1 rounds nothing. No reciprocal of the
    divisor is used where it would be rounded: 1/3 is no fp32 number, so a product with it would be another mean. The
    kernels of steps do not divide at all; those of block sums do.
    """

    divisor: float = 1.0  # how many gradients were added up: the number of ranks, for sums over ranks
    unscale: float = 1.0  # 1 / loss scale
    clip: float = 1.0  # factor of the global-norm clipping

    def folded(self) -> "Factors | None":
        """Returns the same scaling with a divisor of 1, by ``unscale / divisor``; None unless it is a power of two.

        That is exact, because a power of two moves nothing but the exponent: the bits are those of the division
        wherever ``grad / divisor`` and ``unscale / divisor`` are in fp32's normal range, and everywhere if ``unscale``
        is 1. The reciprocal of any other divisor is no fp32 number, so the gradients have to be divided before.
        """
        if math.frexp(self.divisor)[0] != 0.5:
            return None
        return Factors(1.0, self.unscale / self.divisor, self.clip)


def noise_from(noise: torch.Tensor, start: int) -> torch.Tensor:
    """Returns the table of noise for the elements of the shard from ``start`` on.

    Noise is added before values are rounded down, for stochastic rounding and dither. It comes from counters, so that
    it is the same wherever the step runs. Element ``e`` of a param draws ``hash(e, key)``, with a key of the seed, the
    param and its step, or is dithered by ``e * golden ratio + phase`` with a phase of the step (``formats.py``).

    Args:
        noise: 2D [num_rows, 4] int32, ``noise[r] = (key, key, first, phase)``: element ``i`` of the shard is element
            ``i + first`` of the param of row ``r``.
    """
    if start == 0:
        return noise
    # Modulo 2**32: elements of a param beyond that share noise with its first ones.
    moved = torch.tensor([[0, 0, (start + 2**31) % 2**32 - 2**31, 0]], dtype=torch.int32, device=noise.device)
    return noise + moved


@dataclass(frozen=True)
class Streams:
    """The tensors that one pass reads and writes, each 1D; all but the scales have the shard's length."""

    param: torch.Tensor
    master: torch.Tensor | None  # in the spec's format; None where there is none
    states: tuple[torch.Tensor, ...]  # in the order of the variant, each in its format
    scales: tuple[
        torch.Tensor | None, ...
    ] = ()  # 1D [num_blocks] fp32 of each state, None without; empty if no state has any

    def scale(self, index: int) -> torch.Tensor | None:
        """Returns the scales of state ``index``."""
        return self.scales[index] if self.scales else None
