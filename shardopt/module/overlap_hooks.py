"""Hooks by which a module waits for its own params, where a step did not wait for its gather.

They are on modules only while params arrive: from the end of a step to the end of the next forward. A module waits for
the buckets of the params that its code may read: a block for all of its params, any other module for its own. If code
reads another param, the guard of that param waits. A forward without gradients waits for all params at its beginning
(``nn.TransformerEncoderLayer`` takes other kernels for params that are guarded), and so does one in a transform of
``torch.func``, whose wrappers hide params from their guards, and the end of every forward.

Once torch.compile has compiled anything, every step waits for its gather: no guard notices what compiled code reads,
and torch compiles again for params of another class.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from ..domain.model_units import params_by_module
from ..errors import CommunicationError
from .hooks import ModuleHook, remove_all

if TYPE_CHECKING:
    from torch import nn

    from ..domain.domain import Domain, StartGather
    from ..domain.overlapped_gather import OverlappedGather
    from ..partition.bucket import Bucket


class OverlapHooks:
    """The hooks on one module, for one domain."""

    def __init__(self, domain: Domain, root: nn.Module):
        self._domain, self._root = domain, root
        self._needs: dict[nn.Module, tuple[Bucket, ...]] = {}
        self._handles: list[Any] = []
        self._gather: OverlappedGather | None = None

    def attach(self) -> None:
        """Looks up which buckets each module needs. Called after each binding."""
        entries = self._domain.entries
        self._needs = {}
        for module, params in params_by_module(self._root, self._domain.options.tuning.units).items():
            buckets = dict.fromkeys(entries[param].shard.bucket for param in params if param in entries)
            if buckets:
                self._needs[module] = tuple(buckets)

    def start(self, start_gather: StartGather) -> bool:
        """Puts hooks on the modules and starts the gather, or returns False if the step must wait for it."""
        if _has_compiled():
            return False
        self._gather = start_gather(self._remove)
        for module in self._needs:
            if module is not self._root:  # ModuleTakeover calls pre_forward() for the root
                self._handles.append(module.register_forward_pre_hook(ModuleHook(self._pre_module), prepend=True))
        # always_call: after an exception no other call would notice that a rank failed.
        end = ModuleHook(self._post_forward)
        self._handles.append(self._root.register_forward_hook(end, always_call=True))
        return True

    def pre_forward(self) -> None:
        """The forward of the whole module begins."""
        if self._gather is not None:
            self._gather.is_in_forward = torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1
            self._pre_module(self._root)

    def _pre_module(self, module: nn.Module, *_: Any) -> None:
        """The forward of a module begins."""
        if self._gather is None:
            return
        # None: no transform of ``torch.func`` runs.
        if self._gather.is_in_forward and torch._C._functorch.peek_interpreter_stack() is None:
            self._gather.wait_for(self._needs.get(module, ()))  # a shallow copy of a module has its hooks
        else:
            self._gather.finish()

    def _post_forward(self, _: nn.Module, __: Any, output: Any) -> None:
        if self._gather is None:
            return
        # After an exception torch would warn of a second one. The next read of a param raises it.
        has_failed = output is None and sys.exc_info()[0] is not None
        with suppress(*((CommunicationError,) if has_failed else ())):
            self._gather.finish()

    def _remove(self) -> None:
        remove_all(self._handles)
        self._gather = None


def _has_compiled() -> bool:
    """True if torch.compile has compiled code in this process.

    Test: test_a_step_waits_where_compiled_code_reads_params in tests/module/test_arriving.py.
    """
    frames = sys.modules.get("torch._dynamo.convert_frame")
    return frames is not None and getattr(frames, "FRAME_COUNTER", 1) > 0
