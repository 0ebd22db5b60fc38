"""Stage 3 outside of modules: what may be read and written, where, and what is saved."""

import copy
import io
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn import functional as F

from shardopt import (
    Part,
    ReleasedError,
    ShardedAdamW,
    ShardedOptimizer,
    StateError,
    Tuning,
)
from shardopt.domain.model_units import units_of
from tests.support.comparing import momenta, raw, snapshot
from tests.support.modules import (
    KEPT,
    Attention,
    Odd,
    Owner,
    Stack,
    Tied,
    W,
    data,
    loss_of,
    made,
    nothing_left,
    plain,
    poisoned,
    small,
    train_step,
)
from tests.support.ranks import Pool
from tests.support.sweep import Row, sweep_at_once
from tests.support.training import raises

# -- outside of modules ------------------------------------------------------------------------------------------------
REFUSED: dict[str, Callable[[Any, Tensor], Any]] = {
    "sum": lambda model, weight: weight.sum(),
    "functional": lambda model, weight: F.linear(torch.ones(2, W), weight),
    "as second operand": lambda model, weight: torch.ones(W, W).add_(weight),
    "in a list": lambda model, weight: torch.cat([torch.ones(1, W), weight]),
    "foreach": lambda model, weight: torch._foreach_norm([weight]),
    "as output": lambda model, weight: torch.add(torch.ones(W, W), 1, out=weight),
    "len": lambda model, weight: len(weight),
    "iteration": lambda model, weight: list(weight),
    "index": lambda model, weight: weight[0],
    "write of an index": lambda model, weight: weight.__setitem__(0, 1.0),
    "in place": lambda model, weight: weight.mul_(2),
    "init": lambda model, weight: nn.init.normal_(weight),
    "assignment of .data": lambda model, weight: setattr(weight, "data", torch.ones(W, W)),
    "clone": lambda model, weight: weight.clone(),
    "deepcopy": lambda model, weight: copy.deepcopy(weight),
    "deepcopy of the model": lambda model, weight: copy.deepcopy(model),
    "numpy": lambda model, weight: weight.numpy(),
    "comparison": lambda model, weight: weight == 0,
    "transposition": lambda model, weight: weight.T,
    "cast of the model": lambda model, weight: model.half(),
    "vector of params": lambda model, weight: nn.utils.parameters_to_vector(model.parameters()),
    "a method of a module": lambda model, weight: model.blocks[0].up.reset_parameters(),
}
ANSWERED: dict[str, Callable[[Any, Tensor], Any]] = {
    "text": lambda model, weight: (
        "(24, 24)" in repr(weight) and "(24, 24)" in f"{weight}" and "Linear(in_features=24" in repr(model)
    ),
    "description": lambda model, weight: (
        (weight.shape, weight.dtype, weight.numel(), weight.dim(), weight.device.type, weight.is_leaf, weight.stride())
        == ((W, W), torch.float32, W * W, 2, "cpu", True, (W, 1))
    ),
    "flags": lambda model, weight: model.requires_grad_() is model and weight.requires_grad and weight in {weight},
    "others like it": lambda model, weight: (
        not torch.zeros_like(weight).any() and weight.new_ones(3).all() and isinstance(weight, Parameter)
    ),
    "its slice": lambda model, weight: isinstance(weight.data, Part) and isinstance(weight.detach(), Part),
}


def outside(live_bytes: int) -> None:
    """Whether the values happen to be cached or not, nobody reads them."""
    model, opt = made(live_bytes=live_bytes)
    train_step(model, opt, 0)
    before = snapshot(model, opt)
    with torch.no_grad():
        model(data(0, 1, 3, W))
    weight = model.first.weight
    for name, read in REFUSED.items():
        with raises(ReleasedError, "unsharded()"):
            read(model, weight)
            raise AssertionError(name)
    for name, read in ANSWERED.items():
        assert read(model, weight), name
    with raises(StateError, "part"):
        weight.data.mul_(2)
    with opt.unsharded():
        whole = weight.detach().clone()
    assert raw(weight.data.sum()) == raw(whole.sum())  # the other ranks are asked
    assert snapshot(model, opt) == before
    train_step(model, opt, 1)


def test_outside(ranks: Pool) -> None:
    for live_bytes in (0, 1 << 20):
        ranks.run(outside, live_bytes, world=2)


# -- unsharded(), evaluation -------------------------------------------------------------------------------------------


def generation(neighbours: bool) -> None:
    """Loops of another length on each rank, in the middle of training, and what they do with params."""
    results = []
    for stage in (1, 3):
        # Enough room to ask early for what will be needed: not for what another rank's loop has needed.
        model, opt = made(stage, Odd, neighbours=neighbours, live_bytes=1 << 20)
        for step in range(4):
            opt.zero_grad()
            with opt.unsharded(), torch.no_grad(), opt.unsharded():
                x = torch.ones(1, W)
                for _ in range(dist.get_rank()):
                    x = F.linear(model.layers[0](model.shared(x)), model.layers[1].weight.t())
                assert type(model.turned) is Parameter
            plain(model, step)
            with opt.unsharded():
                copied = copy.deepcopy(model)
                norm = sum(param.norm() for param in model.parameters() if param.numel())
            opt.step()
            assert all(type(param) is Parameter for param in copied.parameters())
        results.append((snapshot(model, opt), norm.item(), copied(data(0, 1, W)).sum().item()))
    assert results[0] == results[1]


