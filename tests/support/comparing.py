"""What tests compare: bits of tensors and of optimizers, and models that must end alike or close."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardopt import Part, ShardedOptimizer

# -- bits --------------------------------------------------------------------------------------------------------------


def raw(tensor: Any) -> bytes:
    """The bits that this rank holds of a tensor, a part or a DTensor."""
    tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    tensor = tensor if isinstance(tensor, Part) else tensor.detach()  # of a sharded param that is a part
    local = tensor.local if isinstance(tensor, Part) else tensor
    return local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def raw_numbers(tensor: Tensor) -> bytes:
    """As :func:`raw`, but that one NaN is as good as another."""
    return raw(torch.where(tensor.isnan(), torch.nan, tensor))


def held(optimizer: ShardedOptimizer) -> dict[str, bytes]:
    """The bits of all params and states that this rank holds, step counts included, by place and name."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return {
        f"{name} of {index}": raw(value)
        for index, param in enumerate(params)
        for name, value in (("param", param), *optimizer.state.get(param, {}).items())
    }


def digest(optimizer: ShardedOptimizer) -> str:
    """Of what :func:`held` returns."""
    sha = hashlib.sha256()
    for name, value in held(optimizer).items():
        sha.update(name.encode() + value)
    return sha.hexdigest()


def snapshot(model: nn.Module, *optimizers: ShardedOptimizer) -> list[bytes]:
    """The bits of whole params. Collective."""
    with whole(*optimizers):
        return [raw(param) for param in model.parameters()]


def momenta(model: nn.Module, optimizer: ShardedOptimizer) -> list[bytes]:
    """The bits of whole momentum buffers. Collective."""
    states = [optimizer.state[param].get("momentum_buffer") for param in model.parameters()]
    return [raw(state.full_tensor() if isinstance(state, Part) else state) for state in states if state is not None]


def states_of(optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    """A copy of each param's whole states by name, on rank 0; nothing on other ranks. Collective."""
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.consolidate_state_dict(to=0)
        if dist.is_initialized() and dist.get_rank() != 0:
            return [{} for _ in params]
    return [
        {
            name: value.detach().clone() if isinstance(value, Tensor) else torch.tensor(value)
            for name, value in optimizer.state.get(param, {}).items()
            if value is not None
        }
        for param in params
    ]


def values_of(model: nn.Module, optimizer: ShardedOptimizer) -> dict[str, str]:
    """Digests of all params by name and, on rank 0, of all states as they are saved. Collective."""
    with whole(optimizer):
        found = {name: hashlib.sha256(raw(param)).hexdigest() for name, param in model.named_parameters()}
    optimizer.consolidate_state_dict(to=0)
    if not dist.is_initialized() or dist.get_rank() == 0:
        for index, state in optimizer.state_dict()["state"].items():
            for name, value in state.items():
                found[f"{name} of {index}"] = hashlib.sha256(raw(value)).hexdigest()
    return found


@contextmanager
def whole(*optimizers: ShardedOptimizer) -> Iterator[None]:
    """Params are whole on every rank inside, of several optimizers too."""
    with ExitStack() as stack:
        for optimizer in optimizers:
            stack.enter_context(optimizer.unsharded())
        yield


# -- models ------------------------------------------------------------------------------------------------------------


def same(one: nn.Module, other: nn.Module, atol: float = 0.0, rtol: float = 0.0) -> None:
    for (name, mine), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=atol, rtol=rtol, msg=lambda text, name=name: f"{name}: {text}")


def close_to(one: nn.Module, other: nn.Module) -> None:
    same(one, other, atol=2e-7, rtol=2e-6)


def equal_on_ranks(params: Iterable[Tensor]) -> None:
    """Every rank has the bits of rank 0. Collective."""
    for index, param in enumerate(params):
        first = param.detach().clone()
        dist.broadcast(first, 0)
        assert raw(first) == raw(param), f"param {index} on rank {dist.get_rank()} is not that of rank 0"


def apart(mine: dict[str, Tensor], theirs: dict[str, Tensor], start: dict[str, Tensor]) -> float:
    """How far one training ended from another, as a share of the way that the other one took from ``start``."""
    floats = [name for name, value in theirs.items() if value.is_floating_point()]
    way = torch.cat([(theirs[name] - start[name]).double().flatten() for name in floats])
    rest = torch.cat([(mine[name] - theirs[name]).double().flatten() for name in floats])
    return float(rest.norm() / way.norm())
