"""Subclasses of ``nn.Parameter`` at stage 3: methods, attributes and ``isinstance`` are those of before, always."""

from typing import Any

import torch
from torch import Tensor, nn

from shardopt import ReleasedError
from tests.support.comparing import snapshot
from tests.support.modules import W, made, nothing_left, plain, train_step, watched
from tests.support.ranks import Pool
from tests.support.training import raises


class Tagged(nn.Parameter):
    """With a method, a class attribute and attributes of its own."""

    kind = "tagged"
    note: str

    def doubled(self) -> Tensor:
        return self.data * 2


class Slotted(nn.Parameter):
    __slots__ = ("note",)


class Watching(nn.Parameter):
    """Sees what is computed with it."""

    seen = 0

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Watching.seen += 1
        return super().__torch_function__(function, types, args, kwargs or {})


class Kinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, kind in (("a", Tagged), ("b", Slotted), ("c", Watching), ("d", nn.Parameter)):
            param: Any = kind(torch.empty(W, W))
            if kind in (Tagged, Slotted):
                param.note = name
            setattr(self, name, param)
        self.frozen = Tagged(torch.empty(W, W), requires_grad=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for param in self.parameters():
            nn.init.normal_(param, std=0.2)

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.a, Tagged)
        return x @ self.a.doubled().to(x.dtype) @ self.a @ self.b @ self.c @ self.d + x @ self.frozen


CLASSES = [Tagged, Slotted, Watching, nn.Parameter, Tagged]


def check(model: Any) -> None:
    for param, kind in zip(model.parameters(), CLASSES, strict=True):
        assert isinstance(param, kind) and isinstance(param, nn.Parameter)
    assert (model.a.note, model.b.note, model.a.kind) == ("a", "b", "tagged") and model.a.doubled().shape == (W, W)


def trains() -> None:
    results = []
    for stage in (1, 3):
        for on_meta in (False, True):
            with watched() as buckets:
                torch.manual_seed(0)
                model, opt = made(stage, on_the_meta_device if on_meta else Kinds)
                check(model)
                for step in range(2):
                    train_step(model, opt, step)
                    check(model)
                    assert nothing_left(buckets)
                if stage == 3:
                    for param in model.parameters():
                        with raises(ReleasedError, "sharded over the ranks"):
                            param.sum()
                with opt.unsharded():
                    assert [type(param) for param in model.parameters()] == CLASSES
                results.append(snapshot(model, opt))
                model.frozen.requires_grad_(True)  # it moves into another bucket
                plain(model, 3)
                opt.step()
                check(model)
                opt.close()
            assert [type(param) for param in model.parameters()] == CLASSES and Watching.seen
            check(model)
    assert results[0] == results[2] and results[1] == results[3]


def on_the_meta_device() -> nn.Module:
    with torch.device("meta"):
        return Kinds()


def test_subclasses(ranks: Pool) -> None:
    ranks.run(trains, world=2)
