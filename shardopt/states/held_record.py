"""The record's side of held tensors: one tensor of a param's state, wherever it lies and in whatever format.

It is looked up at each read and write, so a step, an offload, or an assignment to another param ends nothing. The
assignment, loading or forgetting of the param's own state ends it, and so does ``close()``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils._pytree import tree_leaves

from ..domain.history import History
from ..domain.param_state import count_as_torch
from ..domain.remote_states import writing
from ..errors import StateError
from ..kernels import codecs
from ..kernels.formats import FP32
from ..offload.store import ResidentStorage
from ..tensors.edits import Edits
from ..tensors.held import HeldTensor
from ..tensors.held_part import HeldPart
from ..tensors.part import Part

if TYPE_CHECKING:
    from ..domain.domain import Domain
    from ..domain.param import ParamRecord
    from ..domain.param_state import ParamState
    from ..domain.shard import Shard

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Table(Protocol):
    """The states of all params."""

    @property
    def consolidated(self) -> Mapping[torch.nn.Parameter, ParamState] | None: ...

    def domain_of(self, local: torch.nn.Parameter) -> Domain | None: ...

    def waiting_of(self, local: torch.nn.Parameter) -> ParamState | None:
        """Returns the state of a param that is not bound yet."""

    def written(self, local: torch.nn.Parameter) -> ParamState | None:
        """Notes a write to the state of a param; returns its state if it is not bound yet."""


class HeldRecord:
    """The record's side of one tensor of a param's state.

    Attributes:
        device: where they are shown.
        own: the values, once they are the script's own: the record was forgotten, or freed with its bucket.
        ended: what ended this tensor, in words; None while it is live.
    """

    def __init__(self, table: Table, local: torch.nn.Parameter, name: str, device: torch.device):
        self._table, self._local, self.name, self.device = table, local, name, device
        self.own: torch.Tensor | None = None
        self.ended: str | None = None
        self._shown: weakref.ref[torch.Tensor] | None = None

    @property
    def held(self) -> torch.Tensor | None:
        """What a script holds: the tensor that shows this; views keep it alive."""
        return None if self._shown is None else self._shown()

    def show(self, size: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor that shows this."""
        held = self._made(size, stride, dtype)
        self._shown = weakref.ref(held)
        return held

    def _made(self, size: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return HeldTensor.of(self, size, stride, dtype, self.device)

    @property
    def is_memory(self) -> bool:
        return self.own is not None

    @property
    def is_whole(self) -> bool:
        return True

    def read(self) -> torch.Tensor:
        """Returns the values of now."""
        if self.own is not None:
            return self.own
        self._check()
        return self._read()

    def open(self) -> torch.Tensor:
        """Returns the values that a write is to change."""
        if self.own is not None:
            return self.own
        self._check()
        domain = self._domain()
        if domain is not None and domain.epoch.is_moving(self.name, self._place(domain)):
            raise StateError(
                f"write to optimizer.state between two steps: {self.name} was written in the middle of one, which "
                "updates it. Nothing was written."
            )
        return self._opened()

    def _place(self, domain: Domain) -> tuple[Shard, int]:
        entry = domain.entries[self._local]
        return entry.shard, entry.index

    def _opened(self) -> torch.Tensor:
        values = self._read()
        return values if self.is_memory else values.clone()

    def note(self, function: Any, arguments: Sequence[Any]) -> None:
        """Notes a write, which other ranks are to make as well."""
        found = self._entry() if self.own is None else None
        if found is None or found[0].mesh.world.size == 1:
            return
        leaves = tree_leaves(arguments)
        # What all ranks have whole. A part differs between them, and says what it is.
        of_parts = [each.fingerprint for each in leaves if isinstance(each, Part) and each.fingerprint is not None]
        wholes = [each for each in leaves if type(each) in _PLAIN] + of_parts
        words = ", ".join(
            each.words if isinstance(each, Part) else "tensor" if isinstance(each, torch.Tensor) else repr(each)
            for each in leaves
        )
        domain, entry = found
        name = getattr(function, "__name__", function)
        if domain.state_edits is None:
            domain.state_edits = Edits()
        domain.state_edits.note(domain.number_of(entry), f"{self.name}: {name}({words})", wholes)

    def store(self, changed: torch.Tensor) -> None:
        """Takes values that ``open`` returned into the record."""
        if self.own is None:
            self._store(changed)

    @property
    def is_live(self) -> bool:
        """True if this shows the record."""
        return self.own is None and self.ended is None

    def is_of(self, table: Table, local: torch.nn.Parameter, name: str) -> bool:
        """True if this shows that tensor of that param's state."""
        return self.is_live and self._table is table and self._local is local and self.name == name

    def kept(self) -> torch.Tensor | None:
        """Returns values for :meth:`keep`: no later write to the record reaches them, for it makes other memory."""
        return self._opened() if self.is_live else None

    def keep(self, values: torch.Tensor | None) -> None:
        """Makes values of before the script's own."""
        if self.is_live:
            self.own = values

    def end(self, what: str) -> None:
        """Ends what is held: reads and writes raise from now on."""
        if self.is_live:
            self.ended = what

    def _check(self) -> None:
        if self.ended is not None:
            raise StateError(
                "read optimizer.state[param] again: what was read before "
                f"{self.ended} showed a state that is no more, and is neither read nor written now ({self.name}). Take "
                "clone() of what is to be kept."
            )

    def _domain(self) -> Domain | None:
        return self._table.domain_of(self._local)

    def _entry(self) -> tuple[Domain, ParamRecord] | None:
        domain = self._domain()
        return None if domain is None else (domain, domain.entries[self._local])

    def _waiting(self) -> ParamState:
        state = self._table.waiting_of(self._local)
        if state is None:
            self.ended = "the state was forgotten"
            self._check()
        assert state is not None
        return state

    def _read(self) -> torch.Tensor:
        raise NotImplementedError

    def _store(self, changed: torch.Tensor) -> None:
        raise NotImplementedError


class HeldElements(HeldRecord):
    """Values by element of the param: in memory, on a disk, or quantized; at several ranks this rank's slice of them.

    Attributes:
        own_slice: at several ranks, this rank's elements once the record was forgotten.
    """

    own_slice: torch.Tensor | None = None
    own_entry: ParamRecord | None = None  # of then

    @property
    def is_whole(self) -> bool:
        found = self._domain()
        return found is None or found.mesh.shard.size == 1

    @property
    def is_memory(self) -> bool:
        if self.own is not None:
            return True
        found = self._entry()
        return found is None or (found[0].mesh.shard.size == 1 and self._lies_in_memory(found[1].shard))

    def _lies_in_memory(self, shard: Shard) -> bool:
        in_memory = isinstance(shard.home, ResidentStorage) and shard.device == self.device
        return in_memory and self.name != "master" and shard.format_of(self.name) is FP32

    # -- this rank's slice, of several -------------------------------------------------------------------------------

    @property
    def start(self) -> int:
        """The index of the first local element."""
        entry = self._bound()[1] if self.own_slice is None else self.own_entry
        assert entry is not None
        return entry.shard.slice_of(entry.index).start

    def elements(self) -> torch.Tensor:
        """Returns this rank's elements of now, 1D, as :attr:`shardopt.tensors.part.Part.local` is."""
        if self.own_slice is not None:
            return self.own_slice
        self._check()
        _, entry = self._bound()
        return entry.shard.read(self.name, entry.index).to(self.device)

    def fetch(self) -> Callable[[], torch.Tensor]:
        """Returns what reads the whole as it is now, from this rank alone."""
        self._check()
        whole = self.consolidated()
        domain, entry = self._bound()
        if whole is not None:
            if domain.remote is not None:  # as the other ranks do
                domain.remote.note_read(entry.shard, entry.index, self.name)
            return whole.clone
        found = domain.fetcher(entry.shard, entry.index, self.name)
        if found is None:
            raise StateError(
                f"call full_tensor() on every rank: {self.name} lies on several ranks, of which one alone can read "
                "nothing here."
            )
        return found

    def consolidated(self) -> torch.Tensor | None:
        """Returns the whole of now, in host memory, if it was consolidated on this rank; None otherwise."""
        if self.own_slice is not None:
            return None
        self._check()
        state = (self._table.consolidated or {}).get(self._local)
        return None if state is None else state.tensors.get(self.name)

    def draw(self) -> str:
        """Returns the name of the next noise for the param."""
        domain, entry = self._bound()
        return domain.draw(entry)

    def gather(self) -> torch.Tensor:
        """Collective: returns the whole."""
        self._check()
        domain, entry = self._bound()
        return entry.shard.as_param(domain.gather(entry.shard, self.name), entry.index).clone()

    def gather_slices(self, local: torch.Tensor) -> torch.Tensor:
        """Collective: returns the whole of what every rank passes as its slice."""
        domain, entry = self._bound()
        shard = entry.shard
        own = torch.zeros(shard.numel, dtype=local.dtype, device=shard.device)
        own[shard.slice_of(entry.index).local] = local.to(shard.device)
        flat = domain.gather_slices(shard, own, f"copies of {self.name}")
        return shard.as_param(flat, entry.index).to(local.device, copy=True)

    def _bound(self) -> tuple[Domain, ParamRecord]:
        found = self._entry()
        if found is None:
            self.ended = self.ended or "the optimizer was closed"
            self._check()
        assert found is not None
        return found

    # -- the whole ---------------------------------------------------------------------------------------------------

    def _read(self) -> torch.Tensor:
        found = self._entry()
        if found is None:
            return self._of_waiting(self._waiting().tensors)
        domain, entry = found
        shard, index = entry.shard, entry.index
        self._check_kept(shard.home.names)
        if domain.mesh.shard.size > 1:
            return self.fetch()().to(self.device)
        own = shard.read(self.name, index)  # decodes, or reads from a disk, no more than this param
        return own.as_strided(shard.bucket.params[index].size(), shard.strides(index)).to(self.device)

    def _of_waiting(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        self._check_kept(tensors)
        return tensors[self.name]

    def _check_kept(self, names: Collection[str]) -> None:
        if self.name not in names:
            self.ended = "the state was dropped"
            self._check()

    def _opened(self) -> torch.Tensor:
        found = self._entry()
        if found is None or found[0].mesh.shard.size == 1:
            return super()._opened()
        shard, index = found[1].shard, found[1].index
        self._check_kept(shard.home.names)
        size, where = shard.bucket.params[index].size(), shard.slice_of(index)
        whole = torch.zeros(size.numel(), device=self.device)
        whole[where.start : where.start + where.numel] = shard.read(self.name, index)
        return whole.as_strided(size, shard.strides(index))

    def _store(self, changed: torch.Tensor) -> None:
        self._table.written(self._local)
        found = self._entry()
        if found is None or self.is_memory:
            return
        domain, entry = found
        where = entry.shard.slice_of(entry.index)
        values = entry.shard.in_order(entry.index, changed)[where.start : where.start + where.numel]
        if self.name == "master":
            values = self._that_round(entry, values)
        is_served = domain.mesh.shard.size > 1
        moving = writing(domain, entry.shard, entry.index, [self.name]) if is_served else nullcontext()
        with moving, domain.all_or_nothing():
            entry.shard.write(self.name, entry.index, where.start, values)

    def _that_round(self, entry: ParamRecord, values: torch.Tensor) -> torch.Tensor:
        """Returns master weights, where a value does not round to the param those of the record: the param counts."""
        shard, where = entry.shard, entry.shard.slice_of(entry.index).local
        params, kept = shard.params(where.start, where.stop), shard.read(self.name, entry.index)
        fits = codecs.rounds_to(values, params.to(values.device), ties=True)
        return torch.where(fits, values, kept.to(values.device))

    def kept(self) -> torch.Tensor | None:
        if self.is_live and not self.is_whole:
            return self.elements() if self._lies_in_memory(self._bound()[1].shard) else self.elements().clone()
        return super().kept()

    def keep(self, values: torch.Tensor | None) -> None:
        if values is not None and values.dim() == 1 and self.is_live and not self.is_whole:
            self.own_slice, self.own_entry, self.ended = values, self._bound()[1], "its record was forgotten"
        else:
            super().keep(values)


class HeldSlices(HeldElements):
    """The same, shown as a part."""

    def _made(self, size: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return HeldPart(self, torch.empty_strided(size, stride, device="meta"), dtype, self.device)


class HeldMargin(HeldRecord):
    """Values by row or column of the param, which every rank holds whole."""

    def _read(self) -> torch.Tensor:
        found = self._entry()
        margins = self._waiting().margins if found is None else found[1].margins
        if self.name not in margins:
            self.ended = "the state was dropped"
            self._check()
        return margins[self.name].to(self.device)

    def _store(self, changed: torch.Tensor) -> None:
        found, values = self._entry(), torch.empty(changed.shape, dtype=torch.float32).copy_(changed)
        if found is None:
            state = self._table.written(self._local)
            assert state is not None
            state.margins[self.name] = values
            return
        self._table.written(self._local)
        with found[0].epoch.loading(()):  # every rank has its own
            found[1].margins = {**found[1].margins, self.name: values}  # the dict of before may be in a save


class HeldCount(HeldRecord):
    """The step count of a param, or a scalar that its rule passes from step to step."""

    def _read(self) -> torch.Tensor:
        found = self._entry()
        history: Any = self._waiting() if found is None else found[1]
        return count_as_torch(history.step) if self.name == "step" else _as_torch(history.carried[self.name])

    def _store(self, changed: torch.Tensor) -> None:
        value = float(changed)
        if self.name == "step" and (value < 0 or value != int(value)):
            raise StateError(
                f"write a whole number of steps, at least 0, to 'step': found {value:g}, and no update counts so. "
                "Nothing was written."
            )
        found = self._entry()
        state = self._table.written(self._local)
        if found is None:
            assert state is not None
            step, carried = self._with(value, state.step, state.carried)
            state.step, state.carried = step, carried
            return
        domain, entry = found
        with domain.epoch.loading(()):
            entry.history = History(*self._with(value, entry.step, entry.carried))

    def _with(self, value: float, step: int, carried: dict[str, float]) -> tuple[int, dict[str, float]]:
        return (int(value), dict(carried)) if self.name == "step" else (step, {**carried, self.name: value})


def _as_torch(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)
