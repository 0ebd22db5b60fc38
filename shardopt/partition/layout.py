"""The place of each param in its bucket, and the slice of each rank: integers only, testable without ranks.

Params follow each other in a bucket, each starting on a block of 256 elements; every rank owns the same number
of whole blocks. With params of 300, 0, 700 and 1 elements over 3 ranks (one character is 64 elements, `.` is padding)::

    block    0   1   2   3   4   5
    param    aaaa a... cccc cccc ccc. d...
    rank     0000 0000 1111 1111 2222 2222

The bucket is 6 blocks = 1,536 elements, a shard 512. Rank 0 owns all of `a` (and the empty `b`), rank 1 the first 512
elements of `c`, rank 2 its last 188 and `d`. Nothing about a param's blocks depends on the number of ranks, so a number
format that works on blocks never does either. (This example is a test.)
"""

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

# Elements of a block. An 8-bit state has one scale for each block. A param that began within a block would share a
# scale with its neighbour, and its bits would depend on the mesh: so params and shards start on blocks. Test:
# test_blocks_of_a_param_do_not_depend_on_ranks in tests/partition/test_layout.py.
BLOCK = 256


# The share of a bucket, and the elements, from which on a param's gradient is copied as it arrives: a gradient that
# rests is memory that the copy would free.
LARGE = 1 / 4
SMALL = 2**18


@dataclass(frozen=True)
class Piece:
    """The part of one param that lies in one shard. All figures are elements."""

    param: int  # index in the bucket
    start: int  # first element of the param, in storage order
    numel: int
    shard_start: int  # its start in the shard; a multiple of 256

    @property
    def shard_end(self) -> int:
        return self.shard_start + self.numel

    @property
    def local(self) -> slice:
        """Its elements in the shard."""
        return slice(self.shard_start, self.shard_end)


@dataclass(frozen=True)
class BucketLayout:
    """The offsets of one bucket's params, and the slices of its shards.

    Attributes:
        numels: elements of each param.
        num_shards: ranks that share the bucket (1: replicated).
    """

    numels: tuple[int, ...]
    num_shards: int

    def __post_init__(self) -> None:
        if self.num_shards < 1 or any(numel < 0 for numel in self.numels):
            raise ValueError(f"give a layout at least one shard and no negative sizes, found {self!r}.")

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The first element of each param in the bucket, and the end of the last param."""
        return tuple(accumulate((round_up(numel) for numel in self.numels), initial=0))

    @cached_property
    def shard_numel(self) -> int:
        """The elements of every rank's shard, padding included."""
        blocks = self.offsets[-1] // BLOCK
        return -(-blocks // self.num_shards) * BLOCK

    @cached_property
    def resting(self) -> tuple[int, ...]:
        """The params whose gradients rest where autograd put them until the last one of the bucket is there."""
        most = max(LARGE * sum(self.numels), SMALL)
        return tuple(index for index, numel in enumerate(self.numels) if numel <= most) if len(self.numels) > 1 else ()

    @property
    def numel(self) -> int:
        """The elements of the bucket, padding included."""
        return self.shard_numel * self.num_shards

    def over(self, num_shards: int) -> "BucketLayout":
        """Returns the layout of these params over so many ranks."""
        return self if num_shards == self.num_shards else BucketLayout(self.numels, num_shards)

    def shard_slice(self, rank: int) -> slice:
        return slice(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """Returns the part of each param in the shard of ``rank``, in order; omits params with no element in it."""
        return tuple(self._pieces(rank))

    def _pieces(self, rank: int) -> Iterator[Piece]:
        shard = self.shard_slice(rank)
        first = max(bisect.bisect_right(self.offsets, shard.start) - 1, 0)
        for param in range(first, len(self.numels)):
            offset, numel = self.offsets[param], self.numels[param]
            if offset >= shard.stop:
                break
            start, end = max(offset, shard.start), min(offset + numel, shard.stop)
            if start < end:
                yield Piece(param, start - offset, end - start, start - shard.start)


def split_into_buckets(nbytes: Sequence[int], bucket_bytes: int) -> list[list[int]]:
    """Groups indices of params, in their order: a bucket holds at most ``bucket_bytes``, or a single param."""
    buckets: list[list[int]] = []
    first = 0
    while first < len(nbytes):
        end = end_of_bucket(nbytes, first, bucket_bytes)
        buckets.append(list(range(first, end)))
        first = end
    return buckets


def end_of_bucket(nbytes: Sequence[int], first: int, bucket_bytes: int) -> int:
    """Returns the end of the bucket that begins with param ``first``."""
    filled = 0
    for end in range(first, len(nbytes)):
        if filled and filled + nbytes[end] > bucket_bytes:
            return end
        filled += nbytes[end]
    return len(nbytes)


def round_up(numel: int) -> int:
    """Returns the elements of the blocks that hold a param."""
    return -(-numel // BLOCK) * BLOCK
