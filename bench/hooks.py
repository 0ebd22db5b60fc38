"""Host time that stage 3 adds to a tiny model, beside FSDP2: what hooks, bookkeeping and calls cost when nothing moves.

    python bench/hooks.py              blocks of two linears of width 16 in a fake group of 8 ranks, one process

The group is torch's fake one: its collectives return at once, so that only the host's own work is left. Each engine
takes forward, backward and step in turns of a few hundred; `added` is what a turn takes beyond the plain model's with
torch's fused AdamW, of the same round. It is told for one block, and for each of more blocks: the slope.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from common import device_name, median_of, parser_of, ratios, show, write_result
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from tqdm import tqdm

import shardopt

RANKS = 8
FIXED, SLOPE = "added over FSDP2's", "slope over FSDP2's"
Step = Callable[[], None]


@dataclass(frozen=True)
class Size:
    """How large the model is: one block is a container of two linears, several are a container of blocks."""

    width: int
    blocks: int

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        blocks = [
            nn.Sequential(nn.Linear(self.width, self.width), nn.Linear(self.width, self.width))
            for _ in range(self.blocks)
        ]
        return blocks[0] if len(blocks) == 1 else nn.Sequential(*blocks)


def stepping(model: nn.Module, optimizer: torch.optim.Optimizer, width: int) -> Step:
    inputs = torch.ones(4, width)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()

    return step


def plain(size: Size) -> Step:
    model = size.model()
    return stepping(model, torch.optim.AdamW(model.parameters(), fused=True), size.width)


def fsdp2(size: Size) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = size.model(), init_device_mesh("cpu", (RANKS,))
    for block in model if size.blocks > 1 else ():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return stepping(model, torch.optim.AdamW(model.parameters(), fused=True), size.width)


def stage_3(size: Size) -> Step:
    model = size.model()
    # Everything is sharded; a fake rank has no memory to read, and what it "sends" is anything.
    tuning = shardopt.Tuning(keep_below=0, neighbours=False, nonfinite="propagate")
    return stepping(model, shardopt.ShardedAdamW(model, stage=3, tuning=tuning), size.width)


ENGINES: dict[str, Callable[[Size], Step]] = {
    "plain model, torch fused AdamW": plain,
    "FSDP2, torch fused AdamW": fsdp2,
    "shardopt stage 3": stage_3,
}


def turn(step: Step, steps: int) -> float:
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - start) / steps


def measured(sizes: Sequence[Size], turns: int, steps: int) -> dict[Size, dict[str, list[float]]]:
    """Seconds of a step in each turn, of each engine at each size; all take their turns one after the other."""
    engines = {(size, name): make(size) for size in sizes for name, make in ENGINES.items()}
    for step in engines.values():
        turn(step, 20)
    seconds: dict[Size, dict[str, list[float]]] = {size: {name: [] for name in ENGINES} for size in sizes}
    for _ in tqdm(range(turns), desc="turns", unit="turn", disable=None):
        for (size, name), step in engines.items():
            seconds[size][name].append(turn(step, steps))
    return seconds


def added_to(seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    """What a step takes beyond the plain model's of the same turn, of each other engine."""
    base, *others = seconds
    return {name: [one - two for one, two in zip(seconds[name], seconds[base], strict=True)] for name in others}


def main() -> None:
    parser = parser_of(__doc__ or "")
    parser.add_argument("--width", type=int, default=16, help="of the linears")
    parser.add_argument("--blocks", type=int, default=9, help="of the larger model, from which the slope is")
    parser.add_argument("--turns", type=int, default=30, help="of each engine")
    parser.add_argument("--steps", type=int, default=200, help="in a turn")
    args = parser.parse_args()
    if args.quick:
        args.turns, args.steps = 5, 50
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    one, several = Size(args.width, 1), Size(args.width, args.blocks)
    seconds = measured((one, several), args.turns, args.steps)
    fixed, larger = added_to(seconds[one]), added_to(seconds[several])
    slope = {
        name: [(more - less) / (args.blocks - 1) for less, more in zip(fixed[name], larger[name], strict=True)]
        for name in fixed
    }
    ours, theirs = "shardopt stage 3", "FSDP2, torch fused AdamW"
    rows = [
        [
            name,
            *(f"{1e6 * median_of(each[name]).median:.0f}" if name in each else "" for each in (values, fixed, slope)),
        ]
        for name, values in ((name, seconds[one]) for name in ENGINES)
    ]
    columns = ("engine", "one block, us", "added us", "added by each more, us")
    show(f"{device_name(torch.device('cpu'))}; forward, backward and step", columns, rows)
    results: dict[str, Any] = {
        "seconds": {name: median_of(values) for name, values in seconds[one].items()},
        "added seconds": {name: median_of(values) for name, values in fixed.items()},
        FIXED: ratios(fixed[ours], fixed[theirs]),
        "added seconds a block": {name: median_of(values) for name, values in slope.items()},
        SLOPE: ratios(slope[ours], slope[theirs]),
    }
    print(f"added by shardopt over FSDP2: {results[FIXED]}, by each more block: {results[SLOPE]}")
    write_result("hooks", args, torch.device("cpu"), results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
