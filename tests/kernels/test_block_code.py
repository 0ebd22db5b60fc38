"""What travels in 8 or 4 bits has the same bytes from native code and from Triton, interpreted and as compiled."""

from typing import Any

import numpy as np
import pytest
import torch

from shardopt.domain.block_code import BlockCode
from shardopt.domain.formats import TRAFFIC_FORMATS
from shardopt.domain.shard_tables import ShardTables
from shardopt.kernels import codecs, native_backend, triton_backend
from shardopt.kernels.tables import BLOCK, JoinedStreams, Streams
from shardopt.kernels.triton_streams import addresses
from shardopt.partition.layout import BucketLayout
from tests.support.ptx.driver import Driver
from tests.support.ptx.process import Compiling
from tests.support.training import raw

CPU = torch.device("cpu")
LAYOUT = BucketLayout((300, 1, 256, 70), 1)
# Where a param has an element; elsewhere kernels may leave anything.
WITHIN = torch.cat(
    [torch.arange(first, first + numel) for first, numel in zip(LAYOUT.offsets, LAYOUT.numels, strict=False)]
)


def gradients(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(LAYOUT.numel, generator=generator) * 10.0 ** torch.arange(LAYOUT.numel).remainder(9).sub(6)
    values[LAYOUT.offsets[2] + 3] = torch.inf
    values[LAYOUT.offsets[3]], values[LAYOUT.offsets[3] + 1] = 1e-42, 3e38  # no scale is subnormal
    return values.to(dtype)


def code_of(form: str, dtype: torch.dtype, to: torch.dtype, backend: Any, **options: bool) -> BlockCode:
    code = BlockCode(LAYOUT.numel, dtype, to, TRAFFIC_FORMATS[form], CPU, **options)
    code._backend = backend
    return code


def encoded(
    form: str,
    dtype: torch.dtype,
    backend: Any,
    rest: torch.Tensor | None = None,
    shown: torch.Tensor | None = None,
) -> torch.Tensor:
    options = {"keeps_rest": rest is not None, "shows": shown is not None}
    values, code = gradients(dtype), code_of(form, dtype, torch.float32, backend, **options)
    if isinstance(backend, OnPtx):
        backend.driver.memory.allow(values)
    return code.encode(values, ShardTables(LAYOUT.pieces(0), LAYOUT.numel, CPU).gradients_in(values), rest, shown)


def found_by(backend: Any, form: str, dtype: torch.dtype) -> list[bytes]:
    """What messages hold of every element, with and without a residual, what they sum up to, and what is left."""
    found, messages = [], []
    summing = code_of(form, dtype, torch.float32, backend, sums=True)
    for rest in (None, torch.linspace(-1e-3, 1e-3, LAYOUT.numel).bfloat16()):
        messages.append(message := encoded(form, dtype, backend, rest))
        total, arrived = torch.ones(LAYOUT.numel), torch.empty(LAYOUT.numel, dtype=dtype)
        summing.decode_into(total, (messages[0], message, message)[: 2 * len(messages) - 1], 0)
        for at in range(0, LAYOUT.numel, 2 * BLOCK):
            code_of(form, dtype, dtype, backend).decode_into(arrived[at : at + 2 * BLOCK], (message,), at)
        assert rest is None or (rest[LAYOUT.offsets[2] : LAYOUT.offsets[3]] == 0).all()
        found += [raw(torch.nan_to_num(each.float()[WITHIN], nan=7.0)) for each in (total, arrived)]
        found += [] if rest is None else [raw(rest[WITHIN])]
        scales = message[LAYOUT.numel * TRAFFIC_FORMATS[form].bits // 8 :]
        found.append(raw(scales))  # and what fills up the message
        if rest is None:  # who encodes it sees what the others decode
            again = encoded(form, dtype, backend, shown=(shown := torch.zeros_like(arrived)))
            assert raw(shown[WITHIN]) == raw(arrived[WITHIN])
            assert raw(again[-scales.numel() :]) == raw(scales)
    return found


@np.errstate(all="ignore")  # the interpreter computes in NumPy
@pytest.mark.parametrize("form", TRAFFIC_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_interpreter_has_the_bytes_of_native_code(form: str, dtype: torch.dtype) -> None:
    assert found_by(triton_backend, form, dtype) == found_by(native_backend, form, dtype)


class OnPtx:
    """The backend of a GPU, whose kernels are executed as compiled and touch nothing but their streams."""

    def __init__(self, driver: Driver):
        self.driver = driver

    def run(self, spec: Any, number: int, streams: Any, tables: Any) -> None:
        there = [streams.param, *streams.states, *streams.scales]
        self.driver.memory.allow(*(each for each in there if each is not None))
        triton_backend.run(spec, number, streams, tables)


def in_messages() -> None:
    with Driver() as driver:
        found = found_by(OnPtx(driver), "int4", torch.bfloat16)
    assert found == found_by(native_backend, "int4", torch.bfloat16)


def test_as_compiled(compiling: Compiling) -> None:
    compiling(in_messages)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_bit_of_one_element_shows_that_a_param_was_written(dtype: torch.dtype) -> None:
    """Wherever it is, and where all values of a block are NaN; a zero may become -0."""
    values = gradients(dtype).repeat(20)
    layout = BucketLayout((values.numel(),), 1)
    code = BlockCode(layout.numel, dtype, dtype, TRAFFIC_FORMATS["int8"], CPU)
    message = code.encode(values, ShardTables(layout.pieces(0), layout.numel, CPU).gradients_in(values))
    code.decode_into(shown := torch.empty_like(values), (message,), 0)
    assert code.is_shown(shown, message, 0) and code.is_shown(shown[2 * BLOCK :], message, 2 * BLOCK)
    bits = shown.view(torch.int16 if dtype is torch.bfloat16 else torch.int32)
    for at in (0, 1, BLOCK - 1, LAYOUT.offsets[2] + 3, layout.numel // 2, layout.numel - 1):
        for bit in (0, 8 * dtype.itemsize - 1):
            changed = torch.ones_like(bits[at]) << bit
            bits[at] ^= changed
            assert not code.is_shown(shown, message, 0)
            assert code.is_shown(shown[BLOCK:], message, BLOCK) is (at < BLOCK)
            bits[at] ^= changed


def test_two_codes_of_4_bits_share_a_byte() -> None:
    """The first lies in the lower bits, and a block takes 128 bytes wherever its param ends."""
    format, values = TRAFFIC_FORMATS["int4"], gradients(torch.float32)
    expected = torch.zeros(LAYOUT.numel, dtype=torch.uint8)
    for first, numel in zip(LAYOUT.offsets, LAYOUT.numels, strict=False):
        expected[first : first + numel], _ = codecs.encode(values[first : first + numel], format)
    for backend in (native_backend, triton_backend):
        with np.errstate(all="ignore"):
            message = encoded("int4", torch.float32, backend)[: LAYOUT.numel // 2].int()
        codes = torch.stack([message & 15, message >> 4], 1).flatten()
        of_inf = slice(LAYOUT.offsets[2], LAYOUT.offsets[3])
        codes[of_inf] = expected[of_inf].int()  # NaN times a scale is NaN with either sign
        some = WITHIN if backend is triton_backend else slice(None)  # native code leaves zeros elsewhere
        assert torch.equal(codes[some], expected[some].int())


def test_shards_of_codes_of_4_bits_are_joined() -> None:
    """A kernel finds a shard's streams from where they would begin, were the shards before it a part of them."""

    def shard(blocks: int) -> Streams:
        codes, scales = torch.zeros(blocks * BLOCK // 2, dtype=torch.uint8), torch.zeros(blocks)
        return Streams(torch.zeros(blocks * BLOCK, dtype=torch.int16), None, (codes,), (scales,))

    blocks, rows = [3, 1, 2], [2, 1, 1]
    shards = [shard(blocks[0]), None, shard(blocks[2])]
    found, behind = addresses(JoinedStreams(shards, blocks, rows)), sum(blocks[:2])
    for each, row, first in ((shards[0], 0, 0), (shards[0], 1, 0), (shards[2], 3, behind)):
        assert each is not None
        of_block = (2 * BLOCK, 0, BLOCK // 2, 4)
        starts = [at + first * nbytes for at, nbytes in zip(found[row].tolist(), of_block, strict=True)]
        assert starts == [each.param.data_ptr(), 0, each.states[0].data_ptr(), each.scales[0].data_ptr()]  # type: ignore[union-attr]
    assert found[2].tolist() == [0, 0, 0, 0]
