"""Rules that look at whole params, on tensor meshes: each rank has slices, and every norm is that of the whole param.

Gradients are small integers over four, however many ranks there are: sums of them and of their squares are exact, so
that all meshes must give the bits of one process. Shapes do not divide, and some ranks have nothing of a param.
"""

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from shardopt import (
    CommunicationError,
    DisagreementError,
    ShardedAdamW,
    ShardedLAMB,
    ShardedLARS,
    ShardedOptimizer,
    ShardoptError,
    Tuning,
)
from shardopt.partition.comm.group import Ranks
from shardopt.step import first_passes, update
from tests.support.comparing import raw
from tests.support.composed import whole
from tests.support.norm_rules import LAMB, LARS, StableAdamW, three_cuts
from tests.support.ranks import Pool

STEPS, BATCHES = 3, 4
# Of each param its shape, and how it lies on a mesh of one dimension and on one of two; None: a plain tensor.
PARAMS: dict[str, tuple[tuple[int, ...], Any, Any]] = {
    "rows": ((7, 5), [Shard(0)], [Shard(0), Shard(1)]),
    "columns": ((3, 10), [Shard(1)], [Replicate(), Shard(1)]),
    "short": ((3, 300), [Shard(0)], [Shard(0), Shard(0)]),
    "stack": ((2, 6, 5), [Shard(0)], [Shard(1), Replicate()]),
    "copied": ((4, 6), [Replicate()], [Replicate(), Replicate()]),
    "bias": ((7,), [Shard(0)], [Shard(0), Replicate()]),
    "plain": ((9, 2), None, None),
}


class Weighed(nn.Module):
    """The gradient of each param is what it is multiplied by: integers."""

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.own = nn.ParameterDict()
        for name, (shape, *placements) in PARAMS.items():
            value, placed = torch.randn(shape), None if mesh is None else placements[mesh.ndim - 1]
            self.own[name] = nn.Parameter(value if placed is None else distributed(value, mesh, placed))

    def forward(self, step: int, batch: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + batch)
        total = torch.zeros(())
        for param in self.own.values():
            total = total + weighed(param, torch.randint(-8, 9, param.shape, generator=generator).float())
        return total


def weighed(param: Any, factors: Tensor) -> Tensor:
    """Of this rank's elements: where the other ranks have the rest, gradients are the same."""
    if not isinstance(param, DTensor):
        return (param * factors).sum()
    return (param.to_local() * distributed(factors, param.device_mesh, param.placements).to_local()).sum()


def distributed(value: Tensor, mesh: Any, placements: Sequence[Placement]) -> Tensor:
    return distribute_tensor(value, mesh, placements, src_data_rank=None)


Make = Callable[..., torch.optim.Optimizer]


def own_rule(params: Any, **options: Any) -> ShardedOptimizer:
    return ShardedOptimizer(params, {"lr": 0.1}, rule=three_cuts, **options)


# Of the package, and in plain torch; with the same arguments.
KINDS: dict[str, tuple[Make, Make | None, dict[str, Any]]] = {
    "LAMB": (ShardedLAMB, LAMB, {"lr": 0.1, "trust": True}),
    "LARS": (ShardedLARS, LARS, {"lr": 0.5, "trust_coefficient": 0.1}),
    "clipped AdamW": (ShardedAdamW, StableAdamW, {"lr": 0.1, "clip_update": 0.3}),
    "a rule of one's own": (own_rule, None, {}),
}


def made(kind: str, model: nn.Module, **options: Any) -> Any:
    make, _, arguments = KINDS[kind]
    return make(model, tuning=Tuning(bucket_bytes=300, keep_below=4), **arguments, **options)


def take(model: nn.Module, optimizer: Any, step: int, batches: Sequence[int] = range(BATCHES)) -> None:
    optimizer.zero_grad()
    for batch in batches:
        (model(step, batch) / len(batches)).backward()
    optimizer.step()


