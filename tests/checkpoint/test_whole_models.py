"""Checkpoints of models in any cut: one directory, global names; in any other cut each rank reads what it needs."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import shardopt
from shardopt import CheckpointError, load_checkpoint, save_checkpoint
from shardopt.checkpoint import export
from shardopt.checkpoint.inspect import describe, verify
from shardopt.checkpoint.order import joined_order
from shardopt.checkpoint.param_box import StridedBox
from shardopt.checkpoint.publish import find, published
from shardopt.checkpoint.reader import Checkpoint, FileChunk
from shardopt.partition.comm.group import Ranks
from tests.fixtures.make_parts import PARTS, digests, tensor_parallel, with_experts
from tests.support.composed import mixture
from tests.support.cuts import STATES, Cell, Cut, Meshes, Model, digest, needed, small_chunks
from tests.support.ranks import Pool
from tests.support.training import raises

CHUNK = 16  # bytes

ALONE = Cut(alone=True)
CUTS = {
    "one process": ALONE,
    "data 4": Cut(dp=4),
    "data 4, stage 0": Cut(dp=4, stage=0),
    "tensor 2, data 2": Cut(dp=2, tp=2),
    "tensor 4": Cut(tp=4),
    "pipeline 2, data 2": Cut(pp=2, dp=2),
    "pipeline 2, tensor 2": Cut(pp=2, tp=2),
    "experts 2, data 2": Cut(ep=2, dp=2),
    "experts 4": Cut(ep=4),
    "pipeline 2, experts 2": Cut(pp=2, ep=2),
    "data 4, stage 3": Cut(dp=4, stage=3, module=True),
    "pipeline 2, data 2, stage 2": Cut(pp=2, dp=2, stage=2, module=True),
    "pipeline 2, data 2, stage 3": Cut(pp=2, dp=2, stage=3, module=True),
    "renumbered": Cut(pp=2, ep=2, renumbered=True),
    "tensor 4, stage 1": Cut(tp=4, stage=1, module=True),
    "tensor 2, data 2, stage 2": Cut(dp=2, tp=2, stage=2, module=True),
    "tensor 2, data 2, stage 3": Cut(dp=2, tp=2, stage=3, module=True),
    "experts 2, data 2, stage 1": Cut(ep=2, dp=2, stage=1, module=True),
    "experts 4, stage 2": Cut(ep=4, stage=2, module=True),
    "experts 2, data 2, stage 3": Cut(ep=2, dp=2, stage=3, module=True),
    "experts 2, tensor 2, stage 3": Cut(ep=2, tp=2, stage=3, module=True),
}
PAIRS = [
    ("tensor 2, data 2", "data 4"),
    ("tensor 2, data 2", "one process"),
    ("tensor 2, data 2", "tensor 4"),
    ("pipeline 2, data 2", "one process"),
    ("pipeline 2, data 2", "data 4, stage 0"),
    ("pipeline 2, data 2, stage 3", "data 4, stage 3"),
    ("renumbered", "experts 4"),
    ("experts 4", "pipeline 2, tensor 2"),
    ("experts 2, tensor 2, stage 3", "one process"),
]


def uninterrupted(meshes: Meshes) -> list[dict[str, str]]:
    """What there is after two steps, and after three."""
    cell = Cell(ALONE, meshes)
    found = []
    for turn in range(3):
        cell.step(turn)
        found.append(cell.facts())
    return found[1:]


class Reading:
    """Where the chunks begin that this rank reads of params and states."""

    def __init__(self) -> None:
        self.chunks: set[tuple[str, int]] = set()
        read = Checkpoint.read

        def counted(checkpoint: Checkpoint, chunk: FileChunk) -> torch.Tensor:
            if chunk.key.section == "params":
                self.chunks.add((chunk.file, chunk.offset))
            return read(checkpoint, chunk)

        self.patched = patch.object(Checkpoint, "read", counted)


def saves(cut: Cut, root: Path, meshes: Meshes) -> None:
    cell = Cell(cut, meshes)
    for turn in range(2):
        cell.step(turn)
    if not cut.alone or dist.get_rank() == 0:
        save_checkpoint(root, cell.model, cell.optimizer, names=cell.names)
    dist.barrier()


def loads(cut: Cut, root: Path, expected: Sequence[dict[str, str]], meshes: Meshes) -> None:
    cell, reading = Cell(cut, meshes, turn=9), Reading()
    with reading.patched:
        loaded = load_checkpoint(root, cell.model, cell.optimizer, names=cell.names)
    assert loaded.step == 2 and not loaded.mismatches and not loaded.losses
    found = cell.facts()
    assert found.items() <= expected[0].items(), {name for name in found if found[name] != expected[0][name]}
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, list(found))
    assert {name for names in told for name in names} == expected[0].keys()
    with Checkpoint(find(root)) as checkpoint:
        held = {(name, kind): places for name, kind, places in cell.held()}
        if cut.stage == 3:  # params are read as their states are, and nothing tells which elements of frozen ones
            held = {(name, kind): places for (name, kind), places in held.items() if kind != "param"}
            assert needed(checkpoint, held, CHUNK) < reading.chunks
        else:
            assert reading.chunks == needed(checkpoint, held, CHUNK)
    cell.step(2)
    found = cell.facts()
    assert found.items() <= expected[1].items()


def cells(root: Path, pairs: Sequence[tuple[str, str]]) -> None:
    meshes = Meshes()
    expected = uninterrupted(meshes)
    with small_chunks(CHUNK):
        for before in dict.fromkeys(before for before, _ in pairs):
            saves(CUTS[before], root / before, meshes)
            for after in (after for other, after in pairs if other == before):
                try:
                    loads(CUTS[after], root / before, expected, meshes)
                except BaseException as error:
                    error.add_note(f"saved in {before}, loaded in {after}")
                    raise


def test_any_cut_loads_in_any_other(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(cells, tmp_path, PAIRS, world=4)


@pytest.mark.slow
@pytest.mark.parametrize("before", CUTS)
def test_every_cut_loads_in_every_other(ranks: Pool, tmp_path: Path, before: str) -> None:
    ranks.run(cells, tmp_path, [(before, after) for after in CUTS], world=4)


def recuts(root: Path, pairs: Sequence[tuple[str, str, bool]]) -> None:
    """int8 states: the blocks of 256 elements that a cut divides otherwise are rounded once more, and that is said."""
    meshes = Meshes()
    options = {"state_format": "int8", "tuning": shardopt.Tuning(bucket_bytes=300, live_bytes=0, compress_from=0)}
    for number, (before, after, is_rounded) in enumerate(pairs):
        cell = Cell(CUTS[before], meshes, **options)
        for turn in range(2):
            cell.step(turn)
        save_checkpoint(root / str(number), cell.model, cell.optimizer)
        saved: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(saved, cell.states())
        expected = {name: state for each in saved for name, state in each.items()}
        other = Cell(CUTS[after], meshes, turn=9, **options)
        loaded = load_checkpoint(root / str(number), other.model, other.optimizer)
        assert bool(loaded.losses) == is_rounded, (before, after, loaded.losses)
        for name, state in other.states().items():
            largest = float(expected[name].abs().max())
            torch.testing.assert_close(state, expected[name], rtol=0.0, atol=largest / 32 if is_rounded else 0.0)
        other.step(2)


def test_int8_states_of_a_cut_model(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(recuts, tmp_path, [("tensor 2, data 2, stage 2", "tensor 2, data 2, stage 2", False)], world=4)


@pytest.mark.slow
def test_int8_states_are_cut_anew(ranks: Pool, tmp_path: Path) -> None:
    cut = ("tensor 2, data 2, stage 2", "experts 2, tensor 2, stage 3", "experts 2, data 2, stage 3")
    whole = ("pipeline 2, data 2, stage 2", "data 4, stage 3")
    pairs = [(before, after, True) for before in cut for after in whole]
    pairs += [(before, "data 4, stage 3", False) for before in whole]
    ranks.run(recuts, tmp_path, pairs, world=4)


# -- integers ----------------------------------------------------------------------------------------------------------


def test_the_order_of_a_whole_model() -> None:
    parts = [["embed.w", "layers.0.w", "layers.2.w", "layers.10.w"], ["layers.1.w", "layers.3.w", "head.w"]]
    assert joined_order(parts) == [
        "embed.w", "layers.0.w", "layers.1.w", "layers.2.w", "layers.3.w", "layers.10.w", "head.w",
    ]  # fmt: skip
    assert joined_order([["b", "a"], ["b", "a"]]) == ["b", "a"] and joined_order([]) == []


def test_strided_boxes_number_elements_as_tensors_do() -> None:
    """Of every range of small tensors in every storage order: the boxes are the elements, and each is there once."""
    for shape in ((), (5,), (3, 4), (2, 1, 3), (2, 3, 2)):
        for order in itertools.permutations(range(len(shape))):
            strides = torch.empty([shape[dim] for dim in order]).permute([order.index(d) for d in range(len(shape))])
            strided = StridedBox((7,) * len(shape), shape, strides.stride())
            numel = strided.numel
            flat = torch.arange(numel)
            for start, stop in itertools.combinations(range(numel + 1), 2):
                views = [strided.view(flat[start:stop], start, corners) for corners in strided.corners(start, stop)]
                assert torch.cat([view.reshape(-1) for view in views]).sort()[0].tolist() == list(range(start, stop))


# -- what is refused, and what a failure leaves ------------------------------------------------------------------------


def by_hand(value: float) -> tuple[nn.Module, Any]:
    """Two stages that each number their layers from 0, trained together."""
    torch.manual_seed(dist.get_rank())
    stage = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    optimizer = shardopt.ShardedSGD(
        stage.parameters(), lr=0.5, momentum=0.5, process_group=alone, norm_group=dist.group.WORLD
    )
    for param in stage.parameters():
        param.grad = torch.full_like(param, value)
    optimizer.step()
    return stage, optimizer


class Told(nn.Linear):
    """With an extra state."""

    def __init__(self, told: int) -> None:
        super().__init__(2, 2)
        self.told = told

    def get_extra_state(self) -> int:
        return self.told

    def set_extra_state(self, state: int) -> None:
        self.told = state


def refuses_what_differs(root: Path, alone: dist.ProcessGroup) -> None:
    """One name for params of other shapes or dtypes, groups of other values, one module with two extra states."""
    rank = dist.get_rank()
    common = {"process_group": alone, "norm_group": dist.group.WORLD}
    for mine, words in (
        (nn.Linear(2, 2 + rank), ("different params", "'weight' is [2, 2] of", "and [3, 2] of", "Nothing was written")),
        (nn.Linear(2, 2).to((torch.float32, torch.bfloat16)[rank]), ("different params", "bfloat16 on ranks [1]")),
    ):
        with raises(CheckpointError, *words):
            save_checkpoint(root, mine, shardopt.ShardedSGD(mine.parameters(), lr=0.5, **common))
    module = nn.Sequential(Told(rank))
    for param in module.parameters():
        nn.init.ones_(param)  # tied: the same bits on both ranks
    names = {module[0]: f"layers.{rank}"}
    uneven = shardopt.ShardedSGD(module.parameters(), lr=0.5 + rank, **common)
    with raises(CheckpointError, "the same param groups with the same values", ".lr is 0.5 on ranks [0], 1.5 on"):
        save_checkpoint(root, module, uneven, names=names)
    optimizer = shardopt.ShardedSGD([{"params": module.parameters()}], lr=0.5, **common)
    module.append(nn.Linear(2, 2))
    with raises(CheckpointError, "the extra states of modules 'same'"):
        save_checkpoint(root, module, optimizer, names={module[0]: "same", module[1]: f"other.{rank}"})


def saves_by_hand(root: Path) -> None:
    stage, optimizer = by_hand(1.0 + dist.get_rank())
    with raises(CheckpointError, "names={module:", "'0.weight' differs between ranks [0] and ranks [1]"):
        save_checkpoint(root, stage, optimizer)
    assert not root.exists(), "nothing was written"
    rank = dist.get_rank()
    refuses_what_differs(root, [dist.new_group([each]) for each in range(2)][rank])
    assert not root.exists(), "nothing was written"
    names = {stage: f"stages.{rank}", stage[1]: f"norms.{rank}"}
    expected = {name: value.clone() for name, value in stage.state_dict().items()}
    path = save_checkpoint(root, stage, optimizer, names=names).wait()
    again, other = by_hand(7.0)
    with raises(CheckpointError, "'0.weight' [3, 3] is missing"):
        load_checkpoint(path, again, other)
    load_checkpoint(path, again, other, names={again: f"stages.{rank}", again[1]: f"norms.{rank}"})
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in expected.items())
    assert torch.equal(other.state[again[0].weight]["momentum_buffer"], torch.full((3, 3), 1.0 + rank))
    with raises(ValueError, "a Linear is not one"):
        save_checkpoint(root, stage, optimizer, names={nn.Linear(1, 1): "x"})
    with raises(CheckpointError, "names= calls two tensors of this module 'a.weight'"):
        save_checkpoint(root, stage, optimizer, names={stage[0]: "a", stage[1]: "a"})
    odd = nn.Linear(1, 1)
    mesh = init_device_mesh("cpu", (2,))
    placed = DTensor.from_local(torch.ones(2, 1), mesh, [_StridedShard(0, split_factor=2)], run_check=False)
    odd.weight = nn.Parameter(placed)
    with raises(CheckpointError, "redistribute() 'weight' to Shard(...) or Replicate() placements first"):
        save_checkpoint(root, odd)
    odd.weight = nn.Parameter(DTensor.from_local(torch.ones(2, 1), mesh, [Shard(0)], run_check=False))
    with raises(CheckpointError, "give the optimizer too, with its process_group"):
        save_checkpoint(root, odd)
    fails = patch("shardopt.checkpoint.write.SafetensorsWriter.finish", side_effect=OSError("a disk that is full"))
    if rank == 1:
        with fails, raises(CheckpointError, "a disk that is full"):
            save_checkpoint(root, stage, optimizer, names=names)
    else:
        with raises(CheckpointError, "rank 1 failed", "a disk that is full"):
            save_checkpoint(root, stage, optimizer, names=names)
    assert published(root) == [path] and verify(path) == []
    with pytest.raises(CheckpointError, match="give all ranks of the model one directory"):
        save_checkpoint(root / str(rank), stage, optimizer, names=names)


def test_one_name_for_two_params_is_refused_until_modules_have_names(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(saves_by_hand, tmp_path / "runs", world=2)
    with Checkpoint(find(tmp_path / "runs")) as checkpoint:
        norms = [f"norms.{rank}.{name}" for rank in range(2) for name in ("weight", "bias")]
        layers = [f"stages.{rank}.0.{name}" for rank in range(2) for name in ("weight", "bias")]
        assert set(checkpoint.manifest.params) == {*norms, *layers}
        buffers = {
            name
            for each in ("running_mean", "running_var", "num_batches_tracked")
            for name in (f"norms.0.{each}", f"norms.1.{each}")
        }
        assert checkpoint.manifest.names["buffers"] == buffers


def tells(root: Path, num_layers: int) -> list[int]:
    """The lengths of what this rank tells the others before it writes."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(num_layers)))
    optimizer = shardopt.ShardedAdamW(model)
    lengths, exchange = [], Ranks.exchange_json

    def counted(ranks: Ranks, value: Any, phase: str) -> list[Any]:
        if phase == "planning a checkpoint":
            lengths.append(len(json.dumps(value)))
        return exchange(ranks, value, phase)

    with patch.object(Ranks, "exchange_json", counted):
        save_checkpoint(root, model, optimizer)
    return lengths


