"""In which dtype the model sees a param that was handed over in fp32, and the exact values behind it.

With ``compute_dtype`` an fp32 param becomes one of that dtype when it is bound, and its master starts from the values
that it had before. From there on it is a low-precision param like any other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from ..errors import BindingError
from ..partition.memory import zeros
from ..tensors.strides import dense_strides, flattened, in_storage_order
from .formats import OWN_DTYPE
from .param_names import matching

if TYPE_CHECKING:
    from ..config import Precision
    from ..partition.layout import BucketLayout
    from .domain import Domain
    from .formats import DtypeOf
    from .param import Candidate
    from .shard import Shard


def kept_in_fp32(module: torch.nn.Module | None, precision: Precision) -> frozenset[torch.Tensor]:
    """Returns the params of a module that stay fp32.

    Raises:
        BindingError: a pattern names nothing.
    """
    return matching(module, precision.keep_fp32, "keep_fp32", "nothing would stay in fp32 for it")


def cast_buffers(module: torch.nn.Module, precision: Precision) -> frozenset[torch.Tensor]:
    """Returns the buffers of a module that are cast.

    Raises:
        BindingError: a pattern names nothing.
    """
    without = "no buffer would be cast for it"
    found = matching(module, precision.cast_buffers, "cast_buffers", without, kind="buffer")
    return frozenset(each for each in found if each.is_floating_point())


def dtype_in_model(domain: Domain) -> DtypeOf:
    """Returns what tells in which dtype the model will see a param of this domain."""
    precision = domain.options.precision
    if precision is None:
        return OWN_DTYPE
    kept = {
        domain.locals.of(param)
        for param in kept_in_fp32(domain.options.module, precision)
        if isinstance(param, torch.nn.Parameter)
    }

    def found(param: torch.Tensor) -> torch.dtype:
        return precision.compute_dtype if param.dtype is torch.float32 and param not in kept else param.dtype

    return found


def check_castable(domain: Domain, candidates: Sequence[Candidate]) -> None:
    """Raises BindingError for params that ``compute_dtype`` does not apply to. Changes nothing."""
    precision = domain.options.precision
    if precision is None:
        return
    # A param that was frozen when the others were bound was cast with them.
    known = (torch.float32, precision.compute_dtype) if domain.links is not None else (torch.float32,)
    for name, param, _ in candidates:
        if param.dtype not in known:
            raise BindingError(
                f"hand the module over in fp32 (module.float()), or omit compute_dtype={precision.compute_dtype}: "
                f"{name} is {param.dtype}. Masters start from the fp32 values of params, which this one does not have; "
                "a low-precision param trains with fp32 masters as it is."
            )


def exact_slice(
    params: Sequence[torch.nn.Parameter], layout: BucketLayout, rank: int, fresh: Collection[torch.Tensor]
) -> torch.Tensor:
    """Returns this rank's slice of a bucket, 1D [shard_numel] in fp32, from params that are not in it yet.

    Args:
        fresh: params that have no values yet; their elements are zeros.
    """
    exact = zeros(layout.shard_numel, torch.float32, params[0].device)
    for piece in layout.pieces(rank):
        if params[piece.param] not in fresh:
            param = params[piece.param].detach()
            flat = flattened(in_storage_order(param, dense_strides(param)))
            exact[piece.local].copy_(flat[piece.start : piece.start + piece.numel])
    return exact


def _place_of(domain: Domain, param: torch.nn.Parameter) -> tuple[Shard, int] | None:
    entry = domain.entries.get(param)
    if entry is not None:
        return entry.shard, entry.index
    return None if domain.sharded is None else domain.sharded.place_of(param)


@contextmanager
def filled_in_fp32(domain: Domain, params: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """A context in which bound params that have no values get fp32 ones: their buckets get what these round to."""
    where = {param: place for param in params if (place := _place_of(domain, param)) and place[0].is_cast}
    buckets = {param: param.data for param in where}
    for param in where:
        param.data = torch.empty_like(param.data, dtype=torch.float32)
    try:
        yield
    finally:
        for param, (shard, index) in where.items():
            values, param.data = param.data, buckets[param]
            param.data.copy_(values)
            shard.write(shard.exact, index, 0, shard.in_order(index, values))
