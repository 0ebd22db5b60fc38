"""Muon on DTensors: the bits of torch's on whole matrices, at every stage and mesh; each is made whole once."""

import math
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import Parameter

from shardopt import (
    DisagreementError,
    ShardedMuon,
    ShardedOptimizer,
    ShardoptError,
    Tuning,
    load_checkpoint,
    matrix_rule,
    save_checkpoint,
)
from shardopt.rules import muon as muon_rules
from shardopt.step.matrices import MatrixUpdate
from tests.support import composed
from tests.support.comparing import raw
from tests.support.ranks import Pool
from tests.support.tensor_parallel import in_parallel, loss, mesh_of, model_of
from tests.support.training import one_thread, raises
from tests.support.versions import needs_full_tensors_of_any_strides

STEPS = 3


class Case(NamedTuple):
    """A param, how it is placed on the tensor mesh, and what matrices it holds."""

    shape: tuple[int, ...]
    placements: Sequence[Shard | Replicate] = ()  # a plain tensor
    matrices: int | str | None = None
    is_transposed: bool = False  # columns lie together
    scale: float = 1.0  # of its gradient, where an expert's is divided by the number of all ranks


ROWS, COLUMNS, EACH = (Shard(0),), (Shard(1),), (Replicate(),)
CASES = [
    Case((40, 24), ROWS),
    Case((7, 300), COLUMNS),
    Case((33, 65), ROWS),  # 17 rows and 16
    Case((130, 17), COLUMNS),
    Case((1, 50), ROWS),  # one rank holds nothing
    Case((64, 64)),
    Case((16, 24), EACH),
    Case((20, 36), ROWS, is_transposed=True),
    Case((36, 20), COLUMNS, is_transposed=True),
    Case((33, 20), ROWS, 3),  # the cut goes through the second matrix
    Case((24, 20), COLUMNS, 3),
    Case((3, 24, 16), ROWS, "stack"),  # two matrices and one
    Case((3, 24, 17), (Shard(2),), "stack"),
    Case((2, 25, 16), COLUMNS, "stack"),
]
# On a mesh of (experts, tensor): slices of one param are put together in one of the dimensions.
ON_BOTH = [
    Case((5, 24, 17), (Shard(0), Shard(2)), "stack"),
    Case((33, 20), (Replicate(), Shard(0))),
    Case((20, 33), (Shard(1), Replicate())),
]
EXPERTS = [
    Case((64, 24)),
    Case((3, 24, 16), ROWS, "stack", scale=0.5),
    Case((2, 25, 16), COLUMNS, "stack", scale=0.5),
]


