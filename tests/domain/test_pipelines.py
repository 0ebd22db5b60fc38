"""Pipelines of torch.distributed.pipelining with the module handed over, beside one process on the whole model."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.nn.parallel import DistributedDataParallel

import shardopt
from shardopt import Offload, ShardedOptimizer, Tuning
from shardopt.errors import DisagreementError, ShardoptError
from tests.support.composed import BATCH, OPTIONS, STATES, WIDTH, Reference, assert_close, batch, blocks, loss_of, whole
from tests.support.ranks import Pool

STEPS, MICRO_BATCHES = 4, 4
MAX_NORM = 0.05  # every step is clipped
SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero bubble": ScheduleInterleavedZeroBubble,
}
TUNING = Tuning(bucket_bytes=300, keep_below=0)


@dataclass(frozen=True)
class Setting:
    """One way to train."""

    stage: int
    schedule: str
    kind: str = "AdamW"
    options: dict[str, Any] = field(default_factory=dict)
    at_once: bool = False  # the schedule runs under no_sync()
    ddp: bool = False

    @property
    def is_multi(self) -> bool:
        return self.schedule in ("interleaved", "zero bubble")


class Pipeline:
    """This rank's stages of four blocks: two pipelines of two ranks."""

    def __init__(self, setting: Setting, mesh: DeviceMesh) -> None:
        self.setting, self.data_parallel = setting, mesh["dp"].get_group()
        self.rank, part, group = mesh["dp"].get_local_rank(), mesh["pp"].get_local_rank(), mesh["pp"].get_group()
        made = self.layers()
        size = 1 if setting.is_multi else 2
        self.numbers = [part, part + 2] if setting.is_multi else [part]
        modules: list[nn.Module] = [made[number * size : (number + 1) * size] for number in self.numbers]
        if setting.ddp:
            modules = [DistributedDataParallel(each, process_group=self.data_parallel) for each in modules]
        self.modules = modules
        self.model = nn.ModuleList(modules) if setting.is_multi else modules[0]
        options = {
            **OPTIONS[setting.kind],
            "max_grad_norm": MAX_NORM,
            "tuning": TUNING,
            **setting.options,
        }
        self.optimizer: ShardedOptimizer = getattr(shardopt, f"Sharded{setting.kind}")(
            self.model,
            stage=setting.stage,
            process_group=self.data_parallel,
            norm_group=dist.group.WORLD,
            **options,
        )
        count = 4 // size
        stages = [
            PipelineStage(module, number, count, torch.device("cpu"), group=group)
            for module, number in zip(modules, self.numbers, strict=True)
        ]
        given: Any = stages if setting.is_multi else stages[0]
        self.schedule = SCHEDULES[setting.schedule](given, MICRO_BATCHES, loss_fn=self.loss)
        self.is_first, self.is_last = 0 in self.numbers, count - 1 in self.numbers

    def layers(self) -> nn.Sequential:
        return blocks(4)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return loss_of(output)

    def batch(self, step: int) -> Tensor:
        return batch(step, self.rank)

    def target(self, step: int) -> Tensor:
        return torch.zeros(BATCH)

    def run(self, step: int) -> None:
        """The schedule, and what follows it."""
        inputs = (self.batch(step),) if self.is_first else ()
        target = {"target": self.target(step)} if self.is_last else {}
        pause: AbstractContextManager[None] = self.optimizer.no_sync() if self.setting.at_once else nullcontext()
        with pause:
            self.schedule.step(*inputs, **target)
        if self.setting.at_once:
            self.optimizer.reduce_gradients()

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Params by their name in the whole model: stages of a ``Sequential`` keep the numbers of their blocks."""
        for module in self.modules:
            yield from (module.module if isinstance(module, DistributedDataParallel) else module).named_parameters()

    def params(self) -> dict[str, Tensor]:
        """Whole. Collective."""
        with self.optimizer.unsharded():
            return {name: param.detach().clone() for name, param in self.named()}

    def values(self) -> dict[str, Tensor]:
        """Params and states, whole. Collective."""
        found = self.params()
        for name, param in self.named():
            for kind in STATES[self.setting.kind]:
                found[f"{name}.{kind}"] = whole(self.optimizer.state[param][kind]).clone()
        return found


def two_by_two() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))


def trains(*settings: Setting) -> None:
    mesh = two_by_two()
    for setting in settings:
        pipeline = Pipeline(setting, mesh)
        reference = Reference(blocks(4), 2, MAX_NORM, setting.kind)
        for step in range(STEPS):
            pipeline.optimizer.zero_grad()
            pipeline.run(step)
            pipeline.optimizer.step()
            norm = reference.step(step)
            assert norm > 2 * MAX_NORM
            assert pipeline.optimizer.grad_norm == pytest.approx(norm, rel=1e-5), (setting, step)
            found = pipeline.params() if step < STEPS - 1 else pipeline.values()
            assert_close(found, reference.values())
        units = pipeline.optimizer.units
        assert bool(units) == (setting.stage == 3)
        assert not setting.is_multi or {name[:2] for name in units} <= {"0.", "1."}
        pipeline.optimizer.close()


KEPT = Tuning(bucket_bytes=300, keep_below=0, reshard_after_forward=False)
MESSAGES = Tuning(bucket_bytes=300, keep_below=0, neighbours=False)
PAIRWISE = [
    Setting(1, "gpipe"),
    Setting(1, "1f1b", "SGD", at_once=True),
    Setting(1, "interleaved", ddp=True),
    Setting(2, "gpipe", "SGD", ddp=True),
    Setting(2, "1f1b", options={"offload": "cpu"}),
    Setting(2, "interleaved", "SGD", {"tuning": MESSAGES}),
    Setting(3, "gpipe", options={"tuning": KEPT}),
    Setting(3, "1f1b", "SGD", {"offload": Offload("cpu", gradients="cpu")}),
    Setting(3, "interleaved", options={"tuning": MESSAGES}),
]


def test_every_stage_with_every_schedule(ranks: Pool) -> None:
    ranks.run(trains, *PAIRWISE, world=4)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_all_of_them(ranks: Pool, stage: int) -> None:
    options: list[dict[str, Any]] = [
        {},
        {"offload": "cpu"},
        {"tuning": MESSAGES},
        {"tuning": KEPT},
        {"ema": 0.5},
    ]
    settings = [
        Setting(stage, schedule, kind, each, at_once, ddp)
        for schedule in ("gpipe", "1f1b", "interleaved")
        for kind in ("AdamW", "SGD")
        for at_once in ((False, True) if stage == 1 else (False,))
        for ddp in (False, True)
        for each in options
    ]
    ranks.run(trains, *settings, world=4)


# -- the same bits -----------------------------------------------------------------------------------------------------


class Adds(nn.Module):
    """Its gradient is that of the output, summed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randint(-8, 8, (37,)).float())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


