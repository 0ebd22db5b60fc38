"""``offload(params=True)``: nothing of the params is left where they train, and what reads them reads them still."""

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import shardopt
from shardopt import OffloadError, ShardedAdamW, StateError, Tuning
from tests.support.modules import Stack, train_step
from tests.support.ranks import Pool
from tests.support.training import raises


def made(neighbours: bool = False, compute_dtype: torch.dtype | None = None) -> tuple[Any, shardopt.ShardedOptimizer]:
    torch.manual_seed(0)
    model = Stack()
    model.blocks[0].requires_grad_(False)
    tuning = Tuning(keep_below=20, bucket_bytes=2000, neighbours=neighbours, live_bytes=1 << 20)
    return model, ShardedAdamW(model, lr=0.01, stage=3, tuning=tuning, compute_dtype=compute_dtype)


def held(opt: shardopt.ShardedOptimizer) -> dict[str, int]:
    return {tier: nbytes for tier, nbytes in opt.memory()["param"].items() if nbytes}


def slices_of(opt: shardopt.ShardedOptimizer) -> list[StorageWeakRef]:
    assert opt.engine.domain is not None
    shards = (*opt.engine.domain.shards, *opt.engine.domain.frozen_shards)
    return [StorageWeakRef(each.param.untyped_storage()) for each in shards if each.param is not None and each.gathered]


def wholes(opt: shardopt.ShardedOptimizer) -> list[torch.Tensor]:
    return [whole for _, whole in opt.weights(2000)]


def same(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(ones) == len(others) and all(one.equal(other) for one, other in zip(ones, others, strict=True))


def sleeps(root: str, compute_dtype: torch.dtype | None) -> None:
    model, opt = made(compute_dtype=compute_dtype)
    twin, still = made(compute_dtype=compute_dtype)
    for step in range(4):
        for each, one in ((model, opt), (twin, still)):
            train_step(each, one, step)
        before, slices = held(opt), slices_of(opt)
        opt.offload(f"{root}/new/folder", params=True)
        assert slices and all(each.expired() for each in slices)
        opt.offload(f"{root}/new/folder", params=True)  # all of it sleeps already
        kept = sum(each.nbytes for each in model.parameters() if each.numel() < 20)
        assert held(opt).get("device", 0) <= kept and held(opt)["disk"] <= before["device"], held(opt)
        assert same(wholes(opt), wholes(still))
        shown, other = model.state_dict(), twin.state_dict()
        assert all(
            one.full_tensor().equal(other[name].full_tensor()) for name, one in shown.items() if "weight" in name
        )
        shardopt.save_checkpoint(f"{root}/runs", model, opt)
        states = copy.deepcopy(opt.state_dict())
        for call in (lambda: model(torch.ones(1, 24)), opt.unsharded().__enter__, opt.step):
            with raises(StateError, "reload("):
                call()
        opt.reload(states=step % 2 == 0)
        assert held(opt) == before
        with torch.no_grad():
            assert model(torch.ones(1, 24)).equal(twin(torch.ones(1, 24)))
        opt.load_state_dict(states)
        if step != 1:  # a step with params here and states away
            opt.reload()
        loaded, anew = made(compute_dtype=compute_dtype)
        shardopt.load_checkpoint(f"{root}/runs", loaded, anew)
        assert same(wholes(anew), wholes(still))
        anew.close()
    dist.barrier()  # until each rank has removed its own file
    assert not list(Path(f"{root}/new/folder").iterdir())
    dist.barrier()
    opt.offload(f"{root}/new/folder", params=True)
    opt.close()
    assert all(
        one.equal(other)
        for one, other in zip(model.parameters(), map(torch.Tensor.detach, _whole(twin, still)), strict=True)
    )


def _whole(model: nn.Module, opt: shardopt.ShardedOptimizer) -> list[torch.Tensor]:
    opt.close()
    return list(model.parameters())


def stays(root: str) -> None:
    """Neighbours read slices by their address: these stay, and so do all where one rank has no room."""
    model, opt = made(neighbours=True)
    train_step(model, opt, 0)
    assert opt.engine.domain is not None and opt.engine.domain.sharded is not None
    opt.offload(f"{root}/x", params=True)
    assert opt.engine.domain.sharded.gatherer.gathered == []
    train_step(model, opt, 1)
    (Path(root) / "a file").touch()
    model, opt = made()
    train_step(model, opt, 0)
    before = opt.memory()
    with raises(OffloadError):
        opt.offload(f"{root}/a file/in it", params=True)
    assert held(opt) == {tier: nbytes for tier, nbytes in before["param"].items() if nbytes}
    train_step(model, opt, 1)


def test_params_sleep(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(sleeps, str(tmp_path / "fp32"), None, world=2)
    ranks.run(sleeps, str(tmp_path / "cast"), torch.bfloat16, world=2)  # slices are fp32, and sleep in it
    ranks.run(stays, str(tmp_path), world=2)
