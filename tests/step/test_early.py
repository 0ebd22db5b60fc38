"""Updates in backward for a step to come: the bits of a training without, whatever a script does before that step."""

import os
import signal
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardopt import BindingError, CommunicationError, Offload, ShardedAdamW, Tuning
from shardopt.domain.tiers import check_offload
from shardopt.partition import reducer
from shardopt.step import early
from tests.support.late_copies import AsLateAsAllowed, as_on_a_gpu
from tests.support.ranks import Pool
from tests.support.training import Net, loss_of, raises, raw

STEPS, AT = 6, 3  # AT: the step before which something happens
PAUSE = 1  # steps without early updates after that
ENOUGH = 1 << 20  # bytes: the copies of all buckets
ADAMW: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
BF16 = {"state_format": "bf16"}


def tuning() -> Tuning:
    return Tuning(bucket_bytes=1500, compress_from=256, nonfinite="skip")


def bf16() -> nn.Module:
    return Net().bfloat16()


# -- what happens between a backward and its step ----------------------------------------------------------------------


Model = Any
Opt = Any
Event = Callable[[Model, Opt, int], object]


def nothing(model: Model, opt: Opt, step: int) -> None:
    pass


def of_rate(model: Model, opt: Opt, step: int) -> None:
    opt.param_groups[0]["lr"] *= 0.5


def of_group(model: Model, opt: Opt, step: int) -> None:
    opt.param_groups[0]["weight_decay"] = 0.3


def of_variant(model: Model, opt: Opt, step: int) -> None:
    opt.param_groups[0]["maximize"] = True


def of_gradient(model: Model, opt: Opt, step: int) -> None:
    for param in model.parameters():
        param.grad.mul_(0.5)


def of_gradients(model: Model, opt: Opt, step: int) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-2)


def of_gradient_through_data(model: Model, opt: Opt, step: int) -> None:
    for param in model.parameters():
        param.grad.local.data.mul_(0.5)


def of_missing_gradient(model: Model, opt: Opt, step: int) -> None:
    next(model.parameters()).grad = None


def of_param(model: Model, opt: Opt, step: int) -> None:
    with torch.no_grad(), opt.unsharded():
        for param in model.parameters():
            param.mul_(0.5)


def of_param_through_data(model: Model, opt: Opt, step: int) -> None:
    with opt.unsharded():
        for param in model.parameters():
            param.data.mul_(0.5)


def of_state(model: Model, opt: Opt, step: int) -> None:
    for param in model.parameters():
        opt.state[param]["exp_avg"].mul_(0.5)


def of_count(model: Model, opt: Opt, step: int) -> None:
    opt.state[next(model.parameters())]["step"].zero_()


def of_states(model: Model, opt: Opt, step: int) -> None:
    opt.load_state_dict(opt.state_dict())


def of_states_read(model: Model, opt: Opt, step: int) -> None:
    assert any(raw(value) for state in opt.state_dict()["state"].values() for value in state.values())
    assert all(isinstance(raw(value), bytes) for param in model.parameters() for value in opt.state[param].values())


def of_states_held(model: Model, opt: Opt, step: int) -> None:
    """Views of their memory, as what reads them makes: they show what later steps make of it."""
    shards = opt.engine.domain.shards
    held = [each.home.read(name, 0, each.numel) for each in shards for name in each.home.names]
    model.held = held


def of_tier(model: Model, opt: Opt, step: int) -> None:
    opt.offload("cpu")
    opt.reload()


def of_backward(model: Model, opt: Opt, step: int) -> None:
    loss_of(model, 50 + step).backward()


def of_zeros(model: Model, opt: Opt, step: int) -> None:
    opt.zero_grad()
    loss_of(model, 50 + step).backward()


EVENTS: dict[str, Event] = {
    each.__name__: each
    for each in (
        of_rate,
        of_group,
        of_variant,
        of_gradient,
        of_gradients,
        of_gradient_through_data,
        of_missing_gradient,
        of_param,
        of_param_through_data,
        of_state,
        of_count,
        of_states,
        of_states_read,
        of_states_held,
        of_tier,
        of_backward,
        of_zeros,
    )
}

HELD = (of_gradient_through_data, of_states_held)  # a script has memory of them from then on


# -- trainings ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    stage: Any
    make: Callable[[], nn.Module] = Net
    keywords: Any = ()
    backwards: int = 1
    fused: bool = False  # a GradScaler leaves it to the step to unscale
    step: Any = "auto"


