"""Sums of gradients kept in bf16: the bits of an oracle that adds in fp32, in rank order, and rounds once a backward.

Gradients are random numbers of the param's dtype: sums over ranks and backwards are no bf16 numbers, and often ties;
those of fp32 params, beside, show the order of the ranks.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardopt
from shardopt import BindingError, DisagreementError, Offload, ShardedSGD, Tuning
from shardopt.kernels.tables import BLOCK
from shardopt.partition.comm import reduce_scatter as scatter
from shardopt.partition.comm.group import Ranks
from tests.support.ranks import Pool
from tests.support.training import raises, raw

BF16, FP32 = torch.bfloat16, torch.float32
STAGES = (0, 1, 2, 3)
# The last one fills a bucket, which is reduced where the gradient lies.
SHAPES: tuple[tuple[int, ...], ...] = ((300,), (1,), (), (0, 3), (16, 33), (257,), (7, 100), (12 * BLOCK,))
MAX_NORM = 3.0

# -- the oracle --------------------------------------------------------------------------------------------------------


def nearest(values: Tensor) -> Tensor:
    """fp32 values rounded to bf16 ones, ties to even, by integers: no cast of torch's is trusted with it."""
    bits = values.contiguous().view(torch.int32).long()
    cut, rest = bits >> 16, bits & 0xFFFF
    up = (rest > 0x8000) | ((rest == 0x8000) & (cut & 1 == 1))
    return ((cut + up.long()) << 16).int().view(FP32).view(values.shape)


def held_as(param: Parameter) -> Callable[[Tensor], Tensor]:
    """Rounds fp32 values to those that the param's dtype has."""
    return nearest if param.dtype is BF16 else Tensor.clone


def own_gradient(param: Parameter, index: int, step: int, turn: int, rank: int) -> Tensor:
    """Of one rank in one backward, in fp32."""
    generator = torch.Generator().manual_seed(1000 * index + 100 * step + 10 * turn + rank)
    return held_as(param)(torch.randn(param.shape, generator=generator))


@dataclass(frozen=True)
class Expected:
    """Of one param."""

    kept: Tensor  # the sum over ranks and backwards
    mean: Tensor


def expected(setting: "Setting", param: Parameter, index: int, step: int, syncs: Sequence[bool]) -> Expected:
    """Where ranks hold two copies of the states: summed within each copy, then over copies."""
    world, kept_as = dist.get_world_size(), held_as(param)
    size = world // 2 if setting.hybrid else world
    kept: Tensor | None = None
    since = 0
    for turn, is_reduced in enumerate(syncs):
        if not is_reduced:
            continue
        own = [own_gradient(param, index, step, since, rank) for rank in range(world)]
        for later in range(since + 1, turn + 1):  # autograd adds in the param's dtype
            own = [kept_as(each + own_gradient(param, index, step, later, rank)) for rank, each in enumerate(own)]
        if setting.reduce_dtype is not None:
            own = [each.to(setting.reduce_dtype).float() for each in own]
        total = summed([summed(own[first : first + size]) for first in range(0, world, size)])
        kept, since = kept_as(total if kept is None else kept + total), turn + 1
    return Expected(kept, kept_as(kept / world))


