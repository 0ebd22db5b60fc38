"""Tensor, pipeline and expert parallelism with torch's libraries: norms, steps, states and what is refused."""

import io
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

import shardopt
from shardopt import (
    Part,
    ShardedOptimizer,
    Tuning,
    load_checkpoint,
    save_checkpoint,
)
from shardopt.checkpoint.publish import find
from shardopt.checkpoint.reader import Checkpoint
from shardopt.domain.domains import Domains
from shardopt.errors import (
    BindingError,
    CheckpointError,
    DisagreementError,
    StateError,
)
from tests.support import composed
from tests.support.composed import (
    BATCH,
    OPTIONS,
    STATES,
    Reference,
    average,
    batch,
    blocks,
    loss_of,
    mixture,
    parallelized,
    whole,
)
from tests.support.launch import launch
from tests.support.ranks import TIMEOUT, Pool

STEPS, SAVED_AT = 3, 1
MAX_NORM = 0.05  # every step is clipped
SMALL = Tuning(bucket_bytes=300)


class Training:
    """One rank's part of a composition: made anew to resume."""

    kind = "AdamW"
    data_parallel: dist.ProcessGroup  # whose ranks hold the same params
    rank: int  # of its batches
    part: int  # of the model, that this rank holds

    def model(self, seed: int) -> nn.Module:
        raise NotImplementedError

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        return [{"params": list(model.parameters())}]

    def options(self) -> dict[str, Any]:
        return {"process_group": self.data_parallel}

    def backward(self, model: nn.Module, step: int) -> None:
        """Gradients are the mean over all batches behind it."""
        loss_of(model(batch(step, self.rank))).backward()
        average(model.parameters(), self.data_parallel)

    def name(self, name: str) -> str:
        """In the reference."""
        return name

    def make(self, seed: int = 0) -> tuple[nn.Module, ShardedOptimizer]:
        model = self.model(seed)
        options = {**OPTIONS[self.kind], "max_grad_norm": MAX_NORM, "tuning": SMALL, **self.options()}
        return model, getattr(shardopt, f"Sharded{self.kind}")(self.groups(model), **options)

    def values(self, model: nn.Module, optimizer: ShardedOptimizer) -> dict[str, Tensor]:
        """Params and states, whole. Collective."""
        found = {}
        for own, param in model.named_parameters():
            name = self.name(own)
            found[name] = whole(param)
            for kind in STATES[self.kind]:
                found[f"{name}.{kind}"] = whole(optimizer.state[param][kind]).clone()
        return found

    def resumed(
        self, model: nn.Module, optimizer: ShardedOptimizer, root: Path | None
    ) -> tuple[nn.Module, ShardedOptimizer]:
        """By a checkpoint of all ranks, or by ``torch.save`` on one rank of those that hold the same."""
        if root is not None:
            save_checkpoint(root, model, optimizer)
            optimizer.close()
            model, optimizer = self.make(seed=1)
            load_checkpoint(root, model, optimizer)
            return model, optimizer
        state = saved_and_loaded(optimizer.state_dict(), self.data_parallel)
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer.close()
        model, optimizer = self.make(seed=1)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        return model, optimizer

    def whole_model(self) -> nn.Module:
        """As one process has it."""
        return blocks(4)

    def run(self, num_batches: int, root: Path | None = None) -> None:
        """Trains, is resumed, and is compared at each step."""
        reference = Reference(self.whole_model(), num_batches, MAX_NORM, self.kind)
        model, optimizer = self.make()
        for step in range(STEPS):
            if step == SAVED_AT:
                model, optimizer = self.resumed(model, optimizer, root)
            optimizer.zero_grad()
            self.backward(model, step)
            norm = reference.step(step)
            assert norm > 2 * MAX_NORM
            optimizer.step()
            assert optimizer.grad_norm == pytest.approx(norm, rel=1e-5)
            composed.assert_close(self.values(model, optimizer), reference.values())


