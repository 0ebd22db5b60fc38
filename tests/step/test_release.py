"""Released gradients: the bits of a training without, no gradient kept, a clear error for what comes too late."""

import copy
import io
import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch
from weakref import WeakSet

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from shardopt import (
    BindingError,
    CheckpointError,
    CommunicationError,
    DisagreementError,
    Offload,
    ShardedAdamW,
    ShardedLion,
    ShardedNAdam,
    ShardedSGD,
    ShardoptError,
    StateError,
    Tuning,
    load_checkpoint,
    save_checkpoint,
)
from shardopt.config import Options
from shardopt.partition import reducer as reducer_module
from shardopt.partition.comm.group import Ranks
from shardopt.partition.gradient_buckets import PassingSum
from shardopt.tensors.released_gradient import ReleasedGradient
from shardopt.tools.plan import plan
from shardopt.tools.ways import Way
from tests.support import modules, training
from tests.support.modules import Odd, Repeated, Stack, Tied, W
from tests.support.ranks import Pool
from tests.support.training import raises, raw

ADAMW = {"lr": 0.01, "weight_decay": 0.1}
SGD = {"lr": 0.125, "momentum": 0.5, "weight_decay": 0.25}
SMALL = {"master": "split24", "state_format": "int8"}
CLIP: dict[str, Any] = {"max_grad_norm": 0.05, "clip_by": "previous"}
HALF_WAY = "half-way"
JOB = PassingSum.reduction

Loss = Callable[[nn.Module, int], Tensor]


def tuning(**more: Any) -> Tuning:
    """Several buckets; states of all params compressed; no wait for long."""
    return Tuning(**{"bucket_bytes": 1500, "compress_from": 256, **more})


def number() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


# -- the same bits -----------------------------------------------------------------------------------------------------


def on_tokens(model: nn.Module, step: int) -> Tensor:
    return training.loss_of(model, step)


def on_floats(model: nn.Module, step: int) -> Tensor:
    return modules.loss_of(model(modules.data(step, 4, 3, W)))


def skipping(model: nn.Module, step: int) -> Tensor:
    """Each rank leaves out other blocks, and no rank needs one of them in the first steps."""
    model.skipped = {(step + number()) % 3, 3 if step < 2 else 4}
    return on_floats(model, step)


def two_forwards(model: nn.Module, step: int) -> Tensor:
    return on_floats(model, step) + on_floats(model, step + 70)


def bf16_net(**keywords: Any) -> nn.Module:
    return training.Net(**keywords).bfloat16()


CASES: dict[str, tuple[Callable[[], nn.Module], Loss, Any, dict[str, Any]]] = {
    "fp32": (training.Net, on_tokens, ShardedAdamW, ADAMW),
    "small formats": (bf16_net, on_tokens, ShardedAdamW, {**ADAMW, **SMALL}),
    "fp32 masters, an average": (bf16_net, on_tokens, ShardedNAdam, {"lr": 0.01, "ema": 0.9}),
    "no masters": (bf16_net, on_tokens, ShardedLion, {"lr": 0.01, "master": "none"}),
    "reduced in bf16": (training.Net, on_tokens, ShardedSGD, {**SGD, "reduce_dtype": torch.bfloat16}),
    "offloaded": (bf16_net, on_tokens, ShardedAdamW, {**ADAMW, **SMALL, "offload": "cpu"}),
    "checkpointed": (lambda: training.Net(checkpointed=True), on_tokens, ShardedSGD, SGD),
    "reentrant": (lambda: Stack(reentrant=True, blocks=2), on_floats, ShardedSGD, SGD),
    "all reentrant": (lambda: Stack(reentrant=True, whole=True, blocks=2), on_floats, ShardedSGD, SGD),
    "used several times": (Repeated, two_forwards, ShardedSGD, SGD),
    "tied": (Tied, on_floats, ShardedSGD, SGD),
    "odd shapes": (Odd, on_floats, ShardedAdamW, ADAMW),
    "unused": (lambda: Stack(blocks=5), skipping, ShardedAdamW, ADAMW),
    "clipped": (training.Net, on_tokens, ShardedSGD, {**SGD, **CLIP}),
}


