"""What a rank that has run out of batches does while others go on, and how these tell it.

torch's :class:`~torch.distributed.algorithms.join.Join` asks, in a loop, whether some rank still trains. What such a
rank is about to do together with all others it announces first, and a rank that has run out does the same::

    rank 0 (trains)          | round  |  step  | round  |  step  |
    rank 1 (has run out)     | zeros  | update | zeros  | update |      its own shard, with the others' gradients

A round is one reduction of gradients; binding, and a forward of a DDP module (which shares its buffers), are announced
too. Where the module was not handed over, DDP reduces the gradients and shadows that by itself; what it sums on a rank
that has run out goes nowhere, so one of the others sends its gradients ahead of the step.

At stage 3 over shared memory the others read the slices of a rank that has run out, which need not hear of it. Where
params travel, a forward is announced: such a rank joins all its gathers in the order of the schedule, as it joins those
of a backward in the round. A gather of an evaluation, or outside of any forward, is announced by itself. A use that
the schedule of a forward or backward lacks is an error: until the pass ends, such a rank hears nothing.
"""

from __future__ import annotations

import functools
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook, _JoinConfig
from torch.nn.parallel import DistributedDataParallel

from ..domain.dtensors import any_dtensor
from ..domain.hyperparameters import plain_numbers
from ..engine import live_engines
from ..errors import DisagreementError, ShardoptError
from ..module.backward import Backward
from ..partition.unit import UnitState
from ..partition.unit_orders import Direction
from ..step.step import Call

if TYPE_CHECKING:
    from ..engine import Engine
    from ..partition.comm.group import Ranks
    from ..partition.gatherer import Gatherer
    from ..partition.unit import Unit

_OFF = _JoinConfig.construct_disabled_join_config()
_PHASE = "telling ranks that have run out of batches"
# What one rank adds to the sum by which another joinable (DDP) counts the ranks that go on: no count is as large.
_STEP = 1 << 16
_KINDS = {
    "bind": "the first forward",
    "forward": "a forward of DistributedDataParallel",
    "gathers for forward": "a forward",
    "gathers for evaluation": "a forward under no_grad()",
    "gathers for backward": "a backward that reduces no gradients",
    "gather": "a gather of params outside of a forward or backward",
    "round": "a backward",
    "step": "step()",
}
# Here ranks begin to follow the schedule of gathers, each from what it holds.
_SCHEDULED = ("gathers for forward", "round")


