"""DeepSpeed configs: every key is mapped, checked or named. test_deepspeed_training.py trains from one."""

import io
import json
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import shardopt
from shardopt import Offload, ShardoptError, from_deepspeed_config
from shardopt.integrations.deepspeed.loss_scaler import LossScale, LossScaler
from tests.support.training import Net, raises

# As in DeepSpeed's documentation of ZeRO-3 with offload.
DOCUMENTED: dict[str, Any] = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "steps_per_print": 10,
    "wall_clock_breakdown": False,
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": 0.5,
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": 0.001, "warmup_max_lr": 0.01, "warmup_num_steps": 3, "total_num_steps": 10},
    },
    "fp16": {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": 16,
        "loss_scale_window": 4,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": True, "ratio": 0.5},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1000000000,
        "reduce_bucket_size": 500,
        "allgather_bucket_size": 500,
        "stage3_prefetch_bucket_size": 500,
        "stage3_param_persistence_threshold": 100,
        "stage3_max_live_parameters": 2000,
        "stage3_max_reuse_distance": 2000,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}


NVME = {"device": "nvme", "nvme_path": "/a"}


def changed(**sections: Any) -> dict[str, Any]:
    """The documented config at one rank, with sections replaced (None: left out)."""
    config = {**DOCUMENTED, "train_batch_size": 8, **sections}
    return json.loads(json.dumps({key: value for key, value in config.items() if value is not None}))


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# -- keys --------------------------------------------------------------------------------------------------------------


def test_what_the_keys_become(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(changed()))
    module = Net()
    with pytest.warns(UserWarning, match="change no result") as seen:
        run = from_deepspeed_config(path, module)
    assert len(seen) == 1
    names = ("ds.json", "sub_group_size", "allgather_bucket_size", "prefetch", "reuse", "steps_per_print")
    for name in names:
        assert name in str(seen[0].message)
    for name in (
        "offload_param",
        "ratio",
        "pin_memory",
        "overlap_comm",
        "wall_clock_breakdown",
        "16bit",
    ):  # done, or not asked for
        assert name not in str(seen[0].message)
    opt = run.optimizer
    assert type(opt) is shardopt.ShardedAdamW and opt.options.module is module
    assert (opt.options.stage, opt.options.max_grad_norm) == (3, 0.5)
    assert opt.defaults["betas"] == (0.9, 0.95) and opt.defaults["weight_decay"] == 0.1
    tuning = opt.options.tuning
    assert (tuning.bucket_bytes, tuning.keep_below, tuning.live_bytes) == (1000, 100, 4000)
    assert opt.options.offload == Offload("/local_nvme", params="cpu", fraction=0.5, pin_memory=True)
    assert (run.accumulation_steps, run.micro_batch_size) == (2, 4)
    assert run.scaler.is_enabled() and run.scaler.get_scale() == 65536
    assert opt.options.compute_dtype is torch.float16
    assert all(param.dtype is torch.float32 for param in module.parameters())  # cast when they are bound
    module = nn.Linear(8, 8).bfloat16()
    run = from_deepspeed_config({"fp16": {"enabled": True}, "optimizer": {"type": "AdamW"}}, module)
    assert run.optimizer.options.compute_dtype is None
    assert module.weight.dtype is torch.float16  # there are no fp32 values to start from


