"""One training step of a GPT under every way to share its optimizer: time, optimizer part, peak memory.

    python bench/train.py                                   2 gloo ranks of one thread, or a rank on each GPU
    python bench/train.py --dtype bf16
    python bench/train.py --engines ddp zero shardopt-1     only these; `ddp` is always the 1.0
    python bench/train.py --name peers --engines fsdp2 deepspeed-{1,2,3} module-{1,2,3}
    python bench/train.py --quick --layers 2 --width 128    does it run?

Every engine lives in processes of its own and sleeps while another one takes its turn; a round gives each engine one
turn. So a ratio compares steps that were taken within seconds of each other, and memory is that of one engine alone.

* `step`: forward, backward and update, from a barrier on; the slowest rank counts.
* `optimizer`: `optimizer.step()` alone, from a barrier on; for ZeRO-1 that holds the gathering of the params.
* `peak`: the most bytes that a rank's process held while stepping, above what it held before the model was built (all
  libraries loaded, kernels compiled, one step of a small model taken), for each param of the model: weights,
  gradients, buckets, states, activations. `at first`: the same, from the building of the model through its first steps.
* `units moved`: the bytes that a rank receives in a step, counted, in units of (N-1)/N of all params.
* bf16: params and gradients in bf16. Engines marked `no masters` update bf16 weights with bf16 states, which loses
  small updates; those of shardopt and DeepSpeed keep fp32 masters and states.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import torch
from common import Median, describe_machine, median_of, parser_of, pick_device, ratios, show, write_result
from engines import ENGINES, is_offered
from gpt import DTYPES, GPT, Settings
from teams import EngineFailed, Team
from tqdm import tqdm

import shardopt
from shardopt.partition.layout import BucketLayout, split_into_buckets

# Engines in fp32 do the same arithmetic up to the order of sums; training makes that grow, but not to this.
LOSS_TOLERANCE = 0.02


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__ or "")
    titles = "; ".join(f"{name}: {offer.title}" for name, offer in ENGINES.items())
    usual = [name for name, offer in ENGINES.items() if not offer.is_extra]
    parser.add_argument("--engines", nargs="+", choices=[*ENGINES], default=usual, metavar="ENGINE", help=titles)
    parser.add_argument("--dtype", choices=[*DTYPES], default="fp32", help="of params, gradients and activations")
    parser.add_argument("--ranks", type=int, default=None, help="processes an engine (default: all GPUs, else 2)")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where the model lies")
    parser.add_argument("--rounds", type=int, default=30, help="turns of each engine")
    parser.add_argument(
        "--burst", type=int, default=None, help="steps in each half of a turn (default: 5 on a GPU, else 1)"
    )
    parser.add_argument("--layers", type=int, default=8, help="blocks of the GPT")
    parser.add_argument("--width", type=int, default=512, help="channels")
    parser.add_argument("--heads", type=int, default=8, help="attention heads")
    parser.add_argument("--vocab", type=int, default=8192, help="tokens")
    parser.add_argument("--batch", type=int, default=1, help="sequences a rank")
    parser.add_argument("--context", type=int, default=64, help="tokens in a sequence")
    parser.add_argument("--seed", type=int, default=0, help="of the model and the data")
    parser.add_argument("--name", default="train", help="what the result is called")
    args = parser.parse_args()
    device = pick_device(args.device)
    on_gpu = device.type == "cuda"
    args.device = device.type
    args.ranks = args.ranks or (torch.cuda.device_count() if on_gpu else 2)
    args.burst = args.burst or (5 if on_gpu else 1)
    if args.quick:
        args.rounds = min(args.rounds, 5)
    for name in ("ranks", "threads", "rounds", "burst", "layers", "width", "heads", "vocab", "batch", "context"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if args.width % args.heads:
        parser.error(f"--width {args.width} must be a multiple of --heads {args.heads}")
    if on_gpu and args.ranks > torch.cuda.device_count():
        parser.error(f"--ranks {args.ranks}: a rank needs a GPU of its own, and there are {torch.cuda.device_count()}")
    if "ddp" not in args.engines:
        args.engines = ["ddp", *args.engines]  # the 1.0
    return args


def settings_of(args: argparse.Namespace) -> Settings:
    return Settings(**{name: getattr(args, name) for name in Settings.__dataclass_fields__})


def run_rounds(args: argparse.Namespace, settings: Settings) -> tuple[list[Team], dict[str, str]]:
    """Every engine's turns and reports, and why some have none."""
    teams: list[Team] = []
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as directory:
        try:
            names = [name for name in args.engines if is_offered(name, args.dtype)]
            teams = [Team(name) for name in names]
            for team in teams:
                team.start(settings, directory)
            # One after the other: what an engine measures while it is built, it measures alone.
            for team in tqdm(list(teams), desc="building", unit="engine", disable=None):
                try:
                    team.build()
                except EngineFailed as error:
                    teams.remove(team)
                    team.dismiss()
                    team.join()
                    failed[team.name] = str(error)
            for number in tqdm(range(args.rounds), desc="rounds", unit="round", disable=None):
                # Each engine comes first as often as any other.
                for index in range(len(teams)):
                    teams[(number + index) % len(teams)].take_turn()
            for team in teams:
                team.reports = team.ask("report")
        finally:
            for team in teams:
                team.dismiss()
            for team in teams:
                team.join()
    return teams, failed


