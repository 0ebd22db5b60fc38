"""What the formats of masters and states cost in held-out loss: the example's GPT, in bf16, trained in each of them.

    python bench/quality.py                   an hour on 2 cores
    python bench/quality.py --seeds 1 --steps 300
    python bench/quality.py --quick           does it run?

The yardstick is fp32 masters and states with the same seed: the same first params, batches and schedule. Trainings that
differ in the last bit end apart by chance, and a learning rate that is too high makes of that a different model. So
the peak is one whose loss is good *and* repeatable, it falls to zero by the last step, and every training is repeated
from first params of which one element differs by one ulp (a replica). What replicas of one format and seed differ by
is chance, measured: the interval comes from it. Two rows say whether the measurement can be believed: `split` with fp32
states differs from the yardstick in nothing but ties and must be found to cost nothing; `torch.optim.AdamW`, which has
no masters of bf16 params, must be found to cost something.
"""

import math
import multiprocessing
import statistics
import sys
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from common import parser_of, pick_device, show, write_result
from simulate import Size, Training
from torch import Tensor

BASE = ("fp32", "fp32")
NO_MASTER = ("torch.optim.AdamW", "bf16")
FORMATS = (
    BASE,
    ("split", "fp32"),
    ("split", "int8"),
    ("split24", "int8"),
    ("none", "fp32"),
    ("none", "int8"),
    NO_MASTER,
)


@dataclass(frozen=True)
class Run:
    master: str
    states: str
    seed: int
    replica: int
    steps: int
    batch: int
    lr: float
    windows: int

    @property
    def formats(self) -> tuple[str, str]:
        return self.master, self.states

    def held_out_loss(self) -> float:
        """Nats a byte at the end of the training."""
        torch.set_num_threads(1)
        training = Training(self.seed, self.steps, Size(batch=self.batch))
        model = training.model.bfloat16()
        if self.replica:
            nudge(model.get_parameter("blocks.0.qkv.weight"), self.replica)
        options = Namespace(optimizer="shardopt", stage=1, offload=None, lr=self.lr, seed=self.seed)
        options.master, options.state_format = self.formats
        if self.formats == NO_MASTER:
            options.optimizer = "torch"
        opt = training.gpt.make_optimizer(options, model)
        factor = training.gpt.learning_rate_factor
        schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: factor(step, self.steps))
        for _ in range(self.steps):
            opt.zero_grad()
            training.backward()
            opt.step()
            schedule.step()
        return training.held_out_loss(self.windows)


def nudge(param: Tensor, element: int) -> None:
    """Move one element by one ulp of bf16."""
    param.detach().view(-1)[element : element + 1].view(torch.int16).add_(1)


# ---- Statistics ------------------------------------------------------------------------------------------------------

Losses = Mapping[tuple[str, str], Mapping[int, list[float]]]  # formats -> seed -> those of the replicas


def chance(losses: Losses) -> float:
    """Standard deviation of one training over the mean of its replicas, pooled over formats and seeds.

    NO_MASTER is left out: what loses most updates has another spread, and would widen or narrow that of the others.
    """
    squares, freedom = 0.0, 0
    for formats, by_seed in losses.items():
        for of_replicas in by_seed.values() if formats != NO_MASTER else ():
            mean = statistics.mean(of_replicas)
            squares += sum((each / mean - 1) ** 2 for each in of_replicas)
            freedom += len(of_replicas) - 1
    if freedom and not squares:
        raise SystemExit("replicas are equal in every bit: the nudge reached nothing, and chance was not measured.")
    return math.sqrt(squares / freedom) if freedom else math.nan


