"""Every config that people have loads with one warning, and trains as the same numbers do in plain torch."""

import ast
import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

import shardopt
from shardopt import (
    Offload,
    ShardedAdam,
    ShardedAdamW,
    ShardoptError,
    from_deepspeed_config,
)
from tests.support.deepspeed_shapes import CLIP, LR, SHAPES, Shape, adamw, groups_of, with_config
from tests.support.ranks import Pool
from tests.support.training import Net, apart, loss_of, raises

STEPS = 4
# Distance of the ends, as a share of the way from the start; in short formats a master that is off by an ulp rounds to
# another param now and then.
BOUNDS = {torch.float32: 5e-6, torch.bfloat16: 2e-3, torch.float16: 2e-3}


def loss(module: nn.Module, step: int, turn: int) -> Tensor:
    return loss_of(module, 10 * step + turn) * (0.2, 3.0, 1.0, 0.5)[step % 4]


def reference(shape: Shape) -> nn.Module:
    """The model at the end of the same training, in plain torch."""
    module = Net()
    masters = [Parameter(param.detach()) for param in module.parameters()]  # of the exact values
    module.to(shape.dtype)
    optimizer = shape.twin(masters)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    for step in range(STEPS):
        totals = [torch.zeros(param.shape) for param in masters]
        for turn in range(shape.steps):
            (loss(module, step, turn) / shape.steps * shape.scale).backward()
            for total, param in zip(totals, module.parameters(), strict=True):
                assert param.grad is not None
                total += param.grad.float()
                param.grad = None
        for total, master in zip(totals, masters, strict=True):
            if ranks > 1:
                dist.all_reduce(total)
            master.grad = total / ranks / shape.scale
        if shape.rate is not None:
            for group in optimizer.param_groups:
                group["lr"] = shape.rate(step)
        if shape.clip is not None:
            nn.utils.clip_grad_norm_(masters, shape.clip)
        optimizer.step()
        for master, param in zip(masters, module.parameters(), strict=True):
            param.data.copy_(master.detach())
    return module


def set_up(shape: Shape, module: nn.Module, directory: Path, ranks: int = 1) -> Any:
    params = list(module.parameters())
    path = shape.written(directory, ranks)
    with_config(module, shape.hidden)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run = from_deepspeed_config(path, module, auto=shape.auto, **shape.script(params))
    assert len(seen) <= 1 and all("change no result" in str(each.message) for each in seen), seen
    return run


def trained(shape: Shape, module: nn.Module, directory: Path, ranks: int = 1) -> dict[str, Tensor]:
    run = set_up(shape, module, directory, ranks)
    assert run.accumulation_steps == shape.steps and run.scaler.get_scale() == shape.scale
    bucket_bytes = run.optimizer.options.tuning.bucket_bytes
    assert bucket_bytes is None or bucket_bytes <= 32 << 20
    for step in range(STEPS):
        for turn in range(run.accumulation_steps):
            run.scaler.scale(loss(module, step, turn) / run.accumulation_steps).backward()
        assert run.step()
    with run.optimizer.unsharded():
        # unsharded() shows what forward rounds
        found = {name: param.detach().to(shape.dtype, copy=True) for name, param in module.named_parameters()}
    run.optimizer.close()
    return found


def check(shape: Shape, name: str, directory: Path, ranks: int = 1) -> None:
    start = {key: param.detach().to(shape.dtype) for key, param in Net().named_parameters()}
    theirs = {key: param.detach() for key, param in reference(shape).named_parameters()}
    found = trained(shape, Net(), directory, ranks)
    distance = apart(found, theirs, start)
    assert distance < BOUNDS[shape.dtype], (name, distance)


@pytest.mark.parametrize("name", SHAPES)
def test_loads_and_trains_as_torch_does(name: str, tmp_path: Path) -> None:
    check(SHAPES[name], name, tmp_path)


def each_kind(directory: str) -> None:
    """The section, an optimizer, a class, a function, groups; stages 0 to 3; host and disk; three precisions."""
    for name in (
        "stage 3 on a disk", "stage 1, a script's loop", "axolotl, stage 1", "axolotl, stage 2", "llava, stage 2",
        "llava, stage 3", "chat, critic", "squad", "megatron",
    ):  # fmt: skip
        own = Path(directory) / str(dist.get_rank())
        own.mkdir(exist_ok=True)
        check(SHAPES[name], name, own, dist.get_world_size())


