"""Tensor-parallel models with experts hand over their module: every stage, beside torch.optim in one process.

=======  =======================================================================================================
cut      ranks 0 and 2 have other experts than each other; tensor parallelism cuts each expert, as all else
folded   ranks 0 and 1 have other experts than each other, whole; ranks 0 and 2 the same
spread   each of the four ranks has other experts
stacked  the same, of one DTensor over all four
=======  =======================================================================================================
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardopt
from shardopt import ShardedOptimizer, Tuning
from shardopt.errors import BindingError, DisagreementError
from tests.support.composed import OPTIONS, STATES, WIDTH, Block, assert_close, batch, loss_of, parallelized, whole
from tests.support.moe import NUM, Expert, Mixture, WholeModel, close, groups_of, is_of, name_of
from tests.support.ranks import Pool

STEPS, MAX_NORM = 4, 0.05  # every step is clipped
SMALL = Tuning(bucket_bytes=300, keep_below=0, live_bytes=0)
LAYOUTS = ("cut", "folded", "spread", "stacked")


class SlicedMixture(Mixture):
    """Where ranks of ``mesh`` have other experts, each sends its slice of the tokens, which all of them have."""

    mesh: DeviceMesh | None = None

    def exchange(self, x: Tensor, open_: Tensor) -> Tensor:
        if self.mesh is None:
            return super().exchange(x, open_)
        whole_given = (DTensor.from_local(each, self.mesh, [Replicate()], run_check=False) for each in (x, open_))
        given = (each.redistribute(placements=[Shard(0)]).to_local() for each in whole_given)
        done = DTensor.from_local(super().exchange(*given), self.mesh, [Shard(0)], run_check=False)
        return done.redistribute(placements=[Replicate()]).to_local()


class Stack(nn.Module):
    """All experts of a layer are one param."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(NUM, WIDTH, WIDTH))

    def forward(self, number: int, x: Tensor) -> Tensor:
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        return torch.tanh(x @ weight[number])


class StackedMixture(SlicedMixture):
    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__(group)
        self.experts = Stack()

    def exchange(self, x: Tensor, open_: Tensor) -> Tensor:
        return super().exchange(x, open_) + self.experts(0, x[:0]).sum()  # a rank without a token has zeros

    def expert(self, number: int, x: Tensor) -> Tensor:
        return self.experts(number, x)


class Layer(nn.Module):
    def __init__(self, kind: type[Mixture], group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.dense, self.mixture = Block(), kind(group)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dense(x)
        return x + self.mixture(x)


def layers(layout: str, group: dist.ProcessGroup | None = None, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    kind = StackedMixture if layout == "stacked" else SlicedMixture
    return nn.Sequential(Layer(kind, group), Layer(kind, group))


class Experts:
    """Four ranks; 0 and 1 have one batch, 2 and 3 another."""

    def __init__(self, layout: str) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        alone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("ep", "alone"))
        self.layout, self.mesh, self.rank = layout, mesh, mesh["dp"].get_local_rank()
        self.everyone, self.data = alone["ep"], mesh["dp"].get_group()
        groups = {"cut": self.data, "folded": mesh["tp"].get_group()}
        self.group = groups.get(layout, alone["ep"].get_group())
        self.copies = self.data if layout == "folded" else alone["alone"].get_group()

    def model(self, seed: int = 0) -> nn.Module:
        model = parallelized(layers(self.layout, self.group, seed), self.mesh["tp"])
        for module in model.modules():
            if isinstance(module, Expert) and self.layout == "cut":
                plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}  # 6 and 5 rows
                parallelize_module(module, self.mesh["tp"], plan)
            elif isinstance(module, SlicedMixture) and self.layout != "cut":
                module.mesh = self.mesh["tp"]
            elif isinstance(module, Stack):
                placed = distribute_tensor(module.weight.detach(), self.everyone, [Shard(0)])
                module.weight = nn.Parameter(placed)
        return model

    def optimizer(self, kind: str, model: nn.Module, **options: Any) -> ShardedOptimizer:
        given = {**OPTIONS[kind], "max_grad_norm": MAX_NORM, "tuning": SMALL, "process_group": self.data, **options}
        if self.layout == "stacked":
            given["norm_group"] = dist.group.WORLD
        made: ShardedOptimizer = getattr(shardopt, f"Sharded{kind}")(
            groups_of(model, self.copies), module=model, **given
        )
        return made

    def name(self, name: str) -> str:
        return name if self.layout == "stacked" else name_of(name, self.group)

    def names(self, names: Sequence[str]) -> set[str]:
        return {name for name in names if self.layout == "stacked" or is_of(name, self.group)}

    def values(self, kind: str, model: nn.Module, optimizer: ShardedOptimizer) -> dict[str, Tensor]:
        """Params and states, whole. Collective."""
        found = {
            f"{self.name(name)}.{each}": whole(optimizer.state[param][each])
            for name, param in model.named_parameters()
            for each in STATES[kind]
            if param in optimizer.state
        }
        with optimizer.unsharded():
            return found | {self.name(name): whole(param).clone() for name, param in model.named_parameters()}


def closed(step: int, rank: int) -> int:
    """The expert that gets no token of a batch; every third step of neither batch."""
    return step % NUM if step % 3 == 0 else (step + rank) % NUM


