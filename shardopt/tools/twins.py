"""Compares the two kernels of a rule: steps of each from the same values, compared bit for bit.

On a machine with a GPU the Triton kernel is the compiled one; elsewhere Triton's interpreter runs it on the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..kernels.formats import FP32, format_of
from ..kernels.launch import backend_of
from ..kernels.spec import StepSpec
from ..kernels.tables import BLOCK, Factors, Gradients, Streams
from .one_shard import run_alone

if TYPE_CHECKING:
    from ..kernels.launch import Backend
    from ..rules import Rule

# Params of one shard: a partial block, one element, exactly a block, several blocks with a rest.
NUMELS = (300, 1, BLOCK, 3 * BLOCK + 77)


def compare(
    rule: Rule,
    groups: Sequence[dict[str, Any]],
    dtype: torch.dtype,
    steps: int = 3,
    seed: int = 0,
    advance: Callable[[int], None] = lambda steps: None,
) -> dict[str, tuple[int, int]]:
    """Takes ``steps`` steps of ``rule`` natively and with Triton, on four params that take turns in ``groups``.

    ``advance`` is told of each step. Returns, for each tensor that the steps wrote, its elements, and how many of them
    have bits that differ.
    """
    device = triton_device()
    variant = rule.variant(groups[0])
    spec = StepSpec(variant, format_of(dtype, "the param"), format_of(dtype, "the gradient"))
    native = _ShardOn(spec, torch.device("cpu"), seed)
    triton = _ShardOn(spec, device, seed)
    for step in range(1, steps + 1):
        facts = [(groups[index % len(groups)], (numel, 1)) for index, numel in enumerate(NUMELS)]
        scalars = [rule.evaluate(variant, group, step, {}, shape)[0] for group, shape in facts]
        for run, backend in ((native, backend_of(torch.device("cpu"))), (triton, triton_on(device))):
            run.step(backend, scalars, step)
        advance(1)
    return {
        name: (mine.numel(), int((_bits(mine) != _bits(theirs.cpu())).sum()))
        for (name, mine), theirs in zip(native.tensors().items(), triton.tensors().values(), strict=True)
    }


def triton_device() -> torch.device:
    """Returns a GPU, or the CPU with Triton's interpreter switched on, which must happen before Triton is imported."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    os.environ["TRITON_INTERPRET"] = "1"
    return torch.device("cpu")


def triton_on(device: torch.device) -> Backend:
    """Returns Triton's backend, for CPU tensors too, which only its interpreter can update."""
    if device.type == "cuda":
        return backend_of(device)
    from ..kernels import triton_backend

    return triton_backend


class _ShardOn:
    """One shard with its gradients, on one device."""

    def __init__(self, spec: StepSpec, device: torch.device, seed: int):
        self.spec, self.device = spec, device
        self.random = np.random.default_rng(seed)
        self.starts = np.cumsum([0, *(-(-numel // BLOCK) * BLOCK for numel in NUMELS)])
        self.valid = torch.zeros(int(self.starts[-1]), dtype=torch.bool)
        for start, numel in zip(self.starts, NUMELS, strict=False):
            self.valid[start : start + numel] = True
        master = self._values() * self.valid
        self.param = master.to(spec.param.dtype).to(device)
        self.master = None if spec.param is FP32 else master.to(device)
        self.states = {name: (self._values().abs() * self.valid).to(device) for name in spec.variant.states}

    def _values(self) -> torch.Tensor:
        """Returns random values of both signs, magnitudes from 1e-12 to 1e2."""
        signs = self.random.choice([-1.0, 1.0], len(self.valid))
        return torch.from_numpy((signs * 10.0 ** self.random.uniform(-12, 2, len(self.valid))).astype(np.float32))

    def step(self, backend: Backend, scalars: Sequence[Sequence[float]], step: int) -> None:
        grads = [
            grad.to(self.spec.grad.dtype).to(self.device)
            for grad in torch.split(self._values(), np.diff(self.starts).tolist())
        ]
        rows = [
            (grad.data_ptr() - int(start) * grad.element_size(), int(start) + numel)
            for grad, start, numel in zip(grads, self.starts, NUMELS, strict=False)
        ]
        row_of_block = np.repeat(np.arange(len(NUMELS)), np.diff(self.starts) // BLOCK).astype(np.int32)
        gradients = Gradients(
            torch.from_numpy(row_of_block).to(self.device), torch.tensor(rows, dtype=torch.int64).to(self.device), True
        )
        table = torch.tensor(scalars, dtype=torch.float32).to(self.device)
        streams = Streams(self.param, self.master, tuple(self.states.values()))
        factors = Factors(unscale=1 / 3, clip=0.7)
        run_alone(backend, self.spec, streams, gradients, table, factors, None, NUMELS)
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # the gradients of this step may be freed from here on

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns what the steps wrote, without padding."""
        masters = {} if self.master is None else {"master": self.master}
        everything = {"param": self.param, **masters, **self.states}
        return {name: tensor[self.valid.to(self.device)] for name, tensor in everything.items()}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns bit patterns; every NaN counts as the same one, as payloads are not promised."""
    bits = tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)
    return torch.where(tensor.isnan(), torch.full_like(bits, -1), bits)
