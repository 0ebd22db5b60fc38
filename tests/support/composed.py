"""Models of tensor, pipeline and expert parallelism with torch's own libraries, and what one process makes of them."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd, reduce_scatter_tensor_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardopt import Part

OPTIONS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1},
    "SGD": {"lr": 1.0, "momentum": 0.9},  # shows the scale of gradients, which Adam hides
}
STATES = {"AdamW": ("exp_avg", "exp_avg_sq"), "SGD": ("momentum_buffer",)}
WIDTH, HIDDEN, EXPERTS, BATCH = 6, 13, 2, 4  # two ranks hold 7 and 6 rows of what is 13 wide


class Gain(nn.Module):
    """A replicated param that works on a slice of the batch, as sequence parallelism has it: its gradient is a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if not isinstance(weight, DTensor):
            return x * weight
        mesh = weight.device_mesh
        whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        return (whole.redistribute(mesh, [Shard(0)]) * weight).redistribute(mesh, [Replicate()]).to_local()


class Block(nn.Module):
    """Plain, sharded and replicated params."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.gain = Gain()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain(self.down(torch.tanh(self.up(self.norm(x)))))


class Experts(nn.Module):
    """Token ``i`` goes to expert ``i % EXPERTS``. In a group each rank has one of them, and all tokens of the group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        made = [nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS)]
        own = range(EXPERTS) if group is None else [group.rank()]
        self.own, self.group = list(own), group
        self.experts = nn.ModuleList(made[index] for index in own)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x if self.group is None else all_gather_tensor_autograd(x, 0, self.group)
        done = torch.zeros_like(tokens)
        for index, expert in zip(self.own, self.experts, strict=True):
            chosen = (torch.arange(len(tokens)) % EXPERTS == index).unsqueeze(1)
            done = done + torch.where(chosen, torch.tanh(expert(tokens)), 0.0)
        if self.group is None:
            return x + done
        return x + reduce_scatter_tensor_autograd(done, "sum", 0, self.group)


def blocks(num: int = 2, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(Block() for _ in range(num)))


def mixture(group: dist.ProcessGroup | None = None, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(Block(), Experts(group), Block())


def parallelized(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in model.modules():
        if isinstance(block, Block):
            parallelize_module(block, mesh, {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()})
            weight = distribute_tensor(block.gain.weight.detach(), mesh, [Replicate()])
            block.gain.weight = nn.Parameter(weight)
    return model


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(output: Tensor, target: Tensor | None = None) -> Tensor:
    return (output * torch.linspace(-1, 2, WIDTH).to(output.device) + output.square()).sum(1).mean()


def average(params: Iterable[nn.Parameter], group: dist.ProcessGroup, count: int | None = None) -> None:
    """The mean over the group's ranks, as DDP makes it; of ``count`` ranks' losses where these are more."""
    for param in params:
        if param.grad is not None:
            grad = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
            dist.all_reduce(grad, group=group)
            grad /= group.size() if count is None else count


def whole(tensor: Tensor) -> Tensor:
    """Collective where it is a DTensor or a part."""
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor | Part) else tensor.detach()


class Reference:
    """One process, the same data, torch's own optimizer."""

    def __init__(self, model: nn.Module, num_batches: int, max_norm: float, kind: str = "AdamW") -> None:
        self.model, self.num_batches, self.max_norm, self.kind = model, num_batches, max_norm, kind
        self.optimizer = getattr(torch.optim, kind)(model.parameters(), **OPTIONS[kind])

    def step(self, step: int) -> float:
        """The norm of all gradients before clipping."""
        self.optimizer.zero_grad()
        for rank in range(self.num_batches):
            (loss_of(self.model(batch(step, rank))) / self.num_batches).backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        return float(norm)

    def values(self) -> dict[str, Tensor]:
        """Params and states."""
        found = {}
        for name, param in self.model.named_parameters():
            found[name] = param.detach()
            for kind in STATES[self.kind]:
                found[f"{name}.{kind}"] = self.optimizer.state[param][kind]
        return found


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Gradients are summed in another order than in one process, so each errs by some 1e-7 of the largest."""
    assert found.keys() <= expected.keys() and found
    for name, value in found.items():
        theirs, atol = expected[name], 2e-6
        if name.endswith("exp_avg_sq"):
            value, theirs = value.sqrt(), theirs.sqrt()
            atol = 2e-6 * float(theirs.max())
        torch.testing.assert_close(value, theirs, rtol=2e-4, atol=atol, msg=lambda text, name=name: f"{name}: {text}")
