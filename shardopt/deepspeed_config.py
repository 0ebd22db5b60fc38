"""A training set up from a DeepSpeed config: optimizer, loss scaler, schedule, accumulation.

::

    run = shardopt.from_deepspeed_config("ds_config.json", model)
    for step, batch in enumerate(loader):
        run.scaler.scale(loss_of(model, batch) / run.accumulation_steps).backward()
        if (step + 1) % run.accumulation_steps == 0:
            run.step()

Every key is mapped, checked, or named: in one warning where it changes no result, in one error where it would.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from .deepspeed_keys import Keys
from .deepspeed_scheduler import curve_of
from .deepspeed_sections import (
    DERIVED,
    DTYPES,
    batch_of,
    check_rest,
    gradient_format_of,
    offload_of,
    optimizer_of,
    precision_of,
    tuning_of,
)
from .loss_scaler import LossScale, LossScaler
from .optimizer import ShardedOptimizer
from .warmup import CurveLR


@dataclass(frozen=True)
class DeepSpeedRun:
    """What a config asks for.

    Attributes:
        optimizer: has taken the module over.
        scaler: disabled (``scale()`` gives its argument back) unless the config says fp16.
        accumulation_steps: backwards before a step; divide each loss by it.
        micro_batch_size: samples of one forward on one rank; None where the config does not say.
        scheduler: None where the config has none.
    """

    optimizer: ShardedOptimizer
    scaler: LossScaler
    accumulation_steps: int
    micro_batch_size: int | None
    scheduler: LRScheduler | None

    def step(self) -> bool:
        """What ``engine.step()`` does at the end of accumulation; whether it was not skipped for an overflow."""
        before = self.optimizer.updates
        self.scaler.step(self.optimizer)
        taken = self.optimizer.updates > before
        self.scaler.update()
        self.optimizer.zero_grad()
        if taken and self.scheduler is not None:
            self.scheduler.step()
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Of optimizer, scaler and scheduler."""
        scheduler = None if self.scheduler is None else self.scheduler.state_dict()
        return {"optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict(), "scheduler": scheduler}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self.scaler.load_state_dict(state_dict["scaler"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state_dict["scheduler"])


def from_deepspeed_config(
    config: Mapping[str, Any] | str | Path,
    module: nn.Module,
    params: Any = None,
    *,
    auto: Mapping[str, Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> DeepSpeedRun:
    """Sets a training up as ``deepspeed.initialize`` would.

    Args:
        config: the JSON file, or what is in it.
        module: plain or DDP, on its device. Cast to fp16 or bf16 where the config says so, in place.
        params: tensors or param groups; None: all of the module's.
        auto: by dotted path (``"optimizer.params.lr"``), what stands for ``"auto"``. Sizes of buckets need none: they
            are made of ``module.config.hidden_size``.
        process_group: the data-parallel ranks; None: those of DDP, or the default group.

    Raises:
        ShardoptError: keys that would change results, all in one message.
    """
    keys = Keys(config, auto or {}, DERIVED)
    ranks = _ranks(module, process_group)
    micro, steps = batch_of(keys, ranks)
    dtype, scale = precision_of(keys)
    stage = keys.take("zero_optimization.stage", 0)
    tuning = tuning_of(keys, module, dtype or next(module.parameters()).dtype)
    construct, arguments = optimizer_of(keys)
    curve = curve_of(keys, "betas" in construct([torch.zeros(1)]).defaults)
    clip = keys.take("gradient_clipping", 0.0)
    travels = keys.take("communication_data_type")
    if travels not in (None, *DTYPES):
        keys.errors.append(f"communication_data_type={travels!r}: one of {', '.join(DTYPES)} is")
    gradients = gradient_format_of(keys, dtype)
    offload = offload_of(keys, stage, next(module.parameters()).device)
    check_rest(keys)
    keys.finish()
    if keys.warnings:
        warnings.warn(
            f"keys of the DeepSpeed config that change no result here: {'; '.join(keys.warnings)}.", stacklevel=2
        )
    if dtype is not None:
        module.to(dtype)
    optimizer = construct(
        list(module.parameters()) if params is None else params,
        **arguments,
        **offload,
        module=module,
        stage=stage,
        process_group=process_group,
        max_grad_norm=clip or None,
        reduce_dtype=DTYPES.get(travels),
        gradient_format=gradients,
        tuning=tuning,
    )
    device = next(module.parameters()).device.type
    scaler = LossScaler(scale or LossScale(), device, enabled=scale is not None)
    return DeepSpeedRun(optimizer, scaler, steps, micro, None if curve is None else CurveLR(optimizer, curve))


def _ranks(module: nn.Module, process_group: dist.ProcessGroup | None) -> int:
    if not dist.is_initialized():
        return 1
    if process_group is None and isinstance(module, DistributedDataParallel):
        return dist.get_world_size(module.process_group)
    return dist.get_world_size(process_group)
