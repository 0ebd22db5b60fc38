"""The native kernels of sums, compiled; this module loads without Numba, which the functions' own modules import."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..compilers.native import native_kernel

if TYPE_CHECKING:
    from .formats import BlockFormat, Format


@functools.cache
def compile_block_sums(grad: Format) -> Callable[..., None]:
    def function() -> Callable[..., Any]:
        from .native_reductions import block_sums

        return block_sums(grad)

    return native_kernel(f"block_sums of {grad.name}", "qqqqffqqqq", function)


@functools.cache
def compile_add_blocks() -> Callable[..., None]:
    def function() -> Callable[..., Any]:
        from .native_reductions import add_blocks

        return add_blocks()

    return native_kernel("add_blocks", "qqqqqqq", function)


@functools.cache
def compile_count_nonfinite(grad: Format) -> Callable[..., None]:
    def function() -> Callable[..., Any]:
        from .native_reductions import count_nonfinite

        return count_nonfinite(grad)

    return native_kernel(f"count_nonfinite of {grad.name}", "qqqqq", function)


@functools.cache
def compile_margin_sums(grad: Format) -> Callable[..., None]:
    def function() -> Callable[..., Any]:
        from .native_margins import margin_sums

        return margin_sums(grad)

    return native_kernel(f"margin_sums of {grad.name}", "qqqqff", function)


@functools.cache
def compile_is_decoded(kept: Format, format: BlockFormat) -> Callable[..., None]:
    def function() -> Callable[..., Any]:
        from .native_reductions import is_decoded

        return is_decoded(kept, format)

    return native_kernel(f"is_decoded of {kept.name} and {format.name}", "qqqqqq", function)
