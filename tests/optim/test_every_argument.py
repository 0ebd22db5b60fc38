"""Every argument of every public name, with values that nobody meant: what is accepted works, the rest is a clear line.

The arguments are found by ``inspect``, so a new one fails here until the table says what it accepts.
"""

import inspect
import linecache
import math
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import Parameter

import shardopt
from shardopt import Offload, ShardoptError, Tuning
from shardopt.config import Options
from tests.support.paths import ROOT

WALK: dict[str, Any] = {
    "None": None,
    "True": True,
    "text": "nobody",
    "nan": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
    "-1": -1,
    "0": 0,
    "1e30": 1e30,
    "numpy": np.float64(0.5),
    "numpy int": np.int64(1),
    "tensor": torch.tensor(0.5),
    "tensor int": torch.tensor(1),
    "wrong container": {"wrong": []},
}
EVERYTHING = set(WALK)
ONE = {"numpy int", "tensor int"}
HALF = {"numpy", "tensor"}
COUNT = {"0", *ONE}
FLAG = {"True", "0", *ONE}
HINT = {"None", *FLAG}
SHARE = {"0", *HALF}  # at least 0, below 1
POSITIVE = {"1e30", *HALF, *ONE}
FROM_0 = {"0", *POSITIVE}
ANY_NUMBER = {"-1", *FROM_0}
NONE, NOTHING = {"None"}, set[str]()

