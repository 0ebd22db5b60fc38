"""Threads that call one optimizer take turns: their steps are counted, and lose nothing."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import Parameter

from shardopt import ShardedAdamW
from tests.support.comparing import digest, raw

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
