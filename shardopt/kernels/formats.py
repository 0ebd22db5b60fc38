r"""How a value lies in memory: one format a stream of a kernel (param, gradient, master, each state).

A kernel widens a stream to fp32 (dequantizes it) when it loads it, and narrows it (quantizes it) when it stores it;
rules never learn of it. bf16 is moved as its bits (``int16``) and rounded by integer arithmetic: Triton's interpreter
truncates where a GPU rounds.

**Master weights.** ``split`` stores only those bits of a bf16 param's fp32 master that the param lacks: the param is
the upper half of the master's bits, rounded to nearest with ties away from zero, and 16 bits hold the difference, so
that all of fp32 comes back. ``split24`` stores 8 bits of the difference: the master is rounded to 16 bits of mantissa
first. A script may write the param through ``.data``, which leaves the difference of the old value beside the new one.
So the magnitude stays between zero and infinity when both are joined: a written zero would become NaN otherwise. The
master is then the written value to half a unit in its last place. Test: a_written_param_joins_a_stale_rest.

**Blocks in 8 bits.** 256 elements share an fp32 scale; each stores a code that stands for a fraction of it. Codes are
close where values are small and wide where they are large, in straight pieces, as in telephones (ITU-T G.711). With an
offset :math:`d`, a mantissa of :math:`m` bits and :math:`b(x)` the bits of an fp32 number :math:`x`:

.. math::
    q(y) = \lfloor (b(|y| + d) - b(d)) / 2^{23 - m} \rceil, \qquad y(q) = b^{-1}(b(d) + q\,2^{23 - m}) - d

which takes no root, logarithm or table, and has the same bits everywhere. The scale is the block's largest magnitude
over :math:`y(q_{max})`, rounded to 16 bits, so that a decoded block encodes to the very codes that it came from. The
scale is no power of two: an average in which nothing new arrives decays by its scale, and its codes stay. A state that
must not be negative has no sign bit, and a value above zero never becomes zero there: a second moment is a divisor.

A new format of this kind is its numbers here, its name in ``config.StateFormat`` and its row in ``domain/formats.py``:
kernels, codecs and checkpoints take all else from here. One of another kind also has words of its own in
``native_formats.py``, ``triton_formats.py`` and ``codecs.py``.

**Rounding** is to nearest, with two exceptions. A param without a master gets *stochastic rounding*: up with the
probability of the part that is cut off, by a hash of (seed, step, param, element). An average over a thousand steps is
*dithered*: a step changes it by less than half the gap between two numbers of 8 or 16 bits, so that rounded to nearest
it would stay where it is. Instead of one half the kernel adds

.. math::
    \{ i \varphi + t \sqrt 2 \}

the fractional part, for element :math:`i` of the param in its step :math:`t`, with :math:`\varphi` the golden ratio:
which is spread more evenly over elements and steps than random numbers are, and costs one multiplication. An element
is then off by less than a gap, and right on average. The largest of a block has the top code whatever is added.
"""

import math
import struct
from dataclasses import dataclass

import torch

from ..errors import BindingError


@dataclass(frozen=True)
class Format:
    """A number format."""

    name: str  # in the text of both kernels, and in checkpoints
    dtype: torch.dtype  # of the tensor that the user sees
    storage: torch.dtype  # what a kernel loads and stores
    itemsize: int  # bytes an element
    rounding: str = "nearest"  # in a kernel's step: "nearest", "random" or "dithered"; elsewhere to nearest


