"""DeepSpeed configs in the shapes in which people have them, each with the training that it asks for, in plain torch.

The shapes (which sections there are, which keys, what is left to "auto") are those of widely used configs: of the
Hugging Face documentation, LLaMA-Factory, axolotl, alpaca, LLaVA, DeepSpeed-Chat and DeepSpeedExamples. The numbers are
chosen here. Each script fills "auto" and makes its optimizer as the scripts around those configs do.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from shardopt import ShardedAdamW, ShardedSGD

LR, BETAS, EPS, DECAY, CLIP = 0.01, (0.9, 0.95), 1e-8, 0.1, 0.4
LOW, WARMUP, TOTAL = 0.001, 2, 7
NVME = "<a directory>"

Params = list[Parameter]


def adamw(params: Params) -> Optimizer:
    return torch.optim.AdamW(params, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)


def adamw_groups(params: Params) -> Optimizer:
    """Matrices decay, the rest does not: as most scripts have it."""
    return torch.optim.AdamW(groups_of(params), lr=LR, betas=BETAS, eps=EPS)


def groups_of(params: Params) -> list[dict[str, Any]]:
    return [
        {"params": [each for each in params if each.dim() > 1], "weight_decay": DECAY, "lr": LR / 2},
        {"params": [each for each in params if each.dim() <= 1], "weight_decay": 0.0, "lr": LR},
    ]


def warmup_rate(taken: int, low: float = LOW, high: float = LR, total: float = math.inf) -> float:
    """Of WarmupLR and WarmupDecayLR: the lowest rate, then up with a logarithm, then as it is or down in a line."""
    if taken == 0:
        return low
    at = taken - 1
    share = math.log(at + 1) / math.log(WARMUP) if at < WARMUP else 1.0
    if total < math.inf and at >= WARMUP:
        share = max(0.0, (total - at) / (total - WARMUP))
    return low + (high - low) * share


def decaying_rate(taken: int) -> float:
    return warmup_rate(taken, total=TOTAL)


@dataclass(frozen=True)
class Shape:
    """A config, what the script around it gives, and what both ask for.

    Attributes:
        auto: what fills "auto".
        script: further arguments of ``from_deepspeed_config``, of the module's params.
        twin: the optimizer in plain torch, of the fp32 masters.
        rate: of each step, by the steps taken; None: that of the optimizer.
        scale: of the loss.
        hidden: ``module.config.hidden_size``, where there is one.
    """

    config: dict[str, Any]
    auto: dict[str, Any] = field(default_factory=dict)
    script: Callable[[Params], dict[str, Any]] = lambda params: {}
    twin: Callable[[Params], Optimizer] = adamw
    rate: Callable[[int], float] | None = None
    clip: float | None = None
    dtype: torch.dtype = torch.float32
    steps: int = 1
    scale: float = 1.0
    hidden: int | None = None

    def written(self, directory: Path, ranks: int = 1) -> Path:
        """The config as a file; ``train_batch_size`` is that of so many ranks."""
        config = json.loads(json.dumps(self.config).replace(NVME, str(directory)))
        if isinstance(config.get("train_batch_size"), int):
            config["train_batch_size"] *= ranks
        path = directory / "ds_config.json"
        path.write_text(json.dumps(config))
        return path


# -- sections ----------------------------------------------------------------------------------------------------------

OFF = {"enabled": False}
SIZES = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
HALF = {"loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 10, "hysteresis": 2, "min_loss_scale": 1}
ADAMW = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
FILLED: dict[str, Any] = {
    "optimizer.params.lr": LR,
    "optimizer.params.betas": list(BETAS),
    "optimizer.params.eps": EPS,
    "optimizer.params.weight_decay": DECAY,
}
WARM = {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}}
WARMED = {
    "scheduler.params.warmup_min_lr": LOW,
    "scheduler.params.warmup_max_lr": LR,
    "scheduler.params.warmup_num_steps": WARMUP,
}
DECAYS = {"type": "WarmupDecayLR", "params": {**WARM["params"], "total_num_steps": "auto"}}  # type: ignore[dict-item]
DECAYED = {**WARMED, "scheduler.params.total_num_steps": TOTAL}
TWICE = {"gradient_accumulation_steps": 2}
CPU = {"device": "cpu", "pin_memory": True}
STAGE_2 = {
    "stage": 2,
    "allgather_partitions": True,
    "allgather_bucket_size": 2e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 2e8,
    "contiguous_gradients": True,
}
STAGE_3 = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
AUTO_HALF = {"fp16": {"enabled": "auto", **HALF}, "bf16": {"enabled": "auto"}}
IN_FP16 = {"fp16.enabled": True, "bf16.enabled": False}
IN_BF16 = {"fp16.enabled": False, "bf16.enabled": True}
IN_FP32 = {"fp16.enabled": False, "bf16.enabled": False}
PRINTS = {"steps_per_print": 2000, "wall_clock_breakdown": False}
CLIPS = {"gradient_clipping": "auto"}


# -- of the Hugging Face integration -----------------------------------------------------------------------------------


def own(params: Params) -> dict[str, Any]:
    return {"optimizer": adamw(params)}


HUGGING_FACE = {
    "stage 2 with offload": Shape(
        {"fp16": {"enabled": "auto", **HALF}, "optimizer": ADAMW, "scheduler": WARM, **SIZES, **CLIPS, **PRINTS,
         "zero_optimization": {**STAGE_2, "offload_optimizer": CPU}},
        {**FILLED, **WARMED, **TWICE, "fp16.enabled": True, "gradient_clipping": CLIP},
        rate=warmup_rate, clip=CLIP, dtype=torch.float16, steps=2, scale=1024.0,
    ),
    "stage 3 with offload": Shape(
        {**AUTO_HALF, "optimizer": ADAMW, "scheduler": DECAYS, **SIZES, **CLIPS, **PRINTS,
         "zero_optimization": {**STAGE_3, "offload_optimizer": CPU, "offload_param": CPU}},
        {**FILLED, **DECAYED, **TWICE, **IN_BF16, "gradient_clipping": CLIP},
        rate=decaying_rate, clip=CLIP, dtype=torch.bfloat16, steps=2, hidden=20,
    ),
    "stage 3 on a disk": Shape(
        {"bf16": {"enabled": True}, "optimizer": ADAMW, "scheduler": WARM, **SIZES, **CLIPS, **PRINTS,
         "zero_optimization": {
             **STAGE_3,
             "offload_optimizer": {"device": "nvme", "nvme_path": NVME, "pin_memory": True, "buffer_count": 4,
                                   "fast_init": False},
             "offload_param": {"device": "nvme", "nvme_path": NVME, "pin_memory": True, "buffer_count": 5,
                               "buffer_size": 1e8, "max_in_cpu": 1e9}},
         "aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": False,
                 "overlap_events": True}},
        {**FILLED, **WARMED, **TWICE, "gradient_clipping": CLIP},
        rate=warmup_rate, clip=CLIP, dtype=torch.bfloat16, steps=2, hidden=20,
    ),
    "stage 1, a script's loop": Shape(
        {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "bfloat16": {"enabled": True}, **PRINTS,
         "zero_optimization": {"stage": 1, "round_robin_gradients": True}, "gradient_clipping": CLIP},
        script=own, clip=CLIP, dtype=torch.bfloat16, steps=2,
    ),
    "stage 0 with numbers": Shape(
        {"train_batch_size": 4, "zero_optimization": {"stage": 0}, "communication_data_type": "fp32",
         "amp": {"enabled": "auto", "opt_level": "auto"},
         "optimizer": {"type": "AdamW", "params": {"lr": LR, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": DECAY,
                                                   "torch_adam": True, "adam_w_mode": True}}},
    ),
    "params on the host alone": Shape(
        {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": "auto"}, "steps_per_print": 2000,
         "zero_optimization": {"stage": 3, "offload_param": CPU, "reduce_bucket_size": 400,
                               "stage3_prefetch_bucket_size": 400, "stage3_param_persistence_threshold": 200}},
        {"bf16.enabled": True}, script=own, dtype=torch.bfloat16,
    ),
}  # fmt: skip

# -- of trainers: no optimizer section, the script makes it ------------------------------------------------------------

LLAMA_FACTORY = {
    f"factory, stage {stage}{' with offload' if offload else ''}": Shape(
        {**SIZES, **CLIPS, "zero_allow_untested_optimizer": True, **AUTO_HALF,
         "zero_optimization": (
             {**STAGE_3, **({"offload_optimizer": CPU, "offload_param": CPU} if offload else {})} if stage == 3 else
             {**STAGE_2, "stage": stage, "allgather_bucket_size": 5e8, "reduce_bucket_size": 5e8,
              "round_robin_gradients": True, **({"offload_optimizer": CPU} if offload else {})})},
        {**TWICE, **half, "gradient_clipping": CLIP},
        script=lambda params: {"optimizer": adamw_groups(params)},
        twin=adamw_groups, clip=CLIP, dtype=dtype, steps=2, hidden=20 if stage == 3 else None,
    )
    for stage, offload, half, dtype in [
        (0, False, IN_BF16, torch.bfloat16), (2, True, IN_BF16, torch.bfloat16), (3, False, IN_FP32, torch.float32),
        (3, True, IN_BF16, torch.bfloat16),
    ]
}  # fmt: skip

AXOLOTL = {
    "axolotl, stage 1": Shape(
        {"zero_optimization": {"stage": 1, "overlap_comm": True}, "bf16": {"enabled": "auto"}, **SIZES, **CLIPS,
         "fp16": {"enabled": "auto", "auto_cast": False, **HALF}, "wall_clock_breakdown": False,
         "compile": {"disable": False, "backend": "inductor"}},
        {**TWICE, **IN_BF16, "gradient_clipping": CLIP},
        script=lambda params: {"optimizer": torch.optim.AdamW}, twin=torch.optim.AdamW, clip=CLIP,
        dtype=torch.bfloat16, steps=2,
    ),
    "axolotl, stage 2": Shape(
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "contiguous_gradients": True,
                               "overlap_comm": True}, **AUTO_HALF, **SIZES, **CLIPS, "wall_clock_breakdown": False},
        {**TWICE, **IN_FP32, "gradient_clipping": CLIP},
        script=lambda params: {"optimizer": adamw}, clip=CLIP, steps=2,
    ),
    "axolotl, stage 3": Shape(
        {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True, "zero_optimization": {
            **STAGE_3, "sub_group_size": 0, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0,
            "offload_optimizer": CPU, "offload_param": CPU},
         "bf16": {"enabled": True}, **SIZES, **CLIPS, "wall_clock_breakdown": False},
        {**TWICE, "gradient_clipping": CLIP}, script=own, clip=CLIP, dtype=torch.bfloat16, steps=2,
    ),
    "axolotl, numbers left open": Shape(
        {"zero_optimization": {**STAGE_3, "stage3_max_live_parameters": "auto", "stage3_max_reuse_distance": "auto",
                               "sub_group_size": "auto"}, **AUTO_HALF, **SIZES, "gradient_clipping": CLIP},
        {"gradient_accumulation_steps": 1, **IN_FP32},
        script=lambda params: {"optimizer": ShardedSGD}, twin=torch.optim.SGD, clip=CLIP,
    ),
}  # fmt: skip

ALPACA_AND_LLAVA = {
    "alpaca": Shape(
        {"bf16": {"enabled": "auto"}, "optimizer": ADAMW, "scheduler": DECAYS, **SIZES, **CLIPS, "steps_per_print": 5,
         "wall_clock_breakdown": False, "zero_optimization": {
             **STAGE_3, "offload_optimizer": CPU, "offload_param": CPU,
             "stage3_gather_16bit_weights_on_model_save": False}},
        {**FILLED, **DECAYED, **TWICE, "bf16.enabled": True, "gradient_clipping": CLIP},
        rate=decaying_rate, clip=CLIP, dtype=torch.bfloat16, steps=2, hidden=20,
    ),
    "llava, stage 2": Shape(
        {**AUTO_HALF, **SIZES, "zero_optimization": {
            "stage": 2, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9,
            "reduce_bucket_size": "auto"}},
        {**TWICE, **IN_BF16}, script=lambda params: {"params": groups_of(params)},
        twin=lambda params: torch.optim.AdamW(groups_of(params)), dtype=torch.bfloat16, steps=2, hidden=20,
    ),
    "llava, stage 3": Shape(
        {**AUTO_HALF, **SIZES, "zero_optimization": STAGE_3}, {**TWICE, **IN_FP16}, script=own, dtype=torch.float16,
        steps=2, hidden=20, scale=1024.0,
    ),
    "llava, stage 3 with offload": Shape(
        {**AUTO_HALF, "optimizer": ADAMW, "scheduler": WARM, **SIZES, **CLIPS, "steps_per_print": 1e5,
         "wall_clock_breakdown": False, "zero_optimization": {
             **STAGE_3, "offload_optimizer": CPU, "offload_param": CPU, "gather_16bit_weights_on_model_save": True}},
        {**FILLED, **WARMED, **TWICE, **IN_FP32, "gradient_clipping": CLIP},
        rate=warmup_rate, clip=CLIP, steps=2, hidden=20,
    ),
}  # fmt: skip
# Both names of one key are too many; the config that has them is refused by a test of its own.
del ALPACA_AND_LLAVA["llava, stage 3 with offload"].config["zero_optimization"][
    "stage3_gather_16bit_weights_on_model_save"
]

CHAT = {
    "chat, actor": Shape(
        {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 10,
         "zero_optimization": {
             "stage": 3, "offload_param": {"device": "none"}, "offload_optimizer": {"device": "none"},
             "overlap_comm": True, "stage3_param_persistence_threshold": 1e2, "stage3_max_live_parameters": 3e7,
             "stage3_prefetch_bucket_size": 3e7, "memory_efficient_linear": False, "zero_hpz_partition_size": 8,
             "zero_quantized_nontrainable_weights": False},
         "fp16": {"enabled": True, "loss_scale_window": 100, "initial_scale_power": 10}, "gradient_clipping": CLIP,
         "prescale_gradients": False, "wall_clock_breakdown": False,
         "hybrid_engine": {"enabled": True, "max_out_tokens": 512, "inference_tp_size": 1,
                           "release_inference_cache": False, "pin_parameters": True, "tp_gather_partition_size": 8},
         "tensorboard": {"enabled": False, "output_path": "logs", "job_name": "actor"}},
        script=lambda params: {"optimizer": adamw_groups(params)}, twin=adamw_groups, clip=CLIP, dtype=torch.float16,
        steps=2, scale=1024.0,
    ),
    "chat, critic": Shape(
        {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 10,
         "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "overlap_comm": True,
                               "offload_param": {"device": "cpu"}},
         "bfloat16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}, "gradient_clipping": CLIP,
         "hybrid_engine": {"enabled": False}},
        script=lambda params: {"optimizer": ShardedAdamW, "params": groups_of(params)},
        twin=lambda params: torch.optim.AdamW(groups_of(params)), clip=CLIP, dtype=torch.bfloat16,
    ),
}  # fmt: skip

# -- of DeepSpeed's examples -------------------------------------------------------------------------------------------


class Uncorrected(Optimizer):
    """AdamW whose moments are used as they are."""

    def __init__(self, params: Params):
        super().__init__(params, {"lr": LR})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            state, grad = self.state[param], param.grad
            mean = state.setdefault("mean", torch.zeros_like(param))
            square = state.setdefault("square", torch.zeros_like(param))
            mean += (1 - BETAS[0]) * (grad - mean)
            square += (1 - BETAS[1]) * (grad * grad - square)
            param.mul_(1 - LR * DECAY)
            param -= LR * mean / (square.sqrt() + 1e-3)


def section(kind: str, **params: Any) -> dict[str, Any]:
    return {"type": kind, "params": params}


ADAM = section("Adam", lr=LR, betas=list(BETAS), eps=EPS, weight_decay=DECAY)
EXAMPLES = {
    "cifar": Shape(
        {"train_batch_size": 16, "steps_per_print": 2000, "optimizer": ADAM, "gradient_clipping": CLIP,
         "scheduler": section("WarmupLR", warmup_min_lr=LOW, warmup_max_lr=LR, warmup_num_steps=WARMUP),
         "prescale_gradients": False, "bf16": OFF, "fp16": {"enabled": True, "fp16_master_weights_and_grads": False,
                                                            **HALF}, "wall_clock_breakdown": False,
         "zero_optimization": {**STAGE_2, "stage": 1, "allgather_bucket_size": 5e7, "reduce_bucket_size": 5e7,
                               "cpu_offload": False}},
        rate=warmup_rate, clip=CLIP, dtype=torch.float16, scale=1024.0,
    ),
    "gan": Shape({"train_batch_size": 4, "steps_per_print": 10, "optimizer": ADAM}),
    "a first script": Shape(
        {"train_micro_batch_size_per_gpu": 4, "optimizer": ADAM, "fp16": OFF,
         "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
    ),
    "squad": Shape(
        {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 10, "gradient_clipping": CLIP,
         "optimizer": section("Adam", lr=LR, weight_decay=DECAY, bias_correction=False, betas=list(BETAS), eps=1e-3)},
        twin=Uncorrected, clip=CLIP,
    ),
    "bert": Shape(
        {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 1000,
         "prescale_gradients": True, "gradient_predivide_factor": 8.0, "optimizer": ADAM, "fp32_allreduce": True,
         "wall_clock_breakdown": True, "sparse_attention": {"mode": "fixed", "block": 16}},
        steps=2,
    ),
    "megatron": Shape(
        {"train_batch_size": 8, "gradient_accumulation_steps": 2, "steps_per_print": 1, "gradient_clipping": CLIP,
         "zero_optimization": {"stage": 2, "cpu_offload": True, "overlap_comm": False, "reduce_bucket_size": 5e7,
                               "contiguous_gradients": False, "elastic_checkpoint": False, "prefetch_bucket_size": 5},
         "activation_checkpointing": {"partition_activations": False, "contiguous_memory_optimization": False,
                                      "cpu_checkpointing": False, "profile": False},
         "zero_allow_untested_optimizer": True, "wall_clock_breakdown": False},
        script=own, clip=CLIP, steps=2,
    ),
    "monitors": Shape(
        {"train_batch_size": 4, "optimizer": ADAM, "monitor_config": {"tag": "a"}, "comms_config": {"verbose": True},
         "tensorboard": {"enabled": True}, "wandb": {"enabled": False}, "csv_monitor": {"enabled": True},
         "comms_logger": {"enabled": True, "verbose": False}, "flops_profiler": {"enabled": True, "profile_step": 1},
         "autotuning": {"enabled": True, "arg_mappings": {"a": "--a"}}, "elasticity": OFF,
         "progressive_layer_drop": OFF, "curriculum_learning": OFF,
         "data_efficiency": {**OFF, "data_sampling": {"enabled": True}},
         "activation_checkpointing": {"partition_activations": True, "number_checkpoints": 4}, "amp": OFF,
         "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False, "offset": 3}}},
         "eigenvalue": {**OFF, "verbose": False, "max_iter": 100}, "pipeline": {"stages": "auto", "partition": "best"},
         "zero_optimization": {"stage": 1, "offload_param": None}},
    ),
    "images": Shape(
        {"train_batch_size": 4, "fp16": OFF, "optimizer": section("SGD", lr=LR, momentum=0.9, weight_decay=1e-4)},
        twin=lambda params: torch.optim.SGD(params, lr=LR, momentum=0.9, weight_decay=1e-4),
    ),
    "a cycle": Shape(
        {"train_batch_size": 4, "optimizer": section("Adam", lr=LR, adam_w_mode=False, weight_decay=DECAY),
         "scheduler": section("OneCycle", cycle_min_lr=LOW, cycle_max_lr=LR, cycle_first_step_size=2,
                              cycle_momentum=False, cycle_first_stair_count=0, decay_step_size=0)},
        twin=lambda params: torch.optim.Adam(params, lr=LR, weight_decay=DECAY),
        rate=lambda taken: LOW if taken == 0 else LOW + (LR - LOW) * (taken / 2 if taken <= 2 else (4 - taken) / 2),
    ),
}  # fmt: skip

SHAPES: dict[str, Shape] = {**HUGGING_FACE, **LLAMA_FACTORY, **AXOLOTL, **ALPACA_AND_LLAVA, **CHAT, **EXAMPLES}


def with_config(module: nn.Module, hidden: int | None) -> nn.Module:
    """The module as Hugging Face's are."""
    if hidden is not None:
        module.config = type("Config", (), {"hidden_size": hidden})()  # type: ignore[assignment]
    return module
