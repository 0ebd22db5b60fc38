"""How ranks learn of each other while all of them stand in the same call: by messages."""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..domain.agreement import first_difference
from ..errors import CheckpointError
from ..partition.comm.group import Ranks

Problem = Exception | None
Result = TypeVar("Result")


class Meeting:
    """All ranks in one call: those that make a checkpoint, and those that hold other parts of the model, if any."""

    def __init__(self, world: Ranks, device: torch.device, beyond: Sequence[Ranks] = ()):
        self.world, self._device = world, device
        self._beyond = beyond  # met one after the other: they make checkpoints of other parts of the model

    def together(self, work: Callable[[], Result], phase: str) -> Result:
        """Collective: returns what ``work`` returns on this rank, once it has ended without an error on every rank.

        Raises:
            Exception: this rank's own problem.
            CheckpointError: another rank's.
        """
        try:
            found = work()
        except Exception as error:
            self.share(error, phase)
            raise
        self.share(None, phase)
        return found

    def share(self, problem: Problem, phase: str) -> None:
        """Collective: raises this rank's problem, or CheckpointError with another rank's; returns if there is none."""
        for ranks in (self.world, *self._beyond):
            try:
                self._share_in(ranks, problem, phase)
            except Exception as error:  # whoever is met next must hear of it
                problem = error
        if problem is not None:
            raise problem

    def _share_in(self, ranks: Ranks, problem: Problem, phase: str) -> None:
        rows = ranks.exchange([int(problem is not None)], self._device, phase)
        if not any(flag for (flag,) in rows):
            return
        own = None if problem is None else f"{type(problem).__name__}: {problem}"
        told = ranks.exchange_json(own, self._device, phase)
        if problem is not None:
            raise problem
        rank, text = next((rank, text) for rank, text in enumerate(told) if text is not None)
        raise CheckpointError(f"while {phase}, rank {rank} failed, so all ranks stop here. It says: {text}")

    def compare(self, value: Any, phase: str) -> None:
        """Collective: raises CheckpointError with the first difference if ranks do not give the same value."""
        self._compare([self.world], value, phase)

    def compare_beyond(self, value: Any, phase: str) -> None:
        """Collective: raises CheckpointError if the model's other ranks do not give the same value."""
        self._compare(self._beyond, value, phase)

    def _compare(self, groups: Sequence[Ranks], value: Any, phase: str) -> None:
        problem: Problem = None
        for ranks in groups:
            try:
                self._compare_in(ranks, value, phase)
            except Exception as error:
                problem = error
        if self._beyond:
            self.share(problem, phase)
        elif problem is not None:
            raise problem

    def check_apart(self, directory: Path) -> None:
        """Collective: raises CheckpointError if parts of the model would be saved over each other."""
        problem: Problem = None
        group = self.world.group
        own = [str(directory.resolve()), [] if group is None else dist.get_process_group_ranks(group)]
        for ranks in self._beyond:
            told = ranks.exchange_json(own, self._device, "comparing directories")
            if any(where == own[0] and who != own[1] for where, who in told):
                problem = CheckpointError(
                    'give each tensor-parallel rank and pipeline stage a directory of its own (f"runs/stage{s}-'
                    f'tensor{{t}}"): ranks with other parts of the model were given {directory} too, and would '
                    "replace each other's checkpoints."
                )
        if self._beyond:
            self.share(problem, "comparing directories")

    def _compare_in(self, ranks: Ranks, own: Any, phase: str) -> None:
        digest = hashlib.sha256(json.dumps(own).encode()).digest()
        row = [int.from_bytes(digest[at : at + 8], "little", signed=True) for at in (0, 8)]
        rows = ranks.exchange(row, self._device, phase)
        if all(each == rows[0] for each in rows):
            return
        told = ranks.exchange_json(own, self._device, phase)
        for rank, other in enumerate(told):
            difference = first_difference(told[0], other)
            if difference is not None:
                where, ours, theirs = difference
                raise CheckpointError(
                    f"make the same call with the same model and optimizers on every rank: while {phase}, ranks differ "
                    f"in {where}: {ours!r} on rank 0, {theirs!r} on rank {rank}. Nothing was done."
                )

    def everyones(self, value: Any, phase: str) -> list[Any]:
        """Collective: every rank's JSON-able value, by rank."""
        return self.world.exchange_json(value, self._device, phase)

    def from_rank_0(self, value: Any, phase: str) -> Any:
        """Collective: rank 0's JSON-able value."""
        return self.world.exchange_json(value if self.world.rank == 0 else None, self._device, phase)[0]
