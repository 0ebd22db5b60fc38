"""Tensor-parallel models hand over their module: every stage, compared at each step with one process."""

import struct
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardopt
from shardopt import ShardedOptimizer, Tuning, load_checkpoint, save_checkpoint
from shardopt.domain.domains import Domains
from shardopt.domain.dtensors import shown_as
from shardopt.errors import BindingError, DisagreementError, ReleasedError, ShardoptError
from tests.support import composed
from tests.support.composed import OPTIONS, STATES, whole
from tests.support.ranks import Pool
from tests.support.sweep import Row, sweep_at_once
from tests.support.tensor_parallel import LAYOUTS, in_parallel, loss, mesh_of, model_of

STEPS, MAX_NORM = 4, 0.05  # every step is clipped
SMALL = Tuning(bucket_bytes=300, keep_below=4)

# -- four steps beside torch.optim -------------------------------------------------------------------------------------

WITH: dict[str, dict[str, Any]] = {
    "nothing": {},
    "cpu": {"offload": "cpu"},
    "disk": {},
    "int8": {"state_format": "int8", "tuning": Tuning(bucket_bytes=300, keep_below=4, compress_from=0)},
    "scaler": {},
    "release": {"release_gradients": True, "max_grad_norm": None},
}
AXES = {"stage": (1, 2, 3), "layout": LAYOUTS, "extra": tuple(WITH), "kind": ("AdamW", "SGD")}


def is_allowed(stage: int, layout: str, extra: str, kind: str) -> bool:
    if extra == "release":  # nothing is clipped, and SGD would diverge
        return stage == 1 and layout == "blocks" and kind == "AdamW"
    return kind == ("SGD" if extra in ("nothing", "scaler") and layout != "sequence" else "AdamW")


Step = tuple[float, dict[str, Tensor]]


@cache
def reference(layout: str, kind: str, num_batches: int, max_norm: float | None) -> list[Step]:
    """What one process makes of the whole model with torch's optimizer: norm before clipping, params and states."""
    model = model_of(layout)
    optimizer = getattr(torch.optim, kind)(model.parameters(), **OPTIONS[kind])
    steps: list[Step] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(num_batches):
            (loss(model, step, rank) / num_batches).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), torch.inf if max_norm is None else max_norm)
        optimizer.step()
        found = {name: param.detach().clone() for name, param in model.named_parameters()}
        for name, param in model.named_parameters():
            found.update({f"{name}.{state}": optimizer.state[param][state].clone() for state in STATES[kind]})
        steps.append((float(norm), found))
    return steps


def values(model: nn.Module, optimizer: ShardedOptimizer, states: Sequence[str] = ()) -> dict[str, Tensor]:
    """Params and states, whole. Collective."""
    with optimizer.unsharded():
        found = {name: whole(param).clone() for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        for state in states:
            found[f"{name}.{state}"] = whole(optimizer.state[param][state])
    return found


def trains(folder: Path, stage: int, layout: str, extra: str, kind: str) -> None:
    mesh = mesh_of()
    data, rank = mesh["dp"].get_group(), mesh["dp"].get_local_rank()
    model = model_of(layout, mesh["tp"])
    given = {**OPTIONS[kind], "max_grad_norm": MAX_NORM, "tuning": SMALL, "stage": stage, **WITH[extra]}
    if extra == "disk":
        given["offload"] = folder
    optimizer = getattr(shardopt, f"Sharded{kind}")(model, process_group=data, **given)
    expected = reference(layout, kind, data.size(), given["max_grad_norm"])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=extra == "scaler")
    for step, (norm, theirs) in enumerate(expected):
        optimizer.zero_grad()
        with in_parallel(model):
            scaler.scale(loss(model, step, rank)).backward()
        scaler.step(optimizer)
        scaler.update()
        if extra == "int8":  # states are rounded
            assert optimizer.grad_norm == pytest.approx(norm, rel=0.05)
            for name, value in values(model, optimizer).items():
                torch.testing.assert_close(value, theirs[name], rtol=0.0, atol=0.01)
        else:
            assert optimizer.grad_norm == pytest.approx(norm, rel=1e-5)
            states = STATES[kind] if step == STEPS - 1 else ()
            composed.assert_close(values(model, optimizer, states), theirs)
    optimizer.close()


