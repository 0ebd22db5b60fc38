"""The sections of a DeepSpeed config, one function each: what they become here."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .config import Offload, Tuning
from .deepspeed_keys import Keys
from .loss_scaler import LossScale
from .optim import ShardedAdagrad, ShardedAdam, ShardedAdamW, ShardedLion, ShardedSGD
from .optimizer import ShardedOptimizer

_ZERO = "zero_optimization"
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_SIZES = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
# Their "auto" follows from each other, and from the width of the model.
DERIVED = (*BATCH, *(f"{_ZERO}.{name}" for name in _SIZES))

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bfp16": torch.bfloat16, "bf16": torch.bfloat16}


def batch_of(keys: Keys, ranks: int) -> tuple[int | None, int]:
    """(samples of a forward on a rank, backwards before a step): two of three say the third."""
    # "auto" is as good as missing where the others say it.
    given = [None if keys.is_auto(name) else keys.take(name) for name in BATCH]
    keys.ignore(*BATCH)
    total, micro, steps = given
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
    fp16, bf16 = keys.take("fp16.enabled", False), keys.take("bf16.enabled", False)
    for section in ("fp16", "bf16"):
        keys.expect(f"{section}.{section}_master_weights_and_grads", False, "masters are fp32 here")
    keys.ignore("fp16.auto_cast" if keys.take("fp16.auto_cast", False) is False else "-", "bf16.check_grad_overflow")
    found = keys.take_all("fp16")
    if fp16 and bf16:
        keys.errors.append("fp16.enabled and bf16.enabled: one of them is")
    if not fp16:
        return (torch.bfloat16 if bf16 else None), None
    fixed = found.pop("loss_scale", 0)
    scale = LossScale(
        initial=fixed or 2.0 ** found.pop("initial_scale_power", 16),
        fixed=bool(fixed),
        window=found.pop("loss_scale_window", 1000),
        hysteresis=found.pop("hysteresis", 2),
        refills=found.pop("consecutive_hysteresis", False),
        floor=found.pop("min_loss_scale", 1),
    )
    found.pop("initial_scale_power", None)
    keys.errors += [f"fp16.{name}={value!r}: not known here" for name, value in found.items()]
    return torch.float16, scale


Construct = Callable[..., ShardedOptimizer]
# What their constructors there take where the config is silent, where it differs from the classes' here.
_FUSED = {"weight_decay": 0.0}
_CLASSES: dict[str, tuple[Construct, dict[str, Any]]] = {
    "adamw": (ShardedAdamW, _FUSED),
    "adam": (ShardedAdam, _FUSED),
    "adagrad": (ShardedAdagrad, {}),
    "lion": (ShardedLion, {"lr": 1e-3}),
    "sgd": (ShardedSGD, {}),
}


def optimizer_of(keys: Keys) -> tuple[Construct, dict[str, Any]]:
    if not keys.has("optimizer"):
        keys.errors.append(
            "no optimizer: construct it yourself, as shardopt.ShardedAdamW(module, stage=...), and take scaler and "
            "schedule from torch"
        )
    kind = str(keys.take("optimizer.type", "AdamW"))
    arguments = keys.take_all("optimizer.params")
    keys.ignore("optimizer.legacy_fusion")
    name = kind.lower()
    if arguments.pop("bias_correction", True) is not True:
        keys.errors.append("optimizer.params.bias_correction=false: the moments are always corrected")
    is_torchs = arguments.pop("torch_adam", False)
    # There "Adam" decouples its decay too, unless it is told not to.
    if name == "adam" and arguments.pop("adam_w_mode", True):
        name = "adamw"
    arguments.pop("adam_w_mode", None)
    if name not in _CLASSES:
        keys.errors.append(f"optimizer.type={kind!r}: there are {', '.join(sorted(_CLASSES))}")
        return ShardedAdamW, {}
    construct, defaults = _CLASSES[name]
    known = {*construct([torch.zeros(1)]).defaults, "lr"}
    keys.errors += [f"optimizer.params.{key}: {kind} has no such argument" for key in arguments if key not in known]
    if "betas" in arguments:
        arguments["betas"] = tuple(arguments["betas"])
    return construct, {**({} if is_torchs else defaults), **{k: v for k, v in arguments.items() if k in known}}


def tuning_of(keys: Keys, module: nn.Module, dtype: torch.dtype) -> Tuning:
    """Sizes are elements there and bytes here."""
    hidden = _hidden_size(module)

    def elements(name: str, of_hidden: float | None) -> int | None:
        path = f"{_ZERO}.{name}"
        is_auto, found = keys.is_auto(path), keys.take(path)
        if is_auto and of_hidden is None:
            keys.errors.append(f"{path} is 'auto', and module.config has no hidden_size: give it in auto=")
            return None
        found = of_hidden if is_auto else found
        return None if found is None else int(found)

    bucket = elements("reduce_bucket_size", None if hidden is None else hidden**2)
    keep = elements("stage3_param_persistence_threshold", None if hidden is None else 10 * hidden)
    live = elements("stage3_max_live_parameters", None)
    tuning = Tuning()
    if bucket is not None:
        tuning = replace(tuning, bucket_bytes=bucket * dtype.itemsize)
    if keep is not None:
        tuning = replace(tuning, keep_below=keep)
    if live is not None:
        tuning = replace(tuning, live_bytes=live * dtype.itemsize)
    for name, why in {
        "allgather_bucket_size": "params are gathered in the buckets that gradients are reduced in",
        "stage3_prefetch_bucket_size": "the bucket that comes next is asked for early, whatever its size",
        "stage3_max_reuse_distance": "what was used longest ago goes first, once stage3_max_live_parameters are there",
        "sub_group_size": "a shard is updated in one launch, which needs no buffers",
    }.items():
        keys.note(f"{_ZERO}.{name}", why)
    return tuning


def _hidden_size(module: nn.Module) -> int | None:
    """Where the Hugging Face integration looks for it."""
    whole = module.module if isinstance(module, DistributedDataParallel) else module
    config: Any = getattr(whole, "config", None)
    for each in (config, getattr(config, "text_config", None)):
        for name in ("hidden_size", "hidden_sizes", "n_embd", "d_model"):
            found = getattr(each, name, None)
            if found is not None:
                return int(max(found) if isinstance(found, list | tuple) else found)
    return None


def offload_of(keys: Keys, stage: int, device: torch.device) -> dict[str, Any]:
    """The ``offload=`` of the config, as a keyword for the optimizer. Nothing of it changes a result.

    Args:
        device: of the params.
    """
    pinned = keys.take(f"{_ZERO}.offload_param.pin_memory", keys.take(f"{_ZERO}.cpu_offload_use_pin_memory"))
    pinned = keys.take(f"{_ZERO}.offload_optimizer.pin_memory", pinned)
    ratio = keys.take(f"{_ZERO}.offload_optimizer.ratio", 1.0)
    states = _place_of(keys, "offload_optimizer", "cpu_offload") if ratio else None
    params = _place_of(keys, "offload_param", "cpu_offload_params")
    keys.ignore(f"{_ZERO}.offload_optimizer", f"{_ZERO}.offload_param")
    if params is not None and stage < 3:
        keys.warnings.append(f"{_ZERO}.offload_param (below stage 3 params are whole on every rank)")
        params = None
    if device.type != "cpu" and params == "cpu" and states not in (None, "cpu"):
        keys.warnings.append(f"{_ZERO}.offload_param (what leaves a GPU goes where its masters do: into the file)")
        params = states
    if states is None and params is None:
        return {}
    if states is None:
        keys.warnings.append(f"{_ZERO}.offload_param without offload_optimizer (masters and states go with the params)")
    try:
        found = Offload(states=states or params or "cpu", params=params, fraction=ratio or 1.0)
    except (ValueError, NotImplementedError) as error:
        keys.errors.append(str(error).removesuffix("."))
        return {}
    return {"offload": found if pinned is None else replace(found, pin_memory=bool(pinned))}


def _place_of(keys: Keys, section: str, old: str) -> str | None:
    """ "cpu", a directory, or None: where the section leaves it."""
    path = f"{_ZERO}.{section}"
    device = keys.take(f"{path}.device", "none")
    directory: str | None = keys.take(f"{path}.nvme_path")
    if keys.take(f"{_ZERO}.{old}", False):
        return "cpu"
    if device == "nvme":
        if directory is None:
            keys.errors.append(f"{path}.device='nvme' without nvme_path: there is no directory for its files")
        return directory
    if device not in (None, "none", "cpu"):
        keys.errors.append(f"{path}.device={device!r}: none, cpu or nvme is")
    return "cpu" if device == "cpu" else None


def gradient_format_of(keys: Keys, dtype: torch.dtype | None) -> str:
    """In which sums of gradients are kept."""
    kept = str(keys.take("data_types.grad_accum_dtype", None) or "fp32")
    if kept != "fp32" and (kept != "bf16" or dtype is not torch.bfloat16):
        keys.errors.append(f"data_types.grad_accum_dtype={kept!r}: 'fp32', or with bf16 params 'bf16'")
        return "fp32"
    return kept


def check_rest(keys: Keys) -> None:
    for name in ("overlap_comm", "contiguous_gradients"):
        if keys.take(f"{_ZERO}.{name}", True) is False:
            keys.warnings.append(f"{_ZERO}.{name}=false (it is always on)")
    for name in ("stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"):
        if keys.take(f"{_ZERO}.{name}", True) is False:
            keys.warnings.append(f"{_ZERO}.{name}=false (a saved state_dict() is whole all the same)")
    if keys.take("wall_clock_breakdown", False):
        keys.warnings.append("wall_clock_breakdown (print(optimizer.timings()) tells it, at any time)")
    keys.ignore(
        *("steps_per_print", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "dump_state"),
        *("comms_logger", "flops_profiler", "memory_breakdown", "tensorboard", "wandb", "csv_monitor", "checkpoint"),
        *(f"{_ZERO}.{name}" for name in _MEANINGLESS),
    )
    keys.expect("prescale_gradients", False, "gradients are summed in fp32 and divided once")
    keys.expect("gradient_predivide_factor", 1.0, "gradients are summed in fp32 and divided once")
    keys.expect("sparse_gradients", False, "sparse gradients are refused")
    keys.expect("amp.enabled", False, "use torch.autocast")
    for name in ("zero_quantized_weights", "zero_quantized_gradients"):
        keys.expect(f"{_ZERO}.{name}", False, "nothing is quantised on the way")
    for name in ("zero_hpz_partition_size", "mics_shard_size"):
        if keys.take(f"{_ZERO}.{name}", 1) > 1:
            keys.errors.append(f"{_ZERO}.{name}: pass a 2D DeviceMesh (replicate, shard) as process_group instead")


_MEANINGLESS = (
    "allgather_partitions",
    "reduce_scatter",
    "round_robin_gradients",
    "ignore_unused_parameters",
    "load_from_fp32_weights",
    "elastic_checkpoint",
    "use_multi_rank_bucket_allreduce",
    "legacy_stage1",
    "memory_efficient_linear",
    "override_module_apply",
)
