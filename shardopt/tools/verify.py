"""Trains the user's model with shardopt and with ``torch.optim``, at every stage, and reports where they differ.

::

    def build():
        torch.manual_seed(0)
        return MyModel()

    print(shardopt.verify(build, batches))                # on one rank, or on every rank of a group
    print(shardopt.verify(build, batches, ways=[{"offload": "cpu"}, {"state_format": "int8"}]))

Both train independently: a difference in one step stays in all later steps.
"""

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..arguments import number, whole
from ..optim.classes import ShardedAdamW
from ..optim.optimizer import ShardedOptimizer

Loss = Callable[[nn.Module, Any], torch.Tensor]
Make = Callable[..., torch.optim.Optimizer]
Values = dict[str, torch.Tensor]
_STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class Difference:
    """The difference between one way and torch.

    Attributes:
        stage: what was sharded.
        largest: the largest difference of all params after the last step, as a share of the largest change of torch's
            param.
        step: the first step after which a param differed by more than the tolerance; None if none did.
        name: of that param, the first in the module's order.
        found: its difference then, as ``largest``.
        way: the keywords of the way.
        loss: how much the last loss on this rank is above torch's, as a share of torch's.
        is_expected: True for formats that torch lacks: states below fp32, masters of low-precision params, quantized
            traffic.
    """

    stage: int
    largest: float
    step: int | None = None
    name: str | None = None
    found: float = 0.0
    way: str = ""
    loss: float = 0.0
    is_expected: bool = False

    def __str__(self) -> str:
        title = f"stage {self.stage}" + (f", {self.way}" if self.way else "")
        if self.step is None:
            return f"{title}: agrees, largest difference {self.largest:.1e} of the way"
        if self.is_expected:
            return (
                f"{title}: other formats than torch's; it ends {self.largest:.1e} of the way from torch's params, and "
                f"{self.loss:+.2%} from its loss"
            )
        return (
            f"{title}: DIFFERS from step {self.step} on, first in {self.name} by {self.found:.1e} of the way (largest "
            f"in the end {self.largest:.1e})"
        )


@dataclass(frozen=True)
class Verdict:
    """The result of :func:`verify`; it prints one line for each way."""

    differences: tuple[Difference, ...]
    tolerance: float

    @property
    def agrees(self) -> bool:
        """True if no way with torch's formats differs."""
        return all(each.step is None or each.is_expected for each in self.differences)

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
    ways: Sequence[Mapping[str, Any]] = ({},),
    tolerance: float = 1e-3,
    **arguments: Any,
) -> Verdict:
    """Compares training with shardopt and with torch. Collective over the default group, if there is one.

    Args:
        build: returns a new module, with the same values at every call.
        batches: the first ``steps`` of them are used; fewer are repeated.
        optimizer: a class of shardopt's, or a function of ``(module, stage=..., **arguments)`` that returns one.
        reference: returns torch's optimizer of ``(params, **arguments)``; None: the class of the same name.
        loss: of (module, batch), to run backward from; None: ``module(batch)``, or its ``.loss``.
        ways: keywords for shardopt's optimizer alone, each tried at every stage: ``{"offload": "cpu"}``,
            ``{"master": "split", "state_format": "int8"}``. A difference of a format that torch lacks is reported and
            does not count.
        tolerance: largest difference that agrees, as a share of a param's largest change.
        **arguments: for both optimizers (``lr=``, ``weight_decay=``).

    Raises:
        TypeError: an argument is of another type.
        ValueError: no batch, stage, way or step; a tolerance that is not a number from 0 on; a ``build`` whose models
            differ; no torch class of that name; a loss of several elements, or one that depends on no param.
    """
    steps, tolerance = whole(steps, "steps", least=1), number(tolerance, "tolerance", least=0)
    tried = list(itertools.product(_ways(ways), _stages(stages)))
    _check_functions(build, optimizer, reference, loss)
    kept, make = _kept(batches, steps), reference or _class_of_torch(optimizer)
    first = _built(build)
    start = _values(first)
    module = _built(build, first, start)
    del first
    wrapped = DistributedDataParallel(module) if dist.is_initialized() and dist.get_world_size() > 1 else module
    theirs = _made(make, list(module.parameters()), copy.deepcopy(arguments))

    def trained(run: nn.Module, module: nn.Module, opt: torch.optim.Optimizer) -> Iterator[tuple[Values, float]]:
        """Takes the steps; yields the module's params after each, and the loss before it."""
        for step in range(steps):
            reached = _train(run, opt, kept[step % len(kept)], loss)
            with opt.unsharded() if isinstance(opt, ShardedOptimizer) else nullcontext():
                values = _values(module)
            yield values, reached

    expected, found = list(trained(wrapped, module, theirs)), []
    for way, stage in tried:
        mine = _built(build, module, start)
        opt = optimizer(mine, stage=stage, **way, **copy.deepcopy(arguments))
        if not isinstance(opt, ShardedOptimizer):
            raise TypeError(f"optimizer must make an optimizer of shardopt's, found a {type(opt).__name__}.")
        found.append(_compare(stage, way, trained(mine, mine, opt), expected, start, tolerance))
        opt.close()
    return Verdict(tuple(found), tolerance)


