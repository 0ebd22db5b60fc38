"""The bytes that move in a step of a layout: between ranks, through a GPU, and to and from a disk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..partition.zero_stage import ZeroStage

if TYPE_CHECKING:
    from .cut import Cut
    from .plan_layout import DomainLayout, StageLayout
    from .ways import Way

_BF16 = 2


def wire_of(laid: StageLayout, way: Way, reduced: float, gathered: float, cut: Cut) -> dict[str, int]:
    """Returns the bytes that one rank receives, by the ranks among which they move ("data", "experts").

    Args:
        reduced, gathered: bytes of one element that travels: of a gradient, of a param (at stage 3 to a pass).
    """
    return {
        name: _received(domain, way, laid.kept.gradient.itemsize, reduced, gathered, cut) + _in_slices(domain, way)
        for name, domain in laid.domains.items()
    }


def moved_of(kinds: Mapping[str, Mapping[str, int]], way: Way, wire: Mapping[str, int]) -> dict[str, int]:
    """Returns the bytes that move by medium: "wire", "bus" and "disk". ``kinds``: the bytes by kind and tier."""
    return {
        "wire": sum(wire.values()),
        # Masters and states come and go; sums go, and come where the GPU has the states.
        "bus": 2 * sum(kinds[kind].get("host", 0) for kind in ("master", "state"))
        + kinds["gradient"].get("host", 0) * (2 if way.tier == "host" else 1),
        "disk": 2 * sum(kinds[kind].get("disk", 0) for kind in ("master", "state")),
    }


def _received(domain: DomainLayout, way: Way, sum_bytes: int, reduced: float, gathered: float, cut: Cut) -> int:
    """Returns the bytes that one rank receives for gradients and params; an all-reduce moves 2 (ranks - 1) / ranks.

    Every micro-batch is reduced, unless all are reduced at once. At stage 3 every unit is gathered for the forward and
    for the backward; a unit that is kept between them only once.

    Args:
        sum_bytes: of one element of the sums of gradients.
    """
    rounds = 1 if cut.at_once and way.stage < 2 else cut.micro_batches
    size: float = way.seen.itemsize
    after = gathered if way.stage in (1, 2) else size  # of an updated param that ranks hold whole
    if not way.has_module:
        gradients, params = 2.0 * size, after if way.stage else 0  # the caller reduces, once
    elif way.stage == 0 and way.release_gradients:
        gradients, params = reduced * domain.ranks * rounds, 0  # each rank receives all that the others have
    elif way.stage == 0:
        gradients, params = (reduced + sum_bytes) * rounds, 0  # sums come back as they are kept
    else:
        gradients, params = reduced * rounds, after
    sharded = sum(
        sum(bucket.layout.numels) * count for bucket, count in domain.buckets if way.stage == 3 and bucket.shards_params
    )
    moved = domain.numel * gradients + (domain.numel - sharded) * params + domain.gathered * gathered
    from_parts = int(domain.regathered * gathered) * (domain.parts - 1) // max(domain.parts, 1)
    return int(moved) * (domain.ranks - 1) // domain.ranks + from_parts


def _in_slices(domain: DomainLayout, way: Way) -> int:
    """Returns the bytes of slices of matrices that one rank receives, on the average of all ranks.

    A matrix that does not lie whole on one rank travels to its owner and back in bf16, without the owner's own slice,
    which is the Nth part or more.
    """
    is_sharded = ZeroStage(way.stage).shards_states
    return 2 * _BF16 * domain.matrices.sliced * (domain.ranks - 1) // domain.ranks**2 if is_sharded else 0
