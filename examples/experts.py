"""A transformer whose layers are mixtures of experts, spread over ranks; stage 3 shards each expert over its copies.

torchrun --standalone --nproc-per-node 8 examples/experts.py runs                        2 copies of experts on 4 ranks
torchrun --standalone --nproc-per-node 2 examples/experts.py runs copies=1 ranks=2       goes on, four experts on a rank
torchrun --standalone --nproc-per-node 1 examples/experts.py runs copies=1 ranks=1       on one rank, all of them

Kill it when you like: what was published last is whole, and loads in any cut. First values and batches are the same in
each, so losses are too, but for the order in which ranks add.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh

import shardopt


@dataclass(frozen=True)
class Config:
    folder: str
    copies: int = 2  # of each expert
    ranks: int = 4  # over which the experts of a layer are spread
    steps: int = 8
    save_every: int = 3
    warmup: int = 2
    batch: int = 16  # sequences of a step, on all ranks together
    context: int = 16
    vocab: int = 64
    width: int = 64
    layers: int = 2
    heads: int = 4
    experts: int = 8  # of a layer
    lr: float = 1e-2
    keep_below: int = 1024  # smaller params stay whole; the default is for models that are not this small


class Expert(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 2 * config.width, bias=False)
        self.down = nn.Linear(2 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        done: Tensor = self.down(nn.functional.silu(self.up(x)))
        return done


class Mixture(nn.Module):
    """Sends each token to the rank of the expert that the gate likes best, and takes it back."""

    def __init__(self, config: Config, number: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.size = group, config.experts // group.size()
        self.gate = seeded(number, lambda: nn.Linear(config.width, config.experts, bias=False))
        self.first = group.rank() * self.size  # experts are numbered from 0 on each rank, so units are called alike
        own = range(number + self.first + 1, number + self.first + self.size + 1)
        self.experts = nn.ModuleList(seeded(each, lambda: Expert(config)) for each in own)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weight, chosen = self.gate(tokens).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        mine = chosen.bincount(minlength=self.size * self.group.size())  # tokens of this rank, by expert
        theirs = torch.empty_like(mine)  # tokens for this rank's experts, by rank and expert
        dist.all_to_all_single(theirs, mine, group=self.group)
        sent, received = (each.view(-1, self.size).sum(1).tolist() for each in (mine, theirs))
        arrived = all_to_all_single_autograd(tokens[order], received, sent, self.group)
        expert_of = torch.arange(len(theirs), device=x.device).remainder(self.size).repeat_interleave(theirs)
        done = torch.zeros_like(arrived)
        for number, expert in enumerate(self.experts):
            (places,) = torch.where(expert_of == number)  # maybe none: its gradient is zero then, as in every cut
            done = done.index_add(0, places, expert(arrived[places]))
        back = all_to_all_single_autograd(done, sent, received, self.group)
        y: Tensor = back[order.argsort()] * weight.unsqueeze(1)
        return y.view_as(x)


class Block(nn.Module):
    def __init__(self, config: Config, number: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        width, self.heads = config.width, config.heads
        self.norm, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = seeded(number, lambda: nn.Linear(width, 3 * width, bias=False))
        self.out = seeded(number + 1, lambda: nn.Linear(width, width, bias=False))
        self.mixture = Mixture(config, number + 2, group)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        done: Tensor = self.mixture(self.norm2(x))
        return x + done


class Decoder(nn.Module):
    def __init__(self, config: Config, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.embed = seeded(0, lambda: nn.Embedding(config.vocab, config.width))
        self.blocks = nn.ModuleList(Block(config, 100 * (index + 1), group) for index in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = seeded(1, lambda: nn.Linear(config.width, config.vocab, bias=False))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def seeded(seed: int, make: Callable[[], nn.Module]) -> nn.Module:
    """A module has the same first values in every cut."""
    torch.manual_seed(seed)
    return make()


def batch_of(config: Config, step: int) -> Tensor:
    """Sequences that count in threes: [batch, context + 1]."""
    start = torch.randint(config.vocab, (config.batch, 1), generator=torch.Generator().manual_seed(step))
    return (start + 3 * torch.arange(config.context + 1)) % config.vocab


def main(config: Config) -> None:
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group()
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (config.copies, config.ranks), mesh_dim_names=("copies", "experts"))
    model = Decoder(config, mesh["experts"].get_group()).to(device)
    mixtures = {name: each for name, each in model.named_modules() if isinstance(each, Mixture)}
    spread = {param for each in mixtures.values() for param in each.experts.parameters()}
    groups: list[dict[str, Any]] = [
        {"params": [param for param in model.parameters() if param not in spread]},  # shared by all ranks
        {
            "params": [param for param in model.parameters() if param in spread],
            "process_group": mesh["copies"].get_group(),
        },
    ]
    opt = shardopt.ShardedAdamW(
        groups,
        module=model,
        lr=config.lr,
        stage=3,
        max_grad_norm=1.0,
        tuning=shardopt.Tuning(keep_below=config.keep_below),
    )
    rates = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: min((step + 1) / config.warmup, 1.0))
    # What experts are called in the whole model.
    names: dict[Any, str] = {
        expert: f"{name}.experts.{each.first + number}"
        for name, each in mixtures.items()
        for number, expert in enumerate(each.experts)
    }

    begin = 0
    if os.path.exists(os.path.join(config.folder, "latest")):
        loaded = shardopt.load_checkpoint(config.folder, model, opt, names=names)
        rates.load_state_dict(loaded["rates"])
        begin = loaded["step"]
    for step in range(begin, config.steps):
        tokens = batch_of(config, step).chunk(world)[rank].to(device)
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        opt.step()
        rates.step()
        total = loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step}: loss {total.item() / world:.6f}", flush=True)
        if (step + 1) % config.save_every == 0:
            extra = {"step": step + 1, "rates": rates.state_dict()}
            shardopt.save_checkpoint(config.folder, model, opt, extra=extra, keep=2, names=names)  # every rank calls it
    opt.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    folder, *changes = sys.argv[1:] or ["runs"]
    given: dict[str, Any] = {name: int(value) for name, value in (each.split("=") for each in changes)}
    main(replace(Config(folder), **given))
