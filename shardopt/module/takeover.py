"""Taking over a module: its forward decides when to bind, and whether the backward that follows reduces gradients.

A module that is wrapped in DistributedDataParallel loses DDP's reducer; see :mod:`shardopt.module.ddp`.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..domain.agreement import agree_on, checksum
from ..domain.called import CalledModule, called_modules
from ..domain.dtensors import is_dtensor
from ..domain.members import plain_tensors, tensors_of
from ..errors import BindingError
from ..tensors.unsharded_guard import is_sharded
from .averaged_params import AveragedParams, trained_elsewhere
from .buffers import SharedBuffers
from .casts import Casts
from .closure import ClosureState, RaiseNow
from .ddp import active_wrapper, check_same_ranks, has_reducer, ignored_by_ddp, restore_reducer, retire_reducer
from .exact_weights import ExactWeights
from .first_calls import FirstCalls
from .forward import Forward
from .hooks import ModuleHook, call_while_alive, remove_all
from .materialize import give_devices, give_values
from .nested import tensors_within
from .overlap_hooks import OverlapHooks
from .rounds import Rounds, fail_closure, rounds_ended
from .running import in_backward
from .surgery import Bound, Rebinding, names_of, plan_rebinding
from .tree import ModuleTree

if TYPE_CHECKING:
    from ..config import Precision
    from ..domain.domain import Domain
    from ..domain.param import Candidate, ParamRecord
    from ..partition.comm.group import Ranks
    from .materialize import DeferredInit
    from .round_gradients import Release


class ModuleTakeover:
    """The hooks on one module, for one optimizer.

    Attributes:
        module: the module, without DDP around it.
        called: the modules that a script calls: the module, or the stages of a pipeline in it.
        pauses: how many ``no_sync()`` contexts of the optimizer are open.
        groups: returns the param groups of the optimizer.
        closure: the closure of a step, if one runs.
        source: the rank whose buffers all ranks take: the first, or in a ``join()`` one that has a batch.
        before_buffers: is called while a ``join()`` is open, before a forward takes buffers, with the module's name.
        averaged: the params that optimizers other than shardopt's train.
        fresh: params and buffers that were on the meta device and have no values yet.
        rounds: takes the gradients, from :meth:`use_domain` on.
        forward: gathers the params at stage 3, from :meth:`use_domain` on.
        casts: casts inputs and outputs, where the module runs in another dtype than its masters have.
        overlap_hooks: waits for params that the last step did not wait for, from :meth:`use_domain` on; below stage 3.
        bound: the params of groups that are bound, as they were then.
        first_calls: notices a call of another method than forward, until the module is bound.
    """

    def __init__(
        self,
        module: nn.Module,
        always_syncs: bool,
        before_forward: Callable[[], None],
        before_evaluation: Callable[[], None],
        groups: Callable[[], Sequence[Mapping[str, Any]]],
        takeovers: Callable[[], Sequence[ModuleTakeover]],
    ):
        """
        Args:
            module: plain or DDP.
            always_syncs: gradients are sharded, so that every backward reduces them, ``no_sync()`` or not.
            before_forward: is called at the beginning of a forward that a backward can follow.
            before_evaluation: is called at the beginning of one without gradients.
            groups: returns the param groups of the optimizer.
            takeovers: returns those of all optimizers that are in use.
        """
        self.called = called_modules(module)
        self.module: nn.Module = module.module if isinstance(module, DistributedDataParallel) else module
        self.pauses = 0
        self.closure = ClosureState()
        self.rounds: Rounds | None = None
        self.forward: Forward | None = None
        self.overlap_hooks: OverlapHooks | None = None
        self.casts: Casts | None = None
        self._exact: ExactWeights | None = None
        self._is_called = False  # a forward runs in ``unsharded()`` with ``compute_dtype``
        self._domain: Domain | None = None
        self._experts: list[Domain] = []  # those of experts
        self.fresh: frozenset[torch.Tensor] = frozenset()
        self._tree: ModuleTree | None = None  # of the last binding or check_covered()
        # The sharers at the same time. Weak: one optimizer must not keep another one of the same module.
        self._covered_by: frozenset[weakref.ref[ModuleTakeover]] = frozenset()
        self.groups, self._takeovers = groups, takeovers
        self._always_syncs, self._before_forward = always_syncs, before_forward
        self._before_evaluation = before_evaluation
        self._called = {each.module: each for each in self.called}
        self._buffers = {each: SharedBuffers(each.module) for each in self.called}
        self.source = 0
        self.averaged = AveragedParams()
        self.bound: dict[nn.Parameter, Bound] = {}
        self._numel = 0  # of all bound params, as they were bound
        self._has_stepped = False  # since the last forward
        self._frozen: list[nn.Parameter] = []  # in no param group, when this was last looked at
        self.before_buffers: Callable[[str], None] | None = None
        self._hooks: list[Any] = []
        for each in self._called:
            before, after = ModuleHook(self._pre_forward), ModuleHook(self._post_forward)
            self._hooks.append(each.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            self._hooks.append(each.register_forward_hook(after))
        inner = [each for each in self.module.modules() if each not in self._called]
        on_call = call_while_alive(ModuleTakeover._called_within, self)
        self.first_calls = FirstCalls(inner, on_call, call_while_alive(ModuleTakeover._first_gradient, self))

    @property
    def ddp(self) -> DistributedDataParallel | None:
        """The DDP module around the module, if any."""
        found = self._called.get(self.module)
        return None if found is None else found.ddp

    def cast_as(self, precision: Precision) -> None:
        """Puts hooks on modules that cast inputs and outputs, once params have their dtypes.

        Raises:
            BindingError: a pattern names no module.
        """
        self.casts = Casts(self.module, [each.module for each in self.called], precision)
        self._exact = ExactWeights(self.module)
        for each in self.called:  # behind those that cast outputs
            self._hooks.append(each.module.register_forward_hook(ModuleHook(self._end_call), always_call=True))

    # -- which params are whose ------------------------------------------------------------------------------------

    def _sharers(self) -> list[ModuleTakeover]:
        """Returns the takeovers of the module, which may be passed to several optimizers, each with some of its params.

        This one is listed while its optimizer is in use.
        """
        return [each for each in self._takeovers() if each.module is self.module]

    @property
    def is_shared(self) -> bool:
        """True if another optimizer of shardopt trains params of the module."""
        return len(self._sharers()) > 1

    def _grouped(self) -> set[torch.Tensor]:
        """Returns the params in groups of the optimizers that share the module."""
        every = dict.fromkeys((self, *self._sharers()))
        return {param for each in every for group in each.groups() for param in group["params"]}

    def exclude_experts(self) -> None:
        """Says that experts in param groups of other optimizers are not shared by all ranks either."""
        assert self._domain is not None
        others = (group for each in self._sharers() if each is not self for group in each.groups())
        experts = (param for group in others if group.get("process_group") is not None for param in group["params"])
        members = self._domain.members
        self._domain.members = replace(members, params=members.params.union(experts))

    def check_covers(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raises BindingError if an unbound param of these groups is not the module's."""
        domains = [*(() if self._domain is None else (self._domain,)), *self._experts]
        own = {*self.module.parameters(), *(entry.outer for domain in domains for entry in domain.entries.values())}
        for number, group in enumerate(groups):
            for index, param in enumerate(group["params"]):
                if param not in own:
                    raise BindingError(
                        "pass the module that contains all params, or give this param to an optimizer of its own: its "
                        f"gradient would not be reduced. param {index} of group {number} (shape {tuple(param.shape)}) "
                        "is not a param of the module that was handed over."
                    )

    def check_covered(self) -> None:
        """Raises BindingError if a trainable param of the module is in no optimizer that the module was passed to.

        Params that another optimizer has are averaged from now on, and those on DDP's ignore list left to each rank.
        """
        known = self._grouped() | self._of_each_rank()
        left = {name: param for name, param in self.module.named_parameters() if param not in known}
        trainable = {name: param for name, param in left.items() if param.requires_grad}
        elsewhere = trained_elsewhere() if trainable else set()
        for name, param in trainable.items():
            if param not in elsewhere:
                self._check_not_replaced(name, param)
                raise BindingError(
                    "freeze it (requires_grad_(False)), add it to a group (optimizer.add_param_group({'params': "
                    "...}), or of a changed layer optimizer.rebind()), or give it to a torch.optim optimizer before "
                    f"the first forward: {name} is trainable but in no param group of an optimizer that took the "
                    "module over. Nobody would average its gradient, and nobody train it."
                )
            if is_dtensor(param) or param.is_meta or self._experts or self.casts is not None:
                raise BindingError(
                    f"add {name} to a group (optimizer.add_param_group({{'params': ...}})), or build another optimizer "
                    "of shardopt with module=: it is trainable but in no param group of an optimizer that took the "
                    "module over, and gradients of DTensors, of params on the meta device, and of models with experts "
                    "or compute_dtype are not averaged for other optimizers."
                )
        self.averaged.named, self._frozen = trainable, [each for each in left.values() if not each.requires_grad]

    def _check_not_replaced(self, name: str, param: nn.Parameter) -> None:
        """Raises BindingError if a param of the module stands where a bound one was, and none of these is left.

        Where some are left, a script has exchanged a layer: it adds the new one to a group.
        """
        present = set(self.module.parameters())
        for domain in () if self._domain is None else (self._domain, *self._experts):
            entries = domain.entries.values()
            is_left = any(entry.outer in present for entry in entries)
            if not is_left and any(entry.shape == tuple(param.shape) for entry in entries):
                raise BindingError(
                    "load without assign=True (module.load_state_dict(state_dict)), or write to the param (param.copy_("
                    f"tensor) under no_grad()): {name} is a new Parameter in place of one that the optimizer trains, "
                    "as load_state_dict(assign=True) makes them, and no step would reach it. To train the new one, "
                    "call optimizer.rebind()."
                )

    def averages_for_others(self) -> bool:
        """True if another optimizer trains a param of the module; raises BindingError as ``check_covered`` does."""
        self.check_covered()
        return bool(self.averaged.named)

    def check_still_covered(self) -> None:
        """Does ``check_covered`` if modules, params or the optimizers that share the module changed since the last."""
        sharers = frozenset(map(weakref.ref, self._sharers()))
        if self._tree is not None and not (self._tree.is_current and sharers == self._covered_by):
            self.check_covered()
            self._tree, self._covered_by = ModuleTree(self.module), sharers

    def average_others(self) -> None:
        """Collective at the end of a round: averages the gradients that other optimizers use."""
        assert self._domain is not None
        if any(param.requires_grad for param in self._frozen):  # thawed, perhaps for such an optimizer
            self.check_covered()
        if self.averaged.named and self._leads:
            self.averaged.average(self._domain.mesh.world)

    @property
    def _leads(self) -> bool:
        """True if this one does what is done once for a module that several optimizers share."""
        return next((each for each in self._sharers() if each._has_reducer), None) is self

    def check_free(self, candidates: Sequence[Candidate]) -> None:
        """Raises BindingError if another optimizer takes the gradient of a candidate, whatever module it took over."""
        others = [each.rounds for each in self._takeovers() if each is not self and each.rounds is not None]
        taken = {entry.outer for rounds in others for entry in rounds.entries}
        for name, param, _ in candidates:
            if self._domain is not None and self._domain.locals.outer_of(param) in taken:
                raise BindingError(
                    "give a param to one optimizer, or close() the other one first: another optimizer already takes "
                    f"the gradient of {name}, and each would see some of its gradients."
                )

    def process_group(self, given: Any) -> Any:
        """Returns the group to average over: the optimizer's own, else DDP's."""
        for called in self.called:
            self._find_ddp(called)
            if called.ddp is not None:
                if given is None:
                    given = called.ddp.process_group
                check_same_ranks(given, called.ddp)
        return given

    def use_domain(self, domain: Domain, release: Release | None) -> None:
        """Says which domain the params are bound to, and what uses their gradients within backward.

        :meth:`attach` follows for each binding.
        """
        self._domain, has_stages = domain, len(self.called) > 1 and release is None
        self.rounds = Rounds(self, domain, release, has_stages)
        if domain.codes_updates and self._exact is None:
            self._exact = ExactWeights(self.module)
        if domain.shards_params:
            self.forward = Forward(domain, self.module, self.called)
            self.rounds.units = self.forward.params
        elif domain.options.tuning.overlap_gather and self.module in self._called:
            self.overlap_hooks = OverlapHooks(domain, self.module)
            domain.on_overlap = call_while_alive(OverlapHooks.start, self.overlap_hooks, otherwise=False)

    def add_domain(self, domain: Domain) -> None:
        """Says that experts are bound to a domain of their own; after :meth:`use_domain`."""
        assert self.rounds is not None
        self.rounds.add_experts(domain)
        self._experts.append(domain)
        if self.forward is not None:
            self.forward.add_domain(domain)

    def attach(self, domain: Domain, entries: Sequence[ParamRecord]) -> None:
        """Puts hooks on params that were just bound."""
        assert self.rounds is not None
        self._tree = ModuleTree(self.module)
        self.first_calls.end()
        names = names_of(self.module)
        for entry in entries:
            self.bound[entry.outer] = Bound(names.get(entry.outer, entry.name), tuple(entry.outer.shape))
        self._numel = sum(math.prod(each.shape) for each in self.bound.values())
        for buffers in self._buffers.values():
            buffers.look_again()
        self.rounds.attach(domain, entries)
        if self.forward is not None and self._domain is not None:
            self.forward.attach()
            self._domain.gatherer.on_past = call_while_alive(Rounds.pass_over, self.rounds)
        if self.overlap_hooks is not None:
            self.overlap_hooks.attach()
        if self._exact is not None and self._domain is not None:
            self._exact.attach((self._domain, *self._experts))

    # -- values of params and buffers on the meta device -----------------------------------------------------------

    def give_devices(self, ranks: Ranks) -> None:
        """Moves params and buffers from the meta device to the training device; they are fresh from now on."""
        self.fresh |= frozenset(give_devices(self.module, ranks))

    def give_values(self, init: DeferredInit) -> None:
        """Collective: gives fresh tensors their values, on all ranks or none. See :func:`materialize.give_values`."""
        assert self._domain is not None
        give_values(self.module, list(self.fresh), self._domain, init)
        self.fresh = frozenset()

    def describe(self) -> dict[str, Any]:
        """Returns what ranks must have in common before values are shared; JSON-able."""
        named = (*self.module.named_parameters(), *self.module.named_buffers())
        apart = {tensor for domain in self._experts for tensor in tensors_of(self.module, domain.members)}
        apart |= self._of_each_rank()
        shown = ((name, tensor) for name, tensor in named if tensor not in apart and not is_sharded(tensor))
        return {name: [list(tensor.shape), str(tensor.dtype)] for name, tensor in shown}

    def describe_values(self) -> dict[str, int]:
        """Returns what ranks must have in common if a backward binds: no rank may get other values in it."""
        if not in_backward() or all(called.ddp for called in self.called):
            return {}
        own = tensors_of(self.module, self._domain.members) if self._domain is not None else ()
        params = {tensor for tensor in own if isinstance(tensor, nn.Parameter) and not is_sharded(tensor)}
        named = ((name, param) for name, param in self.module.named_parameters() if param in params)
        shown = ((name, [each for each in plain_tensors(param) if each.element_size() > 1]) for name, param in named)
        return {name: sum(checksum(each.detach().reshape(-1)) for each in inner) for name, inner in shown}

    def _of_each_rank(self) -> set[torch.Tensor]:
        """Returns the params and buffers that options leave to each rank, and no param group has."""
        grouped = self._grouped()
        found = {tensor for called in self.called for tensor in ignored_by_ddp(called.module) if tensor not in grouped}
        shares = self._domain is None or self._domain.options.tuning.broadcast_buffers
        return found if shares else found.union(self.module.buffers())

    def share_values(self) -> None:
        """Collective: broadcasts rank 0's params and buffers, as DDP does when it wraps a module.

        Those of experts are broadcast by the first rank that holds them.
        """
        assert self._domain is not None
        if not in_backward() and not all(called.ddp for called in self.called):
            apart = self._of_each_rank()
            for domain in (self._domain, *self._experts):
                # Another optimizer may have sharded some params at stage 3: their values agree already.
                tensors = tensors_of(self.module, domain.members)
                own = [tensor for tensor in tensors if not is_sharded(tensor) and tensor not in apart]
                inner = [each for tensor in own for each in plain_tensors(tensor)]
                domain.mesh.world.broadcast(inner, "sharing rank 0's params")

    # -- forward ---------------------------------------------------------------------------------------------------

    def _pre_forward(self, module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> None:
        called = self._called.get(module)
        if called is None:  # a shallow copy shares hooks
            return
        if self.overlap_hooks is not None:
            self.overlap_hooks.pre_forward()
        self._is_called = self.compute()
        if self.casts is not None:
            self.casts.call(True)
        self._prepare(called)
        self._check_filled()
        if self.forward is not None:
            self.forward.pre_forward(module, arguments, keywords)

    def _check_filled(self) -> None:
        if self.fresh:
            raise BindingError(
                "call optimizer.bind() again, on every rank: it failed before all params that were on the meta device "
                "had values, and this forward would compute with zeros."
            )

    def _prepare(self, called: CalledModule) -> None:
        if torch._C._current_graph_task_id() != -1:  # activation checkpointing, which runs the forward again
            return
        if self._is_alone:
            return
        if not torch.is_grad_enabled():
            self._before_evaluation()
            return
        self._check_sizes()
        self._find_ddp(called)
        self._retire_reducer(called)
        self._before_forward()
        if self.rounds is not None:
            if self.rounds.is_open:
                self.rounds.abandon("a new forward began before its backward had ended")
            self.rounds.is_in_forward = True
            self.rounds.syncing.forward_begins(self._syncs(called))
            self._take_buffers(called)

    def _called_within(
        self, module: nn.Module, arguments: Any, keywords: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        """Binds ahead of a module within the model, which a method or the script calls before any forward."""
        was_fresh = bool(self.fresh) or any(each.is_meta for each in self.module.parameters())
        self._bind_elsewhere()
        self._check_filled()
        if self.forward is None:
            return None
        if not was_fresh:
            self.forward.keep_all()  # the method may have read params already, for a backward
        return self.forward.pre_forward(module, arguments, keywords)

    def _first_gradient(self) -> None:
        """Binds in a backward, ahead of its first gradient."""
        if self.casts is not None:
            raise BindingError(
                "call optimizer.bind() before the method: with compute_dtype params are cast when they are bound, and "
                "this backward belongs to a method that read them in fp32 and called no module within the model."
            )
        self._bind_elsewhere()
        if self.forward is not None:
            self.forward.keep_all()

    def _bind_elsewhere(self) -> None:
        for each in self.called:
            self._find_ddp(each)
            self._retire_reducer(each)
        self._before_forward()

    def expect_backward(self) -> None:
        """Decides whether the next backward reduces gradients, if it follows the forward of a submodule alone."""
        assert self.rounds is not None
        self.rounds.syncing.is_on = self.syncs_now

    @property
    def syncs_now(self) -> bool:
        """False while ``no_sync()`` is open."""
        return all(map(self._syncs, self.called))

    def _syncs(self, called: CalledModule) -> bool:
        """True if the backward of a forward that runs now reduces gradients."""
        # Nothing is bound while all params are frozen; gradients of other modules may come through.
        return self._has_reducer and (
            self._always_syncs or (not self.pauses and (called.ddp is None or called.ddp.require_backward_grad_sync))
        )

    @property
    def _is_alone(self) -> bool:
        """True while this rank runs the module alone."""
        return self._domain is not None and self._domain.turn.alone is not None

    @property
    def _has_reducer(self) -> bool:
        return self._domain is not None and self._domain.reducer is not None

    def _post_forward(self, module: nn.Module, arguments: Any, output: Any) -> Any:
        """Lets the gradient of the output open the round: in the outermost graph, even where all is checkpointed.

        Returns the output if its gradients are weighed.
        """
        called = self._called.get(module)
        if self.rounds is None or called is None or torch._C._current_graph_task_id() != -1:
            return None
        self.rounds.is_in_forward = False
        if torch.is_grad_enabled() and not self._is_alone:
            if called.module.training:
                self._buffers[called].forward_ended(not self.pauses)
            self._mark_graph(called, tensors_within(output), self._syncs(called))
            if self.rounds.weights.in_use:
                return self.rounds.weights.weigh_outputs(output)
        return None

    def _mark_graph(self, called: CalledModule, outputs: Iterable[torch.Tensor], syncs: bool) -> None:
        """Says of the backward through these tensors whether it reduces gradients."""
        begin = partial(ModuleTakeover._begin_graph, called=called, syncs=syncs)
        hook = call_while_alive(lambda me, _: begin(me), self)
        for tensor in outputs:
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(hook)

    def _begin_graph(self, called: CalledModule, syncs: bool) -> None:
        if not self._hooks:  # closed: the user may still run backward through an older graph
            return
        if self.compute():
            later = torch.autograd.Variable._execution_engine.queue_callback
            later(lambda: later(self._rest))  # behind what the end of a backward does with gradients
        if self.forward is not None:
            self.forward.begin_graph(called.name)
        if self.rounds is not None:
            self.rounds.begin_graph(syncs, self.called.index(called))

    def round_ended(self, completed: bool) -> None:
        """A round has ended, or is lost."""
        for buffers in self._buffers.values():
            buffers.round_ended()
        if self.forward is not None:
            self.forward.end_backward(completed)

    def step_ended(self) -> None:
        """All ranks made a step, or raised in one."""
        self._has_stepped = True
        for buffers in self._buffers.values():
            buffers.step_ended()

    def forget_backward(self) -> None:
        """Forgets a failed backward, after gradients were set to None or zero."""
        for buffers in self._buffers.values():
            buffers.gradients_forgotten()
        if self.rounds is not None:
            self.rounds.forget_gradients()

    # -- fp32 values in unsharded() --------------------------------------------------------------------------------

    def compute(self) -> bool:
        """Shows a forward or backward in ``unsharded()`` params of ``compute_dtype``. Returns whether it did."""
        shown = [each.exact for each in (self._domain, *self._experts) if each is not None and each.exact is not None]
        for each in shown:
            each.compute()
        if shown and self.casts is not None:
            self.casts.turn(True)
        return bool(shown)

    def rest(self) -> None:
        """Lets params show fp32 values in ``unsharded()``, once forward and backward have ended."""
        if not in_backward():
            self._rest()

    def _rest(self) -> None:
        domains = [each for each in (self._domain, *self._experts) if each is not None and each.exact is not None]
        for each in domains if not self._is_called else ():
            assert each.exact is not None and self.casts is not None
            each.exact.rest()
            self.casts.turn(False)

    def _end_call(self, *_: Any) -> None:
        self._is_called = False
        if self.casts is not None:
            self.casts.call(False)
        self.rest()

    # -- buffers ---------------------------------------------------------------------------------------------------

    def _buffer_domains(self, called: CalledModule) -> list[Domain]:
        """Returns the domains whose ranks take the buffers of a called module from one of them."""
        if self._domain is None or called.ddp is not None or not self._domain.options.tuning.broadcast_buffers:
            return []
        buffers = self._buffers[called]
        own = [self._domain] if buffers.of(self._domain) and self._leads else []
        return own + [domain for domain in self._experts if self._has_reducer and buffers.of(domain)]

    def _take_buffers(self, called: CalledModule) -> None:
        """Collective before a forward in training."""
        buffers = self._buffers[called]
        domains = self._buffer_domains(called) if called.module.training and buffers.is_due else []
        if not domains or self._domain is None:
            return
        if self.before_buffers is not None:
            self.before_buffers(called.name)
        elif self.closure.is_on:  # one that raised on another rank has come to the same exchange
            with self.closure.raising_together():
                agree_on("buffers", self._domain.mesh.world)
        buffers.share(domains, self.source)
        buffers.forward_begins()

    def share_buffers(self, name: str | None = None) -> None:
        """Collective: all ranks take the buffers of one, of the called module of this name; None: of all."""
        for called in self.called:
            if name in (None, called.name):
                self._buffers[called].share(self._buffer_domains(called), self.source)

    # -- surgery -----------------------------------------------------------------------------------------------------

    def _check_sizes(self) -> None:
        """Raises BindingError if a param was enlarged or cut since it was bound; looks in a step's first forward."""
        if not self._has_stepped:
            return
        with torch._C.DisableTorchFunctionSubclass():  # released params check every attribute that is read
            if sum(map(torch.numel, self.bound)) != self._numel:
                param, was = next(each for each in self.bound.items() if tuple(each[0].shape) != each[1].shape)
                raise BindingError(
                    "call optimizer.rebind() on every rank, once the model is changed and before this forward: "
                    f"{was.name} has the shape {tuple(param.shape)}, and had {was.shape} when the optimizer bound it "
                    "(resize_token_embeddings() gives a param other data, say). Its gradient would not fit."
                )
        self._has_stepped = False

    def plan_rebinding(self) -> Rebinding:
        """Plans what params the groups have from now on: those of the module as it is."""
        known = self._grouped() | self._of_each_rank() | trained_elsewhere()
        named = names_of(self.module)
        new = {name: param for param, name in named.items() if param.requires_grad and param not in known}
        return plan_rebinding(self.bound, self.module, self.groups(), new)

    def _release_params(self) -> None:
        """Removes the hooks of params."""
        if self.rounds is not None:
            self.rounds.detach()
        if self.forward is not None:
            self.forward.close()

    def unbind(self) -> None:
        """Forgets the domains, and removes the hooks of their params. The hooks on the module stay."""
        self._release_params()
        self._domain, self.rounds, self.forward, self.overlap_hooks = None, None, None, None
        self._experts, self.bound, self._tree, self._numel, self._has_stepped = [], {}, None, 0, False

    # -- a step ----------------------------------------------------------------------------------------------------

    def run_closure(self, closure: Callable[[], Any]) -> Any:
        """Returns what the closure of a step returns; see :mod:`shardopt.module.closure`.

        Raises:
            RaiseNow: the ranks need not, or cannot, raise together at the beginning of the step.
            Exception: what the closure raised. The ranks will raise together at the beginning of the step.
        """
        state, ended = self.closure, rounds_ended(self.rounds)
        state.is_on, state.number, state.shared_error = True, state.number + 1, None
        try:
            with torch.enable_grad():
                loss = closure()
        except Exception as error:
            if state.shared_error is not None:
                raise RaiseNow(state.shared_error) from error
            # Read only now: the closure may have bound the module.
            if self.rounds is not None and not fail_closure(self.rounds, error, ended):
                raise RaiseNow(error) from error
            raise
        finally:
            state.is_on = False
        if state.shared_error is not None:  # the closure caught it, but the other ranks will not take this step
            raise RaiseNow(state.shared_error)
        return loss

    # -- DDP -------------------------------------------------------------------------------------------------------

    def _find_ddp(self, called: CalledModule) -> None:
        if called.ddp is None:
            called.ddp = active_wrapper(called.module)

    def retire_reducer(self) -> None:
        """Makes DDP ignore gradients, where it has a reducer."""
        for called in self.called:
            self._retire_reducer(called)

    def _retire_reducer(self, called: CalledModule) -> None:
        if called.ddp is not None and has_reducer(called.ddp):
            on_last = call_while_alive(ModuleTakeover._mark_last, self, called)
            retire_reducer(called.ddp, None if self._domain is None else self._domain.mesh.world.group, on_last)

    def _mark_last(self, called: CalledModule, outputs: Iterable[torch.Tensor]) -> None:
        """A pipeline has called the module under DDP's ``no_sync()``, and its last backward through it follows."""
        if self._has_reducer and not self.pauses:
            self._mark_graph(called, outputs, syncs=True)

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
            self.forward.note_dropped()
        self.close()

    def close(self) -> None:
        """Gives the module back. DDP reduces its gradients again, unless another optimizer has the module, too."""
        remove_all(self._hooks)
        self.first_calls.end()
        for each in (self.casts, self._exact):
            if each is not None:
                each.close()
        self._release_params()
        others = any(each is not self for each in self._sharers())
        for called in self.called if not others else ():
            if called.ddp is not None and not has_reducer(called.ddp):
                restore_reducer(called.ddp)
