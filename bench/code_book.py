"""8-bit codes and bf16 roundings of optimizer states: ours and those of the field, as round trips on fp32 tensors.

A code maps y = x / scale to one of its `levels`; the scale is one number a block. `Offset` is the candidate of
shardopt, in integer operations on fp32 patterns; any other code is a `Table` of levels and of the borders between them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

BLOCK = 256
FLOOR = 2.0**-126  # of a scale: its reciprocal is finite, and a block of zeros divides by no zero
ONE = 127 << 23  # the pattern of 1.0


@dataclass(frozen=True)
class Now:
    """What a rounding may depend on beside the number itself."""

    step: int = 0
    generator: torch.Generator = field(default_factory=torch.Generator)


class Code(Protocol):
    """``code(x, now)`` is x after a store and a load; x is 1D fp32, whole blocks of 256."""

    def __call__(self, x: Tensor, now: Now) -> Tensor: ...


def fp32(x: Tensor, now: Now) -> Tensor:
    return x


# ---- Roundings: what is added to an integer before its last bits are dropped -----------------------------------------


def half(x: Tensor, dropped: int, now: Now) -> Tensor | int:
    return 1 << (dropped - 1)


def random(x: Tensor, dropped: int, now: Now) -> Tensor | int:
    return torch.randint(1 << dropped, x.shape, generator=now.generator, dtype=torch.int32)


def golden(x: Tensor, dropped: int, now: Now) -> Tensor | int:
    """Multiples of the golden ratio, mod 1: over the steps of one element, as over its neighbours, they are spread more
    evenly than random numbers, and cost a multiplication and an addition."""
    element = torch.arange(x.numel()).view(x.shape)
    turns = (element * 0x9E3779B1 + now.step * 0x6A09E667) & 0xFFFFFFFF
    return (turns >> (32 - dropped)).to(torch.int32)


Rounding = Callable[[Tensor, int, Now], "Tensor | int"]


# ---- Ours ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Offset:
    """Floats of `mantissa` bits without a sign or subnormals, shifted down by the smallest so that they start at 0.

    A code is the exponent and the leading mantissa bits of d + |y|, counted from those of d: as many codes to an
    octave, evenly spaced below d. A block's absmax lands on the last code, whose value, `peak`, is in [1, 2).

        d = 2^-(octaves - 1)        octaves = 2^(bits - mantissa), bits = 7 beside a sign, else 8
        code = (pattern(|y| + d) - pattern(d) + half) >> (23 - mantissa)
        |y|  = float((code << (23 - mantissa)) + pattern(d)) - d

    Without a sign code 0 is for 0 alone.
    """

    mantissa: int
    signed: bool
    rounding: Rounding = half
    block: int = BLOCK

    @property
    def last(self) -> int:
        return 127 if self.signed else 255

    @property
    def octaves(self) -> int:
        return (self.last + 1) >> self.mantissa

    @property
    def offset(self) -> float:
        return 2.0 ** -(self.octaves - 1)

    @property
    def peak(self) -> float:
        return 2 - 2.0**-self.mantissa - self.offset

    def encode(self, y: Tensor, now: Now) -> Tensor:
        """Codes, int32, of magnitudes y, fp32."""
        dropped = 23 - self.mantissa
        above = (y + self.offset).view(torch.int32) - self._pattern
        above += self.rounding(y, dropped, now)
        code = (above >> dropped).clamp_(max=self.last)
        return code if self.signed else torch.maximum(code, (y > 0).to(torch.int32))

    def decode(self, code: Tensor) -> Tensor:
        return ((code << (23 - self.mantissa)) + self._pattern).view(torch.float32) - self.offset

    @property
    def _pattern(self) -> int:
        return ONE - ((self.octaves - 1) << 23)

    def __call__(self, x: Tensor, now: Now) -> Tensor:
        blocks = x.view(-1, self.block)
        scale = blocks.abs().amax(1, keepdim=True).mul_(1 / self.peak).clamp_(min=FLOOR)
        y = self.decode(self.encode(blocks.abs() * (1 / scale), now))
        return (y * scale).copysign_(blocks).view(-1)

    def __str__(self) -> str:
        name = f"offset m{self.mantissa}, {self.octaves} octaves"
        name += f", {self.rounding.__name__}" if self.rounding is not half else ""
        return name + (f", blocks of {self.block}" if self.block != BLOCK else "")


# ---- The field's -----------------------------------------------------------------------------------------------------


def from_absmax(absmax: Tensor) -> Tensor:
    return absmax


def power_of_two(absmax: Tensor) -> Tensor:
    """The largest below absmax."""
    return absmax.view(torch.int32).bitwise_and(0xFF << 23).view(torch.float32)


def in_fp16(absmax: Tensor) -> Tensor:
    return absmax.half().float()


def root_in_fp16(absmax: Tensor) -> Tensor:
    return absmax.sqrt().half().float().square()


@dataclass(frozen=True)
class Table:
    """y goes to levels[k] where borders[k - 1] <= y < borders[k]. ``keeps_positive``: no x > 0 goes to 0."""

    name: str
    levels: Tensor  # 1D fp32, ascending
    borders: Tensor  # 1D fp32, one less
    block: int = BLOCK
    scale: Callable[[Tensor], Tensor] = from_absmax
    keeps_positive: bool = False

    def __call__(self, x: Tensor, now: Now) -> Tensor:
        blocks = x.view(-1, self.block)
        scale = self.scale(blocks.abs().amax(1, keepdim=True))
        y = torch.where(scale >= FLOOR, blocks / scale, 0.0)  # a scale that fp16 has flushed holds nothing
        code = torch.bucketize(y, self.borders, right=True)
        if self.keeps_positive:
            code = torch.maximum(code, (y > 0).to(code.dtype))
        return (self.levels[code] * scale).view(-1)

    def __str__(self) -> str:
        return self.name


def nearest(name: str, levels: Tensor, **options: object) -> Table:
    """Each y goes to the level nearest to it."""
    levels = levels.double().sort().values
    return Table(name, levels.float(), ((levels[1:] + levels[:-1]) / 2).float(), **options)  # type: ignore[arg-type]


def mirrored(levels: Tensor) -> Tensor:
    """Of magnitudes that start at 0, the levels with both signs."""
    return torch.cat((-levels[1:].flip(0), levels))


def linear(signed: bool) -> Table:
    last = 127 if signed else 255
    levels = torch.arange(last + 1) / last
    return nearest("linear", mirrored(levels) if signed else levels)


def root(signed: bool) -> Table:
    """FlashOptim's levels in blocks of 256, with nearest rounding and without a lost v."""
    wide = flash(signed)
    return nearest("flash levels, blocks of 256", wide.levels, keeps_positive=not signed)


