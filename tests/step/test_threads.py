"""Threads that call one optimizer take turns: their steps are counted, and lose nothing."""

import copy
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn import Parameter

from shardopt import ShardedAdamW, ShardoptError, Tuning
from shardopt.domain.turn import Turn
from tests.support.comparing import digest, raw
from tests.support.training import raises

STEPS = 10


def made(offload: str | None) -> tuple[list[Parameter], ShardedAdamW]:
    torch.manual_seed(0)
    params = [Parameter(torch.randn(50, 40)) for _ in range(4)]
    for param in params:
        param.grad = torch.full_like(param, 0.5)
    return params, ShardedAdamW(params, lr=0.01, offload=offload)


def together(*works: Callable[[], Any]) -> list[BaseException]:
    errors: list[BaseException] = []
    begin = threading.Barrier(len(works))

    def run(work: Callable[[], Any]) -> None:
        begin.wait()
        for _ in range(STEPS):
            try:
                work()
            except BaseException as error:  # what a thread raises nobody sees
                errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_steps_of_threads(tmp_path: Path) -> None:
    for offload in (None, str(tmp_path)):
        params, opt = made(offload)
        assert together(opt.step, opt.step, opt.step) == []
        others, one = made(None)
        for _ in range(3 * STEPS):
            one.step()
        assert opt.updates == one.updates == 3 * STEPS
        assert [raw(param) for param in params] == [raw(param) for param in others] and digest(opt) == digest(one)
        opt.close()


def test_loads_and_moves_beside_steps(tmp_path: Path) -> None:
    """Each is done as a whole: what comes out is some order of them."""
    params, opt = made(str(tmp_path / "states"))
    opt.step()
    first = {index: {n: v.clone() for n, v in state.items()} for index, state in opt.state_dict()["state"].items()}
    loaded = {**opt.state_dict(), "state": first}
    errors = together(
        opt.step,
        lambda: opt.load_state_dict(loaded),
        lambda: opt.offload("cpu"),
        opt.reload,
        lambda: opt.state.__setitem__(params[0], first[0]),
    )
    assert errors == [] and opt.updates == STEPS + 1
    opt.load_state_dict(loaded)
    assert all(
        raw(opt.state[param][name]) == raw(value)
        for param, s in zip(params, first.values(), strict=True)
        for name, value in s.items()
    )
    opt.step(lambda: opt.load_state_dict(loaded))  # a thread waits for others only
    opt.close()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_thread_at_a_time_runs_a_module(stage: int) -> None:
    """A call of another thread would end the round, and lose what it has summed, or share its counts."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    alone = copy.deepcopy(model)
    opt = ShardedAdamW(model, lr=0.01, stage=stage, tuning=Tuning(keep_below=1, bucket_bytes=64))
    expected = ShardedAdamW(alone, lr=0.01, stage=stage, tuning=Tuning(keep_below=1, bucket_bytes=64))
    inputs, begun, refused = torch.ones(2, 8), threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        begun.set()
        assert refused.wait(60)

    earlier = model(inputs).sum()
    hook = model[1].register_full_backward_pre_hook(wait)
    thread = threading.Thread(target=model(inputs).square().sum().backward)
    thread.start()
    assert begun.wait(60)
    hook.remove()
    try:
        for call in (earlier.backward, lambda: model(inputs)):
            with raises(ShardoptError, "let one thread at a time", "another thread"):
                call()
    finally:
        refused.set()
        thread.join()
    opt.step()
    alone(inputs).square().sum().backward()
    expected.step()
    with opt.unsharded(), expected.unsharded():
        assert [raw(each) for each in model.parameters()] == [raw(each) for each in alone.parameters()]
    opt.close()
    expected.close()


def made_for_threads() -> tuple[torch.nn.Module, ShardedAdamW, torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    return model, ShardedAdamW(model, lr=0.01, stage=2, tuning=Tuning(bucket_bytes=64)), torch.ones(2, 8)


def test_a_refused_thread_steps_after_the_backward_that_it_met() -> None:
    """It does not count as the one that trains: its step waits for the other thread's backward, and takes all of it."""
    (model, opt, inputs), (alone, expected, _) = made_for_threads(), made_for_threads()
    begun, goes_on = threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        begun.set()
        assert goes_on.wait(60)

    hook = model[1].register_full_backward_pre_hook(wait)  # type: ignore[index]
    thread = threading.Thread(target=lambda: model(inputs).square().sum().backward())
    thread.start()
    assert begun.wait(60)
    hook.remove()
    with raises(ShardoptError, "let one thread at a time"):
        model(inputs)
    wait_for_round, waited = Turn._wait_for_round, list[str]()

    def wait_and_let_go(turn: Turn, call: str) -> None:
        waited.append(call)
        goes_on.set()
        wait_for_round(turn, call)

    with patch.object(Turn, "_wait_for_round", wait_and_let_go):
        opt.step()
    goes_on.set()
    thread.join()
    assert waited == ["step()"]
    alone(inputs).square().sum().backward()
    expected.step()
    assert [raw(each) for each in model.parameters()] == [raw(each) for each in alone.parameters()]
    opt.close()
    expected.close()


def test_a_failed_backward_of_a_thread_that_ended_keeps_no_other_from_training() -> None:
    (model, opt, inputs), (alone, expected, _) = made_for_threads(), made_for_threads()

    def fails(*_: object) -> None:
        raise ArithmeticError

    def backward() -> None:
        with suppress(ArithmeticError):
            model(inputs).sum().backward()

    hook = model[1].register_full_backward_pre_hook(fails)  # type: ignore[index]
    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    hook.remove()
    for each, optimizer in ((model, opt), (alone, expected)):
        loss = each(inputs).square().sum()
        optimizer.zero_grad()  # after the forward
        loss.backward()
        optimizer.step()
    assert [raw(each) for each in model.parameters()] == [raw(each) for each in alone.parameters()]
    opt.close()
    expected.close()
