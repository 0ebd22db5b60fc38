"""An option is told once, by its field: keywords, checks, what ranks compare, the planner, the tables follow from it.

Each field of ``Options``, ``Tuning`` and ``Offload`` is changed on one of two ranks: an error on both names it, or its
field says why ranks may differ in it and both bind.
"""

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, get_type_hints

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardopt import DisagreementError, Offload, ShardedAdamW, Tuning
from shardopt.arguments import whole
from shardopt.config import OptionKeywords, Options
from shardopt.option import check_fields, compared, option, options_of
from shardopt.tools.ways import PLANNED, Way
from tests.optim.test_every_argument import OFFLOAD, OPTIONS, TUNING, WALK
from tests.support.paths import ROOT
from tests.support.ranks import Pool
from tests.support.scripts import run_script

LISTS = (Options, Tuning, Offload)
ACCEPTED = {Options: OPTIONS, Tuning: TUNING, Offload: OFFLOAD}
# Another value than the default, where the walk of every argument has none. None: made where the ranks are.
OTHERS: dict[type[Any], dict[str, Any]] = {
    Options: {
        "module": None,
        "stage": 2,
        "process_group": None,
        "norm_group": None,
        "master": "none",
        "state_format": "bf16",
        "gradient_format": "bf16",
        "clip_by": "previous",
        "release_gradients": True,
        "reduce_dtype": torch.float32,
        "compute_dtype": torch.float16,
        "cast_inputs": False,
        "output_dtype": torch.float32,
        "keep_fp32": ("weight",),
        "cast_buffers": ("scale",),
        "gather_dtype": "int8",
        "error_feedback": True,
        "offload": "cpu",
        "tuning": Tuning(seed=1),
    },
    Tuning: {
        "bucket_bytes": 4096,
        "keep": ("*.bias",),
        "units": (nn.Linear,),
        "reshard_after_forward": False,
        "prefetch": {"a": ("b",)},
        "timeout": 600.0,
        "chunk_bytes": 8192,
        "nonfinite": "raise",
    },
    Offload: {
        "states": None,
        "gradients": "cpu",
        "params": "cpu",
        "step": "cpu",
        "early_bytes": 4096,
        "pin_memory": False,
    },
}


def other(options: type[Any], name: str, default: Any) -> Any:
    """A value that ranks can differ in."""
    if name in OTHERS[options]:
        return OTHERS[options][name]
    walked = [WALK[label] for label in sorted(ACCEPTED[options][name])]
    return next(each for each in walked if each is not None and each != default)


# What all ranks give besides, where the other value needs it.
BESIDES: dict[str, dict[str, Any]] = {
    "gradients": {"stage": 2},
    "early_bytes": {"stage": 2},
    "params": {"stage": 3},
    "norm_group": {"module": None},
    "gather_dtype": {"stage": 3},
    "error_feedback": {"reduce_dtype": "int8"},
    "clip_by": {"max_grad_norm": 1.0},
}
PRECISION = ("compute_dtype", "cast_inputs", "output_dtype", "keep_fp32", "cast_buffers")
BESIDES |= {name: {"compute_dtype": torch.bfloat16} for name in PRECISION}


def binds(options: dict[str, Any]) -> str:
    """The error, empty where there is none."""
    net = nn.Linear(8, 8)
    if "compute_dtype" in options:
        net.register_buffer("scale", torch.ones(1))
    net = net if "compute_dtype" in options else net.bfloat16()
    options = {"module": net, **options}
    opt = ShardedAdamW(net.parameters(), **options)
    try:
        if options["module"] is None:
            opt.step()
        else:
            opt.bind()
    except DisagreementError as error:
        return str(error)
    opt.close()
    return ""


def differing(directory: str) -> Iterator[tuple[str, bool, str]]:
    """(name, whether its field lets ranks differ, what was raised), of each field."""
    world, mine = dist.group.WORLD, dist.get_rank() == 1
    made = {"module": None, "process_group": world, "norm_group": world, "states": directory}
    for kind in LISTS:
        for field, said in options_of(kind):
            name, value = field.name, other(kind, field.name, field.default)
            given = {name: made[name] if value is None else value} if mine else {}
            inside = {Tuning: "tuning", Offload: "offload"}.get(kind)
            options = {**BESIDES.get(name, {}), **({inside: kind(**given)} if inside else given)}
            yield ".".join(["options", *[inside] * bool(inside), name]), bool(said.local), binds(options)


@pytest.mark.filterwarnings("ignore")
def test_ranks_agree_on_every_option(ranks: Pool, tmp_path: Any) -> None:
    for found in ranks.run(differing_on_all, str(tmp_path), world=2):
        for name, may_differ, error in found:
            assert may_differ == (error == ""), (name, error)
            said = "module" if name == "options.module" else name
            expected = f"ranks differ in {said}", f"ranks differ in the number of {said}"
            assert may_differ or any(words in error for words in expected), (name, error)


def differing_on_all(directory: str) -> list[tuple[str, bool, str]]:
    return list(differing(directory))


@dataclass(frozen=True)
class More(Options):
    """Options with one more."""

    novelty: int = option(0, "new", partial(whole, least=0))

    def __post_init__(self) -> None:
        check_fields(self)


def test_a_new_field_is_checked_and_compared() -> None:
    assert compared(More(novelty=3))["novelty"] == 3
    with pytest.raises(ValueError, match=r"^novelty must be .* at least 0.*found -1"):
        More(novelty=-1)


def test_what_is_compared_is_the_same_text_on_ranks_that_agree() -> None:
    one, other = {"exp_avg": "bf16", "exp_avg_sq": "int8"}, {"exp_avg_sq": "int8", "exp_avg": "bf16"}
    texts = {json.dumps(compared(Options(state_format=formats))) for formats in (one, other)}  # type: ignore[arg-type]
    assert len(texts) == 1
    assert compared(Options(offload="/one")) == compared(Options(offload="/other"))


def test_keywords_are_the_fields() -> None:
    """Type checkers read the one, everything else the other. jsonargparse, which reads the keywords for Lightning's
    command line, fails at one that takes a dataclass and not None."""
    assert get_type_hints(OptionKeywords) == get_type_hints(Options) | {"tuning": Tuning | None}
    assert Options(tuning=None).tuning == Tuning()  # type: ignore[arg-type]


@pytest.mark.parametrize("options", LISTS)
def test_a_field_is_told(options: type[Any]) -> None:
    names = [each.name for each in dataclasses.fields(options)]
    assert all(said.meaning and "\n" not in said.meaning and "|" not in said.meaning for _, said in options_of(options))
    described = [line.strip().partition(":")[0] for line in (options.__doc__ or "").splitlines() if line[:9].strip(" ")]
    assert [each for each in described if each in names] == names


def test_the_planner_takes_options_by_their_names() -> None:
    defaults = {each.name: each.default for each in dataclasses.fields(Way)}
    assert len(PLANNED) > 3 and all(defaults[field.name] == field.default for field, _ in PLANNED)


def test_the_tables_of_the_pages_are_those_of_the_fields() -> None:
    done = run_script(ROOT / "scripts" / "options.py", "--check")
    assert done.returncode == 0, done.stderr
