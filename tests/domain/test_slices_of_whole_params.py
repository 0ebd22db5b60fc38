"""Rules that look at whole params, on tensor meshes: each rank has slices, and every norm is that of the whole param.

Gradients are small integers over two, however many ranks there are: sums of them and of their squares are exact. Of
params and states a mesh makes other blocks, whose sums of squares differ by some 1e-10, which no norm of these shows in
fp32. So all meshes must give the bits of one process. Shapes do not divide, and some ranks have nothing of a param.
"""

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from shardopt import (
    BindingError,
    CommunicationError,
    DisagreementError,
    ShardedAdafactor,
    ShardedAdamW,
    ShardedLAMB,
    ShardedLARS,
    ShardedOptimizer,
    ShardoptError,
    StateError,
    Tuning,
    load_checkpoint,
    prepare_states,
    save_checkpoint,
)
from shardopt.checkpoint.export import export_states
from shardopt.checkpoint.publish import find
from shardopt.checkpoint.reader import Checkpoint
from shardopt.partition.comm.group import Ranks
from shardopt.step import margins, norms, update
from tests.support.comparing import raw
from tests.support.composed import whole
from tests.support.norm_rules import LAMB, LARS, StableAdamW, three_cuts
from tests.support.ranks import Pool
from tests.support.training import raises

STEPS, BATCHES = 3, 2
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
            value, lies = torch.randn(shape), None if mesh is None else placements[mesh.ndim - 1]
            self.own[name] = nn.Parameter(value if lies is None else distributed(value, mesh, lies))

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
    "Adafactor": (ShardedAdafactor, torch.optim.Adafactor, {"lr": 0.1, "weight_decay": 0.1}),
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


def placed(shape: Sequence[int]) -> tuple[DeviceMesh, dict[str, Any], range]:
    """The tensor mesh, the option that names the data-parallel ranks, and this rank's batches."""
    mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=("dp", "x", "y")[: len(shape)])
    data = mesh["dp"].get_group()
    each = BATCHES // data.size()
    batches = range(data.rank() * each, data.rank() * each + each)
    return mesh[("x", "y")[: len(shape) - 1]], {"process_group": data}, batches


Row = tuple[tuple[int, ...], int, str]  # a mesh, whose first dimension is data-parallel, a stage, one of KINDS


def trains(rows: Sequence[Row]) -> list[tuple[Row, dict[str, bytes]]]:
    found = []
    for shape, its in itertools.groupby(rows, key=lambda row: row[0]):
        tensor, option, batches = placed(shape)
        for row in its:
            _, stage, kind = row
            model = Weighed(tensor)
            optimizer = made(kind, model, stage=stage, **option)
            for step in range(STEPS):
                take(model, optimizer, step, batches)
            found.append((row, bits_of(values(model, optimizer))))
            optimizer.close()
    return found


def check(ranks: Pool, rows: Sequence[Row]) -> None:
    expected = {kind: bits_of(alone(kind)) for kind in KINDS}
    for world, its in itertools.groupby(rows, key=lambda row: math.prod(row[0])):
        for of_rank in ranks.run(trains, list(its), world=world):
            for row, found in of_rank:
                assert found.keys() == expected[row[-1]].keys()
                for name, value in found.items():
                    assert value == expected[row[-1]][name], (row, name)


MESHES = [(1, 3), (1, 4), (2, 2), (1, 2, 2)]


def test_the_bits_of_one_process(ranks: Pool) -> None:
    """Every rule at every mesh and at every stage."""
    check(ranks, [(mesh, (at + by) % 4, kind) for at, mesh in enumerate(MESHES) for by, kind in enumerate(KINDS)])


@pytest.mark.slow
def test_the_bits_of_one_process_at_every_stage(ranks: Pool) -> None:
    check(ranks, list(itertools.product(MESHES, range(4), KINDS)))


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


