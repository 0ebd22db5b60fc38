"""The params of the param groups with their records, looked up once for as long as the groups list the same params."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..errors import BindingError

if TYPE_CHECKING:
    from .hyperparameters import Group
    from .param import ParamRecord
    from .shard import Shard

_FLAT = attrgetter("flat")
_ATTRIBUTES = (torch.Tensor.size, torch.Tensor.stride, attrgetter("device"), attrgetter("dtype"))


class ListedParams:
    """The facts of the params that a step needs before their gradients. Valid until a param is bound or released.

    Attributes:
        params: the bound params in the order of the groups.
        entries: their records.
        groups: the index of each one's group.
        numbers: the index of each one, counted through all groups. The upper 32 bits number the slice of a DTensor.
        others: the params that are not bound.
        shards: (index of a group, shard that holds some of its params), each pair once.
        left: the numbers of the shards none of whose params is listed.
        attributes: sizes, strides, devices and dtypes of all bound params, when they were checked; None in place of the
            strides of a source.
        sources: the records of params to whose ``data`` a tensor was assigned that is not taken yet.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        entries: Mapping[torch.nn.Parameter, ParamRecord],
        slice_numbers: Mapping[torch.nn.Parameter, int],
        shards: Sequence[Shard],
    ):
        listed = [(param, index) for index, group in enumerate(groups) for param in group["params"]]
        self._ids = [list(map(id, group["params"])) for group in groups]  # of params that are kept alive here
        # Tensor-parallel ranks hold different elements under one number; ranks that hold copies must stay alike.
        bound = [
            (param, entries[param], group, number + (slice_numbers.get(param, 0) << 32))
            for number, (param, group) in enumerate(listed)
            if param in entries
        ]
        self.params = [param for param, *_ in bound]
        self.entries = [entry for _, entry, *_ in bound]
        self.groups = [group for _, _, group, _ in bound]
        self.numbers = [number for *_, number in bound]
        self.others = [param for param, _ in listed if param not in entries]
        pairs = ((group, entry.shard) for group, entry in zip(self.groups, self.entries, strict=True))
        self.shards: tuple[tuple[int, Shard], ...] = tuple(dict.fromkeys(pairs))
        kept = {shard for _, shard in self.shards}
        self.left = [number for number, shard in enumerate(shards) if shard not in kept]
        self._buckets = list(dict.fromkeys(entry.shard.bucket for entry in self.entries))
        number_of = {bucket: number for number, bucket in enumerate(self._buckets)}
        self._bucket_of = [number_of[entry.shard.bucket] for entry in self.entries]
        # Of each param, in bytes from the start of its bucket; an empty one has no address.
        self._offsets = np.array([_offset(entry) for entry in self.entries], dtype=np.int64)
        self._is_empty = np.array([not entry.param.numel() for entry in self.entries], dtype=bool)
        self._starts: list[int] = []  # address of each bucket
        self._addresses: list[int] = []  # of each param, if the buckets are there
        self.attributes: list[list[Any]] = [[]] * len(_ATTRIBUTES)
        self.sources: list[ParamRecord] = []

    def are_in(self, groups: Sequence[Group]) -> bool:
        """True if the groups list these params in this order."""
        return [list(map(id, group["params"])) for group in groups] == self._ids

    def check(self) -> None:
        """Raises BindingError if a param is not where binding put it, or is listed twice.

        Params are compared as a whole with what they were when each was checked, and one by one where that differs.
        """
        attributes = [list(map(get, self.params)) for get in _ATTRIBUTES]
        starts = list(map(torch.Tensor.data_ptr, map(_FLAT, self._buckets)))
        if starts != self._starts:  # a bucket that was freed may be allocated again at another address
            addresses = np.array(starts, dtype=np.int64)[self._bucket_of] + self._offsets
            addresses[self._is_empty] = 0
            self._starts, self._addresses = starts, addresses.tolist()
        if attributes == self.attributes and list(map(torch.Tensor.data_ptr, self.params)) == self._addresses:
            return
        seen: set[ParamRecord] = set()
        self.sources = []
        for number, entry in enumerate(self.entries):
            if entry in seen:
                raise BindingError(
                    f"remove one of the two places of {entry.name}: it is listed twice in the param groups, and would "
                    "be updated twice."
                )
            seen.add(entry)
            entry.check()
            if entry.is_source:
                self.sources.append(entry)
                attributes[1][number] = None
        self.attributes = attributes


def _offset(entry: ParamRecord) -> int:
    bucket = entry.shard.bucket
    return bucket.layout.offsets[entry.index] * bucket.dtype.itemsize
