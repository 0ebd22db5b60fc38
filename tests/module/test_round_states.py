"""The states of a round: each row of the table in the docstring of ``RoundState`` happens, and the reducer agrees."""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardopt import ShardedSGD, ShardoptError, Tuning
from shardopt.module.rounds import RoundState
from tests.support.ranks import Pool
from tests.support.training import raises

ROW = re.compile(r"^ *(CLOSED|OPEN|LOST) +(\S.*?)  +(CLOSED|OPEN|LOST)$", re.MULTILINE)


def rows() -> list[tuple[RoundState, str, RoundState]]:
    return [(RoundState[start], event, RoundState[end]) for start, event, end in ROW.findall(RoundState.__doc__ or "")]


class Net(nn.Module):
    """``between`` is called in backward, after the gradient of ``second`` and before that of ``first``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(4, 3), nn.Linear(3, 3)
        self.between: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self.between())
        return self.second(hidden).sum()


class Walk:
    """One module and its optimizer, brought into a state and led on by an event."""

    def __init__(self, stage: int) -> None:
        self.model = Net()
        tuning = Tuning(keep_below=0)  # or stage 3 keeps these small params whole, as stage 2 does
        self.opt = ShardedSGD(self.model, lr=0.1, stage=stage, tuning=tuning)
        self.opt.bind()
        assert bool(self.opt.units) == (stage == 3)
        self.seen: list[RoundState] = []

    @property
    def state(self) -> RoundState:
        handover: Any = self.opt.engine.takeover
        reducer = self.opt.engine.domain.reducer if self.opt.engine.domain is not None else None
        state: RoundState = handover.rounds.state
        assert (state is RoundState.OPEN) == (reducer is not None and reducer.is_open)
        assert (handover.rounds._lost is not None) == (state is RoundState.LOST)
        return state

    def loss(self) -> Tensor:
        loss: Tensor = self.model(torch.tensor([1, 3]))
        return loss

    def backward(self, between: Callable[[], None]) -> None:
        loss = self.loss()
        self.model.between = between
        try:
            loss.backward()
        finally:
            self.model.between = lambda: None

    def note(self) -> None:
        self.seen.append(self.state)

    def own_error(self) -> None:
        raise ValueError("of the user's own")

    def go_to(self, state: RoundState) -> None:
        if state is not RoundState.CLOSED:
            with raises(ValueError):
                self.backward(self.own_error)
        if state is RoundState.LOST:
            self.loss()
        assert self.state is state

    def happen(self, event: str, start: RoundState) -> RoundState:
        """The state after the event."""
        if event == "zero_grad()":
            self.opt.zero_grad()
        elif event == "forward":
            self.loss()
        elif event == "step()":
            if start is RoundState.CLOSED:
                self.opt.step()
            else:
                with raises(ShardoptError, "of a part of a backward only", "zero_grad()"):
                    self.opt.step()
        elif event == "first gradient of a round":
            self.backward(self.note)
            return self.seen.pop()
        elif event == "autograd is done":
            self.opt.zero_grad()
            self.backward(self.note)
            assert self.seen.pop() is start
        elif event == "shardopt raises in backward":
            self.opt.zero_grad()
            self.model.first.sparse = True  # a gradient that cannot be reduced
            with raises(ShardoptError, "sparse"):
                self.backward(self.note)
            self.model.first.sparse = False
            assert self.seen.pop() is start
        elif event == "an error of the user's own in backward":
            self.opt.zero_grad()
            with raises(ValueError):
                self.backward(self.own_error)
        else:
            raise AssertionError(f"no such event: {event}")
        return self.state


def each_row_happens(stage: int) -> None:
    walk = Walk(stage)
    for start, event, end in rows():
        for _ in range(2):
            walk.opt.zero_grad()
            walk.go_to(start)
            assert walk.happen(event, start) is end, f"{start.name}, {event}"
    if stage == 1:
        walk.opt.zero_grad()
        with walk.opt.no_sync():
            walk.backward(walk.note)
        assert walk.seen.pop() is RoundState.CLOSED is walk.state
    walk.opt.close()


def test_each_row_happens(ranks: Pool) -> None:
    """On one rank, where nobody has to be told of an error."""
    for stage in (1, 2, 3):
        ranks.run(each_row_happens, stage, world=1)


def test_the_table_is_whole() -> None:
    """Every call that a user can make is in it from every state; no two rows disagree."""
    found = {(start, event): end for start, event, end in rows()}
    assert len(found) == len(rows()) == 14
    for event in ("zero_grad()", "forward", "step()"):
        assert {start for start, name in found if name == event} == set(RoundState)
    assert {end for _, _, end in rows()} == set(RoundState)
