"""``docs/what-you-hold.md``, "States": what ``optimizer.state`` hands out is live, beside ``torch.optim``."""

import copy
import itertools
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

import shardopt
from shardopt import DisagreementError, Part, ShardedAdamW, ShardedOptimizer, StateError, Tuning
from shardopt.kernels import codecs
from tests.support.ranks import Pool
from tests.support.training import raises

SHAPE = (40, 33)  # of six blocks, so that each of two ranks has some
TIERS: list[dict[str, Any]] = [
    {},
    {"stage": 0},
    {"state_format": "bf16"},
    {"state_format": "int8"},
    {"offload": "cpu"},
    {"offload": "disk"},
]


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, Part) else value.detach().clone()


def stepped(options: dict[str, Any], count: int = 2) -> tuple[list[Parameter], ShardedOptimizer]:
    generator = torch.Generator().manual_seed(1)
    params = [Parameter(torch.randn(SHAPE, generator=generator)) for _ in range(count)]
    options = dict(options)
    if options.get("offload") == "disk":
        options["offload"] = tempfile.mkdtemp()
    opt = ShardedAdamW(params, lr=0.1, tuning=Tuning(compress_from=1, timeout=60), **options)
    step(params, opt)
    return params, opt


def step(params: list[Parameter], opt: Any) -> None:
    for param in params:
        param.grad = torch.linspace(-1, 1, param.numel()).view(SHAPE)
    opt.step()


def stored(opt: ShardedOptimizer, values: Tensor, name: str = "exp_avg") -> Tensor:
    """Values as they are after they were stored."""
    (domain,) = opt.engine.domains
    format = domain.shards[0].format_of(name)
    return codecs.decode(*codecs.encode(values.flatten(), format), format).view(SHAPE).clone()


# -- what ends nothing -------------------------------------------------------------------------------------------------


def events(params: list[Parameter], opt: ShardedOptimizer) -> dict[str, Callable[[], object]]:
    other = {name: whole(value) for name, value in opt.state[params[1]].items()}
    return {
        "a step": lambda: step(params, opt),
        "an assignment to another param": lambda: opt.state.__setitem__(params[1], other),
        "forgetting another one": lambda: opt.state.__delitem__(params[1]),
        "offload()": lambda: opt.offload("cpu"),
        "reload()": opt.reload,
        "consolidate_state_dict()": opt.consolidate_state_dict,
    }


def live_over_events() -> None:
    """Read, written, and written through a view that was made before."""
    for options in TIERS:
        params, opt = stepped(options)
        state = opt.state[params[0]]
        held, count = state["exp_avg"], state["step"]
        column = held.t()[1]
        for name, event in events(params, opt).items():
            event()
            now = whole(opt.state[params[0]]["exp_avg"])
            assert torch.equal(whole(held), now), (options, name)
            held.mul_(0.5)
            now = stored(opt, now * 0.5)
            column.fill_(0.25)
            now[:, 1] = 0.25
            now = stored(opt, now)
            assert torch.equal(whole(opt.state[params[0]]["exp_avg"]), now), (options, name)
            assert torch.equal(whole(held), now)
            count.add_(1)
            assert opt.state[params[0]]["step"] == count and opt.state_dict()["state"][0]["step"] == count
        assert count == 1 + 1 + 6  # a step before, one among the events, and what was added
        opt.close()


def test_held_tensors_are_live(ranks: Pool) -> None:
    for world in (1, 2):
        ranks.run(live_over_events, world=world)


# -- what ends it ------------------------------------------------------------------------------------------------------


def ended() -> None:
    for options in TIERS:
        params, opt = stepped(options)
        whole_state = {name: whole(value) for name, value in opt.state[params[0]].items()}
        whole_dict = copy.deepcopy({**opt.state_dict(), "state": {0: whole_state}})
        ends: dict[str, Callable[[], object]] = {
            "state was assigned": partial(opt.state.__setitem__, params[0], whole_state),
            "states were loaded": partial(opt.load_state_dict, whole_dict),
            "close()": opt.close,
        }
        for words, end in ends.items():
            state = dict(opt.state[params[0]])
            held, row, count = state["exp_avg"], state["exp_avg"][3], state["step"]
            end()
            for each in (held, row, count):
                for use in (each.sum, each.zero_, partial(torch.add, each, 1)):
                    with raises(StateError, words):
                        use()
            for write in (partial(held.__setitem__, 0, 1), partial(setattr, held, "data", torch.zeros(SHAPE))):
                with raises(StateError, words):
                    write()
        assert opt.state.get(params[0]) is None

        params, opt = stepped(options)
        state = opt.state[params[0]]
        one = state["exp_avg_sq"]
        state["exp_avg"] = torch.ones(SHAPE)  # the others are given back as they were read
        one.fill_(0.5)
        assert torch.equal(whole(opt.state[params[0]]["exp_avg_sq"]), stored(opt, torch.full(SHAPE, 0.5), "exp_avg_sq"))
        held, before = state["exp_avg"], whole(state["exp_avg"])
        del opt.state[params[0]]
        if isinstance(held, Part):
            assert torch.equal(held.local, before.flatten()[held.start :][: held.local.numel()])
        else:
            assert torch.equal(held, before) and held.add_(1).sub_(1).sub_(before).abs().max() < 1e-6
        assert params[0] not in opt.state
        opt.close()


