"""Agreement: one small message a step, by which every rank knows what all ranks are about to do.

A sharded step needs every rank. If one rank had other params, another learning rate, a gradient that others lack, or an
error, the rest would hang, or go on with shards that do not belong together. So before anything changes, each rank
sends a digest of its view of the step, and what the decision needs (overflow, norm). If digests differ, ranks exchange
the views themselves, and the first difference is named on every rank.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..errors import CommunicationError, DisagreementError, OffloadError, ShardoptError
from ..kernels.reductions import LIMBS
from ..partition.comm.together import together

if TYPE_CHECKING:
    from ..partition.comm.group import Ranks

# The key, in a description, of the params that a step binds: errors then name the calls in which ranks differ.
UNBOUND = "params not yet bound (of a new optimizer, a new group, or unfrozen)"

# The flags of a row: what is true of any rank counts.
_PROBLEM, _OVERFLOW, _WRITTEN, _PROPOSES_ORDER = 1, 2, 4, 8

# Averages of one batch agree to rounding; gradients of different batches to no digit.
_ALIKE, _TINY = 1e-2, 1e-12


@dataclass(frozen=True)
class StepDigest:
    """One rank's view of the step that it is about to take, in a form that ranks compare."""

    key: Any  # JSON-able and short; must be equal on all ranks
    describe: Callable[[], dict[str, Any]]  # JSON-able, with names; called only if keys differ
    problem: Exception | None = None  # why this rank cannot step
    overflow: bool = False  # the GradScaler found an Inf or NaN
    nonfinite: int = 0  # such elements in the gradients of this rank's shards
    witness: int = 0  # bits of a float64 that must be alike on all ranks
    written: int = 0  # params that were written since the last step, but not by it
    proposes_order: bool = False  # this rank used units that the schedule does not have; ranks may differ in it
    limbs: tuple[int, ...] = field(default=(0,) * LIMBS)  # sum of squares of the gradients, see kernels/reductions.py
    sampled: str = ""  # the param whose gradient the witness is of
    consequence: str = "so no rank took the step and nothing changed"  # of a difference

    def row(self) -> list[int]:
        digest = hashlib.sha256(json.dumps(self.key).encode()).digest()
        return [
            int.from_bytes(digest[:8], "little", signed=True),
            int.from_bytes(digest[8:16], "little", signed=True),
            (_PROBLEM if self.problem is not None else 0)
            | (_OVERFLOW if self.overflow else 0)
            | (_WRITTEN if self.written else 0)
            | (_PROPOSES_ORDER if self.proposes_order else 0),
            self.nonfinite,
            self.witness,
            *self.limbs,
        ]


@dataclass(frozen=True)
class Consensus:
    """The facts that all ranks know after they agreed."""

    overflow: bool
    nonfinite: int
    limbs: tuple[int, ...]  # of one copy of all gradients; empty if nobody reads them
    written: bool  # on any rank
    proposes_order: bool  # on any rank


def agree(view: StepDigest, ranks: Ranks, one_copy: Sequence[int] = ()) -> Consensus:
    """Collective: exchanges the digests.

    Args:
        one_copy: the ranks whose shards make up one copy of all gradients; empty if nobody reads the sum of ``limbs``.

    Raises:
        Exception: this rank's own problem.
        DisagreementError: another rank's problem, or the first difference between the views; on every rank.
        CommunicationError: a rank is missing.
    """
    if ranks.size == 1:  # it has nothing to compare with
        if view.problem is not None:
            raise view.problem
        limbs = view.limbs if one_copy else ()
        return Consensus(view.overflow, view.nonfinite, limbs, view.written > 0, view.proposes_order)
    rows = ranks.exchange(view.row(), "agreeing on the step")
    first, flags, nonfinite, differs, is_witnessed = rows[0], 0, 0, False, False
    for row in rows:
        flags |= row[2]
        nonfinite += row[3]
        differs = differs or row[0] != first[0] or row[1] != first[1]
        is_witnessed = is_witnessed or row[4] != 0
    if flags & _PROBLEM:
        _raise_problem(view, ranks)
    if differs:
        _raise_difference(view, ranks)
    if is_witnessed:
        _compare_witnesses([row[4] for row in rows], view.sampled)
    return Consensus(
        overflow=bool(flags & _OVERFLOW),
        nonfinite=nonfinite,
        written=bool(flags & _WRITTEN),
        proposes_order=bool(flags & _PROPOSES_ORDER),
        limbs=tuple(map(sum, zip(*[rows[rank][5:] for rank in one_copy], strict=True))),
    )


def agree_on(what: str | dict[str, Any], ranks: Ranks, problem: Exception | None = None) -> None:
    """Collective: returns once no rank has a problem, and all of them say the same.

    Args:
        what: the name of the point that all ranks have reached, or values that they compare, JSON-able and by name.

    Raises:
        Exception: as :func:`agree`.
    """
    agree(StepDigest(what, (lambda: what) if isinstance(what, dict) else dict, problem), ranks)


