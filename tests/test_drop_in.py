"""Drop-in: what a script does with a torch optimizer and a DDP model works unchanged, or is refused by name."""

import copy
import gc
import hashlib
import io
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Zoo, fill_gradients
from ranks import Pool
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

from shardopt import (
    BindingError,
    CommunicationError,
    DisagreementError,
    Part,
    ShardedAdamW,
    ShardedOptimizer,
    ShardedSGD,
    ShardoptError,
    StateError,
    Tuning,
)

# -- models, data, bits ------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Embedding, convolution, norm and linear layers, small."""

    def __init__(self, seed: int = 0, checkpointed: bool = False, reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, 12)
        self.conv = nn.Conv1d(12, 20, 3, padding=1)
        self.norm = nn.LayerNorm(20)
        self.hidden = nn.Linear(20, 31)
        self.out = nn.Linear(31, 5)
        self.checkpointed, self.reentrant = checkpointed, reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.conv(self.embed(tokens).transpose(1, 2)).transpose(1, 2)
        if self.checkpointed:
            return checkpoint(self.tail, x, use_reentrant=self.reentrant)
        return self.tail(x)

    def tail(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.hidden(self.norm(x))))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Other data on every rank and step."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, 11, (4, 7), generator=generator), torch.randint(0, 5, (4, 7), generator=generator)


def loss_of(model: nn.Module, step: int) -> Tensor:
    tokens, targets = batch(step)
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, step).backward()
    optimizer.step()


def raw(tensor: Tensor) -> bytes:
    local = tensor.local if isinstance(tensor, Part) else tensor
    return local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def digest(optimizer: ShardedOptimizer) -> str:
    """Of all params and of all states that this rank holds, step counts included."""
    sha = hashlib.sha256()
    for group in optimizer.param_groups:
        for param in group["params"]:
            sha.update(raw(param))
            for name, value in optimizer.state.get(param, {}).items():
                sha.update(name.encode() + raw(value))
    return sha.hexdigest()


def same(one: nn.Module, other: nn.Module, atol: float = 0.0, rtol: float = 0.0) -> None:
    for (name, mine), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=atol, rtol=rtol, msg=lambda text, name=name: f"{name}: {text}")


def close_to(one: nn.Module, other: nn.Module) -> None:
    same(one, other, atol=2e-7, rtol=2e-6)


@contextmanager
def raises(kind: type[BaseException], *words: str) -> Iterator[None]:
    """That error, with all these words in it."""
    try:
        yield
    except kind as error:
        assert all(word in str(error) for word in words), f"{words} not in: {error}"
    else:
        raise AssertionError(f"no {kind.__name__} with {words}")


def refused(params: list[Parameter], kind: type[BaseException], *words: str) -> None:
    """The step is refused on every rank, and nothing changed."""
    optimizer = ShardedAdamW(params)
    before = [raw(param) for param in params if not param.is_meta]
    with raises(kind, *words):
        optimizer.step()
    assert before == [raw(param) for param in params if not param.is_meta]
    assert not optimizer.state


def with_gradient(param: Parameter) -> Parameter:
    param.grad = torch.ones_like(param)
    return param


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def pair(**keywords: Any) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, ShardedOptimizer]:
    """The same DDP model twice, with torch's AdamW and with ours."""
    theirs, ours = ddp(Net()), ddp(Net())
    torch_opt = torch.optim.AdamW(theirs.parameters(), **copy.deepcopy(keywords))  # schedulers write tensor rates
    return theirs, ours, torch_opt, ShardedAdamW(ours.parameters(), **copy.deepcopy(keywords))


# -- schedulers, groups, closures --------------------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(opt, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda opt: lr_scheduler.MultiplicativeLR(opt, lambda epoch: 0.9),
    "StepLR": lambda opt: lr_scheduler.StepLR(opt, 2),
    "MultiStepLR": lambda opt: lr_scheduler.MultiStepLR(opt, [1, 3]),
    "ConstantLR": lambda opt: lr_scheduler.ConstantLR(opt, 0.5, 2),
    "LinearLR": lambda opt: lr_scheduler.LinearLR(opt, 0.5, total_iters=3),
    "ExponentialLR": lambda opt: lr_scheduler.ExponentialLR(opt, 0.9),
    "PolynomialLR": lambda opt: lr_scheduler.PolynomialLR(opt, 4),
    "CosineAnnealingLR": lambda opt: lr_scheduler.CosineAnnealingLR(opt, 3),
    "CosineAnnealingWarmRestarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 2),
    "CyclicLR": lambda opt: lr_scheduler.CyclicLR(opt, 1e-4, 1e-2, 2, cycle_momentum=True),
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(opt, 1e-2, total_steps=8),
    "ReduceLROnPlateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=0),
    "SequentialLR": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.LinearLR(opt, 0.1, total_iters=2), lr_scheduler.ExponentialLR(opt, 0.9)], [2]
    ),
    "ChainedScheduler": lambda opt: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(opt, 0.5, 2), lr_scheduler.ExponentialLR(opt, 0.9)], optimizer=opt
    ),
    "SWALR": lambda opt: torch.optim.swa_utils.SWALR(opt, 1e-4, anneal_epochs=3),
}