def made(way: Way, nbytes: int, **more: Any) -> tuple[Any, Any]:
    model = way.make()
    keywords = {**ADAMW, "tuning": tuning(), **dict(way.keywords), **more}
    return model, ShardedAdamW(model, **keywords, stage=way.stage, offload=Offload(early_bytes=nbytes, step=way.step))


def updates_of(opt: Opt) -> Any:
    return opt.engine.domain.early


def trained(way: Way, event: Event, nbytes: int, **more: Any) -> tuple[list[bytes], list[int], list[int]]:
    """The bits at the end, how many buckets each step took, and how often early updates were dropped so far."""
    model, opt = made(way, nbytes, **more)
    taken, dropped = [], []
    for step in range(STEPS):
        opt.zero_grad()
        for turn in range(way.backwards):
            loss_of(model, 10 * step + turn).backward()
        if step == AT:
            event(model, opt, step)
        opt.step()
        if nbytes:
            taken.append(updates_of(opt).taken)
            dropped.append(updates_of(opt).dropped)
            sizes = opt.memory()["buffer"]
            assert sum(updates_of(opt).nbytes.values()) <= nbytes <= ENOUGH, sizes
    return ended(model, opt), taken, dropped


def ended(model: Model, opt: Opt) -> list[bytes]:
    found = [raw(value) for value in model.__dict__.pop("held", ())]
    found += [raw(value) for param in model.parameters() for value in opt.state[param].values()]
    with opt.unsharded():
        found += [raw(param) for param in model.parameters()]
    opt.close()
    return found


def check(way: Way, name: str, event: Event) -> None:
    plain, *_ = trained(way, event, 0)
    ours, taken, dropped = trained(way, event, ENOUGH)
    where = f"{name}, {way}: {taken}, {dropped}"
    assert ours == plain, where
    assert min(taken[2:AT]) > 0, where
    assert dropped == [0] * AT + [event is not nothing] * (STEPS - AT), where
    if event is nothing:
        assert min(taken[2:]) > 0, where
    else:
        assert taken[AT + 1 : -1] == [0] * PAUSE, where
        # What stands in for copies to a device holds views of what it copies.
        assert way.step == "gpu" or (taken[-1] > 0) == (event not in HELD), where


WAYS = [
    Way(1),
    Way(2, keywords=tuple(BF16.items())),
    Way(3),
    Way(2, bf16),
    Way(3, bf16, (("master", "split"), ("state_format", "int8"))),
]


def trains(ways: list[Way], events: list[str]) -> None:
    with patch.object(early, "STEPS_WITHOUT", PAUSE):
        for way in ways:
            check(way, "nothing", nothing)
            for name in events:
                check(way, name, EVENTS[name])


@pytest.mark.parametrize("world", [1, 2])
def test_whatever_happens_before_a_step_it_has_the_bits_of_one_that_waits(world: int, ranks: Pool) -> None:
    """Each event in one of the ways."""
    names = list(EVENTS)
    for index, way in enumerate(WAYS):
        ranks.run(trains, [way], names[(index + world) % len(WAYS) :: len(WAYS)], world=world)


# -- other steps -------------------------------------------------------------------------------------------------------


def scaled(way: Way, nbytes: int) -> tuple[list[bytes], int]:
    """With a GradScaler, of which one loss overflows: that step is skipped."""
    model, opt = made(way, nbytes, fused=way.fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1000)
    for step in range(STEPS):
        opt.zero_grad()
        loss = loss_of(model, step) * (torch.inf if step == AT else 1.0)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    taken = updates_of(opt).taken if nbytes else 0
    return ended(model, opt), taken


def overflowed(way: Way, nbytes: int) -> tuple[list[bytes], list[int]]:
    model, opt = made(way, nbytes)
    taken = []
    for step in range(STEPS):
        opt.zero_grad()
        (loss_of(model, step) * (torch.inf if step == AT else 1.0)).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the step that is skipped
            opt.step()
        taken.append(updates_of(opt).taken if nbytes else 0)
    return ended(model, opt), taken


def skips() -> None:
    with patch.object(early, "STEPS_WITHOUT", PAUSE):
        for way in (Way(2), Way(3, bf16, tuple(BF16.items()))):
            (plain, _), (ours, taken) = overflowed(way, 0), overflowed(way, ENOUGH)
            assert ours == plain and min(taken[2:AT]) > 0 and taken[AT:-1] == [0] * (PAUSE + 1) and taken[-1] > 0, taken
            for fused in (False, True):  # each writes all gradients before the step
                (plain, _), (ours, number) = (scaled(replace(way, fused=fused), each) for each in (0, ENOUGH))
                assert ours == plain and number == 0


