"""Hugging Face ``Trainer`` with only the optimizer's line changed: trained, killed, resumed in new processes.

Beside it, the same Trainer on the same data with ``torch.optim.AdamW`` under DDP, never interrupted.
"""

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
    find_spec("transformers") is None, reason="needs the extra 'frameworks': pip install .[frameworks]"
)

STEPS, SAVED_AT = 6, 4
ADAMW: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
SMALL = Tuning(bucket_bytes=20_000, keep_below=300)

# stage, whether the module is handed over, which form of the Trainer's argument, bf16
VARIANTS: dict[str, tuple[int, bool, str, bool]] = {
    "stage 1, params": (1, False, "optimizers", False),
    "stage 1, params, bf16": (1, False, "class", True),
    "stage 1": (1, True, "optimizers", False),
    "stage 2": (2, True, "class", False),
    "stage 2, bf16": (2, True, "optimizers", True),
    "stage 3": (3, True, "optimizers", False),
    "stage 3, bf16": (3, True, "class", True),
    "stage 2, computed in bf16": (2, True, "class", True),
    "stage 3, computed in bf16": (3, True, "optimizers", True),
}


class Samples(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences in which a token follows from the one before."""

    def __init__(self, seed: int, size: int):
        generator = torch.Generator().manual_seed(seed)
        start = torch.randint(0, 48, (size, 1), generator=generator)
        self.tokens = (start + 5 * torch.arange(12)) % 48

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def make_model() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=48, n_positions=12))


def is_computed(name: str) -> bool:
    """True if ``compute_dtype`` says so, in place of the Trainer's option."""
    return "computed" in name


def make_trainer(folder: str, steps: int, bf16: bool, model: nn.Module, **optimizer: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        bf16=bf16,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        weight_decay=0.2,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=SAVED_AT,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=3,
    )
    trainer = Trainer(model, arguments, train_dataset=Samples(1, 64), eval_dataset=Samples(2, 8), **optimizer)
    if steps < STEPS:
        trainer.add_callback(stop_after(steps))
    return trainer


def stop_after(steps: int) -> Any:
    """The schedule is that of the whole training, which ends in mid-flight."""
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step >= steps

    return Stop()


def sharded(model: nn.Module, name: str) -> dict[str, Any]:
    """The line that changes."""
    stage, module, form, _ = VARIANTS[name]
    options: dict[str, Any] = {"stage": stage, "module": model if module else None, "tuning": SMALL}
    if is_computed(name):
        options |= {"compute_dtype": torch.bfloat16, "output_dtype": torch.float32}
    if form == "class":
        return {"optimizer_cls_and_kwargs": (ShardedAdamW, {**ADAMW, **options})}
    return {"optimizers": (ShardedAdamW(model.parameters(), **ADAMW, **options), None)}


def history(trainer: Any) -> dict[str, list[float]]:
    """What the Trainer logged, by name."""
    names = ("loss", "grad_norm", "learning_rate", "eval_loss")
    return {name: [float(each[name]) for each in trainer.state.log_history if name in each] for name in names}


def reference(folder: str) -> dict[tuple[str, bool], tuple[dict[str, list[float]], dict[str, Tensor]]]:
    """By form (the Trainer makes groups without decay where it is given the class) and bf16."""
    found = {}
    for form in ("optimizers", "class"):
        for bf16 in (False, True):
            model = make_model()
            whole: dict[str, Any] = {"optimizers": (torch.optim.AdamW(model.parameters(), **ADAMW), None)}
            optimizer = whole if form == "optimizers" else {"optimizer_cls_and_kwargs": (torch.optim.AdamW, ADAMW)}
            trainer = make_trainer(f"{folder}/torch-{form}-{bf16}", STEPS, bf16, model, **optimizer)
            trainer.train()
            params = {name: value.detach().clone() for name, value in model.state_dict().items()}
            found[form, bf16] = history(trainer), params
    return found


def begin(folder: str) -> Any:
    """All variants, two steps beyond the checkpoint."""
    expected = reference(folder)
    for name, (stage, _, _, bf16) in VARIANTS.items():
        model = make_model()
        by_trainer = bf16 and not is_computed(name)
        trainer = make_trainer(f"{folder}/{name}", SAVED_AT + 1, by_trainer, model, **sharded(model, name))
        trainer.train()
        opt = trainer.optimizer.optimizer
        assert opt.options.stage == stage and opt.engine.domain.mesh.shard.size == 2
        opt.close()
    return expected


def resume(folder: str, expected: Any) -> None:
    for name, (_, _, form, bf16) in VARIANTS.items():
        model = make_model()
        by_trainer = bf16 and not is_computed(name)
        trainer = make_trainer(f"{folder}/{name}", STEPS, by_trainer, model, **sharded(model, name))
        trainer.train(resume_from_checkpoint=f"{folder}/{name}/checkpoint-{SAVED_AT}")
        losses, params = expected[form, bf16]
        close = {"rtol": 2e-2 if bf16 else 2e-4, "atol": 2e-3 if bf16 else 2e-5}
        for what, values in history(trainer).items():
            mine, theirs = torch.tensor(values), torch.tensor(losses[what])
            torch.testing.assert_close(mine, theirs, msg=lambda text, at=f"{name}, {what}": f"{at}: {text}", **close)
        opt = trainer.optimizer.optimizer
        with opt.unsharded():
            distance = apart(model.state_dict(), params, make_model().state_dict())
        assert distance < (0.1 if bf16 else 1e-3), f"{name}: {distance}"
        opt.close()


def test_trains_is_killed_and_resumes(tmp_path: Path) -> None:
    expected = launch(begin, str(tmp_path), killed=True, frameworks=True)
    first = expected[0]
    losses = first["optimizers", False][0]["loss"]
    assert len(losses) == STEPS and losses[-1] < losses[0] - 0.1
    launch(resume, str(tmp_path), first, frameworks=True)