def trained(name: str, stage: int, released: bool, **knobs: Any) -> dict[str, Any]:
    """What a training of some steps leaves, with other rates for biases, a schedule, and weights written meanwhile."""
    make, loss, kind, keywords = CASES[name]
    torch.manual_seed(0)
    model = make()
    frozen = list(model.parameters())[-1].requires_grad_(False)
    groups = [
        {"params": [param for param in model.parameters() if param.dim() > 1]},
        {"params": [param for param in model.parameters() if param.dim() < 2], "lr": 0.03},
    ]
    opt = kind(
        groups,
        **keywords,
        module=model,
        stage=stage,
        release_gradients=released,
        tuning=tuning(**knobs),
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda epoch: 0.5**epoch)
    norms = []
    for step in range(5):
        if step == 2:
            frozen.requires_grad_(True)  # bound at its first forward
            with torch.no_grad(), opt.unsharded():
                next(model.parameters()).mul_(0.5)  # as a loader would write
        if step == 3:
            frozen.requires_grad_(False)
        opt.zero_grad()
        loss(model, step).backward()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        assert all(isinstance(grad, ReleasedGradient) for grad in grads) or not released
        norms.append(0.0 if released else math.sqrt(math.fsum(float(g.norm(dtype=torch.float64)) ** 2 for g in grads)))
        opt.step()
        if released:
            assert all(param.grad is None for param in model.parameters())
            norms[-1] = opt.grad_norm
        schedule.step()
    states = {key: {name: raw(value) for name, value in opt.state[key].items()} for key in model.parameters()}
    with opt.unsharded():
        params = [raw(param) for param in model.parameters()]
    return {
        "params": params,
        "states": list(states.values()),
        "updates": opt.updates,
        "norms": norms,
        "kept": opt.memory()["gradient"]["device"] if released else 0,
    }


def has_same_bits(stage: int, neighbours: bool, third: int | None) -> None:
    """``third``: of the cases; None: all of them."""
    for index, name in enumerate(CASES):
        if third is not None and index % 3 != third:
            continue
        policy = "propagate" if index % 4 == 3 else "skip"
        check_same(name, stage, neighbours=neighbours, nonfinite=policy)


def check_same(name: str, stage: int, **knobs: Any) -> None:
    plain, released = (trained(name, stage, each, **knobs) for each in (False, True))
    torch.testing.assert_close(released.pop("norms"), plain.pop("norms"), rtol=1e-12, atol=0)
    for key in plain:
        assert released[key] == plain[key], f"{key} of {name}, stage {stage}, {knobs}"


def has_same_bits_otherwise() -> None:
    """With the backend's own collectives, of which two ranks' sums have the same bits."""
    for stage in (0, 1):
        with patch.object(Ranks, "has_collectives", lambda ranks, device: ranks.group is not None):
            check_same("fp32", stage, neighbours=False)


@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.slow)], ids=("drawn", "whole"))
@pytest.mark.parametrize("world", [1, 2, 3])
def test_same_bits_as_without(world: int, is_whole: bool, ranks: Pool) -> None:
    """By default each case at all stages, on one number of ranks."""
    for stage in range(4):
        ranks.run(has_same_bits, stage, world != 2, None if is_whole else (stage + world) % 3, world=world)
    if world == 2:
        ranks.run(has_same_bits_otherwise, world=world)


def test_a_param_that_leaves_its_group_and_returns_keeps_all_of_its_master() -> None:
    """Its backwards meanwhile write nothing, so what is kept beside it is still that of its weights."""
    ends = []
    for released in (False, True):
        model = layers(2)
        opt = ShardedAdamW(model, **ADAMW, master="split", release_gradients=released)
        params = opt.param_groups[0]["params"]
        for step in range(6):
            if step == 2:
                away = params.pop(0)
            if step == 4:
                params.insert(0, away)
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step)).bfloat16()
            model(x).float().square().mean().backward()
            opt.step()
            model.zero_grad()
        ends.append([raw(each) for param in model.parameters() for each in (param, *opt.state[param].values())])
    assert ends[0] == ends[1]


