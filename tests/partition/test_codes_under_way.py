"""What lies in memory while encoded gradients are on their way: their codes, and no buffer that they were made of.

Nothing ends in mid-backward but what the limit asks for, so that no number here depends on the pace of ranks.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import nn

from shardopt import ShardedAdamW, Tuning
from shardopt.partition import reducer as reducer_module
from shardopt.partition.comm.reduce_scatter_p2p import P2PReduceScatter
from shardopt.partition.reducer import BUCKETS_UNDER_WAY, Reducer
from tests.support.ranks import Pool

WIDTH, BUCKETS, WORLD = 64, 6, 2
NUMEL = WIDTH * WIDTH  # of a param


class Found(NamedTuple):
    """At the end of a backward that no reduction but by the limit had ended in."""

    read: Sequence[int]  # elements of each buffer that reductions under way read
    nbytes: Sequence[int]  # that they count
    buffers: int  # in the pool, once the backward has ended


def at_the_end_of_backward(reduce_dtype: Any, in_bucket: int, most: int) -> Found:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(in_bucket * BUCKETS)))
    tuning = Tuning(bucket_bytes=4 * NUMEL * in_bucket, neighbours=False)
    opt = ShardedAdamW(model, stage=2, reduce_dtype=reduce_dtype, tuning=tuning)
    seen: list[tuple[list[int], list[int]]] = []
    finish = Reducer.finish

    def look(reducer: Reducer) -> None:
        seen.append(
            ([each.buffer.numel() for each in reducer._reducing], [each.nbytes for each in reducer._reducing.values()])
        )
        finish(reducer)

    limits: dict[str, Any] = {"BYTES_UNDER_WAY": most, "BYTES_WITHOUT_WAITS": 1 << 40, "BUFFERS_WITHOUT_WAITS": 1 << 40}
    with (
        patch.multiple(reducer_module, **limits),
        patch.object(P2PReduceScatter, "progress", lambda _: []),
        patch.object(Reducer, "finish", look),
    ):
        for _ in range(2):  # the first round finds the order
            model(torch.ones(3, WIDTH)).square().mean().backward()
            opt.step()
            opt.zero_grad()
    reducer: Any = opt.engine.domain.reducer  # type: ignore[union-attr]
    buffers = len(reducer.buffers)
    opt.close()
    return Found(*seen[-1], buffers)


def test_buffers_are_free_once_they_are_encoded(ranks: Pool) -> None:
    for reduce_dtype in ("int8", "int4"):
        for found in ranks.run(at_the_end_of_backward, reduce_dtype, 2, 1 << 40, world=WORLD):
            assert found.read == [0] * BUCKETS and found.buffers == 1, (reduce_dtype, found)
        # A gradient alone in its bucket is sent from where it is.
        for found in ranks.run(at_the_end_of_backward, reduce_dtype, 1, 1 << 40, world=WORLD):
            assert found.read == [0] * BUCKETS and found.buffers == 0, (reduce_dtype, found)
    for found in ranks.run(at_the_end_of_backward, None, 2, 1 << 40, world=WORLD):
        assert found.read == [2 * NUMEL] * BUCKETS and found.buffers == BUCKETS, found


def test_the_limit_counts_codes(ranks: Pool) -> None:
    """The messages of a rank to each, itself included, and what each sends to it: of codes with a scale a block."""
    for reduce_dtype, itemsize in (("int8", 1 + 4 / 256), ("int4", 1 / 2 + 4 / 256)):
        message = int(2 * NUMEL // WORLD * itemsize)
        for number in (BUCKETS_UNDER_WAY, 4):
            most = number * (2 * WORLD - 1) * message
            for found in ranks.run(at_the_end_of_backward, reduce_dtype, 2, most, world=WORLD):
                assert len(found.nbytes) == number and sum(found.nbytes) == most, (reduce_dtype, found)
