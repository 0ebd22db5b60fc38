"""``compute_dtype``: an fp32 module trains to the bits of a bf16 one with fp32 masters that start from its values."""

import copy
import warnings
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardopt
from shardopt import (
    BindingError,
    Offload,
    OffloadError,
    ShardedAdamW,
    ShardedOptimizer,
    ShardedSGD,
    ShardoptError,
    Tuning,
)
from shardopt.tensors.part import Part
from shardopt.tensors.unsharded_guard import own_class
from tests.support.comparing import raw
from tests.support.ranks import Pool
from tests.support.training import raises

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
STEPS = 3
Pair = namedtuple("Pair", ["one", "other"])


@dataclass
class Batch:
    """What a library's class may be: floating tensors and others, nested."""

    x: Tensor
    more: dict[str, Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(40)
        self.hidden = nn.Linear(40, 33)
        self.back = nn.Linear(33, 40)

    def forward(self, x: Tensor) -> Tensor:
        return self.back(torch.relu(self.hidden(self.norm(x))))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Params of all sizes, a tied one, one that is not used, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 40)
        self.block = Block()
        self.out = nn.Linear(40, 11, bias=False)
        self.out.weight = self.embed.weight
        self.unused = nn.Parameter(torch.randn(300))
        self.register_buffer("scale", torch.tensor(1.1))
        self.seen: list[torch.dtype] = []

    def forward(self, batch: Batch) -> dict[str, Any]:
        x = self.embed(batch.more["tokens"][0]) + batch.x + batch.more["pair"].one
        self.seen = [x.dtype, self.block.hidden.weight.dtype]
        x = x + self.run(x)
        return {"logits": self.out(x), "tokens": batch.more["tokens"]}

    def run(self, x: Tensor) -> Tensor:
        return self.block(x)  # type: ignore[no-any-return]


class Autocast(Net):
    def run(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16):
            return super().run(x)


