"""The kernels of rules that look at whole params: natively, in Triton's interpreter and as PTX, the same bits.

What a pass measures decides what the next one writes, so that the bits of params tell of the sums too.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from shardopt.kernels import native_backend, triton_backend
from shardopt.kernels.formats import BF16, BF16_DITHERED, BF16_RANDOM, FP16, FP32, SIGNED8, SPLIT, SPLIT24, UNSIGNED8
from shardopt.kernels.reductions import COLUMNS, new_totals
from shardopt.kernels.spec import Spec
from shardopt.kernels.tables import Factors, Tables
from shardopt.rules.passes import passes_of
from shardopt.rules.rule import Rule
from tests.kernels.test_kernels import NASTY
from tests.support.cases import CASES, GRADIENTS
from tests.support.norm_rules import NORM_CASES, chained_states, norm_of_a_change, three_cuts
from tests.support.ptx.driver import Driver
from tests.support.ptx.executed import PASSES, check_executed
from tests.support.ptx.process import Compiling
from tests.support.ptx.shards import CPU, ShardOnPtx
from tests.support.shards import Shape

LAMB, LARS, CLIPPED = (case.rule for case in NORM_CASES)
GROUPS: dict[str, dict[str, Any]] = {
    repr(case): {**case.ours([torch.zeros(1)], **case.keywords[0]).defaults, "trust": True, "lr": 0.1}
    for case in NORM_CASES
}
# Rule, its group, and the formats of param, gradient, master and states.
ROWS: dict[str, tuple[Rule, dict[str, Any], Any]] = {
    "LAMB": (LAMB, GROUPS["LAMB"], (FP32, FP32)),
    "LAMB in 16 bits": (LAMB, GROUPS["LAMB"], (BF16, BF16, FP32, (BF16, BF16_DITHERED))),
    "LAMB in 8 bits": (LAMB, GROUPS["LAMB"], (BF16_RANDOM, FP32, None, (SIGNED8, UNSIGNED8))),
    "LAMB averaged": (LAMB.averaging(0.9), GROUPS["LAMB"], (BF16, BF16, SPLIT, (SIGNED8, UNSIGNED8, BF16_DITHERED))),
    "LARS": (LARS, GROUPS["LARS"], (FP16, FP16, FP32, (SIGNED8,))),
    "clipped AdamW": (CLIPPED, GROUPS["AdamW"], (BF16, FP32, SPLIT24, (BF16, UNSIGNED8))),
    "three cuts": (three_cuts, {"lr": 0.1}, (FP32, FP32, None, (SIGNED8, UNSIGNED8))),
    "chained states": (chained_states, {"lr": 0.1}, (FP32, BF16, None, (SIGNED8, SIGNED8))),
    "norm of a change": (norm_of_a_change, {"lr": 0.1}, (FP32, FP32, None, (UNSIGNED8, SIGNED8))),
}
SHAPE = replace(NASTY, members=tuple(replace(each, before=number) for number, each in enumerate(NASTY.members)))


HEAVY_TAILED = replace(SHAPE, grads="heavy_tailed")
SPECIAL = replace(SHAPE, grads="special", members=tuple(replace(each, misaligned=1) for each in SHAPE.members))
FEW = ("LAMB in 8 bits", "three cuts", "chained states", "norm of a change")  # in the interpreter, by default
FEW_ON_PTX = ("LAMB in 8 bits", "LARS", "clipped AdamW")  # every rule of the package; "three cuts" has four kernels


@pytest.mark.parametrize("row", [row if row in FEW else pytest.param(row, marks=pytest.mark.slow) for row in ROWS])
def test_the_interpreter_has_the_bits_of_the_native_kernels(row: str) -> None:
    of, group, formats = ROWS[row]
    shape = HEAVY_TAILED if row == "norm of a change" else SPECIAL  # an Inf would hide what else is measured
    shard = ShardOnPtx(shape, of, group, Spec(passes_of(of.variant(group)), *formats), GRADIENTS)
    shard.assert_same(shard.launch(triton_backend, CPU), shard.launch(native_backend, CPU), row)


def in_rows(shapes: tuple[Shape, ...], rows: tuple[str, ...] = tuple(ROWS)) -> set[str]:
    executed: set[str] = set()
    for row in rows:
        of, group, formats = ROWS[row]
        for shape in shapes:
            shard = ShardOnPtx(shape, of, group, Spec(passes_of(of.variant(group)), *formats), GRADIENTS)
            expected = shard.launch(native_backend, CPU)
            with Driver() as driver:
                shard.driver = driver
                found = shard.launch(triton_backend, CPU)
            shard.assert_same(found, expected, f"PTX: {row}")
            executed |= {each.ttir for each in driver.executed}
    return executed


def test_every_pass_as_compiled(compiling: Compiling) -> None:
    check_executed(PASSES, compiling(in_rows, (SPECIAL,), FEW_ON_PTX))


@pytest.mark.slow
def test_every_row_as_compiled(compiling: Compiling) -> None:
    compiling(in_rows, (SHAPE, SPECIAL, HEAVY_TAILED))


def test_what_is_measured_is_what_gradients_norms_are() -> None:
    """LARS measures its gradient: to the last limb as the sums for clipping, Inf and NaN counted alike."""
    spec = Spec(passes_of(LARS.variant(GROUPS["LARS"])), FP32, FP32)
    for shape in (SHAPE, SPECIAL, HEAVY_TAILED):
        shape = replace(shape, factors=Factors(unscale=0.3))
        shard = ShardOnPtx(shape, LARS, GROUPS["LARS"], spec, GRADIENTS)
        table = shard.gradients(shard.memory)
        expected, found = (new_totals(table.num_rows, torch.device("cpu")) for _ in range(2))
        native_backend.add_totals(FP32, table, shape.factors, expected)
        totals = torch.zeros(2, table.num_rows, COLUMNS, dtype=torch.int64)
        scalars = torch.nn.functional.pad(shard.scalars(), (0, 2))
        native_backend.run(spec, 0, shard.streams(shard.memory), Tables(table, scalars, shape.factors, totals=totals))
        found += totals[1]
        assert torch.equal(found, expected)
        assert np.any(totals[0].numpy())


def test_rules_without_norms_have_one_pass() -> None:
    """It writes all states and the param, rounds nothing early and measures nothing."""
    for case in CASES:
        for keywords in case.keywords:
            group = case.ours([torch.nn.Parameter(torch.zeros(1))], **keywords).param_groups[0]
            variant = case.rule.variant(group)
            (found,) = passes_of(variant)
            assert (found.states, found.scalars, found.written) == (variant.states, variant.scalars, variant.states)
            assert found.writes_param and not (found.rounded or found.measured or found.products)


def test_where_rules_are_cut() -> None:
    """Of each pass: what it stores, what it measures, which states it means as they are stored."""
    cuts = {
        name: [(each.written, each.measured, each.rounded) for each in passes_of(of.variant(group))]
        for name, (of, group, _) in ROWS.items()
    }
    moments = ("exp_avg", "exp_avg_sq")
    assert cuts["LAMB"] == [(moments, (0, 1), moments), ((), (), ())]
    assert cuts["LAMB averaged"] == [(moments, (0, 1), moments), (("ema",), (), ())]
    assert cuts["LARS"] == [((), (0, 1), ()), (("momentum_buffer",), (), ())]
    assert cuts["three cuts"] == [
        ((), (0,), ()),
        (("momentum",), (1,), ("momentum",)),
        (("square",), (2,), ("square",)),
        ((), (), ()),
    ]
    assert cuts["chained states"] == [(("first", "second"), (0,), ("first", "second")), ((), (), ())]
