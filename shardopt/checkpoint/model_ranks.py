"""Which ranks make or load a checkpoint of a model together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import CheckpointError
from ..partition.comm.group import Ranks
from .collectives import Collectives
from .mesh_ranks import Holder, MeshRanks, numbers_of

if TYPE_CHECKING:
    from ..engine import Engine


def data_ranks_of(engines: Sequence[Engine]) -> Ranks:
    """Returns the ranks that hold the same, but for experts: all that an optimizer's own process group has."""
    worlds = [engine.ensure_domains().main.mesh.world for engine in engines]
    if not worlds:
        return Ranks(None, None)
    if any((world.size, world.rank) != (worlds[0].size, worlds[0].rank) for world in worlds):
        raise CheckpointError(
            "save each optimizer with its own module and directory: they work on different process groups, so not "
            "every rank would know what to write."
        )
    return worlds[0]


def collectives_of(engines: Sequence[Engine]) -> Collectives:
    """Collective: returns the collectives of all ranks of the model, who make one checkpoint."""
    home, crossing = data_ranks_of(engines), _crossing(engines)
    if len(crossing) > 1:
        return Collectives(MeshRanks(crossing))
    return Collectives(crossing[0] if crossing else home)


def collectives_of_parts(engines: Sequence[Engine]) -> Collectives:
    """Returns the collectives of ranks that load checkpoints in which each part of the model was saved by itself."""
    home = data_ranks_of(engines)
    return Collectives(home, [ranks for ranks in _crossing(engines) if numbers_of(ranks) != numbers_of(home)])


def _crossing(engines: Sequence[Engine]) -> list[Ranks]:
    """Returns the groups whose ranks are the model: one that holds all, or the dimensions of a mesh."""
    found: dict[Holder, Ranks] = {}
    for engine in engines:
        engine.groups_by_domain()
        domains = engine.ensure_domains()
        domains.update_whole(engine.groups)
        for ranks in domains.whole or (domains.main.mesh.world,):
            found.setdefault(tuple(sorted(numbers_of(ranks))), ranks)
    several = {numbers: ranks for numbers, ranks in found.items() if ranks.size > 1}
    return [ranks for numbers, ranks in several.items() if not any(set(numbers) < set(other) for other in several)]