def _made(make: Make, params: list[nn.Parameter], arguments: dict[str, Any]) -> torch.optim.Optimizer:
    """Returns torch's optimizer.

    Raises:
        TypeError: it takes no such arguments, or is none.
    """
    try:
        made = make(params, **arguments)
    except TypeError as error:
        raise TypeError(
            "give verify() its own keywords (steps=, loss=, ways= and so on), and those that both optimizers take "
            f"(lr=, weight_decay=); those of shardopt alone go into ways=: {error}."
        ) from error
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(f"reference must return an optimizer of torch.optim, found {type(made).__name__}.")
    return made


def _stages(stages: Any) -> list[int]:
    return [whole(stage, "each of stages", least=0, most=3) for stage in _listed(stages, "stages")]


def _ways(ways: Any) -> list[Mapping[str, Any]]:
    found = _listed(ways, "ways")
    for way in found:
        if not isinstance(way, Mapping):
            raise TypeError(f"each of ways is a dict of keywords, such as {{'offload': 'cpu'}}, found {way!r}.")
    return found


def _kept(batches: Any, steps: int) -> list[Any]:
    """Returns at most as many batches as steps."""
    if not isinstance(batches, Iterable) or isinstance(batches, str | Mapping):
        raise TypeError(f"batches takes what yields batches, found {type(batches).__name__}.")
    kept = list(itertools.islice(batches, steps))
    if not kept:
        raise ValueError("verify() needs at least one batch to train on.")
    return kept


def _class_of_torch(optimizer: Callable[..., ShardedOptimizer]) -> Make:
    """Returns torch's class of the same name."""
    name = getattr(optimizer, "__name__", "").removeprefix("Sharded")
    found: Make | None = getattr(torch.optim, name, None)
    if found is None:
        raise ValueError(
            "pass reference=, which makes an optimizer of (params, **arguments): torch.optim has no "
            f"{name or 'class of this name'} to compare with."
        )
    return found


def _listed(values: Any, what: str) -> list[Any]:
    if isinstance(values, str | Mapping) or not isinstance(values, Iterable):
        raise TypeError(f"{what} takes a list, found {values!r}.")
    found = list(values)
    if not found:
        raise ValueError(f"{what} is empty: nothing would be compared.")
    return found


def _check_functions(build: object, optimizer: object, reference: object, loss: object) -> None:
    if isinstance(build, nn.Module) or not callable(build):
        raise TypeError(f"build takes a function that makes a model, found {type(build).__name__}.")
    is_foreign = isinstance(optimizer, type) and not issubclass(optimizer, ShardedOptimizer)
    if is_foreign or not callable(optimizer):
        found = getattr(optimizer, "__qualname__", type(optimizer).__name__)
        raise TypeError(
            f"optimizer takes a class of shardopt's, such as ShardedAdamW, found {found}. reference= takes torch's."
        )
    for what, value in (("reference", reference), ("loss", loss)):
        if value is not None and not callable(value):
            raise TypeError(f"{what} takes a function or None, found {type(value).__name__}.")


