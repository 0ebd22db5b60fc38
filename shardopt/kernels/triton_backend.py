"""The backend for GPUs: kernels that Triton compiles; one launch, on the current stream, for shards kept alike."""

from .triton_pass import prepare_pass, run_pass
from .triton_reductions import add_totals, count_nonfinite
from .triton_step import prepare, step

joins_shards = True

__all__ = ["add_totals", "count_nonfinite", "joins_shards", "prepare", "prepare_pass", "run_pass", "step"]
