"""Sums of gradients in host memory, params on a GPU: the bits of sums that never left it, and no copy too many.

A GPU of CPU tensors (``late_copies.py``): sums go down and come up as late as the landing allows.
"""

import copy
import gc
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardopt
from shardopt import (
    BindingError,
    CommunicationError,
    Offload,
    ShardedAdamW,
    ShardedSGD,
    Tuning,
)
from shardopt.domain.host_sum import HostSum
from shardopt.domain.tiers import check_offload
from shardopt.module.round_gradients import RoundGradients
from shardopt.offload.gradients import SLOTS, HostLanding
from shardopt.partition.reducer import Reducer
from shardopt.tensors.gradient import GradientPart
from shardopt.tools.plan import plan
from shardopt.tools.ways import Way
from tests.step.test_gradient_format import Setting as Summing
from tests.step.test_gradient_format import is_exact
from tests.support.late_copies import AsLateAsAllowed, AtOnce, Later, as_on_a_gpu
from tests.support.offloaded import at_rest, check_trainings, on_a_gpu
from tests.support.ranks import Pool, RankFailure
from tests.support.sweep import Row, drawn, grid, sweep_at_once
from tests.support.training import Net, loss_of, raw


def ways(root: Path | str) -> list[Offload]:
    return [
        *(Offload(gradients="cpu", step=step) for step in ("cpu", "gpu", "auto")),
        Offload(root, gradients="cpu"),
    ]


def away(offload: Offload | None) -> AbstractContextManager[None]:
    return nullcontext() if offload is None else on_a_gpu()


# -- the sums ----------------------------------------------------------------------------------------------------------


def exact_at_rest(settings: Sequence[Summing]) -> None:
    with on_a_gpu():
        for setting in settings:
            is_exact(setting)


def summing(root: str) -> list[Summing]:
    kinds = [replace(Summing(2), offload=each) for each in ways(root)]
    kinds += [Summing(3, neighbours=False, offload=each) for each in ways(root)[:2]]
    first = kinds[0]
    return [
        *kinds,
        replace(first, syncs=(True, False, True)),
        replace(first, reduce_dtype=torch.float32),
    ]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_sums_are_those_of_the_oracle(world: int, ranks: Pool, tmp_path: Path) -> None:
    """Every setting, by turns on 1, 2 and 3 ranks."""
    ranks.run(exact_at_rest, summing(str(tmp_path))[world - 1 :: 3], world=world)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3])
def test_sums_of_every_setting_are_those_of_the_oracle(world: int, ranks: Pool, tmp_path: Path) -> None:
    ranks.run(exact_at_rest, summing(str(tmp_path)), world=world)


def test_sums_by_collectives_are_those_of_the_oracle(ranks: Pool) -> None:
    """Of two ranks: of more no backend says in which order it adds."""
    setting = Summing(2, neighbours=False, collectives=True, reduce_dtype=torch.float32)
    ranks.run(exact_at_rest, [replace(setting, offload=Offload(gradients="cpu", step="gpu"))], world=2)


@contextmanager
def settles_nothing() -> Iterator[None]:
    with patch.object(HostLanding, "wait_for_copies", lambda self: None):
        yield


@contextmanager
def arrives_at_once() -> Iterator[None]:
    with patch.object(HostLanding, "wait_loaded", lambda self, slot: None):
        yield


@contextmanager
def lends_at_once() -> Iterator[None]:
    """Without waiting for the copy of the sum that was in the slot before."""
    with patch.object(HostLanding, "acquire", lambda self, total: self._next_slot(total)):
        yield


@contextmanager
def brings_at_once() -> Iterator[None]:
    """Into a slot that its last sum has not left yet."""

    def load(self: HostLanding, total: Tensor) -> Any:
        slot = self._next_slot(total)
        slot.mark = None
        self._free.insert(0, slot)
        return real(self, total)

    real = HostLanding.load
    with patch.object(HostLanding, "load", load):
        yield


@contextmanager
def looks_behind() -> Iterator[None]:
    """At norms once the sum has left, and its slot holds anything."""

    real, taken = HostSum.use, list[Callable[[], None]]()

    def use(self: HostSum, reduction: Any) -> None:
        slot = self._slot
        assert slot is not None
        real(self, reduction)
        self._landing.wait_for_copies()
        slot.here.view(torch.uint8).fill_(0xFF)
        taken.pop()()

    def later(*given: Any) -> None:
        taken.append(partial(take_sum, *given))

    take_sum = RoundGradients.take_sum
    with patch.object(HostSum, "use", use), patch.object(RoundGradients, "take_sum", later):
        yield


