"""Keys of a DeepSpeed config that configure no optimizer: those without an effect are listed in one warning.

Keys that would change results are refused, unless they are switched off by ``{"enabled": false, ...}``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .keys import AUTO, count, flag, number

if TYPE_CHECKING:
    from .keys import Keys, Kind

_ZERO = "zero_optimization"


def check_rest(keys: Keys) -> None:
    """Takes every key that does not configure the optimizer."""
    for path, (kind, done, why) in _ALWAYS.items():
        found = _value(keys, path, kind, done)
        if found != done:
            keys.warn(path, why, found)
    for path, (kind, done, why) in _NEVER.items():
        found = _value(keys, path, kind, done)
        if found > done:
            keys.refuse(path, found, why)
    for path, why in _OTHER_RESULTS.items():
        for name, value in _switched_on(keys, path):
            keys.refuse(name, value, why)
    for path in (*_INSTEAD, *_ELSEWHERE):
        found = keys.drop(path)
        is_off = any(name.endswith(".enabled") and value is False for name, value in found)
        if not is_off and any(value not in (False, AUTO) for _, value in found):
            keys.warnings.append(f"{path} ({_INSTEAD[path]})" if path in _INSTEAD else path)


def _value(keys: Keys, path: str, kind: Kind, default: Any) -> Any:
    """Takes and returns the value at ``path``, or DeepSpeed's default if it is missing or "auto"."""
    if keys.is_auto(path):
        keys.drop(path)
    return keys.take(path, kind, default)


def _switched_on(keys: Keys, path: str) -> Iterator[tuple[str, Any]]:
    """Yields the first switch of a section, or the key itself, that is not off."""
    found = keys.drop(path)
    switches = [(name, value) for name, value in found if name.endswith(".enabled") or name == path]
    if any(name == f"{path}.enabled" and value in (False, AUTO) for name, value in switches):
        return
    asked = [(name, value) for name, value in switches or found if value not in (False, AUTO)]
    yield from asked[:1]


# Behaviour that is always on: (kind, the value that asks for it, the warning for another value).
_ALWAYS: dict[str, tuple[Kind, Any, str]] = {
    f"{_ZERO}.overlap_comm": (flag, True, "it is always on"),
    f"{_ZERO}.contiguous_gradients": (flag, True, "it is always on"),
    f"{_ZERO}.reduce_scatter": (flag, True, "it is always on"),
    f"{_ZERO}.allgather_partitions": (flag, True, "it is always on"),
    f"{_ZERO}.stage3_gather_16bit_weights_on_model_save": (flag, True, "a saved state_dict() is whole all the same"),
    f"{_ZERO}.stage3_gather_fp16_weights_on_model_save": (flag, True, "a saved state_dict() is whole all the same"),
    f"{_ZERO}.mics_shard_size": (number, -1, "for shards within a machine give a 2D DeviceMesh as process_group"),
    f"{_ZERO}.zero_hpz_partition_size": (count, 1, "for shards within a machine give a 2D DeviceMesh as process_group"),
    "prescale_gradients": (flag, False, "gradients are summed in fp32 and divided once"),
    "gradient_predivide_factor": (number, 1, "gradients are summed in fp32 and divided once"),
    "fp16.auto_cast": (flag, False, "give the model its inputs in fp16"),
    "wall_clock_breakdown": (flag, False, "print(optimizer.timings()) shows it at any time"),
    "memory_breakdown": (flag, False, "optimizer.memory() returns it"),
    "dump_state": (flag, False, "print(optimizer) shows it"),
    "dataloader_drop_last": (flag, False, "the DataLoader is the script's own"),
}