def adds() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Adds() for _ in range(4)))


def integers(step: int, rank: int) -> Tensor:
    return torch.randint(-4, 4, (BATCH, 37), generator=torch.Generator().manual_seed(10 * step + rank)).float()


class Linear(Pipeline):
    """A loss that is linear in the params: sums of integers, which no order of adding changes."""

    def layers(self) -> nn.Sequential:
        return adds()

    def batch(self, step: int) -> Tensor:
        return integers(0, self.rank)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return (output * target).sum(1).mean()

    def target(self, step: int) -> Tensor:
        return integers(step, self.rank)


def same_bits(*settings: Setting) -> None:
    mesh = two_by_two()
    for setting in settings:
        pipeline, model = Linear(setting, mesh), adds()
        alone = getattr(shardopt, f"Sharded{setting.kind}")(
            model.parameters(),
            process_group=[dist.new_group([rank]) for rank in range(4)][dist.get_rank()],
            max_grad_norm=MAX_NORM,
            tuning=TUNING,
            **OPTIONS[setting.kind],
        )
        for step in range(STEPS):
            for each in (pipeline.optimizer, alone):
                each.zero_grad()
            pipeline.run(step)
            for rank in range(2):
                (pipeline.loss(model(integers(0, rank)), integers(step, rank)) / 2).backward()
            pipeline.optimizer.step()
            alone.step()
            assert pipeline.optimizer.grad_norm == alone.grad_norm
            theirs = dict(model.named_parameters())
            for name, param in pipeline.params().items():
                assert torch.equal(param, theirs[name]), (setting, step, name)
        pipeline.optimizer.close()
        alone.close()


