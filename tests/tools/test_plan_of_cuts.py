"""The plan of a model that is cut, against what its ranks hold, and receive from the others of each group."""

import itertools
import runpy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from shardopt import ShardedAdafactor, ShardedAdamW, ShardedMuon, ShardedOptimizer, Tuning
from shardopt.config import Options
from shardopt.domain.model_units import units_of
from shardopt.tools.cut import Cut, LocalParam, params_by_stage
from shardopt.tools.decoder import transformer
from shardopt.tools.need import Need
from shardopt.tools.plan import Planner, groups_for, plan
from shardopt.tools.ways import Way
from tests.support.paths import ROOT
from tests.support.ranks import Pool
from tests.support.wire import Moved, counting

CLOSE = 0.01  # padding of shards to blocks, agreements and headers of messages
FP32 = torch.float32
MICRO_BATCHES = 4
ADAMW, MUON = ShardedAdamW([torch.zeros(1)]), ShardedMuon([torch.zeros(1, 1)])


SHARDED = Tuning(keep_below=0)
_names = itertools.count()


@dataclass(frozen=True)
class Setting:
    """A training on four ranks; each rank has one data-parallel peer, but for experts, which all ranks are."""

    cut: Cut
    stage: Any
    tuning: Tuning = SHARDED
    kind: Callable[..., ShardedOptimizer] = ShardedAdamW

    @property
    def way(self) -> Way:
        return Way(self.stage, True, FP32)


def need_of(whole: nn.Module, setting: Setting, stage: int = 0) -> Need:
    given, like = Options(tuning=setting.tuning), setting.kind([torch.zeros(1)])
    return Planner(whole, like.rule, groups_for(whole, like), 4, given, setting.cut).needs(setting.way)[stage]


def held(opt: ShardedOptimizer) -> dict[str, int]:
    memory = opt.memory()
    return {kind: memory[kind].get("device", 0) for kind in ("param", "gradient", "master", "state")}


def of_plan(need: Need) -> dict[str, int]:
    return {kind: need.bytes[kind].get("device", 0) for kind in ("param", "gradient", "master", "state")}


def example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "examples" / f"{name}.py"))


def in_a_pipeline(made: dict[str, Any], setting: Setting) -> tuple[Need, dict[str, int], int]:
    """Of tensor or pipeline parallelism: what is planned, held, and received from the data-parallel peer."""
    cut = setting.cut
    sizes = {"pp": cut.pipeline, "dp": 2, "tp": cut.tensor}
    config = made["Config"]("", width=128, **sizes)
    # Torch keeps what it found of DTensors by the equality of meshes, for all jobs of a process.
    pp, dp, tp = (f"{kind}{next(_names)}" for kind in sizes)
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=(pp, dp, tp))
    number, group = mesh[pp].get_local_rank(), mesh[dp].get_group()
    whole, model = made["Stage"](replace(config, pp=1), 0), made["Stage"](config, number)
    if cut.tensor > 1:
        made["divide"](model, mesh[tp])
    opt = setting.kind(
        model, stage=setting.stage, process_group=group, norm_group=dist.group.WORLD, tuning=setting.tuning
    )
    stage = PipelineStage(model, number, cut.pipeline, torch.device("cpu"), group=mesh[pp].get_group())
    schedule = Schedule1F1B(stage, cut.micro_batches, loss_fn=made["loss_of"])

    def backward() -> None:
        tokens = made["batch_of"](config, 0)
        schedule.step(*((tokens[:, :-1],) if model.is_first else ()), target=tokens[:, 1:] if model.is_last else None)

    moved = second_step(opt, cut, backward)
    (peer,) = {*dist.get_process_group_ranks(group)} - {dist.get_rank()}
    found = need_of(whole, setting, number), held(opt), moved.by_rank[peer]
    opt.close()
    return found


