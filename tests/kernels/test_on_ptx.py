"""The kernels as a GPU would run them: compiled for sm_90 by a launch, executed, and equal to the native kernels.

What Triton's interpreter cannot show is in what is compiled: contraction, flushed subnormals, approximate quotients,
masks, the alignment that a launch promises, exchanges between threads. ``tests/support/ptx`` executes it. Every output
is compared bit for bit: params, masters, states and scales; norms and counts. test_ptx_faults.py holds that a kernel
with a fault in it is found.

Functions named ``in_...`` run in a process of its own, where Triton compiles; they are handed names, as formats are
compared by identity.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardopt.config import Options
from shardopt.domain.formats import formats_for
from shardopt.kernels import triton_reductions
from shardopt.kernels.formats import (
    BF16,
    BF16_DITHERED,
    BF16_RANDOM,
    FP16,
    FP32,
    SIGNED8,
    SPLIT24,
    UNSIGNED8,
    format_of,
)
from shardopt.kernels.spec import Spec
from shardopt.kernels.tables import Factors
from shardopt.rules.passes import passes_of
from tests.kernels.test_kernels import ADAM_RULE, ADAMW, KEPT, NASTY, SHAPES, group_of
from tests.kernels.test_reductions import SHAPES as SHAPES_TO_REDUCE
from tests.support.cases import CASES, GRADIENTS, KEPT_IN, MASTERS, STATE_FORMATS
from tests.support.ptx.executed import STEPS, SUMS, check_executed
from tests.support.ptx.process import Compiling
from tests.support.ptx.shards import check_joined, check_reductions, check_step
from tests.support.shards import Shape
from tests.support.sweep import drawn, grid
from tests.support.versions import needs_the_ptx_of_new_triton

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# What a launch can be handed: the gradients as backward left them, or sums of them.
GRADIENTS_OF = {"fp32": ("fp32",), "bf16": ("bf16", "fp32"), "fp16": ("fp16", "fp32", "bf16")}
AXES: dict[str, Any] = {
    "case": [case.name for case in CASES],
    "variant": ("plain", "flags", "averaged"),  # with none of its flags, with most; with an average of the weights too
    "dtype": tuple(DTYPES),
    "master": MASTERS,
    "states": STATE_FORMATS,
    "grad": tuple(DTYPES),
}
Row = tuple[Any, ...]


# What bf16 params of a case are kept in by default, as in all other tests: each other format is two kernels to compile.
KEPT_OF = {case.name: kept for case, kept in KEPT_IN.items()}


def is_possible(*, dtype: str, master: str, grad: str, **_: Any) -> bool:
    return (master == "fp32" or dtype == "bf16") and grad in GRADIENTS_OF[dtype]


def is_daily(*, case: str, dtype: str, master: str, grad: str, **_: Any) -> bool:
    return is_possible(dtype=dtype, master=master, grad=grad) and (dtype != "bf16" or master == KEPT_OF[case][0])


# -- steps -------------------------------------------------------------------------------------------------------------


def in_rows(given_rows: list[Row], all_gradients: bool = False) -> set[str]:
    """Returns what the executed kernels are made of, as Triton's first form of them.

    Rows take turns with the kinds of gradients, two by two as alignment changes from row to row, or take all of them.
    """
    executed = set()
    for number, row in enumerate(given_rows):
        named = dict(zip(AXES, row, strict=True))
        case = next(each for each in CASES if each.name == named["case"])
        of = case.rule.averaging(0.9) if named["variant"] == "averaged" else case.rule
        group = group_of(case, case.keywords[0 if named["variant"] == "plain" else -1])
        dtype = DTYPES[named["dtype"]]
        kept = formats_for(of, Options(master=named["master"], state_format=named["states"]), dtype, 10**6)
        variant = of.variant(group)
        param = BF16_RANDOM if dtype is torch.bfloat16 and kept.master is None else format_of(dtype, "the param")
        grad = format_of(DTYPES[named["grad"]], "the gradient")
        spec = Spec(passes_of(variant), param, grad, kept.master, tuple(kept.states[name] for name in variant.states))
        members = tuple(replace(each, misaligned=number % 2, before=number) for each in NASTY.members)
        for seed, grads in enumerate(("log_uniform", "special")):
            if not all_gradients and seed != number // 2 % 2:
                continue
            shape = replace(NASTY, members=members, grads=grads, seed=seed)
            try:
                executed |= {each.ttir for each in check_step(shape, spec, group, of).executed}
            except Exception as error:
                error.add_note(f"{named}, {grads}")
                raise
    return executed


def first_rows() -> list[Row]:
    """One of each rule; other tests compile its native kernel as well."""
    return [(case, "flags", "bf16", *kept, "bf16") for case, kept in KEPT_OF.items()]


@cache
def rows() -> list[Row]:
    return drawn(AXES, allowed=is_daily, first=first_rows())


@pytest.fixture(scope="module")
def executed(compiling: Compiling) -> Callable[[str], set[str]]:
    """The kernels of a rule's rows, which are executed once."""
    return cache(lambda name: compiling(in_rows, [row for row in rows() if row[0] == name]))


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_every_rule_and_format(executed: Callable[[str], set[str]], case: Any) -> None:
    """Every two of rule, variant, dtype, states' format and gradient's format meet; of masters each rule has one."""
    executed(case.name)