def accumulates() -> None:
    """Of several backwards a step the last one updates early; one more or one less drops what is updated."""
    with patch.object(early, "STEPS_WITHOUT", PAUSE):
        for way in (Way(2, backwards=3), Way(3, bf16, tuple(BF16.items()), backwards=2), Way(1, backwards=2)):
            for event in (nothing, of_backward):
                check(way, event.__name__, event)
        for more, clips in (({"max_grad_norm": 1e9}, False), ({"max_grad_norm": 1e-2}, True)):
            plain, *_ = trained(Way(2), nothing, 0, **more)
            ours, taken, dropped = trained(Way(2), nothing, ENOUGH, **more)
            assert ours == plain, (taken, dropped)
            assert (dropped[-1] > 0, max(taken) == 0) == (clips, clips), (taken, dropped)


def of_lost_round(model: Model, opt: Opt, step: int) -> None:
    """A backward fails when most of its buckets are reduced: nothing that a step could have taken is dropped."""

    def fail(grad: torch.Tensor) -> None:
        raise ValueError("of the script")

    opt.zero_grad()
    loss = loss_of(model, step)
    handle = next(model.parameters()).register_hook(fail)
    with pytest.raises(ValueError, match="of the script"):
        loss.backward()
    handle.remove()
    of_zeros(model, opt, step)


def loses_rounds() -> None:
    for way in (Way(2), Way(1)):
        plain, *_ = trained(way, of_lost_round, 0)
        with patch.object(early, "STEPS_WITHOUT", PAUSE):
            ours, taken, dropped = trained(way, of_lost_round, ENOUGH)
        assert ours == plain and taken[-1] > 0, (taken, dropped)
        assert dropped[-1] == 1, dropped  # by the zero_grad() ahead of it


def has_no_memory() -> None:
    """The last rank has no memory for the third copy, and updates that bucket in the step."""
    beside, calls = early.ResidentStorage.beside, []

    def fails(self: Any, names: Any) -> Any:
        calls.append(names)
        if len(calls) > 2 and dist.get_rank() == dist.get_world_size() - 1:
            raise RuntimeError("can't allocate memory")
        return beside(self, names)

    plain, *_ = trained(Way(2), nothing, 0)
    with patch.object(early.ResidentStorage, "beside", fails):
        ours, taken, dropped = trained(Way(2), nothing, ENOUGH)
    assert ours == plain and dropped == [0] * STEPS
    assert (taken[-1] == 2) == (dist.get_rank() == dist.get_world_size() - 1), taken


@pytest.mark.parametrize("world", [1, 2])
def test_steps_that_are_skipped_scaled_accumulated_or_clipped(world: int, ranks: Pool) -> None:
    ranks.run(skips, world=world)
    ranks.run(accumulates, world=world)
    ranks.run(loses_rounds, world=world)
    ranks.run(has_no_memory, world=world)


def nothing_is_seen(stage: int) -> None:
    """Between backward and step params, states and counts are those of before, and sums those of the backward."""
    ends = []
    for nbytes in (0, ENOUGH):
        model, opt = made(Way(stage), nbytes)
        for step in range(4):
            opt.zero_grad()
            loss_of(model, step).backward()
            if step == 3:
                break
            opt.step()
        if nbytes:
            assert len(updates_of(opt)._made) > 2
        params = list(model.parameters())
        grads = [raw(param.grad.full_tensor()) for param in params]
        ends.append([grads, [raw(value) for param in params for value in opt.state[param].values()], ended(model, opt)])
    assert ends[0] == ends[1]


