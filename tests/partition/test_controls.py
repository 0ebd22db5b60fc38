"""What users say about stage 3: which modules are units, what is gathered ahead, what stays, and units by hand.

None of it changes a bit; the schedule and the bytes that travel show that it is done."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardopt import BindingError, ShardedSGD, ShardoptError
from shardopt.units.schedule import Use
from tests.partition.test_ranks_apart import CONNECTIONS, Drops, connected, made, trained
from tests.support.comparing import snapshot
from tests.support.modules import RATES, Block, W, data, poisoned, small
from tests.support.ranks import Pool

ORDERS = [(0, 1, 2, 3)] * 3
NAMES = ["first", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "last"]


def ahead(uses: Sequence[Use]) -> dict[str, tuple[str, ...]]:
    return {use.unit: use.ahead for use in uses if use.ahead}


def gathered(kind: str, **tuning: Any) -> tuple[float, Any]:
    """The bytes of params that the last of four steps receives, as a share of all, and the schedule; bits as always."""
    expected = trained(*made(1), ORDERS)
    with connected(kind), poisoned():
        model, opt = made(3, kind, **tuning)
        assert trained(model, opt, ORDERS) == expected
        gatherer = opt.engine.domain.gatherer
        before = opt.engine.domain.transport.traffic.params
        opt.zero_grad()
        model(data(0, 4, W), ORDERS[0]).square().mean().backward()
        opt.step()
        world = dist.get_world_size()
        whole = sum(unit.nbytes for unit in gatherer.units.values()) * (world - 1) / world
        return (opt.engine.domain.transport.traffic.params - before) / whole, opt.schedule()


def what_stays() -> None:
    for kind in ("memory", "messages"):
        assert gathered(kind, live_bytes=0)[0] == 2
        assert gathered(kind, live_bytes=0, reshard_after_forward=False)[0] == 1
        share, schedule = gathered(kind, live_bytes=0, reshard_after_forward=("blocks.*", "last"))
        assert schedule.kept == ("first",) and 1 < share < 2


def test_units_stay_until_backward(ranks: Pool) -> None:
    ranks.run(what_stays, world=2)


def what_is_ahead() -> None:
    lists: Mapping[str, Sequence[str]] = {"blocks.1": ["blocks.3", "first"], "blocks.3": ["last", "blocks.0"]}
    one = gathered("messages", prefetch=1)[1]
    following = {unit: (other,) for unit, other in pairwise(NAMES)}
    assert ahead(one.forward) == following
    schedule = gathered("messages", prefetch=lists)[1]
    assert ahead(schedule.forward) == {"blocks.1": ("blocks.3",), "blocks.3": ("last",)}
    assert ahead(schedule.backward) == {"blocks.3": ("blocks.0",), "blocks.1": ("first",)}
    none = gathered("messages", prefetch=0)[1]
    assert not ahead((*none.forward, *none.backward))


def test_what_is_gathered_ahead(ranks: Pool) -> None:
    ranks.run(what_is_ahead, world=2)


def said() -> None:
    for given, names in (
        ((Block,), NAMES),
        (("blocks",), ["first", "blocks", "last"]),
        ((nn.Linear,), ["first", *(f"blocks.{n}.{part}" for n in range(4) for part in ("up", "down")), "last"]),
    ):
        model, opt = made(3, units=given)
        trained(model, opt, ORDERS[:1])
        assert [name for name in opt.units if name in names] == names, opt.units
    model = Drops()
    opt = ShardedSGD(model, **RATES, stage=3, tuning=small(units=(model.blocks[1],)))
    opt.bind()
    assert "blocks.1" in opt.units and "blocks.0" not in opt.units
    for wrong, words in (
        ({"units": ("nobody",)}, "units"),
        ({"units": (nn.Conv2d,)}, "units"),
        ({"prefetch": {"blocks.1": ("nobody",)}}, "prefetch"),
        ({"reshard_after_forward": ("nobody.*",)}, "reshard_after_forward"),
    ):
        with pytest.raises(BindingError, match=words):
            ShardedSGD(Drops(), **RATES, stage=3, tuning=small(**wrong)).bind()


def test_units_are_what_the_user_says(ranks: Pool) -> None:
    ranks.run(said, world=1)


def by_hand(kind: str) -> None:
    expected = trained(*made(1), ORDERS)
    with connected(kind), poisoned():
        model, opt = made(3, kind)
        assert opt.units == {} and "no step" in str(opt.schedule())
        with pytest.raises(KeyError, match=r"blocks\.1: call optimizer\.bind\(\)"):
            opt.units["blocks.1"]
        opt.bind()
        with pytest.raises(KeyError, match=r"block\.1: no unit .* blocks\.0, blocks\.1"):
            opt.units["block.1"]
        whole = {name: param.detach().clone() for name, param in Drops().named_parameters()}
        weight = model.blocks[1].up.weight
        unit = opt.units["blocks.1"]
        for handle in (unit.unshard(), unit.unshard(async_op=True)):
            if handle is not None:
                handle.wait()
            assert unit.is_unsharded and "unsharded" in repr(unit)
            weight.sum()
            unit.reshard()
            assert not unit.is_unsharded
            with pytest.raises(ShardoptError, match=r"blocks\.1\.up\.weight"):
                weight.sum()
        # The forward waits for what was asked; the unit stays until the backward ends.
        unit.unshard(async_op=True)
        with torch.no_grad():
            model(data(0, 4, W), (0, 1, 2, 3))
        assert unit.is_unsharded
        assert whole.keys() == dict(model.named_parameters()).keys()
        assert trained(model, opt, ORDERS) == expected
        assert not unit.is_unsharded
        # What stays from forward to backward may be given up.
        opt.zero_grad()
        loss = model(data(7, 4, W), (0, 1, 2, 3)).square().mean()
        for each in opt.units.values():
            each.reshard()
        loss.backward()
        opt.step()
        other, reference = made(1)
        trained(other, reference, ORDERS)
        reference.zero_grad()
        other(data(7, 4, W), (0, 1, 2, 3)).square().mean().backward()
        reference.step()
        assert snapshot(model, opt) == snapshot(other, reference)


def test_units_by_hand(ranks: Pool) -> None:
    for kind in CONNECTIONS:
        ranks.run(by_hand, kind, world=2)
