"""What there is to save or to fill, by name: params with their optimizer and shard, and buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..domain.dtensors import is_dtensor, place_of
from ..errors import CheckpointError
from ..partition.comm.group import Ranks
from ..tensors.unsharded_guard import is_sharded
from .block import Block
from .claims import Claim, Claims
from .everyone import Everyone, Holder, numbers_of
from .held import block_of
from .meeting import Content, Meeting
from .names import global_names, unwrapped

if TYPE_CHECKING:
    from ..domain.domain import Domain
    from ..domain.param import Group, ParamRecord
    from ..domain.shard import Shard
    from ..engine import Engine
    from .claims import Turn


@dataclass(frozen=True)
class ModelParam:
    """One param of the model, and where its values and states lie.

    Attributes:
        name: in the whole model.
        aliases: its other names, where it is tied.
        param: the local one of a DTensor.
        block: of the whole param, that ``param`` is.
        holders: the ranks that hold the same block.
        mesh: the ranks that hold the other blocks, or copies.
        optimizer: index of the engine that has it.
        domain: that keeps it in ``shard``, if it is sharded.
        index: in the shard's bucket.
        entry: where it is trained.
        place: of a DTensor, by which checkpoints of before went, that knew nothing of blocks.
        experts: the number of its ``process_group`` among those of the optimizer's groups; None: it has no own one.
        turn: where other ranks use the name for other experts.
        older: its names in checkpoints of before.
        is_planned: by the ranks that hold the same, to be written or compared; False if others write a copy.
    """

    name: str
    aliases: tuple[str, ...]
    param: nn.Parameter
    block: Block
    holders: Ranks
    mesh: tuple[int, ...]
    optimizer: int | None
    domain: Domain | None = None
    shard: Shard | None = None
    index: int = 0
    entry: ParamRecord | None = None
    place: str | None = None
    experts: int | None = None
    turn: Turn | None = None
    older: tuple[str, ...] = ()
    is_planned: bool = True

    @property
    def block_name(self) -> str:
        """The name of its tensors in a checkpoint that these ranks save."""
        return self.block.name_in(self.name)

    def settled(self, claims: Claims) -> ModelParam:
        """Returns it as all ranks know it: with its name among other experts, written by one of those who hold it."""
        holder = numbers_of(self.holders)
        turn, before = claims.turns.get((holder, self.name)), claims.older.get((holder, self.name))
        names = self.name, *self.aliases
        older = () if before is None else tuple(before.of(each) for each in names)
        if turn is not None:
            names = turn.of(self.name), *(turn.of(each) for each in self.aliases)
        settled = replace(self, name=names[0], aliases=names[1:], turn=turn, older=older)
        return replace(settled, is_planned=claims.is_planned(settled.block_name, holder))


@dataclass
class Model:
    """All that a checkpoint saves or fills: params by name with their engine and shard, and buffers.

    Attributes:
        given_names: of modules, in the whole model.
        name_of: gives what the module calls a tensor or module its name in the whole model.
        home: the ranks that hold the same, but for experts.
        mesh: the ranks that hold copies of what is plain here.
        claims: which params all ranks of the model hold, once :meth:`settle` has heard it; likewise which buffers.
    """

    module: nn.Module
    engines: Sequence[Engine]
    given_names: Mapping[nn.Module, str] = field(default_factory=dict)
    home: Ranks = field(init=False)
    name_of: Callable[[str], str] = field(init=False)
    params: dict[str, ModelParam] = field(init=False)
    buffers: dict[str, torch.Tensor] = field(init=False)
    mesh: tuple[int, ...] = field(init=False, default=())
    claims: Claims = field(init=False, default_factory=Claims)
    buffer_claims: Claims = field(init=False, default_factory=Claims)

    def __post_init__(self) -> None:
        self.module = unwrapped(self.module)
        self.name_of = global_names(self.module, self.given_names)
        self.home = home_of(self.engines)
        self.params = self._apart((member.name, member) for member in self._find_params())
        self.buffers = self._apart(_persistent_buffers(self.module, self.name_of))
        if not self.engines and self.home.size > 1 and any(map(is_dtensor, self.module.parameters())):
            raise CheckpointError(
                "give the optimizer too, with its process_group: without it all ranks are taken for copies of one "
                "another, and those of a DTensor hold other elements. Nothing was saved or loaded."
            )

    @staticmethod
    def _apart(named: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, each in named:
            if name in found:
                raise CheckpointError(
                    f"give the modules other names: by names= two tensors of this module are called {name!r}, and a "
                    "checkpoint holds one of that name. Nothing was saved or loaded."
                )
            found[name] = each
        return found

    def _find_params(self) -> Iterator[ModelParam]:
        names: dict[nn.Parameter, list[str]] = {}
        for name, param in self.module.named_parameters(remove_duplicate=False):
            names.setdefault(param, []).append(self.name_of(name))
        numbered = [(number, group) for number, engine in enumerate(self.engines) for group in engine.groups]
        owner = {param: (number, group) for number, group in numbered for param in group["params"]}
        for param, (number, _) in owner.items():
            if param not in names:
                raise CheckpointError(
                    f"give the module that holds all params: one of shape {tuple(param.shape)} of optimizer {number} "
                    "is not in this one, has no name, and would be lost."
                )
        sharded = dict(self._sharded())
        # Of plain params there are copies on the ranks of the DTensors beside them.
        beside = (mesh_of(param) for param, (_, group) in owner.items() if group.get("process_group") is None)
        self.mesh = next(filter(None, beside), ())
        for param, (name, *others) in names.items():
            member = ModelParam(
                name,
                tuple(dict.fromkeys(each for each in others if each != name)),
                param,
                block_of(param, name),
                self.home,
                mesh_of(param) or self.mesh,
                None,
                place=place_of(param),
            )
            yield self._trained(member, *owner[param], sharded) if param in owner else self._frozen(member, sharded)

    def _trained(
        self, member: ModelParam, number: int, group: Group, sharded: Mapping[int, tuple[Domain, Shard, int]]
    ) -> ModelParam:
        """Finds a param that is in a group of engine ``number``."""
        param, engine = member.param, self.engines[number]
        composition, local = engine.compose(), engine.local_params.of(param)
        domain = composition.domain_of(local)
        member = replace(member, optimizer=number, holders=composition.world_of(group))
        if domain is not None:
            entry = domain.entries[local]
            member = replace(member, param=local, domain=domain, shard=entry.shard, index=entry.index, entry=entry)
        elif id(param) in sharded:
            member = self._frozen(member, sharded)
        else:
            member = replace(member, param=local)
        own = group.get("process_group")
        if own is None:
            return member
        # Of other experts than those of ranks outside of the group, unless they are DTensors over these.
        return replace(member, experts=list(composition.others).index(own), mesh=mesh_of(param))

    @staticmethod
    def _frozen(member: ModelParam, sharded: Mapping[int, tuple[Domain, Shard, int]]) -> ModelParam:
        """Finds a param that is not trained."""
        values: Any = member.param
        if id(values) in sharded:
            domain, shard, index = sharded[id(values)]
            return replace(member, param=shard.bucket.params[index], domain=domain, shard=shard, index=index)
        if is_sharded(values):
            raise CheckpointError(
                f"give all optimizers that work on the module: {member.name!r} was sharded by an optimizer that was "
                "not given, so its values are not here."
            )
        if is_dtensor(values):
            return replace(member, param=nn.Parameter(values._local_tensor.detach(), requires_grad=False))
        return member

    def _sharded(self) -> Iterator[tuple[int, tuple[Domain, Shard, int]]]:
        """Yields the id of each frozen param that is sharded, and where it lies."""
        for domain in (each for engine in self.engines for each in engine.domains):
            if domain.sharded is not None:
                for shard in domain.sharded.frozen:
                    yield from ((id(param), (domain, shard, at)) for at, param in enumerate(shard.bucket.outers))

    # -- what ranks tell each other --------------------------------------------------------------------------------

    def settle(self, meeting: Meeting, phase: str) -> None:
        """Collective: learns what all ranks hold, by which params get the names that they have in a checkpoint."""
        contents = []
        for holders, members in self.by_holders():
            is_home = holders is self.home
            claims = {"params": [self._claim(member) for member in members]}
            claims["buffers"] = [self._claim_of_buffer(name) for name in self.buffers] if is_home else []
            meshes = list({claim.mesh: None for each in claims.values() for claim in each})
            common = {section: {claim.name: claim.told() for claim in each} for section, each in claims.items()}
            mesh_of_names = {  # but for those of the first mesh, which are all in most models
                section: {claim.name: number for claim in each if (number := meshes.index(claim.mesh))}
                for section, each in claims.items()
            }
            own = {"meshes": [sorted(mesh) for mesh in meshes], "mesh_of": mesh_of_names}
            contents.append(Content(numbers_of(holders), common, own if holders.rank == 0 else None))
        told = meeting.by_holders(contents, phase)
        self.claims, self.buffer_claims = Claims.of(told, "params"), Claims.of(told, "buffers")
        self._settle_params()

    def settle_as(self, other: Model) -> None:
        """Takes what a model of the same names has learned."""
        self.claims, self.buffer_claims = other.claims, other.buffer_claims
        self._settle_params()

    def _settle_params(self) -> None:
        settled = (member.settled(self.claims) for member in self.params.values())
        self.params = {member.name: member for member in settled}

    def by_holders(self) -> list[tuple[Ranks, list[ModelParam]]]:
        """Returns the params by the ranks that hold the same, those of :attr:`home` first."""
        found: dict[Holder, tuple[Ranks, list[ModelParam]]] = {numbers_of(self.home): (self.home, [])}
        for member in self.params.values():
            found.setdefault(numbers_of(member.holders), (member.holders, []))[1].append(member)
        return list(found.values())

    @staticmethod
    def _claim(member: ModelParam) -> Claim:
        holder, dtype = numbers_of(member.holders), str(member.param.dtype)
        return Claim(holder, member.name, member.aliases, member.block, dtype, frozenset(member.mesh), member.experts)

    def _claim_of_buffer(self, name: str) -> Claim:
        buffer, holder = self.buffers[name], numbers_of(self.home)
        return Claim(holder, name, (), Block.whole(buffer.shape), str(buffer.dtype), frozenset(self.mesh), None)

    def names_in(self, engine: Engine) -> list[list[str]]:
        """Returns the names of the params of each group."""
        name_of = {member.param: name for name, member in self.params.items()}
        return [[name_of[param] for param in group["params"]] for group in engine.local_groups()]

    def groups_by_param(self) -> dict[nn.Parameter, Group]:
        """Returns the group of each param that an engine has, by its local param."""
        groups = (group for engine in self.engines for group in engine.local_groups())
        return {param: group for group in groups for param in group["params"]}

    @property
    def device(self) -> torch.device:
        """Of the model's params, whose generator of random numbers is saved."""
        return next((param.device for param in self.module.parameters()), torch.device("cpu"))

    # -- whether this is the moment --------------------------------------------------------------------------------

    def check_savable(self) -> None:
        """Raises CheckpointError while params and states may not belong together, or names stand for several params."""
        self._check_unbroken([each for engine in self.engines for each in engine.domains])
        self._check_own()
        for claims in (self.claims, self.buffer_claims):
            claims.check_savable()

    def check_loadable(self) -> None:
        """Raises CheckpointError while a load cannot replace all there is; what an earlier load left, it can."""
        domains = [each for engine in self.engines for each in engine.domains]
        self._check_unbroken([each for each in domains if not each.is_half_loaded])
        self._check_own()

    def _check_unbroken(self, domains: Iterable[Domain]) -> None:
        broken = next((each.broken for each in domains if each.broken is not None), None)
        if broken is not None:
            raise CheckpointError(
                f"start anew from the last checkpoint: a step failed half-way ({broken}), so params and states may "
                "belong to different steps. Nothing was saved."
            )

    def _check_own(self) -> None:
        """Raises CheckpointError unless params are the weights, and lie in their shards."""
        for engine in self.engines:
            if any(each.is_averaged for each in engine.domains):
                raise CheckpointError(
                    "call this outside of `with optimizer.unsharded(ema=True):`, or save module.state_dict(): params "
                    "show the average of the weights, which the checkpoint would hold in place of the weights."
                )
            sharded = [each.sharded for each in engine.domains if each.sharded is not None]
            if any(unit.users for each in sharded for unit in each.units):
                raise CheckpointError(
                    "call this outside of `with optimizer.unsharded():` and of the module's forward: params are "
                    "gathered, and writes to them are not in the shards yet."
                )


