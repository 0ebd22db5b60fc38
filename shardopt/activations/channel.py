"""Messages of a group of ranks about their activations: to compare a tensor in forward, to gather it in backward.

Each exchange is one row of numbers from each rank, of one length in both cases. Ranks that make different calls find
that out from the rows, before any tensor travels, and all of them raise the same error.
"""

from enum import IntEnum
from typing import NamedTuple

import torch

from ..errors import BindingError, DisagreementError
from ..partition.comm.all_gather import Window
from ..partition.comm.group import Ranks
from ..partition.comm.transport import all_gather_between

_GRAIN = 16  # bytes: shards begin at a multiple, so that an element of any dtype lies in one of them


class Act(IntEnum):
    """The purpose of an exchange."""

    COMPARE = 1
    GATHER = 2


_VERBS = {Act.COMPARE: "compares", Act.GATHER: "gathers"}
_PHASES = {Act.COMPARE: "comparing activations in forward", Act.GATHER: "gathering activations in backward"}


class Row(NamedTuple):
    """The message of a rank in an exchange."""

    act: int
    position: int  # of the tensor, in the order in which the ``with`` saved them
    numel: int
    nbytes: int
    checksum: int
    options: int  # digest of the options in which ranks must agree

    @property
    def text(self) -> str:
        """The row in words, for an error."""
        verb = {int(act): verb for act, verb in _VERBS.items()}.get(self.act, "means")  # another call's numbers
        return f"{verb} tensor {self.position} of {self.nbytes} bytes"

    @property
    def content(self) -> tuple[int, int, int]:
        return self.numel, self.nbytes, self.checksum


class Channel:
    """One group of ranks."""

    def __init__(self, ranks: Ranks, number: int):
        """``number``: of its messages, see :class:`.decisions.Decisions`."""
        self.ranks, self._number = ranks, number

    def check_carries(self, device: torch.device) -> bool:
        """Returns True if tensors of this device can travel, False if they stay whole, as host memory over NCCL does.

        Raises:
            BindingError: the group carries nothing of a GPU, on all ranks.
        """
        if self.ranks.size == 1 or self.ranks.carries(device):
            return True
        if device.type == "cpu":
            return False
        raise BindingError(
            "call init_process_group() without a backend, or with one for this device too, such as "
            f'"cpu:gloo,cuda:nccl": activations are on {device}, of which the {self.ranks.size} ranks\' group carries '
            "nothing (gloo does not), so they cannot be partitioned."
        )

    def exchange_rows(self, row: Row) -> list[Row]:
        """Collective: returns every rank's row, by rank.

        Raises:
            DisagreementError: the ranks make different calls.
            CommunicationError: a rank died or is late.
        """
        phase = _PHASES[Act(row.act)]
        found = self.ranks.exchange(row, phase)
        rows = [Row(*each) for each in found]
        if any(each.options != row.options for each in rows):
            raise DisagreementError(
                "give partition_activations() the same check= and keep_below= on every rank of the group: they differ, "
                f"{self.ranks.at(phase)}, so ranks would not partition the same tensors."
            )
        for rank, each in enumerate(rows):
            compared = 2 if row.act == Act.COMPARE else 4  # ranks may compare tensors of other sizes
            if each[:compared] != rows[0][:compared]:
                raise self._mismatch(phase, f"rank 0 {rows[0].text}, rank {rank} {each.text}")
        return rows

    def _mismatch(self, phase: str, found: str) -> DisagreementError:
        return DisagreementError(
            "run the same forward and the same backward on every rank of partition_activations()' group, then call "
            f"zero_grad() and begin the step anew: {found}, {self.ranks.at(phase)}. Nothing was gathered: ranks would "
            "have mixed two tensors."
        )

    def shard_bytes(self, nbytes: int) -> int:
        """Returns the bytes of each rank's shard of a tensor; the last shards may be padded."""
        size = self.ranks.size
        return -(-nbytes // (size * _GRAIN)) * _GRAIN

    def shard_of(self, values: torch.Tensor) -> torch.Tensor:
        """Returns a copy of this rank's slice, uint8 [shard_bytes], of a tensor's bytes."""
        size = self.shard_bytes(values.numel())
        own = values[self.ranks.rank * size : (self.ranks.rank + 1) * size]
        shard = values.new_empty(size)
        shard[: own.numel()] = own
        shard[own.numel() :] = 0
        return shard

    def gather(self, shard: torch.Tensor, memory: torch.Tensor) -> None:
        """Collective: fills ``memory``, uint8 [size * shard_bytes], with every rank's shard.

        ``shard``: this rank's, there or in host memory.
        """
        window = Window(memory, shard.numel(), self._number)
        window.shard(self.ranks.rank).copy_(shard, non_blocking=True)
        travels = all_gather_between(self.ranks, memory.device, _PHASES[Act.GATHER])
        travels.start(window)
        travels.finish()
