"""Shadows the collective calls of ranks that have a batch on ranks that have run out of batches.

torch's :class:`~torch.distributed.algorithms.join.Join` asks in a loop whether a rank still trains. A rank that trains
announces each call that needs all ranks, and a rank that has run out makes the same call::

    rank 0 (trains)          | round  |  step  | round  |  step  |
    rank 1 (has run out)     | zeros  | update | zeros  | update |      its own shard, with the others' gradients

A round is one reduction of gradients; binding and a forward that shares buffers (of a DDP module, any) are announced
too. If the module was not handed over, DDP reduces the gradients and shadows its reductions itself. The sums that it
makes on a rank that has run out reach no param, so one of the other ranks sends its gradients before the step.

At stage 3 over shared memory, the other ranks read the slices of a rank that has run out, which does nothing for it.
Where params travel, a forward is announced: the rank joins all its gathers in the order of the schedule, as it joins
those of a backward in the round. A gather of an evaluation, or outside of any forward, is announced singly. A use that
the schedule of a forward or backward lacks is an error: the rank receives no announcement until the pass ends.
"""

from __future__ import annotations

import functools
import traceback
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook, _JoinConfig
from torch.nn.parallel import DistributedDataParallel

from ..domain.hyperparameters import plain_numbers
from ..errors import ShardoptError
from ..module.ddp import syncs_buffers
from ..module.hooks import call_while_alive
from ..partition.comm.tags import GatherKind
from ..step.step import Call
from ..units.unit import UnitState
from ..units.unit_orders import Direction
from .announcement import SPARSE, Announcement, dtype_of, edits_of, follow_edits, follow_numbers

if TYPE_CHECKING:
    from ..engine import Engine
    from ..module.rounds import Rounds
    from ..module.takeover import ModuleTakeover
    from ..partition.comm.group import Ranks
    from ..units.gatherer import Gatherer
    from ..units.unit import Unit

_OFF = _JoinConfig.construct_disabled_join_config()
_PHASE = "telling ranks that have run out of batches"
# One rank adds this to the sum by which another joinable (DDP) counts the ranks that go on; no count is as large.
_STEP = 1 << 16


