"""Values on their way between the tests' processes: pickles in which a tensor is its bytes.

torch's own pickles open a file in memory for each tensor, a third of a millisecond, which for a job of a thousand small
tensors is most of its time. Views of one storage arrive as tensors of their own.
"""

import io
import pickle
from typing import Any

import torch
from torch import Tensor


def dumps(value: Any) -> bytes:
    """To be read by ``pickle.loads``."""
    file = io.BytesIO()
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        is_plain = type(value) is Tensor and value.device.type == "cpu" and value.layout is torch.strided
        if not is_plain or value.requires_grad or not value.is_contiguous():
            return NotImplemented
        return _tensor, (value.reshape(-1).view(torch.uint8).numpy().tobytes(), value.dtype, tuple(value.shape))


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)