def saved_and_loaded(state: dict[str, Any], group: dist.ProcessGroup) -> dict[str, Any]:
    """What the first rank of the group saved, without the others' help, on all of its ranks."""
    file = [b""]
    if group.rank() == 0:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        file = [buffer.getvalue()]
    dist.broadcast_object_list(file, group=group, group_src=0)
    return torch.load(io.BytesIO(file[0]), weights_only=True)


# -- tensor parallelism ------------------------------------------------------------------------------------------------


class TensorParallel(Training):
    def __init__(self, num_tensor: int, stage: int) -> None:
        shape = (dist.get_world_size() // num_tensor, num_tensor)
        self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        self.data_parallel, self.rank = self.mesh["dp"].get_group(), self.mesh["dp"].get_local_rank()
        self.stage, self.part = stage, self.mesh["tp"].get_local_rank()

    def whole_model(self) -> nn.Module:
        return blocks()

    def model(self, seed: int) -> nn.Module:
        return parallelized(blocks(2, seed), self.mesh["tp"])

    def options(self) -> dict[str, Any]:
        return {"process_group": self.data_parallel, "stage": self.stage}


def trains_tensor_parallel(num_tensor: int, root: Path) -> None:
    for stage, saved_in in ((1, None), (1, root / "1"), (0, root / "0")):
        training = TensorParallel(num_tensor, stage)
        training.kind = "AdamW" if stage else "SGD"
        training.run(training.data_parallel.size(), saved_in)


@pytest.mark.parametrize("num_data", [1, 2])
def test_tensor_parallel(ranks: Pool, num_data: int, tmp_path: Path) -> None:
    ranks.run(trains_tensor_parallel, 2, tmp_path, world=2 * num_data)


# -- expert parallelism ------------------------------------------------------------------------------------------------


class ExpertParallel(Training):
    """Every rank has a batch of its own; two and two hold the same expert."""

    def __init__(self) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "experts"))
        self.data_parallel = self.expert_copies = mesh["copies"].get_group()
        self.experts, self.rank = mesh["experts"].get_group(), dist.get_rank()
        self.part = self.experts.rank()

    def whole_model(self) -> nn.Module:
        return mixture()

    def model(self, seed: int) -> nn.Module:
        return mixture(self.experts, seed)

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        experts, rest = list(model[1].parameters()), [*model[0].parameters(), *model[2].parameters()]
        return [{"params": rest}, {"params": experts, "process_group": self.expert_copies}]

    def options(self) -> dict[str, Any]:
        return {}

    def backward(self, model: nn.Module, step: int) -> None:
        loss_of(model(batch(step, self.rank))).backward()
        rest, experts = self.groups(model)
        average(rest["params"], dist.group.WORLD)
        average(experts["params"], self.expert_copies, count=dist.get_world_size())

    def name(self, name: str) -> str:
        return name.replace("1.experts.0.", f"1.experts.{self.experts.rank()}.")


def trains_experts(root: Path) -> None:
    for kind, saved_in in (("AdamW", root), ("SGD", None)):
        training = ExpertParallel()
        training.kind = kind
        training.run(dist.get_world_size(), saved_in)


