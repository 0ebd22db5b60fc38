"""States on a disk: how near a step comes to what the disk can do, and what offloading costs a whole training step.

    python bench/offload.py --directory /nvme              256M elements: a file of 6 GiB
    python bench/offload.py --elements 64                  on a small disk
    python bench/offload.py --only disk                    the disk step alone, or peak, moves, training

* The disk step: `optimizer.step()` of AdamW on one bf16 param, with fp32 master and states in a file, as bytes read and
  written over time. Beside it, in turn with it, a loop that does nothing but move the same bytes in the same file:
  direct I/O, sequential, each transfer as long as one of the step's, at every number of requests in flight,
  reading one copy and writing the other in turn ("mixed") or first all of this and then all of that ("apart"). The one
  that moved most in this run is the 100 %.
* The peak: resident memory of a process that steps from the disk, read by another one, above that of the same process
  with its params and gradients alone; at several sizes of the model.
* The moves: `offload()` and `reload()` of masters and states, to the directory, or on a GPU to host memory, as bytes
  over time, and a step from there (`--device cuda`: nothing else is measured then).
* The training step: stage 2 in bf16 on 2 ranks (bench/train.py's model and engines), states in memory and on the disk
  of the system's temporary directory, and DeepSpeed where it is installed.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import train
from common import (
    Median,
    describe_machine,
    median_of,
    parser_of,
    pick_device,
    ratios,
    seconds_of,
    show,
    write_result,
)
from engines import ENGINES
from torch.nn import Parameter
from tqdm import tqdm

from shardopt import ShardedAdamW, Tuning
from shardopt.offload.disk.pipeline import SLOTS
from shardopt.offload.disk.store import DiskStore

MI = 1 << 20
BYTES_AN_ELEMENT = 12  # master and two states, read and written once each
DEPTHS = (1, 2, 4, 8, 12)  # requests in flight
PATTERNS = ("mixed", "apart")


class Plain:
    """Direct transfers in the file of a store, through its memory, in the order of the file, and nothing else.

    They are those of a step: what holds is read, and the other copy of it, which holds nothing, is written. A file and
    memory of its own would not do: of two files that differ in nothing, one was seen to be a third faster, and of two
    buffers one 2.5 times, as the virtual machine's own host happens to hold them.
    """

    def __init__(self, store: DiskStore, transfer: int):
        self._store, self._file = store, store.segments._file
        slots = store.pipeline._free
        self._buffers = [part.memory for slot in slots for part in slot.parts([transfer] * (slot.nbytes // transfer))]
        assert len(self._buffers) >= max(DEPTHS)
        self.is_direct = self._file.is_direct

    def seconds(self, pattern: str, depth: int) -> float:
        pairs = [
            ((self._file.read, segment.at(held.copy)), (self._file.write, segment.at(1 - held.copy)))
            for segment, held in sorted(self._store.segments._held.items())
            if held is not None
        ]
        if pattern == "apart":
            calls = [read for read, _ in pairs] + [write for _, write in pairs]
        else:
            calls = [call for pair in pairs for call in pair]
        ordered = iter(zip(cycle(self._buffers), calls, strict=False))  # its next() is atomic under the GIL

        def move(_: int) -> None:
            for buffer, (call, offset) in ordered:
                call(buffer, offset)

        with ThreadPoolExecutor(depth) as pool:
            start = time.perf_counter()
            list(pool.map(move, range(depth)))
            return time.perf_counter() - start

    def read_rates(self, most: int = 64) -> list[float]:
        """GB/s of reading the same segments, one request in flight, through each of the buffers by itself."""
        held = [(segment, held) for segment, held in sorted(self._store.segments._held.items()) if held is not None]
        offsets = [segment.at(each.copy) for segment, each in held[:most]]
        rates = []
        for buffer in self._buffers:
            start = time.perf_counter()
            for offset in offsets:
                self._file.read(buffer, offset)
            rates.append(len(offsets) * len(buffer) / 1e9 / (time.perf_counter() - start))
        return rates


def measure_disk(args: argparse.Namespace) -> dict[str, Any]:
    numel = args.elements * MI
    param = Parameter(torch.zeros(numel, dtype=torch.bfloat16))
    param.grad = torch.ones_like(param)
    tuning = Tuning(chunk_bytes=args.chunk * MI, nonfinite="propagate")
    optimizer = ShardedAdamW([param], lr=1e-3, offload=args.directory, tuning=tuning)
    for _ in range(2):
        optimizer.step()  # the second one writes to blocks that were never written as well
    assert optimizer.engine.domain is not None and isinstance(optimizer.engine.domain.store, DiskStore)
    plain = Plain(optimizer.engine.domain.store, args.chunk * MI)
    steps: list[float] = []
    ways = [(pattern, depth) for pattern in PATTERNS for depth in DEPTHS]
    plains: dict[tuple[str, int], list[float]] = {way: [] for way in ways}
    for _ in tqdm(range(args.rounds), desc="disk", unit="round", disable=None):
        for number, way in enumerate(ways):
            plains[way].append(plain.seconds(*way))
            if number == len(ways) // 2:
                start = time.perf_counter()
                optimizer.step()
                steps.append(time.perf_counter() - start)
    memory, read_rates = optimizer.memory(), plain.read_rates()
    in_memory = in_memory_step(numel, args.rounds)
    optimizer.close()
    moved = 2 * BYTES_AN_ELEMENT * numel / 1e9
    best = min(ways, key=lambda way: median_of(plains[way]).median)
    return {
        "elements": numel,
        "direct": plain.is_direct,
        "step GB/s": median_of([moved / each for each in steps]),
        "plain GB/s": {
            f"{pattern}, {depth} in flight": median_of([moved / each for each in seconds])
            for (pattern, depth), seconds in plains.items()
        },
        "best": f"{best[0]}, {best[1]} in flight",
        "plain read GB/s, by buffer": read_rates,
        "of plain": ratios(plains[best], steps),
        "step s": median_of(steps),
        "step in memory s": in_memory,
        "buffers MB": memory["buffer"]["host"] / 1e6,
        "chunk of all states MB": 3 * args.chunk * MI / 1e6,
        "low-precision shard MB": 2 * numel / 1e6,
    }


def in_memory_step(numel: int, rounds: int) -> Median:
    param = Parameter(torch.zeros(numel, dtype=torch.bfloat16))
    param.grad = torch.ones_like(param)
    optimizer = ShardedAdamW([param], lr=1e-3, tuning=Tuning(nonfinite="propagate"))
    seconds = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    return median_of(seconds[1:])


PEAK = """
import sys, torch
from shardopt import ShardedAdamW, Tuning
from shardopt.partition.memory import return_free_pages
numel, chunk, root = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
def trained(numels):
    params = [torch.nn.Parameter(torch.ones(each, dtype=torch.bfloat16)) for each in numels]
    for param in params:
        param.grad = torch.ones_like(param)
    return params, ShardedAdamW(params, offload=root, tuning=Tuning(chunk_bytes=chunk, nonfinite="propagate"))