@pytest.mark.parametrize(
    ("section", "expected", "warned"),
    [
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, Offload("cpu"), ""),
        ({"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}}, Offload(pin_memory=False), ""),
        ({"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.4}}, Offload(fraction=0.4), ""),
        ({"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.0}}, None, ""),
        ({"stage": 3, "offload_optimizer": {"device": "none", "nvme_path": "/a"}}, None, ""),
        ({"stage": 1, "cpu_offload": True, "cpu_offload_params": True}, Offload(), "below stage 3"),
        ({"stage": 3, "offload_param": {"device": "cpu"}}, Offload(params="cpu"), "without offload_optimizer"),
        (
            {
                "stage": 3,
                **{name: {"device": "nvme", "nvme_path": "/a"} for name in ("offload_optimizer", "offload_param")},
            },
            Offload("/a", params="/a"),
            "",
        ),
    ],
)
def test_offload(section: dict[str, Any], expected: Offload | None, warned: str) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run = from_deepspeed_config(
            changed(zero_optimization=section, steps_per_print=None, zero_allow_untested_optimizer=None), Net()
        )
    assert run.optimizer.options.offload == expected
    assert warned in "".join(str(each.message) for each in seen) and len(seen) == bool(warned)


@pytest.mark.parametrize(
    ("kind", "params", "expected", "defaults"),
    [
        ("Adam", {}, "ShardedAdamW", {"weight_decay": 0.0, "lr": 1e-3}),
        ("Adam", {"adam_w_mode": False, "weight_decay": 0.2}, "ShardedAdam", {"weight_decay": 0.2}),
        ("AdamW", {"torch_adam": True}, "ShardedAdamW", {"weight_decay": 0.01}),
        ("Lion", {"betas": [0.8, 0.9]}, "ShardedLion", {"betas": (0.8, 0.9), "lr": 1e-3}),
        ("Adagrad", {"lr": 0.5}, "ShardedAdagrad", {"lr": 0.5}),
        ("SGD", {"lr": 0.1, "momentum": 0.9}, "ShardedSGD", {"momentum": 0.9}),
    ],
)
def test_optimizers(kind: str, params: dict[str, Any], expected: str, defaults: dict[str, Any]) -> None:
    config = changed(optimizer={"type": kind, "params": params}, fp16=None, scheduler=None)
    with quiet():
        run = from_deepspeed_config(config, Net())
    assert type(run.optimizer).__name__ == expected and run.scheduler is None and not run.scaler.is_enabled()
    assert {key: run.optimizer.defaults[key] for key in defaults} == defaults


def test_sums_of_gradients() -> None:
    for kept in ("fp32", "bf16"):
        with quiet():
            run = from_deepspeed_config(
                changed(fp16=None, bf16={"enabled": True}, data_types={"grad_accum_dtype": kept}), Net()
            )
        assert run.optimizer.options.gradient_format == kept


def test_batch_sizes() -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for given, found in [
        ((8, 4, 2), (4, 2)),
        ((8, 4, None), (4, 2)),
        ((8, None, 2), (4, 2)),
        ((None, 4, 2), (4, 2)),
        ((8, None, None), (8, 1)),
        ((None, 4, None), (4, 1)),
        (("auto", 4, 2), (4, 2)),
        (("auto", "auto", 2), (None, 2)),
    ]:
        with quiet():
            run = from_deepspeed_config(changed(**dict(zip(names, given, strict=True))), Net())
        assert (run.micro_batch_size, run.accumulation_steps) == found, given
    for wrong in ((9, 4, 2), (7, None, 2), (8, 4, 4)):
        with pytest.raises(ShardoptError, match="train_batch_size"), quiet():
            from_deepspeed_config(changed(**dict(zip(names, wrong, strict=True))), Net())


def test_auto() -> None:
    module = Net()
    zero = {"stage": 3, "reduce_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}
    zero["stage3_prefetch_bucket_size"] = "auto"
    config = changed(
        zero_optimization=zero, gradient_clipping="auto", optimizer={"type": "AdamW", "params": {"lr": "auto"}}
    )
    with raises(ShardoptError, "auto={'optimizer.params.lr': ..., 'gradient_clipping': ...}"), quiet():
        from_deepspeed_config(config, module)
    with quiet():
        run = from_deepspeed_config(config, module, auto={"optimizer.params.lr": 0.25, "gradient_clipping": 0.75})
    assert run.optimizer.options.tuning == shardopt.Tuning()
    run.optimizer.close()
    module = Net()
    module.config = type("Config", (), {"hidden_size": 32})()  # type: ignore[assignment]
    with quiet():
        run = from_deepspeed_config(config, module, auto={"optimizer.params.lr": 0.25, "gradient_clipping": 0.75})
    assert run.optimizer.defaults["lr"] == 0.25 and run.optimizer.options.max_grad_norm == 0.75
    assert run.optimizer.options.tuning.bucket_bytes == 2 * 32**2 and run.optimizer.options.tuning.keep_below == 320
    with pytest.raises(ShardoptError, match="does not set these to 'auto'"):
        from_deepspeed_config(config, module, auto={"zero_optimization.stage": 2})


def test_quantized_traffic() -> None:
    zero = {"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True}
    config = {"optimizer": {"type": "Adam", "params": {}}, "zero_optimization": zero}
    config |= {"train_micro_batch_size_per_gpu": 1}
    with quiet():
        run = from_deepspeed_config(config, Net())
    assert (run.optimizer.options.reduce_dtype, run.optimizer.options.gather_dtype) == ("int4", "int8")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"optimizer": {"type": "OneBitAdam", "params": {}}}, "OneBitAdam"),
    ({"optimizer": {"type": "AdamW", "params": {"freeze_step": 3}}}, "freeze_step"),
    ({"optimizer": {"type": "SGD", "params": {"bias_correction": False}}}, "bias_correction"),
    ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}}, "max_grad_norm.*gradient_clipping"),
    ({"optimizer": {"type": "Adam", "params": {"betas": [0.9, 2.0]}}}, "Invalid beta"),
    ({"optimizer": None}, "no optimizer"),
    ({"scheduler": {"type": "Cosine", "params": {}}}, "Cosine.*OneCycle"),
    ({"scheduler": {"type": "OneCycle", "params": {"cycle_max_lr": 1.0}}}, "cycle_min_lr is missing"),
    ({"scheduler": {"type": "OneCycle", "params": {"cycle_first_stair_count": 3}}}, "cycle_first_stair_count=3"),
    ({"scheduler": {"type": "LRRangeTest", "params": {"last_batch_iteration": 3}}}, "last_batch_iteration"),
    ({"scheduler": {"type": "WarmupCosineLR", "params": {}}}, "total_num_steps"),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup": 3}}}, "scheduler.params.warmup"),
    ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, "fp16_master_weights_and_grads"),
    ({"fp16": {"enabled": True, "scale": 3}}, "fp16.scale"),
    ({"bf16": {"enabled": True}}, "bf16.enabled"),
    ({"fp16": {"enabled": True, "hysteresis": 0}}, "hysteresis at least 1"),
    ({"sparse_gradients": True}, "sparse_gradients"),
    ({"communication_data_type": "fp8"}, "communication_data_type"),
    ({"data_types": {"grad_accum_dtype": "bf16"}}, 'grad_accum_dtype="bf16".*bf16 params'),
    ({"zero_optimization": {"stage": 2, "zero_quantized_weights": True}}, "zero_quantized_weights.*stage 3"),
    ({"zero_optimization": {"zero_quantized_nontrainable_weights": True}}, "zero_quantized_nontrainable_weights"),
    (
        {"communication_data_type": "fp32", "zero_optimization": {"zero_quantized_gradients": True}},
        "communication_data_type",
    ),
    ({"zero_optimization": {"stage": 5}}, "stage=5"),
    ({"zero_optimization": {"stage": 3, "offload_param": {"device": "tape"}}}, "tape"),
    ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}, "without nvme_path"),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/a"},
                "cpu_offload": True,
            }
        },
        "same directory",
    ),
    ({"pipeline": {"stages": 2}}, "pipeline.stages"),
    ({"gradient_clipping": "auto"}, "gradient_clipping': ..."),
    ({"fp16": {"enabled": "auto"}}, "fp16.enabled': ..."),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}}, "warmup_num_steps': ..."),
    (
        {"scheduler": {"type": "LRRangeTest", "params": {"lr_range_test_step_size": 0}}},
        "lr_range_test_step_size must be at least 1, found 0",
    ),
]