class Announced:
    """What the ranks said of what they are about to do."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]):
        """
        Args:
            rows: by rank; its ``kind`` is None of a rank that has run out.

        Raises:
            DisagreementError: they cannot go on together; on every rank.
        """
        self.active = [rank for rank, row in enumerate(rows) if row["kind"] is not None]
        self.is_complete = len(self.active) == len(rows)
        self.first = self.active[0]
        self.facts = rows[self.first]
        self.kind: str = self.facts["kind"]
        self.size = len(rows)
        for rank in range(self.size):
            if rows[rank]["setup"] != rows[0]["setup"]:
                raise DisagreementError(
                    f"ranks differ in what they join with: {rows[0]['setup']} on rank 0, {rows[rank]['setup']} on rank "
                    f"{rank}. A rank that runs out of batches could not follow the others. Give all ranks the same "
                    "model (in DistributedDataParallel or not), param groups and options of join(), and step several "
                    "optimizers in the order in which Join was given them."
                )
        for rank in self.active:
            if rows[rank]["kind"] != self.kind and any(row.get("failed") for row in rows):
                failed = next(rank for rank, row in enumerate(rows) if row.get("failed"))
                raise DisagreementError(
                    f"rank {failed} cannot take this step, so no rank does: {rows[failed]['failed']}"
                )
            if rows[rank]["kind"] != self.kind:
                raise DisagreementError(
                    f"rank {self.first} is at {_KINDS[self.kind]}, rank {rank} at {_KINDS[rows[rank]['kind']]}: a rank "
                    "that has run out of batches cannot follow both, so none goes on. Make the same calls on all ranks "
                    "that have a batch."
                )
            problem = rows[rank].get("problem") or (not self.is_complete and rows[rank].get("written"))
            if problem:
                raise DisagreementError(f"rank {rank} cannot go on beside ranks that have run out: {problem}")
        for rank in range(self.size if self.kind in _SCHEDULED and not self.is_complete else 0):
            if rows[rank]["gathered"] != self.facts["gathered"]:
                raise DisagreementError(
                    f"reshard units before {_KINDS[self.kind]} in which ranks have run out of batches: rank {rank} "
                    f"holds {rows[rank]['gathered']}, rank {self.first} {self.facts['gathered']}, so they would not "
                    "make the same gathers. Call the model itself, and opt.units[...].reshard() after unshard()."
                )


class Shadow(JoinHook):
    """Of one optimizer, for one context."""

    def __init__(self, engine: Engine, by_all: bool, number: int):
        """
        Args:
            by_all: the mean is over all ranks; else over those that had a batch.
            number: of the joinables of a ``Join`` each has another one, on all ranks the same.
        """
        self._engine, self._by_all, self._number = weakref.ref(engine), by_all, number
        self.shadows = False  # at this moment, what another rank announced
        self._ranks: Ranks = engine.compose().main.mesh.world
        self._is_complete = True  # as all ranks said when something was announced last, none has run out
        self._backward: Backward | None = None
        self._ddp: DistributedDataParallel | None = None
        self._ddp_hook: Any = None
        handover, me = engine.takeover, weakref.ref(self)
        if handover is None:
            return
        self._backward = backward = cast(Backward, handover.backward)
        closure = handover.closure

        def before_round(held: list[int]) -> int | None:
            hook = me()
            with closure.raising_together():
                announced = (
                    None if hook is None else hook.announce("round", lambda: {"held": held, **edits_of(backward)})
                )
            return None if hook is None or announced is None else hook._divisor(announced)

        def before_gathers(gathers: Direction | Unit) -> None:
            hook = me()
            if hook is not None:
                with closure.raising_together():
                    hook.announce_gathers(gathers)

        def before_forward(*_: Any) -> None:
            hook = me()
            if hook is not None and hook._ddp is not None:
                with closure.raising_together():
                    is_on = hook.announce("forward") is not None
                # It then takes buffers from a rank that has a batch, and not from rank 0.
                hook._ddp._join_config = _JoinConfig(is_on, throw_on_early_termination=False, is_first_joinable=False)

        backward.before_round = before_round
        if handover.forward is not None:
            handover.forward.before_gathers = before_gathers
        handover.retire_reducer()
        self._ddp = handover.ddp
        if self._ddp is not None:
            self._ddp_hook = self._ddp.register_forward_pre_hook(before_forward, prepend=True)

    def leave(self) -> None:
        """The context is left."""
        engine = self._engine()
        if engine is not None and engine.joining == self.tell:
            engine.joining, _joinable(engine)._join_config = None, _OFF
            if engine.takeover is not None and engine.takeover.forward is not None:
                engine.takeover.forward.before_gathers = None
        if self._backward is not None:
            self._backward.before_round = None
        if self._ddp is not None:
            self._ddp_hook.remove()
            self._ddp._join_config = _OFF

    # -- on a rank that has a batch --------------------------------------------------------------------------------

    def tell(self, kind: str, call: Call | None) -> None:
        """Collective: announces a binding or a step."""
        self.announce(kind, dict if call is None else functools.partial(self.step_facts, call))

    def announce(self, kind: str, facts: Callable[[], dict[str, Any]] = dict) -> Announced | None:
        """Collective: says what this rank is about to do with all others; None where there is no context.

        Raises:
            DisagreementError: the ranks cannot do so together; on every rank.
            RuntimeError: a rank has run out, and the context was asked to end there.
        """
        engine = self._engine()
        if engine is None or self.shadows or not _joinable(engine)._join_config.enable:
            return None
        self._check_place(engine)
        work = Join.notify_join_context(_joinable(engine))
        if work is not None:
            work.wait()
        if not _joinable(engine)._join_config.is_first_joinable:
            self._count(engine, _STEP)
        row: dict[str, Any] = {}
        try:
            row = facts()
        except Exception as error:  # the others wait for this rank
            row = {"problem": f"{type(error).__name__}: {error}"}
        announced = self._exchange(engine, kind, row)
        if kind == "step" and self._backward is None and not announced.is_complete:
            self._send_gradients(engine, announced)
        return announced

    def announce_gathers(self, gathers: Direction | Unit) -> None:
        """Collective where params travel: announces a forward, or a unit that is gathered outside of the schedule."""
        engine = self._engine()
        gatherer = None if engine is None else _gatherer(engine)
        if gatherer is None or not gatherer.waits_for_others or gatherer.unsharded_contexts or self.shadows:
            return
        assert self._backward is not None
        if isinstance(gathers, Direction):
            facts = {}
            if gathers is Direction.BACKWARD:
                self._backward.open_round_early()  # which announces a round
                if self._backward.is_open:
                    return
                facts["written"] = "torch.autograd.grad() gathers params, which they could not join. Use backward()."
            self.announce(f"gathers for {gathers.value}", lambda: facts)
            return
        if gatherer.direction in (Direction.FORWARD, Direction.BACKWARD):
            if self._is_complete:
                return
            why = (
                f"{gathers.name or 'the model itself'} is used in another order than the ranks expect. Take a first "
                "step in which all ranks have a batch, and keep its order."
            )
            if self._backward.is_open:  # they wait for gathers, and hear nothing until these time out
                raise ShardoptError(f"this rank cannot go on beside ranks that have run out: {why}")
            gatherer.end_pass()  # they listen once they joined all gathers of the forward
            gatherer.orders.refuse()
            self.announce("gather", lambda: {"problem": why})
        elif gathers.state is UnitState.SHARDED and (gatherer.direction is None or not self._is_complete):
            self.announce("gather", lambda: {"unit": gathers.name})

    def _check_place(self, engine: Engine) -> None:
        if self._backward is not None and not _joinable(engine)._join_config.is_first_joinable:
            raise ShardoptError(
                "Join was given others ahead of this optimizer, which took the module over: a rank that has run out of "
                "batches would follow them first. Use `with optimizer.join():` or Join([optimizer]), with one "
                "optimizer for the module."
            )

    def _count(self, engine: Engine, number: int) -> float:
        total = torch.full((1,), float(number), device=engine.device)
        dist.all_reduce(total, group=self._ranks.group)
        return total.item()

    def _exchange(self, engine: Engine, kind: str | None, facts: Mapping[str, Any]) -> Announced:
        setup = {
            "divide_by_initial_world_size": self._by_all,
            "DistributedDataParallel": self._ddp is not None,
            "number of the optimizer": self._number,
            "params": [len(group["params"]) for group in engine.groups],
        }
        gatherer = _gatherer(engine)
        gathered = [] if gatherer is None or not gatherer.waits_for_others else gatherer.gathered
        row = {"kind": kind, "setup": setup, "gathered": gathered, **facts}
        announced = Announced(self._ranks.exchange_json(row, _PHASE))
        self._is_complete = announced.is_complete
        return announced

    def _divisor(self, announced: Announced) -> int:
        return announced.size if self._by_all else len(announced.active)

    def step_facts(self, call: Call) -> dict[str, Any]:
        """What a rank must know to take this step as well."""
        engine = self._engine()
        assert engine is not None
        gatherer = _gatherer(engine)
        return {
            "orders": [[], []] if gatherer is None else [gatherer.orders.passes, gatherer.departures],
            "closure": call.closure,
            "failed": None if call.problem is None else f"{type(call.problem).__name__}: {call.problem}",
            "scaling": [call.scale, call.overflow],
            "numbers": [plain_numbers(group) for group in engine.groups],
            "gradients": [_dtype_of(param.grad) for param in engine.params],
            **(edits_of(self._backward) if self._backward is not None else {}),
        }

    def tell_of(self, error: Exception, caller: str) -> None:
        """Collective: the body raised on this rank alone, perhaps; the others wait for it, or will at their next call.

        What came out of a call of ours is known to all; and of a backward that is under way the sums are not complete.

        Args:
            caller: the module whose frames are ``join()`` itself.
        """
        engine = self._engine()
        modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
        ours = __name__.partition(".")[0]
        is_known = any(name.partition(".")[0] == ours for name in modules if name != caller)
        if is_known or engine is None or (self._backward is not None and self._backward.is_open):
            return
        call = Call(engine.defaults, problem=error)
        with suppress(Exception):  # the error itself, or that all of them have raised it
            self.tell("step", call)
            engine.take(call)

    # -- on a rank that has run out --------------------------------------------------------------------------------

    def main_hook(self) -> None:
        """Does what the others announce."""
        engine = self._engine()
        assert engine is not None
        self._check_place(engine)
        if not _joinable(engine)._join_config.is_first_joinable and self._count(engine, 0) < _STEP:
            raise ShardoptError(
                "a rank still has batches and ran a forward without a step() after the one before: a rank that has run "
                "out cannot tell which of the two follows. Call step() after every backward in this context, or hand "
                "the module over to the optimizer and use `with optimizer.join():`, where gradients may be accumulated."
            )
        self.shadows = True
        try:
            announced = self._exchange(engine, None, {})
            _SHADOWS[announced.kind](self, engine, announced)
        finally:
            self.shadows = False

    def post_hook(self, is_last_joiner: bool) -> None:
        """All have run out: buffers of a DDP module are those of a rank that had the last batch."""
        if self._ddp is not None and self._ddp.modules_buffers and self._ddp.forward_sync_buffers:
            rank = self._ddp._find_common_rank(self._ranks.rank, is_last_joiner)
            self._ddp._sync_module_buffers(rank)
        self.leave()

    def _bind(self, engine: Engine, announced: Announced) -> None:
        engine.bind()

    def _forward(self, engine: Engine, announced: Announced) -> None:
        ddp = self._ddp
        assert ddp is not None
        ddp._check_and_sync_module_buffers()
        ddp.require_forward_param_sync = ddp._check_global_requires_backward_grad_sync(is_joined_rank=True)

    def _pass(self, engine: Engine, announced: Announced) -> None:
        gatherer = _gatherer(engine)
        assert gatherer is not None
        gatherer.begin_pass(Direction(announced.kind.rpartition(" ")[2]))
        gatherer.end_pass()

    def _gather(self, engine: Engine, announced: Announced) -> None:
        gatherer = _gatherer(engine)
        assert gatherer is not None
        gatherer.join(gatherer.units[announced.facts["unit"]])

    def _round(self, engine: Engine, announced: Announced) -> None:
        assert self._backward is not None
        _follow_edits(self._backward, announced.facts["edits"])
        self._backward.run_round_of_zeros(announced.facts["held"], self._divisor(announced))

    def _step(self, engine: Engine, announced: Announced) -> None:
        facts = announced.facts
        follow_numbers(engine.groups, facts["numbers"])
        if self._backward is not None:
            _follow_edits(self._backward, facts["edits"])
            for param, dtype in zip(engine.params, facts["gradients"], strict=True):
                if dtype is None:
                    param.grad = None
        else:
            self._send_gradients(engine, announced)
        gatherer = _gatherer(engine)
        if gatherer is not None:
            gatherer.orders.copy_from(*facts["orders"])
        scale, overflow = facts["scaling"]
        engine.take(Call(engine.defaults, facts["closure"], scale=scale, overflow=overflow))

    def _send_gradients(self, engine: Engine, announced: Announced) -> None:
        """Collective: from the first rank that has a batch to those that have none. They are alike on all that have."""
        for param, dtype in zip(engine.params, announced.facts["gradients"], strict=True):
            if dtype is None or dtype == _SPARSE:  # which a step refuses
                grad = None
            elif self._ranks.rank == announced.first:
                grad = param.grad
            else:
                grad = torch.empty_like(param, dtype=getattr(torch, dtype), requires_grad=False)
            if grad is not None:
                self._ranks.broadcast([grad], _PHASE, root=announced.first)
            if self.shadows:
                param.grad = grad


def _joinable(engine: Engine) -> Joinable:
    """The optimizer, as torch's ``Join`` sees it."""
    return cast(Joinable, engine.owner)


