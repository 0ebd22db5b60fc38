"""Formats of masters and states: what they promise of every value, and the same bits from kernels, codecs and NumPy.

A rule that returns the gradient puts any fp32 number into a format, one that returns a state reads it back. The native
kernel sees every pattern, Triton's those where rounding can go wrong; test_kernels.py compares the two on whole shards.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardopt.kernels import codecs, native_backend
from shardopt.kernels.formats import (
    BF16,
    BF16_DITHERED,
    BF16_RANDOM,
    FORMATS,
    FP16,
    FP32,
    ROOT2,
    SIGNED8,
    SMALLEST_SCALE,
    SPLIT,
    SPLIT24,
    UNSIGNED8,
    BlockFormat,
    Format,
)
from shardopt.kernels.launch import Backend
from shardopt.kernels.spec import Spec
from shardopt.kernels.tables import BLOCK, Streams, Tables
from shardopt.rules import rule
from shardopt.rules.passes import passes_of
from tests.support.number_formats import (
    decode_blocks,
    dithered,
    dropped_bits,
    encode_blocks,
    fractions,
    from_bf16,
    hashed,
    part_master,
    to_bf16_by_chance,
)
from tests.support.shards import BACKENDS, assert_same_bits, bits, lone

KERNELS = pytest.mark.parametrize(("backend", "device"), BACKENDS, ids=("native", "triton"))
BLOCKS = [each for each in FORMATS.values() if isinstance(each, BlockFormat)]
BLOCK_FORMATS = pytest.mark.parametrize("format", BLOCKS, ids=lambda each: each.name)
MASTERS = pytest.mark.parametrize("format", [SPLIT, SPLIT24], ids=lambda each: each.name)
# Below a bf16: nothing, the least, around the middle of what 8 bits keep, around the tie, all.
LOW_HALVES = (0x0000, 0x0001, 0x007F, 0x0080, 0x0081, 0x7F7F, 0x7F80, 0x7FFF, 0x8000, 0x8001, 0xFF7F, 0xFF80, 0xFFFF)
LARGEST = torch.finfo(torch.float32).max


def no_scalars(group: Any, step: int, carried: Any) -> dict[str, float]:
    return {}


@rule(scalars=no_scalars)
def take_gradient(param, grad, state, s):
    return grad


@rule(scalars=no_scalars)
def keep_param(param, grad, state, s):
    return param


@rule(states=("kept",), scalars=no_scalars)
def put(param, grad, state, s):
    state.kept = grad
    return param


@rule(states=("kept",), scalars=no_scalars)
def approach(param, grad, state, s):
    state.kept = state.kept + 0.001 * (grad - state.kept)
    return param


@rule(states=("kept", "other"), scalars=no_scalars)
def by_turns(param, grad, state, s):
    before = state.kept
    state.kept = grad - before
    param = param + state.kept
    state.other = state.other + state.kept * before
    state.kept = grad + state.other
    return param + before / state.kept


@rule(states=("kept",), scalars=no_scalars)
def get(param, grad, state, s):
    return state.kept + 0 * grad  # without the state, which is +0 where it is not read, there is nothing to see


def launch(
    backend: Backend, spec: Spec, streams: Streams, grad: Tensor, noise: tuple[int, int, int, int] | None = None
) -> None:
    """One param that is the whole shard."""
    gradients, _grad = lone(grad)
    scalars = torch.empty((1, 0), device=grad.device)
    rows = None if noise is None else torch.tensor([noise], dtype=torch.int32, device=grad.device)
    with np.errstate(all="ignore"):
        backend.run(spec, 0, streams, Tables(gradients, scalars, noise=rows))


def padded(numel: int) -> int:
    return -(-numel // BLOCK) * BLOCK


def high_halves(low: int) -> Tensor:
    """Every upper half, before this lower one."""
    return ((torch.arange(2**16, dtype=torch.int64) << 16) + low - 2**31).int()


def is_interpreted(backend: Backend, device: torch.device) -> bool:
    """Triton's interpreter runs program by program, ten milliseconds for each 256 elements."""
    return backend is not native_backend and device.type == "cpu"


def halves_for(backend: Backend, low: int, device: torch.device) -> Tensor:
    """All upper halves; interpreted, of every sign and exponent those with the ends and the middle of the mantissas."""
    found = high_halves(low)
    if is_interpreted(backend, device):
        found = found.view(-1, 0x80)[:, [0, 1, 0x3F, 0x40, 0x7E, 0x7F]].flatten()
    return found


def u16(tensor: Tensor) -> np.ndarray[Any, Any]:
    return tensor.cpu().view(torch.int16).numpy().view(np.uint16)


# -- masters -----------------------------------------------------------------------------------------------------------


