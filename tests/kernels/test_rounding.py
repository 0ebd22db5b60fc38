"""Rounding to bf16 and fp16: torch's cast, bit for bit, through the kernels themselves.

A rule that returns the gradient makes the step a cast: gradient in fp32, param in the format under test. Triton's form
runs on the inputs where rounding can go wrong, the native one on all 2**32 in the slow run; test_kernels.py compares
the two on everything else.
"""

from typing import Any

import numpy as np
import pytest
import torch

from shardopt.kernels import native_backend
from shardopt.kernels.formats import BF16, FP16, FP32, Format
from shardopt.kernels.launch import Backend
from shardopt.kernels.spec import Spec
from shardopt.kernels.tables import Streams, Tables
from shardopt.rules import rule
from shardopt.rules.passes import passes_of
from tests.support.shards import BACKENDS, TRITON_DEVICE, Guarded, assert_same_bits, bits, lone
from tests.support.without_gpu import sized

# Bits that are cut off: none, the least one, around the middle, all. bf16 loses 16 bits, fp16 13 (more below 2**-14).
LOW_HALVES = (0x0000, 0x0001, 0x0FFF, 0x1000, 0x1001, 0x1FFF, 0x2000, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
# Where each rounds to even, and just above; numbers that are subnormal in fp16 lose as many bits as in bf16.
TIES = {BF16: (0x8000, 0x8001), FP16: (0x1000, 0x1001, 0x8000)}
FEW_MANTISSAS = [0, 1, 0x3F, 0x40, 0x7E, 0x7F]  # by their last seven bits
CUDA_NAN = 0x7FFFFFFF  # rounds to -0 where a NaN has no case of its own


def no_scalars(group: Any, step: int, carried: Any) -> dict[str, float]:
    return {}


@rule(scalars=no_scalars)
def take_gradient(param, grad, state, s):
    return grad


def cast(backend: Backend, patterns: torch.Tensor, to: Format) -> torch.Tensor:
    """The fp32 numbers with these bits, rounded by a kernel; also checks that the master got them unchanged."""
    values = patterns.view(torch.float32)
    gradients, _grad = lone(values)
    param = Guarded(gradients.num_blocks * 256, to.dtype)
    master = Guarded(gradients.num_blocks * 256, torch.float32)
    param, master = param.copy_to(values.device), master.copy_to(values.device)
    spec = Spec(passes_of(take_gradient.variant({})), to, FP32)
    scalars = torch.empty((1, 0), device=values.device)
    with np.errstate(all="ignore"):
        backend.run(spec, 0, Streams(param.inner, master.inner, ()), Tables(gradients, scalars))
    assert_same_bits(master.inner[: len(values)], values, "master")
    return param.inner[: len(values)]


def check(backend: Backend, patterns: torch.Tensor, to: Format) -> None:
    values = patterns.view(torch.float32)
    found = cast(backend, patterns, to)
    assert_same_bits(found, values.to(to.dtype), to.name)
    if to is BF16:
        assert bool((bits(found)[values.isnan()] == 0x7FC0).all()), "one NaN for all, so that copies on ranks agree"


def high_halves(low: int) -> torch.Tensor:
    return ((torch.arange(2**16, dtype=torch.int64) << 16) + low - 2**31).int()


@pytest.mark.parametrize(
    ("backend", "device", "at_ties"),
    [
        (*BACKENDS[0], False),
        (*BACKENDS[1], True),
        pytest.param(*BACKENDS[1], False, marks=pytest.mark.slow),  # seconds for each in the interpreter
    ],
    ids=("native", "triton at ties", "triton"),
)
@pytest.mark.parametrize("to", [BF16, FP16], ids=lambda each: each.name)
def test_every_high_half(backend: Backend, device: torch.device, at_ties: bool, to: Format) -> None:
    """At ties: of every sign and exponent, with a few mantissas; the interpreter takes milliseconds for each 256."""
    for low in TIES[to] if at_ties else LOW_HALVES:
        highs = high_halves(low)
        if at_ties and device.type == "cpu":
            highs = highs.view(-1, 0x80)[:, FEW_MANTISSAS].flatten()
        check(backend, highs.to(device), to)


@pytest.mark.parametrize(("backend", "device"), BACKENDS, ids=("native", "triton"))
def test_nan_of_cuda(backend: Backend, device: torch.device) -> None:
    patterns = torch.tensor([CUDA_NAN, -1, 0x7F800001, 0x7F7FFFFF], dtype=torch.int64).int()
    found = cast(backend, patterns.to(device), BF16).cpu()
    assert bits(found).tolist() == [0x7FC0, 0x7FC0, 0x7FC0, 0x7F80]


@pytest.mark.parametrize("source", [BF16, FP16], ids=lambda each: each.name)
def test_widening_is_exact(source: Format) -> None:
    """Every 16-bit pattern as a gradient, against torch's cast to fp32; in the interpreter as at ties."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).short().view(source.dtype)
    spec = Spec(passes_of(take_gradient.variant({})), FP32, source)
    for backend, device in BACKENDS:
        is_interpreted = backend is not native_backend and device.type == "cpu"
        grad = every.view(-1, 0x80)[:, FEW_MANTISSAS].flatten() if is_interpreted else every
        gradients, _grad = lone(grad.to(device), source)
        param = torch.zeros(len(grad), device=device)
        with np.errstate(all="ignore"):
            backend.run(spec, 0, Streams(param, None, ()), Tables(gradients, torch.empty((1, 0), device=device)))
        assert_same_bits(param.cpu(), grad.float(), type(backend).__name__)


@pytest.mark.slow
@pytest.mark.parametrize("to", [BF16, FP16], ids=lambda each: each.name)
def test_all_patterns(to: Format) -> None:
    chunk = 2**24
    for start in range(-(2**31), 2**31, chunk):
        check(native_backend, torch.arange(start, start + chunk, dtype=torch.int64).int(), to)


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize("to", [BF16, FP16], ids=lambda each: each.name)
def test_all_patterns_on_a_gpu(to: Format) -> None:
    chunk, every = 2**26, sized(1, 2**13 - 1)  # odd: each low half comes with some high half
    for start in range(-(2**31), 2**31, chunk):
        patterns = torch.arange(start, start + chunk, every, dtype=torch.int64, device=TRITON_DEVICE).int()
        check(BACKENDS[1][0], patterns, to)
