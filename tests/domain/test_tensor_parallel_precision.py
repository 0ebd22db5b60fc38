"""``compute_dtype`` of tensor-parallel models: the bits of the model in bf16 whose masters start from fp32 values."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardopt import ShardedAdamW, ShardedOptimizer, Tuning, load_checkpoint, save_checkpoint
from tests.support.comparing import raw
from tests.support.composed import whole
from tests.support.ranks import Pool
from tests.support.tensor_parallel import in_parallel, loss, mesh_of, model_of

BF16, FP32 = torch.bfloat16, torch.float32
STEPS = 3
Steps = Iterator[tuple[bytes, dict[str, Tensor]]]


def made(mesh: DeviceMesh, model: nn.Module, stage: int, **more: Any) -> ShardedOptimizer:
    tuning = Tuning(bucket_bytes=300, keep_below=4, neighbours=stage != 2)
    return ShardedAdamW(model, process_group=mesh["dp"].get_group(), lr=0.01, stage=stage, tuning=tuning, **more)


def step_of(mesh: DeviceMesh, model: nn.Module, opt: ShardedOptimizer, step: int) -> bytes:
    opt.zero_grad()
    with in_parallel(model):
        found = loss(model, step, mesh["dp"].get_local_rank())
        found.float().backward()
    opt.step()
    return raw(found.detach().float())


def as_low(mesh: DeviceMesh, layout: str) -> Steps:
    model = model_of(layout, mesh["tp"])
    exact = [param.detach().clone() for param in model.parameters()]
    model.bfloat16()
    if layout != "sequence":  # which is given tokens
        model.register_forward_pre_hook(lambda _, inputs: tuple(each.bfloat16() for each in inputs))
    opt = made(mesh, model, 1)
    slots = ("exp_avg", "exp_avg_sq")
    states = {
        index: {
            "step": torch.tensor(0.0),
            "master": each,
            **{s: torch.zeros_like(each) for s in slots},
        }
        for index, each in enumerate(exact)
    }
    opt.load_state_dict({"state": states, "param_groups": opt.state_dict()["param_groups"]})
    for step in range(STEPS):
        told = step_of(mesh, model, opt, step)
        yield told, {name: whole(opt.state[param]["master"]).clone() for name, param in model.named_parameters()}
    opt.close()


def saved(model: nn.Module) -> dict[str, Tensor]:
    found = {name: whole(value) for name, value in model.state_dict().items()}
    return {name: whole(value).clone() for name, value in found.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(raw(one[name]) == raw(other[name]) for name in one)


def dtypes(model: nn.Module) -> set[torch.dtype]:
    cut = [param for param in model.parameters() if isinstance(param, DTensor)]
    return {each.dtype for each in model.parameters()} | {each.to_local().dtype for each in cut}


def computes_in_bf16(folder: Path) -> None:
    mesh = mesh_of()
    for layout, stages in (("blocks", (1, 3)), ("sequence", (2, 3))):
        expected = list(as_low(mesh, layout))
        for stage in stages:
            model = model_of(layout, mesh["tp"])
            opt = made(mesh, model, stage, compute_dtype=BF16)
            for step, (told, values) in enumerate(expected):
                assert step_of(mesh, model, opt, step) == told, (layout, stage, step)
                assert same(saved(model), values), (layout, stage, step)
                assert stage == 3 or dtypes(model) == {BF16}
            with opt.unsharded(), torch.no_grad():
                assert dtypes(model) == {FP32}
                assert same({name: whole(param).clone() for name, param in model.named_parameters()}, values)
                for param in model.parameters():
                    param.mul_(1 + 2**-20)  # less than bf16 can tell
            assert same(saved(model), {name: each * (1 + 2**-20) for name, each in values.items()}), (layout, stage)
            save_checkpoint(folder / f"{layout}{stage}", model, opt)
            again = model_of(layout, mesh["tp"], seed=1)
            other = made(mesh, again, 1, compute_dtype=BF16)
            load_checkpoint(folder / f"{layout}{stage}", again, other)
            assert step_of(mesh, again, other, 3) == step_of(mesh, model, opt, 3)
            after = saved(model)
            assert same(saved(again), after), (layout, stage)
            opt.close()
            other.close()
            assert dtypes(model) == {FP32} and same(saved(model), after), (layout, stage)


def test_tensor_parallel_models_compute_in_bf16(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(computes_in_bf16, tmp_path, world=4)
