"""Models that ``parallelize_module`` cuts in three ways, with what one process makes of each.

==========  ============================================================================================
blocks      13 rows over 2 ranks (7 and 6); plain, sharded and replicated params; a gradient that is a sum
sequence    embedding to loss: sequence parallelism between the layers, ``loss_parallel`` at the end
empty       one row over 2 ranks: one of them holds nothing of a param
==========  ============================================================================================
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from tests.support import composed
from tests.support.composed import WIDTH, Block, blocks, loss_of

LAYOUTS = ("blocks", "sequence", "empty")
VOCABULARY, SENTENCE, SENTENCES = 10, 4, 2


def mesh_of(num_data: int = 2, num_tensor: int = 2) -> DeviceMesh:
    return init_device_mesh("cpu", (num_data, num_tensor), mesh_dim_names=("dp", "tp"))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Language(nn.Module):
    """Between its layers each rank has a slice of every sentence, and its own words' logits at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = Layer()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.layer(self.embed(tokens))))


def model_of(layout: str, mesh: DeviceMesh | None = None, seed: int = 0) -> nn.Module:
    """Whole, or this rank's part of it."""
    torch.manual_seed(seed)
    if layout == "sequence":
        language = Language()
        return language if mesh is None else _language_on(language, mesh)
    if layout == "empty":
        model: nn.Module = nn.Sequential(Block(), nn.Linear(WIDTH, 1))
        if mesh is not None:
            model = parallelize_module(model, mesh, {"1": ColwiseParallel(output_layouts=Replicate())})
    else:
        model = blocks(2, seed)
    return model if mesh is None else composed.parallelized(model, mesh)


def _language_on(model: Language, mesh: DeviceMesh) -> nn.Module:
    within = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        **{f"layer.{name}": style for name, style in within.items()},
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    return parallelize_module(model, mesh, plan)


def loss(model: nn.Module, step: int, rank: int) -> Tensor:
    """Of the batch of one data-parallel rank."""
    if not isinstance(model, Language):
        return loss_of(model(composed.batch(step, rank)))
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(VOCABULARY, (SENTENCES, SENTENCE + 1), generator=generator)
    found = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    return found.to_local() if isinstance(found, DTensor) else found


def in_parallel(model: nn.Module) -> AbstractContextManager[None]:
    """Around forward and backward."""
    return loss_parallel() if isinstance(model, Language) else nullcontext()
