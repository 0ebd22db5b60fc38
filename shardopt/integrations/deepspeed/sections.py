"""Translates the sections of a DeepSpeed config, one function each."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...config import MIB, Offload, Tuning
from .keys import count, flag, number, text
from .loss_scaler import LossScale

if TYPE_CHECKING:
    from .keys import Keys, Kind

_ZERO = "zero_optimization"
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

SECTIONS = (
    *("optimizer", "optimizer.params", "scheduler", "scheduler.params", "fp16", "bf16", "data_types", _ZERO),
    *(f"{_ZERO}.offload_optimizer", f"{_ZERO}.offload_param"),
)
_SHORT = ("prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters", "max_reuse_distance")
_LONG = ("gather_16bit_weights_on_model_save", "model_persistence_threshold", "module_granularity_threshold")
# Other names of keys in a config -> the names that are taken.
RENAMED = {
    "bfloat16": "bf16",
    "fp16.master_weights_and_grads": "fp16.fp16_master_weights_and_grads",
    **{f"{_ZERO}.{name}": f"{_ZERO}.stage3_{name}" for name in (*_SHORT, *_LONG)},
    f"{_ZERO}.use_all_reduce_for_fetch_params": f"{_ZERO}.stage3_use_all_reduce_for_fetch_params",
}

_NAMES = {
    torch.float32: ("fp32", "float32", "torch.float32"),
    torch.float16: ("fp16", "float16", "torch.float16", "half"),
    torch.bfloat16: ("bf16", "bfp16", "bfloat16", "torch.bfloat16"),
}
_DTYPES = {name: dtype for dtype, names in _NAMES.items() for name in names}

# A larger bucket leaves nothing to overlap. DeepSpeed's sizes are those of buffers for copies of gradients.
_LARGEST_BUCKET = 32 * MIB


def batch_of(keys: Keys, ranks: int) -> tuple[int | None, int]:
    """Returns (samples of a forward on a rank, backwards before a step); two of the three keys determine the third."""
    # "auto" counts as missing where the other keys determine it.
    asks = keys.is_auto(BATCH[2])
    given = []
    for name in BATCH:
        if keys.is_auto(name):
            keys.drop(name)
        found = keys.take(name, count)
        if found == 0:
            keys.refuse(name, found, "it is at least 1")
        given.append(found or None)
    total, micro, steps = given
    if asks and total is None:
        keys.unfilled.append(BATCH[2])
    if micro is None and total is not None:
        micro, rest = divmod(total, ranks * (steps or 1))
        if rest or not micro:
            keys.errors.append(
                f"train_batch_size={total}: it cannot be shared by {ranks} ranks x {steps or 1} accumulation steps"
            )
    if steps is None:
        steps, rest = divmod(total, micro * ranks) if total is not None and micro else (1, 0)
        steps = max(steps, 1)
    if total is not None and micro and total != micro * steps * ranks:
        keys.errors.append(
            f"train_batch_size={total}: train_micro_batch_size_per_gpu {micro} x gradient_accumulation_steps {steps} x "
            f"{ranks} ranks are {micro * steps * ranks}"
        )
    return micro, steps


def precision_of(keys: Keys) -> tuple[torch.dtype | None, LossScale | None]:
    fp16, bf16 = (keys.take(f"{section}.enabled", flag, False) for section in ("fp16", "bf16"))
    for section in ("fp16", "bf16"):
        keys.expect(f"{section}.{section}_master_weights_and_grads", False, "masters are fp32 here")
    keys.expect("bf16.bf16_optimizer_states", False, 'construct the optimizer yourself, with state_format="bf16"')
    if fp16 and bf16:
        keys.errors.append("fp16.enabled and bf16.enabled: only one of them can be true")
    if not fp16:  # then the rest of the section has no effect
        for name in _SCALE:
            keys.drop(f"fp16.{name}")
        return (torch.bfloat16 if bf16 else None), None
    rule = {name: keys.take(f"fp16.{key}", kind, default) for key, (name, kind, default) in _SCALE.items()}
    fixed, power = rule.pop("fixed"), rule.pop("power")
    try:
        return torch.float16, LossScale(initial=fixed or 2.0**power, fixed=bool(fixed), **rule)
    except (ValueError, OverflowError) as error:
        keys.errors.append(f"fp16: {str(error).removesuffix('.')}")
        return torch.float16, None


_SCALE: dict[str, tuple[str, Kind, Any]] = {
    "loss_scale": ("fixed", number, 0),
    "initial_scale_power": ("power", number, 16),
    "loss_scale_window": ("window", count, 1000),
    "hysteresis": ("hysteresis", count, 2),
    "consecutive_hysteresis": ("refills", flag, False),
    "min_loss_scale": ("floor", number, 1),
}


def stage_of(keys: Keys) -> int:
    stage: int = keys.take(f"{_ZERO}.stage", count, 0)
    if stage > 3:
        keys.refuse(f"{_ZERO}.stage", stage, "0, 1, 2 or 3 is")
        return 0
    return stage


def clip_of(keys: Keys) -> float | None:
    clip: float = keys.take("gradient_clipping", number, 0.0)
    if clip < 0:
        keys.refuse("gradient_clipping", clip, "a norm is above 0, and 0 clips nothing")
    return clip if clip > 0 else None


def gather_dtype_of(keys: Keys, stage: int) -> str | None:
    """Returns the form in which params travel at stage 3; None: their own dtype."""
    path = f"{_ZERO}.zero_quantized_weights"
    is_quantized = keys.take(path, flag, False)
    if is_quantized and stage < 3:
        keys.refuse(path, is_quantized, "at stage 3 it is")
    return "int8" if is_quantized and stage == 3 else None


def reduce_dtype_of(keys: Keys) -> torch.dtype | str | None:
    """Returns the dtype in which gradients are reduced; "int4" if they are quantized, as there."""
    asked = keys.take("communication_data_type", text)
    if keys.take(f"{_ZERO}.zero_quantized_gradients", flag, False):
        if asked is not None:
            keys.refuse("communication_data_type", asked, "without zero_quantized_gradients it is")
        return "int4"
    if keys.take("fp32_allreduce", flag, False) and asked is None:
        asked = "fp32"
    if asked is not None and asked not in _DTYPES:
        keys.refuse("communication_data_type", asked, "fp32, fp16 or bf16 is")
    return _DTYPES.get(asked) if asked is not None else None


def tuning_of(keys: Keys, module: nn.Module, dtype: torch.dtype) -> Tuning:
    """Converts sizes in elements to bytes. If the model's width is not known, "auto" stands for the default."""
    hidden = _hidden_size(module)

    def elements(name: str, of_hidden: int | None) -> int | None:
        path = f"{_ZERO}.{name}"
        if keys.is_auto(path):
            keys.drop(path)
            return of_hidden
        found: int | None = keys.take(path, count)
        return found

    bucket = elements("reduce_bucket_size", None if hidden is None else hidden**2)
    keep = elements("stage3_param_persistence_threshold", None if hidden is None else 10 * hidden)
    live = elements("stage3_max_live_parameters", None)
    tuning = Tuning()
    if bucket == 0:
        keys.refuse(f"{_ZERO}.reduce_bucket_size", bucket, "it is at least 1")
    elif bucket is not None and bucket * dtype.itemsize > _LARGEST_BUCKET:
        keys.warn(f"{_ZERO}.reduce_bucket_size", "larger buckets overlap less: Tuning.bucket_bytes keeps its default")
    elif bucket is not None:
        tuning = replace(tuning, bucket_bytes=bucket * dtype.itemsize)
    if keep is not None:
        tuning = replace(tuning, keep_below=keep)
    if live is not None:
        tuning = replace(tuning, live_bytes=live * dtype.itemsize)
    return tuning