def accumulated(released: bool, stage: int, folder: Any, kind: str) -> list[bytes]:
    """Steps of three backwards each, with gradients that only the first one or only the last one brings."""
    make, loss, optimizer, keywords = CASES[kind]
    torch.manual_seed(0)
    model = make()
    opt = optimizer(model, **keywords, stage=stage, release_gradients=released, tuning=tuning())
    wrapped = DistributedDataParallel(model)
    heads = [each for each in model.children() if isinstance(each, nn.Linear)][-1:]
    for step in range(4):
        opt.zero_grad()
        for turn in range(3):
            is_paused = turn < 2 or step == 2  # then nothing is reduced within a backward
            for param in heads[0].parameters() if heads else ():
                param.requires_grad_(not (step == 1 and turn == 2))
            with (wrapped if step == 3 else opt).no_sync() if is_paused else nullcontext():
                loss(wrapped if step == 3 else model, 3 * step + turn).backward()
            if step == 1 and turn == 0:
                save_checkpoint(folder, model, opt)
                opt.zero_grad()
                load_checkpoint(folder, model, opt)
        for param in heads[0].parameters() if heads else ():
            param.requires_grad_(True)
        if step == 2:
            opt.reduce_gradients()
            opt.reduce_gradients()  # there is nothing left
        opt.step()
    found = bits(model, opt)
    assert opt.updates == 4
    opt.close()
    return found


def accumulates(folder: Any, world: int) -> None:
    for number, kind in enumerate(("fp32", "small formats", "unused")):
        stage = (world + number) % 2  # every two of world, kind and stage meet
        plain, released = (accumulated(each, stage, folder / f"{kind}{each}", kind) for each in (False, True))
        assert plain == released, f"{kind}, stage {stage}"


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_last_backward_of_an_accumulation_releases(world: int, ranks: Pool, tmp_path: Any) -> None:
    ranks.run(accumulates, tmp_path, world, world=world)


def clipped(folder: Any, way: dict[str, Any], resumes: bool) -> tuple[list[bytes], list[Tensor]]:
    """Five steps, the second of which is skipped, and where they resume the others from checkpoints."""
    torch.manual_seed(0)
    model = training.Net()
    opt = ShardedSGD(model, **SGD, **CLIP, **way)
    for step in range(5):
        opt.zero_grad()
        (on_tokens(model, step) * (math.nan if step == 1 else 1.0)).backward()
        if resumes and way.get("release_gradients"):  # the step was taken, and step() is to come
            save_checkpoint(folder, model, opt)
        opt.step()
        if resumes:
            if not way.get("release_gradients"):
                save_checkpoint(folder, model, opt)
            opt.zero_grad()
            (on_tokens(model, 40) * 9).backward()  # what it leaves is overwritten
            opt.step()
            assert opt.state_dict()["param_groups"][0]["previous_grad_norm"] == opt.grad_norm
            load_checkpoint(folder, model, opt)
    with opt.unsharded():
        found = [raw(param) for param in model.parameters()], [param.detach().clone() for param in model.parameters()]
    opt.close()
    return found


