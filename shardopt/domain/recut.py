"""Gives each rank its slices of states that were loaded as parts of other slices: together, the ranks have all of them.

A group that is added after the first step has buckets of its own. A new optimizer that begins with the group may put
the same params into one bucket, and the slices of a state dict that each rank kept are then not those that it needs.
The same holds for another stage, and for another ``Tuning``. With params of 2 and 1 blocks on two ranks::

    kept     a: 0 1    b: 0            two buckets
    needed   a: 0 0    b: 1            one bucket: rank 0 lacks half of a, rank 1 lacks b
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..errors import StateError
from ..tensors.part import Part
from ..tensors.strides import dense_strides, flattened, in_storage_order

if TYPE_CHECKING:
    from ..partition.comm.group import Ranks
    from ..partition.mesh import Mesh
    from .bucket_plan import PlannedBucket
    from .param_state import ParamState


@dataclass(frozen=True)
class _Needed:
    """A tensor of a loaded state, and the elements of it that this rank needs."""

    state: ParamState
    name: str
    param: torch.nn.Parameter
    start: int
    stop: int
    words: str

    @property
    def is_lacking(self) -> bool:
        tensor = self.state.tensors.get(self.name)
        return isinstance(tensor, Part) and not tensor.holds(self.start, self.stop)

    def held(self) -> tuple[int, torch.Tensor]:
        """Returns this rank's elements in host memory, 1D, and the index of the first one."""
        tensor = self.state.tensors.get(self.name)
        if isinstance(tensor, Part):
            return tensor.start, tensor.local.to("cpu", torch.float32)
        return 0, torch.empty(0) if tensor is None else _in_order(tensor, self.param)


def recut(plan: Sequence[PlannedBucket], mesh: Mesh, waiting: Mapping[torch.nn.Parameter, ParamState]) -> None:
    """Collective: exchanges what ranks lack of the states that wait for the params of these buckets.

    Raises:
        StateError: no rank has some of the elements; on every rank.
    """
    needed = dict(enumerate(_needed(plan, mesh.shard.rank, waiting)))
    if not needed:
        return
    lacking = [number for number, each in needed.items() if each.is_lacking]
    everyones = mesh.world.exchange_json(lacking, "comparing slices of loaded states")
    for number in sorted({number for lacks in everyones for number in lacks}):
        _exchange(needed[number], mesh.world)


def _needed(
    plan: Sequence[PlannedBucket], rank: int, waiting: Mapping[torch.nn.Parameter, ParamState]
) -> Iterator[_Needed]:
    """Yields one entry for each tensor of a state, in an order that is the same on all ranks."""
    for planned in plan:
        pieces = {piece.param: piece for piece in planned.layout.pieces(rank)}
        for index, (name, param, _) in enumerate(planned.members):
            if param in waiting:
                piece = pieces.get(index)
                start, stop = (0, 0) if piece is None else (piece.start, piece.start + piece.numel)
                for state in (*planned.states, "master"):
                    yield _Needed(waiting[param], state, param, start, stop, f"{state} of {name}")


def _exchange(needed: _Needed, ranks: Ranks) -> None:
    """Collective: replaces one tensor by the part that this rank needs."""
    start, own = needed.held()
    phase = f"exchanging {needed.words}"
    numel, rows = needed.param.numel(), ranks.exchange([start, start + own.numel()], phase)
    found = torch.empty(needed.stop - needed.start)
    end = 0  # of the elements that have come
    for root, (first, last) in sorted(enumerate(rows), key=lambda row: row[1]):
        if last > end >= first:
            piece = own if root == ranks.rank else torch.empty(last - first)
            ranks.broadcast([piece], phase, root)
            low, high = max(first, needed.start), min(last, needed.stop)
            if low < high:
                found[low - needed.start : high - needed.start] = piece[low - first : high - first]
            end = last
    if end < numel:
        raise StateError(
            "load a dict of whole tensors (a file that torch.save wrote, or what consolidate_state_dict() gathers), or "
            f"give every rank the dict that it took itself: of {needed.words} ranks hold the elements {rows}, and "
            f"none holds those from {end} on, of {numel}. Nothing was bound."
        )
    needed.state.tensors[needed.name] = Part(found, needed.start, needed.param)


def _in_order(tensor: torch.Tensor, param: torch.nn.Parameter) -> torch.Tensor:
    """Returns a whole tensor's elements in the storage order of the param, 1D, fp32, in host memory."""
    return flattened(in_storage_order(tensor.detach().to("cpu", torch.float32), dense_strides(param)))
