"""Hooks by which a module waits for its own params, where a step left its gather behind.

They are on modules only while params arrive: from the end of a step to the end of the next forward. A module waits for
the buckets of the params that its code may read: a block for all of its params, any other module for its own. What code
reads beyond that, the guard of the param sees. All params are waited for at once before a forward without gradients
(``nn.TransformerEncoderLayer`` takes other kernels for params that are guarded), and at the end of every forward.

Once torch.compile has compiled anything, no step leaves its gather behind: no guard sees what compiled code reads, and
torch compiles again for params of another class.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from ..domain.units import params_by_module
from ..errors import CommunicationError
from .hooks import ModuleHook

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from ..domain.arriving import Arriving
    from ..domain.domain import Domain
    from ..partition.bucket import Bucket


class ArrivalHooks:
    """The hooks on one module, for one domain."""

    def __init__(self, domain: Domain, root: nn.Module):
        self._domain, self._root = domain, root
        self._needs: dict[nn.Module, tuple[Bucket, ...]] = {}
        self._handles: list[Any] = []
        self._arriving: Arriving | None = None

    def attach(self) -> None:
        """Looks up which buckets each module needs: params were bound."""
        entries = self._domain.entries
        self._needs = {}
        for module, params in params_by_module(self._root, self._domain.options.tuning.units).items():
            buckets = dict.fromkeys(entries[param].shard.bucket for param in params if param in entries)
            if buckets:
                self._needs[module] = tuple(buckets)

    def leave(self, begin: Callable[[], Arriving]) -> bool:
        """Lets params arrive from now on, or returns False if the step must wait for them."""
        if _has_compiled():
            return False
        self._arriving = begin()
        self._arriving.on_end = self._remove
        for module in self._needs:
            if module is not self._root:  # ModuleTakeover calls pre_forward() for the root
                self._handles.append(module.register_forward_pre_hook(ModuleHook(self._pre_module), prepend=True))
        # always_call: after an exception too, nobody else would hear of a rank that failed.
        end = ModuleHook(self._post_forward)
        self._handles.append(self._root.register_forward_hook(end, always_call=True))
        return True

    def pre_forward(self) -> None:
        """The forward of the whole module begins."""
        if self._arriving is None:
            return
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            self._arriving.is_in_forward = True
            self._arriving.wait_for(self._needs.get(self._root, ()))
        else:
            self._arriving.settle()

    def _pre_module(self, module: nn.Module, _: Any) -> None:
        """The forward of a module inside begins."""
        if self._arriving is None:
            return
        if self._arriving.is_in_forward:
            self._arriving.wait_for(self._needs.get(module, ()))  # a shallow copy of a module has its hooks
        else:
            self._arriving.settle()

    def _post_forward(self, _: nn.Module, __: Any, output: Any) -> None:
        if self._arriving is None:
            return
        # After an exception torch would warn of another one; whoever reads a param will be told.
        has_failed = output is None and sys.exc_info()[0] is not None
        with suppress(*((CommunicationError,) if has_failed else ())):
            self._arriving.settle()

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._arriving = [], None


def _has_compiled() -> bool:
    """True if torch.compile has compiled code in this process."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    return frames is not None and getattr(frames, "FRAME_COUNTER", 1) > 0
