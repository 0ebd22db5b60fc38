"""The face towards torch: an optimizer that schedulers, scalers, DDP scripts and frameworks take for torch's own."""

import copy
import dataclasses
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar, Unpack

import torch
import torch.distributed as dist

# torch.compiler.disable would import all of Dynamo here; this, which torch.optim uses too, waits for the first call.
from torch._compile import _disable_dynamo
from torch.distributed.device_mesh import DeviceMesh

from .agreement import View, agree
from .averaged import averaged, has_average
from .backward import Backward
from .bind import bind, frozen_of
from .closure import Settled, run_closure
from .composition import Composition, Party
from .config import Offload, OptionKeywords, Options, check_process_group
from .consolidate import consolidate
from .domain import Domain
from .entry import Candidate, Group, named_params, without_process_group
from .errors import ShardoptError, StateError
from .handover import Handover
from .kept import check_formats
from .local_params import LocalParams, local_gradient
from .materialise import check_materialisable, meta_params
from .memory import memory_of
from .offload.store import Store
from .partition.mesh import Mesh
from .partition.placement import Placement, Placements
from .release import Release, drop_gradients
from .relocate import relocate
from .rules import Rule
from .state_table import StateTable
from .state_view import StateView
from .states import ParamState
from .step import NOTHING_DONE, Call, Outcome, run_step
from .survey import Scaling, check_group, check_numbers, plain_numbers
from .tiers import check_offload, make_store, tier_of
from .timings import Timings
from .turns import in_turn
from .uneven import Uneven
from .written_params import refresh_masters

Optimizer = TypeVar("Optimizer", bound="ShardedOptimizer")
Closure = Callable[[], Any]

# Accepted by torch, wrong here: what would go wrong, what to do.
_REFUSED_FLAGS = {
    "capturable": "the step's scalars are computed on the host, so a captured graph would replay those of one step for "
    "ever; pass capturable=False and run the step outside of the graph",
    "differentiable": "params are updated in place by one fused kernel, which autograd cannot see; pass "
    "differentiable=False, or use the torch class where gradients must flow through the step",
}

# The optimizers that a module was handed to: each may have some of its params.
_SHARING: weakref.WeakKeyDictionary[torch.nn.Module, "weakref.WeakSet[torch.optim.Optimizer]"]
_SHARING = weakref.WeakKeyDictionary()


