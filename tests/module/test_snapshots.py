"""Promise: a copy of a stage 3 ``state_dict()`` keeps the values of its moment, and loads slice to slice later."""

import copy
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardopt import Part, ShardedSGD, StateError
from tests.support.comparing import raw
from tests.support.modules import W, made, plain, train_step
from tests.support.ranks import Pool
from tests.support.training import raises

Copies = dict[str, Any]
WAYS: dict[str, Callable[[nn.Module], Copies]] = {
    "clone": lambda model: {name: value.clone() for name, value in model.state_dict().items()},
    "deepcopy": lambda model: copy.deepcopy(model.state_dict()),
    "of a clone": lambda model: {name: value.clone().detach() for name, value in model.state_dict().items()},
}


def whole(model: nn.Module, opt: Any) -> list[bytes]:
    with opt.unsharded():
        return [raw(value.detach().clone()) for value in model.state_dict().values()]


def early_stopping() -> None:
    for way, take in WAYS.items():
        model, opt = made()
        train_step(model, opt, 0)
        good, best = whole(model, opt), take(model)
        train_step(model, opt, 1)
        model.load_state_dict(best)
        assert whole(model, opt) == good, way
        train_step(model, opt, 2)
        assert [raw(value.full_tensor()) for value in best.values()] == good, way
        model.load_state_dict(best)
        assert whole(model, opt) == good, way
        opt.close()


def one_rank_reads() -> None:
    model, opt = made()
    train_step(model, opt, 0)
    with opt.unsharded():
        before = model.first.weight.detach().clone()
    live = model.state_dict()["first.weight"]
    assert isinstance(live, Part)
    for same in (live.cpu(), live.to(torch.float32), live.float(), live.contiguous()):
        assert same is live
    kept, short = live.clone(), live.half()
    if dist.get_rank() == 0:  # alone, until the next step
        assert torch.equal(kept.sum(), before.sum())
        file = io.BytesIO()
        torch.save(copy.deepcopy(live), file)
        file.seek(0)
        assert torch.equal(torch.load(file), before)
    dist.barrier()
    train_step(model, opt, 1)
    assert torch.equal(short.full_tensor(), before.half())
    reads: list[Callable[[], Tensor]] = [kept.sum, kept.read_whole, lambda: kept[0]]
    for read in reads:
        if dist.get_world_size() == 1:
            read()
            assert torch.equal(kept.read_whole(), before)
            continue
        with raises(StateError, "copy.full_tensor() on every rank", "v.full_tensor()"):
            read()
    opt.close()


def test_early_stopping(ranks: Pool) -> None:
    for world in (1, 2):
        ranks.run(early_stopping, world=world)


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def views_are_read() -> None:
    """A view of an entry reads as torch's own of the same values, alone or among plain tensors."""
    model, opt = made()
    train_step(model, opt, 0)
    entry = model.state_dict()["first.weight"]
    whole = entry.full_tensor()
    assert type(whole) is torch.Tensor
    for view, own in ((entry.t(), whole.t()), (entry[1], whole[1]), (entry.split(2)[1], whole.split(2)[1])):
        assert view.tolist() == own.tolist() and raw(view) == raw(own) and torch.equal(view, own)
        assert type(view + 1) is type(view.clone()) is torch.Tensor and raw(view @ own.t()) == raw(own @ own.t())
        array = view.numpy()
        assert not array.flags.writeable and (array == own.numpy()).all()
        assert raw(through_a_file(view)) == raw(own) and type(copy.deepcopy(view)) is torch.Tensor
        assert repr(view) == repr(own) and float(view.reshape(-1)[0]) == float(own.reshape(-1)[0])
        into = torch.from_dlpack(view).zero_()
        assert not into.any() and torch.equal(view, own)
        with raises(StateError, "unsharded()"):
            torch.mul(own, 2, out=view)
        assert torch.equal(torch.empty_like(own).copy_(view), own)
    opt.close()


def test_one_rank_reads(ranks: Pool) -> None:
    for world in (1, 2):
        ranks.run(one_rank_reads, world=world)
        ranks.run(views_are_read, world=world)


def rows_of_the_page() -> dict[str, str]:
    """Returns what ``docs/what-you-hold.md`` says of each way to get an entry."""
    page = Path(__file__).parents[2] / "docs/what-you-hold.md"
    text = page.read_text().split("## State dicts and gradients\n")[1].split("\n## ")[0]
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {how: what for _, how, what, _ in cells[1:]}


def as_the_page_says(rows: dict[str, str]) -> None:
    model, opt = made()
    train_step(model, opt, 0)
    names: dict[str, Any] = {"model": model, "optimizer": opt, "copy": copy, "torch": torch}
    for how, what in rows.items():
        if "grad." in how:
            continue
        if "unsharded" in how:
            with opt.unsharded(), torch.no_grad():
                value = model.first.weight.mul_(2)
                assert what == "live" and value is model.first.weight
            continue
        if "weights()" in how:
            whole = dict(opt.weights())["first.weight"]
            before = raw(whole)
            with opt.unsharded(), torch.no_grad():
                model.first.weight.add_(1)
            assert what == "a snapshot" and raw(whole) == before
            continue
        for call in re.findall("`(.*?)`", how):
            names["v"] = live = model.state_dict()["first.weight"]
            reads, there = "copy" in call and "deepcopy" not in call, {**names}
            if reads:
                there["copy"], call = live.clone(), call.replace("(copy)", "(copy, io.BytesIO())")
            if what == "refusing":
                with raises(StateError, "full_tensor()"):
                    exec(call, there)
                continue
            value = there["copy"] if reads else eval(call, {**there})
            value = value["first.weight"] if isinstance(value, dict) else value
            there["io"] = io
            assert not reads or eval(call, there) is not True
            before = raw(value.full_tensor())
            with opt.unsharded(), torch.no_grad():
                model.first.weight.add_(1)
            assert (raw(value.full_tensor()) == before) is (what == "a snapshot"), call
    opt.close()


def gradients_refuse(calls: list[str]) -> None:
    for stage, releases in ((0, False), (0, True), (1, False), (1, True), (2, False), (3, False)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(W, W), nn.Tanh(), nn.Linear(W, W))
        opt = ShardedSGD(model, lr=0.1, stage=stage, release_gradients=releases)
        plain(model, 0)
        names = {"grad": model[0].weight.grad, "t": torch.zeros(W, W)}
        for call in calls:
            if releases:
                with raises(StateError, "release_gradients"):
                    exec(call, names)
                continue
            exec(call, names)
            assert not names["grad"].full_tensor().any()
            names["grad"].add_(1)
        opt.step()
        opt.close()


def test_the_page(ranks: Pool) -> None:
    rows = rows_of_the_page()
    assert len(rows) == 8 and set(rows.values()) == {"live", "a snapshot", "refusing"}
    ranks.run(as_the_page_says, rows, world=2)
    for how in rows:
        if "grad." in how:
            ranks.run(gradients_refuse, re.findall("`(.*?)`", how), world=2)