class Block(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = Parameter(weight)

    def forward(self, coefficients: Tensor) -> Tensor:
        weight: Any = self.weight
        if not isinstance(weight, DTensor):
            return (weight * coefficients).sum()
        placed = distribute_tensor(coefficients, weight.device_mesh, weight.placements, src_data_rank=None)
        return (weight * placed).sum().full_tensor()


class Model(nn.Module):
    """The loss is linear in the params: their gradients are given numbers."""

    def __init__(self, cases: Sequence[Case], mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        self.cases = cases
        generator = torch.Generator().manual_seed(0)
        weights = []
        for case in cases:
            weight = torch.randn(case.shape, generator=generator)
            if case.is_transposed:
                weight = weight.T.contiguous().T
            if mesh is not None and case.placements:
                weight = distribute_tensor(weight, mesh, case.placements, src_data_rank=None)
            weights.append(weight)
        self.blocks = nn.ModuleList(map(Block, weights))

    def forward(self, step: int) -> Tensor:
        terms = [block(each) for block, each in zip(self.blocks, gradients(self.cases, step), strict=True)]
        return torch.stack(terms).sum()


def gradients(cases: Sequence[Case], step: int) -> list[Tensor]:
    """The same on every rank, of so few bits that sums are exact."""
    generator = torch.Generator().manual_seed(step + 1)
    return [torch.randn(case.shape, generator=generator).bfloat16().float() for case in cases]


def of_torch(cases: Sequence[Case], keywords: dict[str, Any], steps: int = STEPS) -> list[bytes]:
    """Params and momenta after torch's training, of whole matrices."""
    weights = Model(cases).parameters()
    parts = [matrices_in(weight.detach(), case) for weight, case in zip(weights, cases, strict=True)]
    params = [[Parameter(each.clone()) for each in its] for its in parts]
    optimizer = torch.optim.Muon([each for its in params for each in its], **keywords)
    with one_thread():
        for step in range(steps):
            for its, grad, case in zip(params, gradients(cases, step), cases, strict=True):
                for param, own in zip(its, matrices_in(grad, case), strict=True):
                    param.grad = torch.empty_like(param).copy_(own * case.scale)
            optimizer.step()
    momenta = [[optimizer.state[each]["momentum_buffer"] for each in its] for its in params]
    return [raw(joined(its, case)) for found in (params, momenta) for its, case in zip(found, cases, strict=True)]


def matrices_in(tensor: Tensor, case: Case) -> list[Tensor]:
    if case.matrices == "stack":
        return list(tensor)
    return list(tensor.chunk(1 if case.matrices is None else int(case.matrices)))


def joined(tensors: Sequence[Tensor], case: Case) -> Tensor:
    return torch.stack([*tensors]) if case.matrices == "stack" else torch.cat([*tensors])


def groups_of(model: Model) -> list[dict[str, Any]]:
    words: dict[Any, list[nn.Parameter]] = {}
    for param, case in zip(model.parameters(), model.cases, strict=True):
        words.setdefault(case.matrices, []).append(param)
    return [{"params": its, "matrices": matrices} for matrices, its in words.items()]


def values(model: Model, optimizer: ShardedOptimizer) -> list[bytes]:
    """Collective: params and momenta, whole."""
    with optimizer.unsharded():
        found = [raw(composed.whole(param)) for param in model.parameters()]
    return found + [raw(composed.whole(optimizer.state[each]["momentum_buffer"])) for each in model.parameters()]


def optimizer_of(model: Model, group: Any, takes_module: bool = True, **options: Any) -> ShardedMuon:
    groups = [{**each, "rule": "muon"} for each in groups_of(model)]
    module = {"module": model} if takes_module else {}
    return ShardedMuon(groups, process_group=group, **module, **options)


def train(
    model: Model, optimizer: ShardedOptimizer, steps: range = range(STEPS), load: str = "", save: str = ""
) -> list[bytes]:
    if load:
        load_checkpoint(load, model, optimizer)
    with one_thread():
        for step in steps:
            optimizer.zero_grad()
            model(step).backward()
            optimizer.step()
    if save:
        save_checkpoint(save, model, optimizer)
    found = values(model, optimizer)
    optimizer.close()
    return found


# -- the bits of torch's -----------------------------------------------------------------------------------------------

DEFAULTS: dict[str, Any] = {"lr": 0.02}
OTHER: dict[str, Any] = {"momentum": 0.3, "nesterov": False, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0}
UNKEPT = Tuning(keep_below=0)
# By mesh: keywords; "disk" is a folder.
SETTINGS: dict[tuple[tuple[str, int], ...], list[dict[str, Any]]] = {
    (("dp", 1), ("tp", 2)): [{"stage": 1, "takes_module": False}],
    (("dp", 2), ("tp", 2)): [
        {"stage": 0},
        {"stage": 1, "tuning": Tuning(bucket_bytes=8192), "takes_module": False},
        {"stage": 2, "tuning": Tuning(neighbours=False, overlap_gather=True), "offload": "disk"},
        {"stage": 3, "tuning": UNKEPT, "offload": "cpu"},
    ],
    (("replicate", 2), ("dp", 1), ("tp", 2)): [{"stage": 2}],
    (("dp", 1), ("ep", 2), ("tp", 2)): [{"stage": 3, "tuning": UNKEPT}],
}


def run_settings(shape: dict[str, int], cases: Sequence[Case], keywords: dict[str, Any]) -> list[list[bytes]]:
    mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
    group = mesh["replicate", "dp"] if "replicate" in shape else mesh["dp"].get_group()
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for options in SETTINGS[tuple(shape.items())]:
            model = Model(cases, mesh["ep", "tp"] if "ep" in shape else mesh["tp"])
            place = {"offload": folder} if options.get("offload") == "disk" else {}
            runs.append(train(model, optimizer_of(model, group, **{**keywords, **options, **place})))
    return runs


@needs_full_tensors_of_any_strides
def test_bits_of_torch(ranks: Pool) -> None:
    """It takes more than 20 seconds: seven trainings on five kinds of meshes."""
    for shape, settings in SETTINGS.items():
        keywords, cases = OTHER if shape[0] == ("dp", 2) else DEFAULTS, ON_BOTH if "ep" in dict(shape) else CASES
        expected, world = of_torch(cases, keywords), math.prod(dict(shape).values())
        for rank, runs in enumerate(ranks.run(run_settings, dict(shape), cases, keywords, world=world)):
            for options, found in zip(settings, runs, strict=True):
                pairs = list(zip(found, expected, strict=True))
                differ = [cases[index % len(cases)] for index, (own, theirs) in enumerate(pairs) if own != theirs]
                assert not differ, (shape, rank, options)


def of_experts(stage: int) -> list[bytes]:
    """Two data-parallel ranks have slices of stacks: the rows, and of each expert half the rows."""
    model = Model(EXPERTS, init_device_mesh("cpu", (2,)))
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    dense, stacks = ({**each, "rule": "muon"} for each in groups_of(model))
    groups = [dense, {**stacks, "process_group": alone}]
    optimizer = ShardedMuon(groups, **DEFAULTS, module=model, stage=stage, norm_group=dist.group.WORLD, tuning=UNKEPT)
    model(0).backward()
    if dist.get_rank() == 1:
        list(model.parameters())[-1].grad = None
    with raises(DisagreementError, "placements of gradients"):
        optimizer.step()  # nothing changes
    return train(model, optimizer)


def test_stacks_of_experts_over_a_mesh_of_their_own(ranks: Pool) -> None:
    for stage in (1, 3):
        assert ranks.run(of_experts, stage, world=2) == [of_torch(EXPERTS, DEFAULTS)] * 2


def saved_or_loaded(folder: str, steps: range) -> list[bytes]:
    """Two data-parallel and two tensor ranks save, one and two go on."""
    mesh = mesh_of(dist.get_world_size() // 2)
    model = Model(CASES[-6:], mesh["tp"])
    optimizer = optimizer_of(model, mesh["dp"].get_group(), **DEFAULTS, stage=2 if steps.start else 3)
    places = {"load": folder} if steps.start else {"save": folder}
    return train(model, optimizer, steps, **places)


@needs_full_tensors_of_any_strides
def test_a_checkpoint_in_another_cut(ranks: Pool, tmp_path: Path) -> None:
    for steps, world in ((range(1), 4), (range(1, 3), 2)):
        expected = of_torch(CASES[-6:], DEFAULTS, steps.stop)
        assert ranks.run(saved_or_loaded, str(tmp_path), steps, world=world) == [expected] * world


def took(num_tensor: int) -> tuple[list[list[tuple[int, ...]]], dict[str, Tensor]]:
    """Shapes by rule, and params after two steps, of a model with embedding and head; cut, its slices are smaller."""
    mesh = mesh_of(1, 2) if num_tensor > 1 else None
    model = model_of("sequence", None if mesh is None else mesh["tp"])
    group = None if mesh is None else mesh["dp"].get_group()
    optimizer = ShardedMuon(model, lr=0.02, adamw={"lr": 1e-3}, process_group=group, stage=2)
    for step in range(2):
        optimizer.zero_grad()
        with nullcontext() if mesh is None else in_parallel(model):
            loss(model, step, 0).backward()
        optimizer.step()
    shapes = [[tuple(each.shape) for each in group["params"]] for group in optimizer.param_groups]
    found = {name: composed.whole(param).clone() for name, param in model.named_parameters()}
    optimizer.close()
    return shapes, found


def test_defaults_look_at_whole_params(ranks: Pool) -> None:
    """Slices add up in another order, which the function's bf16 shows: by far less than a slice's update would."""
    shapes, expected = took(1)
    assert shapes[0] == [(8, 6), (6, 8)]
    for theirs, found in ranks.run(took, 2, world=2):
        assert theirs == shapes
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=0.0, atol=1e-3, msg=name)


# -- once, and what fails ----------------------------------------------------------------------------------------------


def counted() -> tuple[int, list[tuple[int, ...]]]:
    """Bytes of slices that this rank received in a step; the shapes of the matrices that it made whole."""
    mesh = mesh_of(dist.get_world_size() // 2)
    model, made = Model(CASES, mesh["tp"]), []

    @matrix_rule(accumulate=muon_rules.accumulate, apply=muon_rules.apply)
    def counting(update: Tensor, group: Any) -> Tensor:
        made.append(tuple(update.shape))
        return update

    defaults = ShardedMuon([torch.zeros(1, 1)]).defaults
    group = mesh["dp"].get_group()
    optimizer = ShardedOptimizer(groups_of(model), defaults, rule=counting, module=model, process_group=group)
    model(0).backward()
    optimizer.step()
    return optimizer.engine.traffic()["matrices"], made


def test_each_matrix_is_made_whole_once(ranks: Pool) -> None:
    """Those that are not cut once on each tensor rank. Slices travel over data-parallel ranks, then over mates."""
    expected, least, most = Counter[tuple[int, ...]](), 0, 0
    for case in CASES:
        is_cut = case.placements not in ((), EACH) and (*case.placements, case.matrices) != (*ROWS, "stack")
        for each in matrices_in(torch.empty(case.shape), case):
            expected[tuple(each.shape)] += 1 if case.placements not in ((), EACH) else 2
        if is_cut:
            dim = case.placements[0].dim
            rows = -(-case.shape[dim] // 2)  # of the first rank; or columns
            others = math.prod(case.shape) // case.shape[dim]
            least, most = least + 4 * others * (case.shape[dim] - rows), most + 4 * others * rows
    alone, both = (ranks.run(counted, world=world) for world in (2, 4))
    for found in (alone, both):
        assert Counter(shape for _, made in found for shape in made) == expected
    received = sum(each for each, _ in alone)  # nothing over data-parallel ranks
    assert least <= received <= most
    assert received < sum(each for each, _ in both) <= most + 4 * sum(math.prod(case.shape) for case in CASES)


def fails_on_one(neighbours: bool, before: bool, folder: str) -> tuple[list[str], bool]:
    """What each of three steps said, and if the second one changed nothing."""
    mesh = mesh_of()
    model = Model(CASES[:6], mesh["tp"])

    def fail() -> None:
        if dist.get_rank() == 1 and optimizer.updates == 1 and not said[1:]:
            raise ArithmeticError("no such root")

    @matrix_rule(accumulate=muon_rules.accumulate, apply=muon_rules.apply)
    def failing(update: Tensor, group: Any) -> Tensor:
        fail()
        return update

    def make_room(own: MatrixUpdate) -> None:
        if before:
            fail()
        make_all_room(own)

    make_all_room = MatrixUpdate.make_room
    defaults = ShardedMuon([torch.zeros(1, 1)]).defaults
    options: dict[str, Any] = {"tuning": Tuning(neighbours=neighbours), "process_group": mesh["dp"].get_group()}
    if folder:
        options["offload"] = folder
    optimizer = ShardedOptimizer(groups_of(model), defaults, rule=failing, module=model, **options)
    said: list[str] = []
    held: list[list[bytes]] = []
    with patch.object(MatrixUpdate, "make_room", make_room):
        for step in range(3):
            optimizer.zero_grad()
            model(step).backward()
            try:
                optimizer.step()
                said.append("")
            except Exception as error:
                said.append("\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]))
            held.append([raw(composed.whole(param)) for param in model.parameters()])
    optimizer.close()
    return said, held[0] == held[1]


@pytest.mark.parametrize(("neighbours", "before"), [(True, False), (False, True)])
def test_what_fails_on_one_rank_is_told_to_all(ranks: Pool, neighbours: bool, before: bool, tmp_path: Path) -> None:
    """Before slices travel, or in the function. On a disk nothing has changed, and training goes on."""
    for folder in ("", str(tmp_path)):
        for rank, (said, same) in enumerate(ranks.run(fails_on_one, neighbours, before, folder, world=4)):
            first, second, third = said
            assert first == "" and ("ArithmeticError: no such root" if rank == 1 else "Disagreement") in second
            if folder:
                assert same and third == ""
            else:
                assert "an earlier step failed half-way" in third


def refused() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for placements in ((Shard(0), Shard(1)), (Shard(1), Shard(1))):
        weight = distribute_tensor(torch.zeros(4, 6), mesh, placements)
        ShardedMuon([{"params": [weight], "rule": "adamw"}])
        with raises(ShardoptError, "redistribute() DTensors", "slice"):
            ShardedMuon([weight])
    row = init_device_mesh("cpu", (4,))
    slices = DTensor.from_local(torch.zeros(2, 6), row, [Shard(0)], run_check=False, shape=(13, 6), stride=(6, 1))
    with raises(ShardoptError, "as torch.chunk does"):
        ShardedMuon([slices])


def test_slices_that_nobody_can_put_together_are_refused(ranks: Pool) -> None:
    ranks.run(refused, world=4)
