"""What Triton asks of a driver before it compiles, answered for a GPU that is not there."""

import torch
from triton.backends.compiler import GPUTarget


class NoDriver:
    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")
