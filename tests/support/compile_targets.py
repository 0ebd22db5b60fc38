"""Compiles the kernels for GPUs that need not be there and prints, as JSON, what the code is made of.

Run by test_compiled.py in a process of its own, because the tests' process has Triton's interpreter switched on.
"""

import importlib.util
import inspect
import json
import multiprocessing
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from shardopt.kernels import triton_backend, triton_margins, triton_reductions, triton_step
from shardopt.kernels.formats import (
    BF16,
    BF16_DITHERED,
    BF16_RANDOM,
    FP16,
    FP32,
    SIGNED8,
    SPLIT,
    SPLIT24,
    UNSIGNED8,
    BlockFormat,
    Format,
)
from shardopt.kernels.products import MarginPiece, geometry_of
from shardopt.kernels.reductions import new_totals
from shardopt.kernels.spec import Spec
from shardopt.kernels.tables import BLOCK, Factors, Gradients, Streams, Tables
from shardopt.rules.passes import passes_of
from tests.support.cases import CASES
from tests.support.machine_code import read
from tests.support.no_driver import NoDriver

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# What launches ask for, which the test checks.
OPTIONS = {"num_warps": triton_step.NUM_WARPS, "enable_fp_fusion": False}
MARGIN_KERNELS = (
    triton_margins.margin_parts_kernel,
    triton_margins.add_parts_kernel,
    triton_margins.side_sums_kernel,
)


def specs() -> Iterator[tuple[str, Spec, bool]]:
    """Every rule with most of its flags on, in fp32 and in the fewest bytes; AdamW plain and in all formats, gradients
    aligned and not.
    """
    for case in CASES:
        group = case.ours([torch.nn.Parameter(torch.zeros(1))], **case.keywords[-1]).param_groups[0]
        variant = case.rule.variant(group)
        yield case.name, Spec(passes_of(variant), FP32, FP32), True
        least = {"fp32": FP32, "bf16": BF16_DITHERED}
        states = [
            least.get(case.rule.tolerates(name), UNSIGNED8 if name in case.rule.nonnegative else SIGNED8)
            for name in variant.states
        ]
        yield f"{case.name} kept", Spec(passes_of(variant), BF16_RANDOM, BF16, None, tuple(states)), True
    plain = CASES[0].rule.variant({**group_of_adamw(), "amsgrad": False})
    for param in (FP32, BF16, FP16):
        for grad in (FP32, BF16, FP16):
            yield "AdamW plain", Spec(passes_of(plain), param, grad), True
    for param, master in ((FP32, FP32), (BF16, FP32), (BF16, SPLIT), (BF16, SPLIT24), (BF16_RANDOM, None)):
        for states in ((FP32, FP32), (SIGNED8, UNSIGNED8), (BF16, BF16_DITHERED)):
            if master is FP32 and states == (FP32, FP32):
                continue  # above
            yield "AdamW kept", Spec(passes_of(plain), param, BF16 if param is not FP32 else FP32, master, states), True
    yield "AdamW plain", Spec(passes_of(plain), FP32, FP32), False
    yield "AdamW plain", Spec(passes_of(plain), BF16, BF16), False


def group_of_adamw() -> dict[str, Any]:
    return CASES[0].ours([torch.nn.Parameter(torch.zeros(1))]).param_groups[0]