def clips_by_the_norm_before(folder: Any) -> None:
    """Every way has the bits of every other, and after every resume; they are close to what torch's SGD makes.

    Each way on two of the three numbers of ranks, but for the first one, which the others are compared with.
    """
    ways: list[dict[str, Any]] = [{"stage": stage} for stage in range(4)]
    ways += [{"stage": stage, "release_gradients": True} for stage in range(4)]
    ways += [{"stage": stage, "release_gradients": True, "offload": folder / f"{stage}"} for stage in (1, 3)]
    ways += [{"stage": 2, "offload": folder / "disk"}, {"stage": 1, "offload": "cpu"}]
    found, world = [], dist.get_world_size() if dist.is_initialized() else 1
    for number, way in enumerate(ways):
        if number and number % 3 == 3 - world:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the step that is skipped
            knobs = {"tuning": tuning(keep_below=200), **way}
            found.append(clipped(folder / f"of {number}", knobs, resumes=number % 3 > 0))
        assert found[-1][0] == found[0][0], f"{way}"
    torch.manual_seed(0)
    reference = training.Net()
    sgd = torch.optim.SGD(reference.parameters(), **SGD)
    norm = None
    for step in (0, 2, 3, 4):
        sgd.zero_grad()
        on_tokens(reference, step).backward()
        grads = [param.grad for param in reference.parameters()]
        if dist.is_initialized():
            for grad in grads:
                dist.all_reduce(grad)
                grad /= dist.get_world_size()
        factor = 1.0 if norm is None else min(1.0, CLIP["max_grad_norm"] / norm)
        norm = float(torch.stack([grad.norm() for grad in grads]).norm())
        assert norm > 2 * CLIP["max_grad_norm"], norm
        torch._foreach_mul_(grads, factor)
        sgd.step()
    for ours, theirs in zip(found[0][1], reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_clipping_by_the_norm_before(world: int, ranks: Pool, tmp_path: Any) -> None:
    ranks.run(clips_by_the_norm_before, tmp_path, world=world)


def replayed(released: bool, stage: int) -> list[bytes]:
    """Steps alike, then one in which rank 0 leaves a block out, and one in which all ranks do."""
    torch.manual_seed(0)
    model = Stack(blocks=3)
    opt = ShardedAdamW(model, **ADAMW, stage=stage, release_gradients=released, tuning=tuning(bucket_bytes=4000))
    for step in range(7):
        model.skipped = {1} if step == 5 or (step == 3 and number() == 0) else set()
        step_with(model, opt, step, on_floats)
    found = bits(model, opt)
    opt.close()
    return found


def replays() -> None:
    for stage in (0, 1):
        assert replayed(True, stage) == replayed(False, stage), f"stage {stage}"


@pytest.mark.parametrize("world", [1, 2])
def test_a_plan_does_not_outlive_the_gradients_it_was_made_for(world: int, ranks: Pool) -> None:
    ranks.run(replays, world=world)


def adversaries(**keywords: Any) -> list[bytes]:
    """A critic through which the loss of another model runs while it is frozen: at first, and before its own step."""
    torch.manual_seed(0)
    critic, maker = Stack(blocks=2), Stack(blocks=2)
    opts = [ShardedAdamW(each, **ADAMW, **keywords) for each in (critic, maker)]

    def take_step(opt: Any) -> None:
        opt.step()
        opt.zero_grad()

    def fool(step: int, weight: float = 1.0) -> None:
        critic.requires_grad_(False)
        (critic(maker(modules.data(step, 4, 3, W))).square().mean() * weight).backward()
        critic.requires_grad_(True)
        take_step(opts[1])

    for step in range(4):
        fool(step)
        critic(maker(modules.data(step, 4, 3, W)).detach()).mean().backward()
        if step == 2:
            fool(9, weight=0.0)  # what comes through depends on whether the critic is updated
        take_step(opts[0])
    for opt in opts:
        opt.close()
    return [raw(param) for model in (critic, maker) for param in model.parameters()]


def has_same_bits_through_frozen_models() -> None:
    usual = [adversaries(stage=stage, tuning=tuning(keep_below=1000)) for stage in (1, 2, 3)]
    released = [adversaries(stage=stage, release_gradients=True, tuning=tuning()) for stage in (0, 1, 3)]
    assert all(each == usual[0] for each in (*usual, *released))


@pytest.mark.parametrize("world", [1, 2])
def test_backwards_of_other_models_are_no_steps(world: int, ranks: Pool) -> None:
    ranks.run(has_same_bits_through_frozen_models, world=world)


# -- memory ------------------------------------------------------------------------------------------------------------


def layers(count: int = 16, width: int = 64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count))).bfloat16()


