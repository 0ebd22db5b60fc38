"""Who holds it together? The engine behind one optimizer: its domains, the module that it took over, one step, the end.

The optimizer has torch's methods, each of which is one call of the engine. Checkpoints and the view of the states call
the engine too.
"""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .arguments import flag, whole
from .bindings import Bindings
from .config import Offload, check_norm_group
from .domain.agreement import agree_on_call, agreed
from .domain.alone import read_alone
from .domain.dtensors import local_gradient
from .domain.masters import refresh_masters
from .domain.memory import memory_in_words, memory_of
from .domain.relocate import move_states
from .domain.sleep import put_to_sleep, wake
from .domain.tiers import tier_of
from .domain.timings import Timings
from .domain.unsharded import check_not_unsharded, resharded, unsharded
from .errors import BindingError, CommunicationError, ShardoptError, StateError
from .module.closure import RaiseNow
from .module.gradient_statistics import statistics_of
from .module.gradients_at_once import reduce_together, sum_tied
from .module.surgery import names_of
from .module.takeover import ModuleTakeover
from .option import given_in_words
from .partition.comm.group import Ranks
from .partition.comm.together import Relay
from .partition.mesh import everyone_of
from .partition.zero_stage import ZeroStage
from .states.consolidate import consolidate, rank_to_gather_on
from .states.table import StateTable
from .states.torch_format import check_same_rules, read_state_dict, read_states_of_params
from .states.weights import weights_of
from .step.program import ELEMENTWISE
from .step.step import NOTHING_DONE, Call, check_unbroken, run_step
from .step.update_in_backward import UpdateInBackward, drop_gradients
from .tensors.unsharded_guard import ALONE
from .units.schedule import Schedule
from .units.unit_view import Units, UnitView

if TYPE_CHECKING:
    from .config import Options
    from .domain.domain import Domain
    from .domain.memory import Memory
    from .domain.param import Group
    from .domain.param_state import ParamState
    from .module.backward import Backward
    from .rules import Rule
    from .states.weight_stream import WeightStream
    from .states.weights import Weight
    from .step.step import Outcome, Planners

# The engines of this process, oldest first: optimizers of one module read each other's params, and DDP's join() finds
# the optimizers of its params. It is the only table of the process that outlives a call.
_LIVE: list[weakref.ref[Engine]] = []


def live_engines() -> list[Engine]:
    """Returns the engines that were neither dropped nor closed, oldest first."""
    found = (reference() for reference in _LIVE)
    return [engine for engine in found if engine is not None and not engine.is_closed]


def _takeovers() -> list[ModuleTakeover]:
    return [engine.takeover for engine in live_engines() if engine.takeover is not None]


