"""Promise: params train beside a frozen base of a wrapper subclass (quantized weights), the same on all ranks."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardopt import ShardedSGD
from tests.support.comparing import raw
from tests.support.ranks import Pool


class Int8(Tensor):
    """A scale for each row, as the int8 weights of torchao have it."""

    levels: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, levels: Tensor, scale: Tensor) -> "Int8":
        made: Int8 = torch.Tensor._make_wrapper_subclass(cls, levels.shape, dtype=scale.dtype, device=levels.device)
        made.levels, made.scale = levels, scale
        return made

    def __init__(self, levels: Tensor, scale: Tensor):
        super().__init__()

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["levels", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> "Int8":
        return Int8(inner["levels"], inner["scale"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, arguments: Sequence[Any] = (), keywords: Any = None
    ) -> Any:
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(arguments[0].levels, arguments[0].scale)
        raise NotImplementedError(f"Int8 has no {function}")


class Adapted(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        weight = torch.randn(width, width)
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.base = nn.Parameter(Int8((weight / scale).round().to(torch.int8), scale), requires_grad=False)
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        base: Any = self.base
        return x @ (base.levels * base.scale).T + self.up(self.down(x))


def trains_beside_a_quantized_base(stage: int, lists_all: bool) -> list[bytes]:
    torch.manual_seed(dist.get_rank())  # rank 0's values become those of all
    model = nn.Sequential(Adapted(16), nn.Tanh(), Adapted(16))
    groups = [param for param in model.parameters() if lists_all or param.requires_grad]
    opt = ShardedSGD(groups, lr=0.1, module=model, stage=stage)
    before = [raw(param) for param in model[0].up.parameters()]
    model(torch.randn(3, 16)).square().mean().backward()
    opt.step()
    assert [raw(param) for param in model[0].up.parameters()] != before
    whole = [param for param in model.parameters() if param.requires_grad]
    held = [each for layer in (model[0], model[2]) for each in (layer.base.levels, layer.base.scale)]
    assert opt.memory()["param"]["device"] == sum(each.nbytes for each in held) + (
        sum(shard.bucket.nbytes for shard in opt.engine.domain.shards)
    )
    opt.close()
    return [raw(each.detach()) for each in (*whole, *held)]


def test_trains_beside_a_quantized_base(ranks: Pool) -> None:
    for stage, lists_all in ((0, True), (1, False), (2, True)):
        one, other = ranks.run(trains_beside_a_quantized_base, stage, lists_all, world=2)
        assert one == other
