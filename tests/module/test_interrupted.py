"""KeyboardInterrupt and SystemExit in a forward or backward: torch calls no hook, and weights can still be saved."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardopt
from shardopt import CheckpointError, ShardedSGD, load_checkpoint, save_checkpoint
from tests.support.comparing import snapshot
from tests.support.modules import RATES, W, data, small
from tests.support.ranks import Pool
from tests.support.training import raises

PACKAGE = os.path.dirname(shardopt.__file__)


class Reader(nn.Module):
    """An embedding, whose call has no differentiable input, and layers; ``amid`` is called in forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layers = nn.Embedding(9, W), nn.ModuleList(nn.Linear(W, W) for _ in range(3))
        self.amid: Callable[[str], None] = lambda _: None

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed((x.abs() * 3).long().clamp(max=8))
        for number, layer in enumerate(self.layers):
            x = layer(x)
            self.amid(f"forward {number}")
            x.register_hook(lambda _, number=number: self.amid(f"backward {number}"))
        return x.square().mean()


class Interrupted:
    """A model that trains, and its checkpoints."""

    def __init__(self, stage: int, folder: str) -> None:
        self.folder, self.saves, self.stage = Path(folder), 0, stage
        self.model = Reader()
        self.opt = ShardedSGD(self.model, **RATES, stage=stage, tuning=small())
        self.train(0)

    def backward(self, step: int) -> None:
        self.model(data(step, 4, 2)).backward()

    def train(self, step: int) -> None:
        self.opt.zero_grad()
        self.backward(step)
        self.opt.step()

    def check_saved(self) -> None:
        """What is saved are the weights, and the gradients of a whole backward or none. Collective."""
        self.saves += 1
        path = save_checkpoint(self.folder / str(self.saves), self.model, self.opt).wait()
        other = Reader()
        opt = ShardedSGD(other, **RATES, stage=self.stage, tuning=small())
        load_checkpoint(path, other, opt)
        assert len({param.grad is None for param in other.parameters()}) == 1
        assert snapshot(other, opt) == snapshot(self.model, self.opt)
        opt.close()


def is_saved_amid(stage: int, folder: str) -> None:
    """In the model's own code, once in each module, forward and backward; then training goes on."""
    one, other = Interrupted(stage, f"{folder}/one"), Interrupted(stage, f"{folder}/other")
    moments = [f"{phase} {number}" for phase in ("forward", "backward") for number in range(3)]
    for step, moment in enumerate(moments, 1):

        def interrupt(at: str, moment: str = moment, kind: Any = (KeyboardInterrupt, SystemExit)[step % 2]) -> None:
            if at == moment:
                if stage == 3 and "forward" in at:
                    with raises(CheckpointError, "outside of the module's forward and backward"):
                        save_checkpoint(one.folder, one.model, one.opt)
                raise kind

        one.opt.zero_grad()
        one.model.amid = interrupt
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            one.backward(step)
        one.model.amid = lambda _: None
        one.check_saved()
        one.train(step + 50)
        other.train(step + 50)
        assert snapshot(one.model, one.opt) == snapshot(other.model, other.opt), moment


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_are_saved_amid_a_forward_or_backward(stage: int, ranks: Pool, tmp_path: Path) -> None:
    ranks.run(is_saved_amid, stage, str(tmp_path), world=2)


def interrupted_at(line: int, call: Callable[[], object]) -> int:
    """Raises KeyboardInterrupt at this line of all that the package runs in the call. Returns how many ran."""
    ran = 0

    def in_package(_: FrameType, event: str, __: Any) -> Any:
        nonlocal ran
        if event == "line":
            ran += 1
            if ran == line:
                sys.settrace(None)
                raise KeyboardInterrupt
        return in_package

    before = sys.gettrace()
    sys.settrace(lambda frame, *_: in_package if frame.f_code.co_filename.startswith(PACKAGE) else None)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return ran


def is_saved_at(stage: int, share: int, folder: str) -> None:
    """At any line of the package: what was under way there is taken back later, and nothing but the batch is lost."""
    one, other = Interrupted(stage, f"{folder}/one"), Interrupted(stage, f"{folder}/other")
    lines = interrupted_at(-1, lambda: one.backward(1))
    for step in range(1, lines, share):
        one.opt.zero_grad()
        interrupted_at(step, lambda step=step: one.backward(step))
        one.check_saved()
        one.train(-step)
        other.train(-step)
        assert snapshot(one.model, one.opt) == snapshot(other.model, other.opt), step


@pytest.mark.parametrize("share", [389, pytest.param(1, marks=pytest.mark.slow)])
def test_weights_are_saved_at_any_line(share: int, ranks: Pool, tmp_path: Path) -> None:
    for stage in (2, 3):
        ranks.run(is_saved_at, stage, share, str(tmp_path / str(stage)), world=1, deadline=3600.0)