def told_of_small_and_large(root: Path) -> tuple[list[int], list[int]]:
    return tells(root / "small", 1), tells(root / "large", 30)


def test_ranks_that_hold_the_same_tell_no_names(ranks: Pool, tmp_path: Path) -> None:
    """Every rank has a buffer of the longest message for each rank: names would be world x params on each."""
    for small, large in ranks.run(told_of_small_and_large, tmp_path, world=2):
        assert small and small == large


# -- export ------------------------------------------------------------------------------------------------------------


def saved_to_be_exported(root: Path) -> dict[str, str]:
    meshes = Meshes()
    with small_chunks(CHUNK):
        saves(CUTS["tensor 2, data 2"], root / "tensor", meshes)
        saves(CUTS["renumbered"], root / "renumbered", meshes)
    return uninterrupted(meshes)[0]


def test_export_knows_the_whole_model(ranks: Pool, tmp_path: Path) -> None:
    """Into the state dict of ``torch.optim`` in one process, and into one file of weights."""
    expected = ranks.run(saved_to_be_exported, tmp_path, world=4)[0]
    for cut in ("tensor", "renumbered"):
        model = Model()
        named = dict(model.named_parameters())
        trained = {name: param for name, param in named.items() if param.requires_grad}
        experts = [name for name in trained if "expert" in name or "stacked" in name]
        groups = [[name for name in trained if name not in experts], experts]
        theirs = torch.optim.AdamW([{"params": [trained[name] for name in names]} for names in groups])
        with small_chunks(CHUNK):
            assert verify(find(tmp_path / cut)) == [] and any(
                "layers.0.up.weight" in line for line in describe(tmp_path / cut)
            )
            with Checkpoint(find(tmp_path / cut)) as checkpoint:
                export.export_states(checkpoint, tmp_path / "optimizer.pt", 0, lambda nbytes: None)
                export.export_weights(checkpoint, tmp_path / "weights.safetensors", lambda nbytes: None)
        theirs.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
        assert [group["lr"] for group in theirs.param_groups] == [0.01, 0.02]
        weights = load_file(tmp_path / "weights.safetensors")
        assert all(digest(weights[name]) == expected[name] for name in named)
        for name, param in trained.items():
            assert theirs.state[param]["step"] == 2
            for kind in STATES:
                assert digest(theirs.state[param][kind]) == expected[f"{name}.{kind}"], (cut, name)


