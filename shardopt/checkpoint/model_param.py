"""One param of a model as a checkpoint sees it: its names, the box that this rank holds, and where its values lie."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..domain.dtensors import box_of, is_dtensor
from ..errors import BindingError, CheckpointError
from .claims import Held
from .mesh_ranks import numbers_of
from .param_box import ParamBox

if TYPE_CHECKING:
    from ..domain.domain import Domain
    from ..domain.param import ParamRecord
    from ..domain.shard import Shard
    from ..partition.comm.group import Ranks
    from .claims import Claims
    from .records import ExpertIndex


@dataclass(frozen=True)
class ModelParam:
    """One param of the model, and where its values and states lie.

    Attributes:
        name: in the whole model.
        aliases: the other names of a tied param.
        param: the local tensor of a DTensor, else the param itself.
        box: the box of the whole param that ``param`` holds.
        holders: the ranks that hold the same box.
        mesh: the ranks that hold the other boxes, or copies.
        optimizer: index of the engine that trains it; None: no engine does.
        domain, shard, index: where the values lie, if the param is sharded; ``index`` counts in the shard's bucket.
        entry: the domain's record of a trained param.
        place: the placement of a DTensor, which identifies it in checkpoints of versions without boxes.
        experts: the number of its ``process_group`` among those of the optimizer's groups; None: it has none.
        expert_index: where other ranks use the name for other experts.
        older: its names in checkpoints of older versions.
        are_codes: its bits are no numbers of its dtype: packed codes, whose scales lie beside it.
        is_planned: these ranks write or compare it; False: other ranks write their copy.
    """

    name: str
    aliases: tuple[str, ...]
    param: nn.Parameter
    box: ParamBox
    holders: Ranks
    mesh: tuple[int, ...]
    optimizer: int | None
    domain: Domain | None = None
    shard: Shard | None = None
    index: int = 0
    entry: ParamRecord | None = None
    place: str | None = None
    experts: int | None = None
    expert_index: ExpertIndex | None = None
    older: tuple[str, ...] = ()
    are_codes: bool = False
    is_planned: bool = True

    @property
    def box_name(self) -> str:
        """The name of the box in a checkpoint that these ranks save."""
        return self.box.name_in(self.name)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its values in a checkpoint: fp32 where the model sees a rounded copy of them."""
        return torch.float32 if self.shard is not None and self.shard.is_cast else self.param.dtype

    @property
    def held(self) -> Held:
        """What these ranks say of the param to the others."""
        return Held(self.aliases, self.box, str(self.dtype), self.experts)

    def named(self, claims: Claims) -> ModelParam:
        """Returns the param with the name that all ranks give it, and whether these ranks write it."""
        holder = numbers_of(self.holders)
        expert_index, before = claims.expert_indices.get((holder, self.name)), claims.older.get((holder, self.name))
        names = self.name, *self.aliases
        older = () if before is None else tuple(before.of(each) for each in names)
        if expert_index is not None:
            names = expert_index.of(self.name), *(expert_index.of(each) for each in self.aliases)
        renamed = replace(self, name=names[0], aliases=names[1:], expert_index=expert_index, older=older)
        return replace(renamed, is_planned=claims.is_planned(renamed.box_name, holder))


def box_held(param: Any, name: str) -> ParamBox:
    """Returns the box that this rank holds: all of a plain tensor, a part of a DTensor.

    Raises:
        CheckpointError: it is not known which elements of a DTensor this rank holds.
    """
    try:
        return ParamBox(tuple(param.shape), *box_of(param, repr(name)))
    except BindingError as error:
        raise CheckpointError(f"{error} Nothing was saved or loaded.") from error


def mesh_of(param: Any) -> tuple[int, ...]:
    """Returns the ranks of a DTensor's mesh; none for a plain tensor."""
    return tuple(sorted(param.device_mesh.mesh.flatten().tolist())) if is_dtensor(param) else ()
