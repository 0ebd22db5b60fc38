"""Ranks with a GPU each, over NCCL: what leaves a training (checkpoints, state dicts) and how gradients may end."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardopt
from tests.support.chain import bind_chain, bits_of, step_chain
from tests.support.comparing import raw
from tests.support.ranks import Pool

pytestmark = pytest.mark.gpu

NUMELS = (300, 1, 2000, 257, 3000)
FORMATS = {"dtype": torch.bfloat16, "master": "split24", "state_format": "int8"}


def runs(device: str, world: int, ranks: Pool, function: Any, *arguments: Any) -> list[Any]:
    """The same function over gloo on CPUs, or over NCCL."""
    return ranks.run(function, device, *arguments, world=world, backend="nccl" if device == "cuda" else "gloo")


# -- checkpoints -------------------------------------------------------------------------------------------------------


def saves(device: str, root: Path, stage: int, offload: Any, asynchronous: bool) -> list[bytes]:
    model, optimizer = bind_chain(stage, device, offload, NUMELS)
    step_chain(model, optimizer, range(3))
    saving = shardopt.save_checkpoint(root, model, optimizer, asynchronous=asynchronous)
    step_chain(model, optimizer, range(3, 5))  # while it is written
    saving.wait()
    return bits_of(model, optimizer)


def goes_on(device: str, root: Path, stage: int, offload: Any) -> list[bytes]:
    model, optimizer = bind_chain(stage, device, offload, NUMELS)
    shardopt.load_checkpoint(root, model, optimizer)
    step_chain(model, optimizer, range(3, 5))
    return bits_of(model, optimizer)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_checkpoints(ranks: Pool, stage: int, tmp_path: Path) -> None:
    """Saved on GPUs, also in the background; loaded on GPUs at another stage, and on CPUs: all the same bits."""
    expected = runs("cpu", 2, ranks, saves, tmp_path / "cpu", stage, None, False)
    ways = [(None, False), ("cpu", True), (str(tmp_path / "states"), False)]
    for number, (offload, background) in enumerate(ways):
        root = tmp_path / str(number)
        assert runs("cuda", 2, ranks, saves, root, stage, offload, background) == expected, offload
        assert runs("cuda", 2, ranks, goes_on, root, (stage + 1) % 4, offload if (stage + 1) % 4 else None) == expected
        assert runs("cpu", 2, ranks, goes_on, root, stage, None) == expected, offload


# -- state dicts -------------------------------------------------------------------------------------------------------


def saves_alone(device: str, stage: int, options: dict[str, Any], questions: int) -> dict[str, Any] | None:
    """Rank 0 writes while the others go on into the next step, where they wait for it."""
    model, optimizer = bind_chain(stage, device, None, NUMELS, **options)
    found: dict[str, Any] = {}
    for step in range(questions):
        step_chain(model, optimizer, range(step, step + 1))
        if dist.get_rank() == 0:
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            found = torch.load(file, weights_only=True, map_location="cpu")
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank():
        return None
    whole = optimizer.state_dict()
    for index, state in whole["state"].items():
        for name, value in state.items():
            assert raw(torch.as_tensor(value).cpu()) == raw(torch.as_tensor(found["state"][index][name])), (index, name)
    return {
        f"{index} {name}": raw(torch.as_tensor(value).cpu())
        for index, state in whole["state"].items()
        for name, value in state.items()
    }


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_rank_saves_alone_and_all_consolidate(ranks: Pool, stage: int) -> None:
    """More questions than the 32 streams that torch hands out in turn: none may wait behind NCCL's."""
    for options, questions in (({}, 12), (FORMATS if stage else {}, 3)):
        on_cpu, on_cuda = (runs(device, 2, ranks, saves_alone, stage, options, questions) for device in ("cpu", "cuda"))
        assert on_cuda == on_cpu and len(on_cpu[0]) >= 10


# -- gradients ---------------------------------------------------------------------------------------------------------


def releases(device: str, is_released: bool, options: dict[str, Any]) -> list[bytes]:
    keywords = {"max_grad_norm": None, "release_gradients": is_released, **options}
    model, optimizer = bind_chain(1, device, None, NUMELS, **keywords)
    step_chain(model, optimizer, range(0, 8, 2))  # one backward each
    return bits_of(model, optimizer)


def test_released_gradients(ranks: Pool) -> None:
    for options in ({}, FORMATS):
        expected = runs("cpu", 2, ranks, releases, False, options)
        for is_released in (False, True):
            assert runs("cuda", 2, ranks, releases, is_released, options) == expected


def clips(device: str, stage: int) -> tuple[list[bytes], list[float]]:
    """torch's own clipping, on parts."""
    model, optimizer = bind_chain(stage, device, None, NUMELS, max_grad_norm=None)
    norms = []
    for step in range(3):
        optimizer.zero_grad()
        model(torch.zeros((), device=next(model.parameters()).device), step + 7 * dist.get_rank()).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 50.0)))
        optimizer.step()
    return bits_of(model, optimizer), norms


def test_clip_grad_norm(ranks: Pool) -> None:
    for stage in (2, 3):
        assert runs("cuda", 2, ranks, clips, stage) == runs("cpu", 2, ranks, clips, stage)