@pytest.mark.parametrize(("section", "word"), WRONG)
def test_what_would_change_results_is_an_error(section: dict[str, Any], word: str) -> None:
    module = Net()
    with pytest.raises(ShardoptError, match=word), quiet():
        from_deepspeed_config(changed(**section), module)
    assert all(param.dtype is torch.float32 for param in module.parameters())  # nothing half done


def test_errors_come_together_and_warnings_too() -> None:
    with pytest.raises(ShardoptError) as error, quiet():
        from_deepspeed_config(changed(sparse_gradients=True, elsewhere=3), Net())
    assert "sparse_gradients" in str(error.value) and "elsewhere=3" in str(error.value)
    zero = {"stage": 1, "overlap_comm": False, "contiguous_gradients": False}
    with pytest.warns(UserWarning) as seen:
        from_deepspeed_config(changed(zero_optimization=zero, wall_clock_breakdown=True), Net())
    assert len(seen) == 1
    for word in ("overlap_comm=false", "contiguous_gradients=false", "optimizer.timings()", "steps_per_print"):
        assert word in str(seen[0].message)


# -- schedules and scales ----------------------------------------------------------------------------------------------


def rates(kind: str, steps: int, key: str = "lr", **params: Any) -> list[Any]:
    config = changed(scheduler={"type": kind, "params": params}, fp16=None, zero_optimization={"stage": 1})
    with quiet():
        run = from_deepspeed_config(config, Net())
    found = []
    for _ in range(steps):
        found.append(run.optimizer.param_groups[0][key])
        run.optimizer.step()  # no gradients: nothing happens
        assert run.scheduler is not None
        run.scheduler.step()
    return found


