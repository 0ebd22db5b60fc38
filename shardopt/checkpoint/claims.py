"""Which ranks hold which params of a model, by global name, and which of these ranks write each box.

::

    ranks     name             box           mesh
    0, 2      0.up.weight      [0:7, 0:6]    0, 1      tensor parallel: two boxes of one param
    1, 3      0.up.weight      [7:13, 0:6]   0, 1
    0, 2      0.norm.weight    whole         0, 1      copies: one set of ranks writes
    1, 3      0.norm.weight    whole         0, 1

Sets of ranks that a tensor mesh connects hold one param. Sets that no mesh connects hold one param if its bits are
equal (a weight that two pipeline stages tie); otherwise they hold two params by one name, which is an error. Experts
need no comparison: ranks outside of their ``process_group`` hold other experts.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..errors import CheckpointError
from .mesh_ranks import Holder
from .param_box import ParamBox, make_up
from .records import ExpertIndex
from .typed_json import Count, Names  # noqa: TC001 (fields of records are read at run time)

ADVICE = (
    'give names={module: "its name in the whole model"} to save_checkpoint() and to load_checkpoint(), on the ranks '
    "whose modules number their layers from 0"
)


@dataclass(frozen=True)
class Held:
    """What a set of ranks says of a param or buffer that it holds; the same on all of these ranks.

    Attributes:
        experts: the number of its ``process_group`` among those of the optimizer's param groups; None: it has none.
    """

    aliases: Names
    box: ParamBox
    dtype: str
    experts: Count | None

    @property
    def shape_and_dtype(self) -> tuple[tuple[int, ...], str]:
        return self.box.shape, self.dtype


@dataclass(frozen=True)
class Meshes:
    """The ranks that hold the other boxes, or copies, of what a set of ranks holds.

    Attributes:
        sets: of ranks.
        number_of: by name, the number of its set, where it is not the first one, which is that of most names.
    """

    sets: tuple[tuple[Count, ...], ...]
    number_of: dict[str, Count]

    @staticmethod
    def of(mesh_of: Mapping[str, tuple[int, ...]]) -> Meshes:
        sets = list(dict.fromkeys(tuple(sorted(mesh)) for mesh in mesh_of.values()))
        numbers = {name: sets.index(tuple(sorted(mesh))) for name, mesh in mesh_of.items()}
        return Meshes(tuple(sets), {name: number for name, number in numbers.items() if number})


@dataclass(frozen=True)
class HeldNames:
    """What a set of ranks holds, by name; the same on all of these ranks."""

    params: dict[str, Held]
    buffers: dict[str, Held]


@dataclass(frozen=True)
class HeldMeshes:
    """Who holds the rest of it; ranks of one set need not agree."""

    params: Meshes
    buffers: Meshes


class Claim(NamedTuple):
    """One set of ranks reports that it holds a param; ``mesh``: the ranks that hold the other boxes, or copies."""

    holder: Holder
    name: str
    held: Held
    mesh: frozenset[int]


@dataclass
class Claims:
    """What follows from the claims of all ranks; the same on all ranks.

    Attributes:
        expert_indices: (holder, name) -> the index, where other ranks use the name for other experts.
        older: (holder, name) -> the index in checkpoints of versions that had no names in the whole model.
        writers: name of a box -> the ranks that write it.
        contested: name of a box -> the sets of ranks that hold it, and may hold different params.
        boxes: name in the checkpoint -> the boxes that make up the param, where it is cut.
        problem: in words, why no checkpoint can hold these params.
    """

    expert_indices: dict[tuple[Holder, str], ExpertIndex] = field(default_factory=dict)
    older: dict[tuple[Holder, str], ExpertIndex] = field(default_factory=dict)
    writers: dict[str, Holder] = field(default_factory=dict)
    contested: dict[str, list[Holder]] = field(default_factory=dict)
    boxes: dict[str, list[ParamBox]] = field(default_factory=dict)
    problem: str | None = None

    @staticmethod
    def of(held: Iterable[tuple[Holder, Mapping[str, Held], Meshes]]) -> Claims:
        """Returns what follows from what each set of ranks holds."""
        found = Claims()
        by_name: defaultdict[str, list[Claim]] = defaultdict(list)
        for holder, names, meshes in held:
            for name, about in names.items():
                mesh = meshes.sets[meshes.number_of.get(name, 0)]
                by_name[name].append(Claim(holder, name, about, frozenset(mesh)))
        found._number_all_experts(claim for claims in by_name.values() for claim in claims)
        for name, claims in by_name.items():
            found._resolve(name, claims)
        return found

    def is_planned(self, box: str, holder: Holder) -> bool:
        """True if these ranks write the box, or compare it with other holders of the same name."""
        return holder == self.writers.get(box) or holder in self.contested.get(box, ())

    def _resolve(self, name: str, claims: Sequence[Claim]) -> None:
        params = _connected(claims)
        if len(params) > 1 and all(claim.held.experts is not None for claim in claims):
            for number, param in enumerate(params):
                index = ExpertIndex(number, len(params))
                self.expert_indices.update({(claim.holder, name): index for claim in param})
                self._choose_writers(index.of(name), param)
            return
        for param in params:
            self._choose_writers(name, param)
        if len(params) > 1:
            held = [{claim.held.box.name_in(name) for claim in param} for param in params]
            if any(each != held[0] for each in held) or len({claim.held.shape_and_dtype for claim in claims}) > 1:
                self._refuse(f"{name!r} is {_in_words(params[0][0])}, and {_in_words(params[1][0])}")
                return
            for each in held[0]:
                holders = [_holder_of(each, name, param) for param in params]
                self.contested[each], self.writers[each] = holders, holders[0]

    def _choose_writers(self, name: str, claims: Sequence[Claim]) -> None:
        """Chooses the ranks that write each box of one param."""
        first, holders = claims[0], defaultdict[str, list[Holder]](list)
        boxes = {
            claim.held.box.name_in(name): claim.held.box
            for claim in claims
            if claim.held.box.numel or claim.held.box.is_whole
        }
        for claim in claims:
            holders[claim.held.box.name_in(name)].append(claim.holder)
            if claim.held.shape_and_dtype != first.held.shape_and_dtype:
                self._refuse(f"{name!r} is {_in_words(first)}, and {_in_words(claim)}")
                return
        if set(boxes) != {name} and not make_up(first.held.box.shape, boxes.values()):
            self._refuse(f"the boxes that ranks hold of {name!r} do not make it up: {sorted(boxes)}")
            return
        if set(boxes) != {name}:
            self.boxes[name] = [boxes[each] for each in sorted(boxes, key=lambda each: boxes[each].offsets)]
        for each in boxes:
            # The name chooses among copies, so that no rank writes all params.
            self.writers[each] = holders[each][zlib.crc32(each.encode()) % len(holders[each])]

    def _refuse(self, what: str) -> None:
        self.problem = self.problem or what

    def _number_all_experts(self, claims: Iterable[Claim]) -> None:
        experts = [claim for claim in claims if claim.held.experts is not None]
        groups: defaultdict[int | None, set[Holder]] = defaultdict(set)
        for claim in experts:
            groups[claim.held.experts].add(claim.holder)
        for claim in experts:
            theirs = sorted(groups[claim.held.experts])
            self.older[claim.holder, claim.name] = ExpertIndex(theirs.index(claim.holder), len(theirs))

    def check_savable(self) -> None:
        """Raises CheckpointError if ranks use one name for what are different params."""
        if self.problem is not None:
            raise different_params(self.problem)


def different_params(what: str) -> CheckpointError:
    return CheckpointError(
        f"{ADVICE}: ranks use one name for different params, and the checkpoint would hold only one of them: {what}. "
        "Nothing was written."
    )


def _holder_of(box: str, name: str, param: Sequence[Claim]) -> Holder:
    return next(claim.holder for claim in param if claim.held.box.name_in(name) == box)


def _in_words(claim: Claim) -> str:
    return f"{list(claim.held.box.shape)} of {claim.held.dtype} on ranks {list(claim.holder)}"


def _connected(claims: Sequence[Claim]) -> list[list[Claim]]:
    """Returns the claims by param: tensor meshes connect the ranks that hold one param."""
    found: list[tuple[set[int], list[Claim]]] = []
    for claim in claims:
        ranks, together = {*claim.holder, *claim.mesh}, [claim]
        apart = []
        for others, theirs in found:
            if ranks & others:
                ranks, together = ranks | others, theirs + together
            else:
                apart.append((others, theirs))
        found = [*apart, (ranks, together)]
    return sorted((each for _, each in found), key=lambda each: min(claim.holder for claim in each))
