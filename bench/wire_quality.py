"""What quantized traffic costs in held-out loss: the example's GPT in fp32 on 2 ranks, trained in each way.

    python bench/wire_quality.py                          3 seeds, 1,000 steps a training
    python bench/wire_quality.py --minutes 9              no training begins after them; whole seeds count
    python bench/wire_quality.py --ways both-2 both-3     these, beside the uncompressed one and `chance`
    python bench/wire_quality.py --quick                  does it run?

Ranks are processes that send each other messages. All ways of a seed have the same first params and batches, so that
`over` compares the loss of a seed with that of the same seed uncompressed, and says how uncertain the mean is: by one
standard error. Trainings end apart by chance: `chance` is uncompressed too, from first params that are shaken by 1 %,
as much as 8 bits shake them, and says how much of a difference means nothing. (One ulp would say less: so small a
difference does not grow to that within 1,000 steps.)
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from common import parser_of, show, write_result
from simulate import Size, Training
from torch import multiprocessing

import shardopt

RANKS = 2
SHAKEN = 0.01
PLAIN, CHANCE = "plain", "chance"
BOTH: dict[str, Any] = {"gather_dtype": "int8", "reduce_dtype": "int8", "error_feedback": True}


class Traffic(NamedTuple):
    """What travels, in words, and the keywords of the optimizer."""

    title: str
    options: dict[str, Any]


WAYS = {
    PLAIN: Traffic("uncompressed, stage 2", {"stage": 2}),
    CHANCE: Traffic("uncompressed, shaken first params", {"stage": 2}),
    "both-2": Traffic("int8 params, int8 gradients, feedback, stage 2", {"stage": 2, **BOTH}),
    "both-3": Traffic("int8 params, int8 gradients, feedback, stage 3", {"stage": 3, **BOTH}),
    "low-2": Traffic("int8 params, int4 gradients, feedback, stage 2", {"stage": 2, **BOTH, "reduce_dtype": "int4"}),
    "params-3": Traffic("int8 params, stage 3", {"stage": 3, "gather_dtype": "int8"}),
    "params-2": Traffic("int8 params, stage 2", {"stage": 2, "gather_dtype": "int8"}),
    "int8-2": Traffic("int8 gradients, stage 2", {"stage": 2, "reduce_dtype": "int8"}),
    "int4-2": Traffic("int4 gradients, stage 2", {"stage": 2, "reduce_dtype": "int4"}),
    "none-2": Traffic(
        "int4 gradients, no feedback, stage 2", {"stage": 2, "reduce_dtype": "int4", "error_feedback": False}
    ),
}
PROMISED = ("both-2", "both-3", "low-2")


def run(rank: int, args: argparse.Namespace, directory: str) -> None:
    """Runs all trainings on one rank; rank 0 writes the held-out losses, by way and seed."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/group", rank=rank, world_size=RANKS)
    until, losses = time.monotonic() + 60 * args.minutes, dict[str, list[float]]()
    for seed in range(args.seeds):
        its = dict[str, float]()
        for name in (PLAIN, CHANCE, *args.ways):
            is_late = [time.monotonic() >= until]
            dist.broadcast_object_list(is_late)  # the ranks' clocks differ
            if is_late[0]:
                break
            its[name] = train(rank, name, seed, args)
            if rank == 0:
                print(f"seed {seed}, {WAYS[name].title}: {its[name]:.4f}", flush=True)
        else:
            for name, loss in its.items():
                losses.setdefault(name, []).append(loss)
    if rank == 0:
        Path(directory, "losses").write_text(json.dumps(losses))
    dist.destroy_process_group()


def train(rank: int, name: str, seed: int, args: argparse.Namespace) -> float:
    training = Training(seed, args.steps, Size(args.layers, args.width, 4, args.context, args.batch))
    training.sampler.manual_seed(RANKS * seed + rank)
    if name == CHANCE:
        with torch.no_grad():
            shaking = torch.Generator().manual_seed(seed)
            for param in training.model.parameters():
                param.mul_(1 + SHAKEN * torch.randn(param.shape, generator=shaking))
    tuning = shardopt.Tuning(neighbours=False, keep_below=0, bucket_bytes=1 << 18)
    opt = shardopt.ShardedAdamW(
        training.model,
        lr=4e-3,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        max_grad_norm=1.0,
        tuning=tuning,
        **WAYS[name].options,
    )
    for step in range(args.steps):
        for group in opt.param_groups:
            group["lr"] = training.lr(step)
        opt.zero_grad()
        training.loss().backward()
        opt.step()
    with opt.unsharded():
        loss = training.held_out_loss(args.windows)
    opt.close()
    return loss


def uncertainty(values: Sequence[float]) -> float:
    """The standard error of their mean."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def main() -> None:
    parser = parser_of(str(__doc__))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16, help="sequences a rank")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--ways", nargs="+", choices=[*WAYS][2:], default=PROMISED)
    parser.add_argument("--windows", type=int, default=1024, help="of held-out text")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.seeds, args.windows = 3, 1, 64
    with tempfile.TemporaryDirectory() as directory:
        multiprocessing.spawn(run, (args, directory), nprocs=RANKS)  # type: ignore[no-untyped-call]
        losses = json.loads(Path(directory, "losses").read_text())
    over = {
        name: [loss / plain - 1 for loss, plain in zip(each, losses[PLAIN], strict=True)]
        for name, each in losses.items()
    }
    rows = [
        [
            WAYS[name].title,
            f"{statistics.mean(losses[name]):.4f}",
            f"{statistics.mean(each):+.2%}",
            f"{uncertainty(each):.2%}",
            f"{min(each):+.2%}",
            f"{max(each):+.2%}",
        ]
        for name, each in over.items()
    ]
    if not over:
        sys.exit("no seed was trained in all ways: give more --minutes, or fewer --steps or --ways")
    show(
        f"{args.steps} steps, {len(losses[PLAIN])} seeds", ("way", "held-out loss", "over", "+-", "least", "most"), rows
    )
    write_result("wire-quality", args, torch.device("cpu"), {"losses": losses, "over": over})


if __name__ == "__main__":
    main()