def test_steps_execute_every_function(executed: Callable[[str], set[str]]) -> None:
    """Rules that together use every word."""
    names = ("AdamW", "Adagrad", "Lion", "Rprop")
    lines = check_executed(STEPS, set[str]().union(*map(executed, names)))
    assert len({file for file, _ in lines if file.startswith("<shardopt triton ")}) >= len(names)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_every_rule_in_every_format(compiling: Compiling, case: Any) -> None:
    """A hundred kernels of each rule, half a second each to compile."""
    compiling(in_rows, [row for row in grid(AXES, is_possible) if row[0] == case.name], True)


FORMATS_OF_ANY_SHARD: list[Any] = [
    (FP32, FP32, FP32, ()),
    (BF16, BF16, SPLIT24, (SIGNED8, UNSIGNED8)),
    (BF16_RANDOM, BF16, None, (SIGNED8, UNSIGNED8)),
    (FP16, FP16, FP32, ()),
]


def given_examples(examples: int, function: Callable[..., None], **strategies: Any) -> None:
    """The same ones in every default run."""
    health = [HealthCheck.too_slow]
    chosen = settings(
        max_examples=examples, derandomize=examples < 100, deadline=None, database=None, suppress_health_check=health
    )
    chosen(given(**strategies)(function))()


def in_any_shard(examples: int) -> None:
    def any_shard(shape: Shape, formats: Any) -> None:
        check_step(shape, Spec(passes_of(ADAM_RULE.variant(ADAMW)), *formats), ADAMW, ADAM_RULE)

    given_examples(examples, any_shard, shape=SHAPES, formats=st.sampled_from(FORMATS_OF_ANY_SHARD))


def few_or_many(default: int, slow: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("examples", [default, pytest.param(slow, marks=pytest.mark.slow)])


@few_or_many(15, 1000)
def test_any_shard(compiling: Compiling, examples: int) -> None:
    """Sizes, offsets, alignment, skipped params, and gradients of every kind, NaN and subnormals among them."""
    compiling(in_any_shard, examples)


# -- several shards ----------------------------------------------------------------------------------------------------


def in_joined_shards() -> None:
    others = (replace(NASTY, members=NASTY.members[:2], empty_blocks=2), replace(NASTY, members=NASTY.members[::-1]))
    shapes = [replace(each, grads="special", seed=seed) for seed, each in enumerate((NASTY, *others))]
    for formats in (KEPT[2], KEPT[6], (BF16_RANDOM, BF16, None, (BF16, BF16_DITHERED))):
        check_joined(shapes, Spec(passes_of(ADAM_RULE.variant(ADAMW)), *formats), ADAMW, ADAM_RULE)


def test_several_shards_at_a_time(compiling: Compiling) -> None:
    """Each gets what it would get alone, its noise too."""
    compiling(in_joined_shards)


# -- reductions --------------------------------------------------------------------------------------------------------


def in_reductions(examples: int) -> set[str]:
    executed = set()
    for fmt in (FP32, BF16, FP16):
        for grads in GRADIENTS:
            driver = check_reductions(replace(NASTY, grads=grads, factors=Factors(3.0, 1 / 3)), fmt)
            executed |= {each.ttir for each in driver.executed}

    def any_reduction(shape: Shape, fmt: Any) -> None:
        check_reductions(shape, fmt)

    given_examples(examples, any_reduction, shape=SHAPES_TO_REDUCE, fmt=st.sampled_from([FP32, BF16, FP16]))
    return executed


@few_or_many(15, 1000)
def test_reductions(compiling: Compiling, examples: int) -> None:
    """Sums of squares, largest magnitudes and counts of each block, and what they add up to for each param."""
    check_executed(SUMS, compiling(in_reductions, examples))


def in_programs_of(blocks: int, warps: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_reductions, "BLOCKS_PER_PROGRAM", blocks)
        patch.setattr(triton_reductions, "NUM_WARPS", warps)
        shape = replace(NASTY, grads="special")
        check_reductions(shape, FP32)
        check_reductions(shape, BF16)


@pytest.mark.parametrize(
    ("blocks", "warps"),
    [
        (2, 1),
        pytest.param(4, 4, marks=needs_the_ptx_of_new_triton),
        pytest.param(8, 4, marks=[needs_the_ptx_of_new_triton, pytest.mark.slow]),
    ],
)
def test_sums_of_programs_of_any_size(compiling: Compiling, blocks: int, warps: int) -> None:
    """Launches take one warp; several exchange values through shared memory, between barriers."""
    compiling(in_programs_of, blocks, warps)
