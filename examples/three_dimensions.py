"""A transformer cut in three dimensions: pipeline stages (pp), stage 3 over copies (dp), tensor parallelism (tp).

torchrun --standalone --nproc-per-node 8 examples/three_dimensions.py runs              pp 2, dp 2, tp 2
torchrun --standalone --nproc-per-node 8 examples/three_dimensions.py runs pp=1 dp=4    goes on, in another cut
torchrun --standalone --nproc-per-node 1 examples/three_dimensions.py runs pp=1 dp=1 tp=1

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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardopt


@dataclass(frozen=True)
class Config:
    folder: str
    pp: int = 2
    dp: int = 2
    tp: int = 2
    steps: int = 8
    save_every: int = 3
    warmup: int = 2
    batch: int = 16  # sequences of a step, on all ranks together
    micro_batches: int = 4  # of a pipeline
    context: int = 16
    vocab: int = 64
    width: int = 64
    layers: int = 4
    heads: int = 4
    lr: float = 1e-2
    keep_below: int = 1024  # smaller params stay whole; the default is for models that are not this small


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        self.head_width = width // config.heads
        self.norm, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        heads = [each(y).unflatten(-1, (-1, self.head_width)) for each in (self.query, self.key, self.value)]
        q, k, v = (each.transpose(1, 2) for each in heads)  # [batch, heads of this rank, tokens, head_width]
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        hidden: Tensor = self.down(nn.functional.silu(self.up(self.norm2(x))))
        return x + hidden


class Stage(nn.Module):
    """The layers of one pipeline stage, called as in the whole model."""

    def __init__(self, config: Config, number: int) -> None:
        super().__init__()
        size = config.layers // config.pp
        self.is_first, self.is_last = number == 0, number == config.pp - 1
        if self.is_first:
            self.embed = seeded(0, lambda: nn.Embedding(config.vocab, config.width))
        own = range(number * size, (number + 1) * size)
        self.blocks = nn.ModuleDict({str(index): seeded(index + 1, lambda: Block(config)) for index in own})
        if self.is_last:
            self.norm = nn.RMSNorm(config.width)
            self.head = seeded(config.layers + 1, lambda: nn.Linear(config.width, config.vocab, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            x = self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.is_last else x


def seeded(seed: int, make: Callable[[], nn.Module]) -> nn.Module:
    """A module has the same first values in every cut."""
    torch.manual_seed(seed)
    return make()


def divide(model: Stage, mesh: DeviceMesh) -> None:
    """Divides matrices over the ranks of the mesh; norms stay whole."""
    columns, rows = ColwiseParallel(), RowwiseParallel()
    for block in model.blocks.values():
        plan = {"query": columns, "key": columns, "value": columns, "out": rows, "up": columns, "down": rows}
        parallelize_module(block, mesh, plan)
    if model.is_first:
        parallelize_module(model, mesh, {"embed": RowwiseParallel(input_layouts=Replicate())})
    if model.is_last:
        parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), target.flatten())


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
    mesh = init_device_mesh(device.type, (config.pp, config.dp, config.tp), mesh_dim_names=("pp", "dp", "tp"))
    model = Stage(config, mesh["pp"].get_local_rank()).to(device)
    divide(model, mesh["tp"])
    opt = shardopt.ShardedAdamW(
        model,
        lr=config.lr,
        stage=3,
        process_group=mesh["dp"].get_group(),  # the ranks that hold the same
        norm_group=dist.group.WORLD,  # the ranks that clip by one norm
        max_grad_norm=1.0,
        tuning=shardopt.Tuning(keep_below=config.keep_below),
    )
    rates = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: min((step + 1) / config.warmup, 1.0))
    stage = PipelineStage(model, mesh["pp"].get_local_rank(), config.pp, device, group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, config.micro_batches, loss_fn=loss_of)

    begin = 0
    if os.path.exists(os.path.join(config.folder, "latest")):
        loaded = shardopt.load_checkpoint(config.folder, model, opt)
        rates.load_state_dict(loaded["rates"])
        begin = loaded["step"]
    for step in range(begin, config.steps):
        tokens = batch_of(config, step).chunk(config.dp)[mesh["dp"].get_local_rank()].to(device)
        inputs = (tokens[:, :-1],) if model.is_first else ()
        losses: list[Tensor] = []  # of micro-batches, on the last stage
        opt.zero_grad()
        schedule.step(*inputs, target=tokens[:, 1:] if model.is_last else None, losses=losses)
        opt.step()
        rates.step()
        loss = torch.stack(losses).mean() if losses else torch.zeros((), device=device)
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item() / (config.dp * config.tp):.6f}", flush=True)
        if (step + 1) % config.save_every == 0:
            extra = {"step": step + 1, "rates": rates.state_dict()}
            shardopt.save_checkpoint(config.folder, model, opt, extra=extra, keep=2)  # every rank calls it
    opt.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    folder, *changes = sys.argv[1:] or ["runs"]
    given: dict[str, Any] = {name: int(value) for name, value in (each.split("=") for each in changes)}
    main(replace(Config(folder), **given))
