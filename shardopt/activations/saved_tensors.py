"""What one ``with`` keeps: decides for each tensor that autograd saves, and keeps the same tensor once."""

import weakref
from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..offload.checksum import checksum
from .channel import Act, Channel
from .checksums import Checksums
from .decisions import Decisions
from .packed import Fingerprint, PackedActivation, PartitionedActivation, WholeActivation
from .plain import is_param, plain_of
from .tensor_meta import TensorMeta


@dataclass(frozen=True)
class Policy:
    """The arguments of ``partition_activations()``."""

    keep_below: int  # elements
    check: bool
    offload: bool

    @property
    def digest(self) -> int:
        """The digest of the options in which ranks must agree."""
        return self.keep_below * 2 + self.check


class PackedRef(NamedTuple):
    """A tensor that was saved in this ``with``, as long as a graph holds it."""

    position: int
    is_same: bool
    packed: "weakref.ref[PackedActivation]"


class SavedTensors:
    """The tensors that autograd saves in one ``with``, and in those of the same place within it."""

    def __init__(self, channel: Channel, decisions: Decisions, policy: Policy):
        self._channel, self._decisions, self._policy = channel, decisions, policy
        self._saved: dict[Hashable, PackedRef] = {}
        self._sums = Checksums()

    def pack(self, tensor: torch.Tensor) -> PackedActivation:
        """Returns what autograd holds in the tensor's place. Collective where ranks must compare it first.

        Raises:
            DisagreementError: the ranks save different tensors.
            BindingError: the group cannot carry it.
            CommunicationError: a rank died, or does not run this forward.
        """
        # A tensor that is saved while backward runs (a recomputation) is used at once.
        if torch._C._current_graph_task_id() != -1 or is_param(tensor):
            return WholeActivation(tensor)
        plain, spec = plain_of(tensor)
        meta = None if plain is None else TensorMeta.of(plain, spec)
        if plain is None or meta is None or not self._channel.check_carries(meta.device):
            return self._counted(WholeActivation(tensor, tensor.nbytes if tensor.layout == torch.strided else 0))
        key = _key_of(plain, meta)
        saved = self._saved.get(key)
        packed = None if saved is None else saved.packed()
        if packed is None:
            with torch.no_grad():
                position = len(self._saved) if saved is None else saved.position
                packed, is_same = self._pack(tensor, plain, meta, position, None if saved is None else saved.is_same)
            self._saved[key] = PackedRef(position, is_same, weakref.ref(self._counted(packed)))
        return packed

    def _counted(self, packed: PackedActivation) -> PackedActivation:
        self._decisions.packed.add(packed)
        return packed

    def _pack(
        self, tensor: torch.Tensor, plain: torch.Tensor, meta: TensorMeta, position: int, is_same: bool | None
    ) -> tuple[PackedActivation, bool]:
        """Returns what is kept, and whether it is one tensor on all ranks.

        Args:
            plain: the tensor, or the local tensor of the DTensor that it is.
            is_same: what was found of it in this ``with``. It is not compared twice: it was dropped meanwhile, which
                the garbage collector of another rank need not have done yet.
        """
        kind = meta.dtype, meta.shape
        if self._channel.ranks.size == 1:
            is_same = self._policy.offload and meta.device.type != "cpu"
        elif is_same is None and not self._policy.check:
            is_same = self._decisions.find(position, kind)
        if is_same is False:
            return WholeActivation(tensor, meta.nbytes), False
        values = meta.bytes_of(plain)
        fingerprint = self._fingerprint(position, values, meta)
        if is_same is None:
            is_same = self._compare(fingerprint)
            self._decisions.decide(position, kind, is_same)
        if not is_same:
            return WholeActivation(tensor, meta.nbytes), False
        return self._partitioned(fingerprint, values), True

    def _fingerprint(self, position: int, values: torch.Tensor, meta: TensorMeta) -> Fingerprint:
        found = 0 if self._channel.ranks.size == 1 else checksum(values, meta.dtype.itemsize)
        return Fingerprint(position, meta, self._policy.digest, self._sums.add(found))

    def _compare(self, fingerprint: Fingerprint) -> bool:
        rows = self._channel.exchange_rows(fingerprint.row(Act.COMPARE))
        meta = fingerprint.meta
        is_large = meta.nbytes > 0 and meta.numel >= self._policy.keep_below
        return is_large and len({row.content for row in rows}) == 1

    def _partitioned(self, fingerprint: Fingerprint, values: torch.Tensor) -> PartitionedActivation:
        shard = self._channel.shard_of(values)
        if self._policy.offload and shard.device.type != "cpu":
            # torch's allocator of pinned memory knows of the copies, and takes nothing back before they are done.
            pinned = torch.empty(shard.shape, dtype=shard.dtype, pin_memory=True)
            shard = pinned.copy_(shard, non_blocking=True)
        on_difference = partial(self._decisions.stays_whole, fingerprint.position)
        return PartitionedActivation(self._channel, fingerprint, shard, on_difference)


def _key_of(plain: torch.Tensor, meta: TensorMeta) -> Hashable:
    """Returns what two tensors have in common if they are the same memory with the same values.

    The weak reference keeps the storage's place, not its memory, from being taken by another storage.
    """
    where = plain.storage_offset(), meta.shape, meta.stride, meta.dtype
    return StorageWeakRef(plain.untyped_storage()), *where, plain._version, meta.spec
