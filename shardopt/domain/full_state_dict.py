"""Parts in torch's ``get_optimizer_state_dict()`` and ``get_model_state_dict()``: with ``full_state_dict=True`` wholes.

torch gathers DTensors there, and passes every other tensor on as it is: a part would stay a part. What is asked for is
known to one function of torch alone, so that one is wrapped. Ranks read by themselves, so none waits for another.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from ..tensors.part import Part
from .dtensors import is_dtensor, local_tensor, shown_as

if TYPE_CHECKING:
    from .shard import Shard

_MODULE, _GATHERS = "torch.distributed.checkpoint.state_dict", "_gather_state_dict"


def take_parts_along() -> None:
    """Makes torch's functions read parts from now on, if the program has imported them, and safetensors stream them.

    Neither has a hook for it.
    """
    from ..tensors.parts_in_files import stream_parts  # nobody saves in most processes

    stream_parts()
    module = sys.modules.get(_MODULE)
    gather = getattr(module, _GATHERS, None)
    if gather is not None and not isinstance(gather, _WithParts):
        setattr(module, _GATHERS, _WithParts(gather))


def part_of_param(
    shard: Shard,
    index: int,
    name: str,
    gather: Callable[[Shard, str], torch.Tensor],
    gather_slices: Callable[[Shard, torch.Tensor, str], torch.Tensor],
    fetch: Callable[[], torch.Tensor] | None,
    write: Callable[[torch.Tensor], None],
    is_alone: bool,
) -> Part:
    """Returns this rank's slice of a param as a part, with the shape of the param.

    Args:
        name: what the shard holds of the param.
        gather, gather_slices: collective; return what all ranks hold of the shard, or pass as their slices of it.
        fetch, write, is_alone: see :class:`Part`.
    """

    def gathered(_: torch.Tensor) -> torch.Tensor:
        return shard.as_param(gather(shard, name), index).clone()

    def gathered_slices(local: torch.Tensor) -> torch.Tensor:
        own = torch.zeros(shard.numel, dtype=local.dtype, device=shard.device)
        own[shard.slice_of(index).local] = local.to(shard.device)
        flat = gather_slices(shard, own, "copies of params")
        return shard.as_param(flat, index).to(local.device, copy=True)

    take_parts_along()
    start, like = shard.slice_of(index).start, shard.bucket.params[index]
    return Part(shard.read(name, index), start, like, gathered, None, fetch, write, gathered_slices, is_alone)


@dataclass(frozen=True)
class _WithParts:
    """torch's function, with whole tensors in place of parts on the ranks that keep the result."""

    gather: Callable[..., dict[str, Any]]

    def __call__(self, state_dict: dict[str, Any], *, ranks_only: Sequence[int] = (), **keywords: Any) -> Any:
        is_kept = not ranks_only or dist.get_rank(keywords.get("pg")) in ranks_only
        to_host = bool(keywords.get("cpu_offload"))

        def whole(tensor: torch.Tensor) -> torch.Tensor:
            part = local_tensor(tensor)
            # Of a DTensor all ranks of its mesh gather what is then inside, whoever keeps it.
            if not isinstance(part, Part) or not (is_kept or is_dtensor(tensor)):
                return tensor
            # broadcast_from_rank0= sends a tensor's memory, and the other ranks take it for that of a contiguous one.
            found = part.read_whole().contiguous()
            return shown_as(tensor, found if to_host and not is_dtensor(tensor) else found.to(part.device))

        return self.gather(tree_map_only(torch.Tensor, whole, state_dict), ranks_only=ranks_only, **keywords)