def trains_experts() -> None:
    """A stack of experts whose rows lie on a mesh of their own, with data-parallel ranks of their own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "experts"))
    for kind in ("LAMB", "Adafactor"):
        torch.manual_seed(0)
        start = [torch.randn(3, 40), torch.randn(5, 60)]
        alike = [nn.Parameter(each.clone()) for each in start]
        stack = nn.Parameter(distributed(start[1], mesh["experts"], [Shard(0)]))
        plain = nn.Parameter(start[0].clone())
        groups = [{"params": [plain]}, {"params": [stack], "process_group": mesh["copies"].get_group()}]
        ours: Any = made(kind, groups, norm_group=dist.group.WORLD, max_grad_norm=50.0)
        theirs: Any = made(kind, alike, process_group=mesh_of_one().get_group(), max_grad_norm=50.0)
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step)
            grads = [torch.randint(-8, 9, each.shape, generator=generator).float() for each in start]
            plain.grad, stack.grad = grads[0], distributed(grads[1], mesh["experts"], [Shard(0)])
            for param, grad in zip(alike, grads, strict=True):
                param.grad = grad
            ours.step()
            theirs.step()
        assert raw(plain) == raw(alike[0]) and raw(whole(stack)) == raw(alike[1])
        if dist.get_rank() == 3:
            stack.grad = None
        with pytest.raises(DisagreementError, match=r"placements of gradients|cannot take this step"):
            ours.step()


def mesh_of_one() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("others", "this"))["this"]


def test_experts_on_a_mesh_of_their_own(ranks: Pool) -> None:
    ranks.run(trains_experts, world=4)


# -- states with a value for each row or column ------------------------------------------------------------------------


def resumes(folder: str, shape: Sequence[int], stage: int, saves: bool) -> dict[str, bytes]:
    tensor, option, batches = placed(shape) if shape else (None, {}, range(BATCHES))
    model = Weighed(tensor)
    optimizer = made("Adafactor", model, stage=stage, **option)
    if saves:
        for step in range(STEPS - 1):
            take(model, optimizer, step, batches)
        save_checkpoint(folder, model, optimizer)
    else:
        load_checkpoint(folder, model, optimizer)
    take(model, optimizer, STEPS - 1, batches)
    found = bits_of(values(model, optimizer))
    optimizer.close()
    return found


def test_checkpoints_load_on_any_mesh(ranks: Pool, tmp_path: Path) -> None:
    expected = bits_of(alone("Adafactor"))
    for number, saved in enumerate([(2, 2), (1, 2, 2)]):
        folder = str(tmp_path / str(number))
        assert ranks.run(resumes, folder, saved, 3, True, world=4)[3] == expected
        assert resumes(folder, (), 0, False) == expected
        for shape in ((1, 3), (1, 2)):
            assert ranks.run(resumes, folder, shape, 1, False, world=math.prod(shape))[1] == expected
        with Checkpoint(find(Path(folder))) as checkpoint:
            export_states(checkpoint, tmp_path / "exported.pt", 0, lambda _: None)
        exported = torch.load(tmp_path / "exported.pt", weights_only=True)["state"]
        assert exported[0]["row_var"].shape == (7, 1) and exported[3]["col_var"].shape == (2, 1, 5)
    resumes(str(tmp_path / "of one"), (), 0, True)
    assert ranks.run(resumes, str(tmp_path / "of one"), (2, 2), 2, False, world=4)[1] == expected


def hands_states_on() -> None:
    """As torch's own are, states of rows and columns are DTensors that every rank has whole."""
    tensor, option, batches = placed((1, 2))
    model, other = Weighed(tensor), Weighed(tensor)
    first, second = made("Adafactor", model, **option), made("Adafactor", other, **option)
    take(model, first, 0, batches)
    second.load_state_dict(copy.deepcopy(first.state_dict()))  # before anything is bound
    other.load_state_dict(model.state_dict())
    for optimizer, each in ((first, model), (second, other)):
        take(each, optimizer, 1, batches)
    assert bits_of(values(model, first)) == bits_of(values(other, second))
    second.load_state_dict(first.state_dict())
    state: Any = first.state_dict()
    rows: Any = state["state"][0]["row_var"]
    assert rows.placements == (Replicate(),) and rows.shape == (7, 1)
    state["state"][0]["row_var"] = rows.redistribute(placements=[Shard(0)])
    with pytest.raises(StateError, match=r"row_var of .*needed whole on every rank"):
        second.load_state_dict(state)
    state["state"][0]["row_var"] = rows.to_local()[:4]
    with pytest.raises(StateError, match=r"row_var of .*has shape \(4, 1\).*needs \(7, 1\)"):
        second.load_state_dict(state)
    fresh = made("Adafactor", Weighed(tensor), **option)
    prepare_states(fresh)
    shown = fresh.state[fresh.param_groups[0]["params"][1]]
    assert shown["col_var"].shape == (1, 10) and not shown["col_var"].to_local().any()
    placed_otherwise = DTensor.from_local(torch.ones(2, 4), tensor, [_StridedShard(0, split_factor=2)], run_check=False)
    with pytest.raises(BindingError, match=r"redistribute\(\) param 0 of the group"):
        ShardedAdafactor([nn.Parameter(placed_otherwise)])


