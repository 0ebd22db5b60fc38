"""Writes to params between steps: each row of the params in ``docs/what-you-hold.md`` does what the page says."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from shardopt import (
    BindingError,
    DisagreementError,
    Part,
    ReleasedError,
    ShardedAdamW,
    ShardedOptimizer,
    ShardedSGD,
    ShardoptError,
    Tuning,
    load_checkpoint,
    save_checkpoint,
)
from tests.support.cases import fill_gradients
from tests.support.paths import ROOT
from tests.support.ranks import Pool
from tests.support.training import raises, raw

Write = Callable[[Parameter], object]


class Net(nn.Module):
    """Two params of several blocks, so that each rank owns some of each."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.one = Parameter(torch.randn(40, 33, generator=generator).bfloat16())
        self.other = Parameter(torch.randn(700, generator=generator).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        return (self.one * x).sum() + (self.other * x).sum()


def made(**keywords: Any) -> tuple[Net, ShardedOptimizer]:
    model = Net()
    opt = ShardedSGD(model.parameters(), lr=0.01, momentum=0.9, **keywords)
    for number in range(3):
        step(model, opt, number)
    return model, opt


def step(model: nn.Module, opt: ShardedOptimizer, number: int) -> None:
    fill_gradients(model.parameters(), "heavy_tailed", number)
    opt.step()


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, Part) else value.clone()


def kept(model: Net, opt: ShardedOptimizer, name: str = "master") -> list[Tensor]:
    return [whole(opt.state[param][name]) for param in model.parameters()]


def bits(tensors: Any) -> list[bytes]:
    return [*map(raw, tensors)]


def follows(master: Tensor, param: Tensor) -> Tensor:
    """What a master is beside a param: torch's own rounding says whether somebody else wrote it."""
    keeps = master.bfloat16().view(torch.int16) == param.view(torch.int16)
    return torch.where(keeps, master, param.float())


def takes_effect(write: Write, folder: str) -> None:
    """On the ranks: states, a checkpoint and the next step have what was written, and no bit is lost beside it."""
    for read in ("state", "checkpoint", "step"):
        model, opt = made()
        before, momentum = kept(model, opt), kept(model, opt, "momentum_buffer")
        write(model.one)
        written = [param.detach().clone() for param in model.parameters()]
        expected = [follows(own, param) for own, param in zip(before, written, strict=True)]
        assert raw(expected[0]) != raw(before[0]) and raw(expected[1]) == raw(before[1])
        held = None
        if read == "state":
            held = opt.state[model.one]["master"]
            assert bits(kept(model, opt)) == bits(expected)
        elif read == "checkpoint":
            save_checkpoint(f"{folder}/{write.__name__}", model, opt, allow_nonfinite=True)
            model = Net(seed=4)
            opt = ShardedSGD(model.parameters(), lr=0.01, momentum=0.9)
            load_checkpoint(f"{folder}/{write.__name__}", model, opt)
            assert bits(model.parameters()) == bits(written)
        twin = Net()
        with torch.no_grad():
            for param, value in zip(twin.parameters(), written, strict=True):
                param.copy_(value)
        other = ShardedSGD(twin.parameters(), lr=0.01, momentum=0.9)
        pairs = enumerate(zip(momentum, expected, strict=True))
        states = {number: {"momentum_buffer": buffer, "master": master} for number, (buffer, master) in pairs}
        other.load_state_dict({**other.state_dict(), "state": states})
        for each, its in ((model, opt), (twin, other)):
            step(each, its, 7)
        assert bits(model.parameters()) == bits(twin.parameters()), read
        assert bits(kept(model, opt)) == bits(kept(twin, other)), read
        if held is not None and not isinstance(held, Part):
            assert raw(held) == raw(opt.state[model.one]["master"]), "not live"


@torch.no_grad()
def in_place(param: Parameter) -> None:
    param.clamp_(-0.5, 0.5)


def clamped(param: Parameter) -> None:
    param.data.clamp_(-0.5, 0.5)


def rows(param: Parameter) -> None:
    param.data[[3, 17, 39]] = torch.linspace(-2, 2, 33).bfloat16()


def nonfinite(param: Parameter) -> None:
    param.data[5, :4] = torch.tensor([math.inf, -math.inf, 1e-40, -1e-40]).bfloat16()


def viewed(param: Parameter) -> None:
    param.detach().view(-1)[::3] = 0.25


def masked(param: Parameter) -> None:
    """The zeros are of both signs."""
    param.data.mul_(torch.arange(33) % 3 != 0)