def test_a_linear_loss_gives_the_same_bits(ranks: Pool) -> None:
    ranks.run(
        same_bits,
        Setting(1, "interleaved", "SGD", at_once=True),
        Setting(2, "gpipe", "AdamW"),
        Setting(3, "interleaved", "SGD"),
        world=4,
    )


# -- zero bubble -------------------------------------------------------------------------------------------------------


def zero_bubble() -> None:
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)
    mesh = two_by_two()
    for stage in (1, 2, 3):
        pipeline = Pipeline(Setting(stage, "zero bubble"), mesh)
        for _ in range(2):
            before = pipeline.params()
            pipeline.optimizer.zero_grad()
            pipeline.run(0)  # ends on all ranks
            with pytest.raises(ShardoptError, match="zero-bubble schedule at stage 1 under") as found:
                pipeline.optimizer.step()
            assert type(found.value) in (ShardoptError, DisagreementError)
            for name, param in pipeline.params().items():
                assert torch.equal(param, before[name])
        pipeline.optimizer.close()
    trains(Setting(1, "zero bubble", at_once=True))


def test_zero_bubble(ranks: Pool) -> None:
    """Gradients that no hook sees: reduced at once at stage 1, else an error on all ranks, in the step."""
    ranks.run(zero_bubble, world=4)


# -- decisions ---------------------------------------------------------------------------------------------------------


def decides_together(stage: int) -> None:
    pipeline = Pipeline(Setting(stage, "1f1b", options={"fused": True}), two_by_two())
    optimizer: Any = pipeline.optimizer
    pipeline.run(0)
    optimizer.step()
    before = pipeline.params()
    number = pipeline.numbers[0]
    for odd in range(2):  # what a GradScaler hands over: the gradients of one stage overflowed
        optimizer.zero_grad()
        pipeline.run(1)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(float(number == odd))
        optimizer.step()
        assert optimizer.updates == 1
        del optimizer.grad_scale, optimizer.found_inf
    for odd in range(2):
        optimizer.zero_grad()
        pipeline.run(1)
        if number == odd:
            next(param for _, param in pipeline.named()).grad.mul_(torch.inf)
        with pytest.warns(UserWarning, match="all ranks skipped this step"):
            optimizer.step()
    for name, param in pipeline.params().items():
        assert torch.equal(param, before[name])
    optimizer.zero_grad()
    pipeline.run(1)
    optimizer.step()
    assert optimizer.updates == 2
    optimizer.close()


@pytest.mark.parametrize("stage", [1, 3])
def test_all_stages_skip_together(ranks: Pool, stage: int) -> None:
    ranks.run(decides_together, stage, world=4)


class Scaled(Pipeline):
    scaler: ShardedGradScaler

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self.scaler.scale(loss_of(output))


def scales(*settings: Setting) -> None:
    """What overflows in one stage lowers the scale of all, and they go on together."""
    mesh = two_by_two()
    for setting in settings:
        pipeline, reference = Scaled(setting, mesh), Reference(blocks(4), 2, MAX_NORM, setting.kind)
        pipeline.scaler = ShardedGradScaler("cpu", init_scale=2.0**10)
        pipeline.scaler.scale(torch.zeros(()))
        for step in range(4):
            pipeline.optimizer.zero_grad()
            pipeline.run(step)
            if step in (1, 2) and pipeline.numbers[0] == step - 1:
                next(param for _, param in pipeline.named()).grad.mul_(torch.inf)
            pipeline.scaler.step(pipeline.optimizer)
            pipeline.scaler.update()
            if step not in (1, 2):
                reference.step(step)
            assert pipeline.scaler.get_scale() == 2.0 ** (10, 9, 8, 8)[step]
            assert_close(pipeline.params(), reference.values())
        pipeline.optimizer.close()


