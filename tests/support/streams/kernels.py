"""The Triton backend without a GPU: its own Python code, whose launches the native kernels carry out.

So all that the backend does around a launch (tables, what ATen adds up, what the host reads back) is what a GPU gets.
A launch uses the bytes that the kernel would: of each row the elements up to its end, and nothing of skipped rows.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from shardopt.kernels import native_backend, triton_margins, triton_reductions, triton_step
from shardopt.kernels.formats import Format, format_of
from shardopt.kernels.native_step import compile_step
from shardopt.kernels.native_sums import compile_count_nonfinite
from shardopt.kernels.products import INNER, OUTER, MarginPiece
from shardopt.kernels.reductions import BlockSums
from shardopt.kernels.spec import Spec
from shardopt.kernels.tables import BLOCK, Factors, Gradients

from .book import Book, Span, length, span
from .counts import KERNELS
from .record import COMPUTE, WORKERS, Cost

_FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Kernel:
    """In place of a Triton kernel: ``kernel[grid](...)``."""

    def __init__(self, launch: Callable[..., None]):
        self._launch = launch

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._launch


class Rows:
    """Which elements of a shard a launch updates, and where their gradients are.

    Attributes:
        numbers: of the rows that have elements.
        runs: blocks [first, last) of one row that have elements, and its number.
    """

    def __init__(self, row_of_block: Tensor, rows: Tensor):
        of_block = _values(row_of_block)
        firsts = np.flatnonzero(np.diff(of_block, prepend=-1))
        self._spans: list[tuple[int, int, int]] = []  # first element, end, address of the gradient of element 0
        self.numbers: list[int] = []
        self.runs: list[tuple[int, int, int]] = []
        for first, last in zip(firsts, [*firsts[1:], len(of_block)], strict=True):
            grad_at, end = _values(rows)[of_block[first]].tolist()
            if first * BLOCK < end:
                self._spans.append((int(first) * BLOCK, min(int(last) * BLOCK, end), grad_at))
                self.numbers.append(int(of_block[first]))
                self.runs.append((int(first), min(int(last), -(-end // BLOCK)), int(of_block[first])))

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


def _step(book: Book, *arguments: Any, spec: Spec, number: int, **_: Any) -> None:
    streams, next_row, row_of_block, rows, scalars, noise, products, totals, _, _, unscale, clip, ties = arguments
    table, used, part = _values(streams), Rows(row_of_block, rows), spec.passes[number]
    own = [each for each in (spec.param, spec.master if spec.has_master else None) if each is not None]
    writes: list[Span] = []
    for first, last, row in used.runs:
        at = table[row if next_row else 0].tolist()
        scales_at = dict(zip(part.states, at[2 + len(part.states) :], strict=True))
        sums = [BlockSums(last - first) for _ in part.measured]
        compile_step(spec, number)(
            first,
            last,
            *(each.data_ptr() for each in (row_of_block, rows, scalars, noise)),
            np.float32(unscale),
            np.float32(clip),
            ties,
            *at[: len(own)],
            *at[2 : 2 + len(part.states)],
            *(each for each in scales_at.values() if each),
            *[products.data_ptr()][: spec.has_product],
            *(address for each in sums for address in each.addresses(first)),
        )
        for index, each in enumerate(sums):
            native_backend.add_blocks(each, row_of_block, totals[index], first)
        kept = list(zip(at[: len(own)], own, strict=True)) if part.writes_param else []
        pairs = zip(part.states, at[2:], spec.states, strict=False)
        kept += [(address, format) for name, address, format in pairs if name in part.written]
        sizes = [BLOCK * getattr(each, "bits", 8 * each.itemsize) // 8 for _, each in kept]  # of a block
        writes += [(at_ + first * size, at_ + last * size) for (at_, _), size in zip(kept, sizes, strict=True)]
        writes += [
            (scales_at[name] + first * 4, scales_at[name] + last * 4) for name in part.written if scales_at[name]
        ]
    reads = [*map(span, (row_of_block, rows, scalars, noise, streams, products)), *used.gradients(spec.grad.itemsize)]
    if spec.has_product:  # of the factors, which are one tensor, where each begins
        places = _values(products)[used.numbers][:, [OUTER, INNER]].ravel().tolist()
        reads += [(at, at + 4) for at in places]
    writes += [span(totals)] * bool(part.measured)
    writes = [each for each in writes if each[0] < each[1]]
    book.act("step_kernel", reads, writes, cost=Cost(COMPUTE, length(reads) + 2 * length(writes)))
    book.counts.note(KERNELS)


def _margin_sums(book: Book, grad: Format, pieces: Sequence[MarginPiece], factors: Factors, _: torch.device) -> None:
    for each in pieces:
        there = [_values(tensor) for tensor in (each.rows, each.columns)]
        here = [torch.from_numpy(sums.copy()) for sums in there]
        native_backend.add_margin_sums([MarginPiece(each.grad, each.start, each.geometry, *here)], factors)
        for sums, added in zip(there, here, strict=True):
            sums[:] = added.numpy()
    written = [span(tensor) for each in pieces for tensor in (each.rows, each.columns)]
    book.act("margin sums", [span(each.grad) for each in pieces], written)
    book.counts.note(KERNELS)


def _totals(book: Book, row_of_block: Tensor, rows: Tensor, *arguments: Any, GRAD: str, **_: Any) -> None:
    totals, num_blocks, _, divisor, unscale = arguments
    table = Gradients(row_of_block[:num_blocks], rows, True)
    native_backend.add_totals(_format(GRAD), table, Factors(divisor, unscale), totals)
    start, width = span(totals)[0], totals.shape[1] * totals.element_size()
    added = [(start + row * width, start + (row + 1) * width) for row in Rows(row_of_block, rows).numbers]
    _read(book, "totals_kernel", row_of_block, rows, _format(GRAD), added)


def _count_nonfinite(book: Book, row_of_block: Tensor, rows: Tensor, *arguments: Any, GRAD: str, **_: Any) -> None:
    count, num_blocks = arguments
    counts = np.zeros(num_blocks, np.int32)
    tables = (row_of_block.data_ptr(), rows.data_ptr())
    compile_count_nonfinite(_format(GRAD))(0, num_blocks, *tables, counts.ctypes.data)
    _values(count)[0] += counts.sum()
    _read(book, "count_nonfinite_kernel", row_of_block, rows, _format(GRAD), [span(count)])


def _read(book: Book, name: str, row_of_block: Tensor, rows: Tensor, grad: Format, into: list[Span]) -> None:
    used = Rows(row_of_block, rows)
    reads = [span(row_of_block), span(rows), *used.gradients(grad.itemsize)]
    book.act(name, reads, into)
    book.counts.note(KERNELS)


def _format(name: str) -> Format:
    return format_of(_FORMATS[name], "a gradient")


@contextmanager
def carried_out(book: Book) -> Iterator[None]:
    """Within, launches of the Triton backend are carried out, and what the native backend does is the host's."""
    kernels = {
        (triton_step, "step_kernel"): _step,
        (triton_reductions, "totals_kernel"): _totals,
        (triton_reductions, "count_nonfinite_kernel"): _count_nonfinite,
    }
    with ExitStack() as stack:
        for (module, name), launch in kernels.items():
            kernel = Kernel(lambda *arguments, _launch=launch, **keywords: _launch(book, *arguments, **keywords))
            stack.enter_context(patch.object(module, name, kernel))
        margin_sums = partial(_margin_sums, book)
        stack.enter_context(patch.object(triton_margins, "_launch", margin_sums))  # two kernels of them, or three
        named = lambda spec, number, aligned: {"spec": spec, "number": number}  # noqa: E731
        stack.enter_context(patch.object(triton_step, "constants", named))
        stack.enter_context(_host_steps(book))
        yield


@contextmanager
def _host_steps(book: Book) -> Iterator[None]:
    """Updates on the CPU are the host's own."""
    run = native_backend.run

    def on_host(spec: Spec, number: int, streams: Any, tables: Any) -> None:
        run(spec, number, streams, tables)
        used, part = Rows(tables.gradients.row_of_block, tables.gradients.rows), spec.passes[number]
        own = [each for each in (streams.param, streams.master) if each is not None] if part.writes_param else []
        places = [index for index, name in enumerate(part.states) if name in part.written]
        writes = [each for stream in (*own, *(streams.states[index] for index in places)) for each in used.of(stream)]
        scales = [streams.scale(index) for index in places]
        writes += [each for scale in scales if scale is not None for each in used.of(scale, BLOCK)]
        reads = used.gradients(spec.grad.itemsize)
        cost = Cost(WORKERS, length(reads) + 2 * length(writes))
        book.act("an update on the CPU", reads, writes, book.host, cost)

    with patch.object(native_backend, "run", on_host):
        yield
