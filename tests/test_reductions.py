"""Sums of squares, largest magnitudes, non-finite counts: the same bits from both kernels, in any order, never over."""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
import torch
from cases import ADAM_KEYWORDS, CASES, GRADIENTS
from hypothesis import given, settings
from hypothesis import strategies as st
from shards import BACKENDS, HandmadeShard, Member, Shape, lone, scaled

from shardopt.kernels.formats import BF16, FP16, FP32, Format
from shardopt.kernels.launch import Native
from shardopt.kernels.reductions import LIMBS, BlockSums, sum_of_squares
from shardopt.kernels.spec import StepSpec
from shardopt.kernels.tables import BLOCK

LARGEST, SMALLEST = 3.4028234663852886e38, 2.0**-149
# The bound that reductions.py states, for the norm: blocks are truncated to 27 bits of their largest element.
RTOL = 2.0**-21


def shard_of(shape: Shape, grad: Format) -> HandmadeShard:
    case = CASES[0]
    group = case.ours([torch.nn.Parameter(torch.zeros(1))], **ADAM_KEYWORDS[0]).param_groups[0]
    return HandmadeShard(shape, case.rule, group, StepSpec(case.rule.variant(group), FP32, grad), GRADIENTS)


def blocks_of(shard: HandmadeShard) -> list[np.ndarray]:
    """The unscaled gradient of each block of the shard; empty where the block is skipped or no param's."""
    blocks = [np.zeros(0, np.float32) for _ in range(shard.num_blocks)]
    for member, start, grad in zip(shard.shape.members, shard.starts, shard.memory.grads, strict=True):
        if not member.skipped:
            values = scaled(grad.inner, shard.shape.unscale)
            for first in range(0, member.numel, BLOCK):
                blocks[(start + first) // BLOCK] = values[first : first + BLOCK]
    return blocks


def reference(block: np.ndarray) -> tuple[int, int, int, int]:
    """(S, E, bits of the largest, non-finite count) of one block, in float64 and Python's integers."""
    finite = np.abs(block[np.isfinite(block)])
    largest = np.max(finite, initial=np.float32(0))
    exponent = max(math.frexp(largest)[1] + 126, 1) if largest else 1
    whole = np.floor(np.ldexp(finite.astype(np.float64), 153 - exponent))  # exact: a power of two
    total = sum(int(q) ** 2 for q in whole)
    return total, exponent, int(largest.view(np.int32)), len(block) - len(finite)


def exact(sums: BlockSums) -> Fraction:
    """What the mantissas and exponents of all blocks stand for."""
    pairs = zip(sums.mantissa.tolist(), sums.exponent.tolist(), strict=True)
    return sum((mantissa * Fraction(2) ** (2 * max(exponent, 1) - 306) for mantissa, exponent in pairs), Fraction(0))


MEMBERS = st.builds(
    Member,
    numel=st.integers(0, 3 * BLOCK) | st.sampled_from([0, 1, BLOCK - 1, BLOCK, BLOCK + 1]),
    skipped=st.sampled_from([False, False, True]),
    misaligned=st.sampled_from([0, 0, 1, 8]),
)
SHAPES = st.builds(
    Shape,
    members=st.lists(MEMBERS, max_size=6).map(tuple),
    empty_blocks=st.integers(0, 3),
    unscale=st.sampled_from([1.0, 1 / 65536, 1 / 3, 1e-30, 1e30]),
    grads=st.sampled_from(list(GRADIENTS)),
    seed=st.integers(0, 2**32),
)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(shape=SHAPES, fmt=st.sampled_from([FP32, BF16, FP16]))
def test_kernels_equal_the_reference(shape: Shape, fmt: Format) -> None:
    shard = shard_of(shape, fmt)
    blocks = blocks_of(shard)
    expected = [reference(block) for block in blocks]
    raw = sum(
        int((~grad.inner.isfinite()).sum())
        for member, grad in zip(shape.members, shard.memory.grads, strict=True)
        if not member.skipped
    )
    for backend, device in BACKENDS:
        memory = shard.memory.copy_to(device)
        gradients = shard.gradients(memory)
        with np.errstate(all="ignore"):
            sums = backend.block_sums(fmt, gradients, shape.unscale)
            count = backend.count_nonfinite(fmt, gradients)
        columns = [column.tolist() for column in (sums.mantissa, sums.exponent, sums.largest, sums.nonfinite)]
        assert list(zip(*columns, strict=True)) == expected, type(backend).__name__
        assert int(count) == raw, "of the gradients as they are, before the loss scale"
        assert sum_of_squares(sums.limbs().tolist()) == float(exact(sums))
        finite = np.concatenate([block[np.isfinite(block)] for block in [np.zeros(0, np.float32), *blocks]])
        truth = math.sqrt(math.fsum(float(each) ** 2 for each in finite))
        assert math.sqrt(sum_of_squares(sums.limbs().tolist())) == pytest.approx(truth, rel=RTOL, abs=0)


def made_up(mantissas: Sequence[int], exponents: Sequence[int]) -> BlockSums:
    zeros = torch.zeros(len(mantissas), dtype=torch.int32)
    return BlockSums(
        torch.tensor(mantissas, dtype=torch.int64), torch.tensor(exponents, dtype=torch.int32), zeros, zeros
    )


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    pairs=st.lists(
        st.tuples(st.integers(0, 2**62 - 1) | st.sampled_from([0, 1, 2**31, 2**32, 2**62 - 1]), st.integers(0, 254)),
        max_size=40,
    ),
    data=st.data(),
)
def test_limbs_are_exact_in_any_order(pairs: list[tuple[int, int]], data: st.DataObject) -> None:
    """Blocks dealt to ranks and buckets in any way, their limbs added in any order: one and the same sum."""
    sums = made_up([mantissa for mantissa, _ in pairs], [exponent for _, exponent in pairs])
    limbs = sums.limbs()
    assert limbs.shape == (LIMBS,)
    assert sum(int(limb) << (32 * index) for index, limb in enumerate(limbs.tolist())) == exact(sums) * 2**304
    assert sum_of_squares(limbs.tolist()) == float(exact(sums))
    order = data.draw(st.permutations(pairs))
    cut = data.draw(st.integers(0, len(pairs)))
    shares = [made_up([pair[0] for pair in share], [pair[1] for pair in share]) for share in (order[:cut], order[cut:])]
    assert torch.equal(shares[1].limbs() + shares[0].limbs(), limbs)


