"""Who holds it together? The engine behind one optimizer: its domains, the module that it took over, one step, the end.

The optimizer is torch's surface and nothing else: each of its methods is a line into the engine. Checkpoints see the
engine too, and so does the view of the states, through a protocol that names the few things it needs.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .config import Offload, check_norm_group
from .domain.agreement import StepDigest, agree, agree_on_call
from .domain.bind import bind, frozen_of
from .domain.domain import Domain
from .domain.domains import Domains
from .domain.dtensors import DTensorLocals, local_gradient
from .domain.formats import check_formats
from .domain.hyperparameters import check_numbers, plain_numbers
from .domain.masters import refresh_masters
from .domain.memory import memory_in_words, memory_of
from .domain.norm_rules import check_takes_norms
from .domain.relocate import move_states
from .domain.tiers import tier_of
from .domain.timings import Timings
from .domain.unsharded import check_gathered_by_nobody, check_weights, unsharded
from .errors import BindingError, CommunicationError, DisagreementError, ShardoptError, StateError
from .module.backward import Backward
from .module.closure import RaiseNow
from .module.gradients_at_once import reduce_together, sum_tied
from .module.materialize import (
    Values,
    check_materializable,
    check_unused,
    device_to_train_on,
    meta_params,
)
from .module.takeover import ModuleTakeover
from .option import given_in_words
from .partition.comm.group import Ranks
from .partition.mesh import Mesh, everyone_of
from .partition.placement import Placement, Placements
from .partition.schedule import Schedule
from .partition.unit_view import Units, UnitView
from .states.consolidate import consolidate, rank_to_gather_on
from .states.table import StateTable, StateView
from .states.torch_format import read_state_dict, to_state_dict
from .step.step import NOTHING_DONE, Call, run_step
from .step.update_in_backward import UpdateInBackward, drop_gradients

if TYPE_CHECKING:
    from .config import Options
    from .domain.memory import Memory
    from .domain.param import Candidate, Group
    from .domain.param_state import ParamState
    from .rules import Rule
    from .step.step import Outcome

# The engines of this process, from the oldest: optimizers of one module ask for each other's params, and DDP's join()
# takes those along whose params it wraps. The only table of the process that outlives a call.
_LIVE: list[weakref.ref[Engine]] = []


def live_engines() -> list[Engine]:
    """Those that were neither dropped nor closed, from the oldest."""
    found = (reference() for reference in _LIVE)
    return [engine for engine in found if engine is not None and not engine.is_closed]


def _takeovers() -> list[ModuleTakeover]:
    return [engine.takeover for engine in live_engines() if engine.takeover is not None]


class Engine:
    """What one optimizer is made of.

    Attributes:
        rule: the arithmetic.
        options: what the user said.
        check_arguments: of a class with torch's arguments: checks those that a param group gives, and returns them.
        states: of all params, wherever they are.
        local_params: the plain tensors behind DTensor params.
        takeover: of the module that was handed over.
        joining: collective, of the ``join()`` that is open: tells ranks that have run out of batches what this one is
            about to do, so that they do the same.
        grad_norm, updates: see :class:`ShardedOptimizer`.
        lock: held by the thread that changes states; a closure may load states, so a thread may hold it several times.
        is_closed: nothing can be done any more.
    """

    def __init__(
        self,
        owner: torch.optim.Optimizer,
        rule: Rule,
        options: Options,
        check_arguments: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None,
    ):
        check_formats(rule, options)
        check_takes_norms(rule, options)
        self._owner = weakref.ref(owner)  # it has this engine, and must go as soon as nobody has it
        self.rule, self.options, self.check_arguments = rule, options, check_arguments
        self.local_params = DTensorLocals()
        self.states = StateTable(rule, self.local_params)
        self.takeover: ModuleTakeover | None = None
        self.joining: Callable[[str, Call | None], None] | None = None
        self.grad_norm: float | None = None
        self.updates = 0
        self.lock = threading.RLock()
        self.is_closed = False
        self._composition: Domains | None = None  # from the first forward or step on
        self._release: UpdateInBackward | None = None  # in place of the steps, where gradients are released
        self._away: Offload | None = None  # where offload() moved masters and states
        self._retire: list[weakref.finalize[Any, Engine]] = []

    def enroll(self) -> None:
        """The optimizer is constructed: :func:`live_engines` lists its engine from now on."""
        _LIVE[:] = [reference for reference in _LIVE if reference() is not None]
        _LIVE.append(weakref.ref(self))

    # -- what the optimizer holds ----------------------------------------------------------------------------------

    @property
    def owner(self) -> torch.optim.Optimizer:
        """The optimizer, whose param groups scripts and frameworks replace at any time."""
        owner = self._owner()
        assert owner is not None  # hooks that may outlive it ask for the engine, which goes with it
        return owner

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The param groups, as the script sees them."""
        return self.owner.param_groups

    @property
    def defaults(self) -> dict[str, Any]:
        """The hyper-parameters that every group has."""
        return self.owner.defaults

    @property
    def params(self) -> list[torch.nn.Parameter]:
        """Of all groups, in their order."""
        return [param for group in self.groups for param in group["params"]]

    def local_groups(self) -> list[Group]:
        """The param groups with the plain tensors that DTensors come down to."""
        return [self.local_params.of_group(group) for group in self.groups]

    def check_open(self) -> None:
        """Raises ShardoptError after :meth:`close`."""
        if self.is_closed:
            raise ShardoptError("this optimizer was closed and its states released: construct a new one.")

    def check_weights(self, call: str) -> None:
        """Raises ShardoptError where params show the average of the weights."""
        check_weights(self.domains, call)

    # -- the domains -----------------------------------------------------------------------------------------------

    @property
    def domain(self) -> Domain | None:
        """The main one; None before the first forward or step."""
        return None if self._composition is None else self._composition.main

    @property
    def domains(self) -> list[Domain]:
        """All; none before the first forward or step."""
        return [] if self._composition is None else self._composition.domains

    def compose(self) -> Domains:
        """The domains, the main one made if this is the first time."""
        if self._composition is None:
            main = self._make_domain(self._process_group())
            backward = self._make_backward(main)
            self._composition = self.states.domains_of_model = Domains(main, self.options, self.local_params)
            if self.takeover is not None:
                self.takeover.use_domain(main, backward)
        return self._composition

    def groups_by_domain(self) -> list[tuple[Domain, Sequence[Group]]]:
        """Each domain that has params, with its groups; in the same order on all ranks of a domain."""
        return self.compose().groups_by_domain(self.groups, self._make_expert_domain)

    def _handed_over(self) -> list[tuple[Domain, Sequence[Group]]]:
        """Those of a module that was handed over: without experts, the main one."""
        if any(group.get("process_group") is not None for group in self.groups):
            return self.groups_by_domain()
        return [(self.compose().main, self.local_groups())]

    def ranks(self) -> Ranks:
        """All that make every call together; before the first step too, which may still be given another DDP module."""
        if self._composition is not None:
            return self._composition.main.mesh.world
        group = self._process_group()
        found = None if group is None else everyone_of(group)
        return Ranks(found, self.options.tuning.deadline)

    def agree_on_call(self, call: str, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Collective: what all ranks give to a call, or the same error on all."""
        return agree_on_call(call, read, self.ranks())

    @property
    def device(self) -> torch.device:
        """On which ranks meet: that of the params, or that which they will have, where all are on the meta device."""
        found = self._device_of_params()
        return device_to_train_on(self.ranks()) if found is None else found

    def _device_of_params(self) -> torch.device | None:
        return next((param.device for param in self.params if not param.is_meta), None)

    def _process_group(self) -> dist.ProcessGroup | DeviceMesh | None:
        group = self.options.process_group
        return group if self.takeover is None else self.takeover.process_group(group)

    def _make_domain(self, group: dist.ProcessGroup | DeviceMesh | None) -> Domain:
        sharded = Placements.of_stage(self.options.stage).state is Placement.SHARD
        mesh = Mesh.of(group, sharded, self.options.tuning.deadline)
        domain = Domain(self.rule, self.options, mesh, self.local_params)
        self._at_the_end(Domain.retire, domain)
        return domain

    def _make_expert_domain(self, group: dist.ProcessGroup | DeviceMesh) -> Domain:
        domain = self._make_domain(group)
        if self.takeover is not None:
            self.takeover.add_domain(domain, Backward(domain, self.compose().main.mesh.world.size))
        return domain

    def _make_backward(self, domain: Domain) -> Backward:
        if not self.options.release_gradients:
            return Backward(domain)
        me = weakref.ref(self)

        def begin() -> tuple[Sequence[Group], Mapping[str, Any], Sequence[Ranks]]:
            engine = me()
            assert engine is not None  # without it there are no hooks
            engine.check_weights("a backward with release_gradients=True")
            engine.states.consolidated = None
            return engine.local_groups(), engine.defaults, engine.compose().whole

        self._release = UpdateInBackward(domain, begin)
        return self._release

    def _at_the_end(self, call: Callable[..., None], *arguments: Any) -> None:
        """Calls it when the optimizer is gone, unless it was closed."""
        finalizer = weakref.finalize(self, call, *arguments)
        finalizer.atexit = False  # at the interpreter's end nothing need be given back
        self._retire.append(finalizer)

    # -- the module ------------------------------------------------------------------------------------------------

    def take_over(self, module: torch.nn.Module) -> None:
        """Puts hooks on a module, by which the optimizer binds at its first forward."""
        me = weakref.ref(self)

        def before_forward() -> None:
            engine = me()
            if engine is not None:
                engine.bind()

        def groups() -> list[dict[str, Any]]:
            engine = me()
            return [] if engine is None else engine.groups

        has_parts = Placements.of_stage(self.options.stage).grad is Placement.SHARD
        takeover = ModuleTakeover(module, has_parts, before_forward, groups, _takeovers)
        takeover.check_covers(self.groups)
        self.takeover = takeover
        self._at_the_end(ModuleTakeover.dropped, takeover)

    @torch.no_grad()
    def bind(
        self,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        init_fn: Callable[[torch.nn.Module], object] | None = None,
    ) -> None:
        """Collective: see :meth:`ShardedOptimizer.bind`."""
        self.check_open()
        if self.takeover is None:
            raise ShardoptError(
                "bind() takes a module over, but none was handed over: the params are bound at the first step. Pass "
                "the module as first argument or as module=."
            )
        takeover, values = self.takeover, Values(state_dict, init_fn)
        by_domain = self._handed_over()
        candidates = [each for domain, groups in by_domain for each in domain.unbound(groups)]
        is_bound = all(domain.entries or not frozen_of(domain, takeover.module) for domain, _ in by_domain)
        if not candidates and not takeover.fresh and is_bound:
            check_unused(values)
            return
        with self.takeover.closure.meeting():
            self._bind_together(self.takeover, by_domain, candidates, values)

    def _bind_together(
        self,
        takeover: ModuleTakeover,
        by_domain: Sequence[tuple[Domain, Sequence[Group]]],
        candidates: list[Candidate],
        values: Values,
    ) -> None:
        self.settle()
        self._announce("bind")
        composition = self.compose()
        with composition.told("bind() begins"):
            numbers = self._check_together(takeover, candidates, values)
        try:
            with composition.told("bind() ends"):
                self._bind_module(takeover, by_domain, values, numbers)
        finally:
            self.local_params.show()

    def _bind_module(
        self,
        takeover: ModuleTakeover,
        by_domain: Sequence[tuple[Domain, Sequence[Group]]],
        values: Values,
        numbers: Sequence[dict[str, Any]],
    ) -> None:
        main = self.compose().main
        if meta_params(takeover.module):
            takeover.give_devices(main.mesh.world)
        elif not any(domain.entries for domain, _ in by_domain) and not takeover.fresh:
            takeover.share_values()
        problem: Exception | None = None
        for domain, groups in by_domain:
            try:
                unbound = domain.unbound(groups)
                frozen = frozen_of(domain, takeover.module, unbound)
                leads = len(by_domain) > 1 and domain.links is None  # rounds of experts run beside the main domain's
                if unbound or frozen or leads:
                    self._bind_params(domain, groups, numbers, unbound, frozen=frozen)
            except Exception as error:
                if domain is main:
                    raise
                problem = problem or error  # of the ranks of one expert: all others are told
        if len(by_domain) > 1:
            agree(StepDigest("experts", dict, problem), main.mesh.world)
        if takeover.fresh:
            takeover.give_values(values)
        takeover.expect_backward()

    def _bind_params(
        self,
        domain: Domain,
        groups: Sequence[Group],
        numbers: Sequence[dict[str, Any]],
        candidates: Sequence[Candidate],
        closure: bool = False,
        frozen: Sequence[torch.nn.Parameter] = (),
    ) -> None:
        """Collective: binds params. The states that waited for them are theirs, and their gradients are taken over."""
        takeover, waiting = self.takeover, self.states.waiting
        fresh = frozenset[torch.Tensor]() if takeover is None else takeover.fresh
        entries = bind(domain, groups, numbers, candidates, waiting, frozen=frozen, fresh=fresh, closure=closure)
        self.states.forget_waiting(entry.param for entry in entries)
        if takeover is not None:
            takeover.attach(domain, entries)

    def _check_together(
        self, takeover: ModuleTakeover, candidates: Sequence[Candidate], values: Values
    ) -> list[dict[str, Any]]:
        """Collective: what can be wrong on one rank alone is raised on all, before any of them waits for values."""
        problem: Exception | None = None
        numbers: list[dict[str, Any]] = []
        domain = self.compose().main
        try:
            self.compose().look(self.groups)  # first: it finds the ranks who are to be told of a problem
            takeover.check_covers(self.groups)
            takeover.check_covered()
            assert takeover.backward is not None
            takeover.check_free(candidates)
            numbers = [plain_numbers(group) for group in self.groups]
            check_numbers(numbers, self.defaults)
            if takeover.fresh or meta_params(takeover.module):
                self._check_one_domain()
                check_materializable(takeover.module, values, takeover.fresh)
            else:
                check_unused(values)
        except Exception as error:
            problem = error
        view = {"module": takeover.describe(), **values.describe()}
        agree(StepDigest(view, lambda: view, problem), domain.mesh.world)
        return numbers

    def _check_one_domain(self) -> None:
        if len(self.domains) > 1:
            raise BindingError(
                "build the model with values (module.to_empty() and its initializers): some of it is on the meta "
                "device, and param groups have their own process_group. Experts of other ranks would get the values "
                "that this rank draws."
            )

    def ensure_bound(self) -> None:
        """Collective: params become views of buckets, as at the first step, if they are not yet."""
        if self.takeover is not None:
            self.bind()
            return
        try:
            for domain, groups in self.groups_by_domain():
                candidates = domain.unbound(groups)
                if candidates:
                    numbers = [plain_numbers(group) for group in groups]
                    check_numbers(numbers, self.defaults)
                    self._bind_params(domain, groups, numbers, candidates)
        finally:
            self.local_params.show()

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

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Collective: see :meth:`ShardedOptimizer.reduce_gradients`."""
        self.check_open()
        if self.takeover is None:
            raise ShardoptError(
                "hand the module over (as first argument or module=), or average gradients over process_group "
                "yourself: reduce_gradients() reduces what backwards under no_sync() accumulated, and without the "
                "module shardopt reduces no gradients."
            )
        if Placements.of_stage(self.options.stage).grad is Placement.SHARD or self.options.release_gradients:
            return  # every backward has
        self.bind()
        reduce_together(self.compose().main, self.takeover.backward)

    @torch.no_grad()
    def sum_tied(self, param: torch.nn.Parameter, group: dist.ProcessGroup | DeviceMesh) -> None:
        """Collective: see :meth:`ShardedOptimizer.sum_tied`."""
        self.check_open()
        if not isinstance(param, torch.nn.Parameter):
            raise TypeError(f"sum_tied(param=) takes a param, an nn.Parameter, found {type(param).__name__}.")
        check_norm_group(group, "sum_tied(group=)")
        if not any(param is each for each in self.params):
            raise ShardoptError(
                "give the copy that this rank trains: sum_tied() was given a param that is in none of the optimizer's "
                "param groups, and no gradient would be summed."
            )
        ranks = Ranks(everyone_of(group), self.options.tuning.deadline)
        if ranks.rank and self.options.norm_group is not None:  # the first rank counts it in the norm of the model
            local = self.local_params.of(param)
            (self.compose().domain_of(local) or self.compose().main).note_slice(local, False, None)
        sum_tied(param, ranks)

    def settle(self) -> None:
        """Waits for params that a step left under way."""
        for domain in self.domains:
            domain.settle()

    @contextmanager
    def unsharded(self, ema: bool) -> Iterator[None]:
        """See :meth:`ShardedOptimizer.unsharded`."""
        self.settle()
        with unsharded(self.domains, self.rule, ema):
            yield

    def forget_backward(self) -> None:
        """Gradients were set to None or zero: a backward that failed before leaves nothing."""
        backward = self._backward()
        if backward is not None:
            backward.forget_gradients()

    def _backward(self) -> Backward | None:
        """Of the module that was taken over, once it is bound."""
        return None if self.takeover is None else self.takeover.backward

    # -- the step --------------------------------------------------------------------------------------------------

    def _announce(self, kind: str, call: Call | None = None) -> None:
        """Collective in a ``join()``: ranks that have run out do the same."""
        if self.joining is None:
            return
        try:
            self.joining(kind, call)
        except DisagreementError as error:  # the others are in a backward, say
            if call is not None and call.problem is not None:
                raise call.problem from error
            raise

    def step(self, closure: Callable[[], Any] | None, scaling: Callable[[], tuple[float, bool]]) -> Any:
        """Collective: one step. Returns what the closure returned.

        Args:
            scaling: gives the loss scale, and whether an Inf or NaN was found; asked once the closure has run.
        """
        with self.lock:
            return self._step(closure, scaling)

    def _step(self, closure: Callable[[], Any] | None, scaling: Callable[[], tuple[float, bool]]) -> Any:
        self.check_open()
        loss, problem, scaled, settled = None, None, (1.0, False), None

        def evaluate() -> Any:
            self.check_weights("step()")
            check_gathered_by_nobody(self.domains)
            if closure is not None and not callable(closure):
                raise TypeError(f"closure takes a function or None, found {type(closure).__name__}.")
            return None if closure is None else closure()

        try:
            if closure is None:
                loss = evaluate()
            elif self.takeover is not None:
                loss = self.takeover.run_closure(evaluate)
            else:
                with torch.enable_grad():
                    loss = evaluate()
            scaled = scaling()
            self.settle()
            backward = self._backward()
            if self.takeover is not None and backward is not None:
                self.takeover.check_still_covered()
                backward.check_whole()
        except RaiseNow as error:
            settled = error.error
        except Exception as error:  # raised on every rank by run_step, so that no rank waits for this one
            problem = error
        if settled is not None:
            raise settled
        call = Call(self.defaults, closure is not None, problem, *scaled)
        try:
            self._announce("step", call)
            self.take(call)
            return loss
        except BaseException:
            backward = self._backward()
            if closure is not None and backward is not None:
                backward.catch_up()
            raise

    def take(self, call: Call) -> None:
        """Collective: one step with the gradients that there are."""
        if call.problem is None:
            self.settle()  # in a join() this rank has run no forward since the last step
        # Released params would ask for each attribute whether it may be read.
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            updated, norm = self._close_released(call) if self.options.release_gradients else self._run(call)
        self.states.consolidated = None  # a skipped step too lets masters follow weights that were written
        self.grad_norm = norm
        self.updates += updated

    def _close_released(self, call: Call) -> Outcome:
        """The end of a step that was taken in backward."""
        if call.problem is not None:
            raise call.problem
        if self._release is not None:
            self.local_params.show()
            return self._release.close(self.params)
        drop_gradients(self.params)  # before the first forward there are none
        return NOTHING_DONE

    def _run(self, call: Call) -> Outcome:
        by_domain, composition = self.groups_by_domain(), self.compose()
        composition.compare_norm_groups(call.problem)
        try:
            composition.look(self.groups)
            self.local_params.prepare_gradients()
        except Exception as error:  # this rank's alone, perhaps: its tensor mates come to the exchange that follows
            call = dataclasses.replace(call, problem=call.problem or error)
        try:
            composition.agree_on_gradients(self.groups, call.problem)
            self.local_params.take_gradients(composition.sum_over)
        except Exception as error:
            call = dataclasses.replace(call, problem=error)
        try:
            return run_step(by_domain, composition.whole, call, self._bind_params)
        finally:
            self.local_params.drop_gradients()
            self.local_params.show()

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """See :meth:`ShardedOptimizer.refresh_masters`."""
        with self.lock:
            self.check_weights("refresh_masters()")
            self.settle()
            self.states.consolidated = None
            for domain in self.domains:
                refresh_masters(domain)

    # -- states ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def consolidate(self, to: object) -> None:
        """See :meth:`ShardedOptimizer.consolidate_state_dict`."""
        self.check_open()
        if len(self.domains) > 1:
            raise StateError(
                "consolidate_state_dict() gathers on one rank, and param groups have their own process_group: their "
                "params are others on other ranks. Call state_dict() on one rank of each process_group instead."
            )
        domain = self.domain
        if domain is None or domain.mesh.shard.size == 1:
            rank_to_gather_on(to, self.ranks().size)
            return
        ((_, groups),) = self.groups_by_domain()
        states = consolidate(domain, to, groups)
        if states is not None:
            self.states.consolidated = {**self.states.waiting, **states}

    def view(self) -> StateView:
        """See :attr:`ShardedOptimizer.state`."""
        return StateView(self)

    def state_dict(self) -> dict[str, Any]:
        """In torch's format, before hooks see it."""
        return to_state_dict(self.groups, self.view())

    def load(self, state_dict: Mapping[str, Any], groups: list[dict[str, Any]]) -> None:
        """Loads what hooks have seen. ``groups``: those of the dict, with the params of this optimizer's."""
        with self.lock:
            loaded, own = read_state_dict(state_dict, groups, self.states)
            self.replace_states(loaded, own)
            self.owner.param_groups = groups

    def replace_states(self, loaded: Mapping[torch.nn.Parameter, ParamState], own: dict[Any, Any]) -> None:
        """Takes checked states by param, and what the user keeps beside them; all others are forgotten."""
        self.check_weights("loading states")
        self.settle()
        self.states.replace(loaded)
        self.states.own = own

    def copy_states(self, to: Engine, copied: Callable[[Any], Any]) -> None:
        """The states of this moment wait in another engine for its params.

        Args:
            copied: this optimizer's param, or anything, -> the other one's copy of it.
        """
        to.states.wait(
            {to.local_params.of(copied(param)): state.copy() for param, state in self.states.all(self.groups).items()}
        )
        to.states.own = copied(self.states.own)
        to.is_closed, to.grad_norm, to.updates = self.is_closed, self.grad_norm, self.updates

    # -- where states rest -----------------------------------------------------------------------------------------

    def offload(self, to: str | os.PathLike[str]) -> None:
        """Collective: see :meth:`ShardedOptimizer.offload`."""
        if not isinstance(to, str | os.PathLike):
            raise TypeError(
                f"optimizer.offload() takes 'cpu' or a directory, where all masters and states go, found {to!r}. "
                "Other ways to offload are for the constructor: offload=Offload(...)."
            )
        self._move(Offload(to))

    def reload(self) -> None:
        """Collective: see :meth:`ShardedOptimizer.reload`."""
        if self._away is not None:
            self._move(None)

    @torch.no_grad()
    def _move(self, to: Offload | None) -> None:
        with self.lock:
            self.check_open()
            self.settle()
            if move_states(self.domains, to):
                self._away = to

    # -- reports and the end ---------------------------------------------------------------------------------------

    def units(self) -> Units:
        """See :meth:`ShardedOptimizer.units`."""
        sharded = [domain.sharded for domain in self.domains if domain.sharded is not None]
        units = [(each.gatherer, unit) for each in sharded for unit in each.units]
        units.sort(key=lambda found: found[1].number)  # as in the model; buckets are made from its end
        return Units({unit.name: UnitView(gatherer, unit) for gatherer, unit in units})

    def schedule(self) -> Schedule:
        """See :meth:`ShardedOptimizer.schedule`."""
        sharded = None if self.domain is None else self.domain.sharded
        return Schedule() if sharded is None else sharded.gatherer.orders.schedule

    def timings(self) -> Timings:
        """See :meth:`ShardedOptimizer.timings`."""
        return Timings.of_all([domain.timings() for domain in self.domains])

    def traffic(self) -> dict[str, int]:
        """Bytes that this rank has received from others, by kind."""
        found: Counter[str] = Counter()
        for domain in self.domains:
            found.update(domain.traffic())
        return dict(found)

    def memory(self) -> Memory:
        """See :meth:`ShardedOptimizer.memory`."""
        grouped = self.params
        others = [] if self.takeover is None else list(self.takeover.module.parameters())
        params = dict.fromkeys(map(self.local_params.of, [*grouped, *others]))
        grads = [local_gradient(param) for param in dict.fromkeys([*grouped, *others])]
        rests = self.options.rests
        return memory_of(self.domains, params, grads, rests, tier_of(rests if self._away is None else self._away))

    def describe(self) -> str:
        """For ``repr``: the stage, what else differs from the defaults, and what it costs on this rank."""
        words = ", ".join([f"stage={self.options.stage}", *given_in_words(self.options, besides=("module", "stage"))])
        bound = [domain for domain in self.domains if domain.shards]
        for domain in bound:
            words += (
                f", ranks={domain.mesh.world.size}, buckets={len(domain.shards)}, transport={domain.transport.name}"
            )
        if self.is_closed:
            return f"{words}, closed"
        if not bound:
            when = "step" if self.takeover is None else "forward"
            return f"{words}, not bound: masters and states are allocated at the first {when}"
        return f"{words})\nOn this rank ({memory_in_words(self.memory())}"

    @torch.no_grad()
    def close(self) -> None:
        """See :meth:`ShardedOptimizer.close`."""
        self.check_weights("close()")
        with suppress(CommunicationError):  # told already; what did not arrive is lost with the other rank
            self.settle()
        if self.takeover is not None:
            self.takeover.close()
        for finalizer in self._retire:
            finalizer.detach()
        for domain in self.domains:
            domain.release()
        self.local_params.show()
        self._composition, self._away, self.is_closed = None, None, True
        self.states = StateTable(self.rule, self.local_params)
