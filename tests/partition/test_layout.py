"""Layouts: the picture in the docstring, what must hold for any params and ranks, sizes that no machine holds."""

import re
import sys
from collections.abc import Callable
from itertools import groupby, pairwise
from types import FrameType
from typing import Any, TypeVar

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardopt.partition import layout
from shardopt.partition.layout import BLOCK, BucketLayout, Piece, split_into_buckets

T = TypeVar("T")

NUMELS = st.lists(
    st.integers(0, 5 * BLOCK) | st.sampled_from([0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 10**6]), min_size=1, max_size=12
)


# -- the picture -------------------------------------------------------------------------------------------------------


def test_picture() -> None:
    """The ASCII picture, read back character by character: 64 elements each, `.` is padding."""
    text = layout.__doc__ or ""
    found = re.search(r"With params of ([\d, ]+) and (\d+) elements over (\d+) ranks", text)
    assert found
    numels = (*map(int, found[1].split(", ")), int(found[2]))
    bucket = BucketLayout(numels, int(found[3]))
    rows = {
        label: re.search(rf"^    {label} +(.+)$", text, re.MULTILINE)[1].split()  # type: ignore[index]
        for label in ("block", "param", "rank")
    }
    blocks = len(rows["block"])
    assert rows["block"] == [str(index) for index in range(blocks)] and bucket.numel == blocks * BLOCK
    drawn_params, drawn_ranks = ([cell for cell in "".join(rows[label])] for label in ("param", "rank"))
    params, ranks = ["."] * (blocks * 4), [""] * (blocks * 4)
    for rank in range(bucket.num_shards):
        shard = bucket.shard_slice(rank)
        ranks[shard.start // 64 : shard.stop // 64] = str(rank) * (bucket.shard_numel // 64)
        for piece in bucket.pieces(rank):
            first = (shard.start + piece.shard_start) // 64
            cells = -(-piece.numel // 64)
            params[first : first + cells] = "abcd"[piece.param] * cells
    assert params == drawn_params and ranks == drawn_ranks
    assert f"The bucket is {blocks} blocks = {bucket.numel:,} elements, a shard {bucket.shard_numel}." in text
    assert [list(bucket.pieces(rank)) for rank in range(3)] == [
        [Piece(0, 0, 300, 0)],
        [Piece(2, 0, 512, 0)],
        [Piece(2, 512, 188, 0), Piece(3, 0, 1, 256)],
    ]


# -- any params, any ranks ---------------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(numels=NUMELS, num_shards=st.integers(1, 9))
@example(numels=[1], num_shards=8)  # ranks that own nothing
@example(numels=[0, 0], num_shards=3)
@example(numels=[2 * BLOCK + 1, 0, 1], num_shards=2)  # a cut inside the first, behind the empty one
def test_pieces_cover_every_param_once(numels: list[int], num_shards: int) -> None:
    bucket = BucketLayout(tuple(numels), num_shards)
    assert len(bucket.offsets) == len(numels) + 1 and all(offset % BLOCK == 0 for offset in bucket.offsets)
    assert all(
        after - before - numel in range(BLOCK)
        for (before, after), numel in zip(pairwise(bucket.offsets), numels, strict=True)
    )
    slices = [bucket.shard_slice(rank) for rank in range(num_shards)]
    assert [part.stop - part.start for part in slices] == [bucket.shard_numel] * num_shards
    assert slices[0].start == 0 and slices[-1].stop == bucket.numel
    assert all(left.stop == right.start for left, right in pairwise(slices))
    # What padding costs: less than a block a param and a block a rank.
    assert bucket.numel - sum(numels) < BLOCK * (len(numels) + num_shards)
    assert bucket.shard_numel % BLOCK == 0

    reached = [0] * len(numels)  # of each param, up to where its pieces so far go
    for rank in range(num_shards):
        pieces = bucket.pieces(rank)
        assert [piece.param for piece in pieces] == sorted({piece.param for piece in pieces})
        for piece in pieces:
            assert piece.numel > 0 and piece.start == reached[piece.param]
            reached[piece.param] += piece.numel
            assert piece.start % BLOCK == 0 and piece.shard_start % BLOCK == 0
            assert 0 <= piece.shard_start < piece.shard_end <= bucket.shard_numel
            # Where the piece lies in the bucket is where its param has it.
            assert slices[rank].start + piece.shard_start == bucket.offsets[piece.param] + piece.start
            # Only the end of a param may leave a block unfinished.
            assert piece.numel % BLOCK == 0 or reached[piece.param] == numels[piece.param]
    assert reached == numels


@settings(max_examples=100)
@given(numels=NUMELS, shards=st.tuples(st.integers(1, 9), st.integers(1, 9)))
def test_blocks_of_a_param_do_not_depend_on_ranks(numels: list[int], shards: tuple[int, int]) -> None:
    def blocks(num_shards: int) -> set[tuple[int, int, int]]:
        bucket = BucketLayout(tuple(numels), num_shards)
        return {
            (piece.param, piece.start + first, min(BLOCK, piece.numel - first))
            for rank in range(num_shards)
            for piece in bucket.pieces(rank)
            for first in range(0, piece.numel, BLOCK)
        }

    assert blocks(shards[0]) == blocks(shards[1])
    assert BucketLayout(tuple(numels), shards[0]).offsets == BucketLayout(tuple(numels), shards[1]).offsets


@pytest.mark.parametrize(("numels", "num_shards"), [((1, -1), 2), ((1,), 0), ((1,), -3)])
def test_refused(numels: tuple[int, ...], num_shards: int) -> None:
    with pytest.raises(ValueError, match="at least one shard and no negative sizes, found BucketLayout"):
        BucketLayout(numels, num_shards)


# -- buckets -----------------------------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(sizes=st.lists(st.integers(0, 100) | st.just(0), max_size=30), limit=st.integers(1, 150))
def test_buckets_keep_order_and_size(sizes: list[int], limit: int) -> None:
    buckets = split_into_buckets(sizes, limit)
    assert [index for bucket in buckets for index in bucket] == list(range(len(sizes)))
    filled = [sum(sizes[index] for index in bucket) for bucket in buckets]
    for bucket, total in zip(buckets, filled, strict=True):
        assert bucket
        assert total <= limit or sum(sizes[index] > 0 for index in bucket) == 1
    # None is cut short: the next param would not have fitted.
    for (_, total), (after, _) in pairwise(zip(buckets, filled, strict=True)):
        assert total + sizes[after[0]] > limit


def test_a_huge_param_is_alone_and_tiny_ones_share() -> None:
    assert split_into_buckets([10, 10, 1000, 1, 1], 25) == [[0, 1], [2], [3, 4]]
    assert split_into_buckets([], 25) == []


# -- a trillion --------------------------------------------------------------------------------------------------------


def lines_run(call: Callable[[], T]) -> tuple[int, T]:
    """How many lines of the layout's file a call runs, and what it returns."""
    lines = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_filename != layout.__file__:  # a finalizer of what some other test left
            return None
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        returned = call()
    finally:
        sys.settrace(before)
    return lines, returned


def test_trillion_params_over_4096_ranks() -> None:
    """Plain integers, no loop over blocks, nor over params for each rank: many small ones and a huge one."""
    numels = (*[4097] * 20_000, 10**12 - 7)
    lines, bucket = lines_run(lambda: BucketLayout(numels, 4096))
    first_lines, first = lines_run(lambda: bucket.pieces(0))  # all small ones, and the offsets of all
    counted = [lines_run(lambda rank=rank: bucket.pieces(rank)) for rank in range(1, 4096)]
    assert lines + first_lines < 20 * len(numels) and max(lines for lines, _ in counted) < 50
    pieces = [first, *(of_rank for _, of_rank in counted)]
    assert sum(piece.numel for of_rank in pieces for piece in of_rank) == sum(numels)
    assert bucket.numel / sum(numels) < 1.00001
    assert max(piece.start for of_rank in pieces for piece in of_rank) > 2**39
    assert all(isinstance(value, int) for value in (bucket.numel, *bucket.offsets))


@pytest.mark.parametrize("world", [1, 2, 8])
def test_padding_of_a_real_model(world: int) -> None:
    """A GPT of 33M params on 8 ranks: under 1 % of padding."""
    width, layers = 512, 10
    sizes = [(3 * width * width, 3 * width, width * width, width, width, width), (4 * width * width, 4 * width) * 2]
    numels = (
        256 * width,
        1024 * width,
        *[size for _ in range(layers) for kind in sizes for size in kind],
        width,
        width,
    )
    bucket = BucketLayout(numels, world)
    assert 31e6 < sum(numels) < 34e6
    assert bucket.numel / sum(numels) < 1.01


def test_one_huge_and_many_tiny_are_balanced() -> None:
    """No rank has more than its even share and a block, whatever the shapes."""
    numels = (10**7, *[1] * 1000, 3 * 10**6)
    bucket = BucketLayout(numels, 8)
    blocks = sum(-(-numel // BLOCK) for numel in numels)
    assert bucket.shard_numel == -(-blocks // 8) * BLOCK
    owners = [piece.param for rank in range(8) for piece in bucket.pieces(rank)]
    assert len([key for key, _ in groupby(owners)]) == len(numels)
