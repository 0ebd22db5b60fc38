"""Shards made by hand, updated and reduced by compiled kernels, whose results are compared with the native ones."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from shardopt.kernels import native_backend, triton_backend
from shardopt.kernels.formats import FP32, Format
from shardopt.kernels.reductions import LARGEST, LIMBS, NONFINITE, new_totals
from shardopt.kernels.spec import Spec
from shardopt.kernels.tables import BLOCK, Gradients, JoinedStreams, Streams, Tables, joined_blocks, noise_from
from shardopt.rules.passes import passes_of
from shardopt.rules.rule import Rule
from tests.support.cases import CASES, GRADIENTS
from tests.support.shards import HandmadeShard, Memory, Shape

from .driver import Driver

CPU = torch.device("cpu")
RULE = next(case.rule for case in CASES if case.name == "SGD")
GROUP = next(case for case in CASES if case.name == "SGD").ours([torch.zeros(1)]).param_groups[0]


class ShardOnPtx(HandmadeShard):
    """Tells a driver what kernels find through tables: its streams, and its gradients but for skipped ones."""

    driver: Driver | None = None
    is_aligned: bool | None = None  # what a launch promises of the gradients; None: the truth

    def gradients(self, memory: Memory) -> Gradients:
        found = super().gradients(memory)
        if self.driver is not None:
            grads = zip(self.shape.members, memory.grads, strict=True)
            self.driver.memory.allow(*(grad.inner for member, grad in grads if not member.skipped))
            self.driver.memory.allow(*(stream.inner for stream in memory.streams().values()))
        return found if self.is_aligned is None else replace(found, aligned=self.is_aligned)


def check_step(
    shape: Shape, spec: Spec, group: dict[str, Any], of: Rule, is_aligned: bool | None = None, **options: Any
) -> Driver:
    """Compares all that a step writes. ``options`` are the driver's."""
    shard = ShardOnPtx(shape, of, group, spec, GRADIENTS)
    expected = shard.launch(native_backend, CPU)
    with Driver(**options) as driver:
        shard.driver, shard.is_aligned = driver, is_aligned
        found = shard.launch(triton_backend, CPU)
    shard.assert_same(found, expected, "PTX")
    return driver


def check_joined(shapes: Sequence[Shape], spec: Spec, group: dict[str, Any], of: Rule) -> None:
    """Compares one launch over several shards with one for each; between them lies one that nothing is updated in."""
    shards = [ShardOnPtx(shape, of, group, spec, GRADIENTS) for shape in shapes]
    expected = [shard.launch(native_backend, CPU) for shard in shards]
    memories = [shard.memory.copy_to(CPU) for shard in shards]
    with Driver() as driver:
        for shard in shards:
            shard.driver = driver
        tables = [shard.gradients(memory) for shard, memory in zip(shards, memories, strict=True)]
        tables.insert(1, Gradients(torch.zeros(3, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int64), True))
        streams: list[Streams | None] = [shard.streams(memory) for shard, memory in zip(shards, memories, strict=True)]
        streams.insert(1, None)
        blocks, rows = [each.num_blocks for each in tables], [each.num_rows for each in tables]
        row_of_block = joined_blocks([each.row_of_block for each in tables], rows)
        scalars = [shard.scalars() for shard in shards]
        scalars.insert(1, torch.zeros(2, scalars[0].shape[1]))
        noise: list[torch.Tensor] = []
        if spec.needs_noise:
            noise = [noise_of for shard in shards if (noise_of := shard.noise(CPU)) is not None]
            noise.insert(1, torch.zeros(2, 4, dtype=torch.int32))
            firsts = [sum(blocks[:index]) * BLOCK for index in range(len(blocks))]
            noise = [noise_from(each, -first) for each, first in zip(noise, firsts, strict=True)]
        joined = Gradients.joined(tables, spec.grad.itemsize, row_of_block)
        told = Tables(joined, torch.cat(scalars), shapes[0].factors, torch.cat(noise) if noise else None)
        triton_backend.run(spec, 0, JoinedStreams(streams, blocks, rows), told)
    for shard, memory, alone in zip(shards, memories, expected, strict=True):
        shard.assert_same(memory, alone, "joined")
    assert len(driver.executed) == 1


def check_reductions(shape: Shape, grad: Format, **options: Any) -> Driver:
    shard = ShardOnPtx(shape, RULE, GROUP, Spec(passes_of(RULE.variant(GROUP)), FP32, grad), GRADIENTS)
    with Driver(**options) as driver:
        shard.driver = driver
        gradients = shard.gradients(shard.memory)
        found, count = new_totals(gradients.num_rows, CPU), torch.zeros(1, dtype=torch.int64)
        triton_backend.add_totals(grad, gradients, shape.factors, found)
        triton_backend.count_nonfinite(grad, gradients, count)
    expected, counted = new_totals(gradients.num_rows, CPU), torch.zeros(1, dtype=torch.int64)
    native_backend.add_totals(grad, gradients, shape.factors, expected)
    native_backend.count_nonfinite(grad, gradients, counted)
    for name, columns in (("limbs", slice(LIMBS)), ("largest", LARGEST), ("nonfinite", NONFINITE)):
        assert torch.equal(found[:, columns], expected[:, columns]), f"PTX: {name} of params differ"
    assert torch.equal(count, counted), "PTX: the count differs"
    return driver
