"""A ZeRO stage is three placements, said once and read by one code path."""

from dataclasses import dataclass
from enum import Enum


class Placement(Enum):
    """How one kind of tensor lies over the ranks."""

    REPLICATE = "replicate"  # every rank holds all of it
    SHARD = "shard"  # every rank holds its slice


@dataclass(frozen=True)
class Placements:
    """Where params, gradients and states (masters with them) lie; Rajbhandari et al., arXiv 1910.02054."""

    param: Placement
    grad: Placement
    state: Placement

    @staticmethod
    def of_stage(stage: int) -> "Placements":
        kinds = [Placement.SHARD if stage >= threshold else Placement.REPLICATE for threshold in (3, 2, 1)]
        return Placements(*kinds)