def mesh_of(param: Any) -> tuple[int, ...]:
    """Returns the ranks of a DTensor's mesh; none for a plain tensor."""
    return tuple(sorted(param.device_mesh.mesh.flatten().tolist())) if is_dtensor(param) else ()


def home_of(engines: Sequence[Engine]) -> Ranks:
    """Returns the ranks that hold the same, but for experts: all that an optimizer's own process group has."""
    worlds = [engine.compose().main.mesh.world for engine in engines]
    if not worlds:
        return Ranks(None, None)
    if any((world.size, world.rank) != (worlds[0].size, worlds[0].rank) for world in worlds):
        raise CheckpointError(
            "save each optimizer with its own module and directory: they work on different process groups, so not "
            "every rank would know what to write."
        )
    return worlds[0]


def meeting_of(engines: Sequence[Engine]) -> Meeting:
    """Collective: returns the meeting of all ranks of the model, who make one checkpoint."""
    home, crossing = home_of(engines), _crossing(engines)
    if len(crossing) > 1:
        return Meeting(Everyone(crossing))
    return Meeting(crossing[0] if crossing else home)


def meeting_of_parts(engines: Sequence[Engine]) -> Meeting:
    """Returns the meeting of ranks that load checkpoints in which each part of the model was saved by itself."""
    home = home_of(engines)
    return Meeting(home, [ranks for ranks in _crossing(engines) if numbers_of(ranks) != numbers_of(home)])


