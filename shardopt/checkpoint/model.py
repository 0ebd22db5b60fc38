"""A model as checkpoints save and fill it: params by name with their optimizer and shard, and buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from ..domain.dtensors import is_dtensor, place_of
from ..domain.members import plain_tensors
from ..errors import CheckpointError
from ..module.rounds import RoundState
from ..tensors.inner_tensors import is_packed, kept_beside, named_inside
from ..tensors.unsharded_guard import is_sharded
from .claims import Claims, Held, HeldMeshes, HeldNames, Meshes
from .collectives import HolderReport
from .mesh_ranks import Holder, numbers_of
from .model_param import ModelParam, box_held, mesh_of
from .model_ranks import data_ranks_of
from .names import global_names, unwrapped
from .param_box import ParamBox

if TYPE_CHECKING:
    from ..domain.domain import Domain
    from ..domain.param import Group
    from ..domain.shard import Shard
    from ..engine import Engine
    from ..partition.comm.group import Ranks
    from .collectives import Collectives

Named = TypeVar("Named")


@dataclass
class Model:
    """All that a checkpoint saves or fills: params by name with their engine and shard, and buffers.

    Attributes:
        given_names: names of modules in the whole model, from the user.
        name_of: maps a name in the module to the name in the whole model.
        data_ranks: the data-parallel ranks, which hold the same params but for experts.
        mesh: the ranks that hold copies of this rank's plain tensors.
        claims, buffer_claims: which ranks hold which params and buffers; set by :meth:`learn_names`.
    """

    module: nn.Module
    engines: Sequence[Engine]
    given_names: Mapping[nn.Module, str] = field(default_factory=dict)
    data_ranks: Ranks = field(init=False)
    name_of: Callable[[str], str] = field(init=False)
    params: dict[str, ModelParam] = field(init=False)
    buffers: dict[str, torch.Tensor] = field(init=False)
    mesh: tuple[int, ...] = field(init=False, default=())
    claims: Claims = field(init=False, default_factory=Claims)
    buffer_claims: Claims = field(init=False, default_factory=Claims)

    def __post_init__(self) -> None:
        self.module = unwrapped(self.module)
        self.name_of = global_names(self.module, self.given_names)
        self.data_ranks = data_ranks_of(self.engines)
        self.params = self._by_name((member.name, member) for member in self._find_params())
        self.buffers = self._by_name(_persistent_buffers(self.module, self.name_of))
        if not self.engines and self.data_ranks.size > 1 and any(map(is_dtensor, self.module.parameters())):
            raise CheckpointError(
                "give the optimizer too, with its process_group: without one all ranks count as copies of each other, "
                "but ranks of a DTensor hold different elements. Nothing was saved or loaded."
            )

    @staticmethod
    def _by_name(named: Iterable[tuple[str, Named]]) -> dict[str, Named]:
        """Returns a dict. Raises CheckpointError for a name that occurs twice."""
        found: dict[str, Named] = {}
        for name, each in named:
            if name in found:
                raise CheckpointError(
                    f"give the modules other names: names= calls two tensors of this module {name!r}, and a checkpoint "
                    "holds one tensor of a name. Nothing was saved or loaded."
                )
            found[name] = each
        return found

    def _find_params(self) -> Iterator[ModelParam]:
        names: dict[nn.Parameter, list[str]] = {}
        for name, param in self._named_tensors():
            names.setdefault(param, []).append(self.name_of(name))
        numbered = [(number, group) for number, engine in enumerate(self.engines) for group in engine.groups]
        owner = {
            each: (number, group) for number, group in numbered for param in group["params"] for each in _inside(param)
        }
        for param, (number, _) in owner.items():
            if param not in names:
                raise CheckpointError(
                    f"give the module that holds all params: a param of shape {tuple(param.shape)} of optimizer "
                    f"{number} is not in this module, so it has no name and would be lost."
                )
        sharded = dict(self._sharded())
        codes = {id(param) for each in self.module.modules() if kept_beside(each) for param in _packed_of(each)}
        # The ranks of a model's DTensors hold copies of its plain params.
        beside = (mesh_of(param) for param, (_, group) in owner.items() if group.get("process_group") is None)
        self.mesh = next(filter(None, beside), ())
        for param, (name, *others) in names.items():
            member = ModelParam(
                name,
                tuple(dict.fromkeys(each for each in others if each != name)),
                param,
                box_held(param, name),
                self.data_ranks,
                mesh_of(param) or self.mesh,
                None,
                place=place_of(param),
                are_codes=id(param) in codes,
            )
            yield self._trained(member, *owner[param], sharded) if param in owner else self._frozen(member, sharded)

    def _named_tensors(self) -> Iterator[tuple[str, Any]]:
        """Yields params; of quantized ones the plain tensors inside, and the scales that their modules save."""
        for name, param in self.module.named_parameters(remove_duplicate=False):
            yield from ((name, param),) if is_dtensor(param) else named_inside(param, name)  # as :func:`_inside`
        for name, each in self.module.named_modules(remove_duplicate=False):
            yield from ((f"{name}.{key}" if name else key, tensor) for key, tensor in kept_beside(each).items())

    def _trained(
        self, member: ModelParam, number: int, group: Group, sharded: Mapping[int, tuple[Domain, Shard, int]]
    ) -> ModelParam:
        """Returns a param with what engine ``number``, which trains it, knows of it."""
        param, engine = member.param, self.engines[number]
        domains, local = engine.ensure_domains(), engine.local_params.of(param)
        domain = domains.domain_of(local)
        member = replace(member, optimizer=number, holders=domains.world_of(group))
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
        # Ranks outside of the group hold other experts, unless the param is a DTensor over these ranks.
        return replace(member, experts=list(domains.others).index(own), mesh=mesh_of(param))

    @staticmethod
    def _frozen(member: ModelParam, sharded: Mapping[int, tuple[Domain, Shard, int]]) -> ModelParam:
        """Returns a param that no engine trains, with its shard where it is sharded."""
        values: Any = member.param
        if id(values) in sharded:
            domain, shard, index = sharded[id(values)]
            return replace(member, param=shard.bucket.params[index], domain=domain, shard=shard, index=index)
        if is_sharded(values):
            raise CheckpointError(
                f"give all optimizers of the module: {member.name!r} was sharded by an optimizer that was not given, "
                "so its values are not known here."
            )
        if is_dtensor(values):
            return replace(member, param=nn.Parameter(values._local_tensor.detach(), requires_grad=False))
        return member

    def _sharded(self) -> Iterator[tuple[int, tuple[Domain, Shard, int]]]:
        """Yields the id of each frozen param that is sharded, and where it lies."""
        for domain in self.domains:
            if domain.sharded is not None:
                for shard in domain.sharded.frozen:
                    yield from ((id(param), (domain, shard, at)) for at, param in enumerate(shard.bucket.outers))

    # -- names that all ranks know ---------------------------------------------------------------------------------

    def learn_names(self, collectives: Collectives, phase: str) -> None:
        """Collective: gathers what all ranks hold, and gives params the names that they have in a checkpoint."""
        reports = []
        for holders, members in self.by_holders():
            buffers = self.buffers if holders is self.data_ranks else {}
            held = HeldNames(
                {member.name: member.held for member in members},
                {name: Held((), ParamBox.whole(each.shape), str(each.dtype), None) for name, each in buffers.items()},
            )
            of_params = Meshes.of({member.name: member.mesh for member in members})
            own = HeldMeshes(of_params, Meshes.of(dict.fromkeys(buffers, self.mesh)))
            reports.append(HolderReport(numbers_of(holders), held, own if holders.rank == 0 else None))
        gathered = collectives.gather_by_holder(reports, (HeldNames, HeldMeshes), phase)
        told = [(holder, held, meshes) for holder, held, meshes in gathered if meshes is not None]
        self.claims = Claims.of((holder, held.params, meshes.params) for holder, held, meshes in told)
        self.buffer_claims = Claims.of((holder, held.buffers, meshes.buffers) for holder, held, meshes in told)
        self._rename_params()

    def take_names_of(self, other: Model) -> None:
        """Takes the claims that a model with the same names has gathered."""
        self.claims, self.buffer_claims = other.claims, other.buffer_claims
        self._rename_params()

    def _rename_params(self) -> None:
        settled = (member.named(self.claims) for member in self.params.values())
        self.params = {member.name: member for member in settled}

    def by_holders(self) -> list[tuple[Ranks, list[ModelParam]]]:
        """Returns the params grouped by the ranks that hold them; :attr:`data_ranks` come first."""
        found: dict[Holder, tuple[Ranks, list[ModelParam]]] = {numbers_of(self.data_ranks): (self.data_ranks, [])}
        for member in self.params.values():
            found.setdefault(numbers_of(member.holders), (member.holders, []))[1].append(member)
        return list(found.values())

    def names_in(self, engine: Engine) -> list[list[str]]:
        """Returns the names of the params of each group."""
        name_of = {member.param: name for name, member in self.params.items()}
        groups = engine.local_groups()
        return [[name_of[each] for param in group["params"] for each in _inside(param)] for group in groups]

    def groups_by_param(self) -> dict[nn.Parameter, Group]:
        """Returns the param group of each trained param, by its local param."""
        groups = (group for engine in self.engines for group in engine.local_groups())
        return {each: group for group in groups for param in group["params"] for each in _inside(param)}

    @property
    def domains(self) -> list[Domain]:
        return [domain for engine in self.engines for domain in engine.domains]

    @property
    def device(self) -> torch.device:
        """The device of the params, whose generator of random numbers is saved."""
        return next((param.device for param in self.module.parameters()), torch.device("cpu"))

    @property
    def has_lost_gradients(self) -> bool:
        """True if gradients are those of a part of a backward only: an error, or an interrupt, has ended it."""
        takeovers = (engine.takeover for engine in self.engines if engine.takeover is not None)
        return any(each.rounds is not None and each.rounds.state is not RoundState.CLOSED for each in takeovers)

    # -- checks before a save or a load ----------------------------------------------------------------------------

    def check_savable(self) -> None:
        """Raises CheckpointError if params and states may belong to different steps, or a name to several params."""
        self._check_unbroken(self.domains)
        self._check_sharded()
        for engine in self.engines:
            engine.settle_states()
        for claims in (self.claims, self.buffer_claims):
            claims.check_savable()

    def check_loadable(self) -> None:
        """Raises CheckpointError if a load could not replace everything. It can replace what a failed load left."""
        self._check_unbroken([each for each in self.domains if not each.is_half_loaded])
        self._check_sharded()

    def _check_unbroken(self, domains: Iterable[Domain]) -> None:
        broken = next((each.broken for each in domains if each.broken is not None), None)
        if broken is not None:
            raise CheckpointError(
                f"restart from the last checkpoint: a step failed half-way ({broken}), so params and states may "
                "belong to different steps. Nothing was saved."
            )

    def _check_sharded(self) -> None:
        """Raises CheckpointError while params are gathered for a call, or show the average of the weights."""
        for engine in self.engines:
            if any(each.is_averaged for each in engine.domains):
                raise CheckpointError(
                    "call this outside of `with optimizer.unsharded(ema=True):`, or save module.state_dict(): params "
                    "show the average of the weights, which the checkpoint would hold in place of the weights."
                )
            sharded = [each.sharded for each in engine.domains if each.sharded is not None]
            is_exact = any(each.exact is not None for each in engine.domains)
            if is_exact or any(each.gatherer.here.unsharded_contexts for each in sharded):
                raise CheckpointError(
                    "call this outside of `with optimizer.unsharded():`: what was written to the gathered params is "
                    "not in the shards yet."
                )
            forward = None if engine.takeover is None else engine.takeover.forward
            if forward is not None and forward.is_running:
                raise CheckpointError(
                    "call this outside of the module's forward and backward: they gather params, what a forward "
                    "writes to them is not in the shards yet, and ranks would wait for each other in different calls."
                )


def _inside(param: nn.Parameter) -> Iterator[Any]:
    """Yields the plain tensors inside of a quantized param; any other param, a DTensor too, itself."""
    yield from (param,) if is_dtensor(param) else plain_tensors(param)


def _packed_of(module: nn.Module) -> Iterator[nn.Parameter]:
    return (each for each in module._parameters.values() if each is not None and is_packed(each))


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
