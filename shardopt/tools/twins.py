"""Compares the two kernels of a rule bit for bit: both take steps from the same values.

On a machine with a GPU the Triton kernel is the compiled one; elsewhere Triton's interpreter runs it on the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..kernels.formats import BF16, format_of
from ..kernels.launch import backend_of
from ..kernels.spec import Spec
from ..kernels.tables import BLOCK, Factors, Gradients, Streams, Tables
from ..rules.matrix import MatrixRule
from ..rules.passes import passes_of
from ..rules.words import fma
from .one_shard import run_alone

if TYPE_CHECKING:
    from ..kernels.launch import Backend
    from ..rules import Rule

# Sizes of params in one shard: part of a block, one element, exactly a block, several blocks and a part.
NUMELS = (300, 1, BLOCK, 3 * BLOCK + 77)


def compare(
    rule: Rule,
    groups: Sequence[dict[str, Any]],
    dtype: torch.dtype,
    steps: int = 3,
    seed: int = 0,
    advance: Callable[[int], None] = lambda steps: None,
) -> dict[str, tuple[int, int]]:
    """Takes ``steps`` steps of ``rule`` natively and with Triton, on four params, which alternate between ``groups``.

    For a rule of whole matrices, each of its two passes is compared; torch computes what is between them.

    Returns:
        For each tensor that the steps wrote, its number of elements, and how many of them differ.
    """
    own, param, grad = rule.of(groups[0]), format_of(dtype, "the param"), format_of(dtype, "the gradient")
    if not isinstance(own, MatrixRule):
        spec = Spec(passes_of(rule.variant(groups[0])), param, grad)
        return _compared(rule, spec, groups, steps, seed, advance)
    first = Spec(passes_of(own.accumulate.variant(groups[0])), BF16, grad, None)  # its result is the update
    second = Spec(passes_of(own.apply.variant(groups[0])), param, BF16)
    made = _compared(own.accumulate, first, groups, steps, seed, advance)
    return {"update": made.pop("param"), **made} | _compared(own.apply, second, groups, steps, seed, lambda steps: None)


def _compared(
    rule: Rule,
    spec: Spec,
    groups: Sequence[dict[str, Any]],
    steps: int,
    seed: int,
    advance: Callable[[int], None],
) -> dict[str, tuple[int, int]]:
    device, variant = triton_device(), rule.variant(groups[0])
    native = _TestShard(spec, torch.device("cpu"), seed)
    triton = _TestShard(spec, device, seed)
    for step in range(1, steps + 1):
        # A pass of a matrix rule reads the shape of its matrix from the group.
        facts = [({**groups[index % len(groups)], "shape": (numel, 1)}, numel) for index, numel in enumerate(NUMELS)]
        scalars = [rule.evaluate(variant, group, step, {}, (numel, 1))[0] for group, numel in facts]
        native.step(backend_of(torch.device("cpu")), scalars, step)
        with nullcontext() if device.type == "cuda" else fma_rounds_once():
            triton.step(triton_on(device), scalars, step)
        advance(1)
    return {
        name: (mine.numel(), int((_bits(mine) != _bits(theirs.cpu())).sum()))
        for (name, mine), theirs in zip(native.tensors().items(), triton.tensors().values(), strict=True)
    }


def triton_device() -> torch.device:
    """Returns a GPU, or the CPU with Triton's interpreter switched on. Call it before Triton is imported."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    os.environ["TRITON_INTERPRET"] = "1"
    return torch.device("cpu")


def triton_on(device: torch.device) -> Backend:
    """Returns Triton's backend. Only Triton's interpreter can update CPU tensors."""
    if device.type == "cuda":
        return backend_of(device)
    from ..kernels import triton_backend

    return triton_backend


@contextmanager
def fma_rounds_once() -> Iterator[None]:
    """Context in which Triton's interpreter rounds a fused multiply-add once, as every GPU does."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_fma(_: Any, x: Any, y: Any, z: Any) -> Any:
        return TensorHandle(fma(x.data, y.data, z.data), z.dtype.scalar)

    before = InterpreterBuilder.create_fma
    InterpreterBuilder.create_fma = create_fma
    try:
        yield
    finally:
        InterpreterBuilder.create_fma = before


class _TestShard:
    """One shard with its gradients, on one device."""

    def __init__(self, spec: Spec, device: torch.device, seed: int):
        self.spec, self.device = spec, device
        self.random = np.random.default_rng(seed)
        self.starts = np.cumsum([0, *(-(-numel // BLOCK) * BLOCK for numel in NUMELS)])
        self.valid = torch.zeros(int(self.starts[-1]), dtype=torch.bool)
        for start, numel in zip(self.starts, NUMELS, strict=False):
            self.valid[start : start + numel] = True
        master = self._values() * self.valid
        self.param = master.to(spec.param.dtype).to(device)
        self.master = master.to(device) if spec.has_master else None
        self.states = {name: (self._values().abs() * self.valid).to(device) for name in spec.names}

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
        tables = Tables(gradients, table, Factors(unscale=1 / 3, clip=0.7))
        run_alone(backend, self.spec, streams, tables, NUMELS)
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # the gradients of this step may be freed from here on

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns what the steps wrote, without padding."""
        masters = {} if self.master is None else {"master": self.master}
        everything = {"param": self.param, **masters, **self.states}
        return {name: tensor[self.valid.to(self.device)] for name, tensor in everything.items()}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns bit patterns. All NaNs have one pattern, as their payloads are not guaranteed."""
    bits = tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)
    return torch.where(tensor.isnan(), torch.full_like(bits, -1), bits)
