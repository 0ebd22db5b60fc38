"""Stage 3: params are there when a module reads them, and gone afterwards, whatever models do with their modules.

Every model trains at stage 1 and at stage 3; losses, params and states must be the same to the bit. Buckets are small,
and live no longer than they are needed. Memory that was given back is filled with NaN: reading it too early or too late
shows. (For real it would be zeros, or a crash.)
"""

import gc
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from shardopt import ShardedAdamW, ShardedOptimizer, ShardedSGD, ShardoptError
from tests.support.comparing import momenta, raw, snapshot
from tests.support.modules import (
    RATES,
    Attention,
    InPlace,
    Layers,
    Odd,
    Owner,
    Positioned,
    Product,
    Repeated,
    Run,
    Stack,
    Structures,
    Tied,
    W,
    accumulated,
    curved,
    data,
    joined,
    made,
    nothing_left,
    penalised,
    plain,
    poisoned,
    retained,
    skipping,
    skipping_alone,
    small,
    square,
    train_step,
    watched,
)
from tests.support.ranks import Pool
from tests.support.training import raises

# -- the grid ----------------------------------------------------------------------------------------------------------

# name: model, way, whether ranks must be able to read each other's memory
CASES: dict[str, tuple[Callable[[], nn.Module], Run, bool]] = {
    "skipping": (Stack, skipping, False),
    "skipping_alone": (Stack, skipping_alone, True),
    "penalised": (lambda: nn.Sequential(nn.Linear(W, W), nn.Tanh(), Owner(0)), penalised, False),
    "curved": (lambda: nn.Sequential(nn.Linear(W, W), nn.Tanh(), nn.Linear(W, W)), curved, False),
    **{
        f"{make.__name__}, {run.__name__}": (make, run, False)
        for make in (Repeated, Owner, Structures, Positioned, Product, Tied, Attention, Layers, Odd)
        for run in (plain, retained, accumulated, joined)
        if run is plain or make in (Product, Tied, Odd)
    },
    **{
        f"checkpointed, reentrant {reentrant}, whole {whole}": (lambda r=reentrant, w=whole: Stack(r, w), plain, False)
        for reentrant in (True, False)
        for whole in (True, False)
    },
    "in place": (lambda: nn.Sequential(nn.Linear(W, W), InPlace(), InPlace(), InPlace()), plain, False),
}

STEPS = 3
Result = tuple[list[float], list[bytes], list[bytes]]


def trained(make: Callable[[], nn.Module], run: Run, stage: int, wrap: bool = False, **tuning: Any) -> Result:
    torch.manual_seed(0)
    model = make()
    whole = DistributedDataParallel(model) if wrap else model
    with watched() as buckets:
        opt = ShardedSGD(whole, **RATES, stage=stage, tuning=small(**tuning))
        losses = []
        for step in range(STEPS):
            opt.zero_grad()
            losses.append(run(model if run in (skipping, skipping_alone) else whole, step).item())
            assert not any(each.users for each in buckets) or run in (penalised, curved)
            opt.step()
            assert nothing_left(buckets)
    assert bool(buckets) == (stage == 3)
    return losses, snapshot(model, opt), momenta(model, opt)


def by_torch(make: Callable[[], nn.Module], run: Run) -> nn.Module:
    torch.manual_seed(0)
    model = make()
    opt = SGD(model.parameters(), **RATES)
    for step in range(STEPS):
        opt.zero_grad()
        run(model, step)
        for param in model.parameters():
            present = torch.tensor(param.grad is not None, dtype=torch.int32)
            dist.all_reduce(present)
            if present:
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
        opt.step()
    return model


# Whoever reads memory that was given back gets NaN; once it is given back for real.
VARIANTS: tuple[dict[str, Any], ...] = (
    {"poison": True},
    {"poison": True, "neighbours": False, "live_bytes": 8000},
    {"poison": True, "wrap": True, "live_bytes": 1 << 20},
    {"neighbours": False},
    {"poison": True, "keep_below": 0, "bucket_bytes": 1},
)


