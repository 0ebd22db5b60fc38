"""What test_on_ptx.py would say of a kernel with a fault in it: each of these is planted in compiled code, and found.

Arithmetic faults change the bits of results. A GPU reports few of the others.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from shardopt.kernels import triton_reductions, triton_step
from shardopt.kernels.formats import BF16, FP32, SIGNED8, UNSIGNED8
from shardopt.kernels.spec import Spec
from shardopt.rules.passes import passes_of
from tests.kernels.test_kernels import ADAM_RULE, ADAMW, NASTY
from tests.support.ptx.numbers import PtxError
from tests.support.ptx.process import Compiling
from tests.support.ptx.shards import check_reductions, check_step
from tests.support.shards import Shape
from tests.support.versions import needs_the_ptx_of_new_triton

DIFFERENT_BITS = (AssertionError, r"\d+ of \d+ differ")
PLAIN: tuple[Any, ...] = (FP32, FP32, FP32, ())
IN_8_BITS: tuple[Any, ...] = (BF16, BF16, FP32, (SIGNED8, UNSIGNED8))
SHAPE = replace(NASTY, grads="log_uniform")


class Replaced(NamedTuple):
    """An edit of PTX, which has to find its place."""

    pattern: str
    by: str | Callable[[re.Match[str]], str]
    count: int = 0  # 0: everywhere

    def __call__(self, ptx: str) -> str:
        changed = re.sub(self.pattern, self.by, ptx, count=self.count)
        assert changed != ptx, f"{self.pattern} is not in the kernel"
        return changed


def contract(ptx: str) -> str:
    """Sums of a product become one operation, as compilers do it unless they are told not to."""
    products = {
        into: f"{one}, {other}" for into, one, other in re.findall(r"mul\.rn\.f32 \t(%\w+), (\S+), (\S+);", ptx)
    }

    def fused(sum: re.Match[str]) -> str:
        into, one, other = sum.groups()
        return f"fma.rn.f32 \t{into}, {products[one]}, {other};" if one in products else sum[0]

    return Replaced(r"add\.rn\.f32 \t(%\w+), (%\w+), (%?\w+);", fused)(ptx)


class Fault(NamedTuple):
    edit: Callable[[str], str]
    found: tuple[type[Exception], str]
    formats: tuple[Any, ...] = PLAIN


FAULTS = {
    "contraction": Fault(contract, DIFFERENT_BITS),
    "flushed products": Fault(Replaced(r"mul\.rn\.f32", "mul.rn.ftz.f32"), DIFFERENT_BITS),
    "flushed sums": Fault(Replaced(r"add\.rn\.f32", "add.rn.ftz.f32"), DIFFERENT_BITS),
    "approximate quotients": Fault(Replaced(r"div\.rn\.f32", "div.full.f32"), DIFFERENT_BITS),
    "quotients less exact than that": Fault(
        Replaced(r"div\.rn\.f32", "div.approx.f32"), (PtxError, "div.approx.f32: this opcode is not known")
    ),
    "products that may be contracted": Fault(
        Replaced(r"mul\.rn\.f32", "mul.f32", 1), (PtxError, "mul.f32: this opcode is not known")
    ),
    "a mask off by one": Fault(Replaced(r"setp\.lt\.u64", "setp.le.u64"), (PtxError, "which is in no tensor")),
    "a mask forgotten": Fault(Replaced(r"@%p\d+ (ld\.global)", r"\1"), (PtxError, "which is in no tensor")),
    "a misaligned load": Fault(
        Replaced(r"(ld\.global\.v4\.b32 .*, \[ %rd\d+) \+ 0 \]", r"\1 + 4 ]"),
        (PtxError, "a misaligned load of 16 bytes"),
    ),
    "a misaligned store": Fault(
        Replaced(r"(st\.global\.v4\.b32 \[ %rd\d+) \+ 0 \]", r"\1 + 8 ]"), (PtxError, "a misaligned store of 16 bytes")
    ),
    "a wrong lane": Fault(
        Replaced(r"(shfl\.sync\.idx\.b32 \t%\w+, %\w+), %\w+,", r"\1, 5,"), DIFFERENT_BITS, IN_8_BITS
    ),
    "a lane that is not there": Fault(
        Replaced(r"(\s)(shfl\.sync\.idx)", r"\1@!%p1 \2"), (PtxError, "not all lanes|before it is written"), IN_8_BITS
    ),
    "another reduction": Fault(Replaced(r"redux\.sync\.max\.u32", "redux.sync.min.u32"), DIFFERENT_BITS, IN_8_BITS),
    "a register without a value": Fault(
        Replaced(r"mov\.u32 %r\d+, (?:0x0|%r\d+);", ""), (PtxError, "is read before it is written")
    ),
}


def in_kernel_with(name: str) -> None:
    fault = FAULTS[name]
    spec = Spec(passes_of(ADAM_RULE.variant(ADAMW)), *fault.formats)
    check_step(SHAPE, spec, ADAMW, ADAM_RULE)  # nothing is found where nothing is wrong
    kind, message = fault.found
    with pytest.raises(kind, match=message):
        check_step(SHAPE, spec, ADAMW, ADAM_RULE, edit=fault.edit)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_code_is_found(compiling: Compiling, name: str) -> None:
    compiling(in_kernel_with, name)


def in_kernel_with_contraction() -> None:
    run = triton_step.step_kernel.run

    def run_contracted(*arguments: Any, **named: Any) -> Any:
        return run(*arguments, **named | {"enable_fp_fusion": True})

    with pytest.MonkeyPatch.context() as patch, pytest.raises((AssertionError, PtxError), match=r"differ|not known"):
        patch.setattr(triton_step.step_kernel, "run", run_contracted)
        check_step(SHAPE, Spec(passes_of(ADAM_RULE.variant(ADAMW)), *PLAIN), ADAMW, ADAM_RULE)


def test_contraction_by_the_compiler_is_found(compiling: Compiling) -> None:
    compiling(in_kernel_with_contraction)


def in_launch_that_promises() -> None:
    members = tuple(replace(each, misaligned=1) for each in NASTY.members)
    with pytest.raises(PtxError, match="a misaligned load of 16 bytes"):
        check_step(
            replace(SHAPE, members=members),
            Spec(passes_of(ADAM_RULE.variant(ADAMW)), *PLAIN),
            ADAMW,
            ADAM_RULE,
            is_aligned=True,
        )


def test_gradients_that_are_not_as_aligned_as_promised(compiling: Compiling) -> None:
    compiling(in_launch_that_promises)


class SumsFault(NamedTuple):
    edit: Replaced
    found: tuple[type[Exception], str]
    blocks: int = 1  # of a program
    warps: int = 1


SUMS_FAULTS = {
    "no barrier": SumsFault(Replaced(r"bar\.sync \t0;", ""), (PtxError, "no barrier lies between them"), 4, 4),
    "a wrong lane": SumsFault(Replaced(r"(shfl\.sync\.bfly\.b32 .*), 4, 31", r"\1, 2, 31"), (AssertionError, "limbs")),
    "another reduction": SumsFault(Replaced(r"redux\.sync\.add", "redux.sync.max"), (AssertionError, "nonfinite")),
}


def in_sums_with(name: str) -> None:
    fault = SUMS_FAULTS[name]

    def edit(ptx: str) -> str:
        return fault.edit(ptx) if "totals_kernel" in ptx else ptx

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_reductions, "BLOCKS_PER_PROGRAM", fault.blocks)
        patch.setattr(triton_reductions, "NUM_WARPS", fault.warps)
        for grads in ("heavy_tailed", "special"):
            check_reductions(Shape(NASTY.members, grads=grads), FP32)
        kind, message = fault.found
        with pytest.raises(kind, match=message):
            for grads in ("heavy_tailed", "special"):
                check_reductions(Shape(NASTY.members, grads=grads), FP32, edit=edit)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=needs_the_ptx_of_new_triton) if fault.warps > 1 else name
        for name, fault in SUMS_FAULTS.items()
    ],
)
def test_a_fault_in_an_exchange_is_found(compiling: Compiling, name: str) -> None:
    compiling(in_sums_with, name)
