"""A loop like torchtitan's, in plain PyTorch: a config, a model built on the meta device, stage 3, activation
checkpoints, gradient accumulation, warmup and decay, clipping, asynchronous checkpoints, metrics.

python examples/pretrain.py runs                                          one process
torchrun --standalone --nproc-per-node 2 examples/pretrain.py runs        two ranks
"""

import os
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardopt


@dataclass(frozen=True)
class Config:
    folder: str
    steps: int = 8
    warmup: int = 2
    accumulation: int = 2
    batch: int = 4
    context: int = 16
    vocab: int = 256
    width: int = 128
    layers: int = 2
    heads: int = 4
    lr: float = 3e-3
    save_every: int = 4


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.RMSNorm(config.width), nn.RMSNorm(config.width)
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, c))
        hidden: Tensor = self.down(nn.functional.silu(self.up(self.norm2(x))))
        return x + hidden


class Decoder(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        logits: Tensor = self.head(self.norm(x))
        return logits


def main(config: Config) -> None:
    rank = 0
    if "RANK" in os.environ:
        dist.init_process_group()
        rank = dist.get_rank()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    with torch.device("meta"):  # no rank ever holds the whole model
        model = Decoder(config).bfloat16()
    opt = shardopt.ShardedAdamW(model, lr=config.lr, betas=(0.9, 0.95), weight_decay=0.1, stage=3, master="split")
    schedule = torch.optim.lr_scheduler.LambdaLR(
        opt, lambda step: min((step + 1) / config.warmup, max(0.1, 1 - step / config.steps))
    )
    saving = None
    for step in range(config.steps):
        for micro in range(config.accumulation):
            generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
            start = torch.randint(0, config.vocab, (config.batch, 1), generator=generator)
            tokens = ((start + 3 * torch.arange(config.context + 1)) % config.vocab).to(device)
            logits = model(tokens[:, :-1]).float()
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / config.accumulation
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        schedule.step()
        opt.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {loss.item() * config.accumulation:.4f}, norm {norm.item():.3f}")
        if (step + 1) % config.save_every == 0:
            extra = {"schedule": schedule.state_dict()}
            saving = shardopt.save_checkpoint(config.folder, model, opt, extra=extra, keep=2, asynchronous=True)
    if saving is not None:
        saving.wait()
    if rank == 0:
        print(opt.timings())
    opt.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Config(sys.argv[1] if len(sys.argv) > 1 else "runs"))