class Shadow(JoinHook):
    """Announces and shadows the calls of one optimizer, within one context."""

    def __init__(self, engine: Engine, by_all: bool, number: int):
        """
        Args:
            by_all: True if the mean is over all ranks; False: over those that had a batch.
            number: of this joinable in its ``Join``; the same on all ranks.
        """
        self._engine, self._by_all, self._number = weakref.ref(engine), by_all, number
        self.shadows = False  # True while this rank makes a call that another rank announced
        self._ranks: Ranks = engine.ensure_domains().main.mesh.world
        self._is_complete = True  # True if no rank had run out at the last announcement
        self._rounds: Rounds | None = None
        self._ddp: DistributedDataParallel | None = None
        self._ddp_hook: Any = None
        if engine.takeover is not None:
            self._put_hooks(engine.takeover)

    def _put_hooks(self, takeover: ModuleTakeover) -> None:
        """Lets the module that was taken over announce its rounds, gathers and forwards."""
        assert takeover.rounds is not None
        self._rounds = rounds = takeover.rounds
        rounds.announcer = self  # until leave()
        takeover.retire_reducer()
        self._ddp = next((each.ddp for each in takeover.called if each.module is takeover.module), None)
        if self._ddp is not None:
            before_forward = call_while_alive(Shadow.before_forward, self, self._ddp)
            self._ddp_hook = self._ddp.register_forward_pre_hook(before_forward, prepend=True)

    def before_round(self, held: list[int]) -> int | None:
        """See :class:`shardopt.module.rounds.Announcer`."""
        rounds = self._rounds
        assert rounds is not None
        with rounds.closure.raising_together():
            announced = self.announce(
                "round", lambda: {"held": held, "weighted": rounds.weights.is_on, **edits_of(rounds.main)}
            )
        return None if announced is None else self._divisor(announced)

    def before_gathers(self, gathers: Direction | Unit) -> None:
        """Collective where params travel: announces gathers."""
        assert self._rounds is not None
        with self._rounds.closure.raising_together():
            self.announce_gathers(gathers)

    def before_buffers(self, called: str) -> None:
        """Collective: announces a forward that takes buffers, of the called module of this name."""
        assert self._rounds is not None
        with self._rounds.closure.raising_together():
            self.announce("forward", lambda: {"called": called})

    def before_forward(self, ddp: DistributedDataParallel, *_: Any) -> None:
        """Collective: announces a forward of DDP, which takes buffers from a rank that has a batch, not from rank 0."""
        assert self._rounds is not None
        with self._rounds.closure.raising_together():
            is_on = self.announce("forward") is not None
        ddp._join_config = _JoinConfig(is_on, throw_on_early_termination=False, is_first_joinable=False)

    def leave(self) -> None:
        """Ends the context: removes all hooks."""
        engine = self._engine()
        if engine is not None and engine.joining == self.announce_call:
            engine.joining, _joinable(engine)._join_config = None, _OFF
            if engine.takeover is not None:
                engine.takeover.source = 0
        if self._rounds is not None:
            self._rounds.announcer = None
        if self._ddp is not None:
            self._ddp_hook.remove()
            self._ddp._join_config = _OFF

    # -- on a rank that has a batch --------------------------------------------------------------------------------

    def announce_call(self, kind: str, call: Call | None) -> None:
        """Collective: announces that this rank binds or steps."""
        self.announce(kind, dict if call is None else functools.partial(self.step_facts, call))

    def announce(self, kind: str, facts: Callable[[], dict[str, Any]] = dict) -> Announcement | None:
        """Collective: announces a call that all ranks will make. Returns None if no context is open.

        Raises:
            DisagreementError: the ranks cannot make the call together; on every rank.
            RuntimeError: a rank has run out, and the context should end with the first one that does.
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
        except Exception as error:  # sent to the others, which wait for this rank
            row = {"problem": f"{type(error).__name__}: {error}"}
        announced = self._exchange(engine, kind, row)
        if kind == "step" and self._rounds is None and not announced.is_complete:
            self._send_gradients(engine, announced)
        return announced

    def announce_gathers(self, gathers: Direction | Unit) -> None:
        """Collective where params travel: announces a forward, or a unit that is gathered outside of the schedule."""
        engine = self._engine()
        gatherer = None if engine is None else _gatherer(engine)
        if gatherer is None or not gatherer.waits_for_others or gatherer.here.unsharded_contexts or self.shadows:
            return
        assert self._rounds is not None
        if isinstance(gathers, Direction):
            facts = {}
            if gathers is Direction.BACKWARD:
                self._rounds.open_round_early()  # which announces a round
                if self._rounds.is_open:
                    return
                facts["written"] = "torch.autograd.grad() gathers params, which they could not join. Use backward()."
            self.announce(f"gathers for {gathers.value}", lambda: facts)
            return
        if gatherer.passes.direction in (Direction.FORWARD, Direction.BACKWARD):
            if self._is_complete:
                return
            why = (
                f"{gathers.name or 'the model itself'} is used in another order than the ranks expect. Take a first "
                "step in which all ranks have a batch, and keep its order."
            )
            if self._rounds.is_open:  # the others wait for gathers, and receive no announcement until these time out
                raise ShardoptError(f"this rank cannot go on beside ranks that have run out: {why}")
            gatherer.passes.end()  # the others receive announcements once they have joined all gathers of the forward
            gatherer.orders.refuse()
            self.announce("gather", lambda: {"problem": why})
        elif gathers.state is UnitState.SHARDED and (gatherer.passes.direction is None or not self._is_complete):
            self.announce("gather", lambda: {"unit": gathers.name, "for": gatherer.passes.kind.value})

    def _check_place(self, engine: Engine) -> None:
        if self._rounds is not None and not _joinable(engine)._join_config.is_first_joinable:
            raise ShardoptError(
                "use `with optimizer.join():` or Join([optimizer]), with one optimizer for the module: Join was given "
                "others ahead of this optimizer, which took the module over, and a rank that has run out of batches "
                "would follow them first."
            )

    def _count(self, engine: Engine, number: int) -> float:
        total = torch.full((1,), float(number), device=engine.device)
        dist.all_reduce(total, group=self._ranks.group)
        return total.item()

    def _exchange(self, engine: Engine, kind: str | None, facts: Mapping[str, Any]) -> Announcement:
        setup = {
            "divide_by_initial_world_size": self._by_all,
            "DistributedDataParallel": self._ddp is not None,
            "number of the optimizer": self._number,
            "params": [len(group["params"]) for group in engine.groups],
        }
        gatherer = _gatherer(engine)
        gathered = [] if gatherer is None or not gatherer.waits_for_others else gatherer.gathered
        row = {"kind": kind, "setup": setup, "gathered": gathered, **facts}
        announced = Announcement(self._ranks.exchange_json(row, _PHASE))
        self._is_complete = announced.is_complete
        if engine.takeover is not None:
            engine.takeover.source = announced.active[-1]  # as DDP has it
        return announced

    def _divisor(self, announced: Announcement) -> int:
        return announced.size if self._by_all else len(announced.active)

    def step_facts(self, call: Call) -> dict[str, Any]:
        """Returns what a rank that has run out needs to take this step."""
        engine = self._engine()
        assert engine is not None
        gatherer = _gatherer(engine)
        return {
            "orders": [[], False] if gatherer is None else gatherer.orders.told,
            "closure": call.closure,
            "failed": None if call.problem is None else f"{type(call.problem).__name__}: {call.problem}",
            "scaling": [call.scale, call.overflow],
            "numbers": [plain_numbers(group) for group in engine.groups],
            "gradients": [dtype_of(param.grad) for param in engine.params],
            **(edits_of(self._rounds.main) if self._rounds is not None else {}),
        }

    def announce_error(self, error: Exception, caller: str) -> None:
        """Collective: announces an error of the body, which the other ranks may not have; they wait for this rank.

        All ranks know an error from a call of shardopt. After an error in a backward, sums are incomplete, so nothing
        is announced.

        Args:
            caller: the module whose frames are ``join()`` itself.
        """
        engine = self._engine()
        modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
        ours = __name__.partition(".")[0]
        is_known = any(name.partition(".")[0] == ours for name in modules if name != caller)
        if is_known or engine is None or (self._rounds is not None and self._rounds.is_open):
            return
        call = Call(engine.defaults, problem=error)
        with suppress(Exception):  # the error itself, or that all of them have raised it
            self.announce_call("step", call)
            engine.take(call)

    # -- on a rank that has run out --------------------------------------------------------------------------------

    def main_hook(self) -> None:
        """Makes the call that the others announce."""
        engine = self._engine()
        assert engine is not None
        self._check_place(engine)
        if not _joinable(engine)._join_config.is_first_joinable and self._count(engine, 0) < _STEP:
            raise ShardoptError(
                "call step() after every backward in this context, or hand the module over to the optimizer and use "
                "`with optimizer.join():`, where gradients may be accumulated: a rank with batches ran two forwards "
                "without a step() between them, and a rank that has run out cannot know which call follows."
            )
        self.shadows = True
        try:
            announced = self._exchange(engine, None, {})
            _SHADOWS[announced.kind](self, engine, announced)
        finally:
            self.shadows = False

    def post_hook(self, is_last_joiner: bool) -> None:
        """Ends the context when all ranks have run out: all buffers become those of a rank with the last batch."""
        engine = self._engine()
        if engine is not None and engine.takeover is not None:
            engine.takeover.share_buffers()
        if self._ddp is not None and syncs_buffers(self._ddp):
            rank = self._ddp._find_common_rank(self._ranks.rank, is_last_joiner)
            self._ddp._sync_module_buffers(rank)
        self.leave()

    def _bind(self, engine: Engine, announced: Announcement) -> None:
        engine.bind()

    def _forward(self, engine: Engine, announced: Announcement) -> None:
        ddp = self._ddp
        if ddp is None:
            assert engine.takeover is not None
            engine.takeover.share_buffers(announced.facts["called"])
            return
        ddp._check_and_sync_module_buffers()
        ddp.require_forward_param_sync = ddp._check_global_requires_backward_grad_sync(is_joined_rank=True)

    def _pass(self, engine: Engine, announced: Announcement) -> None:
        gatherer = _gatherer(engine)
        assert gatherer is not None
        gatherer.passes.begin(Direction(announced.kind.rpartition(" ")[2]))
        gatherer.passes.end()

    def _gather(self, engine: Engine, announced: Announcement) -> None:
        gatherer = _gatherer(engine)
        assert gatherer is not None
        gatherer.join(gatherer.units[announced.facts["unit"]], GatherKind(announced.facts["for"]))

    def _round(self, engine: Engine, announced: Announcement) -> None:
        assert self._rounds is not None
        follow_edits(self._rounds.main, announced.facts["edits"])
        self._rounds.run_round_of_zeros(announced.facts["held"], self._divisor(announced), announced.facts["weighted"])

    def _step(self, engine: Engine, announced: Announcement) -> None:
        facts = announced.facts
        follow_numbers(engine.groups, facts["numbers"])
        if self._rounds is not None:
            follow_edits(self._rounds.main, facts["edits"])
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

    def _send_gradients(self, engine: Engine, announced: Announcement) -> None:
        """Collective: sends reduced gradients from the first rank that has a batch to the ranks that have none."""
        for param, dtype in zip(engine.params, announced.facts["gradients"], strict=True):
            if dtype is None or dtype == SPARSE:  # which a step refuses
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
    """Returns the optimizer, which is what torch's ``Join`` takes."""
    return cast(Joinable, engine.owner)


def _gatherer(engine: Engine) -> Gatherer | None:
    """Returns the gatherer of stage 3, once params are bound."""
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
