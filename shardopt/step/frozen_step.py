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
from .launches import KeptChunks, Launch, LaunchForm, Program, StepPlan, forms_of
from .params import AlikeParams, ParamUpdate, Variants

if TYPE_CHECKING:
    from ..domain.domain import Domain
    from ..domain.history import History
    from ..domain.listed import ListedParams
    from ..domain.param import ParamRecord
    from ..domain.shard import Shard

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


class FrozenStep:
    """The plan of one domain's steps, but for what each step evaluates.

    Attributes:
        kept: the updates, without gradients that are not kept.
        program: of the updates; who makes the plan sets it.
        states: the names of the states that each shard needs.
        awaited: the updates whose gradients are still to come, if they come bucket by bucket.
    """

    def __init__(
        self,
        domain: Domain,
        listed: ListedParams,
        numbers: Numbers,
        updates: Sequence[ParamUpdate],
        awaits: bool = False,
    ):
        """
        Args:
            updates: of the step that is planned, with their gradients, which are not kept.
            awaits: True if gradients come bucket by bucket, while the step goes on.
        """
        self._domain, self._listed, self._numbers = domain, listed, numbers
        variants = Variants(domain.rule, numbers)
        self.states = _states_of(domain, listed, variants)
        self.awaited = {each.entry: each for each in updates} if awaits else {}
        self._is_new: set[ParamRecord] = set(listed.entries).difference(self.awaited) if awaits else set()
        self._forms_of: dict[Shard, tuple[list[Any], list[LaunchForm]]] = {}  # of buckets whose gradients have come
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
        # -- updates, as a plan may keep them: parts of reduced gradients stay, other gradients are let go
        kept = [each if each.gradient_slice is not None else ParamUpdate(*each[:3]) for each in updates]
        self._columns: list[list[Any]] = [[each[n] for each in kept] for n in range(len(ParamUpdate._fields))]
        self._sums = kept if len(self._slices) == len(kept) else None  # the updates of every step
        self.kept, self.program = kept, Program()
        by_shard: dict[Shard, dict[int, ParamUpdate]] = {shard: {} for shard in domain.shards}
        for each in () if awaits else updates:
            by_shard[each.entry.shard][each.entry.index] = each
        self._forms = [form for shard, its in by_shard.items() for form in forms_of(shard, variants, its, self._alike)]
        self._reads_sums = all([form.reads_sums for form in self._forms])
        # The chunks of other launches hold gradients, which are let go.
        self._kept: KeptChunks | None = {} if all([form.stays for form in self._forms]) else None

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
        return self._types == list(map(type, grads)) and self._are_as_before(grads)

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
        of_shard: dict[Shard, list[LaunchForm]] = {}
        for form in self._forms:
            of_shard.setdefault(form.shard, []).append(form)
        self._alike.evaluate(numbers)
        return {
            shard: [form.launch({}, self._alike, self._domain.options.tuning.seed) for form in its]
            for shard, its in of_shard.items()
            if all(form.is_ahead for form in its)
        }

    def _are_as_before(self, grads: Sequence[Any]) -> bool:
        """True if the gradients are as when the step was planned, but for their addresses and values.

        Parts show the sums, whole and divided as then; all others lie in memory as then.
        """
        slices = self._slices
        if slices:
            parts = grads if self._are_parts else [each for each in grads if type(each) is GradientPart]
            show_sums = all(map(is_, map(_PART, slices), parts)) and all(map(is_, map(_PENDING, slices), repeat(None)))
            if not show_sums or self._divisors != list(map(_DIVISOR, slices)):
                return False
            if self._are_parts:
                return True
        plain = grads if self._plain is None else [grads[number] for number in self._plain]
        return all([list(map(get, plain)) == self._attributes[n] for n, get in enumerate(_OF_GRADIENT)])

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
        alike, seed = self._alike, domain.options.tuning.seed
        alike.evaluate(numbers)
        of_entry = {} if self._reads_sums else {each.entry: each for each in updates}
        return StepPlan(
            domain,
            numbers,
            updates,
            [form.launch(of_entry, alike, seed) for form in self._forms],
            list(zip(alike.histories, alike.scalars, strict=True)),
            self._facts.now() if domain.mesh.world.size > 1 else [],  # one rank has nothing to compare with
            self._versions is not None,
            self.states,
            program=self.program,
            kept=self._kept,
            slices=self._slices if self._sums is not None else (),
        )

    def _updates(self, grads: Sequence[torch.Tensor]) -> list[ParamUpdate]:
        columns = list(self._columns)
        kept, slices = columns[3], columns[5]
        columns[3] = [own if each is not None else grad for own, each, grad in zip(kept, slices, grads, strict=True)]
        return list(map(_update, zip(*columns, strict=True)))

    # -- gradients that come bucket by bucket ----------------------------------------------------------------------

    def begin(self, numbers: Numbers) -> None:
        """Evaluates the scalars of a step, before the first bucket is updated."""
        self._numbers = numbers
        self._alike.evaluate(numbers)

    def awaits_all(self, entries: Iterable[ParamRecord]) -> bool:
        """True if these params are planned, or in no param group."""
        return self._is_new.isdisjoint(entries)

    def launches_of(self, shard: Shard, updates: Mapping[int, ParamUpdate]) -> list[Launch]:
        """Returns the launches of one bucket, whose gradients have come.

        Args:
            updates: index in the bucket -> an awaited update, with its gradient.
        """
        domain, key = self._domain, [(index, each.grad.dtype, each.divisor) for index, each in updates.items()]
        known, forms = self._forms_of.get(shard, ([], []))
        if known != key:
            forms = list(forms_of(shard, Variants(domain.rule, self._numbers), updates, self._alike))
            self._forms_of[shard] = key, forms
        of_entry = {each.entry: each for each in updates.values()}
        return [form.launch(of_entry, self._alike, domain.options.tuning.seed) for form in forms]

    def was_taken(self) -> None:
        """Notes that the step's params were updated, and their versions with them: the next step may be a replay."""
        self._versions = list(map(_VERSION, self._params))
        for entry, version in zip(self._entries, self._versions, strict=True):
            entry.version = version


def _states_of(domain: Domain, listed: ListedParams, variant_of: Variants) -> dict[Shard, dict[str, None]]:
    """Returns the names of the states that each shard needs.

    They follow from the groups alone, not from what this rank holds: the shards of all ranks then hold the same states.
    """
    states: dict[Shard, dict[str, None]] = {shard: {} for shard in domain.shards}
    for group, shard in listed.shards:
        # All params of a bucket give one answer to what a rule asks of them.
        states[shard].update(dict.fromkeys(variant_of(group, shard.bucket.params[0].shape).states))
    return states