def schedulers() -> None:
    for name, make in SCHEDULERS.items():
        for lr in (1e-3, torch.tensor(1e-3)):
            if name == "CyclicLR" and isinstance(lr, Tensor):
                continue
            theirs, ours, torch_opt, opt = pair(lr=lr)
            torch_schedule, schedule = make(torch_opt), make(opt)
            seen: set[float] = set()
            for step in range(5):
                rates = []
                for model, optimizer, each in ((theirs, torch_opt, torch_schedule), (ours, opt, schedule)):
                    train_step(model, optimizer, step)
                    each.step(*([1.0] if name == "ReduceLROnPlateau" else []))
                    rates.append([float(group["lr"]) for group in optimizer.param_groups])
                assert rates[0] == rates[1], f"{name}: {rates}"
                seen.add(rates[0][0])
            assert len(seen) > 1, f"{name} did nothing"
            close_to(ours, theirs)


def groups_and_unfreezing() -> None:
    """Each param its own lr and decay; a group added and a param unfrozen in mid-training."""
    theirs, ours = Net(), Net()
    torch_extra, extra = Parameter(torch.ones(3, 5)), Parameter(torch.ones(3, 5))
    optimizers: list[torch.optim.Optimizer] = []
    for model, kind in ((theirs, torch.optim.AdamW), (ours, ShardedAdamW)):
        model.embed.weight.requires_grad_(False)
        groups = [
            {"params": [param], "lr": 1e-3 * (1 + which), "weight_decay": 0.1 * which, "betas": (0.5 + which / 30, 0.9)}
            for which, param in enumerate(model.parameters())
        ]
        optimizers.append(kind(groups))
    for step in range(9):
        if step == 3:
            optimizers[0].add_param_group({"params": [torch_extra], "lr": 0.1})
            optimizers[1].add_param_group({"params": [extra], "lr": 0.1})
        if step == 5:
            for model in (theirs, ours):
                model.embed.weight.requires_grad_(True)
        for model, optimizer, more in ((theirs, optimizers[0], torch_extra), (ours, optimizers[1], extra)):
            optimizer.zero_grad()
            fill_gradients([*model.parameters(), more], "heavy_tailed", step)
            if step == 7:
                model.conv.weight.requires_grad_(False)
                model.conv.weight.grad = None
            optimizer.step()
    close_to(ours, theirs)
    torch.testing.assert_close(extra, torch_extra, atol=1e-7, rtol=1e-6)
    counts = [
        [float(optimizer.state[param]["step"]) for param in (*model.parameters(), more)]
        for model, optimizer, more in ((theirs, optimizers[0], torch_extra), (ours, optimizers[1], extra))
    ]
    assert counts[0] == counts[1] and set(counts[0]) == {4.0, 6.0, 7.0, 9.0}


def closures() -> None:
    theirs, ours, torch_opt, opt = pair()
    for step in range(3):
        losses = []
        for model, optimizer in ((theirs, torch_opt), (ours, opt)):

            def closure(model: nn.Module = model, optimizer: Any = optimizer, step: int = step) -> Tensor:
                assert torch.is_grad_enabled()
                optimizer.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                return loss

            with torch.no_grad() if step == 1 else torch.enable_grad():
                losses.append(optimizer.step(closure))
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=0)
    close_to(ours, theirs)
    before = digest(opt)
    with raises(DisagreementError, "closure"):
        opt.step((lambda: 1.0) if dist.get_rank() == 1 else None)
    assert digest(opt) == before