def keeps_no_gradient(stage: int) -> None:
    """Of gradients, their buffers and their sums, never more is there than a few buckets hold."""
    model = layers()
    tuned = tuning(bucket_bytes=4 * 64 * 64, timeout=120.0)
    opt = ShardedAdamW(model, **ADAMW, **SMALL, stage=stage, release_gradients=True, tuning=tuned)
    numel, world = sum(param.numel() for param in model.parameters()), dist.get_world_size()
    bucket = 2 * 64 * 64  # elements
    made: dict[StorageWeakRef, int] = {}
    peaks = []

    def note(*tensors: Tensor) -> None:
        made.update({StorageWeakRef(each.untyped_storage()): each.untyped_storage().nbytes() for each in tensors})
        peaks.append(sum(nbytes for ref, nbytes in made.items() if not ref.expired()))

    def job(self: PassingSum, buffer: Tensor, add: bool) -> Any:
        found = JOB(self, buffer, add)
        note(found.buffer, found.target)
        return found

    for param in model.parameters():
        param.register_hook(note)
    # More memory than was meant is taken by ranks of a busy machine that lose patience, and beside an optimizer that
    # another test left in mid-backward.
    patient = patch.multiple(reducer_module, BYTES_UNDER_WAY=0, PATIENCE=60.0, _REDUCERS=WeakSet())
    with patch.object(PassingSum, "reduction", job), patient:
        for step in range(3):
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step)).bfloat16()
            model(x).square().mean().backward()
            opt.step()
            if step == 0:
                peaks.clear()  # ranks compile, and are waited for no longer than a while
    assert len(peaks) == 2 * 24
    # Two buckets that are reduced and one that is filled, as buffers and as fp32 sums; two params' own gradients.
    sums = 4 * bucket // (world if stage else 1) if world > 1 else 0
    assert max(peaks) <= 3 * (2 * bucket + sums) + 2 * 2 * 64 * 64 < 16 * (2 * bucket + sums) // 2
    memory = opt.memory()
    assert memory["gradient"] == {"device": 0}
    kept = sum(memory[kind]["device"] for kind in ("param", "master", "state"))
    shards = world if stage else 1
    assert kept == numel * 2 + numel * (3 + 2 * 4 / 256) / shards
    if world == 1:
        assert kept / numel == 5.03125
    way = Way(stage, True, torch.bfloat16, "split24", "int8", release_gradients=True)
    need = plan(model, opt, world, way, Options(tuning=opt.options.tuning))
    for kind in ("param", "gradient", "master", "state"):
        assert need.bytes[kind]["device"] == memory[kind]["device"]


@pytest.mark.parametrize("world", [1, 2])
def test_no_gradient_is_kept(world: int, ranks: Pool) -> None:
    for stage in (0, 1):
        ranks.run(keeps_no_gradient, stage, world=world)


# -- what comes too late -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"module": None}, ("hand the module over", "ShardedAdamW(model")),
        ({"max_grad_norm": 1.0}, ("max_grad_norm=1.0", "clip_by='previous'", "omit one")),
        ({"gradient_format": "bf16"}, ("gradient_format='bf16'", "no effect")),
        ({"stage": 2, "offload": Offload("cpu", gradients="cpu")}, ("Offload(gradients='cpu')", "no effect")),
        ({"release_gradients": "yes"}, ("True or False",)),
    ],
)
def test_refused_at_construction(keywords: dict[str, Any], words: tuple[str, ...]) -> None:
    model = training.Net()
    with raises(TypeError if "release_gradients" in keywords else ValueError, *words):
        ShardedAdamW(model.parameters(), **{"module": model, "release_gradients": True, **keywords})


def made(stage: int = 1, make: Callable[[], nn.Module] = training.Net, **keywords: Any) -> tuple[Any, Any]:
    model = make()
    given = {"release_gradients": True, "tuning": tuning(), **keywords}
    return model, ShardedSGD(model, **SGD, stage=stage, **given)


def step_with(model: nn.Module, opt: Any, step: int, loss: Loss = on_tokens) -> None:
    opt.zero_grad()
    loss(model, step).backward()
    opt.step()


def bits(model: nn.Module, opt: Any) -> list[bytes]:
    """Params and, where they are bound, this rank's states."""
    states = [raw(value) for param in model.parameters() for value in opt.state.get(param, {}).values()]
    return [raw(param) for param in model.parameters()] + states


LATE_USES: dict[str, Callable[[nn.Module, Any], Any]] = {
    "clipped": lambda model, opt: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "clipped one by one": lambda model, opt: nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False),
    "clipped by value": lambda model, opt: nn.utils.clip_grad_value_(model.parameters(), 1.0),
    "a norm": lambda model, opt: model.out.weight.grad.norm(),
    "read": lambda model, opt: model.out.weight.grad * 1,
    "printed as numbers": lambda model, opt: model.out.bias.grad[0].item(),
    "added to": lambda model, opt: model.out.weight.grad.add_(1.0),
    "gathered": lambda model, opt: model.out.weight.grad.full_tensor(),
    "copied": lambda model, opt: model.out.weight.grad.clone(),
    "its part": lambda model, opt: model.out.weight.grad.local,
    "saved": lambda model, opt: torch.save(model.out.weight.grad, io.BytesIO()),
    "unscaled": lambda model, opt: torch.amp.GradScaler("cpu").unscale_(opt),
    "scaled": lambda model, opt: torch.amp.GradScaler("cpu").step(opt),
}