def values(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Params and states, whole. Collective."""
    with optimizer.unsharded():
        found = {name: whole(param).clone() for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        for state, value in optimizer.state[param].items():
            found[f"{name} {state}"] = whole(value)
    return found


def bits_of(found: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: raw(value) for name, value in found.items()}


def alone(kind: str) -> dict[str, Tensor]:
    """What a process makes of the whole params by itself."""
    model = Weighed()
    optimizer = made(kind, model)
    for step in range(STEPS):
        take(model, optimizer, step)
    return values(model, optimizer)


def trains(meshes: Sequence[tuple[int, ...]], stages: Sequence[int]) -> list[tuple[Any, dict[str, bytes]]]:
    """At each mesh, whose first dimension is data-parallel, and each stage."""
    found = []
    for shape in meshes:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "x", "y")[: len(shape)])
        tensor, data = mesh[("x", "y")[: len(shape) - 1]], mesh["dp"].get_group()
        each = BATCHES // data.size()
        batches = range(data.rank() * each, data.rank() * each + each)
        for stage in stages:
            for kind in KINDS:
                model = Weighed(tensor)
                optimizer = made(kind, model, process_group=data, stage=stage)
                for step in range(STEPS):
                    take(model, optimizer, step, batches)
                found.append(((shape, stage, kind), bits_of(values(model, optimizer))))
                optimizer.close()
    return found


def check(ranks: Pool, world: int, meshes: Sequence[tuple[int, ...]], stages: Sequence[int]) -> None:
    expected = {kind: bits_of(alone(kind)) for kind in KINDS}
    for of_rank in ranks.run(trains, meshes, stages, world=world):
        for row, found in of_rank:
            assert found.keys() == expected[row[-1]].keys()
            for name, value in found.items():
                assert value == expected[row[-1]][name], (row, name)


def test_the_bits_of_one_process(ranks: Pool) -> None:
    check(ranks, 3, [(1, 3)], [0])
    check(ranks, 4, [(2, 2)], [1, 2, 3])
    check(ranks, 4, [(1, 4), (1, 2, 2)], [3])


@pytest.mark.slow
def test_the_bits_of_one_process_at_every_stage(ranks: Pool) -> None:
    check(ranks, 4, [(1, 4), (2, 2), (1, 2, 2)], range(4))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind][1]])
def test_one_process_beside_plain_torch(kind: str) -> None:
    """So all others are what torch makes of whole params too."""
    _, make, arguments = KINDS[kind]
    assert make is not None
    model = Weighed()
    plain = make(model.parameters(), **arguments)
    for step in range(STEPS):
        take(model, plain, step)
    found = alone(kind)
    for name, param in model.named_parameters():
        torch.testing.assert_close(found[name], param.detach(), rtol=1e-5, atol=1e-6)


# -- what keeps it so --------------------------------------------------------------------------------------------------


def with_a_fault(fault: str) -> list[str]:
    """Returns the params that differ from those of one process."""
    add_up, calls = Ranks.add_up, [0]

    def faulty(self: Ranks, vector: Tensor, phase: str) -> None:
        is_tensor_mesh = self.size == 4
        calls[0] += is_tensor_mesh
        mine = vector.clone()
        add_up(self, vector, phase)
        if is_tensor_mesh and phase == first_passes._ADDING_UP:
            vector.copy_(mine if fault == "own" else vector + mine * (dist.get_rank() == 1))

    with patch.object(Ranks, "add_up", faulty):
        ((_, found),) = [each for each in trains([(1, 4)], [1]) if each[0][-1] == "LAMB"]
    assert calls[0]
    expected = bits_of(alone("LAMB"))
    return [name for name in found if found[name] != expected[name] and " " not in name]


def test_what_the_mesh_does_not_add_up_shows(ranks: Pool) -> None:
    cut = {f"own.{name}" for name, (_, placed, _) in PARAMS.items() if placed and placed[0].is_shard()}
    for fault in ("own", "twice"):
        for found in ranks.run(with_a_fault, fault, world=4):
            assert cut == set(found)


def fails(folder: str, is_on_disk: bool) -> None:
    """The second pass of a step cannot run on one rank: its mates on both meshes hear of it, and so do theirs."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    options: dict[str, Any] = {"process_group": mesh["dp"].get_group(), "stage": 1}
    model, odd = Weighed(mesh["tp"]), dist.get_rank() == 1
    optimizer = made("LAMB", model, offload=f"{folder}/{dist.get_rank()}" if is_on_disk else None, **options)
    take(model, optimizer, 0, [0])
    before = bits_of(values(model, optimizer))

    def no_room(*_: Any) -> None:
        raise MemoryError("no room")

    told = r"no room|output of rank 0|ranks of the tensor mesh|rank 1 cannot take"
    with (
        patch.object(update, "_run_pass", no_room if odd else update._run_pass),
        pytest.raises((CommunicationError, ShardoptError, MemoryError), match=told),
    ):
        take(model, optimizer, 1, [0])
    if is_on_disk:
        assert before == bits_of(values(model, optimizer))
        take(model, optimizer, 1, [0])
        assert before != bits_of(values(model, optimizer))
    else:
        with pytest.raises(ShardoptError, match="half-way"):
            optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_a_rank_that_cannot_measure(is_on_disk: bool, ranks: Pool, tmp_path: Any) -> None:
    ranks.run(fails, str(tmp_path), is_on_disk, world=4)


def lacks_a_gradient() -> None:
    """A slice without a gradient is no slice of zeros: the rest of the param would be scaled by another norm."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = Weighed(mesh["tp"])
    optimizer = ShardedLAMB(model.parameters(), process_group=mesh["dp"].get_group())
    model(0, 0).backward()
    if dist.get_rank() == 1:
        model.own["rows"].grad = None
    with pytest.raises(DisagreementError, match="placements of gradients"):
        optimizer.step()


def test_a_gradient_on_some_ranks_alone(ranks: Pool) -> None:
    ranks.run(lacks_a_gradient, world=2)
