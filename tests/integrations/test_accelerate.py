"""Accelerate with only the optimizer's line changed: trained, killed, resumed in new processes.

Beside it, the same loop with ``torch.optim.AdamW`` under DDP, never interrupted.
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
    find_spec("accelerate") is None, reason="needs the extra 'frameworks': pip install .[frameworks]"
)

STEPS, SAVED_AT = 6, 3
ADAMW: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
SMALL = Tuning(bucket_bytes=20_000, keep_below=300)

# stage, whether the module is handed over, bf16, saved as safetensors
VARIANTS = {
    "stage 1, params": (1, False, False, True),
    "stage 1, bf16": (1, True, True, False),
    "stage 2": (2, True, False, True),
    "stage 3": (3, True, False, True),
    "stage 3, bf16": (3, True, True, False),
    "stage 2, computed in bf16": (2, True, True, False),
}


class Net(nn.Module):
    """With a tied weight and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(24, 16)
        self.hidden = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.LayerNorm(16))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.head = nn.Linear(16, 24, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        return self.head(self.hidden(self.embed(tokens)))


def samples() -> torch.utils.data.Dataset[Any]:
    tokens = torch.randint(0, 24, (64,), generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(tokens, (5 * tokens + 1) % 24)


Run = dict[str, Any]


def run(folder: str, kind: str, begin: int, end: int, bf16: bool, safe: bool) -> Run:
    """A script of Accelerate's, from step ``begin`` up to ``end``. ``kind``: of the optimizer."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state()
    GradientState._reset_state()
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=2, mixed_precision="bf16" if bf16 and "computed" not in kind else "no"
    )
    model, loader = Net(), torch.utils.data.DataLoader(samples(), batch_size=2, shuffle=False)
    if kind == "torch":
        opt = torch.optim.AdamW(model.parameters(), **ADAMW)
    else:
        stage, has_module = VARIANTS[kind][:2]
        options: dict[str, Any] = {"stage": stage, "module": model if has_module else None, "tuning": SMALL}
        if "computed" in kind:  # by shardopt, in place of Accelerate's autocast
            options |= {"compute_dtype": torch.bfloat16, "output_dtype": torch.float32}
        opt = ShardedAdamW(model.parameters(), **ADAMW, **options)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 4, 0.5)
    model, opt, loader, schedule = accelerator.prepare(model, opt, loader, schedule)
    if begin:
        accelerator.load_state(folder)
        loader = accelerator.skip_first_batches(loader, 2 * begin)
    losses, norms, rates, step = [], [], [], begin
    for tokens, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(tokens), targets)
            accelerator.backward(loss)
            losses.append(loss.item())
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            opt.step()
            schedule.step()
            opt.zero_grad()
        if not accelerator.sync_gradients:
            continue
        assert not accelerator.optimizer_step_was_skipped
        rates.append(opt.param_groups[0]["lr"])
        step += 1
        if step == SAVED_AT and kind != "torch" and not begin:
            accelerator.save_state(folder, safe_serialization=safe)
            if kind == "stage 3":  # inside of unsharded(), as scripts that export do
                with opt.optimizer.unsharded():
                    accelerator.save_model(model, f"{folder}/whole", safe_serialization=True)
                    if accelerator.is_main_process:
                        torch.save(plain(accelerator.unwrap_model(model)), f"{folder}/whole.pt")
        if step == end:
            break
    found = {"loss": losses, "norm": norms, "rate": rates}
    if kind == "torch":
        return found | {"model": plain(accelerator.unwrap_model(model))}
    with opt.optimizer.unsharded():
        found["model"] = plain(accelerator.unwrap_model(model))
    opt.optimizer.close()
    return found


def plain(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def begin(folder: str) -> dict[bool, Run]:
    warnings.simplefilter("ignore")
    expected = {bf16: run(folder, "torch", 0, STEPS, bf16, True) for bf16 in (False, True)}
    for name, (_, _, bf16, safe) in VARIANTS.items():
        run(f"{folder}/{name}", name, 0, SAVED_AT + 1, bf16, safe)
    return expected


def resume(folder: str, expected: list[dict[bool, Run]]) -> None:
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    for name, (_, _, bf16, safe) in VARIANTS.items():
        found = run(f"{folder}/{name}", name, SAVED_AT, STEPS, bf16, safe)
        theirs = expected[dist.get_rank()][bf16]
        close = {"rtol": 2e-2 if bf16 else 2e-4, "atol": 5e-3 if bf16 else 2e-5}
        for what in ("loss", "norm", "rate"):
            values = torch.tensor(found[what])
            last = torch.tensor(theirs[what][-len(values) :])
            torch.testing.assert_close(values, last, msg=lambda text, at=f"{name}, {what}": f"{at}: {text}", **close)
        distance = apart(found["model"], theirs["model"], Net().state_dict())
        assert distance < (0.1 if bf16 else 1e-3), f"{name}: {distance}"
    from safetensors.torch import load_file

    # What was exported in the middle of the training is what the model held then; it names one tied param once.
    whole, held = load_file(f"{folder}/stage 3/whole/model.safetensors"), torch.load(f"{folder}/stage 3/whole.pt")
    assert set(whole) | {"head.weight"} == set(held) == set(Net().state_dict()) | {"head.weight"}
    assert all(torch.equal(value, held[name]) for name, value in whole.items())


def skipped() -> None:
    """``step_was_skipped`` is read off whether the scaler called ``step()``."""
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    warnings.simplefilter("ignore")
    accelerator = Accelerator(cpu=True)
    for stage in (1, 2, 3):
        model = Net()
        opt = ShardedAdamW(model, **ADAMW, stage=stage, tuning=SMALL)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        wrapped = AcceleratedOptimizer(opt, scaler=scaler)
        model = accelerator.prepare(model)
        seen = []
        for step in range(3):
            tokens, targets = torch.arange(4), torch.arange(4)
            loss = nn.functional.cross_entropy(model(tokens), targets) * (float("inf") if step == 1 else 1.0)
            scaler.scale(loss).backward()
            wrapped.step()
            seen.append(wrapped.step_was_skipped)
            wrapped.zero_grad()
        assert seen == [False, True, False] and scaler.get_scale() == 2.0**9
        opt.close()


def test_trains_is_killed_and_resumes(tmp_path: Path) -> None:
    expected = launch(begin, str(tmp_path), killed=True, frameworks=True)
    losses = expected[0][False]["loss"]
    assert len(losses) == 2 * STEPS and sum(losses[-4:]) < sum(losses[:4]) - 0.4
    launch(resume, str(tmp_path), expected, frameworks=True)


def test_a_skipped_step_is_seen() -> None:
    launch(skipped, frameworks=True)
