"""What the formats of masters and states cost in held-out loss: the example's GPT, in bf16, trained in each of them.

    python bench/quality.py                   an hour on 2 cores
    python bench/quality.py --seeds 1 --steps 300
    python bench/quality.py --quick           does it run?

The yardstick is fp32 masters and states with the same seed: the same first params, batches and schedule. Trainings that
differ in the last bit end apart by chance; `split` with fp32 states tells by how much: it differs from fp32 masters in
nothing but the rounding of ties, which a bf16 param meets once in 65,536 times.
"""

import multiprocessing
import statistics
import sys
from typing import Any

import torch
from common import ROOT, parser_of, pick_device, show, write_result
from tqdm import tqdm

BASE = ("fp32", "fp32")
FORMATS = (
    ("split", "fp32"),
    ("split", "int8"),
    ("split24", "int8"),
    ("none", "fp32"),
    ("none", "int8"),
)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=1000, help="of each training")
    parser.add_argument("--seeds", type=int, default=3, help="trainings in each format")
    parser.add_argument("--batch", type=int, default=16, help="sequences a step")
    parser.add_argument("--at-once", type=int, default=2, help="trainings that run at a time, on one thread each")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.seeds = 10, 1
    runs = [(*formats, seed, args.steps, args.batch) for seed in range(args.seeds) for formats in (BASE, *FORMATS)]
    losses: dict[tuple[str, str], dict[int, float]] = {formats: {} for formats in (BASE, *FORMATS)}
    with multiprocessing.get_context("spawn").Pool(args.at_once) as pool:
        for (master, states, seed, *_), loss in tqdm(pool.imap_unordered(held_out, runs), total=len(runs)):
            losses[master, states][seed] = loss
    rows = [row(formats, losses) for formats in (BASE, *FORMATS)]
    titles = ("master", "states", "held-out loss", "over fp32", "seed by seed")
    show(f"GPT in bf16, {args.steps} steps, {args.seeds} seeds", titles, [cells(each) for each in rows])
    write_result("quality", args, pick_device("cpu"), {"rows": rows})


def held_out(run: tuple[str, str, int, int, int]) -> tuple[tuple[str, str, int, int, int], float]:
    """Nats a byte at the end of one training."""
    sys.path.insert(0, str(ROOT / "examples"))
    import train_gpt

    torch.set_num_threads(1)
    master, states, seed, steps, batch = run
    sys.argv = ["train_gpt.py", "--dtype", "bf16", "--stage", "1", "--master", master, "--state-format", states]
    sys.argv += ["--seed", str(seed), "--steps", str(steps), "--batch", str(batch), "--seconds", "1e9"]
    args = train_gpt.parse_args()
    train_gpt.tqdm = _silent
    train_gpt.print = lambda *_, **__: None
    told = train_gpt.train(args, train_gpt.Ranks(0, 1, torch.device("cpu")))
    return run, told["held_out"][-1][1]


def _silent(*arguments: Any, **keywords: Any) -> Any:
    return tqdm(*arguments, **{**keywords, "disable": True})


def row(formats: tuple[str, str], losses: dict[tuple[str, str], dict[int, float]]) -> dict[str, Any]:
    ratios = [losses[formats][seed] / losses[BASE][seed] - 1 for seed in sorted(losses[formats])]
    return {
        "master": formats[0],
        "states": formats[1],
        "loss": statistics.mean(losses[formats].values()),
        "over fp32": statistics.mean(ratios),
        "by seed": ratios,
    }


def cells(row: dict[str, Any]) -> list[str]:
    by_seed = ", ".join(f"{100 * each:+.2f} %" for each in row["by seed"])
    return [row["master"], row["states"], f"{row['loss']:.4f}", f"{100 * row['over fp32']:+.3f} %", by_seed]


if __name__ == "__main__":
    main()