def broadcast(param: Parameter) -> None:
    if dist.is_initialized():
        with torch.no_grad():
            param.data.add_(dist.get_rank() + 1)
        dist.broadcast(param.data, 0)
    else:
        param.data.add_(1)


def assigned(param: Parameter) -> None:
    param.data = param.detach().clone().mul_(0.5)


WRITES = (in_place, clamped, rows, nonfinite, viewed, masked, broadcast, assigned)


def writes_take_effect(folder: str) -> None:
    for write in WRITES if dist.get_world_size() == 1 else (rows, broadcast, assigned):
        takes_effect(write, folder)


def ranks_write_differently() -> None:
    model, opt = made()
    model.one.data.fill_(float(dist.get_rank() + 1))
    step(model, opt, 5)
    both = [torch.empty_like(model.one) for _ in range(2)]
    dist.all_gather(both, model.one.detach())
    assert raw(both[0]) == raw(both[1])
    owners = model.one.detach().float().round().unique().tolist()
    assert {1.0, 2.0} <= set(owners)
    for write in ("in place", "assigned"):
        model, opt = made()
        with torch.no_grad():
            values = torch.full_like(model.one, float(dist.get_rank()))
            if write == "in place":
                model.one.copy_(values)
            else:
                model.one.data = values
        with raises(DisagreementError, "weights"):
            step(model, opt, 5)
    sources_are_taken_on_all_ranks_or_none()


def sources_are_taken_on_all_ranks_or_none() -> None:
    for master in ("fp32", "split"):
        model, opt = made(master=master)
        other, opt_of_other = made(master=master)
        for values in (float(dist.get_rank()), 1.0):  # of each rank its own; of one rank alone
            before = bits([*model.parameters(), *kept(model, opt)])
            if values != 1.0 or dist.get_rank() == 1:
                model.one.data = torch.full_like(model.one, values)
            with raises(DisagreementError, "weights (sum of bits) of"):
                step(model, opt, 5)
            assert bits([*model.parameters(), *kept(model, opt)]) == before
        for each, its in ((model, opt), (other, opt_of_other)):
            step(each, its, 5)
        assert bits([*model.parameters(), *kept(model, opt)]) == bits([*other.parameters(), *kept(other, opt_of_other)])


def masters_that_are_not_compared() -> None:
    """The same bits but for writes through ``.data``, which a step undoes unless something has read the master."""

    def ended(write: Callable[[Any, ShardedOptimizer], object], **tuning: Any) -> list[bytes]:
        model, opt = made(tuning=Tuning(**tuning))
        write(model, opt)
        step(model, opt, 5)
        return bits([*model.parameters(), *kept(model, opt)])

    def loads(model: Any, opt: ShardedOptimizer) -> None:
        """States whose masters do not round to the weights, which stay."""
        states = copy.deepcopy(opt.state_dict())
        with torch.no_grad():
            model.one.mul_(0.5)
        step(model, opt, 4)
        opt.load_state_dict(states)

    def refreshes(model: Any, opt: ShardedOptimizer) -> None:
        model.one.data.mul_(0.5)
        opt.refresh_masters()

    def reads(model: Any, opt: ShardedOptimizer) -> None:
        model.one.data.mul_(0.5)
        whole(opt.state[model.one]["master"])

    nothing = ended(lambda *_: None)
    assert ended(lambda *_: None, compare_masters=False) == nothing
    for write in (lambda model, _: in_place(model.one), loads, refreshes, reads):
        assert ended(write, compare_masters=False) == ended(write) != nothing
    assigned = lambda model, _: setattr(model.one, "data", torch.full_like(model.one, 0.5))  # noqa: E731
    assert ended(assigned, compare_masters=False) == ended(assigned) != nothing
    through_data = lambda model, _: model.one.data.mul_(0.5)  # noqa: E731
    assert ended(through_data, compare_masters=False) == nothing != ended(through_data)


def a_source_is_taken_once() -> None:
    model, opt = made()
    source = torch.full_like(model.one, 0.5)
    model.one.data = source
    assert bool((kept(model, opt)[0].bfloat16() == 0.5).all())
    source.fill_(9.0)
    assert bool((model.one == 0.5).all()) and bool((kept(model, opt)[0].bfloat16() == 0.5).all())
    for other in (torch.zeros(3), torch.zeros_like(model.one, dtype=torch.float32)):
        model, opt = made()
        model.one.data = other.reshape(-1)[:3] if other.numel() == 3 else other
        model.one.grad = torch.zeros_like(model.one)
        with raises(BindingError, "was moved, recast or given other storage"):
            opt.step()