def test_what_has_ended_is_refused(ranks: Pool) -> None:
    for world in (1, 2):
        ranks.run(ended, world=world)


# -- a training that writes its states is torch's ----------------------------------------------------------------------

CLASSES = ("AdamW", "NAdam", "ASGD", "Adagrad", "RAdam", "Adadelta", "Rprop", "SGD")


def trained(kind: str, ours: bool) -> list[Tensor]:
    options = {"momentum": 0.9} if kind == "SGD" else {}
    module = shardopt if ours else torch.optim
    param = Parameter(torch.linspace(-1, 1, 40 * 33).view(SHAPE).clone())
    opt = getattr(module, ("Sharded" if ours else "") + kind)([param], lr=0.05, **options)
    for index in range(6):
        for name, value in opt.state[param].items() if index != 2 else ():  # before the first step too
            with torch.no_grad():
                if name in ("step", "ax"):
                    value.mul_(0) if index == 3 else None
                elif name in ("eta", "mu_product", "mu"):
                    value.mul_(0.75)
                elif value is not None and name != "prev":
                    value[3] = 0.125
                    value[:, 2].mul_(0.5)
                    value.clamp_(max=0.5)
        param.grad = torch.linspace(1, -0.5, 40 * 33).view(SHAPE) * (1 + index % 3)
        opt.step()
    return [param.detach(), *(whole(value) for value in opt.state[param].values() if value is not None)]


def beside_torch() -> None:
    for kind in CLASSES:
        for number, (own, wanted) in enumerate(zip(trained(kind, True), trained(kind, False), strict=True)):
            torch.testing.assert_close(own, wanted, rtol=2e-5, atol=2e-6, check_dtype=False, msg=f"{kind} {number}")


def test_loops_that_write_states_are_those_of_torch(ranks: Pool) -> None:
    for world in (1, 2):
        ranks.run(beside_torch, world=world)


# -- copies, arrays, expressions ---------------------------------------------------------------------------------------


def kinds_of_copies() -> None:
    for options in TIERS:
        params, opt = stepped(options)
        held = opt.state[params[0]]["exp_avg"]
        for alike in (held.cpu(), held.to(held.dtype), held.float(), held.contiguous(), held.to("cpu")):
            assert alike is held
        copies = [held.clone(), copy.deepcopy(held), held.half(), held * 1]
        before = whole(held)
        for number, row in enumerate(held.unbind()):  # each of a list of views is its own
            row.fill_(number % 3)
        assert torch.equal(whole(held).round()[:, 0], torch.arange(SHAPE[0]).remainder(3.0)), options
        held.detach().zero_()
        assert whole(held).eq(0).all()
        for each in copies:
            local = each.local if isinstance(each, Part) else each.flatten()
            first = each.start if isinstance(each, Part) else 0
            wanted = before.flatten()[first : first + local.numel()].to(each.dtype)
            assert torch.equal(local, wanted), options
        assert whole(held.t()[2]).eq(0).all()
        expected = whole(held).numpy()
        for each in (held, held.clone(), held.detach().cpu()):
            assert each.tolist() == expected.tolist() and (np.asarray(each) == expected).all(), options
        array = held.numpy()
        if dist.is_initialized():
            dist.barrier()  # a rank that reads alone needs the others' states
        is_kept_so = "state_format" not in options and options.get("offload") != "disk"
        if is_kept_so and not isinstance(held, Part):
            array[:] = 3
            assert whole(held).eq(3).all()
        else:
            assert not array.flags.writeable
        with raises(StateError, "another shape"):
            held.data = torch.zeros(3)
        with raises(StateError, "another shape"):
            held.resize_(3)
        opt.close()


def expressions() -> None:
    params, opt = stepped({})
    held, square = (opt.state[params[0]][name] for name in ("exp_avg", "exp_avg_sq"))
    first, second = whole(held), whole(square)
    values, fetched = params[0].detach(), list[Any]()
    remote = opt.engine.domains[0].remote
    assert remote is not None
    read, remote.fetch = remote.fetch, lambda *given: fetched.append(given) or read(*given)  # type: ignore[method-assign,func-returns-value]
    found: dict[str, tuple[Tensor, Tensor]] = {
        "zeros_like": (torch.zeros_like(held), torch.zeros_like(first)),
        "full_like": (torch.full_like(held, 2, dtype=torch.float64), torch.full_like(first, 2, dtype=torch.float64)),
        "several": (
            held.abs() * 2 + square / 3 - values,
            first.abs() * 2 + second / 3 - values,
        ),
        "where": (torch.where(held > 0, held, square), torch.where(first > 0, first, second)),
        "row": (held * torch.arange(33), first * torch.arange(33)),
        "own": (held.clone().add_(square).mul_(2), first.clone().add_(second).mul_(2)),
    }
    draw = torch.randn_like(held)
    assert not fetched and isinstance(draw, Part) and torch.zeros_like(held[0]).shape == (33,)
    for name, (own, wanted) in found.items():
        assert isinstance(own, Part), name
        assert torch.equal(own.full_tensor(), wanted) and own.dtype == wanted.dtype, name
        if name != "own":
            assert torch.equal(own + 0, wanted) and own.sum() == wanted.sum()
    dist.barrier()
    held[held > 0] = 0
    first[first > 0] = 0
    held.add_(square, alpha=2).copy_(held * 2)
    assert torch.equal(whole(held), first.add_(second, alpha=2) * 2)
    for param in params:
        opt.state[param] = {name: torch.zeros_like(value) for name, value in opt.state[param].items()}
    assert all(whole(value).eq(0).all() for param in params for value in opt.state[param].values())
    step(params, opt)
    opt.close()


