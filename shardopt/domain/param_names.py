"""Params by the names that a user sees: ``model.named_parameters()`` without what wrappers put in between."""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import BindingError

# Attributes by which torch.compile and activation checkpointing hold the module that they wrap.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


def matching(module: nn.Module | None, patterns: Sequence[str]) -> frozenset[torch.Tensor]:
    """The params that one of the patterns names, or that lie in a module which one names; ``*`` stands for any text.

    Raises:
        BindingError: a pattern names nothing.
    """
    if module is None or not patterns:
        return frozenset()
    names = list(_names(module))
    found: set[torch.Tensor] = set()
    for pattern in patterns:
        own = [param for name, param in names if any(fnmatchcase(each, pattern) for each in _with_modules(name))]
        if not own:
            some = ", ".join(name for name, _ in names[:5])
            raise BindingError(
                f"Tuning(keep=...) has the pattern {pattern!r}, which names no param and no module: nothing would be "
                "kept whole for it. Write a name as in model.named_parameters(), * standing for any text. This model "
                f"has {some}{', ...' if len(names) > 5 else ''}."
            )
        found.update(own)
    return frozenset(found)


def name_of(module: nn.Module | None, param: torch.Tensor) -> str | None:
    """The name of a param in the module: the first one, if it is tied."""
    return None if module is None else next((name for name, each in _names(module) if each is param), None)


def _names(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    for name, param in inner.named_parameters(remove_duplicate=False):
        yield ".".join(each for each in name.split(".") if each not in _WRAPPERS), param


def _with_modules(name: str) -> Iterator[str]:
    """``a.b.weight``, ``a.b`` and ``a``."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        yield ".".join(parts[:end])
