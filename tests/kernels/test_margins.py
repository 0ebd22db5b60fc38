"""Sums over rows and columns, and products of their factors: natively, in Triton's interpreter and as PTX, one result.

Pieces begin and end anywhere in params of every order of dimensions: in the midst of runs, bands and spans.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from shardopt.kernels import native_backend, triton_backend, triton_margins
from shardopt.kernels.formats import BF16, FP16, FP32, SPLIT, Format
from shardopt.kernels.products import BAND, COLUMNS, FIRST, INNER, OUTER, RUN, SPAN, Geometry, MarginPiece, geometry_of
from shardopt.kernels.spec import Spec
from shardopt.kernels.tables import BLOCK, Factors
from shardopt.rules.adafactor import adafactor
from shardopt.rules.passes import passes_of
from shardopt.rules.rule import FP32_EPS
from tests.kernels.test_passes import SPECIAL
from tests.support.cases import GRADIENTS
from tests.support.ptx.driver import Driver
from tests.support.ptx.executed import MARGINS, PRODUCTS, check_executed
from tests.support.ptx.process import Compiling
from tests.support.ptx.shards import CPU, ShardOnPtx
from tests.support.shards import assert_same_bits
from tests.support.versions import needs_the_interpreter_of_new_triton, needs_the_ptx_of_new_triton


class Laid(NamedTuple):
    """A param's shape, and its dimensions from the slowest in memory to the fastest."""

    shape: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def geometry(self) -> Geometry:
        return geometry_of(self.shape, self.empty().stride())

    def empty(self, dtype: torch.dtype = torch.float32) -> Tensor:
        back = [self.order.index(dim) for dim in range(len(self.shape))]
        return torch.empty([self.shape[dim] for dim in self.order], dtype=dtype).permute(back)


def contiguous(*shape: int) -> Laid:
    return Laid(shape, tuple(range(len(shape))))


IN_BANDS = (
    contiguous(2 * BAND + 3, 70),
    contiguous(3, 2 * SPAN + 9),
    contiguous(1, 900),
    contiguous(2, 3, BAND + 1, 5),
    Laid((90, SPAN + 1), (1, 0)),
    Laid((3, 65, 7), (1, 0, 2)),  # matrices lie between the rows of each other
)
WITHOUT = (
    contiguous(64, 64),
    contiguous(40, 5, 3, 3),
    contiguous(9, 1),
    contiguous(5, 1, 1),
    Laid((4, 3, 5, 80), (0, 2, 3, 1)),  # channels last
    Laid((6, 100, 4), (1, 2, 0)),
)