def _crossing(engines: Sequence[Engine]) -> list[Ranks]:
    """Returns the groups whose ranks are the model: one that holds all, or the dimensions of a mesh."""
    found: dict[Holder, Ranks] = {}
    for engine in engines:
        engine.groups_by_domain()
        composition = engine.compose()
        composition.update_whole(engine.groups)
        for ranks in composition.whole or (composition.main.mesh.world,):
            found.setdefault(tuple(sorted(numbers_of(ranks))), ranks)
    several = {numbers: ranks for numbers, ranks in found.items() if ranks.size > 1}
    return [ranks for numbers, ranks in several.items() if not any(set(numbers) < set(other) for other in several)]


def _persistent_buffers(module: nn.Module, name_of: Callable[[str], str]) -> Iterator[tuple[str, torch.Tensor]]:
    seen = set()
    for prefix, each in module.named_modules():
        for name, buffer in each.named_buffers(recurse=False):
            if name not in each._non_persistent_buffers_set and buffer not in seen:
                seen.add(buffer)
                full = name_of(f"{prefix}.{name}" if prefix else name)
                if is_dtensor(buffer):
                    raise CheckpointError(
                        f"make buffer {full!r} a plain tensor, or not persistent: it is a DTensor, and only one rank's "
                        "elements would be saved."
                    )
                yield full, buffer