@contextmanager
def forgets_what_is_held() -> Iterator[None]:
    """A later backward's sum goes down in place of the earlier ones'."""
    real = HostSum.reduction
    with patch.object(HostSum, "reduction", lambda self, buffer, add: real(self, buffer, False)):
        yield


BROKEN: list[Callable[[], AbstractContextManager[None]]] = [
    settles_nothing,
    arrives_at_once,
    lends_at_once,
    brings_at_once,
    looks_behind,
    forgets_what_is_held,
]


def exact_but_broken(break_it: Callable[[], AbstractContextManager[None]], offload: Offload) -> None:
    with break_it():
        exact_at_rest([Summing(2, offload=offload)])


@pytest.mark.parametrize("break_it", BROKEN, ids=lambda each: each.__name__)
def test_each_wait_is_needed(break_it: Callable[[], AbstractContextManager[None]], ranks: Pool) -> None:
    for step in ("cpu", "gpu"):
        with pytest.raises(RankFailure):
            ranks.run(exact_but_broken, break_it, Offload(gradients="cpu", step=step), world=1)


# -- trainings ---------------------------------------------------------------------------------------------------------

RECIPES = ("accumulates under no_sync", "clips in the step", "scaler", "own groups", "overflows, scaler")


def training_ways(root: Path) -> dict[str, Offload]:
    params = [Offload(gradients="cpu", params="cpu"), Offload(root, gradients="cpu", params=root)]
    parts = [Offload(gradients="cpu", step="gpu", fraction=0.5), Offload(root, gradients="cpu", fraction=0.5)]
    names = ("cpu", "gpu", "auto", "disk", "params", "params on disk", "part", "part on disk")
    return dict(zip(names, [*ways(root), *params, *parts], strict=True))


AXES = {
    "stage": (2, 3),
    "neighbours": (True, False),
    "gradient_format": ("fp32", "bf16"),
    "way": tuple(training_ways(Path())),
}


def allowed(stage: int, neighbours: bool, way: str, **_: Any) -> bool:
    """What rests elsewhere is in no memory that others could read."""
    return not way.startswith("params") or (stage == 3 and not neighbours)


def train_at(world: int, calls: Iterable[tuple[Row, str]], ranks: Pool, root: Path) -> None:
    settings = []
    for (stage, neighbours, gradient_format, way), recipe in calls:
        where: dict[str, Any] = {"gradient_format": gradient_format, "offload": training_ways(root)[way]}
        live_bytes = 6000 if way.startswith("params") else 1 << 20
        settings.append((recipe, at_rest(stage, neighbours, live_bytes=live_bytes, **where)))
    check_trainings(settings, ranks, world, on_a_gpu)