def _gatherer(engine: Engine) -> Gatherer | None:
    """Of stage 3, once params are bound."""
    sharded = None if engine.domain is None else engine.domain.sharded
    return None if sharded is None else sharded.gatherer


_SHADOWS = {
    "bind": Shadow._bind,
    "forward": Shadow._forward,
    "gathers for forward": Shadow._pass,
    "gathers for evaluation": Shadow._pass,
    "gather": Shadow._gather,
    "round": Shadow._round,
    "step": Shadow._step,
}
_SPARSE = "sparse"


def _dtype_of(grad: torch.Tensor | None) -> str | None:
    if grad is None:
        return None
    return str(grad.dtype).removeprefix("torch.") if grad.layout is torch.strided else _SPARSE


def edits_of(backward: Backward) -> dict[str, Any]:
    """What was done to reduced gradients in place, each rank to its own slice, since this was asked last."""
    edits: dict[str, list[Any]] = {}
    written = None
    for number, entry in enumerate(backward.entries):
        slot = entry.gradient_slice
        if slot is None or not slot.shows_in(entry.grad):
            continue
        if slot.edits:
            edits[str(number)], slot.edits = slot.edits, []
        if slot.was_written:
            written = (
                f"the gradient of {entry.name} was written to through .local or a view of it, which they could not "
                "repeat. Scale and clamp gradients as a whole (clip_grad_norm_, clip_grad_value_, mul_)."
            )
    return {"edits": edits, "written": written}


def _follow_edits(backward: Backward, edits: Mapping[str, Sequence[Sequence[Any]]]) -> None:
    for number, entry in enumerate(backward.entries):
        slot, grad = entry.gradient_slice, cast(Any, entry.param.grad)
        if slot is None or not slot.shows_in(grad):  # which the ranks will find out together
            continue
        for name, *arguments in edits.get(str(number), ()):
            getattr(grad, name)(*arguments)
        slot.edits = []


def follow_numbers(groups: Sequence[dict[str, Any]], numbers: Sequence[Mapping[str, Any]]) -> None:
    """Hyper-parameters of param groups become those of a rank that goes on, whose scheduler may have moved them."""
    for group, theirs in zip(groups, numbers, strict=True):
        own = plain_numbers(group)
        for key, value in theirs.items():
            if key not in own or own[key] == value:
                continue
            if isinstance(group[key], torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = tuple(value) if isinstance(group[key], tuple) else value


def check_can_join(engine: Engine) -> None:
    """Raises ShardoptError where a rank that has run out could not follow."""
    options, takeover, why = engine.options, engine.takeover, None
    if options.release_gradients:
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
            "Omit join()"
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
