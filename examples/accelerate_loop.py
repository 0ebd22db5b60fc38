"""A loop with Accelerate: gradient accumulation, clipping, save_state and load_state.

python examples/accelerate_loop.py                                                       one process
accelerate launch --config_file examples/accelerate.yaml examples/accelerate_loop.py     two ranks
torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py checkpoint          the same

The config names no FSDP and no DeepSpeed. `MULTI_GPU` starts two ranks on CPUs too, where there is no GPU; `MULTI_CPU`
of Accelerate takes mpirun.
"""

import sys

import torch
from accelerate import Accelerator

from shardopt import ShardedAdamW


def main(folder: str) -> None:
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    model = torch.nn.Sequential(torch.nn.Linear(16, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    opt = ShardedAdamW(model, lr=1e-2, stage=2)  # before prepare()
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 16)), batch_size=8)
    model, opt, batches = accelerator.prepare(model, opt, batches)
    for (x,) in batches:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(x), x.mean(dim=1, keepdim=True))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
    accelerator.save_state(folder)  # the main process writes, and the others do not wait for it
    accelerator.wait_for_everyone()
    accelerator.load_state(folder)
    accelerator.print(f"loss {loss.item():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "checkpoint")