def trains_as_stage_1(name: str, variants: Sequence[dict[str, Any]]) -> None:
    make, run, needs_neighbours = CASES[name]
    expected = trained(make, run, 1)
    for variant in variants:
        if needs_neighbours and not variant.get("neighbours", True):
            continue
        tuning = {key: value for key, value in variant.items() if key != "poison"}
        with poisoned() if variant.get("poison") else nullcontext():
            found = trained(make, run, 3, **tuning)
        for kind, mine, theirs in zip(("losses", "params", "states"), found, expected, strict=True):
            assert mine == theirs, f"{name}, {variant}: {kind}"
    for mine, param in zip(expected[1], by_torch(make, run).parameters(), strict=True):
        own = torch.frombuffer(bytearray(mine), dtype=torch.float32) if mine else torch.zeros(0)
        torch.testing.assert_close(
            own, param.detach().flatten(), rtol=1e-5, atol=1e-6, msg=lambda text: f"{name}: {text}"
        )


def all_train_as_stage_1(calls: Sequence[tuple[str, Sequence[dict[str, Any]]]]) -> None:
    for call in calls:
        trains_as_stage_1(*call)


def test_trains_as_stage_1(ranks: Pool) -> None:
    """Every model and way to train, in one of the variants by turns."""
    rows = [(name, (VARIANTS[(number + 1) % len(VARIANTS)],)) for number, name in enumerate(CASES)]
    for world, calls in ((2, [row for number, row in enumerate(rows) if number % 3]), (3, rows[::3])):
        ranks.run(all_train_as_stage_1, calls, world=world)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_trains_as_stage_1_in_every_variant(world: int, variant: dict[str, Any], ranks: Pool) -> None:
    ranks.run(all_train_as_stage_1, [(name, (variant,)) for name in CASES], world=world)


