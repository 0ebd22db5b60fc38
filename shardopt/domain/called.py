"""The modules that a script calls: the model, or each stage of a pipeline that this rank holds.

A rank of an interleaved pipeline has several stages. They are handed over as one ``nn.ModuleList``, which has no
forward: the schedule calls each stage. A stage may be wrapped in DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(eq=False)
class CalledModule:
    """A module whose forward begins a forward of the model.

    Attributes:
        name: in the model; "" is the model itself.
        module: without DDP around it.
        ddp: the DDP module around it, if any; one that is wrapped around it later is found at the next forward.
    """

    name: str
    module: nn.Module
    ddp: DistributedDataParallel | None = None


def called_modules(model: nn.Module) -> list[CalledModule]:
    """Returns the model, or the modules in a ``ModuleList``, and in those that it holds."""
    return list(_called("", model))


def _called(name: str, module: nn.Module) -> Iterator[CalledModule]:
    if type(module) is nn.ModuleList and len(module):
        for key, each in module.named_children():
            yield from _called(f"{name}.{key}" if name else key, each)
    elif isinstance(module, DistributedDataParallel):
        yield CalledModule(name, module.module, module)
    else:
        yield CalledModule(name, module)


def stage_numbers(model: nn.Module | None) -> dict[nn.Parameter, int]:
    """Returns the number of the pipeline stage of each param; empty if the model is called as one.

    A param that several stages share belongs to the first.
    """
    called = [] if model is None else called_modules(model)
    found: dict[nn.Parameter, int] = {}
    for number, each in enumerate(called if len(called) > 1 else ()):
        for param in each.module.parameters():
            found.setdefault(param, number)
    return found
