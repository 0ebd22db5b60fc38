"""What tests of whole trainings share: a small model, its data, steps, errors that must come."""

import copy
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from shardopt import ShardedAdamW, ShardedOptimizer
from tests.support.comparing import apart, close_to, digest, raw, same

__all__ = ["apart", "close_to", "digest", "raw", "same"]  # where tests looked for them before

# -- models and data ---------------------------------------------------------------------------------------------------


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


@contextmanager
def one_thread() -> Iterator[None]:
    """Within it, or in a function under ``@one_thread()``, torch computes on one thread; then on as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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


def saved_bytes(optimizer: ShardedOptimizer) -> bytes:
    """What rank 0 writes, on every rank."""
    optimizer.consolidate_state_dict()
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        box = [file.getvalue()]
    dist.broadcast_object_list(box, 0)
    return box[0]


def load_bytes(data: bytes) -> dict[str, Any]:
    return torch.load(io.BytesIO(data), weights_only=True)