def a_written_average_is_refused() -> None:
    model, opt = made(ema=0.9)
    before = bits(model.parameters()), bits(kept(model, opt)), bits(kept(model, opt, "ema"))
    for write in (in_place, rows):
        with (
            raises(ShardoptError, "write to params outside of", "unsharded(ema=True)"),
            opt.unsharded(ema=True),
        ):
            write(model.one)
        assert (bits(model.parameters()), bits(kept(model, opt)), bits(kept(model, opt, "ema"))) == before
    with pytest.raises(ZeroDivisionError), opt.unsharded(ema=True):
        model.one.data.fill_(1)
        raise ZeroDivisionError
    with opt.unsharded(ema=True):
        pass
    step(model, opt, 5)


def a_stale_rest_is_half_a_unit() -> None:
    for master in ("split", "split24"):
        model, opt = made(master=master)
        masked(model.one)
        rows(model.one)
        value, joined = model.one.detach().float(), kept(model, opt)[0]
        assert bool((joined.signbit() == value.signbit()).all())
        assert bool(((joined - value).abs() <= value.abs() * 2.0**-8 + 2.0**-133).all())
        step(model, opt, 5)
        assert bool(model.one.isfinite().all())


def loaded_masters_wait_for_weights() -> None:
    model, opt = made()
    weights, state, masters = [each.detach().clone() for each in model.parameters()], opt.state_dict(), kept(model, opt)
    if dist.is_initialized():
        opt.consolidate_state_dict()
    fresh, again = made()
    step(fresh, again, 8)
    again.load_state_dict(state)
    assert bits(kept(fresh, again)) == bits(masters)
    for param, value in zip(fresh.parameters(), weights, strict=True):
        param.data.copy_(value)
    assert bits(kept(fresh, again)) == bits(masters)
    rows(fresh.one)
    expected = [follows(own, param.detach()) for own, param in zip(masters, fresh.parameters(), strict=True)]
    assert bits(kept(fresh, again)) == bits(expected)


def trained(model: nn.Module, opt: ShardedOptimizer) -> None:
    model(torch.ones(1, dtype=torch.bfloat16)).float().backward()
    opt.step()
    opt.zero_grad()


def whole_params_at_stage_3() -> None:
    ends = []
    for stage in (1, 3):
        model = Net()
        opt = ShardedSGD(model, lr=0.25, momentum=0.9, stage=stage, tuning=Tuning(keep_below=0))
        trained(model, opt)
        with opt.unsharded():
            masked(model.one)
            model.other.data = torch.full_like(model.other, 0.5)
        masters = kept(model, opt)
        trained(model, opt)
        with opt.unsharded():
            ends.append([*bits(model.parameters()), *bits(masters), *bits(kept(model, opt))])
        if stage == 3 and dist.get_world_size() > 1:
            with raises(ShardoptError, "optimizer.unsharded()"):
                model.other.data = torch.zeros(700, dtype=torch.bfloat16)
    assert ends[0] == ends[1]