# ---- Report ----------------------------------------------------------------------------------------------------------


def largest(reports: Sequence[dict[str, Any]], key: str, numel: int) -> float | None:
    """Bytes a param on the rank that needs most."""
    values = [report[key] for report in reports]
    return None if None in values else max(values) / numel


def states_against_formula(team: Team, settings: Settings, numel: int) -> dict[str, float] | None:
    """Masters and states as shardopt counts them, beside what ZeRO's formula asks for, in bytes a param."""
    stage = ENGINES[team.name].stage
    if stage is None:
        return None
    memories = [{kind: sum(tiers.values()) for kind, tiers in report["memory"].items()} for report in team.reports]
    measured = max(memory["master"] + memory["state"] for memory in memories) / numel
    formula = (8 if settings.dtype == "fp32" else 12) / (settings.ranks if stage >= 1 else 1)
    kinds = {kind: max(memory[kind] for memory in memories) / numel for kind in memories[0] if kind != "gradient"}
    return {**kinds, "masters and states": measured, "formula": formula, "padding": measured / formula - 1}


def units_moved(team: Team, settings: Settings, numel: int) -> float | None:
    """What a rank receives in a step, as it counts it, in units of all params but its own share."""
    unit = numel * DTYPES[settings.dtype].itemsize * (settings.ranks - 1) / settings.ranks
    moved = largest(team.reports, "moved", 1)
    return moved / unit if moved and unit else None


def padding_at(ranks: int, model: GPT) -> float:
    """Part by which the states of a stage-1 run on so many ranks exceed an equal share; integers alone tell."""
    numels = [param.numel() for param in reversed(list(model.parameters()))]
    held = 0
    for indices in split_into_buckets(
        [4 * numel for numel in numels], shardopt.Tuning().bucket_bytes_of(torch.device("cpu"), has_module=False)
    ):
        held += BucketLayout(tuple(numels[index] for index in indices), ranks).shard_numel * ranks
    return held / sum(numels) - 1


def summarise(team: Team, baseline: Team, settings: Settings, numel: int) -> dict[str, Any]:
    losses, right = team.reports[0]["losses"], baseline.reports[0]["losses"]
    return {
        "title": ENGINES[team.name].title,
        "masters": settings.dtype == "fp32" or ENGINES[team.name].has_masters,
        "step s": median_of(team.seconds("step")),
        "step x DDP": ratios(team.seconds("step"), baseline.seconds("step")),
        "optimizer s": median_of(team.seconds("update")),
        "optimizer x DDP": ratios(team.seconds("update"), baseline.seconds("update")),
        "peak bytes a param": largest(team.reports, "peak", numel),
        "peak bytes a param at first": largest(team.reports, "first peak", numel),
        "states": states_against_formula(team, settings, numel),
        "units a step": units_moved(team, settings, numel),
        "first loss": losses[0],
        "last loss": losses[-1],
        "largest loss difference to DDP": max(abs(a - b) / abs(b) for a, b in zip(losses, right, strict=True)),
    }


