"""Triton spellings of the words that kernels use: the vocabulary of rules, widening and narrowing."""

import triton
import triton.language as tl

# -- the vocabulary of rules -------------------------------------------------------------------------------------------


@triton.jit
def sign(x):
    return tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, 0.0))


@triton.jit
def minimum(x, y):
    return tl.where((x < y) | (x != x), x, y)


@triton.jit
def maximum(x, y):
    return tl.where((x > y) | (x != x), x, y)


@triton.jit
def clamp(x, low, high):
    return minimum(maximum(x, low), high)


@triton.jit
def load_bf16(pointer, BLOCK: tl.constexpr):
    """Returns a block of bf16 in fp32 [1, BLOCK]: two lie in a word, whose upper half is an fp32 number already."""
    words = tl.load(pointer.to(tl.pointer_type(tl.int32)) + tl.arange(0, BLOCK // 2)[None, :])
    return tl.reshape(tl.join(words << 16, words & -65536), (1, BLOCK)).to(tl.float32, bitcast=True)


@triton.jit
def widen(x, FORMAT: tl.constexpr):
    """Dequantizes to fp32, exactly; bf16 comes as its bits in int16."""
    if FORMAT == "bf16" or FORMAT == "bf16_random" or FORMAT == "bf16_dithered":
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def narrow(x, FORMAT: tl.constexpr):
    """Rounds fp32 to nearest, ties to even. A NaN becomes 0x7fc0 in bf16: rounded bits could be infinity or -0."""
    if FORMAT == "bf16":
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x != x, 0x7FC0, rounded).to(tl.uint16).to(tl.int16, bitcast=True)
    elif FORMAT == "fp16":
        return x.to(tl.float16)
    else:
        return x


RULE_WORDS = {"tl": tl, "sign": sign, "minimum": minimum, "maximum": maximum, "clamp": clamp}