def test_experts_have_a_data_parallel_group_of_their_own(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(trains_experts, tmp_path, world=4)


# -- pipeline parallelism ----------------------------------------------------------------------------------------------


class Pipeline(Training):
    """Two stages of two blocks, each on its data-parallel ranks; micro-batches one forward, one backward."""

    def __init__(self, num_data: int) -> None:
        mesh = init_device_mesh("cpu", (2, num_data), mesh_dim_names=("pp", "dp"))
        self.data_parallel, self.rank = mesh["dp"].get_group(), mesh["dp"].get_local_rank()
        self.stages, self.part = mesh["pp"].get_group(), mesh["pp"].get_local_rank()

    def model(self, seed: int) -> nn.Module:
        return blocks(4, seed)[2 * self.part : 2 * self.part + 2]  # which keep their numbers

    def options(self) -> dict[str, Any]:
        return {"process_group": self.data_parallel, "norm_group": dist.group.WORLD}

    def backward(self, model: nn.Module, step: int) -> None:
        stage = PipelineStage(model, self.part, 2, torch.device("cpu"), group=self.stages)
        schedule = Schedule1F1B(stage, n_microbatches=2, loss_fn=loss_of)
        if self.part == 0:
            schedule.step(batch(step, self.rank))
        else:
            schedule.step(target=torch.zeros(BATCH))
        average(model.parameters(), self.data_parallel)


def trains_pipeline(num_data: int, root: Path) -> None:
    for kind, saved_in in (("AdamW", root), ("SGD", None)):
        training = Pipeline(num_data)
        training.kind = kind
        training.run(num_data, saved_in)


@pytest.mark.parametrize("num_data", [1, 2])
def test_pipeline(ranks: Pool, num_data: int, tmp_path: Path) -> None:
    ranks.run(trains_pipeline, num_data, tmp_path, world=2 * num_data)


# -- all together ------------------------------------------------------------------------------------------------------


class Cube(Pipeline):
    """Tensor x pipeline x data, two each."""

    def __init__(self) -> None:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        self.mesh, self.data_parallel, self.rank = mesh, mesh["dp"].get_group(), mesh["dp"].get_local_rank()
        self.stages, self.part = mesh["pp"].get_group(), mesh["pp"].get_local_rank()

    def model(self, seed: int) -> nn.Module:
        return parallelized(super().model(seed), self.mesh["tp"])


def trains_cube(root: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    Cube().run(2, root)
    dist.barrier()
    dist.destroy_process_group()


def test_tensor_x_pipeline_x_data(tmp_path: Path) -> None:
    launch(trains_cube, tmp_path, world=8)


# -- decisions ---------------------------------------------------------------------------------------------------------

# Something that one part of the model holds alone.
APART = {TensorParallel: "0.up.weight", ExpertParallel: "1.experts.0.weight", Pipeline: "up.weight"}


def made(kind: type[Training]) -> Training:
    return kind(2, 1) if kind is TensorParallel else kind(2) if kind is Pipeline else kind()


def bits(model: nn.Module, optimizer: ShardedOptimizer) -> list[bytes]:
    """All that this rank holds."""
    tensors = [local(param) for param in model.parameters()]
    for param in model.parameters():
        state = optimizer.state[param]
        tensors += [state["step"], *(local(state[kind]) for kind in STATES["AdamW"])]
    return [tensor.numpy().tobytes() for tensor in tensors]


def local(tensor: Any) -> Tensor:
    tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return (tensor.local if isinstance(tensor, Part) else tensor).detach()


def decides_together(kind: type[Training]) -> None:
    training = made(kind)
    model, optimizer = training.make()
    training.backward(model, 0)
    optimizer.step()
    before = bits(model, optimizer)
    for part in range(2):
        optimizer.zero_grad()
        training.backward(model, 1)
        if training.part == part:
            (odd,) = [param for name, param in model.named_parameters() if name.endswith(APART[kind])][:1]
            local(odd.grad).view(-1)[0] = torch.inf
        with pytest.warns(UserWarning, match="all ranks skipped this step"):
            optimizer.step()
        assert optimizer.grad_norm == torch.inf and bits(model, optimizer) == before
    optimizer.zero_grad()
    training.backward(model, 1)

    def fails_on_one() -> None:
        if dist.get_rank() == 1:
            raise ZeroDivisionError("as a loss may")

    with pytest.raises(ZeroDivisionError if dist.get_rank() == 1 else DisagreementError, match="as a loss may"):
        optimizer.step(fails_on_one)
    assert bits(model, optimizer) == before
    # Looking at the params may fail on one rank alone as well; the others hear of it and do not wait.
    fails = patch.object(Domains, "_note_copies", side_effect=BindingError("as params may"))
    told = pytest.raises(BindingError if dist.get_rank() == 1 else DisagreementError, match="as params may")
    with fails if dist.get_rank() == 1 else nullcontext(), told:
        optimizer.step()
    assert bits(model, optimizer) == before
    optimizer.step()
    assert bits(model, optimizer) != before


@pytest.mark.parametrize("kind", [TensorParallel, ExpertParallel, Pipeline])
def test_all_parts_of_a_model_decide_together(ranks: Pool, kind: type[Training]) -> None:
    ranks.run(decides_together, kind, world=4)


def clips_as_torch() -> None:
    """``clip_grad_norm_`` takes DTensors alone: the norms are left out, here and there."""
    results = []
    for max_norm in (MAX_NORM, None):
        training = TensorParallel(2, 1)
        model = training.model(0)
        params = [param for param in model.parameters() if isinstance(param, DTensor)]
        options = {**OPTIONS["SGD"], **training.options(), "max_grad_norm": max_norm}
        optimizer = shardopt.ShardedSGD(params, **options)
        training.backward(model, 0)
        if max_norm is None:
            norm = nn.utils.clip_grad_norm_(params, MAX_NORM).full_tensor()
            assert results[0][0] == pytest.approx(float(norm), rel=1e-6)
        optimizer.step()
        results.append((optimizer.grad_norm, [whole(param) for param in params]))
    for ours, theirs in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_clip_grad_norm_of_torch_gives_the_same(ranks: Pool) -> None:
    ranks.run(clips_as_torch, world=2)


def averages() -> None:
    """An expert that no token came to has no average yet, on its ranks alone; the others do not wait for them."""
    own = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    shared, expert = nn.Linear(6, 5), nn.Linear(6, 5)
    groups = [{"params": [*shared.parameters()]}, {"params": [*expert.parameters()], "process_group": own}]
    for param in (*shared.parameters(), *expert.parameters()):
        nn.init.ones_(param)
    optimizer = shardopt.ShardedSGD(groups, lr=1.0, ema=0.5, tuning=SMALL)
    for _ in range(2):
        shared.weight.grad, shared.bias.grad = torch.ones_like(shared.weight), torch.ones_like(shared.bias)
        expert.weight.grad = torch.ones_like(expert.weight) if dist.get_rank() == 0 else None
        optimizer.step()
    with optimizer.unsharded(ema=True):
        assert bool((shared.weight == -0.5).all()) and bool((shared.bias == -0.5).all())  # of 0 and -1
        assert bool((expert.weight == (-0.5 if dist.get_rank() == 0 else 1)).all())
    assert bool((shared.weight == -1).all()) and bool((expert.weight == (-1 if dist.get_rank() == 0 else 1)).all())


def test_averages_of_experts(ranks: Pool) -> None:
    ranks.run(averages, world=2)


# -- what is refused ---------------------------------------------------------------------------------------------------


def steps(model: nn.Module, params: Any, **options: Any) -> None:
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    shardopt.ShardedAdamW(params, **{"tuning": SMALL, **options}).step()


def refuses() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    alone = mesh["dp"].get_group()
    model = parallelized(blocks(), mesh["tp"])
    params = list(model.parameters())
    plain = [param for param in params if not isinstance(param, DTensor)]
    sharded = [param for param in params if isinstance(param, DTensor)]

    with pytest.raises(BindingError, match=r"process_group=mesh.*DTensor over ranks \[0, 1\]"):
        steps(model, params)
    with pytest.raises(BindingError, match="plain tensor of a group with its own process_group"):
        groups = [{"params": sharded}, {"params": plain, "process_group": mesh["dp"].get_group()}]
        steps(model, groups, process_group=alone)
    with pytest.raises(BindingError, match="share states or params with this one and are not in norm_group"):
        steps(model, plain, norm_group=alone)
    with pytest.raises(BindingError, match="share states or params with this one and are not in norm_group"):
        steps(model, params, process_group=alone, norm_group=alone)
    with pytest.raises(
        ValueError, match="A step is taken in each backward, and a pipeline has one for each micro-batch"
    ):
        shardopt.ShardedAdamW(blocks(), release_gradients=True, norm_group=dist.group.WORLD)
    with pytest.raises(TypeError, match="process_group of a param group takes a ProcessGroup"):
        shardopt.ShardedAdamW([{"params": plain, "process_group": -100}])
    with pytest.raises(BindingError, match="parts of a sum"):
        part = nn.Parameter(DTensor.from_local(torch.ones(3), mesh["tp"], [Partial()], run_check=False))
        part.grad = torch.zeros_like(part)
        shardopt.ShardedAdamW([part], process_group=alone).step()


def test_what_cannot_be_right_is_refused(ranks: Pool) -> None:
    ranks.run(refuses, world=2)


def loads_at_its_own_place_only() -> None:
    training = TensorParallel(2, 1)
    model, optimizer = training.make()
    training.backward(model, 0)
    optimizer.step()
    before = bits(model, optimizer)
    other = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    moved = distribute_tensor(whole(optimizer.state[model[0].up.weight]["exp_avg"]), other, [Shard(1)])
    state = optimizer.state_dict()
    state["state"][2]["exp_avg"] = moved
    with pytest.raises(StateError, match="each rank would take other elements than its own"):
        optimizer.load_state_dict(state)
    assert bits(model, optimizer) == before


def test_state_dicts_load_at_the_same_place_only(ranks: Pool) -> None:
    ranks.run(loads_at_its_own_place_only, world=2)


def saves_with_strangers(folder: Path) -> None:
    """Rank r steps with r ^ 1, and shares its experts with r ^ 2: all four make one checkpoint."""
    mesh, rank = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "dp")), dist.get_rank()
    model = blocks()
    params = list(model.parameters())
    for param in params:
        param.grad = torch.ones_like(param)
    params[-1].grad.mul_(rank % 2)
    own = {"params": params[-1:], "process_group": mesh["ep"].get_group()}
    groups = [{"params": params[:-1]}, own]
    options = {"process_group": mesh["dp"].get_group(), "norm_group": dist.group.WORLD, "tuning": SMALL}
    optimizer = shardopt.ShardedSGD(groups, lr=0.5, momentum=0.5, **options)
    optimizer.step()
    path = save_checkpoint(folder, model, optimizer).wait()
    expected = bits_of(params)
    optimizer.step()
    load_checkpoint(path, model, optimizer)
    assert bits_of(params) == expected
    with torch.no_grad():
        params[0].add_(rank // 2)  # other values under one name, which no mesh says are of one param
    with pytest.raises(CheckpointError, match=r"names={module.*'0.norm.weight' differs between ranks \[0, 1\]"):
        save_checkpoint(folder, model, optimizer)
    assert find(folder) == path


def bits_of(params: list[nn.Parameter]) -> list[bytes]:
    return [param.detach().numpy().tobytes() for param in params]


def test_all_who_share_params_make_one_checkpoint(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(saves_with_strangers, tmp_path, world=4)


def saves_tied_experts(folder: Path) -> None:
    """Each rank's expert has two names, and so has what is saved of it."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "alone"))
    model = nn.ModuleDict({"dense": nn.Linear(3, 3), "expert": nn.Linear(3, 3), "tied": nn.Linear(3, 3)})
    model["tied"].weight, model["tied"].bias = model["expert"].weight, model["expert"].bias
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    experts = {"params": model["expert"].parameters(), "process_group": mesh["alone"].get_group()}
    optimizer = shardopt.ShardedAdamW([{"params": model["dense"].parameters()}, experts], tuning=SMALL)
    optimizer.step()
    save_checkpoint(folder, model, optimizer)
    with Checkpoint(find(folder)) as checkpoint:
        aliases = {name: about.aliases for name, about in checkpoint.manifest.params.items() if about.aliases}
    both = [f"{kind}@{turn}of2" for kind in ("weight", "bias") for turn in range(2)]
    assert aliases == {f"expert.{each}": (f"tied.{each}",) for each in both}


def test_tied_experts_keep_their_names(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(saves_tied_experts, tmp_path, world=2)
