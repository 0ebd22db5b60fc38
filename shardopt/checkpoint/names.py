"""Names in the whole model, for a module that is a part of the model: a pipeline stage, one rank's experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn
from torch.nn.parallel import DistributedDataParallel

# torch inserts these into names when it compiles or wraps a module.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def global_names(module: nn.Module, given: Mapping[nn.Module, str]) -> Callable[[str], str]:
    """Returns the function from the name of a param, buffer or module of ``module`` to its name in the whole model.

    ::

        module = nn.Sequential(norm, experts)      {module: "layers.3", experts: "layers.3.experts.7"}

        0.weight       layers.3.0.weight           the innermost module with a name counts
        1.up.weight    layers.3.experts.7.up.weight

    Raises:
        ValueError: a module in ``given`` is not in ``module``.
    """
    named = {unwrapped(each): prefix for each, prefix in given.items()}
    prefixes: dict[str, str] = {}
    found = set()
    for path, each in module.named_modules(remove_duplicate=False):
        inner = unwrapped(each)
        if inner in named:
            prefixes[plain_name(f"{path}.").rstrip(".")] = named[inner]
            found.add(inner)
    lost = [each for each in named if each not in found]
    if lost:
        raise ValueError(
            f"names takes submodules of the module that is saved or loaded: a {type(lost[0]).__name__} is not one, so "
            f"no param would be called {named[lost[0]]!r}."
        )

    def name_of(name: str) -> str:
        parts = plain_name(name).split(".")
        for end in range(len(parts), -1, -1):
            prefix = prefixes.get(".".join(parts[:end]))
            if prefix is not None:
                return ".".join(filter(None, (prefix, *parts[end:])))
        return plain_name(name)

    return name_of


def read_names(names: object) -> dict[nn.Module, str]:
    """Returns the argument ``names=``. Raises TypeError if it is not a dict of modules and strings."""
    if names is None:
        return {}
    if not isinstance(names, Mapping):
        raise TypeError(
            f"names takes a dict of modules and their names in the whole model, found {type(names).__name__}."
        )
    for module, prefix in names.items():
        if not isinstance(module, nn.Module) or not isinstance(prefix, str):
            raise TypeError(
                'names takes a dict of modules and their names in the whole model ({module: "layers.3"}), found '
                f"{type(module).__name__}: {prefix!r}."
            )
    return dict(names)


def unwrapped(module: nn.Module) -> nn.Module:
    """Returns the user's own module, without the wrappers of DDP and torch.compile."""
    while True:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        elif "_orig_mod" in module._modules:
            module = module._orig_mod  # type: ignore[assignment]
        else:
            return module


def plain_name(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
