"""Units: the params that stage 3 gathers together, found from the module tree.

A unit is one of a run of like blocks, as people wrap them one by one elsewhere, and is never cut. What lies outside of
blocks has a unit for each module that owns params, if they are large; small ones share one unit::

    Llama                      unit
      embed                    embed
      layers: ModuleList
        0: Block               layers.0       all params of the block, experts and adapters included
        1: Block               layers.1
      norm                     (rest)         small
      head                     head

A call of one of a unit's ``modules`` needs the unit. A tied param belongs to the first unit that holds it, which a call
of any module that owns the param needs as well.

Of a ``ModuleList`` of pipeline stages each stage has units of its own, as the model that it is: ``0.layers.3``,
``1.(rest)``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import BindingError
from ..units.schedule import Budget
from .called import called_modules
from .param_names import without_wrappers

if TYPE_CHECKING:
    from ..config import Tuning

REST = "(rest)"
# A module outside of blocks shares a unit with its like if it has fewer bytes than both: each unit costs a message.
SMALL, SMALL_SHARE = 1 << 20, 1 / 64  # bytes; of the model's

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
# Modules that read the params of their children without calling them: never split.
_READS_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


@dataclass(frozen=True, eq=False)
class UnitPlan:
    """A unit before anything is allocated.

    Attributes:
        name: of the module, as in ``model.named_modules()``; "" for the params that the model owns itself.
        modules: a call of one of them needs the unit.
        params: in the order of ``model.parameters()``.
        called: the name of the module that a script calls, with this unit in it; see :mod:`shardopt.domain.called`.
        is_around: True if one of the modules calls modules of other units.
    """

    name: str
    modules: tuple[nn.Module, ...]
    params: tuple[nn.Parameter, ...]
    called: str = ""
    is_around: bool = False

    @property
    def is_spread(self) -> bool:
        """True if the unit is used early and late in a pass: it stays from the first use to the last."""
        return len(self.modules) > 1 or self.is_around


def gathering_budget(tuning: Tuning, travels: bool) -> Budget:
    """Returns what these options allow to be gathered at once.

    Args:
        travels: True if params travel between ranks; False if a gather reads the other ranks' memory.
    """
    prefetch, resharded = tuning.prefetch, tuning.reshard_after_forward
    units = math.inf if tuning.live_bytes is not None else 3 if travels else 1
    if travels and isinstance(prefetch, int):
        units = prefetch + 1
    return Budget(
        math.inf if tuning.live_bytes is None else tuning.live_bytes,
        units,
        travels,
        _is_resharded(resharded),
        prefetch if isinstance(prefetch, Mapping) else None,
    )


def _is_resharded(asked: bool | int | str | Sequence[str]) -> bool | tuple[str, ...]:
    if isinstance(asked, bool):
        return asked
    return asked not in (0, 1) if isinstance(asked, int | str) else tuple(asked)  # one rank holds all of a unit


def check_names(units: Sequence[UnitPlan], tuning: Tuning) -> None:
    """Raises BindingError if an option names a unit that there is not."""
    names = [unit.name for unit in units]
    asked: dict[str, Sequence[str]] = {}
    if not isinstance(tuning.reshard_after_forward, int | str):
        asked["reshard_after_forward"] = tuning.reshard_after_forward
    if isinstance(tuning.prefetch, Mapping):
        asked["prefetch"] = [*tuning.prefetch, *(name for named in tuning.prefetch.values() for name in named)]
    for option, patterns in asked.items():
        for pattern in patterns:
            found = any(fnmatchcase(name, pattern) for name in names) if option != "prefetch" else pattern in names
            if not found:
                raise BindingError(
                    f"write names of units as opt.units has them: Tuning({option}=...) has {pattern!r}, which names no "
                    f"unit, and nothing would follow from it. This model has {', '.join(names[:5])}"
                    f"{', ...' if len(names) > 5 else ''}."
                )


def units_of(module: nn.Module, given: Sequence[Any] = ()) -> list[UnitPlan]:
    """Returns the units of a model, in the order of its modules; the same on all ranks.

    Args:
        given: ``Tuning.units``: which modules are units, in place of the blocks that are found.

    Raises:
        BindingError: one of ``given`` is not a module of the model that has params.
    """
    root = module.module if isinstance(module, DistributedDataParallel) else module
    small = min(SMALL, SMALL_SHARE * sum(map(_nbytes, root.parameters())))
    unit_of: dict[nn.Parameter, str] = {}
    modules: dict[str, list[nn.Module]] = {}
    called_of: dict[str, str] = {}
    for called, name, each, whole in _split_called(root, given):
        params = [param for param in each.parameters(recurse=whole) if param not in unit_of]
        if params:
            is_small = not whole and sum(map(_nbytes, params)) < small
            name = (f"{called}.{REST}" if called else REST) if is_small else name
            modules.setdefault(name, []).append(each)
            unit_of.update(dict.fromkeys(params, name))
            called_of[name] = called
    owners = {each: name for name, units in modules.items() for each in units}
    around = {name for each, name in owners.items() if any(owners.get(inner, name) != name for inner in each.modules())}
    inside = {name: {each for unit in units for each in unit.modules()} for name, units in modules.items()}
    for each in root.modules():
        for param in each.parameters(recurse=False):
            name = unit_of[param]
            if each not in inside[name]:  # a tied param of another unit
                inside[name].add(each)
                modules[name].append(each)
    params_of: dict[str, list[nn.Parameter]] = {name: [] for name in modules}
    for param in root.parameters():
        params_of[unit_of[param]].append(param)
    return [
        UnitPlan(name, tuple(modules[name]), tuple(params), called_of[name], name in around)
        for name, params in params_of.items()
    ]


def params_by_module(root: nn.Module, given: Sequence[Any] = ()) -> dict[nn.Module, tuple[nn.Parameter, ...]]:
    """Returns the params that the code of each module may read: all of a block, else those that the module owns.

    Args:
        given: as for :func:`units_of`.
    """
    return {each: tuple(each.parameters(recurse=whole)) for _, _, each, whole in _split_called(root, given)}


def _split_called(root: nn.Module, given: Sequence[Any]) -> Iterator[tuple[str, str, nn.Module, bool]]:
    """Yields what ``_split`` does for each module that a script calls, after the name of that module."""
    said, seen = _said(root, given) if given else None, set[nn.Module]()
    for called in called_modules(root):
        is_unit = _is_unit(called.module, said) if called.name else said is not None and called.module in said
        if is_unit and called.module not in seen:
            seen.add(called.module)
            yield called.name, called.name, called.module, True
            continue
        for name, each, whole in _split(called.module, called.name, seen, said):
            yield called.name, name, each, whole


def _is_unit(stage: nn.Module, said: set[nn.Module] | None) -> bool:
    """True if all params of a pipeline stage are one unit."""
    return _is_layer(stage) or _is_never_split(stage) or (said is not None and stage in said)


def _nbytes(param: nn.Parameter) -> int:
    return param.numel() * param.element_size()


def _said(root: nn.Module, given: Sequence[Any]) -> set[nn.Module]:
    """Returns the modules that the user said are units."""
    found: set[nn.Module] = set()
    named = [(without_wrappers(name), each) for name, each in root.named_modules() if name and any(_params(each))]
    for wanted in given:
        if isinstance(wanted, str):
            own = [each for name, each in named if fnmatchcase(name, wanted)]
        else:
            own = [
                each for _, each in named if each is wanted or (isinstance(wanted, type) and isinstance(each, wanted))
            ] or [root] * (root is wanted)  # of a class, only modules inside of the model
        if not own:
            raise BindingError(
                "name modules of this model that have params (classes, modules, or names as in model.named_modules(), "
                f"* matches any text): Tuning(units=...) has {wanted!r:.80}, which is none, and no unit would be made."
            )
        found.update(own)
    return found


def _params(module: nn.Module) -> Iterator[bool]:
    return (True for _ in module.parameters())


def _split(
    module: nn.Module, name: str, seen: set[nn.Module], said: set[nn.Module] | None
) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yields each block (True), and each module outside of blocks that owns params (False).

    Args:
        said: the blocks; None: they are found.
    """
    if module in seen:
        return
    seen.add(module)
    if next(module.parameters(recurse=False), None) is not None:
        yield name, module, False
    children = [(key, each) for key, each in module.named_children() if next(each.parameters(), None) is not None]
    kinds = Counter(type(each) for _, each in children)
    for key, each in children:
        full = without_wrappers(f"{name}.{key}" if name else key)
        is_block = each in said if said is not None else _is_block(each, module, kinds[type(each)] > 1)
        if (is_block or _is_never_split(each)) and each not in seen:
            seen.add(each)
            yield full, each, True
        else:
            yield from _split(each, full, seen, said)


def _is_block(module: nn.Module, parent: nn.Module, is_one_of_many: bool) -> bool:
    """True if all params of a module are one unit."""
    if type(module) in CONTAINERS:  # a block may be written as a container of layers, in a container of such blocks
        return type(parent) in CONTAINERS and is_one_of_many and all(map(_is_layer, module.children()))
    if type(parent) in CONTAINERS:
        return is_one_of_many or not _is_layer(module)
    return is_one_of_many and not _is_layer(module) and not _holds_blocks(module)


def _is_never_split(module: nn.Module) -> bool:
    """True if a module may read the params of its children without calling them."""
    return isinstance(module, _READS_CHILDREN) or torch.nn.utils.parametrize.is_parametrized(module)


def _is_layer(module: nn.Module) -> bool:
    """True if no module inside of it has params."""
    return not any(next(each.parameters(), None) is not None for each in module.children())


def _holds_blocks(module: nn.Module) -> bool:
    """True if a container somewhere inside holds several modules that are more than layers: a tower, not a block."""
    for each in module.modules():
        if type(each) in CONTAINERS:
            inner = [child for child in each.children() if type(child) not in CONTAINERS]
            if sum(any(True for _ in child.children()) for child in inner) > 1:
                return True
    return False
