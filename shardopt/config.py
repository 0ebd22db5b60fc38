"""What the user may say, validated when it is said, frozen afterwards."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypedDict

import torch.distributed as dist

__all__ = ["OptionKeywords", "Options", "Tuning"]

MIB = 1 << 20


@dataclass(frozen=True)
class Tuning:
    """The rare knobs. None of them changes a bit of the result.

    Attributes:
        bucket_bytes: largest bytes of params in one bucket; a single larger param has a bucket of its own. Smaller
            buckets overlap the update of one with the gathering of another; each costs one launch and one message
            to every rank.
        timeout: seconds that one wait for the other ranks may take; None: the process group's own timeout.
        neighbours: let CPU ranks of one machine read each other's params out of memory, where the system allows it,
            instead of sending them through sockets.
        nonfinite: what a step does when a gradient holds an Inf or a NaN: ``"skip"`` it on all ranks together with a
            warning (nothing changes, step counts included), ``"raise"`` on all ranks before anything changed, or
            ``"propagate"`` as torch does (and save the reading of the gradients that looking for it takes).
    """

    bucket_bytes: int = 32 * MIB
    timeout: float | None = None
    neighbours: bool = True
    nonfinite: Literal["skip", "raise", "propagate"] = "skip"

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise ValueError(f"Tuning.bucket_bytes must be at least 1, found {self.bucket_bytes!r}.")
        if self.timeout is not None and not self.timeout > 0:
            raise ValueError(f"Tuning.timeout is in seconds and must be above 0, found {self.timeout!r}.")
        if self.nonfinite not in ("skip", "raise", "propagate"):
            raise ValueError(f"Tuning.nonfinite must be 'skip', 'raise' or 'propagate', found {self.nonfinite!r}.")

    @property
    def deadline(self) -> timedelta | None:
        return None if self.timeout is None else timedelta(seconds=self.timeout)


class OptionKeywords(TypedDict, total=False):
    """The keywords that every optimizer takes beyond torch's; :class:`Options` says what they mean."""

    stage: int
    process_group: dist.ProcessGroup | None
    max_grad_norm: float | None
    tuning: Tuning


@dataclass(frozen=True)
class Options:
    """How an optimizer is sharded.

    Attributes:
        stage: 0 replicates everything; 1 gives each rank an equal slice of the masters and states.
        process_group: the ranks that share the states: those that DDP averages gradients over. None: the default
            group, or no communication where there is none.
        max_grad_norm: clip gradients to this global 2-norm inside the step.
        tuning: the rare knobs.
    """

    stage: int = 1
    process_group: dist.ProcessGroup | None = None
    max_grad_norm: float | None = None
    tuning: Tuning = Tuning()

    def __post_init__(self) -> None:
        if self.stage not in (0, 1):
            raise ValueError(
                f"stage must be 0 (replicate) or 1 (shard masters and states), found {self.stage!r}: sharding "
                "gradients (2) and params (3) is not part of this version."
            )
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm must be above 0, or None for no clipping, found {self.max_grad_norm!r}.")
        if self.process_group is not None and not isinstance(self.process_group, dist.ProcessGroup):
            raise TypeError(
                f"process_group takes a ProcessGroup that this rank is a member of, found {self.process_group!r}: "
                "construct the optimizer on members only (new_group returns a number elsewhere)."
            )
        if not isinstance(self.tuning, Tuning):
            raise TypeError(f"tuning takes a shardopt.Tuning, found {type(self.tuning).__name__}.")
