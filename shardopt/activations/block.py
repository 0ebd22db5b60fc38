"""What one ``with`` keeps: decides for each tensor that autograd saves, and keeps the same tensor once."""

import weakref
from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..domain.dtensors import Spec
from .channel import Act, Channel
from .checksum import Sums, checksum
from .decisions import Decisions
from .geometry import Geometry
from .kept import Kept, Name, Sharded, Whole
from .plain import is_param, plain_of


@dataclass(frozen=True)
class Policy:
    """What the user said."""

    keep_below: int  # elements
    check: bool
    offload: bool

    @property
    def digest(self) -> int:
        """Of what ranks must agree in."""
        return self.keep_below * 2 + self.check


class Entry(NamedTuple):
    """A tensor that was saved in this ``with``."""

    position: int
    is_same: bool
    kept: "weakref.ref[Kept]"  # lives as long as a graph holds it


class Block:
    """The tensors that autograd saves in one ``with``, and in those of the same place within it."""

    def __init__(self, channel: Channel, decisions: Decisions, policy: Policy):
        self._channel, self._decisions, self._policy = channel, decisions, policy
        self._entries: dict[Hashable, Entry] = {}
        self._sums = Sums()

    def pack(self, tensor: torch.Tensor) -> Kept:
        """Returns what autograd holds in the tensor's place. Collective where ranks must compare it first.

        Raises:
            DisagreementError: the ranks save different tensors.
            BindingError: the group cannot carry it.
            CommunicationError: a rank died, or does not run this forward.
        """
        # What is saved while backward runs (a recomputation) is used at once.
        if torch._C._current_graph_task_id() != -1 or is_param(tensor):
            return Whole(tensor)
        plain = plain_of(tensor)
        geometry = None if plain is None else Geometry.of(plain[0])
        if plain is None or geometry is None or not self._channel.check_carries(geometry.device):
            return self._counted(Whole(tensor, tensor.nbytes if tensor.layout == torch.strided else 0))
        key = _key_of(*plain)
        entry = self._entries.get(key)
        kept = None if entry is None else entry.kept()
        if kept is None:
            with torch.no_grad():
                position = len(self._entries) if entry is None else entry.position
                known = None if entry is None else entry.is_same
                kept, is_same = self._keep(tensor, *plain, geometry, position, known)
            self._entries[key] = Entry(position, is_same, weakref.ref(self._counted(kept)))
        return kept

    def _counted(self, kept: Kept) -> Kept:
        self._decisions.kept.add(kept)
        return kept

    def _keep(
        self,
        tensor: torch.Tensor,
        plain: torch.Tensor,
        spec: Spec | None,
        geometry: Geometry,
        position: int,
        is_same: bool | None,
    ) -> tuple[Kept, bool]:
        """Returns what is kept, and whether it is one tensor on all ranks.

        Args:
            plain: the tensor, or the one behind it; ``spec`` is then the DTensor's.
            is_same: what was found of it in this ``with``. It is not compared twice: it was dropped meanwhile, which
                the garbage collector of another rank need not have done yet.
        """
        kind = geometry.dtype, geometry.shape
        if self._channel.ranks.size == 1:
            is_same = self._policy.offload and geometry.device.type != "cpu"
        elif is_same is None and not self._policy.check:
            is_same = self._decisions.find(position, kind)
        if is_same is False:
            return Whole(tensor, geometry.nbytes), False
        values = geometry.bytes_of(plain)
        name = self._named(position, values, geometry)
        if is_same is None:
            is_same = self._compare(name, geometry)
            self._decisions.decide(position, kind, is_same)
        if not is_same:
            return Whole(tensor, geometry.nbytes), False
        return self._sharded(name, values, geometry, spec), True

    def _named(self, position: int, values: torch.Tensor, geometry: Geometry) -> Name:
        index = self._sums.add(0 if self._channel.ranks.size == 1 else checksum(values, geometry.dtype.itemsize))
        return Name(position, self._policy.digest, self._sums, index)

    def _compare(self, name: Name, geometry: Geometry) -> bool:
        rows = self._channel.meet(name.row(Act.COMPARE, geometry))
        is_large = geometry.nbytes > 0 and geometry.numel >= self._policy.keep_below
        return is_large and len({row.content for row in rows}) == 1

    def _sharded(self, name: Name, values: torch.Tensor, geometry: Geometry, spec: Spec | None) -> Sharded:
        shard = self._channel.shard_of(values)
        if self._policy.offload and shard.device.type != "cpu":
            # torch's allocator of pinned memory knows of the copies, and takes nothing back before they are done.
            pinned = torch.empty(shard.shape, dtype=shard.dtype, pin_memory=True)
            shard = pinned.copy_(shard, non_blocking=True)
        differed = partial(self._decisions.stays_whole, name.position)
        return Sharded(self._channel, name, geometry, spec, shard, differed)


def _key_of(plain: torch.Tensor, spec: Spec | None) -> Hashable:
    """What two tensors have in common if they are the same memory with the same values.

    The weak reference keeps the storage's place, not its memory, from being taken by another storage.
    """
    where = plain.storage_offset(), tuple(plain.shape), plain.stride(), plain.dtype
    return StorageWeakRef(plain.untyped_storage()), *where, plain._version, spec