@dataclass(frozen=True)
class BlockFormat(Format):
    """Codes with a scale for each block; see the docstring of this file.

    Attributes:
        bits: of a code; a sign is the highest one. 8, or 4: two codes share a byte.
    """

    has_sign: bool = True
    mantissa: int = 4
    offset: float = 2.0**-7
    bits: int = 8

    @property
    def shift(self) -> int:
        return 23 - self.mantissa

    @property
    def offset_bits(self) -> int:
        return int.from_bytes(struct.pack("<f", self.offset), "little")

    @property
    def top(self) -> int:
        """The largest code, without its sign."""
        return (1 << (self.bits - self.has_sign)) - 1

    @property
    def largest(self) -> float:
        """The value of the top code, before the scale: an fp32 number of 8 or fewer bits."""
        bits = self.offset_bits + (self.top << self.shift)
        (value,) = struct.unpack("<f", bits.to_bytes(4, "little"))
        return float(value) - self.offset

    @property
    def largest_scale(self) -> float:
        """The largest scale with which the top code is finite: an fp32 number of as many bits as every scale."""
        mantissa, exponent = math.frexp(LARGEST_FP32 / self.largest)
        digits = 2 ** (24 - SCALE_DROPPED_BITS)
        return math.ldexp(math.floor(mantissa * digits) / digits, exponent)


FP32 = Format("fp32", torch.float32, torch.float32, 4)
BF16 = Format("bf16", torch.bfloat16, torch.int16, 2)
FP16 = Format("fp16", torch.float16, torch.float16, 2)
BF16_RANDOM = Format("bf16_random", torch.bfloat16, torch.int16, 2, rounding="random")
BF16_DITHERED = Format("bf16_dithered", torch.bfloat16, torch.int16, 2, rounding="dithered")
SPLIT = Format("split", torch.int16, torch.int16, 2)
SPLIT24 = Format("split24", torch.int8, torch.int8, 1)
SIGNED8 = BlockFormat("signed8", torch.uint8, torch.uint8, 1, has_sign=True, mantissa=4, offset=2.0**-7)
# For the wire, where two codes share a byte. Their distances double at each second code, which suits gradients: the
# largest of a block is often far above the others. Kernels find no larger code by themselves, but for Inf and NaN. The
# exponent of an offset is a multiple of 4 (of 8 with 8 bits): its bits are not those of a code, so that OR adds them.
SIGNED4 = BlockFormat("signed4", torch.uint8, torch.uint8, 1, has_sign=True, mantissa=1, offset=2.0**-3, bits=4)
UNSIGNED8 = BlockFormat(
    "unsigned8", torch.uint8, torch.uint8, 1, rounding="dithered", has_sign=False, mantissa=5, offset=2.0**-7
)

FORMATS = {
    each.name: each for each in (FP32, BF16, FP16, BF16_RANDOM, BF16_DITHERED, SPLIT, SPLIT24, SIGNED8, UNSIGNED8)
}
# Fractions of 2**32 for the dither: of the golden ratio, made odd, and of the root of 2.
GOLDEN, ROOT2 = 0x9E3779B1, 0x6A09E667

# The scale's rounding may take a block's largest element this far below the top code, where codes are 2**18 or more
# apart. Dithered, it would now and then get the code below, and the decoded block would have another scale.
BELOW_TOP = 1 << 9
# A block's scale is rounded to 16 bits of mantissa. It is never subnormal: its inverse would be infinite.
SCALE_DROPPED_BITS = 8
SMALLEST_SCALE = 2.0**-126
LARGEST_FP32 = (2 - 2.0**-23) * 2.0**127
INFINITY_BITS = 0x7F800000
NAN_BITS = 0x7FC00000  # of every NaN that is stored: the bits of a NaN that arithmetic makes depend on the machine

_BY_DTYPE = {format.dtype: format for format in (FP32, BF16, FP16)}
GRADIENT_DTYPES = frozenset(_BY_DTYPE)  # and of params


def format_of(dtype: torch.dtype, what: str) -> Format:
    """Returns the format of a tensor's dtype.

    Args:
        what: names the tensor in the error.

    Raises:
        BindingError: no format has this dtype.
    """
    try:
        return _BY_DTYPE[dtype]
    except KeyError:
        raise BindingError(
            f"cast the tensor, or give it to a torch.optim optimizer of its own: {what} is "
            f"{str(dtype).removeprefix('torch.')}, and updates are computed in fp32 for float32, bfloat16 and float16 "
            "tensors, so that precision or the imaginary part would be lost silently."
        ) from None
