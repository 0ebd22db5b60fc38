"""Which optimizer to take: loss of the example's GPT over steps and over time, each at the best of five rates.

    python bench/curves.py                     ten minutes of one core
    python bench/curves.py --seconds 420       as many trainings as begin in that time
    python bench/curves.py --resume RESULT     what is missing in one that was stopped, or made before an optimizer was
    python bench/curves.py --quick             does it run?

Every training of one seed begins with the same params and reads the same batches, under the same schedule (warm-up,
then a cosine to zero), with gradients clipped to a norm of 1 and without weight decay, which few steps cannot judge.
The best rate is that of the least held-out loss at the end, with the first seed; the other seeds are trained at it.
Were it the first or the last of the five, a better one could lie beyond, and the result says so. A curve is of training
losses, means of ten steps; of so long a text few bytes are read twice. Time is steps times the median of a whole step,
which is measured for all optimizers by turns in one process: losses of trainings that ran beside other work keep their
worth, and times are compared in pairs.
"""

import functools
import itertools
import json
import multiprocessing
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from common import median_of, parser_of, pick_device, ratios, seconds_of, show, write_result
from simulate import Size, Training
from torch import nn

import shardopt
from shardopt import ShardedOptimizer

Make = Callable[[nn.Module, float], ShardedOptimizer]
CPU = pick_device("cpu")


@dataclass(frozen=True)
class Candidate:
    """An optimizer, and the five learning rates that it is tried at, each twice the one before."""

    name: str  # of the class, behind "Sharded"
    least: float
    make: Make

    @property
    def rates(self) -> list[float]:
        return [self.least * 2**power for power in range(5)]


def _of(name: str, **keywords: Any) -> Make:
    return lambda model, lr: getattr(shardopt, f"Sharded{name}")(model, lr=lr, weight_decay=0.0, **keywords)


def _muon(model: nn.Module, lr: float) -> ShardedOptimizer:
    """With steps as long as AdamW's, so that one rate serves both rules."""
    others = {"lr": lr, "weight_decay": 0.0, "betas": (0.9, 0.95)}
    return shardopt.ShardedMuon(model, lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw", adamw=others)


BASE = "AdamW"
CANDIDATES = {
    each.name: each
    for each in (
        Candidate("AdamW", 1e-3, _of("AdamW", betas=(0.9, 0.95))),
        Candidate("Muon", 4e-3, _muon),
        Candidate("LAMB", 1e-2, _of("LAMB", betas=(0.9, 0.95))),
        Candidate("Adafactor", 1e-2, _of("Adafactor")),
        Candidate("Lion", 4e-4, _of("Lion")),
    )
    if hasattr(shardopt, f"Sharded{each.name}")
}


@dataclass(frozen=True)
class Run:
    optimizer: str
    lr: float
    seed: int


# ---- Measured --------------------------------------------------------------------------------------------------------


def size_of(args: Namespace) -> Size:
    return Size(args.layers, args.width, args.heads, args.context, args.batch)


@dataclass(frozen=True)
class Trained:
    """In nats a byte: means of the training loss over ``args.every`` steps, and the held-out loss at the end."""

    losses: list[float]
    held_out: float


def trained(args: Namespace, run: Run) -> Trained:
    torch.set_num_threads(1)
    training = Training(run.seed, args.steps, size_of(args))
    optimizer = CANDIDATES[run.optimizer].make(training.model, run.lr)
    factor = training.gpt.learning_rate_factor
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(step, args.steps))
    losses = []
    for _ in range(args.steps):
        optimizer.zero_grad()
        losses.append(float(training.backward()))
        optimizer.step()
        schedule.step()
    held_out = training.held_out_loss(args.windows)
    optimizer.close()
    means = [statistics.mean(losses[at : at + args.every]) for at in range(0, args.steps, args.every)]
    return Trained(means, held_out)