class Engine(Bindings):
    """The bindings of one optimizer, and all that its methods do.

    Attributes:
        check_arguments: checks and returns the arguments of a param group, for a class with torch's arguments.
        unread: keys of param groups that choose another rule than the optimizer has.
        fixed: values of param groups that belong to the class: no state dict or checkpoint changes them.
        grad_norm, updates: see :class:`ShardedOptimizer`.
        planners: of the steps that were taken, by domain.
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
        self.planners: Planners = {}  # of the steps, by domain
        self._release: UpdateInBackward | None = None  # in place of the steps, where gradients are released
        self._away: Offload | None = None  # where offload() moved masters and states

    def enroll(self) -> None:
        """Lists this engine in :func:`live_engines`, once its optimizer is constructed."""
        self.default_names = self.default_names or frozenset(self.owner.defaults)
        _LIVE[:] = [reference for reference in _LIVE if reference() is not None]
        _LIVE.append(weakref.ref(self))

    # -- the module ------------------------------------------------------------------------------------------------

    def take_over(self, module: torch.nn.Module) -> None:
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

        has_parts = ZeroStage(self.options.stage).shards_gradients
        takeover = ModuleTakeover(module, has_parts, before_forward, before_evaluation, groups, _takeovers)
        try:
            takeover.check_covers(self.groups)
            if self.options.precision is not None:
                takeover.cast_as(self.options.precision)
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

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Collective: see :meth:`ShardedOptimizer.reduce_gradients`."""
        with self.turn.take_together("reduce_gradients()"):
            self._reduce_gradients()

    def _reduce_gradients(self) -> None:
        self.check_open()
        if self.takeover is None:
            raise ShardoptError(
                "hand the module over (as first argument or module=), or average gradients over process_group "
                "yourself: reduce_gradients() reduces what backwards under no_sync() accumulated, and without the "
                "module shardopt reduces no gradients."
            )
        if ZeroStage(self.options.stage).shards_gradients:
            return  # every backward has reduced them
        self.bind_module()
        reduce_together(self.ensure_domains().main, self.takeover.backward)

    @torch.no_grad()
    def gradient_statistics(self, names: Sequence[str]) -> dict[str, dict[str, float]]:
        """Collective: see :meth:`ShardedOptimizer.gradient_statistics`."""
        with self.turn.take_together("gradient_statistics()"):
            self.check_open()
            if self.takeover is None or self.options.release_gradients:
                raise ShardoptError(
                    "ask param.grad itself, or hand the module over without release_gradients: gradient_statistics() "
                    "is of gradients that shardopt reduces and keeps. Here each rank holds whole ones, or none is kept."
                )
            self.bind_module()
            found: dict[str, dict[str, float]] = {}
            for domain, backward in self.takeover.reducing():
                found |= statistics_of(domain, backward, names)
            return found

    @torch.no_grad()
    def sum_tied(self, param: torch.nn.Parameter, group: dist.ProcessGroup | DeviceMesh) -> None:
        """Collective: see :meth:`ShardedOptimizer.sum_tied`."""
        with self.turn.take_together("sum_tied()"):
            self._sum_tied(param, group)

    def _sum_tied(self, param: torch.nn.Parameter, group: dist.ProcessGroup | DeviceMesh) -> None:
        self.check_open()
        if not isinstance(param, torch.nn.Parameter):
            raise TypeError(f"sum_tied(param=) takes a param, an nn.Parameter, found {type(param).__name__}.")
        check_norm_group(group, "sum_tied(group=)")
        if not any(param is each for each in self.params):
            raise ShardoptError(
                "give the copy that this rank trains: sum_tied() was given a param that no param group of this "
                "optimizer has, so no gradient would be summed."
            )
        ranks = Ranks(everyone_of(group), self.options.tuning.deadline)
        if ranks.rank and self.options.norm_group is not None:  # only the first rank counts it in the model's norm
            local = self.local_params.of(param)
            (self.ensure_domains().domain_of(local) or self.ensure_domains().main).note_slice(local, False, None)
        sum_tied(param, ranks)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with self.turn.take_between(ALONE):
            self.check_open()
            self.finish_gathers()
            is_running = self.takeover is not None and self.takeover.forward is not None
            if is_running and self.takeover.forward.is_running:  # type: ignore[union-attr]
                raise StateError(f"enter {ALONE} between two forwards: it was entered in the middle of one.")
            context = read_alone(self.domains)
            context.__enter__()
            self.turn.alone = ALONE

        def leave(*error: Any) -> bool | None:
            self.turn.alone = None
            with self.turn.hold(f"the end of {ALONE}"):
                return context.__exit__(*error)

        with ExitStack() as stack:
            stack.push(leave)
            yield

    def unsharded(self, ema: object, alone: object) -> AbstractContextManager[None]:
        """See :meth:`ShardedOptimizer.unsharded`."""
        if not flag(alone, "unsharded(alone=)"):
            return self._unsharded(ema)
        if ema:
            raise ValueError(
                "give unsharded(ema=True) on every rank, or alone=True for the weights: the average is not read alone."
            )
        return self._alone()

    @contextmanager
    def _unsharded(self, ema: object) -> Iterator[None]:
        with self.turn.take_together("unsharded()"):
            self.finish_gathers()
            self.bind_to_unshard()
            context = unsharded(self.domains, self.rule, ema)
            context.__enter__()

        def leave(*error: Any) -> bool | None:
            with self.turn.hold("the end of unsharded()"):
                return context.__exit__(*error)

        with ExitStack() as stack:
            stack.push(leave)
            yield

    @torch.no_grad()
    def weights(self, bucket_bytes: object, dtype: torch.dtype | None, names: object) -> WeightStream:
        """Collective: see :meth:`ShardedOptimizer.weights`."""
        from .states.weight_stream import WeightStream

        with self.turn.take_together("weights()"):
            self.check_open()
            self.end_stream("weights()")
            self.finish_gathers()
            self.bind_to_unshard()
            found: list[Weight] = []

            def read() -> dict[str, Any]:
                found.extend(self._weights(dtype, names))
                # Of experts each rank has others, by names that may say so.
                told = [[each.name if len(self.domains) < 2 else "", *each.told] for each in found]
                return {"bucket_bytes": whole(bucket_bytes, "weights(bucket_bytes=)", least=1), "weights": told}

            if self._domains is None:
                mates: tuple[Ranks, ...] = (self.ranks(),)
                given = agree_on_call("weights()", read, mates[0])
            else:
                mates = self._domains.mates
                with self._domains.raising_together("weights()"):
                    given = agree_on_call("weights()", read, mates[0])
            stream = WeightStream(found, given["bucket_bytes"], mates, self.turn)
            self.stream = weakref.ref(stream)
            return stream

    def weights_metadata(self, dtype: torch.dtype | None, names: object) -> dict[str, torch.Tensor]:
        """See :meth:`ShardedOptimizer.weights_metadata`."""
        with self.turn.take("weights_metadata()"):
            self.check_open()
            return {each.name: each.meta() for each in self._weights(dtype, names)}

    def _weights(self, dtype: torch.dtype | None, names: object) -> list[Weight]:
        module = None if self.takeover is None else self.takeover.module
        beside = [each for each in live_engines() if each.takeover is not None and each.takeover.module is module]
        domains = [domain for engine in beside for domain in engine.domains]
        return weights_of(module, self.groups, domains, dtype, names)

    def gradient_weight(self, tokens: object, average: object) -> None:
        """See :meth:`ShardedOptimizer.gradient_weight`."""
        count, is_mean = whole(tokens, "gradient_weight(tokens=)", least=0), flag(average, "gradient_weight(average=)")
        with self.turn.take_between("gradient_weight()"):
            self.check_open()
            if self.takeover is None or self.options.release_gradients:
                raise ShardoptError(
                    "hand the module over (ShardedAdamW(model, stage=2)), without release_gradients=True: "
                    "gradient_weight() weighs gradients that backward adds up, and here they are averaged by DDP, or "
                    "used up bucket by bucket before all ranks' tokens are known."
                )
            self.ensure_domains()
            backward = self.takeover.backward
            assert backward is not None
            if backward.has_stages or self.takeover.averaged.named or len(self.domains) > 1:
                raise ShardoptError(
                    "weigh the loss yourself: gradient_weight() weighs the gradients of one backward with the tokens "
                    "of one rank, and here schedules of pipeline stages run backwards, experts have gradients of "
                    "other ranks' tokens, or another optimizer trains some params."
                )
            halves = [entry.name for entry in backward.entries if entry.param.dtype is torch.float16]
            if halves:
                raise ShardoptError(
                    f"keep params in fp32 or bf16: the gradient of {halves[0]} is fp16, in which a product with the "
                    "number of tokens overflows."
                )
            backward.weigh(count, is_mean)

    def forget_backward(self) -> None:
        """Forgets a failed backward, after gradients were set to None or zero."""
        if self.takeover is not None:
            self.takeover.forget_backward()

    # -- the step --------------------------------------------------------------------------------------------------

    def _make_backward(self, domain: Domain) -> Backward:
        if not self.options.release_gradients:
            return super()._make_backward(domain)
        me = weakref.ref(self)

        def begin() -> tuple[Sequence[Group], Mapping[str, Any], Sequence[Ranks]]:
            engine = me()
            assert engine is not None  # hooks live as long as the engine
            engine.check_weights("a backward with release_gradients=True")
            check_not_unsharded(engine.domains, "a backward with release_gradients=True")
            engine.states.consolidated = None
            return engine.local_groups(), engine.defaults, engine.ensure_domains().whole

        self._release = UpdateInBackward(domain, begin)
        return self._release

    def step(self, closure: Callable[[], Any] | None, scaling: Callable[[], tuple[float, bool]]) -> Any:
        """Collective: one step. Returns what the closure returned.

        Args:
            scaling: returns the loss scale, and True if an Inf or NaN was found; called once the closure has run.
        """
        with self.turn.take_between("step()"):
            try:
                return self._step(closure, scaling)
            finally:
                if self.takeover is not None:
                    self.takeover.step_ended()

    def _step(self, closure: Callable[[], Any] | None, scaling: Callable[[], tuple[float, bool]]) -> Any:
        self.check_open()
        loss, scaled, settled, relay = None, (1.0, False), None, Relay()

        def evaluate() -> Any:
            self.check_weights("step()")
            self.settle_states()
            if closure is not None and not callable(closure):
                raise TypeError(f"closure takes a function or None, found {type(closure).__name__}.")
            if closure is None:
                return None
            with self.turn.lend():
                return closure()

        try:
            self._interrupt_stream()
            self._check_awake()
            if closure is None:
                loss = evaluate()
            elif self.takeover is not None:
                loss = self.takeover.run_closure(evaluate)
            else:
                with torch.enable_grad():
                    loss = evaluate()
            scaled = scaling()
            self.finish_gathers()
            backward = self._backward()
            if self.takeover is not None and backward is not None:
                self.takeover.check_still_covered()
                backward.check_whole()
        except RaiseNow as error:
            settled = error.error
        except Exception as error:  # run_step raises it on every rank, so that no rank waits for this one
            relay.note(error)
        if settled is not None:
            raise settled
        call = Call(self.defaults, closure is not None, relay.problem, *scaled)
        try:
            self._announce("step", call)
            self._take(call)
            return loss
        except BaseException:
            backward = self._backward()
            if closure is not None and backward is not None:
                backward.catch_up()
            raise

    def _check_awake(self) -> None:
        if any(domain.sharded is not None and domain.sharded.is_asleep for domain in self.domains):
            raise StateError(
                "call optimizer.reload() before step(), on every rank: params were offloaded by offload(params=True), "
                "and an update writes them on the device."
            )

    def _interrupt_stream(self) -> None:
        """Raises an error if a stream of weights is open: a step would change weights that other ranks still read."""
        stream = self.open_stream
        if stream is not None:
            error, is_raised_by_all = stream.interrupt_together("step()")
            raise RaiseNow(error) if is_raised_by_all else error

    def take(self, call: Call) -> None:
        """Collective: takes one step with the present gradients."""
        with self.turn.take_between("step()"):
            self._take(call)

    def _take(self, call: Call) -> None:
        if call.problem is None:
            self.finish_gathers()  # in a join() this rank may have run no forward since the last step
        # Params whose values are released check every attribute that is read.
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            updated, norm = self._close_released(call) if self.options.release_gradients else self._run(call)
        self.states.end_step(self.groups)
        self.grad_norm = norm
        self.updates += updated
        if self.takeover is not None:
            self.takeover.share_buffers()

    def _close_released(self, call: Call) -> Outcome:
        """Ends a step that was taken in backward."""
        if call.problem is not None:
            raise call.problem
        if self._release is not None:
            self.local_params.update_dtensors()
            return self._release.finish_step(self.params)
        drop_gradients(self.params)  # before the first forward there are none
        return NOTHING_DONE

    def _run(self, call: Call) -> Outcome:
        by_domain, domains, relay = self.groups_by_domain(), self.ensure_domains(), Relay(call.problem)
        domains.compare_norm_groups(call.problem)

        def sum_gradients(problem: Exception | None) -> None:
            domains.agree_on_gradients(self.groups, problem)
            self.local_params.set_local_gradients(domains.sum_over)

        try:
            domains.update_whole(self.groups)  # also after an error: it finds the tensor ranks, which wait below
            self.local_params.prepare_gradients()
        except Exception as error:
            relay.note(error)
        relay.meet(sum_gradients)
        call = dataclasses.replace(call, problem=relay.problem)
        try:
            with resharded(domains.domains, call.problem):
                return run_step(by_domain, domains.whole, call, self._bind_params, self.planners)
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

    def load_of_params(self, states: Mapping[Any, Any], groups: Sequence[Group]) -> None:
        """Loads a dict by param, as torch's ``__setstate__`` takes it; an empty one forgets all states."""
        with self.turn.take("__setstate__()"):
            self.replace_states(*read_states_of_params(states, groups, self.states))

    def replace_states(self, loaded: Mapping[torch.nn.Parameter, ParamState], own: dict[Any, Any]) -> None:
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

    # -- where states are kept -------------------------------------------------------------------------------------

    def offload(self, to: str | os.PathLike[str], params: object) -> None:
        """Collective: see :meth:`ShardedOptimizer.offload`."""
        sleeps = flag(params, "offload(params=)")
        if not isinstance(to, str | os.PathLike):
            raise TypeError(
                f"optimizer.offload() takes 'cpu' or a directory, where all masters and states go, found {to!r}. "
                "Other ways to offload are for the constructor: offload=Offload(...)."
            )
        self._move("offload()", Offload(to), sleeps)

    @torch.no_grad()
    def reload(self, states: object) -> None:
        """Collective: see :meth:`ShardedOptimizer.reload`."""
        is_all = flag(states, "reload(states=)")
        with self.turn.take_together("reload()"):
            for domain in self.domains:
                wake(domain)
            self.planners.clear()  # plans have views of where params were
        if is_all:
            self._move("reload()", None)

    @torch.no_grad()
    def _move(self, call: str, to: Offload | None, sleeps: bool = False) -> None:
        with self.turn.take_together(call):
            if to is None and self._away is None:
                return
            self.check_open()
            self.end_stream(call)
            self.finish_gathers()
            ends = [put_to_sleep(domain, to) for domain in self.domains[:1] if sleeps and to is not None]
            if move_states(self.domains, to):
                self._away = to
            for end in ends:
                self.planners.clear()  # plans keep views of params
                end()

    # -- surgery ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def rebind(self) -> None:
        """Collective: see :meth:`ShardedOptimizer.rebind`."""
        with self.turn.take_together("rebind()"):
            self._rebind()

    def _rebind(self) -> None:
        view: dict[str, Any] = {}
        with agreed(view, self.ranks()):
            takeover = self._rebindable()
            plan = takeover.plan_rebinding()
            names = names_of(takeover.module)
            view["rebind()"] = [
                {names[param]: [list(param.shape), param in plan.kept] for param in params} for params in plan.groups
            ]
            states = plan.states(self.states.all(self.groups))
        away, self._away = self._away, None
        takeover.unbind()
        for domain in self.domains:
            domain.release()
        self.retire_domains()
        self.planners.clear()
        self.local_params.update_dtensors()
        self._domains, self._release = None, None
        self.states.start_anew({self.local_params.of(param): state for param, state in states.items()})
        for group, params in zip(self.groups, plan.groups, strict=True):
            group["params"] = params
        self.bind_module()
        if away is not None and move_states(self.domains, away):
            self._away = away

    def _rebindable(self) -> ModuleTakeover:
        """Returns the takeover of a module that can be bound anew. Raises ShardoptError if it cannot."""
        self.check_open()
        if self.takeover is None:
            raise ShardoptError(
                "replace params in param_groups (group['params'][i] = new, and del optimizer.state[old]): rebind() "
                "looks for them in the module, and none was handed over."
            )
        self.check_weights("rebind()")
        check_not_unsharded(self.domains, "rebind()")
        if len(self.domains) > 1:
            raise ShardoptError(
                "construct a new optimizer, and load the state dict of this one: rebind() is not there for models with "
                "experts, whose param groups have their own process_group."
            )
        if self.options.compute_dtype is not None:
            raise ShardoptError(
                "construct a new optimizer, and load the state dict of this one: rebind() is not there with "
                "compute_dtype, whose fp32 values lie with the optimizer."
            )
        for domain in self.domains:
            check_unbroken(domain)
        self.finish_gathers()
        self.settle_states()
        return self.takeover

    # -- reports and the end ---------------------------------------------------------------------------------------

    def units(self) -> Units:
        """See :meth:`ShardedOptimizer.units`."""
        with self.turn.take("units"):
            sharded = [domain.sharded for domain in self.domains if domain.sharded is not None]
            units = [(each.gatherer, unit) for each in sharded for unit in each.units]
            units.sort(key=lambda found: found[1].number)  # in the model's order; buckets are made from its end
            return Units({unit.name: UnitView(gatherer, unit, self.turn.take) for gatherer, unit in units})

    def schedule(self) -> Schedule:
        """See :meth:`ShardedOptimizer.schedule`."""
        with self.turn.take("schedule()"):
            sharded = None if self.domain is None else self.domain.sharded
            return Schedule() if sharded is None else sharded.gatherer.orders.schedule

    def timings(self) -> Timings:
        """See :meth:`ShardedOptimizer.timings`."""
        with self.turn.take("timings()"):
            return Timings.of_all([domain.timings() for domain in self.domains])

    def program(self) -> str:
        """See :meth:`ShardedOptimizer.program`."""
        with self.turn.take("program()"):
            if self.options.release_gradients:
                return str(ELEMENTWISE)
            return "\n\n".join(str(planner.program) for planner in self.planners.values())

    def traffic(self) -> dict[str, int]:
        """Returns the bytes that this rank has received from others, by kind."""
        found: Counter[str] = Counter()
        for domain in self.domains:
            found.update(domain.traffic())
        return dict(found)

    def memory(self) -> Memory:
        """See :meth:`ShardedOptimizer.memory`."""
        with self.turn.take("memory()"):
            return self._memory()

    def _memory(self) -> Memory:
        grouped = self.params
        others = [] if self.takeover is None else list(self.takeover.module.parameters())
        params = dict.fromkeys(map(self.local_params.of, [*grouped, *others]))
        grads = [local_gradient(param) for param in dict.fromkeys([*grouped, *others])]
        offload = self.options.offload_options
        return memory_of(self.domains, params, grads, offload, tier_of(offload if self._away is None else self._away))

    def describe(self) -> str:
        """Returns for ``repr`` the options that differ from the defaults, and the memory on this rank."""
        words = ", ".join([f"stage={self.options.stage}", *given_in_words(self.options, besides=("module", "stage"))])
        bound = [domain for domain in self.domains if domain.shards]
        for domain in bound:
            words += (
                f", ranks={domain.mesh.world.size}, buckets={len(domain.shards)}, transport={domain.transport.name}"
            )
            laid = domain.matrix_stats(self.groups)
            words += f", matrices whole on one rank: {laid}" if laid.matrices else ""
        if self.is_closed:
            return f"{words}, closed"
        if self.turn.call is not None:  # what is shown to a log or a debugger raises nothing, and waits for nobody
            return f"{words}, in the middle of {self.turn.call}"
        if not bound:
            when = "step" if self.takeover is None else "forward"
            return f"{words}, not bound: masters and states are allocated at the first {when}"
        return f"{words})\nOn this rank ({memory_in_words(self.memory())}"

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
        self.planners.clear()
        self.local_params.update_dtensors()
        self._domains, self._away, self.is_closed = None, None, True
        self.states = StateTable(self.rule, self.local_params)
