"""Uneven inputs: what makes an optimizer joinable, for ranks with unequal numbers of batches.

Outside of a context nothing is announced, and nothing costs anything. :mod:`shardopt.shadow` says what happens inside.
"""

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook, _JoinConfig
from torch.nn.parallel import DistributedDataParallel

from .agreement import agree_on_call
from .arguments import flag
from .errors import BindingError, DisagreementError, ShardoptError
from .local_params import any_dtensor
from .step import Call

if TYPE_CHECKING:
    from .optimizer import ShardedOptimizer
    from .shadow import Shadow

OFF = _JoinConfig.construct_disabled_join_config()

# All optimizers, from the oldest: DDP's join() takes those along whose params it wraps.
_ENROLLED: "list[weakref.ref[ShardedOptimizer]]" = []


class Uneven(Joinable):
    """A joinable optimizer."""

    _join_config = OFF  # torch's Join writes it
    _hook: "Shadow | None" = None  # of the context that is open

    def __init__(self) -> None:  # Joinable's is abstract
        super().__init__()

    @contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """A context for unequal numbers of batches, where the module was handed over (stages 0, 1 and 2).

        A rank that leaves its loop waits at the end of the context, takes part with zeros in what the others reduce,
        and takes every step with them: params and states are the same on all ranks throughout, and its param groups
        follow the others' hyper-parameters. Without the module: ``with ddp.join():``, or torch's
        ``Join([ddp, optimizer])``, with a step behind every backward.

        Args:
            divide_by_initial_world_size: gradients are divided by the number of all ranks; False: by the number of
                those that had a batch.
            enable: False: as if there were no context.
            throw_on_early_termination: all ranks raise RuntimeError as soon as one of them has run out.

        Raises:
            ShardoptError: at stage 3, with ``release_gradients=True``, or for a composed model; on every rank, at once.
            DisagreementError: ranks give other arguments.
            TypeError: one is neither True nor False.
        """
        given = {
            "divide_by_initial_world_size": divide_by_initial_world_size,
            "enable": enable,
            "throw_on_early_termination": throw_on_early_termination,
        }
        self._meet("join()", lambda: {name: flag(value, f"join({name}=)") for name, value in given.items()})
        if not enable or not dist.is_initialized():
            yield
            return
        try:
            with Join(
                [self],
                throw_on_early_termination=throw_on_early_termination,
                divide_by_initial_world_size=divide_by_initial_world_size,
            ):
                yield
        finally:
            if self._hook is not None:  # behind an exception
                self._hook.leave()

    def join_hook(self, divide_by_initial_world_size: bool = True, **keywords: Any) -> JoinHook:
        """What torch's ``Join`` runs on a rank that has run out; see :meth:`join`."""
        from .shadow import Shadow  # which few trainings need

        optimizer = cast("ShardedOptimizer", self)
        name = "divide_by_initial_world_size"

        def read() -> dict[str, Any]:
            _check_can_join(optimizer)
            return {name: flag(divide_by_initial_world_size, f"join({name}=)")}

        by_all = self._meet("join()", read)[name]
        if self._hook is not None:
            self._hook.leave()
        self._hook = Shadow(optimizer, by_all)
        return self._hook

    def _meet(self, call: str, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Collective: what all ranks give to a call, or the same error on all."""
        return agree_on_call(call, read, cast("ShardedOptimizer", self)._ranks(), self.join_device)

    @property
    def join_device(self) -> torch.device:
        """Of the messages of ``Join``: that of the params."""
        return next((param.device for param in cast("ShardedOptimizer", self)._grouped()), torch.device("cpu"))

    @property
    def join_process_group(self) -> Any:
        """The ranks that share the states."""
        return cast("ShardedOptimizer", self)._bound().mesh.world.group

    def _announce(self, kind: str, call: Call | None = None) -> None:
        """Collective in a context: ranks that have run out do the same."""
        hook = self._hook
        if hook is None:
            return
        try:
            hook.announce(kind, dict if call is None else functools.partial(hook.step_facts, call))
        except DisagreementError as error:  # the others are in a backward, say
            if call is not None and call.problem is not None:
                raise call.problem from error
            raise

    def _enroll(self) -> None:
        """``ddp.join()`` finds this optimizer from now on."""
        _ENROLLED[:] = [each for each in _ENROLLED if each() is not None]
        _ENROLLED.append(weakref.ref(cast("ShardedOptimizer", self)))
        if not hasattr(DistributedDataParallel.join, "__wrapped__"):
            DistributedDataParallel.join = _along(DistributedDataParallel.join)  # type: ignore[method-assign]


def _check_can_join(optimizer: "ShardedOptimizer") -> None:
    """Raises ShardoptError where a rank that has run out could not follow."""
    options, why = optimizer.options, None
    if options.stage == 3:
        why = (
            "at stage 3 every forward gathers params from all ranks, and a rank that has run out runs none. That comes "
            "with a schedule of gathers. Use stage 2"
        )
    elif options.release_gradients:
        why = (
            "release_gradients=True takes the steps inside of backward, and a rank that has run out runs none. "
            "Construct the optimizer without it"
        )
    elif (
        options.norm_group is not None
        or any(group.get("process_group") is not None for group in optimizer.param_groups)
        or any_dtensor(optimizer._grouped())
    ):
        why = (
            "the model is composed with tensor, pipeline or expert parallelism, whose ranks need each other's batches. "
            "Leave join() away"
        )
    if why is not None:
        raise ShardoptError(
            f"join() was asked to let ranks run out of batches, and {why}, or give all ranks equally many batches. "
            "Otherwise ranks that have a batch would wait for one that has none."
        )


def _along(join: Callable[..., Any]) -> Callable[..., Any]:
    """DDP's ``join()``, which takes along the optimizers whose params it wraps: their steps need all ranks."""

    @functools.wraps(join)
    def joined(
        self: DistributedDataParallel,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Any:
        if not enable:
            return join(self, divide_by_initial_world_size, enable, throw_on_early_termination)
        own = set(self.module.parameters())
        beside = []
        for optimizer in (each() for each in _ENROLLED):
            if optimizer is None or optimizer._closed:
                continue
            if optimizer._handover is not None and optimizer._handover.module is self.module:
                raise BindingError(
                    "DistributedDataParallel.join() was called, and an optimizer took the module over: DDP has no "
                    "reductions left that a rank without a batch could follow. Use `with optimizer.join():`, or pass "
                    "model.parameters() without the module at stage 0 or 1."
                )
            if optimizer._handover is None and any(param in own for param in optimizer._grouped()):
                beside.append(optimizer)
        by_all = divide_by_initial_world_size
        return Join([self, *beside], enable, throw_on_early_termination, divide_by_initial_world_size=by_all)

    return joined
