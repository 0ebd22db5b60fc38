"""Buffers of a module without DDP around it: in training all ranks take those of one rank, as under DDP.

A forward in training may change them (running statistics, a codebook that follows the data), on each rank by its own
batch. Before the next one, rank 0's are broadcast. They travel as bytes, in one message a device, the widest dtypes
first, so that each buffer begins at a multiple of its element size::

    int64 int64 | float32 float32 float32 | bfloat16 | bool bool

The end of a step does the same: what one rank alone evaluates or saves between two steps is then what every rank would.

A rank may lose a batch to an error of its own, call ``zero_grad()``, and go on with its next batch while the others
wait for it in the backward of theirs. The forward of its next batch is then the other half of their forward, whose
message it has received, so it takes no other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..domain.agreement import agree_on
from ..domain.dtensors import local_tensor
from ..domain.members import buffers_of
from .ddp import ignored_by_ddp
from .tree import ModuleTree

if TYPE_CHECKING:
    from ..domain.called import CalledModule
    from ..domain.domain import Domain
    from ..partition.comm.group import Ranks
    from .coverage import Coverage

_PHASE = "sharing the buffers of the module"


class SharedBuffers:
    """The buffers of one module that a script calls."""

    def __init__(self, called: CalledModule, coverage: Coverage):
        self._called, self._module, self._coverage = called, called.module, coverage
        self._tree: ModuleTree | None = None
        self._named: dict[Domain, dict[str, torch.Tensor]] = {}  # from the last time that the tree changed
        self._agreed: dict[Domain, dict[str, Any]] = {}  # dtypes and shapes that all ranks have
        self._is_due = True
        self._awaits_round = False  # a forward ran, and no round of gradients ended since
        self._is_put_off = False  # until a round ends

    # -- when ------------------------------------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """True if the next forward in training takes the buffers of one rank. As in DDP the first one does, and each
        that follows a step, or a forward whose backward reduces gradients."""
        return self._is_due and not self._is_put_off

    def forward_begins(self) -> None:
        """The forward that took the buffers runs. If it raises, the next one is another attempt at it."""
        self._is_due = False

    def forward_ended(self, syncs: bool) -> None:
        """A forward in training has ended; ``syncs``: its backward reduces gradients."""
        self._is_due, self._awaits_round, self._is_put_off = syncs, True, False

    def round_ended(self) -> None:
        """A round of gradients was reduced, or was lost on all ranks."""
        self._awaits_round = self._is_put_off = False

    def step_ended(self) -> None:
        """All ranks made a step, or raised in one."""
        self._is_due, self._awaits_round, self._is_put_off = True, False, False

    def gradients_forgotten(self) -> None:
        """The gradients were set to None or zero, maybe between a forward and its backward."""
        self._is_put_off = self._awaits_round

    # -- how -------------------------------------------------------------------------------------------------------

    def look_again(self) -> None:
        """Params were bound: domains may have other buffers."""
        self._tree = None

    def _of(self, domain: Domain) -> Mapping[str, torch.Tensor]:
        """Returns the buffers by name that the ranks of a domain share; none on a rank alone."""
        if domain.mesh.world.size == 1:
            return {}
        if self._tree is None or not self._tree.is_current:  # a forward may assign buffers anew
            self._tree, self._named = ModuleTree(self._module, "_buffers"), {}
        if domain not in self._named:
            own = set(buffers_of(self._module, domain.members)) - ignored_by_ddp(self._module)
            self._named[domain] = {
                name: local_tensor(each) for name, each in self._module.named_buffers() if each in own
            }
        return self._named[domain]

    @property
    def domains(self) -> list[Domain]:
        """The domains whose ranks take the buffers from one of them."""
        domains = self._coverage.domains
        if not domains or self._called.ddp is not None or not domains[0].options.tuning.broadcast_buffers:
            return []
        own = domains[:1] if self._of(domains[0]) and self._coverage.leads else []
        return own + [domain for domain in domains[1:] if self._coverage.has_reducer and self._of(domain)]

    def share(self, source: int) -> None:
        """Collective: every rank takes the buffers of rank ``source`` of each domain.

        Raises:
            DisagreementError: ranks hold other buffers.
            CommunicationError: a rank is missing, or runs another forward.
        """
        for domain in self.domains:
            named, world = self._of(domain), domain.mesh.world
            layout = {name: [str(each.dtype), list(each.shape)] for name, each in named.items()}
            if self._agreed.get(domain) != layout:  # a message of another size would end the process in gloo
                agree_on({"buffers": layout}, world)
                self._agreed[domain] = layout
            by_device: dict[torch.device, list[torch.Tensor]] = {}
            for each in named.values():
                by_device.setdefault(each.device, []).append(each)
            for tensors in by_device.values():
                _broadcast(tensors, world, source)


def _broadcast(tensors: Sequence[torch.Tensor], ranks: Ranks, source: int) -> None:
    # ``.data`` has a version of its own: a graph that saved a buffer can still run backward, as under DDP.
    values = [each.data for each in sorted(tensors, key=lambda each: -each.element_size())]
    if ranks.rank == source:
        message = torch.cat([each.reshape(-1).view(torch.uint8) for each in values])
    else:
        message = torch.empty(sum(each.nbytes for each in values), dtype=torch.uint8, device=values[0].device)
    ranks.broadcast_on_stream(message, _PHASE, source)
    if ranks.rank != source:
        pairs = zip(message.split([each.nbytes for each in values]), values, strict=True)
        torch._foreach_copy_(values, [part.view(to.dtype).view(to.shape) for part, to in pairs])
