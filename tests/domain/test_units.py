"""The units of models as people write them: each block of a run is one, and nothing cuts a block."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations

from shardopt.domain.model_units import REST, units_of

W = 64


def mlp(width: int = W) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


class Block(nn.Module):
    def __init__(self, experts: int = 0) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(W), nn.MultiheadAttention(W, 4)
        self.mlp: nn.Module = nn.ModuleList(mlp() for _ in range(experts)) if experts else mlp()


class Tower(nn.Module):
    def __init__(self, blocks: int = 3, experts: int = 0) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(100, W), nn.ModuleList(Block(experts) for _ in range(blocks))
        self.norm = nn.LayerNorm(W)


class Language(nn.Module):
    """A transformer inside of a model with a head, tied or not."""

    def __init__(self, tied: bool = False, **kind: int) -> None:
        super().__init__()
        self.model, self.lm_head = Tower(**kind), nn.Linear(W, 100, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed.weight


class TwoTowers(nn.Module):
    """Two modules of one class that are towers, not blocks; a param of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.document, self.scale = Tower(), Tower(), nn.Parameter(torch.ones(100, W))


class Siblings(nn.Module):
    """Blocks by attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = Block(), Block(), nn.Linear(W, W)


class Residual(nn.Module):
    """Stages that are containers, of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, W, 7)
        self.stage1, self.stage2 = nn.Sequential(mlp(), mlp()), nn.Sequential(Block(), Block())
        self.stage3 = nn.Sequential(Block())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(100, W), nn.LSTM(W, W, 2)
        self.out = parametrizations.weight_norm(nn.Linear(W, 100))


def wrapped() -> nn.Module:
    model = Language()
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = checkpoint_wrapper(layer)
    return model


LAYERS = ["model.layers.0", "model.layers.1", "model.layers.2"]
CASES: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "language model": (Language, ["model.embed", *LAYERS, REST, "lm_head"]),
    "experts": (lambda: Language(experts=4), ["model.embed", *LAYERS, REST, "lm_head"]),
    "tied": (lambda: Language(tied=True), ["model.embed", *LAYERS, REST]),
    "checkpointed": (wrapped, ["model.embed", *LAYERS, REST, "lm_head"]),
    "two towers": (
        TwoTowers,
        [
            *("", "query.embed", "query.layers.0", "query.layers.1", "query.layers.2", REST),
            *("document.embed", "document.layers.0", "document.layers.1", "document.layers.2"),
        ],
    ),
    "siblings": (Siblings, ["one", "two", "out"]),
    "stages": (
        Residual,
        ["stem", "stage1.0", "stage1.1", "stage2.0", "stage2.1", "stage3.0"],
    ),
    "recurrent": (Recurrent, ["embed", "rnn", "out"]),
    "layers": (lambda: nn.Sequential(nn.Linear(W, W), nn.ReLU(), nn.Linear(W, W)), ["0", "2"]),
    "of torch": (
        lambda: nn.Transformer(W, 4, 2, 1, 2 * W, batch_first=True),
        ["encoder.layers.0", "encoder.layers.1", REST, "decoder.layers.0"],
    ),
    "one module": (lambda: nn.Linear(W, W), [""]),
}


@pytest.mark.parametrize("name", CASES)
def test_units(name: str) -> None:
    make, expected = CASES[name]
    model = make()
    units = units_of(model)
    assert [unit.name for unit in units] == expected
    # Every param is in one unit, and whoever owns a param is, or lies in, a module whose call needs that unit.
    assert sorted(map(id, (param for unit in units for param in unit.params))) == sorted(map(id, model.parameters()))
    for unit in units:
        needing = {each for module in unit.modules for each in module.modules()}
        for param in unit.params:
            assert {each for each in model.modules() if param in set(each.parameters(recurse=False))} <= needing
    assert [unit.name for unit in units_of(make())] == expected


def test_a_tied_param_is_used_early_and_late() -> None:
    model = Language(tied=True)
    embed, *others = units_of(model)
    assert embed.modules == (model.model.embed, model.lm_head) and embed.is_spread
    assert not any(unit.is_spread for unit in others if unit.name != REST)