class ShardedOptimizer(torch.optim.Optimizer, Uneven):
    """Any rule as a ``torch.optim.Optimizer`` whose masters and states are sharded over ranks.

    The classes of :mod:`shardopt.optim` are this one with torch's names and arguments. Use it directly for a rule of
    your own::

        opt = ShardedOptimizer(model.parameters(), {"lr": 1e-3, "beta": 0.9}, rule=my_rule)

    Nothing is allocated and no rank is talked to before the first ``step()``: move, cast, load and wrap the model as
    you like until then. Every rank of the process group must take every step.

    Args:
        params: as for ``torch.optim``: tensors, named tensors or param groups.
        defaults: hyper-parameters of groups that do not set their own.
        rule: the arithmetic, made by :func:`shardopt.rules.rule`.
        **options: see :class:`shardopt.config.Options`.
    """

    _check_group: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    """Of a class with torch's arguments: checks those that a param group gives, and returns them."""

    def __init__(self, params: Any, defaults: dict[str, Any], *, rule: Rule, **options: Unpack[OptionKeywords]):
        if not isinstance(rule, Rule):
            raise TypeError(f"rule takes what shardopt.rule makes of a function, found {type(rule).__name__}.")
        if not isinstance(defaults, dict):
            raise TypeError(f"defaults takes a dict of hyper-parameters, found {type(defaults).__name__}.")
        self.rule = rule
        unknown = [name for name in options if name not in Options.__dataclass_fields__]
        if unknown:
            raise TypeError(
                f"{type(self).__name__}.__init__() got an unexpected keyword argument {unknown[0]!r}; beyond "
                f"the rule's own hyper-parameters it takes {', '.join(Options.__dataclass_fields__)}."
            )
        if isinstance(params, torch.nn.Module):
            if options.get("module", params) is not params:
                raise TypeError(
                    "a module was given as the first argument and another one as module=: only one can be taken over."
                )
            options["module"] = params
            params = list(params.parameters())
        elif not isinstance(params, Iterable):
            raise TypeError(f"params takes a module, tensors or param groups, found {type(params).__name__}.")
        self.options = Options(**options)
        if self.options.ema is not None:
            self.rule = rule.averaging(self.options.ema)
        check_formats(self.rule, self.options)
        self._handover: Handover | None = None
        self._release: Release | None = None  # in place of the steps, where gradients are released
        self._composition: Composition | None = None  # at the first step
        self._turn = threading.RLock()
        self._locals = LocalParams()
        self._states = StateTable(self.rule, self._locals)
        self._retire: list[weakref.finalize[Any, ShardedOptimizer]] = []
        self._away: Offload | None = None  # where offload() moved masters and states
        self._closed = False
        self.grad_norm: float | None = None
        """Global 2-norm of the last step's gradients before clipping, where ``max_grad_norm`` or ``release_gradients``
        was given: NaN where one of them is, inf where one is Inf (with ``release_gradients``: where one is either)."""
        self.updates = 0
        """Calls of ``step()`` that changed params: those that no Inf, NaN or scaler skipped."""
        super().__init__(params, defaults)
        if self.options.module is not None:
            self._hand_over(self.options.module)
        self._enroll()

    # -- the module ------------------------------------------------------------------------------------------------

    def _hand_over(self, module: torch.nn.Module) -> None:
        me = weakref.ref(self)

        def before_forward() -> None:
            optimizer = me()
            if optimizer is not None:
                optimizer.bind()

        has_parts = Placements.of_stage(self.options.stage).grad is Placement.SHARD
        handover = Handover(module, has_parts, before_forward)
        handover.check_covers(self)
        self._handover = handover
        handover.sharing = _SHARING.setdefault(handover.module, handover.sharing)
        handover.sharing.add(self)
        self._retire.append(weakref.finalize(self, Handover.dropped, handover))
        self._retire[-1].atexit = False

    @torch.no_grad()
    def bind(self, state_dict: Mapping[str, torch.Tensor] | None = None) -> None:
        """Takes the module over now, and not at its first forward. Every rank must call it.

        A model that is trained through its submodules or other methods only (``model.encode(x)``), so that its own
        forward never runs, needs this call. Params become views of buckets, masters and states are allocated. A module
        that was built on the meta device is given memory and values here, bucket by bucket: at stage 3 no rank ever
        holds all of it.

        Args:
            state_dict: values for params and buffers on the meta device: whole tensors by their names in the module
                (a memory-mapped file will do). None: each module's own ``reset_parameters()``.

        Raises:
            BindingError: a param that no bucket can hold, or values that are missing.
            Exception: what a ``reset_parameters()`` raised, and DisagreementError on the other ranks. The module has no
                values then: mend the cause and call this again, on every rank. Forwards are refused until then.
        """
        self._check_open()
        handover = self._handover
        if handover is None:
            raise ShardoptError(
                "bind() takes a module over, but none was handed over: the params are bound at the first step. Pass "
                "the module as first argument or as module=."
            )
        domain = self._bound()
        candidates = domain.unbound(self.param_groups)
        if not candidates and not handover.fresh and (domain.entries or not frozen_of(domain, handover.module)):
            return
        with handover.closure.meeting():
            self._bind_together(handover, candidates, state_dict)

    def _bind_together(
        self, handover: Handover, candidates: list[Candidate], state_dict: Mapping[str, torch.Tensor] | None
    ) -> None:
        domain = self._bound()
        self._announce("bind")
        numbers = self._check_together(handover, candidates, state_dict)
        if meta_params(handover.module):
            handover.give_devices(domain.mesh.world)
            candidates = domain.unbound(self.param_groups)
        elif not domain.entries and not handover.fresh:
            handover.share_values(domain.mesh.world)
        frozen = frozen_of(domain, handover.module, candidates)
        if candidates or frozen:
            self._bind_params(domain, self.param_groups, numbers, candidates, frozen=frozen)
        if handover.fresh:
            handover.give_values(state_dict)
        handover.expect_backward()

    def _bind_params(
        self,
        domain: Domain,
        groups: Sequence[Group],
        numbers: Sequence[dict[str, Any]],
        candidates: Sequence[Candidate],
        closure: bool = False,
        frozen: Sequence[torch.nn.Parameter] = (),
    ) -> None:
        """Collective: see :func:`shardopt.bind.bind`. What waited for the params is theirs, and gradients are taken."""
        handover, waiting = self._handover, self._states.waiting
        fresh = frozenset[torch.Tensor]() if handover is None else handover.fresh
        bound = bind(domain, groups, numbers, candidates, waiting, frozen=frozen, fresh=fresh, closure=closure)
        self._states.forget_waiting(entry.param for entry in bound.entries)
        if handover is not None:
            handover.attach(bound)

    def _check_together(
        self, handover: Handover, candidates: Sequence[Candidate], state_dict: Mapping[str, torch.Tensor] | None
    ) -> list[dict[str, Any]]:
        """Collective: what can be wrong on one rank alone is raised on all, before any of them waits for values."""
        problem: Exception | None = None
        numbers: list[dict[str, Any]] = []
        try:
            handover.check_covers(self)
            handover.check_covered()
            assert handover.backward is not None
            handover.backward.check_free(candidates)
            self._compose().look(self.param_groups)
            numbers = [plain_numbers(group) for group in self.param_groups]
            check_numbers(numbers, self.defaults)
            fresh = handover.fresh
            if fresh or meta_params(handover.module):
                check_materialisable(handover.module, state_dict, fresh)
        except Exception as error:
            problem = error
        view = {"module": handover.describe()}
        device = next((param.device for _, param, _ in candidates if not param.is_meta), torch.device("cpu"))
        agree(View(view, lambda: view, problem), self._bound().mesh.world, device)
        return numbers

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forwards inside are followed by backwards that accumulate each rank's own gradients, without reducing them.

        At stage 0 and 1, as DDP's own ``no_sync()``, which is honoured as well; the last backward before a step must
        be outside. From stage 2 on every backward is reduced into the shards, which is what keeps memory down, and
        without the module nothing is reduced here: then it does nothing.
        """
        if self._handover is None:
            yield
            return
        self._handover.pauses += 1
        try:
            yield
        finally:
            self._handover.pauses -= 1

    @contextmanager
    def unsharded(self, ema: bool = False) -> Iterator[None]:
        """Whole params on every rank: for ``generate()``, evaluation, exporting, code that reads them anywhere.

        Below stage 3 they always are. Every rank must enter and leave, and waits there for the others (for
        ``Tuning.timeout``, then an error says so); inside, ranks may run as they like, for as long as they like. What
        is written to params in place stays written, if every rank writes the same.

        Args:
            ema: show the moving average of the weights (``ema=0.999`` at construction) in their place; behind it they
                are the weights again, and what was written inside is gone.
        """
        domain = self._domain
        if ema:
            with ExitStack() as stack:
                for each in self._averaging():
                    stack.enter_context(averaged(each))
                yield
            return
        if domain is None or domain.sharded is None:
            yield
            return
        with domain.sharded.unsharded():
            yield

    def _averaging(self) -> list[Domain]:
        """Those that have an average. Experts that no token came to have none yet, on some ranks of the model."""
        if self.rule.average is None:
            raise ShardoptError(
                "unsharded(ema=True) was called and no average of the weights is kept: construct the optimizer with "
                "ema=0.999, say; it begins with the next step."
            )
        self._check_weights("unsharded(ema=True)")
        found = [each for each in self._domains if has_average(each)]
        if not found:
            raise ShardoptError("unsharded(ema=True) was called before the first step: there is no average yet.")
        return found

    def _check_weights(self, call: str) -> None:
        if any(domain.is_averaged for domain in self._domains):
            raise ShardoptError(
                f"{call} inside of `with optimizer.unsharded(ema=True):`, where the params are the average of the "
                "weights: it would take them for the weights, which come back behind it. Leave the context first."
            )

    def _check_released(self) -> None:
        if any(domain.sharded is not None and domain.sharded.shown for domain in self._domains):
            raise ShardoptError(
                "step() inside of `with optimizer.unsharded():` at stage 3: the whole params that are shown there "
                "would be out of date, and be written over the update behind it. Leave the context first."
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; after an error in backward it makes the next one start afresh."""
        with torch._C.DisableTorchFunctionSubclass():
            super().zero_grad(set_to_none)
        if self._handover is not None and self._handover.backward is not None:
            self._handover.backward.forget()

    # -- param groups ----------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; in mid-training the new params are bound, in buckets of their own, at the next step.

        Raises:
            ValueError: a param is in another group already. (Twice in this one: torch's warning now, an error at the
                first step.)
            ShardoptError: the group asks for what a fused, host-steered update cannot do.
            TypeError: a param is complex, or a hyper-parameter is no number.
            ValueError: a hyper-parameter is out of its range, or makes a scalar of the update Inf or NaN.
        """
        if not isinstance(param_group, dict) or "params" not in param_group:
            raise TypeError(f"param_group must be a dict with 'params', found {type(param_group).__name__}.")
        for flag, reason in _REFUSED_FLAGS.items():
            if param_group.get(flag, self.defaults.get(flag)):
                raise ShardoptError(f"{type(self).__name__} was given {flag}=True: {reason}.")
        own = param_group.get("process_group")
        check_process_group(own, "process_group of a param group")
        if own is not None and self.options.module is not None:
            raise ShardoptError(
                "a param group has its own process_group, and the module was handed over, whose gradients are reduced "
                "over one group: those of this group would be averaged with other params. Give the params without the "
                "module (stage 1), and average each group's gradients over its process_group."
            )
        super().add_param_group(param_group)
        try:
            check_group(self.rule, self.param_groups[-1], self._check_group)
        except Exception:
            self.param_groups.pop()
            raise
        if any(param.is_complex() for param in self.param_groups[-1]["params"]):
            self.param_groups.pop()
            raise TypeError(
                "complex params are not supported: the fused update would drop their imaginary part. Use "
                "torch.view_as_real on the param, or give it to a torch.optim optimizer of its own."
            )

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What GradScaler asks: with it, it hands over scale and overflow instead of calling ``step()`` or not."""
        return bool(self.defaults.get("fused"))

    # -- the step --------------------------------------------------------------------------------------------------

    @_disable_dynamo
    @in_turn
    def step(self, closure: Closure | None = None) -> Any:
        """Updates every param that has a gradient. Every rank must make this call; threads of one process take turns.

        Args:
            closure: re-evaluates the model and returns the loss; on every rank or on none. What it raises on one rank
                is raised on all, at once where the module was handed over (:mod:`shardopt.closure` says how).

        Returns:
            What the closure returned.

        Raises:
            ShardoptError: see :mod:`shardopt.errors`; unless the message says otherwise, nothing changed on any rank.
        """
        self._check_open()
        loss, problem, scaling, settled = None, None, Scaling(), None

        def evaluate() -> Any:
            self._check_weights("step()")
            self._check_released()
            if closure is not None and not callable(closure):
                raise TypeError(f"closure takes a function or None, found {type(closure).__name__}.")
            return None if closure is None else closure()

        try:
            loss = evaluate() if closure is None else run_closure(evaluate, self._handover)
            scaling = self._scaling()
            if self._handover is not None and self._handover.backward is not None:
                self._handover.check_still_covered()
                self._handover.backward.check_whole()
        except Settled as error:
            settled = error.error
        except Exception as error:  # raised on every rank by run_step, so that no rank waits for this one
            problem = error
        if settled is not None:
            raise settled
        call = Call(self.defaults, scaling, closure is not None, problem)
        try:
            self._announce("step", call)
            self._take(call)
        except BaseException:
            if closure is not None and self._handover is not None and self._handover.backward is not None:
                self._handover.backward.end_closure()
            raise
        return loss

    def _take(self, call: Call) -> None:
        # Released params would ask for each attribute whether it may be read.
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            outcome = self._run(call)
        self._states.consolidated = None  # a skipped step too lets masters follow weights that were written
        self.grad_norm = outcome.grad_norm
        if outcome.updated:
            self.updates += 1

    def _run(self, call: Call) -> Outcome:
        if self.options.release_gradients:
            if call.problem is not None:
                raise call.problem
            if self._release is not None:
                return self._release.close(self._grouped())
            drop_gradients(self._grouped())  # before the first forward there are none
            return NOTHING_DONE
        parties, composition = self._parties(), self._compose()
        try:
            composition.look(self.param_groups)
            self._locals.prepare_gradients()
        except Exception as error:  # this rank's alone, perhaps: its tensor mates come to the exchange that follows
            call = dataclasses.replace(call, problem=call.problem or error)
        try:
            composition.agree_on_gradients(self.param_groups, call.problem)
            self._locals.take_gradients(composition.sum_over)
        except Exception as error:
            call = dataclasses.replace(call, problem=error)
        try:
            return run_step(parties, composition.whole, call, self._bind_params)
        finally:
            self._locals.drop_gradients()
            self._locals.show()

    def _parties(self) -> list[Party]:
        return self._compose().parties(self.param_groups, self._make_domain)

    def _local_groups(self) -> list[Group]:
        """Param groups with the plain tensors that they come down to."""
        return [self._locals.of_group(group) for group in self.param_groups]

    def _grouped(self) -> list[torch.nn.Parameter]:
        return [param for group in self.param_groups for param in group["params"]]

    def _check_open(self) -> None:
        if self._closed:
            raise ShardoptError("this optimizer was closed and its states released: construct a new one.")

    def _bound(self) -> Domain:
        return self._compose().main

    @property
    def _domain(self) -> Domain | None:
        return None if self._composition is None else self._composition.main

    @property
    def _domains(self) -> list[Domain]:
        return [] if self._composition is None else self._composition.domains

    def _compose(self) -> Composition:
        if self._composition is None:
            group = self.options.process_group
            if self._handover is not None:
                group = self._handover.process_group(group)
            main = self._make_domain(group)
            backward = self._make_backward(main)
            self._composition = self._states.composition = Composition(main, self.options, self._locals)
            if self._handover is not None:
                self._handover.begin(main, backward)
        return self._composition

    def _make_backward(self, domain: Domain) -> Backward:
        if not self.options.release_gradients:
            return Backward(domain)
        me = weakref.ref(self)

        def begin() -> tuple[Sequence[Group], Mapping[str, Any]]:
            optimizer = me()
            assert optimizer is not None  # without it there are no hooks
            optimizer._check_weights("a backward with release_gradients=True")
            optimizer._states.consolidated = None
            return optimizer.param_groups, optimizer.defaults

        self._release = Release(domain, begin)
        return self._release

    def _make_domain(self, group: dist.ProcessGroup | DeviceMesh | None) -> Domain:
        sharded = Placements.of_stage(self.options.stage).state is Placement.SHARD
        mesh = Mesh.of(group, sharded, self.options.tuning.deadline)
        domain = Domain(self.rule, self.options, mesh)
        retire = weakref.finalize(self, Domain.retire, domain)
        retire.atexit = False  # at the interpreter's end all are asked
        self._retire.append(retire)
        return domain

    def _scaling(self) -> Scaling:
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        return Scaling(1.0 if scale is None else float(scale), found is not None and bool(found))

    @in_turn
    def refresh_masters(self) -> None:
        """Makes masters follow params that were written through ``.data``, which leaves no trace to notice.

        Params written in place (``load_state_dict``, ``copy_``) are noticed without this call. Local: make it on every
        rank that wrote.
        """
        self._check_weights("refresh_masters()")
        self._states.consolidated = None
        with torch.no_grad():
            for domain in self._domains:
                refresh_masters(domain)

    # -- states ----------------------------------------------------------------------------------------------------

    @property  # type: ignore[override]
    def state(self) -> StateView:
        """Param -> its state in torch's form. A param that has no state yet has an empty one (Adagrad's all have one).

        Tensors are views of the shard where one rank holds everything, else parts. ``state[param] = ...`` loads one
        param's state, as ``load_state_dict()`` does: on every rank, each takes its part. All else of it is read-only.
        Keys that are no tensors are yours, as in torch: state dicts hold them, checkpoints have ``extra``.
        """
        return StateView(self)

    @state.setter
    def state(self, value: Mapping[Any, Any]) -> None:
        """Only an empty one can be assigned, which is how scripts of torch forget all states."""
        if value:
            raise StateError("optimizer.state lies in shards and cannot be assigned: call load_state_dict().")
        if "param_groups" in self.__dict__:  # torch's constructor assigns one, before there are groups
            self._take_over(self.param_groups, {})
            self._states.own = {}

    def state_dict(self) -> dict[str, Any]:
        """In torch's format: ``{"state": {index: {...}}, "param_groups": [...]}``. No other rank need call it.

        At several ranks its tensors are parts: saved, they are whole, plain tensors, for which the other ranks are
        asked while they wait or compute. Save before the next step, and before any rank loads states.
        """
        self._check_open()
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        index: dict[int, int] = {}
        for number, param in enumerate(self._grouped()):
            index.setdefault(id(param), number)  # of a param that is listed twice torch takes the first
        groups = [
            {key: [index[id(param)] for param in value] if key == "params" else value for key, value in group.items()}
            for group in (without_process_group(group) for group in self.param_groups)
        ]
        states = {
            index.get(id(key), key): dict(state) if isinstance(key, torch.Tensor) else state
            for key, state in self.state.items()
        }
        state_dict: dict[str, Any] = {"state": states, "param_groups": groups}
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            replaced = post_hook(self, state_dict)
            if replaced is not None:
                state_dict = replaced
        return state_dict

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collective: gathers every state on rank ``to``, in host memory; ``state_dict()`` there is then plain tensors.

        Faster than one rank's asking for them, and for those who want plain tensors in memory.
        It holds until the next step. A dict saved from it loads into the torch class, and here at any number of ranks.
        """
        self._check_open()
        if len(self._domains) > 1:
            raise StateError(
                "consolidate_state_dict() gathers on one rank, and param groups have their own process_group: their "
                "params are others on other ranks. Call state_dict() on one rank of each process_group instead."
            )
        domain = self._domain
        if domain is None or domain.mesh.shard.size == 1:
            return
        size = domain.mesh.world.size
        if not 0 <= to < size:
            raise ValueError(f"consolidate_state_dict(to={to}): there are {size} ranks, 0 to {size - 1}.")
        with torch.no_grad():
            (party,) = self._parties()
            states = consolidate(domain, to, party.groups)
        if states is not None:
            self._states.consolidated = {**self._states.waiting, **states}

    @in_turn
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a dict of this class or of the torch class, at any number of ranks; each rank takes its part.

        Raises:
            ValueError: the groups do not match (torch's own messages).
            StateError: tensors are missing, unknown or of other shapes. Nothing was changed.
        """
        self._check_open()
        if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= state_dict.keys():
            raise TypeError(
                f"state_dict takes what state_dict() returned, with 'state' and 'param_groups', found a "
                f"{type(state_dict).__name__}. Nothing was changed."
            )
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = hook(self, state_dict)
            if replaced is not None:
                state_dict = replaced
        groups = self._loaded_groups(copy.deepcopy(state_dict["param_groups"]))
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        owners = dict(zip(keys, named_params(groups), strict=True))
        loaded, own, of_params = {}, {}, {int, *map(type, keys)}
        for key, state in state_dict["state"].items():
            if type(key) not in of_params:
                own[key] = state
                continue
            if key not in owners:
                raise StateError(
                    f"the state dict has a state for {key!r}, which none of its param groups lists: it was edited or "
                    "belongs to another optimizer. Load the dict as it was saved."
                )
            name, param, group = owners[key]
            loaded[param] = self._states.read(state, group, param, name)
        self._take_over(groups, loaded)
        self._states.own = own
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _loaded_groups(self, saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if len(saved) != len(self.param_groups):
            raise ValueError("loaded state dict has a different number of parameter groups")
        if any(len(new["params"]) != len(own["params"]) for new, own in zip(saved, self.param_groups, strict=True)):
            raise ValueError(
                "loaded state dict contains a parameter group that doesn't match the size of optimizer's group"
            )
        for new, own in zip(saved, self.param_groups, strict=True):
            new["params"] = own["params"]
            for key in ("param_names", "process_group"):
                if key in own:
                    new.setdefault(key, own[key])
            for key, value in self.defaults.items():  # a dict saved before torch knew the flag
                new.setdefault(key, value)
        return saved

    def _take_over(self, groups: list[dict[str, Any]], loaded: Mapping[torch.nn.Parameter, ParamState]) -> None:
        self._check_weights("loading states")
        self._states.replace(loaded)
        self.param_groups = groups

    # -- where states rest -----------------------------------------------------------------------------------------

    def offload(self, to: str | os.PathLike[str] = "cpu") -> None:
        """Collective: moves all masters and states out of the way, until :meth:`reload`; for inference beside training.

        Everything works as ever meanwhile: ``step()``, at the speed of the tier, state dicts and checkpoints. The bits
        of a training do not depend on where it was offloaded. Before the first step there is nothing to move, and this
        does nothing.

        Args:
            to: ``"cpu"``: host memory; for params on a CPU that is where they are, and nothing is copied. A directory:
                a file in it, as with ``offload=directory``, and the memory is free.

        Raises:
            OffloadError: they cannot be kept there. They are where they were, on every rank.
            TypeError: it is neither.
        """
        if not isinstance(to, str | os.PathLike):
            raise TypeError(
                f"optimizer.offload() takes 'cpu' or a directory, where all masters and states go, found {to!r}. "
                "Other ways to offload are for the constructor: offload=Offload(...)."
            )
        self._move(Offload(to))

    def reload(self) -> None:
        """Collective: brings masters and states back to where the constructor's ``offload`` says: to the device.

        Without an :meth:`offload` before it does nothing.

        Raises:
            OffloadError: they cannot be read, or not be kept. They are where they were, on every rank.
        """
        if self._away is not None:
            self._move(None)

    @in_turn
    def _move(self, to: Offload | None) -> None:
        self._check_open()
        domain = self._domain
        if len(self._domains) > 1:
            raise ShardoptError(
                "offload() and reload() move states on all ranks or on none, and this optimizer's params are shared by "
                "several process groups, which could not undo what one of them did. Give each its own optimizer."
            )
        if domain is None or not domain.shards:
            return
        rests, tuning = self.options.rests if to is None else to, self.options.tuning

        def open_store() -> Store:
            check_offload(rests, domain.device)
            return make_store(rests, tuning, domain.device)

        with torch.no_grad():
            relocate(domain, tier_of(rests), open_store)
        self._away = to

    @property
    def _tier(self) -> str:
        """Where masters and states rest, or most of them."""
        return tier_of(self.options.rests if self._away is None else self._away)

    # -- copies and ends -------------------------------------------------------------------------------------------

    def __deepcopy__(self: Optimizer, memo: dict[int, Any]) -> Optimizer:
        """A copy with the states of this moment; its params are those that ``memo`` holds copies of, as in torch."""
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        module = copy.deepcopy(self.options.module, memo)
        other.rule, other.options = self.rule, dataclasses.replace(self.options, module=module)
        other._closed, other.grad_norm, other.updates = self._closed, self.grad_norm, self.updates
        other._composition, other._handover, other._away = None, None, None
        other._release, other._check_group, other._turn = None, self._check_group, threading.RLock()
        other._retire, other._locals = [], LocalParams()
        other._states = StateTable(self.rule, other._locals)
        for group in self.param_groups:
            memo[id(group.get("process_group"))] = group.get("process_group")  # the same ranks
        other._states.wait(
            {
                other._locals.of(copy.deepcopy(param, memo)): state.copy()
                for param, state in self._states.all(self.param_groups).items()
            }
        )
        other._states.own = copy.deepcopy(self._states.own, memo)
        # As torch's copies: hooks, and what schedulers patched onto this instance, are left behind.
        other.__setstate__(copy.deepcopy({"defaults": self.defaults, "param_groups": self.param_groups}, memo))
        # torch added what groups of our own rules do not have, and a step would look for.
        other.defaults = {key: other.defaults[key] for key in self.defaults}
        if module is not None:
            other._hand_over(module)
        other._enroll()
        return other

    def __getstate__(self) -> dict[str, Any]:
        raise StateError(
            "a sharded optimizer cannot be pickled: its params and states are views of buffers that the copy would not "
            "share. Save optimizer.state_dict(), or copy.deepcopy((model, optimizer)) in one process."
        )

    def close(self) -> None:
        """Gives every param storage of its own and releases masters and states. The model stays usable.

        A DDP module reduces its gradients itself again. At stage 3 the params are gathered: every rank must call it.
        While another rank still reads this one's states, for its ``state_dict()``, this waits: until that one closes
        too, or has asked nothing for a few seconds.
        """
        self._check_weights("close()")
        if self._handover is not None:
            self._handover.sharing.discard(self)
            self._handover.close()
        for retire in self._retire:
            retire.detach()
        with torch.no_grad():
            for domain in self._domains:
                domain.release()
        self._locals.show()
        self._composition, self._closed = None, True
        self._states = StateTable(self.rule, self._locals)
        self._away = None

    # -- reports ---------------------------------------------------------------------------------------------------

    def timings(self) -> Timings:
        """Wall-clock seconds of each phase of a step, medians of the last 100; ``print`` shows a table.

        The phases are labels in ``torch.profiler`` as well.
        """
        return Timings.of_all([domain.timings() for domain in self._domains])

    def memory(self) -> dict[str, dict[str, int]]:
        """Bytes on this rank by kind (param, gradient, master, state, buffer) and tier (device, host, disk)."""
        others = [] if self._handover is None else list(self._handover.module.parameters())
        params = dict.fromkeys([*map(self._locals.of, self._grouped()), *others])
        grads = [local_gradient(param) for param in dict.fromkeys([*self._grouped(), *others])]
        return memory_of(self._domains, params, grads, self.options.rests, self._tier)

    def __repr__(self) -> str:
        options = f"stage={self.options.stage}"
        for domain in (each for each in self._domains if each.shards):
            transport = domain.transport.name
            options += f", ranks={domain.mesh.world.size}, buckets={len(domain.shards)}, transport={transport}"
        return f"{super().__repr__()[:-1]}Sharded ({options})\n)"