def trains_all(rows: Sequence[Row], folder: Path) -> None:
    for row in rows:
        try:
            trains(folder, *row)
        except Exception as error:
            error.add_note(f"in {row}")
            raise


@sweep_at_once(AXES, strength=1, allowed=is_allowed)
def test_trains_as_one_process(ranks: Pool, rows: list[Row], tmp_path: Path) -> None:
    ranks.run(trains_all, rows, tmp_path, world=4)


# -- the same bits at every mesh ---------------------------------------------------------------------------------------


class Weighed(nn.Module):
    """Its loss is the sum of its params times integers, which are the gradients: exact, in whatever order added up."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 3)])
        self.norm = nn.LayerNorm(9)

    def forward(self, step: int, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + rank)
        total = torch.zeros(())
        for param in self.parameters():
            factors = torch.randint(-8, 9, param.shape, generator=generator).to(param.dtype)
            total = total + weighed(param, factors)
        return total


def weighed(param: Any, factors: Tensor) -> Tensor:
    if not isinstance(param, DTensor):
        return (param * factors).sum()
    placed = distribute_tensor(factors, param.device_mesh, param.placements, src_data_rank=None)
    return (param * placed).sum().full_tensor()


def bits_of(model: nn.Module, optimizer: ShardedOptimizer, batches: Sequence[int]) -> list[bytes]:
    """The norms of these steps, and the params at their end."""
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for batch in batches:
            (model(step, batch) / len(batches)).backward()
        optimizer.step()
        found.append(struct.pack("<d", optimizer.grad_norm or 0.0))
    return found + [value.view(torch.uint8).numpy().tobytes() for value in values(model, optimizer).values()]


def same_bits() -> None:
    alone = mesh_of(4, 1)["tp"].get_group()
    meshes = ((1, (2, 2)), (3, (2, 2))), ((2, (1, 4)), (3, (4, 1)))
    for dtype, master, rows in zip((torch.float32, torch.bfloat16), ("fp32", "split24"), meshes, strict=True):
        options: dict[str, Any] = {**OPTIONS["AdamW"], "max_grad_norm": 1.0, "master": master}
        one = Weighed().to(dtype)
        # Each micro-batch adds to bf16 gradients exactly: they are small integers over 4.
        expected = bits_of(one, shardopt.ShardedAdamW(one.parameters(), process_group=alone, **options), range(4))
        for stage, (data, tensor) in rows:
            mesh = mesh_of(data, tensor)
            plan = {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}
            model = parallelize_module(Weighed().to(dtype), mesh["tp"], plan)
            group, each = mesh["dp"].get_group(), 4 // data
            optimizer = shardopt.ShardedAdamW(model, process_group=group, stage=stage, tuning=SMALL, **options)
            batches = range(group.rank() * each, group.rank() * each + each)
            assert bits_of(model, optimizer, batches) == expected, (stage, data, tensor, dtype)
            optimizer.close()


def test_same_bits_at_every_mesh(ranks: Pool) -> None:
    ranks.run(same_bits, world=4)


# -- noise -------------------------------------------------------------------------------------------------------------


class Ones(nn.Module):
    """A param that is cut, one that is copied, and a plain one."""

    def __init__(self) -> None:
        super().__init__()
        self.cut, self.copied = nn.Linear(64, 8, bias=False), nn.Linear(64, 4, bias=False)
        self.plain = nn.Linear(64, 4, bias=False)
        for param in self.parameters():
            nn.init.ones_(param)

    def forward(self) -> Tensor:
        return sum((weighed(param, torch.ones_like(param)) for param in self.parameters()), torch.zeros(()))


def draws_noise() -> None:
    """bf16 params without a master are rounded at random."""
    for stage in (1, 3):
        mesh = mesh_of()
        model = parallelize_module(Ones().to(torch.bfloat16), mesh["tp"], {"cut": ColwiseParallel()})
        model.copied.weight = nn.Parameter(distribute_tensor(model.copied.weight.detach(), mesh["tp"], [Replicate()]))
        given: dict[str, Any] = {"master": "none", "process_group": mesh["dp"].get_group(), "tuning": SMALL}
        optimizer = shardopt.ShardedSGD(model, lr=1e-3, stage=stage, **given)
        for _ in range(2):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
        with optimizer.unsharded():
            own = {name: local(param).float().numpy().tobytes() for name, param in model.named_parameters()}
        everyones: list[Any] = [None] * 4
        dist.all_gather_object(everyones, own)
        for name in own:
            first, second, *replicas = (each[name] for each in everyones)  # of data-parallel rank 0, then of 1
            assert replicas == [first, second]
            assert (first == second) is not name.startswith("cut"), name
        optimizer.close()


def test_different_elements_are_rounded_by_different_noise(ranks: Pool) -> None:
    ranks.run(draws_noise, world=4)


# -- decisions ---------------------------------------------------------------------------------------------------------


def made(stage: int, **options: Any) -> tuple[nn.Module, ShardedOptimizer, int]:
    """The model, its optimizer, and this rank among the data-parallel ones."""
    mesh = mesh_of()
    model = model_of("blocks", mesh["tp"])
    given = {"lr": 0.1, "momentum": 0.9, "tuning": SMALL, "stage": stage, **options}
    return model, shardopt.ShardedSGD(model, process_group=mesh["dp"].get_group(), **given), mesh["dp"].get_local_rank()


def local(tensor: Any) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def held(model: nn.Module, optimizer: ShardedOptimizer) -> list[bytes]:
    with optimizer.unsharded():
        return [local(param).detach().numpy().tobytes() for param in model.parameters()]


def backward(model: nn.Module, step: int, rank: int, spoilt: bool = False) -> None:
    """With an Inf among the elements of one param that this rank holds."""
    param = model.get_parameter("0.up.weight")
    hook = param.register_hook(lambda grad: shown_as(param, local(grad) * torch.inf) if spoilt else grad)
    loss(model, step, rank).backward()
    hook.remove()


def decide_together() -> None:
    """What one tensor-parallel rank alone meets, all ranks of the model hear of."""
    odd = dist.get_rank() == 1
    for stage, options in ((1, {}), (1, {"release_gradients": True}), (2, {"max_grad_norm": MAX_NORM}), (3, {})):
        model, optimizer, rank = made(stage, **options)
        # Looking at the params may fail on one rank, before anything is bound.
        fails = patch.object(Domains, "_note_copies", side_effect=BindingError("as params may"))
        told = pytest.raises(BindingError if odd else DisagreementError, match="as params may")
        with fails if odd else nullcontext(), told:
            loss(model, 0, rank)
        backward(model, 0, rank)
        optimizer.step()
        before = held(model, optimizer)
        optimizer.zero_grad()
        if "release_gradients" in options:  # some buckets were updated before the Inf came
            with pytest.raises(ShardoptError, match="some params took the step"):
                backward(model, 1, rank, spoilt=odd)
            continue
        backward(model, 1, rank, spoilt=odd)
        with pytest.warns(UserWarning, match="all ranks skipped this step"):
            optimizer.step()
        assert optimizer.grad_norm in (torch.inf, None) and held(model, optimizer) == before
        optimizer.zero_grad()
        backward(model, 1, rank)

        def fails_on_one() -> None:
            if odd:
                raise ZeroDivisionError("as a loss may")

        with pytest.raises(ZeroDivisionError if odd else DisagreementError, match="as a loss may"):
            optimizer.step(fails_on_one)
        assert held(model, optimizer) == before
        optimizer.step()
        assert held(model, optimizer) != before
        optimizer.close()


def test_all_ranks_decide_together(ranks: Pool) -> None:
    ranks.run(decide_together, world=4)


# -- what scripts see --------------------------------------------------------------------------------------------------


def shows_gradients() -> None:
    model, optimizer, rank = made(1)
    with optimizer.no_sync():
        backward(model, 0, rank)
    for param in model.parameters():  # sums that sequence parallelism leaves are made
        assert getattr(param.grad, "placements", None) == getattr(param, "placements", None)
    backward(model, 1, rank)
    backward(model, 2, rank)  # adds to parts
    alone = model_of("blocks")
    for step, each in product(range(3), range(2)):
        (loss(alone, step, each) / 2).backward()
    found = {name: param.grad for name, param in model.named_parameters()}
    for name, param in alone.named_parameters():
        theirs = found[name]
        if isinstance(theirs, DTensor):
            mesh, placements = theirs.device_mesh, theirs.placements
            whole_local = theirs.to_local().full_tensor()
            theirs = DTensor.from_local(whole_local, mesh, placements, shape=param.shape, stride=param.stride())
        torch.testing.assert_close(theirs.full_tensor(), param.grad, rtol=1e-4, atol=1e-5)
    norm = nn.utils.clip_grad_norm_(alone.parameters(), MAX_NORM)
    clipped = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    assert float(clipped.full_tensor()) == pytest.approx(float(norm), rel=1e-5)
    again = nn.utils.get_total_norm([param.grad for param in model.parameters()])
    assert float(again.full_tensor()) == pytest.approx(MAX_NORM, rel=1e-4)
    # A scaler looks at all of them, and so does every rank where one alone holds an Inf.
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))  # from now on it has a scale
    optimizer.zero_grad(set_to_none=False)
    assert all(float(norm) == 0 for norm in map(norm_of, model.parameters()))
    optimizer.zero_grad()
    backward(model, 0, rank, spoilt=dist.get_rank() == 1)
    before = held(model, optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0 and held(model, optimizer) == before
    # What a schedule assigns is placed before it is reduced, and a tied weight's part is one of the local tensor.
    optimizer.zero_grad()
    copied: Any = model.get_parameter("0.gain.weight")
    half = torch.full_like(local(copied), rank)
    copied.grad = DTensor.from_local(half, copied.device_mesh, [Partial()], run_check=False)
    optimizer.reduce_gradients()
    optimizer.sum_tied(copied, mesh_of(4, 1)["tp"].get_group())
    assert bool((copied.grad.to_local().full_tensor() == 1).all())  # the mean of 0 + 0 and 1 + 1
    optimizer.close()
    assert all(param.grad is None for param in model.parameters())


def norm_of(param: nn.Parameter) -> Tensor:
    assert param.grad is not None
    return whole(torch.linalg.vector_norm(param.grad))


def test_gradients_are_those_of_the_params(ranks: Pool) -> None:
    ranks.run(shows_gradients, world=4)


def resumes(root: Path) -> None:
    """In the middle of an accumulation, of all ranks in one directory."""
    model, optimizer, rank = made(3)
    backward(model, 0, rank)
    optimizer.step()
    optimizer.zero_grad()
    backward(model, 1, rank)
    save_checkpoint(root, model, optimizer)
    optimizer.step()
    after = held(model, optimizer)
    optimizer.close()
    model, optimizer, rank = made(3)
    load_checkpoint(root, model, optimizer)
    optimizer.step()
    assert held(model, optimizer) == after
    optimizer.close()


def test_checkpoints_hold_gradients_of_dtensors(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(resumes, tmp_path, world=4)


def guards() -> None:
    model, optimizer, rank = made(3)
    before = {name: whole(param).clone() for name, param in model.named_parameters()}
    loss(model, 0, rank)
    for name in ("0.up.weight", "0.norm.weight"):
        param: Any = model.get_parameter(name)
        for call in (
            ("__mul__", "to_local", "full_tensor", "redistribute") if isinstance(param, DTensor) else ("__mul__",)
        ):
            with pytest.raises(ReleasedError, match=name):
                getattr(param, call)(*(2,) * (call == "__mul__"))
    shown = model.state_dict()  # of parts, inside of DTensors as outside
    for name, value in before.items():
        assert torch.equal(whole(shown[name]), value)
    with optimizer.unsharded():
        kept = {name: param.detach() for name, param in model.named_parameters()}  # they keep the memory that they show
    model.load_state_dict({name: value * 2 for name, value in shown_whole(model, optimizer).items()})
    for name, value in kept.items():
        assert torch.equal(whole(value), before[name])
    for name, value in shown_whole(model, optimizer).items():
        assert torch.equal(whole(value), 2 * before[name])
    optimizer.close()
    for name, param in model.named_parameters():
        assert torch.equal(whole(param), 2 * before[name])


def shown_whole(model: nn.Module, optimizer: ShardedOptimizer) -> dict[str, Tensor]:
    """It stays valid after the context."""
    with optimizer.unsharded():
        return model.state_dict()


def test_released_dtensors_are_guarded(ranks: Pool) -> None:
    ranks.run(guards, world=4)


def refuses_meta() -> None:
    mesh = mesh_of()
    with torch.device("meta"):
        model = model_of("blocks")
    parallelize_module(model, mesh["tp"], {"0.up": ColwiseParallel()})
    optimizer = shardopt.ShardedSGD(model, lr=0.1, process_group=mesh["dp"].get_group())
    with pytest.raises(BindingError, match=r"0\.up\.weight is a DTensor on the meta device"):
        optimizer.bind()


def test_dtensors_on_the_meta_device_are_refused(ranks: Pool) -> None:
    ranks.run(refuses_meta, world=4)


# -- context parallelism, hybrid meshes --------------------------------------------------------------------------------


class Attention(nn.Module):
    """Of one sentence, of which each rank of ``group`` has a slice; keys and values come from all of them."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.group = group
        self.into, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.into(x).chunk(3, dim=1)
        first = 0
        if self.group is not None:
            key, value = (all_gather_tensor_autograd(each.contiguous(), 0, self.group) for each in (key, value))
            first = self.group.rank() * len(x)
        is_past = torch.arange(len(key)) <= first + torch.arange(len(x)).unsqueeze(1)
        scores = (query @ key.T / 8**0.5).masked_fill(~is_past, -torch.inf)
        return self.out(scores.softmax(dim=1) @ value).square().mean()


