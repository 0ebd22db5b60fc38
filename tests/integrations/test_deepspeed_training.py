"""A training from a DeepSpeed config is the one that its keys describe, step for step, and resumes to the bit.

The same training is written here a second time, with torch alone: a model in the config's precision, fp32 masters,
``torch.optim.AdamW``, clipping by the global norm, a schedule, accumulation over micro-batches and ranks.
"""

import copy
import io
import json
import math
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from shardopt import from_deepspeed_config
from tests.integrations.test_deepspeed_config import DOCUMENTED
from tests.support.ranks import Pool
from tests.support.training import Net, apart, loss_of

STEPS, SAVED, SKIPPED = 9, 4, 2
SCALE = 256.0  # of the loss, in fp16
LR, LEAST, WARMUP, TOTAL, DECAY, CLIP = 0.01, 0.001, 3, 10, 0.1, 0.5
# Distance of the ends, as a share of the way from the start. Measured: 2e-7 in fp32; a master that is off by an ulp
# rounds to another bf16 param now and then.
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 1e-3, torch.float16: 1e-3}


def micro_batch(module: nn.Module, step: int, turn: int) -> Tensor:
    """A loss; each step's gradients are larger or smaller than the last one's. One overflows on one rank."""
    loss = loss_of(module, 10 * step + turn) * (0.2, 3.0, 1.0, 0.5)[step % 4]
    return loss * math.inf if (step, turn, dist.get_rank()) == (SKIPPED, 0, 1) else loss


# -- with torch alone --------------------------------------------------------------------------------------------------


def rate(taken: int) -> float:
    """Of WarmupDecayLR, behind so many steps: the lowest one first, then up with a logarithm, then down in a line."""
    if taken == 0:
        return LEAST
    at = taken - 1
    share = math.log(at + 1) / math.log(WARMUP) if at < WARMUP else (TOTAL - at) / (TOTAL - WARMUP)
    return LEAST + (LR - LEAST) * share


def mean_gradients(module: nn.Module, step: int, scale: float) -> list[Tensor]:
    """fp32, over two micro-batches and all ranks; back from the scale of the loss."""
    totals = [torch.zeros(param.shape) for param in module.parameters()]
    for turn in range(2):
        (micro_batch(module, step, turn) / 2 * scale).backward()
        for total, param in zip(totals, module.parameters(), strict=True):
            assert param.grad is not None
            total += param.grad.float()
            param.grad = None
    for total in totals:
        dist.all_reduce(total)
    return [total / dist.get_world_size() / scale for total in totals]


def reference(dtype: torch.dtype, has_schedule: bool) -> tuple[nn.Module, list[float]]:
    """The model at the end, and the norms of the steps' gradients."""
    module = Net()
    masters = [Parameter(param.detach()) for param in module.parameters()]  # of the exact values
    module.to(dtype)
    optimizer = torch.optim.AdamW(masters, lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=DECAY)
    norms = []
    for step in range(STEPS):
        gradients = mean_gradients(module, step, SCALE if dtype is torch.float16 else 1.0)
        if step == SKIPPED:
            continue
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient
        if has_schedule:
            optimizer.param_groups[0]["lr"] = rate(len(norms))
        norms.append(nn.utils.clip_grad_norm_(masters, CLIP).item())
        optimizer.step()
        for master, param in zip(masters, module.parameters(), strict=True):
            param.data.copy_(master.detach())
    return module, norms


# -- from the config ---------------------------------------------------------------------------------------------------


def config_of(dtype: torch.dtype, stage: int, has_schedule: bool, directory: str) -> dict[str, Any]:
    config = json.loads(json.dumps(DOCUMENTED))
    config["zero_optimization"]["stage"] = stage
    config["zero_optimization"]["offload_optimizer"]["nvme_path"] = directory
    config["fp16"].update(enabled=dtype is torch.float16, initial_scale_power=math.log2(SCALE))
    config["bf16"] = {"enabled": dtype is torch.bfloat16}
    assert config["optimizer"]["params"] == {"lr": LR, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": DECAY}
    rates = {"warmup_min_lr": LEAST, "warmup_max_lr": LR, "warmup_num_steps": WARMUP, "total_num_steps": TOTAL}
    assert config["scheduler"] == {"type": "WarmupDecayLR", "params": rates}
    if not has_schedule:
        del config["scheduler"]
    assert config["gradient_clipping"] == CLIP and config["gradient_accumulation_steps"] == 2
    return config


def train(run: Any, module: nn.Module, steps: range) -> None:
    for step in steps:
        for turn in range(run.accumulation_steps):
            run.scaler.scale(micro_batch(module, step, turn) / run.accumulation_steps).backward()
        assert run.step() == (step != SKIPPED)


def whole(run: Any, module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """What forward sees: ``unsharded()`` shows the fp32 values that it rounds."""
    with run.optimizer.unsharded():
        return {name: param.detach().to(dtype, copy=True) for name, param in module.named_parameters()}


def saved(run: Any, module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """What rank 0 writes alone, on every rank."""
    box = [b"", b""]
    if dist.get_rank() == 0:
        for index, shown in enumerate((run.state_dict(), module.state_dict())):
            file = io.BytesIO()
            torch.save(shown, file)
            box[index] = file.getvalue()
    dist.broadcast_object_list(box, 0)
    states, weights = (torch.load(io.BytesIO(each), weights_only=True) for each in box)
    return states, weights


def trains_and_resumes(dtype: torch.dtype, stage: int, has_schedule: bool, directory: str) -> None:
    config = config_of(dtype, stage, has_schedule, directory)
    module, again = Net(), Net()
    start = {name: param.to(dtype) for name, param in copy.deepcopy(module).named_parameters()}
    expected, norms = reference(dtype, has_schedule)
    assert min(norms) < CLIP < max(norms) / 2  # some are clipped
    run = from_deepspeed_config(config, module)
    train(run, module, range(SAVED))
    states, weights = saved(run, module)
    assert run.scaler.get_scale() == (SCALE if dtype is torch.float16 else 1.0)
    assert run.optimizer.memory()["state"]["disk"]
    train(run, module, range(SAVED, STEPS))
    found = whole(run, module, dtype)
    theirs = {name: param.detach() for name, param in expected.named_parameters()}
    distance = apart(found, theirs, start)
    assert distance < BOUNDS[dtype], (dtype, stage, distance)
    resumed = from_deepspeed_config(config, again)
    again.load_state_dict(weights)
    resumed.load_state_dict(states)
    train(resumed, again, range(SAVED, STEPS))
    for name, param in whole(resumed, again, dtype).items():
        assert torch.equal(param, found[name]), name
    assert resumed.scaler.state_dict() == run.scaler.state_dict()
    for each in (run, resumed):
        each.optimizer.close()


def all_precisions(directory: str) -> None:
    warnings.simplefilter("ignore")  # keys that change no result, and the step that overflows
    trains_and_resumes(torch.float32, 1, False, directory)
    trains_and_resumes(torch.float32, 3, True, directory)
    trains_and_resumes(torch.bfloat16, 2, True, directory)
    trains_and_resumes(torch.float16, 3, True, directory)


def test_trains_as_torch_does_and_resumes(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(all_precisions, str(tmp_path), world=2)