def times_of(args: Namespace) -> dict[str, Any]:
    """Seconds of a whole step and of its update, and bytes of states, by optimizer; all step by turns."""
    trainings = {name: Training(0, args.steps, size_of(args)) for name in CANDIDATES}
    optimizers = {name: CANDIDATES[name].make(each.model, 1e-4) for name, each in trainings.items()}
    whole: dict[str, list[float]] = {name: [] for name in CANDIDATES}
    update: dict[str, list[float]] = {name: [] for name in CANDIDATES}
    for turn in range(args.turns + 2):
        for name, training in trainings.items():
            optimizers[name].zero_grad()
            backward = seconds_of(training.backward, CPU)
            step = seconds_of(optimizers[name].step, CPU)
            if turn >= 2:  # the first ones compile and allocate
                whole[name].append(backward + step)
                update[name].append(step)
    numel = sum(param.numel() for param in trainings[BASE].model.parameters())
    return {
        name: {
            "step s": median_of(whole[name]).as_json(),
            "update s": median_of(update[name]).as_json(),
            "step x AdamW": ratios(whole[name], whole[BASE]).as_json(),
            "state bytes a param": sum(optimizers[name].memory()["state"].values()) / numel,
        }
        for name in CANDIDATES
    } | {"params": numel}


# ---- What it shows ---------------------------------------------------------------------------------------------------

Results = dict[Run, Trained]


def steps_until(curve: Sequence[float], loss: float, every: int) -> float | None:
    """Steps after which a curve is first down to a loss, on a line between its points; None: it never is."""
    for at, (before, after) in enumerate(itertools.pairwise(curve), 1):
        if after <= loss:
            return every * (at + (before - loss) / (before - after))
    return None


def best_of(optimizer: str, found: Results, args: Namespace) -> float:
    """The rate of the least held-out loss with the first seed."""
    rates = CANDIDATES[optimizer].rates[: args.rates]
    return min(rates, key=lambda lr: found[Run(optimizer, lr, 0)].held_out)


def row(optimizer: str, found: Results, args: Namespace) -> dict[str, Any]:
    rates, best = CANDIDATES[optimizer].rates[: args.rates], best_of(optimizer, found, args)
    at_best = [found[Run(optimizer, best, seed)] for seed in range(args.seeds)]
    return {
        "optimizer": optimizer,
        "held out by rate": {f"{lr:g}": found[Run(optimizer, lr, 0)].held_out for lr in rates},
        "best rate": best,
        "best is at an end": best in (rates[0], rates[-1]),
        "losses": [statistics.mean(points) for points in zip(*(each.losses for each in at_best), strict=True)],
        "held out by seed": [each.held_out for each in at_best],
    }


def results_of(found: Results, times: dict[str, Any], args: Namespace) -> dict[str, Any]:
    """The trainings; and a row of each optimizer whose trainings are all there."""
    results: dict[str, Any] = {"trainings": [asdict(run) | asdict(each) for run, each in found.items()]}
    results |= {"times": times, "points": list(range(args.every, args.steps + 1, args.every))}
    names = [name for name in tried(found, args) if all(run in found for run in runs_of_seeds(name, found, args))]
    rows = [row(name, found, args) for name in names]
    base = next((each for each in rows if each["optimizer"] == BASE), None)
    for each in rows:
        end = None if base is None else base["losses"][-1]
        each["steps to AdamW's loss"] = None if end is None else steps_until(each["losses"], end, args.every)
    return results | {"rows": rows}


def cells(row: dict[str, Any], times: dict[str, Any]) -> list[str]:
    until, end = row["steps to AdamW's loss"], " (an end of the five)" * row["best is at an end"]
    step = times[row["optimizer"]]["step x AdamW"]["median"] if row["optimizer"] in times else float("nan")
    by_rate = ", ".join(f"{lr}: {loss:.3f}" for lr, loss in row["held out by rate"].items())
    by_seed = row["held out by seed"]
    ends = f"{statistics.mean(by_seed):.4f} ({min(by_seed):.4f} to {max(by_seed):.4f})"
    steps = "-" if until is None else f"{until:.0f}"
    return [row["optimizer"], f"{row['best rate']:g}{end}", ends, steps, f"{step:.2f}", by_rate]


