"""Who holds it together? The engine behind one optimizer: its domains, the module that it took over, one step, the end.

The optimizer has torch's methods, each of which is one call of the engine, or of a function of ``calls/``. Checkpoints
and the view of the states call the engine too.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .bindings import Bindings
from .domain.hyperparameters import plain_numbers
from .domain.masters import refresh_masters
from .domain.sleep import wake
from .domain.unsharded import check_not_unsharded, check_weights, is_resharded, resharded
from .errors import BindingError, CommunicationError, StateError
from .module.closure import RaiseNow
from .module.hooks import call_while_alive
from .module.takeover import ModuleTakeover
from .partition.comm.together import Relay
from .states.consolidate import consolidate, rank_to_gather_on
from .states.table import StateTable
from .states.torch_format import check_same_rules, read_state_dict, read_states_of_params
from .step.decide import remember_norm
from .step.step import NOTHING_DONE, Call, run_step
from .step.update_in_backward import UpdateInBackward, drop_gradients

if TYPE_CHECKING:
    from .config import Offload, Options
    from .domain.domain import Domain
    from .domain.param import Group
    from .domain.param_state import ParamState
    from .domain.shard import Shard
    from .module.coverage import Coverage
    from .module.round_gradients import Release
    from .partition.comm.group import Ranks
    from .rules import Rule
    from .step.launches import Launch
    from .step.step import Outcome
    from .step.survey import Plans

# The engines of this process, oldest first: optimizers of one module read each other's params, and DDP's join() finds
# the optimizers of its params. It is the only table of the process that outlives a call.
_LIVE: list[weakref.ref[Engine]] = []


def live_engines() -> list[Engine]:
    """Returns the engines that were neither dropped nor closed, oldest first."""
    return [engine for each in _LIVE if (engine := each()) is not None and not engine.is_closed]


def _coverages() -> list[Coverage]:
    return [engine.takeover.coverage for engine in live_engines() if engine.takeover is not None]


class Engine(Bindings):
    """The bindings of one optimizer, and what it does around a step.

    Attributes:
        check_arguments: checks and returns the arguments of a param group, for a class with torch's arguments.
        unread: keys of param groups that choose another rule than the optimizer has.
        fixed: values of param groups that belong to the class: no state dict or checkpoint changes them.
        grad_norm, updates: see :class:`ShardedOptimizer`.
        plans: of the steps that were taken, by domain.
    """

    def __init__(
        self,
        owner: torch.optim.Optimizer,
        rule: Rule,
        options: Options,
        check_arguments: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None,
        unread: Sequence[str] = (),
        fixed: Mapping[str, Any] | None = None,
    ):
        super().__init__(owner, rule, options)
        self.check_arguments, self.unread, self.fixed = check_arguments, unread, fixed or {}
        self.grad_norm: float | None = None
        self.updates = 0
        self.plans: Plans = {}  # of the steps, by domain
        self.release: UpdateInBackward | None = None  # in place of the steps, where gradients are released
        self.away: Offload | None = None  # where offload() moved masters and states
        self._stepping = self.turn.take_between("step()")

    def enroll(self) -> None:
        """Lists this engine in :func:`live_engines`, once its optimizer is constructed."""
        self.default_names = self.default_names or frozenset(self.owner.defaults)
        _LIVE[:] = [reference for reference in _LIVE if reference() is not None]
        _LIVE.append(weakref.ref(self))

    # -- the module ------------------------------------------------------------------------------------------------

    def take_over(self, module: nn.Module) -> None:
        """Puts hooks on a module, by which the optimizer binds at its first forward."""
        me = weakref.ref(self)

        def before_forward() -> None:
            engine = me()
            if engine is not None:
                with engine.turn.hold("a forward"):
                    engine.bind_module()

        def before_evaluation() -> None:
            engine = me()
            if engine is not None:
                with engine.turn.hold("a forward"):
                    engine.bind_frozen()

        def groups() -> list[dict[str, Any]]:
            engine = me()
            return [] if engine is None else engine.groups

        takeover = ModuleTakeover(module, self.options, before_forward, before_evaluation, groups, _coverages)
        try:
            takeover.coverage.check_covers(self.groups)
            takeover.cast()
        except BindingError:
            # Who keeps the error, as a notebook does, keeps the engine, and the hooks would go on running. Test:
            # refused_before_training.
            takeover.close()
            raise
        takeover.first_calls.watch(self.params)
        self.takeover = takeover
        self._at_the_end(ModuleTakeover.dropped, takeover)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See :meth:`ShardedOptimizer.no_sync`."""
        if self.takeover is None:
            yield
            return
        self.takeover.pauses += 1
        try:
            yield
        finally:
            self.takeover.pauses -= 1

    def forget_backward(self) -> None:
        """Forgets a failed backward, after gradients were set to None or zero."""
        if self.takeover is not None:
            self.takeover.forget_backward()

    # -- the step --------------------------------------------------------------------------------------------------

    def _make_domain(self, group: Any) -> Domain:
        domain, offload = super()._make_domain(group), self.options.offload_options
        if offload is not None and offload.early_bytes:
            from .step.early import EarlyUpdates  # where it is asked for: a fresh process imports no more than it uses

            domain.early = EarlyUpdates(offload.early_bytes, call_while_alive(Engine._plan_ahead, self, otherwise={}))
        return domain

    def _make_release(self, domain: Domain) -> Release | None:
        if not self.options.release_gradients:
            return None
        me = weakref.ref(self)

        def begin() -> tuple[Sequence[Group], Mapping[str, Any], Sequence[Ranks], Plans]:
            engine = me()
            assert engine is not None  # hooks live as long as the engine
            engine.check_weights("a backward with release_gradients=True")
            check_not_unsharded(engine.domains, "a backward with release_gradients=True")
            engine.states.consolidated = None
            return engine.local_groups(), engine.defaults, engine.ensure_domains().whole, engine.plans

        def took_step(norm: float) -> None:
            engine = me()
            assert engine is not None
            remember_norm(engine.options, engine.groups, norm)

        self.release = UpdateInBackward(domain, begin, took_step)
        return self.release

    def _plan_ahead(self) -> Mapping[Shard, Sequence[Launch]]:
        """Returns the launches of the coming step, before its gradients have come, as far as they are known."""
        main = self.domain
        if main is None or len(self.domains) > 1 or main not in self.plans:
            return {}
        groups = self.local_groups()
        return self.plans[main].launches_ahead(main.listed(groups), [plain_numbers(group) for group in groups])

    def step(self, closure: Callable[[], Any] | None, scaling: Callable[[], tuple[float, bool]]) -> Any:
        """Collective: one step. Returns what the closure returned.

        Args:
            scaling: returns the loss scale, and True if an Inf or NaN was found; called once the closure has run.
        """
        with self._stepping:
            try:
                return self._step(closure, scaling)
            finally:
                if self.takeover is not None:
                    self.takeover.step_ended()

    def _step(self, closure: Callable[[], Any] | None, scaling: Callable[[], tuple[float, bool]]) -> Any:
        self.check_open()
        loss, scaled, settled, relay, takeover = None, (1.0, False), None, Relay(), self.takeover
        try:
            if self.stream is not None:
                self._interrupt_stream()
            for domain in self.domains:
                if domain.sharded is not None and domain.sharded.is_asleep:
                    raise StateError(
                        "call optimizer.reload() before step(), on every rank: params were offloaded by "
                        "offload(params=True), and an update writes them on the device."
                    )
            if closure is None:
                self._begin_step()
            else:
                loss = self._evaluate(closure)
            scaled = scaling()
            self.finish_gathers()
            if takeover is not None and takeover.rounds is not None:
                takeover.coverage.check_still_covered()
                takeover.rounds.check_whole()
        except RaiseNow as error:
            settled = error.error
        except Exception as error:  # run_step raises it on every rank, so that no rank waits for this one
            relay.note(error)
        if settled is not None:
            raise settled
        call = Call(self.defaults, closure is not None, relay.problem, *scaled)
        try:
            if self.joining is not None:
                self._announce("step", call)
            self._take(call)
            return loss
        except BaseException:
            if closure is not None and takeover is not None and takeover.rounds is not None:
                takeover.rounds.catch_up()
            raise

    def _begin_step(self) -> None:
        """Raises an error if a step cannot begin here."""
        check_weights(self.domains, "step()")
        if self.stream is not None:
            self.end_stream("step()")
        if self.states.is_unsettled or "state" in self.owner.__dict__:
            self.settle_states()

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """Returns what the closure of a step returns."""

        def evaluate() -> Any:
            self._begin_step()
            if not callable(closure):
                raise TypeError(f"closure takes a function or None, found {type(closure).__name__}.")
            with self.turn.lend():
                return closure()

        if self.takeover is not None:
            return self.takeover.run_closure(evaluate)
        with torch.enable_grad():
            return evaluate()

    def _interrupt_stream(self) -> None:
        """Raises an error if a stream of weights is open: a step would change weights that other ranks still read."""
        stream = self.open_stream
        if stream is not None:
            error, is_raised_by_all = stream.interrupt_together("step()")
            raise RaiseNow(error) if is_raised_by_all else error

    def take(self, call: Call) -> None:
        """Collective: takes one step with the present gradients."""
        with self._stepping:
            if call.problem is None:
                self.finish_gathers()  # in a join() this rank may have run no forward since the last step
            self._take(call)

    def _take(self, call: Call) -> None:
        groups, has_grad = self.groups, torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # by hand: the context manager costs every step four more calls
        try:
            # Params whose values are released check every attribute that is read.
            with torch._C.DisableTorchFunctionSubclass():
                updated, norm = (
                    self._close_released(call) if self.options.release_gradients else self._run(call, groups)
                )
        finally:
            torch._C._set_grad_enabled(has_grad)
        self.states.end_step(groups)
        self.grad_norm = norm
        self.updates += updated
        if self.takeover is not None:
            self.takeover.share_buffers()

    def _close_released(self, call: Call) -> Outcome:
        """Ends a step that was taken in backward."""
        if call.problem is not None:
            raise call.problem
        if self.release is not None:
            self.local_params.update_dtensors()
            return self.release.finish_step(self.params)
        drop_gradients(self.params)  # before the first forward there are none
        return NOTHING_DONE

    def _run(self, call: Call, groups: list[dict[str, Any]]) -> Outcome:
        domains = self.ensure_domains()
        by_domain = domains.groups_by_domain(groups, self._make_expert_domain)
        if domains.is_alone and is_resharded(domains.domains):
            outcome = run_step(by_domain, (), call, self._bind_params, self.plans)
        else:
            outcome = self._run_with_others(by_domain, groups, call)
        if outcome[0]:
            remember_norm(self.options, groups, outcome[1])
        return outcome

    def _run_with_others(
        self, by_domain: Sequence[tuple[Domain, Sequence[Group]]], groups: Sequence[Group], call: Call
    ) -> Outcome:
        """Takes a step of which ranks beyond the main domain's know, or in ``unsharded()``."""
        domains, relay = self.ensure_domains(), Relay(call.problem)
        domains.compare_norm_groups(call.problem)

        def sum_gradients(problem: Exception | None) -> None:
            domains.agree_on_gradients(groups, problem)
            self.local_params.set_local_gradients(domains.sum_over)

        try:
            domains.update_whole(groups)  # also after an error: it finds the tensor ranks, which wait below
            self.local_params.prepare_gradients()
        except Exception as error:
            relay.note(error)
        relay.meet(sum_gradients)
        call = call._replace(problem=relay.problem)
        try:
            with resharded(domains.domains, call.problem):
                return run_step(by_domain, domains.whole, call, self._bind_params, self.plans)
        finally:
            self.local_params.drop_gradients()
            self.local_params.update_dtensors()

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """See :meth:`ShardedOptimizer.refresh_masters`."""
        with self.turn.take("refresh_masters()"):
            self.check_weights("refresh_masters()")
            self.finish_gathers()
            self.states.consolidated = None
            for domain in self.domains:
                refresh_masters(domain)

    # -- states ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def consolidate(self, to: object) -> None:
        """See :meth:`ShardedOptimizer.consolidate_state_dict`."""
        with self.turn.take_together("consolidate_state_dict()"):
            self._consolidate(to)

    def _consolidate(self, to: object) -> None:
        self.check_open()
        if len(self.domains) > 1:
            raise StateError(
                "consolidate_state_dict() gathers on one rank, and param groups have their own process_group: their "
                "params differ between ranks. Call state_dict() on one rank of each process_group instead."
            )
        domain = self.domain
        if domain is None or domain.mesh.shard.size == 1:
            rank_to_gather_on(to, self.ranks().size)
            return
        ((_, groups),) = self.groups_by_domain()
        states = consolidate(domain, to, groups)
        if states is not None:
            self.states.consolidated = {**self.states.waiting, **states}

    def load(self, state_dict: Mapping[str, Any], groups: list[dict[str, Any]]) -> None:
        """Loads a state dict, after its hooks. ``groups``: those of the dict, with this optimizer's params."""
        with self.turn.take("load_state_dict()"):
            check_same_rules(self.rule, self.unread, self.fixed, groups, self.groups)
            loaded, own = read_state_dict(state_dict, groups, self.states)
            self.replace_states(loaded, own)
            for group in groups:
                group.update(self.fixed)
            self.owner.param_groups = groups

    def load_of_params(self, states: Mapping[Any, Any], groups: Sequence[Group], call: str = "__setstate__()") -> None:
        """Loads a dict by param, as torch's ``__setstate__`` takes it; an empty one forgets all states."""
        with self.turn.take(call):
            self.replace_states(*read_states_of_params(states, groups, self.states))

    def replace_states(self, loaded: Mapping[nn.Parameter, ParamState], own: dict[Any, Any]) -> None:
        """Replaces all states by checked states by param, and the user's own entries by ``own``."""
        self.check_weights("loading states")
        self.finish_gathers()
        self.states.replace(loaded)
        self.states.own = own

    def copy_states(self, to: Engine, copied: Callable[[Any], Any]) -> None:
        """Copies the present states to another engine, where they wait for its params.

        Args:
            copied: maps this optimizer's param, or another object, to the other optimizer's copy.
        """
        with self.turn.take("copy.deepcopy()"):
            present = self.states.all(self.groups)
            to.states.waiting = {to.local_params.of(copied(param)): state.copy() for param, state in present.items()}
            to.states.own = copied(self.states.own)
            to.states.notes = {copied(param): copied(notes) for param, notes in self.states.notes.items()}
            to.is_closed, to.grad_norm, to.updates = self.is_closed, self.grad_norm, self.updates

    # -- reports and the end ---------------------------------------------------------------------------------------

    def traffic(self) -> dict[str, int]:
        """Returns the bytes that this rank has received from others, by kind."""
        found: Counter[str] = Counter()
        for domain in self.domains:
            found.update(domain.traffic())
        return dict(found)

    @torch.no_grad()
    def close(self) -> None:
        """See :meth:`ShardedOptimizer.close`."""
        with self.turn.take_together("close()"):
            self._close()

    def _close(self) -> None:
        self.check_weights("close()")
        with suppress(CommunicationError):  # raised before; params that did not arrive are lost with the other rank
            self.finish_gathers()
        for domain in self.domains:
            wake(domain)
        for domain in self.domains:  # first: another rank may still read gradients of this one
            domain.stop_serving()
        if self.takeover is not None:
            self.takeover.close()
        for finalizer in self._retire:
            finalizer.detach()
        self.states.end_all("close()")
        for domain in self.domains:
            domain.release()
        self.plans.clear()
        self.local_params.update_dtensors()
        self._domains, self.domains, self.away, self.is_closed = None, [], None, True
        self.states = StateTable(self.rule, self.local_params)