def copies_of_consolidated() -> None:
    """Whole and plain where they were gathered, so that one rank saves them after later steps; parts elsewhere."""
    params, opt = stepped({})
    wanted = whole(opt.state[params[0]]["exp_avg"])
    opt.consolidate_state_dict(to=1)
    held = opt.state[params[0]]["exp_avg"]
    copied, half = held.clone(), held.half()
    step(params, opt)
    assert isinstance(held, Part) and not torch.equal(whole(held), wanted)
    is_there = dist.get_rank() == 1
    assert {type(each) is Tensor for each in (copied, half)} == {is_there}
    if is_there:
        assert torch.equal(copied, wanted) and torch.equal(half, wanted.half())
    assert isinstance(opt.state[params[0]]["exp_avg"].clone(), Part)  # the step ended what was gathered
    opt.close()


def ranks_that_differ() -> None:
    rank = dist.get_rank()
    for options in ({}, {"stage": 0}, {"state_format": "int8"}):
        ways: list[Callable[[Any], object]] = [
            lambda state: rank and state["exp_avg"].zero_(),
            lambda state: state["exp_avg"].mul_(0.5 + rank),
            lambda state: state["exp_avg_sq"].copy_(torch.full(SHAPE, 0.5 + rank)),
            lambda state: state["exp_avg"][rank].zero_(),
            lambda state: state["step"].add_(rank + 1),
        ]
        for way in ways:
            params, opt = stepped(options)
            before = {name: whole(value) for name, value in opt.state[params[0]].items()}
            dist.barrier()
            alike = opt.state[params[1]]
            alike["exp_avg"].mul_(torch.linspace(0, 1, 33)).t()[2].fill_(0.25)
            torch._foreach_mul_([alike["exp_avg"], alike["exp_avg_sq"]], 0.5)
            step(params, opt)  # all ranks made these
            weights = [param.detach().clone() for param in params]
            way(opt.state[params[0]])
            for _ in range(2):
                with raises(
                    DisagreementError,
                    "steps taken" if way is ways[4] else "writes to optimizer.state",
                    "nothing changed",
                ):
                    step(params, opt)
            assert all(map(torch.equal, weights, params))
            opt.state[params[0]] = before
            step(params, opt)
            opt.close()


def test_ranks_that_write_otherwise(ranks: Pool) -> None:
    ranks.run(ranks_that_differ, world=2)


def test_copies_of_what_was_consolidated_are_plain(ranks: Pool) -> None:
    ranks.run(copies_of_consolidated, world=2)


def test_copies_and_arrays(ranks: Pool) -> None:
    for world in (1, 2):
        ranks.run(kinds_of_copies, world=world)


def test_expressions_fetch_nothing(ranks: Pool) -> None:
    ranks.run(expressions, world=2)


def test_a_count_is_a_whole_number() -> None:
    params, opt = stepped({})
    for wrong in (-1.0, 0.5):
        with raises(StateError, "whole number of steps"):
            opt.state[params[0]]["step"].fill_(wrong)
    assert opt.state[params[0]]["step"] == 1


def test_the_page_has_these_rows() -> None:
    from tests.support.paths import ROOT

    page = (ROOT / "docs" / "what-you-hold.md").read_text()
    table = page[page.index("## States") : page.index("## State dicts and gradients")]
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    assert len(rows) == 20 and "to come" not in page


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_margins_are_live(tier: str) -> None:
    """Adafactor's rows and columns, which every rank holds whole."""
    offload = {"offload": tempfile.mkdtemp()} if tier == "disk" else {}
    param = Parameter(torch.ones(SHAPE))
    opt = shardopt.ShardedAdafactor([param], **offload)
    step([param], opt)
    names = [name for name, value in opt.state[param].items() if value.dim() == 2 and 1 in value.shape]
    assert names
    held = [opt.state[param][name] for name in names]
    for value in held:
        value[:] = 0.5
    assert all(opt.state[param][name].eq(0.5).all() for name in names)
    step([param], opt)
    for value, name in itertools.zip_longest(held, names):
        assert torch.equal(value, opt.state[param][name]) and not value.eq(0.5).all()
