"""``compute_dtype``: an fp32 module trains to the bits of a bf16 one with fp32 masters that start from its values."""

from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardopt import BindingError, ShardedAdamW, ShardedOptimizer, ShardedSGD, Tuning
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


class Net(nn.Module):
    """Params of all sizes, a tied one, one that is not used, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 40)
        self.norm = nn.LayerNorm(40)
        self.hidden = nn.Linear(40, 33)
        self.back = nn.Linear(33, 40)
        self.out = nn.Linear(40, 11, bias=False)
        self.out.weight = self.embed.weight
        self.unused = nn.Parameter(torch.randn(300))
        self.register_buffer("scale", torch.tensor(1.1))
        self.seen: list[torch.dtype] = []

    def forward(self, batch: Batch) -> dict[str, Any]:
        x = self.embed(batch.more["tokens"][0]) + batch.x + batch.more["pair"].one
        self.seen = [x.dtype, self.hidden.weight.dtype]
        x = x + self.back(torch.relu(self.hidden(self.norm(x))))
        return {"logits": self.out(x), "tokens": batch.more["tokens"]}


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


def step_of(model: nn.Module, opt: ShardedOptimizer, given: Batch) -> Tensor:
    opt.zero_grad()
    loss: Tensor = model(given)["logits"].float().square().mean()
    loss.backward()
    opt.step()
    return loss.detach()


def masters(model: nn.Module, opt: ShardedOptimizer) -> dict[str, Tensor]:
    """Whole fp32 values of what was trained; collective."""
    found = {}
    for name, param in model.named_parameters():
        if not opt.state[param]:
            continue
        value = opt.state[param].get("master")
        if value is None:  # the slices of the params themselves are the masters
            value = model.state_dict()[name]
        found[name] = value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
        assert found[name].dtype is FP32
    return found


def as_low(kind: type[Any], dtype: torch.dtype = BF16, **options: Any) -> Iterator[tuple[bytes, dict[str, Tensor]]]:
    """What a low-precision model trains to, whose masters start from the fp32 values: losses and masters."""
    model = Net()
    exact = {param: param.detach().clone() for param in model.parameters()}
    scale = model.scale
    model.to(dtype)
    model.scale = scale  # buffers stay what they are
    opt = kind(model, tuning=tuning(), **options)
    slots = ("exp_avg", "exp_avg_sq") if kind is ShardedAdamW else ("momentum_buffer",)
    states = {
        index: {"step": torch.tensor(0.0), "master": exact[param], **{name: torch.zeros(param.shape) for name in slots}}
        for index, param in enumerate(model.parameters())
    }
    opt.load_state_dict({"state": states, "param_groups": opt.state_dict()["param_groups"]})
    for step in range(STEPS):
        yield raw(step_of(model, opt, low(batch(step), dtype))), masters(model, opt)
    opt.close()


def as_option(kind: type[Any], dtype: torch.dtype = BF16, **options: Any) -> Iterator[tuple[bytes, dict[str, Tensor]]]:
    model = Net()
    opt = kind(model, compute_dtype=dtype, **{"tuning": tuning(), **options})
    for step in range(STEPS):
        loss = step_of(model, opt, batch(step))
        assert model.seen == [dtype, dtype]
        assert model.scale.dtype is FP32
        yield raw(loss), masters(model, opt)
    opt.close()


def same_bits() -> None:
    adamw, sgd = {"lr": 0.01}, {"lr": 0.1, "momentum": 0.9}
    for kind, rates in ((ShardedAdamW, adamw), (ShardedSGD, sgd)):
        expected = list(as_low(kind, stage=1, **rates))
        for stage in (0, 1, 2, 3):
            for neighbours in (True, False):
                own = tuning(neighbours=neighbours)
                for step, found in enumerate(as_option(kind, stage=stage, tuning=own, **rates)):
                    where = (kind.__name__, stage, neighbours, step)
                    assert found[0] == expected[step][0], where
                    assert len(found[1]) == 7  # but for the unused one
                    for name, each in found[1].items():
                        assert raw(each) == raw(expected[step][1][name]), (*where, name)


@pytest.mark.parametrize("world", [1, 2])
def test_bits_of_a_low_precision_model_with_masters(ranks: Pool, world: int) -> None:
    ranks.run(same_bits, world=world)


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
    opt.step()
    opt.close()
    model = Net()
    opt = ShardedSGD(model, lr=0.1, compute_dtype=BF16, cast_inputs=False)
    found = model(low(given, BF16))
    assert found["logits"].dtype is BF16
    with pytest.raises(RuntimeError, match="dtype"):
        model(given)
    opt.close()


def test_frozen_params_are_cast() -> None:
    for stage in (1, 3):
        model = Net()
        model.hidden.requires_grad_(False)
        opt = ShardedSGD(model, lr=0.1, stage=stage, compute_dtype=BF16, tuning=tuning())
        step_of(model, opt, batch(0))
        assert model.hidden.weight.dtype is BF16
        model.hidden.requires_grad_(True)
        step_of(model, opt, batch(1))
        assert model.hidden.weight.dtype is BF16
        opt.close()


def test_what_does_not_apply() -> None:
    model = Net()
    with raises(ValueError, "hand the module over"):
        ShardedSGD(model.parameters(), lr=0.1, compute_dtype=BF16)
    with raises(ValueError, "omit master='split'"):
        ShardedSGD(model, lr=0.1, compute_dtype=BF16, master="split")
    with raises(ValueError, "compute_dtype must be torch.bfloat16"):
        ShardedSGD(model, lr=0.1, compute_dtype=FP32)
    for more in ({"cast_inputs": False}, {"output_dtype": FP32}, {"keep_fp32": ("norm",)}):
        with raises(ValueError, "give compute_dtype=torch.bfloat16"):
            ShardedSGD(model, lr=0.1, **more)
    with raises(BindingError, "keep_fp32 has the pattern 'nrom'"):
        ShardedSGD(model, lr=0.1, compute_dtype=BF16, keep_fp32=("nrom",))
    assert not model._forward_pre_hooks
    model.hidden.bfloat16()
    opt = ShardedSGD(model, lr=0.1, compute_dtype=BF16)
    with raises(BindingError, "hand the module over in fp32"):
        opt.bind()
    with torch.device("meta"):
        model = Net()
    opt = ShardedSGD(model, lr=0.1, compute_dtype=BF16)
    with raises(BindingError, "meta device"):
        opt.bind()
    model = Net()
    others = [param for param in model.parameters() if param is not model.hidden.weight]
    opt = ShardedSGD(others, lr=0.1, module=model, compute_dtype=BF16)
    apart = torch.optim.SGD([model.hidden.weight], lr=0.1)
    with raises(BindingError, "not averaged for other optimizers"):
        model(batch(0))
    del apart
