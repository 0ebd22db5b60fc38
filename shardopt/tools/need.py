"""The bytes that one way to run a training needs, and the choice among ways that fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..domain.bucket_plan import MatrixStats
    from .cut import Cut
    from .ways import Way

KINDS = ("param", "gradient", "master", "state", "buffer", "arriving", "window", "ddp")


@dataclass(frozen=True)
class Need:
    """The bytes that one way needs on one rank.

    Attributes:
        bytes: by kind and tier: at most those of ``opt.memory()`` between steps (``buffer``: of all reductions that can
            be under way); ``arriving``: gradients that rest until the last one of their bucket is there; ``window``:
            params gathered while modules run; ``ddp``: DistributedDataParallel's buckets.
        formula: bytes a param for N data-parallel ranks, without padding, buffers and window; small params keep fp32
            states.
        moved: bytes in a step: that one rank receives ("wire"; of slices of Muon's matrices, the average of the ranks),
            that stream through a GPU and back for states or sums of gradients in host memory ("bus"; none for params on
            CPUs), that its disk reads and writes ("disk").
        wire: the bytes of the wire by the ranks among which they move: "data", and "experts" if experts have copies.
        numel: of the params on the rank.
        cut: of the planned model.
        matrices: which matrices are whole on one rank, for a rule of whole matrices above stage 0.
    """

    way: Way
    bytes: dict[str, dict[str, int]]
    formula: str
    moved: dict[str, int]
    wire: dict[str, int]
    numel: int
    cut: Cut
    matrices: MatrixStats

    def on(self, tier: str) -> int:
        """Returns the bytes of all kinds on a tier."""
        return sum(tiers.get(tier, 0) for tiers in self.bytes.values())

    @property
    def file(self) -> int:
        """The bytes of the file on the disk, which holds masters and states twice."""
        return 2 * self.on("disk")


def cheapest(needs: Sequence[Need], device_bytes: int, host_bytes: int | None = None) -> Need | None:
    """Returns the need of least :func:`cost` among those that fit; one that keeps all of fp32 is preferred."""
    fitting = [need for need in needs if fits(need, device_bytes, host_bytes)]
    return min(fitting, key=lambda need: (not need.way.is_exact, *cost(need), need.on("device")), default=None)


def cost(need: Need) -> tuple[int, int, int]:
    """Returns the bytes that move in a step, the slowest medium first: disk, bus, wire."""
    return need.moved["disk"], need.moved["bus"], need.moved["wire"]


def fits(need: Need, device_bytes: int, host_bytes: int | None = None) -> bool:
    return need.on("device") <= device_bytes and (host_bytes is None or need.on("host") <= host_bytes)