def dynamic(signed: bool) -> Table:
    """Dynamic trees (https://arxiv.org/abs/2110.02861): decade 10^-e, e = 0..6, is cut into 2^(6 - e) (twice as many
    without a sign) equal intervals, whose middles are levels; and 0, and 1 (with a sign there is no -1)."""
    decades = []
    for e in range(7):
        count = 2 ** (6 - e) * (1 if signed else 2)
        middles = 0.1 + 0.9 * (torch.arange(count, dtype=torch.float64) + 0.5) / count
        decades.append(middles * 10.0**-e)
    levels = torch.cat(decades)
    both = torch.cat((-levels, levels)) if signed else levels
    return nearest("dynamic tree", torch.cat((both, torch.tensor([0.0, 1.0], dtype=torch.float64))))


def flash(signed: bool) -> Table:
    """FlashOptim (https://arxiv.org/abs/2602.23349): groups of 32, fp16 scales, rounded to nearest where companded:
    2 |y| / (1 + |y|) in 127ths for momentum; the root, over the root of the largest, in 255ths for variance."""
    last = 127 if signed else 255
    codes = torch.arange(last + 1, dtype=torch.float64)
    middles = codes[:-1] + 0.5
    if not signed:
        levels, borders = (codes / last) ** 2, (middles / last) ** 2
        return Table("flash", levels.float(), borders.float(), block=32, scale=root_in_fp16)

    def expand(c: Tensor) -> Tensor:
        return c / (2 * last - c)  # c / last = 2 y / (1 + y), solved for y

    levels, borders = mirrored(expand(codes)), expand(middles)
    borders = torch.cat((-borders.flip(0), borders))
    return Table("flash", levels.float(), borders.float(), block=32, scale=in_fp16)