OPTIONS = {
    "module": NONE,
    "stage": COUNT,
    "process_group": NONE,
    "norm_group": NONE,
    "master": NOTHING,
    "state_format": NOTHING,
    "gradient_format": NOTHING,
    "ema": NONE | SHARE,
    "max_grad_norm": NONE | POSITIVE | {"inf"},
    "clip_by": NOTHING,  # without a norm to clip to
    "release_gradients": {"0"},  # without the module
    "reduce_dtype": NONE,
    "gather_dtype": NONE,
    "error_feedback": NONE | {"0"},  # without a quantized reduce_dtype
    "compute_dtype": NONE,
    "cast_inputs": {"True", *ONE},  # False has no effect without compute_dtype
    "output_dtype": NONE,
    "keep_fp32": NOTHING,
    "cast_buffers": NOTHING,
    "offload": NONE,
    "tuning": NONE,
}
# Of torch's arguments. As in torch NaN is refused, and a hint may be left open.
TORCH = {
    "params": NOTHING,
    "lr": FROM_0,
    "betas": NOTHING,
    "etas": NOTHING,
    "step_sizes": NOTHING,
    "eps": FROM_0,
    "weight_decay": FROM_0,
    "momentum": FROM_0,
    "dampening": ANY_NUMBER | {"inf", "-inf"},  # without a momentum it is never used
    "lr_decay": FROM_0,
    "initial_accumulator_value": FROM_0,
    "rho": SHARE | ONE,
    "alpha": FROM_0,
    "lambd": ANY_NUMBER,
    "t0": ANY_NUMBER | {"inf", "-inf"},
    "momentum_decay": FROM_0 | {"inf"},  # of which the momentum is the limit
    "amsgrad": FLAG,
    "nesterov": {"0"},  # without a momentum
    "centered": FLAG,
    "decoupled_weight_decay": FLAG,
    "clip_update": NONE | POSITIVE | {"inf"},
    "trust": FLAG,
    "trust_coefficient": FROM_0,
    "maximize": FLAG,
    "foreach": HINT,
    "fused": HINT,
    "capturable": {"0"},
    "differentiable": {"0"},
}
# Where a class differs.
OF_CLASS: dict[str, dict[str, set[str]]] = {
    "ShardedASGD": {"alpha": {"-1", "inf", *FROM_0} - {"1e30"}},
    "ShardedAdafactor": {
        "eps": NOTHING,
        "beta2_decay": {"0", "-1", "-inf"},
        "d": ONE | {"1e30", "inf"},
    },
    "ShardedMuon": {
        "nesterov": FLAG,
        "eps": FROM_0 | {"inf"},  # of which updates of zeros are the limit
        "ns_coefficients": NOTHING,
        "ns_steps": COUNT,
        "adjust_lr_fn": NONE,
        "adamw": NONE,
    },
}
TUNING = {
    "bucket_bytes": NONE | ONE,
    "keep_below": COUNT,
    "keep": NOTHING,
    "live_bytes": NONE | COUNT,
    "units": NOTHING,
    "reshard_after_forward": FLAG,
    "prefetch": NONE | COUNT | {"wrong container"},  # a dict from a unit to a list of units
    "timeout": NONE | POSITIVE | {"inf"},
    "neighbours": FLAG,
    "by_host": FLAG,
    "overlap_gather": FLAG,
    "broadcast_buffers": FLAG,
    "chunk_bytes": ONE,
    "nonfinite": NOTHING,
    "compress_from": COUNT,
    "seed": COUNT | {"-1"},
    "compare_masters": FLAG,
    "compare_gathered": FLAG,
}
OFFLOAD = {
    "states": NOTHING,
    "gradients": NONE,
    "params": NONE,
    "step": NOTHING,
    "fraction": {"numpy int", "tensor int"} | HALF,
    "early_bytes": {"0"},  # of states in a file
    "pin_memory": FLAG,
}
SAVE = {
    "directory": {"text"},
    "module": NOTHING,
    "optimizer": NONE,
    "extra": NONE | {"wrong container"},
    "step": NONE | COUNT,
    "keep": NONE | ONE,
    "asynchronous": FLAG,
    "allow_nonfinite": FLAG,
    "full_precision": FLAG,
    "names": NONE,
}
SAVE_WEIGHTS = {
    "directory": {"text"},
    "optimizer": NOTHING,
    "dtype": NONE,
    "bytes_per_file": ONE,
    "merge": NONE,
    "prefix": {"text"},
}
LOAD = {"directory": NOTHING, "module": NOTHING, "optimizer": NONE, "strict": FLAG, "names": NONE}
VERIFY = {
    "build": NOTHING,
    "batches": NOTHING,
    "steps": ONE,
    "optimizer": NOTHING,
    "reference": NONE,
    "loss": NONE,
    "stages": NOTHING,
    "ways": NOTHING,
    "tolerance": FROM_0 | {"inf"},
    "arguments": EVERYTHING,  # the optimizer's own
}
RULE = {
    "scalars": NOTHING,
    "states": NOTHING,
    "carried": NOTHING,
    "counts_steps": FLAG,
    "nonnegative": NOTHING,
    "tolerates": NONE,
    "initial": NONE,
    "of_param": NOTHING,
}
MATRIX_RULE = {"accumulate": NOTHING, "apply": NOTHING}
DEEPSPEED = {
    "config": NOTHING,
    "module": NOTHING,
    "params": NONE,
    "optimizer": NONE,
    "auto": NONE,
    "process_group": NONE,
}
ACTIVATIONS = {
    "process_group": NONE,
    "offload": NONE,
    "keep_below": COUNT,
    "check": FLAG,
    "timeout": NONE | POSITIVE | {"inf"},
}
# What shardopt makes and hands out, and errors, whose arguments are words.
MADE_HERE = {"DeepSpeedRun", "Difference", "Part", "Verdict"}


def classes() -> list[str]:
    return [name for name in shardopt.__all__ if name.startswith("Sharded")]


def trains(kind: Any, given: dict[str, Any]) -> None:
    """One step, with everything that is not given left as it is."""
    param = Parameter(torch.linspace(1, 2, 8).view(2, 4))
    opt = kind(**{"params": [param], **given})
    param.grad = torch.ones(2, 4)
    opt.step()
    opt.close()


def constructed(kind: Any) -> Callable[[dict[str, Any], Path], None]:
    return lambda given, _: trains(kind, given)


def general(given: dict[str, Any], _: Path) -> None:
    example = shardopt.ShardedSGD([torch.zeros(1)])
    trains(shardopt.ShardedOptimizer, {"defaults": example.defaults, "rule": example.rule, **given})


