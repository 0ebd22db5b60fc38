"""Params by the names that a user sees: those of ``model.named_parameters()``, without the parts that wrappers add."""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import BindingError

# Attributes by which torch.compile and activation checkpointing hold the module that they wrap.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
_LISTS = {"param": "named_parameters", "buffer": "named_buffers"}
_NONE = {"param": "names no param and no module", "buffer": "names no buffer and no module"}


def matching(
    module: nn.Module | None,
    patterns: Sequence[str],
    option: str = "Tuning(keep=...)",
    without: str = "nothing would be kept whole for it",
    kind: str = "param",
) -> frozenset[torch.Tensor]:
    """Returns the params that a pattern names, and those in a module that a pattern names; ``*`` matches any text.

    Args:
        option: that has the patterns, for messages.
        without: what would follow from a pattern that names nothing.
        kind: "param", or "buffer" for buffers in their place.

    Raises:
        BindingError: a pattern names nothing.
    """
    if module is None or not patterns:
        return frozenset()
    names = list(_names(module, kind))
    found: set[torch.Tensor] = set()
    for pattern in patterns:
        own = [each for name, each in names if any(fnmatchcase(part, pattern) for part in _with_modules(name))]
        if not own:
            some = ", ".join(name for name, _ in names[:5])
            raise BindingError(
                f"write a name as in model.{_LISTS[kind]}() (* matches any text): {option} has the pattern "
                f"{pattern!r}, which {_NONE[kind]}, and {without}. This model has "
                f"{some}{', ...' if len(names) > 5 else ''}."
            )
        found.update(own)
    return frozenset(found)


def name_of(module: nn.Module | None, param: torch.Tensor) -> str | None:
    """Returns the name of a param in the module: the first one, if it is tied."""
    return None if module is None else next((name for name, each in _names(module) if each is param), None)


def _names(module: nn.Module, kind: str = "param") -> Iterator[tuple[str, torch.Tensor]]:
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    for name, tensor in getattr(inner, _LISTS[kind])(remove_duplicate=False):
        yield without_wrappers(name), tensor


def without_wrappers(name: str) -> str:
    """Returns a name of ``model.named_parameters()`` or ``named_modules()`` without the parts that wrappers add."""
    return ".".join(each for each in name.split(".") if each not in _WRAPPERS)


def _with_modules(name: str) -> Iterator[str]:
    """Yields the name and those of the modules around it: ``a.b.weight``, ``a.b`` and ``a``."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        yield ".".join(parts[:end])
