"""The Triton backend without a GPU: its own Python code, whose launches the native kernels carry out.

So all that the backend does around a launch (tables, what ATen adds up, what the host reads back) is what a GPU gets.
A launch uses the bytes that the kernel would: of each row the elements up to its end, and nothing of skipped rows.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from shardopt.kernels import native_backend, triton_reductions, triton_step
from shardopt.kernels.formats import BlockFormat, Format, format_of
from shardopt.kernels.native_reductions import compile_block_sums, compile_count_nonfinite
from shardopt.kernels.native_step import compile_step
from shardopt.kernels.spec import StepSpec
from shardopt.kernels.tables import BLOCK

from .book import Book, Span, span
from .counts import KERNELS

_FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Kernel:
    """In place of a Triton kernel: ``kernel[grid](...)``."""

    def __init__(self, launch: Callable[..., None]):
        self._launch = launch

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._launch


class Rows:
    """Which elements of a shard a launch updates, and where their gradients are."""

    def __init__(self, row_of_block: Tensor, rows: Tensor):
        of_block = _values(row_of_block)
        firsts = np.flatnonzero(np.diff(of_block, prepend=-1))
        self._spans: list[tuple[int, int, int]] = []  # first element, end, address of the gradient of element 0
        for first, last in zip(firsts, [*firsts[1:], len(of_block)], strict=True):
            grad_at, end = _values(rows)[of_block[first]].tolist()
            if first * BLOCK < end:
                self._spans.append((int(first) * BLOCK, min(int(last) * BLOCK, end), grad_at))

    def gradients(self, itemsize: int) -> list[Span]:
        return [(at + first * itemsize, at + end * itemsize) for first, end, at in self._spans]

    def of(self, stream: Tensor, grain: int = 1) -> list[Span]:
        """The bytes of these elements in a stream of one item for so many elements."""
        at, size = span(stream)[0], stream.element_size()
        whole = [(first // BLOCK * BLOCK, -(-end // BLOCK) * BLOCK) for first, end, _ in self._spans]
        return [(at + first // grain * size, at + end // grain * size) for first, end in whole]


def _values(table: Tensor) -> Any:
    with torch._C.DisableTorchFunction():
        return torch._C.TensorBase.numpy(table)


def _step(book: Book, *arguments: Any, spec: StepSpec, **_: Any) -> None:
    param, master, states, scales, row_of_block, rows, scalars, noise, num_blocks, unscale, clip = arguments
    scales = [each for each, format in zip(scales, spec.states, strict=True) if isinstance(format, BlockFormat)]
    streams = [param, *([master] if spec.has_master else []), *states]
    compile_step(spec)(
        0,
        num_blocks,
        *(each.data_ptr() for each in (row_of_block, rows, scalars, noise)),
        np.float32(unscale),
        np.float32(clip),
        *(each.data_ptr() for each in (*streams, *scales)),
    )
    used = Rows(row_of_block, rows)
    tables = map(span, (row_of_block, rows, scalars, noise))
    writes = [each for stream in streams for each in used.of(stream)]
    writes += [each for scale in scales for each in used.of(scale, BLOCK)]
    book.act("step_kernel", [*tables, *used.gradients(spec.grad.itemsize)], writes)
    book.counts.note(KERNELS)


def _block_sums(book: Book, row_of_block: Tensor, rows: Tensor, *arguments: Any, GRAD: str, **_: Any) -> None:
    columns, (num_blocks, divisor, unscale) = arguments[:4], arguments[4:]
    kernel = compile_block_sums(_format(GRAD))
    tables = (row_of_block.data_ptr(), rows.data_ptr())
    kernel(0, num_blocks, *tables, np.float32(divisor), np.float32(unscale), *(each.data_ptr() for each in columns))
    _read(book, "block_sums_kernel", row_of_block, rows, _format(GRAD), columns)


def _count_nonfinite(book: Book, row_of_block: Tensor, rows: Tensor, *arguments: Any, GRAD: str, **_: Any) -> None:
    counts, num_blocks = arguments
    compile_count_nonfinite(_format(GRAD))(0, num_blocks, row_of_block.data_ptr(), rows.data_ptr(), counts.data_ptr())
    _read(book, "count_nonfinite_kernel", row_of_block, rows, _format(GRAD), (counts,))


def _read(book: Book, name: str, row_of_block: Tensor, rows: Tensor, grad: Format, into: Any) -> None:
    used = Rows(row_of_block, rows)
    reads = [span(row_of_block), span(rows), *used.gradients(grad.itemsize)]
    book.act(name, reads, map(span, into))
    book.counts.note(KERNELS)


def _format(name: str) -> Format:
    return format_of(_FORMATS[name], "a gradient")


@contextmanager
def carried_out(book: Book) -> Iterator[None]:
    """Within, launches of the Triton backend are carried out, and what the native backend does is the host's."""
    kernels = {
        (triton_step, "step_kernel"): _step,
        (triton_reductions, "block_sums_kernel"): _block_sums,
        (triton_reductions, "count_nonfinite_kernel"): _count_nonfinite,
    }
    with ExitStack() as stack:
        for (module, name), launch in kernels.items():
            kernel = Kernel(lambda *arguments, _launch=launch, **keywords: _launch(book, *arguments, **keywords))
            stack.enter_context(patch.object(module, name, kernel))
        stack.enter_context(patch.object(triton_step, "constants", lambda spec, aligned: {"spec": spec}))
        stack.enter_context(patch.object(triton_step, "prepare", lambda *_: None))
        stack.enter_context(_host_steps(book))
        yield


@contextmanager
def _host_steps(book: Book) -> Iterator[None]:
    """Updates on the CPU are the host's own."""
    step = native_backend.step

    def on_host(spec: Any, streams: Any, gradients: Any, scalars: Any, factors: Any, noise: Any = None) -> None:
        step(spec, streams, gradients, scalars, factors, noise)
        used = Rows(gradients.row_of_block, gradients.rows)
        own = [each for each in (streams.param, streams.master, *streams.states) if each is not None]
        writes = [each for stream in own for each in used.of(stream)]
        writes += [each for scale in streams.scales if scale is not None for each in used.of(scale, BLOCK)]
        book.act("an update on the CPU", used.gradients(spec.grad.itemsize), writes, book.host)

    with patch.object(native_backend, "step", on_host):
        yield