# -- checkpoints of before ---------------------------------------------------------------------------------------------


def loads_parts() -> None:
    rank, expected = dist.get_rank(), json.loads((PARTS / "expected.json").read_text())
    own = PARTS / f"tensor{rank}"
    model, optimizer = tensor_parallel(1)
    assert load_checkpoint(own, model, optimizer).step == 2
    assert digests(model, optimizer) == expected[rank]["tensor"]
    with pytest.raises(CheckpointError, match=r"the step of the checkpoint of each part .*: 1 on .* 2 on"):
        load_checkpoint(published(own)[rank], model, optimizer)
    for wrong in (PARTS / f"tensor{1 - rank}", PARTS / "tensor0"):
        with pytest.raises(
            CheckpointError, match=r"placed \(Shard\(dim=0\),\) at \(.,\) of a mesh of \(2,\)|rank . failed"
        ):
            load_checkpoint(wrong, model, optimizer)
    assert digests(model, optimizer) == expected[rank]["tensor"]
    model, optimizer = with_experts(1)
    assert load_checkpoint(PARTS / "experts", model, optimizer).step == 2
    assert digests(model, optimizer) == expected[rank]["experts"]
    alone = [dist.new_group([each]) for each in range(2)][rank]
    everything = mixture()
    with raises(CheckpointError, "(it is one of 2 experts that were saved under one name: load it where as many ranks"):
        load_checkpoint(
            PARTS / "experts", everything, shardopt.ShardedAdamW(everything.parameters(), process_group=alone)
        )


def test_checkpoints_of_before_load_at_the_cut_that_saved_them(ranks: Pool) -> None:
    ranks.run(loads_parts, world=2)
