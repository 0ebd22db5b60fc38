"""Sums of squares, largest magnitudes, non-finite counts: the same bits from both kernels, in any order, never over."""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from shardopt.kernels import native_backend, triton_backend
from shardopt.kernels.formats import BF16, FP16, FP32, Format
from shardopt.kernels.launch import Backend
from shardopt.kernels.reductions import (
    COLUMNS,
    LIMB_BITS,
    LIMBS,
    NONFINITE,
    BlockSums,
    new_totals,
    sum_of_rows,
    sum_of_squares,
)
from shardopt.kernels.reductions import LARGEST as LARGEST_AT
from shardopt.kernels.spec import Spec
from shardopt.kernels.tables import BLOCK, Factors, Gradients
from shardopt.kernels.triton_reductions import add_to_row, row_of_block_sums
from shardopt.rules.passes import passes_of
from tests.support.cases import ADAM_KEYWORDS, CASES, GRADIENTS
from tests.support.shards import BACKENDS, HandmadeShard, Member, Shape, bits, lone, scaled
from tests.support.sweep import sweep

LARGEST, SMALLEST = 3.4028234663852886e38, 2.0**-149
# The bound that reductions.py states, for the norm: blocks are truncated to 27 bits of their largest element.
RTOL = 2.0**-21


def shard_of(shape: Shape, grad: Format) -> HandmadeShard:
    case = CASES[0]
    group = case.ours([torch.nn.Parameter(torch.zeros(1))], **ADAM_KEYWORDS[0]).param_groups[0]
    return HandmadeShard(shape, case.rule, group, Spec(passes_of(case.rule.variant(group)), FP32, grad), GRADIENTS)


def blocks_of(shard: HandmadeShard) -> list[np.ndarray]:
    """The divided and unscaled gradient of each block of the shard; empty where the block is skipped or no param's."""
    blocks = [np.zeros(0, np.float32) for _ in range(shard.num_blocks)]
    for member, start, grad in zip(shard.shape.members, shard.starts, shard.memory.grads, strict=True):
        if not member.skipped:
            values = scaled(grad.inner, shard.shape.factors)
            for first in range(0, member.numel, BLOCK):
                blocks[(start + first) // BLOCK] = values[first : first + BLOCK]
    return blocks


def reference(block: np.ndarray) -> tuple[int, int, int]:
    """(what the limbs stand for, bits of the largest, non-finite count) of one block, in Python's integers."""
    finite = np.abs(block[np.isfinite(block)])
    largest = np.max(finite, initial=np.float32(0))
    exponent = max(math.frexp(largest)[1] + 126, 1) if largest else 1
    whole = np.floor(np.ldexp(finite.astype(np.float64), 153 - exponent))  # exact: a power of two
    total = sum(int(q) ** 2 for q in whole)
    return total << 2 * exponent - 2, int(largest.view(np.int32)), len(block) - len(finite)


def columns(sums: BlockSums) -> list[torch.Tensor]:
    """Mantissas, exponents, largest magnitudes and counts of non-finite elements."""
    count = sums.num_blocks
    mantissas, *others = np.split(sums.memory, [2 * count, 3 * count, 4 * count])
    return [*map(torch.from_numpy, (mantissas.view(np.int64), *others))]


def exact(sums: BlockSums, rows: Sequence[int] | None = None, row: int = 0) -> Fraction:
    """What the mantissas and exponents of all blocks stand for, or of those of one row."""
    mantissas, exponents, *_ = columns(sums)
    triples = zip(mantissas.tolist(), exponents.tolist(), rows or [row] * sums.num_blocks, strict=True)
    return sum(
        (mantissa * Fraction(2) ** (2 * max(exponent, 1) - 306) for mantissa, exponent, of in triples if of == row),
        Fraction(0),
    )


def value(limbs: torch.Tensor) -> int:
    """What one row of limbs stands for, without the base."""
    return sum(limb << (32 * index) for index, limb in enumerate(limbs.tolist()))


def totals_of(backend: Backend, fmt: Format, gradients: Gradients, factors: Factors) -> torch.Tensor:
    found = new_totals(gradients.num_rows, gradients.row_of_block.device)
    with np.errstate(all="ignore"):
        backend.add_totals(fmt, gradients, factors, found)
    return found


def count_of(backend: Backend, fmt: Format, gradients: Gradients) -> int:
    found = torch.zeros(1, dtype=torch.int64, device=gradients.row_of_block.device)
    with np.errstate(all="ignore"):
        backend.count_nonfinite(fmt, gradients, found)
    return int(found)


def of_each_block(backend: Backend, fmt: Format, gradients: Gradients, factors: Factors) -> list[tuple[int, int, int]]:
    """As ``reference`` has them: by a table in which each block has a row of its own."""
    rows = gradients.rows[gradients.row_of_block.long()].contiguous()
    own = torch.arange(gradients.num_blocks, dtype=torch.int32, device=rows.device)
    found = totals_of(backend, fmt, Gradients(own, rows, gradients.aligned), factors)
    return [(value(row[:LIMBS]), int(row[LARGEST_AT]), int(row[NONFINITE])) for row in found]


def square_of(totals: torch.Tensor) -> float:
    """The square of the norm of the whole shard."""
    return sum_of_squares(sum_of_rows(totals.cpu())[0])


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
    factors=st.builds(
        Factors,
        divisor=st.sampled_from([1.0, 2.0, 3.0, 7.0]),
        unscale=st.sampled_from([1.0, 1 / 65536, 1 / 3, 1e-30, 1e30]),
        clip=st.just(1.0),
    ),
    grads=st.sampled_from(list(GRADIENTS)),
    seed=st.integers(0, 2**32),
)


