"""Executes a grid: one instruction after the other, for all threads at a time.

Threads that took different ways at a branch wait for each other: of all threads, those at the lowest address go on, so
that ways join again where the code does.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from .memory import GlobalMemory, SharedMemory
from .numbers import TYPES, Array, PtxError, bits_of, width_of
from .operations import ATOMICS, OPERATIONS, REDUCTIONS
from .registers import Mask, Registers
from .text import Address, Instruction, Kernel, Operand

WARP = 32
ALL_LANES = 0xFFFFFFFF
# How a shuffle finds the lane that a lane reads, from its own and the operand; a lane outside of the warp reads itself.
SOURCES: dict[str, Callable[[Array, Array], Array]] = {
    "idx": lambda lane, by: by,
    "bfly": lambda lane, by: lane ^ by,
    "up": lambda lane, by: lane - by,
    "down": lambda lane, by: lane + by,
}
CLAMPS = {"idx": 31, "bfly": 31, "up": 0, "down": 31}


class Machine:
    """Blocks [first, last) of a grid in one dimension."""

    def __init__(
        self, kernel: Kernel, grid: int, arguments: list[Any], memory: GlobalMemory, shared: int, first: int, last: int
    ) -> None:
        if len(arguments) != len(kernel.params):
            raise PtxError(f"{len(arguments)} arguments for the {len(kernel.params)} params of {kernel.name}")
        self._kernel, self._memory, self._shared = kernel, memory, SharedMemory(last - first, shared)
        self._size = (last - first) * kernel.threads
        thread = np.arange(self._size, dtype=np.uint32)
        self._block, self._thread = thread // kernel.threads, thread % kernel.threads
        fixed = {
            "%tid.x": self._thread,
            "%ctaid.x": self._block + np.uint32(first),
            "%laneid": thread % WARP,
            "%ntid.x": np.full_like(thread, kernel.threads),
            "%nctaid.x": np.full_like(thread, grid),
            "WARP_SZ": np.full_like(thread, WARP),
        }
        if kernel.shared:
            fixed[kernel.shared] = np.zeros(self._size, np.uint64)
        self._registers = Registers(kernel.kinds, fixed, self._size)
        pairs = zip(kernel.params, arguments, strict=True)
        self._params = {name: _argument(kind, value) for (name, kind), value in pairs}
        self._at = np.zeros(self._size, np.int64)  # the instruction that each thread comes to next
        self._handlers = {
            "ld": self._load,
            "st": self._store,
            "atom": self._update,
            "mov": self._move,
            "shfl": self._shuffle,
            "redux": self._reduce,
            "bar": self._barrier,
            "ldmatrix": self._load_matrices,
            "stmatrix": self._store_matrices,
        }

    def run(self) -> None:
        code, joins = self._kernel.code, self._kernel.joins
        while (at := int(self._at.min(initial=len(code)))) < len(code):
            active = self._at == at
            while True:
                instruction = code[at]
                try:
                    mask = self._guarded(instruction, active)
                    if instruction.is_jump:
                        self._jump(instruction, at, active, mask)
                        break
                    self._execute(instruction, mask)
                except PtxError as error:
                    raise PtxError(f"{self._kernel.name}, {instruction}: {error}") from None
                at += 1
                if at in joins or at == len(code):
                    self._at[active] = at
                    break

    def _guarded(self, instruction: Instruction, active: Mask) -> Mask:
        if instruction.guard is None:
            return active
        predicate = self._registers.read(instruction.guard, "pred", active)
        return active & (predicate ^ instruction.is_negated)

    def _jump(self, instruction: Instruction, at: int, active: Mask, mask: Mask) -> None:
        is_branch = instruction.opcode.startswith("bra")
        self._at[active] = at + 1
        self._at[mask] = self._kernel.labels[str(instruction.operands[0])] if is_branch else len(self._kernel.code)

    def _execute(self, instruction: Instruction, mask: Mask) -> None:
        operation = OPERATIONS.get(instruction.opcode)
        handler = self._handlers.get(instruction.opcode.partition(".")[0])
        is_plain = not any(isinstance(each, tuple) for each in instruction.operands)
        if operation is not None and is_plain:
            into, *sources = instruction.operands
            kinds = zip(sources, operation.operands, strict=True)
            self._write(into, operation(*(self._read(each, kind, mask) for each, kind in kinds)), mask)
        elif handler is not None:
            handler(instruction, mask)
        else:
            raise PtxError("this opcode is not known here")

    def _read(self, operand: Operand, kind: str, mask: Mask) -> Array:
        assert isinstance(operand, str | int), operand
        return self._registers.read(operand, kind, mask)

    def _write(self, operand: Operand, values: Array, mask: Mask) -> None:
        assert isinstance(operand, str), operand
        self._registers.write(operand, values, mask)

    # -- memory --------------------------------------------------------------------------------------------------------

    def _load(self, instruction: Instruction, mask: Mask) -> None:
        """``ld.global.v4.b32 {a, b, c, d}, [address + offset]``"""
        space, kind = _space_and_kind(instruction.opcode)
        into, place = instruction.operands
        assert isinstance(place, Address)
        if space == "param":
            width, bits = width_of(kind), self._params[place.base] >> 8 * place.offset
            word = np.full(self._size, bits % 2**width, f"u{width // 8}")
            self._write(into, word.view(TYPES[kind]), mask)
            return
        registers = into if isinstance(into, tuple) else (into,)
        count = len(registers) * width_of(kind) // 8
        items = np.zeros((self._size, count), np.uint8)
        if mask.any():
            items[mask] = self._access(space, place, mask, count)
        words = items.view(TYPES[kind])
        for index, register in enumerate(registers):
            self._write(register, np.ascontiguousarray(words[:, index]), mask)

    def _store(self, instruction: Instruction, mask: Mask) -> None:
        space, kind = _space_and_kind(instruction.opcode)
        place, source = instruction.operands
        assert isinstance(place, Address)
        sources = source if isinstance(source, tuple) else (source,)
        words = np.stack([bits_of(self._read(each, kind, mask)) for each in sources], axis=1)
        if mask.any():
            self._access(space, place, mask, words[mask].view(np.uint8))

    def _update(self, instruction: Instruction, mask: Mask) -> None:
        """``atom.global.gpu.relaxed.add.u64 into, [address + offset], value``; what was there before is not told."""
        if instruction.opcode not in ATOMICS:
            raise PtxError("this opcode is not known here")
        kind, operation = ATOMICS[instruction.opcode]
        _, place, value = instruction.operands
        assert isinstance(place, Address)
        if mask.any():
            values = np.ascontiguousarray(self._read(value, kind, mask)[mask])
            self._memory.update(self._addresses(place, mask)[mask], values, operation)

    def _access(self, space: str, place: Address, mask: Mask, what: int | Array) -> Any:
        """A load of so many bytes of each thread, or a store of 2D [threads, bytes]."""
        addresses, verb = self._addresses(place, mask)[mask], "load" if isinstance(what, int) else "store"
        if space == "global":
            return getattr(self._memory, verb)(addresses, what)
        if space != "shared":
            raise PtxError(f"{space} memory is not known here")
        return getattr(self._shared, verb)(self._block[mask], self._thread[mask] // WARP, addresses, what)

    def _addresses(self, place: Address, mask: Mask) -> Array:
        is_narrow = self._kernel.kinds.get(place.base) == "b32"  # those of shared memory may be
        base = self._read(place.base, "u32" if is_narrow else "u64", mask).astype(np.uint64)
        return base + np.uint64(place.offset % 2**64)

    def _load_matrices(self, instruction: Instruction, mask: Mask) -> None:
        """``ldmatrix.sync.aligned.m8n8.x4.shared.b16 {a, b, c, d}, [address]``"""
        into, place = instruction.operands
        assert isinstance(into, tuple) and isinstance(place, Address)
        for register, addresses in zip(into, self._quarter_rows(instruction, place, len(into), mask), strict=True):
            words = np.zeros(self._size, np.uint32)
            found = self._shared.load(self._block[mask], self._thread[mask] // WARP, addresses[mask], 4)
            words[mask] = found.view(np.uint32)[:, 0]
            self._write(register, words, mask)

    def _store_matrices(self, instruction: Instruction, mask: Mask) -> None:
        """``stmatrix.sync.aligned.m8n8.x4.shared.b16 [address], {a, b, c, d}``"""
        place, source = instruction.operands
        assert isinstance(source, tuple) and isinstance(place, Address)
        for register, addresses in zip(source, self._quarter_rows(instruction, place, len(source), mask), strict=True):
            items = self._read(register, "b32", mask)[mask][:, None].view(np.uint8)
            self._shared.store(self._block[mask], self._thread[mask] // WARP, addresses[mask], items)

    def _quarter_rows(self, instruction: Instruction, place: Address, count: int, mask: Mask) -> list[Array]:
        """What each lane takes of each matrix: eight lanes name its rows of 16 bytes, four lanes share one."""
        if instruction.opcode.partition(".")[2] != f"sync.aligned.m8n8.x{count}.shared.b16":
            raise PtxError("this opcode is not known here")
        self._check_members(-1, mask)
        rows, lane = self._addresses(place, mask), np.arange(self._size) % WARP
        if (rows[mask] % 16).any():
            raise PtxError("a misaligned row of a matrix")
        warp = np.arange(self._size) - lane
        return [rows[warp + 8 * index + lane // 4] + (4 * (lane % 4)).astype(np.uint64) for index in range(count)]

    def _move(self, instruction: Instruction, mask: Mask) -> None:
        """``mov.b64 {low, high}, whole`` and ``mov.b64 whole, {low, high}``"""
        kind = instruction.opcode.partition(".")[2]
        into, source = instruction.operands
        parts = into if isinstance(into, tuple) else source
        assert isinstance(parts, tuple)
        part = f"b{width_of(kind) // len(parts)}"
        if isinstance(source, tuple):
            words = np.stack([self._read(each, part, mask) for each in source], axis=1)
            self._write(into, words.view(TYPES[kind])[:, 0], mask)
            return
        words = np.ascontiguousarray(self._read(source, kind, mask))[:, None].view(TYPES[part])
        for index, each in enumerate(parts):
            self._write(each, np.ascontiguousarray(words[:, index]), mask)

    # -- between threads -----------------------------------------------------------------------------------------------

    def _shuffle(self, instruction: Instruction, mask: Mask) -> None:
        """``shfl.sync.bfly.b32 into, source, by, clamp, members``"""
        _, sync, mode, kind = instruction.opcode.split(".")
        into, source, by, clamp, members = instruction.operands
        if (sync, kind, clamp) != ("sync", "b32", CLAMPS[mode]):
            raise PtxError(f"a shuffle that is not known here: {instruction.operands}")
        self._check_members(members, mask)
        lane = np.arange(self._size) % WARP
        number = self._read(by, "u32", mask).astype(np.int64)
        target = SOURCES[mode](lane, number)
        target = np.where((target >= 0) & (target < WARP), target, lane)
        warp = np.arange(self._size) - lane
        self._write(into, self._read(source, "b32", mask)[warp + target], mask)

    def _reduce(self, instruction: Instruction, mask: Mask) -> None:
        """``redux.sync.add.s32 into, source, members``"""
        if instruction.opcode not in REDUCTIONS:
            raise PtxError("this opcode is not known here")
        kind, reduce = REDUCTIONS[instruction.opcode]
        into, source, members = instruction.operands
        self._check_members(members, mask)
        warps = self._read(source, kind, mask).reshape(-1, WARP)
        self._write(into, np.repeat(reduce.reduce(warps, axis=1, dtype=warps.dtype), WARP), mask)

    def _check_members(self, members: Operand, mask: Mask) -> None:
        warps = mask.reshape(-1, WARP)
        if (warps.any(axis=1) & ~warps.all(axis=1)).any():
            raise PtxError("not all lanes of a warp take part")
        if (self._read(members, "u32", mask)[mask] != ALL_LANES).any():
            raise PtxError("an exchange between some lanes of a warp is not known here")

    def _barrier(self, instruction: Instruction, mask: Mask) -> None:
        """``bar.sync 0``; ``bar.warp.sync`` is nothing where lanes go on together."""
        if instruction.opcode == "bar.warp.sync":
            self._check_members(instruction.operands[0], mask)
            return
        if instruction.opcode != "bar.sync" or instruction.operands != (0,):
            raise PtxError("this barrier is not known here")
        blocks = mask.reshape(-1, self._kernel.threads)
        if (blocks.any(axis=1) & ~blocks.all(axis=1)).any():
            raise PtxError("not all threads of a block come to a barrier")
        self._shared.pass_barrier(blocks.any(axis=1))


def _space_and_kind(opcode: str) -> tuple[str, str]:
    """Of ``st.shared::cta.v4.b32``: no other modifier is known."""
    found = re.fullmatch(r"(?:ld|st)\.(\w+?)(?:::cta)?(?:\.cg)?(?:\.v[248])?\.([bsuf]\d+)", opcode)
    if found is None:
        raise PtxError("this opcode is not known here")
    return found[1], found[2]


def _argument(kind: str, value: Any) -> int:
    """The bits of an argument."""
    if kind.startswith("f"):
        return int(bits_of(np.array(value, TYPES[kind])))
    return int(value) % 2 ** width_of(kind)