def runs_of_rates(name: str, args: Namespace) -> list[Run]:
    """The first seed at every rate."""
    return [Run(name, lr, 0) for lr in CANDIDATES[name].rates[: args.rates]]


def runs_of_seeds(name: str, found: Results, args: Namespace) -> list[Run]:
    """Every seed at the best rate."""
    return [Run(name, best_of(name, found, args), seed) for seed in range(args.seeds)]


def tried(found: Results, args: Namespace) -> list[str]:
    """The optimizers that were trained at every rate."""
    return [name for name in CANDIDATES if all(run in found for run in runs_of_rates(name, args))]


def resumed(results: Sequence[Path]) -> tuple[Results, dict[str, Any]]:
    """Returns the trainings of all results, and the times of the last that has some."""
    trainings, times = {}, {}
    for path in results:
        found = json.loads(path.read_text())["results"]
        times = found["times"] or times
        for each in found["trainings"]:
            trainings[Run(each["optimizer"], each["lr"], each["seed"])] = Trained(each["losses"], each["held_out"])
    return trainings, times


def main() -> None:
    parser = parser_of(__doc__ or "")
    parser.add_argument("--steps", type=int, default=200, help="of each training")
    parser.add_argument("--every", type=int, default=10, help="steps that a point of a curve is the mean of")
    parser.add_argument("--seeds", type=int, default=3, help="first params and batches")
    parser.add_argument("--rates", type=int, default=5, help="learning rates of each optimizer")
    parser.add_argument("--windows", type=int, default=512, help="held-out sequences, the same ones for all")
    parser.add_argument("--turns", type=int, default=40, help="steps of each optimizer that are timed")
    for name, value in {"layers": 2, "width": 64, "heads": 4, "context": 64, "batch": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=value, help="of the GPT and its batches")
    parser.add_argument("--at-once", type=int, default=2, help="trainings that run at a time, on one thread each")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no training is waited for")
    parser.add_argument("--optimizers", nargs="+", default=list(CANDIDATES), choices=CANDIDATES, help="to train now")
    parser.add_argument("--resume", type=Path, nargs="*", default=[], help="results to go on from")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.every, args.seeds, args.rates, args.windows, args.turns = 4, 2, 1, 2, 64, 2
    start = time.perf_counter()
    torch.set_num_threads(1)
    found, times = resumed(args.resume)
    seconds, names = args.seconds, args.optimizers
    del args.resume, args.seconds, args.optimizers
    with multiprocessing.get_context("spawn").Pool(args.at_once) as pool:

        def train(wanted: list[Run]) -> None:
            """Until the time is over. Writes each time: what is there when it is stopped can be read, and resumed."""
            left = [run for run in wanted if run not in found]
            for run, each in zip(left, pool.imap(functools.partial(trained, args), left), strict=True):
                found[run] = each
                print(f"{run}: {each.held_out:.4f}", file=sys.stderr, flush=True)
                write_result("curves", args, CPU, results_of(found, times, args))
                if time.perf_counter() - start > seconds:
                    break

        train([run for name in names for run in runs_of_rates(name, args)])
        if time.perf_counter() - start <= seconds:
            train([run for name in names for run in runs_of_seeds(name, found, args)])
    if not set(CANDIDATES) <= times.keys() and time.perf_counter() - start <= seconds:
        times = times_of(args)
    results = results_of(found, times, args)
    write_result("curves", args, CPU, results)
    titles = ("optimizer", "best rate", "held-out loss", "steps to AdamW's", "step, x AdamW", "by rate")
    show(f"GPT, {args.steps} steps, {args.seeds} seeds", titles, [cells(each, times) for each in results["rows"]])


if __name__ == "__main__":
    main()