def tuned(given: dict[str, Any], _: Path) -> None:
    """With the module: some say how it is trained, and nothing else."""
    module = nn.Linear(4, 2)
    opt = shardopt.ShardedSGD(module, tuning=Tuning(**given))
    module(torch.ones(1, 4)).sum().backward()
    opt.step()
    opt.close()


def offloaded(given: dict[str, Any], folder: Path) -> None:
    trains(shardopt.ShardedSGD, {"offload": Offload(**{"states": str(folder), **given}), "momentum": 0.9})


def small() -> tuple[nn.Module, shardopt.ShardedOptimizer]:
    torch.manual_seed(0)
    module = nn.Linear(4, 2)
    return module, shardopt.ShardedSGD(module)


def saved(given: dict[str, Any], folder: Path) -> None:
    module, optimizer = small()
    shardopt.save_checkpoint(**{"directory": folder, "module": module, "optimizer": optimizer, **given}).wait()


def saved_alone(given: dict[str, Any], folder: Path) -> None:
    _, optimizer = small()
    shardopt.save_weights(**{"directory": folder, "optimizer": optimizer, **given})


def loaded(given: dict[str, Any], folder: Path) -> None:
    module, optimizer = small()
    shardopt.save_checkpoint(folder, module, optimizer)
    shardopt.load_checkpoint(**{"directory": folder, "module": module, "optimizer": optimizer, **given})


def prepared(given: dict[str, Any], _: Path) -> None:
    shardopt.prepare_states(**{"optimizer": small()[1], **given})


def verified(given: dict[str, Any], folder: Path) -> None:
    if "arguments" in given:  # both optimizers get them, and refuse what they do not know: torch's, which is first, ...
        with pytest.raises(TypeError, match=r"^give verify\(\) its own keywords .*: SGD\.__init__\(\) got .*'nobody'"):
            verified({"nobody": given["arguments"]}, folder)
        # ... and shardopt's, where torch's takes anything.
        takes_anything = {"reference": lambda params, **_: torch.optim.SGD(params)}
        with pytest.raises(TypeError, match=r"^ShardedSGD\.__init__\(\) got .*'nobody'"):
            verified({"nobody": given["arguments"], **takes_anything}, folder)
        return
    call = {
        "build": lambda: small()[0],
        "batches": [torch.ones(2, 4)],
        "loss": mean,
        "steps": 1,
        "stages": (1,),
        **given,
    }
    if given.get("loss", mean) is None:
        call["build"] = Summed
    shardopt.verify(**{"optimizer": shardopt.ShardedSGD, **call})


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = small()[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).sum()


def mean(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return module(batch).mean()


def no_scalars(group: Any, step: int, carried: Any) -> dict[str, float]:
    return {"lr": group["lr"]}


def plain(param, grad, state, s):  # type: ignore[no-untyped-def]
    return param - s.lr * grad


def ruled(given: dict[str, Any], _: Path) -> None:
    found = shardopt.rule(**{"scalars": no_scalars, **given})(plain)
    trains(shardopt.ShardedOptimizer, {"defaults": {"lr": 0.5}, "rule": found})


def ruled_by_matrices(given: dict[str, Any], _: Path) -> None:
    passes = {name: shardopt.rule(scalars=no_scalars)(gradient_alone) for name in MATRIX_RULE}
    found = shardopt.matrix_rule(**{**passes, **given})(lambda update, group: update)
    trains(shardopt.ShardedOptimizer, {"defaults": {"lr": 0.5}, "rule": found})


def gradient_alone(param, grad, state, s):  # type: ignore[no-untyped-def]
    return s.lr * grad


CONFIG = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}, "zero_optimization": {"stage": 1}}


def configured(given: dict[str, Any], _: Path) -> None:
    shardopt.from_deepspeed_config(**{"config": CONFIG, "module": small()[0], **given})


def kept(given: dict[str, Any], _: Path) -> None:
    with shardopt.partition_activations(**given) as context:
        loss = small()[0](torch.ones(3, 4)).square().sum()
    loss.backward()
    assert context.memory() == {"partitioned": {}, "whole": {}}  # one rank keeps as autograd does