def summed(terms: Sequence[Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


@contextmanager
def in_small_chunks() -> Iterator[None]:
    """Sums 300 elements at a time. Chunks are cached by length: this process may have used some in an earlier test."""
    with patch.object(scatter, "CHUNK", 300):
        scatter.chunks.cache_clear()
        try:
            yield
        finally:
            scatter.chunks.cache_clear()


# -- what is trained ---------------------------------------------------------------------------------------------------


class Sums(nn.Module):
    """Params whose gradients are given."""

    def __init__(self, mixed: bool = True):
        super().__init__()
        torch.manual_seed(0)
        dtypes = [FP32 if mixed and index % 3 == 2 else BF16 for index in range(len(SHAPES))]
        self.cells = nn.ModuleList(Cell(shape, dtype) for shape, dtype in zip(SHAPES, dtypes, strict=True))

    def forward(self, step: int, turn: int, rank: int) -> Tensor:
        x = torch.zeros(())
        for index, cell in enumerate(self.cells):
            x = cell(x, own_gradient(cell.weight, index, step, turn, rank))
        return x


class Cell(nn.Module):
    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype):
        super().__init__()
        self.weight = Parameter(torch.randn(shape).to(dtype))

    def forward(self, x: Tensor, gradient: Tensor) -> Tensor:
        return x + (self.weight * gradient.to(self.weight.dtype)).sum().float()


@dataclass(frozen=True)
class Setting:
    stage: int
    neighbours: bool = True
    syncs: tuple[bool, ...] = (True, True, True)
    reduce_dtype: torch.dtype | None = None
    offload: Offload | None = None
    hybrid: bool = False
    collectives: bool = False  # gloo's, in place of the messages that are faster

    def optimizer(self, model: nn.Module, **more: Any) -> ShardedSGD:
        tuning = Tuning(bucket_bytes=3000, keep_below=100, neighbours=self.neighbours)
        group = init_device_mesh("cpu", (2, 2)) if self.hybrid else None
        options = {"reduce_dtype": self.reduce_dtype, "offload": self.offload, "process_group": group}
        return ShardedSGD(model, lr=1.0, stage=self.stage, gradient_format="bf16", tuning=tuning, **options, **more)


def is_exact(setting: Setting) -> None:
    """Every backward's sums, the means that parts show, norms, clipping, and the params behind the step."""
    collectives = patch.object(Ranks, "has_collectives", lambda self, _: self.group is not None)
    with collectives if setting.collectives else nullcontext(), in_small_chunks():
        model = Sums()
        optimizer = setting.optimizer(model, max_grad_norm=1e6)  # looks at norms, and clips nothing
        masters = [param.detach().float() for param in model.parameters()]
        for step in range(3):
            found = accumulated(setting, model, optimizer, step)
            check_norms(setting, model, found)
            means = [each.mean for each in found]
            if step == 1:
                check_whole(setting, model, means)
            if step == 2:
                means = clipped(model, means)
            optimizer.step()
            masters = [master - mean for master, mean in zip(masters, means, strict=True)]
            with optimizer.unsharded():
                for index, (param, master) in enumerate(zip(model.parameters(), masters, strict=True)):
                    assert raw(param) == raw(master.to(param.dtype)), f"{setting}, step {step}, param {index}"
        optimizer.close()


def accumulated(setting: Setting, model: Sums, optimizer: ShardedSGD, step: int) -> list[Expected]:
    """Runs the backwards of a step, and looks at the sums behind each; what they should leave."""
    optimizer.zero_grad()
    syncs = tuple(setting.stage >= 2 or each for each in setting.syncs)
    for turn, each in enumerate(setting.syncs):
        with nullcontext() if each else optimizer.no_sync():
            model(step, turn, dist.get_rank()).backward()
        if not syncs[turn]:
            continue
        for index, param in enumerate(model.parameters()):
            gradient_slice, wanted = (
                param.grad.gradient_slice,
                expected(setting, param, index, step, syncs[: turn + 1]).kept,
            )
            where = f"{setting}, step {step}, backward {turn}, param {index}"
            assert gradient_slice.total.dtype is param.dtype, where
            assert raw(gradient_slice.total) == raw(wanted.flatten()[here(gradient_slice)].to(param.dtype)), where
    return [expected(setting, param, index, step, syncs) for index, param in enumerate(model.parameters())]


def here(gradient_slice: Any) -> slice:
    return slice(gradient_slice.start, gradient_slice.start + gradient_slice.total.numel())


def check_norms(setting: Setting, model: Sums, found: Sequence[Expected]) -> None:
    """The norm is that of what is kept, over the ranks; the largest is that of the mean."""
    for param, wanted in zip(model.parameters(), found, strict=True):
        norm = float(wanted.kept.double().norm()) / dist.get_world_size()
        assert float(param.grad.norm()) == pytest.approx(norm, rel=1e-6), setting
        assert raw(param.grad.norm(math.inf)) == raw(largest(wanted.mean)), setting
        assert param.grad.isfinite().all()


def check_whole(setting: Setting, model: Sums, means: Sequence[Tensor]) -> None:
    for param, mean in zip(model.parameters(), means, strict=True):
        part = param.grad
        assert part.dtype is part.local.dtype is param.dtype
        assert raw(part.local) == raw(mean.flatten()[here(part.gradient_slice)].to(param.dtype)), setting
        assert raw(part.full_tensor()) == raw(mean.to(param.dtype)), setting
        assert raw(part.norm(math.inf)) == raw(largest(mean)), setting  # divided by now


def largest(values: Tensor) -> Tensor:
    return values.abs().max() if values.numel() else torch.zeros(())


def clipped(model: Sums, means: Sequence[Tensor]) -> list[Tensor]:
    norm = clip_grad_norm_(model.parameters(), MAX_NORM)
    factor = MAX_NORM / (norm + 1e-6)
    return [held_as(param)(mean * factor) for param, mean in zip(model.parameters(), means, strict=True)]


def all_exact(settings: Sequence[Setting]) -> None:
    for setting in settings:
        is_exact(setting)


SETTINGS = [
    *(Setting(stage, neighbours) for stage in STAGES for neighbours in (True, False)),
    *(Setting(stage, syncs=(True, False, True)) for stage in STAGES),
    Setting(2, reduce_dtype=FP32),
    Setting(2, reduce_dtype=torch.float16, syncs=(True,)),
    Setting(2, offload=Offload(gradients="cpu")),
]


def by_turns(world: int) -> list[Setting]:
    """Every setting on 2 ranks or on 3, a third of them on one; neighbours and messages on each number of ranks."""
    turns = enumerate(SETTINGS)
    return [each for turn, each in turns if (turn % 3 == 0 if world == 1 else (turn + turn // 2) % 2 == world % 2)]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_sums_are_those_of_the_oracle(world: int, ranks: Pool) -> None:
    ranks.run(all_exact, by_turns(world), world=world)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3])
def test_sums_of_every_setting_are_those_of_the_oracle(world: int, ranks: Pool) -> None:
    ranks.run(all_exact, SETTINGS, world=world)


def test_sums_by_collectives_and_over_copies(ranks: Pool) -> None:
    """Collectives of two ranks, as no backend says in which order it adds; it adds in the dtype that travels."""
    collectives = Setting(2, neighbours=False, collectives=True)
    ranks.run(all_exact, [replace(collectives, reduce_dtype=FP32), replace(collectives, syncs=(True,))], world=2)
    ranks.run(all_exact, [Setting(stage, hybrid=True, syncs=(True, True)) for stage in (1, 3)], world=4)


# -- memory ------------------------------------------------------------------------------------------------------------


class Widest(TorchDispatchMode):
    """Elements of the largest fp32 tensor that any operation takes or gives."""

    numel = 0

    def __torch_dispatch__(self, function: Any, kinds: Any, arguments: Any = (), keywords: Any = None) -> Any:
        found = function(*arguments, **(keywords or {}))
        for each in tree_leaves((arguments, keywords, found)):
            if isinstance(each, Tensor) and each.dtype is FP32:
                self.numel = max(self.numel, each.numel())
        return found


def takes_two_bytes(setting: Setting) -> None:
    """An element, between steps; while gradients are reduced a chunk in fp32."""
    with in_small_chunks():
        model = Sums(mixed=False)
        optimizer = setting.optimizer(model)
        for step in range(2):
            optimizer.zero_grad()
            for turn in range(2):
                loss = model(step, turn, dist.get_rank())
                with Widest() as widest:
                    loss.backward()
                assert widest.numel == (300 if dist.get_world_size() > 1 else 1), (setting, widest.numel)
            optimizer.step()
        assert optimizer.engine.domain is not None and optimizer.engine.domain.links is not None
        links = optimizer.engine.domain.links
        own = sum(shard.numel for shard in optimizer.engine.domain.shards)
        tier = "device" if setting.offload is None else "host"
        held = optimizer.memory()["gradient"]
        assert held.pop(tier) == pytest.approx(2 * own, abs=2 * BLOCK * len(model.cells)) and not any(held.values())
        # Gradients travel as they are, and at stage 0 sums come back as they are kept.
        buckets, others = optimizer.engine.domain.reducer.buckets, dist.get_world_size() - 1
        nbytes = sum(
            4 * each.sink.part_numel if setting.stage == 0 else 2 * each.sink.total.numel() for each in buckets
        )
        assert sum(wire.traffic.gradients for wire in (links.shards, links.replicas)) == 4 * others * nbytes, setting


def all_take_two_bytes(settings: Sequence[Setting]) -> None:
    for setting in settings:
        takes_two_bytes(setting)


@pytest.mark.parametrize("world", [1, 2])
def test_sums_take_two_bytes_an_element(world: int, ranks: Pool) -> None:
    settings = [Setting(stage, neighbours) for stage in STAGES for neighbours in (True, False)]
    ranks.run(all_take_two_bytes, [*settings, Setting(3, offload=Offload(gradients="cpu"))], world=world)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_a_checkpoint_loads_in_the_other_format(tmp_path: Path) -> None:
    """A sum is rounded where it has to be, which is said, and its norms with it."""
    sizes = []
    for saved, loaded in (("fp32", "bf16"), ("bf16", "fp32")):
        models = [nn.Linear(300, 200).bfloat16() for _ in range(2)]
        first, second = (
            ShardedSGD(model, lr=1.0, stage=2, gradient_format=each)  # type: ignore[arg-type]
            for model, each in zip(models, (saved, loaded), strict=True)
        )
        for _ in range(3):
            models[0](torch.randn(1, 300).to(BF16)).sum().backward()
        shardopt.save_checkpoint(tmp_path / saved, models[0], first).wait()
        told = shardopt.load_checkpoint(tmp_path / saved, models[1], second).losses
        is_rounded = loaded == "bf16"
        assert told == (("gradient of 2 params was saved in fp32 and is rounded to bf16",) if is_rounded else ())
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            before = one.grad.gradient_slice.total.float()
            after = nearest(before) if is_rounded else before
            assert raw(other.grad.gradient_slice.total.float()) == raw(after)
            assert raw(other.grad.norm(math.inf)) == raw(after.abs().max())
        sizes.append(sum(each.stat().st_size for each in (tmp_path / saved).rglob("*.safetensors")))
    assert sizes[0] - sizes[1] == pytest.approx(2 * 301 * 200, rel=0.1)


# -- wrong use ---------------------------------------------------------------------------------------------------------


def forward_of(dtypes: Sequence[torch.dtype], gradient_format: str = "bf16") -> None:
    model = nn.Sequential(*(nn.Linear(3, 3).to(dtype) for dtype in dtypes))
    ShardedSGD(model, lr=1.0, gradient_format=gradient_format).bind()  # type: ignore[arg-type]


def differs_on_one_rank() -> None:
    with raises(DisagreementError, "gradient_format", "'bf16'", "'fp32'"):
        forward_of([BF16], ("fp32", "bf16")[dist.get_rank()])


def test_what_is_refused(ranks: Pool) -> None:
    with raises(ValueError, "gradient_format", "'int8'"):
        ShardedSGD(nn.Linear(3, 3), lr=1.0, gradient_format="int8")  # type: ignore[arg-type]
    with raises(ValueError, "gradient_format", "no effect", "hand the module over"):
        ShardedSGD(nn.Linear(3, 3).bfloat16().parameters(), lr=1.0, gradient_format="bf16")
    for world in (1, 2):
        ranks.run(refuses_dtypes, world=world)
    ranks.run(differs_on_one_rank, world=2)


def refuses_dtypes() -> None:
    with raises(BindingError, "param 2 of group 0", "torch.float16", "gradient_format='fp32'"):
        forward_of([BF16, torch.float16])
    with raises(BindingError, "param 0 of group 0", "torch.float32", "no effect"):
        forward_of([FP32, FP32])
    forward_of([BF16, FP32])