def agreed(what: str | dict[str, Any], ranks: Ranks) -> AbstractContextManager[None]:
    """A context, collective at its end: an error inside of it, on any rank, is raised on all of them.

    Args:
        what: as for :func:`agree_on`; values may be filled in inside.
    """
    return together(lambda problem: agree_on(what, ranks, problem))


def agree_on_call(call: str, read: Callable[[], dict[str, Any]], ranks: Ranks) -> dict[str, Any]:
    """Collective, ahead of what a call does together: what ``read`` makes of its arguments, JSON-able.

    Raises:
        Exception: what ``read`` raised here.
        DisagreementError: what it raised on another rank, or arguments that differ; on every rank.
        CommunicationError: a rank is missing.
    """
    key: dict[str, dict[str, Any]] = {call: {}}
    nothing = f"so {call} did nothing"
    with together(lambda problem: agree(StepDigest(key, lambda: key, problem, consequence=nothing), ranks)):
        key[call] = read()
    return key[call]


def _compare_witnesses(bits: Sequence[int], name: str) -> None:
    values = [struct.unpack("<d", struct.pack("<q", each))[0] for each in bits]
    for rank, value in enumerate(values):
        # Not to the last bit: averages may be summed in another order on each rank. Non-finite ones are counted anyway.
        if (
            math.isfinite(value)
            and math.isfinite(values[0])
            and not math.isclose(value, values[0], rel_tol=_ALIKE, abs_tol=_TINY)
        ):
            raise DisagreementError(
                "wrap the model in DistributedDataParallel or hand it over (ShardedAdamW(model, stage=2)), leave "
                "no_sync() for the last backward, and give params on DDP's ignore list to torch.optim: gradients "
                f"differ between ranks: a block of {name} sums to {values[0]:.6g} on rank 0, to {value:.6g} on rank "
                f"{rank}. They were not averaged, so no rank took the step and nothing changed."
            )


def _raise_problem(view: StepDigest, ranks: Ranks) -> None:
    own = None if view.problem is None else [type(view.problem).__name__, str(view.problem)]
    problems = ranks.exchange_json(own, "reporting a problem")
    # A rank that abandoned a backward made the others raise a CommunicationError there: its own error says more.
    reported = [(rank, problem) for rank, problem in enumerate(problems) if problem is not None]
    first = [each for each in reported if each[1][0] != CommunicationError.__name__]
    if view.problem is not None and (own in [problem for _, problem in first] or not first):
        raise view.problem
    rank, (kind, text) = (first or reported)[0]
    # An OffloadError can be fixed and the call repeated, so it is of one type on all ranks: all can catch it.
    error = OffloadError if kind == OffloadError.__name__ else DisagreementError
    raise error(
        f"rank {rank} cannot take this step, so no rank does and nothing changed. It says: {kind}: {text}"
    ) from view.problem


def _raise_difference(view: StepDigest, ranks: Ranks) -> None:
    descriptions = ranks.exchange_json(view.describe(), "finding where ranks differ")
    for rank, other in enumerate(descriptions):
        difference = first_difference(descriptions[0], other)
        if difference is not None:
            where, ours, theirs = difference
            raise DisagreementError(
                f"ranks differ in {where}: {ours!r} on rank 0, {theirs!r} on rank {rank}. Their shards would belong to "
                f"different trainings, {view.consequence}. Give every rank the same model, param groups, options and "
                "calls: seed all ranks alike, or hand the module over, and every rank gets the values of rank 0."
            )
    raise ShardoptError("ranks sent different digests for equal views of the step: this is a bug in shardopt.")


def first_difference(one: Any, other: Any, where: str = "") -> tuple[str, Any, Any] | None:
    """Returns the first difference of two JSON values: (path, value in the one, value in the other); None if equal."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = dict.fromkeys([*one, *other])
        found = (first_difference(one.get(key), other.get(key), f"{where}.{key}" if where else key) for key in keys)
        return next(filter(None, found), None)
    if isinstance(one, list) and isinstance(other, list):
        if len(one) != len(other):
            return f"the number of {where}", len(one), len(other)
        found = (
            first_difference(*pair, f"{where}[{index}]") for index, pair in enumerate(zip(one, other, strict=True))
        )
        return next(filter(None, found), None)
    same = one == other or (one != one and other != other)  # NaN
    return None if same and type(one) is type(other) else (where, one, other)


def checksum(param: torch.Tensor) -> int:
    """Returns the sum of a param's bit patterns, by which ranks notice that they start from different weights."""
    bits = param.detach().contiguous().view(torch.int16 if param.element_size() == 2 else torch.int32)
    return int(bits.sum(dtype=torch.int64))
