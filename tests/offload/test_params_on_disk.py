"""Stage 3 with slices of the params in a file: freed memory, whole steps, every way of reading and writing params."""

import copy
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardopt
from shardopt import Offload, OffloadError, ShardedAdamW, Tuning
from shardopt.offload.disk.store import DiskStore
from tests.offload.test_offload_faults import Faulty, System, system
from tests.support.memory import resident
from tests.support.ranks import Pool
from tests.support.training import raw

MIB = 1 << 20


class Tower(nn.Module):
    """Trained layers on a frozen one, of which some are small enough to stay whole."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(40, 60)
        self.base.requires_grad_(False)
        self.layers = nn.ModuleList([nn.Linear(60, 70), nn.Linear(70, 3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.base(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def in_file(root: str | None) -> Offload | None:
    return None if root is None else Offload(root, params=root)


def make(offload: Offload | None, low: bool = True, **keywords: Any) -> tuple[Tower, ShardedAdamW]:
    torch.manual_seed(0)
    model = Tower().to(torch.bfloat16 if low else torch.float32)
    tuning = Tuning(chunk_bytes=4096, bucket_bytes=4000, keep_below=200, live_bytes=0, neighbours=False)
    return model, ShardedAdamW(model, lr=0.01, stage=3, offload=offload, tuning=tuning, **keywords)


def step(model: Tower, optimizer: ShardedAdamW, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    optimizer.zero_grad()
    model(torch.randn(4, 40, generator=generator).to(model.base.weight.dtype)).float().sum().backward()
    optimizer.step()


def bits(model: Tower, optimizer: ShardedAdamW) -> list[bytes]:
    with optimizer.unsharded():
        whole = [raw(param.detach().clone()) for param in model.parameters()]
    states = [value for state in copy.deepcopy(optimizer.state_dict())["state"].values() for value in state.values()]
    return whole + [raw(value) for value in states]


# -- every way to params -----------------------------------------------------------------------------------------------


def goes_through_everything(offload: Offload | None, runs: str, low: bool) -> list[list[bytes]]:
    """The same calls with params in memory and elsewhere; their bits after each."""
    model, optimizer = make(offload, low, ema=0.9)
    found = []
    for number in range(2):
        step(model, optimizer, number)
    found.append(bits(model, optimizer))
    with optimizer.unsharded():  # written through .data
        model.layers[0].weight.data.mul_(0.5)
        model.base.weight.data.add_(0.25)
    found.append(bits(model, optimizer))
    with optimizer.unsharded(ema=True):
        found.append([raw(param.detach().clone()) for param in model.parameters()])
    step(model, optimizer, 2)
    with optimizer.unsharded():
        weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    saved = copy.deepcopy(optimizer.state_dict())
    shardopt.save_checkpoint(runs, model, optimizer)
    step(model, optimizer, 3)
    found.append(bits(model, optimizer))
    shardopt.load_checkpoint(runs, model, optimizer)
    found.append(bits(model, optimizer))
    if offload is not None:
        optimizer.offload("cpu")
        assert "disk" not in optimizer.memory()["param"]
        assert offload.params is None or optimizer.memory()["param"]["host"] > 0
    step(model, optimizer, 4)
    if offload is not None:
        optimizer.offload(offload.directory or Path(runs))
        optimizer.reload()
    found.append(bits(model, optimizer))
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    step(model, optimizer, 3)
    found.append(bits(model, optimizer))
    model.base.weight.requires_grad_(True)  # it was frozen, and is trained from here on
    step(model, optimizer, 5)
    found.append(bits(model, optimizer))
    optimizer.close()
    found.append([raw(param.detach()) for param in model.parameters()])
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_every_way_to_params_leaves_the_same_bits(world: int, ranks: Pool, tmp_path: Path) -> None:
    for low in (True, False):
        expected = ranks.run(goes_through_everything, None, str(tmp_path / f"runs {low}"), low, world=world)
        found = ranks.run(
            goes_through_everything, in_file(str(tmp_path / "swap")), str(tmp_path / f"away {low}"), low, world=world
        )
        for mine, theirs in zip(found, expected, strict=True):
            assert [a == b for a, b in zip(mine, theirs, strict=True)] == [True] * len(theirs)
    assert not os.listdir(tmp_path / "swap")


def materialises(root: str | None) -> list[bytes]:
    tuning = Tuning(chunk_bytes=4096, bucket_bytes=4000, keep_below=200, neighbours=False)
    with torch.device("meta"):
        model = Tower()
    torch.manual_seed(0)
    offload = None if root is None else Offload(root, params=root)
    optimizer = ShardedAdamW(model, lr=0.01, stage=3, offload=offload, tuning=tuning)
    step(model, optimizer, 0)
    return bits(model, optimizer)


def test_a_model_on_the_meta_device_is_made_in_the_file(ranks: Pool, tmp_path: Path) -> None:
    assert ranks.run(materialises, str(tmp_path), world=2) == ranks.run(materialises, None, world=2)


# -- memory ------------------------------------------------------------------------------------------------------------


def test_the_memory_of_params_is_free(tmp_path: Path) -> None:
    _, small = make(in_file(str(tmp_path)))
    small.bind()  # what is loaded once
    small.close()
    layers = [nn.Linear(1024, 4096, bias=False) for _ in range(4)]
    layers[3].requires_grad_(False)
    model = nn.ModuleList(layers)  # 64 MiB, of which 16 are frozen
    before = resident()
    optimizer = ShardedAdamW(model, stage=3, offload=Offload(tmp_path, params=tmp_path), tuning=Tuning(live_bytes=0))
    optimizer.bind()
    nbytes = 4 * 16 * MIB
    assert before - resident() > 0.8 * nbytes
    memory = optimizer.memory()
    assert memory["param"] == {"device": 0, "disk": nbytes} and memory["state"] == {"disk": 2 * 3 * 16 * MIB}
    optimizer.close()


# -- faults ------------------------------------------------------------------------------------------------------------


def fails_somewhere(root: str, kind: str, every: int) -> int:
    """A write, or a read, of the last rank's step fails, one after the other. Returns how many did.

    No read is made before the step: see test_read_ahead.py.
    """
    expected_model, expected = make(None)
    model, optimizer = make(in_file(root))
    for number in range(2):
        step(expected_model, expected, number)
        step(model, optimizer, number)
    before, failures = bits(model, optimizer), 0
    is_last = dist.get_rank() == dist.get_world_size() - 1
    while True:
        optimizer.zero_grad()
        with patch.object(DiskStore, "read_ahead", lambda _: None):
            model(torch.ones(4, 40, dtype=torch.bfloat16)).float().sum().backward()
        faulty: System = Faulty(kind, "EIO", every * failures) if is_last else System()
        try:
            with system(faulty):
                optimizer.step()
            break
        except OffloadError:
            failures += 1
        assert bits(model, optimizer) == before
    expected.zero_grad()
    expected_model(torch.ones(4, 40, dtype=torch.bfloat16)).float().sum().backward()
    expected.step()
    assert bits(model, optimizer) == bits(expected_model, expected)
    optimizer.close()
    expected.close()
    return failures


def test_a_step_that_fails_leaves_params_as_they_were(ranks: Pool, tmp_path: Path) -> None:
    for kind in ("write", "read"):
        failures = ranks.run(fails_somewhere, str(tmp_path), kind, 3, world=2)
        assert failures[0] == failures[1] > 3


def cannot_be_written_back(root: str) -> str:
    model, optimizer = make(in_file(root))
    step(model, optimizer, 0)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    faulty: System = Faulty("write", "EIO", 0) if is_last else System()
    try:
        with system(faulty), optimizer.unsharded():
            model.layers[0].weight.data.mul_(0.5)
    except shardopt.ShardoptError as error:
        return type(error).__name__
    return ""


def test_params_that_cannot_be_written_back_are_told_to_all(ranks: Pool, tmp_path: Path) -> None:
    assert ranks.run(cannot_be_written_back, str(tmp_path), world=2) == ["CommunicationError", "OffloadError"]


class TwoBuckets(nn.Module):
    """One module that needs several buckets at once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Parameter(torch.randn(40, 60)), nn.Parameter(torch.randn(60, 70))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.one @ self.two


