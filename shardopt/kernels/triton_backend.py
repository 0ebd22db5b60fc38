"""The backend for GPUs: kernels that Triton compiles; one launch for a shard on the current stream of its device."""

from .triton_reductions import block_sums, count_nonfinite, totals
from .triton_step import prepare, step

__all__ = ["block_sums", "count_nonfinite", "prepare", "step", "totals"]
