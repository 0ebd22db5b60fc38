"""A ZeRO stage as three placements, which one code path reads."""

from dataclasses import dataclass
from enum import Enum


class Placement(Enum):
    """How one kind of tensor is distributed over the ranks."""

    REPLICATE = "replicate"  # every rank holds the whole tensor
    SHARD = "shard"  # every rank holds its slice


@dataclass(frozen=True)
class Placements:
    """The placements of params, gradients and states (with masters); Rajbhandari et al., arXiv 1910.02054."""

    param: Placement
    grad: Placement
    state: Placement

    @staticmethod
    def of_stage(stage: int) -> "Placements":
        kinds = [Placement.SHARD if stage >= threshold else Placement.REPLICATE for threshold in (3, 2, 1)]
        return Placements(*kinds)
