"""The table of :class:`shardopt.domain.param.MasterState`: every event in every state leads where the table says."""

from collections.abc import Callable

import torch
from torch.nn import Parameter

from shardopt import ShardedSGD
from shardopt.domain.param import MasterState
from tests.support.cases import fill_gradients

WEIGHTS, OTHERS = 1.0, 3.0


def table() -> dict[str, dict[str, str]]:
    """Event -> state before -> state after, as the docstring tells them."""
    text = MasterState.__doc__
    assert text is not None
    rows = [line.strip() for line in text.split("=\n")[-2].splitlines()]
    head = next(line.split() for line in text.splitlines() if line.strip().startswith("event"))[1:]
    cut = {line.rsplit(maxsplit=len(head))[0]: line.split()[-len(head) :] for line in rows if line and line[0] != "="}
    return {event: dict(zip(head, after, strict=True)) for event, after in cut.items()}


def new() -> tuple[Parameter, ShardedSGD]:
    param = Parameter(torch.full((300,), WEIGHTS, dtype=torch.bfloat16))
    opt = ShardedSGD([param], lr=0.0, momentum=0.9, master="split")
    step(param, opt)
    return param, opt


def step(param: Parameter, opt: ShardedSGD) -> None:
    fill_gradients([param], "integers", 0)
    opt.step()


def load(master: float | None) -> Callable[[Parameter, ShardedSGD], None]:
    def act(param: Parameter, opt: ShardedSGD) -> None:
        state = {"momentum_buffer": torch.ones(300)}
        if master is not None:
            state["master"] = torch.full((300,), master)
        opt.load_state_dict({"state": {0: state}, "param_groups": opt.state_dict()["param_groups"]})

    return act


def forget(param: Parameter, opt: ShardedSGD) -> None:
    opt.state = {}


REACH = {
    "FOLLOWS": lambda param, opt: None,
    "LOADED": load(WEIGHTS),
    "UNMATCHED": load(OTHERS),
    "STALE": load(None),
}
EVENTS = {
    "a step updates the param": step,
    "a state is loaded, whose master is whole or fits": load(WEIGHTS),
    "a state is loaded, with the halves of others": load(OTHERS),
    "a state is loaded, without a master, in halves": load(None),
    "refresh_masters()": lambda param, opt: opt.refresh_masters(),
    "all states are forgotten": forget,
}


def test_the_table() -> None:
    told = table()
    assert told.keys() == EVENTS.keys()
    for event, act in EVENTS.items():
        assert told[event].keys() == REACH.keys() == {state.name for state in MasterState}
        for before, reach in REACH.items():
            param, opt = new()
            entry = opt.engine.domains[0].entries[param]
            reach(param, opt)
            assert entry.master_state.name == before
            act(param, opt)
            assert entry.master_state.name == told[event][before], (event, before)
            assert (entry.version is None) == (entry.master_state is not MasterState.FOLLOWS)
            assert (0 in entry.shard.unmatched_masters) == (entry.master_state is MasterState.UNMATCHED)
