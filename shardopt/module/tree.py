"""The modules, params and buffers that a module consists of, to notice one that is replaced."""

from itertools import chain
from typing import Any

from torch import nn


class ModuleTree:
    """The objects that a module consisted of when the tree was made.

    Every step compares them with the module's present objects. The comparison costs a fraction of
    ``list(module.parameters())``, and finds what no hook reports (``module._parameters[name] = ...``, as
    ``Module.to()`` may do).
    """

    def __init__(self, root: nn.Module, kind: str = "_parameters"):
        """
        Args:
            kind: the table of each module that is compared besides that of its submodules.
        """
        self._tables: list[dict[str, Any]] = [
            table for module in root.modules() for table in (getattr(module, kind), module._modules)
        ]
        self._values = list(chain.from_iterable(map(dict.values, self._tables)))
        self._ids = list(map(id, self._values))  # which are kept alive, so that nothing else has their ids

    @property
    def is_current(self) -> bool:
        """True if the module still consists of the same objects."""
        return list(map(id, chain.from_iterable(map(dict.values, self._tables)))) == self._ids
