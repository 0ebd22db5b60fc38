"""The public face, frozen: names, arguments, defaults, the pages' numbers and pictures, the command line."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import shardopt
from shardopt import Offload, Tuning
from shardopt.config import Options
from tests.optim.test_every_argument import OFFLOAD, OPTIONS, TUNING, public
from tests.support.cases import CASES
from tests.support.norm_rules import NORM_CASES
from tests.support.paths import ROOT
from tests.support.scripts import run_module, run_script

EXPORTED = [
    "BindingError",
    "CheckpointError",
    "CommunicationError",
    "DeepSpeedRun",
    "Difference",
    "DisagreementError",
    "Offload",
    "OffloadError",
    "Part",
    "ReleasedError",
    "RuleError",
    "ShardedASGD",
    "ShardedAdadelta",
    "ShardedAdafactor",
    "ShardedAdagrad",
    "ShardedAdam",
    "ShardedAdamW",
    "ShardedAdamax",
    "ShardedLAMB",
    "ShardedLARS",
    "ShardedLion",
    "ShardedMuon",
    "ShardedNAdam",
    "ShardedOptimizer",
    "ShardedRAdam",
    "ShardedRMSprop",
    "ShardedRprop",
    "ShardedSGD",
    "ShardoptError",
    "StateError",
    "Tuning",
    "UnsupportedVersionError",
    "Verdict",
    "from_deepspeed_config",
    "load_checkpoint",
    "matrix_rule",
    "partition_activations",
    "prepare_states",
    "rule",
    "save_checkpoint",
    "save_weights",
    "verify",
]
TORCH_CLASSES = [*(case.name for case in CASES if case.is_torchs), "Adafactor"]


def test_names_are_added_on_purpose() -> None:
    assert sorted(shardopt.__all__) == sorted(EXPORTED)
    optimizers = {name for name in EXPORTED if name.startswith("Sharded")} - {"ShardedOptimizer"}
    # None without its row in the tests' tables, but for one of whole matrices (tests/step/test_muon.py), and one whose
    # states are of rows and columns (tests/step/test_adafactor.py).
    rows = {case.ours.__name__ for case in (*CASES, *NORM_CASES)}
    assert optimizers == rows | {"ShardedMuon", "ShardedAdafactor"}
    assert all(hasattr(shardopt, name) for name in EXPORTED)
    assert [name for name in dir(shardopt) if not name.startswith("_")] == sorted(EXPORTED)  # and no module


def test_options_are_added_on_purpose() -> None:
    """By a row of the tables that say what each accepts."""
    for options, table in ((Options, OPTIONS), (Tuning, TUNING), (Offload, OFFLOAD)):
        assert list(options.__dataclass_fields__) == list(table)


def test_methods_are_added_on_purpose() -> None:
    """Those that torch's optimizers do not have."""
    own = {name for name in dir(shardopt.ShardedOptimizer) if not name.startswith("_")}
    assert sorted(own - set(dir(torch.optim.Optimizer))) == [
        "bind",
        "close",
        "consolidate_state_dict",
        "grad_norm",
        "gradient_statistics",
        "gradient_weight",
        "join",
        "join_device",
        "join_hook",
        "join_process_group",
        "log",
        "memory",
        "monitor",
        "no_sync",
        "offload",
        "options",
        "program",
        "rebind",
        "reduce_gradients",
        "refresh_masters",
        "reload",
        "rule",
        "schedule",
        "state",
        "sum_tied",
        "timings",
        "units",
        "unsharded",
        "updates",
        "weights",
        "weights_metadata",
    ]
    joins = shardopt.ShardedOptimizer.join, torch.nn.parallel.DistributedDataParallel.join
    own_join, theirs = (inspect.signature(each).parameters.values() for each in joins)
    assert [(each.name, each.default) for each in own_join] == [(each.name, each.default) for each in theirs]


