"""The backend for GPUs: kernels that Triton compiles; one launch, on the current stream, for shards kept alike."""

from .triton_margins import add_margin_sums, prepare_margin_sums
from .triton_reductions import add_totals, count_nonfinite
from .triton_step import prepare, run

joins_shards = True

__all__ = [
    "add_margin_sums",
    "add_totals",
    "count_nonfinite",
    "joins_shards",
    "prepare",
    "prepare_margin_sums",
    "run",
]
