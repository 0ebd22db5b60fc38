"""Moves of masters and states to another tier and back, and of the params that sleep with them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from ..arguments import flag
from ..config import Offload
from ..domain.relocate import move_states
from ..domain.sleep import put_to_sleep, wake

if TYPE_CHECKING:
    from ..engine import Engine


def offload(engine: Engine, to: str | os.PathLike[str], params: object) -> None:
    """Collective: see :meth:`ShardedOptimizer.offload`."""
    sleeps = flag(params, "offload(params=)")
    if not isinstance(to, str | os.PathLike):
        raise TypeError(
            f"optimizer.offload() takes 'cpu' or a directory, where all masters and states go, found {to!r}. "
            "Other ways to offload are for the constructor: offload=Offload(...)."
        )
    _move(engine, "offload()", Offload(to), sleeps)


@torch.no_grad()
def reload(engine: Engine, states: object) -> None:
    """Collective: see :meth:`ShardedOptimizer.reload`."""
    is_all = flag(states, "reload(states=)")
    with engine.turn.take_together("reload()"):
        for domain in engine.domains:
            wake(domain)
        engine.plans.clear()  # plans have views of where params were
    if is_all:
        _move(engine, "reload()", None)


@torch.no_grad()
def _move(engine: Engine, call: str, to: Offload | None, sleeps: bool = False) -> None:
    with engine.turn.take_together(call):
        if to is None and engine.away is None:
            return
        engine.check_open()
        engine.end_stream(call)
        engine.finish_gathers()
        ends = [put_to_sleep(domain, to) for domain in engine.domains[:1] if sleeps and to is not None]
        if move_states(engine.domains, to):
            engine.away = to
        for end in ends:
            engine.plans.clear()  # plans keep views of params
            end()
