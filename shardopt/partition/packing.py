"""Buckets whose matrices each lie whole in one shard, so that no slice travels to make one whole: integers only.

A bucket's matrices are packed into its shards in another order, and all shards are as long as the longest. With
matrices of 2, 3, 2 and 1 blocks on two ranks (one character is a block of 256)::

    rank     0 0 0 0 1 1 1 1
    cut      a a b b b c c d          two blocks of b lie on one rank, one on the other
    packed   b b b d a a c c

With matrices of 2, 2 and 1 blocks the second shard would have to be padded with a block: a fifth of the bucket. That
is too much, so the bucket is cut. (These examples are tests.)

Padding is reduced and gathered as params are, and takes memory. So a bucket is packed only if that adds at most
:data:`MOST_PADDING`, and no more bytes on the wire than its slices. A bucket that cannot be packed may end sooner:
gradients are reduced in the order in which they arrive, so packing changes the order within a bucket, never across
buckets.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from .layout import BLOCK, BucketLayout, end_of_bucket, round_up

# Of a bucket's elements. Padding takes memory and travels with every reduction and gather. Test:
# test_padding_that_moves_more_than_slices_is_left_out in tests/partition/test_packing.py.
MOST_PADDING = 0.05
# A slice travels to the owner of its matrix and back, two bytes an element each way.
_BYTES_OF_SLICES = 4
# Lengths of a shard that are tried, from the shortest to the one with most padding: each try sorts all matrices.
_LENGTHS = 6


@dataclass(frozen=True)
class PackedLayout(BucketLayout):
    """The layout of a bucket whose params each lie in one shard: those of the first shard come first.

    Attributes:
        counts: how many params each shard has.
    """

    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.counts) != self.num_shards or sum(self.counts) != len(self.numels):
            raise ValueError(f"give a packed layout each param in one of its shards, found {self!r}.")

    @cached_property
    def _ends(self) -> list[int]:
        """How many params the shards up to each one have."""
        return list(accumulate(self.counts))

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The first element of each param in the bucket, and the end of the last param."""
        found: list[int] = []
        end = 0
        for rank, (count, last) in enumerate(zip(self.counts, self._ends, strict=True)):
            places = accumulate(map(round_up, self.numels[last - count : last]), initial=rank * self.shard_numel)
            *starts, end = places
            found += starts
        return (*found, end)

    @cached_property
    def shard_numel(self) -> int:
        """The elements of every rank's shard, padding included."""
        bounds = zip(self.counts, self._ends, strict=True)
        return max(sum(map(round_up, self.numels[last - count : last])) for count, last in bounds)


class Packable(NamedTuple):
    """A param of one or several matrices, one after the other."""

    numel: int
    matrices: tuple[int, ...]  # the elements of each
    cost: int  # of what the owner of its matrices computes
    itemsize: int  # bytes of an element, and of its gradient's

    @property
    def blocks(self) -> int:
        return round_up(self.numel) // BLOCK

    def travelling(self, offset: int, shard_numel: int) -> int:
        """Returns the elements of its matrices that do not lie in the shard that has most of their matrix."""
        return self.numel - sum(self._largest_slices(offset, shard_numel))

    def whole(self, offset: int, shard_numel: int) -> list[int]:
        """Returns the elements of each of its matrices that lies in one shard."""
        largest = self._largest_slices(offset, shard_numel)
        return [numel for numel, each in zip(self.matrices, largest, strict=True) if numel == each]

    def _largest_slices(self, offset: int, shard_numel: int) -> Iterator[int]:
        """Yields for each matrix the most of its elements that lie in one shard."""
        for numel in self.matrices:
            yield _largest_slice(offset, offset + numel, shard_numel) if numel else 0
            offset += numel


class Split(NamedTuple):
    """The params of one bucket, by index, in the order of its layout."""

    indices: list[int]
    layout: BucketLayout


