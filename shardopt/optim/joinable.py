"""Uneven inputs: what makes an optimizer joinable, for ranks with unequal numbers of batches.

Outside of a context nothing is announced, and nothing costs anything. :mod:`shardopt.optim.shadow` says what happens
inside.
"""

import functools
import itertools
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook, _JoinConfig
from torch.nn.parallel import DistributedDataParallel

from ..arguments import flag
from ..domain.agreement import agree_on_call
from ..domain.dtensors import any_dtensor
from ..engine import Engine, live_engines
from ..errors import BindingError, ShardoptError
from ..module.materialize import device_to_train_on
from ..step.step import Call
from ..step.survey import Scaling

if TYPE_CHECKING:
    from .shadow import Shadow

OFF = _JoinConfig.construct_disabled_join_config()

# Counts the contexts that rank 0 entered, once for each joinable: steps of several optimizers are told apart by it.
_NUMBERS = itertools.count()


class JoinableOptimizer(Joinable):
    """A joinable optimizer."""

    engine: Engine
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
            if self._shadow is not None:  # behind an exception
                self._shadow.leave()

    def join_hook(self, divide_by_initial_world_size: bool = True, **keywords: Any) -> JoinHook:
        """What torch's ``Join`` runs on a rank that has run out; see :meth:`join`."""
        from .shadow import Shadow  # which few trainings need

        name = "divide_by_initial_world_size"

        def read() -> dict[str, Any]:
            _check_can_join(self.engine)
            return {name: flag(divide_by_initial_world_size, f"join({name}=)")}

        by_all = self._meet("join()", read)[name]
        (number,), *_ = self.engine.ranks().exchange([next(_NUMBERS)], self.join_device, "entering join()")
        if self._shadow is not None:
            self._shadow.leave()
        self._shadow = self.engine.joining = Shadow(self, by_all, number)
        return self._shadow

    def _meet(self, call: str, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Collective: what all ranks give to a call, or the same error on all."""
        return agree_on_call(call, read, self.engine.ranks(), self.join_device)

    def _tell(self, error: Exception) -> None:
        """Collective: the body raised on this rank alone, perhaps; the others wait for it, or will at their next call.

        What came out of a call of ours is known to all; and of a backward that is under way the sums are not complete.
        """
        engine, shadow = self.engine, self._shadow
        backward = None if engine.takeover is None else engine.takeover.backward
        ours = __name__.partition(".")[0]
        modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
        is_known = any(name.partition(".")[0] == ours for name in modules[1:])  # behind join() itself
        if is_known or shadow is None or (backward is not None and backward.is_open):
            return
        call = Call(engine.defaults, Scaling(), closure=False, problem=error)
        with suppress(Exception):  # the error itself, or that all of them have raised it
            shadow.tell("step", call)
            engine.take(call)

    @property
    def join_device(self) -> torch.device:
        """Of the messages of ``Join``: that of the params, or will be, where they are still on the meta device."""
        found = next((param.device for param in self.engine.params if not param.is_meta), None)
        return device_to_train_on(self.engine.ranks()) if found is None else found

    @property
    def join_process_group(self) -> Any:
        """The ranks that share the states."""
        return self.engine.compose().main.mesh.world.group


def take_along() -> None:
    """``ddp.join()`` finds optimizers from now on: torch offers no other way to be taken along."""
    if not hasattr(DistributedDataParallel.join, "__wrapped__"):
        DistributedDataParallel.join = _along(DistributedDataParallel.join)  # type: ignore[method-assign]


def _check_can_join(engine: Engine) -> None:
    """Raises ShardoptError where a rank that has run out could not follow."""
    options, takeover, why = engine.options, engine.takeover, None
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
        or any(group.get("process_group") is not None for group in engine.groups)
        or any_dtensor(engine.params)
    ):
        why = (
            "the model is composed with tensor, pipeline or expert parallelism, whose ranks need each other's batches. "
            "Leave join() away"
        )
    elif takeover is not None and any(
        each is not engine and each.takeover is not None and each.takeover.module is takeover.module
        for each in live_engines()
    ):
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
