"""What the kernels compile to, for GPUs that need not be there: widths, 64-bit offsets, no spills, no contraction.

Prints a table of registers with ``-rP``. ``compile_targets.py`` does the compiling, in a process of its own.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.support.ptx.process import CACHE

Facts = dict[str, Any]
CUDA, HIP = ("sm_80", "sm_90"), "gfx942"
# Blocks of threads that still fill a GPU's registers with enough loads under way: 20 warps of 32 a multiprocessor.
MOST_REGISTERS = 96
MOST_REGISTERS_IN_8_BITS = 128  # 16 warps: of several states in 8 bits one holds new values until their scale is known


@pytest.fixture(scope="module", params=["drawn", pytest.param("whole", marks=pytest.mark.slow)])
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Facts:
    """By default each kernel is compiled for one of the targets, drawn; with --slow for all (80 s of a core).

    What Triton keeps is found by the next run, by Triton's hash of all that the code is made of.
    """
    folder = tmp_path_factory.mktemp("triton")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment |= {"TRITON_CACHE_DIR": str(CACHE), "PYTHONPATH": path}
    command = [sys.executable, "-m", "tests.support.compile_targets", str(folder), request.param]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    found: Facts = json.loads(done.stdout) | {"copies": 3 if request.param == "whole" else 1}
    for kernel in found["kernels"] + found["reductions"]:
        print(f"{kernel['target']:7} {kernel['label']:32} {kernel['registers']:3} registers", end="")
        print(f"  {kernel['spilled']} spilled  {kernel['shared']} bytes shared")
    return found


def everything(compiled: Facts) -> list[Facts]:
    return [*compiled["kernels"], *compiled["reductions"]]


def failing(kernels: list[Facts], *names: str) -> list[tuple[Any, ...]]:
    """Label, target and what is not empty or zero."""
    return [
        (kernel["label"], kernel["target"], name, kernel[name])
        for kernel in kernels
        for name in names
        if kernel.get(name)
    ]


def test_every_rule_and_format_is_there(compiled: Facts) -> None:
    labels = {kernel["label"] for kernel in compiled["kernels"]}
    assert len({label.split()[0] for label in labels}) == 12
    assert sum(" kept " in label for label in labels) == 12 + 13
    assert sum(label.startswith("AdamW plain") for label in labels) == 11
    assert len(compiled["kernels"]) == (len(labels) + 2 if compiled["copies"] == 1 else 3 * len(labels))
    assert len(compiled["reductions"]) == (9 if compiled["copies"] == 1 else 3 * 2 * 3) and {
        each["target"] for each in compiled["kernels"]
    } == {*CUDA, HIP}


def test_both_sides_of_2_gib_are_one_kernel(compiled: Facts) -> None:
    """On HIP an access is to a buffer with an offset of 32 bits: from its block, whose address is data and has 64."""
    steps = [kernel for kernel in compiled["kernels"] if kernel["target"] == HIP]
    assert steps
    for kernel in steps:
        assert any(name.startswith("buffer_store") for name in kernel["memory"]), kernel["label"]
        assert not kernel["narrow_offsets"], kernel["label"]


def test_no_spills_and_few_registers(compiled: Facts) -> None:
    assert not failing(everything(compiled), "spilled", "shared")
    for kernel in everything(compiled):
        most = MOST_REGISTERS_IN_8_BITS if kernel.get("scales", 0) > 1 else MOST_REGISTERS
        assert 0 < kernel["registers"] <= most, (kernel["label"], kernel["target"])


def test_sums_over_rows_and_columns_are_what_they_say(compiled: Facts) -> None:
    """In float64, each operation rounded once; no spills; a span is folded within a warp."""
    margins = compiled["margins"]
    assert len(margins) == 3 * 3
    assert not failing(margins, "spilled", "shared", "narrow_offsets", "fused", "flushed", "other_memory", "quotients")
    assert all(0 < each["registers"] <= 168 for each in margins)  # 12 warps a multiprocessor: 48 KiB of loads under way


def test_offsets_have_64_bits(compiled: Facts) -> None:
    assert not failing(everything(compiled), "narrow_offsets")


def test_narrow_offsets_would_be_seen(compiled: Facts) -> None:
    """The same kernel with ``.to(tl.int64)`` taken away."""
    assert any("muli" in each and "i32" in each for each in compiled["mutant"])


def test_accesses_are_as_wide_as_they_can_be(compiled: Facts) -> None:
    """Streams in 128 bits wherever a thread has as much: the rest of the accesses are tables and the ends of params."""
    for kernel in compiled["kernels"]:
        elements = kernel["elements"]
        assert elements >= (8 if kernel["target"] in CUDA else 4)
        for verb in ("load", "store"):
            expected: dict[int, int] = {}  # bits of an access -> accesses of one thread
            for itemsize in kernel["streams"][verb]:
                width = min(elements * itemsize * 8, 128)
                expected[width] = expected.get(width, 0) + elements * itemsize * 8 // width
            found = accesses(kernel, verb)
            label = f"{kernel['label']} {kernel['target']} {verb}"
            for width, count in expected.items():
                assert found.get(width, 0) >= count, label
            if verb == "store" or kernel["target"] in CUDA:  # on HIP a row of a table, too, is one load
                assert found.get(128, 0) == expected.get(128, 0), label
            if kernel["target"] in CUDA:
                assert set(expected) <= {128, 64}, label  # 8 elements of a byte
            if verb == "store":
                if kernel["scales"]:
                    expected[32] = expected.get(32, 0) + kernel["scales"]
                assert found == expected, label
    for kernel in compiled["reductions"]:
        assert kernel["target"] == HIP or accesses(kernel, "load")[128] > 0


def accesses(kernel: Facts, verb: str) -> dict[int, int]:
    """Bits of an access -> how many there are."""
    found: dict[int, int] = {}
    for name, count in kernel["memory"].items():
        if kernel["target"] in CUDA:
            if name.startswith("ld" if verb == "load" else "st"):
                vector, _, bits = name.split(".", 2)[2].rpartition("b")
                width = int(bits) * int(vector.strip("v.") or 1)
                found[width] = found.get(width, 0) + count
        elif f"_{verb}_" in name:
            width = {"dwordx4": 128, "dwordx3": 96, "dwordx2": 64, "dword": 32}.get(name.rsplit("_", 1)[1], 16)
            found[width] = found.get(width, 0) + count
    return found


def test_arithmetic_is_ieee(compiled: Facts) -> None:
    """Correctly rounded quotients and roots, nothing fused, nothing flushed to zero.

    Machine code of a quotient holds fused operations of its own. So it is read for the rules without one, and for the
    totals, whose only quotient is that by the divisor: theirs holds as many as a kernel that does nothing else.
    """
    on_cuda = [kernel for kernel in everything(compiled) if kernel["target"] in CUDA]
    assert not failing(on_cuda, "fused", "flushed", "other_memory")
    for kernel in on_cuda:
        assert set(kernel["roots_and_quotients"]) <= {"div.rn.f32", "sqrt.rn.f32"}
    adam = [kernel for kernel in compiled["kernels"] if kernel["label"].startswith("AdamW plain")]
    assert all(
        kernel.get("roots_and_quotients", ["div.rn.f32", "sqrt.rn.f32"]) == ["div.rn.f32", "sqrt.rn.f32"]
        for kernel in adam
    )
    without = [
        kernel
        for kernel in compiled["kernels"]
        if kernel["label"].split()[0] in ("SGD", "Lion", "Rprop", "ASGD") and not kernel["scales"]
    ]
    counts = [kernel for kernel in compiled["reductions"] if kernel["label"].startswith("count_nonfinite")]
    sums = [kernel for kernel in compiled["reductions"] if kernel["label"].startswith("totals")]
    assert (len(without), len(counts), len(sums)) == (
        6 * compiled["copies"],
        *((3, 6) if compiled["copies"] == 1 else (9, 9)),
    )
    assert not failing(without + counts, "machine_fused", "quotients")
    for kernel in sums:
        assert kernel["machine_fused"] == compiled["fused_in_quotients"][kernel["target"]] > 0, kernel["label"]
    on_hip = [kernel for kernel in everything(compiled) if kernel["target"] == HIP]
    assert {kernel["denormals"] for kernel in on_hip} == {3}
    # Two quotients an element, and one: none is a product with a reciprocal. On gfx942 they are counted by the
    # instruction that each ends in and that rounds it correctly.
    assert all(kernel["quotients"] == 2 * kernel["elements"] for kernel in adam)
    assert all(kernel["quotients"] == kernel["elements"] for kernel in sums)
    # And one a block for the inverse of each scale, by which its elements are multiplied.
    kept = [kernel for kernel in compiled["kernels"] if kernel["label"].startswith("AdamW kept")]
    assert len(kept) == 14 * compiled["copies"]
    for kernel in kept:
        assert kernel["quotients"] == 2 * kernel["elements"] + kernel["scales"], kernel["label"]


def test_a_call_is_one_launch_over_all_blocks(compiled: Facts) -> None:
    """That a shard's step is one call, test_counts.py holds."""
    found = compiled["launches"]
    summed = found["blocks_summed_per_program"]
    for name, blocks in (("step", found["blocks_per_program"]), ("sums", summed), ("counts", summed)):
        grids = found[f"{name}_grids"]
        assert len(grids) == len(found["sizes"])
        for (programs,), num_blocks in zip(grids, found["sizes"], strict=True):
            assert (programs - 1) * blocks < num_blocks <= programs * blocks


def test_new_numbers_compile_nothing(compiled: Facts) -> None:
    """Launches of nine sizes, each with other scalars, factors (ints among them), rows and addresses."""
    found = compiled["launches"]
    assert found["step_kernels"] == found["sums_kernels"] == found["counts_kernels"] == 1


def test_launches_ask_for_what_is_compiled_here(compiled: Facts) -> None:
    """Warps, and no contraction of products and sums into FMA."""
    assert not compiled["launches"]["wrong_options"]
