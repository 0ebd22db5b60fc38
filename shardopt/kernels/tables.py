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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch

BLOCK = 256  # elements: the grain of layouts, norms, scalars and quantization
_ALIGNED = 16  # bytes; Triton compiles another kernel for a table that begins elsewhere


@dataclass(frozen=True)
class Gradients:
    """The addresses of the gradients of one shard.

    ``rows[r] = (grad_at, end)``: ``grad_at`` is the address that the gradient of the shard's element 0 would have if
    the param of row ``r`` reached that far (so element ``i`` is at ``grad_at + i * itemsize``), ``end`` the index in
    the shard of the first element after the param; 0 for a param that is skipped.
    """

    row_of_block: torch.Tensor  # 1D [num_blocks] int32, where the kernel runs
    rows: torch.Tensor  # 2D [num_rows, 2] int64; there too, or in host memory until ``there`` sends it
    aligned: bool  # True if every grad_at is a multiple of 16 bytes

    @cached_property  # each step asks
    def num_blocks(self) -> int:
        return self.row_of_block.numel()

    @property
    def num_rows(self) -> int:
        return self.rows.shape[0]

    def there(self) -> "Gradients":
        """Returns the table with all of it where the kernel runs."""
        return replace(self, rows=sent(self.rows, self.row_of_block.device))

    def unless(self, is_spoilt: torch.Tensor) -> "Gradients":
        """Returns the table where the kernel runs, all of it skipped if this flag there says so; no host decides."""
        if is_spoilt.device.type == "cpu":  # it is known, and asking for it takes less time than an operation does
            return replace(self, rows=torch.zeros_like(self.rows)) if is_spoilt else self
        rows = sent(self.rows, is_spoilt.device)
        rows[:, 1].masked_fill_(is_spoilt, 0)
        return replace(self, rows=rows)

    def part(self, start: int, stop: int, itemsize: int) -> "Gradients":
        """Returns the table of elements [start, stop) of the shard, as if these were all; ``start`` begins a block.

        The kernel's bits are those of the whole shard: nothing in a kernel depends on where a block lies.
        """
        if start == 0 and stop >= self.num_blocks * BLOCK:
            return self
        moved = torch.tensor([[start * itemsize, -start]], dtype=torch.int64)
        row_of_block = blocks_of(self.row_of_block, start, stop)
        # A param that ends before the part gets an end of 0 or less, and so does a skipped one: kernels pass over both.
        return Gradients(row_of_block, self.rows + sent(moved, self.rows.device), self.aligned)

    def only(self, blocks: torch.Tensor) -> "Gradients":
        """Returns the table with all other blocks skipped; ``blocks`` is 1D [num_blocks] bool, in host memory."""
        skipped = self.num_rows - 1  # the row of blocks without a param
        row_of_block = torch.where(sent(blocks, self.row_of_block.device), self.row_of_block, skipped)
        return replace(self, row_of_block=row_of_block)

    @staticmethod
    def joined(tables: "Sequence[Gradients]", itemsize: int, row_of_block: torch.Tensor) -> "Gradients":
        """Returns the table of several shards, with rows in host memory, as if the shards were one.

        Args:
            row_of_block: as :func:`joined_blocks` makes it of theirs.
        """
        rows, first = [], 0
        for each in tables:
            # A skipped row ends where its shard begins, before each of its blocks.
            rows.append(each.rows.numpy() + np.array([[-first * itemsize, first]]))
            first += each.num_blocks * BLOCK
        aligned = all(each.aligned for each in tables)
        return Gradients(row_of_block, torch.from_numpy(np.concatenate(rows)), aligned)


def joined_blocks(rows_of_blocks: Sequence[torch.Tensor], rows: Sequence[int]) -> torch.Tensor:
    """Returns the row of each block of several shards as if they were one: blocks and rows of each behind another's.

    Args:
        rows_of_blocks: of each shard, in host memory.
        rows: how many rows each shard has.
    """
    firsts = np.cumsum([0, *rows[:-1]], dtype=np.int32)
    return torch.from_numpy(
        np.concatenate([each.numpy() + first for each, first in zip(rows_of_blocks, firsts, strict=True)])
    )


