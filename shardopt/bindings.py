"""What one optimizer holds: its param groups, the module that it took over, the domains that its params are bound to.

Params are bound at the first forward of the module, or at the first step: all ranks first check together what each of
them will bind, then each domain binds its own params. :mod:`shardopt.engine` uses bound params.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .domain.agreement import agree_on, agree_on_call, agreed
from .domain.bind import bind
from .domain.domain import Domain
from .domain.domains import Domains
from .domain.dtensors import DTensorLocals
from .domain.formats import check_formats
from .domain.frozen import frozen_of, warn_of_whole_frozen
from .domain.hyperparameters import check_numbers, plain_numbers
from .domain.norm_rules import check_takes_norms
from .domain.param import Candidate
from .domain.turn import Turn
from .domain.unsharded import check_weights
from .errors import BindingError, DisagreementError, ShardoptError
from .module.ddp import group_of
from .module.first_values import DeferredInit, check_materializable, check_unused, device_to_train_on, meta_params
from .module.hooks import call_while_alive
from .module.running import in_backward
from .partition.comm.group import Ranks
from .partition.comm.together import Relay
from .partition.mesh import Mesh, everyone_of
from .partition.zero_stage import ZeroStage
from .states.table import StateTable
from .states.torch_format import read_states_of_params

if TYPE_CHECKING:
    from .config import Options
    from .domain.param import Group
    from .domain.param_state import ParamState
    from .module.round_gradients import Release
    from .module.rounds import Rounds
    from .module.takeover import ModuleTakeover
    from .rules import Rule
    from .states.weight_stream import WeightStream
    from .step.step import Call


_EQUAL_VALUES = "values (call optimizer.bind() before the first forward, and they become those of rank 0): param"


class Bindings:
    """The params of one optimizer, and what they are bound to.

    Attributes:
        rule: the arithmetic.
        options: of the constructor.
        states: of all params, bound or not.
        local_params: the plain tensors behind DTensor params.
        takeover: of the module that was handed over.
        turn: which call reads or changes all this; every public call takes it.
        joining: collective, set while a ``join()`` is open: announces a call of this rank to ranks that have run out of
            batches, which make the same call.
        is_closed: True after :meth:`close`.
    """

    def __init__(self, owner: torch.optim.Optimizer, rule: Rule, options: Options):
        check_formats(rule, options)
        check_takes_norms(rule, options)
        self._owner = weakref.ref(owner)  # weak: the optimizer holds this object, and must be freed when it is dropped
        self.rule, self.options = rule, options
        self.local_params = DTensorLocals()
        self.states = StateTable(rule, self.local_params)
        self.takeover: ModuleTakeover | None = None
        self.turn = Turn(call_while_alive(Bindings.ranks, self), options.release_gradients)
        self.default_names: frozenset[str] = frozenset()  # those of the class
        self.turn.before_together = call_while_alive(Bindings._end_stream_for, self)
        self.joining: Callable[[str, Call | None], None] | None = None
        self.is_closed = False
        self.stream: weakref.ref[WeightStream] | None = None  # of weights; the last one
        self._has_warned = False  # of frozen params that stay whole
        self._domains: Domains | None = None  # from the first forward or step on
        self.domains: list[Domain] = []  # all of them
        self._retire: list[weakref.finalize[Any, Any]] = []

    # -- what the optimizer holds --------------------------------------------------------------------------------------

    @property
    def owner(self) -> torch.optim.Optimizer:
        """The optimizer, whose param groups scripts and frameworks replace at any time."""
        owner = self._owner()
        assert owner is not None  # hooks that may outlive it look for the engine, which is freed with it
        return owner

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The param groups, as the script sees them."""
        return self.owner.param_groups

    @property
    def defaults(self) -> dict[str, Any]:
        """The hyper-parameters that every group has."""
        found, names = self.owner.defaults, self.default_names
        if len(found) == len(names):
            return found
        return {key: value for key, value in found.items() if key in names}  # a wrapper may have added its own

    @property
    def params(self) -> list[torch.nn.Parameter]:
        """The params of all groups, in order."""
        return [param for group in self.groups for param in group["params"]]

    def local_groups(self) -> list[Group]:
        """Returns the param groups with the local tensors of DTensors."""
        return [self.local_params.of_group(group) for group in self.groups]

    def check_open(self) -> None:
        """Raises ShardoptError after :meth:`close`."""
        if self.is_closed:
            raise ShardoptError("construct a new optimizer: this one was closed and its states released.")

    def take_stray(self) -> None:
        """Loads a ``state`` that a script put into the optimizer's ``__dict__``, as torch's own reads it there.

        Raises:
            StateError: it does not fit; it stays there, and is raised by each call until it is taken out.
        """
        given = self.owner.__dict__
        if "state" in given:
            self.replace_states(*read_states_of_params(given["state"], self.groups, self.states))
            del given["state"]

    def replace_states(self, loaded: Mapping[torch.nn.Parameter, ParamState], own: dict[Any, Any]) -> None:
        """Replaces all states by checked states by param, and the user's own entries by ``own``."""
        raise NotImplementedError

    def settle_states(self) -> None:
        """Loads states that were assigned elsewhere: to a param before it was in a group, or into ``__dict__``.

        Raises:
            StateError: one does not fit its param.
        """
        self.take_stray()
        self.states.settle(self.groups)
        self.states.check_fit(self.groups)

    def check_weights(self, call: str) -> None:
        """Raises ShardoptError where params show the average of the weights, or a stream of them is open."""
        check_weights(self.domains, call)
        self.end_stream(call)

    @property
    def open_stream(self) -> WeightStream | None:
        """The stream of weights that this rank has not read to its end."""
        stream = None if self.stream is None else self.stream()
        return stream if stream is not None and stream.is_open else None

    def _end_stream_for(self, call: str) -> None:
        if call != "weights()":  # the stream's own: other ranks may be in its next meeting
            self.end_stream(call)

    def end_stream(self, call: str) -> None:
        """Raises StateError if a stream of weights is open, and ends it on all ranks."""
        if self.open_stream is not None:
            raise self.open_stream.interrupt(call)

    # -- the domains ---------------------------------------------------------------------------------------------------

    @property
    def domain(self) -> Domain | None:
        """The main domain; None before the first forward or step."""
        return None if self._domains is None else self._domains.main

    @property
    def is_bound(self) -> bool:
        """True from the first forward or step on: there are domains."""
        return self._domains is not None

    def unbind(self) -> None:
        """Forgets the domains, which were released: the next forward or step binds anew."""
        self._domains, self.domains = None, []

    def ensure_domains(self) -> Domains:
        """Returns the domains; the first call makes the main one."""
        if self._domains is None:
            main = self._make_domain(self._process_group())
            release = self._make_release(main)
            self._domains = self.states.domains_of_model = Domains(main, self.options, self.local_params)
            self.domains = self._domains.domains
            if self.takeover is not None:
                self.takeover.use_domain(main, release)
        return self._domains

    def groups_by_domain(self) -> list[tuple[Domain, Sequence[Group]]]:
        """Returns each domain that has params, with its groups, in the same order on all ranks of a domain."""
        return self.ensure_domains().groups_by_domain(self.groups, self._make_expert_domain)

    def ranks(self) -> Ranks:
        """Returns the ranks that make every call together. A new DDP module may change them before the first step."""
        if self._domains is not None:
            return self._domains.main.mesh.world
        group = self._process_group()
        found = None if group is None else everyone_of(group)
        return Ranks(found, self.options.tuning.deadline)

    def agree_on_call(self, call: str, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Collective: returns the arguments that all ranks give to a call, or raises the same error on all."""
        with self.turn.take_together(call):
            return agree_on_call(call, read, self.ranks())

    @property
    def device(self) -> torch.device:
        """The device of collectives: that of the params, or that which they will get, if all are on the meta device."""
        found = next((param.device for param in self.params if not param.is_meta), None)
        return device_to_train_on(self.ranks()) if found is None else found

    def _process_group(self) -> dist.ProcessGroup | DeviceMesh | None:
        group = self.options.process_group
        return group if self.takeover is None else group_of(self.takeover.called, group)

    def _make_domain(self, group: dist.ProcessGroup | DeviceMesh | None) -> Domain:
        sharded = ZeroStage(self.options.stage).shards_states
        mesh = Mesh.of(group, sharded, self.options.tuning.deadline)
        domain = Domain(self.rule, self.options, mesh, self.local_params, self.turn)
        domain.on_freed = call_while_alive(StateTable.keep, self.states)
        domain.waits_in_parts = call_while_alive(StateTable.waits_in_parts, self.states, otherwise=False)
        self._at_the_end(Domain.retire, domain)
        return domain

    def _make_expert_domain(self, group: dist.ProcessGroup | DeviceMesh) -> Domain:
        domain = self._make_domain(group)
        if self.takeover is not None:
            self.takeover.add_domain(domain)
        return domain

    def _make_release(self, domain: Domain) -> Release | None:
        """Returns what uses gradients within backward, where they are released."""
        return None

    def _at_the_end(self, call: Callable[..., None], *arguments: Any) -> None:
        """Calls ``call`` when the optimizer is freed, unless it was closed."""
        finalizer = weakref.finalize(self, call, *arguments)
        finalizer.atexit = False  # at exit the system frees everything
        self._retire.append(finalizer)

    def retire_domains(self) -> None:
        """Forgets the domains' ends: they were released."""
        for finalizer in list(self._retire):
            alive = finalizer.peek()
            if alive is not None and alive[1] is Domain.retire:
                finalizer.detach()
                self._retire.remove(finalizer)

    def _rounds(self) -> Rounds | None:
        """The rounds of the module that was taken over; None before it is bound."""
        return None if self.takeover is None else self.takeover.rounds

    def finish_gathers(self) -> None:
        """Waits for params that a step left under way."""
        for domain in self.domains:
            if domain.overlapped_gather is not None:
                domain.finish_gather()

    # -- binding -------------------------------------------------------------------------------------------------------

    def _announce(self, kind: str, call: Call | None = None) -> None:
        """Collective in a ``join()``: announces a call, which ranks that have run out of batches make too."""
        if self.joining is None:
            return
        try:
            self.joining(kind, call)
        except DisagreementError as error:  # the others may be in a backward
            if call is not None and call.problem is not None:
                raise call.problem from error
            raise

    @torch.no_grad()
    def bind(
        self,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        init_fn: Callable[[torch.nn.Module], object] | None = None,
    ) -> None:
        """Collective: see :meth:`ShardedOptimizer.bind`."""
        with self.turn.take_together("bind()"):
            self.bind_module(state_dict, init_fn)

    def bind_module(
        self,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        init_fn: Callable[[torch.nn.Module], object] | None = None,
    ) -> None:
        """Collective: does ``bind`` within a call or a hook that has the turn."""
        if not in_backward():  # on a GPU a thread of autograd's own
            self.turn.trainer = threading.get_ident()
        self.check_open()
        if self.takeover is None:
            raise ShardoptError(
                "pass the module as first argument or as module=: bind() takes a module over, and none was handed "
                "over, so the params are bound at the first step."
            )
        takeover, init = self.takeover, DeferredInit(state_dict, init_fn)
        by_domain = self.groups_by_domain()  # without experts, the main one
        if not self._has_warned:
            self._has_warned = True
            for domain, _ in by_domain:
                warn_of_whole_frozen(domain, takeover.module)
        candidates, is_bound = list[Candidate](), not takeover.values.fresh
        for domain, groups in by_domain:
            candidates += domain.unbound(groups)
            is_bound = is_bound and bool(domain.entries or not frozen_of(domain, takeover.module))
        if not candidates and is_bound:
            check_unused(init)
            return
        takeover.coverage.check_in_place()  # first: a transform of torch.func allows no message either
        with torch.no_grad(), self.takeover.closure.raising_together():
            self._bind_together(self.takeover, by_domain, candidates, init)

    def _bind_together(
        self,
        takeover: ModuleTakeover,
        by_domain: Sequence[tuple[Domain, Sequence[Group]]],
        candidates: list[Candidate],
        init: DeferredInit,
    ) -> None:
        self.finish_gathers()
        self._announce("bind")
        domains = self.ensure_domains()
        takeover.coverage.exclude_experts()
        with domains.raising_together("bind() begins"):
            numbers = self._check_together(takeover, candidates, init)
        try:
            with domains.raising_together("values are shared"):
                is_shared = self._share_values(takeover, by_domain)
            if is_shared:
                domains.compare_experts(self.groups)
            with domains.raising_together("bind() ends"):
                self._bind_module(takeover, by_domain, init, numbers)
        finally:
            self.local_params.update_dtensors()

    def _share_values(self, takeover: ModuleTakeover, by_domain: Sequence[tuple[Domain, Sequence[Group]]]) -> bool:
        """Collective: gives ranks that hold the same params the same values. Returns False if they need not be shared:
        they are bound, or still to be made."""
        if meta_params(takeover.module):
            takeover.values.give_devices(self.ensure_domains().main.mesh.world)
        elif not any(domain.entries for domain, _ in by_domain) and not takeover.values.fresh:
            takeover.values.share()
            return True
        return False

    def _bind_module(
        self,
        takeover: ModuleTakeover,
        by_domain: Sequence[tuple[Domain, Sequence[Group]]],
        init: DeferredInit,
        numbers: Sequence[dict[str, Any]],
    ) -> None:
        main = self.ensure_domains().main
        relay = Relay()
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
                relay.note(error)  # of the ranks of one expert: the others are told
        if len(by_domain) > 1:
            agree_on("experts", main.mesh.world, relay.problem)
        if takeover.values.fresh:
            takeover.values.give(init)
        if takeover.casts is not None:
            takeover.casts.begin()
        assert takeover.rounds is not None
        takeover.rounds.syncing.is_on = takeover.syncs_now

    def _bind_params(
        self,
        domain: Domain,
        groups: Sequence[Group],
        numbers: Sequence[dict[str, Any]],
        candidates: Sequence[Candidate],
        closure: bool = False,
        frozen: Sequence[torch.nn.Parameter] = (),
    ) -> None:
        """Collective: binds params, with the states that waited for them, and takes their gradients over."""
        takeover, waiting = self.takeover, self.states.waiting
        fresh = frozenset[torch.Tensor]() if takeover is None else takeover.values.fresh
        entries = bind(domain, groups, numbers, candidates, waiting, frozen=frozen, fresh=fresh, closure=closure)
        for entry in entries:
            self.states.waiting.pop(entry.param, None)
        if takeover is not None:
            takeover.attach(domain, entries)

    def _check_together(
        self, takeover: ModuleTakeover, candidates: Sequence[Candidate], init: DeferredInit
    ) -> list[dict[str, Any]]:
        """Collective: checks all that may be wrong on one rank, and raises it on all before a rank waits for values."""
        view: dict[str, Any] = {}
        with agreed(view, self.ensure_domains().main.mesh.world):
            self.ensure_domains().update_whole(self.groups)  # first: it finds the ranks that a problem is sent to
            takeover.coverage.check_covers(self.groups)
            takeover.coverage.check_covered()
            takeover.coverage.check_free(candidates)
            numbers = [plain_numbers(group) for group in self.groups]
            check_numbers(numbers, self.defaults)
            if takeover.values.fresh or meta_params(takeover.module):
                self._check_one_domain()
                check_materializable(takeover.module, init, takeover.values.fresh)
            else:
                check_unused(init)
            others = {"params of other optimizers": list(takeover.coverage.averaged)}
            values = {_EQUAL_VALUES: takeover.values.describe_bits()}
            view |= {"module": takeover.values.describe(), **values, **others, **init.describe()}
        return numbers

    def _check_one_domain(self) -> None:
        if len(self.domains) > 1:
            raise BindingError(
                "build the model with values (module.to_empty() and its initializers): some params are on the meta "
                "device, and param groups have their own process_group, so experts of other ranks would get the same "
                "values as this rank's."
            )

    def bind_frozen(self) -> None:
        """Collective: binds a module of which nothing trains, if stage 3 shards it and no forward has bound it.

        Its first forward is an evaluation, and perhaps all of them are: a reference model, say.
        """
        if self.takeover is None or not ZeroStage(self.options.stage).shards_params:
            return
        is_bound = self.domain is not None and self.domain.links is not None
        if not is_bound and not any(param.requires_grad for param in self.takeover.module.parameters()):
            with torch.inference_mode(False):  # what is made in that mode could not be trained later
                self.bind_module()

    def bind_to_unshard(self) -> None:
        """Collective at stage 3: binds what is not bound, or a forward in ``unsharded()`` would shard it."""
        takeover = self.takeover
        if takeover is None or self.is_closed or not ZeroStage(self.options.stage).shards_params:
            return
        if meta_params(takeover.module) or takeover.values.fresh:
            raise ShardoptError(
                "call optimizer.bind(), which gives params their values, before unsharded(): some params of the "
                "module are on the meta device, and there is nothing to show yet."
            )
        with torch.inference_mode(False):  # as in bind_frozen()
            self.bind_module()

    def ensure_bound(self) -> None:
        """Collective: binds params that are not bound yet, as the first step does."""
        if self.takeover is not None:
            self.bind_module()
            return
        try:
            for domain, groups in self.groups_by_domain():
                candidates = domain.unbound(groups)
                if candidates:
                    numbers = [plain_numbers(group) for group in groups]
                    check_numbers(numbers, self.defaults)
                    self._bind_params(domain, groups, numbers, candidates)
        finally:
            self.local_params.update_dtensors()
