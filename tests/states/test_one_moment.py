"""What is saved of states is of one moment: beside a step or a load it is refused, and never a mixture of two."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardopt
from shardopt import ShardedAdamW, StateError, Tuning
from shardopt.domain.remote_states import RemoteStates
from shardopt.step import update
from tests.states.test_one_rank_alone import same, saved
from tests.support.moments import Moments
from tests.support.ranks import Pool
from tests.support.training import raises

SMALL = Tuning(bucket_bytes=3000, keep_below=100)


def stepped(stage: int | None, steps: int = 2, **options: Any) -> tuple[nn.Module, ShardedAdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(17, 40), nn.Tanh(), nn.Linear(40, 3))
    if options.pop("low", False):
        model.bfloat16()
    taken, keywords = (model, {"stage": stage}) if stage is not None else (model.parameters(), {})
    opt = ShardedAdamW(taken, lr=0.01, tuning=SMALL, **keywords, **options)
    for number in range(steps):
        take_step(model, opt, number)
    return model, opt


def take_step(model: nn.Module, opt: Any, number: int) -> None:
    opt.zero_grad()
    x = torch.full((2, 17), 0.5 + number, dtype=model[0].weight.dtype)
    model(x).square().sum().backward()  # the same on all ranks: nobody need average it
    opt.step()


def plain(opt: ShardedAdamW) -> dict[str, Any]:
    """What rank 0 saves, on every rank."""
    box = [saved(opt.state_dict()) if not dist.is_initialized() or dist.get_rank() == 0 else None]
    if dist.is_initialized():
        dist.broadcast_object_list(box, 0)
    return box[0]


# -- a load between looking and saving ---------------------------------------------------------------------------------


def writes(model: nn.Module, opt: ShardedAdamW, first: dict[str, Any], folder: str) -> dict[str, Callable[[], Any]]:
    """Everything that writes states without a step."""
    params = list(model.parameters())

    def assign() -> None:
        opt.state[params[0]] = first["state"][0]

    def forget() -> None:
        opt.state = {}  # type: ignore[assignment]

    return {
        "load_state_dict": lambda: opt.load_state_dict(first),
        "assign": assign,
        "load_checkpoint": lambda: shardopt.load_checkpoint(folder, model, opt),
        "forget": forget,
    }


def loads_between(folder: str) -> None:
    for stage in (None, 1, 2, 3):
        model, opt = stepped(stage, 1)
        first = plain(opt)
        shardopt.save_checkpoint(f"{folder}/{stage}", model, opt)
        for name, write in writes(model, opt, first, f"{folder}/{stage}").items():
            take_step(model, opt, 1)
            expected = plain(opt)
            weights = model.state_dict()
            backup = opt.state_dict()
            write()
            if dist.is_initialized():
                with raises(StateError, "take state_dict() again", "exp_avg", "load"):
                    saved(backup["state"][0])
            elif name != "load_checkpoint":
                assert same(saved(backup), expected), (stage, name)
            saved(weights)  # of which a load of states is nothing
            if name != "load_checkpoint":  # which writes to where states lie, as torch's load of weights does
                opt.load_state_dict(backup)
                assert same(saved(opt.state_dict()), expected), (stage, name)
            dist.is_initialized() and dist.barrier()
        opt.close()


def test_loads_between(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(loads_between, str(tmp_path / "two"), world=2)
    loads_between(str(tmp_path / "alone"))  # without a group


@pytest.mark.parametrize("between", ["step", "load_checkpoint"])
def test_what_was_looked_at_is_of_one_moment_at_one_rank(between: str, tmp_path: Path) -> None:
    """Of before or, as in torch, of now: the steps fit the moments."""
    model, opt = stepped(None, 1)
    shardopt.save_checkpoint(tmp_path, model, opt)
    take_step(model, opt, 1)
    looked_at, before = opt.state_dict(), saved(opt.state_dict())
    take_step(model, opt, 2) if between == "step" else shardopt.load_checkpoint(tmp_path, model, opt)
    assert same(saved(looked_at), before) or same(saved(looked_at), saved(opt.state_dict()))


def test_loads_between_at_one_rank(tmp_path: Path) -> None:
    """Looking gives what a later load does not reach."""
    for low, options in ((False, {}), (True, {}), (False, {"state_format": "int8"}), (True, {"master": "split"})):
        for stage in (None, 3):
            _, opt = stepped(stage, 1, low=low, **options)
            first = saved(opt.state_dict())
            opt.close()
            _, opt = stepped(stage, 2, low=low, **options)
            expected, backup = saved(opt.state_dict()), opt.state_dict()
            opt.load_state_dict(first)
            assert same(saved(backup), expected) and not same(expected, first)
            opt.close()


def loads_elsewhere(stage: int) -> None:
    """Rank 1 goes on to a load, while rank 0 has yet to save."""
    rank = dist.get_rank()
    model, opt = stepped(stage)
    best = plain(opt)
    take_step(model, opt, 2)
    last, before = plain(opt), opt.state_dict()
    params, token = list(model.parameters()), torch.zeros(1)
    for write in (lambda: opt.load_state_dict(best), lambda: opt.state.__setitem__(params[0], best["state"][0])):
        if rank == 1:
            write()
        dist.barrier()
        if rank == 0:
            state = opt.state_dict()
            for stale in (before, state):
                with raises(StateError, "take state_dict() again", "load"):
                    saved(stale["state"][0])
            saved(model.state_dict())
            write()
            loaded = saved(opt.state_dict())
            assert same(loaded["state"][0], best["state"][0]) and not same(loaded["state"][0], last["state"][0])
        dist.barrier()
    # Who has loaded reads of the others what they load a little later.
    if rank == 0:
        opt.load_state_dict(last)
        dist.send(token, 1)
        assert same(saved(opt.state_dict()), last)
    else:
        dist.recv(token, 0)
        opt.load_state_dict(last)
    dist.barrier()
    # Ranks that loaded differently agree again behind a step.
    if rank == 1:
        opt.load_state_dict(last)
    take_step(model, opt, 3)
    assert same(saved(opt.state_dict()), plain(opt)) or rank != 0
    opt.close()


def test_loads_elsewhere(ranks: Pool) -> None:
    for stage in (1, 3):
        ranks.run(loads_elsewhere, stage, world=2)


def looks_assigned() -> None:
    """To assign what was looked at writes nothing: what was looked at before can be saved, on ranks without a slice."""
    model, opt = stepped(1)
    before = opt.state_dict()
    for param in model.parameters():
        opt.state[param] = {name: value.to("cpu") for name, value in opt.state[param].items()}
    assert len(saved(before)["state"]) == 4
    dist.barrier()
    opt.state[model[0].bias] = {name: value.clone() for name, value in opt.state[model[0].bias].items()}
    dist.barrier()
    with raises(StateError, "load"):
        saved(before)
    assert len(saved(opt.state_dict())["state"]) == 4  # all ranks count it, whatever they own
    dist.barrier()
    opt.close()


def test_looks_assigned(ranks: Pool) -> None:
    ranks.run(looks_assigned, world=3)


# -- a save beside a step ----------------------------------------------------------------------------------------------


def beside_a_step(folder: str, release: bool) -> None:
    """A thread of rank 0 reads at three moments of a step."""
    rank, moments = dist.get_rank(), Moments(folder)
    model, opt = stepped(1, release_gradients=release)
    kept = opt.state_dict()
    refused: list[str] = []

    def read(when: str) -> None:
        try:
            saved(kept)
        except StateError as error:
            refused.append(f"{when}: {error}")

    launch, by_shard, slice_at = update._launch, update.launches_by_shard, RemoteStates._slice

    def launched(*arguments: Any) -> None:
        launch(*arguments)
        if rank == 0:
            read("own update")
        elif not release:
            moments.say("rank 1 updates")
            moments.wait("rank 0 has read")

    def updates(*arguments: Any) -> Any:
        if rank == 0 and not release:  # not in its own update yet
            moments.wait("rank 1 updates")
            read("another one's update")
            moments.say("rank 0 has read")
        return by_shard(*arguments)

    with patch.object(update, "_launch", launched), patch.object(update, "launches_by_shard", updates):
        take_step(model, opt, 2)
    dist.barrier()
    if rank == 0:
        assert {each.split(":")[0] for each in refused} >= {"own update"} | (
            set() if release else {"another one's update"}
        )
        assert all("take state_dict() again" in each and "under way" in each for each in refused), refused
        assert saved(opt.state_dict())["state"][0]["step"] == 3
    # The step begins while a slice is on its way.
    dist.barrier()
    kept = opt.state_dict()

    def sliced(*arguments: Any) -> Tensor:
        found = slice_at(*arguments)
        moments.say("a slice is on its way")
        moments.wait("the step was taken")
        return found

    with patch.object(RemoteStates, "_slice", sliced):
        if rank == 0:
            refused.clear()
            thread = threading.Thread(target=read, args=("later",))
            thread.start()
        moments.wait("a slice is on its way")
        take_step(model, opt, 3)
        dist.barrier()
        moments.say("the step was taken")
        if rank == 0:
            thread.join()
            assert "before any rank takes the next step" in refused[0], refused
        dist.barrier()
    assert saved(opt.state_dict())["state"][0]["step"] == 4
    dist.barrier()
    opt.close()


def test_beside_a_step(ranks: Pool, tmp_path: Path) -> None:
    for release in (False, True):
        ranks.run(beside_a_step, str(tmp_path / str(release)), release, world=2)