def hooks_and_reports() -> None:
    model = ddp(Net())
    opt = ShardedAdamW(model.named_parameters(), lr=1e-3)
    seen: list[str] = []
    handles = [
        opt.register_step_pre_hook(lambda *_: seen.append("before")),
        opt.register_step_post_hook(lambda *_: seen.append("after")),
        opt.register_state_dict_pre_hook(lambda *_: seen.append("saving")),
        opt.register_state_dict_post_hook(lambda _, saved: saved.__setitem__("mine", 1)),
        opt.register_load_state_dict_pre_hook(lambda _, loaded: {**loaded, "param_groups": loaded["param_groups"]}),
        opt.register_load_state_dict_post_hook(lambda _: seen.append("loaded")),
    ]
    train_step(model, opt, 0)
    assert isinstance(opt, torch.optim.Optimizer) and "ShardedAdamW" in repr(opt) and "lr: 0.001" in repr(opt)
    saved = opt.state_dict()
    opt.load_state_dict(saved)
    assert saved["mine"] == 1 and saved["param_groups"][0]["param_names"][0] == "module.embed.weight"
    for handle in handles:
        handle.remove()
    train_step(model, opt, 1)
    assert seen == ["before", "after", "saving", "loaded"]
    opt.zero_grad(set_to_none=False)
    assert all(param.grad is not None and not param.grad.any() for param in model.parameters())
    opt.zero_grad()
    assert all(param.grad is None for param in model.parameters())
    before = digest(opt)
    opt.step()  # no param has a gradient: nothing happens
    assert digest(opt) == before


def test_schedulers_groups_closures_hooks(ranks: Pool) -> None:
    for function in (schedulers, groups_and_unfreezing, closures, hooks_and_reports):
        ranks.run(function, world=2)


# -- overflow, scaling, clipping ---------------------------------------------------------------------------------------


def scalers() -> None:
    """Both protocols; an overflow on one rank, through DDP and without it, is skipped by all."""
    for fused in (False, True):
        # Where nothing reduces the gradients, only the fused protocol lets the ranks decide together.
        for reduced in (True, False) if fused else (True,):
            for bad in (math.inf, math.nan, -math.inf):
                model: nn.Module = Net()
                model = ddp(model) if reduced else model
                opt = ShardedSGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused or None)
                twin = copy.deepcopy(model)
                torch_opt = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
                scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
                for step in range(4):
                    opt.zero_grad()
                    spoiled = step == 2 and dist.get_rank() == 1
                    if reduced:
                        loss = loss_of(model, step)
                        scaler.scale(loss * bad if spoiled else loss).backward()
                    else:
                        fill_gradients(model.parameters(), "integers", step)
                        scaler.scale(torch.zeros(()))  # makes the scale
                        if spoiled:
                            list(model.parameters())[3].grad.view(-1)[-1] = bad
                    if step == 2:
                        before = digest(opt)
                    else:
                        for param, other in zip(model.parameters(), twin.parameters(), strict=True):
                            other.grad = param.grad / scaler.get_scale()
                        torch_opt.step()
                    scaler.step(opt)
                    scaler.update()
                    if step == 2:
                        assert digest(opt) == before, f"fused={fused} reduced={reduced} {bad}"
                        # Without DDP only the rank that overflowed may lower its scale by itself: agree as DDP would.
                        scaler.update(512.0)
                    assert scaler.get_scale() == (512.0 if step >= 2 else 1024.0)
                close_to(model, twin)


def nonfinite_policies() -> None:
    """One bad element, in each param, on one rank."""
    for policy in ("skip", "raise", "propagate"):
        for stage in (0, 1):
            for where in range(13):
                params = [param for param in Zoo().parameters() if param.requires_grad]
                opt = ShardedAdamW(params, stage=stage, tuning=Tuning(nonfinite=policy))
                fill_gradients(params, "integers", 0)
                opt.step()
                if where >= len(params) or not params[where].numel():
                    continue
                before = digest(opt)
                fill_gradients(params, "integers", 1)
                # On one rank: the one that updates this element, which may be the only one to see it.
                element = params[where].numel() - 1 if where % 2 else 0
                state = opt.state[params[where]]["exp_avg"]
                if not isinstance(state, Part):
                    sees = dist.get_rank() == where % dist.get_world_size()
                else:
                    sees = state.start <= element < state.start + state.local.numel()
                if sees or policy == "propagate":  # which asks for the same gradients on all ranks, as always
                    params[where].grad.view(-1)[element] = math.nan
                if policy == "raise":
                    with raises(ShardoptError, "Inf or NaN", "nothing changed"):
                        opt.step()
                else:
                    with warnings.catch_warnings(record=True) as caught:
                        warnings.simplefilter("always")
                        opt.step()
                    assert any("skipped this step" in str(each.message) for each in caught) == (policy == "skip")
                if policy == "propagate":
                    assert params[where].isnan().sum() == 1 and sum(int(p.isnan().sum()) for p in params) == 1
                else:
                    assert digest(opt) == before
                fill_gradients(params, "integers", 2)
                opt.step()
                assert digest(opt) != before