def _built(build: Callable[[], nn.Module], before: nn.Module | None = None, start: Values | None = None) -> nn.Module:
    """Returns a new module with the values that the first one had.

    Raises:
        TypeError: it is not a module.
        ValueError: it is the module of an earlier call, or has other values, which would count as a difference.
    """
    module = build()
    if not isinstance(module, nn.Module):
        raise TypeError(f"build() must return an nn.Module, found {type(module).__name__}.")
    advice = "Make a new, equally seeded model in build(): torch.manual_seed(0); return MyModel()."
    if module is before:
        raise ValueError(f"build() returned the same module twice, which is trained by then. {advice}")
    values = _values(module)
    if start is not None:
        differing = [name for name in (*start, *values) if not _are_equal(start.get(name), values.get(name))]
        if differing:
            raise ValueError(f"build() gave {differing[0]} other values than its first call. {advice}")
    return module


def _are_equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None or (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _compare(
    stage: int,
    way: Mapping[str, Any],
    mine: Iterable[tuple[Values, float]],
    expected: Sequence[tuple[Values, float]],
    start: Values,
    tolerance: float,
) -> Difference:
    """Compares params and losses of each step, ``mine`` with those of torch; both began at ``start``."""
    first: tuple[int | None, str | None, float] = (None, None, 0.0)
    shares: dict[str, float] = {}
    above = 0.0
    for step, ((values, loss), (theirs, their_loss)) in enumerate(zip(mine, expected, strict=True)):
        above = (loss - their_loss) / abs(their_loss) if their_loss else 0.0
        shares = {name: _share(values[name], value, start[name]) for name, value in theirs.items()}
        over = next((name for name, share in shares.items() if not share <= tolerance), None)
        if first[0] is None and over is not None:
            first = step + 1, over, shares[over]
    described = ", ".join(f"{key}={value!r}" for key, value in way.items())
    is_low = any(value.dtype is not torch.float32 for value in start.values())
    is_quantized = isinstance(way.get("reduce_dtype"), str) or way.get("gather_dtype") is not None
    is_expected = is_low or is_quantized or way.get("state_format", "fp32") != "fp32"
    largest = max(shares.values(), default=0.0)
    return Difference(stage, largest, *first, described, above, is_expected)


def _share(mine: torch.Tensor, theirs: torch.Tensor, start: torch.Tensor) -> float:
    if not theirs.numel():
        return 0.0
    difference = float((mine.double() - theirs.double()).abs().max())
    if difference == 0:
        return 0.0
    return difference / max(float((theirs.double() - start.double()).abs().max()), torch.finfo(torch.float32).tiny)


def _values(module: nn.Module) -> Values:
    return {name: param.detach().clone() for name, param in module.named_parameters()}


def _train(module: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, loss: Loss | None) -> float:
    """Takes one step. Returns the loss before it."""
    optimizer.zero_grad()
    if loss is not None:
        value = loss(module, batch)
    else:
        output = module(**batch) if isinstance(batch, dict) else module(batch)
        value = getattr(output, "loss", output)
    _check_loss(value, "module(batch), or its .loss, without loss=" if loss is None else "loss(module, batch)")
    value.backward()
    optimizer.step()
    return float(value.detach())


def _check_loss(value: object, what: str) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{what} must return the loss, a tensor of one element, found {type(value).__name__}.")
    if value.numel() != 1 or not value.requires_grad:
        raise ValueError(
            f"{what} must return the loss, one element that depends on the params: found a shape of "
            f"{tuple(value.shape)}{'' if value.requires_grad else ', detached from them'}."
        )
