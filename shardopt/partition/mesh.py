"""The ranks of a training in two directions: shard (one copy of the states) and replicate (several copies).

::

                    shard ->                  all ranks: world
    replicate   rank 0   rank 1   rank 2      a row shares one copy of the states, each rank owns a slice
        |       rank 3   rank 4   rank 5      a column owns the same slice of every copy
        v

Without a device mesh there is one row from stage 1 on, and one column at stage 0. "Replicate all" and "shard all" are
the two ends of hybrid sharding, so no code asks for the stage.
"""

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .comm.group import Ranks


@dataclass(frozen=True)
class Mesh:
    """This rank's groups in both directions."""

    world: Ranks
    shard: Ranks
    replicate: Ranks
    one_copy: tuple[int, ...]  # ranks of the world that share the first copy of the states

    @property
    def is_hybrid(self) -> bool:
        """True for hybrid sharding: several copies of several slices."""
        return self.shard.size > 1 and self.replicate.size > 1

    @property
    def first(self) -> Ranks:
        """The direction in which gradients are reduced first."""
        return self.shard if self.shard.size > 1 else self.replicate

    @staticmethod
    def of(
        group: dist.ProcessGroup | DeviceMesh | None,
        sharded: bool,
        deadline: timedelta | None,
    ) -> "Mesh":
        """Returns the mesh of a group (one row, or one column without sharding) or of a 2D (replicate, shard) mesh."""
        if isinstance(group, DeviceMesh):
            return _of_device_mesh(group, sharded, deadline)
        world = Ranks(group, deadline)
        if sharded:
            return Mesh(world, world, Ranks.alone(), tuple(range(world.size)))
        return Mesh(world, Ranks.alone(), world, (0,))


def everyone_of(group: dist.ProcessGroup | DeviceMesh) -> dist.ProcessGroup:
    """Returns one group of all ranks of a mesh. Collective if the group must be made."""
    if not isinstance(group, DeviceMesh):
        return group
    if group.ndim == 1:
        return group.get_group()
    if group.size() == dist.get_world_size():
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    return group._flatten().get_group()


def _of_device_mesh(mesh: DeviceMesh, sharded: bool, deadline: timedelta | None) -> Mesh:
    if mesh.ndim == 1:
        return Mesh.of(mesh.get_group(), sharded, deadline)
    world = Ranks(everyone_of(mesh), deadline)
    if not sharded:
        return Mesh(world, Ranks.alone(), world, (0,))
    assert world.group is not None
    first_row = tuple(dist.get_group_rank(world.group, int(each)) for each in mesh.mesh[0])
    columns, rows = (Ranks(mesh.get_group(dim), deadline) for dim in (0, 1))
    return Mesh(world, rows, columns, first_row)
