"""On a GPU: the compiled Triton kernel gives the bits of the native one, alone and inside of whole optimizers."""

from typing import Any

import pytest
import torch
from torch.nn import Parameter

import shardopt
from shardopt.twins import compare

pytestmark = pytest.mark.gpu

NAMES = ["AdamW", "Adam", "SGD", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD", "Rprop", "Lion"]
# Every flag that changes the arithmetic.
FLAGS: dict[str, dict[str, Any]] = {
    "AdamW": {"amsgrad": True, "maximize": True},
    "Adam": {"amsgrad": True, "weight_decay": 0.1},
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "RMSprop": {"centered": True, "momentum": 0.9},
    "NAdam": {"decoupled_weight_decay": True, "weight_decay": 0.1},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_one_shard(name: str, dtype: torch.dtype) -> None:
    for keywords in ({}, FLAGS.get(name, {})):
        optimizer = getattr(shardopt, f"Sharded{name}")([torch.zeros(1)], **keywords)
        groups = [dict(optimizer.defaults), {**optimizer.defaults, "lr": 0.5 * optimizer.defaults["lr"]}]
        assert {each.tensor: each.different for each in compare(optimizer.rule, groups, dtype) if each.different} == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_whole_optimizers(name: str, dtype: torch.dtype) -> None:
    """Params of many shapes, two groups, one param without a gradient at some steps, clipping, an overflow skipped."""
    ends = []
    for device in ("cpu", "cuda"):
        generator = torch.Generator().manual_seed(0)
        shapes: list[tuple[int, ...]] = [(), (0,), (1,), (257,), (64, 33), (3, 5, 7, 2)]
        params = [Parameter(torch.randn(shape, generator=generator).to(dtype).to(device)) for shape in shapes]
        groups = [{"params": params[:3]}, {"params": params[3:], "lr": 0.003}]
        keywords = {"lr": 0.01, **FLAGS.get(name, {})}
        optimizer = getattr(shardopt, f"Sharded{name}")(groups, max_grad_norm=1.0, **keywords)
        for step in range(6):
            for index, param in enumerate(params):
                grad = torch.randn(param.shape, generator=generator)
                param.grad = None if index == 4 and step in (1, 3) else grad.to(dtype).to(device)
            optimizer.step()
        tensors = [*params, *(value for state in optimizer.state.values() for value in state.values())]
        ends.append([each.detach().float().cpu() for each in tensors])
    for cpu, cuda in zip(*ends, strict=True):
        assert torch.equal(cpu.view(torch.int32), cuda.view(torch.int32))


def test_a_step_waits_for_nothing_but_its_decision() -> None:
    """Gradients may be freed right after the step: their memory is not reused before the kernel has read them."""
    param = Parameter(torch.zeros(1 << 24, device="cuda"))
    optimizer = shardopt.ShardedSGD([param], lr=1.0, tuning=shardopt.Tuning(nonfinite="propagate"))
    for _ in range(5):
        param.grad = torch.ones_like(param)
        optimizer.step()
        param.grad = None
        torch.full_like(param, float("nan"))
    assert torch.equal(param, torch.full_like(param, -5.0))
