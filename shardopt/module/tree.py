"""Which modules and params a module consists of, so that one that is exchanged after binding is noticed."""

from itertools import chain
from operator import is_
from typing import Any

from torch import nn


class ModuleTree:
    """What a module consisted of when this was made.

    To look whether it still does costs a fraction of ``list(module.parameters())``, and sees what no hook tells of
    (``module._parameters[name] = ...``, as ``Module.to()`` may do): it runs in every step.
    """

    def __init__(self, root: nn.Module):
        self._tables: list[dict[str, Any]] = [
            table for module in root.modules() for table in (module._parameters, module._modules)
        ]
        self._values = list(chain.from_iterable(map(dict.values, self._tables)))

    @property
    def is_current(self) -> bool:
        """Whether the module consists of the same objects."""
        return sum(map(len, self._tables)) == len(self._values) and all(
            map(is_, chain.from_iterable(map(dict.values, self._tables)), self._values)
        )
