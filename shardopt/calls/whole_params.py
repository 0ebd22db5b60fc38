"""Reads of whole params: in place on all ranks or on one, and as a stream of weights."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ..arguments import flag, whole
from ..domain.agreement import agree_on_call
from ..domain.alone import read_alone
from ..domain.masters import take_sources
from ..domain.unsharded import unsharded as gathered
from ..engine import live_engines
from ..errors import StateError
from ..states.weights import weights_of
from ..tensors.unsharded_guard import ALONE

if TYPE_CHECKING:
    from ..engine import Engine
    from ..partition.comm.group import Ranks
    from ..states.merged_weights import Merge, MergedModule, MergedStream
    from ..states.weight_stream import WeightStream
    from ..states.weights import Weight


def unsharded(engine: Engine, ema: object, alone: object) -> AbstractContextManager[None]:
    """See :meth:`ShardedOptimizer.unsharded`."""
    if not flag(alone, "unsharded(alone=)"):
        return _unsharded(engine, ema)
    if ema:
        raise ValueError(
            "give unsharded(ema=True) on every rank, or alone=True for the weights: the average is not read alone."
        )
    return _alone(engine)


@contextmanager
def _unsharded(engine: Engine, ema: object) -> Iterator[None]:
    with engine.turn.take_together("unsharded()"):
        engine.finish_gathers()
        engine.bind_to_unshard()
        context = gathered(engine.domains, engine.rule, ema)
        context.__enter__()
        casts = None if engine.takeover is None else engine.takeover.casts
        if casts is not None:
            casts.rest()

    def leave(*error: Any) -> bool | None:
        with engine.turn.hold("the end of unsharded()"):
            if casts is None:
                return context.__exit__(*error)
            casts.compute()
            try:
                return context.__exit__(*error)
            finally:
                casts.rest()  # unless this was the outermost context

    with ExitStack() as stack:
        stack.push(leave)
        yield


@contextmanager
def _alone(engine: Engine) -> Iterator[None]:
    with engine.turn.take_between(ALONE):
        engine.check_open()
        engine.finish_gathers()
        is_running = engine.takeover is not None and engine.takeover.forward is not None
        if is_running and engine.takeover.forward.is_running:  # type: ignore[union-attr]
            raise StateError(f"enter {ALONE} between two forwards: it was entered in the middle of one.")
        context = read_alone(engine.domains)
        context.__enter__()
        engine.turn.alone = ALONE

    def leave(*error: Any) -> bool | None:
        engine.turn.alone = None
        with engine.turn.hold(f"the end of {ALONE}"):
            return context.__exit__(*error)

    with ExitStack() as stack:
        stack.push(leave)
        yield


@torch.no_grad()
def weights(
    engine: Engine, bucket_bytes: object, dtype: torch.dtype | None, names: object, merge: Merge | None = None
) -> WeightStream | MergedStream:
    """Collective: see :meth:`ShardedOptimizer.weights`."""
    from ..states.merged_weights import MergedStream
    from ..states.weight_stream import WeightStream

    with engine.turn.take_together("weights()"):
        engine.check_open()
        engine.end_stream("weights()")
        engine.finish_gathers()
        engine.bind_to_unshard()
        found: list[Weight] = []
        merged: list[MergedModule] = []

        def read() -> dict[str, Any]:
            own, modules = _weights(engine, dtype, names, merge)
            found.extend(own)
            merged.extend(modules)
            # Of experts each rank has others, by names that may say so.
            told = [[each.name if len(engine.domains) < 2 else "", *each.told] for each in found]
            return {"bucket_bytes": whole(bucket_bytes, "weights(bucket_bytes=)", least=1), "weights": told}

        mates: tuple[Ranks, ...]
        if engine.is_bound:
            mates = engine.ensure_domains().mates
            with engine.ensure_domains().raising_together("weights()"):
                given = agree_on_call("weights()", read, mates[0])
        else:
            mates = (engine.ranks(),)
            given = agree_on_call("weights()", read, mates[0])
        stream = WeightStream(found, given["bucket_bytes"], mates, engine.turn)
        engine.stream = weakref.ref(stream)
        return stream if merge is None else MergedStream(stream, merged, merge, dtype)


def weights_metadata(
    engine: Engine, dtype: torch.dtype | None, names: object, merge: Merge | None = None
) -> dict[str, torch.Tensor]:
    """See :meth:`ShardedOptimizer.weights_metadata`."""
    with engine.turn.take("weights_metadata()"):
        engine.check_open()
        own, merged = _weights(engine, dtype, names, merge)
        if not merged:
            return {each.name: each.meta() for each in own}
        from ..states.merged_weights import merged_metadata

        found = merged_metadata(own, merged)
        return {
            name: each.to(dtype) if dtype is not None and each.is_floating_point() else each
            for name, each in found.items()
        }


def _weights(
    engine: Engine, dtype: torch.dtype | None, names: object, merge: Merge | None
) -> tuple[list[Weight], list[MergedModule]]:
    module = None if engine.takeover is None else engine.takeover.module
    beside = [each for each in live_engines() if each.takeover is not None and each.takeover.module is module]
    domains = [domain for engine in beside for domain in engine.domains]
    for each in domains:
        take_sources(each)
    found = weights_of(module, engine.groups, domains, dtype, names)
    if merge is None:
        return found, []
    from ..states.merged_weights import merged_modules

    if not callable(merge) or names is not None or module is None:
        raise ValueError(
            "give weights(merge=) a function of a module and its weights, hand the module over, and omit names=: "
            f"found {merge!r:.80}, names={names!r:.80}. Weights of one module are merged, and go out by other names."
        )
    own = weights_of(module, engine.groups, domains, dtype, None, {each.name for each in found})
    merged = merged_modules(module, own, merge)
    taken = {name for each in merged for name in each.locals}  # these are merged in their own dtype
    return weights_of(module, engine.groups, domains, dtype, None, taken), merged