Call = Callable[[dict[str, Any], Path], None]
TABLE: dict[str, tuple[dict[str, set[str]], Call]] = {
    **{
        name: ({**TORCH, **OPTIONS, **OF_CLASS.get(name, {})}, constructed(getattr(shardopt, name)))
        for name in classes()
        if name != "ShardedOptimizer"
    },
    "ShardedOptimizer": ({**OPTIONS, "params": NOTHING, "defaults": NOTHING, "rule": NOTHING}, general),
    "Tuning": (TUNING, tuned),
    "Offload": (OFFLOAD, offloaded),
    "save_checkpoint": (SAVE, saved),
    "save_weights": (SAVE_WEIGHTS, saved_alone),
    "load_checkpoint": (LOAD, loaded),
    "prepare_states": ({"optimizer": NOTHING}, prepared),
    "verify": (VERIFY, verified),
    "rule": (RULE, ruled),
    "matrix_rule": (MATRIX_RULE, ruled_by_matrices),
    "from_deepspeed_config": (DEEPSPEED, configured),
    "partition_activations": (ACTIVATIONS, kept),
}


def arguments_of(name: str) -> Iterator[str]:
    for each in inspect.signature(getattr(shardopt, name)).parameters.values():
        if each.name == "options":
            yield from Options.__dataclass_fields__
        else:
            yield each.name


def public() -> list[str]:
    names = [name for name in shardopt.__all__ if name not in MADE_HERE]
    return [name for name in names if not name.endswith("Error")]


def test_the_table_knows_every_argument() -> None:
    """A new one says there what it accepts."""
    assert set(TABLE) == set(public())
    for name in public():
        missing = [each for each in arguments_of(name) if each not in TABLE[name][0]]
        assert not missing, f"say in the table what {name}({', '.join(missing)}) accepts"


WORDS = {"lr": ("learning rate",)}  # torch's


def is_clear(error: BaseException, argument: str) -> str:
    """Why not; empty where it is."""
    text = str(error)
    if isinstance(error, FileNotFoundError):
        return "" if "nobody" in text else "it does not name the file"
    if not isinstance(error, TypeError | ValueError | ShardoptError):
        return f"a {type(error).__name__}"
    if not text or "\n" in text:
        return "not one line"
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    file = frame.f_code.co_filename
    if not linecache.getline(file, line).strip().startswith("raise"):
        return "raised by Python, not by a check"
    names = (argument.rstrip("s"), *WORDS.get(argument, ()))
    if str(ROOT / "shardopt") in file and not any(each in text.lower() for each in names):
        return f"it does not name {argument}"
    return ""


# One class that updates element by element, one that measures params, one of matrices, and their base.
WITH_OPTIONS = ("ShardedAdamW", "ShardedLAMB", "ShardedMuon", "ShardedOptimizer")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", public())
def test_every_argument(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The options are one check for all classes, so few have them here."""
    shares = name in classes() and name not in WITH_OPTIONS
    monkeypatch.chdir(tmp_path)
    check(name, [each for each in arguments_of(name) if not (shares and each in OPTIONS)], tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in classes() if name not in WITH_OPTIONS])
def test_every_option(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check(name, [each for each in arguments_of(name) if each in OPTIONS], tmp_path)


def check(name: str, arguments: list[str], tmp_path: Path) -> None:
    accepts, call = TABLE[name]
    found = []
    for number, argument in enumerate(arguments):
        for label, value in WALK.items():
            folder = tmp_path / f"{number} {label}"
            folder.mkdir()
            try:
                call({argument: value}, folder)
            except Exception as error:
                if label in accepts[argument]:
                    found.append(f"{argument}={label}: refused: {type(error).__name__}: {error}")
                elif why := is_clear(error, argument):
                    found.append(f"{argument}={label}: {why}: {type(error).__name__}: {error}")
            else:
                if label not in accepts[argument]:
                    found.append(f"{argument}={label}: accepted")
    assert not found, "\n".join(found)
