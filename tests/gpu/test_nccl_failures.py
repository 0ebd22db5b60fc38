"""What goes wrong around CUDA and NCCL: the same bits where it need not matter, an error with a type where it does."""

import os
import signal
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import shardopt
from shardopt.offload import pinned
from shardopt.partition import memory
from tests.support.chain import bind_chain, step_chain, train_chain
from tests.support.ranks import Pool
from tests.support.without_gpu import is_here

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not is_here(), reason="only a stand-in of CUDA fails when it is asked to"),
]

NUMELS = (300, 1, 2000, 257, 6000)


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Not ``patch.dict``: at its end there is no variable at all for a moment, and the stand-in's threads read them."""
    before, os.environ[name] = os.environ.get(name), value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def dies(stage: int) -> tuple[str, bool] | None:
    """Rank 1 is killed before its step."""
    tuning = shardopt.Tuning(bucket_bytes=4000, keep_below=500, live_bytes=0, timeout=60.0)
    model, optimizer = bind_chain(stage, "cuda", None, NUMELS, tuning=tuning)
    step_chain(model, optimizer, range(2))
    optimizer.zero_grad()
    model(torch.zeros((), device="cuda"), 3).backward()
    torch.cuda.synchronize()  # all that backward asked of NCCL is done: what follows is the step's
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        optimizer.step()
    except shardopt.CommunicationError as error:
        return str(error), True
    return None


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_killed_rank_is_an_error_on_the_others(ranks: Pool, stage: int) -> None:
    told, _ = ranks.run(dies, stage, world=2, backend="nccl", doomed=[1])
    assert told is not None and "while agreeing on the step" in told[0]


def trains_beside(stage: int) -> list[bytes]:
    """The current GPU is the first one on every rank, as where a script never calls ``set_device``."""
    torch.cuda.set_device(0)
    return train_chain(stage, f"cuda:{dist.get_rank()}", None, NUMELS)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_that_never_call_set_device(ranks: Pool, stage: int) -> None:
    expected = ranks.run(train_chain, stage, "cpu", None, NUMELS, world=2)
    assert ranks.run(trains_beside, stage, world=2, backend="nccl") == expected


def trains_unpinned(offload: Any) -> tuple[list[bytes], list[str], int]:
    with (
        environment("WITHOUT_GPU_NO_PINNING", "1"),
        patch.object(memory, "MAPPED_FROM", 4096),
        patch.object(pinned, "_ALL", weakref.WeakSet()),  # without what an earlier job of this process left
        warnings.catch_warnings(record=True) as heard,
    ):
        warnings.simplefilter("always")
        params = train_chain(2, "cuda", offload, NUMELS)
    return params, [str(each.message) for each in heard], sum(each.pinned_bytes for each in pinned._ALL)


def test_memory_that_cannot_be_pinned(ranks: Pool) -> None:
    """A warning; no later launch fails for it, and the bits are the same."""
    expected = ranks.run(train_chain, 2, "cpu", None, NUMELS, world=2)
    for offload in (shardopt.Offload(step="gpu"), shardopt.Offload(step="cpu")):
        for rank, (params, heard, pinned_bytes) in enumerate(
            ranks.run(trains_unpinned, offload, world=2, backend="nccl")
        ):
            assert params == expected[rank]
            assert pinned_bytes == 0 and sum("could not be pinned" in each for each in heard) == 1


def fills_the_device(stage: int) -> tuple[str, str]:
    """Rank 1's GPU has no room for the buckets; the model and what it computes fit."""
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(8))).cuda()
    optimizer = shardopt.ShardedAdamW(model, stage=stage, tuning=shardopt.Tuning(timeout=120.0))
    torch.cuda.empty_cache()  # of what earlier jobs of this process left
    free, total = torch.cuda.mem_get_info()
    room = total - free + (4 << 20) if dist.get_rank() == 1 else total
    with environment("WITHOUT_GPU_BYTES", str(room)):
        try:
            model(torch.ones(2, 512, device="cuda")).sum().backward()
            optimizer.step()
        except Exception as error:
            return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("stage", [1, 3])
def test_a_full_device_is_an_error_on_all(ranks: Pool, stage: int) -> None:
    other, full = ranks.run(fills_the_device, stage, world=2, backend="nccl")
    assert full[0] == "OutOfMemoryError", full
    assert other[0] in {"CommunicationError", "BindingError", "DisagreementError"}, other
