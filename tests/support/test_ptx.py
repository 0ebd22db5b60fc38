"""The interpreter of PTX does what the chip does, and refuses what the chip leaves undefined."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.support.ptx.machine import Machine
from tests.support.ptx.memory import GlobalMemory
from tests.support.ptx.numbers import PtxError
from tests.support.ptx.operations import OPERATIONS
from tests.support.ptx.text import parse

THREADS = 64
MODULE = """
.version 8.8
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 memory[];
.visible .entry kernel(
    .param .u64 .ptr .global .align 1 kernel_param_0
)
.reqntid {threads}
{{
    .reg .pred %p<9>;
    .reg .b16 %rs<9>;
    .reg .b32 %r<19>;
    .reg .b64 %rd<9>;
    ld.param.b64 %rd1, [kernel_param_0];
    mov.u32 %r1, %tid.x;
    mad.wide.u32 %rd2, %r1, 4, %rd1;
    shl.b32 %r2, %r1, 2;
    mov.b32 %r3, memory;
    add.s32 %r4, %r3, %r2;
{body}
    st.global.b32 [ %rd2 + 0 ], {{ %r9 }};
    ret;
}}
"""


def executed(body: str, numel: int = THREADS) -> list[int]:
    """What every thread leaves in %r9."""
    target = torch.full((numel,), -1, dtype=torch.int32)
    memory = GlobalMemory()
    memory.allow(target)
    kernel = parse(MODULE.format(threads=THREADS, body=body))
    Machine(kernel, 1, [target.data_ptr()], memory, 4 * THREADS, 0, 1).run()
    return target.tolist()


def test_threads_that_took_two_ways_meet_again() -> None:
    """The shuffle behind the branch needs all lanes."""
    found = executed("""
        setp.lt.s32 %p1, %r1, 10;
        @%p1 bra $LOW;
        mov.b32 %r5, 100;
        bra.uni $JOIN;
    $LOW:
        mov.b32 %r5, 200;
    $JOIN:
        shfl.sync.idx.b32 %r9, %r5, 0, 31, -1;
    """)
    assert found == [200] * 32 + [100] * 32


def test_a_loop_ends_for_each_thread_at_its_own_time() -> None:
    found = executed("""
        mov.b32 %r9, 0;
    $AGAIN:
        add.s32 %r9, %r9, 3;
        setp.lt.s32 %p1, %r9, %r1;
        @%p1 bra $AGAIN;
    """)
    assert found == [max(3, -(-thread // 3) * 3) for thread in range(THREADS)]


def test_shared_memory_between_barriers() -> None:
    """Every thread reads what the other warp has stored."""
    exchange = """
        st.shared.b32 [ %r4 + 0 ], %r1;
        {barrier}
        xor.b32 %r5, %r4, 128;
        ld.shared.b32 %r9, [%r5];
    """
    assert executed(exchange.format(barrier="bar.sync 0;")) == [thread ^ 32 for thread in range(THREADS)]
    with pytest.raises(PtxError, match="no barrier lies between them"):
        executed(exchange.format(barrier=""))


REFUSED = {
    "read before it is written": "add.s32 %r9, %r5, 1;",
    "%r5 is read before": "setp.lt.s32 %p1, %r1, 10; @%p1 mov.b32 %r5, 1; mov.b32 %r9, %r5;",  # by some threads
    "not all lanes of a warp": "setp.lt.s32 %p1, %r1, 10; @%p1 shfl.sync.idx.b32 %r9, %r1, 0, 31, -1;",
    "between some lanes": "shfl.sync.idx.b32 %r9, %r1, 0, 31, 15;",
    "not all threads of a block": "setp.lt.s32 %p1, %r1, 32; @%p1 bar.sync 0; mov.b32 %r9, 0;",
    "nothing was stored to": "ld.shared.b32 %r9, [%r4];",
    "beyond shared memory": "ld.shared.b32 %r9, [%r4+256];",
    "no barrier": "mov.b32 %r9, 0; st.shared.b32 [ %r3 + 0 ], %r1;",  # all threads, to one place
    "misaligned load": "ld.global.b32 { %r9 }, [ %rd2 + 2 ];",
    "in no tensor": "ld.global.b32 { %r9 }, [ %rd2 + 4 ];",
    "read as b32": "mov.b16 %rs1, 1; mov.b32 %r9, %rs1;",
    "too narrow": "mov.b16 %rs1, 1; cvt.u64.u32 %r9, %r1;",
    "not known here": "rcp.approx.ftz.f32 %r9, %r1;",
    "local memory is not known": "ld.local.b32 %r9, [%rd1];",
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_undefined_is_refused(message: str) -> None:
    with pytest.raises(PtxError, match=message):
        executed(REFUSED[message])


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_a_fused_sum_is_rounded_once() -> None:
    """Against fractions: drawn numbers, and sums that lie next to the middle between two floats."""
    generator = np.random.default_rng(0)
    one, other, third = (generator.standard_normal(20_000).astype(np.float32) for _ in range(3))
    third[:10_000] *= np.float32(2.0**-24) * generator.integers(1, 9, 10_000).astype(np.float32)
    one[:10_000], other[:10_000] = 1 + 2.0**-12 * generator.integers(0, 99, (2, 10_000))
    found = OPERATIONS["fma.rn.f32"](one, other, third)
    for numbers in zip(one[::50], other[::50], third[::50], found[::50], strict=True):
        *terms, result = (Fraction(float(each)) for each in numbers)
        exact = terms[0] * terms[1] + terms[2]
        near = float(numbers[3])
        neighbours = (np.nextafter(np.float32(near), np.float32(way)) for way in (-np.inf, np.inf))
        assert all(abs(exact - result) <= abs(exact - Fraction(float(each))) for each in neighbours)
    tie = OPERATIONS["fma.rn.f32"](floats(1 + 2.0**-12), floats(1 + 2.0**-12), floats(2.0**-60))
    assert tie == np.float32(1 + 2.0**-11 + 2.0**-23)  # and not the even one below


def test_edges_of_arithmetic() -> None:
    assert OPERATIONS["min.f32"](floats(0.0, np.nan, 1), floats(-0.0, 2, np.nan)).view(np.int32).tolist() == [
        -(2**31),
        np.float32(2).view(np.int32),
        np.float32(1).view(np.int32),
    ]
    assert OPERATIONS["add.rn.f32"](floats(np.inf), floats(-np.inf)).view(np.int32) == 0x7FFFFFFF
    assert OPERATIONS["mul.rn.f32"](floats(2.0**-126), floats(0.5)) == 2.0**-127
    assert OPERATIONS["mul.rn.ftz.f32"](floats(2.0**-126), floats(0.5)) == 0
    assert OPERATIONS["cvt.rzi.s32.f32"](floats(-1.9, 3e9, -3e9, np.nan)).tolist() == [-1, 2**31 - 1, -(2**31), 0]
    assert OPERATIONS["setp.ne.f32"](floats(np.nan), floats(1)) == [False]
    assert OPERATIONS["setp.neu.f32"](floats(np.nan), floats(1)) == [True]
    word = np.array([0x80FF1234], np.uint32)
    assert OPERATIONS["prmt.b32"](word, word * 0, np.array([0x4B30], np.uint32))[0] == 0x00FF8034
    assert OPERATIONS["shr.s32"](word.view(np.int32), word * 0 + 40).tolist() == [-1]
    assert OPERATIONS["shr.u32"](word, word * 0 + 40).tolist() == [0]
    assert OPERATIONS["bfe.u32"](word, word * 0 + 8, word * 0 + 12).tolist() == [0xF12]