def refuses_what_comes_too_late(stage: int, folder: Any) -> None:
    reference, plain = made(stage, release_gradients=False)
    model, opt = made(stage)
    opt.step()  # without a backward nothing happens, as in torch
    model.out.weight.grad = torch.ones_like(model.out.weight)
    with raises(ShardoptError, "no backward handed over"):
        opt.step()
    opt.zero_grad()
    opt.bind()
    for step in range(4):
        step_with(reference, plain, step)
    step_with(model, opt, 0)
    on_tokens(model, 1).backward()
    for use in LATE_USES.values():
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))  # as for a loss: before, torch asks for it
        with patch.object(torch.amp, "GradScaler", lambda _, scaler=scaler: scaler), raises(StateError, "released"):
            use(model, opt)
    copied = copy.deepcopy(model.out.weight.grad)  # as of a model beside its gradients
    assert isinstance(copied, ReleasedGradient) and repr(copied).startswith("ReleasedGradient(shape=")
    assert isinstance(model.out.weight.grad.detach(), ReleasedGradient)
    with raises(StateError, ".data", "released"):
        model.out.weight.grad.data = torch.zeros_like(model.out.weight)
    torch._foreach_zero_([model.out.weight.grad])  # as torch clears many at once
    # The second backward is refused before anything changed, through the output's node or through a param's.
    before = bits(model, opt)
    for loss in (lambda: on_tokens(model, 9), lambda: model.out.weight.sum()):
        with raises(ShardoptError, "second backward", "step()"):
            loss().backward()
    opt.zero_grad(set_to_none=False)
    opt.zero_grad()  # takes no update back
    with raises(ShardoptError, "second backward", "step()"):
        on_tokens(model, 9).backward()
    opt.zero_grad()
    assert before == bits(model, opt)
    assert opt.step() is None and opt.updates == 2
    # So are a backward of the next step that would only accumulate, by either no_sync(), and a step of nothing else.
    wrapped = DistributedDataParallel(model)
    before = bits(model, opt)
    for outer, context in ((model, opt.no_sync), (wrapped, wrapped.no_sync)):
        with context():
            on_tokens(outer, 9).backward()
        with raises(ShardoptError, "outside of no_sync()", "reduce_gradients()"):
            opt.step()
        opt.zero_grad()
    model.out.bias.grad = torch.ones_like(model.out.bias)
    with raises(ShardoptError, "by hand"):
        opt.step()
    opt.zero_grad()
    assert before == bits(model, opt) and opt.updates == 2
    step_with(model, opt, 2)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = on_tokens(model, 3)
        loss.backward()
        return loss

    assert opt.step(closure) is not None and opt.updates == 4
    assert bits(model, opt) == bits(reference, plain)


def refuses_two_directions() -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2))
    model, opt = made(process_group=mesh)
    for _ in range(2):
        with raises(BindingError, "2D DeviceMesh"):
            on_tokens(model, 0)
    opt.close()


@pytest.mark.parametrize("world", [1, 2])
def test_refused_by_name(world: int, ranks: Pool, tmp_path: Any) -> None:
    for stage in (0, 1):
        ranks.run(refuses_what_comes_too_late, stage, str(tmp_path), world=world)
    if world == 2:
        ranks.run(refuses_two_directions, world=4)


# -- half a step -------------------------------------------------------------------------------------------------------


def is_broken(model: nn.Module, opt: Any, folder: Any, loss: Loss = on_tokens) -> None:
    """Nothing goes on from here, on any rank."""
    with raises(ShardoptError, HALF_WAY):
        opt.step()
    opt.zero_grad()
    with raises(ShardoptError, HALF_WAY):
        loss(model, 5).backward()
    with raises(ShardoptError, HALF_WAY):
        opt.step()
    with raises(CheckpointError, HALF_WAY):
        save_checkpoint(folder, model, opt)


class Boom(Exception):
    pass