def attends() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    everyone = mesh["dp", "cp"]._flatten("dp_cp").get_group()
    data, context = mesh["dp"].get_local_rank(), mesh["cp"].get_local_rank()
    for stage in (1, 3):
        model, alone = Attention(mesh["cp"].get_group()), Attention(None)
        options: dict[str, Any] = {"process_group": everyone, "max_grad_norm": MAX_NORM, "tuning": SMALL}
        optimizer = shardopt.ShardedAdamW(model, stage=stage, **OPTIONS["AdamW"], **options)
        theirs = torch.optim.AdamW(alone.parameters(), **OPTIONS["AdamW"])
        for step in range(STEPS):
            sentences = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            theirs.zero_grad()
            model(sentences[data][3 * context : 3 * context + 3]).backward()
            optimizer.step()
            (sum(map(alone, sentences)) / 2).backward()
            norm = nn.utils.clip_grad_norm_(alone.parameters(), MAX_NORM)
            theirs.step()
            assert optimizer.grad_norm == pytest.approx(float(norm), rel=1e-5)
            composed.assert_close(values(model, optimizer), dict(alone.state_dict()))
        optimizer.close()


def test_context_parallel(ranks: Pool) -> None:
    ranks.run(attends, world=4)


def trains_hybrid(stage: int) -> None:
    """Shards over two ranks, copies of them on two, each cut in two."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
    data = mesh["replicate", "shard"]
    rank = 2 * mesh["replicate"].get_local_rank() + mesh["shard"].get_local_rank()
    model = model_of("empty", mesh["tp"])
    options: dict[str, Any] = {"process_group": data, "max_grad_norm": MAX_NORM, "tuning": SMALL}
    optimizer = shardopt.ShardedAdamW(model, stage=stage, **OPTIONS["AdamW"], **options)
    for step, (norm, theirs) in enumerate(reference("empty", "AdamW", 4, MAX_NORM)[:2]):
        optimizer.zero_grad()
        loss(model, step, rank).backward()
        optimizer.step()
        assert optimizer.grad_norm == pytest.approx(norm, rel=1e-5)
        composed.assert_close(values(model, optimizer), theirs)
    optimizer.close()


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3])
def test_hybrid_mesh(ranks: Pool, stage: int) -> None:
    ranks.run(trains_hybrid, stage, world=8)


# -- several optimizers ------------------------------------------------------------------------------------------------


def trains_by_two(*stages: int) -> None:
    """Each optimizer has some params of the module, and knows of the others'."""
    mesh = mesh_of()
    rank, rates = mesh["dp"].get_local_rank(), (0.1, 0.02)
    for stage in stages:
        model, alone = model_of("blocks", mesh["tp"]), model_of("blocks")
        given: dict[str, Any] = {"module": model, "process_group": mesh["dp"].get_group(), "tuning": SMALL}
        ours = [
            shardopt.ShardedSGD(block.parameters(), lr=lr, momentum=0.9, stage=stage, **given)
            for block, lr in zip(model.children(), rates, strict=True)
        ]
        theirs = [
            torch.optim.SGD(block.parameters(), lr=lr, momentum=0.9)
            for block, lr in zip(alone.children(), rates, strict=True)
        ]
        for step in range(2):
            for each in (*ours, *theirs):
                each.zero_grad()
            loss(model, step, rank).backward()
            for number in range(2):
                (loss(alone, step, number) / 2).backward()
            for each in (*ours, *theirs):
                each.step()
            for each in ours:  # a momentum of fp32, of which each rank keeps a half; shards end with a whole block
                nbytes = 4 * sum(param.numel() for group in each.param_groups for param in group["params"])
                assert nbytes / 2 <= each.memory()["state"]["device"] <= nbytes / 2 + 7 * 4 * 256, stage
            with ours[0].unsharded(), ours[1].unsharded():
                found = {name: whole(param).clone() for name, param in model.named_parameters()}
            composed.assert_close(found, {name: param.detach() for name, param in alone.named_parameters()})
        ours[0].close()
        ours[1].close()
        found = {name: whole(param).clone() for name, param in model.named_parameters()}
        composed.assert_close(found, {name: param.detach() for name, param in alone.named_parameters()})