def minifloat(exponent: int, mantissa: int, signed: bool, continuous: bool = False) -> Table:
    """With subnormals, without Inf and NaN. The scale is a power of two, or puts absmax on the largest value."""
    fraction = torch.arange(2**mantissa, dtype=torch.float64) / 2**mantissa
    lowest = 2 - 2**exponent
    octaves = [fraction * 2.0**lowest] + [(1 + fraction) * 2.0**e for e in range(lowest, 1)]
    levels = torch.cat(octaves)
    if continuous:
        levels = levels / levels[-1]
    name = f"minifloat e{exponent}m{mantissa}" + ("" if continuous else ", 2^k scale")
    scale = from_absmax if continuous else power_of_two
    return nearest(name, mirrored(levels) if signed else levels, scale=scale, keeps_positive=not signed)


def log_uniform(octaves: int, signed: bool) -> Table:
    last = 127 if signed else 255
    magnitudes = 2.0 ** (octaves * (torch.arange(1, last + 1, dtype=torch.float64) / last - 1))
    levels = torch.cat((torch.zeros(1, dtype=torch.float64), magnitudes))
    return nearest(f"log, {octaves} octaves", mirrored(levels) if signed else levels, keeps_positive=not signed)


# ---- bf16 ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BFloat16:
    """Nearest even, or up with the probability that keeps the mean; per block scaled by its absmax, or not at all."""

    rounding: Rounding | None = None  # None: torch's own, to nearest even
    scaled: bool = False

    def __call__(self, x: Tensor, now: Now) -> Tensor:
        if self.scaled:
            blocks = x.view(-1, BLOCK)
            scale = blocks.abs().amax(1, keepdim=True).clamp_(min=FLOOR)
            return (self._round(blocks / scale, now) * scale).view(-1)
        return self._round(x, now)

    def _round(self, x: Tensor, now: Now) -> Tensor:
        if self.rounding is None:
            return x.bfloat16().float()
        return (x.view(torch.int32) + self.rounding(x, 16, now)).bitwise_and_(-1 << 16).view(torch.float32)

    def __str__(self) -> str:
        return f"bf16{' scaled' if self.scaled else ''}, {self.rounding.__name__ if self.rounding else 'nearest'}"


# ---- All of them -----------------------------------------------------------------------------------------------------


def codes_of(signed: bool) -> dict[str, Code]:
    """By name, what may hold a state that is signed (exp_avg) or not (exp_avg_sq)."""
    bits = 7 if signed else 8
    codes = [
        *(Offset(m, signed) for m in ((3, 4, 5) if signed else (3, 4, 5, 6))),
        linear(signed),
        dynamic(signed),
        flash(signed),
        root(signed),
        minifloat(4, bits - 4, signed),
        minifloat(4, bits - 4, signed, continuous=True),
        minifloat(5, bits - 5, signed),
        *(log_uniform(octaves, signed) for octaves in ((8, 16) if signed else (16, 24))),
        *(Offset(m, signed, rounding) for rounding in (random, golden) for m in (4, 5)),
        *(Offset(m, signed, block=block) for m in (4, 5) for block in (128,)),
        BFloat16(),
        BFloat16(scaled=True),
        BFloat16(random),
        BFloat16(golden),
    ]
    return {str(code): code for code in codes}


def check_nearest(code: Offset) -> None:
    """No level is nearer than the one that the integer form finds, but for the one rounding of d + |y|."""
    levels = code.decode(torch.arange(code.last + 1, dtype=torch.int32)).double()
    assert levels[0] == 0 and levels[-1] == torch.tensor(code.peak) and bool((levels.diff() > 0).all())
    borders = (levels[1:] + levels[:-1]) / 2
    octaves = 2.0 ** -(code.octaves * torch.rand(10_000, dtype=torch.float64))
    y = torch.cat((levels, borders * (1 - 2.0**-20), borders, borders * (1 + 2.0**-20), octaves)).float()
    if not code.signed:
        y = y[(y == 0) | (y > levels[1])]  # those below are kept from 0 on purpose
    found = (code.decode(code.encode(y, Now())).double() - y).abs()
    best = (levels - y[:, None]).abs().amin(1)
    assert bool((found - best <= (y + code.offset) * 2.0**-23).all()), code
