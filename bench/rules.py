"""What a step of rules that look at whole params costs beside AdamW's, communication included.

One GPT, copied for each optimizer, with one gradient that stays; its params are sharded by stage 1 without the module,
so that `step()` is the update and the gather. Steps of all optimizers take turns, one thread a rank; a row's ratio is
of the pairs of one run.

    python bench/rules.py            2 ranks, and one; rules of whole matrices at 2 and 4
    python bench/rules.py --quick    does it run?

`bytes` are those that its kernels read and write for each element of fp32 params, over AdamW's. Muon takes the matrices
of a narrower GPT, whose products alone are its cost; torch's own is replicated: each rank updates all of them.
"""

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import median_of, parser_of, pick_device, ratios, show, write_result
from gpt import GPT

import shardopt

# Bytes an element: gradient, param and states, each once for every pass that reads or writes it.
BYTES = {"AdamW": 28, "LAMB": 24 + 16, "AdamW, clipped": 20 + 16, "SGD": 20, "LARS": 8 + 20, "Adafactor": 4 + 8 + 12}
BYTES |= dict.fromkeys(("torch's Adafactor", "torch's, foreach"), 24)  # those that would do
BESIDE = {"LAMB": "AdamW", "AdamW, clipped": "AdamW", "LARS": "SGD", "Adafactor": "AdamW"}
# torch's two forms, the fastest of which counts; of one rank, as torch's states are not sharded.
BESIDE_TORCH = ("torch's Adafactor", "torch's, foreach")
MATRICES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Muon": lambda params: shardopt.ShardedMuon(params),
    "torch's Muon": lambda params: torch.optim.Muon(params),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: shardopt.ShardedAdamW(params),
    "LAMB": lambda params: shardopt.ShardedLAMB(params),
    "AdamW, clipped": lambda params: shardopt.ShardedAdamW(params, clip_update=1.0),
    "SGD": lambda params: shardopt.ShardedSGD(params, lr=0.1, momentum=0.9),
    "LARS": lambda params: shardopt.ShardedLARS(params),
    "Adafactor": lambda params: shardopt.ShardedAdafactor(params),
    "torch's Adafactor": lambda params: torch.optim.Adafactor(params),
    "torch's, foreach": lambda params: torch.optim.Adafactor(params, foreach=True),
}


def main() -> None:
    parser = parser_of(__doc__ or "")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=25, help="steps of each optimizer, in turns")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--matrix-width", type=int, default=128)
    parser.add_argument("--matrix-rounds", type=int, default=5)
    parser.add_argument("--matrix-ranks", type=int, nargs="+", default=[2, 4])
    args = parser.parse_args()
    if args.quick:
        args.layers, args.width, args.rounds = 1, 64, 3
        args.matrix_width, args.matrix_rounds, args.matrix_ranks = 32, 3, [2]
    rows = [row for world in args.ranks for row in rows_of(measured(world, args, OPTIMIZERS), world)]
    for world in args.matrix_ranks:
        seconds = measured(world, args, MATRICES)
        rows.append(row_of(seconds, world, "Muon", "torch's Muon"))
    titles = ("rule", "beside", "ranks", "ms", "ratio", "bytes")
    show("step()", titles, [[str(row.get(title, "")) for title in titles] for row in rows])
    write_result("rules", args, pick_device("cpu"), {"rows": rows})


def rows_of(seconds: dict[str, list[float]], world: int) -> list[dict[str, Any]]:
    pairs = [*BESIDE.items(), *(("Adafactor", each) for each in BESIDE_TORCH if world == 1)]
    return [
        {**row_of(seconds, world, name, other), "bytes": round(BYTES[name] / BYTES[other], 3)} for name, other in pairs
    ]


def row_of(seconds: dict[str, list[float]], world: int, name: str, other: str) -> dict[str, Any]:
    return {
        "rule": name,
        "beside": other,
        "ranks": world,
        "ms": median_of([1e3 * each for each in seconds[name]]),
        "ratio": ratios(seconds[name], seconds[other]),
    }


def measured(world: int, args: argparse.Namespace, optimizers: dict[str, Any]) -> dict[str, list[float]]:
    """Seconds of each step of each optimizer: the longest of all ranks."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        results = context.SimpleQueue()
        given = (world, f"file://{Path(folder) / 'store'}", vars(args), optimizers is MATRICES, results)
        ranks = [context.Process(target=run, args=(rank, *given)) for rank in range(world)]
        for each in ranks:
            each.start()
        found = [results.get() for _ in ranks]
        for each in ranks:
            each.join()
    return {name: [max(step) for step in zip(*(each[name] for each in found), strict=True)] for name in optimizers}


def run(rank: int, world: int, store: str, args: dict[str, Any], of_matrices: bool, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    width, rounds = (args["matrix_width"], args["matrix_rounds"]) if of_matrices else (args["width"], args["rounds"])
    optimizers, models = {}, []  # params live as long as their model
    for name, make in (MATRICES if of_matrices else OPTIMIZERS).items():
        torch.manual_seed(0)
        models.append(GPT(args["layers"], width, 8, 8192, 128))
        of_hidden_layers = [each for each in models[-1].blocks.parameters() if each.ndim == 2]
        params = of_hidden_layers if of_matrices else list(models[-1].parameters())
        for param in params:
            param.grad = torch.randn(param.shape).mul_(1e-3)
        optimizers[name] = make(params)
    seconds: dict[str, list[float]] = {name: [] for name in optimizers}
    for number in range(rounds + 2):  # kernels are compiled, and pages touched, in the first two
        for name, optimizer in optimizers.items():
            dist.barrier()
            start = time.perf_counter()
            optimizer.step()
            if number >= 2:
                seconds[name].append(time.perf_counter() - start)
    results.put(seconds)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