def through_kernel(backend: Backend, master: Tensor, format: Format) -> tuple[Tensor, Tensor, Tensor]:
    """The param and what is kept beside it, after a step that makes the master what it is; and the master of these."""
    numel, device = master.numel(), master.device
    param = torch.full((padded(numel),), math.nan, dtype=torch.bfloat16, device=device)
    rest = torch.zeros(padded(numel), dtype=format.dtype, device=device)
    spec = Spec(passes_of(take_gradient.variant({})), BF16, FP32, format)
    launch(backend, spec, Streams(param, rest, ()), master)
    halves = param[:numel].clone(), rest[:numel].clone()
    launch(backend, Spec(passes_of(keep_param.variant({})), BF16, FP32, format), Streams(param, rest, ()), master)
    for before, after in zip(halves, (param, rest), strict=True):
        assert_same_bits(after[:numel].cpu(), before.cpu(), "a step that changes nothing changed a master")
    return *halves, codecs.join(*halves, format)


def check_masters(backend: Backend, patterns: Tensor, format: Format) -> None:
    master = patterns.view(torch.float32)
    param, rest, joined = through_kernel(backend, master, format)
    expected_param, expected_rest = part_master(master.cpu().numpy(), format)
    assert np.array_equal(u16(param), expected_param), "not the master rounded"
    assert np.array_equal(rest.cpu().numpy(), expected_rest), "not what rounding leaves"
    assert_same_bits(codecs.low_bits_of(master, param, format)[~master.isnan()], rest[~master.isnan()], "the codec's")
    dropped = dropped_bits(format)
    if not dropped:
        assert_same_bits(joined, master, "not all of fp32 comes back")
        return
    # To nearest, ties away from zero, of the magnitude: what is kept is a multiple of 2**dropped.
    magnitude = (patterns & 0x7FFFFFFF).long()
    expected = (magnitude + (1 << (dropped - 1)) >> dropped << dropped) + (patterns.long() & 1 << 31)
    expected = expected.where(expected < 1 << 31, expected - (1 << 32)).int().view(torch.float32)
    assert_same_bits(joined[~master.isnan()], expected[~master.isnan()], "not the nearest of what can be kept")
    assert bool(joined[master.isnan()].isnan().all())


@KERNELS
@MASTERS
def test_a_split_master_comes_back(backend: Backend, device: torch.device, format: Format) -> None:
    """And beside it the param is the master rounded to nearest."""
    for low in LOW_HALVES:
        check_masters(backend, halves_for(backend, low, device).to(device), format)


@KERNELS
@MASTERS
def test_a_written_param_joins_a_stale_rest(backend: Backend, device: torch.device, format: Format) -> None:
    """Each bf16 value beside rests that another one left, as a write through ``.data`` leaves them: the master is the
    value to half a unit in its last place, of its sign; an infinity is not NaN."""
    info, value = torch.iinfo(format.dtype), (halves_for(backend, 0, device) >> 16).short().view(torch.bfloat16)
    for rest in (info.min, -1, 1, info.max):
        rests = torch.full((len(value),), rest, dtype=format.dtype, device=device)
        joined = codecs.join(value, rests, format)
        param, low, unused = value.clone(), rests.clone(), torch.zeros(len(value), device=device)
        launch(backend, Spec(passes_of(keep_param.variant({})), BF16, FP32, format), Streams(param, low, ()), unused)
        assert_same_bits(codecs.join(param, low, format), joined, "the kernel joins otherwise")
        numbers = ~value.isnan()
        assert not bool(joined[numbers].isnan().any()), "NaN from a number"
        assert bool((joined.signbit() == value.signbit())[numbers].all()), "another sign"
        finite = value.isfinite()
        exponent = (value.view(torch.int16).int() >> 7 & 0xFF).clamp(min=1) - 127
        unit = 2.0 ** (exponent - 7).double()
        assert bool(((joined.double() - value.double()).abs() <= unit / 2)[finite].all())


# From the number that a param is to the master beside it: inside half a unit, the ties, and the next numbers.
DISTANCES = (-0x10000, -0x8001, -0x8000, -0x7FFF, -1, 0, 1, 0x7FFF, 0x8000, 0x8001, 0x10000)
NAN_OF_CUDA = 0x7FFFFFFF  # rounds to -0 where a NaN has no case of its own


