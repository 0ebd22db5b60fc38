"""What ranks with a batch announce to ranks that have run out: a call, and the facts that others need to follow it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from ..domain.hyperparameters import plain_numbers
from ..errors import DisagreementError
from ..tensors.gradient_slice import UNREPEATABLE

if TYPE_CHECKING:
    from ..module.round_gradients import RoundGradients

_KINDS = {
    "bind": "the first forward",
    "forward": "a forward that shares buffers",
    "gathers for forward": "a forward",
    "gathers for evaluation": "a forward under no_grad()",
    "gathers for backward": "a backward that reduces no gradients",
    "gather": "a gather of params outside of a forward or backward",
    "round": "a backward",
    "step": "step()",
}
# At these calls all ranks begin to follow the schedule of gathers, so they must hold the same gathered units.
_SCHEDULED = ("gathers for forward", "round")
SPARSE = "sparse"  # stands for the dtype of a sparse gradient


class Announcement:
    """What all ranks announced in one exchange: the call that those with a batch are about to make.

    Attributes:
        active: the ranks that have a batch.
        is_complete: True if all ranks have one.
        first: the first rank that has a batch, whose ``facts`` count.
        kind: the call, a key of ``KINDS``.
        size: the number of ranks.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]]):
        """
        Args:
            rows: by rank; ``kind`` is None for a rank that has run out of batches.

        Raises:
            DisagreementError: the ranks cannot go on together; on every rank.
        """
        self.active = [rank for rank, row in enumerate(rows) if row["kind"] is not None]
        self.is_complete = len(self.active) == len(rows)
        self.first = self.active[0]
        self.facts = rows[self.first]
        self.kind: str = self.facts["kind"]
        self.size = len(rows)
        for rank in range(self.size):
            if rows[rank]["setup"] != rows[0]["setup"]:
                raise DisagreementError(
                    "give all ranks the same model (in DistributedDataParallel or not), param groups and options of "
                    "join(), and step several optimizers in the order in which Join was given them: ranks differ in "
                    f"what they join with, {rows[0]['setup']} on rank 0, {rows[rank]['setup']} on rank {rank}, so a "
                    "rank that runs out of batches could not follow the others."
                )
        for rank in self.active:
            if rows[rank]["kind"] != self.kind and any(row.get("failed") for row in rows):
                failed = next(rank for rank, row in enumerate(rows) if row.get("failed"))
                raise DisagreementError(
                    f"rank {failed} cannot take this step, so no rank does: {rows[failed]['failed']}"
                )
            if rows[rank]["kind"] != self.kind:
                raise DisagreementError(
                    "make the same calls on all ranks that have a batch: "
                    f"rank {self.first} is at {_KINDS[self.kind]}, rank {rank} at {_KINDS[rows[rank]['kind']]}, and a "
                    "rank that has run out of batches cannot follow both, so no rank goes on."
                )
            problem = rows[rank].get("problem") or (not self.is_complete and rows[rank].get("written"))
            if problem:
                raise DisagreementError(f"rank {rank} cannot go on beside ranks that have run out: {problem}")
        for rank in range(self.size if self.kind in _SCHEDULED and not self.is_complete else 0):
            if rows[rank]["gathered"] != self.facts["gathered"]:
                raise DisagreementError(
                    f"reshard units before {_KINDS[self.kind]} in which ranks have run out of batches: rank {rank} "
                    f"holds {rows[rank]['gathered']}, rank {self.first} {self.facts['gathered']}, so they would not "
                    "make the same gathers. Call the model itself, and opt.units[...].reshard() after unshard()."
                )


def dtype_of(grad: torch.Tensor | None) -> str | None:
    if grad is None:
        return None
    return str(grad.dtype).removeprefix("torch.") if grad.layout is torch.strided else SPARSE


def edits_of(gradients: RoundGradients) -> dict[str, Any]:
    """Returns the edits in place of reduced gradients since the last call; each rank repeats them on its slice."""
    edits: dict[str, list[Any]] = {}
    written = None
    for number, entry in enumerate(gradients.entries):
        slot = entry.gradient_slice
        if slot is None or not slot.shows_in(entry.grad):
            continue
        is_unrepeatable = any(edit[0] == UNREPEATABLE for edit in slot.edits)
        if slot.edits:
            edits[str(number)], slot.edits = slot.edits, []
        if slot.was_written or is_unrepeatable:
            written = (
                f"the gradient of {entry.name} was written to through .local or a view of it, or changed by elements, "
                "which they could not repeat. "
                "Scale and clamp gradients as a whole (clip_grad_norm_, clip_grad_value_, mul_)."
            )
    return {"edits": edits, "written": written}


def follow_edits(gradients: RoundGradients, edits: Mapping[str, Sequence[Sequence[Any]]]) -> None:
    for number, entry in enumerate(gradients.entries):
        slot, grad = entry.gradient_slice, cast(Any, entry.param.grad)
        if slot is None or not slot.shows_in(grad):  # all ranks will find this together
            continue
        for name, *arguments in edits.get(str(number), ()):
            getattr(grad, name)(*arguments)
        slot.edits = []


def follow_numbers(groups: Sequence[dict[str, Any]], numbers: Sequence[Mapping[str, Any]]) -> None:
    """Sets hyper-parameters to those of a rank that has a batch, whose scheduler may have changed them."""
    for group, theirs in zip(groups, numbers, strict=True):
        own = plain_numbers(group)
        for key, value in theirs.items():
            if key not in own or own[key] == value:
                continue
            if isinstance(group[key], torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = tuple(value) if isinstance(group[key], tuple) else value