def fails_in_backward(folder: Any) -> None:
    """An error of the user's on the last rank, when so many params have their gradient."""
    last = dist.get_rank() == dist.get_world_size() - 1
    reference, plain = made(release_gradients=False)
    for step in range(2):
        step_with(reference, plain, step)
    for position in (0, 4, 8):
        model, opt = made()
        step_with(model, opt, 0)
        before = bits(model, opt)
        counted = itertools.count()

        def fail(_: Tensor, position: int = position, counted: Any = counted) -> None:
            if next(counted) == position:
                raise Boom

        hooks = [param.register_hook(fail) for param in model.parameters()] if last else []
        with raises(Boom) if last else raises(CommunicationError, "gave up this backward"):
            try:
                on_tokens(model, 1).backward()
            except Boom:
                opt.zero_grad()  # tells the others
                raise
        for hook in hooks:
            hook.remove()
        if position:
            is_broken(model, opt, folder)
        elif dist.get_world_size() == 1:  # nothing was used: the training goes on
            assert before == bits(model, opt)
            step_with(model, opt, 1)
            assert bits(model, opt) == bits(reference, plain)


class Peeking(nn.Module):
    """Uses a param where autograd does not see it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.mix = nn.Linear(W, W), nn.Linear(W, W, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.first(x) @ self.mix.weight.detach())


class Again(nn.Module):
    """Checkpoints that hand over the gradients of one module in two turns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = nn.Linear(W, W)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.block, x.requires_grad_() if x.is_leaf else x, use_reentrant=True)
        return x


def meets_an_updated_param(folder: Any) -> None:
    for make, kind, words in (
        (Peeking, RuntimeError, ("inplace operation",)),
        (Again, ShardoptError, ("use_reentrant=False", "block")),
    ):
        if make is Peeking and dist.get_world_size() > 1:
            continue  # whether the update comes first is then a matter of time; if it does not, nothing is wrong
        model = make()
        opt = ShardedSGD(model.named_parameters(), **SGD, module=model, release_gradients=True, tuning=tuning())
        with raises(kind, *words):
            on_floats(model, 0).backward()
        is_broken(model, opt, folder, on_floats)


def meets_inf_and_nan(folder: Any) -> None:
    """In all gradients, where nothing was used yet; in one, behind buckets that were."""
    last = dist.get_rank() == dist.get_world_size() - 1
    reference, plain = made(release_gradients=False)
    for step in range(2):
        step_with(reference, plain, step)
    for policy in ("skip", "raise"):
        model, opt = made(tuning=tuning(nonfinite=policy))
        step_with(model, opt, 0)
        before = bits(model, opt)
        with warnings.catch_warnings():
            warnings.simplefilter("error" if policy == "raise" else "ignore")
            with raises(ShardoptError, "NaN", "nothing changed") if policy == "raise" else nullcontext():
                (on_tokens(model, 1) * (math.nan if last else 1.0)).backward()
            opt.step()
        assert before == bits(model, opt) and opt.updates == 1
        step_with(model, opt, 1)
        assert bits(model, opt) == bits(reference, plain)
        if last:
            model.embed.weight.register_hook(lambda grad: grad.fill_(math.inf))
        with raises(ShardoptError, "NaN", "were updated before", "first in"):
            on_tokens(model, 2).backward()
        assert all(param.isfinite().all() for param in model.parameters())
        is_broken(model, opt, folder)
    found = []
    for release_gradients in (True, False):
        model, opt = made(tuning=tuning(nonfinite="propagate"), release_gradients=release_gradients)
        if last:
            model.conv.weight.register_hook(lambda grad: grad.index_fill(0, torch.tensor(0), math.inf))
        step_with(model, opt, 0)
        assert opt.grad_norm == (math.inf if release_gradients else None) and opt.updates == 1
        found.append(bits(model, opt))
    assert found[0] == found[1]


