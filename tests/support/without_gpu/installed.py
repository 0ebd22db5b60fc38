"""What every process of the environment loads with torch, by an entry point of the group ``torch.backends``."""

import torch

from tests.support.without_gpu import is_null
from tests.support.without_gpu.build import LIBRARIES


def install() -> None:
    """From now on operations on the device compute, and Triton's launches are executed; not so on a null device."""
    if is_null():
        return
    torch.ops.load_library(LIBRARIES / "operations.so")
    from tests.support.without_gpu.launches import OnDevice

    OnDevice().__enter__()
