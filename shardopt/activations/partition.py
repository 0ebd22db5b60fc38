"""The context around forward that partitions activations over the ranks that all have the same ones (ZeRO-R)."""

import contextlib
import sys
from collections.abc import Hashable
from contextlib import ExitStack
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Literal

import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh

from ..arguments import flag, number, whole
from ..partition.comm.group import Ranks
from ..partition.comm.notes import note_of
from ..partition.comm.transport import Transport
from .channel import Channel
from .decisions import Decisions
from .packed import PackedActivation, PartitionedActivation
from .saved_tensors import Policy, SavedTensors

_YEARS = 10 * 365 * 86400.0  # in place of no limit: deadlines are kept in nanoseconds of 64 bits


class _Site:
    """A place in the program where a ``with`` stands: what the ranks have decided there, and what it keeps.

    Attributes:
        saved: the tensors of the ``with``, while it is entered.
    """

    def __init__(self, number: int):
        self.decisions = Decisions(number)
        self.saved: SavedTensors | None = None


class _Sites:
    """The sites of one process group.

    Attributes:
        number: of their messages; None until the ranks have agreed on one.
    """

    def __init__(self, number: int | None = None):
        self.number = number
        self._sites: dict[Hashable, _Site] = {}

    def at(self, place: Hashable) -> _Site:
        """Returns the site at a place, made when its ``with`` is first entered."""
        assert self.number is not None
        if place not in self._sites:
            self._sites[place] = _Site(self.number)
        return self._sites[place]


_ALONE = _Sites(0)  # of one rank, without a process group


def partition_activations(
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    offload: Literal["cpu"] | None = None,
    keep_below: int = 4096,
    check: bool = False,
    timeout: float | None = None,
) -> "ActivationPartition":
    """Partitions what autograd keeps for backward over ranks that all compute the same activations (ZeRO-R).

    ::

        with shardopt.partition_activations(mesh["tp"].get_group()):
            loss = model(batch)
        loss.backward()  # may be outside

    Ranks of a tensor-parallel group hold copies of the activations between their layers, and so of each activation
    checkpoint. Within the ``with`` each of N ranks keeps 1/N of every tensor that autograd saves and that is the same
    on all of them. Backward gathers it before its first use. Params, views of params and what is saved while backward
    runs stay as they are. Results have the bits that they have without.

    Which tensors are the same is found out by a checksum of each, the first time that a ``with`` at this line of the
    program saves it; tensors that differ, and those that are small, stay whole. A tensor that was the same then and
    differs later is seen before it is gathered: an error on all ranks.

    ``torch.utils.checkpoint`` of both kinds, and so ``gradient_checkpointing_enable()`` of transformers, saves its
    *positional* tensors, and these are partitioned. Tensors by keyword, in tuples or in a closure it holds itself,
    whole.

    Args:
        process_group: the ranks, or their 1D mesh. None: the default group. With one rank, and without ``offload``,
            nothing changes.
        offload: ``"cpu"``: slices of tensors on a GPU are kept in pinned host memory, on one rank too.
        keep_below: tensors of fewer elements stay whole: the gather of each costs a message to every rank.
        check: compares each tensor each time, in forward: no tensor that differs is ever partitioned, at the cost of
            one more message each.
        timeout: seconds that one wait for the other ranks may take; None: the process group's own.

    Returns:
        A context. All ranks of the group enter it, run the same forward, and the same backwards in the same order. Its
        ``memory()`` tells what is kept. It may be entered again, and nested.

    Raises:
        TypeError, ValueError: an argument is none of these.
        DisagreementError: in forward or backward, on all ranks: they save or gather different tensors.
        CommunicationError: in forward or backward: a rank died, or did not come in time.
        BindingError: in forward, on all ranks: the group carries no tensors of this device.

    Source: ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, section 6.1, arXiv:1910.02054.
    """
    limit = number(timeout, "timeout (seconds)", above=0, or_none=", or None") if timeout is not None else None
    if offload is not None and not (isinstance(offload, str) and offload == "cpu"):
        raise ValueError(f"offload must be 'cpu', or None to keep slices where they are, found {offload!r}.")
    policy = Policy(
        keep_below=whole(keep_below, "keep_below (elements)", least=0),
        check=flag(check, "check"),
        offload=offload is not None,
    )
    deadline = None if limit is None else timedelta(seconds=min(limit, _YEARS))
    return ActivationPartition(Ranks(_group_of(process_group), deadline), policy)


def _group_of(given: object) -> dist.ProcessGroup | None:
    if isinstance(given, DeviceMesh):
        if given.ndim != 1:
            raise ValueError(
                'process_group takes one dimension of a mesh, as mesh["tp"]: along which of '
                f"{given.mesh_dim_names or given.ndim} activations are the same, the mesh does not say."
            )
        return given.get_group()
    if given is not None and not isinstance(given, dist.ProcessGroup):
        raise TypeError(
            "process_group takes a ProcessGroup that this rank is a member of, a 1D DeviceMesh, or None for the "
            f"default group, found {given!r}: new_group() returns a number on ranks that are not members."
        )
    return given


class ActivationPartition:
    """See :func:`partition_activations`."""

    def __init__(self, ranks: Ranks, policy: Policy):
        self._ranks, self._policy = ranks, policy
        self._sites: set[_Site] = set()
        self._entered: list[ExitStack] = []

    def __enter__(self) -> "ActivationPartition":
        with ExitStack() as stack:
            if self._ranks.size > 1 or self._policy.offload:
                self._enter(stack, _place(sys._getframe(1)))
            self._entered.append(stack.pop_all())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.pop().close()

    def _enter(self, stack: ExitStack, place: Hashable) -> None:
        site = _sites_of(self._ranks).at(place)
        self._sites.add(site)
        if site.saved is None:
            channel = Channel(self._ranks, site.decisions.number)
            site.saved = SavedTensors(channel, site.decisions, self._policy)
            stack.callback(setattr, site, "saved", None)
        stack.enter_context(saved_tensors_hooks(site.saved.pack, _unpack))

    def memory(self) -> dict[str, dict[str, int]]:
        """Returns the bytes that are kept now on this rank, by kind (partitioned, whole) and tier (device, host).

        They are what autograd saved within this context, at each line of the program where it was entered, whoever
        entered it; without params, and without what ``torch.utils.checkpoint`` holds itself.
        """
        found: dict[str, dict[str, int]] = {"partitioned": {}, "whole": {}}
        for site in self._sites:
            for packed in site.decisions.packed:
                tiers = found["partitioned" if isinstance(packed, PartitionedActivation) else "whole"]
                tiers[packed.tier] = tiers.get(packed.tier, 0) + packed.nbytes
        return found


def _place(frame: FrameType) -> Hashable:
    """The place in the program of a ``with``; of a call of ``ExitStack.enter_context()``, not of its one line."""
    while frame.f_code.co_filename == contextlib.__file__ and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_code.co_firstlineno, frame.f_lasti


def _sites_of(ranks: Ranks) -> _Sites:
    if ranks.group is None:
        return _ALONE
    sites = note_of(ranks.group, _Sites)
    if sites.number is None:
        # A number that no window of an optimizer in this group has, or will have.
        sites.number = Transport(ranks, torch.device("cpu")).open(torch.empty(0), 0).number
    return sites


def _unpack(packed: PackedActivation) -> torch.Tensor:
    return packed.unpack()