@KERNELS
@pytest.mark.parametrize("to", [BF16, FP16], ids=lambda each: each.name)
def test_a_whole_master_follows_a_written_param(backend: Backend, device: torch.device, to: Format) -> None:
    """A master is kept where it rounds to the param, to the even number where it is a tie; else the param counts."""
    highs = halves_for(backend, 0, device)[:: 5 if is_interpreted(backend, device) else 1]
    values = (highs >> 16).short().view(to.dtype)
    patterns = [values.float().view(torch.int32) + distance for distance in DISTANCES]
    patterns += [torch.full_like(patterns[0], bits) for bits in (0, -(2**31), 0x7F800000, -0x800000, NAN_OF_CUDA, 1)]
    pattern, params = torch.cat(patterns), values.repeat(len(patterns))
    master, size = pattern.view(torch.float32), padded(len(pattern))
    spec = Spec(passes_of(keep_param.variant({})), to, FP32)
    for ties in (False, True):
        rounds = master.to(to.dtype).view(torch.int16) == params.view(torch.int16)
        if ties and to is BF16:
            rounds |= (pattern + 0x8000 >> 16).short() == params.view(torch.int16)
        expected = torch.where(rounds & ~master.isnan(), master, params.float())
        below, above = torch.zeros(size, dtype=to.dtype, device=device), torch.zeros(size, device=device)
        below[: len(params)], above[: len(params)] = params.to(device), master.to(device)
        gradients, _grad = lone(torch.zeros(len(params), device=device))
        tables = Tables(gradients, torch.empty((1, 0), device=device), ties=ties)
        with np.errstate(all="ignore"):
            backend.run(spec, 0, Streams(below, above, ()), tables)
        assert_same_bits(above[: len(params)].cpu(), expected, f"the kernel, ties={ties}")
        assert_same_bits(codecs.follow(master, params, ties), expected, f"the codec, ties={ties}")
    above[: len(params)] = master.to(device)
    with np.errstate(all="ignore"):
        backend.run(dataclasses.replace(spec, compares=False), 0, Streams(below, above, ()), tables)
    assert_same_bits(above[: len(params)].cpu(), master, "a kernel that does not compare")


@pytest.mark.slow
@pytest.mark.parametrize("eighth", range(8))
def test_all_of_fp32_comes_back(eighth: int) -> None:
    chunk, first = 2**22, -(2**31) + eighth * 2**29
    for start in range(first, first + 2**29, chunk):
        check_masters(native_backend, torch.arange(start, start + chunk, dtype=torch.int64).int(), SPLIT)


# The seven bits of a mantissa that the param holds: the ends and the middle, or all.
FEW_HIGHS, ALL_HIGHS = (0, 1, 0x3F, 0x40, 0x7F), tuple(range(0x80))


@pytest.mark.parametrize("highs", [FEW_HIGHS, pytest.param(ALL_HIGHS, marks=pytest.mark.slow)], ids=["few", "all"])
@MASTERS
def test_how_close_a_split_master_is(format: Format, highs: tuple[int, ...]) -> None:
    """All lower halves of a few exponents, the least and the largest among them; the error is that of 8 more bits."""
    significant = 24 - dropped_bits(format)
    for exponent in (0, 1, 127, 254):
        uppers = torch.tensor(highs, dtype=torch.int32) + (exponent << 7)
        patterns = ((uppers[:, None] << 16) + torch.arange(1 << 16, dtype=torch.int32)).view(-1)
        if exponent == 254:
            patterns = patterns[: -(1 << dropped_bits(format))]  # the last ones are rounded to infinity
        _, _, joined = through_kernel(native_backend, patterns.view(torch.float32), format)
        values = patterns.view(torch.float32).double()
        error = (joined.double() - values).abs() / 2.0 ** (max(exponent, 1) - 127)
        assert float(error.max()) == (0 if significant == 24 else 2.0**-significant)


@KERNELS
@MASTERS
def test_ties_are_rounded_away_from_zero(backend: Backend, device: torch.device, format: Format) -> None:
    """Or 16 bits could not hold the difference."""
    tie = torch.tensor([0x3F808000]).int().view(torch.float32)
    assert u16(through_kernel(backend, tie.to(device), format)[0]) == [0x3F81]


@MASTERS
def test_a_master_beside_a_param_that_was_rounded_to_even(format: Format) -> None:
    """As an fp32 master's params are: ties come back within one of what is kept, all else as it was."""
    for low in LOW_HALVES:
        master = high_halves(low).view(torch.float32)
        master = master[master.abs() < 3e38]
        param = master.bfloat16()
        joined = codecs.join(param, codecs.low_bits_of(master, param, format), format)
        away = (bits(joined).long() - bits(master).long()).abs()
        dropped = dropped_bits(format)
        is_tie = abs(low - 0x8000) <= 1 << dropped >> 1
        assert int(away.max()) <= (1 << dropped >> 1) + (is_tie << dropped), hex(low)


@MASTERS
def test_another_param_counts_more_than_a_master(format: Format) -> None:
    master = torch.tensor([1.001, -3.7, math.nan, math.inf, 0.0, 1e-40])
    param = torch.tensor([2.0, -3.8, 1.5, 7.0, -0.5, 1.0]).bfloat16()
    assert_same_bits(codecs.join(param, codecs.low_bits_of(master, param, format), format), param.float(), "")