@pytest.mark.parametrize(("world", "strength"), [(1, 1), (2, 2)])
def test_trainings_leave_the_same_bits(world: int, strength: int, ranks: Pool, tmp_path: Path) -> None:
    """The recipes by turns; one backward a step where params are gathered out of a file."""
    turns = itertools.cycle(RECIPES)
    calls = [
        (row, "own groups" if row[-1] == "params on disk" else next(turns)) for row in drawn(AXES, strength, allowed)
    ]
    train_at(world, calls, ranks, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("world", [1, 2])
def test_all_trainings_leave_the_same_bits(world: int, recipe: str, ranks: Pool, tmp_path: Path) -> None:
    train_at(world, [(row, recipe) for row in grid(AXES, allowed)], ranks, tmp_path)


class Twice(nn.Module):
    """Calls its first layer inside of a reentrant checkpoint and outside, so that it has a gradient from each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(40, 40), nn.Linear(40, 40)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.first, self.first(x).relu(), use_reentrant=True))


def through_everything(offload: Offload | None, folder: str) -> list[bytes]:
    """All that reads or writes sums between backwards, beside what a loop does in every step."""
    found: list[bytes] = []
    rank = dist.get_rank() if dist.is_initialized() else 0

    def note(optimizer: Any, *tensors: Tensor) -> None:
        with optimizer.unsharded():
            params = [param for group in optimizer.param_groups for param in group["params"]]
            found.extend(raw(each.detach()) for each in (*params, *tensors))

    with away(offload):
        tuning = Tuning(bucket_bytes=2000, chunk_bytes=4096, nonfinite="skip")
        model = Net()
        opt = ShardedAdamW(model, lr=0.01, stage=2, offload=offload, tuning=tuning, max_grad_norm=0.5)

        def accumulate(*steps: int) -> list[Tensor]:
            for step in steps:
                loss_of(model, step).backward()
            return [param.grad for param in model.parameters() if param.grad is not None]

        parts = accumulate(0, 1)
        note(opt, *(part.full_tensor() for part in parts), *(part.norm() for part in parts))
        opt.step()
        # Nobody knows the norms of what was clamped: the step looks at the sums.
        opt.zero_grad(set_to_none=False)
        for part in accumulate(2):
            part.mul_(3.0).clamp_(-0.01, 0.01)
        opt.step()
        note(opt, *(part.local for part in accumulate(3)), *(part.isnan().any() for part in accumulate()))
        # A mean that was scaled is added to.
        for part in accumulate(4):
            part.div_(2)
        parts = accumulate(5)
        note(opt, *(part.full_tensor() for part in parts), *(part.isfinite().all() for part in parts))
        opt.step()
        # One of a bucket's params starts anew, the others' sums are added to.
        opt.zero_grad()
        accumulate(20)
        model.out.bias.grad = None
        accumulate(21)
        opt.step()
        # A backward that fails half-way, when sums are under way.
        _fails_half_way(model, 6)
        opt.zero_grad()
        accumulate(7, 8)
        opt.step()
        # Sums that are not used yet are saved, and loaded.
        opt.zero_grad()
        parts = accumulate(9)
        shardopt.save_checkpoint(folder, model, opt)
        saved = [part.full_tensor() for part in parts]
        accumulate(10)
        opt.step()
        shardopt.load_checkpoint(folder, model, opt)
        parts = [param.grad for param in model.parameters() if param.grad is not None]
        assert all(raw(part.full_tensor()) == raw(before) for part, before in zip(parts, saved, strict=True))
        # A copy that a failed backward had asked for must not come over what is loaded behind it.
        _fails_half_way(model, 11)
        opt.zero_grad()
        shardopt.load_checkpoint(folder, model, opt)
        accumulate(11)
        opt.step()
        # Masters and states move; the sums stay.
        if offload is not None:
            accumulate(12)
            opt.offload(f"{folder} moved")
            opt.step()
            opt.zero_grad()
            accumulate(13)
            opt.reload()
            opt.step()
        else:
            accumulate(12)
            opt.step()
            opt.zero_grad()
            accumulate(13)
            opt.step()
        note(opt)
        opt.close()
        late: list[int] = []
        twice = Twice()
        other = ShardedSGD(twice, lr=0.1, stage=2, offload=offload, tuning=tuning)
        real = Reducer.finish_late
        with patch.object(Reducer, "finish_late", lambda self, numbers: (late.extend(numbers), real(self, numbers))[1]):
            for step in range(4):
                x = torch.full((2, 40), 0.1 * (step + rank + 1), requires_grad=True)
                twice(x).square().mean().backward()
                if step % 2:
                    other.step()
                    other.zero_grad()
        assert late
        note(other)
        other.close()
    return found


def _fails_half_way(model: Net, step: int) -> None:
    def fail(_: Tensor) -> None:
        raise RuntimeError("on purpose")

    watched = model.conv.weight.register_post_accumulate_grad_hook(fail)
    with pytest.raises((RuntimeError, CommunicationError), match=r"on purpose|gave up this backward"):
        loss_of(model, step).backward()
    watched.remove()


@sweep_at_once({"world": (2, 1), "way": range(4)}, strength=1)
def test_whatever_looks_at_sums_finds_the_same_bits(rows: list[Row], ranks: Pool, tmp_path: Path) -> None:
    for world in (1, 2):
        expected = ranks.run(through_everything, None, str(tmp_path / f"still {world}"), world=world)
        for number in [way for at, way in rows if at == world]:
            offload = ways(tmp_path / "swap")[number]
            found = ranks.run(through_everything, offload, str(tmp_path / f"{world} {number}"), world=world)
            for mine, theirs in zip(found, expected, strict=True):
                assert [a == b for a, b in zip(mine, theirs, strict=True)] == [True] * len(theirs), offload


# -- bytes -------------------------------------------------------------------------------------------------------------


@dataclass
class Moved:
    down: int = 0
    up: int = 0


def test_each_sum_goes_down_once_a_backward_and_the_cpu_reads_it_there() -> None:
    moved, layers, width = Moved(), 12, 64
    numel = layers * width * width

    class Counting(AtOnce):
        def to_device(self, copies: Any, after: Any) -> None:
            moved.up += sum(source.nbytes for _, source in copies)
            super().to_device(copies, after)

        def to_host(self, copies: Any, after: Any) -> None:
            moved.down += sum(source.nbytes for _, source in copies)
            AtOnce.to_device(self, copies, after)

    def passed() -> tuple[int, int]:
        found = copy.copy(moved)
        moved.down = moved.up = 0
        return found.down, found.up

    for step, stepped in (("cpu", (6, 2 * numel)), ("gpu", (12 * numel, 16 * numel))):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).bfloat16()
        x = torch.ones(2, width, dtype=torch.bfloat16)
        with as_on_a_gpu(Counting):
            tuning = Tuning(bucket_bytes=2 * 2 * width * width)
            optimizer = ShardedAdamW(model, stage=2, offload=Offload(gradients="cpu", step=step), tuning=tuning)
            for number in range(3):
                passed()
                model(x).sum().backward()
                assert passed() == (4 * numel, 0)
                model(x).sum().backward()
                assert passed() == (4 * numel, 4 * numel)
                optimizer.step()
                down, up = passed()
                if number:  # at first params come down as well; later a flag for each bucket, if others wrote to it
                    assert (down, up) == stepped
                optimizer.zero_grad()
            memory = optimizer.memory()
            assert memory["gradient"] == {"device": 0, "host": 4 * numel}
            # Two params a bucket: two slots of sums for six buckets; and a row for each block.
            landing = optimizer.engine.domain.landing if optimizer.engine.domain is not None else None
            assert landing is not None and landing.slot_bytes == SLOTS * 4 * 2 * width * width
            still, away = (
                plan(model, optimizer, 1, Way(2, True, torch.bfloat16, tier="host", sums_rest=rest), optimizer.options)
                for rest in (False, True)
            )
            assert away.bytes["gradient"] == {"host": 4 * numel}
            assert landing.slot_bytes <= away.bytes["buffer"]["device"] - still.bytes["buffer"]["device"]
            optimizer.close()


@dataclass(eq=False)
class HostAhead(AsLateAsAllowed):
    """Knows all copies to the device: until the host has waited for one, it must not write what that reads."""

    up: ClassVar[list[Later]] = []

    def to_device(self, copies: Any, after: Any) -> Later:
        mark = super().to_device(copies, after)
        self.up.append(mark)
        return mark


@pytest.mark.parametrize("step", ["gpu", "auto"])
def test_sums_that_were_used_can_be_written(step: Any) -> None:
    """``zero_grad(set_to_none=False)`` behind a step zeroes host memory at once."""
    with as_on_a_gpu(HostAhead):
        offload = Offload(gradients="cpu", step=step)
        model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(4)))
        tuning = Tuning(bucket_bytes=2000, chunk_bytes=4096)
        optimizer = ShardedAdamW(model, stage=2, offload=offload, tuning=tuning)
        for _ in range(8):
            for _ in range(2):
                model(torch.ones(2, 40)).sum().backward()
            parts = [param.grad for param in model.parameters()]
            sums = {
                part.gradient_slice.total.untyped_storage().data_ptr()
                for part in parts
                if isinstance(part, GradientPart)
            }
            optimizer.step()
            copies = [each for mark in HostAhead.up if not mark.is_over for each in mark.copies]
            assert sums and not any(source.untyped_storage().data_ptr() in sums for _, source in copies)
            optimizer.zero_grad(set_to_none=False)
        optimizer.close()
    HostAhead.up.clear()


@pytest.mark.parametrize("ends", ["closed", "dropped"])
def test_no_page_of_sums_stays_registered(ends: str) -> None:
    """Without the garbage collector."""
    there: set[int] = set()

    def unregister(registered: dict[int, int]) -> None:
        there.difference_update(registered)
        registered.clear()

    gc.disable()
    try:
        with (
            on_a_gpu(),
            patch("shardopt.domain.tiers.register_with_cuda", lambda address, _: not there.add(address)),
            patch("shardopt.offload.pinned._unregister", unregister),
        ):
            model = nn.Linear(400, 400, bias=False)
            optimizer = ShardedSGD(model, lr=0.1, stage=2, offload=Offload(gradients="cpu", step="gpu"))
            model(torch.ones(2, 400)).sum().backward()
            assert isinstance(model.weight.grad, GradientPart)
            assert model.weight.grad.gradient_slice.total.data_ptr() in there
            optimizer.step()
            if ends == "closed":
                optimizer.close()
            del optimizer
            assert not there
    finally:
        gc.enable()


def test_copies_of_the_states_are_refused() -> None:
    for device in (torch.device("cuda"), torch.device("cpu")):
        check_offload(Offload(gradients="cpu"), device)
    check_offload(Offload(gradients="cpu"), torch.device("cpu"), 2)
    with pytest.raises(BindingError, match="2 copies of the states"):
        check_offload(Offload(gradients="cpu"), torch.device("cuda"), 2)