# Keys that something else replaces.
_INSTEAD = {
    "activation_checkpointing": "call torch.utils.checkpoint in the model, and shardopt.partition_activations()",
    "hybrid_engine": "generate within `with optimizer.unsharded():`",
    "compile": "call torch.compile(model)",
    f"{_ZERO}.allgather_bucket_size": "params are gathered in the buckets that gradients are reduced in",
    f"{_ZERO}.stage3_prefetch_bucket_size": "the bucket that comes next is asked for early, within Tuning.live_bytes",
    f"{_ZERO}.stage3_max_reuse_distance": "what was used longest ago goes first, beyond stage3_max_live_parameters",
    f"{_ZERO}.sub_group_size": "a shard is updated in one launch, which needs no buffers",
}

# Keys without a counterpart here.
_ELSEWHERE = (
    *("steps_per_print", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "disable_allgather", "aio"),
    *("comms_logger", "comms_config", "flops_profiler", "autotuning", "tensorboard", "wandb", "csv_monitor", "comet"),
    *("monitor_config", "checkpoint", "load_universal_checkpoint", "nebula", "timers", "graph_harvesting", "pipeline"),
    *("use_data_before_expert_parallelism", "use_data_before_expert_parallel_", "sparse_attention", "eigenvalue"),
    *("seq_parallel_communication_data_type", "optimizer.legacy_fusion", "tensor_parallel"),
    *("bf16.immediate_grad_update", "bf16.check_grad_overflow"),
    *(
        f"{_ZERO}.{name}"
        for name in (
            *("offload_optimizer.buffer_count", "offload_optimizer.buffer_size", "offload_optimizer.max_in_cpu"),
            *("offload_optimizer.pipeline_read", "offload_optimizer.pipeline_write", "offload_optimizer.pipeline"),
            *("offload_optimizer.cpuadam_cores_perc", "offload_optimizer.super_offload", "offload_optimizer.fast_init"),
            *("offload_param.buffer_count", "offload_param.buffer_size", "offload_param.max_in_cpu", "leaf_module"),
            *("use_multi_rank_bucket_allreduce", "load_from_fp32_weights", "legacy_stage1", "round_robin_gradients"),
            *("elastic_checkpoint", "ignore_unused_parameters", "stage3_model_persistence_threshold"),
            *(
                "stage3_module_granularity_threshold",
                "stage3_use_all_reduce_for_fetch_params",
                "memory_efficient_linear",
            ),
            *("mics_hierarchical_params_gather", "pipeline_loading_checkpoint", "override_module_apply"),
            *("log_trace_cache_warnings", "allgather_sequential", "enable_sanity_checks"),
        )
    ),
)

# Sections that would change results, and what to do instead.
_OTHER_RESULTS = {
    "amp": "use torch.autocast around the forward",
    "torch_autocast": "use torch.autocast around the forward",
    "sparse_gradients": "sparse gradients are refused: build the embedding with sparse=False",
    "elasticity": "the batch would depend on the number of ranks: give train_batch_size",
    "data_efficiency": "the model would see other data: the DataLoader is the script's own",
    "curriculum_learning": "the model would see other data: the DataLoader is the script's own",
    "progressive_layer_drop": "layers are not dropped here",
    "compression_training": "nothing is pruned or quantized here",
    "quantize_training": "nothing is quantized here",
    f"{_ZERO}.zenflow": "every gradient is used in its own step here",
}
# Quantization, and splits of the model itself: (kind, the largest value that is off, the error for a larger one).
_NEVER: dict[str, tuple[Kind, Any, str]] = {
    f"{_ZERO}.zero_quantized_nontrainable_weights": (
        flag,
        False,
        "frozen params are kept as they are; zero_quantized_weights quantizes them on the way",
    ),
    f"{_ZERO}.enable_mixed_precision_lora": (flag, False, "frozen params are kept as they are"),
    "pipeline.stages": (count, 1, "give the params of each stage to an optimizer with norm_group="),
    "sequence_parallel_size": (count, 1, "shard the sequence in the model"),
    "tensor_parallel.autotp_size": (count, 1, "make params DTensors with torch's parallelize_module"),
}
