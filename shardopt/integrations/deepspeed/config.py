"""Sets a training up from a DeepSpeed config: optimizer, loss scaler, schedule, accumulation.

::

    run = shardopt.from_deepspeed_config("ds_config.json", model)
    for step, batch in enumerate(loader):
        run.scaler.scale(loss_of(model, batch) / run.accumulation_steps).backward()
        if (step + 1) % run.accumulation_steps == 0:
            run.step()

Every key is mapped or checked. Keys without an effect are listed in one warning; unsupported ones in one error.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from ...arguments import mapping
from ...domain.dtensors import is_dtensor
from ...errors import ShardoptError
from .ignored import check_rest
from .keys import Keys
from .loss_scaler import LossScale, LossScaler
from .optimizer import has_betas, optimizer_of
from .scheduler import ScheduleLR, schedule_of
from .sections import (
    RENAMED,
    SECTIONS,
    batch_of,
    clip_of,
    gather_dtype_of,
    gradient_format_of,
    offload_of,
    precision_of,
    reduce_dtype_of,
    stage_of,
    tuning_of,
)

if TYPE_CHECKING:
    from ...optim.optimizer import ShardedOptimizer


@dataclass(frozen=True)
class DeepSpeedRun:
    """The training that a config asks for.

    Attributes:
        optimizer: has taken the module over.
        scaler: disabled (``scale()`` returns its argument) unless the config enables fp16.
        accumulation_steps: backwards before a step; divide each loss by it.
        micro_batch_size: samples of one forward on one rank; None if the config has none.
        scheduler: None if the config has none.
    """

    optimizer: ShardedOptimizer
    scaler: LossScaler
    accumulation_steps: int
    micro_batch_size: int | None
    scheduler: LRScheduler | None

    def step(self) -> bool:
        """Steps as ``engine.step()`` does after gradient accumulation. Returns False if an overflow skipped it."""
        before = self.optimizer.updates
        self.scaler.step(self.optimizer)
        taken = self.optimizer.updates > before
        self.scaler.update()
        self.optimizer.zero_grad()
        if taken and self.scheduler is not None:
            self.scheduler.step()
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Returns the state dicts of optimizer, scaler and scheduler."""
        scheduler = None if self.scheduler is None else self.scheduler.state_dict()
        return {"optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict(), "scheduler": scheduler}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads what :meth:`state_dict` returned into optimizer, scaler and scheduler."""
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self.scaler.load_state_dict(state_dict["scaler"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state_dict["scheduler"])


def from_deepspeed_config(
    config: Mapping[str, Any] | str | Path,
    module: nn.Module,
    params: Any = None,
    *,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    auto: Mapping[str, Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> DeepSpeedRun:
    """Sets a training up as ``deepspeed.initialize`` would.

    Args:
        config: the JSON file, or its content.
        module: plain or DDP, on its device. If the config enables fp16 or bf16, one of fp32 params runs in it with
            ``compute_dtype``, and its buffers are cast; any other one is cast in place.
        params: tensors or param groups; None: all of the module's. Groups that all have an ``"lr"`` need no
            ``optimizer`` section: AdamW then.
        optimizer: replaces that section: an optimizer of ``torch.optim`` (the sharded class of that name takes over its
            groups and states), its class, a class of shardopt's, or a function of params that returns an optimizer of
            ``torch.optim``.
        auto: values for ``"auto"``, by dotted path (``"optimizer.params.lr"``). Sizes of buckets need none: they follow
            from ``module.config.hidden_size``, or are the defaults.
        process_group: the data-parallel ranks; None: those of DDP, or the default group.

    Raises:
        ShardoptError: keys that would change results, values of the wrong type, ``"auto"`` without a value: all in one
            message, which names the file. Nothing was changed.
    """
    if not isinstance(module, nn.Module):
        raise ShardoptError(
            f"from_deepspeed_config(config, module): module takes an nn.Module, found {type(module).__name__}."
        )
    if params is not None and (isinstance(params, str) or not isinstance(params, Iterable)):
        raise TypeError(f"params takes tensors or param groups, or None, found {type(params).__name__}.")
    keys = Keys(config, mapping(auto, "auto", "{'optimizer.params.lr': 1e-4}"), SECTIONS, RENAMED)
    micro, steps = batch_of(keys, _ranks(module, process_group))
    dtype, scale = precision_of(keys)
    first = next(module.parameters(), torch.zeros(()))
    construct, params, states = optimizer_of(keys, module, params, optimizer)
    schedule = schedule_of(keys, has_betas(construct))
    options = _options_of(keys, module, dtype, first)
    params = list(params)  # which may be a generator
    if dtype is not None and _starts_from_fp32(module, params):
        options["compute_dtype"] = dtype
    check_rest(keys)
    keys.finish()
    if keys.warnings:
        warnings.warn(f"keys of {keys.source} that change no result here: {'; '.join(keys.warnings)}.", stacklevel=2)
    made = construct(params, **options, module=module, process_group=process_group)
    if states is not None:
        made.load_state_dict(states)
    scaler = LossScaler(scale or LossScale(), first.device.type, enabled=scale is not None)
    scheduler = None if schedule is None else ScheduleLR(made, schedule)
    # Last, as nothing can fail after it; params are bound at the first forward.
    if "compute_dtype" in options:
        for buffer in module.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(dtype)
    elif dtype is not None:
        module.to(dtype)
    return DeepSpeedRun(made, scaler, steps, micro, scheduler)


def _options_of(keys: Keys, module: nn.Module, dtype: torch.dtype | None, first: torch.Tensor) -> dict[str, Any]:
    """Returns shardopt's own keywords.

    Args:
        dtype: that the module will be cast to; None: it keeps its own.
        first: of its params.
    """
    stage = stage_of(keys)
    return {
        "stage": stage,
        "tuning": tuning_of(keys, module, dtype or first.dtype),
        "max_grad_norm": clip_of(keys),
        "reduce_dtype": reduce_dtype_of(keys),
        "gather_dtype": gather_dtype_of(keys, stage),
        "gradient_format": gradient_format_of(keys, dtype),
        **offload_of(keys, stage, first.device),
    }


def _starts_from_fp32(module: nn.Module, params: Any) -> bool:
    """True if all that trains has fp32 values, which masters can start from."""
    given = [each for group in params for each in (group["params"] if isinstance(group, Mapping) else [group])]
    known = {id(each[-1] if isinstance(each, tuple) else each) for each in given}
    trained = [param for param in module.parameters() if param.requires_grad]
    return all(
        param.dtype is torch.float32 and not param.is_meta and not is_dtensor(param) and id(param) in known
        for param in trained
    )


def _ranks(module: nn.Module, process_group: dist.ProcessGroup | None) -> int:
    if not dist.is_initialized():
        return 1
    if process_group is None and isinstance(module, DistributedDataParallel):
        return dist.get_world_size(module.process_group)
    return dist.get_world_size(process_group)
