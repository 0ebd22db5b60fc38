"""Stage 3: units are unsharded (all-gathered) before a module that needs them runs, in forward and backward.

Every module of a unit has hooks: a block; outside of blocks, each module that owns params. In the forward, its units
are needed from the beginning of its call to the end. In the backward, its units are needed from the arrival of the
gradient of an output until the gradients of all inputs are complete::

    node of an input  <-  nodes of the call  <-  node of an output          backward runs to the left

Of the nodes that are ready, autograd runs the one that was made last. All nodes of a call were made after the nodes of
its inputs. So once the last input's node is about to run, no node of the call will run any more. A call without
differentiable inputs (of an embedding) has no such node: its units stay until backward ends, which is soon.

Several calls may have one input: the time of a diffusion, an encoder's output. Its gradient is complete only when all
of them are through. But once the backward of another call begins, which had ended before this call began, no node of
this call will run any more either: all of them were made later than that call's.

The call may write to its inputs in place, so their nodes are those from before the call. An output that is a view has
two nodes with hooks: a later write in place to the view takes the view's own node out of the graph, but not the node of
its base.

A param may be read outside of a call of its own unit: by the forward of a module around it, as in ``F.linear(h,
self.embed.weight)``, or by another method. The guard sees that a resharded param is read, and asks
:meth:`Forward.read`. A call that runs then needs the unit as well, from there to its end and in its backward: whatever
it made of the param, views included, finds the values. Without a call that runs, the unit stays until the next step: no
hook says in which backward the param is needed, and there may be several.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..domain.alone import check_not_alone
from ..domain.experts import own_units
from ..domain.turn import holding
from ..errors import ReleasedError
from ..tensors.pipelining import is_called_by_pipeline
from ..tensors.unsharded_guard import keep_pattern, refused_alone
from ..units.unit_orders import Direction
from .hooks import ModuleHook, remove_all
from .lent_memory import StateDictHooks, lend_memory
from .module_call import ModuleCall, NodeHook, tensors_within, with_own_nodes
from .running import backward_runs, in_backward, is_left, runs_a_method

if TYPE_CHECKING:
    from ..domain.called import CalledModule
    from ..domain.domain import Domain
    from ..domain.sharded_params import ShardedParams
    from ..partition.readable import Readable
    from ..units.gatherer import Gatherer
    from ..units.unit import Unit
    from .arrivals import Arrivals
    from .rounds import Rounds

# Of params that a call reads although they are of no module of its own, the first are shown one by one, until they are
# this part of their bucket. Then all of it is shown: that costs as much as so many of them, one by one. So a read costs
# the same however large the bucket is.
READ_EACH = 64


class Forward:
    """The hooks on all modules that need units.

    Attributes:
        backwards: number of backwards that have ended.
        runs: the name of the called module whose forward or backward runs, or ran last.
    """

    def __init__(self, domains: Sequence[Domain], root: nn.Module, called: Sequence[CalledModule], rounds: Rounds):
        """
        Args:
            domains: the main one, and those of experts, which share its gatherer, once they are there.
            called: the modules that a script calls.
        """
        self._domains, self._root, self._rounds = domains, root, rounds
        self._called = {each.module: each.name for each in called}
        self.runs = called[0].name
        self._hooks: list[Any] = []
        self._state_dicts = StateDictHooks()
        self._needs: dict[nn.Module, _Needs] = {}
        self._running: list[ModuleCall] = []  # calls in forward, from the outermost
        # The nodes of the outputs of the call that ended last: the inputs of the next one, nearly always.
        self._ends: dict[Any, NodeHook] = {}
        # Calls in backward in their order, and the units that each keeps gathered; None: what reads outside of calls.
        self._open: dict[ModuleCall | None, list[Unit]] = {}
        self.backwards, self.is_closed = 0, False
        # By name of each unit, all local params of its modules, those included that are kept whole.
        self._params: dict[str, tuple[nn.Parameter, ...]] = {}
        self._arrivals: dict[str, list[Arrivals]] = {}  # of the gradients of these
        self.turn = domains[0].turn
        self._gatherer: Gatherer  # once attached
        self._read: Unit | None = None  # by the script, while this rank reads alone

    @property
    def _sharded(self) -> list[ShardedParams]:
        """The sharded params of the domains that are bound."""
        return [domain.sharded for domain in self._domains if domain.sharded is not None]

    def _sharded_with(self, param: nn.Parameter) -> ShardedParams | None:
        return next((each for each in self._sharded if param in each.where), None)

    def attach(self) -> None:
        """Puts hooks on modules of units to which params were bound since the last call."""
        remove_all(self._hooks)
        self._gatherer = self._domains[0].gatherer
        bound, every = self._gatherer.units, self._sharded
        needed: dict[nn.Module, list[Unit]] = {}
        given = self._domains[0].options.tuning.units
        for domain, plan in ((each, unit) for each in self._domains for _, unit in own_units(each, self._root, given)):
            own = self._params[plan.name] = tuple(map(domain.locals.of, plan.params))
            self._arrivals[plan.name] = [bucket for part in self._rounds.parts for bucket in part.arrivals_of(own)]
            for module in plan.modules if plan.name in bound else ():
                needed.setdefault(module, []).append(bound[plan.name])
        some = (shard.gathered for each in every for shard in each.frozen if shard.bucket.present)
        frozen = {gathered.unit for gathered in some if gathered is not None}
        self._needs = {
            module: _Needs(tuple(units), self._readables(module, units), _devices(units), not frozen.isdisjoint(units))
            for module, units in needed.items()
        }
        self._gatherer.passes.caller = weakref.ref(self)
        before, after = ModuleHook(self.pre_forward), ModuleHook(self._post_forward)
        for module in dict.fromkeys((*self._called, *self._needs)):
            if module not in self._called:  # ModuleTakeover calls pre_forward() for these, after it has bound params
                self._hooks.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            # always_call: after an exception too, the module's params are needed no more.
            self._hooks.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))
        self._state_dicts.attach(self._root, every)

    def _readables(self, module: nn.Module, units: Sequence[Unit]) -> tuple[Readable, ...]:
        """Returns what the code of a module reads of these units, one of which it may share with many modules."""
        own = list(module.parameters())
        found: list[Readable] = []
        for each in self._sharded:
            where = each.where
            found += each.readables_of(param for param in own if param in where and where[param].unit in units)
        return tuple(found)

    @property
    def holds_params(self) -> bool:
        """True if params of the module are sharded."""
        return bool(self._needs) and not self.is_closed

    def note_dropped(self) -> None:
        """Leaves the slices to the model, since its optimizer is gone, and says so to whoever reads a param."""
        for each in self._sharded:
            each.is_dropped = True
        self._state_dicts.leave_slices()

    def close(self) -> None:
        """Removes all hooks; a backward through an older graph raises from now on."""
        remove_all(self._hooks)
        self._arrivals.clear()  # whose reducer and sums would live as long as the closed optimizer
        self._state_dicts.close()
        self.is_closed = True

    # -- forward ---------------------------------------------------------------------------------------------------

    @holding("a forward")
    def pre_forward(
        self, module: nn.Module, arguments: Any, keywords: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        """Gathers the module's units: a call of the module begins. Returns the inputs if they were replaced."""
        needs, name = self._needs.get(module), self._called.get(module)
        if needs is None and (name is None or not self._needs):  # a deep copy of a module has the module's hooks
            return None
        in_backward = torch._C._current_graph_task_id() != -1  # activation checkpointing
        has_graph = torch.is_grad_enabled()
        if not self._gatherer.here.unsharded_contexts and torch._C._functorch.get_interpreter_stack():
            _check_no_transform()
        if name is not None:
            self.runs = name
            self._end_interrupted()
            if not self._running and not in_backward:
                self._begin_pass(Direction.FORWARD if has_graph else Direction.EVALUATION)
        if in_backward:
            self._begin_backward()
        # A hook on the gradient of a param would notice a read that comes too late. A frozen param has no gradient, the
        # inputs of its call have.
        checks = name is None and has_graph and needs is not None and needs.is_frozen
        own: set[Any] = set()  # nodes that no other call shares
        if checks:
            arguments = with_own_nodes(arguments, own)
            keywords = {name: with_own_nodes(each, own) for name, each in keywords.items()}
        call = ModuleCall(self, module, own)
        if has_graph:
            for tensor in tensors_within((arguments, keywords) if keywords else arguments, 0):
                node = tensor.grad_fn
                if node is not None:
                    call.starts[node] = self._ends.get(node)
        self._running.append(call)
        if needs is not None:
            call.devices = needs.devices
            for unit in needs.units:
                self._gatherer.use(unit)
                call.units[unit] = None
            for readable in needs.readables:
                call.show(readable)
        return (arguments, keywords) if checks else None

    def _begin_pass(self, direction: Direction) -> None:
        self.before_gathers(direction)
        self._gatherer.passes.begin(direction, self.runs)

    def before_gathers(self, gathers: Direction | Unit) -> None:
        """Tells other ranks in a ``join()`` what this one is about to gather: a unit that no schedule has, say."""
        if self._rounds.announcer is not None:
            self._rounds.announcer.before_gathers(gathers)

    def pass_over(self, units: Iterable[str]) -> None:
        """Awaits no more gradients from units that a backward is past."""
        # Nearly always all of them are there: then no param is looked at.
        if not self._rounds.is_open or any(each.missing for name in units for each in self._arrivals[name]):
            self._rounds.pass_over([param for name in units for param in self._params[name]])

    def _need(self, call: ModuleCall, param: nn.Parameter) -> None:
        """Gathers a param that a call reads although it is of no module of the call's."""
        sharded = self._sharded_with(param)
        assert sharded is not None
        gathered = sharded.where[param]
        if gathered.unit not in call.units:
            self._gatherer.use(gathered.unit)
            call.units[gathered.unit] = None
            call.devices |= _devices((gathered.unit,))
        call.reads += 1
        is_one_of_many = call.reads * READ_EACH < len(gathered.bucket.params)
        for each in sharded.readables_of((param,)) if is_one_of_many else [gathered.bucket.whole]:
            call.show(each)

    @holding("a forward")
    def _post_forward(self, module: nn.Module, arguments: Any, keywords: dict[str, Any], output: Any) -> Any:
        running = self._running
        if not running or running[-1].module is not module:
            at = next((at for at in reversed(range(len(running))) if running[at].module is module), None)
            if at is None:
                return None
            self._end_calls(at + 1)  # the model's own code caught what ended them
        call = running.pop()
        call.frame = None
        tensors = tensors_within(output)
        if lend_memory(call.units, tensors):
            # An output is a param or a view of one: without a copy it would be read after its memory is freed.
            output = torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, output)
            tensors = tensors_within(output)
        self._ends = call.register_hooks(tensors) if call.units and torch.is_grad_enabled() else {}
        if not running:
            self._ends = {}  # nodes keep what they saved
        try:
            for readable, before in call.shown:
                if readable.versions() != before:
                    written = readable.written(before)
                    assert written is not None
                    self._keep_written(module, written, call.units)
                    break
        finally:
            for unit in call.units:
                self._gatherer.done(unit)
            if not running and module in self._called and not in_backward():
                # After an error there is no output. In a join() the other ranks go on until they notice it.
                self._gatherer.passes.end(completed=output is not None or self._rounds.announcer is not None)
        return output

    def _keep_written(self, module: nn.Module, param: nn.Parameter, units: Iterable[Unit]) -> None:
        """Writes back a param that its own module wrote to in its forward: the gathered copy will be dropped.

        Raises:
            ReleasedError: other ranks have slices of the param, and may write something else.
        """
        sharded = self._sharded_with(param)
        # unsharded() writes all params back when it ends.
        if sharded is None or sharded.gatherer.here.unsharded_contexts:
            return
        if self._gatherer.is_alone:
            raise refused_alone(sharded.name_of(param))
        if not self._gatherer.writes.is_alone:
            name = sharded.name_of(param)
            raise ReleasedError(
                f"construct the optimizer with {keep_pattern(name)} so that the param stays whole: the forward of "
                f"{type(module).__name__} wrote to {name}, of which each rank keeps a slice at stage 3, and what it "
                "wrote would be lost with the gathered copy. Every rank must then write the same. Or write it after "
                "step(), in `with optimizer.unsharded():`."
            )
        for unit in units:
            self._gatherer.write_back(unit)

    # -- calls that an interrupt ended -----------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """True while a forward or backward of the module runs; what an interrupt ended is forgotten."""
        self._end_interrupted()
        if self._open and not backward_runs():
            for unit in itertools.chain.from_iterable(self._open.values()):
                self._gatherer.forget_use(unit)
            self._forget_backward()
        return bool(self._running or self._open)

    def _end_interrupted(self) -> None:
        """Ends the calls in forward that have returned or raised, of which no hook told."""
        if self._running:
            over = (at for at, call in enumerate(self._running) if call.frame is not None and is_left(call.frame))
            self._end_calls(next(over, len(self._running)))

    def _end_calls(self, start: int) -> None:
        """Ends calls in forward without their hooks: the one with this number, from the outermost, and those in it."""
        for call in self._running[start:]:
            call.frame = None
            for unit in call.units:
                self._gatherer.forget_use(unit)
        del self._running[start:]
        self._ends = {}

    # -- reads outside of calls ------------------------------------------------------------------------------------

    @holding("a forward")
    def read(self, param: nn.Parameter, is_read: bool) -> bool:
        """Gathers a resharded param for a call in the model's code, else returns False; see :class:`SliceKeeper`."""
        if self.is_closed:
            return False
        sharded = self._sharded_with(param)
        assert sharded is not None
        unit = sharded.where[param].unit
        self._end_interrupted()
        if self._running:
            self._need(self._running[-1], param)
        elif self._gatherer.is_alone:
            if not is_read:
                return False
            if self._read is not None and self._read is not unit:  # a script reads one unit after the other
                self._gatherer.reshard(self._read)
            self._gatherer.use_until_step(unit)
            self._read = unit
        elif in_backward():  # a backward of the user's own, or a hook
            self._begin_backward()
            self._gatherer.use(unit)
            self._gatherer.show(unit)
            self._open.setdefault(None, []).append(unit)
        elif is_read and (runs_a_method(self._root) or is_called_by_pipeline()):
            # No hook says when a backward comes to what was made of the param; there may be several. The same without
            # autograd: the guard would not notice the next read, which autograd saves, since the param is readable.
            self._gatherer.use_until_step(unit)
        else:
            return False
        return True

    def keep_all(self) -> None:
        """Collective over messages: gathers all units until the next step.

        The module was bound after a method of it had begun: what that has read of whole params is saved for a backward.
        """
        for unit in list(self._gatherer.units.values()) if self.holds_params else ():  # none while all are frozen
            self._gatherer.use_until_step(unit)

    def computes(self) -> bool:
        """True in the model's own code: in a forward, a backward or another method."""
        return bool(self._running) or in_backward() or runs_a_method(self._root) or is_called_by_pipeline()

    # -- backward --------------------------------------------------------------------------------------------------

    def _begin_backward(self) -> None:
        if self.turn.alone is not None:
            check_not_alone(self._domains[0], "a backward")
        if self._running:
            self._end_interrupted()
        now = self._gatherer.passes.now
        if (now is None or now.direction is not Direction.BACKWARD) and not self._running:
            self._begin_pass(Direction.BACKWARD)

    @holding("backward()")
    def pre_backward(self, call: ModuleCall) -> None:
        """Gathers the units of a call whose backward begins."""
        for other in tuple(self._open):
            # No node of a call runs any more once the backward of an earlier one begins. That says nothing about a
            # backward within a backward, and about the thread of another device.
            is_alike = other is not None and other.task == call.task and other.devices == call.devices
            if other is not None and is_alike and other.began > call.ended:
                other.is_open = False
                self._end_backward_of(other)  # the turn is held
        self._begin_backward()
        self._open[call] = used = []
        # With create_graph=True the graph of the backward itself saves params: they stay gathered until the step.
        is_counted = not torch.is_grad_enabled()
        for unit in call.units:
            self._gatherer.use(unit)
            if is_counted:
                used.append(unit)
        for readable, _ in call.shown:
            readable.show()

    @holding("backward()")
    def post_backward(self, call: ModuleCall) -> None:
        """Ends the use of the units of a call whose backward is complete."""
        self._end_backward_of(call)

    def _end_backward_of(self, call: ModuleCall) -> None:
        if call not in self._open:
            return  # end_backward() has come before
        units = self._open[call]
        while units:  # taken out first: what an interrupt leaves is for end_backward(), and no use ends twice
            unit = units[0]
            del units[0]
            self._gatherer.done(unit)
        del self._open[call]

    @holding("backward()")
    def end_backward(self, completed: bool) -> None:
        """Reshards the units in use, but for those kept until the step: backward has ended, or was abandoned."""
        self._gatherer.passes.end(completed)
        for units in self._open.values():
            while units:  # taken out first: an interrupt here must not end a use twice
                unit = units.pop(0)
                self._gatherer.done(unit, reshard=not unit.outlives_backward)
        self._forget_backward()

    def forget_calls(self) -> None:
        """Forgets calls whose end no hook reports: of ``torch.autograd.grad()``, or of an interrupted forward."""
        self._running.clear()
        self._ends = {}
        self._forget_backward()

    def _forget_backward(self) -> None:
        self._open.clear()
        self.backwards += 1  # so that what is left of these calls counts as another backward's


def _devices(units: Iterable[Unit]) -> frozenset[torch.device]:
    return frozenset(each.bucket.device for unit in units for each in unit.buckets)


@dataclass(frozen=True, slots=True)
class _Needs:
    """What each call of a module needs.

    Attributes:
        is_frozen: a unit holds frozen params.
    """

    units: tuple[Unit, ...]
    readables: tuple[Readable, ...]
    devices: frozenset[torch.device]
    is_frozen: bool


def _check_no_transform() -> None:
    """Raises ReleasedError within a ``torch.func`` transform that takes gradients: a gather writes to buckets there."""
    kinds = torch._C._functorch.TransformType
    for each in torch._C._functorch.get_interpreter_stack() or ():
        if each.key() in (kinds.Grad, kinds.Jvp):
            raise ReleasedError(
                "put the call in `with optimizer.unsharded():`, which every rank must enter and leave: a module was "
                f"called within torch.func's {each.key().name.lower()} (per-sample gradients, say), and its params lie "
                "in slices (stage 3). They cannot be gathered there, as torch allows no write to memory in it."
            )