def test_two_optimizers_share_a_module(ranks: Pool) -> None:
    ranks.run(trains_by_two, 3, world=4)


@pytest.mark.slow
def test_two_optimizers_share_a_module_at_stages_1_and_2(ranks: Pool) -> None:
    ranks.run(trains_by_two, 1, 2, world=4)


# -- with pipelines ----------------------------------------------------------------------------------------------------


def trains_cube(stage: int) -> None:
    """Two stages of a pipeline, each on two data-parallel ranks, each of these cut in two."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    part, data, rank = mesh["pp"].get_local_rank(), mesh["dp"].get_group(), mesh["dp"].get_local_rank()
    model = composed.parallelized(composed.blocks(4)[2 * part : 2 * part + 2], mesh["tp"])
    options: dict[str, Any] = {"norm_group": dist.group.WORLD, "max_grad_norm": MAX_NORM, "tuning": SMALL}
    optimizer = shardopt.ShardedAdamW(model, stage=stage, process_group=data, **OPTIONS["AdamW"], **options)
    alone = composed.Reference(composed.blocks(4), 2, MAX_NORM)
    ours = PipelineStage(model, part, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    for step in range(STEPS):
        optimizer.zero_grad()
        schedule = Schedule1F1B(ours, n_microbatches=2, loss_fn=composed.loss_of)
        if part == 0:
            schedule.step(composed.batch(step, rank))
        else:
            schedule.step(target=torch.zeros(composed.BATCH))
        optimizer.step()
        assert optimizer.grad_norm == pytest.approx(alone.step(step), rel=1e-5)
        composed.assert_close(values(model, optimizer), alone.values())
    optimizer.close()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_tensor_x_pipeline_x_data(ranks: Pool, stage: int) -> None:
    ranks.run(trains_cube, stage, world=8)
