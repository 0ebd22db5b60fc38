"""Shards made by hand, updated and reduced by compiled kernels, whose results are compared with the native ones."""

from dataclasses import replace
from typing import Any

import torch

from shardopt.kernels import native_backend, triton_backend
from shardopt.kernels.formats import FP32, Format
from shardopt.kernels.spec import StepSpec
from shardopt.kernels.tables import Gradients
from shardopt.rules.rule import Rule
from tests.support.cases import CASES, GRADIENTS
from tests.support.shards import HandmadeShard, Memory, Shape

from .driver import Driver

CPU = torch.device("cpu")
SUMS = ("mantissa", "exponent", "largest", "nonfinite")
RULE = next(case.rule for case in CASES if case.name == "SGD")
GROUP = next(case for case in CASES if case.name == "SGD").ours([torch.zeros(1)]).param_groups[0]


class ShardOnPtx(HandmadeShard):
    """Tells a driver where its gradients lie, which kernels find through a table; skipped ones are not to be read."""

    driver: Driver | None = None
    is_aligned: bool | None = None  # what a launch promises of the gradients; None: the truth

    def gradients(self, memory: Memory) -> Gradients:
        found = super().gradients(memory)
        if self.driver is not None:
            grads = zip(self.shape.members, memory.grads, strict=True)
            self.driver.memory.allow(*(grad.inner for member, grad in grads if not member.skipped))
        return found if self.is_aligned is None else replace(found, aligned=self.is_aligned)


def check_step(
    shape: Shape, spec: StepSpec, group: dict[str, Any], of: Rule, is_aligned: bool | None = None, **options: Any
) -> Driver:
    """Compares all that a step writes. ``options`` are the driver's."""
    shard = ShardOnPtx(shape, of, group, spec, GRADIENTS)
    expected = shard.launch(native_backend, CPU)
    with Driver(**options) as driver:
        shard.driver, shard.is_aligned = driver, is_aligned
        found = shard.launch(triton_backend, CPU)
    shard.assert_same(found, expected, "PTX")
    return driver


def check_reductions(shape: Shape, grad: Format, **options: Any) -> Driver:
    shard = ShardOnPtx(shape, RULE, GROUP, StepSpec(RULE.variant(GROUP), FP32, grad), GRADIENTS)
    with Driver(**options) as driver:
        shard.driver = driver
        gradients = shard.gradients(shard.memory)
        found = triton_backend.block_sums(grad, gradients, shape.factors)
        count = triton_backend.count_nonfinite(grad, gradients)
        table = triton_backend.totals(found, gradients).table
    expected = native_backend.block_sums(grad, gradients, shape.factors)
    for name in SUMS:
        assert torch.equal(getattr(found, name), getattr(expected, name)), f"PTX: {name} of blocks differ"
    assert torch.equal(table, native_backend.totals(expected, gradients).table), "PTX: totals differ"
    assert count == native_backend.count_nonfinite(grad, gradients), "PTX: the count differs"
    return driver
