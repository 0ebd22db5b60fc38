"""What there is to save or to fill, by name: params with their optimizer and shard, and buffers."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..domain.domain import Domain
from ..domain.domains import ExpertGroup
from ..domain.dtensors import is_dtensor, place_of
from ..domain.param import ParamRecord
from ..domain.shard import Shard
from ..engine import Engine
from ..errors import CheckpointError
from ..partition.comm.group import Ranks
from ..tensors.unsharded_guard import is_sharded
from .meeting import Meeting

# Torch puts these into names when it compiles or wraps a module: they are no part of the model.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True)
class ModelParam:
    """One param of the model, and where its values and states lie."""

    name: str
    aliases: tuple[str, ...]  # its other names, where it is tied
    param: nn.Parameter  # the local one of a DTensor
    optimizer: int | None  # index of the engine that has it
    domain: Domain | None  # that keeps it in a shard
    shard: Shard | None
    index: int = 0  # in the shard's bucket
    entry: ParamRecord | None = None  # where it is trained
    place: str | None = None  # of a DTensor
    # Of a group with a process_group of its own: ranks outside of it hold other experts.
    expert_group: ExpertGroup | None = None
    world: Ranks | None = None  # that hold the same; None: all that make the checkpoint


@dataclass
class Model:
    """All that a checkpoint saves or fills: params by name with their engine and shard, and buffers."""

    module: nn.Module
    engines: Sequence[Engine]
    params: dict[str, ModelParam] = field(init=False)
    buffers: dict[str, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.module = unwrapped(self.module)
        self.params = {member.name: member for member in self._find_params()}
        self.buffers = dict(_persistent_buffers(self.module))

    def _find_params(self) -> Iterator[ModelParam]:
        names: dict[nn.Parameter, list[str]] = {}
        for name, param in self.module.named_parameters(remove_duplicate=False):
            names.setdefault(param, []).append(plain_name(name))
        numbered = [(number, group) for number, engine in enumerate(self.engines) for group in engine.groups]
        owner = {param: (number, group) for number, group in numbered for param in group["params"]}
        for param, (number, _) in owner.items():
            if param not in names:
                raise CheckpointError(
                    f"give the module that holds all params: one of shape {tuple(param.shape)} of optimizer {number} "
                    "is not in this one, has no name, and would be lost."
                )
        sharded = dict(self._sharded())
        for param, (name, *aliases) in names.items():
            if param not in owner:
                yield self._frozen(name, tuple(aliases), param, sharded)
                continue
            number, group = owner[param]
            engine = self.engines[number]
            composition, local = engine.compose(), engine.local_params.of(param)
            expert_group = composition.expert_group_of(group)
            domain = composition.domain_of(local)
            entry = None if domain is None else domain.entries[local]
            member = ModelParam(name, tuple(aliases), local, number, None, None, place=place_of(param))
            if entry is not None:
                member = replace(member, domain=domain, shard=entry.shard, index=entry.index, entry=entry)
            elif id(param) in sharded:
                member = self._frozen(name, tuple(aliases), param, sharded, number)
            if expert_group is not None:
                named = [f"{each}@{expert_group}" for each in (name, *aliases)]
                world = composition.world_of(group)
                member = replace(
                    member, name=named[0], aliases=tuple(named[1:]), expert_group=expert_group, world=world
                )
            yield member

    @staticmethod
    def _frozen(
        name: str,
        aliases: tuple[str, ...],
        param: nn.Parameter,
        sharded: Mapping[int, tuple[Domain, Shard, int]],
        number: int | None = None,
    ) -> ModelParam:
        """Finds a param that is not trained."""
        if id(param) in sharded:
            return ModelParam(name, aliases, param, number, *sharded[id(param)])
        if is_sharded(param):
            raise CheckpointError(
                f"give all optimizers that work on the module: {name!r} was sharded by an optimizer that was not "
                "given, so its values are not here."
            )
        values: Any = param
        if is_dtensor(param):
            param = nn.Parameter(values._local_tensor.detach(), requires_grad=False)
        return ModelParam(name, aliases, param, number, None, None, place=place_of(values))

    def _sharded(self) -> Iterator[tuple[int, tuple[Domain, Shard, int]]]:
        """Yields the id of each frozen param that is sharded, and where it lies."""
        for engine in self.engines:
            domain = engine.domain
            if domain is not None and domain.sharded is not None:
                for shard in domain.sharded.frozen:
                    yield from ((id(param), (domain, shard, at)) for at, param in enumerate(shard.bucket.params))

    def names_in(self, engine: Engine) -> list[list[str]]:
        """Returns the names of the params of each group."""
        name_of = {member.param: name for name, member in self.params.items()}
        return [[name_of[param] for param in group["params"]] for group in engine.local_groups()]

    @property
    def world(self) -> Ranks:
        return world_of(self.engines)

    @property
    def device(self) -> torch.device:
        return device_of(self.module)

    def check_savable(self) -> None:
        """Raises CheckpointError while params and states may not belong together."""
        self._check_unbroken([each for engine in self.engines for each in engine.domains])
        self._check_own()

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
            domain = engine.domain
            if any(each.is_averaged for each in engine.domains):
                raise CheckpointError(
                    "call this outside of `with optimizer.unsharded(ema=True):`, or save module.state_dict(): params "
                    "show the average of the weights, which the checkpoint would hold in place of the weights."
                )
            sharded = None if domain is None else domain.sharded
            if sharded is not None and any(each.users for each in sharded.units):
                raise CheckpointError(
                    "call this outside of `with optimizer.unsharded():` and of the module's forward: params are "
                    "gathered, and writes to them are not in the shards yet."
                )


def world_of(engines: Sequence[Engine]) -> Ranks:
    """Returns all ranks that make a checkpoint together."""
    worlds = [engine.compose().main.mesh.world for engine in engines]
    if not worlds:
        return Ranks(None, None)
    if any((world.size, world.rank) != (worlds[0].size, worlds[0].rank) for world in worlds):
        raise CheckpointError(
            "save each optimizer with its own module and directory: they work on different process groups, so not "
            "every rank would know what to write."
        )
    return worlds[0]


def meeting_of(engines: Sequence[Engine], module: nn.Module) -> Meeting:
    """Returns the ranks of this call. Collective where an engine's process groups are not numbered yet."""
    world, beyond = world_of(engines), []
    for engine in engines:
        engine.groups_by_domain()
        composition = engine.compose()
        own = composition.main.mesh.world
        composition.look(engine.groups)
        whole = composition.whole
        composition.number_expert_groups()
        beyond += [ranks for ranks in whole if ranks.group is not own.group and ranks.size > 1]
    return Meeting(world, device_of(module), beyond)


def device_of(module: nn.Module) -> torch.device:
    """Returns the device of the tensors that the module's ranks exchange."""
    return next((param.device for param in module.parameters()), torch.device("cpu"))


def unwrapped(module: nn.Module) -> nn.Module:
    """Returns the user's own module, without the wrappers of DDP and torch.compile."""
    while True:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        elif "_orig_mod" in module._modules:
            module = module._orig_mod  # type: ignore[assignment]
        else:
            return module


def plain_name(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    seen = set()
    for prefix, each in module.named_modules():
        for name, buffer in each.named_buffers(recurse=False):
            if name not in each._non_persistent_buffers_set and buffer not in seen:
                seen.add(buffer)
                if is_dtensor(buffer):
                    raise CheckpointError(
                        f"make buffer {plain_name(f'{prefix}.{name}')!r} a plain tensor, or not persistent: it is a "
                        "DTensor, and only one rank's elements would be saved."
                    )
                yield plain_name(f"{prefix}.{name}" if prefix else name), buffer
