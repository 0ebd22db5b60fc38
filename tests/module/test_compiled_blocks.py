"""Graphs of torch.compile: one for all like blocks, and one for the whole model where no unit is gathered within it.

The backend passes graphs through, and counts them; the bits are those of the eager model."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import counters

from shardopt import ShardedAdamW, Tuning
from tests.support.modules import W, data
from tests.support.ranks import Pool

BLOCKS = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(W), nn.Linear(W, 2 * W), nn.Linear(2 * W, W)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.blocks, self.last = (
            nn.Linear(W, W),
            nn.ModuleList(Block() for _ in range(BLOCKS)),
            nn.Linear(W, W),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def eager(model: Model, _: Any) -> nn.Module:
    return model


def in_place(model: Model, backend: Any) -> nn.Module:
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
    return model


def replaced(model: Model, backend: Any) -> nn.Module:
    for number, block in enumerate(model.blocks):
        compiled: Any = torch.compile(block, backend=backend, fullgraph=True)
        model.blocks[number] = compiled
    return model


def whole(model: Model, backend: Any) -> nn.Module:
    compiled: Any = torch.compile(model, backend=backend, fullgraph=True)
    return compiled


def whole_in_parts(model: Model, backend: Any) -> nn.Module:
    compiled: Any = torch.compile(model, backend=backend)
    return compiled


def trained(
    stage: int, compile: Callable[[Model, Any], nn.Module], is_one: bool = False
) -> tuple[int, int, list[Tensor]]:
    """Graphs, breaks, and the params in the end."""
    graphs = []

    def passing(graph: torch.fx.GraphModule, _: Sequence[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    counters.clear()
    model = Model()
    run = compile(model, passing)
    tuning = Tuning(keep_below=0, live_bytes=0, timeout=60, units=(model,) if is_one else ())
    opt = ShardedAdamW(run, lr=0.01, stage=stage, tuning=tuning)
    for step in range(3):
        opt.zero_grad()
        run(data(step, 4, W)).square().mean().backward()
        opt.step()
    with opt.unsharded():
        params = [param.detach().clone() for param in model.parameters()]
    opt.close()
    return len(graphs), counters["graph_break"].total(), params


def counts_graphs() -> None:
    warnings.simplefilter("ignore")  # what Dynamo says of its own doing
    expected = trained(0, eager)[2]

    def check(found: tuple[int, int, list[Tensor]], graphs: int, breaks: int) -> None:
        assert found[:2] == (graphs, breaks)
        assert all(map(torch.equal, found[2], expected))

    for stage in (2, 3):
        for way in (in_place, replaced):
            check(trained(stage, way), graphs=1, breaks=0)
    for stage in (1, 2):
        check(trained(stage, whole), graphs=1, breaks=0)
    check(trained(3, whole, is_one=True), graphs=1, breaks=0)
    # What lies between two gathers: the first layer, the blocks, which share a graph, and the last one.
    check(trained(3, whole_in_parts), graphs=3, breaks=1)
    with pytest.raises(Unsupported, match="communicates with other ranks"):
        trained(3, whole)
    torch._dynamo.reset()


def test_graphs_are_counted(ranks: Pool) -> None:
    ranks.run(counts_graphs, world=2)
