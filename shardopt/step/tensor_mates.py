"""Matrices that are cut over a tensor mesh: put together on one rank, and taken apart again.

Slices are whole first, each on one of its data-parallel ranks: of all tensor mates the one with the same number. With
two data-parallel and two tensor ranks, and two matrices::

                      tensor 0    tensor 1
    data-parallel 0     a           a            rank (0, 1) owns a: its mate sends it a slice, and gets one back
    data-parallel 1     b           b            rank (1, 0) owns b
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..partition.comm.together import riding_on

if TYPE_CHECKING:
    import torch.distributed as dist

    from ..domain.domain import Domain
    from ..domain.matrix_placement import MatrixPlacement
    from ..partition.comm.together import Relay
    from ..partition.comm.transport import Transport

_OUT, _BACK = "putting slices of matrices together", "sending slices of matrices to their tensor ranks"


class PlacedMatrix(NamedTuple):
    """A param of which this rank and its tensor mates hold a slice each, whole."""

    param: int  # its number, counted through all groups
    placement: MatrixPlacement
    slice: torch.Tensor  # this rank's, bf16, with the shape of the local param
    owner: int  # a tensor rank


# Takes the number of a whole param and its elements, and puts the function's results in place of these.
Make = Callable[[int, torch.Tensor], None]


def put_together(
    domain: Domain, group: dist.ProcessGroup, matrices: Mapping[int, PlacedMatrix], make: Make, relay: Relay
) -> None:
    """Collective over tensor mates: each owner makes its matrices whole, and all get their slices of the results.

    Args:
        matrices: by number; none if this rank has failed. Results take the place of their slices.
        relay: gets the first error of this rank or a mate.
    """
    transport = relay.meet(riding_on(lambda _: domain.transport_to_mates(group)))
    if transport is None:
        return
    own, others = list[torch.Tensor](), list[torch.Tensor]()
    rank, size = transport.ranks.rank, transport.ranks.size
    of_owner = [{number: each for number, each in matrices.items() if each.owner == peer} for peer in range(size)]
    key = zlib.crc32(repr([each.param for each in matrices.values()]).encode())

    def pack() -> None:
        own.extend(_packed(domain, its) for its in of_owner)
        others.extend(_room(own, of_owner[rank], rank))

    relay.attempt(pack)
    relay.meet(riding_on(lambda failed: _travel(domain, transport, _OUT, own, others, failed, key)))
    if relay.problem is not None:  # all mates know of it
        return
    with domain.clock.phase("matrices"):
        relay.attempt(_make_whole, of_owner[rank], others, make)
    relay.meet(riding_on(lambda failed: _travel(domain, transport, _BACK, others, own, failed)))
    relay.attempt(_unpack, of_owner, own)


def _travel(
    domain: Domain,
    transport: Transport,
    phase: str,
    own: Sequence[torch.Tensor],
    others: Sequence[torch.Tensor],
    failed: bool,
    key: int = 0,
) -> None:
    received = (each.nbytes for peer, each in enumerate(others) if peer != transport.ranks.rank)
    transport.traffic.matrices += sum(received)
    with domain.clock.phase("gather"):
        transport.all_to_all(phase).start(own, others, phase, failed=failed, key=key)()


def _packed(domain: Domain, matrices: Mapping[int, PlacedMatrix]) -> torch.Tensor:
    """Returns this rank's slices, one after the other, the elements of each in the order of its rows."""
    slices = [each.slice.reshape(-1) for each in matrices.values()]
    return torch.cat(slices) if slices else torch.empty(0, dtype=torch.bfloat16, device=domain.device)


def _room(own: Sequence[torch.Tensor], owned: Mapping[int, PlacedMatrix], rank: int) -> list[torch.Tensor]:
    """Returns memory for the slices of the matrices that this rank owns, by rank; its own stay where they are."""
    return [
        packed if peer == rank else packed.new_empty(sum(each.placement.numel(peer) for each in owned.values()))
        for peer, packed in enumerate(own)
    ]


def _unpack(of_owner: Sequence[Mapping[int, PlacedMatrix]], own: Sequence[torch.Tensor]) -> None:
    """Puts the results in place of this rank's slices."""
    for its, packed in zip(of_owner, own, strict=True):
        pieces = packed.split([each.slice.numel() for each in its.values()])
        for each, piece in zip(its.values(), pieces, strict=True):
            each.slice.copy_(piece.view(each.slice.shape))


def _make_whole(owned: Mapping[int, PlacedMatrix], slices: Sequence[torch.Tensor], make: Make) -> None:
    """Puts the results in place of the slices of all ranks."""
    by_rank = [
        packed.split([each.placement.numel(peer) for each in owned.values()]) for peer, packed in enumerate(slices)
    ]
    for (number, each), parts in zip(owned.items(), zip(*by_rank, strict=True), strict=True):
        placed = each.placement
        whole = torch.empty_strided(placed.shape, placed.strides, dtype=parts[0].dtype, device=parts[0].device)
        places = whole.split(list(placed.sizes), placed.dim)
        for place, part in zip(places, parts, strict=True):
            place.copy_(part.view(place.shape))
        make(number, whole)
        for place, part in zip(places, parts, strict=True):
            part.view(place.shape).copy_(place)
