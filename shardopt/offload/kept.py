"""What the stores of one optimizer leave to the next one, when its states move to the host and back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .pinned import Pages


@dataclass(frozen=True)
class Kept:
    """Of one optimizer on this rank.

    Attributes:
        pages: by whether they are registered with the GPU.
        seconds: of steps in each place that updates can run in (``measured.py``).
    """

    pages: dict[bool, Pages] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)

    @property
    def spare_bytes(self) -> int:
        return sum(each.spare_bytes for each in self.pages.values())

    def free_spare(self) -> None:
        for each in self.pages.values():
            each.free_spare()
