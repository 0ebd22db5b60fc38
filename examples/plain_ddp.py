"""A training loop in plain PyTorch: made by torchrun or alone, saved, and resumed where it was.

python examples/plain_ddp.py runs                                            one process
torchrun --standalone --nproc-per-node 2 examples/plain_ddp.py runs          two ranks; `runs` is seen by all of them
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import shardopt


def main(runs: str, steps: int = 20) -> None:
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    model.to(device)
    rank = 0
    if "RANK" in os.environ:
        dist.init_process_group()
        rank = dist.get_rank()
        model = DistributedDataParallel(model)
    # was: torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    opt = shardopt.ShardedAdamW(model, lr=1e-3, weight_decay=0.1, stage=2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 100)

    begin = 0
    if os.path.exists(os.path.join(runs, "latest")):
        loaded = shardopt.load_checkpoint(runs, model, opt)
        schedule.load_state_dict(loaded["schedule"])
        begin = loaded["step"]
    for step in range(begin, begin + steps):
        generator = torch.Generator().manual_seed(1000 * step + rank)  # other data on every rank and in every step
        x = torch.randn(16, 64, generator=generator).to(device)
        loss = torch.nn.functional.mse_loss(model(x), x.mean(dim=1, keepdim=True))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        schedule.step()
        opt.zero_grad()
        if rank == 0 and step % 5 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    extra = {"step": begin + steps, "schedule": schedule.state_dict()}
    shardopt.save_checkpoint(runs, model, opt, extra=extra, keep=2)  # every rank calls it
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs")
