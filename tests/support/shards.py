"""A shard made by hand, for the kernels alone: params of several groups and steps, poison wherever nothing may look.

Every buffer lies between two guard zones; gradients are allocated one by one, aligned or not. All that is not an
element of a param (guards, the padding of last blocks, what a gradient is surrounded by) starts as NaN, or as a code
near the largest, so that reading it shows in the result; guards and skipped params are compared after the launch, so
that writing them shows too.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardopt.kernels import native_backend, triton_backend
from shardopt.kernels.formats import FP32, BlockFormat, Format
from shardopt.kernels.launch import Backend
from shardopt.kernels.spec import Spec
from shardopt.kernels.tables import BLOCK, Factors, Gradients, Streams, Tables
from shardopt.rules.rule import Rule
from shardopt.tools.one_shard import run_alone
from tests.support.number_formats import (
    decode_blocks,
    encode_blocks,
    from_bf16,
    join_master,
    noise,
    part_master,
    to_bf16,
    to_bf16_by_chance,
)
from tests.support.oracle import Array, Oracle

# Without a GPU the kernels of Triton run in its interpreter (conftest.py), on CPU tensors.
TRITON_DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BACKENDS: tuple[tuple[Backend, torch.device], ...] = (
    (native_backend, torch.device("cpu")),
    (triton_backend, TRITON_DEVICE),
)
GUARD = 64  # elements on either side
POISON = {4: 0x7FC0BEEF, 2: 0x7FEF, 1: 0xFE}  # NaN in fp32; in fp16 and in bf16; a large code
INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_PARAM, _FIRST_STATE = 1, 3  # streams that draw bits of their own

Draw = Callable[[torch.Size, torch.Generator], Tensor]


@dataclass(frozen=True)
class Member:
    """One param of the shard."""

    numel: int  # elements in this shard
    step: int = 1
    lr_factor: float = 1.0  # its group's lr, over the base group's
    skipped: bool = False
    before: int = 0  # blocks of it that lie in the shards of other ranks
    misaligned: int = 0  # elements that its gradient lies off an aligned address


@dataclass(frozen=True)
class Shape:
    """What a shard holds and what its launch is handed."""

    members: tuple[Member, ...]
    empty_blocks: int = 0  # behind the last member: no param's
    factors: Factors = field(default_factory=Factors)
    grads: str = "log_uniform"
    seed: int = 0
    padding: float = math.nan  # what the streams hold behind the end of a param


SCALES = " scales"


def grain(name: str) -> int:
    """Elements for one item of this stream."""
    return BLOCK if name.endswith(SCALES) else 1


class Guarded:
    """A 1D buffer between guard zones, all of it poison at first."""

    def __init__(self, numel: int, dtype: torch.dtype, shift: int = 0, buffer: Tensor | None = None) -> None:
        self.numel, self.shift = numel, shift
        if buffer is None:
            size = torch.empty((), dtype=dtype).element_size()
            buffer = torch.full((numel + 2 * GUARD + shift,), POISON[size], dtype=INTEGERS[size]).view(dtype)
        self.buffer = buffer

    @property
    def inner(self) -> Tensor:
        return self.buffer[GUARD + self.shift : GUARD + self.shift + self.numel]

    def copy_to(self, device: torch.device) -> "Guarded":
        return Guarded(self.numel, self.buffer.dtype, self.shift, self.buffer.to(device, copy=True))

    def assert_guards(self, what: str) -> None:
        ints = bits(self.buffer)
        outside = torch.cat([ints[: GUARD + self.shift], ints[GUARD + self.shift + self.numel :]])
        assert bool((outside == POISON[self.buffer.element_size()]).all()), f"{what}: written outside of the shard"


@dataclass
class Memory:
    """The buffers of a shard on one device."""

    param: Guarded
    master: Guarded | None
    states: dict[str, Guarded]
    scales: dict[str, Guarded]  # one for each block, of the states that have them
    grads: list[Guarded]

    def copy_to(self, device: torch.device) -> "Memory":
        return Memory(
            self.param.copy_to(device),
            None if self.master is None else self.master.copy_to(device),
            {name: state.copy_to(device) for name, state in self.states.items()},
            {name: scales.copy_to(device) for name, scales in self.scales.items()},
            [grad.copy_to(device) for grad in self.grads],
        )

    def streams(self) -> dict[str, Guarded]:
        scales = {f"{name}{SCALES}": each for name, each in self.scales.items()}
        return {"param": self.param, **({"master": self.master} if self.master else {}), **self.states, **scales}


@dataclass
class HandmadeShard:
    """A shard of ``shape`` filled with values, and what one launch must make of it."""

    shape: Shape
    rule: Rule
    group: dict[str, Any]
    spec: Spec
    draws: dict[str, Draw]  # of gradients, by name
    memory: Memory = field(init=False)
    starts: list[int] = field(init=False)  # first element of each member in the shard

    def __post_init__(self) -> None:
        blocks = [-(-member.numel // BLOCK) for member in self.shape.members]
        self.starts = [BLOCK * sum(blocks[:index]) for index in range(len(blocks))]
        self.num_blocks = sum(blocks) + self.shape.empty_blocks
        generator = torch.Generator().manual_seed(self.shape.seed)
        self.memory = self._allocate()
        self.counters = [
            tuple(each if each < 2**31 else each - 2**32 for each in counters)
            for counters in torch.randint(2**32, (len(blocks), 3), generator=generator).tolist()
        ]
        if not math.isnan(self.shape.padding):
            for stream in self.memory.streams().values():
                stream.inner.fill_(self.shape.padding)
        for name in ("param", *["master"][: self.spec.has_master], *self.spec.names):
            for row, member in enumerate(self.shape.members):
                values = 3 * torch.randn(member.numel, generator=generator, dtype=torch.float64)
                if name != "param" and self.shape.grads != "integers":
                    values = values.abs() * 10 ** torch.empty_like(values).uniform_(-42, 1, generator=generator)
                if self.shape.grads == "special":  # states that overflowed or met a NaN before, too
                    some = torch.rand(member.numel, generator=generator) < 0.2
                    values = torch.where(some, self.draws["special"](values.shape, generator), values)
                self._keep(self.memory, row, name, values.float().numpy())
        for member, grad in zip(self.shape.members, self.memory.grads, strict=True):
            drawn = self.draws[self.shape.grads](torch.Size([member.numel]), generator)
            grad.inner.copy_(drawn)

    def _allocate(self) -> Memory:
        numel, spec = self.num_blocks * BLOCK, self.spec
        states = dict(zip(spec.names, spec.states, strict=True))
        return Memory(
            Guarded(numel, spec.param.dtype),
            Guarded(numel, spec.master.dtype) if spec.has_master and spec.master is not None else None,
            {name: Guarded(numel, format.dtype) for name, format in states.items()},
            {
                name: Guarded(self.num_blocks, torch.float32)
                for name, format in states.items()
                if isinstance(format, BlockFormat)
            },
            [Guarded(member.numel, spec.grad.dtype, member.misaligned) for member in self.shape.members],
        )

    def format(self, name: str) -> Format:
        if name in ("param", "master"):
            found = self.spec.param if name == "param" else self.spec.master
            assert found is not None
            return found
        return self.spec.states[self.spec.names.index(name)]

    def _items(self, memory: Memory, row: int, name: str) -> Tensor:
        """Of one member in one stream."""
        first, last = self.starts[row], self.starts[row] + self.shape.members[row].numel
        return memory.streams()[name].inner[first // grain(name) : -(-last // grain(name))]

    def _keep(self, memory: Memory, row: int, name: str, values: Array) -> None:
        """Puts one member's fp32 values into the stream's format."""
        format, items = self.format(name), self._items(memory, row, name)
        stream = _PARAM if name == "param" else _FIRST_STATE + self._place(name)
        elements = np.arange(len(values)) + self.shape.members[row].before * BLOCK
        added = noise(format, elements, self.counters[row], stream)
        if isinstance(format, BlockFormat):
            codes, scales = encode_blocks(values, format, added)
            items.copy_(torch.from_numpy(codes))
            self._items(memory, row, name + SCALES).copy_(torch.from_numpy(scales))
        elif name == "master" and format is not FP32:
            param, rest = part_master(values, format)
            self._items(memory, row, "param").copy_(torch.from_numpy(param.view(np.int16)).view(torch.bfloat16))
            items.copy_(torch.from_numpy(rest))
        elif name == "master":
            items.copy_(torch.from_numpy(values))
            param = self._items(memory, row, "param")
            rounded = items.to(param.dtype)
            rounded[::8] = param[::8]  # written since, by others
            param.copy_(rounded)
        elif format.rounding != "nearest":
            rounded = to_bf16_by_chance(values, added)
            items.copy_(torch.from_numpy(rounded.view(np.int16)).view(torch.bfloat16))
        elif format.dtype is torch.bfloat16:
            items.copy_(torch.from_numpy(to_bf16(values).view(np.int16)).view(torch.bfloat16))
        else:
            items.copy_(torch.from_numpy(values))

    def _place(self, name: str) -> int:
        return self.spec.names.index(name) if name in self.spec.names else 0

    def _kept(self, memory: Memory, row: int, name: str) -> Array:
        """What :meth:`_keep` kept, in fp32."""
        format, items = self.format(name), self._items(memory, row, name)
        if isinstance(format, BlockFormat):
            return decode_blocks(items.numpy(), self._items(memory, row, name + SCALES).numpy(), format)
        if format.dtype is torch.bfloat16:
            return from_bf16(items.view(torch.int16).numpy().view(np.uint16))
        if name == "master" and format is not FP32:
            upper = self._items(memory, row, "param").view(torch.int16).numpy().view(np.uint16)
            return join_master(upper, items.numpy(), format)
        if name == "master":
            param = self._items(memory, row, "param")
            rounds = (items.to(param.dtype).view(torch.int16) == param.view(torch.int16)) & ~items.isnan()
            return torch.where(rounds, items, param.float()).numpy()
        return items.float().numpy()

    def member_group(self, member: Member) -> dict[str, Any]:
        return {**self.group, "lr": self.group["lr"] * member.lr_factor}

    def gradients(self, memory: Memory) -> Gradients:
        """The tables, as ``tables.py`` tells them; one more row for blocks that no param has."""
        members, device = self.shape.members, memory.param.buffer.device
        row_of_block = torch.full((self.num_blocks,), len(members), dtype=torch.int32)
        rows = torch.zeros((len(members) + 1, 2), dtype=torch.int64)
        for row, (member, start, grad) in enumerate(zip(members, self.starts, memory.grads, strict=True)):
            row_of_block[start // BLOCK : -(-(start + member.numel) // BLOCK)] = row
            if not member.skipped:
                rows[row, 0] = grad.inner.data_ptr() - start * grad.inner.element_size()
                rows[row, 1] = start + member.numel
        aligned = bool((rows[:, 0] % 16 == 0).all())
        return Gradients(row_of_block.to(device), rows.to(device), aligned)

    def scalars(self) -> Tensor:
        """2D [num_rows, num_scalars] fp32; NaN in the rows that nothing may read."""
        table = np.full((len(self.shape.members) + 1, len(self.rule.variant(self.group).scalars)), np.nan, np.float32)
        for row, member in enumerate(self.shape.members):
            if not member.skipped:
                group = self.member_group(member)
                table[row] = self.rule.evaluate(self.rule.variant(group), group, member.step, {})[0]
        return torch.from_numpy(table)

    def noise(self, device: torch.device) -> Tensor | None:
        """The tables of what is not rounded to nearest; None where all is."""
        if not self.spec.needs_noise:
            return None
        places = zip(self.counters, self.shape.members, self.starts, strict=True)
        rows = [[key, other, member.before * BLOCK - start, phase] for (key, other, phase), member, start in places]
        table = np.array([*rows, [0, 0, 0, 0]], np.int64).astype(np.int32)  # modulo 2**32
        return torch.from_numpy(table).to(device)

    def products(self) -> Tensor | None:
        """The table of what a factored rule reads."""
        return None

    def numels(self) -> list[int]:
        """Elements of the param of each row, for rules that take norms: this shard has all of them."""
        return [*(member.numel for member in self.shape.members), 0]

    def streams(self, memory: Memory) -> Streams:
        return Streams(
            memory.param.inner,
            None if memory.master is None else memory.master.inner,
            tuple(state.inner for state in memory.states.values()),
            tuple(memory.scales[name].inner if name in memory.scales else None for name in memory.states),
        )

    def launch(self, backend: Backend, device: torch.device) -> Memory:
        """One step on a copy of the buffers; asserts that nothing but this shard's active blocks was written."""
        memory = self.memory.copy_to(device)
        streams = self.streams(memory)
        scalars, noise = self.scalars().to(device), self.noise(device)
        tables = Tables(self.gradients(memory), scalars, self.shape.factors, noise, self.products())
        with np.errstate(all="ignore"):  # the interpreter computes with NumPy
            run_alone(backend, self.spec, streams, tables, self.numels())
        after = memory.copy_to(torch.device("cpu"))
        for name, stream in after.streams().items():
            stream.assert_guards(name)
            before = bits(self.memory.streams()[name].inner)
            for member, start in zip(self.shape.members, self.starts, strict=True):
                if member.skipped:
                    end = start + -(-member.numel // BLOCK) * BLOCK
                    blocks = slice(start // grain(name), end // grain(name))
                    assert torch.equal(bits(stream.inner)[blocks], before[blocks]), f"{name}: a skipped param changed"
        for grad, given in zip(after.grads, self.memory.grads, strict=True):
            assert torch.equal(bits(grad.buffer), bits(given.buffer)), "a gradient was written"
        return after

    def expected(self) -> Memory:
        """What NumPy makes of it in float32, one operation at a time."""
        memory = self.memory.copy_to(torch.device("cpu"))
        full = "master" if self.spec.has_master else "param"
        for row, (member, grad) in enumerate(zip(self.shape.members, memory.grads, strict=True)):
            if member.skipped:
                continue
            oracle = Oracle(self.rule, self.member_group(member), [self._kept(memory, row, full)], np.float32)
            oracle.states[0] = {name: self._kept(memory, row, name).copy() for name in memory.states}
            oracle.steps[0] = member.step - 1
            oracle.step([scaled(grad.inner, self.shape.factors)])
            assert oracle.params[0].dtype == np.float32
            for name in ("param", "master")[: 1 + self.spec.has_master]:
                self._keep(memory, row, name, oracle.params[0])
            for name in memory.states:
                self._keep(memory, row, name, oracle.states[0][name])
        return memory

    def assert_same(self, found: Memory, expected: Memory, who: str) -> None:
        """Every element of every param, bit for bit; NaN is NaN, and so is every code of a scale that is no number."""
        for name in expected.streams():
            for row in range(len(self.shape.members)):
                mine, theirs = self._items(found, row, name), self._items(expected, row, name)
                if name in expected.scales:
                    scales = self._items(expected, row, name + SCALES)
                    is_finite = scales.isfinite().repeat_interleave(BLOCK)[: len(theirs)]
                    mine, theirs = torch.where(is_finite, mine, 0), torch.where(is_finite, theirs, 0)
                    values = (torch.from_numpy(self._kept(each, row, name)) for each in (found, expected))
                    assert_same_bits(*values, f"{who}: {name} of {row}, decoded")
                assert_same_bits(mine, theirs, f"{who}: {name} of {row}")


def scaled(grad: Tensor, factors: Factors) -> Array:
    """The gradient in fp32, divided and multiplied in turn, rounded each time."""
    value = grad.float().numpy()
    with np.errstate(all="ignore"):
        value = value / np.float32(factors.divisor) * np.float32(factors.unscale) * np.float32(factors.clip)
    assert value.dtype == np.float32
    return value


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(INTEGERS[tensor.element_size()])


def assert_same_bits(found: Tensor, expected: Tensor, what: str) -> None:
    """Equal as integers, so that -0 is not 0; a NaN equals any NaN."""
    differs = (bits(found) != bits(expected)) & ~(found.isnan() & expected.isnan())
    if bool(differs.any()):
        at = int(differs.nonzero()[0])
        raise AssertionError(
            f"{what}: {int(differs.sum())} of {found.numel()} differ, first at {at}: "
            f"{float(found[at])!r}, expected {float(expected[at])!r}"
        )


def lone(grad: Tensor, fmt: Format = FP32, misaligned: int = 0) -> tuple[Gradients, Guarded]:
    """Tables for one param that is the whole shard, with this gradient."""
    guarded = Guarded(grad.numel(), fmt.dtype, misaligned)
    guarded.inner.copy_(grad)
    guarded = guarded.copy_to(TRITON_DEVICE) if grad.device.type == "cuda" else guarded
    pointer = guarded.inner.data_ptr()
    rows = torch.tensor([[pointer, grad.numel()]], dtype=torch.int64, device=grad.device)
    row_of_block = torch.zeros(-(-grad.numel() // BLOCK), dtype=torch.int32, device=grad.device)
    return Gradients(row_of_block, rows, pointer % 16 == 0), guarded
