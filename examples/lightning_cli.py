"""LightningCLI: the config names optimizer, options and stage. It needs pip install "jsonargparse[signatures]".

python examples/lightning_cli.py fit --config examples/lightning_cli.yaml
python examples/lightning_cli.py fit --config examples/lightning_cli.yaml --model.optimizer.stage 3 --trainer.devices 2
"""

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI, OptimizerCallable
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset


class Regression(LightningModule):
    """``optimizer``: what the config makes: a function of params, which takes the module as well."""

    def __init__(self, optimizer: OptimizerCallable, width: int = 256) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))
        self.optimizer = optimizer

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[0].mean(dim=1, keepdim=True))
        self.log("loss", loss)
        return loss

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(TensorDataset(torch.randn(64, 16)), batch_size=8)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self)  # from stage 2 on shardopt takes the module, at stage 1 it may


if __name__ == "__main__":
    trainer = LightningCLI(Regression, save_config_callback=None).trainer
    print(f"stage {trainer.optimizers[0].options.stage}: loss {float(trainer.callback_metrics['loss']):.4f}")
