"""A step that was planned once, and is replayed as long as nothing that it was planned of has changed.

::

    planned   params looked up, checked, sorted: launches, rows, alike params, facts      once
    replayed  one integer and lists compared in C; then addresses, scalars                every step

What is compared: the revision of the domain (loads of states), the params that the groups list, where params lie, their
versions and ``requires_grad``, which of them have a gradient and of what kind, and of the groups what chooses a variant
of the rule. What a step evaluates anew: scalars, addresses of gradients, noise, and what gradients hold.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..tensors.gradient import GradientPart
from ..tensors.unsharded_guard import gradient_in
from .alike import AlikeParams, StepScalars
from .launches import KeptChunks, Launch, LaunchForm, StepPlan, forms_of
from .param_update import ParamUpdate
from .variants import Variants

if TYPE_CHECKING:
    from ..domain.domain import Domain
    from ..domain.history import History
    from ..domain.listed import ListedParams
    from ..domain.param import ParamRecord
    from ..domain.shard import Shard
    from .op import Program

Numbers = Sequence[dict[str, Any]]  # the hyper-parameters of each group, as plain numbers

# Attributes that are read of many objects at once, in C.
_VERSION, _REQUIRES_GRAD, _LOADED = map(attrgetter, ("_version", "requires_grad", "loaded_masters"))
_PART, _PENDING, _DIVISOR = map(attrgetter, ("part", "pending", "divisor"))
# Of a gradient that is read where autograd left it: as those of ListedParams.attributes, and the layout.
_OF_GRADIENT: Sequence[Callable[[torch.Tensor], Any]] = (
    torch.Tensor.size,
    torch.Tensor.stride,
    attrgetter("device"),
    attrgetter("dtype"),
    attrgetter("layout"),
)
# A tuple as it is: one call a param less than the constructor.
_update: Callable[[Iterable[Any]], ParamUpdate] = partial(tuple.__new__, ParamUpdate)


class Facts:
    """What ranks compare of all params of a domain, in a form as short as the params are alike.

    Params of one class have one history, all a gradient or none, and all train or none does. The classes whose numbers
    are equal in a step are told as one: ranks that planned in different steps say the same.
    """

    def __init__(self, entries: Iterable[ParamRecord], updates: Sequence[ParamUpdate]):
        presence = {each.entry: each.gradient_slice is None for each in updates}
        known: dict[tuple[History, bool | None, bool], int] = {}
        of_entries = [
            known.setdefault((entry.history, presence.get(entry), entry.param.requires_grad), len(known))
            for entry in entries
        ]
        self._classes, self._of_entries = list(known), np.array(of_entries, np.int32)
        self._known: tuple[list[int], str] = ([], "")

    def now(self) -> list[Any]:
        """Returns the facts of this step, JSON-able: how params share them, and those of each class."""
        seen: dict[tuple[Any, ...], int] = {}
        numbers = [
            seen.setdefault((history.step, present, trains, *history.carried.values()), len(seen))
            for history, present, trains in self._classes
        ]
        if numbers != self._known[0]:
            of_entries = np.array(numbers, np.int32)[self._of_entries]
            self._known = numbers, hashlib.sha256(of_entries.tobytes()).hexdigest()
        return [self._known[1], *seen]


class _FrozenLaunch:
    """A launch, and which of the step's updates are its rows.

    Attributes:
        is_ahead: True if it is known before the gradients have come.
        stays: True if all of it but the scalars is the same in each step.
    """

    def __init__(self, form: LaunchForm, number_of: Mapping[ParamRecord, int], updates: Sequence[ParamUpdate]):
        self._form, self.shard, self._rows = form, form.shard, list(form.entries)
        self._numbers = [number_of[entry] for entry in form.entries.values()]
        # Sums stay where they are: the updates of all steps are the same.
        self._updates = self._of(updates) if form.reads_sums else None
        # So are launches, where scalars are all that a step tells the kernel.
        self.is_ahead = form.reads_sums and len(form.spec.passes) == 1
        self.is_ahead = self.is_ahead and form.whole.around is None and not form.whole.margins
        self.stays = self.is_ahead and not form.spec.needs_noise
        self._kept: tuple[torch.device, Launch, np.ndarray[Any, Any]] | None = None

    def _of(self, updates: Sequence[ParamUpdate]) -> dict[int, ParamUpdate]:
        return dict(zip(self._rows, [updates[number] for number in self._numbers], strict=True))

    def launch(self, updates: Sequence[ParamUpdate], scalars: StepScalars, seed: int) -> Launch:
        form, shard = self._form, self.shard
        if self._kept is not None:
            device, launch, table = self._kept
            if device == shard.home.device and launch.gradients is shard.sum_table:
                form.fill(table, scalars)
                return launch
        found = form.launch(self._of(updates) if self._updates is None else self._updates, scalars, seed)
        if self.stays:
            self._kept = shard.home.device, found, found.scalars.numpy()
        return found


def without_gradients(updates: Sequence[ParamUpdate]) -> list[ParamUpdate]:
    """Returns the updates as a plan may keep them: parts of reduced gradients stay, other gradients are let go."""
    return [each if each.gradient_slice is not None else ParamUpdate(*each[:3]) for each in updates]


class FrozenStep:
    """The plan of one domain's steps, but for what each step evaluates.

    Attributes:
        program: of the updates.
        states: the names of the states that each shard needs.
        awaited: the updates whose gradients are still to come, if they come bucket by bucket.
    """

    def __init__(
        self,
        domain: Domain,
        listed: ListedParams,
        numbers: Numbers,
        updates: Sequence[ParamUpdate],
        states: dict[Shard, dict[str, None]],
        program: Program,
        awaits: bool = False,
    ):
        """
        Args:
            updates: of the step that is planned, with their gradients, which are not kept.
            program: of the updates, made of what :func:`without_gradients` returns.
            awaits: True if gradients come bucket by bucket, while the step goes on.
        """
        self._domain, self._listed, self._numbers, self.states = domain, listed, numbers, states
        self.awaited = {each.entry: each for each in updates} if awaits else {}
        self._is_new: set[ParamRecord] = set(listed.entries).difference(self.awaited) if awaits else set()
        self._forms: dict[Shard, tuple[list[Any], list[LaunchForm]]] = {}  # of buckets whose gradients have come
        self._awaits = awaits
        self._revision = domain.epoch.revision
        self._alike = AlikeParams(domain.rule, numbers, updates)
        self._alike.share()
        entries = list(domain.entries.values())
        self._entries, self._params = entries, [entry.param for entry in entries]
        self._requires_grad = list(map(_REQUIRES_GRAD, self._params))
        self._facts = Facts(entries, updates)
        self._versions: list[int] | None = None  # of all params, once a step of this plan was taken
        self._kinds = sorted({(each.group, each.entry.shape) for each in updates})
        self._chosen = self._choose(numbers)
        # Of each shard, the params whose masters were loaded since their last update: kernels compare those alone.
        self._loaded = list(map(list, map(_LOADED, domain.shards)))
        # -- gradients
        grads: list[Any] = [] if awaits else list(map(gradient_in, listed.params))  # that are there before the step
        self._types = list(map(type, grads))
        self._slices = [each.gradient_slice for each in updates if each.gradient_slice is not None]
        self._divisors = list(map(_DIVISOR, self._slices))
        self._are_parts = len(self._slices) == len(grads)  # all of them, of params that all have one
        numbers_of_listed = [number for number, grad in enumerate(grads) if grad is not None]
        self._present = numbers_of_listed
        plain = [number for number in numbers_of_listed if type(grads[number]) is torch.Tensor]
        self._plain = plain if len(plain) < len(grads) else None  # None: all
        self._attributes = [[of_all[number] for number in plain] for of_all in listed.attributes]
        self._attributes[3] = [grads[number].dtype for number in plain]
        self._attributes.append([torch.strided] * len(plain))
        # Only what autograd and the reducer make is read without another look.
        self._can_replay = awaits or (
            len(updates) == len(numbers_of_listed)
            and all(
                (type(grads[number]) is torch.Tensor and each.entry.gradient_slice is None)
                or (type(grads[number]) is GradientPart and each.gradient_slice is not None)
                for number, each in zip(numbers_of_listed, updates, strict=True)
            )
        )
        # -- updates: their columns
        kept = without_gradients(updates)
        self._columns: list[list[Any]] = [[each[n] for each in kept] for n in range(len(ParamUpdate._fields))]
        self._sums = kept if len(self._slices) == len(kept) else None  # the updates of every step
        self.program = program
        by_shard: dict[Shard, dict[int, ParamUpdate]] = {shard: {} for shard in domain.shards}
        for each in () if awaits else updates:
            by_shard[each.entry.shard][each.entry.index] = each
        variants, number_of = Variants(domain.rule, numbers), {each.entry: n for n, each in enumerate(updates)}
        self._launches = [
            _FrozenLaunch(form, number_of, updates)
            for shard, its in by_shard.items()
            for form, _ in forms_of(shard, variants, its, self._alike)
        ]
        # The chunks of other launches hold gradients, which are let go.
        self._kept: KeptChunks | None = {} if all([each.stays for each in self._launches]) else None

    def _choose(self, numbers: Numbers) -> list[Any]:
        """Returns what of the groups chooses kernels and the order of work: the rest is scalars."""
        rule, variant_of = self._domain.rule, Variants(self._domain.rule, numbers)
        names = [(rule.of(group).name, group.get("matrices"), variant_of(n)) for n, group in enumerate(numbers)]
        return [names, [variant_of(*kind) for kind in self._kinds]]

    def holds(self, listed: ListedParams, numbers: Numbers) -> bool:
        """True if a step planned now would be this one; the listed params were checked."""
        if not self._holds_before_gradients(listed, numbers):
            return False
        grads: list[Any] = [] if self._awaits else list(map(gradient_in, listed.params))
        return self._types == list(map(type, grads)) and self._show_sums(grads) and self._are_plain(grads)

    def _holds_before_gradients(self, listed: ListedParams, numbers: Numbers) -> bool:
        """True if all but the gradients is as it was."""
        return (
            self._can_replay
            and self._versions is not None
            and self._revision == self._domain.epoch.revision
            and self._listed is listed
            and self._loaded == list(map(list, map(_LOADED, self._domain.shards)))
            and self._versions == list(map(_VERSION, self._params))
            and self._requires_grad == list(map(_REQUIRES_GRAD, self._params))
            and (self._numbers == numbers or self._chosen == self._choose(numbers))
        )

    def launches_ahead(self, listed: ListedParams, numbers: Numbers) -> dict[Shard, list[Launch]]:
        """Returns the launches of the coming step, before its gradients have come, as far as they are known."""
        if self._awaits or not self._holds_before_gradients(listed, numbers):
            return {}
        of_shard: dict[Shard, list[_FrozenLaunch]] = {}
        for each in self._launches:
            of_shard.setdefault(each.shard, []).append(each)
        scalars, seed = self._alike.scalars(numbers), self._domain.options.tuning.seed
        return {
            shard: [each.launch((), scalars, seed) for each in its]
            for shard, its in of_shard.items()
            if all(each.is_ahead for each in its)
        }

    def _show_sums(self, grads: Sequence[Any]) -> bool:
        """True if the parts among the gradients show the sums, whole and divided as when the step was planned."""
        slices = self._slices
        if not slices:
            return True
        parts = grads if self._are_parts else [each for each in grads if type(each) is GradientPart]
        return (
            all(map(is_, map(_PART, slices), parts))
            and all(map(is_, map(_PENDING, slices), repeat(None)))
            and self._divisors == list(map(_DIVISOR, slices))
        )

    def _are_plain(self, grads: Sequence[Any]) -> bool:
        """True if all other gradients lie in memory as when the step was planned, but for their addresses."""
        if self._are_parts:
            return True
        plain = grads if self._plain is None else [grads[number] for number in self._plain]
        for attributes, get in zip(self._attributes, _OF_GRADIENT, strict=True):
            if list(map(get, plain)) != attributes:
                return False
        return True

    def plan(self, numbers: Numbers, updates: Sequence[ParamUpdate] | None = None) -> StepPlan:
        """Returns the plan of a step, without what its gradients hold.

        Args:
            updates: what it updates, by whom the step was planned; None: as then, with the present gradients.
        """
        domain, updates = self._domain, self._sums if updates is None else updates
        if updates is None:
            grads = list(map(gradient_in, self._listed.params))
            present = grads if len(self._present) == len(grads) else [grads[number] for number in self._present]
            updates = self._updates(present)
        self._numbers = numbers
        scalars, seed = self._alike.scalars(numbers), domain.options.tuning.seed
        return StepPlan(
            domain,
            numbers,
            updates,
            [each.launch(updates, scalars, seed) for each in self._launches],
            list(zip(self._alike.histories, scalars.of_alike, strict=True)),
            self._facts.now() if domain.mesh.world.size > 1 else [],  # one rank has nothing to compare with
            self._versions is not None,
            self.states,
            program=self.program,
            kept=self._kept,
        )

    def _updates(self, grads: Sequence[torch.Tensor]) -> list[ParamUpdate]:
        columns = list(self._columns)
        kept, slices = columns[3], columns[5]
        columns[3] = [own if each is not None else grad for own, each, grad in zip(kept, slices, grads, strict=True)]
        return list(map(_update, zip(*columns, strict=True)))

    # -- gradients that come bucket by bucket ----------------------------------------------------------------------

    def begin(self, numbers: Numbers) -> None:
        """Evaluates the scalars of a step, before the first bucket is updated."""
        self._numbers, self._scalars = numbers, self._alike.scalars(numbers)

    def awaits_all(self, entries: Iterable[ParamRecord]) -> bool:
        """True if these params are planned, or in no param group."""
        return self._is_new.isdisjoint(entries)

    def launches_of(self, shard: Shard, updates: Mapping[int, ParamUpdate]) -> list[Launch]:
        """Returns the launches of one bucket, whose gradients have come.

        Args:
            updates: index in the bucket -> an awaited update, with its gradient.
        """
        domain, key = self._domain, [(index, each.grad.dtype, each.divisor) for index, each in updates.items()]
        known, forms = self._forms.get(shard, ([], []))
        if known != key:
            variants = Variants(domain.rule, self._numbers)
            forms = [form for form, _ in forms_of(shard, variants, updates, self._alike)]
            self._forms[shard] = key, forms
        seed, of_row = domain.options.tuning.seed, [updates.get(piece.param) for piece in shard.pieces]
        found: list[Launch] = []
        for form in forms:
            rows = {row: each for row in form.entries if (each := of_row[row]) is not None}
            found.append(form.launch(rows, self._scalars, seed))
        return found

    def was_taken(self) -> None:
        """Notes that the step's params were updated, and their versions with them: the next step may be a replay."""
        self._versions = list(map(_VERSION, self._params))
        for entry, version in zip(self._entries, self._versions, strict=True):
            entry.version = version