def pieces_of(numel: int) -> Iterator[tuple[int, int]]:
    """Elements [start, stop): all of them, and a part, which begins at a block and ends anywhere."""
    yield from {(0, numel), (numel // 3 // BLOCK * BLOCK, numel - numel // 3)}


class Sums(NamedTuple):
    """Of one piece, on what other pieces had added before."""

    laid: Laid
    start: int
    grad: Tensor
    rows: Tensor
    columns: Tensor

    def piece(self) -> MarginPiece:
        return MarginPiece(self.grad, self.start, self.laid.geometry, self.rows, self.columns)

    def copy(self) -> "Sums":
        return self._replace(rows=self.rows.clone(), columns=self.columns.clone())


def every_piece(params: Sequence[Laid], format: Format, grads: str) -> list[Sums]:
    found = []
    for seed, laid in enumerate(params):
        generator = torch.Generator().manual_seed(seed)
        drawn = GRADIENTS[grads](torch.Size([math.prod(laid.shape)]), generator).to(format.dtype)
        for start, stop in pieces_of(len(drawn)):
            sizes = laid.geometry.rows, laid.geometry.num_columns
            before = (torch.rand(size, dtype=torch.float64, generator=generator) for size in sizes)
            found.append(Sums(laid, start, drawn[start:stop].clone(), *before))
    return found


def added_up(backend: Any, before: Sequence[Sums], factors: Factors) -> list[Sums]:
    after = [each.copy() for each in before]
    with np.errstate(all="ignore"):
        backend.add_margin_sums([each.piece() for each in after], factors)
    return after


def assert_same(found: Sequence[Sums], expected: Sequence[Sums], who: str) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        what = f"{who}: {mine.laid}, from {mine.start} on"
        assert_same_bits(mine.rows, theirs.rows, f"{what}, rows")
        assert_same_bits(mine.columns, theirs.columns, f"{what}, columns")


FACTORS = Factors(unscale=1 / 3, clip=0.7)


@pytest.mark.parametrize("format", [FP32, BF16, FP16], ids=lambda each: each.name)
def test_native_sums_are_those_of_float64(format: Format) -> None:
    for laid in (*IN_BANDS, *WITHOUT):
        before = every_piece([laid], format, "log_uniform")
        for each, after in zip(before, added_up(native_backend, before, FACTORS), strict=True):
            whole = torch.zeros(math.prod(laid.shape))
            whole[each.start : each.start + len(each.grad)] = each.grad.float()
            scaled = torch.as_strided(whole, laid.shape, laid.empty().stride()) * np.float32(1 / 3) * np.float32(0.7)
            squares = scaled.double().square()
            for mine, there, sums in ((after.rows, each.rows, -1), (after.columns, each.columns, -2)):
                torch.testing.assert_close(mine, there + squares.sum(sums).reshape(-1), rtol=1e-13, atol=0)


@contextmanager
def on_ptx() -> Iterator[Driver]:
    """A driver that knows of the parts, which kernels find by way of tables."""
    tables = triton_margins._Tables

    def noted(pieces: Sequence[MarginPiece]) -> Any:
        made = tables(pieces)
        driver.memory.allow(
            *made.scratch, *(tensor for each in pieces for tensor in (each.grad, each.rows, each.columns))
        )
        return made

    with Driver() as driver, patch.object(triton_margins, "_Tables", noted):
        yield driver


def in_sums(rows: Sequence[tuple[str, str]]) -> set[str]:
    """Every param in fp32; in the two other formats, which differ in how an element is widened, half of them each."""
    executed = set()
    formats = {each.name: each for each in (FP32, BF16, FP16)}
    params = (*IN_BANDS, *WITHOUT)
    of_format = {"fp32": params, "bf16": params[::2], "fp16": params[1::2]}
    for name, grads in rows:
        before = every_piece(of_format[name], formats[name], grads)
        expected = added_up(native_backend, before, FACTORS)
        with on_ptx() as driver:
            found = added_up(triton_backend, before, FACTORS)
        assert_same(found, expected, f"PTX: {name}, {grads}")
        executed |= {each.ttir for each in driver.executed}
        assert len(driver.executed) == 3
    return executed


def test_sums_as_compiled(compiling: Compiling) -> None:
    rows = [("fp32", "log_uniform"), ("bf16", "special"), ("fp16", "heavy_tailed")]
    check_executed(MARGINS, compiling(in_sums, rows))


@needs_the_interpreter_of_new_triton
def test_the_interpreter_has_the_bits_of_the_native_sums() -> None:
    before = every_piece([contiguous(BAND + 3, 6), contiguous(9, 4), Laid((3, 2, 4), (1, 2, 0))], FP32, "special")
    expected = added_up(native_backend, before, FACTORS)
    assert_same(added_up(triton_backend, before, FACTORS), expected, "interpreter")


def test_a_shard_takes_the_bands_that_it_has() -> None:
    """And the memory of no others: parts are 8 bytes for each 128 elements and for each 512."""
    laid = contiguous(64, 8 * BAND, SPAN)
    start, stop = 5 * BAND * SPAN + 7, 12 * BAND * SPAN
    grad = torch.empty(stop - start)
    sums = torch.empty(laid.geometry.rows).double(), torch.empty(laid.geometry.num_columns).double()
    tables = triton_margins._Tables([MarginPiece(grad, start, laid.geometry, *sums)])
    assert sum(each.numel() for each in tables.scratch) == 7 * (BAND + SPAN)


# -- products ----------------------------------------------------------------------------------------------------------

# Of the members of SPECIAL, each of which has the block that ``before`` says, and those after it.
PARAMS = (
    contiguous(3, 300),
    contiguous(40, 20),
    contiguous(20, 40),
    Laid((70, 45), (1, 0)),
    contiguous(50, 100),
    Laid((4, 3, 17, 20), (0, 2, 3, 1)),
    contiguous(5, 6, 130, 3),
    Laid((45, 9, 6), (1, 2, 0)),
)
MATRIX = (9, 9)  # a shape of two dimensions


class FactoredShard(ShardOnPtx):
    """A shard whose params are parts of matrices."""

    def scalars(self) -> Tensor:
        variant = adafactor.variant(self.group, MATRIX)
        table = np.full((len(self.shape.members) + 1, len(variant.scalars)), np.nan, np.float32)
        for row, member in enumerate(self.shape.members):
            if not member.skipped:
                group = self.member_group(member)
                table[row] = adafactor.evaluate(variant, group, member.step, {}, MATRIX, FP32_EPS)[0]
        return torch.from_numpy(table)

    def numels(self) -> list[int]:
        return [*(math.prod(laid.shape) for laid in PARAMS), 0]

    def products(self) -> Tensor:
        """The table has the addresses of factors, which the shard keeps: from subnormals to infinity."""
        table, self.factors = torch.zeros(len(PARAMS) + 1, COLUMNS, dtype=torch.int64), list[Tensor]()
        generator = torch.Generator().manual_seed(1)
        for row, (member, laid, start) in enumerate(zip(self.shape.members, PARAMS, self.starts, strict=True)):
            geometry = laid.geometry
            assert member.before * BLOCK + member.numel <= math.prod(laid.shape)
            sizes = geometry.rows, geometry.num_columns
            made = [GRADIENTS["special"](torch.Size([size]), generator).abs().float() for size in sizes]
            self.factors += made
            outer, inner = made if geometry.outer_is_row else made[::-1]
            table[row, FIRST] = member.before * BLOCK - start
            table[row, OUTER], table[row, INNER] = outer.data_ptr(), inner.data_ptr()
            table[row, RUN:] = torch.tensor(geometry.columns)
        if self.driver is not None:
            self.driver.memory.allow(*self.factors)
        return table


def factored_shard(*formats: Any) -> FactoredShard:
    group = {"lr": 0.1, "beta2_decay": -0.8, "eps": (1e-30, 1e-3), "d": 1.0, "weight_decay": 0.1, "maximize": False}
    variant = adafactor.variant(group, MATRIX)
    return FactoredShard(SPECIAL, adafactor, group, Spec(passes_of(variant), *formats), GRADIENTS)


FORMATS: dict[str, Any] = {"fp32": (FP32, FP32), "split": (BF16, BF16, SPLIT)}


def in_products(names: Sequence[str]) -> set[str]:
    executed = set()
    for name in names:
        shard = factored_shard(*FORMATS[name])
        expected = shard.launch(native_backend, CPU)
        with Driver() as driver:
            shard.driver = driver
            found = shard.launch(triton_backend, CPU)
        shard.assert_same(found, expected, f"PTX: {name}")
        executed |= {each.ttir for each in driver.executed}
    return executed


@needs_the_ptx_of_new_triton
def test_products_as_compiled(compiling: Compiling) -> None:
    check_executed(PRODUCTS, compiling(in_products, list(FORMATS)))


@needs_the_interpreter_of_new_triton
def test_the_interpreter_has_the_products_of_the_native_kernels() -> None:
    shard = factored_shard(*FORMATS["fp32"])
    shard.assert_same(shard.launch(triton_backend, CPU), shard.launch(native_backend, CPU), "interpreter")
