"""What AdamW's update costs, and what it keeps, in every format of masters and states.

One launch over one shard: bf16 gradient in, bf16 param out. The yardstick is the same update with fp32 masters and
states, run right before or after; below 1 the shorter format is faster.

    python bench/formats.py                             the GPU where there is one
    python bench/formats.py --quick --elements 4194304  does it run?

Masters that are fp32 `alone` are not compared with their params: `Tuning(compare_masters=False)`.

`bytes` are those that a step reads and writes for each element; `kept` those that rest for each param between steps,
its own 2 and the gradient's 2 included: measured on an optimizer, `opt.memory()` and the gradient, of one rank.
"""

import argparse
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import bytes_per_element, median_of, parser_of, pick_device, ratios, show, write_result
from torch.nn import Parameter
from tqdm import tqdm

import shardopt
from shardopt.config import Options
from shardopt.domain.formats import formats_for
from shardopt.kernels import codecs
from shardopt.kernels.formats import BF16, BF16_RANDOM, FP32, BlockFormat
from shardopt.kernels.launch import backend_of
from shardopt.kernels.spec import Spec
from shardopt.kernels.tables import BLOCK, Gradients, Streams, Tables
from shardopt.rules.passes import passes_of

# "alone": fp32 masters that an update does not compare with their params, as with Tuning(compare_masters=False).
MASTERS = ("fp32", "alone", "split", "split24", "none")
MASTER_OF = {"alone": "fp32"}
STATES = ("fp32", "bf16", "int8")
BASE = ("fp32", "fp32")
SETTLE = 0.01  # seconds before each timed run on a CPU
REPEATS = 10  # on a GPU, which would otherwise wait for Python between two kernels

Run = Callable[[], Any]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--elements", type=int, default=64 << 20, help="of the shard")
    parser.add_argument("--rounds", type=int, default=15, help="pairs")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args()
    if args.quick:
        args.rounds = 3
    args.elements = args.elements // BLOCK * BLOCK
    device = pick_device(args.device)
    grad = torch.randn(args.elements, device=device).mul_(1e-3).bfloat16()
    bases = updates(*BASE, grad)
    copy = copy_speed(args, device)
    rows = []
    for master in MASTERS:
        for states in STATES:
            spec, run = bases if (master, states) == BASE else updates(master, states, grad)
            ours, theirs = interleaved(run, bases[1], args.rounds, device)
            speeds = [bytes_per_element(spec) * args.elements / each / 1e9 for each in ours]
            rows.append(
                {
                    "master": master,
                    "states": states,
                    "ms": median_of([1e3 * each for each in ours]),
                    "x fp32": ratios(ours, theirs),
                    "GB/s": median_of(speeds),
                    "of copy": median_of([1e9 * each / copy for each in speeds]),
                    "bytes": bytes_per_element(spec),
                    "kept": kept_bytes(master, states, device),
                }
            )
    titles = ("master", "states", "ms", "x fp32", "GB/s", "of copy", "bytes", "kept")
    show(f"AdamW, bf16, {args.elements} elements", titles, [[cell(row[title]) for title in titles] for row in rows])
    write_result("formats", args, device, {"copy GB/s": copy / 1e9, "rows": rows})


def cell(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def updates(master: str, states: str, grad: torch.Tensor) -> tuple[Spec, Run]:
    """A shard in these formats, and its update."""
    device, numel = grad.device, grad.numel()
    optimizer = shardopt.ShardedAdamW([Parameter(torch.zeros(1))], lr=1e-3, weight_decay=0.1)
    group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    variant = optimizer.rule.variant(group)
    options = Options(master=MASTER_OF.get(master, master), state_format=states)
    kept = formats_for(optimizer.rule, options, torch.bfloat16, numel)
    formats = tuple(kept.states[name] for name in variant.states)
    param = BF16 if kept.master is not None else BF16_RANDOM
    spec = Spec(passes_of(variant), param, BF16, kept.master, formats, compares=master != "alone")
    values = torch.randn(numel, device=device).mul_(0.02)
    shown = values.bfloat16()
    masters = None
    if kept.master is not None:
        masters = values if kept.master is FP32 else codecs.low_bits_of(values, shown, kept.master)
    streams = Streams(
        shown,
        masters,
        tuple(torch.zeros(numel, dtype=format.dtype, device=device) for format in formats),
        tuple(
            torch.zeros(numel // BLOCK, device=device) if isinstance(format, BlockFormat) else None
            for format in formats
        ),
    )
    rows = torch.tensor([[grad.data_ptr(), numel]], dtype=torch.int64, device=device)
    tables = Gradients(torch.zeros(numel // BLOCK, dtype=torch.int32, device=device), rows, aligned=True)
    scalars, _ = optimizer.rule.evaluate(variant, group, 10, {})
    noise = torch.tensor([[1, 2, 0, 3]], dtype=torch.int32)
    backend = backend_of(device)
    backend.prepare(spec, device, tables.aligned)
    return spec, partial(backend.run, spec, 0, streams, Tables(tables, torch.tensor([scalars]), noise=noise))


def interleaved(run: Run, other: Run, rounds: int, device: torch.device) -> tuple[list[float], list[float]]:
    """Seconds of both, one right after the other, in turns."""
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(2):
        run(), other()  # compiled, and memory touched
    for index in tqdm(range(rounds), leave=False):
        first = [(run, ours), (other, theirs)]
        for each, seconds in first if index % 2 else reversed(first):
            seconds.append(timed(each, device))
    return ours, theirs


def timed(run: Run, device: torch.device) -> float:
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(REPEATS):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / REPEATS
    time.sleep(SETTLE)
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def copy_speed(args: argparse.Namespace, device: torch.device) -> float:
    """Bytes a second, read and written."""
    source = torch.zeros(args.elements, device=device)
    target = torch.empty_like(source)
    seconds = [timed(lambda: target.copy_(source), device) for _ in range(args.rounds + 2)][2:]
    return 2 * source.nbytes / median_of(seconds).median


def kept_bytes(master: str, states: str, device: torch.device) -> float:
    """For each param of a model of two matrices and their biases, between steps of one rank."""
    model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 1024)).to(device, torch.bfloat16)
    optimizer = shardopt.ShardedAdamW(model.parameters(), master=MASTER_OF.get(master, master), state_format=states)
    model(torch.ones(1, 1024, device=device, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    memory = optimizer.memory()
    numel = sum(param.numel() for param in model.parameters())
    nbytes = sum(sum(memory[kind].values()) for kind in ("param", "gradient", "master", "state"))
    optimizer.close()
    return math.ceil(100 * nbytes / numel) / 100


if __name__ == "__main__":
    main()
