"""Host time that stage 3 adds to a tiny model, beside FSDP2: what hooks, bookkeeping and calls cost when nothing moves.

    python bench/hooks.py              a block of two linears of width 16 in a fake group of 8 ranks, one process

The group is torch's fake one: its collectives return at once, so that only the host's own work is left. Each engine
takes forward, backward and step in turns of a few hundred; `added` is what a turn takes beyond the plain model's with
torch's fused AdamW, of the same round.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from common import Median, device_name, median_of, parser_of, ratios, show, write_result
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from tqdm import tqdm

import shardopt

RANKS = 8
Step = Callable[[], None]


def block(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))


def stepping(model: nn.Module, optimizer: torch.optim.Optimizer, width: int) -> Step:
    inputs = torch.ones(4, width)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()

    return step


def plain(width: int) -> Step:
    model = block(width)
    return stepping(model, torch.optim.AdamW(model.parameters(), fused=True), width)


def fsdp2(width: int) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = block(width)
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    return stepping(model, torch.optim.AdamW(model.parameters(), fused=True), width)


def stage_3(width: int) -> Step:
    model = block(width)
    # Everything is sharded; a fake rank has no memory to read, and what it "sends" is anything.
    tuning = shardopt.Tuning(keep_below=0, neighbours=False, nonfinite="propagate")
    return stepping(model, shardopt.ShardedAdamW(model, stage=3, tuning=tuning), width)


ENGINES: dict[str, Callable[[int], Step]] = {
    "plain model, torch fused AdamW": plain,
    "FSDP2, torch fused AdamW": fsdp2,
    "shardopt stage 3": stage_3,
}


def turn(step: Step, steps: int) -> float:
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - start) / steps


def main() -> None:
    parser = parser_of(__doc__ or "")
    parser.add_argument("--width", type=int, default=16, help="of the linears")
    parser.add_argument("--turns", type=int, default=30, help="of each engine")
    parser.add_argument("--steps", type=int, default=200, help="in a turn")
    args = parser.parse_args()
    if args.quick:
        args.turns, args.steps = 5, 50
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    engines = {name: make(args.width) for name, make in ENGINES.items()}
    for step in engines.values():
        turn(step, 20)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for _ in tqdm(range(args.turns), desc="turns", unit="turn", disable=None):
        for name, step in engines.items():
            seconds[name].append(turn(step, args.steps))
    base, *others = seconds
    added = {name: [one - two for one, two in zip(seconds[name], seconds[base], strict=True)] for name in others}
    ratio = ratios(added["shardopt stage 3"], added["FSDP2, torch fused AdamW"])

    def cell(values: list[float]) -> str:
        return str(Median(*(1e6 * each for each in vars(median_of(values)).values() if isinstance(each, float)), 0))

    rows = [[name, f"{1e6 * median_of(seconds[name]).median:.0f}"] for name in seconds]
    for row in rows:
        row.append(f"{1e6 * median_of(added[row[0]]).median:.0f}" if row[0] in added else "")
    show(f"{device_name(torch.device('cpu'))}; forward, backward and step", ("engine", "us", "added us"), rows)
    print(f"added by shardopt over added by FSDP2: {ratio}")
    results: dict[str, Any] = {
        "seconds": {name: median_of(values) for name, values in seconds.items()},
        "added seconds": {name: median_of(values) for name, values in added.items()},
        "added over FSDP2's": ratio,
    }
    write_result("hooks", args, torch.device("cpu"), results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
