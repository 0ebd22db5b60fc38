"""The safetensors format: 8 bytes of length, a JSON header, then the tensors' bytes without gaps."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
NAME_OF_DTYPE = {dtype: name for name, dtype in DTYPES.items()}


def header(tensors: Sequence[tuple[str, torch.dtype, Sequence[int]]], metadata: Mapping[str, str] | None) -> bytes:
    """Returns the bytes before the first element, for (name, dtype, shape) of the tensors in the order of the file."""
    described: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    offset = 0
    for name, dtype, shape in tensors:
        end = offset + torch.Size(shape).numel() * dtype.itemsize
        described[name] = {"dtype": NAME_OF_DTYPE[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * ((8 - len(text)) % 16)  # so that a mapped file is aligned for every dtype
    return len(text).to_bytes(8, "little") + text


def bytes_of(values: torch.Tensor) -> memoryview:
    """Returns the bytes of a contiguous 1D tensor on the host, without a copy."""
    return memoryview(cast(Any, values.view(torch.uint8).numpy()))
