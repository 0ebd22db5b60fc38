"""The backend for GPUs: kernels that Triton compiles; one launch, on the current stream, for shards kept alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from ..errors import ShardoptError
from .triton_pass import prepare_pass, run_pass
from .triton_reductions import add_totals, count_nonfinite
from .triton_step import prepare, step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .formats import Format
    from .products import MarginPiece
    from .tables import Factors

joins_shards = True

__all__ = [
    "add_margin_sums",
    "add_totals",
    "count_nonfinite",
    "joins_shards",
    "prepare",
    "prepare_margin_sums",
    "prepare_pass",
    "run_pass",
    "step",
]


def prepare_margin_sums(grad: Format) -> NoReturn:
    raise ShardoptError(
        "give params on a GPU to torch.optim.Adafactor, or train them on the CPU: a rule with second moments of rows "
        "and columns has no kernel for a GPU yet, and nothing changed."
    )


def add_margin_sums(pieces: Sequence[MarginPiece], factors: Factors) -> NoReturn:
    raise NotImplementedError("prepare_margin_sums() refuses")