# -- rounding by chance ------------------------------------------------------------------------------------------------


@KERNELS
def test_chance_is_keyed_by_param_step_and_element(backend: Backend, device: torch.device) -> None:
    """The hash of element, keys and stream alone, wherever a shard begins; a state is dithered, with a phase."""
    values = torch.rand(3 * BLOCK + 7, generator=torch.Generator().manual_seed(0)) + 0.5
    spec = Spec(passes_of(put.variant({})), BF16_RANDOM, FP32, None, (BF16_DITHERED,))
    for keys, first in itertools.product([(0, 0), (-5, 2**31 - 1)], [0, BLOCK, -BLOCK, 2**31 - BLOCK]):
        kept = torch.zeros(padded(len(values)), dtype=torch.bfloat16, device=device)
        param = torch.zeros_like(kept)
        launch(backend, spec, Streams(param, None, (kept,)), values.to(device), (*keys, first, first // 3))
        elements = np.arange(len(values)) + first
        expected = to_bf16_by_chance(values.numpy(), dithered(elements, first // 3, 3))
        assert np.array_equal(u16(kept)[: len(values)], expected)
        launch(
            backend,
            Spec(passes_of(take_gradient.variant({})), BF16_RANDOM, FP32, None),
            Streams(param, None, ()),
            values.to(device),
            (*keys, first, 0),
        )
        assert np.array_equal(u16(param)[: len(values)], to_bf16_by_chance(values.numpy(), hashed(elements, *keys, 1)))
        assert not np.array_equal(u16(param), u16(kept))


def rounded_by_chance(backend: Backend, values: Tensor, keys: tuple[int, int]) -> Tensor:
    param = torch.zeros(padded(len(values)), dtype=torch.bfloat16, device=values.device)
    spec = Spec(passes_of(take_gradient.variant({})), BF16_RANDOM, FP32, None)
    launch(backend, spec, Streams(param, None, ()), values, (*keys, 0, 0))
    return param[: len(values)]


@KERNELS
def test_chance_takes_one_of_the_neighbours(backend: Backend, device: torch.device) -> None:
    for low in LOW_HALVES:
        patterns = halves_for(backend, low, device)
        values = patterns.view(torch.float32)
        found = bits(rounded_by_chance(backend, values.to(device), (1, 2)).cpu()).int() & 0xFFFF
        below = patterns >> 16 & 0xFFFF
        is_nan = values.isnan()
        assert bool((found[is_nan] == 0x7FC0).all())
        assert bool(((found == below) | (found == below + 1))[~is_nan].all())
        if low == 0:
            assert torch.equal(found[~is_nan], below[~is_nan])
        else:
            share = float((found != below)[~is_nan].float().mean())
            assert abs(share - low / 2**16) < 2.5 / math.sqrt(len(values))  # 5 sigma


DRAWS = 2**12


@pytest.mark.slow
def test_the_mean_is_kept_in_every_interval() -> None:
    """4 sigma for each of the 65,536 upper halves, at a lower half of its own; with one step a draw."""
    generator = torch.Generator().manual_seed(0)
    lower = torch.randint(1, 2**16, (2**16,), generator=generator)
    patterns = ((torch.arange(2**16) << 16) + lower - 2**31).int()
    values = patterns.view(torch.float32)
    ups = torch.zeros(2**16, dtype=torch.int64)
    keys = torch.randint(-(2**31), 2**31, (DRAWS, 2), generator=generator).tolist()
    for one, other in keys:
        found = bits(rounded_by_chance(native_backend, values, (one, other))).int() & 0xFFFF
        ups += found != (patterns >> 16 & 0xFFFF)
    number = ~values.isnan()
    chance = lower.double() / 2**16
    sigma = (chance * (1 - chance) * DRAWS).sqrt()
    away = ((ups - DRAWS * chance) / sigma)[number]
    # Of 65,000 normal numbers 4 lie beyond 4 sigma; where less than a draw is expected they are not normal.
    common = (torch.minimum(chance, 1 - chance)[number] * DRAWS) > 20
    assert int((away[common].abs() > 4).sum()) <= 15
    assert float(away[common].abs().max()) < 5.5
    assert abs(float(away.mean())) < 4 / math.sqrt(len(away)) and abs(float(away.std()) - 1) < 0.02


def test_the_mean_is_kept() -> None:
    """Of one value at 2**20 elements, and of 2**10 steps of one element."""
    for share in (0.001, 0.25, 0.5, 0.9):
        values = torch.full((2**20,), 1 + share * 2.0**-7)
        mean = float(rounded_by_chance(native_backend, values, (3, -4)).double().mean())
        assert abs(mean - float(values[0])) < 4 * 2.0**-7 * math.sqrt(share * (1 - share) / 2**20) + 1e-9


# -- blocks in 8 bits: what they promise -------------------------------------------------------------------------------


def neighbours_of_codes(format: BlockFormat) -> Tensor:
    """1D fp64, as fractions of a scale: around each code, around the middle between two, and in between."""
    table = torch.from_numpy(fractions(format)).double()
    middles = (table[1:] + table[:-1]) / 2
    near = torch.cat(
        [point * (1 + sign * eps) for point in (table, middles) for sign in (-1, 1) for eps in (0, 1e-6, 1e-3, 0.01)]
    )
    near = torch.cat([near, torch.linspace(0, 1, 1000).double() * table[-1]])
    near = near[near <= table[-1]]
    return torch.cat([near, -near, -near.new_zeros(1)]) if format.has_sign else near


# Of the block's largest magnitude: subnormal, around where a scale becomes it, ordinary, with such inverses, huge.
LARGEST_OF_BLOCK = (
    2.0**-149,
    2.0**-140,
    1e-39,
    2.0**-126,
    2.0**-125.1,
    1e-30,
    1e-8,
    0.1,
    1.0,
    255 / 256,
    3e5,
    1e20,
    2e38,
    LARGEST,
)


def blocks_around_codes(format: BlockFormat) -> Tensor:
    """2D [blocks, 256] fp32: the block's largest, and 255 others."""
    near = neighbours_of_codes(format)
    near = torch.cat([near, near.new_zeros(-len(near) % (BLOCK - 1))]).view(-1, BLOCK - 1)
    top = float(fractions(format)[-1])
    return torch.cat(
        [
            torch.cat([torch.full((len(near), 1), largest).double(), near / top * largest], 1).float()
            for largest in LARGEST_OF_BLOCK
        ]
    )


def tolerance(values: Tensor, scales: Tensor, format: BlockFormat) -> Tensor:
    """Half of the gap between the codes on either side, and what fp32 may lose on the way there; fp64."""
    table = torch.from_numpy(fractions(format)).double()
    scale = scales.double()[:, None]
    fraction = values.double().abs() / scale.where(scale > 0, 1.0)
    above = torch.searchsorted(table, fraction.contiguous()).clamp(1, format.top)
    half = (table[above] - table[above - 1]) / 2
    return half * scale * (1 + 2.0**-10) + 2.0**-149


@BLOCK_FORMATS
def test_codes_are_within_half_a_gap(format: BlockFormat) -> None:
    values = blocks_around_codes(format)
    kept = codecs.encode(values.flatten(), format)
    assert kept[1] is not None
    decoded = codecs.decode(*kept, format).view_as(values)
    error = (decoded.double() - values.double()).abs()
    allowed = tolerance(values, kept[1], format)
    if not format.has_sign:  # above zero it stays, at the lowest code
        lowest = float(fractions(format)[1]) * kept[1][:, None].double()
        allowed = torch.where((values > 0) & (values.double() < lowest), lowest, allowed)
    at = int((error - allowed).argmax())
    assert bool((error <= allowed).all()), (float(values.view(-1)[at]), float(decoded.view(-1)[at]), at)
    # The bound is no wider than it need be: some values come near to it.
    assert float((error / allowed).max()) > 0.99
    assert bool((decoded[values == 0] == 0).all())
    assert torch.equal(decoded.signbit(), values.signbit())


@BLOCK_FORMATS
def test_the_largest_of_a_block_has_the_top_code(format: BlockFormat) -> None:
    """So the scale is as small as it can be. But for blocks that are subnormal throughout."""
    values = blocks_around_codes(format)
    values = values[values[:, 0] > SMALLEST_SCALE * format.largest]
    kept = codecs.encode(values.flatten(), format)
    assert kept[1] is not None
    assert bool((kept[0].view_as(values)[:, 0] == format.top).all())
    exact = values[:, 0].double() / float(fractions(format)[-1])
    assert float((kept[1].double() / exact - 1).abs().max()) <= 2.0**-15
    assert bool(codecs.decode(*kept, format).isfinite().all())


@BLOCK_FORMATS
@settings(max_examples=300)
@given(data=st.data())
def test_blocks_of_any_values(format: BlockFormat, data: st.DataObject) -> None:
    """The codec against NumPy, and the bound, for what hypothesis thinks of."""
    magnitude = st.floats(0, LARGEST, width=32) | st.sampled_from([0.0, 2.0**-149, 2.0**-126, 1.0, 3e38])
    signs = st.sampled_from([1.0, -1.0] if format.has_sign else [1.0])
    values = np.array(data.draw(st.lists(st.builds(math.prod, st.tuples(magnitude, signs)), max_size=600)), np.float32)
    codes, scales = encode_blocks(values, format)
    kept = codecs.encode(torch.from_numpy(values), format)
    assert kept[1] is not None
    assert np.array_equal(kept[0].numpy(), codes) and np.array_equal(kept[1].numpy(), scales)
    assert_same_bits(codecs.decode(*kept, format), torch.from_numpy(decode_blocks(codes, scales, format)), "decoded")


@BLOCK_FORMATS
def test_what_was_decoded_encodes_to_itself(format: BlockFormat) -> None:
    """Every code below every other as the block's largest, with scales of every exponent that can occur."""
    values = blocks_around_codes(format).flatten()
    generator = torch.Generator().manual_seed(0)
    exponents = torch.rand(4000, 1, generator=generator, dtype=torch.float64) * 276 - 149
    spread = torch.rand(4000, BLOCK, generator=generator, dtype=torch.float64) ** 8
    values = torch.cat([values, (spread * 2**exponents).float().flatten()])
    first = codecs.encode(values, format)
    decoded = codecs.decode(*first, format)
    again = codecs.encode(decoded, format)
    assert first[1] is not None and again[1] is not None
    assert torch.equal(again[0], first[0])
    # Where all codes are zero the scale says nothing, and becomes zero.
    nothing = (decoded == 0).view(-1, BLOCK).all(1)
    assert torch.equal(again[1], torch.where(nothing, 0.0, first[1]))
    assert_same_bits(codecs.decode(*again, format), decoded, "decoded")


def test_above_zero_never_becomes_zero() -> None:
    """What an update is divided by: the least fp32 number beside any other."""
    for largest in (*LARGEST_OF_BLOCK, 0.0):
        values = torch.full((BLOCK,), 2.0**-149)
        values[0], values[1:3] = max(largest, 2.0**-149), 0.0
        decoded = codecs.decode(*codecs.encode(values, UNSIGNED8), UNSIGNED8)
        assert bool((decoded[3:] > 0).all()) and float(decoded[0]) > 0 and not bool(decoded[1:3].any())


@KERNELS
@BLOCK_FORMATS
def test_kernels_and_codecs_agree(backend: Backend, device: torch.device, format: BlockFormat) -> None:
    """Encoded to nearest by the one and decoded by the other, every code and every kind of block; interpreted, a fifth
    of the blocks of each kind, of every code some."""
    format = dataclasses.replace(format, rounding="nearest")
    values = blocks_around_codes(format)[:: 5 if is_interpreted(backend, device) else 1].flatten()[: -BLOCK + 3]
    kept = torch.full((padded(len(values)),), 0x5A, dtype=torch.uint8, device=device)
    scales = torch.full((len(kept) // BLOCK,), math.nan, device=device)
    param = torch.zeros(len(kept), device=device)
    spec = Spec(passes_of(put.variant({})), FP32, FP32, states=(format,))
    launch(backend, spec, Streams(param, None, (kept,), (scales,)), values.to(device))
    expected = codecs.encode(values, format)
    assert expected[1] is not None
    assert torch.equal(kept[: len(values)].cpu(), expected[0])
    assert_same_bits(scales.cpu(), expected[1], "scales")
    spec = Spec(passes_of(get.variant({})), FP32, FP32, states=(format,))
    launch(backend, spec, Streams(param, None, (kept,), (scales,)), values.to(device).zero_())
    shown = codecs.decode(*expected, format)
    assert bool((param[: len(values)].cpu() == shown).all())
    # Reading changed nothing.
    assert torch.equal(kept[: len(values)].cpu(), expected[0])


@KERNELS
@pytest.mark.parametrize("other", [FP32, SIGNED8], ids=lambda each: each.name)
def test_a_rule_sees_what_it_assigned_last(backend: Backend, device: torch.device, other: Format) -> None:
    """Old, new and intermediate values of states, read by the param and by one another; two steps."""
    numel = 2 * BLOCK + 77
    generator = torch.Generator().manual_seed(0)
    param, size = torch.zeros(padded(numel), device=device), padded(numel)
    formats = (SIGNED8, other)
    kept = tuple(torch.zeros(size, dtype=format.dtype, device=device) for format in formats)
    scales = tuple(
        torch.zeros(size // BLOCK, device=device) if isinstance(format, BlockFormat) else None for format in formats
    )
    spec = Spec(passes_of(by_turns.variant({})), FP32, FP32, states=formats)
    shown, first, second = torch.zeros(3, numel)
    for _ in range(2):
        grad = 1 + torch.rand(numel, generator=generator)
        launch(backend, spec, Streams(param, None, kept, scales), grad.to(device))
        before, between = first, grad - first
        second = second + between * before
        last = grad + second
        shown = shown + between + before / last
        encoded = [codecs.encode(each, format) for each, format in zip((last, second), formats, strict=True)]
        for each, codes, format in zip(encoded, kept, formats, strict=True):
            assert_same_bits(codes[:numel].cpu(), each[0], format.name)
        first, second = (codecs.decode(*each, format) for each, format in zip(encoded, formats, strict=True))
        assert_same_bits(param[:numel].cpu(), shown, "the param")


@KERNELS
@BLOCK_FORMATS
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, -math.nan])
def test_what_is_no_number_is_never_hidden(
    backend: Backend, device: torch.device, format: BlockFormat, bad: float
) -> None:
    """A block that holds one shows it, the others do not; in kernels and codecs. -Inf where there is no sign is 0."""
    format = dataclasses.replace(format, rounding="nearest")
    values = torch.linspace(-1, 1, 3 * BLOCK).abs()
    place = BLOCK + 7
    values[place] = bad
    if math.copysign(1, bad) < 0:
        values.view(torch.int32)[place] |= -(2**31)
    if math.isnan(bad):
        values.view(torch.int32)[place] |= 5  # of the many NaN one that no arithmetic makes
    kept = torch.zeros(3 * BLOCK, dtype=torch.uint8, device=device)
    scales = torch.zeros(3, device=device)
    spec = Spec(passes_of(put.variant({})), FP32, FP32, states=(format,))
    param = torch.zeros(3 * BLOCK, device=device)
    launch(backend, spec, Streams(param, None, (kept,), (scales,)), values.to(device))
    for found in ((kept.cpu(), scales.cpu()), codecs.encode(values, format)):
        decoded = codecs.decode(*found, format)
        if not format.has_sign and bad == -math.inf:
            assert float(decoded[place]) == 0 and bool(decoded.isfinite().all())
            continue
        assert not math.isfinite(decoded[place]), "hidden"
        assert math.isnan(bad) == math.isnan(decoded[place])
        assert found[1] is not None
        assert int(found[1].view(torch.int32)[1]) == (0x7FC00000 if math.isnan(bad) else 0x7F800000)
        assert not bool(decoded[BLOCK : 2 * BLOCK].isfinite().any()), "finite beside what has no scale"
        assert bool(decoded[:BLOCK].isfinite().all()) and bool(decoded[2 * BLOCK :].isfinite().all())


@BLOCK_FORMATS
def test_a_decaying_average_keeps_decaying(format: BlockFormat) -> None:
    """Nothing new arrives: the scale falls and the codes stay, however small the step."""
    values = torch.rand(BLOCK, generator=torch.Generator().manual_seed(0))
    kept = codecs.encode(values, format)
    codes, first = kept[0], codecs.decode(*kept, format)
    for _ in range(1000):
        kept = codecs.encode(codecs.decode(*kept, format) * 0.999, format)
        assert torch.equal(kept[0], codes)
    last = codecs.decode(*kept, format)
    ratio = (last.double() / first.double())[first > 0]
    assert float((ratio / 0.999**1000 - 1).abs().max()) < 1000 * 2.0**-16


def chunks_of_one_param() -> Iterator[slice]:
    for start in range(0, 5 * BLOCK, 2 * BLOCK):
        yield slice(start, start + 2 * BLOCK)


@BLOCK_FORMATS
def test_a_block_is_a_world_of_its_own(format: BlockFormat) -> None:
    """Encoded a few blocks at a time as well: no code depends on what else is there."""
    values = torch.randn(5 * BLOCK + 19, generator=torch.Generator().manual_seed(0)).abs()
    values[BLOCK : 2 * BLOCK] *= 1e10
    whole = codecs.encode(values, format)
    assert whole[1] is not None
    for part in chunks_of_one_param():
        some = codecs.encode(values[part], format)
        assert some[1] is not None
        assert torch.equal(some[0], whole[0][part])
        assert torch.equal(some[1], whole[1][part.start // BLOCK : part.start // BLOCK + len(some[1])])


# -- dithering ---------------------------------------------------------------------------------------------------------

STEPS = 512


@KERNELS
@pytest.mark.parametrize("format", [BF16_DITHERED, UNSIGNED8], ids=lambda each: each.name)
def test_dithering_keeps_the_mean(backend: Backend, device: torch.device, format: Format) -> None:
    """Over the steps of each element and over the elements of a step; and no element is off by a whole gap."""
    values = torch.rand(2 * BLOCK, generator=torch.Generator().manual_seed(0)) * 0.9 + 0.05
    values[::BLOCK] = 1  # the blocks' largest, so that gaps are known
    kept = torch.zeros(len(values), dtype=format.dtype, device=device)
    scales = torch.zeros(2, device=device) if isinstance(format, BlockFormat) else None
    spec = Spec(passes_of(put.variant({})), FP32, FP32, states=(format,))
    steps, param = (64 if backend is not native_backend else STEPS), torch.zeros(len(values), device=device)
    mean, over_elements = torch.zeros(len(values), dtype=torch.float64), []
    for step in range(1, steps + 1):
        phase = (step * ROOT2 + 2**31) % 2**32 - 2**31
        launch(backend, spec, Streams(param, None, (kept,), (scales,)), values.to(device), (0, 0, 0, phase))
        shown = codecs.decode(kept.cpu(), None if scales is None else scales.cpu(), format)
        off = (shown - values).double() / gaps(format, values)
        assert float(off.abs().max()) < 1.001
        over_elements.append(float(off.mean()))
        mean += off / steps
    assert float(mean.abs().max()) < 4 / steps**0.9  # if it were random: 1 / sqrt(12 * steps)
    assert max(map(abs, over_elements)) < 0.05  # 1 / sqrt(512) / sqrt(12): 0.013


@KERNELS
def test_the_largest_of_a_block_keeps_the_top_code(backend: Backend, device: torch.device) -> None:
    """Whatever the dither, so that what is decoded has the scale that it came from, and encodes to itself."""
    generator = torch.Generator().manual_seed(0)
    blocks = 32 if is_interpreted(backend, device) else 512
    largest = torch.rand(blocks, 1, generator=generator) + 1
    largest *= 2.0 ** torch.randint(-120, 120, (blocks, 1), generator=generator)
    values = torch.rand(blocks, BLOCK, generator=generator) * largest
    values[:, ::2] = largest
    spec = Spec(passes_of(put.variant({})), FP32, FP32, states=(UNSIGNED8,))
    kept, scales = torch.zeros(values.numel(), dtype=torch.uint8, device=device), torch.zeros(blocks, device=device)
    streams = Streams(torch.zeros(values.numel(), device=device), None, (kept,), (scales,))
    for step in range(1, 4):
        phase = (step * ROOT2 + 2**31) % 2**32 - 2**31
        launch(backend, spec, streams, values.flatten().to(device), (0, 0, 0, phase))
        assert bool((kept.view(blocks, BLOCK)[:, ::2] == UNSIGNED8.top).all())
        again = codecs.encode(codecs.decode(kept.cpu(), scales.cpu(), UNSIGNED8), UNSIGNED8)
        assert again[1] is not None
        assert torch.equal(again[0], kept.cpu()) and torch.equal(again[1], scales.cpu())


def gaps(format: Format, values: Tensor) -> Tensor:
    """fp64: how far apart the two numbers are that a value lies between."""
    if not isinstance(format, BlockFormat):
        return 2.0 ** (torch.frexp(values.double()).exponent - 8).double()
    table = torch.from_numpy(fractions(format)).double() / format.largest
    above = torch.searchsorted(table, values.double()).clamp(1, len(table) - 1)
    return table[above] - table[above - 1]


def test_a_small_change_is_not_lost() -> None:
    """An average that a step moves by a hundredth of a gap goes where it should, and stays put to nearest."""
    for format, moves in ((UNSIGNED8, True), (dataclasses.replace(UNSIGNED8, rounding="nearest"), False)):
        kept, scales = torch.zeros(BLOCK, dtype=torch.uint8), torch.zeros(1)
        param = torch.zeros(BLOCK)
        values = torch.full((BLOCK,), 0.5)
        values[0] = 1
        spec = Spec(passes_of(approach.variant({})), FP32, FP32, states=(format,))
        launch(native_backend, Spec(passes_of(put.variant({})), FP32, FP32, states=(format,)),
               Streams(param, None, (kept,), (scales,)), values, (0, 0, 0, 0))  # fmt: skip
        values[1:] = 0.25
        for step in range(1, 3001):
            phase = (step * ROOT2 + 2**31) % 2**32 - 2**31
            launch(native_backend, spec, Streams(param, None, (kept,), (scales,)), values, (0, 0, 0, phase))
        shown = codecs.decode(kept, scales, format)[1:]
        expected = 0.25 + 0.25 * 0.999**3000
        assert bool(((shown - expected).abs() < 0.02).all()) if moves else bool((shown > 0.45).all())


# -- the tests' own comparison -----------------------------------------------------------------------------------------


def test_bf16_by_chance_in_numpy() -> None:
    """The expectation itself: 0 and all ones of the draw are down and up."""
    values = np.array([1 + 2.0**-23, 1.0, -1.5 - 2.0**-20, 3.3e38], np.float32)
    down = from_bf16(to_bf16_by_chance(values, np.zeros(4, np.uint64)))
    up = from_bf16(to_bf16_by_chance(values, np.full(4, 2**32 - 1, np.uint64)))
    assert (np.abs(down) <= np.abs(values)).all() and (np.abs(up) >= np.abs(values)).all()
    assert up[1] == down[1] == 1 and up[0] == 1 + 2.0**-7
