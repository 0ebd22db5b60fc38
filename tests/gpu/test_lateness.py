"""The stand-in of CUDA itself: what only hopes to be done is not done, and who waits for whom is told."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import shardopt
from shardopt.offload.streams import CopyStreams
from shardopt.partition.comm.group import Ranks
from tests.gpu.test_nccl_failures import environment
from tests.gpu.test_nccl_stages import SEVERAL_CHUNKS, TUNING, small_mappings
from tests.support.chain import train_chain
from tests.support.ranks import Pool, RankFailure
from tests.support.without_gpu import is_here

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not is_here(), reason="on a GPU it is a matter of luck")]


def waits_for_nothing() -> dict[str, list[float]]:
    """What the host finds behind a wait for a stream that waited for nobody."""
    found = {}
    side = torch.cuda.Stream()
    source, copy = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    source.fill_(3.0)
    with torch.cuda.stream(side):
        copy.copy_(source)
    side.synchronize()
    with torch.cuda.stream(side):
        found["kernel"] = copy.tolist()
        side.wait_stream(torch.cuda.default_stream())
        found["kernel that waits"] = copy.copy_(source).tolist()
    gathered = torch.zeros(2, device="cuda")
    torch.cuda.synchronize()
    hosts = dist.new_group(backend="gloo")
    work = dist.all_gather_single(gathered, torch.ones(1, device="cuda"), async_op=True)
    found["all-gather"] = gathered.tolist()
    dist.barrier(hosts)  # a rank that waits makes the other one's part run, too
    work.wait()
    found["all-gather that is waited for"] = gathered.tolist()
    pinned = torch.zeros(4, pin_memory=True)
    pinned.copy_(source, non_blocking=True)
    found["pinned"] = pinned.tolist()
    torch.cuda.synchronize()
    found["pinned, waited for"] = pinned.tolist()
    return found


def test_nothing_runs_before_somebody_waits(ranks: Pool) -> None:
    for found in ranks.run(waits_for_nothing, world=2, backend="nccl"):
        assert found == {
            "kernel": [0.0] * 4,
            "kernel that waits": [3.0] * 4,
            "all-gather": [0.0] * 2,
            "all-gather that is waited for": [1.0] * 2,
            "pinned": [0.0] * 4,
            "pinned, waited for": [3.0] * 4,
        }


# -- waits of the package that are taken away --------------------------------------------------------------------------


def ring_copies(streams: CopyStreams, stream: torch.cuda.Stream, copies: Any, after: Any) -> Any:
    """As CopyStreams._copy, which waits for ``after``."""
    with torch.cuda.stream(stream):
        for into, source in copies:
            into.copy_(source, non_blocking=True)
    return streams._mark(stream)


WAITS: dict[str, tuple[Any, str, Callable[..., Any], int, Any]] = {  # who, what, instead, stage, offload
    "for a reduction": (Ranks, "wait_on_stream", lambda *_: None, 2, None),
    "for a gather": (Ranks, "wait_on_stream", lambda *_: None, 3, None),
    "of a kernel for a copy": (CopyStreams, "wait", lambda *_: None, 1, shardopt.Offload(step="gpu")),
    "of a copy for a kernel": (CopyStreams, "_copy", ring_copies, 1, shardopt.Offload(step="gpu")),
    "of the host for a copy": (CopyStreams, "synchronize", lambda *_: None, 1, shardopt.Offload(step="cpu")),
}


def trains_without(name: str | None, stage: int, offload: Any) -> list[bytes] | str:
    who, what, instead, _, _ = WAITS[name or "for a gather"]
    with small_mappings(), patch.object(who, what, instead if name else getattr(who, what)):
        try:
            return train_chain(stage, "cuda", offload, SEVERAL_CHUNKS, tuning=TUNING)
        except Exception as error:  # gradients that are not finite, say
            return repr(error)


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_that_is_missing_shows(ranks: Pool, name: str) -> None:
    *_, stage, offload = WAITS[name]
    expected = ranks.run(trains_without, None, stage, offload, world=2, backend="nccl")
    assert all(isinstance(each, list) for each in expected)
    assert ranks.run(trains_without, name, stage, offload, world=2, backend="nccl") != expected


# -- ranks that wait for each other ------------------------------------------------------------------------------------


def crosses(report: str) -> None:
    """Each rank waits in one group for what the other one would do only after it."""
    groups = [dist.new_group(), dist.new_group()]
    for group in groups:  # makes its communicator
        dist.all_reduce(torch.ones(1, device="cuda"), group=group)
    torch.cuda.synchronize()
    with environment("WITHOUT_GPU_SECONDS", "5"), environment("WITHOUT_GPU_REPORT", report):
        for group in groups if dist.get_rank() else reversed(groups):
            dist.all_reduce(torch.ones(1, device="cuda"), group=group)
            torch.cuda.synchronize()


def differ(report: str) -> None:
    with environment("WITHOUT_GPU_REPORT", report):
        dist.all_reduce(torch.ones(1 + dist.get_rank(), device="cuda"))
        torch.cuda.synchronize()


@pytest.mark.parametrize(
    ("does", "words"),
    [
        (crosses, ["who waits for whom", "which waits for rank", "in collective 2", ": 1 collectives enqueued"]),
        (differ, ["ranks differ in collective 1", "all-reduce of 1 elements", "all-reduce of 2 elements"]),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_ranks_that_wait_in_vain_are_told_why(
    ranks: Pool, does: Callable[[str], None], words: list[str], tmp_path: Path
) -> None:
    report = tmp_path / "report"
    with pytest.raises(RankFailure):  # torch's watchdog may end the process
        ranks.run(does, str(report), world=2, backend="nccl", deadline=120)
    assert all(word in report.read_text() for word in words), report.read_text()