def test_schedules() -> None:
    log = [0.0, 0.0, math.log(2) / math.log(4), math.log(3) / math.log(4), 1.0, 1.0]
    near = pytest.approx
    assert rates("WarmupLR", 6, warmup_max_lr=1.0, warmup_num_steps=4)[:4] == near(log[:4])
    assert rates("WarmupLR", 6, warmup_max_lr=1.0, warmup_num_steps=4)[5:] == near([1.0])
    line = rates(
        "WarmupDecayLR", 9, warmup_min_lr=0.5, warmup_max_lr=1.5, warmup_num_steps=2, total_num_steps=6,
        warmup_type="linear",
    )  # fmt: skip
    assert line == near([0.5, 0.5, 1.0, 1.5, 1.25, 1.0, 0.75, 0.5, 0.5])
    cosine = rates("WarmupCosineLR", 8, warmup_num_steps=2, total_num_steps=6, warmup_type="linear", cos_min_ratio=0.1)
    shares = [0.1 + 0.9 * (1 + math.cos(math.pi * each / 4)) / 2 for each in (1, 2, 3, 4)]
    assert cosine == near([0.01 * each for each in (0.0, 0.0, 0.5, *shares, shares[-1])])
    # Without a highest rate WarmupLR rises to the optimizer's own, WarmupDecayLR to its default.
    assert rates("WarmupLR", 4, warmup_num_steps=2)[3:] == near([0.01])
    assert max(rates("WarmupDecayLR", 6, warmup_num_steps=2, total_num_steps=9)) == near(0.001)


def test_a_schedule_goes_on_from_where_it_was_saved() -> None:
    """Also to the rate that groups began with, whatever another run begins with; without a function in the file."""
    for kind, params in (
        ("WarmupLR", {"warmup_num_steps": 9}),
        ("OneCycle", {"cycle_min_lr": 0.0, "cycle_max_lr": 1.0}),
    ):
        config = changed(scheduler={"type": kind, "params": params}, fp16=None, zero_optimization={"stage": 1})
        runs = []
        for lr in (0.01, 0.5):
            module = Net()
            groups = [{"params": [each], "lr": lr} for each in module.parameters()]
            with quiet():
                runs.append(from_deepspeed_config(config, module, groups))
        saved, other = runs
        assert isinstance(saved.scheduler, LambdaLR) and isinstance(other.scheduler, LambdaLR)
        for _ in range(3):
            saved.optimizer.step()
            saved.scheduler.step()
        file = io.BytesIO()
        torch.save(saved.scheduler.state_dict(), file)
        file.seek(0)
        other.scheduler.load_state_dict(torch.load(file, weights_only=True))
        for run in runs:
            run.optimizer.step()
            assert run.scheduler is not None
            run.scheduler.step()
        ends = [[(group["lr"], group["betas"]) for group in run.optimizer.param_groups] for run in runs]
        assert ends[0] == ends[1] and saved.scheduler.get_last_lr() == other.scheduler.get_last_lr()