def test_blocks_that_fit() -> None:
    """2**30 of the worst blocks at every exponent stay below 2**63 in each limb, and so does no carry get lost."""
    for exponent in range(255):
        sums = made_up([2**62 - 1], [exponent])
        limbs = sums.limbs() * 2**30
        assert bool((limbs >= 0).all())
        total = sum(int(limb) << (32 * index) for index, limb in enumerate(limbs.tolist()))
        assert total == exact(sums) * 2**304 * 2**30


@pytest.mark.parametrize(
    "values",
    [
        [0.0, -0.0],
        [SMALLEST],
        [SMALLEST] * 1000,
        [LARGEST],
        [-LARGEST] * 1000,
        [LARGEST, SMALLEST],
        [2.0**-126, SMALLEST, 2.0**-126 - SMALLEST],
        [1e-45, 3.4e38, 1e30, 1e-30, 1.0],
        [1.0] + [2.0**-13] * 255,  # the small ones together weigh as much as one truncated bit
        [2.0 - 2.0**-23] * 256,  # every bit set: the largest mantissa that a block can have
    ],
    ids=lambda values: f"{len(values)} of {values[0]:.3g}",
)
def test_extremes(values: list[float]) -> None:
    grad = torch.tensor(values)
    truth = sum((Fraction(float(each)) ** 2 for each in grad), Fraction(0))
    for backend, device in BACKENDS:
        gradients, _grad = lone(grad.to(device))
        sums = backend.block_sums(FP32, gradients, 1.0)
        found = sum_of_squares(sums.limbs().tolist())
        assert math.isfinite(found) and int(sums.nonfinite.sum()) == 0
        assert math.sqrt(found) == pytest.approx(math.sqrt(truth), rel=RTOL, abs=0)
        assert sums.largest.cpu().view(torch.float32).max() == grad.abs().max()


@pytest.mark.parametrize("position", [0, 1, BLOCK - 1, BLOCK, 2 * BLOCK + 6])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, -math.nan])
@pytest.mark.parametrize("fmt", [FP32, BF16, FP16], ids=lambda each: each.name)
def test_one_bad_element(fmt: Format, value: float, position: int) -> None:
    """Counted once wherever it lies, and left out of the sum and of the largest magnitude."""
    grad = torch.ones(2 * BLOCK + 7, dtype=fmt.dtype)
    grad[position] = value
    for backend, device in BACKENDS:
        gradients, _grad = lone(grad.to(device), fmt)
        with np.errstate(all="ignore"):
            assert int(backend.count_nonfinite(fmt, gradients)) == 1
            sums = backend.block_sums(fmt, gradients, 0.5)
        assert sums.nonfinite.tolist() == [int(block == position // BLOCK) for block in range(3)]
        assert sum_of_squares(sums.limbs().tolist()) == (len(grad) - 1) / 4
        assert sums.largest.cpu().view(torch.float32).tolist() == [0.5] * 3


def test_unscaling_can_overflow() -> None:
    """A finite gradient whose product with ``unscale`` is not finite counts: that product is what the step uses."""
    gradients, _grad = lone(torch.tensor([1e30, 1.0]))
    assert int(Native().count_nonfinite(FP32, gradients)) == 0
    sums = Native().block_sums(FP32, gradients, 1e30)
    assert sums.nonfinite.tolist() == [1]
    assert sum_of_squares(sums.limbs().tolist()) == pytest.approx(1e60, rel=RTOL)


def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    grad = torch.randn(100 * BLOCK + 3, generator=torch.Generator().manual_seed(0)) * 1e-40  # subnormal
    gradients, _grad = lone(grad)
    alone = Native().block_sums(FP32, gradients, 1.0)
    monkeypatch.setattr("shardopt.kernels.pool.BLOCKS_PER_RANGE", 3)
    torch.set_flush_denormal(True)
    try:
        many = Native().block_sums(FP32, gradients, 1.0)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(alone.limbs(), many.limbs()) and bool(alone.limbs().any())
