"""Every way to train a model on several ranks that is measured: a name, a title, and how to make it."""

import importlib.util
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gpt import DTYPES, GPT, Settings
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import shardopt

LR = 3e-4


def _backward(loss: Tensor) -> None:
    loss.backward()


@dataclass(frozen=True)
class Engine:
    """How one engine trains a model."""

    forward: Callable[[Tensor], Tensor]
    update: Callable[[], Any]
    zero_grad: Callable[[], Any]
    backward: Callable[[Tensor], Any] = _backward
    memory: Callable[[], dict[str, dict[str, int]]] | None = None  # shardopt's account of itself
    moved: Callable[[], int] | None = None  # bytes that this rank received so far
    gathered: Callable[[], int] | None = None  # the most bytes of params that its schedule has gathered at once
    settle: Callable[[], None] | None = None  # waits for what the last step left under way


Make = Callable[[GPT, Settings], Engine]


def _ddp(model: GPT) -> DistributedDataParallel:
    return DistributedDataParallel(model)


def make_ddp(model: GPT, settings: Settings) -> Engine:
    ddp = _ddp(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=LR, fused=True)
    return Engine(ddp, optimizer.step, optimizer.zero_grad)


def make_alone(model: GPT, settings: Settings) -> Engine:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    return Engine(model, optimizer.step, optimizer.zero_grad)


def make_zero_redundancy(model: GPT, settings: Settings) -> Engine:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp = _ddp(model)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), optimizer_class=torch.optim.AdamW, lr=LR, fused=True)
    return Engine(ddp, optimizer.step, optimizer.zero_grad)


def make_fsdp2(model: GPT, settings: Settings) -> Engine:
    return _fsdp2(model, settings, {})


def make_fsdp2_masters(model: GPT, settings: Settings) -> Engine:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=DTYPES[settings.dtype], reduce_dtype=DTYPES[settings.dtype])
    return _fsdp2(model.float(), settings, {"mp_policy": policy})


def _fsdp2(model: GPT, settings: Settings, keywords: dict[str, Any]) -> Engine:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(settings.device, (settings.ranks,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **keywords)
    fully_shard(model, mesh=mesh, **keywords)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    return Engine(model, optimizer.step, optimizer.zero_grad)


def make_shardopt(stage: int) -> Make:
    def make(model: GPT, settings: Settings) -> Engine:
        ddp = _ddp(model)
        optimizer = shardopt.ShardedAdamW(ddp.parameters(), lr=LR, stage=stage)
        return Engine(ddp, optimizer.step, optimizer.zero_grad, memory=optimizer.memory)

    return make


def make_handed_over(stage: int, wrapped: bool, **keywords: Any) -> Make:
    def make(model: GPT, settings: Settings) -> Engine:
        module = _ddp(model) if wrapped else model
        optimizer = shardopt.ShardedAdamW(module, lr=LR, stage=stage, **keywords)

        def moved() -> int:
            assert optimizer.engine.domain is not None
            traffic = optimizer.engine.domain.transport.traffic
            return traffic.params + traffic.gradients

        def gathered() -> int:
            return optimizer.schedule().most_bytes({name: unit.nbytes for name, unit in optimizer.units.items()})

        def settle() -> None:
            for param in module.parameters():
                param.view(-1)[:1].clone()  # a read, which waits for what is on its way

        return Engine(
            module,
            optimizer.step,
            optimizer.zero_grad,
            memory=optimizer.memory,
            moved=moved,
            gathered=gathered,
            settle=settle if optimizer.options.tuning.overlap_gather else None,
        )

    return make


def make_offloaded(stage: int, offload: str) -> Make:
    """``offload``: "cpu", or "disk" for the system's temporary directory."""

    def make(model: GPT, settings: Settings) -> Engine:
        where = tempfile.gettempdir() if offload == "disk" else offload
        optimizer = shardopt.ShardedAdamW(_ddp(model), lr=LR, stage=stage, offload=where)
        return Engine(optimizer.options.module, optimizer.step, optimizer.zero_grad, memory=optimizer.memory)

    return make


def make_deepspeed(stage: int, offload: bool = False) -> Make:
    """``offload``: states in host memory, stepped by DeepSpeed's own CPU Adam."""

    def make(model: GPT, settings: Settings) -> Engine:
        import deepspeed

        warnings.simplefilter("ignore")  # about calls of its own; this process runs nothing else
        deepspeed.logger.setLevel("ERROR")
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": settings.batch,
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": settings.dtype == "bf16"},
            "zero_allow_untested_optimizer": True,
        }
        if offload:
            config["zero_optimization"] |= {"offload_optimizer": {"device": "cpu"}}
            optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(model.parameters(), lr=LR, weight_decay=0.01)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        return Engine(engine, engine.step, lambda: None, backward=engine.backward)

    return make


@dataclass(frozen=True)
class Offer:
    """A line of the table."""

    title: str
    make: Make
    dtypes: Sequence[str] = ("fp32", "bf16")
    has_masters: bool = True
    package: str = "torch"  # that must be installed
    stage: int | None = None  # of shardopt
    is_extra: bool = False  # left out unless it is asked for


