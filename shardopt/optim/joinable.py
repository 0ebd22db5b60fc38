"""Uneven inputs: what makes an optimizer joinable, for ranks with unequal numbers of batches.

Outside of a context nothing is announced, and nothing costs anything. :mod:`shardopt.optim.shadow` says what happens
inside.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook, _JoinConfig
from torch.nn.parallel import DistributedDataParallel

from ..arguments import flag
from ..errors import BindingError, ShardoptError

if TYPE_CHECKING:
    from ..engine import Engine
    from .shadow import Shadow

OFF = _JoinConfig.construct_disabled_join_config()

# Counts the contexts that rank 0 entered, once for each joinable: steps of several optimizers are told apart by it.
_NUMBERS = itertools.count()


class JoinableOptimizer(Joinable):
    """A joinable optimizer."""

    engine: "Engine"
    _join_config = OFF  # torch's Join writes it
    _shadow: "Shadow | None" = None  # of the context that is open
    _is_joining = False  # inside of join()

    def __init__(self) -> None:  # Joinable's is abstract
        super().__init__()

    @contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """A context for unequal numbers of batches, where the module was handed over.

        A rank that leaves its loop waits at the end of the context, takes part with zeros in what the others reduce,
        and takes every step with them: params and states are the same on all ranks throughout, and its param groups
        follow the others' hyper-parameters. What the body raises on one rank between two backwards, DisagreementError
        says on the others. At stage 3 it joins the gathers of the others' forwards, too. Without the module: ``with
        ddp.join():``, or torch's ``Join([ddp, optimizer])``, with a step after every backward.

        Args:
            divide_by_initial_world_size: gradients are divided by the number of all ranks; False: by the number of
                those that had a batch.
            enable: False: as if there were no context.
            throw_on_early_termination: all ranks raise RuntimeError as soon as one of them has run out.

        Raises:
            ShardoptError: with ``release_gradients=True``, or for a composed model; on every rank, at once.
            DisagreementError: ranks give other arguments; or, at stage 3 where params travel, a forward gathers them in
                another order than the schedule, or ``torch.autograd.grad()`` does, and a rank has run out.
            TypeError: one is neither True nor False.
        """
        given = {
            "divide_by_initial_world_size": divide_by_initial_world_size,
            "enable": enable,
            "throw_on_early_termination": throw_on_early_termination,
        }
        if self._is_joining:
            raise ShardoptError(
                "leave `with optimizer.join():` before entering it again: inside of it ranks that have run out follow "
                "the outer context, and would never come to this one."
            )
        self._meet("join()", lambda: {name: flag(value, f"join({name}=)") for name, value in given.items()})
        if not enable or not dist.is_initialized():
            yield
            return
        self._is_joining = True
        try:
            with Join(
                [self],
                throw_on_early_termination=throw_on_early_termination,
                divide_by_initial_world_size=divide_by_initial_world_size,
            ):
                try:
                    yield
                except Exception as error:
                    if self._shadow is not None:
                        self._shadow.tell_of(error, __name__)
                    raise
        finally:
            self._is_joining = False
            if self._shadow is not None:  # behind an exception
                self._shadow.leave()

    def join_hook(self, divide_by_initial_world_size: bool = True, **keywords: Any) -> JoinHook:
        """What torch's ``Join`` runs on a rank that has run out; see :meth:`join`."""
        from .shadow import Shadow, check_can_join  # which few trainings need

        name = "divide_by_initial_world_size"

        def read() -> dict[str, Any]:
            check_can_join(self.engine)
            return {name: flag(divide_by_initial_world_size, f"join({name}=)")}

        by_all = self._meet("join()", read)[name]
        (number,), *_ = self.engine.ranks().exchange([next(_NUMBERS)], "entering join()")
        if self._shadow is not None:
            self._shadow.leave()
        self._shadow = Shadow(self.engine, by_all, number)
        self.engine.joining = self._shadow.tell
        return self._shadow

    def _meet(self, call: str, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Collective: what all ranks give to a call, or the same error on all."""
        return self.engine.agree_on_call(call, read)

    @property
    def join_device(self) -> torch.device:
        """Of the messages of ``Join``: that of the params, or will be, where they are still on the meta device."""
        return self.engine.device

    @property
    def join_process_group(self) -> Any:
        """The ranks that share the states."""
        return self.engine.compose().main.mesh.world.group


def take_along() -> None:
    """``ddp.join()`` finds optimizers from now on: torch offers no other way to be taken along."""
    if not hasattr(DistributedDataParallel.join, "__wrapped__"):
        DistributedDataParallel.join = _along(DistributedDataParallel.join)  # type: ignore[method-assign]


def _along(join: Callable[..., Any]) -> Callable[..., Any]:
    """DDP's ``join()``, which takes along the optimizers whose params it wraps: their steps need all ranks."""

    @functools.wraps(join)
    def joined(
        self: DistributedDataParallel,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Any:
        from ..engine import live_engines  # DDP's own join() alone needs none of it

        if not enable:
            return join(self, divide_by_initial_world_size, enable, throw_on_early_termination)
        own = set(self.module.parameters())
        beside = []
        for engine in live_engines():
            if engine.takeover is not None and engine.takeover.module is self.module:
                raise BindingError(
                    "DistributedDataParallel.join() was called, and an optimizer took the module over: DDP has no "
                    "reductions left that a rank without a batch could follow. Use `with optimizer.join():`, or pass "
                    "model.parameters() without the module at stage 0 or 1."
                )
            if engine.takeover is None and any(param in own for param in engine.params):
                beside.append(cast(Joinable, engine.owner))
        by_all = divide_by_initial_world_size
        return Join([self, *beside], enable, throw_on_early_termination, divide_by_initial_world_size=by_all)

    return joined