class Packer:
    """Splits params into buckets, and packs those that can be packed.

    The same on all ranks, since nothing counts but the params and their order. Of each bucket the shard of the highest
    cost goes to the rank that has least to compute so far.
    """

    def __init__(self, num_shards: int):
        self._num_shards = num_shards
        self._busy = [0] * num_shards  # cost of the matrices in packed shards

    def split(self, params: Sequence[Packable], bucket_bytes: int | None) -> Iterator[Split]:
        """Yields buckets of consecutive params.

        Args:
            bucket_bytes: a bucket holds at most so many, or a single param. If it cannot be packed, it ends sooner, but
                holds at least half of these params: each bucket costs a message to every rank. None: one bucket.
        """
        nbytes, first = [each.numel * each.itemsize for each in params], 0
        while first < len(params):
            last = len(params) if bucket_bytes is None else end_of_bucket(nbytes, first, bucket_bytes)
            least = last if bucket_bytes is None else first + -(-(last - first) // 2)
            packed = next(self._packed(params, first, range(last, least - 1, -1)), None)
            found = packed or Split(list(range(first, last)), self._cut(params[first:last]))
            yield found
            first += len(found.indices)

    def _cut(self, params: Sequence[Packable]) -> BucketLayout:
        return BucketLayout(tuple(each.numel for each in params), self._num_shards)

    def _packed(self, params: Sequence[Packable], first: int, ends: range) -> Iterator[Split]:
        """Yields the bucket from ``first`` to each of these ends, the last one first, where no slice would travel."""
        blocks = [each.blocks for each in params[first : ends[0]]]
        totals, longest = list(accumulate(blocks)), list(accumulate(blocks, max))
        for end in ends:
            count = end - first
            if longest[count - 1] * self._num_shards > (1 + MOST_PADDING) * totals[count - 1] or not totals[count - 1]:
                continue  # no rank can have all of the longest one
            inside = params[first:end]
            cut = self._cut(inside)
            travelling = sum(
                each.travelling(offset, cut.shard_numel) for each, offset in zip(inside, cut.offsets, strict=False)
            )
            shards = _pack(blocks[:count], self._num_shards) if travelling else _shards_of(cut)
            if shards is not None:
                shards = self._by_rank(inside, shards)
                order = [index for shard in shards for index in shard]
                numels = tuple(inside[index].numel for index in order)
                layout = PackedLayout(numels, self._num_shards, tuple(map(len, shards)))
                if _padding_bytes(cut, layout, inside[0].itemsize) <= _BYTES_OF_SLICES * travelling:
                    for rank, shard in enumerate(shards):
                        self._busy[rank] += sum(inside[index].cost for index in shard)
                    yield Split([first + index for index in order], layout)
            elif not travelling:
                yield Split(list(range(first, end)), cut)

    def _by_rank(self, params: Sequence[Packable], shards: Sequence[list[int]]) -> list[list[int]]:
        """Returns the shards in the order of their ranks."""
        dearest = sorted(shards, key=lambda shard: -sum(params[index].cost for index in shard))
        least_busy = sorted(range(self._num_shards), key=lambda rank: self._busy[rank])
        shard_of = dict(zip(least_busy, dearest, strict=True))
        return [shard_of[rank] for rank in range(self._num_shards)]


def _largest_slice(start: int, end: int, shard_numel: int) -> int:
    first_end, last_start = (start // shard_numel + 1) * shard_numel, (end - 1) // shard_numel * shard_numel
    if end <= first_end:
        return end - start
    return max(first_end - start, end - last_start, shard_numel if first_end < last_start else 0)


def _shards_of(cut: BucketLayout) -> list[list[int]] | None:
    """Returns the params of each shard, by index; None: one lies in several."""
    shards = [[piece.param for piece in cut.pieces(rank)] for rank in range(cut.num_shards)]
    empty = [index for index, numel in enumerate(cut.numels) if not numel]
    return [[*empty, *shards[0]], *shards[1:]] if sum(map(len, shards)) + len(empty) == len(cut.numels) else None


def _padding_bytes(cut: BucketLayout, packed: BucketLayout, itemsize: int) -> int:
    """Returns the bytes that all ranks receive of the padding that packing adds: as gradients, and as params."""
    return (packed.numel - cut.numel) * 2 * itemsize * (packed.num_shards - 1)


def _pack(blocks: Sequence[int], num_shards: int) -> list[list[int]] | None:
    """Returns the matrices of each shard, by index, in shards as short as are found; None: all are too long."""
    total = sum(blocks)
    shortest, longest = max(*blocks, -(-total // num_shards)), int((1 + MOST_PADDING) * total) // num_shards
    for part in range(_LENGTHS if shortest <= longest else 0):
        shards = _pack_into(blocks, num_shards, shortest + (longest - shortest) * part // (_LENGTHS - 1))
        if shards is not None:
            return shards
    return None


def _pack_into(blocks: Sequence[int], num_shards: int, length: int) -> list[list[int]] | None:
    """Gives each matrix, the longest first, to the shard with the least room that is enough; None: there is none."""
    shards: list[list[int]] = [[] for _ in range(num_shards)]
    rooms = [(length, shard) for shard in range(num_shards)]  # sorted
    for index in sorted(range(len(blocks)), key=lambda index: -blocks[index]):
        place = bisect.bisect_left(rooms, (blocks[index], 0))
        if place == len(rooms):
            return None
        room, shard = rooms.pop(place)
        shards[shard].append(index)
        bisect.insort(rooms, (room - blocks[index], shard))
    return [sorted(shard) for shard in shards]