def _hidden_size(module: nn.Module) -> int | None:
    """Returns the model's width from the places where the Hugging Face integration looks for it."""
    whole = module.module if isinstance(module, DistributedDataParallel) else module
    config: Any = getattr(whole, "config", None)
    for each in (config, getattr(config, "text_config", None)):
        for name in ("hidden_size", "hidden_sizes", "n_embd", "d_model"):
            found = getattr(each, name, None)
            if found is not None:
                return int(max(found) if isinstance(found, list | tuple) else found)
    return None


def offload_of(keys: Keys, stage: int, device: torch.device) -> dict[str, Any]:
    """Returns the config's ``offload=`` as a keyword for the optimizer. It changes no result.

    Args:
        device: of the params.
    """
    pins = [
        keys.take(f"{_ZERO}.{name}", flag)
        for name in ("offload_optimizer.pin_memory", "offload_param.pin_memory", "cpu_offload_use_pin_memory")
    ]
    pinned = next((each for each in pins if each is not None), None)
    ratio = keys.take(f"{_ZERO}.offload_optimizer.ratio", number, 1.0)
    states = _tier_of(keys, "offload_optimizer", ("cpu_offload",))
    states = states if ratio else None
    params = _tier_of(keys, "offload_param", ("cpu_offload_params", "cpu_offload_param"))
    if params is not None and stage < 3:
        keys.warn(f"{_ZERO}.offload_param", "below stage 3 params are whole on every rank")
        params = None
    if device.type != "cpu" and params == "cpu" and states not in (None, "cpu"):
        keys.warn(f"{_ZERO}.offload_param", "what leaves a GPU goes where its masters do: into the file")
        params = states
    if states is None and params is None:
        return {}
    if states is None:
        keys.warn(f"{_ZERO}.offload_param without offload_optimizer", "masters and states go with the params")
    try:
        found = Offload(states=states or params or "cpu", params=params, fraction=ratio or 1.0)
    except (TypeError, ValueError) as error:
        keys.errors.append(f"{_ZERO}.offload_optimizer: {str(error).removesuffix('.')}")
        return {}
    return {"offload": found if pinned is None else replace(found, pin_memory=pinned)}


def _tier_of(keys: Keys, section: str, old: tuple[str, ...]) -> str | None:
    """Returns "cpu", a directory, or None if the section does not offload."""
    path = f"{_ZERO}.{section}"
    device = keys.take(f"{path}.device", text, "none")
    directory: str | None = keys.take(f"{path}.nvme_path", text)
    if any([keys.take(f"{_ZERO}.{name}", flag, False) for name in old]):
        return "cpu"
    if device == "nvme":
        if not directory:
            keys.errors.append(f"{path}.device='nvme' without nvme_path: there is no directory for its files")
        return directory or None
    if device not in ("none", "cpu"):
        keys.refuse(f"{path}.device", device, "none, cpu or nvme is")
    return "cpu" if device == "cpu" else None


def gradient_format_of(keys: Keys, dtype: torch.dtype | None) -> str:
    """Returns the format of sums of gradients."""
    asked = keys.take("data_types.grad_accum_dtype", text, "fp32")
    kept = _DTYPES.get(asked)
    if kept is torch.bfloat16 and dtype is torch.bfloat16:
        return "bf16"
    if kept is not torch.float32:
        keys.refuse("data_types.grad_accum_dtype", asked, "'fp32', or with bf16 params 'bf16'")
    return "fp32"
