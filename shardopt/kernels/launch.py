"""Chooses how kernels are executed: native code for CPU tensors, Triton for GPU tensors; the same bits from both."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..compilers.versions import require
from .reductions import new_totals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .formats import Format
    from .products import MarginPiece
    from .spec import Spec
    from .tables import Factors, Gradients, Tables


class Backend(Protocol):
    """One way to execute kernels: ``native_backend.py`` or ``triton_backend.py``.

    Attributes:
        joins_shards: True if one call of ``run`` takes the streams of several shards.
    """

    joins_shards: bool

    def prepare(self, spec: Spec, device: torch.device, aligned: bool) -> None:
        """Compiles the kernels of all passes.

        It is called before the ranks agree on a step, so that a failure changes nothing.
        """

    def run(self, spec: Spec, number: int, streams: Any, tables: Tables) -> None:
        """Runs pass ``number`` over the shard, in place: ``rule(param, grad * unscale * clip, states)``.

        No device is waited for.

        Args:
            streams: Streams; or JoinedStreams, if the backend joins shards.
        """

    def add_totals(self, grad: Format, gradients: Gradients, factors: Factors, totals: torch.Tensor) -> None:
        """Adds what the blocks of ``grad / divisor * unscale`` sum up to, row by row of the table.

        ``factors.clip`` is ignored: it follows from the norm that these sums are for. No device is waited for.

        Args:
            totals: 2D [num_rows, COLUMNS] int64, as :mod:`.reductions` has it; on the device of the table.
        """

    def prepare_margin_sums(self, grad: Format, device: torch.device) -> None:
        """Compiles what ``add_margin_sums`` needs for gradients on ``device``."""

    def add_margin_sums(self, pieces: Sequence[MarginPiece], factors: Factors) -> None:
        """Adds squares of ``grad * unscale * clip`` to sums of rows and columns; see :class:`.products.MarginPiece`."""

    def count_nonfinite(self, grad: Format, gradients: Gradients, count: torch.Tensor) -> None:
        """Adds to ``count``, 1D [1] int64, how many elements of the gradients are Inf or NaN."""


@cache
def backend_of(device: torch.device) -> Backend:
    """Returns the backend for tensors on ``device``, and loads Triton at first use."""
    if device.type == "cpu":
        from . import native_backend  # which needs Numba only for a kernel that is not in the cache

        return native_backend
    require("triton", f"{device.type} tensors")
    from . import triton_backend

    return triton_backend


def totals_of(grad: Format, gradients: Gradients, factors: Factors) -> torch.Tensor:
    """Returns the totals of gradients, as :func:`new_totals` has them, on their device; the host does not wait."""
    found = new_totals(gradients.num_rows, gradients.row_of_block.device)
    backend_of(found.device).add_totals(grad, gradients, factors, found)
    return found
