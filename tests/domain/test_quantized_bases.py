"""Quantized bases at stage 3: wrapper subclasses, and params of a class of their own whose scales lie in attributes.

Each beside the same model at stage 1, and beside the plain model. bitsandbytes' and torchao's take part where they are
installed; two of this file, made alike, always do.
"""

from collections.abc import Callable, Iterator
from importlib import import_module, util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardopt import Offload, ReleasedError, ShardedAdamW, Tuning, load_checkpoint, save_checkpoint
from shardopt.domain.members import plain_tensors
from shardopt.tensors.unsharded_guard import is_sharded
from tests.support.comparing import raw
from tests.support.ranks import Pool
from tests.support.training import raises

W = 320  # scales of a weight are more than a block


class Coded(Tensor):
    """Codes of 8 bits with a scale for each row, in two tensors: a wrapper as torchao's are."""

    codes: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor) -> "Coded":
        made: Coded = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scales.dtype)
        made.codes, made.scales = codes, scales
        return made

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        super().__init__()

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scales"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], _: None, size: Any, stride: Any) -> "Coded":
        return Coded(inner["codes"], inner["scales"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return Coded(func(args[0].codes), func(args[0].scales))
        if func is torch.ops.aten.copy_.default:
            args[0].codes.copy_(args[1].codes), args[0].scales.copy_(args[1].scales)
            return args[0]
        raise NotImplementedError(func)


class Multiply(torch.autograd.Function):
    """Keeps the tensors themselves and not what autograd saves, as bitsandbytes does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        ctx.kept = codes, scales
        return x @ (codes.to(x.dtype) * scales).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        codes, scales = ctx.kept
        return grad @ (codes.to(grad.dtype) * scales), None, None


def coded_values() -> tuple[Tensor, Tensor]:
    return torch.randint(-127, 127, (W, W), dtype=torch.int8), torch.rand(W, 1) / 2000


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(Coded(*coded_values()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        found: Tensor = Multiply.apply(x, weight.codes, weight.scales)  # type: ignore[no-untyped-call]
        return found


class Scales:
    def __init__(self, values: Tensor) -> None:
        self.values, self.book = values, torch.ones(8)


class CodesParam(nn.Parameter):
    """A param of packed codes with scales in an attribute, as bitsandbytes' are."""

    scales: Scales
    again: Tensor

    @classmethod
    def of(cls, codes: Tensor, scales: Tensor) -> "CodesParam":
        made: CodesParam = torch.Tensor._make_subclass(cls, codes, False)
        made.scales, made.again = Scales(scales), made.data
        return made


class Attributed(nn.Module):
    """Its codes are of a dtype of floating point, in whose numbers they mean nothing."""

    def __init__(self) -> None:
        super().__init__()
        codes, scales = coded_values()
        self.weight = CodesParam.of(codes.view(torch.bfloat16), scales)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        scales: Any = self.weight.scales
        for name, each in (("values", scales.values), ("book", scales.book)):
            destination[f"{prefix}weight.{name}"] = each if keep_vars else each.detach()
        destination[f"{prefix}weight.kind"] = torch.zeros(300)  # made for the state dict

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        codes, scales = weight.again.view(torch.int8), weight.scales
        found: Tensor = Multiply.apply(x, codes, scales.values)  # type: ignore[no-untyped-call]
        found = found * scales.book[0]
        return found


def nf4(storage: torch.dtype, nested: bool) -> nn.Module:
    made: nn.Module = (
        import_module("bitsandbytes.nn")
        .Linear4bit(
            W,
            W,
            bias=False,
            quant_type="nf4",
            compute_dtype=torch.float32,
            compress_statistics=nested,
            quant_storage=storage,
        )
        .to("cpu")
    )
    return made


def int8() -> nn.Module:
    layer = import_module("bitsandbytes.nn").Linear8bitLt
    made: nn.Module = layer(W, W, bias=False, has_fp16_weights=False).to("cpu")
    return made


def torchaos(bits: int) -> nn.Module:
    made, tools = nn.Sequential(nn.Linear(W, W, bias=False)), import_module("torchao.quantization")
    # Its packed layouts of int4 need a GPU or another package; this one keeps each code in a byte.
    rows = tools.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=tools.granularity.PerGroup(32))
    tools.quantize_(made, rows if bits == 4 else tools.Int8WeightOnlyConfig())
    found: nn.Module = made[0]
    return found


BASES: dict[str, Callable[[], nn.Module]] = {
    "wrapped": Wrapped,
    "attributed": Attributed,
    "bitsandbytes nf4": lambda: nf4(torch.uint8, True),
    "bitsandbytes nf4 in bf16": lambda: nf4(torch.bfloat16, False),
    "bitsandbytes int8": int8,
    "torchao int8": lambda: torchaos(8),
    "torchao int4": lambda: torchaos(4),
}
# The ranks of the default run; the rest of 1, 2 and 3 are slow.
WORLDS = {
    "wrapped": (1, 3),
    "attributed": (2,),
    "bitsandbytes nf4": (2,),
    "bitsandbytes nf4 in bf16": (),
    "bitsandbytes int8": (3,),
    "torchao int8": (2,),
    "torchao int4": (2,),
}


class Adapted(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.base = BASES[kind]()
        self.a, self.b = nn.Linear(W, 4, bias=False), nn.Linear(4, W, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.b(self.a(x)))


def made(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Adapted(kind) for _ in range(3)))
    for name, param in model.named_parameters():
        param.requires_grad_("base" not in name)
    return model


def batch(step: int) -> Tensor:
    return torch.randn(5, W, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def train(model: nn.Module, optimizer: ShardedAdamW) -> list[bytes]:
    outputs = []
    for step in range(3):
        y = model(batch(step))
        y.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        outputs.append(raw(y))
    return outputs


def bits(state_dict: Any) -> dict[str, list[bytes]]:
    """Of whole tensors; of a wrapper those inside."""
    return {name: [raw(each) for each in plain_tensors(value)] for name, value in state_dict.items()}


def whole(value: Tensor) -> list[bytes]:
    parts: Any = plain_tensors(value)
    return [raw(each.full_tensor() if hasattr(each, "full_tensor") else each) for each in parts]


def trains(kind: str, path: str) -> None:
    model = made(kind)
    optimizer = ShardedAdamW(model, lr=1e-2, stage=1)
    assert raw(made(kind)(batch(0))) == raw(model(batch(0)))
    expected = train(model, optimizer)
    save_checkpoint(f"{path}/one", model, optimizer)
    trained = bits(model.state_dict())
    optimizer.close()
    for neighbours in (True, False):
        model = made(kind)
        before = {name: (param, type(param)) for name, param in model.named_parameters() if not param.requires_grad}
        start = bits(model.state_dict())
        tuning = Tuning(keep_below=0, live_bytes=0, neighbours=neighbours)
        more: dict[str, Any] = {} if neighbours else {"offload": Offload(path, params=path)}
        optimizer = ShardedAdamW(model, lr=1e-2, stage=3, tuning=tuning, **more)
        assert train(model, optimizer) == expected
        check(
            kind, model, optimizer, path, trained, whole_bytes=sum(len(each) for name in before for each in start[name])
        )
        optimizer.close()
        for name, (param, own) in before.items():
            assert model.get_parameter(name) is param and type(param) is own
        assert bits(model.state_dict()) == trained


def check(kind: str, model: Any, optimizer: ShardedAdamW, path: str, trained: Any, whole_bytes: int) -> None:
    base = model[1].base.weight
    assert all(map(is_sharded, model.parameters())) and isinstance(base, nn.Parameter)
    for inner in (base, *plain_tensors(base)):
        with raises(ReleasedError, "1.base.weight"):
            inner + 1
    own, held = whole_bytes / dist.get_world_size(), optimizer.memory()["param"]
    adapters = sum(param.nbytes for param in model.parameters() if param.requires_grad)
    assert own <= held.get("disk", held["device"]) < 1.25 * own + adapters
    assert {name: whole(each) for name, each in model.state_dict().items()} == trained
    assert bits(dict(optimizer.weights(bucket_bytes=W * W * 2))) == trained
    streamed = bits(dict(optimizer.weights(dtype=torch.bfloat16)))
    assert all(found == trained[name] for name, found in streamed.items() if "base" in name)
    save_checkpoint(f"{path}/three", model, optimizer)
    with optimizer.unsharded(), torch.no_grad():
        for each in model.parameters():
            for inner in plain_tensors(each.data):
                inner.zero_()
        assert "nf4" in kind or not model[1].base(batch(0)).any()
        kept = model.state_dict()
    inside = list(plain_tensors(kept["1.base.weight"]))
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in inside), (
        "in a file each brings the others along"
    )
    zeroed = bits(kept)
    assert not any(any(each) for each in zeroed["1.base.weight"]) and zeroed != trained
    assert bits(kept) == zeroed and {name: whole(each) for name, each in model.state_dict().items()} == zeroed
    for name in ("three", "one"):
        load_checkpoint(f"{path}/{name}", model, optimizer)
        assert {name: whole(each) for name, each in model.state_dict().items()} == trained
    other = made(kind)
    plain = ShardedAdamW(other, lr=1e-2, stage=1)
    load_checkpoint(f"{path}/three", other, plain)
    assert bits(other.state_dict()) == trained
    plain.close()


def is_not_encoded(kind: str) -> None:
    """Of a pass that trains: adapters of zeros stay zeros on a wire of 8 bits, and scales would not."""
    results = []
    for options in ({"stage": 1}, {"stage": 3, "gather_dtype": "int8", "tuning": Tuning(keep_below=0)}):
        model: Any = made(kind)
        with torch.no_grad():
            for each in model:
                each.b.weight.zero_()
        optimizer = ShardedAdamW(model, **options)
        y = model(batch(0))
        y.sum().backward()
        results.append(raw(y))
        optimizer.close()
    assert results[0] == results[1]


def test_scales_are_not_encoded_on_the_wire(ranks_with_frameworks: Pool) -> None:
    for kind in ("wrapped", "attributed"):
        ranks_with_frameworks.run(is_not_encoded, kind, world=2)


def cases() -> Iterator[Any]:
    for kind, worlds in WORLDS.items():
        for world in (1, 2, 3):
            yield pytest.param(kind, world, marks=() if world in worlds else pytest.mark.slow)


@pytest.mark.parametrize(("kind", "world"), list(cases()))
def test_a_quantized_base_is_sharded(ranks_with_frameworks: Pool, kind: str, world: int, tmp_path: Path) -> None:
    package = kind.split()[0]
    if package in ("bitsandbytes", "torchao") and util.find_spec(package) is None:
        pytest.skip("pip install .[frameworks]")
    ranks_with_frameworks.run(trains, kind, str(tmp_path), world=world)