# Of what torch does not have. Those of Options, Tuning and Offload are in the tables of the pages.
DEFAULTS: dict[str, dict[str, Any]] = {
    "ShardedLAMB": {
        "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01, "trust": False, "maximize": False
    },
    "ShardedLARS": {
        "lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4, "trust_coefficient": 1e-3, "eps": 1e-8, "trust": False,
        "maximize": False,
    },
    "ShardedLion": {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0, "maximize": False},
    "from_deepspeed_config": dict.fromkeys(("params", "optimizer", "auto", "process_group")),
    "load_checkpoint": {"optimizer": None, "strict": True, "names": None},
    "matrix_rule": {},
    "partition_activations": {
        "process_group": None, "offload": None, "keep_below": 4096, "check": False, "timeout": None
    },
    "prepare_states": {},
    "rule": {
        "states": (), "carried": (), "counts_steps": True, "nonnegative": (), "tolerates": None, "initial": None,
        "of_param": (),
    },
    "save_checkpoint": {
        "optimizer": None, "extra": None, "step": None, "keep": None, "asynchronous": False, "allow_nonfinite": False,
        "full_precision": False, "names": None,
    },
    "save_weights": {"dtype": None, "bytes_per_file": 5_000_000_000, "merge": None, "prefix": ""},
    "verify": {
        "steps": 20, "optimizer": shardopt.ShardedAdamW, "reference": None, "loss": None, "stages": (0, 1, 2, 3),
        "ways": ({},), "tolerance": 1e-3,
    },
}  # fmt: skip
DEFAULTS_OF_METHODS: dict[str, dict[str, Any]] = {
    "bind": {"state_dict": None, "init_fn": None},
    "consolidate_state_dict": {"to": 0},
    "gradient_weight": {"average": True},
    "join": {"divide_by_initial_world_size": True, "enable": True, "throw_on_early_termination": False},
    "join_hook": {"divide_by_initial_world_size": True},
    "log": {"every": 10},
    "monitor": {"every": 1.0},
    "offload": {"to": "cpu", "params": False},
    "reload": {"states": True},
    "step": {"closure": None},
    "unsharded": {"ema": False, "alone": False},
    "weights": {"bucket_bytes": 256 << 20, "dtype": None, "names": None, "merge": None},
    "weights_metadata": {"dtype": None, "names": None, "merge": None},
    "zero_grad": {"set_to_none": True},
}


def defaults_of(function: Any) -> dict[str, Any]:
    arguments = inspect.signature(function).parameters.values()
    return {each.name: each.default for each in arguments if each.default is not inspect.Parameter.empty}


def test_defaults_are_changed_on_purpose() -> None:
    """A script that does not give an argument does today what it did before."""
    of_torch = {f"Sharded{name}" for name in TORCH_CLASSES} | {"ShardedMuon"}  # compared with torch's own
    elsewhere = of_torch | {"ShardedOptimizer", "Tuning", "Offload"}
    assert {name: defaults_of(getattr(shardopt, name)) for name in public() if name not in elsewhere} == DEFAULTS
    methods = inspect.getmembers(shardopt.ShardedOptimizer, inspect.isfunction)
    ours = {name: each for name, each in methods if name[0] != "_" and each.__module__.startswith("shardopt")}
    own = {name: defaults_of(each) for name, each in ours.items()}
    assert {name: found for name, found in own.items() if found} == DEFAULTS_OF_METHODS