def test_scalers_of_all_stages(ranks: Pool) -> None:
    ranks.run(scales, Setting(3, "interleaved"), world=4)


# -- tied weights ------------------------------------------------------------------------------------------------------


class Head(nn.Module):
    """Multiplies by the transpose of the first layer's weight."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def tied(copies: bool) -> nn.Sequential:
    torch.manual_seed(0)
    first, inner = nn.Linear(WIDTH, WIDTH, bias=False), [*blocks(2)]
    weight = nn.Parameter(first.weight.detach().clone()) if copies else first.weight
    return nn.Sequential(first, *inner, Head(weight))


class Tied(Pipeline):
    def layers(self) -> nn.Sequential:
        return tied(copies=True)


def trains_tied(*settings: Setting) -> None:
    mesh = two_by_two()
    for setting in settings:
        pipeline = Tied(setting, mesh)
        reference = Reference(tied(copies=False), 2, MAX_NORM, setting.kind)
        ends = {"0.weight", "3.weight"}
        (own,) = [param for name, param in pipeline.named() if name in ends]
        for step in range(STEPS):
            pipeline.optimizer.zero_grad()
            pipeline.run(step)
            pipeline.optimizer.sum_tied(own, mesh["pp"].get_group())
            pipeline.optimizer.step()
            assert pipeline.optimizer.grad_norm == pytest.approx(reference.step(step), rel=1e-5)
            found = {"0.weight" if name in ends else name: param for name, param in pipeline.params().items()}
            assert_close(found, reference.values())
        pipeline.optimizer.zero_grad()
        pipeline.optimizer.sum_tied(own, mesh["pp"].get_group())
        assert own.grad is None  # no copy has one
        with pytest.raises(ShardoptError, match="that no param group of this optimizer has"):
            pipeline.optimizer.sum_tied(nn.Parameter(torch.ones(1)), mesh["pp"].get_group())
        pipeline.optimizer.close()


def test_weights_that_two_stages_hold(ranks: Pool) -> None:
    ranks.run(trains_tied, Setting(1, "gpipe", at_once=True), Setting(3, "1f1b", "SGD"), world=4)


def sums_what_a_script_reduced() -> None:
    """Without the module gradients are whole, and the script's own."""
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    param = nn.Parameter(torch.zeros(3))
    optimizer = shardopt.ShardedSGD([param], lr=1.0, process_group=alone)
    param.grad = torch.full((3,), 1.0 + dist.get_rank())
    optimizer.sum_tied(param, dist.group.WORLD)
    optimizer.step()
    assert param.tolist() == [-3.0] * 3


def test_whole_gradients_of_tied_weights(ranks: Pool) -> None:
    ranks.run(sums_what_a_script_reduced, world=2)


# -- what a backward is ------------------------------------------------------------------------------------------------


def each_graph_knows(stage: int) -> None:
    """The backward of a micro-batch is a round, or not, by what its own forward was, not by the last one."""
    model, group = nn.Linear(3, 2), dist.group.WORLD
    optimizer = shardopt.ShardedSGD(model, lr=1.0, stage=stage, process_group=group, norm_group=group)
    with optimizer.no_sync():
        first = model(torch.full((1, 3), 1.0 + dist.get_rank())).sum()
    second = model(torch.full((1, 3), 10.0)).sum()
    first.backward()
    assert isinstance(model.weight.grad, shardopt.Part) == (stage > 1)
    third = model(torch.full((1, 3), 100.0)).sum()
    with optimizer.no_sync():
        second.backward()
        model(torch.ones(1, 3))
        third.backward()
    assert bool((whole(model.weight.grad) == 111.5).all())
    optimizer.close()


@pytest.mark.parametrize("stage", [1, 2])
def test_each_graph_knows_whether_it_is_reduced(ranks: Pool, stage: int) -> None:
    ranks.run(each_graph_knows, stage, world=2)