class Writes(nn.Module):
    """A layer whose forward calls what it is given with its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(torch.linspace(-1, 1, 32 * 32).view(32, 32))
        self.write: Write | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.weight
        if self.write is not None:
            self.write(self.weight)
        return x


def forwards_write_to_gathered_params() -> None:
    """An evaluation finds it, and with the option a training forward; nothing else is taken for a write."""
    settings: list[dict[str, Any]] = [
        {},
        {"tuning": {"neighbours": False}},
        {"gather_dtype": "int8"},
        {"compute_dtype": torch.bfloat16},
        {"tuning": {"reshard_after_forward": False}},
    ]
    for setting in settings:
        tuning = Tuning(keep_below=0, compare_gathered=True, **setting.pop("tuning", {}))
        model = nn.Sequential(*(Writes() for _ in range(3)))
        opt = ShardedSGD(model, lr=0.01, stage=3, tuning=tuning, **setting)
        x = torch.ones(2, 32)

        def evaluate(model: nn.Module = model, x: Tensor = x) -> Tensor:
            with torch.no_grad():
                return model(x).clone()  # type: ignore[no-any-return]

        def train(model: nn.Module = model, opt: ShardedOptimizer = opt, x: Tensor = x) -> None:
            model(x).float().sum().backward()
            opt.step()
            opt.zero_grad()

        for _ in range(2):
            train()
            before = evaluate()
        for layer, runs in ((0, evaluate), (2, evaluate), (1, train)):
            model[layer].write = lambda weight: weight.data.mul_(0.5)
            with raises(ReleasedError, "`with optimizer.unsharded():`", f"unit is resharded: {layer}"):
                runs()
            model[layer].write = None
            if runs is evaluate:
                assert raw(evaluate()) == raw(before), setting
            else:
                opt.zero_grad()
        with opt.unsharded():
            model[1].write = lambda weight: weight.data.zero_()
            evaluate()
            model[1].write = None
        assert not evaluate().any(), setting
        train()


def what_is_refused() -> None:
    model = Net()
    opt = ShardedSGD(model, lr=0.01, momentum=0.9, release_gradients=True)
    trained(model, opt)
    model.one.data = torch.zeros_like(model.one)
    with raises(BindingError, "call param.copy_(tensor) in place of param.data = tensor"):
        trained(model, opt)
    for stage in (0, 1, 2, 3):
        model = Net()
        opt = ShardedSGD(model, lr=0.01, momentum=0.9, stage=stage)
        trained(model, opt)
        with opt.unsharded():
            values = {name: value.clone() for name, value in model.state_dict().items()}
        with raises(ShardoptError, "load without assign=True", "one is a new Parameter"):
            model.load_state_dict(values, assign=True)
            trained(model, opt)
    model, opt = made()
    model.one.data = model.one.data.view(-1)
    for read in (lambda: opt.state[model.one], opt.state_dict, opt.step):
        with raises(BindingError, "was moved, recast"):
            read()


def test_a_param_of_two_optimizers() -> None:
    """Each takes the values that the other one left, as in torch."""
    ends = []
    for first, second in ((torch.optim.AdamW, torch.optim.SGD), (ShardedAdamW, ShardedSGD)):
        param = Parameter(torch.linspace(-1, 1, 1600))
        both: list[Any] = [first([param], lr=0.01), second([param], lr=0.1, momentum=0.9)]
        for number in range(5):
            for opt in both:
                fill_gradients([param], "heavy_tailed", number)
                opt.step()
        ends.append(param.detach().clone())
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-6)


PAGE = {
    "`param.clamp_()`, `param[rows] = v`, `load_state_dict()`": in_place,
    "`param.data.clamp_()`, `param.data[rows] = v`, `dist.broadcast(param.data, 0)`": rows,
    "through a view: `param.detach()`, `param.data.view(-1)`": viewed,
    'with `master="split"` or `"split24"`, through `.data`': a_stale_rest_is_half_a_unit,
    "a mask of zeros": masked,
    "through `.data`, with `Tuning(compare_masters=False)`": masters_that_are_not_compared,
    "after the states are loaded, before their weights": loaded_masters_wait_for_weights,
    "inside `with optimizer.unsharded():` at stage 3, through `.data` too": whole_params_at_stage_3,
    "through `.data` in an evaluation at stage 3, outside of `unsharded()`; in a training forward with "
    "`Tuning(compare_gathered=True)`": forwards_write_to_gathered_params,
    "inside `with optimizer.unsharded(ema=True):`": a_written_average_is_refused,
    "`param.data = tensor` of the same shape, dtype and device": a_source_is_taken_once,
    "`param.data = tensor` of another shape, dtype or device; at stage 3 outside of `unsharded()`; "
    "with `release_gradients`": what_is_refused,
    "a new `Parameter` in the param's place: `load_state_dict(assign=True)`": what_is_refused,
}
EXCEPTIONS = {"through `.data` in a training forward at stage 3, outside of `unsharded()`"}


def test_the_page_has_these_rows() -> None:
    text = (ROOT / "docs" / "what-you-hold.md").read_text().split("## Params\n")[1].split("\n## ")[0]
    told = [line.split(" | ")[0].removeprefix("| ") for line in text.splitlines() if line.startswith("| ")][1:]
    assert told == [*PAGE, *EXCEPTIONS]


def test_writes_take_effect(ranks: Pool, tmp_path: Path) -> None:
    for world in (1, 2):
        ranks.run(writes_take_effect, str(tmp_path / str(world)), world=world)


def test_what_else_the_page_says(ranks: Pool) -> None:
    for world in (1, 2):
        for function in dict.fromkeys(each for each in PAGE.values() if each not in WRITES):
            ranks.run(function, world=world)
    ranks.run(ranks_write_differently, world=2)