def in_place(model: Any, opt: ShardedOptimizer) -> None:
    with opt.unsharded(), torch.no_grad():
        model.first.weight.copy_(torch.ones(W, W))
        model.blocks[0].up.bias.add_(1)


def through_data(model: Any, opt: ShardedOptimizer) -> None:
    with opt.unsharded():
        model.first.weight.data.fill_(0.5)
        model.blocks[1].down.weight.data.clamp_(-0.01, 0.01)


def loaded(model: Any, opt: ShardedOptimizer) -> None:
    others = Stack().to(model.first.weight.dtype).state_dict()
    model.load_state_dict({name: value + 0.01 for name, value in others.items()})


def loaded_inside(model: Any, opt: ShardedOptimizer) -> None:
    with opt.unsharded():
        loaded(model, opt)


WRITES = {
    "write": (in_place, through_data, loaded, loaded_inside),
    "dtype": (torch.float32, torch.bfloat16),
    "neighbours": (True, False),
    "world": (2, 3),
}


def writes(rows: Sequence[Row]) -> None:
    """What is written stays, and masters follow, as at stage 1."""
    for write, dtype, neighbours, _ in rows:
        results = []
        for stage in (1, 3):
            # Room for everything: a write to what is cached must not be lost.
            tuning = {"neighbours": neighbours, "live_bytes": 1 << 20}
            model, opt = made(stage, lambda dtype=dtype: Stack().to(dtype), **tuning)
            seen = []
            for step in range(3):
                opt.zero_grad()
                loss_of(model(data(step, 4, 3, W).to(dtype)).float()).backward()
                opt.step()
                with torch.no_grad():
                    seen.append(model(data(9, 1, 3, W).to(dtype)).sum().item())
                if step == 0:
                    write(model, opt)
                seen.append(snapshot(model, opt))
            masters = [opt.state[param].get("master") for param in model.parameters()]
            seen += [raw(each.full_tensor()) for each in masters if each is not None]
            results.append(seen)
        assert results[0] == results[1], f"{write.__name__}, {dtype}, neighbours {neighbours}"
        assert dtype is torch.float32 or len(results[0]) > 6


def kept_views(neighbours: bool) -> None:
    """What was taken of whole params inside holds them outside too: it is saved later, say."""
    model, opt = made(neighbours=neighbours)
    twin, other = made(1)
    for step in range(3):
        train_step(model, opt, step)
        train_step(twin, other, step)
        with opt.unsharded():
            inside, part = model.state_dict(), model.first.weight.detach().numpy()[2:]
            with opt.unsharded():
                pass
        expected = {name: value.clone() for name, value in twin.state_dict().items()}
        file = io.BytesIO()
        torch.save(inside, file)
        train_step(model, opt, step + 9)
        train_step(twin, other, step + 9)
        for name, value in expected.items():
            if value.numel() >= KEPT:  # others go on being the model's, as in torch
                assert raw(inside[name]) == raw(value), name
        assert raw(torch.from_numpy(part)) == raw(expected["first.weight"][2:])
        assert all(torch.equal(torch.load(io.BytesIO(file.getvalue()))[name], expected[name]) for name in expected)
        assert snapshot(model, opt) == snapshot(twin, other)


def evaluation(neighbours: bool) -> None:
    for make in (Stack, Attention, Owner):
        model, opt = made(make=make, neighbours=neighbours)
        twin, other = made(1, make)
        with poisoned():
            for mode in (torch.no_grad, torch.inference_mode):
                for each, optimizer in ((model, opt), (twin, other)):
                    each.train()
                    train_step(each, optimizer, 1)
                    each.eval()
                with mode():
                    if neighbours and dist.get_rank() == 0:  # nobody else is asked
                        for step in range(3):
                            assert raw(model(data(step, 1, 3, W))) == raw(twin(data(step, 1, 3, W)))
                    assert raw(model(data(5, 1, 3, W))) == raw(twin(data(5, 1, 3, W)))
                    assert nothing_left(opt.engine.domain.sharded.units)
            assert snapshot(model, opt) == snapshot(twin, other)


def test_unsharded_and_evaluation(ranks: Pool) -> None:
    for neighbours in (True, False):
        for function in (generation, kept_views, evaluation):
            ranks.run(function, neighbours, world=2)
    ranks.run(generation, False, world=3)


