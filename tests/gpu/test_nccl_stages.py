"""Ranks with a GPU each, over NCCL: every stage and every tier leaves the bits of CPUs over gloo."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest

import shardopt
from shardopt.domain import tiers
from shardopt.partition import memory
from tests.support.chain import train_chain
from tests.support.ranks import Pool

pytestmark = pytest.mark.gpu

SMALL, SEVERAL_CHUNKS = (300, 1, 2000, 257, 6000), (300, 1, 2000, 257, 20_000)
TUNING = shardopt.Tuning(bucket_bytes=4000, keep_below=500, live_bytes=0, chunk_bytes=16 << 10)


@contextmanager
def small_mappings() -> Iterator[None]:
    """Streams of these sizes lie in pages of their own, as large ones do, so that they can be pinned."""
    with patch.object(memory, "MAPPED_FROM", 4096):
        yield


def trains_each(stage: int, device: str, ways: list[Any], numels: tuple[int, ...]) -> list[list[bytes]]:
    """One group for all of them."""
    found = []
    for way in ways:
        with small_mappings(), patch.object(tiers, "register_with_cuda", wraps=tiers.register_with_cuda) as register:
            found.append(train_chain(stage, device, way, numels, tuning=TUNING))
        pins = isinstance(way, shardopt.Offload) and way.states == "cpu" and way.pin_memory
        assert device == "cpu" or not pins or register.called, way
    return found


def expect_same(ranks: Pool, world: int, stage: int, ways: list[Any], numels: tuple[int, ...] = SMALL) -> None:
    (expected,) = ranks.run(trains_each, stage, "cpu", [None], numels, world=world)[0]
    for rank, found in enumerate(ranks.run(trains_each, stage, "cuda", ways, numels, world=world, backend="nccl")):
        for way, params in zip(ways, found, strict=True):
            assert params == expected, (rank, way)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stages(ranks: Pool, stage: int, world: int) -> None:
    expect_same(ranks, world, stage, [None])


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_tiers(ranks: Pool, stage: int, world: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    root = str(tmp_path_factory.mktemp("states"))
    ways: list[Any] = ["cpu", shardopt.Offload(pin_memory=False), root]
    ways += [shardopt.Offload(step=step) for step in ("cpu", "gpu")]
    if stage >= 2:
        ways += [shardopt.Offload(gradients="cpu", step=step) for step in ("cpu", "gpu")]
        ways += [shardopt.Offload(root, gradients="cpu")]
    if stage == 3:
        ways += [shardopt.Offload(params="cpu"), shardopt.Offload(root, params=root)]
    expect_same(ranks, world, stage, ways, SEVERAL_CHUNKS)