def reduces_its_stage() -> None:
    """Of two stages on a rank, a backward moves the buckets of one."""
    pipeline = Pipeline(Setting(2, "interleaved"), two_by_two())
    for step in range(2):
        pipeline.optimizer.zero_grad()
        before = pipeline.optimizer.engine.traffic().get("gradients", 0)
        pipeline.run(step)
        buckets = pipeline.optimizer.engine.domain.reducer.buckets
        once = sum(bucket.buffer_numel for bucket in buckets) * 4 // 2  # the other rank's half, in bytes
        assert pipeline.optimizer.engine.traffic()["gradients"] - before == MICRO_BATCHES * once
        pipeline.optimizer.step()
    pipeline.optimizer.close()


def graphs_of_two(offload: Offload | None, graphs: Sequence[Sequence[bool]]) -> None:
    """Stages that run in one graph are reduced right, too.

    Args:
        graphs: by step, of each backward, whether it runs through both stages.
    """
    torch.manual_seed(0)
    model, theirs = (nn.ModuleList(nn.Linear(3, 3) for _ in range(2)) for _ in range(2))
    theirs.load_state_dict(model.state_dict())
    optimizer = shardopt.ShardedSGD(model, lr=0.01, stage=2, offload=offload, tuning=TUNING)
    torch_optimizer = torch.optim.SGD(theirs.parameters(), lr=0.01)
    world = dist.get_world_size()

    def loss_of_two(modules: nn.ModuleList, seed: int, both: bool) -> Tensor:
        hidden = modules[0](torch.randn(2, 3, generator=torch.Generator().manual_seed(seed)))
        return (modules[1](hidden) if both else hidden).square().sum()

    for step, backwards in enumerate(graphs):
        for each in (optimizer, torch_optimizer):
            each.zero_grad()
        for number, both in enumerate(backwards):
            seed = 100 * step + 10 * number
            loss_of_two(model, seed + dist.get_rank(), both).backward()
            for rank in range(world):
                (loss_of_two(theirs, seed + rank, both) / world).backward()
            if step == number == 0:  # its sum is stale, beside one that is not
                for modules in (model, theirs):
                    modules[0].bias.grad = None
            for param, other in zip(model.parameters(), theirs.parameters(), strict=True):
                if other.grad is None:
                    assert param.grad is None
                    continue
                assert float(param.grad.norm()) == pytest.approx(float(other.grad.norm()), rel=1e-5)
                torch.testing.assert_close(whole(param.grad), other.grad)
        optimizer.step()
        torch_optimizer.step()
    optimizer.close()


def test_a_backward_reduces_the_buckets_of_its_stage(ranks: Pool) -> None:
    ranks.run(reduces_its_stage, world=4)
    for offload in (None, Offload("cpu", gradients="cpu")):
        ranks.run(graphs_of_two, offload, [(False, True, True)], world=2)
        ranks.run(graphs_of_two, offload, [(False,), (True, False, True)], world=2)


def stays_gathered(neighbours: bool) -> None:
    """``reshard_after_forward=False``: each unit travels once a step, whatever the number of micro-batches."""
    mesh = two_by_two()
    travelled = {}
    for stays in (True, False):
        tuning = Tuning(bucket_bytes=300, keep_below=0, reshard_after_forward=not stays, neighbours=neighbours)
        pipeline = Pipeline(Setting(3, "interleaved", options={"tuning": tuning}), mesh)
        for step in range(3):
            pipeline.optimizer.zero_grad()
            before = pipeline.optimizer.engine.traffic().get("params", 0)
            pipeline.run(step)
            travelled[stays] = pipeline.optimizer.engine.traffic()["params"] - before
            gatherer = pipeline.optimizer.engine.domain.gatherer
            assert gatherer.gathered == (sorted(gatherer.units) if stays else [])
            pipeline.optimizer.step()
            assert not gatherer.gathered
        once = sum(unit.nbytes for unit in gatherer.units.values()) // 2  # the other rank's half
        pipeline.optimizer.close()
    assert travelled[True] == once
    assert travelled[False] > 4 * once


def test_units_stay_gathered_over_a_schedule(ranks: Pool) -> None:
    ranks.run(stays_gathered, True, world=4)
    ranks.run(stays_gathered, False, world=4)
