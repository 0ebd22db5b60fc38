"""Reading ``param.grad`` between two backwards changes no bit of the gradient: the sum is kept, the mean is a quotient.

On three ranks: a third is rounded, so that a sum that is divided and multiplied again has other bits.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardopt import (
    ShardedAdamW,
    ShardedOptimizer,
    Tuning,
    load_checkpoint,
    save_checkpoint,
)
from tests.support.comparing import raw
from tests.support.modules import W, data, loss_of
from tests.support.ranks import Pool

LOOKS: dict[str, Callable[[Any], Any]] = {
    "local": lambda grad: grad.local.clone(),
    "whole": lambda grad: grad.full_tensor(),
    "copy": lambda grad: grad.clone(),
    "cast": lambda grad: grad.double(),
    "finite": lambda grad: grad.isfinite().all(),
    "nan": lambda grad: grad.isnan().any(),
    "norm": lambda grad: grad.norm(),
    "twice": lambda grad: (grad.local, grad.full_tensor()),
    "turned": lambda grad: (grad.neg_(), grad.local, grad.neg_()),
    "sum": lambda grad: grad.sum(),
    "view": lambda grad: grad.view(-1)[3].item(),
    "list": lambda grad: grad.tolist(),
    "order": lambda grad: grad.norm(1),
}


def made(stage: int, gradient_format: str) -> tuple[Any, ShardedOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(W, W), nn.Tanh(), nn.Linear(W, W))
    model.to(torch.bfloat16 if gradient_format == "bf16" else torch.float32)
    tuning = Tuning(bucket_bytes=2000, keep_below=20)
    return model, ShardedAdamW(model, lr=0.01, stage=stage, gradient_format=gradient_format, tuning=tuning)


def backward(model: nn.Module, number: int) -> None:
    loss_of(model(data(number, 4, W).to(next(model.parameters()).dtype)).float()).backward()


def accumulated(model: Any, opt: ShardedOptimizer, look: Callable[[Any], Any] | None) -> list[bytes]:
    opt.zero_grad()
    for number in range(3):
        backward(model, number)
        for param in model.parameters() if look is not None else ():
            look(param.grad)
    return [raw(param.grad.local) for param in model.parameters()]


def looking() -> None:
    for stage, gradient_format in ((0, "fp32"), (2, "fp32"), (2, "bf16"), (3, "fp32")):
        model, opt = made(stage, gradient_format)
        expected = accumulated(model, opt, None)
        for name, look in LOOKS.items():
            assert accumulated(model, opt, look) == expected, f"{name}, stage {stage}, {gradient_format}"
        opt.close()


def writing() -> None:
    """What is written to what was read holds, and only that: the rest is the sum that it was."""
    results = []
    for writes in (False, True):
        model, opt = made(2, "fp32")
        backward(model, 0)
        grad: Any = model[0].weight.grad
        if writes:
            grad.local[:1] = 7
        backward(model, 1)
        results.append(model[0].weight.grad.local.clone())
        opt.close()
    plain, written = results
    assert torch.equal(plain[1:], written[1:]) and (not plain.numel() or (written[0] - plain[0]).abs() > 5)


def saving(folder: str) -> None:
    """One rank looks, all save between two backwards; who goes on and who resumes have the same bits."""
    model, opt = made(2, "fp32")
    expected = accumulated(model, opt, None)
    opt.zero_grad()
    for number in range(2):
        backward(model, number)
    if dist.get_rank() == 1:
        for param in model.parameters():
            assert param.grad.local is not None
    save_checkpoint(folder, model, opt)
    backward(model, 2)
    assert [raw(param.grad.local) for param in model.parameters()] == expected
    opt.close()
    model, opt = made(2, "fp32")
    load_checkpoint(folder, model, opt)
    backward(model, 2)
    assert [raw(param.grad.local) for param in model.parameters()] == expected


def test_looking(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(looking, world=3)
    ranks.run(writing, world=3)
    ranks.run(saving, str(tmp_path), world=3)
