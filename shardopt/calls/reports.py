"""What an optimizer tells of itself: units, schedule, program, seconds, bytes, and a line for ``repr``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..domain.dtensors import local_gradient
from ..domain.memory import memory_in_words, memory_of
from ..domain.tiers import tier_of
from ..domain.timings import Timings
from ..option import given_in_words
from ..tensors.inner_tensors import kept_beside
from ..units.schedule import Schedule
from ..units.unit_view import Units, UnitView

if TYPE_CHECKING:
    from ..domain.memory import Memory
    from ..engine import Engine


def units(engine: Engine) -> Units:
    """See :meth:`ShardedOptimizer.units`."""
    with engine.turn.take("units"):
        sharded = [domain.sharded for domain in engine.domains if domain.sharded is not None]
        units = [(each.gatherer, unit) for each in sharded for unit in each.units]
        units.sort(key=lambda found: found[1].number)  # in the model's order; buckets are made from its end
        return Units({unit.name: UnitView(gatherer, unit, engine.turn.take) for gatherer, unit in units})


def schedule(engine: Engine) -> Schedule:
    """See :meth:`ShardedOptimizer.schedule`."""
    with engine.turn.take("schedule()"):
        sharded = None if engine.domain is None else engine.domain.sharded
        return Schedule() if sharded is None else sharded.gatherer.orders.schedule


def timings(engine: Engine) -> Timings:
    """See :meth:`ShardedOptimizer.timings`."""
    with engine.turn.take("timings()"):
        return Timings.of_all([domain.timings() for domain in engine.domains])


def program(engine: Engine) -> str:
    """See :meth:`ShardedOptimizer.program`."""
    with engine.turn.take("program()"):
        return "\n\n".join(str(each.program) for each in engine.plans.values())


def memory(engine: Engine) -> Memory:
    """See :meth:`ShardedOptimizer.memory`."""
    with engine.turn.take("memory()"):
        return _memory(engine)


def _memory(engine: Engine) -> Memory:
    grouped = engine.params
    others = [] if engine.takeover is None else list(engine.takeover.module.parameters())
    params: dict[Any, None] = dict.fromkeys(map(engine.local_params.of, [*grouped, *others]))
    if engine.takeover is not None:
        params.update(
            (tensor, None) for each in engine.takeover.module.modules() for tensor in kept_beside(each).values()
        )
    grads = [local_gradient(param) for param in dict.fromkeys([*grouped, *others])]
    offload = engine.options.offload_options
    return memory_of(engine.domains, params, grads, offload, tier_of(offload if engine.away is None else engine.away))


def describe(engine: Engine) -> str:
    """Returns for ``repr`` the options that differ from the defaults, and the memory on this rank."""
    words = ", ".join([f"stage={engine.options.stage}", *given_in_words(engine.options, besides=("module", "stage"))])
    bound = [domain for domain in engine.domains if domain.shards]
    for domain in bound:
        words += f", ranks={domain.mesh.world.size}, buckets={len(domain.shards)}, transport={domain.transport.name}"
        laid = domain.matrix_stats(engine.groups)
        words += f", matrices whole on one rank: {laid}" if laid.matrices else ""
    if engine.is_closed:
        return f"{words}, closed"
    if engine.turn.call is not None:  # what is shown to a log or a debugger raises nothing, and waits for nobody
        return f"{words}, in the middle of {engine.turn.call}"
    if not bound:
        when = "step" if engine.takeover is None else "forward"
        return f"{words}, not bound: masters and states are allocated at the first {when}"
    return f"{words})\nOn this rank ({memory_in_words(memory(engine))}"