# Small buckets take another buffer rather than wait, as many as the pace of the ranks asks for: here they wait.
@patch.multiple(reducer, BYTES_WITHOUT_WAITS=0, BUFFERS_WITHOUT_WAITS=0, PATIENCE=120.0)
def starts_early(stage: Any) -> None:
    """The first update begins before half of the buckets have arrived, and the copies have no more than their bytes."""
    events: list[str] = []
    arrives, updates = early.EarlyUpdates.update, early._run

    def arrive(*arguments: Any) -> None:
        events.append("arrived")
        arrives(*arguments)

    def run(*arguments: Any) -> None:
        events.append("updated")
        updates(*arguments)

    model, opt = made(Way(stage), ENOUGH)
    with patch.object(early.EarlyUpdates, "update", arrive), patch.object(early, "_run", run):
        for step in range(4):
            opt.zero_grad()
            events.clear()
            loss_of(model, step).backward()
            in_backward = list(events)
            opt.step()
    arrived, first = in_backward.count("arrived"), in_backward.index("updated")
    assert arrived >= 4 and in_backward[:first].count("arrived") <= arrived // 2, in_backward
    needed, plain = sum(updates_of(opt).nbytes.values()), sum(opt.memory()["buffer"].values())
    opt.close()
    for most in (needed - 1, needed // 2, 1):
        model, opt = made(Way(stage), most)
        for step in range(4):
            opt.zero_grad()
            loss_of(model, step).backward()
            opt.step()
        found = sum(updates_of(opt).nbytes.values())
        assert found <= most and updates_of(opt).taken == len(updates_of(opt)._copies), (most, found)
        assert sum(opt.memory()["buffer"].values()) == plain - needed + found
        assert f"early updates: buckets that the last step took: {updates_of(opt).taken}," in str(opt.timings())
        opt.zero_grad()
        loss_of(model, 9).backward()
        opt.zero_grad()
        assert not found or sum(updates_of(opt).nbytes.values()) == 0  # freed with what was dropped
        opt.close()


def test_nothing_is_seen_before_the_step(ranks: Pool) -> None:
    for stage in (1, 3):
        ranks.run(nothing_is_seen, stage, world=2)
        nothing_is_seen(stage)


def test_the_first_update_begins_in_the_first_half_of_backward(ranks: Pool) -> None:
    for stage in (1, 2, 3):
        ranks.run(starts_early, stage, world=2)
    starts_early(2)


def through_a_ring(ways: list[Way], events: list[str]) -> None:
    """States stream through a device, whose copies come as late as they may."""
    with as_on_a_gpu(AsLateAsAllowed):  # type: ignore[arg-type]
        trains([replace(way, step="gpu") for way in ways], events)


def test_states_that_stream_through_a_device(ranks: Pool) -> None:
    names = list(EVENTS)
    for index, way in enumerate(WAYS):
        ranks.run(through_a_ring, [way], names[index :: len(WAYS)], world=1 + index % 2)


def test_what_has_no_early_updates_is_refused() -> None:
    model = Net()
    with raises(ValueError, "states='cpu'", "early_bytes=9"):
        Offload("/tmp", early_bytes=9)
    with raises(ValueError, "early_bytes", "hand the module over"):
        ShardedAdamW(model.parameters(), offload=Offload(early_bytes=9))
    with raises(ValueError, "early_bytes", "stage 0"):
        ShardedAdamW(model, stage=0, offload=Offload(early_bytes=9))
    with raises(ValueError, "early_bytes", "release_gradients"):
        ShardedAdamW(model, release_gradients=True, offload=Offload(early_bytes=9))
    with raises(ValueError, "early_bytes", "params="):
        ShardedAdamW(model, stage=3, offload=Offload(params="cpu", early_bytes=9))
    refused: Any = (("cpu", {}, 2), ("cuda", {}, 2), ("cuda", {"step": "cpu"}, 1))
    for device, options, copies in refused:
        with raises(BindingError, "early_bytes"):
            check_offload(Offload(early_bytes=9, **options), torch.device(device), copies)
    with raises(BindingError, "early_bytes"):
        check_offload(Offload(early_bytes=9, gradients="cpu"), torch.device("cuda"))


def dies_before_the_step(stage: int) -> str:
    """Rank 1 ends between backward and step; nothing that rank 0 updated early is seen after the error."""
    model, opt = made(Way(stage), ENOUGH, tuning=Tuning(bucket_bytes=1500, compress_from=256, timeout=120))
    for step in range(3):
        opt.zero_grad()
        loss_of(model, step).backward()
        if step < 2:
            opt.step()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    assert len(updates_of(opt)._made) > 2
    shards = opt.engine.domain.shards
    before = [raw(each) for shard in shards for each in (shard.param, *shard.home.streams.values())]
    try:
        opt.step()
    except CommunicationError as error:
        after = [raw(each) for shard in shards for each in (shard.param, *shard.home.streams.values())]
        assert before == after
        dist.destroy_process_group()  # as a process that ends does
        return str(error)
    return "nothing"


def test_a_rank_that_dies_before_the_step_leaves_nothing_behind(ranks: Pool) -> None:
    for stage in (2, 3):
        assert "every rank must call step()" in ranks.run(dies_before_the_step, stage, world=2, doomed=[1])[0]
