"""States that are read and then written on several ranks: a rank that comes later reads what was there; no barrier.

One rank is held back until the others have written. What they compute is what one process would.
"""

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from shardopt import DisagreementError, StateError
from tests.states.test_held_tensors import TIERS, step, stepped, stored, whole
from tests.support.moments import Moments
from tests.support.ranks import Pool
from tests.support.training import raises

State = dict[str, Any]

COUNT = 5  # params


def scale(state: State) -> None:
    held = state["exp_avg"]
    held.mul_(1 / (1 + held.norm()))


def assign(state: State) -> None:
    held = state["exp_avg"]
    scaled = held / (1 + held.abs().sum())
    state["exp_avg"] = scaled


def mask(state: State) -> None:
    held = state["exp_avg"]
    held[held > held.median()] = 0


def of_another(state: State) -> None:
    state["exp_avg"].mul_(state["exp_avg_sq"].max())


WAYS: list[Callable[[State], object]] = [scale, assign, mask, of_another]


def cut() -> int:
    """The number of a param of which two ranks have some."""
    return {2: 2, 3: 1}[dist.get_world_size()]


def last_after_others(moments: Moments, call: Callable[[], object]) -> None:
    """Makes a call on the last rank once the others have made it."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if rank == last:
        moments.wait(*(f"rank {other}" for other in range(last)))
    call()
    moments.say(f"rank {rank}")
    dist.barrier()


def reads_then_writes(folder: str) -> None:
    for number, options in enumerate(TIERS):
        params, opt = stepped(options, COUNT)
        opt.consolidate_state_dict(to=0)  # which reads nothing of the others, the first time
        for way in WAYS:
            expected = {name: whole(value) for name, value in opt.state[params[cut()]].items()}
            dist.barrier()
            way(expected)
            state = opt.state[params[cut()]]
            last_after_others(Moments(f"{folder}/{number} {way.__name__}"), partial(way, state))
            found = opt.state[params[cut()]]["exp_avg"]
            assert torch.equal(whole(found), stored(opt, expected["exp_avg"])), (options, way.__name__)
            (domain,) = opt.engine.domains
            entry = domain.entries[params[cut()]]
            moments: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(moments, domain.epoch.now("exp_avg", (entry.shard, entry.index)))
            assert moments.count(moments[0]) == len(moments), (options, way.__name__, moments)
            dist.barrier()
            step(params, opt)
            assert domain.remote is None or not domain.remote._kept
        opt.close()


def one_param_at_a_time(folder: str) -> None:
    """What was written of one param is nothing of another one's, nor a state of another one of the same param."""
    params, opt = stepped({}, COUNT)
    shown, other = opt.state_dict(), opt.state[params[0]]
    sums = [float(other[name].sum()) for name in ("exp_avg", "exp_avg_sq")]

    def write_and_read() -> None:
        opt.state[params[cut()]]["exp_avg"].fill_(2)
        other["exp_avg"].mul_(0.5)
        assert float(other["exp_avg_sq"].sum()) == sums[1] and float(shown["state"][0]["exp_avg_sq"].sum()) == sums[1]
        with raises(StateError, "take state_dict() again"):
            shown["state"][cut()]["exp_avg"].sum()

    last_after_others(Moments(folder), write_and_read)
    assert float(other["exp_avg"].sum()) == sums[0] / 2
    dist.barrier()
    step(params, opt)
    opt.close()


def what_was_not_read(folder: str) -> None:
    """Is refused to the reader, at once: also where another rank never comes to what it asks for."""
    rank, moments = dist.get_rank(), Moments(folder)
    params, opt = stepped({}, COUNT)
    if rank == 0:
        opt.state[params[cut()]]["exp_avg"].mul_(0.5)
        moments.say("written")
    else:
        moments.wait("written")
        with raises(StateError, "or writes one that it has not read", "a load of states"):
            opt.state[params[cut()]]["exp_avg"].norm()
        opt.state[params[cut()]]["exp_avg"].mul_(0.5)
    dist.barrier()
    step(params, opt)
    if rank == 0:
        opt.state[params[cut()]]["exp_avg"].mul_(0.5)
        with raises(StateError, "write states on every rank alike", "in its step"):
            opt.state[params[cut()]]["exp_avg"].norm()
    with raises(DisagreementError, "writes to optimizer.state"):
        step(params, opt)
    opt.close()


def test_a_late_rank_reads_what_was_there(ranks: Pool) -> None:
    for world in (2, 3):
        for function in (reads_then_writes, one_param_at_a_time):
            ranks.run(function, tempfile.mkdtemp(), world=world)


def test_what_was_written_unread_is_refused(ranks: Pool) -> None:
    ranks.run(what_was_not_read, tempfile.mkdtemp(), world=2)