def test_one_of_each_kind_over_two_ranks(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(each_kind, str(tmp_path), world=2, timeout=60)


# -- what is said of the keys ------------------------------------------------------------------------------------------


def message_of(config: Any, module: nn.Module | None = None, **keywords: Any) -> str:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        from_deepspeed_config(config, module or Net(), **keywords).optimizer.close()
    assert len(seen) <= 1
    return str(seen[0].message) if seen else ""


def test_one_warning_lists_what_has_no_effect(tmp_path: Path) -> None:
    told = message_of(SHAPES["monitors"].written(tmp_path))
    listed = ("monitor_config", "comms_config", "tensorboard", "csv_monitor", "comms_logger", "flops_profiler",
              "autotuning", "activation_checkpointing (call torch.utils.checkpoint")  # fmt: skip
    for name in (str(tmp_path / "ds_config.json"), *listed):
        assert name in told, told
    for name in ("wandb", "elasticity", "curriculum", "data_efficiency", "compression", "eigenvalue", "amp", "offload"):
        assert name not in told, told  # they are switched off
    told = message_of(SHAPES["bert"].written(tmp_path))
    for name in ("prescale_gradients=true", "gradient_predivide_factor=8.0", "wall_clock_breakdown=true", "sparse_att"):
        assert name in told, told
    told = message_of(SHAPES["chat, actor"].written(tmp_path), optimizer=torch.optim.AdamW)
    for name in ("zero_hpz_partition_size=8 (for shards", "hybrid_engine (generate within", "stage3_prefetch_bucket"):
        assert name in told, told
    assert "memory_efficient_linear" not in told and "tensorboard" not in told
    assert not message_of({"optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 1, "overlap_comm": True}})


ADAM = {"type": "Adam", "params": {"lr": LR}}


def test_buckets_of_billions_of_elements_keep_the_default() -> None:
    for dtype, elements in ((torch.float32, 5e8), (torch.bfloat16, 5e8), (torch.float32, 9_000_000)):
        config = {"optimizer": ADAM, "bf16": {"enabled": dtype is torch.bfloat16}}
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            run = from_deepspeed_config({**config, "zero_optimization": {"reduce_bucket_size": elements}}, Net())
        assert run.optimizer.options.tuning.bucket_bytes is None
        assert len(seen) == 1 and "reduce_bucket_size (larger buckets overlap less" in str(seen[0].message)
    assert not message_of({"optimizer": ADAM, "zero_optimization": {"reduce_bucket_size": 8_000_000}})


ZERO = "zero_optimization"
WRONG_TYPES: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({ZERO: {"stage": 2, "offload_optimizer": True}}, (f"{ZERO}.offload_optimizer=true", "an object")),
    ({ZERO: True}, (f"{ZERO}=true", "an object")),
    ({ZERO: {"stage": "2"}}, (f'{ZERO}.stage="2"', "a whole number")),
    ({ZERO: {"stage": 1.5}}, (f"{ZERO}.stage=1.5", "a whole number")),
    ({ZERO: {"stage": True}}, (f"{ZERO}.stage=true", "a whole number")),
    ({ZERO: {"stage": -1}}, (f"{ZERO}.stage=-1", "a whole number")),
    ({ZERO: {"stage": 3, "reduce_bucket_size": "5e8"}}, (f'{ZERO}.reduce_bucket_size="5e8"', "a whole number")),
    ({ZERO: {"stage": 3, "reduce_bucket_size": 0}}, (f"{ZERO}.reduce_bucket_size=0", "at least 1")),
    ({ZERO: {"stage": 3, "max_live_parameters": "many"}}, (f'{ZERO}.max_live_parameters="many"', "a whole number")),
    ({ZERO: {"overlap_comm": "yes"}}, (f'{ZERO}.overlap_comm="yes"', "true or false")),
    ({ZERO: {"cpu_offload": 1}}, (f"{ZERO}.cpu_offload=1", "true or false")),
    ({ZERO: {"offload_optimizer": {"device": True}}}, (f"{ZERO}.offload_optimizer.device=true", "a text")),
    ({ZERO: {"offload_optimizer": {"device": "cpu", "pin_memory": "no"}}}, ('pin_memory="no"', "true or false")),
    ({ZERO: {"offload_optimizer": {"device": "nvme", "nvme_path": ["/a"]}}}, ('nvme_path=["/a"]', "a text")),
    ({ZERO: {"offload_optimizer": {"device": "cpu", "ratio": "all"}}}, ('ratio="all"', "a number")),
    ({ZERO: {"offload_optimizer": {"device": "cpu", "ratio": 1.5}}}, ("offload_optimizer", "fraction", "1.5")),
    ({"bf16": {"enabled": "false"}}, ('bf16.enabled="false"', "true or false")),
    ({"bfloat16": {"enabled": "false"}}, ('bfloat16.enabled="false"', "true or false")),
    ({"bf16": True}, ("bf16=true", "an object")),
    ({"fp16": {"enabled": 1}}, ("fp16.enabled=1", "true or false")),
    ({"fp16": {"enabled": True, "loss_scale": "dynamic"}}, ('fp16.loss_scale="dynamic"', "a number")),
    ({"fp16": {"enabled": True, "initial_scale_power": 1e9}}, ("fp16",)),
    ({"optimizer": "AdamW"}, ('optimizer="AdamW"', "an object")),
    ({"optimizer": {"type": 3}}, ("optimizer.type=3", "a text")),
    ({"optimizer": {"type": "AdamW", "params": [1]}}, ("optimizer.params=[1]", "an object")),
    ({"optimizer": {"type": "AdamW", "params": {"lr": "1e-3"}}}, ('optimizer.params.lr="1e-3"', "without quotes")),
    ({"optimizer": {"type": "AdamW", "params": {"lr": True}}}, ("optimizer.params.lr=true", "a number")),
    ({"optimizer": {"type": "AdamW", "params": {"lr": math.nan}}}, ("optimizer.params.lr=NaN", "a number")),
    ({"optimizer": {"type": "AdamW", "params": {"lr": -1.0}}}, ("optimizer.params", "Invalid learning rate")),
    ({"optimizer": {"type": "AdamW", "params": {"betas": 0.9}}}, ("optimizer.params.betas=0.9", "two numbers")),
    ({"optimizer": {"type": "AdamW", "params": {"betas": ["0.9", 0.9]}}}, ("optimizer.params.betas", "a number")),
    ({"optimizer": {"type": "AdamW", "params": {"amsgrad": "no"}}}, ('amsgrad="no"', "true or false")),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "10"}}}, ('num_steps="10"', "a whole number")),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "sqrt"}}}, ("warmup_type", "'sqrt'")),
    ({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_first_step_size": 0}}},
     ("scheduler.params", "at least 1")),
    ({"scheduler": []}, ("scheduler=[]", "an object")),
    ({"train_batch_size": "8"}, ('train_batch_size="8"', "a whole number")),
    ({"train_micro_batch_size_per_gpu": 0}, ("train_micro_batch_size_per_gpu=0", "at least 1")),
    ({"gradient_accumulation_steps": 2.5}, ("gradient_accumulation_steps=2.5", "a whole number")),
    ({"gradient_clipping": "1.0"}, ('gradient_clipping="1.0"', "a number")),
    ({"gradient_clipping": -1}, ("gradient_clipping=-1",)),
    ({"communication_data_type": 16}, ("communication_data_type=16", "a text")),
    ({"data_types": {"grad_accum_dtype": True}}, ("data_types.grad_accum_dtype=true", "a text")),
    ({"wall_clock_breakdown": "yes"}, ('wall_clock_breakdown="yes"', "true or false")),
    ({"bf16": {"enabled": False}, "bfloat16": {"enabled": False}}, ("two names of one key",)),
    ({"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}}}, ("quantized",)),
    ({"progressive_layer_drop": {"enabled": True, "theta": 0.5}}, ("progressive_layer_drop.enabled=true",)),
    ({"elasticity": {"enabled": "true"}}, ('elasticity.enabled="true"',)),
    ({"torch_autocast": {"enabled": True}}, ("torch.autocast around the forward",)),
    ({"tensor_parallel": {"autotp_size": 2}}, ("tensor_parallel.autotp_size=2", "parallelize_module")),
]  # fmt: skip


@pytest.mark.parametrize("config, words", WRONG_TYPES, ids=[words[0] for _, words in WRONG_TYPES])
def test_what_is_wrong_is_named_with_file_and_key(
    config: dict[str, Any], words: tuple[str, ...], tmp_path: Path
) -> None:
    path, module = tmp_path / "mine.json", Net()
    path.write_text(json.dumps({"optimizer": ADAM, **config}))
    with raises(ShardoptError, str(path), *words):
        from_deepspeed_config(path, module)
    assert all(param.dtype is torch.float32 for param in module.parameters())


def test_auto_is_one_dict_to_fill_in(tmp_path: Path) -> None:
    shape = SHAPES["stage 3 with offload"]
    path = shape.written(tmp_path)
    with pytest.raises(ShardoptError) as error:
        from_deepspeed_config(path, Net())
    told = str(error.value)
    assert str(path) in told and "results would differ" not in told
    asked = ast.literal_eval(told[told.index("auto={") + 5 : told.index("})") + 1])
    assert asked == dict.fromkeys(shape.auto, ...)
    config = {"optimizer": ADAM, "train_batch_size": 8, "gradient_accumulation_steps": "auto"}
    assert from_deepspeed_config(config, Net()).accumulation_steps == 1  # the batch size says it
    with raises(ShardoptError, "does not set these to 'auto'", "['optimizer.params.lr']"):
        from_deepspeed_config(config, Net(), auto={"optimizer.params.lr": 1})
    sections = {"optimizer": ADAM, ZERO: {"stage": 1, "offload_optimizer": "auto"}}
    with raises(ShardoptError, f"auto={{'{ZERO}.offload_optimizer': ...}}"):
        from_deepspeed_config(sections, Net())
    run = from_deepspeed_config(sections, Net(), auto={f"{ZERO}.offload_optimizer": {"device": "cpu"}})
    assert run.optimizer.options.offload == Offload()


def test_files_that_are_no_configs_are_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    for content, words in (
        ('{"a": 1,}', ("is not JSON", "line 1 column")),
        ("", ("is not JSON",)),
        ('{"optimizer": {}, "optimizer": {}}', ("'optimizer' occurs twice",)),
        ("[1]", ("a JSON object", "list")),
        ("[" * 100_000, ("is not JSON",)),
    ):
        path.write_text(content)
        with raises(ShardoptError, str(path), *words):
            from_deepspeed_config(path, Net())
    path.write_bytes(b"\xff\xfe{")
    with raises(ShardoptError, str(path), "is not JSON"):
        from_deepspeed_config(str(path), Net())
    for wrong in (tmp_path, tmp_path / "missing.json"):
        with raises(ShardoptError, "pass the path of a JSON file", str(wrong)):
            from_deepspeed_config(wrong, Net())
    with raises(ShardoptError, "an empty path"):
        from_deepspeed_config("", Net())
    for wrong in (None, 3, ["ds.json"]):
        with raises(ShardoptError, "a dict, or the path of a JSON file", type(wrong).__name__):
            from_deepspeed_config(wrong, Net())  # type: ignore[arg-type]
    with raises(ShardoptError, "module takes an nn.Module"):
        from_deepspeed_config({"optimizer": ADAM}, Net().parameters())  # type: ignore[arg-type]


# -- the script's own optimizer ----------------------------------------------------------------------------------------


class Mine(torch.optim.AdamW):
    """With a step that nobody knows."""


def test_the_scripts_own_optimizer() -> None:
    module = Net()
    theirs = torch.optim.Adam(module.named_parameters(), lr=LR, amsgrad=True)
    theirs.param_groups[0]["note"] = "kept"
    loss_of(module, 0).backward()
    theirs.step()
    config = {ZERO: {"stage": 2}, "gradient_clipping": CLIP}
    opt = from_deepspeed_config(config, module, optimizer=theirs).optimizer
    assert type(opt) is ShardedAdam and opt.options.stage == 2 and opt.options.max_grad_norm == CLIP
    (group,) = opt.param_groups
    assert (group["lr"], group["amsgrad"], group["note"]) == (LR, True, "kept")
    assert group["param_names"] == [name for name, _ in module.named_parameters()]
    for param in module.parameters():  # states too
        assert (
            torch.equal(opt.state[param]["exp_avg"], theirs.state[param]["exp_avg"]) and opt.state[param]["step"] == 1
        )
    opt.close()
    # It goes before the section, as there.
    told = message_of({"optimizer": {"type": "Lamb", "params": {"lr": "auto"}}}, optimizer=torch.optim.SGD)
    assert "optimizer (optimizer= was given" in told
    # A class of shardopt's with arguments, and params beside it.
    module = Net()
    make = shardopt.ShardedAdamW
    run = from_deepspeed_config(config, module, groups_of(list(module.parameters())), optimizer=make)
    assert type(run.optimizer) is ShardedAdamW and [group["lr"] for group in run.optimizer.param_groups] == [LR / 2, LR]
    muon = from_deepspeed_config(config, Net(), optimizer=shardopt.ShardedMuon).optimizer  # it takes matrices alone
    assert {group["rule"] for group in muon.param_groups} >= {"adamw"}


def test_optimizers_that_cannot_be_taken_over_are_refused() -> None:
    module = Net()
    params = list(module.parameters())
    cases: list[tuple[Any, Any, tuple[str, ...]]] = [
        (Mine(params), None, ("Mine", "another update would run")),
        (torch.optim.LBFGS(params), None, ("LBFGS",)),
        (ShardedAdamW(params), None, ("give the class",)),
        (lambda given: ShardedAdamW(given), None, ("ShardedAdamW", "an optimizer of torch.optim")),
        (adamw(params), params, ("without params=", "already has params")),
        ("AdamW", None, ("'AdamW'", "its class")),
        (lambda given: None, None, ("NoneType",)),
        (None, None, ("no optimizer section", "optimizer=torch.optim.AdamW(")),
        (None, [{"params": params}], ("no optimizer section",)),
    ]
    for optimizer, own, words in cases:
        with raises(ShardoptError, *words):
            from_deepspeed_config({"bf16": {"enabled": True}}, module, own, optimizer=optimizer)
    with raises(ShardoptError, "capturable=True"):
        made = torch.optim.AdamW(params, capturable=True)
        from_deepspeed_config({"bf16": {"enabled": True}}, module, optimizer=made)
    assert all(param.dtype is torch.float32 for param in params)  # nothing half done


class FusedAdam(torch.optim.Optimizer):
    """As DeepSpeed's and Apex's: decay decoupled or not, bias correction or not, said beside the numbers."""

    __module__ = "deepspeed.ops.adam.fused_adam"

    def __init__(self, params: Any, adam_w_mode: bool = True, bias_correction: bool = True):
        defaults = {
            "lr": LR,
            "bias_correction": bias_correction,
            "betas": (0.9, 0.95),
            "eps": 1e-8,
            "weight_decay": 0.1,
        }
        super().__init__(params, defaults)
        self.adam_w_mode = adam_w_mode


def test_the_fused_adams_of_others_are_adam_and_adamw() -> None:
    for decoupled, expected in ((True, ShardedAdamW), (False, ShardedAdam)):
        module = Net()
        opt = from_deepspeed_config({}, module, optimizer=FusedAdam(module.parameters(), decoupled)).optimizer
        assert type(opt) is expected
        (group,) = opt.param_groups
        assert (group["lr"], group["betas"], group["weight_decay"]) == (LR, (0.9, 0.95), 0.1)
        assert group["decoupled_weight_decay"] is decoupled and "bias_correction" not in group
    with raises(ShardoptError, "FusedAdam", "another update would run"):
        from_deepspeed_config({}, Net(), optimizer=lambda params: FusedAdam(params, bias_correction=False))
    for module, name in (("mine", "FusedAdam"), ("apex.optimizers", "FusedNovoGrad")):
        with raises(ShardoptError, f"{module}.{name}", "another update would run"):
            from_deepspeed_config({}, Net(), optimizer=type(name, (FusedAdam,), {"__module__": module}))
