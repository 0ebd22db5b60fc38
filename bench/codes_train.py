"""What 8-bit and bf16 states of AdamW cost in held-out loss: trainings of the example's GPT, beside fp32 states.

    python bench/codes_train.py
    python bench/codes_train.py --steps 1000 --seeds 1 --pairs "offset m4 + m5" flash
    python bench/codes_train.py --quick     does it run?

States are stored in the format and loaded again after each step; all else is the same fp32 training, of the same
batches. Trainings that differ in a last bit end apart: `fp32, nudged` tells by how much.
"""

import multiprocessing
import sys
from argparse import Namespace
from dataclasses import dataclass, fields
from typing import Any

import torch
from code_book import BLOCK
from common import parser_of, show, write_result
from simulate import AdamW, Pair, Size, Training, pairs
from torch import Tensor, nn
from tqdm import tqdm

NUDGED = "fp32, nudged"  # of one step the gradients are changed by a millionth
FORMATS = {pair.name: pair for pair in (*pairs(), Pair(NUDGED))}
OURS = ("offset m4 + m4", "offset m4 + m5", "offset m5 + m5", "offset m5 + m5 golden")
DEFAULT = (NUDGED, *OURS, "dynamic tree", "flash", "bf16, nearest", "bf16, nearest + golden")


@dataclass(frozen=True)
class Flat:
    """The model's params as views of one buffer, each at a block's start; gradients alike."""

    param: Tensor
    grad: Tensor
    decay: Tensor  # 0.1 for matrices, as the example has it


def flatten(model: nn.Module) -> Flat:
    params = list(model.parameters())
    sizes = [-(-p.numel() // BLOCK) * BLOCK for p in params]
    flat = Flat(*(torch.zeros(sum(sizes)) for _ in range(3)))
    for p, param, grad, decay in zip(params, *(each.split(sizes) for each in vars(flat).values()), strict=True):
        param[: p.numel()] = p.detach().flatten()
        p.data, p.grad = param[: p.numel()].view_as(p), grad[: p.numel()].view_as(p)
        decay.fill_(0.1 if p.dim() >= 2 else 0.0)
    return flat


@dataclass(frozen=True)
class Run:
    name: str  # of the pair
    seed: int
    steps: int
    beta2: float
    size: Size

    def held_out_loss(self) -> float:
        """In nats a byte, at the end of a training."""
        torch.set_num_threads(1)
        training = Training(self.seed, self.steps, self.size)
        flat = flatten(training.model)
        opt = AdamW(flat.param, FORMATS[self.name], self.beta2, flat.decay, self.seed)
        for step in range(self.steps):
            flat.grad.zero_()
            training.backward()
            if step == 0 and self.name == NUDGED:
                flat.grad.mul_(1 + 1e-6 * torch.randn(flat.grad.shape, generator=torch.Generator().manual_seed(0)))
            with torch.no_grad():
                opt.step(flat.grad, training.lr(step))
        return training.held_out_loss()


def run_training(args: Namespace) -> dict[str, Any]:
    names = ["fp32", *args.pairs]
    size = Size(args.layers, args.width, args.heads, args.context, args.batch)
    runs = [
        Run(name, seed, args.steps, beta2, size) for beta2 in args.beta2 for seed in range(args.seeds) for name in names
    ]
    losses: dict[str, dict[str, list[float]]] = {str(beta2): {name: [] for name in names} for beta2 in args.beta2}
    with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
        found = tqdm(pool.imap(Run.held_out_loss, runs), desc="train", total=len(runs), disable=None)
        for run, loss in zip(runs, found, strict=True):
            losses[str(run.beta2)][run.name].append(loss)
            print(f"beta2 {run.beta2}, seed {run.seed}, {run.name}: {loss:.5f}", file=sys.stderr, flush=True)
    for beta2, by_name in losses.items():
        rows = []
        for name, of_name in by_name.items():
            more = [100 * (one / two - 1) for one, two in zip(of_name, by_name["fp32"], strict=True)]
            mean = [f"{sum(each) / len(each):{form}}" for each, form in ((of_name, ".4f"), (more, "+.2f"))]
            rows.append([name, *mean, " ".join(f"{each:+.2f}" for each in more)])
        show(f"held-out loss, beta2 {beta2}", ("states", "nats a byte", "% over fp32", "by seed"), rows)
    return losses


def main() -> None:
    parser = parser_of(__doc__ or "")
    parser.add_argument("--steps", type=int, default=300, help="of a training")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each format")
    parser.add_argument("--beta2", type=float, nargs="+", default=[0.999], help="of AdamW")
    for field in fields(Size):
        parser.add_argument(f"--{field.name}", type=int, default=field.default, help="of the GPT and its batches")
    parser.add_argument("--workers", type=int, default=2, help="trainings at a time, of a thread each")
    parser.add_argument("--pairs", nargs="+", default=DEFAULT, choices=FORMATS, help="formats beside fp32")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.seeds = 20, 1
    write_result("codes-train", args, torch.device("cpu"), run_training(args))


if __name__ == "__main__":
    main()
