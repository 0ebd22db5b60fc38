"""Where a Triton kernel finds the streams of a shard, and what it is told of them when it is compiled."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton
import triton.language as tl

from .formats import FP32, BlockFormat, Format
from .tables import BLOCK, JoinedStreams, Streams

if TYPE_CHECKING:
    from .spec import Spec

_TYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.int16: tl.int16,
    torch.int8: tl.int8,
    torch.uint8: tl.uint8,
}
GRAD_TYPES = {"fp32": tl.float32, "bf16": tl.int16, "fp16": tl.float16}


@triton.jit
def stream_at(address_ptr, TYPE: tl.constexpr):
    """Returns where a stream begins, in memory that begins on 16 bytes at every block."""
    return tl.multiple_of(tl.load(address_ptr).to(tl.pointer_type(TYPE)), 16)


def stream_constants(spec: Spec, aligned: bool) -> dict[str, Any]:
    """Returns what a kernel is told of its streams when it is compiled."""
    return {
        "NUM_SCALARS": len(spec.scalars),
        "PARAM": spec.param.name,
        "GRAD": spec.grad.name,
        "MASTER": _master(spec),
        "TYPES": tuple(_TYPES[each] for each in _storages(spec)),
        # Triton 3.6 takes no tuple of names and numbers out of a tuple, so they are apart. It hands on what it takes
        # out only as tl.constexpr(...). Test: test_compiled.py with that Triton, as .github/workflows/tests.yml has it.
        "STATES": tuple("block" if isinstance(format, BlockFormat) else format.name for format in spec.states),
        "NUMBERS": tuple(_numbers(format) for format in spec.states),
        "ROUNDINGS": tuple(format.rounding for format in spec.states),
        "NEEDS_NOISE": spec.needs_noise,
        "GRAD_TYPE": GRAD_TYPES[spec.grad.name],
        "ALIGNED": aligned,
        "BLOCK": BLOCK,
    }


def _master(spec: Spec) -> str:
    if not spec.has_master or spec.master is None:
        return ""
    return "alone" if spec.master is FP32 and not spec.compares else spec.master.name


def _numbers(format: Format) -> tuple[float, ...]:
    if not isinstance(format, BlockFormat):
        return ()
    scaling = (1 / format.largest, format.largest_scale)
    return (format.has_sign, format.shift, format.offset_bits, format.offset, *scaling, format.bits)


def _storages(spec: Spec) -> list[torch.dtype]:
    """The dtypes of param, master and states in memory; that of the param for a master that there is not."""
    master = spec.master if spec.has_master and spec.master is not None else spec.param
    return [each.storage for each in (spec.param, master, *spec.states)]


def addresses(streams: Streams | JoinedStreams) -> torch.Tensor:
    """Returns where kernels find element 0 of each stream: the param, its master, the states, their scales.

    Several shards are taken for one, in which each lies behind the one before. Element 0 of a shard's stream would then
    lie as far before the stream as the elements of the shards before it reach.

    Returns:
        2D int64 in host memory, one row for each row of the other tables; a single one for a single shard. 0 is the
        address of what is not there.
    """
    if isinstance(streams, JoinedStreams) and len(streams.shards) == 1 and streams.shards[0] is not None:
        streams = streams.shards[0]
    if isinstance(streams, Streams):
        return torch.tensor([[at for at, _ in _places(streams, 1)]], dtype=torch.int64)
    width = next(len(_places(each, 1)) for each in streams.shards if each is not None)
    found, row, first = np.zeros((sum(streams.num_rows), width), np.int64), 0, 0
    for each, num_blocks, num_rows in zip(streams.shards, streams.num_blocks, streams.num_rows, strict=True):
        if each is not None:
            found[row : row + num_rows] = [at and at - first * nbytes for at, nbytes in _places(each, num_blocks)]
        row, first = row + num_rows, first + num_blocks
    return torch.from_numpy(found)


def _places(streams: Streams, num_blocks: int) -> list[tuple[int, int]]:
    """The address of each stream, or 0, and its bytes a block: of codes of 4 bits half a byte an element."""
    scales = [streams.scale(index) for index in range(len(streams.states))]
    return [
        (0, 0) if each is None else (each.data_ptr(), each.nbytes // max(num_blocks, 1))
        for each in (streams.param, streams.master, *streams.states, *scales)
    ]


def on(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which Triton launches on this device: it takes the current one, whatever that of the pointers."""
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return nullcontext()
    return torch.cuda.device(device)


def block_of_nothing(spec: Spec, device: torch.device) -> Streams:
    """Returns streams of one block."""

    def block(dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(BLOCK, dtype=dtype, device=device)

    master = spec.master if spec.has_master else None
    return Streams(
        block(spec.param.dtype),
        None if master is None else block(master.dtype),
        tuple(block(format.dtype) for format in spec.states),
        tuple(block(torch.float32) if isinstance(format, BlockFormat) else None for format in spec.states),
    )
