"""How far rules end from float64 after 1,000 steps, beside torch's own class.

    python bench/oracle.py            all rules and seeds
    python bench/oracle.py --quick    does it run?

Three trainings of one small GPT begin with the same params: the oracle's in float64, torch's and shardopt's in fp32.
Each goes its own way: its gradient is that of its own params, computed in float64, and rounded to fp32 for the two that
train in fp32. So what they differ in is the arithmetic of the update. The distance is the root of the mean square of a
param's difference from the oracle's, over all params. Muon's oracle orthogonalizes in float64, where torch's class and
shardopt's do in bf16.

Two trainings that differ in the last bit go apart by chance as well, so the ratio is of geometric means over seeds.
"""

import argparse
import copy
import math
import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from common import parser_of, pick_device, show, write_result
from gpt import GPT
from torch import Tensor, nn

import shardopt

Make = Callable[[nn.Module], Any]
FP32_EPS = torch.finfo(torch.float32).eps


class Oracle(torch.optim.Muon):
    """``torch.optim.Muon`` whose iteration of Newton and Schulz is computed in float64."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                buffer = self.state[param].setdefault("momentum_buffer", torch.zeros_like(param))
                buffer.lerp_(param.grad, 1 - group["momentum"])
                update = param.grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
                update = orthogonalized(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.sub_(update, alpha=group["lr"] * math.sqrt(max(1, param.shape[0] / param.shape[1])))


def orthogonalized(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    a, b, c = coefficients
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


class Both:
    """A class of torch's for the matrices of blocks, and AdamW for all else: no class of torch has both."""

    def __init__(self, model: nn.Module, of_matrices: Callable[..., torch.optim.Optimizer]) -> None:
        matrices, others = parted(model)
        self.parts = (of_matrices(matrices, lr=0.02), torch.optim.AdamW(others))

    def step(self) -> None:
        for part in self.parts:
            part.step()


def parted(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    matrices = [param for name, param in model.named_parameters() if "blocks." in name and param.ndim == 2]
    return matrices, [param for param in model.parameters() if not any(param is each for each in matrices)]


def sharded_muon(model: nn.Module) -> torch.optim.Optimizer:
    matrices, others = parted(model)
    groups = [{"params": matrices, "rule": "muon"}, {"params": others, "rule": "adamw"}]
    return shardopt.ShardedMuon(groups, lr=0.02)


@dataclass(frozen=True)
class Trio:
    oracle: Make
    torch: Make
    shardopt: Make


def _trio(name: str, **arguments: Any) -> Trio:
    """A class of torch's, which computes in float64 where its params are of float64."""

    def torchs(model: nn.Module) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = getattr(torch.optim, name)(model.parameters(), **arguments)
        return made

    def ours(model: nn.Module) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = getattr(shardopt, f"Sharded{name}")(model.parameters(), **arguments)
        return made

    return Trio(torchs, torchs, ours)


TRIOS = {
    "Muon": Trio(partial(Both, of_matrices=Oracle), partial(Both, of_matrices=torch.optim.Muon), sharded_muon),
    # Its first eps is by default that of the param's dtype, which is not the same number in float64.
    "Adafactor": _trio("Adafactor", eps=(FP32_EPS, 1e-3)),
    "AdamW": _trio("AdamW"),
}


def loss_of(model: GPT, tokens: Tensor) -> Tensor:
    """As the model's own, which rounds to fp32."""
    x = model.tokens(tokens[:, :-1]) + model.positions.weight
    for block in model.blocks:
        x = block(x)
    return F.cross_entropy(model.head(model.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


def batches(seed: int, args: argparse.Namespace) -> Iterator[Tensor]:
    """Sequences that go on by a stride of their own, a tenth of their tokens drawn at random: part can be learned."""
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randint, generator=generator)
    for _ in range(args.steps):
        start, stride = draw(args.vocab, (args.batch, 1)), draw(1, 8, (args.batch, 1))
        tokens = (start + stride * torch.arange(args.context + 1)) % args.vocab
        noise = torch.rand(tokens.shape, generator=generator) < 0.1
        yield torch.where(noise, draw(args.vocab, tokens.shape), tokens)


def distances(rule: str, seed: int, args: argparse.Namespace) -> dict[str, float]:
    """Root mean square of the distance from the oracle at the end, of torch's class and of shardopt's."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    first = GPT(args.layers, args.width, 4, args.vocab, args.context)
    models = {"oracle": copy.deepcopy(first).double(), "torch": copy.deepcopy(first), "shardopt": copy.deepcopy(first)}
    optimizers = {who: getattr(TRIOS[rule], who)(model) for who, model in models.items()}
    exact = copy.deepcopy(first).double()  # where gradients are computed
    for tokens in batches(seed, args):
        for who, model in models.items():
            pairs = list(zip(exact.parameters(), model.parameters(), strict=True))
            for mirror, param in pairs:
                mirror.data.copy_(param.data)
            exact.zero_grad()
            loss_of(exact, tokens).backward()
            for mirror, param in pairs:
                param.grad = mirror.grad.to(param.dtype, copy=True) if mirror.grad is not None else None
            optimizers[who].step()
    flat = {
        who: torch.cat([param.detach().double().flatten() for param in model.parameters()])
        for who, model in models.items()
    }
    return {who: float((flat[who] - flat["oracle"]).square().mean().sqrt()) for who in ("torch", "shardopt")}


def main() -> None:
    parser = parser_of(__doc__ or "")
    parser.add_argument("--rules", nargs="+", default=list(TRIOS), choices=list(TRIOS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=48)
    parser.add_argument("--vocab", type=int, default=64)
    parser.add_argument("--context", type=int, default=16)
    parser.add_argument("--batch", type=int, default=4)
    args = parser.parse_args()
    if args.quick:
        args.seeds, args.steps = 1, 5
    asked = [(rule, seed, args) for rule in args.rules for seed in range(args.seeds)]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = dict(zip([each[:2] for each in asked], pool.starmap(distances, asked), strict=True))
    rows = [_row(rule, [found[rule, seed] for seed in range(args.seeds)]) for rule in args.rules]
    titles = ("rule", "torch", "shardopt", "ratio")
    show(
        "distance from float64", titles, [[row["rule"], *(f"{row[title]:.3g}" for title in titles[1:])] for row in rows]
    )
    write_result("oracle", args, pick_device("cpu"), {"rows": rows})


def _row(rule: str, found: list[dict[str, float]]) -> dict[str, Any]:
    means = {who: math.exp(sum(math.log(each[who]) for each in found) / len(found)) for who in ("torch", "shardopt")}
    return {"rule": rule, **means, "ratio": means["shardopt"] / means["torch"], "by seed": found}


if __name__ == "__main__":
    main()
