"""Every kernel as machine code for an H100: compiled as a launch compiles it, and read."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from triton.runtime import driver as drivers

from shardopt.kernels import triton_reductions
from shardopt.kernels.formats import BF16, FP16, FP32, Format
from shardopt.kernels.spec import Spec

from .compile_targets import TARGETS, compile_reduction, compile_step, label_of, specs
from .machine_code import main_path, read, units

TARGET = TARGETS["sm_90"]


class Lowered(NamedTuple):
    """A kernel, and what of its machine code counts."""

    label: str
    of: Spec | Format  # of a step; of the gradients that a reduction reads
    blocks: int  # that a program takes
    registers: int  # of a lane
    units: dict[str, int]  # instructions of a warp on the main path, by the unit that executes them


def lowered_kernels(is_wanted: Callable[[str], bool] = lambda label: True) -> Iterator[Lowered]:
    """Yields the kernels whose labels are wanted; Triton's own driver is back in place behind it."""
    before, found = drivers._active, []
    try:
        for named, spec, aligned in specs():
            label = label_of(named, spec, aligned)
            if is_wanted(label):
                found.append((label, spec, 1, compile_step(spec, aligned, TARGET)))
        for kernel in (triton_reductions.totals_kernel, triton_reductions.count_nonfinite_kernel):
            for grad in (FP32, BF16, FP16):
                label = f"{kernel.fn.__name__} {grad.name}"
                if is_wanted(label):
                    blocks = triton_reductions.BLOCKS_PER_PROGRAM
                    found.append((label, grad, blocks, compile_reduction(kernel, grad, TARGET)))
    finally:
        drivers._active = before
    codes = read([kernel.asm["cubin"] for *_, kernel in found], TARGET.arch)
    for (label, of, blocks, _), code in zip(found, codes, strict=True):
        yield Lowered(label, of, blocks, code.registers, units(main_path(code)))
