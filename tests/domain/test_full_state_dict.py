"""Promise: torch's functions with ``full_state_dict=True`` return whole tensors, also on one rank alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from shardopt import ShardedAdamW, ShardedOptimizer, ShardedSGD
from shardopt.partition.comm.peer_memory import PeerMemory
from shardopt.remote import peers, serve
from tests.domain.test_recut import TUNING, network, states_of, train_step
from tests.support.ranks import Pool
from tests.support.tensor_parallel import mesh_of, model_of
from tests.support.training import raw

EVERYWHERE = StateDictOptions(full_state_dict=True)
ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def trained(stage: int, kind: type[ShardedOptimizer] = ShardedAdamW) -> tuple[Any, Any]:
    model = network()
    opt = kind(model, lr=0.01, stage=stage, tuning=TUNING)
    train_step(model, opt, 0)
    return model, opt


def values(state: dict[str, Any]) -> dict[str, bytes]:
    assert all(type(value) is torch.Tensor for value in state.values())
    return {name: raw(value) for name, value in state.items()}


def whole_and_back(stage: int, other: int) -> None:
    model, opt = trained(stage)
    expected = states_of(opt)
    opt.engine.states.consolidated = None
    with opt.unsharded():
        weights = {name: raw(param) for name, param in model.named_parameters()}
    for get, put in ((EVERYWHERE, EVERYWHERE), (ON_RANK_0, FROM_RANK_0)):
        states, params = get_optimizer_state_dict(model, opt, options=get), get_model_state_dict(model, options=get)
        if get is EVERYWHERE or dist.get_rank() == 0:
            names = list(weights)
            found = [values(states["state"][name]) for name in names]
            assert {(n, name): value for n, each in enumerate(found) for name, value in each.items()} == expected
            assert values(params) == weights
        else:
            assert not states and not params
        into, loaded = trained(other)
        # torch broadcasts a plain param's memory as it is, and would take its strides for those of a contiguous one.
        set_model_state_dict(into, {name: each.contiguous() for name, each in params.items()}, options=put)
        set_optimizer_state_dict(into, loaded, states, options=put)
        assert states_of(loaded) == expected
        with loaded.unsharded():
            assert {name: raw(param) for name, param in into.named_parameters()} == weights
        loaded.close()
    opt.close()


def of_dtensors() -> None:
    """Of a tensor-parallel model: parts lie inside of DTensors, and what is whole has no slice of either kind."""
    mesh = mesh_of()
    model = model_of("blocks", mesh["tp"])
    opt = ShardedAdamW(model, stage=3, process_group=mesh["dp"].get_group(), tuning=TUNING)
    opt.bind()
    whole = values(get_model_state_dict(model, options=EVERYWHERE))
    with opt.unsharded():
        expected = {
            name: raw(param.full_tensor() if isinstance(param, DTensor) else param)
            for name, param in model.named_parameters()
        }
    assert whole == expected
    opt.close()


def test_whole_and_back(ranks: Pool) -> None:
    for stage, other in ((2, 3), (3, 0)):
        ranks.run(whole_and_back, stage, other, world=2)
    ranks.run(of_dtensors, world=4)


@contextmanager
def apart() -> Iterator[None]:
    """Within it ranks are on machines of their own."""
    with (
        patch.object(PeerMemory, "can_read", lambda self, card: False),
        patch.object(peers, "own_machine", lambda: f"machine {dist.get_rank()}"),
        patch.dict(serve._SERVERS, clear=True),
    ):
        yield


def one_rank_alone() -> None:
    """The other one waits at a barrier, in a step, or for nothing: it makes no call for the one that reads."""
    with apart():
        for stage in (1, 3):
            model, opt = trained(stage)
            with opt.unsharded():
                weights = {name: raw(param) for name, param in model.named_parameters()}
            expected = states_of(opt)
            opt.engine.states.consolidated = None
            if dist.get_rank() == 0:
                states = get_optimizer_state_dict(model, opt, options=ON_RANK_0)["state"]
                assert [raw(states[name]["exp_avg"]) for name in weights] == [
                    expected[number, "exp_avg"] for number in range(len(weights))
                ]
                assert values(get_model_state_dict(model, options=ON_RANK_0)) == weights
            train_step(model, opt, 1)
            opt.close()
        # torch steps an optimizer of empty state, which needs every rank: plain SGD has none after a step either.
        model, opt = trained(3, ShardedSGD)
        opt.zero_grad()
        assert opt.state and len(opt.state) == 0
        if dist.get_rank() == 0:
            assert not get_optimizer_state_dict(model, opt, options=ON_RANK_0)["state"]
        train_step(model, opt, 1)
        opt.close()


def test_one_rank_reads_alone_over_messages(ranks: Pool) -> None:
    ranks.run(one_rank_alone, world=2)