def blocks_of(row_of_block: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Returns the rows of the blocks of elements [start, stop); ``start`` begins a block."""
    part = row_of_block[start // BLOCK : -(-stop // BLOCK)]
    # Triton compiles another kernel, in mid-step, for an address that is no multiple of 16 bytes: a chunk may begin at
    # any block. Test: test_no_chunk_takes_another_kernel in tests/offload/test_ring.py.
    return part if part.data_ptr() % 16 == 0 else part.clone()


def sent(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a small table on the device of a kernel; the host does not wait.

    It is copied through pinned memory of torch's own allocator, which hands it to nobody else before the copy has read
    it. A copy of other memory would wait for all that the device was given to do: a wait for each table of a step.
    """
    if device.type != "cuda" or table.device == device:
        return table.to(device)
    return table.pin_memory().to(device, non_blocking=True)


def sent_together(tables: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Returns small tables of the host on the device of a kernel, by one copy; the host does not wait."""
    # Packed in pinned memory at once, of which `sent` tells: every operation of a step counts.
    sizes = [-(-each.nbytes // _ALIGNED) * _ALIGNED for each in tables]
    packed = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    values, start = packed.numpy(), 0
    for each, size in zip(tables, sizes, strict=True):
        values[start : start + each.nbytes] = each.numpy().reshape(-1).view(np.uint8)
        start += size
    there = packed.to(device, non_blocking=True).split(sizes)
    return [part[: each.nbytes].view(each.dtype).view(each.shape) for part, each in zip(there, tables, strict=True)]


def _on_host(table: torch.Tensor) -> torch.Tensor:
    return table.cpu()


def _joined(tables: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns tables as one, 1D. One alone takes no kernel: the bounds of tests/partition/test_timeline.py see it."""
    return tables[0].view(-1) if len(tables) == 1 else torch.cat([each.view(-1) for each in tables])


def read_together(
    tables: Sequence[torch.Tensor], read: Callable[[torch.Tensor], torch.Tensor] = _on_host
) -> list[torch.Tensor]:
    """Returns small tables of one dtype in host memory, by one copy, and one wait, for each device.

    Args:
        read: copies a table of a device to host memory.
    """
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for each in tables:
        if each.device.type != "cpu":
            by_device.setdefault(each.device, []).append(each)
    if not by_device:
        return list(tables)
    copies = {
        device: iter(read(_joined(some)).split([each.numel() for each in some])) for device, some in by_device.items()
    }
    return [next(copies[each.device]).view(each.shape) if each.device in copies else each for each in tables]


class Factors(NamedTuple):
    """The scaling of a gradient on its way to the rule: ``widen(grad) / divisor * unscale * clip``.

    In this order each quotient and product is rounded once to fp32; a factor of 1 rounds nothing. No reciprocal of the
    divisor is used where it would be rounded: 1/3 is no fp32 number, so a product with it would be another mean. The
    kernels of steps do not divide at all; those of block sums do.
    """

    divisor: float = 1.0  # how many gradients were added up: the number of ranks, for sums over ranks
    unscale: float = 1.0  # 1 / loss scale
    clip: float = 1.0  # factor of the global-norm clipping

    @lru_cache(maxsize=32)  # noqa: B019 (of tuples of three numbers; each launch of a step asks)
    def folded(self) -> "Factors | None":
        """Returns the same scaling with a divisor of 1, by ``unscale / divisor``; None unless it is a power of two.

        That is exact, because a power of two moves nothing but the exponent: the bits are those of the division
        wherever ``grad / divisor`` and ``unscale / divisor`` are in fp32's normal range, and everywhere if ``unscale``
        is 1. The reciprocal of any other divisor is no fp32 number, so the gradients have to be divided before.
        """
        if math.frexp(self.divisor)[0] != 0.5:
            return None
        return Factors(1.0, self.unscale / self.divisor, self.clip)


class Tables(NamedTuple):
    """What a launch is told of each param, a row each; in host memory but for the gradients and the totals.

    Attributes:
        scalars: 2D [num_rows, len(spec.scalars)] fp32.
        factors: of every gradient. The divisor is 1: gradients were divided before, or it is :meth:`Factors.folded`.
            A quotient an element would be 5 to 7 % of AdamW's step on a CPU.
        noise: 2D [num_rows, 4] int32, see :func:`noise_from`; None if everything is rounded to nearest.
        products: 2D [num_rows, products.COLUMNS] int64, for a rule that reads a product; the factors lie where the
            kernel runs.
        totals: 3D [len(measured), num_rows, reductions.COLUMNS] int64, where the kernel runs, to which the block sums
            of each measured value are added, row by row; None if the pass measures nothing.
        ties: True if the fp32 masters were loaded and not updated since: a split one, which they may have been, rounds
            ties away from zero.
    """

    gradients: Gradients
    scalars: torch.Tensor
    factors: Factors = Factors()
    noise: torch.Tensor | None = None
    products: torch.Tensor | None = None
    totals: torch.Tensor | None = None
    ties: bool = False


def noise_from(noise: torch.Tensor, start: int) -> torch.Tensor:
    """Returns the table of noise for the elements of the shard from ``start`` on.

    Noise is added before values are rounded down, for stochastic rounding and dither. It comes from counters, so that
    it is the same wherever the step runs. Element ``e`` of a param draws ``hash(e, key)``, with a key of the seed, the
    param and its step, or is dithered by ``e * golden ratio + phase`` with a phase of the step (``formats.py``).

    Args:
        noise: 2D [num_rows, 4] int32 in host memory, ``noise[r] = (key, key, first, phase)``: element ``i`` of the
            shard is element ``i + first`` of the param of row ``r``; ``first`` is a multiple of 256, as blocks are.
    """
    if start == 0:
        return noise
    # Modulo 2**32: elements of a param beyond that share noise with its first ones.
    return noise + torch.tensor([[0, 0, (start + 2**31) % 2**32 - 2**31, 0]], dtype=torch.int32)


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


@dataclass(frozen=True)
class JoinedStreams:
    """The streams of several shards that one launch takes as if they were one."""

    shards: Sequence[Streams | None]  # None: nothing of it is updated
    num_blocks: Sequence[int]  # of each
    num_rows: Sequence[int]  # of each
