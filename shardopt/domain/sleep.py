"""Params that sleep: this rank's slices lie in host memory or a file, and nothing of them on the device.

Between two steps of reinforcement learning an inference engine needs the device. Masters, states and averages are moved
by :mod:`.relocate`; slices of params at stage 3 go here::

    awake     shard.param: memory on the device         gathers read it, updates write it
    asleep    shard.param: the same elements elsewhere   state dicts, weights() and checkpoints read it; no gather does

Neighbours read slices by their address, so those of params on CPUs stay where any rank could. Pinned memory is kept for
the next sleep: to pin it takes longer than to fill it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ..errors import OffloadError, StateError
from ..partition.memory import zeros
from ..units.unit import ParamShard
from .agreement import agreed

if TYPE_CHECKING:
    from ..config import Offload
    from .domain import Domain
    from .shard import Shard
    from .sharded_params import ShardedParams


class _Bed:
    """The place of one shard's slice while it sleeps."""

    def __init__(self, shard: Shard, elsewhere: torch.Tensor):
        assert shard.param is not None
        elsewhere.copy_(shard.param, non_blocking=True)
        self._shard, self._elsewhere = shard, elsewhere
        self._memory: torch.Tensor | None = None  # from waking up on

    def lie_down(self) -> None:
        """Frees the memory on the device. Cannot fail."""
        self._use(self._elsewhere, ParamShard(self._elsewhere, _refuse, _refuse))

    def make_room(self) -> None:
        """Allocates memory on the device, and fills it."""
        self._memory = zeros(self._elsewhere.numel(), self._elsewhere.dtype, self._shard.device)
        self._memory.copy_(self._elsewhere, non_blocking=True)

    def get_up(self) -> None:
        """Uses the memory on the device from now on. Cannot fail."""
        memory, self._memory = self._memory, None
        assert memory is not None
        self._use(memory, ParamShard(memory, lambda into: into.copy_(memory), memory.copy_))

    def _use(self, param: torch.Tensor, own: ParamShard) -> None:
        assert self._shard.gathered is not None
        self._shard.param, self._shard.gathered.param_shard = param, own


def _refuse(_: torch.Tensor) -> NoReturn:
    raise StateError(
        "call optimizer.reload(), or reload(states=False) for params alone, on every rank: params were offloaded by "
        "offload(params=True), and a forward, unsharded() or a write to them needs their slices on the device."
    )


def put_to_sleep(domain: Domain, to: Offload) -> Callable[[], None]:
    """Collective: frees what is gathered, and copies slices of params to where they will sleep.

    Returns the call that ends it and frees them, once all else has been moved.

    Raises:
        OffloadError: a rank has no room; nothing changed on any of them.
    """
    sharded = domain.sharded
    if sharded is None or sharded.is_asleep:
        return lambda: None
    beds: list[_Bed] = []
    with agreed({"offload(params=)": True}, domain.mesh.world):
        sharded.gatherer.drop_all()
        for shard in _moving(domain, sharded, to):
            beds.append(_Bed(shard, _elsewhere(sharded, shard, to)))
        _wait(domain.device)

    def end() -> None:
        for each in beds:
            each.lie_down()
        for shard in (*domain.shards, *domain.frozen_shards):
            if shard.gathered is not None and shard.gathered.secondary is not None:
                shard.gathered.secondary.free()
        sharded.asleep = beds
        sharded.sleeps_in = "host" if to.directory is None else "disk"

    return end


def wake(domain: Domain) -> None:
    """Collective: brings slices of params back.

    Raises:
        OffloadError: a rank has no room; all of them sleep on.
    """
    sharded = domain.sharded
    if sharded is None or not sharded.is_asleep:
        return
    beds: Sequence[Any] = sharded.asleep
    with agreed({"reload() of params": True}, domain.mesh.world):
        for each in beds:
            each.make_room()
        _wait(domain.device)
    for each in beds:
        each.get_up()
    sharded.asleep = []


def _moving(domain: Domain, sharded: ShardedParams, to: Offload) -> list[Shard]:
    if domain.device.type == "cpu" and (to.directory is None or not sharded.gathers_by_messages):
        return []
    shards = (*domain.shards, *domain.frozen_shards)
    return [each for each in shards if each.gathered is not None and each.param is not None]


def _elsewhere(sharded: ShardedParams, shard: Shard, to: Offload) -> torch.Tensor:
    if to.directory is not None:
        return _in_a_file(to.directory, shard)
    if shard not in sharded.beds:
        sharded.beds[shard] = torch.empty(shard.numel, dtype=shard.dtype, pin_memory=to.pin_memory)
    return sharded.beds[shard]


def _in_a_file(directory: Path, shard: Shard) -> torch.Tensor:
    """Returns a tensor that a file without a name holds: the system removes it with the last reference."""
    made = directory / f"params-{secrets.token_hex(8)}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        found = torch.from_file(str(made), shared=True, size=shard.numel, dtype=shard.dtype)
        made.unlink()
    except (OSError, RuntimeError) as error:
        with suppress(OSError):
            made.unlink(missing_ok=True)
        raise OffloadError(
            f"give a directory with room for {shard.numel * shard.dtype.itemsize} bytes, which this rank may "
            f"write: no file for params could be made in {directory} ({error}). Nothing was moved."
        ) from error
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