def undone_on_a_disk(folder: Any) -> None:
    """Errors in mid-backward, and an Inf behind buckets that were used: nothing has happened, and it goes on."""
    last = number() == (dist.get_world_size() if dist.is_initialized() else 1) - 1
    for stage, kind, share in ((1, {"master": "split", "state_format": "int8"}, 0.5), (3, {}, 1.0)):
        way = {**kind, "stage": stage, "tuning": tuning(keep_below=200)}
        reference, model = bf16_net(), bf16_net()
        plain = ShardedAdamW(reference, **ADAMW, **way)
        offload = Offload(folder / f"{stage}", fraction=share)
        opt = ShardedAdamW(model, **ADAMW, **way, release_gradients=True, offload=offload)
        for step in range(4):
            step_with(reference, plain, step)
            if step in (1, 2):
                before, counted = bits(model, opt), itertools.count()

                def spoil(grad: Tensor, step: int = step, counted: Any = counted) -> Any:
                    if step == 1 and next(counted) == 6:
                        raise Boom
                    return grad if step == 1 else grad.fill_(math.inf)

                spoilt = model.parameters() if step == 1 else [model.embed.weight]
                hooks = [param.register_hook(spoil) for param in spoilt] if last else []
                opt.zero_grad()
                with warnings.catch_warnings(), spoils(step, last, model, opt):
                    warnings.simplefilter("ignore")
                    on_tokens(model, 50).backward()
                    opt.step()
                for hook in hooks:
                    hook.remove()
                assert before == bits(model, opt) and opt.updates == step
            step_with(model, opt, step)
        with opt.unsharded(), plain.unsharded():
            assert bits(model, opt) == bits(reference, plain), f"stage {stage}"
        opt.close()
        plain.close()


@contextmanager
def spoils(step: int, last: bool, model: nn.Module, opt: Any) -> Iterator[None]:
    if step == 2:
        yield
        return
    with raises(Boom) if last else raises(CommunicationError, "gave up this backward"):
        try:
            yield
        except Boom:
            opt.zero_grad()  # tells the others
            raise
    opt.zero_grad()


@pytest.mark.parametrize("world", [1, 2])
def test_a_disk_undoes_what_backward_has_updated(world: int, ranks: Pool, tmp_path: Any) -> None:
    ranks.run(undone_on_a_disk, tmp_path, world=world)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("happens", [fails_in_backward, meets_an_updated_param, meets_inf_and_nan])
def test_half_a_step_is_the_end(happens: Callable[[Any], None], world: int, ranks: Pool, tmp_path: Any) -> None:
    ranks.run(happens, tmp_path, world=world)


def shown_between() -> None:
    """Backward is the step: what was consolidated before it is not shown after it, and no average takes it."""
    model = nn.Linear(30, 20, bias=False)
    opt = ShardedSGD(model, lr=0.5, momentum=0.5, release_gradients=True, ema=0.5)

    def shows(value: float) -> bool:
        found = opt.state[model.weight]["momentum_buffer"]
        return bool((getattr(found, "local", found) == value).all())

    for expected in (1.0, 1.5):
        model(torch.ones(1, 30)).sum().backward()
        assert shows(expected)
        opt.step()
        opt.consolidate_state_dict()
    before = bits(model, opt)
    with opt.unsharded(ema=True), raises(ShardoptError, "before a backward with release_gradients=True: inside"):
        model(torch.ones(1, 30)).sum().backward()
    opt.zero_grad()
    assert bits(model, opt) == before and opt.updates == 2
    model(torch.ones(1, 30)).sum().backward()
    opt.step()
    assert shows(1.75) and opt.updates == 3
    opt.close()


@pytest.mark.parametrize("world", [1, 2])
def test_what_is_shown_between_backward_and_step(world: int, ranks: Pool) -> None:
    ranks.run(shown_between, world=world)


def ranks_differ(folder: Any) -> None:
    last = dist.get_rank() == 1
    model, opt = made()
    step_with(model, opt, 0)
    opt.param_groups[0]["lr"] *= 2 if last else 1
    with raises(DisagreementError, "lr", "0.25 on rank 1", "checkpoint"):
        on_tokens(model, 1).backward()
    is_broken(model, opt, folder)
    model, opt = made()
    step_with(model, opt, 0)
    with torch.no_grad():
        model.out.bias.mul_(2 if last else 3)
    with raises(DisagreementError, "weights (sum of bits)", "checkpoint"):
        on_tokens(model, 1).backward()
    is_broken(model, opt, folder)
    model, opt = made(release_gradients=last)
    with raises(DisagreementError, "release_gradients", "nothing changed"):
        on_tokens(model, 0)


def test_ranks_that_differ(ranks: Pool, tmp_path: Any) -> None:
    ranks.run(ranks_differ, tmp_path, world=2)
