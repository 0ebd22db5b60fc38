"""This rank's slice of one param's reduced gradient, and the norms of the whole gradient, which every rank knows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol, cast
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from .norm_table import Norms, NormTable

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .norm_table import Array, Rows

# Read of many slices at once, in C.
_TABLE, _ROW, _HOME, _DIVISOR = map(attrgetter, ("table", "row", "home", "divisor"))


class Fetch(Protocol):
    """Reads the whole mean of a moment."""

    @property
    def steps(self) -> int:
        """The number of steps that were taken."""

    def __call__(self, moment: tuple[int, int]) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Home:
    """The memory in which the slices of one bucket lie."""

    total: Tensor  # 1D
    count: int  # of slices


class Copied:
    """Lives as long as a copy of a gradient that can be read."""


class GradientSlice:
    """This rank's slice of one param's reduced gradient. The reducer fills it; it outlives the parts that show it.

    Attributes:
        total: 1D, sum over ranks and backwards, fp32 or bf16; the same memory for life. Scaling computes in fp32 and
            rounds once to this dtype.
        start: index of the slice's first element in the param's storage order.
        receive: takes a full local gradient that autograd adds to the part.
        gather: collective; returns the whole (the param's shape) of what each rank passes as its slice: of ``total``
            once every rank has divided it. None where this rank holds the whole gradient.
        table, row: where the norms of the whole gradient stand.
        home: where ``total`` lies; None: alone.
        number: of the gradient among those of its domain, the same on all ranks.
        divisor: number by which ``total`` still has to be divided; 1 once it is the mean.
        undivided: the sum that ``total`` held before ``show_mean()`` divided it.
        part: the part that shows this gradient. Any other part of this slice is stale.
        has_mean: a round has made this gradient, and no later call has dropped it.
        is_used: True if a step used this gradient after the last backward.
        is_held: a script may hold memory of ``total``, and write to it.
        edits: in-place edits of the mean since the last round: each the name of a method of the part and its arguments.
        pending: this rank's own gradient (the param's shape), which autograd added to the part under ``no_sync()``; the
            next round reduces it.
        unreduced: address of the gradient that autograd accumulated while nothing reduced it; 0: none.
        was_early: that was before the param was bound.
        draws: names the next noise that is drawn for the param; None once the optimizer is gone.
        group: the ranks over which this is the mean; None: this rank alone.
        is_spoilt_elsewhere: gradients of other ranks' experts hold an Inf or NaN.
        fetch: reads the whole mean of a moment, this rank alone, in host memory and the slice's dtype; counts steps.
            None where this rank holds the whole, or cannot read.
        round, edit_count: the moment: the round that made this gradient, and the changes in place since.
        is_moving: the mean is not readable for other ranks: a round is open, or an edit under way.
        was_read: this rank has read the whole of this moment, so that others may do so, later than this rank.
        kept: by such a moment, the mean as it was then, and an event of a device after its copy; until the round after,
            or as long as there are copies of it.
        written: on a device, after the kernels of the last change.
    """

    def __init__(
        self,
        total: Tensor,
        start: int,
        place: tuple[NormTable, int],
        receive: Callable[[Tensor], None],
        gather: Callable[[Tensor], Tensor] | None = None,
        fetch: Fetch | None = None,
        group: ProcessGroup | None = None,
        draws: Callable[[], str | None] | None = None,
        home: Home | None = None,
    ):
        self.total, self.start, self.receive, self.gather, self.fetch = total, start, receive, gather, fetch
        self.group, self.draws = group, draws
        (self.table, self.row), self.home = place, home
        self.number = self.row
        self.divisor = 1
        self.undivided: Tensor | None = None
        self._undivided_by = 1  # the divisor that made the mean of it
        self.part: Tensor | None = None
        self.has_mean = self.is_used = self.is_held = False
        self.edits: list[list[Any]] = []
        self.pending: Tensor | None = None
        self.unreduced, self.was_early = 0, False
        self.is_spoilt_elsewhere = False
        self.round, self.edit_count = 0, 0
        self.is_moving = self.was_read = False
        self.kept: dict[tuple[int, int], tuple[Tensor, torch.cuda.Event | None]] = {}
        self._copied: WeakValueDictionary[tuple[int, int], Copied] | None = None  # of which moments there are copies
        self.written: torch.cuda.Event | None = None
        self._lent: Tensor | None = None
        self._lent_version = 0
        self._is_aliased = False

    @property
    def was_written(self) -> bool:
        """True if the user may have written single elements, which would change the norms."""
        return self._is_aliased or (self._lent is not None and self._lent._version != self._lent_version)

    @property
    def norms(self) -> Norms | None:
        """Norms of the mean. None if they are not known: after clamping, an overflow, or a write to a lent tensor."""
        return None if self.was_written else self.table[self.row]

    @norms.setter
    def norms(self, norms: Norms | None) -> None:
        self.table[self.row] = norms
        self.follow_writes()

    def follow_writes(self) -> None:
        """Records that the norms in the table are those of what the user may have written until now."""
        if self._lent is not None:
            self._lent_version = self._lent._version

    def divide(self) -> None:
        """Makes ``total`` the mean: divides once and rounds once, as a kernel that divides on reading does."""
        divide_all([self])

    def show_mean(self) -> None:
        """Makes ``total`` the mean for a reader, and keeps the sum: rounds and steps have the same bits as without."""
        self.is_held = True
        if self.divisor != 1:
            total, self._undivided_by = self.total.clone(), self.divisor
            was_read, self.was_read = self.was_read, False  # the mean stays what it is
            self.divide()
            self.undivided, self.was_read = total, was_read
            settle([self])

    def summed(self) -> tuple[Tensor, int]:
        """Returns the sum and its divisor: the undivided sum after ``show_mean()``, else ``total``.

        Elements of the mean that the user wrote since ``show_mean()`` are multiplied by the divisor.
        """
        if self.undivided is None:
            return self.total, self.divisor
        mean = self.undivided.clone()
        divide_(mean, self._undivided_by)
        return torch.where(self.total == mean, self.undivided, self.total * self._undivided_by), self._undivided_by

    def replace(self, mean: Tensor) -> None:
        """Makes this the mean, 1D. Its norms are not known."""
        self.divide()
        self.total.copy_(mean)
        self.norms = None
        self.edit_count += 1
        settle([self])

    # -- for other ranks -------------------------------------------------------------------------------------------

    @property
    def moment(self) -> tuple[int, int]:
        """The round that made this gradient, and how often it was changed in place since."""
        return self.round, self.edit_count

    def read_whole(self) -> Tensor:
        """Returns the whole mean, in host memory and the slice's dtype: this rank alone reads it from the others.

        Raises:
            StateError: another rank has changed or dropped this gradient meanwhile.
            CommunicationError: another rank is gone.
        """
        assert self.fetch is not None
        self.was_read = True  # first: whoever waits for this rank's answer waits for others, which may be ahead
        return self.fetch(self.moment)

    def measure_anew(self) -> Norms:
        """Returns the norms of the mean, which the table does not know; this rank alone reads it from the others."""
        whole = self.read_whole().double()
        finite = whole[whole.isfinite()]
        largest = float(finite.abs().max()) if finite.numel() else 0.0
        # The table stays as it is: ranks compare theirs, and not all of them may have asked.
        return Norms(float(finite.square().sum().sqrt()), largest, whole.numel() - finite.numel())

    def keep_mean(self) -> None:
        """Keeps the mean, which is about to change, for ranks that come to this moment later."""
        mean = self.total.clone()
        divide_(mean, self.divisor)
        # A new table: a thread that serves may look at the old one.
        self.kept, self.was_read = self.kept | {self.moment: (mean, _recorded(self))}, False

    def copied(self) -> Copied:
        """Returns what every copy of the present mean refers to, as long as it can be read."""
        self.was_read = True  # so that the mean is kept if it changes before the copy is read
        if self._copied is None:
            self._copied = WeakValueDictionary()
        found = self._copied.get(self.moment)
        if found is None:
            found = self._copied[self.moment] = Copied()
        return found

    def drop_kept(self) -> None:
        """Drops what was kept of earlier rounds, but for means of which there are copies."""
        self.kept = {moment: mean for moment, mean in self.kept.items() if moment in (self._copied or ())}

    def restore_sum(self, count: int) -> Tensor | None:
        """Makes ``total`` the sum of ``count`` ranks again, so that a round can add to it.

        Returns:
            Memory that was read and is not needed any more.
        """
        if self.divisor == count:
            return None
        if self.undivided is not None and self._undivided_by == count:
            self.total.copy_(self.summed()[0])
            read, self.undivided = self.undivided, None
            return read
        self.divide()
        self.total.mul_(count)
        return None

    def shows_in(self, grad: Tensor | None) -> bool:
        """True if ``grad`` is the part that shows this gradient, or an alias of that part (``.detach()``)."""
        return getattr(grad, "gradient_slice", None) is self and not cast(Any, grad).is_stale

    def lend(self) -> Tensor:
        """Returns the mean, to be read. After a write to it the norms are unknown."""
        self.show_mean()
        if self._lent is None:
            # ``total`` shares its version counter with the whole buffer; ``.data`` has a counter of its own.
            self._lent = self.total.data
            self._lent_version = self._lent._version
        return self._lent

    def alias(self) -> Tensor:
        """Returns the mean, for views. Writes to views go unnoticed: the norms of this slice are never known again."""
        self.show_mean()
        self._is_aliased = True
        return self.total


# -- many gradients at once --------------------------------------------------------------------------------------------


def settle(slices: Sequence[GradientSlice]) -> None:
    """Shows changes of these slices to other ranks, which wait for the kernels so far."""
    event = _recorded(slices[0]) if slices else None
    for each in slices:
        each.written, each.is_moving = event, False


def _recorded(gradient_slice: GradientSlice) -> torch.cuda.Event | None:
    """Returns an event after what the current stream does so far; None on a CPU, or if nobody else reads."""
    device = gradient_slice.total.device
    if device.type != "cuda" or gradient_slice.fetch is None:
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def divide_all(slices: Sequence[GradientSlice]) -> None:
    """Makes the totals of these slices their means; the caller settles them."""
    _move(slices)
    for each in slices:
        each.undivided = None
    for divisor in {*map(_DIVISOR, slices)} - {1}:
        undivided = [each for each in slices if each.divisor == divisor]
        for _, _, some in _by_table(undivided):
            _divide(_totals(some), divisor)
        for each in undivided:
            each.divisor = 1


def multiply(slices: Sequence[GradientSlice], factor: float) -> None:
    """Multiplies the means by one number."""
    _scale(slices, "mul_", factor, _multiply, NormTable.multiply)


def divide(slices: Sequence[GradientSlice], divisor: float) -> None:
    """Divides the means by one number."""
    _scale(slices, "div_", divisor, _divide, NormTable.divide)


def _scale(
    slices: Sequence[GradientSlice],
    name: str,
    number: float,
    scale: Callable[[Sequence[Tensor], float], None],
    scale_norms: Callable[[NormTable, Rows, float], None],
) -> None:
    divide_all(slices)
    by_table = _by_table(slices)
    for _, _, some in by_table:
        scale(_totals(some), number)
    _note_edit(slices, [name, number])
    for table, _, some in by_table:
        scale_norms(table, _rows(table, some), number)
        # A scaling of gradients whose norms may not show it, as they are not known.
        for each in some if table.edits else ():
            if each.number in table.edits:
                table.edits.note(each.number, f"{name} {number!r}")


def negate(slices: Sequence[GradientSlice]) -> None:
    """Negates the means, which changes no norm."""
    _move(slices)
    torch._foreach_neg_(_totals(slices))
    undivided = [each.undivided for each in slices if each.undivided is not None]
    if undivided:
        torch._foreach_neg_(undivided)
    for each in slices:
        each.edits.append(["neg_"])
        each.edit_count += 1
        each.table.edits.note(each.number, "neg_")
    settle(slices)


def zero(slices: Sequence[GradientSlice]) -> None:
    """Zeroes the gradients, and forgets what was not reduced yet."""
    _move(slices)
    torch._foreach_zero_(_totals(slices))
    for each in slices:
        each.edits, each.pending, each.undivided = [], None, None
    _note_edit(slices, ["zero_"])
    for table, _, some in _by_table(slices):
        table.zero(_rows(table, some))
        table.edits.forget([each.number for each in some])


def clamp(slices: Sequence[GradientSlice], low: float | None = None, high: float | None = None) -> None:
    """Clamps the means. Their norms are not known afterwards."""
    divide_all(slices)
    totals = [each.total for each in slices]
    if low is not None:
        torch._foreach_clamp_min_(totals, low)
    if high is not None:
        torch._foreach_clamp_max_(totals, high)
    for name, bound in (("clamp_min_", low), ("clamp_max_", high)):
        if bound is not None:
            _note_edit(slices, [name, bound])
            for table, _, some in _by_table(slices):
                table.forget(_rows(table, some))
            for each in slices:
                each.table.edits.note(each.number, f"{name} {bound!r}")


UNREPEATABLE = ""  # names an edit that a rank without its arguments cannot make


def change(gradient_slice: GradientSlice, by: Callable[[Tensor], object], text: str, wholes: Sequence[Tensor]) -> None:
    """Changes the mean by a function that is given the slice, in place. The norms are not known afterwards.

    Args:
        text: names the edit and its numbers.
        wholes: the whole tensors that were part of it.
    """
    divide_all([gradient_slice])
    try:
        by(gradient_slice.total)
    except BaseException:  # torch looks at its arguments before it writes
        settle([gradient_slice])
        raise
    _note_edit([gradient_slice], [UNREPEATABLE, text])
    gradient_slice.norms = None
    gradient_slice.table.edits.note(gradient_slice.number, text, wholes)


def set_norms(slices: Sequence[GradientSlice], two: Array, largest: Array, nonfinite: Array) -> None:
    """Sets the norms of new means: 1D [slices] each. ``largest`` is rounded as the slices are."""
    for table, places, some in _by_table(slices):
        table.fill(_rows(table, some), two[places], largest[places], nonfinite[places])
    for each in slices:
        if each._lent is not None:
            each.follow_writes()


def norms_of(slices: Sequence[GradientSlice]) -> tuple[Array, Array, Array] | None:
    """Returns the norms of these means: ``two``, ``largest`` and ``nonfinite``, 1D [slices] each.

    None if those of one are not known.
    """
    (two, largest), nonfinite = np.empty((2, len(slices))), np.empty(len(slices), np.int64)
    for table, places, some in _by_table(slices):
        rows = _rows(table, some)
        if not table.known[rows].all():
            return None
        two[places], largest[places], nonfinite[places] = table.two[rows], table.largest[rows], table.nonfinite[rows]
    return None if _written(slices) else (two, largest, nonfinite)


def _note_edit(slices: Sequence[GradientSlice], edit: list[Any]) -> None:
    """Notes an edit of these slices, and shows it to other ranks; the caller sets the norms that are known then."""
    event = _recorded(slices[0]) if slices else None
    for each in slices:
        each.edits += (edit,)
        each.edit_count += 1
        each.written, each.is_moving = event, False
    for each in _written(slices):
        each.norms = None


def _move(slices: Sequence[GradientSlice]) -> None:
    """Keeps other ranks from reading what is about to change."""
    for each in slices:
        each.is_moving = True
        if each.was_read:
            each.keep_mean()


def _written(slices: Sequence[GradientSlice]) -> list[GradientSlice]:
    """Returns those to which the user may have written single elements."""
    return [each for each in slices if (each._lent is not None or each._is_aliased) and each.was_written]


def _by_table(slices: Sequence[GradientSlice]) -> list[tuple[NormTable, Any, Sequence[GradientSlice]]]:
    """Returns each table, the indices in ``slices`` of those whose norms it holds, and these, whose dtype is one."""
    tables = list(dict.fromkeys(map(_TABLE, slices)))
    if len(tables) == 1:  # nearly always
        return [(tables[0], slice(None), slices)]
    found: list[tuple[NormTable, Any, Sequence[GradientSlice]]] = []
    for table in tables:
        places = [place for place, each in enumerate(slices) if each.table is table]
        found.append((table, places, [slices[place] for place in places]))
    return found


def _rows(table: NormTable, slices: Sequence[GradientSlice]) -> Rows:
    """Returns what the rows of these slices are indexed by: a slice if they are all rows, in order, as nearly always.

    To index by a list takes 40 times as long, most of it to make an array of it, and columns are indexed often.
    """
    rows = list(map(_ROW, slices))
    return slice(None) if rows == table.every else np.array(rows)


def _totals(slices: Sequence[GradientSlice]) -> list[Tensor]:
    """Returns the memory of these slices: one tensor for all those of a bucket, and what is between them.

    On a CPU, the operation on each of many tensors would take the time, not the elements. No slice is given twice.
    """
    counts = Counter(map(_HOME, slices))
    whole = {home for home, count in counts.items() if home is not None and count == home.count}
    found = [home.total for home in whole]
    return found if len(whole) == len(counts) else found + [each.total for each in slices if each.home not in whole]


def _multiply(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiplies tensors of one dtype in place."""
    if tensors[0].dtype is torch.bfloat16 and tensors[0].device.type == "cpu":
        for tensor in tensors:  # the form for lists rounds the factor to bf16 first
            tensor.mul_(factor)
    else:
        torch._foreach_mul_(list(tensors), factor)


def _divide(tensors: Sequence[Tensor], divisor: float) -> None:
    """Divides tensors of one dtype by IEEE division in fp32, in place, and rounds once.

    torch's CUDA kernel for one tensor and a divisor in host memory multiplies by the reciprocal. That for lists
    divides, and does not round the divisor to bf16.
    """
    torch._foreach_div_(list(tensors), divisor)


def divide_(tensor: Tensor, divisor: float) -> None:
    """Divides in place by IEEE division in fp32, and rounds once."""
    _divide([tensor], divisor)