@pytest.mark.parametrize("name", TORCH_CLASSES)
def test_arguments_and_groups_are_torchs(name: str) -> None:
    torch_class, ours = getattr(torch.optim, name), getattr(shardopt, f"Sharded{name}")
    theirs = inspect.signature(torch_class).parameters
    mine = dict(inspect.signature(ours).parameters)
    assert mine.pop("options").kind is inspect.Parameter.VAR_KEYWORD
    assert ("clip_update" in mine) == (name == "AdamW")
    mine.pop("clip_update", None)
    assert [(each.name, each.default, each.kind) for each in mine.values()] == [
        (each.name, each.default, each.kind) for each in theirs.values()
    ]
    params = [torch.nn.Parameter(torch.zeros(3))]
    assert ours(params).defaults == torch_class(params).defaults


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"stge": 1}, TypeError, "unexpected keyword argument 'stge'.*module, stage, process_group"),
        ({"stage": 4}, ValueError, "stage .0: replicate.* at least 0 and at most 3, found 4"),
        ({"max_grad_norm": -1.0}, ValueError, "max_grad_norm must be a number above 0"),
        ({"clip_by": "last"}, ValueError, "clip_by must be 'own' or 'previous'"),
        ({"clip_by": "previous"}, ValueError, "give max_grad_norm=1.0, or omit clip_by"),
        ({"norm_group": 7}, TypeError, "norm_group takes a ProcessGroup"),
        ({"offload": 1}, TypeError, "offload takes 'cpu', a directory"),
        ({"offload": ""}, ValueError, "'cpu' or a directory"),
        ({"tuning": {"timeout": 3}}, TypeError, "shardopt.Tuning"),
        ({"capturable": True}, shardopt.ShardoptError, "capturable=True.*captured graph"),
        ({"differentiable": True}, shardopt.ShardoptError, "differentiable=True.*autograd"),
    ],
)
def test_wrong_options_are_refused(arguments: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        shardopt.ShardedAdamW([torch.zeros(3)], **arguments)


@pytest.mark.parametrize("flag", ["capturable", "differentiable"])
def test_flags_of_a_group_are_refused(flag: str) -> None:
    with pytest.raises(shardopt.ShardoptError, match=f"{flag}=True"):
        shardopt.ShardedAdamW([{"params": [torch.zeros(3)], flag: True}])


@pytest.mark.parametrize(
    "keywords",
    [{"bucket_bytes": 0}, {"timeout": 0}, {"timeout": -1.0}, {"nonfinite": "ignore"}, {"chunk_bytes": 0}],
    ids=str,
)
def test_wrong_tuning_is_refused(keywords: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(keywords))):
        shardopt.Tuning(**keywords)


EXCERPT = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "kernels.md").read_text(), flags=re.DOTALL)[0]


def test_the_excerpt_of_adamw_in_the_pages_is_the_rule(tmp_path: Path) -> None:
    """Its arithmetic, on AdamW's flags, is that of the real file where exp_avg does not change its base."""
    names: dict[str, Any] = {}
    script = tmp_path / "excerpt.py"
    script.write_text("from shardopt.rules.adam import *\nfrom shardopt.rules import rule, sqrt\n" + EXCERPT)
    exec(compile(script.read_text(), str(script), "exec"), names)
    group = dict(shardopt.ShardedAdamW([torch.zeros(1)]).defaults)
    real, excerpt = shardopt.ShardedAdamW([torch.zeros(1)]).rule, names["adam"]
    params = [torch.linspace(-3, 3, 500).requires_grad_() for _ in range(2)]
    optimizers = [
        shardopt.ShardedOptimizer([param], group, rule=each)
        for param, each in zip(params, (real, excerpt), strict=True)
    ]
    for step in range(5):
        for param, optimizer in zip(params, optimizers, strict=True):
            param.grad = torch.sin(param.detach() * (step + 1))
            optimizer.step()
    assert torch.equal(params[0], params[1])


@pytest.mark.parametrize("script", ["readme.py", "pictures.py"])
def test_numbers_and_pictures_are_those_of_the_results(script: str) -> None:
    done = run_script(ROOT / "bench" / script, "--check")
    assert done.returncode == 0, done.stderr


def test_command_line() -> None:
    shown = run_module("shardopt", "--help")
    assert shown.returncode == 0 and "twins" in shown.stdout, shown.stderr
    twins = run_module("shardopt", "twins", "--optimizer", "SGD", "--steps", "1")
    assert twins.returncode == 0 and "all bits are equal" in twins.stdout, twins.stderr


def test_timings(tmp_path: Path) -> None:
    """Each phase of a step has its time, and its label in torch's profiler."""
    for offload, phases in ((None, set()), (str(tmp_path), {"fetch"})):
        model = torch.nn.Linear(300, 7)
        optimizer = shardopt.ShardedAdamW(model, offload=offload)
        assert not optimizer.timings() and "no step" in str(optimizer.timings())
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.ones(2, 300)).sum().backward()
                optimizer.step()
        labels = {event.key for event in profile.key_averages()}
        timings = optimizer.timings()
        for phase in phases | {"reduce", "survey", "agree", "update", "gather"}:
            assert 0 < timings[phase] < 60 and f"shardopt: {phase}" in labels and phase in str(timings)
        optimizer.close()
