"""Taking over a module: its forward decides when to bind, and whether the backward that follows reduces gradients.

A module that is wrapped in DistributedDataParallel loses DDP's reducer; see :mod:`shardopt.module.ddp`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..domain.agreement import agree_on
from ..domain.called import CalledModule, called_modules
from ..errors import BindingError
from .buffers import SharedBuffers
from .casts import Casts
from .closure import ClosureState, RaiseNow
from .coverage import Coverage
from .ddp import find_wrapper, has_reducer, restore_reducer, retire_reducer
from .exact_weights import ExactWeights
from .first_calls import FirstCalls
from .first_values import FirstValues
from .forward import Forward
from .hooks import ModuleHook, call_while_alive, remove_all
from .module_call import tensors_within
from .overlap_hooks import OverlapHooks
from .rounds import Rounds, fail_closure, rounds_ended

if TYPE_CHECKING:
    from ..config import Options
    from ..domain.domain import Domain
    from ..domain.param import ParamRecord
    from .round_gradients import Release


class ModuleTakeover:
    """The hooks on one module, for one optimizer.

    Attributes:
        module: the module, without DDP around it.
        called: the modules that a script calls: the module, or the stages of a pipeline in it.
        coverage: which params are whose.
        values: what they begin with.
        domains: that params are bound to, see :class:`Coverage`.
        pauses: how many ``no_sync()`` contexts of the optimizer are open.
        closure: the closure of a step, if one runs.
        source: the rank whose buffers all ranks take: the first, or in a ``join()`` one that has a batch.
        rounds: takes the gradients, from :meth:`use_domain` on.
        forward: gathers the params at stage 3, from :meth:`use_domain` on.
        casts: casts inputs and outputs, where the module runs in another dtype than its masters have.
        overlap_hooks: waits for params that the last step did not wait for, from :meth:`use_domain` on; below stage 3.
        first_calls: notices a call of another method than forward, until the module is bound.
    """

    def __init__(
        self,
        module: nn.Module,
        options: Options,
        before_forward: Callable[[], None],
        before_evaluation: Callable[[], None],
        groups: Callable[[], Sequence[Mapping[str, Any]]],
        coverages: Callable[[], Sequence[Coverage]],
    ):
        """
        Args:
            module: plain or DDP.
            before_forward: is called at the beginning of a forward that a backward can follow.
            before_evaluation: is called at the beginning of one without gradients.
            groups: returns the param groups of the optimizer.
            coverages: returns those of all optimizers that are in use.
        """
        self.called = called_modules(module)
        self.module: nn.Module = module.module if isinstance(module, DistributedDataParallel) else module
        self.coverage = Coverage(self.module, self.called, options, groups, coverages)
        self.values, self.domains = FirstValues(self.called, self.coverage), self.coverage.domains
        self.pauses = self.source = 0
        self.closure = ClosureState()
        self.rounds: Rounds | None = None
        self.forward: Forward | None = None
        self.overlap_hooks: OverlapHooks | None = None
        self.casts: Casts | None = None
        self._exact = ExactWeights(self.module)
        self._options, self._before_forward, self._before_evaluation = options, before_forward, before_evaluation
        self._called = {each.module: each for each in self.called}
        self._buffers = {each: SharedBuffers(each, self.coverage) for each in self.called}
        self._hooks: list[Any] = []
        before, after = ModuleHook(self._pre_forward), ModuleHook(self._post_forward)
        for each in self._called:
            self._hooks.append(each.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            self._hooks.append(each.register_forward_hook(after))
        inner = [each for each in self.module.modules() if each not in self._called]
        on_call = call_while_alive(ModuleTakeover._called_within, self)
        self.first_calls = FirstCalls(inner, on_call, call_while_alive(ModuleTakeover._first_gradient, self))

    def cast(self) -> None:
        """Puts hooks on modules that cast inputs and outputs, once params have their dtypes, if options say so.

        Raises:
            BindingError: a pattern names no module.
        """
        precision = self._options.precision
        if precision is not None:
            self.casts = Casts(self.module, list(self._called), precision, self.domains)

    # -- it is bound -----------------------------------------------------------------------------------------------

    def use_domain(self, domain: Domain, release: Release | None) -> None:
        """Says which domain the params are bound to, and what uses their gradients within backward.

        :meth:`attach` follows for each binding.
        """
        self.domains.append(domain)
        self.rounds = Rounds(self, domain, release, has_stages=len(self.called) > 1 and release is None)
        if domain.shards_params:
            self.forward = Forward(self.domains, self.module, self.called, self.rounds)
        elif domain.options.tuning.overlap_gather and self.module in self._called:
            self.overlap_hooks = OverlapHooks(domain, self.module)
            domain.on_overlap = call_while_alive(OverlapHooks.start, self.overlap_hooks, otherwise=False)

    def add_domain(self, domain: Domain) -> None:
        """Says that experts are bound to a domain of their own; after :meth:`use_domain`."""
        assert self.rounds is not None
        self.domains.append(domain)
        self.rounds.add_experts(domain)

    def attach(self, domain: Domain, entries: Sequence[ParamRecord]) -> None:
        """Puts hooks on params that were just bound."""
        assert self.rounds is not None
        self.first_calls.end()
        self.coverage.note_bound(entries)
        for buffers in self._buffers.values():
            buffers.look_again()
        self.rounds.attach(domain, entries)
        for each in (self.forward, self.overlap_hooks):
            if each is not None:
                each.attach()
        self._exact.attach(self.domains)

    def _release_params(self) -> None:
        """Removes the hooks of params."""
        if self.rounds is not None:
            self.rounds.detach()
        if self.forward is not None:
            self.forward.close()

    def unbind(self) -> None:
        """Forgets the domains, and removes the hooks of their params. The hooks on the module stay."""
        self._release_params()
        self.rounds, self.forward, self.overlap_hooks = None, None, None
        self.coverage.forget_bound()

    # -- forward ---------------------------------------------------------------------------------------------------

    def _pre_forward(self, module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> None:
        called = self._called.get(module)
        if called is None:  # a shallow copy shares hooks
            return
        if self.overlap_hooks is not None:
            self.overlap_hooks.pre_forward()
        if self.casts is not None:
            self.casts.begin_call()
        # Activation checkpointing runs a forward again, in a backward.
        if torch._C._current_graph_task_id() == -1 and not self._is_alone:
            self._prepare(called)
        self.values.check_given()
        if self.forward is not None:
            self.forward.pre_forward(module, arguments, keywords)

    def _prepare(self, called: CalledModule) -> None:
        if not torch.is_grad_enabled():
            self._before_evaluation()
            return
        self.coverage.check_sizes()
        rounds, is_open = self.rounds, False
        if rounds is not None and rounds.is_open:
            is_open = True
            rounds.check_thread()  # first: what follows makes this thread the one that trains
        self._bind()
        rounds = self.rounds
        if rounds is not None:
            if is_open and rounds.is_open:
                rounds.abandon("a new forward began before its backward had ended")
            rounds.is_in_forward = True
            rounds.syncing.forward_begins(self._syncs(called))
            buffers = self._buffers[called]
            if called.module.training and buffers.is_due and buffers.domains:
                self._take_buffers(called, rounds)

    def _bind(self) -> None:
        self.retire_reducer()
        self._before_forward()

    def _called_within(
        self, module: nn.Module, arguments: Any, keywords: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        """Binds ahead of a module within the model, which a method or the script calls before any forward."""
        was_fresh = bool(self.values.fresh) or any(each.is_meta for each in self.module.parameters())
        self._bind()
        self.values.check_given()
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
        self._bind()
        if self.forward is not None:
            self.forward.keep_all()

    @property
    def syncs_now(self) -> bool:
        """True if a backward reduces gradients that follows the forward of a submodule alone."""
        return all(map(self._syncs, self.called))

    def _syncs(self, called: CalledModule) -> bool:
        """True if the backward of a forward that runs now reduces gradients."""
        is_paused = self.pauses or not (called.ddp is None or called.ddp.require_backward_grad_sync)
        return self.coverage.has_reducer and (self._options.reduces_always or not is_paused)

    @property
    def _is_alone(self) -> bool:
        """True while this rank runs the module alone."""
        return bool(self.domains) and self.domains[0].turn.alone is not None

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

    # -- backward --------------------------------------------------------------------------------------------------

    def _mark_graph(self, called: CalledModule, outputs: Iterable[torch.Tensor], syncs: bool) -> None:
        """Says of the backward through these tensors whether it reduces gradients."""
        hook = partial(call_while_alive(ModuleTakeover._begin_graph, self), called, syncs)
        for tensor in outputs:
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(hook)

    def _begin_graph(self, called: CalledModule, syncs: bool, _: Any) -> None:
        if not self._hooks:  # closed: the user may still run backward through an older graph
            return
        if self.casts is not None:
            self.casts.begin_backward()
        if self.forward is not None:
            self.forward.runs = called.name
        if self.rounds is not None:
            self.rounds.begin_graph(syncs, self.called.index(called))

    def round_ended(self, completed: bool) -> None:
        """A round has ended, or is lost."""
        for buffers in self._buffers.values():
            buffers.round_ended()
        if self.forward is not None:
            self.forward.end_backward(completed)

    # -- between backward and forward ------------------------------------------------------------------------------

    def step_ended(self) -> None:
        """All ranks made a step, or raised in one."""
        self.coverage.step_ended()
        for buffers in self._buffers.values():
            buffers.step_ended()

    def forget_backward(self) -> None:
        """Forgets a failed backward, after gradients were set to None or zero."""
        for buffers in self._buffers.values():
            buffers.gradients_forgotten()
        if self.rounds is not None:
            self.rounds.forget_gradients()

    def _take_buffers(self, called: CalledModule, rounds: Rounds) -> None:
        """Collective before a forward in training."""
        if rounds.announcer is not None:
            rounds.announcer.before_buffers(called.name)
        elif self.closure.is_on:  # one that raised on another rank has come to the same exchange
            with self.closure.raising_together():
                agree_on("buffers", self.domains[0].mesh.world)
        self._buffers[called].share(self.source)
        self._buffers[called].forward_begins()

    def share_buffers(self, name: str | None = None) -> None:
        """Collective: all ranks take the buffers of one, of the called module of this name; None: of all."""
        for called, buffers in self._buffers.items():
            if name in (None, called.name):
                buffers.share(self.source)

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

    def retire_reducer(self) -> None:
        """Makes DDP ignore gradients, where it has a reducer."""
        group = self.domains[0].mesh.world.group if self.domains else None
        for called in self.called:
            find_wrapper(called)
            if called.ddp is not None and has_reducer(called.ddp):
                retire_reducer(called.ddp, group, call_while_alive(ModuleTakeover._mark_last, self, called))

    def _mark_last(self, called: CalledModule, outputs: Iterable[torch.Tensor]) -> None:
        """A pipeline has called the module under DDP's ``no_sync()``, and its last backward through it follows."""
        if self.coverage.has_reducer and not self.pauses:
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
        if self.casts is not None:
            self.casts.close()
        self._exact.close()
        self._release_params()
        for called in self.called if not self.coverage.is_shared else ():
            if called.ddp is not None and not has_reducer(called.ddp):
                restore_reducer(called.ddp)
