"""Params of the module that another optimizer trains, torch's own say: their gradients are averaged as under DDP.

Such a param stays whole on every rank, at every stage. At the end of a round of gradients, ranks tell each other who
has a gradient, and sum these. ``param.grad`` holds the mean afterwards, also of what ``no_sync()`` accumulated: what it
held of earlier rounds is the same on all ranks, so the mean over ranks leaves that as it is.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ..errors import DisagreementError, ShardoptError

if TYPE_CHECKING:
    from torch import nn

    from ..partition.comm.group import Ranks

_PHASE = "averaging gradients of params that other optimizers train"


def trained_elsewhere() -> set[torch.Tensor]:
    """Returns the params of all optimizers in this process but shardopt's own.

    It looks at every object: it is called only where a trainable param is in no param group.
    """
    found: set[torch.Tensor] = set()
    for each in gc.get_objects():
        # By ``type()``: an object may answer to ``isinstance`` by code of its own.
        if issubclass(type(each), torch.optim.Optimizer) and not hasattr(each, "engine"):
            found.update(param for group in getattr(each, "param_groups", ()) for param in group["params"])
    return found


@torch.no_grad()
def average(named: Mapping[str, nn.Parameter], ranks: Ranks) -> None:
    """Collective, once a round has ended: averages the gradients over ranks. A rank without one adds zeros.

    Raises:
        ShardoptError: a gradient is sparse; DisagreementError on the other ranks.
        DisagreementError: ranks differ in the params.
    """
    named = {name: param for name, param in named.items() if param.requires_grad}
    if not named or ranks.size == 1:
        return
    grads = {name: param.grad for name, param in named.items() if param.grad is not None}
    sparse = next((name for name, grad in grads.items() if grad.layout is not torch.strided), None)
    present = [int(name in grads) for name in named]
    rows = ranks.exchange_json([list(named), sparse, present], _PHASE)
    for rank, (names, other, _) in enumerate(rows):
        if names != rows[0][0]:
            raise DisagreementError(
                "give every rank the same optimizers and params that train: ranks differ in the params that an "
                f"optimizer other than shardopt's trains, {rows[0][0]} on rank 0, {names} on rank {rank}."
            )
        if other is not None:
            raise (ShardoptError if sparse is not None else DisagreementError)(
                f"build the embedding with sparse=False: the gradient of {other} is sparse on rank {rank}, and "
                "only dense ones are averaged over ranks."
            )
    used = [any(each[2][index] for each in rows) for index in range(len(named))]
    by_kind: dict[tuple[torch.device, torch.dtype], list[nn.Parameter]] = {}
    for param, is_used in zip(named.values(), used, strict=True):
        if is_used:
            by_kind.setdefault((param.device, param.dtype), []).append(param)
    for params in by_kind.values():
        _average(params, ranks)


def _average(params: Sequence[nn.Parameter], ranks: Ranks) -> None:
    grads: list[torch.Tensor] = []
    for param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        grads.append(param.grad)
    total = torch.cat([grad.reshape(-1) for grad in grads])
    total = total.float() if total.element_size() == 2 else total  # 16-bit numbers are summed in fp32
    ranks.all_reduce(total, _PHASE)
    total /= ranks.size
    parts = total.split([grad.numel() for grad in grads])
    torch._foreach_copy_(grads, [part.view(grad.shape) for part, grad in zip(parts, grads, strict=True)])
