"""Taking over a module: its forward tells when to bind, and whether the backward that follows reduces gradients.

A module that is wrapped in DistributedDataParallel loses DDP's reducer; see :mod:`shardopt.module.ddp`.
"""

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..domain.bind import Bound
from ..domain.domain import Domain
from ..domain.param import Candidate
from ..errors import BindingError
from ..partition.comm.group import Ranks
from ..partition.placement import Placement, Placements
from ..tensors.unsharded_guard import is_sharded
from .backward import Backward
from .closure import ClosureState, RaiseNow
from .ddp import (
    active_wrapper,
    check_same_ranks,
    has_reducer,
    restore_reducer,
    retire_reducer,
)
from .forward import Forward, tensors_within
from .hooks import ModuleHook, call_while_alive
from .materialize import Values, give_devices, give_values
from .tree import ModuleTree


class ModuleTakeover:
    """The hooks on one module, for one optimizer.

    Attributes:
        module: the module, without DDP around it.
        ddp: the DDP module around it, if any; one that is wrapped around it later is found at the next forward.
        pauses: how many ``no_sync()`` contexts of the optimizer are open.
        groups: returns the param groups of the optimizer.
        closure: the closure of a step, if one runs.
        backward: takes the gradients, from :meth:`use_domain` on.
        forward: gathers the params at stage 3, from :meth:`use_domain` on.
    """

    def __init__(
        self,
        module: nn.Module,
        always_syncs: bool,
        before_forward: Callable[[], None],
        groups: Callable[[], Sequence[Mapping[str, Any]]],
        takeovers: Callable[[], "Sequence[ModuleTakeover]"],
    ):
        """
        Args:
            module: plain or DDP.
            always_syncs: gradients are sharded, so that every backward reduces them, ``no_sync()`` or not.
            before_forward: is called at the beginning of a forward that a backward can follow.
            groups: returns the param groups of the optimizer.
            takeovers: returns those of all optimizers that are in use.
        """
        self.ddp = module if isinstance(module, DistributedDataParallel) else None
        self.module: nn.Module = module.module if isinstance(module, DistributedDataParallel) else module
        self.pauses = 0
        self.closure = ClosureState()
        self.backward: Backward | None = None
        self.forward: Forward | None = None
        self._domain: Domain | None = None
        self._fresh: frozenset[torch.Tensor] = frozenset()
        self._tree: ModuleTree | None = None  # of the last binding or check_covered()
        self._covered_by: frozenset[weakref.ref[ModuleTakeover]] = frozenset()  # the sharers at the same time
        self.groups, self._takeovers = groups, takeovers
        self._always_syncs, self._before_forward = always_syncs, before_forward
        self._hooks = [
            self.module.register_forward_pre_hook(ModuleHook(self._pre_forward), prepend=True, with_kwargs=True),
            self.module.register_forward_hook(ModuleHook(self._post_forward)),
        ]

    # -- which params are whose ------------------------------------------------------------------------------------

    def _sharers(self) -> "list[ModuleTakeover]":
        """Returns the takeovers of the module, which may be passed to several optimizers, each with some of its params.

        This one is listed while its optimizer is in use.
        """
        return [each for each in self._takeovers() if each.module is self.module]

    def check_covers(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raises BindingError if an unbound param of these groups is not the module's."""
        own = {*self.module.parameters(), *(() if self._domain is None else self._domain.entries)}
        for number, group in enumerate(groups):
            for index, param in enumerate(group["params"]):
                if param not in own:
                    raise BindingError(
                        "pass the module that contains all params, or give this param to an optimizer of its own: its "
                        f"gradient would not be reduced. param {index} of group {number} (shape {tuple(param.shape)}) "
                        "is not a param of the module that was handed over."
                    )

    def check_covered(self) -> None:
        """Raises BindingError if a trainable param of the module is in no optimizer that the module was passed to."""
        known = {param for each in self._sharers() for group in each.groups() for param in group["params"]}
        for name, param in self.module.named_parameters():
            if param.requires_grad and param not in known:
                raise BindingError(
                    "freeze it (requires_grad_(False)) or add it to a group (optimizer.add_param_group({'params': "
                    f"...}})): {name} is trainable but in no param group of an optimizer that took the module over. "
                    "Nobody would average its gradient, and nobody train it."
                )

    def check_still_covered(self) -> None:
        """Does ``check_covered`` if modules, params or the optimizers that share the module changed since the last."""
        sharers = frozenset(map(weakref.ref, self._sharers()))
        if self._tree is not None and not (self._tree.is_current and sharers == self._covered_by):
            self.check_covered()
            self._tree, self._covered_by = ModuleTree(self.module), sharers

    def check_free(self, candidates: Sequence[Candidate]) -> None:
        """Raises BindingError if another optimizer takes the gradient of a candidate, whatever module it took over."""
        backwards = (each.backward for each in self._takeovers() if each is not self)
        taken = {entry.param for backward in backwards if backward is not None for entry in backward.entries}
        for name, param, _ in candidates:
            if param in taken:
                raise BindingError(
                    "give a param to one optimizer, or close() the other one first: another optimizer already takes "
                    f"the gradient of {name}, and each would see some of its gradients."
                )

    def process_group(self, given: Any) -> Any:
        """Returns the group to average over: the optimizer's own, else DDP's."""
        self._find_ddp()
        if self.ddp is None:
            return given
        if given is None:
            return self.ddp.process_group
        check_same_ranks(given, self.ddp)
        return given

    def use_domain(self, domain: Domain, backward: Backward) -> None:
        """Says which domain the params are bound to; :meth:`attach` follows for each binding."""
        self._domain, self.backward = domain, backward
        backward.closure = self.closure
        if Placements.of_stage(domain.options.stage).param is Placement.SHARD:
            self.forward = Forward(domain, self.module)
            backward.on_end, backward.units = self.forward.end_backward, self.forward.params

    def attach(self, bound: Bound) -> None:
        """Puts hooks on params that were just bound."""
        assert self.backward is not None
        self._tree = ModuleTree(self.module)
        self.backward.attach(bound.entries, bound.shards)
        if self.forward is not None and self._domain is not None:
            self.forward.attach()
            self._domain.gatherer.on_past = call_while_alive(Backward.pass_over, self.backward)

    # -- values of params and buffers on the meta device -----------------------------------------------------------

    @property
    def fresh(self) -> frozenset[torch.Tensor]:
        """Params and buffers that were on the meta device and have no values yet."""
        return self._fresh

    def give_devices(self, ranks: Ranks) -> None:
        """Moves params and buffers from the meta device to the training device; they are fresh from now on."""
        self._fresh |= frozenset(give_devices(self.module, ranks))

    def give_values(self, values: Values) -> None:
        """Collective: gives fresh tensors their values, on all ranks or none. See :func:`materialize.give_values`."""
        assert self._domain is not None
        give_values(self.module, list(self._fresh), self._domain, values)
        self._fresh = frozenset()

    def describe(self) -> dict[str, Any]:
        """Returns what ranks must have in common before values are shared; JSON-able."""
        named = (*self.module.named_parameters(), *self.module.named_buffers())
        return {name: [list(tensor.shape), str(tensor.dtype)] for name, tensor in named if not is_sharded(tensor)}

    def share_values(self, ranks: Ranks) -> None:
        """Collective: broadcasts rank 0's params and buffers, as DDP does when it wraps a module."""
        if self.ddp is None:
            # Another optimizer may have sharded some params at stage 3: their values agree already.
            params = [param for param in self.module.parameters() if not is_sharded(param)]
            ranks.broadcast([*params, *self.module.buffers()], "sharing rank 0's params")

    # -- forward ---------------------------------------------------------------------------------------------------

    def _pre_forward(self, module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> None:
        if module is not self.module:  # a shallow copy shares hooks
            return
        self._prepare()
        if self.fresh:
            raise BindingError(
                "call optimizer.bind() again, on every rank: it failed before all params that were on the meta device "
                "had values, and this forward would compute with zeros."
            )
        if self.forward is not None:
            self.forward.pre_forward(module, arguments, keywords)

    def _prepare(self) -> None:
        # In a backward this is activation checkpointing, which runs the forward again.
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return
        self._find_ddp()
        self.retire_reducer()
        self._before_forward()
        if self.backward is not None:
            if self.backward.is_open:
                self.backward.abandon("a new forward began before its backward had ended")
            self.backward.is_in_forward = True
            self.expect_backward()

    def expect_backward(self) -> None:
        """Decides whether the next backward reduces gradients; it may follow the forward of a submodule alone, too."""
        assert self.backward is not None
        # Nothing is bound while all params are frozen; gradients of other modules may come through.
        self.backward.is_syncing = self._has_reducer and (
            self._always_syncs or (not self.pauses and (self.ddp is None or self.ddp.require_backward_grad_sync))
        )

    @property
    def _has_reducer(self) -> bool:
        return self._domain is not None and self._domain.reducer is not None

    def _post_forward(self, module: nn.Module, arguments: Any, output: Any) -> None:
        """Lets the gradient of the output open the round: in the outermost graph, even where all is checkpointed."""
        backward = self.backward
        if backward is None or module is not self.module or torch._C._current_graph_task_id() != -1:
            return
        backward.is_in_forward = False
        if not backward.is_syncing:
            return
        hook = call_while_alive(lambda me, _: me.open_early(), backward)
        for tensor in tensors_within(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(hook)

    # -- a step ----------------------------------------------------------------------------------------------------

    def run_closure(self, closure: Callable[[], Any]) -> Any:
        """Returns what the closure of a step returns; see :mod:`shardopt.module.closure`.

        Raises:
            RaiseNow: the ranks need not, or must not, be told at the beginning of the step.
            Exception: what the closure raised. The ranks will meet at the beginning of the step.
        """
        state, rounds = self.closure, 0 if self.backward is None else self.backward.rounds
        state.is_on, state.number, state.shared_error = True, state.number + 1, None
        try:
            with torch.enable_grad():
                loss = closure()
        except Exception as error:
            if state.shared_error is not None:
                raise RaiseNow(state.shared_error) from error
            if self.backward is not None and not self.backward.fail(error, rounds):  # the closure may have bound it
                raise RaiseNow(error) from error
            raise
        finally:
            state.is_on = False
        if state.shared_error is not None:  # the closure caught it, but the other ranks will not take this step
            raise RaiseNow(state.shared_error)
        return loss

    # -- DDP -------------------------------------------------------------------------------------------------------

    def _find_ddp(self) -> None:
        if self.ddp is None:
            self.ddp = active_wrapper(self.module)

    def retire_reducer(self) -> None:
        """Makes DDP ignore gradients, if it has a reducer."""
        if self.ddp is not None and has_reducer(self.ddp):
            retire_reducer(self.ddp, None if self._domain is None else self._domain.mesh.world.group)

    # -- the end ---------------------------------------------------------------------------------------------------

    def dropped(self) -> None:
        """Does ``close`` after the optimizer was dropped without it."""
        if self.forward is not None and self.forward.holds_params:
            warnings.warn(
                "call close() on every rank before a stage 3 optimizer is dropped: this rank holds only a slice of the "
                "module's params, and the rest is gone.",
                ResourceWarning,
                stacklevel=2,
            )
        self.close()

    def close(self) -> None:
        """Gives the module back. DDP reduces its gradients again, unless another optimizer has the module, too."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self.backward is not None:
            self.backward.detach()
        if self.forward is not None:
            self.forward.close()
        others = any(each is not self for each in self._sharers())
        if self.ddp is not None and not has_reducer(self.ddp) and not others:
            restore_reducer(self.ddp)