def few_or_many(default: int, slow: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("examples", [default, pytest.param(slow, marks=pytest.mark.slow)])


def given_examples(examples: int, check: Callable[..., None], **strategies: Any) -> None:
    """Runs a check on that many examples, the same in every run."""
    settings(max_examples=examples)(given(**strategies)(check))()


@few_or_many(25, 300)
def test_kernels_equal_the_reference(examples: int) -> None:
    given_examples(examples, kernels_equal_the_reference, shape=SHAPES, fmt=st.sampled_from([FP32, BF16, FP16]))


def kernels_equal_the_reference(shape: Shape, fmt: Format) -> None:
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
        factors = shape.factors._replace(clip=0.5)  # of no effect
        assert of_each_block(backend, fmt, gradients, factors) == expected, type(backend).__name__
        assert count_of(backend, fmt, gradients) == raw, "of the gradients as they are, before the loss scale"
        totals = totals_of(backend, fmt, gradients, factors)
        limbs, nonfinite = sum_of_rows(totals.cpu())
        assert value(torch.tensor(limbs)) == sum(each[0] for each in expected)
        assert nonfinite == sum(each[2] for each in expected)
        squares = square_of(totals)
        finite = np.concatenate([block[np.isfinite(block)] for block in [np.zeros(0, np.float32), *blocks]])
        truth = math.sqrt(math.fsum(float(each) ** 2 for each in finite))
        assert math.sqrt(squares) == pytest.approx(truth, rel=RTOL, abs=0)


@pytest.mark.parametrize("divisor", [2.0, 3.0, 7.0])
@pytest.mark.parametrize("fmt", [FP32, BF16, FP16], ids=lambda each: each.name)
def test_the_divisor_is_divided_by(fmt: Format, divisor: float) -> None:
    """On elements for which multiplying by the reciprocal gives other bits, each the only one of its block."""
    grad = GRADIENTS["heavy_tailed"](torch.Size([999]), torch.Generator().manual_seed(0)).to(fmt.dtype)
    quotients = grad.float().numpy() / np.float32(divisor)
    differs = quotients != grad.float().numpy() * (np.float32(1) / np.float32(divisor))
    if divisor != 2:  # halves are exact
        grad, quotients = grad[torch.from_numpy(differs)], quotients[differs]
    grad, quotients = grad[:20], quotients[:20]
    assert len(grad) == 20
    alone = torch.zeros(len(grad), BLOCK, dtype=fmt.dtype)
    alone[:, 17] = grad
    for backend, device in BACKENDS:
        gradients, _grad = lone(alone.view(-1).to(device), fmt)
        found = of_each_block(backend, fmt, gradients, Factors(divisor))
        assert found == [reference(quotients[index : index + 1]) for index in range(len(quotients))]
        assert [each[1] for each in found] == bits(torch.from_numpy(np.abs(quotients))).tolist()


@pytest.mark.parametrize("fmt", [FP32, BF16, FP16], ids=lambda each: each.name)
def test_one_element_that_is_not_finite_is_counted_wherever_it_is(fmt: Format) -> None:
    """In a row that is looked at in places by turns, with elements left over."""
    numel = 4 * BLOCK + 131
    largest = torch.full((numel,), torch.finfo(fmt.dtype).max, dtype=fmt.dtype)
    largest[::2].neg_()
    for misaligned in (0, 1):
        gradients, guarded = lone(largest, fmt, misaligned)
        grad = guarded.inner
        assert count_of(native_backend, fmt, gradients) == 0
        for at in range(numel):
            kept = grad[at].clone()
            grad[at] = (math.inf, -math.inf, math.nan)[at % 3]
            assert count_of(native_backend, fmt, gradients) == 1, at
            grad[at] = kept
        grad[5::7] = math.nan
        assert count_of(native_backend, fmt, gradients) == len(range(5, numel, 7))


# -- totals ------------------------------------------------------------------------------------------------------------


def made_up(mantissas: Sequence[int], exponents: Sequence[int]) -> BlockSums:
    """Sums that no kernel made."""
    found = BlockSums(len(mantissas))
    mantissa, exponent, *_ = columns(found)
    mantissa[:], exponent[:] = torch.tensor(mantissas, dtype=torch.int64), torch.tensor(exponents, dtype=torch.int32)
    return found


@triton.jit
def add_made_up(
    rows_ptr,
    mantissa_ptr,
    exponent_ptr,
    largest_ptr,
    nonfinite_ptr,
    totals_ptr,
    num_blocks,
    COLUMNS: tl.constexpr,
    LARGEST: tl.constexpr,
    NONFINITE: tl.constexpr,
    LIMB_BITS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """What the kernel of totals does with the sums of a block, for many blocks at a time."""
    blocks = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    inside = blocks < num_blocks
    mantissa = tl.load(mantissa_ptr + blocks, mask=inside, other=0)
    exponent = tl.load(exponent_ptr + blocks, mask=inside, other=0)
    nonfinite = tl.load(nonfinite_ptr + blocks, mask=inside, other=0)
    added = row_of_block_sums(mantissa, exponent, nonfinite, NONFINITE, LIMB_BITS, LANES)
    row = tl.load(rows_ptr + blocks, mask=inside, other=0).to(tl.int64)
    add_to_row(totals_ptr, row, added, tl.load(largest_ptr + blocks, mask=inside, other=0), COLUMNS, LARGEST, LANES)


def added_natively(sums: BlockSums, rows: Sequence[int], num_rows: int) -> torch.Tensor:
    totals = new_totals(num_rows, torch.device("cpu"))
    native_backend.add_blocks(sums, torch.tensor(rows, dtype=torch.int32), totals)
    return totals


def added_by_triton(sums: BlockSums, rows: Sequence[int], num_rows: int) -> torch.Tensor:
    totals, row_of_block = new_totals(num_rows, torch.device("cpu")), torch.tensor(rows, dtype=torch.int32)
    tables = (row_of_block, *columns(sums))
    constants = {"COLUMNS": COLUMNS, "LARGEST": LARGEST_AT, "NONFINITE": NONFINITE, "LIMB_BITS": LIMB_BITS}
    device = next(device for backend, device in BACKENDS if backend is triton_backend)
    there = totals.to(device)
    if rows:
        tables = tuple(each.to(device) for each in tables)
        add_made_up[(-(-len(rows) // 64),)](*tables, there, len(rows), **constants, LANES=32, BLOCKS=64)
    return there.cpu()


ADDED = {"native": added_natively, "triton": added_by_triton}
Add = Callable[[BlockSums, Sequence[int], int], torch.Tensor]


BLOCK_SUMS = st.tuples(
    st.integers(0, 2**62 - 1) | st.sampled_from([0, 1, 2**31, 2**32, 2**62 - 1]),
    st.integers(0, 254),
    st.sampled_from([0, 0, 1, 2, 7]),  # row
)


@pytest.mark.parametrize(
    ("add", "examples", "least"),
    [
        pytest.param(added_natively, 200, 0, id="native"),
        # In the interpreter a launch takes its time, not a block; the first examples would have few blocks.
        pytest.param(added_by_triton, 50, 20, id="triton"),
        pytest.param(added_by_triton, 200, 0, id="triton, many", marks=pytest.mark.slow),
    ],
)
def test_limbs_are_exact_in_any_order(add: Add, examples: int, least: int) -> None:
    """Blocks dealt to ranks and buckets in any way, their limbs added in any order: one and the same sum."""
    blocks, each_add = st.lists(BLOCK_SUMS, min_size=least, max_size=40), st.just(add)
    given_examples(examples, limbs_are_exact_in_any_order, add=each_add, blocks=blocks, data=st.data())


def limbs_are_exact_in_any_order(add: Add, blocks: list[tuple[int, int, int]], data: st.DataObject) -> None:
    def limbs_of(share: list[tuple[int, int, int]]) -> tuple[torch.Tensor, BlockSums, list[int]]:
        mantissas, exponents, rows = [list(column) for column in zip(*share, strict=True)] or [[], [], []]
        sums = made_up(mantissas, exponents)
        return add(sums, rows, 10)[:, :LIMBS], sums, rows

    limbs, sums, rows = limbs_of(blocks)
    for row in range(len(limbs)):
        assert value(limbs[row]) == exact(sums, rows, row) * 2**304
        assert sum_of_squares(limbs[row].tolist()) == float(exact(sums, rows, row))
    order = data.draw(st.permutations(blocks))
    cut = data.draw(st.integers(0, len(blocks)))
    assert torch.equal(limbs_of(order[cut:])[0] + limbs_of(order[:cut])[0], limbs)


def test_blocks_that_fit() -> None:
    """2**30 of the worst blocks at every exponent stay below 2**63 in each limb, and so does no carry get lost."""
    rows = list(range(255))  # one for each exponent
    sums = made_up([2**62 - 1] * len(rows), rows)
    for add in ADDED.values():
        limbs = add(sums, rows, len(rows))[:, :LIMBS] * 2**30
        assert bool((limbs >= 0).all())
        for row in rows:
            assert value(limbs[row]) == exact(sums, rows, row) * 2**304 * 2**30


@few_or_many(25, 300)
def test_a_row_is_its_param_alone(examples: int) -> None:
    """Whatever shares the shard with it, in whatever ranges and threads; rows of no block and skipped ones are 0."""
    formats, lengths, threads = st.sampled_from([FP32, BF16, FP16]), st.integers(1, 4), st.integers(1, 3)
    given_examples(examples, a_row_is_its_param_alone, shape=SHAPES, fmt=formats, length=lengths, threads=threads)


def a_row_is_its_param_alone(shape: Shape, fmt: Format, length: int, threads: int) -> None:
    shard = shard_of(shape, fmt)
    before = torch.get_num_threads()
    ends = []
    for backend, device in BACKENDS:
        memory = shard.memory.copy_to(device)
        gradients = shard.gradients(memory)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("shardopt.kernels.pool.BLOCKS_PER_RANGE", length)
            torch.set_num_threads(threads)
            try:
                totals = totals_of(backend, fmt, gradients, shape.factors)
            finally:
                torch.set_num_threads(before)
            assert not bool(totals[-1].any())  # the row of blocks that no param has
            for row, (member, grad) in enumerate(zip(shape.members, memory.grads, strict=True)):
                numbers = (totals[row, :LIMBS], totals[row, LARGEST_AT], totals[row, NONFINITE])
                if member.skipped:
                    assert not any(bool(each.any()) for each in numbers)
                    continue
                own, _grad = lone(grad.inner, fmt, member.misaligned)
                alone = totals_of(backend, fmt, own, shape.factors)
                expected = (alone[0, :LIMBS], alone[0, LARGEST_AT], alone[0, NONFINITE])
                assert all(map(torch.equal, numbers, expected)), (row, type(backend).__name__)
                values = torch.from_numpy(scaled(grad.inner.cpu(), shape.factors))
                finite = values[values.isfinite()].abs()
                assert int(totals[row, LARGEST_AT]) == (int(bits(finite).max()) if len(finite) else 0)
                assert int(totals[row, NONFINITE]) == len(values) - len(finite)
        limbs, nonfinite = sum_of_rows(totals.cpu())
        assert nonfinite == int(totals[:, NONFINITE].sum())
        assert limbs == totals[:, :LIMBS].sum(dim=0).tolist()
        ends.append(totals.cpu())
    assert torch.equal(*ends)


def test_many_rows() -> None:
    """Rows in no order, most of them of one block, as thousands of small params make them."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 3000, (5000,), generator=generator)
    mantissas = torch.randint(0, 2**62 - 1, (5000,), generator=generator)
    exponents = torch.randint(0, 255, (5000,), generator=generator)
    sums = made_up(mantissas.tolist(), exponents.tolist())
    largest = torch.randint(0, 0x7F800000, (5000,), generator=generator).int()
    nonfinite = torch.randint(0, BLOCK + 1, (5000,), generator=generator).int()
    for column, values in zip(columns(sums)[2:], (largest, nonfinite), strict=True):
        column[:] = values
    native, of_triton = (add(sums, rows.tolist(), 3000) for add in ADDED.values())
    assert torch.equal(native, of_triton)
    for row in range(0, 3000, 7):
        mine = rows == row
        assert native[row, LARGEST_AT] == max(largest[mine].tolist(), default=0)
        assert native[row, NONFINITE] == int(nonfinite[mine].sum())
        assert value(native[row, :LIMBS]) == exact(sums, rows.tolist(), row) * 2**304


# -- extremes ----------------------------------------------------------------------------------------------------------


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
        totals = totals_of(backend, FP32, gradients, Factors())
        found = square_of(totals)
        assert math.isfinite(found) and int(totals[:, NONFINITE].sum()) == 0
        assert math.sqrt(found) == pytest.approx(math.sqrt(truth), rel=RTOL, abs=0)
        assert totals[:, LARGEST_AT].max() == int(bits(grad.abs()).max())


POSITIONS = (0, 1, BLOCK - 1, BLOCK, 2 * BLOCK + 6)


@sweep({"position": POSITIONS, "value": ("inf", "-inf", "nan", "-nan"), "fmt": (FP32, BF16, FP16)})
def test_one_bad_element(position: int, value: str, fmt: Format) -> None:
    """Counted once wherever it lies, and left out of the sum and of the largest magnitude."""
    grad = torch.ones(2 * BLOCK + 7, dtype=fmt.dtype)
    grad[position] = float(value)
    for backend, device in BACKENDS:
        gradients, _grad = lone(grad.to(device), fmt)
        assert count_of(backend, fmt, gradients) == 1
        found = of_each_block(backend, fmt, gradients, Factors(unscale=0.5))
        assert [nonfinite for _, _, nonfinite in found] == [int(block == position // BLOCK) for block in range(3)]
        assert [largest for _, largest, _ in found] == [int(bits(torch.tensor([0.5])))] * 3
        assert square_of(totals_of(backend, fmt, gradients, Factors(unscale=0.5))) == (len(grad) - 1) / 4


def test_unscaling_can_overflow() -> None:
    """A finite gradient whose product with ``unscale`` is not finite counts: that product is what the step uses."""
    gradients, _grad = lone(torch.tensor([1e30, 1.0]))
    assert count_of(native_backend, FP32, gradients) == 0
    totals = totals_of(native_backend, FP32, gradients, Factors(unscale=1e30))
    assert totals[0, NONFINITE] == 1
    assert square_of(totals) == pytest.approx(1e60, rel=RTOL)


def test_the_divisor_comes_first() -> None:
    """A sum whose mean fits is no overflow, though the product with the other factor alone would be one."""
    gradients, _grad = lone(torch.tensor([3e38, 1.0]))
    sums = native_backend.block_sums(FP32, gradients, Factors(divisor=4.0, unscale=2.0))
    _, _, largest, nonfinite = columns(sums)
    assert nonfinite.tolist() == [0] and largest.view(torch.float32).tolist() == [torch.tensor(1.5e38)]


def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    grad = torch.randn(100 * BLOCK + 3, generator=torch.Generator().manual_seed(0)) * 1e-40  # subnormal
    gradients, _grad = lone(grad)
    alone = native_backend.block_sums(FP32, gradients, Factors())
    monkeypatch.setattr("shardopt.kernels.pool.BLOCKS_PER_RANGE", 3)
    torch.set_flush_denormal(True)
    try:
        many = native_backend.block_sums(FP32, gradients, Factors())
    finally:
        torch.set_flush_denormal(False)
    assert all(map(torch.equal, columns(alone), columns(many))) and bool(columns(alone)[0].any())
