"""Lightning: configure_optimizers returns shardopt's optimizer, the Trainer keeps strategy="ddp".

python examples/lightning_module.py                                      one process
torchrun --standalone --nproc-per-node 2 examples/lightning_module.py    two ranks
"""

import os
import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from shardopt import ShardedAdamW


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[0].mean(dim=1, keepdim=True))
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> ShardedAdamW:
        return ShardedAdamW(self, lr=1e-2, stage=2)


def main(folder: str) -> None:
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 16)), batch_size=8)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = Trainer(
        max_epochs=2,
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        gradient_clip_val=1.0,
        default_root_dir=folder,
        logger=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), batches)
    print(f"loss {float(trainer.callback_metrics['loss']):.4f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "lightning-run")