def clipping(stage: int) -> list[str]:
    """torch's clip_grad_norm_ before the step, and the clipping that is part of it."""
    digests = []
    for bound in (0.05, 1e6):
        models = [Net() for _ in range(3)]
        fused = ShardedSGD(models[0].parameters(), lr=0.1, momentum=0.9, max_grad_norm=bound, stage=stage)
        plain = ShardedSGD(models[1].parameters(), lr=0.1, momentum=0.9)
        theirs = torch.optim.SGD(models[2].parameters(), lr=0.1, momentum=0.9)
        for step in range(5):
            for model in models:
                fill_gradients(model.parameters(), "heavy_tailed" if step % 2 else "integers", step)
            norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), bound) for model in models[1:]]
            fused.step()
            plain.step()
            theirs.step()
            assert norms[0] == norms[1]
            assert fused.grad_norm == pytest.approx(float(norms[0]), rel=1e-6)
        close_to(models[0], models[2])
        close_to(models[1], models[2])
        digests.append(hashlib.sha256(b"".join(raw(param) for param in models[0].parameters())).hexdigest())
    return digests


def test_overflow_and_clipping(ranks: Pool) -> None:
    ranks.run(scalers, world=2)
    for world in (1, 2, 3):
        ranks.run(nonfinite_policies, world=world)
    digests = [each for world in (1, 2, 3) for stage in (0, 1) for each in ranks.run(clipping, stage, world=world)]
    assert all(each == digests[0] for each in digests) and digests[0][0] != digests[0][1]


# -- state dicts -------------------------------------------------------------------------------------------------------


def saved_bytes(optimizer: ShardedOptimizer) -> bytes:
    """What rank 0 writes, on every rank."""
    optimizer.consolidate_state_dict(to=0)
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        box = [file.getvalue()]
    dist.broadcast_object_list(box, 0)
    return box[0]


def load_bytes(data: bytes) -> dict[str, Any]:
    return torch.load(io.BytesIO(data), weights_only=True)