def _extra(
    title: str, stage: int, *, wrapped: bool = False, dtypes: Sequence[str] = Offer.dtypes, **keywords: Any
) -> Offer:
    """A setting of shardopt with the module handed over, which runs where it is asked for."""
    return Offer(title, make_handed_over(stage, wrapped, **keywords), dtypes=dtypes, stage=stage, is_extra=True)


def _offloaded(title: str, offload: str) -> Offer:
    return Offer(title, make_offloaded(2, offload), stage=2, is_extra=True)


BY_MESSAGES = shardopt.Tuning(neighbours=False)
BY_HOST = shardopt.Tuning(by_host=True)
LATE = shardopt.Tuning(overlap_gather=True)
EARLY = shardopt.Offload(early_bytes=1 << 30)
NEAR = shardopt.Tuning(reshard_after_forward="host")
LATE_BY_MESSAGES = shardopt.Tuning(neighbours=False, overlap_gather=True)
INT8: dict[str, Any] = {"reduce_dtype": "int8", "gather_dtype": "int8"}
INT4: dict[str, Any] = {"reduce_dtype": "int4", "gather_dtype": "int8"}
SMALL: dict[str, Any] = {"master": "split24", "state_format": "int8", "dtypes": ("bf16",)}
ENGINES = {
    "ddp": Offer("DDP + torch fused AdamW", make_ddp, has_masters=False),
    "zero": Offer("DDP + ZeroRedundancyOptimizer (fused AdamW)", make_zero_redundancy, has_masters=False),
    "fsdp2": Offer("FSDP2 + torch fused AdamW", make_fsdp2, has_masters=False),
    "fsdp2-masters": Offer("FSDP2, fp32 params, bf16 compute", make_fsdp2_masters, dtypes=("bf16",)),
    "deepspeed-1": Offer("DeepSpeed stage 1", make_deepspeed(1), package="deepspeed"),
    "deepspeed-2": Offer("DeepSpeed stage 2", make_deepspeed(2), package="deepspeed"),
    "deepspeed-3": Offer("DeepSpeed stage 3", make_deepspeed(3), package="deepspeed"),
    "shardopt-0": Offer("DDP + shardopt stage 0", make_shardopt(0), stage=0),
    "shardopt-1": Offer("DDP + shardopt stage 1", make_shardopt(1), stage=1),
    "module-0": Offer("shardopt stage 0, DDP module handed over", make_handed_over(0, wrapped=True), stage=0),
    "module-1": Offer("shardopt stage 1, DDP module handed over", make_handed_over(1, wrapped=True), stage=1),
    "module-2": Offer("shardopt stage 2, DDP module handed over", make_handed_over(2, wrapped=True), stage=2),
    "module-3": Offer("shardopt stage 3, plain module handed over", make_handed_over(3, wrapped=False), stage=3),
    "messages-2": _extra("shardopt stage 2, by messages", 2, wrapped=True, tuning=BY_MESSAGES),
    "messages-2-late": _extra("the same, params arrive in the forward", 2, wrapped=True, tuning=LATE_BY_MESSAGES),
    "host-2": _extra("shardopt stage 2, by host", 2, tuning=BY_HOST),
    "host-int8-2": _extra("shardopt stage 2, by host, int8 both ways", 2, **INT8, tuning=BY_HOST),
    "int8-2": _extra("shardopt stage 2, int8 both ways", 2, **INT8),
    "int4-2": _extra("shardopt stage 2, int4 gradients, int8 params", 2, **INT4),
    "int8-2-late": _extra("int8 both ways, params arrive in the forward", 2, **INT8, tuning=LATE),
    "int4-2-late": _extra("int4 gradients, int8 params, which arrive in the forward", 2, **INT4, tuning=LATE),
    "int8-3": _extra("shardopt stage 3, int8 both ways", 3, **INT8),
    "int8-3-near": _extra("the same, backward gathers within a host", 3, **INT8, tuning=NEAR),
    "messages-3": _extra("shardopt stage 3, by messages", 3, tuning=BY_MESSAGES),
    "alone": Offer("no exchange: each rank by itself", make_alone, has_masters=False, is_extra=True),
    "small": _extra("shardopt stage 1, split24 masters, int8 states", 1, **SMALL),
    "small-released": _extra("the same, gradients released", 1, **SMALL, release_gradients=True),
    "module-2-early": _extra("shardopt stage 2, updates while backward goes on", 2, wrapped=True, offload=EARLY),
    "module-2-cpu": _offloaded("shardopt stage 2, states offloaded to host memory", "cpu"),
    "module-2-disk": _offloaded("shardopt stage 2, states offloaded to disk", "disk"),
    "deepspeed-2-offload": Offer(
        "DeepSpeed stage 2, states offloaded to its CPU Adam",
        make_deepspeed(2, offload=True),
        package="deepspeed",
        is_extra=True,
    ),
}


def is_offered(name: str, dtype: str) -> bool:
    return dtype in ENGINES[name].dtypes and importlib.util.find_spec(ENGINES[name].package) is not None