def trains_hybrid() -> None:
    """(replicate, shard) = (2, 2)."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2))
    results = []
    for stage in (1, 3):
        torch.manual_seed(0)
        model = Owner()
        opt = ShardedSGD(model, **RATES, stage=stage, process_group=mesh, tuning=small())
        for step in range(3):
            opt.zero_grad()
            plain(model, step)
            opt.step()
        results.append(snapshot(model, opt))
    assert results[0] == results[1]


def trains_compiled(ways: Sequence[tuple[str, bool]]) -> None:
    """Hooks are left out of torch.compile's graphs, which break there."""
    expected = trained(Stack, plain, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Dynamo says of its own doing
        for backend, outside in ways:
            torch._dynamo.reset()
            torch.manual_seed(0)
            model = Stack()
            compiled = torch.compile(model, backend=backend)
            opt = ShardedSGD(compiled if outside else model, **RATES, stage=3, tuning=small())
            losses = []
            for step in range(STEPS):
                opt.zero_grad()
                losses.append(plain(compiled, step).item())
                opt.step()
            assert (losses, snapshot(model, opt)) == expected[:2], f"{backend}, compiled first: {outside}"


def test_hybrid(ranks: Pool) -> None:
    ranks.run(trains_hybrid, world=4)


@pytest.mark.parametrize(
    "ways",
    [
        (("eager", True), ("aot_eager", False)),
        pytest.param((("eager", False), ("aot_eager", True)), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_compiled(ways: Sequence[tuple[str, bool]], ranks: Pool) -> None:
    ranks.run(trains_compiled, ways, world=2)


# -- errors in the middle ----------------------------------------------------------------------------------------------


class Boom(Exception):
    pass


def boom(*_: Any) -> None:
    raise Boom


def exceptions(neighbours: bool) -> None:
    def in_forward(model: Any, alone: bool) -> Any:
        return model.blocks[1].down.register_forward_pre_hook(boom)

    def in_backward(model: Any, alone: bool) -> Any:
        def hook(module: nn.Module, arguments: Any, output: Tensor) -> None:
            if not alone or dist.get_rank() == 0:
                output.register_hook(boom)

        return model.blocks[1].norm.register_forward_hook(hook)

    def trained_through(fail: Callable[[Any, bool], Any], alone: bool, stage: int) -> list[bytes]:
        model, opt = made(stage, neighbours=neighbours)
        train_step(model, opt, 0)
        opt.zero_grad()
        handle, failed = fail(model, alone), False
        try:
            plain(model, 1)
        except (Boom, ShardoptError):
            failed = True
        handle.remove()
        assert failed
        opt.zero_grad()
        dist.barrier()
        assert stage == 1 or not any(each.users for each in opt.engine.domain.sharded.units)
        for step in range(2, 4):
            train_step(model, opt, step)
        return snapshot(model, opt)

    expected = trained_through(in_forward, False, 1)
    assert expected == trained_through(in_backward, False, 1)
    for fail in (in_forward, in_backward):
        for alone in (False, True) if fail is in_backward and neighbours else (False,):
            assert trained_through(fail, alone, 3) == expected, f"{fail.__name__}, alone {alone}"


def inside_an_exception() -> None:
    """An exception leaves unsharded() as it should be left, and does not hide."""
    model, opt = made()
    train_step(model, opt, 0)
    before = snapshot(model, opt)
    with raises(Boom), opt.unsharded():
        boom()
    assert nothing_left(opt.engine.domain.sharded.units) and snapshot(model, opt) == before


class Hidden(nn.Module):
    """Hands a tensor on that its forward does not return."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.weight = nn.Linear(W, W), square()

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = (self.layer(x) @ self.weight @ self.weight).mean()
        return x


def hidden_outputs() -> None:
    with poisoned():
        model, opt = made(make=lambda: nn.Sequential(nn.Linear(W, W), Hidden(), nn.Linear(W, W)))
        for step in range(2):
            told = ""
            output = model(data(step, 1, W))
            try:
                (output.sum() + model[1].hidden).backward()
            except ShardoptError as error:
                told = str(error)
            assert "released" in told or "gave up" in told
            opt.zero_grad()
            dist.barrier()
        before = snapshot(model, opt)
        with opt.unsharded():
            (model(data(2, 1, W)).sum() + model[1].hidden).backward()
        opt.step()
        assert snapshot(model, opt) != before and nothing_left(opt.engine.domain.sharded.units)


def test_exceptions(ranks: Pool) -> None:
    for neighbours in (True, False):
        ranks.run(exceptions, neighbours, world=2)
    ranks.run(inside_an_exception, world=2)
    ranks.run(hidden_outputs, world=2)


# -- several -----------------------------------------------------------------------------------------------------------


def several_models() -> None:
    """Two models in one graph, each with its optimizer."""
    results = []
    for stage in (1, 3):
        one, opt = made(stage)
        two, other = made(stage, Owner, live_bytes=1 << 20)
        for step in range(3):
            opt.zero_grad()
            other.zero_grad()
            loss = two(torch.tanh(one(data(step, 2, 3, W)))).sum() + one(two(data(step + 9, 2, 3, W))).sum()
            loss.backward()
            opt.step()
            other.step()
        results.append((snapshot(one, opt), snapshot(two, other)))
    assert results[0] == results[1]


def several_optimizers() -> None:
    """Two optimizers share a module; a slow rank is waited for in whichever of the rounds it has come to."""

    def slowly(*_: Any) -> None:
        if dist.get_rank() == 0:
            time.sleep(0.02)

    for wrap, is_frozen in ((False, True), (True, False)):
        results = []
        for stage in (1, 3):
            torch.manual_seed(0)
            model = Stack(blocks=2)
            model.blocks[0].up.weight.requires_grad_(not is_frozen)
            whole = DistributedDataParallel(model) if wrap else model
            rest = [param for param in model.blocks.parameters() if param.requires_grad]
            tuning = small(bucket_bytes=6000)  # several params in each: gradients are copied into buffers
            opts: list[ShardedOptimizer] = [
                ShardedAdamW(model.first.parameters(), lr=0.01, module=whole, stage=stage, tuning=tuning),
                ShardedSGD(rest, **RATES, module=whole, stage=stage, tuning=tuning),
            ]
            for layer in model.modules():
                if isinstance(layer, nn.Linear):
                    layer.register_forward_hook(lambda *given: given[-1].register_hook(slowly) and None)
            for step in range(3):
                for opt in opts:
                    opt.zero_grad()
                plain(whole, step)
                for opt in opts:
                    opt.step()
            with opts[0].unsharded(), opts[1].unsharded():
                results.append([raw(param) for param in model.parameters()])
            del opts, opt
            gc.collect()
        assert results[0] == results[1], f"wrapped {wrap}, frozen {is_frozen}"


def test_several(ranks: Pool) -> None:
    for function in (several_models, several_optimizers):
        ranks.run(function, world=2)


@pytest.mark.slow
def test_several_on_three_ranks(ranks: Pool) -> None:
    ranks.run(several_models, world=3)
