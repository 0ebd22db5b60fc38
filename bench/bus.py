"""States in host memory, params on a GPU: how near a step comes to the bus, or to the memory of the host.

    python bench/bus.py                     256M elements, on the GPU
    python bench/bus.py --elements 64

One update of AdamW on bf16 params with fp32 masters and states that rest in host memory, in turn with plain copies:

* `step="gpu"`: masters and states stream through the device. 12 bytes an element each way, over what two streams that
  copy pinned memory at the same time, one to the device and one back, move in this run: the 100 %.
* `step="cpu"`: gradients down, params up, 2 bytes an element each way, and 28 that the CPU reads and writes, over
  `dst.copy_(src)` in host memory (bytes read and written): the 100 %.
* torchao's `CPUOffloadOptimizer` around torch's fused AdamW, where it is installed: the same params, timed with
  the (short) backward in which it copies gradients.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from common import median_of, parser_of, pick_device, ratios, seconds_of, show, write_result
from torch.nn import Parameter
from tqdm import tqdm

from shardopt import Offload, ShardedAdamW, Tuning

MI = 1 << 20
STATES = 12  # bytes an element: master and two states
LOW = 2  # of a param, and of a gradient


def main() -> None:
    args = parse_args()
    device = pick_device(args.device)
    numel = args.elements * MI
    calls = {"copy, both ways": both_ways(numel * STATES // 4, device), "copy, host": host_copy(numel)}
    ways = ("gpu", "cpu") if device.type == "cuda" else ("cpu",)
    for step in ways:
        calls[f"step={step!r}"] = sharded(args, device, step)
    not_run: dict[str, str] = {}
    try:
        calls["torchao"] = torchao(args, device)
    except ImportError as error:
        not_run["torchao"] = str(error)
    seconds = timed(calls, device, args.rounds)
    results = {**summary(args, seconds), "not run": not_run}
    rows = [
        [name, str(each["s"]), str(each["GB/s"]), str(each.get("of", ""))] for name, each in results["ways"].items()
    ]
    show(f"{args.elements}M elements, states in host memory", ("what", "s", "GB/s", "of the copy"), rows)
    write_result("bus", args, device, results)


def both_ways(nbytes: int, device: torch.device) -> Callable[[], Any]:
    """Copies ``nbytes`` of pinned memory to the device, and as many back at the same time."""
    pins = device.type == "cuda"
    up, down = (torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pins) for _ in range(2))
    into, source = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    pairs = ((into, up), (down, source))
    streams = [torch.cuda.Stream(device) if pins else None for _ in pairs]

    def copy() -> None:
        for stream, (to, origin) in zip(streams, pairs, strict=True):
            with torch.cuda.stream(stream):
                to.copy_(origin, non_blocking=True)

    return copy


def host_copy(numel: int) -> Callable[[], Any]:
    source = torch.ones(numel)
    into = torch.zeros_like(source)
    return lambda: into.copy_(source)


def make_params(args: argparse.Namespace, device: torch.device) -> list[Parameter]:
    params = [
        Parameter(torch.ones(1 << 24, dtype=torch.bfloat16, device=device)) for _ in range(args.elements * MI >> 24)
    ]
    for param in params:
        param.grad = torch.full_like(param, 0.5)
    return params


def sharded(args: argparse.Namespace, device: torch.device, step: Any) -> Callable[[], Any]:
    tuning = Tuning(chunk_bytes=args.chunk * MI, nonfinite="propagate")
    return ShardedAdamW(make_params(args, device), lr=1e-3, offload=Offload(step=step), tuning=tuning).step


def torchao(args: argparse.Namespace, device: torch.device) -> Callable[[], Any]:
    from torchao.optim import CPUOffloadOptimizer

    params = make_params(args, device)
    optimizer = CPUOffloadOptimizer(params, torch.optim.AdamW, lr=1e-3, fused=True)

    def step() -> None:
        for param in params:  # its hooks copy gradients as backward makes them
            param.grad = None
        torch.stack([(param.float() * 0.5).sum() for param in params]).sum().backward()
        optimizer.step()

    return step


def timed(calls: dict[str, Callable[[], Any]], device: torch.device, rounds: int) -> dict[str, list[float]]:
    for call in calls.values():  # compiles, allocates
        seconds_of(call, device)
        seconds_of(call, device)
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in tqdm(range(rounds), unit="round", disable=None):
        for name, call in calls.items():
            found[name].append(seconds_of(call, device))
    return found


def summary(args: argparse.Namespace, seconds: dict[str, list[float]]) -> dict[str, Any]:
    numel = args.elements * MI
    # Bytes that count for each, and what they are compared with.
    streamed, touched = 2 * STATES * numel, (2 * STATES + 2 * LOW) * numel
    moved = {
        "copy, both ways": (2 * (numel * STATES // 4), None),
        "copy, host": (8 * numel, None),
        "step='gpu'": (streamed, "copy, both ways"),
        "step='cpu'": (touched, "copy, host"),
        "torchao": (touched, "copy, host"),
    }
    rates = {name: [moved[name][0] / 1e9 / each for each in times] for name, times in seconds.items()}
    ways: dict[str, Any] = {}
    for name, times in seconds.items():
        ways[name] = {"s": median_of(times), "GB/s": median_of(rates[name])}
        beside = moved[name][1]
        if beside is not None:
            ways[name]["of"] = ratios(rates[name], rates[beside])
    over = {name: ratios(seconds["torchao"], times) for name, times in seconds.items() if "torchao" in seconds}
    bus = {"step='gpu'": [STATES, STATES], "step='cpu'": [LOW, LOW]}
    return {"ways": ways, "torchao takes": over, "bytes an element on the bus, down and up": bus}


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__ or "")
    parser.add_argument("--elements", type=int, default=256, help="in units of 2**20, a multiple of 16")
    parser.add_argument("--chunk", type=int, default=4, help="MiB of one state in a chunk")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="cpu: does the script run?")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.elements = min(args.rounds, 3), min(args.elements, 32)
    if args.elements < 16 or args.elements % 16:
        parser.error("--elements must be a multiple of 16, and at least 16")
    return args


if __name__ == "__main__":
    main()