def test_states_of_rows_and_columns_are_handed_on(ranks: Pool) -> None:
    ranks.run(hands_states_on, world=2)


# -- what keeps it so --------------------------------------------------------------------------------------------------


def with_a_fault(fault: str, kind: str) -> list[str]:
    """Returns the params that differ from those of one process."""
    all_reduce, calls = Ranks.all_reduce, [0]

    def faulty(self: Ranks, vector: Tensor, phase: str) -> None:
        is_tensor_mesh = self.size == 4
        calls[0] += is_tensor_mesh
        mine = vector.clone()
        all_reduce(self, vector, phase)
        if is_tensor_mesh and phase in (norms._ADDING_UP, margins._ADDING_UP):
            vector.copy_(mine if fault == "own" else vector + mine * (dist.get_rank() == 1))

    with patch.object(Ranks, "all_reduce", faulty):
        ((_, found),) = trains([((1, 4), 1, kind)])
    assert calls[0]
    expected = bits_of(alone(kind))
    return [name for name in found if found[name] != expected[name] and " " not in name]


def test_what_the_mesh_does_not_add_up_shows(ranks: Pool) -> None:
    cut = {f"own.{name}" for name, (_, lies, _) in PARAMS.items() if lies and lies[0].is_shard()}
    for fault, kind in itertools.product(("own", "twice"), ("LAMB", "Adafactor")):
        for found in ranks.run(with_a_fault, fault, kind, world=4):
            assert cut == set(found)


def fails(folder: str, kind: str, is_on_disk: bool) -> None:
    """A step cannot go on, on one rank: its mates on both meshes hear of it, and so do theirs."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    options: dict[str, Any] = {"process_group": mesh["dp"].get_group(), "stage": 1}
    model, odd = Weighed(mesh["tp"]), dist.get_rank() == 1
    optimizer = made(kind, model, offload=f"{folder}/{dist.get_rank()}" if is_on_disk else None, **options)
    take(model, optimizer, 0, [0])
    before = bits_of(values(model, optimizer))

    def no_room(*_: Any) -> None:
        raise MemoryError("no room")

    told: Any = (CommunicationError, "look at the output of")
    if is_on_disk:
        told = (DisagreementError, "cannot take this step, so no rank does and nothing changed", "no room")
    where: Any = (margins, "_add_own") if kind == "Adafactor" else (update, "chunks_of")
    with (
        patch.object(*where, no_room if odd else getattr(*where)),
        raises(MemoryError, "no room") if odd else raises(*told),
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
@pytest.mark.parametrize("kind", ["LAMB", "Adafactor"])
def test_a_rank_that_cannot_measure(kind: str, is_on_disk: bool, ranks: Pool, tmp_path: Path) -> None:
    ranks.run(fails, str(tmp_path), kind, is_on_disk, world=4)


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