trained([1])[1].step()  # compiles
params, optimizer = trained([min(1 << 24, numel - start) for start in range(0, numel, 1 << 24)])
return_free_pages()
print("ready", flush=True)
sys.stdin.readline()
for _ in range(3):
    optimizer.step()
print(sum(optimizer.memory()["buffer"].values()), flush=True)
sys.stdin.readline()
"""


def measure_peak(args: argparse.Namespace) -> dict[str, Any]:
    """By elements of the model."""
    found = {}
    for elements in (args.elements // 4, args.elements, 3 * args.elements):
        numel, chunk = elements * MI, args.chunk * MI
        command = [sys.executable, "-c", PEAK, str(numel), str(chunk), str(args.directory)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None and process.stdout is not None
            process.stdout.readline()
            before = _status(process.pid, "VmRSS")
            Path(f"/proc/{process.pid}/clear_refs").write_text("5")  # the peak begins anew
            print(file=process.stdin, flush=True)
            told = int(process.stdout.readline())
            peak = _status(process.pid, "VmHWM") - before
        found[f"{elements}M"] = {
            "params and gradients MB": 4 * numel / 1e6,
            "states in the file MB": BYTES_AN_ELEMENT * numel / 1e6,
            "peak above MB": peak / 1e6,
            "6 chunks MB": 6 * 3 * chunk / 1e6,
            "low-precision shard MB": 2 * numel / 1e6,
            "of these two": peak / (6 * 3 * chunk + 2 * numel),
            "memory() says MB": told / 1e6,
        }
    return found


def _status(pid: int, name: str) -> int:
    """Bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def measure_moves(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    numel = args.elements * MI
    params = [Parameter(torch.ones(1 << 24, dtype=torch.bfloat16, device=device)) for _ in range(numel >> 24)]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = ShardedAdamW(params, lr=1e-3, tuning=Tuning(chunk_bytes=args.chunk * MI, nonfinite="propagate"))

    for _ in range(2):
        optimizer.step()
    to = "cpu" if device.type == "cuda" else args.directory
    calls: dict[str, Callable[[], Any]] = {
        "step, states on the device": optimizer.step,
        "offload": lambda: optimizer.offload(to),
        "step, states offloaded": optimizer.step,
        "reload": optimizer.reload,
    }
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in tqdm(range(args.rounds), desc="moves", unit="round", disable=None):
        for name, call in calls.items():
            found[name].append(seconds_of(call, device))
    optimizer.close()
    moved = {"offload": 1, "reload": 1, "step, states offloaded": 2}  # times all masters and states
    nbytes = BYTES_AN_ELEMENT * (numel >> 24 << 24) / 1e9
    return {
        "to": "host memory" if device.type == "cuda" else "disk",
        "masters and states GB": nbytes,
        "s": {name: median_of(each) for name, each in found.items()},
        "GB/s": {name: median_of([times * nbytes / each for each in found[name]]) for name, times in moved.items()},
    }


def show_moves(found: dict[str, Any]) -> None:
    rows = [[name, str(each), str(found["GB/s"].get(name, ""))] for name, each in found["s"].items()]
    title = f"{found['masters and states GB']:.2f} GB of masters and states, to {found['to']} and back"
    show(title, ("what", "s", "GB/s moved"), rows)


def measure_training(args: argparse.Namespace) -> dict[str, Any]:
    command = ["train", "--dtype", "bf16", "--rounds", str(args.rounds), "--engines", *args.engines]
    sys.argv = command
    options = train.parse_args()
    settings = train.settings_of(options)
    with torch.device("meta"):
        numel = sum(param.numel() for param in settings.model().parameters())
    teams, failed = train.run_rounds(options, settings)
    by_name = {team.name: team for team in teams}
    base = by_name["module-2"]
    return {
        "params": numel,
        "engines": {
            name: {
                "title": ENGINES[name].title,
                "step s": median_of(team.seconds("step")),
                "optimizer s": median_of(team.seconds("update")),
                "step x in memory": ratios(team.seconds("step"), base.seconds("step")),
                "peak bytes a param": train.largest(team.reports, "peak", numel),
                "last loss": team.reports[0]["losses"][-1],
            }
            for name, team in by_name.items()
        },
        "not run": {name: reason.splitlines()[-1] for name, reason in failed.items()},
    }


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__ or "")
    parser.add_argument("--elements", type=int, default=256, help="of the disk step, in units of 2**20")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="where the files are made")
    parser.add_argument("--chunk", type=int, default=4, help="MiB of one state in a chunk: of one transfer")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each")
    parser.add_argument("--only", choices=("disk", "peak", "moves", "training"), help="this alone")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the params that move")
    parser.add_argument(
        "--engines",
        nargs="*",
        default=["module-2", "module-2-cpu", "module-2-disk", "deepspeed-2-offload"],
        help="of the training step",
    )
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.elements = min(args.rounds, 3), min(args.elements, 16)
    for name in ("elements", "chunk", "rounds"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if args.device == "cuda" and args.only not in (None, "moves"):
        parser.error("on a GPU the moves are measured, and nothing else")
    if args.engines and "module-2" not in args.engines:
        args.engines = ["module-2", *args.engines]  # the 1.0
    return args


def show_peak(found: dict[str, Any]) -> None:
    show(
        "resident memory while stepping from the disk, above params and gradients; read from outside",
        ("elements", "states MB", "above MB", "6 chunks and a low-precision shard MB", "of these"),
        [
            [
                elements,
                f"{each['states in the file MB']:.0f}",
                f"{each['peak above MB']:.0f}",
                f"{each['6 chunks MB'] + each['low-precision shard MB']:.0f}",
                f"{each['of these two']:.3f}",
            ]
            for elements, each in found.items()
        ],
    )


def show_disk(disk: dict[str, Any], args: argparse.Namespace, device: torch.device) -> None:
    where = describe_machine(device)["device"]
    rows = [
        ["step, states on disk", str(disk["step GB/s"]), str(disk["of plain"])],
        *([f"plain direct I/O, {way}", str(rate), ""] for way, rate in disk["plain GB/s"].items()),
    ]
    title = f"{where}; AdamW of {args.elements}M bf16 params, {args.chunk} MiB a transfer"
    show(title, ("what", "GB/s read and written", "of the best"), rows)
    print(
        f"step {disk['step s']} s, in memory {disk['step in memory s']} s; buffers {disk['buffers MB']:.0f} MB: "
        f"{SLOTS} chunks of {disk['chunk of all states MB']:.0f} MB and a low-precision shard of "
        f"{disk['low-precision shard MB']:.0f}"
    )
    rates = disk["plain read GB/s, by buffer"]
    print(
        f"plain reads of the same bytes through each of the step's buffers: {min(rates):.2f} to {max(rates):.2f} GB/s"
    )


def show_training(trained: dict[str, Any]) -> None:
    show(
        f"a training step of {trained['params'] / 1e6:.1f}M params, stage 2, bf16, 2 ranks",
        ("engine", "step ms", "x in memory", "optimizer ms", "peak B/param", "loss"),
        [
            [
                each["title"],
                f"{1e3 * each['step s'].median:.4g}",
                str(each["step x in memory"]),
                f"{1e3 * each['optimizer s'].median:.3g}",
                f"{each['peak bytes a param'] or 0:.1f}",
                f"{each['last loss']:.4f}",
            ]
            for each in trained["engines"].values()
        ],
    )


def main() -> None:
    args = parse_args()
    device = pick_device(args.device)
    parts: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[dict[str, Any]], None]]] = {
        "moves": (lambda: measure_moves(args, device), show_moves)
    }
    if device.type == "cpu":
        parts["peak"] = (lambda: measure_peak(args), show_peak)
        parts["disk"] = (lambda: measure_disk(args), lambda found: show_disk(found, args, device))
        if args.engines:
            parts["training"] = (lambda: measure_training(args), show_training)
    results: dict[str, Any] = {}
    for name, (measure, tell) in parts.items():
        if args.only in (None, name):
            results[name] = measure()
            tell(results[name])
    write_result("offload" + (f"-{args.only}" if args.only else ""), args, device, results)


if __name__ == "__main__":
    main()
