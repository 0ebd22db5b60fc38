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
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import CheckpointError
from .mesh_ranks import Holder
from .param_box import ParamBox, make_up

if TYPE_CHECKING:
    from .collectives import HolderReport

ADVICE = (
    'give names={module: "its name in the whole model"} to save_checkpoint() and to load_checkpoint(), on the ranks '
    "whose modules number their layers from 0"
)


class ExpertIndex(NamedTuple):
    """One of several sets of ranks that hold different experts under one name."""

    number: int
    total: int

    def __str__(self) -> str:
        return f"{self.number}of{self.total}"

    def of(self, name: str) -> str:
        return f"{name}@{self}"


class Claim(NamedTuple):
    """One set of ranks reports that it holds a param.

    Attributes:
        mesh: the ranks that hold the other boxes, or copies.
        experts: the number of its ``process_group`` among those of the optimizer's param groups; None: it has none.
    """

    holder: Holder
    name: str
    aliases: tuple[str, ...]
    box: ParamBox
    dtype: str
    mesh: frozenset[int]
    experts: int | None

    def to_json(self) -> dict[str, Any]:
        """Returns JSON that is the same on all ranks of the holder: all but the mesh."""
        box = [list(self.box.shape), list(self.box.offsets), list(self.box.sizes)]
        return {"aliases": list(self.aliases), "box": box, "dtype": self.dtype, "experts": self.experts}

    @staticmethod
    def from_json(holder: Holder, name: str, value: Mapping[str, Any], mesh: Iterable[int]) -> Claim:
        box = ParamBox(*(tuple(each) for each in value["box"]))
        return Claim(holder, name, tuple(value["aliases"]), box, value["dtype"], frozenset(mesh), value["experts"])

    @property
    def shape_and_dtype(self) -> tuple[Any, ...]:
        return self.box.shape, self.dtype


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
    def of(reports: Sequence[HolderReport], section: str) -> Claims:
        """Returns what follows from reports of "params" or "buffers"."""
        found = Claims()
        by_name: defaultdict[str, list[Claim]] = defaultdict(list)
        for each in reports:
            meshes = each.own["meshes"]
            for name, about in each.common[section].items():
                mesh = meshes[each.own["mesh_of"][section].get(name, 0)]
                by_name[name].append(Claim.from_json(each.holder, name, about, mesh))
        found._number_all_experts(claim for claims in by_name.values() for claim in claims)
        for name, claims in by_name.items():
            found._resolve(name, claims)
        return found

    def is_planned(self, box: str, holder: Holder) -> bool:
        """True if these ranks write the box, or compare it with other holders of the same name."""
        return holder == self.writers.get(box) or holder in self.contested.get(box, ())

    def _resolve(self, name: str, claims: Sequence[Claim]) -> None:
        params = _connected(claims)
        if len(params) > 1 and all(claim.experts is not None for claim in claims):
            for number, param in enumerate(params):
                index = ExpertIndex(number, len(params))
                self.expert_indices.update({(claim.holder, name): index for claim in param})
                self._choose_writers(index.of(name), param)
            return
        for param in params:
            self._choose_writers(name, param)
        if len(params) > 1:
            held = [{claim.box.name_in(name) for claim in param} for param in params]
            if any(each != held[0] for each in held) or len({claim.shape_and_dtype for claim in claims}) > 1:
                self._refuse(f"{name!r} is {_in_words(params[0][0])}, and {_in_words(params[1][0])}")
                return
            for each in held[0]:
                holders = [_holder_of(each, name, param) for param in params]
                self.contested[each], self.writers[each] = holders, holders[0]

    def _choose_writers(self, name: str, claims: Sequence[Claim]) -> None:
        """Chooses the ranks that write each box of one param."""
        first, holders = claims[0], defaultdict[str, list[Holder]](list)
        boxes = {claim.box.name_in(name): claim.box for claim in claims if claim.box.numel or claim.box.is_whole}
        for claim in claims:
            holders[claim.box.name_in(name)].append(claim.holder)
            if claim.shape_and_dtype != first.shape_and_dtype:
                self._refuse(f"{name!r} is {_in_words(first)}, and {_in_words(claim)}")
                return
        if set(boxes) != {name} and not make_up(first.box.shape, boxes.values()):
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
        experts = [claim for claim in claims if claim.experts is not None]
        groups: defaultdict[int | None, set[Holder]] = defaultdict(set)
        for claim in experts:
            groups[claim.experts].add(claim.holder)
        for claim in experts:
            theirs = sorted(groups[claim.experts])
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
    return next(claim.holder for claim in param if claim.box.name_in(name) == box)


def _in_words(claim: Claim) -> str:
    return f"{list(claim.box.shape)} of {claim.dtype} on ranks {list(claim.holder)}"


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
