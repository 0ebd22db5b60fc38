"""What a kernel is compiled for: the rule's variant and the formats of its streams."""

from dataclasses import dataclass

from .formats import FP32, Format
from .translate import Arithmetic


@dataclass(frozen=True)
class StepSpec:
    """What a kernel is compiled for."""

    variant: Arithmetic
    param: Format
    grad: Format

    @property
    def has_master(self) -> bool:
        return self.param is not FP32

    @property
    def bytes_per_element(self) -> int:
        """Bytes that one pass reads and writes for each element, tables aside."""
        full = 1 + len(self.variant.states) if self.has_master else len(self.variant.states)
        return self.grad.itemsize + 2 * FP32.itemsize * full + self.param.itemsize * (1 if self.has_master else 2)
