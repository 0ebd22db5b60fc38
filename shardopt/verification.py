"""Trains a model of the user's own beside ``torch.optim``, at every stage, and tells where they part.

::

    def build():
        torch.manual_seed(0)
        return MyModel()

    print(shardopt.verify(build, batches))                # on one rank, or on every rank of a group

Both run freely: a difference in one step is in all that follow.
"""

import copy
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .optim import ShardedAdamW
from .optimizer import ShardedOptimizer

Loss = Callable[[nn.Module, Any], torch.Tensor]
Make = Callable[..., torch.optim.Optimizer]
_STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class Difference:
    """One stage beside torch.

    Attributes:
        stage: what was sharded.
        largest: over all params after the last step: the largest difference, as a share of how far the param of torch
            moved at its most.
        step: the first after which a param differed by more than the tolerance; None if none did.
        name: of that param, the first in the module's order.
        found: by how much it differed then, as ``largest``.
    """

    stage: int
    largest: float
    step: int | None = None
    name: str | None = None
    found: float = 0.0

    def __str__(self) -> str:
        if self.step is None:
            return f"stage {self.stage}: agrees, largest difference {self.largest:.1e} of the way"
        return (
            f"stage {self.stage}: DIFFERS from step {self.step} on, first in {self.name} by {self.found:.1e} of the "
            f"way (largest in the end {self.largest:.1e})"
        )


@dataclass(frozen=True)
class Verdict:
    """What :func:`verify` found; prints as a line a stage."""

    differences: tuple[Difference, ...]
    tolerance: float

    @property
    def agrees(self) -> bool:
        return all(each.step is None for each in self.differences)

    def __str__(self) -> str:
        return "\n".join(map(str, self.differences))


def verify(
    build: Callable[[], nn.Module],
    batches: Iterable[Any],
    steps: int = 20,
    *,
    optimizer: Callable[..., ShardedOptimizer] = ShardedAdamW,
    reference: Make | None = None,
    loss: Loss | None = None,
    stages: Sequence[int] = _STAGES,
    tolerance: float = 1e-3,
    **arguments: Any,
) -> Verdict:
    """Every rank of the default group must call it; without one it runs alone.

    Args:
        build: a new module, with the same values at every call.
        batches: at least ``steps`` of them are kept; fewer are repeated.
        optimizer: a class of shardopt's, or what makes one of ``(module, stage=..., **arguments)``.
        reference: makes torch's of ``(params, **arguments)``; None: the class of the same name.
        loss: of (module, batch), to run backward from; None: ``module(batch)``, or its ``.loss``.
        tolerance: what share of the way that a param moved may differ.
        **arguments: of both (``lr=``, ``weight_decay=``).

    Raises:
        ValueError: no batch, or no torch class of that name.
    """
    kept = list(itertools.islice(batches, steps))
    if not kept:
        raise ValueError("verify() needs at least one batch to train on.")
    name = getattr(optimizer, "__name__", "").removeprefix("Sharded")
    make = reference or getattr(torch.optim, name, None)
    if make is None:
        raise ValueError(
            f"torch.optim has no {name or 'class of this name'} to compare with: pass reference=, which makes an "
            "optimizer of (params, **arguments)."
        )
    start = _values(build())
    module = build()
    wrapped = DistributedDataParallel(module) if dist.is_initialized() and dist.get_world_size() > 1 else module
    theirs = make(list(module.parameters()), **copy.deepcopy(arguments))
    expected = []
    for step in range(steps):
        _train(wrapped, theirs, kept[step % len(kept)], loss)
        expected.append(_values(module))
    found = []
    for stage in stages:
        mine = build()
        opt = optimizer(mine, stage=stage, **copy.deepcopy(arguments))
        found.append(_compare(stage, mine, opt, start, expected, kept, loss, tolerance))
        opt.close()
    return Verdict(tuple(found), tolerance)


Values = dict[str, torch.Tensor]


def _compare(
    stage: int,
    module: nn.Module,
    optimizer: ShardedOptimizer,
    start: Values,
    expected: Sequence[Values],
    batches: Sequence[Any],
    loss: Loss | None,
    tolerance: float,
) -> Difference:
    first: tuple[int, str, float] | None = None
    shares: dict[str, float] = {}
    for step, theirs in enumerate(expected):
        _train(module, optimizer, batches[step % len(batches)], loss)
        with optimizer.unsharded():
            mine = _values(module)
        shares = {name: _share(mine[name], value, start[name]) for name, value in theirs.items()}
        over = next((name for name, share in shares.items() if not share <= tolerance), None)
        if first is None and over is not None:
            first = step + 1, over, shares[over]
    largest = max(shares.values(), default=0.0)
    return Difference(stage, largest) if first is None else Difference(stage, largest, *first)


def _share(mine: torch.Tensor, theirs: torch.Tensor, start: torch.Tensor) -> float:
    if not theirs.numel():
        return 0.0
    difference = float((mine.double() - theirs.double()).abs().max())
    if difference == 0:
        return 0.0
    return difference / max(float((theirs.double() - start.double()).abs().max()), torch.finfo(torch.float32).tiny)


def _values(module: nn.Module) -> Values:
    return {name: param.detach().clone() for name, param in module.named_parameters()}


def _train(module: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, loss: Loss | None) -> None:
    optimizer.zero_grad()
    if loss is not None:
        value = loss(module, batch)
    else:
        output = module(**batch) if isinstance(batch, dict) else module(batch)
        value = getattr(output, "loss", output)
    value.backward()
    optimizer.step()