def continued(dtype: torch.dtype) -> tuple[str, bytes]:
    """Ten steps; also five, saved, loaded elsewhere in every way, and five: the same bits. Returns them, the file."""

    def advance(params: list[Parameter], optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            fill_gradients(params, "heavy_tailed", step)
            if step == 3:
                params[4].grad = None
            optimizer.step()

    whole = list(Zoo(dtype).parameters())
    opt = ShardedAdamW(whole, lr=1e-2, amsgrad=True)
    advance(whole, opt, range(5))
    data = saved_bytes(opt)
    weights = [param.detach().clone() for param in whole]
    parts = {
        key: {name: value.clone() for name, value in state.items()} for key, state in opt.state_dict()["state"].items()
    }
    part_dict = {**opt.state_dict(), "state": parts}
    advance(whole, opt, range(5, 10))
    expected = digest(opt)
    ways: dict[str, Callable[[list[Parameter], ShardedOptimizer], None]] = {
        "before the first step": lambda params, fresh: fresh.load_state_dict(load_bytes(data)),
        "parts, on the ranks that they come from": lambda params, fresh: (
            advance(params, fresh, range(50, 52)),
            fresh.load_state_dict(part_dict),
        ),
        "after other steps": lambda params, fresh: (
            advance(params, fresh, range(50, 52)),
            fresh.load_state_dict(load_bytes(data)),
        ),
        "twice": lambda params, fresh: (
            fresh.load_state_dict(load_bytes(data)),
            fresh.load_state_dict(fresh.state_dict()),
        ),
        "deepcopied after loading": lambda params, fresh: fresh.load_state_dict(load_bytes(data)),
    }
    for name, way in ways.items():
        params = list(Zoo(dtype, seed=5).parameters())
        fresh = ShardedAdamW(params, lr=3.0, amsgrad=True, stage=1, tuning=Tuning(bucket_bytes=1 << 20))
        way(params, fresh)
        with torch.no_grad():
            for param, value in zip(params, weights, strict=True):
                param.copy_(value)
        if name.startswith("after") or name.startswith("parts"):
            # The weights were written after the state was loaded: masters that round to other values were refreshed.
            fresh.load_state_dict(load_bytes(data))
        if name.startswith("deepcopied"):
            params, fresh = copy.deepcopy((params, fresh))
        advance(params, fresh, range(5, 10))
        assert digest(fresh) == expected, name
    return expected, data


def moved_and_cast_after_loading(data: bytes) -> None:
    """Loaded before .to(dtype) and before DDP: kept until the params are bound."""
    low = list(Zoo(torch.bfloat16).parameters())
    ours = ShardedAdamW(low, lr=1e-2, amsgrad=True)
    ours.load_state_dict(load_bytes(data))
    late_model = Zoo()
    late = ShardedAdamW(late_model.parameters(), lr=1e-2, amsgrad=True)
    late.load_state_dict(load_bytes(data))
    late_model.bfloat16()
    with torch.no_grad():
        for mine, theirs in zip(late_model.parameters(), low, strict=True):
            mine.copy_(theirs)
    for step in range(3):
        fill_gradients(low, "integers", step)
        fill_gradients(late_model.parameters(), "integers", step)
        ours.step()
        late.step()
    assert digest(ours) == digest(late)


def through_torch() -> None:
    """torch -> ours -> torch, each going on from the other's file as it would from its own."""
    for kind, ours, keywords in (
        (torch.optim.AdamW, ShardedAdamW, {"lr": 1e-2, "amsgrad": True}),
        (torch.optim.SGD, ShardedSGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ):
        reference, params = list(Zoo().parameters()), list(Zoo().parameters())
        torch_opt, first = kind(reference, **keywords), kind(params, **keywords)
        middle, last = ours(params, **keywords), kind(params, **keywords)
        for step in range(9):
            if step == 3:
                middle.load_state_dict(first.state_dict())
            if step == 6:
                saved, expected = load_bytes(saved_bytes(middle)), torch_opt.state_dict()
                assert saved.keys() == expected.keys()
                assert saved["param_groups"][0].keys() == expected["param_groups"][0].keys()
                last.load_state_dict(saved)
            fill_gradients(reference, "integers", step)
            fill_gradients(params, "integers", step)
            torch_opt.step()
            (first, middle, last)[step // 3].step()
        for mine, theirs in zip(params, reference, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=2e-6)
            for name, value in torch_opt.state.get(theirs, {}).items():
                torch.testing.assert_close(last.state[mine][name], value, atol=1e-6, rtol=2e-6)


def wrong_state_dicts() -> None:
    params = [param for param in Zoo().parameters() if param.requires_grad]
    opt = ShardedAdamW(params)
    fill_gradients(params, "integers", 0)
    opt.step()
    before = digest(opt), repr(opt.param_groups)

    def refuse(saved: dict[str, Any], kind: type[Exception], *words: str) -> None:
        with raises(kind, *words):
            opt.load_state_dict(saved)
        assert (digest(opt), repr(opt.param_groups)) == before

    def stepped(kind: type[torch.optim.Optimizer], shapes: list[Any], **keywords: Any) -> dict[str, Any]:
        others = [Parameter(torch.ones(shape)) for shape in shapes]
        other = kind(others, **keywords)
        for each in others:
            each.grad = torch.ones_like(each)
        other.step()
        return other.state_dict()

    shapes = [param.shape for param in params]
    refuse(stepped(torch.optim.AdamW, shapes[::-1]), StateError, "shape", "another model")
    refuse(stepped(torch.optim.AdamW, shapes[1:]), ValueError, "doesn't match the size")
    refuse(stepped(torch.optim.SGD, shapes, momentum=0.9), StateError, "exp_avg", "momentum_buffer")
    refuse(stepped(torch.optim.Adagrad, shapes), StateError, "exp_avg")
    good = stepped(torch.optim.AdamW, shapes)
    lacks = copy.deepcopy(good)
    del lacks["state"][3]["exp_avg_sq"]
    refuse(lacks, StateError, "missing", "exp_avg_sq")
    stranger = copy.deepcopy(good)
    stranger["state"][99] = stranger["state"][0]
    refuse(stranger, StateError, "99")
    two_groups = copy.deepcopy(good)
    two_groups["param_groups"].append(two_groups["param_groups"][0])
    refuse(two_groups, ValueError, "different number of parameter groups")
    flags = stepped(torch.optim.AdamW, shapes, amsgrad=True)
    for group in flags["param_groups"]:
        group["amsgrad"] = False
    refuse(flags, StateError, "max_exp_avg_sq")
    with raises(StateError, "load_state_dict"):
        opt.state = {0: 1}  # type: ignore[misc, assignment]


def parts() -> None:
    """A part says what it is, refuses what it cannot answer, and gathers."""
    params = [param for param in Zoo(torch.bfloat16).parameters() if param.requires_grad]
    opt, alone = ShardedAdamW(params), copy.deepcopy(params)
    torch_opt = ShardedAdamW(alone, stage=0)
    for step in range(3):
        for each, optimizer in ((params, opt), (alone, torch_opt)):
            fill_gradients(each, "integers", step)
            optimizer.step()
    found = 0
    for param, other in zip(params, alone, strict=True):
        for name, value in opt.state[param].items():
            exact = torch_opt.state[other][name]
            assert value.shape == exact.shape and value.dtype == exact.dtype
            if name == "step":
                continue
            assert isinstance(value, Part) and not isinstance(exact, Part)
            assert raw(value.full_tensor()) == raw(exact)
            assert value.full_tensor().stride() == exact.stride()
            with raises(StateError, "consolidate_state_dict"):
                torch.save(value, io.BytesIO())
            with raises(StateError, "full_tensor"):
                value.sum()
            with raises(StateError, "full_tensor"):
                value + 1
            assert raw(value.clone()) == raw(value) and f"shape={tuple(value.shape)}" in repr(value)
            found += value.local.numel()
    assert found
    with raises(StateError, "consolidate_state_dict"):
        torch.save(opt.state_dict(), io.BytesIO())
    with raises(StateError, "state_dict"):
        torch.save(opt, io.BytesIO())
    opt.consolidate_state_dict(to=dist.get_world_size() - 1)
    if dist.get_rank() == dist.get_world_size() - 1:
        torch.save(opt.state_dict(), io.BytesIO())
    else:
        with raises(StateError, "consolidate_state_dict"):
            torch.save(opt.state_dict(), io.BytesIO())
    with raises(ValueError, "ranks"):
        opt.consolidate_state_dict(to=7)


def test_state_dicts(ranks: Pool) -> None:
    finals: dict[torch.dtype, list[Any]] = {torch.float32: [], torch.bfloat16: []}
    files = {}
    for world in (1, 2, 3):
        for dtype, found in finals.items():
            by_rank = ranks.run(continued, dtype, world=world)
            files[dtype, world] = by_rank[0][1]
            found.append(load_bytes(by_rank[0][1]))
        ranks.run(moved_and_cast_after_loading, files[torch.bfloat16, 1], world=world)
        ranks.run(through_torch, world=world)
        ranks.run(wrong_state_dicts, world=world)
        if world > 1:
            ranks.run(parts, world=world)
    for dicts in finals.values():  # what is saved does not tell how many ranks saved it
        for other in dicts[1:]:
            assert other["param_groups"] == dicts[0]["param_groups"]
            for key, state in dicts[0]["state"].items():
                assert all(raw(value) == raw(other["state"][key][name]) for name, value in state.items())


# -- weights written by others, copies, ends ---------------------------------------------------------------------------


def written_weights() -> None:
    """Masters follow weights that were written; elements that the write left alone keep their low bits."""
    for way in ("in place", "through .data"):
        params = [param for param in Zoo(torch.bfloat16).parameters() if param.requires_grad]
        opt = ShardedSGD(params, lr=0.01, momentum=0.9)
        for step in range(3):
            fill_gradients(params, "heavy_tailed", step)
            opt.step()
        masters = [
            opt.state[param]["master"].full_tensor()
            if dist.get_world_size() > 1
            else opt.state[param]["master"].clone()
            for param in params
        ]
        assert any((master != param.float()).any() for master, param in zip(masters, params, strict=True))
        values = [param.detach().clone() for param in params]
        for value in values:
            value[torch.arange(value.numel()).reshape(value.shape) % 2 == 0] = 0.25
        for param, value in zip(params, values, strict=True):
            if way == "in place":
                with torch.no_grad():
                    param.copy_(value)
            else:
                param.data.copy_(value)
            param.grad = None
        if way != "in place":
            opt.refresh_masters()
        else:
            fill_gradients(params[:1], "integers", 0)
            params[0].grad.zero_()
            opt.step()  # notices
        for which, (param, value, master) in enumerate(zip(params, values, masters, strict=True)):
            now = opt.state[param]["master"]
            now = now.full_tensor() if isinstance(now, Part) else now
            if which == 0 and way == "in place":
                continue  # the momentum moved it
            kept = master.bfloat16() == value
            assert torch.equal(now, torch.where(kept, master, value.float())), f"{way}, param {which}"


def copies() -> None:
    model = ddp(Net()) if dist.get_world_size() > 1 else Net()
    opt = ShardedAdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        fill_gradients(model.parameters(), "integers", step)
        opt.step()
    plain = Net()
    plain.load_state_dict(
        model.module.state_dict() if isinstance(model, DistributedDataParallel) else model.state_dict()
    )
    other_model, other = copy.deepcopy((list(model.parameters()), opt))
    before = digest(opt)
    assert digest(other) == before
    for step in range(3, 6):
        fill_gradients(other_model, "integers", step)
        other.step()
    assert digest(opt) == before
    for step in range(3, 6):
        fill_gradients(model.parameters(), "integers", step)
        opt.step()
    assert digest(opt) == digest(other)
    opt.close()
    with raises(ShardoptError, "closed"):
        opt.step()
    close_to(model, model)
    again = ShardedAdamW(model.parameters(), lr=1e-2)
    again.load_state_dict(load_bytes(saved_bytes(other)))
    for params, optimizer in ((list(model.parameters()), again), (other_model, other)):
        fill_gradients(params, "integers", 6)
        optimizer.step()
    assert digest(again) == digest(other)


def memory_is_the_formula() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for stage in (0, 1):
            numels = (100_000, 257, 1, 0, 30_000)
            params = [Parameter(torch.randn(numel).to(dtype)) for numel in numels]
            opt = ShardedAdamW(params, stage=stage, tuning=Tuning(bucket_bytes=1 << 30))
            for param in params:
                param.grad = torch.ones_like(param)
            opt.step()
            shards = dist.get_world_size() if stage else 1
            blocks = sum(-(-numel // 256) for numel in numels)
            per_shard = -(-blocks // shards) * 256
            size = params[0].element_size()
            assert opt.memory() == {
                "param": {"device": per_shard * shards * size},
                "gradient": {"device": sum(numels) * size},
                "master": {"device": 4 * per_shard if dtype is torch.bfloat16 else 0},
                "state": {"device": 8 * per_shard},
                "buffer": {"device": per_shard // 256 * 4},
            }
            held = sum(
                opt.state[param][name].untyped_storage().nbytes() if not isinstance(opt.state[param][name], Part) else 0
                for param in params[:1]
                for name in ("exp_avg",)
            )
            assert stage or held == 4 * per_shard


def test_weights_copies_memory(ranks: Pool) -> None:
    for world in (1, 2, 3):
        for function in (written_weights, copies, memory_is_the_formula):
            ranks.run(function, world=world)


# -- wrong uses --------------------------------------------------------------------------------------------------------


def wrong_params() -> None:
    first = with_gradient(Parameter(torch.ones(8)))
    refused([first, with_gradient(Parameter(first.detach()[2:6]))], BindingError, "share memory", "param 0", "param 1")
    refused([first, with_gradient(Parameter(first.detach().view(2, 4)))], BindingError, "share memory")
    expanded = Parameter(torch.ones(3).expand(2, 3))
    expanded.grad = torch.ones(2, 3)
    refused([first, expanded], BindingError, "one place in memory")
    refused([first, Parameter(torch.ones(3, device="meta"))], BindingError, "meta")
    refused([first, with_gradient(Parameter(torch.ones(3, dtype=torch.float64)))], ShardoptError, "float64")
    sparse = Parameter(torch.ones(4, 3))
    sparse.grad = torch.zeros(4, 3).to_sparse()
    before = raw(sparse), raw(first)
    with raises(ShardoptError, "sparse"):
        ShardedAdamW([first, sparse]).step()
    assert before == (raw(sparse), raw(first))
    with raises(TypeError, "complex"):
        ShardedAdamW([first, Parameter(torch.ones(3, dtype=torch.complex64))])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch only warns of duplicates
        with raises((ValueError, BindingError), "twice"):  # type: ignore[arg-type]
            ShardedAdamW([first, first]).step()
    with raises(ValueError, "more than one parameter group"):
        ShardedAdamW([{"params": [first]}, {"params": [first]}])
    for flag in ("differentiable", "capturable"):
        with raises(ShardoptError, flag):
            ShardedAdamW([first], **{flag: True})
    for options, kind in (
        ({"stage": 2}, ValueError),
        ({"max_grad_norm": -1.0}, ValueError),
        ({"tuning": {}}, TypeError),
    ):
        with raises(kind, next(iter(options))):
            ShardedAdamW([first], **options)
    # After all these refusals the param still trains.
    opt = ShardedAdamW([first])
    before = raw(first), raw(first)
    opt.step()
    assert raw(first) != before[0]


def moved_params() -> None:
    for change in ("moved", "recast", "resized", "released"):
        for world_wide in (True, False):
            model = Net()
            opt = ShardedAdamW(model.parameters())
            fill_gradients(model.parameters(), "integers", 0)
            opt.step()
            fill_gradients(model.parameters(), "integers", 1)
            victim = model.out.weight
            kept, before = victim.data, digest(opt)
            if world_wide or dist.get_rank() == 0:
                if change == "moved":
                    victim.data = kept.clone()
                elif change == "recast":
                    victim.grad = None
                    victim.data = kept.bfloat16()
                    victim.grad = torch.ones_like(victim)
                elif change == "resized":
                    victim.grad = None
                    victim.data = kept[:1]
                else:
                    victim.grad = None
                    victim.data = torch.empty(0)
            with raises((BindingError, DisagreementError), "moved"):  # type: ignore[arg-type]
                opt.step()
            if world_wide or dist.get_rank() == 0:
                victim.grad = None
                victim.data = kept
            assert digest(opt) == before
            fill_gradients(model.parameters(), "integers", 1)
            opt.step()
            assert digest(opt) != before


def test_wrong_uses(ranks: Pool) -> None:
    for world in (1, 2):
        ranks.run(wrong_params, world=world)
        ranks.run(moved_params, world=world)


# -- autograd, compilation, several at once ----------------------------------------------------------------------------


def surroundings() -> None:
    """Compiled and checkpointed models train as plain ones do."""
    expected = Net()
    plain = ShardedAdamW(expected.parameters(), lr=1e-2)
    models: list[nn.Module] = [
        torch.compile(Net(), backend="aot_eager"),
        Net(checkpointed=True),
        Net(checkpointed=True, reentrant=True),
    ]
    for step in range(3):
        train_step(ddp(expected), plain, step)
    for model in models:
        opt = ShardedAdamW(model.parameters(), lr=1e-2)
        wrapped = ddp(model)
        for step in range(3):
            train_step(wrapped, opt, step)
        close_to(model, expected)


def autograd_sees_the_write() -> None:
    messages = []
    for kind in (torch.optim.AdamW, ShardedAdamW):
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        opt = kind([*first.parameters(), *second.parameters()])
        loss = second(first(torch.ones(1, 4))).sum()
        loss.backward(retain_graph=True)
        opt.step()
        with raises(RuntimeError, "modified by an inplace operation"):
            loss.backward()
        messages.append(True)
    assert len(messages) == 2


def several_at_once() -> None:
    """Two models, three optimizers; and two groups of ranks."""
    one, two = ddp(Net(1)), ddp(Net(2))
    halves = list(one.parameters())
    opts = [
        ShardedAdamW(halves[:4], lr=1e-2),
        ShardedSGD(halves[4:], lr=0.1, momentum=0.9),
        ShardedAdamW(two.parameters(), stage=0),
    ]
    alone = [copy.deepcopy(one), copy.deepcopy(two)]
    torch_halves = list(alone[0].parameters())
    torch_opts = [
        torch.optim.AdamW(torch_halves[:4], lr=1e-2),
        torch.optim.SGD(torch_halves[4:], lr=0.1, momentum=0.9),
        torch.optim.AdamW(alone[1].parameters()),
    ]
    for step in range(4):
        for models, optimizers in (((one, two), opts), (alone, torch_opts)):
            for optimizer in optimizers:
                optimizer.zero_grad()
            (loss_of(models[0], step) + loss_of(models[1], step)).backward()
            for optimizer in optimizers:
                optimizer.step()
    close_to(one, alone[0])
    close_to(two, alone[1])
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    own = Net(dist.get_rank())
    opt = ShardedAdamW(own.parameters(), process_group=groups[dist.get_rank()])
    before = digest(opt)
    for step in range(dist.get_rank() + 1):  # each rank as often as it likes
        fill_gradients(own.parameters(), "integers", step)
        opt.step()
    assert digest(opt) != before and not any(isinstance(each, Part) for each in opt.state[own.out.weight].values())
    del opts, opt
    gc.collect()


def without_group() -> None:
    assert not dist.is_initialized()
    ours, theirs = Net(), Net()
    opt, torch_opt = ShardedAdamW(ours.parameters()), torch.optim.AdamW(theirs.parameters())
    for step in range(3):
        train_step(ours, opt, step)
        train_step(theirs, torch_opt, step)
    close_to(ours, theirs)
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    torch_opt.load_state_dict(load_bytes(file.getvalue()))
    opt.consolidate_state_dict()
    train_step(ours, opt, 3)
    train_step(theirs, torch_opt, 3)
    close_to(ours, theirs)


def test_surroundings(ranks: Pool) -> None:
    ranks.run(surroundings, world=2)
    ranks.run(autograd_sees_the_write, world=2)
    ranks.run(several_at_once, world=3)
    ranks.run(without_group, world=1, group=False)


# -- deadlines ---------------------------------------------------------------------------------------------------------


def late() -> str:
    """A rank that never comes: the others say what they waited for, in time."""
    model = Net()
    opt = ShardedAdamW(model.parameters(), tuning=Tuning(timeout=2.0))
    fill_gradients(model.parameters(), "integers", 0)
    opt.step()
    found = ""
    if dist.get_rank() == 0:
        try:
            opt.step()
        except CommunicationError as error:
            found = str(error)
    dist.destroy_process_group()
    return found


def test_deadline(ranks: Pool) -> None:
    found = ranks.run(late, world=2, deadline=60)[0]
    assert "agreeing on the step" in found and "rank 0 of 2" in found
