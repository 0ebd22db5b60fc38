"""The registers of all threads of a grid: a word of each thread, and which threads have written it."""

import numpy as np

from .numbers import TYPES, Array, PtxError, bits_of, width_of

Mask = Array  # 1D bool: the threads that take part


class Registers:
    def __init__(self, kinds: dict[str, str], fixed: dict[str, Array], count: int) -> None:
        """
        Args:
            kinds: of every register.
            fixed: what has a value from the beginning and keeps it: ``%tid.x``, the address of shared memory.
            count: of threads.
        """
        self._kinds, self._fixed, self._count = kinds, fixed, count
        self._words: dict[str, Array] = {}
        self._written: dict[str, Mask] = {}  # of registers that not every thread has written

    def read(self, operand: str | int, kind: str, mask: Mask) -> Array:
        """Returns the word of every thread; a wider register is read in its lower bits.

        Raises:
            PtxError: a thread of the mask has not written it, or the register is too narrow.
        """
        wanted = TYPES[kind]
        if isinstance(operand, int):
            return self._constant(operand, kind)
        words = self._fixed.get(operand)
        if words is None:
            words = self._words.get(operand)
            if words is None or not (self._written.get(operand, True) | ~mask).all():
                raise PtxError(f"{operand} is read before it is written")
        if words.dtype.itemsize < wanted.itemsize or (words.dtype.kind == "b") != (kind == "pred"):
            raise PtxError(f"{operand} is read as {kind}")
        narrowed = words if words.dtype.itemsize == wanted.itemsize else words.astype(f"u{wanted.itemsize}")
        return narrowed.view(wanted)

    def write(self, register: str, values: Array, mask: Mask) -> None:
        """Keeps the values of the mask's threads; what is narrower than the register is extended to it."""
        if register == "_":  # a sink
            return
        if register not in self._kinds:
            raise PtxError(f"{register} is not a register")
        kind = self._kinds[register]
        if width_of(kind) != 1:
            wide = np.dtype(f"{'i' if values.dtype.kind == 'i' else 'u'}{TYPES[kind].itemsize}")
            if values.dtype.itemsize > wide.itemsize:
                raise PtxError(f"{register} is too narrow")
            if values.dtype.itemsize < wide.itemsize:
                values = (values if values.dtype.kind == "i" else bits_of(values)).astype(wide)
        words = bits_of(values)
        if mask.all():
            self._written.pop(register, None)
            self._words[register] = words
            return
        if register in self._words:
            if register in self._written:
                self._written[register] = self._written[register] | mask
            words = np.where(mask, words, self._words[register])
        else:
            self._written[register] = mask
        self._words[register] = words

    def _constant(self, bits: int, kind: str) -> Array:
        if kind == "pred":
            return np.full(self._count, bool(bits))
        width = width_of(kind)
        return np.full(self._count, bits % 2**width, f"u{width // 8}").view(TYPES[kind])
