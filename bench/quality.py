"""What the formats of masters and states cost in held-out loss: the example's GPT, in bf16, trained in each of them.

    python bench/quality.py                   an hour on 2 cores
    python bench/quality.py --resume RESULT   what is missing in one that was stopped
    python bench/quality.py --quick           does it run?

The yardstick is fp32 masters and states with the same seed: the same first params, batches and schedule. Trainings that
differ in the last bit end apart by chance, and a learning rate that is too high makes of that a different model. So
the peak is one whose loss is good *and* repeatable, it falls to zero by the last step, and every training is repeated
from first params of which one element differs by one ulp (a replica). What is left when seeds and formats are taken out
is chance, measured: the intervals come from it. Two rows say whether the measurement can be believed: `split` with fp32
states differs from the yardstick in nothing but ties and must be found to cost nothing; `torch.optim.AdamW`, which has
no masters of bf16 params and bf16 states, must be found to cost something.
"""

import json
import math
import multiprocessing
import statistics
import sys
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
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
        options = Namespace(
            optimizer="shardopt", stage=1, offload=None, lr=self.lr, seed=self.seed, gradient_format="fp32"
        )
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

Losses = Mapping[Run, float]


@dataclass(frozen=True)
class Fit:
    """log(loss) = seed + format + chance, by least squares: seeds and formats need not have equally many trainings."""

    over_base: dict[tuple[str, str], float]  # of a format: its loss over the yardstick's, less one
    error: dict[tuple[str, str], float]  # standard error of that
    residual: float  # standard deviation of one training's chance; what a format does to one seed alone is in it
    freedom: int

    def interval(self, formats: tuple[str, str]) -> float:
        """Half of the width that holds the true value with 95 % confidence."""
        return student_95(self.freedom) * self.error[formats]


def fit(losses: Losses) -> Fit:
    """NO_MASTER is left out: what loses most updates scatters more, and would widen the interval of the others."""
    runs = [run for run in losses if run.formats != NO_MASTER]
    seeds = sorted({run.seed for run in runs})
    others = [formats for formats in FORMATS if formats not in (BASE, NO_MASTER)]
    design = [[float(run.seed == at) for at in seeds] + [float(run.formats == at) for at in others] for run in runs]
    x = torch.tensor(design, dtype=torch.float64)  # [trainings, seeds + formats]
    y = torch.tensor([losses[run] for run in runs], dtype=torch.float64).log()
    inverse = torch.linalg.inv(x.T @ x)
    effects = inverse @ x.T @ y
    freedom = len(runs) - x.shape[1]
    residual = ((y - x @ effects).square().sum() / freedom).sqrt().item()
    errors = residual * inverse.diagonal().sqrt()
    over, of = effects[len(seeds) :].expm1().tolist(), errors[len(seeds) :].tolist()
    return Fit(dict(zip(others, over, strict=True)), dict(zip(others, of, strict=True)), residual, freedom)


def student_95(freedom: int) -> float:
    """Student's t that 95 % lie within, from the normal's by the expansion of Cornish and Fisher: to 1 % from 3 on."""
    z = statistics.NormalDist().inv_cdf(0.975)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def of_replicas(losses: Losses, formats: tuple[str, str], seed: int) -> list[float]:
    return [loss for run, loss in losses.items() if (run.formats, run.seed) == (formats, seed)]


def ulp(losses: Losses) -> float:
    """Standard deviation of the yardstick's trainings that differ by one ulp at the start, over their mean."""
    squares, freedom = 0.0, 0
    for seed in sorted({run.seed for run in losses}):
        repeated = of_replicas(losses, BASE, seed)
        squares += sum((loss / statistics.mean(repeated) - 1) ** 2 for loss in repeated)
        freedom += len(repeated) - 1
    if not squares:
        raise SystemExit("replicas are equal in every bit: the nudge reached nothing, and chance was not measured.")
    return math.sqrt(squares / freedom)


def row(formats: tuple[str, str], losses: Losses, fitted: Fit) -> dict[str, Any]:
    """By seed, means of the replicas; NO_MASTER has no interval."""
    seeds = sorted({run.seed for run in losses})
    by_seed = [
        statistics.mean(of_replicas(losses, formats, seed)) / statistics.mean(of_replicas(losses, BASE, seed)) - 1
        for seed in seeds
    ]
    fits = formats in fitted.error
    return {
        "master": formats[0],
        "states": formats[1],
        "trainings": sum(run.formats == formats for run in losses),
        "loss": statistics.mean(statistics.mean(of_replicas(losses, formats, seed)) for seed in seeds),
        "over fp32": fitted.over_base[formats] if fits else statistics.mean(by_seed),
        "interval": fitted.interval(formats) if fits else None,
        "by seed": by_seed,
    }


def cells(row: dict[str, Any]) -> list[str]:
    by_seed = ", ".join(f"{100 * each:+.2f}" for each in row["by seed"])
    over = f"{100 * row['over fp32']:+.3f}"
    over += "" if row["interval"] is None else f" +- {100 * row['interval']:.3f}"
    return [row["master"], row["states"], str(row["trainings"]), f"{row['loss']:.4f}", over, by_seed]


def results_of(every: Losses, args: Namespace) -> dict[str, Any]:
    """The trainings; and what they show, once there is one of each format and seed."""
    results: dict[str, Any] = {"trainings": [asdict(run) | {"loss": loss} for run, loss in every.items()]}
    losses = {run: loss for run, loss in every.items() if run.lr == args.lr}
    if len({(run.formats, run.seed) for run in losses}) == len(FORMATS) * args.seeds:
        fitted = fit(losses)
        peaks = {str(lr): [loss for run, loss in every.items() if run.lr == lr] for lr in args.peaks}
        results["rows"] = [row(formats, losses, fitted) for formats in FORMATS]
        results["chance"] = {"residual": fitted.residual, "freedom": fitted.freedom, "an ulp": ulp(losses)}
        results["other peaks"] = {lr: of_peak for lr, of_peak in peaks.items() if of_peak}
    return results


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


def trained(result: Path) -> dict[Run, float]:
    losses = {}
    for each in json.loads(result.read_text())["results"]["trainings"]:
        loss = each.pop("loss")
        losses[Run(**each)] = loss
    return losses


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
    parser.add_argument("--resume", type=Path, default=None, help="a result that was stopped, to go on from")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.seeds, args.windows = 10, 2, 64
    losses = {} if args.resume is None else trained(args.resume)
    del args.resume
    left = [run for run in runs(args) if run not in losses]
    with multiprocessing.get_context("spawn").Pool(args.at_once) as pool:
        for run, loss in zip(left, pool.imap(Run.held_out_loss, left), strict=True):
            print(f"{run}: {loss:.5f}", file=sys.stderr, flush=True)
            losses[run] = loss
            # Each time, since it takes so long: what is there when it is stopped can be read, and resumed.
            write_result("quality", args, pick_device("cpu"), results_of(losses, args))
    results = results_of(losses, args)
    write_result("quality", args, pick_device("cpu"), results)
    titles = ("master", "states", "trainings", "held-out loss", "% over fp32", "seed by seed")
    show(f"GPT in bf16, {args.steps} steps, {args.seeds} seeds", titles, [cells(each) for each in results["rows"]])


if __name__ == "__main__":
    main()
