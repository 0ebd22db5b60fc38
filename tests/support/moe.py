"""A mixture of experts in plain torch, its experts on all ranks or spread over those of a group."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd, reduce_scatter_tensor_autograd

from tests.support.composed import WIDTH, Block, Reference, batch, loss_of

NUM = 4  # experts


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 11), nn.Linear(11, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Mixture(nn.Module):
    """Each token goes to the expert that the gate likes best; an expert without a token is not called.

    Attributes:
        closed: the expert that gets no token at all.
        called: the experts that this rank called in the last forward.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, NUM)
        made = [Expert() for _ in range(NUM)]
        size, rank = (1, 0) if group is None else (group.size(), group.rank())
        self.own = range(rank * NUM // size, (rank + 1) * NUM // size)
        self.group, self.closed = group, 0
        self.called: list[int] = []
        self.experts = nn.ModuleList(made[index] for index in self.own)

    def forward(self, x: Tensor) -> Tensor:
        return self.exchange(x, torch.softmax(self.gate(x), -1).index_fill(-1, torch.tensor([self.closed]), 0.0))

    def exchange(self, x: Tensor, open_: Tensor) -> Tensor:
        """What the experts make of this rank's tokens. ``open_``: the gate's weights."""
        if self.group is not None:
            x, open_ = (all_gather_tensor_autograd(each, 0, self.group) for each in (x, open_))
        weight, chosen = open_.max(-1)
        # A rank without a token takes part in the backward of both collectives.
        done, self.called = (x + weight.unsqueeze(1)) * 0.0, []
        for number, index in enumerate(self.own):
            (tokens,) = torch.where(chosen == index)
            if len(tokens):
                self.called.append(index)
                done = done.index_add(0, tokens, self.expert(number, x[tokens]) * weight[tokens].unsqueeze(1))
        return done if self.group is None else reduce_scatter_tensor_autograd(done, "sum", 0, self.group)

    def expert(self, number: int, x: Tensor) -> Tensor:
        """``number``: among those of this rank."""
        done: Tensor = self.experts[number](x)
        return done


class Layer(nn.Module):
    """Params of all ranks and of experts, which stage 3 gathers over other groups."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.dense, self.mixture = Block(), Mixture(group)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dense(x)
        return x + self.mixture(x)


def mixtures(group: dist.ProcessGroup | None = None, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(Layer(group), Layer(group))


def close(model: nn.Module, expert: int) -> None:
    """Lets no token come to one expert."""
    for each in model.modules():
        if isinstance(each, Mixture):
            each.closed = expert


def groups_of(model: nn.Module, copies: Any) -> list[dict[str, Any]]:
    """The param groups of a model whose experts are spread; ``copies``: the ranks that hold the same."""
    experts = [param for name, param in model.named_parameters() if "experts." in name]
    own = set(experts)
    dense = [param for param in model.parameters() if param not in own]
    return [{"params": dense}, {"params": experts, "process_group": copies}]


def name_of(name: str, group: dist.ProcessGroup) -> str:
    """The name that a param of this rank has in the whole model."""
    head, found, tail = name.partition("experts.")
    if not found:
        return name
    number, _, rest = tail.partition(".")
    return f"{head}experts.{group.rank() * NUM // group.size() + int(number)}.{rest}"


def is_of(name: str, group: dist.ProcessGroup) -> bool:
    """True if this rank has what the whole model calls so."""
    found = name.partition("experts.")[2]
    return not found or int(found.partition(".")[0]) * group.size() // NUM == group.rank()


class WholeModel(Reference):
    """One process with all experts. ``closed``: step, batch -> the expert that gets no token of this batch."""

    def __init__(
        self, model: nn.Module, num_batches: int, max_norm: float, kind: str, closed: Callable[[int, int], int]
    ) -> None:
        super().__init__(model, num_batches, max_norm, kind)
        self.closed = closed

    def step(self, step: int) -> float:
        """The norm of all gradients before clipping."""
        self.optimizer.zero_grad()
        for rank in range(self.num_batches):
            close(self.model, self.closed(step, rank))
            (loss_of(self.model(batch(step, rank))) / self.num_batches).backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        return float(norm)

    def values(self) -> dict[str, Tensor]:
        """Params, and the states of those that ever had a gradient."""
        named = dict(self.model.named_parameters())
        states = {
            f"{name}.{kind}": state for name in named for kind, state in self.optimizer.state[named[name]].items()
        }
        return {name: value for name, value in states.items() if not name.endswith(".step")} | {
            name: param.detach() for name, param in named.items()
        }