@sweep_at_once(WRITES)
def test_writes(ranks: Pool, rows: Sequence[Row]) -> None:
    for world in WRITES["world"]:
        ranks.run(writes, [row for row in rows if row[-1] == world], world=world)


# -- saving, copies, ends ----------------------------------------------------------------------------------------------


def saving() -> None:
    model, opt = made(make=Tied)
    twin, other = made(1, Tied)
    for each, its in ((model, opt), (twin, other)):
        train_step(each, its, 0)
    state = model.state_dict()
    for name, value in twin.state_dict().items():
        assert isinstance(state[name], Part) == (value.numel() >= KEPT)
        assert raw(state[name].full_tensor() if isinstance(state[name], Part) else state[name]) == raw(value)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    for name, value in torch.load(file, weights_only=True).items():
        assert raw(value) == raw(twin.state_dict()[name])
    with opt.unsharded():
        copied, its = copy.deepcopy((model, opt))
    assert copied.head.weight is copied.embed.weight and copied.head.weight is not model.head.weight
    for each, optimizer in ((model, opt), (copied, its), (twin, other)):
        train_step(each, optimizer, 1)
    assert snapshot(model, opt) == snapshot(copied, its) == snapshot(twin, other)
    for optimizer in (opt, its, other):
        optimizer.close()
    for each in (model, copied, twin):
        assert all(type(param) is Parameter for param in each.parameters())
        assert [raw(param) for param in each.parameters()] == [raw(param) for param in twin.parameters()]
    # The module is as it was, for any other optimizer.
    again = ShardedAdamW(model, stage=3, tuning=small())
    train_step(model, again, 2)
    again.close()


class Adapted(nn.Module):
    """A frozen layer and a trained one of low rank."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.a, self.b = base, nn.Linear(W, 4, bias=False), nn.Linear(4, W, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def adapted() -> nn.Module:
    model = Stack().requires_grad_(False)
    model.first = Adapted(model.first)
    for block in model.blocks:
        block.up = nn.Sequential(Adapted(nn.Linear(W, W).requires_grad_(False)), block.up)
    return model


def shard_bytes(numels: list[int]) -> int:
    """Of a rank, for one bucket with these params."""
    return -(-sum(-(-numel // 256) for numel in numels) // dist.get_world_size()) * 256 * 4


def frozen_memory() -> None:
    """The base of a model is sharded, and has no master, no state and no gradient."""
    model, opt = made(3, adapted, keep_below=90, bucket_bytes=1 << 20)
    for step in range(2):
        train_step(model, opt, step)
    trained = [[param.numel() for param in unit.params if param.requires_grad] for unit in units_of(model)]
    base = [[param.numel() for param in unit.params if not param.requires_grad] for unit in units_of(model)]
    kept = [numel for unit in base for numel in unit if numel < 90]
    memory = {kind: tiers["device"] for kind, tiers in opt.memory().items()}
    assert min(map(min, filter(None, trained))) > 90 and sum(map(len, base)) > 2 * sum(map(len, trained))
    assert memory["state"] == memory["gradient"] == sum(map(shard_bytes, trained)) and not memory["master"]
    sharded = [[numel for numel in unit if numel >= 90] for unit in base]
    assert memory["param"] == sum(map(shard_bytes, trained + sharded)) + 4 * sum(kept)
    assert all(opt.state[param] == {} for param in model.parameters() if not param.requires_grad)
    assert nothing_left(opt.engine.domain.sharded.units)


def frozen(neighbours: bool) -> None:
    """Layers that are unfrozen train from then on, and those that are frozen no more."""
    results = []
    for stage in (1, 3):
        model, opt = made(stage, adapted, neighbours=neighbours)
        with poisoned() if stage == 3 else nullcontext():
            for step in range(2):
                train_step(model, opt, step)
            for part, is_trained in ((model.blocks[0], True), (model.first.a, False), (model, True)):
                part.requires_grad_(is_trained)
                for step in range(2):
                    train_step(model, opt, step)
        results.append((snapshot(model, opt), momenta(model, opt)))
    assert results[0] == results[1]


def test_saving_and_frozen(ranks: Pool) -> None:
    for world in (2, 3):
        ranks.run(saving, world=world)
        ranks.run(frozen_memory, world=world)
        for neighbours in (True, False):
            ranks.run(frozen, neighbours, world=world)


CASTS = {"half": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32}


@pytest.mark.parametrize("own", CASTS)
def test_a_cast_to_what_params_are_does_nothing(own: str) -> None:
    """Frameworks cast a model that is in place already; any other cast would read what is not there."""
    model = nn.Linear(30, 40).to(CASTS[own])
    opt = ShardedAdamW(model, stage=3, tuning=Tuning(keep_below=0))
    opt.bind()
    weight = model.weight
    for cast in CASTS:
        if cast == own:
            assert getattr(model, cast)() is model and model.weight is weight
        else:
            with pytest.raises(ReleasedError):
                getattr(model, cast)()
    opt.close()
    assert model.weight.dtype is CASTS[own]