def with_experts(made: dict[str, Any], setting: Setting) -> tuple[Need, dict[str, int], int, int]:
    """What is planned, held, and received from the rank of the same experts, and from the one without tokens for it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "experts"))
    copies = mesh["copies"].get_group()
    alone = [dist.new_group([rank]) for rank in range(4)][dist.get_rank()]
    config = made["Config"]("", width=256, experts=4)
    whole, model = (made["Decoder"](config, group) for group in (alone, mesh["experts"].get_group()))
    spread = {param for name, param in model.named_parameters() if ".experts." in name}
    groups: list[dict[str, Any]] = [
        {"params": [param for param in model.parameters() if param not in spread]},
        {"params": [param for param in model.parameters() if param in spread], "process_group": copies},
    ]
    opt = ShardedAdamW(groups, module=model, stage=setting.stage, tuning=setting.tuning)

    def backward() -> None:
        model(made["batch_of"](config, 0)[:, :-1]).square().mean().backward()

    moved = second_step(opt, setting.cut, backward)
    (copy,) = {*dist.get_process_group_ranks(copies)} - {dist.get_rank()}
    (opposite,) = {*range(4)} - {copy} - {*dist.get_process_group_ranks(mesh["experts"].get_group())}
    found = need_of(whole, setting), held(opt), moved.by_rank[copy], moved.by_rank[opposite]
    opt.close()
    return found


def second_step(opt: ShardedOptimizer, cut: Cut, backward: Callable[[], None]) -> Moved:
    """The first one shares weights, and shows the order of units."""
    for _ in range(2):
        opt.zero_grad()
        with counting() as moved:
            with opt.no_sync() if cut.at_once else nullcontext():
                backward()
            if cut.at_once:
                opt.reduce_gradients()
            opt.step()
    return moved


def in_pipelines(settings: Sequence[Setting]) -> list[tuple[Need, dict[str, int], int]]:
    made = example("three_dimensions")
    return [in_a_pipeline(made, setting) for setting in settings]


def with_all_experts(settings: Sequence[Setting]) -> list[tuple[Need, dict[str, int], int, int]]:
    made = example("experts")
    return [with_experts(made, setting) for setting in settings]


TENSOR, EXPERTS = Cut(tensor=2), Cut(experts=2)
PIPELINE = Cut(pipeline=2, micro_batches=MICRO_BATCHES)
AT_ONCE = Cut(pipeline=2, micro_batches=MICRO_BATCHES, at_once=True)
TUNINGS = (
    SHARDED,
    Tuning(keep_below=0, neighbours=False),
    Tuning(keep_below=0, reshard_after_forward=False),
    Tuning(),
)


def check_pipelines(pool: Pool, settings: Sequence[Setting]) -> None:
    for by_setting in pool.run(in_pipelines, settings, world=4):
        for setting, (need, held, received) in zip(settings, by_setting, strict=True):
            assert held == of_plan(need), setting
            assert need.wire.keys() == {"data"}
            assert received == pytest.approx(need.wire["data"], rel=CLOSE), f"{setting}: {received / need.wire['data']}"


def check_experts(pool: Pool, settings: Sequence[Setting]) -> None:
    for by_setting in pool.run(with_all_experts, settings, world=4):
        for setting, (need, held, of_copy, of_opposite) in zip(settings, by_setting, strict=True):
            assert held == of_plan(need), setting
            data, experts = need.wire["data"], need.wire["experts"]
            assert of_opposite == pytest.approx(data / 3, rel=CLOSE), f"{setting}: {3 * of_opposite / data}"
            assert of_copy == pytest.approx(data / 3 + experts, rel=CLOSE), f"{setting}: {of_copy - of_opposite}"


def test_plans_of_a_pipeline(ranks: Pool) -> None:
    check_pipelines(ranks, [Setting(PIPELINE, 3)])


def test_means_over_rows_and_columns_are_whole_on_each_tensor_rank(ranks: Pool) -> None:
    setting = Setting(TENSOR, 2, kind=ShardedAdafactor)
    for ((need, held, _),) in ranks.run(in_pipelines, [setting], world=4):
        assert held == of_plan(need)


@pytest.mark.slow
@pytest.mark.parametrize("tuning", TUNINGS)
def test_plans_of_all_cuts(ranks: Pool, tuning: Tuning) -> None:
    # Gathers by messages in a pipeline at stage 3 are not planned to 1 %.
    stages = range(4 if tuning.neighbours else 3)
    check_pipelines(ranks, [Setting(cut, stage, tuning) for cut in (TENSOR, PIPELINE, AT_ONCE) for stage in stages])


@pytest.mark.slow
@pytest.mark.parametrize("tuning", [each for each in TUNINGS if each.neighbours])
def test_plans_of_all_experts(ranks: Pool, tuning: Tuning) -> None:
    check_experts(ranks, [Setting(EXPERTS, stage, tuning) for stage in range(4)])


def test_muon_in_a_pipeline() -> None:
    """Of each stage its own matrices: the embedding, which AdamW takes, is at the first one."""
    model, way, cut = transformer(10**6), Way(2, True, FP32), Cut(pipeline=2)
    alone = Options(tuning=Tuning(bucket_bytes=1))  # each matrix has a bucket, and is cut
    for stage in range(2):
        need, plain = (
            Planner(model, each.rule, groups_for(model, each), 8, alone, cut).needs(way)[stage]
            for each in (MUON, ADAMW)
        )
        matrices = sum(param.numel() for block in halves_of(model)[stage] for param in block if param.ndim == 2)
        states = 4 * matrices + 8 * (need.numel - matrices)
        assert need.formula == f"4 + {round(4 + states / need.numel, 2):g}/N"
        assert sum(need.bytes["state"].values()) == pytest.approx(states / 4, rel=CLOSE)
        assert need.wire["data"] - plain.wire["data"] == 4 * matrices * 3 // 16


def halves_of(model: nn.Module) -> list[list[nn.ParameterList]]:
    blocks: list[Any] = list(model.children())[1:]
    return [blocks[: len(blocks) // 2], blocks[len(blocks) // 2 :]]


class Sparse(nn.Module):
    """A router, and experts: five modules, or one stacked weight of all five."""

    def __init__(self, stacked: bool) -> None:
        super().__init__()
        self.router = nn.Linear(4, 5, bias=False)
        self.experts = nn.Module() if stacked else nn.ModuleList(nn.Linear(4, 3, bias=False) for _ in range(5))
        if stacked:
            self.experts.weight = nn.Parameter(torch.zeros(5, 3, 4))


def test_the_first_rank_has_most_experts() -> None:
    """Of five, two ranks have three and two: what is planned is the rank that has three."""
    for stacked, experts in ((False, [(3, 4)] * 3), (True, [(3, 3, 4)])):
        model = Sparse(stacked)
        (found,) = params_by_stage(model, units_of(model), Cut(experts=2))
        assert found[model.router.weight] == LocalParam(torch.Size([5, 4]), False)
        assert [each.shape for each in found.values() if each.is_expert] == experts
        assert len(found) == 1 + len(experts)


def test_what_cannot_be_cut() -> None:
    for cut, ranks, words in (
        (Cut(tensor=2), 3, "2 divides"),
        (Cut(pipeline=9), 9, "at most"),
        (Cut(experts=2), 2, "called experts"),
    ):
        with pytest.raises(ValueError, match=words):
            plan(transformer(10**5), ADAMW, ranks, Way(1, True, FP32), cut=cut)
    with pytest.raises(ValueError, match="looks at whole matrices"):
        plan(transformer(10**5), MUON, 2, Way(1, True, FP32), cut=Cut(tensor=2))
    with pytest.raises(ValueError, match="tensor or for experts"):
        Cut(tensor=2, experts=2)