def test_cycles_and_range_tests() -> None:
    near = pytest.approx
    cycle = {"cycle_min_lr": 1.0, "cycle_max_lr": 3.0, "cycle_first_step_size": 2, "cycle_second_step_size": 4}
    decay = {"decay_step_size": 2, "decay_lr_rate": 0.5, "decay_mom_rate": 0.01}
    up_and_down = [1.0, 2.0, 3.0, 2.5, 2.0, 1.5, 1.0]
    assert rates("OneCycle", 9, **cycle, **decay) == near([*up_and_down, 1 / 1.25, 1 / 1.5])
    assert rates("OneCycle", 9, **cycle) == near([*up_and_down, 1.0, 1.0])
    unending = rates("OneCycle", 9, **cycle, decay_lr_rate=0.5)  # without steps of a decay there is none
    assert unending == near([*up_and_down, 1.0, 1.0])
    betas = rates("OneCycle", 9, "betas", **cycle, **decay)
    assert [first for first, _ in betas] == near([0.8, 0.85, 0.8, 0.825, 0.85, 0.875, 0.9, 0.9 * 1.005, 0.9 * 1.01])
    assert {second for _, second in betas} == {0.99}
    assert set(rates("OneCycle", 9, "betas", **cycle, cycle_momentum=False)) == {(0.9, 0.95)}
    found = rates("LRRangeTest", 5, lr_range_test_min_lr=0.5, lr_range_test_step_size=2, lr_range_test_step_rate=2.0)
    assert found == near([0.5, 1.0, 1.5, 2.0, 2.5])
    stairs = rates("LRRangeTest", 5, lr_range_test_step_size=2, lr_range_test_staircase=True)
    assert stairs == near([0.001, 0.001, 0.002, 0.002, 0.003])
    scheduler = {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0}}
    config = changed(scheduler=scheduler, optimizer={"type": "SGD", "params": {"lr": 0.1}}, fp16=None)
    with pytest.warns(UserWarning, match="cycle_momentum .of an optimizer without betas"):
        from_deepspeed_config(config, Net())


def scales(rule: LossScale, overflows: list[bool]) -> list[float]:
    scaler = LossScaler(rule, "cpu")
    param = nn.Parameter(torch.ones(3))
    opt, found = torch.optim.SGD([param], lr=0.0), []
    for overflow in overflows:
        param.grad = torch.full((3,), math.inf if overflow else 1.0)
        scaler.scale(torch.ones(()))
        scaler.step(opt)
        scaler.update()
        found.append(scaler.get_scale())
        again = LossScaler(rule, "cpu")  # its state is all there is
        again.load_state_dict(scaler.state_dict())
        scaler = again
    return found


def test_loss_scales() -> None:
    assert scales(LossScale(8, hysteresis=2), [True, True, False, True]) == [8, 4, 4, 2]
    assert scales(LossScale(8, hysteresis=2, refills=True), [True, False, True, True]) == [8, 8, 8, 4]
    assert scales(LossScale(8, window=2, hysteresis=1), [False] * 5) == [8, 8, 16, 16, 32]
    assert scales(LossScale(8, window=1, hysteresis=2), [True, True, False, False, True, True]) == [8, 4, 4, 8, 8, 4]
    assert scales(LossScale(8, fixed=True), [True, False, True]) == [8, 8, 8]
    with raises(ShardoptError, "min_loss_scale"):
        scales(LossScale(4, hysteresis=1, floor=2), [True, True])
    disabled = LossScaler(LossScale(), "cpu", enabled=False)
    disabled.update()
    assert disabled.state_dict() == {} and disabled.scale(torch.ones(())) == 1
