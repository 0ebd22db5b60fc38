"""Units that fewer ranks hold between forward and backward: ``Tuning(reshard_after_forward=2)``, and ``"host"``.

Each of four ranks keeps half of what a step gathers first. Every later gather of that step stays within two ranks.
Memory that was given back is NaN."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardopt import BindingError, ShardedAdamW, ShardedOptimizer, Tuning
from shardopt.config import Options
from shardopt.domain import holding
from shardopt.tools.plan import Planner, groups_for
from shardopt.tools.ways import Way
from tests.partition.test_controls import gathered
from tests.partition.test_gather import CASES, trained
from tests.partition.test_ranks_apart import connected
from tests.support.comparing import snapshot
from tests.support.modules import W, data, poisoned, small
from tests.support.ranks import Pool
from tests.support.wire import counting

WORLD = 4
# Cases of test_gather.py: the bytes that may stay gathered, and whether ranks read each other's memory.
WAYS = {
    "skipping": (0, True),
    "Tied, accumulated": (8000, False),
    "curved": (0, True),
    "checkpointed, reentrant True, whole False": (0, False),
    "checkpointed, reentrant False, whole True": (0, True),
}


def has_the_same_bits() -> None:
    for name, (room, neighbours) in WAYS.items():
        make, run, _ = CASES[name]
        expected = trained(make, run, 1)
        with poisoned():
            found = trained(make, run, 3, neighbours=neighbours, live_bytes=room, reshard_after_forward=2)
        assert found == expected, name


def moves_less() -> None:
    """A gather among two of four ranks brings 1/2 of a unit, one among all 3/4."""
    for kind, ranks, share in (("memory", 2, 1 + 2 / 3), ("messages", 2, 1 + 2 / 3), ("memory", 1, 1)):
        assert gathered(kind, live_bytes=0, reshard_after_forward=ranks)[0] == pytest.approx(share)


def test_the_same_bits_by_shorter_ways(ranks: Pool) -> None:
    ranks.run(has_the_same_bits, world=WORLD)
    ranks.run(moves_less, world=WORLD)


class Deep(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(8 * W, 8 * W), nn.Tanh()) for _ in range(3)))

    def part(self, layer: int, number: int) -> nn.Module:
        return self.get_submodule(f"{layer}.{number}")


def made(holders: Any, **options: Any) -> tuple[Deep, ShardedOptimizer]:
    torch.manual_seed(0)
    model = Deep()
    tuning = small(neighbours=False, reshard_after_forward=holders, timeout=60)
    return model, ShardedAdamW(model, lr=0.01, stage=3, process_group=dist.new_group(), tuning=tuning, **options)


def backward(model: Deep, step: int) -> None:
    model(data(step, 4, 8 * W)).square().mean().backward()


def other_groups_send_nothing() -> None:
    """Of a second micro-batch, whose values ranks hold already, only sums of gradients come from other groups."""
    model, opt = made(2)
    others = {0, 1, 2, 3} - {*range(dist.get_rank() // 2 * 2, dist.get_rank() // 2 * 2 + 2)}
    backward(model, 0)
    opt.step()
    assert opt.engine.domain is not None
    nbytes = sum(unit.nbytes for unit in opt.engine.domain.gatherer.units.values())
    received = []
    for _ in range(2):
        opt.zero_grad()
        for micro_batch in range(2):
            with counting() as moved:
                out = model(data(micro_batch, 4, 8 * W))
            received.append(sum(moved.by_rank[rank] for rank in others) / nbytes)
            out.square().mean().backward()
        opt.step()
    assert received == pytest.approx([1 / 2, 0, 1 / 2, 0], abs=0.02), received
    before = opt.engine.domain.traffic()
    opt.zero_grad()
    backward(model, 0)
    opt.step()
    moved = sum(opt.engine.domain.traffic().values()) - sum(before.values())
    held = opt.memory()["param"]["device"]
    given = Options(tuning=opt.engine.options.tuning)
    whole, like = Deep(), ShardedAdamW([torch.zeros(1)])
    (need,) = Planner(whole, like.rule, groups_for(whole, like), WORLD, given).needs(Way(3, True, torch.float32))
    assert need.bytes["param"]["device"] == held
    assert moved == pytest.approx(need.wire["data"], rel=0.03)  # which counts no padding
    opt.close()
    model, opt = made(True)
    backward(model, 0)
    assert held - opt.memory()["param"]["device"] == nbytes / 2


def holds_what_was_gathered() -> None:
    """Whatever happens between forward, backward and step, on every wire and in every format: as without holders."""
    ways: tuple[tuple[str, dict[str, Any]], ...] = (
        ("messages", {}),
        ("collectives", {}),
        ("messages", {"gather_dtype": "int8"}),
        ("messages", {"compute_dtype": torch.bfloat16}),
        ("messages", {"offload": "cpu"}),
    )
    for kind, options in ways:
        with connected(kind):
            found = [what_comes_out(holders, **options) for holders in (True, 2)]
        assert found[0] == found[1], (kind, options)


def what_comes_out(holders: Any, **options: Any) -> list[Any]:
    found: list[Any] = []
    model, opt = made(holders, **options)
    for step in range(2):
        opt.zero_grad()
        out = model(data(step, 4, 8 * W))
        with torch.no_grad():  # exact, and of other lengths
            found.append(model(data(7, 2, 8 * W)).tolist())
        out.square().mean().backward()
        opt.step()
    with pytest.raises(ZeroDivisionError), patch.object(model.part(2, 1), "forward", lambda _: 1 / 0):
        backward(model, 2)
    backward(model, 3)
    opt.step()
    opt.offload(params=True)
    opt.reload()
    before = opt.state_dict()
    opt.zero_grad()
    backward(model, 4)
    with opt.unsharded(), torch.no_grad():  # within a step: what is held is no longer what params are
        model.part(1, 0).get_parameter("weight").mul_(0.5)
    opt.load_state_dict(before)
    backward(model, 5)
    opt.step()
    return [*found, snapshot(model, opt)]


def test_what_is_held_is_what_was_gathered(ranks: Pool) -> None:
    ranks.run(other_groups_send_nothing, world=WORLD)
    ranks.run(holds_what_was_gathered, world=WORLD)


def on_hosts(numbers: list[int]) -> Any:
    """Ranks that take each other for ranks of hosts, of which these have so many."""
    host = [at for at, number in enumerate(numbers) for _ in range(number)][dist.get_rank()]
    return patch.object(holding, "_own_host", lambda: f"host {host}")


def finds_hosts() -> None:
    with on_hosts([2, 2]):
        assert gathered("memory", live_bytes=0, reshard_after_forward="host")[0] == pytest.approx(1 + 2 / 3)
    assert gathered("memory", live_bytes=0, reshard_after_forward="host")[0] == 2  # these are ranks of one host
    for numbers, words in (([1, 3], r"hosts of \[1, 3\] ranks"), ([1, 1, 1, 1], "4 hosts of one rank")):
        with on_hosts(numbers), pytest.raises(BindingError, match=words):
            made("host")[1].bind()
    with pytest.raises(BindingError, match="divides the 4 ranks"):
        made(3)[1].bind()
    with pytest.raises(TypeError, match="reshard_after_forward"):
        Tuning(reshard_after_forward="hosts")


def test_ranks_of_a_host_hold_units(ranks: Pool) -> None:
    ranks.run(finds_hosts, world=WORLD)