def trains(num_steps: int, stage: int, layout: str, kind: str) -> None:
    experts = Experts(layout)
    reference = WholeModel(layers(layout), 2, MAX_NORM, kind, closed)
    model = experts.model()
    optimizer = experts.optimizer(kind, model, stage=stage)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=kind == "SGD")
    for step in range(num_steps):
        close(model, closed(step, experts.rank))
        optimizer.zero_grad()
        scaler.scale(loss_of(model(batch(step, experts.rank)))).backward()
        norm = reference.step(step)
        assert norm > 2 * MAX_NORM
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.grad_norm == pytest.approx(norm, rel=1e-5)
        found, expected = experts.values(kind, model, optimizer), reference.values()
        assert_close(found, expected)
        assert found.keys() == experts.names([*expected])  # an expert that no rank called has no state yet
    assert any("experts 1" in name for name in optimizer.units) == (stage == 3)
    optimizer.close()


def trains_all(num_steps: int, rows: Sequence[tuple[int, str, str]]) -> None:
    for row in rows:
        try:
            trains(num_steps, *row)
        except Exception as error:
            error.add_note(f"in {row}")
            raise


def test_trains_as_one_process(ranks: Pool) -> None:
    ranks.run(trains_all, 3, [(3, "folded", "AdamW")], world=4)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_of_them(ranks: Pool, layout: str) -> None:
    ranks.run(trains_all, STEPS, [*product((0, 1, 2, 3), (layout,), ("AdamW", "SGD"))], world=4)


# -- decisions ---------------------------------------------------------------------------------------------------------


def decides_together(stage: int, layout: str) -> None:
    """What an expert of one rank meets, ranks of its tensor mesh hear of, and those of its batch."""
    experts = Experts(layout)
    model, odd = experts.model(), dist.get_rank() == 1
    optimizer = experts.optimizer("SGD", model, stage=stage)

    def backward() -> None:
        optimizer.zero_grad()
        loss_of(model(batch(0, experts.rank))).backward()

    backward()
    optimizer.step()
    before = experts.values("SGD", model, optimizer)
    backward()
    called = [param for name, param in model.named_parameters() if ".experts." in name and param.grad is not None]
    spoils = [param.register_hook(lambda grad: grad * (torch.inf if odd else 1.0)) for param in called]
    assert called or not odd
    backward()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 1.0
    backward()
    with pytest.warns(UserWarning, match="all ranks skipped this step"):
        optimizer.step()
    for each in spoils:
        each.remove()
    after = experts.values("SGD", model, optimizer)
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    optimizer.close()


@pytest.mark.parametrize(("stage", "layout"), [(1, "spread"), pytest.param(3, "cut", marks=pytest.mark.slow)])
def test_all_ranks_decide_together(ranks: Pool, stage: int, layout: str) -> None:
    ranks.run(decides_together, stage, layout, world=4)


def refuses() -> None:
    """Experts that may be copies on the tensor mesh: on ranks 0 and 1 they begin alike."""
    experts = Experts("folded")
    experts.group = [dist.new_group([rank]) for rank in range(4)][dist.get_rank()]  # so each rank has all of them
    model = experts.model()
    optimizer = experts.optimizer("SGD", model)
    with pytest.raises(BindingError, match=r"Replicate\(\)\) if they are copies.* those of ranks \[.\]"):
        optimizer.bind()
    optimizer.close()
    # Of two ranks alone: the others hear of it.
    model = experts.model()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if ".experts." in name and dist.get_rank() > 1:
                param.add_(dist.get_rank())
    alone = [dist.new_group([rank]) for rank in range(4)][dist.get_rank()]
    experts.copies = alone
    optimizer = experts.optimizer("SGD", model)
    with pytest.raises(BindingError if dist.get_rank() < 2 else DisagreementError, match="are the same"):
        optimizer.bind()
    optimizer.close()


def test_experts_that_may_be_copies_are_refused(ranks: Pool) -> None:
    ranks.run(refuses, world=4)


def takes_part_without_experts() -> None:
    """Of two ranks of a tensor mesh, the first has an expert, and the second has none."""
    mesh, rank = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")), dist.get_rank()
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    model[0].weight = nn.Parameter(distribute_tensor(torch.ones(8, 8), mesh["tp"], [Shard(0)]))
    groups: list[dict[str, Any]] = [{"params": [model[0].weight]}]
    alone = mesh["dp"].get_group()
    if rank == 0:
        model.append(nn.Linear(8, 8, bias=False))
        groups.append({"params": [model[1].weight], "process_group": alone})
    optimizer = shardopt.ShardedSGD(groups, module=model, process_group=alone, max_grad_norm=1.0)
    optimizer.bind()
    x = torch.ones(2, 8)
    loss = (x @ model[0].weight.to_local().T).sum()
    (loss if rank else loss + model[1](x).sum()).backward()
    optimizer.step()
    assert optimizer.grad_norm == pytest.approx((4 * 8 * (8 + 8)) ** 0.5)  # each element of each gradient is 2
    optimizer.close()


def test_a_rank_of_a_tensor_mesh_may_have_no_experts(ranks: Pool) -> None:
    ranks.run(takes_part_without_experts, world=2)