def row(formats: tuple[str, str], losses: Losses, spread: float) -> dict[str, Any]:
    """Mean loss over the yardstick's, by seed and over all, with two standard errors of what chance makes of it."""
    ours, base = losses[formats], losses[BASE]
    by_seed = [statistics.mean(ours[seed]) / statistics.mean(base[seed]) - 1 for seed in sorted(ours)]
    variances = [1 / len(ours[seed]) + 1 / len(base[seed]) for seed in ours]
    return {
        "master": formats[0],
        "states": formats[1],
        "loss": statistics.mean(each for of_seed in ours.values() for each in of_seed),
        "over fp32": statistics.mean(by_seed),
        "chance": 0.0 if formats == BASE else 2 * spread * math.sqrt(sum(variances)) / len(ours),
        "by seed": by_seed,
        "losses": {str(seed): ours[seed] for seed in sorted(ours)},
    }


def cells(row: dict[str, Any]) -> list[str]:
    by_seed = ", ".join(f"{100 * each:+.2f}" for each in row["by seed"])
    over = f"{100 * row['over fp32']:+.3f} +- {100 * row['chance']:.3f} %"
    return [row["master"], row["states"], f"{row['loss']:.4f}", over, by_seed]


# ---- Trainings -------------------------------------------------------------------------------------------------------


def replicas_of(formats: tuple[str, str], turn: int) -> tuple[int, ...]:
    """Those trained in one turn. The yardstick is in every ratio: with twice as many its own chance weighs less."""
    if formats == BASE:
        return 2 * turn, 2 * turn + 1
    return () if formats == NO_MASTER and turn else (turn,)


def runs(args: Namespace) -> list[Run]:
    """Turn by turn, each of all formats and seeds; then the yardstick of the first seed at the other peaks."""
    shared = {"steps": args.steps, "batch": args.batch, "windows": args.windows}
    measured = [
        Run(*formats, seed, replica, lr=args.lr, **shared)
        for turn in range(args.replicas)
        for seed in range(args.seeds)
        for formats in FORMATS
        for replica in replicas_of(formats, turn)
    ]
    return measured + [Run(*BASE, 0, replica, lr=lr, **shared) for lr in args.peaks for replica in (0, 1)]


def main() -> None:
    parser = parser_of(__doc__ or "")
    parser.add_argument("--steps", type=int, default=1000, help="of each training")
    parser.add_argument("--seeds", type=int, default=3, help="first params and batches")
    parser.add_argument("--replicas", type=int, default=2, help="of each format and seed; twice as many of fp32")
    parser.add_argument("--batch", type=int, default=4, help="sequences a step")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--peaks", type=float, nargs="*", default=(4e-3, 2e-3), help="others, for the yardstick alone")
    parser.add_argument("--windows", type=int, default=2048, help="held-out sequences, the same ones for all")
    parser.add_argument("--at-once", type=int, default=2, help="trainings that run at a time, on one thread each")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.seeds, args.windows = 10, 1, 64
    losses: dict[tuple[str, str], dict[int, list[float]]] = {formats: {} for formats in FORMATS}
    peaks: dict[str, list[float]] = {}
    results: dict[str, Any] = {}
    with multiprocessing.get_context("spawn").Pool(args.at_once) as pool:
        all_runs = runs(args)
        for run, loss in zip(all_runs, pool.imap(Run.held_out_loss, all_runs), strict=True):
            print(f"{run}: {loss:.5f}", file=sys.stderr, flush=True)
            if run.lr == args.lr:
                losses[run.formats].setdefault(run.seed, []).append(loss)
            else:
                peaks.setdefault(str(run.lr), []).append(loss)
            if all(len(by_seed) == args.seeds for by_seed in losses.values()):
                # Each time, since it takes so long: what is there when it is stopped is a result.
                spread = chance(losses)
                rows = [row(formats, losses, spread) for formats in FORMATS]
                results = {"chance of one training": spread, "rows": rows, "other peaks": peaks}
                write_result("quality", args, pick_device("cpu"), results)
    titles = ("master", "states", "held-out loss", "over fp32", "seed by seed, %")
    show(f"GPT in bf16, {args.steps} steps, {args.seeds} seeds", titles, [cells(each) for each in results["rows"]])


if __name__ == "__main__":
    main()
