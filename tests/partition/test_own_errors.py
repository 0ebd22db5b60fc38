"""Each rank's own error wins on that rank; the others hear of it at the end of that backward, by an error of its type.

So a script that skips a batch after its own error loses no rank, and one loop serves all: whichever rank fails first.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardopt import CommunicationError, ShardedAdamW
from tests.support.comparing import snapshot
from tests.support.modules import W, data, small
from tests.support.ranks import Pool

LAYERS = 5


class Chain(nn.Module):
    """A bucket for each layer; ``amid`` is called with a layer's number once backward has come to its output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(W, W, bias=False) for _ in range(LAYERS))
        self.amid: Callable[[int], None] = lambda _: None

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            x.register_hook(lambda _, number=number: self.amid(number))
        return x.square().mean()


def goes_on(stage: int, first: int, own: bool) -> None:
    """Rank ``first`` fails, and has left the backward before the other one goes on in it; which fails too, or not."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    model, other = Chain(), Chain()
    opt, reference = (ShardedAdamW(each, lr=1e-2, stage=stage, tuning=small()) for each in (model, other))
    met = list[int]()

    def train(model: Chain, opt: ShardedAdamW, *steps: int) -> None:
        for step in steps:
            opt.zero_grad()
            model(data(step, 4, W)).backward()
            opt.step()

    def amid(number: int) -> None:
        met.append(number)
        if rank != first and number == LAYERS - 2:
            store.wait(["left"])
        if number == (LAYERS - 2 if rank == first else 0) and (own or rank == first):
            raise torch.OutOfMemoryError(f"on rank {rank}")

    train(model, opt, 0, 1)
    train(other, reference, 0, 1)
    opt.zero_grad()
    loss = model(data(2, 4, W))
    model.amid = amid
    try:
        loss.backward()
        raise AssertionError("no error")
    except torch.OutOfMemoryError as error:
        opt.zero_grad()
        if rank == first:
            store.set("left", "")
        is_own = own or rank == first
        assert isinstance(error, CommunicationError) is not is_own, repr(error)
        assert (f"on rank {rank}" if is_own else f"rank {first} gave up this backward") in str(error), error
    assert met == list(range(LAYERS - 1, LAYERS - 3 if rank == first else -1, -1)), "the backward did not go on"
    model.amid = lambda _: None
    train(model, opt, 3, 4)
    train(other, reference, 3, 4)
    assert snapshot(model, opt) == snapshot(other, reference)


def test_own_errors_win(ranks: Pool) -> None:
    for stage, first, own in ((3, 0, True), (3, 1, True), (3, 1, False), (2, 0, False)):
        ranks.run(goes_on, stage, first, own, world=2)
