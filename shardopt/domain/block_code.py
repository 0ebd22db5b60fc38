"""Slices in 8 or 4 bits on the wire: quantized in blocks of 256 by one rank, decoded by others.

Encoding and decoding are passes of no rule, for which the kernels of a step are compiled: the bits are the same from
native code and from Triton, and those of states in 8 bits (``kernels/formats.py``)::

    encode    sent = value                        sent: codes, and an fp32 scale a block
    show      param = sent                        as it is encoded
    decode    param = sent
    sum       param = sent + other                of two messages, as they are decoded
              param = param + sent                of each further one

A message is the codes of a slice, then its scales, as bytes; of 4 bits, two share a byte. Blocks hold elements of
one param, so that padding and other params change no scale; what is not encoded decodes to zeros. A block with an Inf
or a NaN arrives as Inf and NaN throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..kernels.formats import BF16, FP32, format_of
from ..kernels.launch import backend_of
from ..kernels.spec import Spec
from ..kernels.tables import BLOCK, Gradients, Streams, Tables
from ..rules.passes import Pass

if TYPE_CHECKING:
    from ..kernels.formats import BlockFormat

# Bytes. Messages lie behind each other in an all-to-all, and kernels take codes in 128 bits.
_ALIGNED = 16
_NO_SCALARS = torch.zeros(1, 1)
_SENT = ("sent",)
_BOTH = ("sent", "other")
_KEPT = ("sent", "residual")


def _pass(name: str, states: tuple[str, ...], source: str, written: tuple[str, ...], writes_param: bool) -> Pass:
    rounded = ("sent",) if written and source.count("state_sent") > 1 else ()
    return Pass(name, states, (), source, written, rounded, (), (), writes_param, ())


_ENCODE = _pass("encode", _SENT, "state_sent = grad", _SENT, writes_param=False)
_ENCODE_AND_SHOW = _pass("encode_and_show", _SENT, "state_sent = grad\nparam = state_sent", _SENT, writes_param=True)
# 1e38 is an fp32 number that bf16 has room for; a NaN is not below it.
_ENCODE_AND_KEEP = _pass(
    "encode_and_keep",
    _KEPT,
    "local_value = grad + state_residual\n"
    "state_sent = local_value\n"
    "local_rest = local_value - state_sent\n"
    "state_residual = where(abs(local_rest) < 1e+38, local_rest, 0.0)",
    _KEPT,
    writes_param=False,
)
_DECODE = _pass("decode", _SENT, "param = state_sent", (), writes_param=True)
_SUM = (
    _pass("decode_first", _BOTH, "param = state_sent", (), writes_param=True),
    _pass("decode_two", _BOTH, "param = state_sent + state_other", (), writes_param=True),
    _pass("decode_and_add", _BOTH, "param = param + state_sent", (), writes_param=True),
)


class BlockCode:
    """Encodes slices of one length, and decodes them."""

    def __init__(
        self,
        numel: int,
        from_dtype: torch.dtype,
        to_dtype: torch.dtype,
        format: BlockFormat,
        device: torch.device,
        keeps_rest: bool = False,
        sums: bool = False,
        shows: bool = False,
    ):
        """Compiles the kernels.

        Args:
            numel: of a slice: whole blocks.
            from_dtype, to_dtype: of what is encoded, and of what is decoded.
            keeps_rest: True to add a residual before, and to keep what quantizing takes.
            sums: True if several messages are decoded at a time.
            shows: True if what is encoded is decoded too, at once, by who encodes it.
        """
        source, target = (format_of(each, "what travels") for each in (from_dtype, to_dtype))
        plain = _ENCODE_AND_SHOW if shows else _ENCODE
        part, formats = (_ENCODE_AND_KEEP, (format, BF16)) if keeps_rest else (plain, (format,))
        self._encode = Spec((part,), source, source, None, formats)
        self._decode = Spec(_SUM if sums else (_DECODE,), target, FP32, None, (format,) * (1 + sums))
        self._numel, self._bits, self._device, self._format, self._target = numel, format.bits, device, format, target
        self._one_row = torch.zeros(numel // BLOCK, dtype=torch.int32, device=device)  # of each block
        self._backend = backend_of(device)
        for spec in (self._encode, self._decode):
            self._backend.prepare(spec, device, aligned=True)

    @property
    def message_bytes(self) -> int:
        """The bytes that travel for one slice."""
        return message_bytes(self._numel, self._bits)

    def _code_bytes(self, numel: int) -> int:
        return numel * self._bits // 8

    def encode(
        self,
        values: torch.Tensor,
        where: Gradients | None,
        residual: torch.Tensor | None = None,
        shown: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the message of a slice.

        Args:
            values: 1D [numel].
            where: says which elements of them are encoded, with a row for each param; None: none.
            residual: 1D [numel] bf16, if what quantizing takes is kept.
            shown: 1D [numel], gets what the message holds, if this is a code that ``shows``.
        """
        # Kernels write neither padding nor what is not encoded, which decodes to zeros.
        message = torch.zeros(self.message_bytes, dtype=torch.uint8, device=self._device)
        if where is not None:
            codes = message[: self._code_bytes(self._numel)]
            kept = () if residual is None else (residual,)
            scales = (self._scales(message, 0, self._numel), *(None for _ in kept))
            streams = Streams(values if shown is None else shown, None, (codes, *kept), scales)
            self._backend.run(self._encode, 0, streams, Tables(where, _NO_SCALARS))
        return message

    def decode_into(self, target: torch.Tensor, messages: Sequence[torch.Tensor], first: int) -> None:
        """``target = messages[0] + messages[1] + ...``, in this order, from element ``first`` of the slice on.

        Args:
            target: 1D, whole blocks.
        """
        numel = target.numel()
        if numel == 0:
            return
        rows = torch.from_numpy(np.array([[target.data_ptr(), numel]]))  # a fifth of the time of torch.tensor()
        gradients = Gradients(self._one_row[: numel // BLOCK], rows, target.data_ptr() % 16 == 0)
        tables, count = Tables(gradients, _NO_SCALARS), len(self._decode.states)
        codes = [each[self._code_bytes(first) : self._code_bytes(first + numel)] for each in messages]
        scales = [self._scales(each, first, first + numel) for each in messages]
        for number, at in enumerate([0, *range(2, len(messages))]):
            # A pass of one message takes another one's place too, and does not read it.
            of = [at, min(at + 1, len(messages) - 1)][:count]
            streams = Streams(target, None, tuple(codes[each] for each in of), tuple(scales[each] for each in of))
            self._backend.run(self._decode, 2 if number else min(len(messages), 2) - 1, streams, tables)

    def is_shown(self, shown: torch.Tensor, message: torch.Tensor, first: int) -> bool:
        """Returns whether ``shown``, in host memory, is to the bit what a message holds from element ``first`` on.

        Args:
            shown: 1D, whole blocks.
        """
        from ..kernels.native_backend import is_decoded

        stop = first + shown.numel()
        codes = message[self._code_bytes(first) : self._code_bytes(stop)]
        return is_decoded(shown, codes, self._scales(message, first, stop), self._target, self._format)

    def _scales(self, message: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Returns the scales of elements [start, stop) of a slice, whole blocks."""
        first = self._code_bytes(self._numel)
        return message[first + start // BLOCK * 4 : first + stop // BLOCK * 4].view(torch.float32)


def message_bytes(numel: int, bits: int) -> int:
    """Returns the bytes of the message of a slice of whole blocks, in codes of so many bits."""
    used = numel * bits // 8 + numel // BLOCK * 4
    return -(-used // _ALIGNED) * _ALIGNED
