"""Predict the kernels' speed on an H100 from their machine code. Nothing is executed: a prediction, not a measurement.

    PYTHONPATH=. python bench/gpu_model.py             every kernel, compiled for sm_90; no GPU is needed

A kernel is compiled as a launch compiles it and its machine code is read: registers, and the instructions that a warp
executes on its main path (``tests/support/machine_code.py``). A block of 256 elements then takes the longest of

* memory: its bytes at the rate of a copy,
* issue: its instructions, of which a multiprocessor issues 4 a clock, at best in 80 % of its clocks,
* units: those of integers have half as many lanes as those of fp32, those of roots and conversions an eighth,
* latency: three loads in a row (the row of the block, the row's end, the streams), then the instructions, shared by the
  warps that the registers leave room for.

``of copy`` is the first over the longest. It says what a kernel can reach, so that a kernel that cannot is seen before
there is a GPU; what it does reach, ``bench/kernels.py`` measures on one. Not in it: caches, the clock under load, the
first and the last wave, launches. The committed result is also what ``tests/kernels/test_machine_code.py`` holds the
kernels to, so run this again when a kernel changes.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from common import bytes_per_element, parser_of, show, write_result

from shardopt.kernels.spec import Spec
from shardopt.kernels.tables import BLOCK
from tests.support.compile_targets import itemsizes
from tests.support.lowered import Lowered, lowered_kernels


@dataclass(frozen=True)
class Gpu:
    """What the model knows of a GPU: vendor's numbers, but for the last three."""

    name: str = "H100 SXM"
    multiprocessors: int = 132
    clock: float = 1.755  # GHz
    registers: int = 65536  # of a multiprocessor
    blocks: int = 32  # of threads, a multiprocessor
    issued: float = 4.0  # instructions of a warp a clock, as the next ones
    fp32: float = 4.0
    integer: float = 2.0
    special: float = 0.5
    memory: float = 1.0
    copy: float = 3000.0  # GB/s, read and written: what copies reach there
    latency: float = 800.0  # ns, of a load under load
    efficiency: float = 0.8  # of the clocks that a kernel of this kind fills: 0.75 to 0.85 are usual

    @property
    def bytes_a_ns(self) -> float:
        return self.copy / self.multiprocessors

    @property
    def instructions_a_ns(self) -> float:
        return self.clock * self.efficiency


@dataclass(frozen=True)
class Prediction:
    kernel: str
    registers: int
    warps: int  # a multiprocessor
    instructions: int  # of a warp on the main path
    instructions_an_element: float  # of a lane
    units: dict[str, int]  # the same by unit
    bytes_an_element: float
    in_flight: float  # KiB a multiprocessor
    issue: float  # of copy
    integer: float
    latency: float
    of_copy: float
    bound: str


def bytes_of(kernel: Lowered) -> tuple[float, int]:
    """Bytes of an element that a kernel moves, its row included; those of them that a warp has under way at a time."""
    row = 4 / BLOCK
    if isinstance(kernel.of, Spec):
        return bytes_per_element(kernel.of) + row, sum(itemsizes(kernel.of, "load", True))
    return kernel.of.itemsize + row, kernel.of.itemsize


def predict(kernel: Lowered, gpu: Gpu) -> Prediction:
    """Times are in ns for the blocks of one program on one multiprocessor."""
    elements = kernel.blocks * BLOCK
    registers = -(-kernel.registers // 8) * 8
    warps = min(gpu.blocks, gpu.registers // (registers * 32))
    instructions = sum(kernel.units.values())
    moved, loaded = bytes_of(kernel)
    memory = elements * moved / gpu.bytes_a_ns
    lanes = {"fp32": gpu.fp32, "integer": gpu.integer, "special": gpu.special, "memory": gpu.memory}
    times = {unit: kernel.units.get(unit, 0) / rate / gpu.instructions_a_ns for unit, rate in lanes.items()}
    times["issue"] = instructions / gpu.issued / gpu.instructions_a_ns
    # A warp by itself issues every second clock.
    times["latency"] = (3 * gpu.latency + 2 * instructions / gpu.clock) / warps
    bounds = {name: min(1.0, memory / time) for name, time in times.items() if time}
    least = min(bounds, key=lambda name: bounds[name])
    return Prediction(
        kernel.label,
        kernel.registers,
        warps,
        instructions,
        round(instructions * 32 / elements, 2),
        kernel.units,
        round(moved, 3),
        round(warps * elements * loaded / 1024, 1),
        *(round(bounds.get(name, 1.0), 3) for name in ("issue", "integer", "latency")),
        round(bounds[least], 3),
        least if bounds[least] < 1 else "memory",
    )


def main() -> None:
    parser = parser_of(__doc__ or "")
    args = parser.parse_args()
    gpu = Gpu()
    rows = [predict(kernel, gpu) for kernel in lowered_kernels()]
    rows.sort(key=lambda row: row.of_copy)
    show(
        f"{gpu.name}, predicted from machine code; nothing was executed",
        ("kernel", "registers", "warps", "instructions an element", "bytes", "in flight KiB", "of copy", "bound by"),
        [
            (
                row.kernel,
                str(row.registers),
                str(row.warps),
                f"{row.instructions_an_element:.1f}",
                f"{row.bytes_an_element:.2f}",
                f"{row.in_flight:.0f}",
                f"{100 * row.of_copy:.0f} %",
                row.bound,
            )
            for row in rows
        ],
    )
    results: dict[str, Any] = {
        "prediction": "computed from machine code for sm_90; no GPU was used",
        "gpu": asdict(gpu),
        "rows": [asdict(row) for row in rows],
    }
    write_result("gpu-model", args, torch.device("cpu"), results)


if __name__ == "__main__":
    main()
