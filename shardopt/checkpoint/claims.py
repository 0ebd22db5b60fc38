"""Who holds what: the params of a model by global name, as the ranks tell it, and who of them writes which block.

::

    ranks     name             block         mesh
    0, 2      0.up.weight      [0:7, 0:6]    0, 1      tensor parallel: two blocks of one param
    1, 3      0.up.weight      [7:13, 0:6]   0, 1
    0, 2      0.norm.weight    whole         0, 1      copies, of which one set of ranks writes
    1, 3      0.norm.weight    whole         0, 1

Sets of ranks that a tensor mesh connects hold one param. Sets that none connects hold one param if its bits are the
same (a weight that two pipeline stages tie), else two that were given one name, which no checkpoint could tell apart.
Experts are told apart without a look: ranks outside of their ``process_group`` hold others.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import CheckpointError
from .block import Block, make_up
from .everyone import Holder

if TYPE_CHECKING:
    from .meeting import Content

ADVICE = (
    'give names={module: "its name in the whole model"} to save_checkpoint() and to load_checkpoint(), on the ranks '
    "whose modules number their layers anew"
)


class Turn(NamedTuple):
    """One of several sets of ranks that hold different experts under one name."""

    number: int
    total: int

    def __str__(self) -> str:
        return f"{self.number}of{self.total}"

    def of(self, name: str) -> str:
        return f"{name}@{self}"


class Claim(NamedTuple):
    """What one set of ranks says that it holds.

    Attributes:
        mesh: the ranks that hold the rest of it, or copies.
        experts: the number of the ``process_group`` among those of the optimizer's param groups; None: it has none.
    """

    holder: Holder
    name: str
    aliases: tuple[str, ...]
    block: Block
    dtype: str
    mesh: frozenset[int]
    experts: int | None

    def told(self) -> dict[str, Any]:
        """JSON that is the same on all ranks of the holder: all but the mesh."""
        block = [list(self.block.shape), list(self.block.offsets), list(self.block.sizes)]
        return {"aliases": list(self.aliases), "block": block, "dtype": self.dtype, "experts": self.experts}

    @staticmethod
    def heard(holder: Holder, name: str, told: Mapping[str, Any], mesh: Iterable[int]) -> Claim:
        block = Block(*(tuple(each) for each in told["block"]))
        return Claim(holder, name, tuple(told["aliases"]), block, told["dtype"], frozenset(mesh), told["experts"])

    @property
    def looks(self) -> tuple[Any, ...]:
        return self.block.shape, self.dtype


@dataclass
class Claims:
    """What follows from all claims; the same on all ranks.

    Attributes:
        turns: (holder, name) -> where the name is used for other experts elsewhere.
        older: (holder, name) -> as checkpoints were written that had no names in the whole model.
        writers: name of a block -> who writes it.
        contested: name of a block -> those who hold it, and may hold different params.
        blocks: name in the checkpoint -> the blocks that make it up, where it is cut.
        problem: in words, what no checkpoint can hold.
    """

    turns: dict[tuple[Holder, str], Turn] = field(default_factory=dict)
    older: dict[tuple[Holder, str], Turn] = field(default_factory=dict)
    writers: dict[str, Holder] = field(default_factory=dict)
    contested: dict[str, list[Holder]] = field(default_factory=dict)
    blocks: dict[str, list[Block]] = field(default_factory=dict)
    problem: str | None = None

    @staticmethod
    def of(told: Sequence[Content], section: str) -> Claims:
        """Returns what follows for "params" or "buffers"."""
        found = Claims()
        by_name: defaultdict[str, list[Claim]] = defaultdict(list)
        for each in told:
            meshes = each.own["meshes"]
            for name, about in each.common[section].items():
                mesh = meshes[each.own["mesh_of"][section].get(name, 0)]
                by_name[name].append(Claim.heard(each.holder, name, about, mesh))
        found._number_all_experts(claim for claims in by_name.values() for claim in claims)
        for name, claims in by_name.items():
            found._settle(name, claims)
        return found

    def is_planned(self, block: str, holder: Holder) -> bool:
        """True if these ranks write the block, or compare it with what others hold under its name."""
        return holder == self.writers.get(block) or holder in self.contested.get(block, ())

    def _settle(self, name: str, claims: Sequence[Claim]) -> None:
        params = _connected(claims)
        if len(params) > 1 and all(claim.experts is not None for claim in claims):
            for number, param in enumerate(params):
                turn = Turn(number, len(params))
                self.turns.update({(claim.holder, name): turn for claim in param})
                self._settle_one(turn.of(name), param)
            return
        for param in params:
            self._settle_one(name, param)
        if len(params) > 1:
            held = [{claim.block.name_in(name) for claim in param} for param in params]
            if any(each != held[0] for each in held) or len({claim.looks for claim in claims}) > 1:
                self._refuse(f"{name!r} is {_in_words(params[0][0])}, and {_in_words(params[1][0])}")
                return
            for each in held[0]:
                holders = [_holder_of(each, name, param) for param in params]
                self.contested[each], self.writers[each] = holders, holders[0]

    def _settle_one(self, name: str, claims: Sequence[Claim]) -> None:
        """Finds who writes the blocks of one param, of which several sets of ranks hold some or all."""
        first, holders = claims[0], defaultdict[str, list[Holder]](list)
        blocks = {
            claim.block.name_in(name): claim.block for claim in claims if claim.block.numel or claim.block.is_whole
        }
        for claim in claims:
            holders[claim.block.name_in(name)].append(claim.holder)
            if claim.looks != first.looks:
                self._refuse(f"{name!r} is {_in_words(first)}, and {_in_words(claim)}")
                return
        if set(blocks) != {name} and not make_up(first.block.shape, blocks.values()):
            self._refuse(f"the ranks hold blocks of {name!r} that are not all of it: {sorted(blocks)}")
            return
        if set(blocks) != {name}:
            self.blocks[name] = [blocks[each] for each in sorted(blocks, key=lambda each: blocks[each].offsets)]
        for each in blocks:
            # Copies are shared out by their names, so that no rank writes all of them.
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
            self.older[claim.holder, claim.name] = Turn(theirs.index(claim.holder), len(theirs))

    def check_savable(self) -> None:
        """Raises CheckpointError if ranks use one name for what are different params."""
        if self.problem is not None:
            raise different_params(self.problem)


def different_params(what: str) -> CheckpointError:
    return CheckpointError(
        f"{ADVICE}: ranks use one name for different params, of which the checkpoint would hold one: {what}. Nothing "
        "was written."
    )


def _holder_of(block: str, name: str, param: Sequence[Claim]) -> Holder:
    return next(claim.holder for claim in param if claim.block.name_in(name) == block)


def _in_words(claim: Claim) -> str:
    return f"{list(claim.block.shape)} of {claim.dtype} on ranks {list(claim.holder)}"


def _connected(claims: Sequence[Claim]) -> list[list[Claim]]:
    """Returns the claims of each param: those of sets of ranks that tensor meshes connect."""
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