def reads_that_fail(root: str | None) -> tuple[int, list[bytes]]:
    """Each read fails once, in forward, backward and unsharded(); the call is made again. Returns how many did.

    No read is made before the step: one that fails there is not told, and would end the series early.
    """
    model = nn.Sequential(TwoBuckets(), nn.Linear(70, 40))
    tuning = Tuning(bucket_bytes=4000, keep_below=200, live_bytes=0)
    optimizer = ShardedAdamW(model, lr=0.01, stage=3, offload=in_file(root), tuning=tuning)

    def forward_and_backward() -> None:
        optimizer.zero_grad()
        with patch.object(DiskStore, "read_ahead", lambda _: None):
            model(torch.ones(4, 40)).square().mean().backward()

    def shown() -> list[bytes]:
        with optimizer.unsharded():
            return [raw(param.detach().clone()) for param in model.parameters()]

    forward_and_backward()
    optimizer.step()
    failures = 0
    for call in (forward_and_backward, shown):
        for at in range(100):
            with system(Faulty("read", "EIO", at)):
                try:
                    call()
                    break
                except OffloadError:
                    failures += 1
        assert optimizer.engine.domain is not None and optimizer.engine.domain.sharded is not None
        assert not any(each.users for each in optimizer.engine.domain.sharded.units)
    optimizer.step()
    found = shown()
    optimizer.close()
    return failures, found


def test_a_read_that_fails_once_is_made_again(tmp_path: Path) -> None:
    failures, found = reads_that_fail(str(tmp_path))
    assert failures > 6 and found == reads_that_fail(None)[1]
