"""Uneven inputs: what makes an optimizer joinable, for ranks with unequal numbers of batches.

Outside of a context nothing is announced, and nothing costs anything. :mod:`shardopt.shadow` says what happens inside.
"""

import functools
import itertools
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook, _JoinConfig
from torch.nn.parallel import DistributedDataParallel

from .agreement import agree_on_call
from .arguments import flag
from .errors import BindingError, DisagreementError, ShardoptError
from .local_params import any_dtensor
from .materialise import device_to_train_on
from .step import Call
from .survey import Scaling

if TYPE_CHECKING:
    from .optimizer import ShardedOptimizer
    from .shadow import Shadow

OFF = _JoinConfig.construct_disabled_join_config()

# Counts the contexts that rank 0 entered, once for each joinable: steps of several optimizers are told apart by it.
_NUMBERS = itertools.count()
# All optimizers, from the oldest: DDP's join() takes those along whose params it wraps.
_ENROLLED: "list[weakref.ref[ShardedOptimizer]]" = []


class Uneven(Joinable):
    """A joinable optimizer."""

    _join_config = OFF  # torch's Join writes it
    _hook: "Shadow | None" = None  # of the context that is open
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
        """A context for unequal numbers of batches, where the module was handed over (stages 0, 1 and 2).

        A rank that leaves its loop waits at the end of the context, takes part with zeros in what the others reduce,
        and takes every step with them: params and states are the same on all ranks throughout, and its param groups
        follow the others' hyper-parameters. What the body raises on one rank between two backwards, DisagreementError
        says on the others. Without the module: ``with ddp.join():``, or torch's
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
                    self._tell(error)
                    raise
        finally:
            self._is_joining = False
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
        (number,), *_ = optimizer._ranks().exchange([next(_NUMBERS)], self.join_device, "entering join()")
        if self._hook is not None:
            self._hook.leave()
        self._hook = Shadow(optimizer, by_all, number)
        return self._hook

    def _meet(self, call: str, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Collective: what all ranks give to a call, or the same error on all."""
        return agree_on_call(call, read, cast("ShardedOptimizer", self)._ranks(), self.join_device)

    @property
    def join_device(self) -> torch.device:
        """Of the messages of ``Join``: that of the params, or will be, where they are still on the meta device."""
        optimizer = cast("ShardedOptimizer", self)
        found = next((param.device for param in optimizer._grouped() if not param.is_meta), None)
        return device_to_train_on(optimizer._ranks()) if found is None else found

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

    def _tell(self, error: Exception) -> None:
        """Collective: the body raised on this rank alone, perhaps; the others wait for it, or will at their next call.

        What came out of a call of ours is known to all; and of a backward that is under way the sums are not complete.
        """
        optimizer = cast("ShardedOptimizer", self)
        backward = None if optimizer._handover is None else optimizer._handover.backward
        ours = __name__.partition(".")[0]
        modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
        is_known = any(name.partition(".")[0] == ours for name in modules[1:])  # behind join() itself
        if is_known or (backward is not None and backward.is_open):
            return
        call = Call(optimizer.defaults, Scaling(), closure=False, problem=error)
        with suppress(Exception):  # the error itself, or that all of them have raised it
            self._announce("step", call)
            optimizer._take(call)

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
    elif optimizer._handover is not None and any(each is not optimizer for each in optimizer._handover.sharing):
        why = (
            "several optimizers took the module over, and a rank that has run out can follow one. Use one with several "
            "param groups"
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