@triton.jit(do_not_specialize=["divisor"])
def quotients_alone(source_ptr, target_ptr, divisor, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(target_ptr + offsets, tl.div_rn(tl.load(source_ptr + offsets), divisor))


# -- compiling ---------------------------------------------------------------------------------------------------------


def compile_step(spec: Spec, aligned: bool, target: GPUTarget, kernel: Any = triton_step.step_kernel) -> Any:
    """Of a launch over one block."""
    streams = Streams(
        stream(spec.param.storage).view(spec.param.dtype),
        stream(spec.master.storage) if spec.has_master and spec.master is not None else None,
        tuple(stream(each.storage) for each in spec.states),
        tuple(stream(torch.float32) if isinstance(each, BlockFormat) else None for each in spec.states),
    )
    scalars = torch.zeros(1, len(spec.scalars))
    noise = torch.zeros(1, 4, dtype=torch.int32) if spec.needs_noise else None
    with patch.object(triton_step, "step_kernel", kernel):
        return compiled_by(
            kernel, target, lambda: triton_step.run(spec, 0, streams, Tables(tables(aligned), scalars, noise=noise))
        )


def stream(dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(BLOCK, dtype=dtype)


def tables(aligned: bool = True) -> Gradients:
    return Gradients(torch.zeros(1, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int64), aligned)


def compile_reduction(kernel: Any, grad: Format, target: GPUTarget) -> Any:
    if kernel is triton_reductions.totals_kernel:
        totals = new_totals(1, torch.device("cpu"))
        return compiled_by(kernel, target, lambda: triton_reductions.add_totals(grad, tables(), Factors(), totals))
    count = torch.zeros(1, dtype=torch.int64)
    return compiled_by(kernel, target, lambda: triton_reductions.count_nonfinite(grad, tables(), count))


def compile_margins(kernel: Any, grad: Format, target: GPUTarget) -> Any:
    """One of the kernels that add up squares over rows and columns, of a param with bands and of one without."""
    pieces = []
    for shape in ((3, 700), (5, 7)):
        sums = [torch.zeros(size, dtype=torch.float64) for size in shape]
        grads = torch.zeros(shape[0] * shape[1], dtype=grad.dtype)
        pieces.append(MarginPiece(grads, 0, geometry_of(shape, (shape[1], 1)), *sums))
    with ExitStack() as stack:
        for other in MARGIN_KERNELS:
            if other is not kernel:
                stack.enter_context(patch.object(other, "run", lambda *_, **__: None))
        return compiled_by(kernel, target, lambda: triton_margins.add_margin_sums(pieces, Factors()))


def facts_of_quotients(target: GPUTarget) -> dict[str, Any]:
    """Of the quotients, by one number, of as many blocks as a program sums up."""
    numel = triton_reductions.BLOCKS_PER_PROGRAM * BLOCK
    numbers = torch.zeros(numel), torch.zeros(numel), 3.0
    launch = lambda: quotients_alone[(1,)](*numbers, BLOCK=numel, **OPTIONS)  # noqa: E731
    return facts(compiled_by(quotients_alone, target, launch), target)


def compiled_by(kernel: Any, target: GPUTarget, launch: Callable[[], Any]) -> Any:
    """The kernel that a launch compiles on this target; nothing is started."""
    triton.runtime.driver.set_active(TargetDriver(target))
    found: list[Any] = []

    def warm_up(*arguments: Any, warmup: bool, **keywords: Any) -> None:
        found.append(type(kernel).run(kernel, *arguments, warmup=True, **keywords))

    with patch.object(kernel, "run", warm_up):
        launch()
    return found[0]


# -- reading what was compiled -----------------------------------------------------------------------------------------


def facts(kernel: Any, target: GPUTarget) -> dict[str, Any]:
    found = {"narrow_offsets": narrow_offsets(kernel.asm["ttir"]), "shared": kernel.metadata.shared}
    if target.backend == "cuda":
        return found | ptx_facts(kernel.asm["ptx"]) | {"cubin": kernel.asm["cubin"]}
    return found | amdgcn_facts(kernel.asm["amdgcn"])


def ptx_facts(ptx: str) -> dict[str, Any]:
    return {
        "memory": Counter(re.findall(r"\b(?:ld|st)\.global(?:\.v\d)?\.b\d+", ptx)),
        "other_memory": sorted(set(re.findall(r"\b(?:ld|st|atom|red|cp)\.(?!global|param|shared)\S+", ptx))),
        "roots_and_quotients": sorted(set(re.findall(r"\b(?:div|sqrt|rcp|rsqrt)\.\S+", ptx))),
        "quotients": len(re.findall(r"\bdiv\.rn\.f32", ptx)),
        "fused": sorted(set(re.findall(r"\b(?:fma|mad)\.\S*f\d+\S*", ptx))),
        "flushed": sorted(set(re.findall(r"\b\w+\.(?:\w+\.)*ftz\S*", ptx))),
    }


def add_machine_code(kernels: list[dict[str, Any]], target: GPUTarget) -> None:
    """Registers a thread and spills, as the driver would see them; fused operations. Of HIP the assembly says it."""
    if target.backend != "cuda":
        return
    for kernel, code in zip(kernels, read([each.pop("cubin") for each in kernels], target.arch), strict=True):
        names = Counter(each.name.split(".")[0] for each in code.instructions)
        kernel["registers"] = code.registers
        kernel["spilled"] = code.spilled + names["STL"] + names["LDL"]
        kernel["machine_fused"] = names["FFMA"]


def amdgcn_facts(text: str) -> dict[str, Any]:
    def number(name: str) -> int:
        found = re.search(rf"{name}:?\s+(\d+)", text)
        assert found, f"{name} is not in the assembly"
        return int(found.group(1))

    return {
        "memory": Counter(re.findall(r"\b(?:global|buffer)_(?:load|store)_\w+", text)),
        "registers": number(r"\.vgpr_count"),
        "spilled": number(r"\.vgpr_spill_count")
        + number(r"\.sgpr_spill_count")
        + number(r"\.private_segment_fixed_size"),
        "machine_fused": len(re.findall(r"\bv_(?:pk_)?(?:fma|mad|fmac|mac)_(?:f32|legacy_f32)", text)),
        "quotients": len(re.findall(r"\bv_div_fixup_f32", text)),
        "denormals": number(r"\.amdhsa_float_denorm_mode_32"),  # 3: kept
    }


def narrow_offsets(ttir: str) -> list[str]:
    """Sums and products of fewer than 64 bits that an address is computed from, followed back to where data begins."""
    made_by = dict(re.findall(r"^\s*(%[\w.#]+)(?::\d+)? = (.*)$", ttir, re.MULTILINE))
    wrong: dict[str, None] = {}

    def follow(name: str, seen: set[str]) -> None:
        text = made_by.get(name)
        if text is None or name in seen:
            return
        seen.add(name)
        operation = text.split()[0]
        if operation in ("tt.load", "arith.constant", "tt.make_range", "tt.get_program_id"):
            return
        kind = re.sub(r" loc\(.*", "", text).rsplit(":", 1)[-1]
        if operation in ("arith.muli", "arith.addi", "arith.subi", "arith.shli") and "i64" not in kind:
            wrong[f"{name} = {operation} : {kind.strip()}"] = None
        for operand in re.findall(r"%[\w.#]+", text.split(" loc(")[0]):
            follow(operand, seen)

    addresses = [name for name, text in made_by.items() if text.startswith("tt.addptr")]
    assert addresses
    for name in addresses:
        follow(name, set())
    return list(wrong)


# -- a kernel that is wrong on purpose ---------------------------------------------------------------------------------


def mutant_kernel(folder: Path) -> Any:
    """The step kernel with offsets of 32 bits."""
    source = inspect.getsource(triton_step)
    changed = source.replace("tl.program_id(0).to(tl.int64)", "tl.program_id(0)")
    assert changed != source
    path = folder / "mutant.py"
    path.write_text(changed)
    found = importlib.util.spec_from_file_location("shardopt.kernels.mutant", path)
    assert found and found.loader
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module.step_kernel


# -- launches ----------------------------------------------------------------------------------------------------------


class TargetDriver(NoDriver):
    """One for each target, as Triton keeps what it compiled by the number of the device."""

    def get_current_device(self) -> int:
        return [*TARGETS.values()].index(self._target)


class Launches:
    """Takes a kernel's launches: compiles what a real one would compile, notes the grid, starts nothing."""

    def __init__(self, kernel: Any) -> None:
        self.grids: list[tuple[int, ...]] = []
        self.compiled: list[str] = []  # one entry a launch
        self.options: list[dict[str, Any]] = []
        self._run = kernel.run
        kernel.run = self

    def __call__(self, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        self.grids.append(grid)
        self.options.append({name: keywords.get(name) for name in OPTIONS})
        self.compiled.append(self._run(*arguments, grid=grid, warmup=True, **keywords).hash)


def launch_facts() -> dict[str, Any]:
    """Launches of every size with every number changed: how many kernels, which grids."""
    triton.runtime.driver.set_active(TargetDriver(TARGETS["sm_90"]))
    case = CASES[0]
    spec = Spec(passes_of(case.rule.variant(group_of_adamw())), BF16, BF16)
    steps, sums = Launches(triton_step.step_kernel), Launches(triton_reductions.totals_kernel)
    counts = Launches(triton_reductions.count_nonfinite_kernel)
    sizes = [1, 2, 3, 4, 5, 16, 17, 1024, 4096]
    for index, num_blocks in enumerate(sizes):
        numel = num_blocks * BLOCK
        streams = Streams(
            torch.zeros(numel, dtype=torch.bfloat16), torch.zeros(numel), (torch.zeros(numel), torch.zeros(numel))
        )
        num_rows = 1 + index
        gradients = Gradients(
            torch.zeros(num_blocks, dtype=torch.int32), torch.zeros((num_rows, 2), dtype=torch.int64), True
        )
        scalars = torch.full((num_rows, len(spec.scalars)), float(index))
        # With a float at first, then with ints too.
        factors = Factors() if index == 0 else Factors(1, 2.0**-index, 1 + index)
        triton_backend.run(spec, 0, streams, Tables(gradients, scalars, factors))
        totals = new_totals(num_rows, torch.device("cpu"))
        triton_backend.add_totals(BF16, gradients, factors._replace(divisor=1.0 if index == 0 else 1 + index), totals)
        triton_backend.count_nonfinite(BF16, gradients, torch.zeros(1, dtype=torch.int64))
    return {
        "sizes": sizes,
        "blocks_per_program": 1,
        "blocks_summed_per_program": triton_reductions.BLOCKS_PER_PROGRAM,
        "step_grids": steps.grids,
        "sums_grids": sums.grids,
        "counts_grids": counts.grids,
        "step_kernels": len(set(steps.compiled)),
        "sums_kernels": len(set(sums.compiled)),
        "counts_kernels": len(set(counts.compiled)),
        "wrong_options": [each for each in steps.options + sums.options + counts.options if each != OPTIONS],
    }


def label_of(label: str, spec: Spec, aligned: bool) -> str:
    kept = [] if "kept" not in label else [spec.master, *spec.states]
    names = [spec.param.name, spec.grad.name, *("-" if each is None else each.name for each in kept)]
    return " ".join([label, *names, *["unaligned"][aligned:]])


def itemsizes(spec: Spec, verb: str, aligned: bool) -> list[int]:
    """Bytes of an element of every stream that one pass reads or writes whole."""
    found = [spec.param.itemsize, *(each.itemsize for each in spec.states)]
    if spec.has_master and spec.master is not None:
        found.append(spec.master.itemsize)
    if verb == "load" and aligned:
        found.append(spec.grad.itemsize)
    return found


def drawn(name: str, whole: bool) -> list[tuple[str, Spec, bool]]:
    """All specs; or every third one, so that each is compiled for one target, and what AdamW is in fp32 for all."""
    first = list(TARGETS).index(name)
    return [each for number, each in enumerate(specs()) if whole or number == 0 or number % len(TARGETS) == first]


def drawn_reductions(name: str, whole: bool) -> list[tuple[Any, Format]]:
    """Each reduction for each dtype of gradients; or so many that every two of target, reduction and dtype meet."""
    first, kernels = (
        list(TARGETS).index(name),
        (triton_reductions.totals_kernel, triton_reductions.count_nonfinite_kernel),
    )
    grads = (FP32, BF16, FP16)
    if whole:
        return [(kernel, grad) for kernel in kernels for grad in grads]
    return [(kernels[turn // 2], grads[(first + turn) % 3]) for turn in range(3)]


def facts_of(name: str, whole: bool) -> dict[str, Any]:
    """All that is asked of one target."""
    target, kernels, reductions = TARGETS[name], [], []
    for label, spec, aligned in drawn(name, whole):
        threads = triton_step.NUM_WARPS * target.warp_size
        kernels.append(
            {
                "label": label_of(label, spec, aligned),
                "target": name,
                "elements": BLOCK // threads,  # a thread
                "streams": {verb: itemsizes(spec, verb, aligned) for verb in ("load", "store")},
                "scales": sum(isinstance(each, BlockFormat) for each in spec.states),
                **facts(compile_step(spec, aligned, target), target),
            }
        )
    for kernel, grad in drawn_reductions(name, whole):
        reductions.append(
            {
                "label": f"{kernel.fn.__name__} {grad.name}",
                "target": name,
                "elements": triton_reductions.BLOCKS_PER_PROGRAM
                * BLOCK
                // (triton_reductions.NUM_WARPS * target.warp_size),
                **facts(compile_reduction(kernel, grad, target), target),
            }
        )
    margins = [
        {"label": kernel.fn.__name__, "target": name, **facts(compile_margins(kernel, FP32, target), target)}
        for kernel in MARGIN_KERNELS
    ]
    quotients = facts_of_quotients(target)
    add_machine_code([*kernels, *reductions, *margins, quotients], target)
    return {
        "kernels": kernels,
        "reductions": reductions,
        "margins": margins,
        "fused_in_quotients": {name: quotients["machine_fused"]},
    }


def main(folder: Path, whole: bool) -> None:
    # Compiling is most of the time, and one core's: a process for each target, as far as there are cores.
    workers = min(len(TARGETS), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:  # nothing has run yet
        targets = pool.map(facts_of, TARGETS, [whole] * len(TARGETS))
        plain = next(spec for label, spec, _ in specs() if label == "AdamW plain")
        mutant = compile_step(plain, True, TARGETS["sm_90"], mutant_kernel(folder))
        found: dict[str, Any] = {"mutant": narrow_offsets(mutant.asm["ttir"]), "launches": launch_facts()}
        kernels, reductions, margins, fused = zip(*(each.values() for each in targets), strict=True)
    found["kernels"], found["reductions"], found["margins"] = (
        [*chain(*each)] for each in (kernels, reductions, margins)
    )
    found["fused_in_quotients"] = {name: count for each in fused for name, count in each.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "whole")