def compare(teams: Sequence[Team], one: str, other: str) -> dict[str, Median] | None:
    """Ratios of two engines, round by round."""
    by_name = {team.name: team for team in teams}
    if one not in by_name or other not in by_name:
        return None
    return {key: ratios(by_name[one].seconds(key), by_name[other].seconds(key)) for key in ("step", "update")}


def table_row(row: dict[str, Any]) -> list[str]:
    def number(value: float | None) -> str:
        return "n/a" if value is None else f"{value:.1f}"

    states = row["states"]
    return [
        row["title"] + ("" if row["masters"] else ", no masters"),
        f"{row['step s'].median * 1e3:.4g}",
        str(row["step x DDP"]),
        f"{row['optimizer s'].median * 1e3:.3g}",
        number(row["peak bytes a param"]),
        number(row["peak bytes a param at first"]),
        "" if row["units a step"] is None else f"{row['units a step']:.2f}",
        f"{states['masters and states']:.3f} ({states['formula']:.3g})" if states else "",
        f"{row['last loss']:.4f}",
    ]


def main() -> None:
    args = parse_args()
    device, settings = pick_device(args.device), settings_of(args)
    with torch.device("meta"):
        model = settings.model()
    numel = sum(param.numel() for param in model.parameters())
    teams, failed = run_rounds(args, settings)
    baseline = next((team for team in teams if team.name == "ddp"), None)
    if baseline is None:
        sys.exit(f"the baseline did not run: {failed['ddp']}")
    rows = {team.name: summarise(team, baseline, settings, numel) for team in teams}
    against_zero = compare(teams, "shardopt-1", "zero")
    padding = padding_at(8, model)

    where = f"{describe_machine(device)['device']}, {settings.ranks} ranks of {settings.threads} threads"
    columns = (
        "engine",
        "step ms",
        "x DDP",
        "optimizer ms",
        "peak B/param",
        "at first",
        "units moved",
        "states B/param (formula)",
        "loss",
    )
    show(f"{where}; GPT of {numel / 1e6:.1f}M params, {args.dtype}", columns, [table_row(row) for row in rows.values()])
    if against_zero:
        step, update = against_zero["step"], against_zero["update"]
        print(f"shardopt stage 1 over ZeroRedundancyOptimizer: step {step}, optimizer {update}")
    print(f"padding of masters and states at 8 ranks: {100 * padding:.3f} %")
    for name in args.engines:
        if args.dtype in ENGINES[name].dtypes and name not in rows:
            print(f"{name}: {failed.get(name, 'not installed')}")
    if args.dtype == "fp32":
        for row in rows.values():
            if not row["largest loss difference to DDP"] < LOSS_TOLERANCE:
                print(f"WARNING: the losses of {row['title']} are not those of DDP: it does not train the same way")
    results = {
        "params": numel,
        "packages": {name: version(name) for name in sorted({ENGINES[name].package for name in rows} - {None})},
        "engines": rows,
        "shardopt-1 over zero": against_zero,
        "padding at 8 ranks": padding,
        "not run": {name: reason.splitlines()[-1] for name, reason in failed.items()},
        "rounds": {
            team.name: json.loads(json.dumps(team.turns), parse_float=lambda x: float(f"{float(x):.6g}"))
            for team in teams
        },
    }
    ranks = "" if settings.ranks == 2 else f"-{settings.ranks}-ranks"
    write_result(f"{args.name}-{args.dtype}{ranks}", args, device, results)


if __name__ == "__main__":
    main()
