"""Uneven inputs: makes an optimizer joinable, for ranks with unequal numbers of batches.

Outside of a context nothing is announced, at no cost. :mod:`shardopt.optim.shadow` describes what happens inside.
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

# Counts the contexts that rank 0 entered, once for each joinable; the number identifies an optimizer among several.
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
        """Context for unequal numbers of batches, where the module was handed over.

        A rank that leaves its loop waits at the end of the context, adds zeros to the reductions of the others, and
        takes every step with them: params and states stay equal on all ranks, and its param groups follow the others'
        hyper-parameters. At stage 3 it also joins the gathers of the others' forwards. If the body raises on one rank
        between two backwards, the other ranks raise DisagreementError. Without the module: ``with ddp.join():``, or
        torch's ``Join([ddp, optimizer])``, with a step after every backward.

        Args:
            divide_by_initial_world_size: gradients are divided by the number of all ranks; False: by the number of
                those that had a batch.
            enable: False does nothing, as without the context.
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
        self.engine.agree_on_call(
            "join()", lambda: {name: flag(value, f"join({name}=)") for name, value in given.items()}
        )
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
                        self._shadow.announce_error(error, __name__)
                    raise
        finally:
            self._is_joining = False
            if self._shadow is not None:  # after an exception
                self._shadow.leave()

    def join_hook(self, divide_by_initial_world_size: bool = True, **keywords: Any) -> JoinHook:
        """Returns the hook that torch's ``Join`` runs on a rank that has run out; see :meth:`join`."""
        from .can_join import check_can_join  # not at the top: few trainings need these
        from .shadow import Shadow

        name = "divide_by_initial_world_size"

        def read() -> dict[str, Any]:
            check_can_join(self.engine)
            return {name: flag(divide_by_initial_world_size, f"join({name}=)")}

        by_all = self.engine.agree_on_call("join()", read)[name]
        (number,), *_ = self.engine.ranks().exchange([next(_NUMBERS)], "entering join()")
        if self._shadow is not None:
            self._shadow.leave()
        self._shadow = Shadow(self.engine, by_all, number)
        self.engine.joining = self._shadow.announce_call
        return self._shadow

    @property
    def join_device(self) -> torch.device:
        """The device of ``Join``'s messages: that of the params, or that which meta params will have."""
        return self.engine.device

    @property
    def join_process_group(self) -> Any:
        """The ranks that share the states."""
        return self.engine.ensure_domains().main.mesh.world.group


def take_along() -> None:
    """Makes ``ddp.join()`` find optimizers from now on; torch has no hook for it."""
    if not hasattr(DistributedDataParallel.join, "__wrapped__"):
        DistributedDataParallel.join = _along(DistributedDataParallel.join)  # type: ignore[method-assign]


def _along(join: Callable[..., Any]) -> Callable[..., Any]:
    """Returns DDP's ``join()`` with the optimizers of its params as joinables: their steps need all ranks."""

    @functools.wraps(join)
    def joined(
        self: DistributedDataParallel,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Any:
        from ..engine import live_engines  # not at the top: imported only when join() is called

        if not enable:
            return join(self, divide_by_initial_world_size, enable, throw_on_early_termination)
        own = set(self.module.parameters())
        beside = []
        for engine in live_engines():
            if engine.takeover is not None and engine.takeover.module is self.module:
                raise BindingError(
                    "use `with optimizer.join():`, or pass model.parameters() without the module at stage 0 or 1: "
                    "DistributedDataParallel.join() was called, and an optimizer took the module over, so DDP has no "
                    "reductions left that a rank without a batch could follow."
                )
            if engine.takeover is None and any(param in own for param in engine.params):
                beside.append(cast(Joinable, engine.owner))
        by_all = divide_by_initial_world_size
        return Join([self, *beside], enable, throw_on_early_termination, divide_by_initial_world_size=by_all)

    return joined