class Checkpointed(Net):
    def run(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


class Reentrant(Net):
    def run(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=True)


class Compiled(Net):
    def __init__(self) -> None:
        super().__init__()
        self.block.compile(backend="aot_eager")

    def run(self, x: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of dynamo, which looks at the gradient of an input
            return super().run(x)


NETS = {"plain": Net, "autocast": Autocast, "checkpointed": Checkpointed, "reentrant": Reentrant, "compiled": Compiled}


def batch(step: int) -> Batch:
    """Other data on every rank and step, in fp32."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x, one, other = (torch.randn(4, 40, generator=generator) for _ in range(3))
    tokens = torch.randint(0, 11, (4,), generator=generator)
    return Batch(x, {"tokens": [tokens], "pair": Pair(one, other)})


def low(given: Batch, dtype: torch.dtype) -> Batch:
    pair = given.more["pair"]
    return Batch(given.x.to(dtype), {**given.more, "pair": Pair(pair.one.to(dtype), pair.other.to(dtype))})


def tuning(**more: Any) -> Tuning:
    return Tuning(**{"keep_below": 100, "bucket_bytes": 3000, **more})


def step_of(model: nn.Module, opt: ShardedOptimizer, given: Batch, scaler: Any = None) -> Tensor:
    opt.zero_grad()
    loss: Tensor = model(given)["logits"].float().square().mean()
    if scaler is None:
        loss.backward()
        opt.step()
    else:
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    return loss.detach()


def exact(model: nn.Module) -> dict[str, Tensor]:
    """Whole fp32 values by name, as a state dict gives them; collective."""
    found = {}
    for name, value in model.state_dict().items():
        assert value.dtype is FP32, name
        found[name] = value.full_tensor() if isinstance(value, Part) else value.clone()
    return found


@dataclass(frozen=True)
class Setting:
    """What a training has besides."""

    dtype: torch.dtype = BF16
    keep: tuple[str, ...] = ()
    scaler: bool = False
    net: str = "plain"
    options: dict[str, Any] = field(default_factory=dict)


class Casting(nn.LayerNorm):
    """What keep_fp32 does to a norm, by hand."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).to(x.dtype)


def as_low(kind: type[Any], setting: Setting, **options: Any) -> Iterator[tuple[bytes, dict[str, Tensor]]]:
    """What a low-precision model trains to, whose masters start from the fp32 values: losses and masters."""
    model = NETS[setting.net]()
    exact = {name: param.detach().clone() for name, param in model.named_parameters()}
    scale = model.scale
    model.to(setting.dtype)
    model.scale = scale  # buffers stay what they are
    if setting.keep:
        model.block.norm = Casting(40)  # of ones and zeros
    opt = kind(model, **{"tuning": tuning(), **options, **setting.options})
    slots = ("exp_avg", "exp_avg_sq") if kind is ShardedAdamW else ("momentum_buffer",)
    states = {}
    for index, (name, param) in enumerate(model.named_parameters()):
        states[index] = {"step": torch.tensor(0.0), **{slot: torch.zeros(param.shape) for slot in slots}}
        if param.dtype is not FP32:
            states[index]["master"] = exact[name]
    opt.load_state_dict({"state": states, "param_groups": opt.state_dict()["param_groups"]})
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if setting.scaler else None
    for step in range(STEPS):
        loss = raw(step_of(model, opt, low(batch(step), setting.dtype), scaler))
        found = {name: opt.state[param].get("master", param.detach()) for name, param in model.named_parameters()}
        yield (
            loss,
            {name: each.full_tensor() if isinstance(each, Part) else each.clone() for name, each in found.items()},
        )
    opt.close()


def as_option(kind: type[Any], setting: Setting, **options: Any) -> Iterator[tuple[bytes, dict[str, Tensor]]]:
    model = NETS[setting.net]()
    own = {"tuning": tuning(), "compute_dtype": setting.dtype, "keep_fp32": setting.keep}
    opt = kind(model, **{**own, **options, **setting.options})
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if setting.scaler else None
    for step in range(STEPS):
        loss = step_of(model, opt, batch(step), scaler)
        assert model.seen == [setting.dtype, setting.dtype]
        assert model.scale.dtype is FP32
        yield raw(loss), exact(model)
    opt.close()


def compare(expected: Any, found: Any, where: Any) -> None:
    assert found[0] == expected[0], where
    for name, each in expected[1].items():
        assert raw(each) == raw(found[1][name]), (where, name)


def same_bits() -> None:
    adamw, sgd = {"lr": 0.01}, {"lr": 0.1, "momentum": 0.9}
    for kind, rates in ((ShardedAdamW, adamw), (ShardedSGD, sgd)):
        expected = list(as_low(kind, Setting(), stage=1, **rates))
        for stage in (0, 1, 2, 3):
            for neighbours in (True, False) if dist.get_world_size() > 1 else (True,):
                own = tuning(neighbours=neighbours)
                for step, found in enumerate(as_option(kind, Setting(), stage=stage, tuning=own, **rates)):
                    compare(expected[step], found, (kind.__name__, stage, neighbours, step))


@pytest.mark.parametrize("world", [1, 2])
def test_bits_of_a_low_precision_model_with_masters(ranks: Pool, world: int) -> None:
    ranks.run(same_bits, world=world)


def same_bits_beside(directory: str) -> None:
    """With all that a training may have besides. What is compiled, a second a training and rank, is so at one stage."""
    settings = {
        "norms in fp32": Setting(keep=("*.no*m",)),
        "fp16 and a scaler": Setting(FP16, scaler=True),
        "fp16, and a scaler of fused": Setting(FP16, scaler=True, options={"fused": True}),
        "reduced in fp32": Setting(options={"reduce_dtype": FP32}),
        "autocast": Setting(net="autocast"),
        "checkpointed": Setting(net="checkpointed"),
        "checkpointed, reentrant": Setting(net="reentrant"),
        "compiled": Setting(net="compiled"),
        "compiled, norms in fp32": Setting(net="compiled", keep=("block.norm",)),
        "clipped": Setting(options={"max_grad_norm": 0.1}),
        "averaged": Setting(options={"ema": 0.9}),
        "int8": Setting(options={"state_format": "int8"}),
        "sums in bf16": Setting(options={"gradient_format": "bf16"}),
        "on the host": Setting(options={"offload": "cpu"}),
        "on a disk": Setting(options={"offload": directory}),
        "params on a disk": Setting(options={"offload": Offload(directory, params=directory)}),
    }
    for name, setting in settings.items():
        stages = {"params on a disk": (3,), "compiled": (2,), "compiled, norms in fp32": (3,)}.get(name, (2, 3))
        expected = list(as_low(ShardedAdamW, setting, lr=0.01, stage=stages[0]))
        for stage in stages:
            for step, found in enumerate(as_option(ShardedAdamW, setting, lr=0.01, stage=stage)):
                compare(expected[step], found, (name, stage, step))


def test_bits_beside_other_features(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(same_bits_beside, str(tmp_path), world=2)


def test_inputs_and_outputs() -> None:
    given = batch(0)
    model = Net()
    opt = ShardedSGD(model, lr=0.1, compute_dtype=BF16, output_dtype=FP32)
    with torch.no_grad():
        assert model(given)["logits"].dtype is FP32  # nothing is bound: params are fp32
        assert model.seen == [FP32, FP32]
    found = model(given)
    assert found["logits"].dtype is FP32
    assert found["tokens"][0] is given.more["tokens"][0]
    assert (given.x.dtype, given.more["pair"].one.dtype) == (FP32, FP32)  # the caller's own
    assert found["logits"].sum().backward() is None
    model(batch=given)
    assert model.seen == [BF16, BF16]
    opt.step()
    opt.close()
    model = Net()
    opt = ShardedSGD(model, lr=0.1, compute_dtype=BF16, cast_inputs=False)
    found = model(low(given, BF16))
    assert found["logits"].dtype is BF16
    with pytest.raises(RuntimeError, match="dtype"):
        model(given)
    opt.close()


class Agent(nn.Module):
    """Is called by other methods than forward; casts within are its own affair."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(40, 33), nn.LayerNorm(33), nn.Linear(33, 40))
        self.value = Casting32(40, 1)
        self.register_buffer("scale", torch.tensor(1.1))
        self.register_buffer("count", torch.tensor(3))
        self.body.register_buffer("shift", torch.full((40,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x)

    def act(self, x: Tensor) -> Tensor:
        return self.value(x=self.body(x)) * self.body.shift[0]  # type: ignore[no-any-return]


class Casting32(nn.Module):
    """Runs a part of it in fp32 on purpose: what is cast is what the outermost call is given."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(fan_in, fan_out), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.seen(x.float()).to(x.dtype))  # type: ignore[no-any-return]


def resumes_buffers(saved: Path, stage: int, keywords: dict[str, Any]) -> None:
    """Buffers that were cast are loaded before the first forward, with ``cast_buffers`` and without; and back."""
    again, plain = Agent(), Agent()
    for model in (again, plain):
        model.body.shift.fill_(5)
    opt = ShardedSGD(again, lr=0.1, tuning=tuning(), **keywords)
    unrounded = ShardedSGD(plain, lr=0.1, stage=stage, tuning=tuning())
    shardopt.load_checkpoint(saved, again, opt)
    assert raw(again.body.shift) == raw(torch.full((40,), 0.3, dtype=BF16))
    shardopt.load_checkpoint(saved, plain, unrounded)
    assert raw(plain.body.shift) == raw(torch.full((40,), 0.3, dtype=BF16).float())
    plain.body.shift.fill_(0.7)
    shardopt.save_checkpoint(saved / "plain", plain, unrounded)
    shardopt.load_checkpoint(saved / "plain", again, opt)
    assert raw(again.body.shift) == raw(torch.full((40,), 0.7, dtype=BF16))
    for each in (opt, unrounded):
        each.close()


def test_methods_and_buffers(tmp_path: Path) -> None:
    """Inputs of other methods are cast as forward's are; buffers that are named are cast, and come back."""
    for stage in (1, 3):
        found = []
        for method in ("forward", "act"):
            model = Agent()
            seen: list[torch.dtype] = []
            model.value.seen.register_forward_hook(lambda _, __, output, seen=seen: seen.append(output.dtype))
            keywords: dict[str, Any] = {"compute_dtype": BF16, "cast_buffers": ("body", "count"), "stage": stage}
            opt = ShardedSGD(model, lr=0.1, tuning=tuning(), **keywords)
            opt.bind()
            for step in range(2):
                opt.zero_grad()
                loss = (
                    (model(batch(step).x) if method == "forward" else model.act(batch(step).x)).float().square().sum()
                )
                loss.backward()
                opt.step()
                found.append(raw(loss))
            assert seen == [FP32, FP32]
            assert [each.dtype for each in model.buffers()] == [FP32, torch.int64, BF16]
            assert raw(model.body.shift) == raw(torch.full((40,), 0.3, dtype=BF16))
            shardopt.save_checkpoint(tmp_path / f"{stage}-{method}", model, opt)
            opt.close()
            assert raw(model.body.shift) == raw(torch.full((40,), 0.3))
        assert found[:2] == found[2:], stage
        resumes_buffers(tmp_path / f"{stage}-act", stage, keywords)
    with raises(BindingError, "cast_buffers has the pattern 'shfit'", "named_buffers()"):
        ShardedSGD(Agent(), lr=0.1, compute_dtype=BF16, cast_buffers=("shfit",))
    opt = ShardedSGD(Agent(), lr=0.1, compute_dtype=BF16, cast_inputs=False)
    opt.bind()
    with pytest.raises(RuntimeError, match="dtype"):
        opt.engine.takeover.module.act(batch(0).x)  # type: ignore[union-attr]
    opt.close()


def test_frozen_params_are_cast(tmp_path: Path) -> None:
    """What a checkpoint holds of them loads with ``compute_dtype`` and without, as what trains does."""
    for stage in (1, 3):
        model = Net()
        model.block.hidden.requires_grad_(False)
        opt = ShardedSGD(model, lr=0.1, stage=stage, compute_dtype=BF16, tuning=tuning())
        step_of(model, opt, batch(0))
        assert (model.seen[1], model.block.hidden.weight.dtype) == (BF16, FP32 if stage == 3 else BF16)
        shardopt.save_checkpoint(tmp_path / str(stage), model, opt)
        plain = Net()
        plain.block.hidden.requires_grad_(False)
        unrounded = ShardedSGD(plain, lr=0.1, stage=stage, tuning=tuning())
        shardopt.load_checkpoint(tmp_path / str(stage), plain, unrounded)
        with opt.unsharded(), unrounded.unsharded():
            kept = model.block.hidden.weight.float()
            assert torch.equal(plain.block.hidden.weight, kept) and plain.block.hidden.weight.dtype is FP32
        unrounded.close()
        model.block.hidden.requires_grad_(True)
        step_of(model, opt, batch(1))
        assert model.seen[1] is BF16
        opt.close()


def shown_in_fp32() -> None:
    """Outside of forward and backward a param of stage 3 has the dtype, and shows the values, of its fp32 slices."""
    frozen = "block.back.weight"
    seen: list[torch.dtype] = []
    for neighbours in (True, False):
        model, opt = made(3, tuning=tuning(neighbours=neighbours, keep_below=1))
        model.get_parameter(frozen).requires_grad_(False)
        model.block.hidden.register_forward_hook(lambda module, *_: seen.append(module.weight.dtype))
        for step in range(2):
            step_of(model, opt, batch(step))
            params = dict(model.named_parameters())
            for name, param in params.items():
                assert param.dtype is FP32, name
                assert own_class(param) is nn.Parameter  # else a frozen one would count as packed codes
                assert (param.element_size(), param.nbytes) == (4, 4 * param.numel())
                for made_of in (torch.zeros_like(input=param), param.new_empty(3), torch.empty_like(param)):
                    assert made_of.dtype is FP32
                assert torch.zeros_like(param, dtype=BF16).dtype is param.new_ones(2, dtype=BF16).dtype is BF16
                assert torch.zeros_like(param).stride() == param.stride()
            whole = exact(model)
            for name, param in params.items():
                shown = param.detach()
                assert shown.dtype is FP32
                assert raw(shown.full_tensor()) == raw(whole[name])  # type: ignore[attr-defined]
            assert all(param.grad is not None for name, param in params.items() if name not in (frozen, "unused"))
            opt.zero_grad()
            assert model.float() is model  # casts nothing
            with pytest.raises(shardopt.errors.ReleasedError, match="move and cast the model"):
                model.bfloat16()
        assert seen == [BF16, BF16]
        seen.clear()
        assert dict(opt.weights())["block.hidden.weight"].dtype is BF16
        opt.close()


def test_params_of_stage_3_are_fp32_outside_of_forward(ranks: Pool) -> None:
    ranks.run(shown_in_fp32, world=2)


def test_what_does_not_apply() -> None:
    model = Net()
    with raises(ValueError, "hand the module over"):
        ShardedSGD(model.parameters(), lr=0.1, compute_dtype=BF16)
    with raises(ValueError, "omit master='split'"):
        ShardedSGD(model, lr=0.1, compute_dtype=BF16, master="split")
    with raises(ValueError, "compute_dtype must be torch.bfloat16"):
        ShardedSGD(model, lr=0.1, compute_dtype=FP32)
    for more in ({"cast_inputs": False}, {"output_dtype": FP32}, {"keep_fp32": ("norm",)}, {"cast_buffers": ("s",)}):
        with raises(ValueError, "give compute_dtype=torch.bfloat16"):
            ShardedSGD(model, lr=0.1, **more)
    with raises(BindingError, "keep_fp32 has the pattern 'nrom'"):
        ShardedSGD(model, lr=0.1, compute_dtype=BF16, keep_fp32=("nrom",))
    assert not model._forward_pre_hooks
    model.block.hidden.bfloat16()
    opt = ShardedSGD(model, lr=0.1, compute_dtype=BF16)
    with raises(BindingError, "hand the module over in fp32"):
        opt.bind()
    model = Net()
    others = [param for param in model.parameters() if param is not model.block.hidden.weight]
    opt = ShardedSGD(others, lr=0.1, module=model, compute_dtype=BF16)
    with raises(BindingError, "call optimizer.bind()"):
        model.unused.sum().backward()
    apart = torch.optim.SGD([model.block.hidden.weight], lr=0.1)
    with raises(BindingError, "not averaged for other optimizers"):
        model(batch(0))
    del apart


# -- what is saved and loaded ------------------------------------------------------------------------------------------


def made(stage: int, **more: Any) -> tuple[Net, ShardedOptimizer]:
    model = Net()
    options = {"compute_dtype": BF16, "tuning": tuning(neighbours=stage != 2), **more}
    return model, ShardedAdamW(model, lr=0.01, stage=stage, **options)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(raw(one[name]) == raw(other[name]) for name in one)


def saved_and_loaded(directory: str) -> None:
    folder = Path(directory)
    model, opt = made(1)
    for step in range(2):
        step_of(model, opt, batch(step))
    half_way = exact(model)
    shardopt.save_checkpoint(folder / "whole", model, opt)
    rank = dist.get_rank()
    if rank == 0:  # alone
        torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, folder / "file.pt")
    dist.barrier()
    step_of(model, opt, batch(2))
    expected = exact(model)
    opt.close()
    files = torch.load(folder / "file.pt")
    assert same(files["model"], half_way)
    for stage in (0, 1, 2, 3):
        for by in ("checkpoint", "checkpoint, bound", "file", "file, bound"):
            model, opt = made(stage)
            if "bound" in by:
                step_of(model, opt, batch(7))
            if "checkpoint" in by:
                shardopt.load_checkpoint(folder / "whole", model, opt)
            else:
                model.load_state_dict(files["model"])
                opt.load_state_dict(files["opt"])
            assert "bound" not in by or same(exact(model), half_way), (stage, by)
            step_of(model, opt, batch(2))
            assert same(exact(model), expected), (stage, by)
            shardopt.save_checkpoint(folder / f"{stage}{by}", model, opt)
            opt.close()
            plain = Net()  # whose params are fp32, and stay so
            shardopt.load_checkpoint(folder / f"{stage}{by}", plain, ShardedAdamW(plain, lr=0.01, stage=1))
            assert same(dict(plain.state_dict()), expected), (stage, by)


def test_files_hold_fp32(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(saved_and_loaded, str(tmp_path), world=2)


def written() -> None:
    """A write reaches the fp32 values, and leaves the low bits of what it leaves alone."""
    for stage in (0, 1, 2, 3):
        model, opt = made(stage)
        step_of(model, opt, batch(0))
        before = exact(model)
        with opt.unsharded(), torch.no_grad():
            assert all(param.dtype is FP32 and param.nbytes == 4 * param.numel() for param in model.parameters())
            assert all(own_class(param) is nn.Parameter for param in model.parameters())
            assert opt.engine.domain.exact._buckets[0].whole is None  # before a value is used
            logits = model(batch(5))["logits"]
            assert model.seen == [BF16, BF16]
            for rank in range(dist.get_world_size()):  # nobody reads what another rank wrote
                if rank == dist.get_rank():
                    assert raw(model.block.norm.weight.detach()) == raw(before["block.norm.weight"])
                    model.block.hidden.weight[3] = 0.1
                    model.block.norm.weight.mul_(1 + 2**-20)
                    model.block.back.weight.data.copy_(1.1 * model.block.back.weight)
                    found = model(batch(5))["logits"]
                    assert model.seen == [BF16, BF16]
                dist.barrier()
            assert raw(found) != raw(logits)
            with torch.enable_grad():
                model(batch(5))["logits"].float().sum().backward()
            opt.zero_grad()
            copied = copy.deepcopy(model)
            if dist.get_rank() == 0:  # alone
                inside = model.state_dict()
            for name, param in model.named_parameters():
                assert param.dtype is param.detach().dtype is FP32, name
        shown = exact(model)
        assert dist.get_rank() or same({name: each.clone() for name, each in inside.items()}, shown), stage
        for dtype in (FP32, torch.float16, BF16, None):
            whole = dict(opt.weights(2000, dtype))
            assert same(whole, {name: shown[name].to(each.dtype) for name, each in whole.items()}), (stage, dtype)
            assert whole["embed.weight"].dtype is (dtype or BF16)
        assert same({name: each.clone() for name, each in copied.state_dict().items()}, shown), stage
        by_hand = {name: each.clone() for name, each in before.items()}
        by_hand["block.hidden.weight"][3] = 0.1
        by_hand["block.norm.weight"].mul_(1 + 2**-20)  # less than bf16 can tell
        by_hand["block.back.weight"].mul_(1.1)
        assert same(shown, by_hand), stage
        assert raw(found) == raw(model(batch(5))["logits"]), stage
        model.load_state_dict({name: each.to(BF16) if each.dim() else each for name, each in before.items()})
        again = exact(model)
        kept = {name for name, each in before.items() if raw(each) == raw(again[name])}
        assert kept >= {"embed.weight", "block.back.bias", "unused"}, stage
        model.load_state_dict(before)
        assert same(exact(model), before), stage
        copies = {name: each.clone() for name, each in model.state_dict().items()}
        step_of(model, opt, batch(1))
        assert not same(exact(model), before)
        model.load_state_dict(copies)
        assert same(exact(model), before), stage
        step_of(model, opt, batch(1))
        with opt.unsharded():
            model.load_state_dict(before)
        assert same(exact(model), before), stage
        opt.close()
        assert same(dict(model.state_dict()), before), stage
        assert all(param.dtype is FP32 for param in model.parameters())
        assert model(batch(0))["logits"].dtype is FP32


def averages_in_fp32(directory: str) -> None:
    """``unsharded(ema=True)`` shows the averages as they are kept; a forward sees what they round to."""
    for stage, more in ((0, {}), (1, {}), (1, {"offload": directory}), (2, {}), (3, {}), (3, {"state_format": "int8"})):
        model, opt = made(stage, ema=0.9, **more)
        for step in range(2):
            step_of(model, opt, batch(step))
        before = exact(model)
        kept = {name: opt.state[param].get("ema", before[name]) for name, param in model.named_parameters()}
        averages = {name: v.full_tensor() if isinstance(v, Part) else v.clone() for name, v in kept.items()}
        rounded = Net().to(BF16)
        rounded.scale = model.scale  # buffers stay what they are
        for name, param in rounded.named_parameters():
            param.data = averages[name].to(BF16)
        expected = rounded(low(batch(5), BF16))["logits"]
        for _ in range(2):
            with opt.unsharded(ema=True), torch.no_grad():
                assert raw(model(batch(5))["logits"]) == raw(expected), stage
                assert model.seen == [BF16, BF16]
                shown = {name: param.detach().clone() for name, param in model.named_parameters()}
                assert all(each.dtype is FP32 for each in shown.values()) and same(shown, averages), stage
                assert same({name: model.state_dict()[name] for name in shown}, averages), stage
                assert raw(model(batch(5))["logits"]) == raw(expected), stage
            assert same(exact(model), before), stage
        with raises(ShardoptError, "(shape (40,)) was written inside"), opt.unsharded(ema=True), torch.no_grad():
            model.block.norm.weight.mul_(1 + 2**-20)  # less than bf16 can tell
        assert same(exact(model), before), stage
        with opt.unsharded(), opt.unsharded(ema=True):
            assert raw(model.block.norm.weight.detach()) == raw(averages["block.norm.weight"]), stage
        step_of(model, opt, batch(2))
        other, plain = made(stage, ema=0.9, **more)
        for step in range(3):
            step_of(other, plain, batch(step))
        assert same(exact(model), exact(other)), stage
        opt.close()
        plain.close()


@pytest.mark.parametrize("world", [1, 2])
def test_averages_are_shown_in_fp32(ranks: Pool, world: int, tmp_path: Path) -> None:
    ranks.run(averages_in_fp32, str(tmp_path), world=world)


def written_beside_faults(path: str) -> None:
    """A disk that fails one rank fails all of them, as they enter and as they leave; the values stay."""
    model, opt = made(2, offload=path)
    step_of(model, opt, batch(0))
    before, home = exact(model), opt.engine.domain.entries[model.block.norm.weight].shard.home

    def fail(*_: Any) -> None:
        raise OffloadError("the disk fails")

    def break_down() -> None:
        if dist.get_rank() == 1:
            home.read = fail

    def mend() -> None:
        home.__dict__.pop("read", None)

    break_down()
    with raises(OffloadError, "the disk fails"), opt.unsharded():
        raise AssertionError("entered")
    mend()
    with raises(OffloadError, "the disk fails"), opt.unsharded(), torch.no_grad():
        model.block.norm.weight.mul_(1 + 2**-20)
        break_down()
    mend()
    assert same(exact(model), before)
    with opt.unsharded(), torch.no_grad():
        model.block.norm.weight.mul_(2)
    assert raw(exact(model)["block.norm.weight"]) == raw(2 * before["block.norm.weight"])
    opt.close()


def test_a_disk_that_fails_one_rank_in_unsharded(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(written_beside_faults, str(tmp_path), world=2)


@pytest.mark.parametrize("world", [1, 2])
def test_writes_reach_fp32_values(ranks: Pool, world: int) -> None:
    ranks.run(written, world=world)


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(40, 33), nn.LayerNorm(33), nn.Linear(33, 40))


def made_on_meta() -> None:
    """The initializers draw fp32 values, or a state dict gives them: masters start from these."""
    torch.manual_seed(3 + dist.get_rank())  # rank 0's count
    values = Net().state_dict()
    for stage in (1, 3):
        keywords: dict[str, Any] = {"lr": 0.01, "stage": stage, "compute_dtype": BF16, "tuning": tuning()}
        for build, given in ((Net, {"state_dict": values}), (layers, {})):
            with torch.device("meta"):
                model = build()
            model[2].weight.requires_grad_(False) if build is layers else None
            opt = ShardedAdamW(model, **keywords)
            torch.manual_seed(5)
            opt.bind(**given)
            torch.manual_seed(5)
            plain = build()
            if given:
                plain.load_state_dict(given["state_dict"])
            if build is layers:
                plain[2].weight.requires_grad_(False)
                trained = [name for name, _ in model.named_parameters() if stage == 3 or name != "2.weight"]
                shown = {name: model.state_dict()[name] for name in trained}
                whole = {name: v.full_tensor() if isinstance(v, Part) else v for name, v in shown.items()}
                assert same(whole, {name: plain.state_dict()[name] for name in trained}), stage
            else:
                assert same(exact(model), dict(plain.state_dict())), stage
                other = ShardedAdamW(plain, **keywords)
                for step in range(2):
                    assert raw(step_of(model, opt, batch(step))) == raw(step_of(plain, other, batch(step))), stage
                assert same(exact(model), exact(plain)), stage
                other.close()
            opt.close()


def test_model_on_the_meta_device(ranks: Pool) -> None:
    ranks.run(made_on_meta, world=2)


def enlarged(stage: int) -> Iterator[dict[str, Tensor]]:
    """As ``resize_token_embeddings()`` does it: other data for the param, in the dtype that the old one shows."""
    model, opt = made(stage)
    model.block.back.requires_grad_(False)
    step_of(model, opt, batch(0))
    with opt.unsharded():
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
        old = model.embed.weight
        torch.manual_seed(1)
        new = nn.Embedding(13, 40, dtype=old.dtype)
        new.weight.data[:11] = old.data
        model.embed.weight.data = new.weight.data
    with raises(BindingError, "call optimizer.rebind()"):
        model(batch(1))
    opt.rebind()
    with opt.unsharded():
        now = {name: param.detach().clone() for name, param in model.named_parameters()}
    assert raw(now["embed.weight"][:11]) == raw(before.pop("embed.weight"))
    assert now["embed.weight"].dtype is FP32 and raw(now["embed.weight"]) == raw(new.weight)
    assert all(raw(now[name]) == raw(each) for name, each in before.items())
    model.block.back.requires_grad_(True)  # was cast, and has fp32 values from here on
    for step in range(2):
        step_of(model, opt, batch(step))
        yield exact(model)
    assert opt.state[model.block.hidden.weight]["step"] == 3
    opt.close()


def rebound() -> None:
    expected = list(enlarged(1))
    for stage in (2, 3):
        for one, other in zip(expected, enlarged(stage), strict=True):
            assert same(one, other), stage


def test_rebind_keeps_fp32_values(ranks: Pool) -> None:
    ranks.run(rebound, world=2)


# -- bytes -------------------------------------------------------------------------------------------------------------


def kept_and_moved(stage: int, neighbours: bool, **options: Any) -> tuple[dict[str, int], int, int, int]:
    """Bytes by kind after a step, bytes received for params in a step, bytes kept of params that stay whole, params."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    own = Tuning(neighbours=neighbours, keep_below=1000)
    opt = ShardedAdamW(model, lr=0.01, stage=stage, tuning=own, **options)
    for _ in range(3):
        before = opt.engine.traffic().get("params", 0)
        opt.zero_grad()
        model(torch.ones(2, 512)).float().sum().backward()
        opt.step()
    moved = opt.engine.traffic()["params"] - before
    kinds = {kind: sum(tiers.values()) for kind, tiers in opt.memory().items()}
    small, numel = 4 * 512, sum(param.numel() for param in model.parameters())
    opt.close()
    return kinds, moved, small, numel


def bytes_of() -> None:
    world = dist.get_world_size()
    for neighbours in (False, True):
        for stage in (1, 2, 3):
            found, moved, small, numel = kept_and_moved(stage, neighbours, compute_dtype=BF16)
            _, moved_in_fp32, *_ = kept_and_moved(stage, neighbours)
            # Of stage 3 the params that stay whole are kept as at stage 2. Shared memory is read as it is, and cast.
            large = numel - small
            expected = {
                "param": 2 * numel if stage < 3 else 2 * small + 4 * large // world,
                "master": (4 * numel if stage < 3 else 4 * small) // world,
                "gradient": 4 * numel // world,
                "state": 8 * numel // world,
            }
            assert {kind: found[kind] for kind in expected} == expected, stage
            if stage == 3 and neighbours:
                assert moved_in_fp32 - moved == small * 2 * (world - 1) // world
            else:
                assert 2 * moved == moved_in_fp32 > 0, (stage, neighbours)


def test_bytes_kept_and_moved(ranks: Pool) -> None:
    ranks.run(bytes_of, world=2)
