"""Lightning's ``Trainer(strategy="ddp")`` with only the optimizer's line changed: trained, killed, resumed.

Beside it, the same module with ``torch.optim.AdamW``, never interrupted.
"""

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardopt import ShardedAdamW, Tuning
from tests.support.launch import launch
from tests.support.training import apart

pytestmark = pytest.mark.skipif(
    find_spec("lightning") is None, reason="needs the extra 'frameworks': pip install .[frameworks]"
)

STEPS, SAVED_AT = 8, 4
ADAMW: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
SMALL = Tuning(bucket_bytes=20_000, keep_below=300)

# stage, whether the module is handed over, precision
VARIANTS = {
    "stage 1, params": (1, False, "32-true"),
    "stage 1, bf16": (1, True, "bf16-mixed"),
    "stage 2": (2, True, "32-true"),
    "stage 3": (3, True, "32-true"),
    "stage 3, bf16": (3, True, "bf16-mixed"),
}


def make_module(kind: str) -> Any:
    """The LightningModule; ``kind``: of the optimizer."""
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed = nn.Embedding(24, 16)
            self.hidden = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.LayerNorm(16))
            self.head = nn.Linear(16, 24)
            self.losses: list[float] = []
            self.norms: list[float] = []

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.hidden(self.embed(tokens)))

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("validation", nn.functional.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norms = [param.grad.norm() for param in self.parameters()]
            self.norms.append(float(torch.linalg.vector_norm(torch.stack(norms))))

        def configure_optimizers(self) -> Any:
            if kind == "torch":
                opt = torch.optim.AdamW(self.parameters(), **ADAMW)
            else:
                stage, has_module, _ = VARIANTS[kind]
                module = self if has_module else None
                opt = ShardedAdamW(self.parameters(), **ADAMW, stage=stage, module=module, tuning=SMALL)
            schedule = torch.optim.lr_scheduler.StepLR(opt, 3, 0.5)
            return {"optimizer": opt, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return Module()


def loader(seed: int, size: int) -> Any:
    """An epoch of training is SAVED_AT steps: Lightning resumes in mid-epoch with the epoch's first batch."""
    tokens = torch.randint(0, 24, (size,), generator=torch.Generator().manual_seed(seed))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens, (5 * tokens + 1) % 24), batch_size=4)


Run = dict[str, Any]


def run(folder: str, kind: str, end: int, precision: str, resumed: bool = False) -> Run:
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=SAVED_AT, save_top_k=-1)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        precision=precision,
        max_steps=end,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        val_check_interval=6,
        callbacks=[saving],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = make_module(kind)
    ckpt = f"{folder}/step={SAVED_AT}.ckpt" if resumed else None
    trainer.fit(module, loader(1, 64), loader(2, 16), ckpt_path=ckpt)
    found: Run = {"loss": module.losses, "norm": module.norms}
    found["validation"] = [float(trainer.callback_metrics["validation"])]
    found["rate"] = [trainer.optimizers[0].param_groups[0]["lr"]]
    if kind == "torch":
        return found | {"model": plain(module)}
    opt = trainer.optimizers[0]
    assert type(opt) is ShardedAdamW and opt.engine.domain is not None and opt.engine.domain.mesh.shard.size == 2
    with opt.unsharded():
        found["model"] = plain(module)
    opt.close()
    return found


def plain(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def begin(folder: str) -> dict[str, Run]:
    warnings.simplefilter("ignore")
    expected = {each: run(f"{folder}/torch-{each}", "torch", STEPS, each) for each in ("32-true", "bf16-mixed")}
    for name, (_, _, precision) in VARIANTS.items():
        run(f"{folder}/{name}", name, SAVED_AT + 2, precision)
    return expected


def resume(folder: str, expected: list[dict[str, Run]]) -> None:
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    for name, (_, _, precision) in VARIANTS.items():
        found = run(f"{folder}/{name}", name, STEPS, precision, resumed=True)
        theirs = expected[dist.get_rank()][precision]
        close = {"rtol": 2e-2, "atol": 5e-3} if precision != "32-true" else {"rtol": 2e-4, "atol": 2e-5}
        for what in ("loss", "norm", "validation", "rate"):
            values = torch.tensor(found[what])
            last = torch.tensor(theirs[what][-len(values) :])
            torch.testing.assert_close(values, last, msg=lambda text, at=f"{name}, {what}": f"{at}: {text}", **close)
        distance = apart(found["model"], theirs["model"], make_module("torch").state_dict())
        assert distance < (1e-3 if precision == "32-true" else 0.1), f"{name}: {distance}"


def test_trains_is_killed_and_resumes(tmp_path: Path) -> None:
    expected = launch(begin, str(tmp_path), killed=True, frameworks=True)
    losses = expected[0]["32-true"]["loss"]
    assert len(losses) == 2 * STEPS and sum(losses[-4:]) < sum(losses[:4]) - 0.4
    launch(resume, str(tmp_path), expected, frameworks=True)


def fits_and_tests(folder: str) -> None:
    """What Lightning does behind ``fit()``: it sends rank 0's params to all, sharded ones too, and evaluates."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    warnings.simplefilter("ignore")
    losses = []
    for kind in ("torch", "stage 3"):
        best = ModelCheckpoint(f"{folder}/{kind}", monitor="validation", mode="min")
        trainer = Trainer(
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            max_steps=SAVED_AT,
            val_check_interval=2,
            callbacks=[best],
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = make_module(kind)
        module.test_step = module.validation_step
        trainer.fit(module, loader(1, 64), loader(2, 16))
        found = [
            trainer.validate(module, loader(2, 16), verbose=False),
            trainer.test(module, loader(3, 16), verbose=False),
            trainer.test(module, loader(3, 16), ckpt_path="best", verbose=False),
        ]
        losses.append([each[0]["validation"] for each in found])
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=2e-4, atol=2e-5)


def test_fits_and_tests(tmp_path: Path) -> None:
    launch(fits_and_tests, str(tmp_path), frameworks=True)
