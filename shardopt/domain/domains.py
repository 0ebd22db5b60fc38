"""Domains: one optimizer on a model whose params do not all have the same data-parallel ranks.

::

    tensor     0 1      rank 0 and 1 hold halves of each matrix (DTensors over this mesh)
    data     | 0 2      rank 0 and 2 hold the same halves, and share their states (process_group=)
    pipeline | 0 4      rank 4 holds other layers; only the norm and the decision are common (norm_group=)

Each set of ranks that shares states has a domain of its own, with its buckets, its agreement and its all-gather. One
more exchange decides for the whole model: the norm, in which every element counts once, whether a gradient holds an Inf
or NaN, and whether some rank cannot step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..errors import BindingError
from ..partition.comm.group import Ranks
from ..partition.comm.together import Relay, together
from ..partition.mesh import everyone_of
from ..rules.choice import RuleChoice
from ..rules.matrix import MatrixRule
from .agreement import Consensus, StepDigest, agree, agree_on, checksum
from .dtensors import any_dtensor, cut_dims, is_counted_here, is_dtensor, local_tensor, mesh_of, slice_number
from .experts import check_experts, set_members
from .param import named_params

if TYPE_CHECKING:
    from ..config import Options
    from .domain import Domain
    from .dtensors import DTensorLocals
    from .param import Group


@dataclass
class Domains:
    """The domains of one optimizer.

    Attributes:
        main: the domain of groups without a ``process_group`` of their own.
        domains: all of them, the main one first.
    """

    main: Domain
    options: Options
    locals: DTensorLocals
    others: dict[Any, Domain] = field(default_factory=dict)  # by process group
    whole: tuple[Ranks, ...] = ()  # those of the last :meth:`update_whole`
    _norm_ranks: Ranks | None = None
    _has_compared: bool = False
    _tensor_ranks: tuple[Ranks, ...] = ()  # of the main domain's tensor mesh, in each of its dimensions
    _known: dict[Any, Ranks] = field(default_factory=dict)  # by process group
    # DTensor -> the ranks that it is cut over, where a rule looks at whole params; see :class:`Domain`.
    _cuts: dict[torch.nn.Parameter, Sequence[Ranks]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.domains = [self.main]

    @property
    def mates(self) -> tuple[Ranks, ...]:
        """The ranks that make collective calls together: those of the main domain, and of each tensor mesh."""
        return (self.main.mesh.world, *self._tensor_ranks)

    @property
    def is_alone(self) -> bool:
        """True if the ranks of the main domain, which have compared that, are all there are, and no param is a DTensor.

        The groups were looked at by :meth:`groups_by_domain`.
        """
        is_one = self._has_compared and not self.others and self.options.norm_group is None
        return is_one and self.locals.are_none and not self.whole

    def domain_of(self, local: torch.nn.Parameter) -> Domain | None:
        """Returns the domain that has bound this local param."""
        return next((domain for domain in self.domains if local in domain.entries), None)

    def groups_by_domain(
        self, groups: Sequence[Group], make: Callable[[Any], Domain]
    ) -> list[tuple[Domain, Sequence[Group]]]:
        """Each domain that has params, with its groups, in the same order on all ranks of each domain.

        A domain's groups are all param groups, with the params that the domain binds, as local tensors.

        Args:
            make: makes the domain of a process group.
        """
        for group in groups:
            if group.get("process_group") is not None:
                break
        else:
            return [(self.main, [self.locals.of_group(group) for group in groups])]
        for group in groups:
            own = group.get("process_group")
            if own is not None and own not in self.others:
                self.others[own] = make(own)
                self.domains.append(self.others[own])
        set_members(self.main, self.others, groups)
        found: list[tuple[Domain, Sequence[Group]]] = []
        for own, domain in ((None, self.main), *self.others.items()):
            # Every domain gets all groups, with the params of others removed: the numbers of groups in messages stay,
            # and ranks compare all hyper-parameters. A DeviceMesh is compared by value, as a key of a table is:
            # ``mesh["dp"]`` is a new object at each call.
            mine = [
                self.locals.of_group(group) if group.get("process_group") == own else {**group, "params": []}
                for group in groups
            ]
            # The main domain of a module without params that train: rounds and gathers of experts run within its own.
            if any(group["params"] for group in mine) or (domain is self.main and self.options.module is not None):
                found.append((domain, mine))
        return found or [(self.main, list(groups))]  # nothing to update, but the step still takes place

    def world_of(self, group: Group) -> Ranks:
        """Returns the ranks that hold the same params of a group."""
        return self.others.get(group.get("process_group"), self.main).mesh.world

    def compare_norm_groups(self, problem: Exception | None) -> None:
        """Collective, once: compares whether ranks gave a ``norm_group``: those that did wait for its ranks.

        Raises:
            Exception: this rank's problem.
            DisagreementError: another rank's, or the group was given on some ranks only. All ranks raise.
        """
        if self._has_compared:
            return
        given = {"options.norm_group": self.options.norm_group is not None}
        agree_on(given, self.main.mesh.world, problem)
        self._has_compared = True

    def update_whole(self, groups: Sequence[Group]) -> None:
        """Sets ``whole``: the sets of ranks over which the norm is summed and decisions are taken, in this order.

        ``whole`` is empty if the ranks that share the states are the whole model. Records which params other ranks
        count. After an error ``whole`` is set as well, so that the ranks that wait for this one can be notified.

        Raises:
            BindingError: copies cannot be distinguished from different slices.
        """
        if self.options.norm_group is not None and self._norm_ranks is None:
            self._norm_ranks = self._ranks_of(everyone_of(self.options.norm_group))
        has_dtensors = any(any_dtensor(group["params"]) for group in groups)
        mesh, unusable = self._tensor_mesh(groups) if has_dtensors else (None, None)
        rule = self.main.rule
        if has_dtensors and (rule.takes_norms or isinstance(rule, MatrixRule | RuleChoice)):
            self._find_cuts(groups)
        if self.options.norm_group is None and not self.others and mesh is None:
            self._tensor_ranks = self.whole = ()
            return
        # Before any error: the ranks of the exchanges that follow must be notified of it.
        dims = range(0 if mesh is None else mesh.ndim)
        self._tensor_ranks = tuple(self._ranks_of(mesh.get_group(dim)) for dim in dims if mesh)
        self.whole = (self.main.mesh.world, *self._tensor_ranks)
        if self._norm_ranks is not None:
            self.whole = (self._norm_ranks,)
        if unusable is not None:
            raise unusable
        if self.options.module is not None:
            everyone = _ranks(self.main.mesh.world)
            check_experts(self.options, everyone, [_ranks(each.mesh.world) for each in self.others.values()])
        self._note_copies(groups, mesh)
        if self._norm_ranks is not None:
            self._check_within(self._norm_ranks, "norm_group", mesh)
        else:
            self._check_within(self.main.mesh.world, "the optimizer's process_group")

    @contextmanager
    def raising_together(self, call: str) -> Iterator[None]:
        """Collective at its end: an error inside, which all ranks of the main domain raise, reaches the tensor mesh.

        The ranks of a tensor mesh run one forward together; other stages of a pipeline come to theirs later.
        """

        def tell(problem: Exception | None) -> None:
            if self._tensor_ranks:  # which may have been found inside
                agree_on_whole(StepDigest(call, dict, problem), (self.main.mesh.world, *self._tensor_ranks))

        with together(tell):
            yield

    def compare_experts(self, groups: Sequence[Group]) -> None:
        """Collective over the model: raises on all ranks if ranks of a tensor mesh begin with the same experts.

        They may be copies, which the norm would count several times. Ranks without experts take part.
        """
        if not self._tensor_ranks:
            return
        with self.raising_together("comparing experts"):
            own = {name: checksum(param) for name, param in self._undeclared_experts(groups)}
            found = [ranks.exchange_json(own, "comparing experts") for ranks in self._tensor_ranks]
            for ranks, everyones in zip(self._tensor_ranks, found, strict=True):
                alike = [rank for rank, each in enumerate(everyones) if own and each == own and rank != ranks.rank]
                if alike:
                    same = sorted(_ranks(ranks)[rank] for rank in alike)
                    raise BindingError(
                        f"make {next(iter(own))} and its like DTensors (distribute_tensor, Replicate()) if they are "
                        "copies, or build other experts with other values: a param group with its own process_group "
                        f"has plain params, and those of ranks {same}, on the same tensor mesh, are the same. The "
                        "norm would count them several times."
                    )

    def _undeclared_experts(self, groups: Sequence[Group]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields local params of experts of which no DTensor says whether ranks of the tensor mesh hold copies."""
        everyone = {rank for ranks in self._tensor_ranks for rank in _ranks(ranks)}
        for name, param, group in named_params(groups):
            values: Any = param
            is_said = is_dtensor(param) and everyone <= set(values.device_mesh.mesh.flatten().tolist())
            if group.get("process_group") is not None and param.numel() and not is_said:
                yield name, local_tensor(param)

    def agree_on_gradients(self, groups: Sequence[Group], problem: Exception | None) -> None:
        """Collective over the tensor mesh: its ranks agree before they finish sums of gradients together.

        Likewise over the meshes of experts, where their ranks look at whole params together.

        Raises:
            Exception: this rank's problem.
            DisagreementError: another rank's, or gradients that are not placed alike.
        """
        relay = Relay(problem)
        if self._tensor_ranks or self._cuts:
            dtensors = [(name, param) for name, param, _ in named_params(groups) if is_dtensor(param)]
            relay.meet(partial(_compare_gradients, dtensors, self._tensor_ranks))
            for ranks in dict.fromkeys(ranks for cut in self._cuts.values() for ranks in cut):
                if ranks not in self._tensor_ranks:
                    of_cut = [each for each in dtensors if ranks in self._cuts.get(each[1], ())]
                    relay.meet(partial(_compare_gradients, of_cut, (ranks,)))
        relay.check()

    def sum_over(self, mesh: DeviceMesh, dim: int, tensor: torch.Tensor) -> None:
        """Collective over one dimension of a tensor mesh: sums in place."""
        self._ranks_of(mesh.get_group(dim)).all_reduce(tensor, "summing gradients over the tensor mesh")

    def _ranks_of(self, group: dist.ProcessGroup) -> Ranks:
        if group not in self._known:
            self._known[group] = Ranks(group, self.options.tuning.deadline)
        return self._known[group]

    def _find_cuts(self, groups: Sequence[Group]) -> None:
        for param in (each for group in groups for each in group["params"] if is_dtensor(each)):
            if param not in self._cuts:
                mesh: DeviceMesh = param.device_mesh
                ranks = [self._ranks_of(mesh.get_group(dim)) for dim in cut_dims(param) if mesh.size(dim) > 1]
                self._cuts[param] = tuple(ranks)

    def _tensor_mesh(self, groups: Sequence[Group]) -> tuple[DeviceMesh | None, Exception | None]:
        """Returns the mesh of DTensors with ranks beyond the main domain's world, and the error if it is unusable."""
        found: DeviceMesh | None = None
        everyone = set(_ranks(self.main.mesh.world))
        whole = set() if self._norm_ranks is None else set(_ranks(self._norm_ranks))
        # Experts come last: they may have a mesh of their own, which says nothing about plain params.
        for name, param, group in sorted(
            named_params(groups), key=lambda each: each[2].get("process_group") is not None
        ):
            if not is_dtensor(param):
                continue
            values: Any = param
            mesh: DeviceMesh = values.device_mesh
            ranks = set(mesh.mesh.flatten().tolist())
            own = group.get("process_group")
            is_within = own is not None and ranks <= everyone
            try:
                mesh_of(param, name)
                self._check_apart(name, ranks, own)
                is_other = found is not None and found.mesh.tolist() != mesh.mesh.tolist()
                if found is not None and is_other and not is_within and not (own is not None and ranks <= whole):
                    raise BindingError(
                        "use one tensor mesh for all params of an optimizer; experts, in a group with their own "
                        f"process_group, may have another one within norm_group. {name} is a DTensor over ranks "
                        f"{sorted(ranks)}, others are over ranks {sorted(found.mesh.flatten().tolist())}, and it "
                        "cannot be told which ranks hold copies of plain params."
                    )
            except BindingError as error:
                return found or mesh, error
            if not is_within:
                found = found or mesh
        return found, None

    def _check_apart(self, name: str, ranks: set[int], own: Any) -> None:
        """Raises BindingError if two ranks of a DTensor's mesh are to share its states."""
        sharing = set(_ranks(self.main.mesh.world if own is None else self.others[own].mesh.world))
        if len(ranks & sharing) > 1:
            raise BindingError(
                'give the data-parallel ranks, also if it is one rank: process_group=mesh["dp"].get_group(); and leave '
                f"out fully_shard(): stage=3 does its work. {name} is a DTensor over ranks {sorted(ranks)}, and ranks "
                f"{sorted(ranks & sharing)} of these are to share its states. They hold different elements, or "
                "copies that tensor parallelism keeps alike."
            )

    def _note_copies(self, groups: Sequence[Group], mesh: DeviceMesh | None) -> None:
        """Records which rank counts a param: of an element that several ranks hold, one counts it."""
        first = mesh is None or not any(mesh.get_coordinate() or ())
        for name, param, group in named_params(groups):
            own = group.get("process_group")
            if own is not None and mesh is not None and not is_dtensor(param) and self.options.module is None:
                raise BindingError(
                    f"hand over the module, or make {name} a DTensor (distribute_tensor), replicated or sharded: it is "
                    "a plain tensor of a group with its own process_group, beside DTensors. The ranks of their mesh "
                    "may hold copies of it or other values, and the norm could count it several times."
                )
            domain = self.main if own is None else self.others[own]
            is_slice = is_dtensor(param)
            is_counted = is_counted_here(param) if is_slice else first or own is not None
            # Other experts have other elements, whose noise is drawn apart: by the first rank that holds them.
            apart = None if own is None else min(_ranks(domain.mesh.world))
            number = slice_number(param, apart) if is_slice else apart
            domain.note_slice(self.locals.of(param), is_counted, number, self._cuts.get(param, ()))

    def _check_within(self, ranks: Ranks, what: str, mesh: DeviceMesh | None = None) -> None:
        neighbours = [_ranks(domain.mesh.world) for domain in self.domains]
        if mesh is not None:
            neighbours.append(mesh.mesh.flatten().tolist())
        for others in neighbours:
            beyond = set(others) - set(_ranks(ranks))
            if beyond:
                raise BindingError(
                    "give norm_group= all ranks that train the model (torch.distributed.group.WORLD, say): ranks "
                    f"{sorted(beyond)} share states or params with this one and are not in {what}, {_ranks(ranks)}. "
                    "The norm and the decision to skip a step would differ between ranks of one model."
                )


def _placement(grad: Any) -> str:
    return "absent" if grad is None else f"{getattr(grad, 'placements', 'plain')} {grad.dtype}"


def _compare_gradients(
    params: Sequence[tuple[str, torch.nn.Parameter]], whole: Sequence[Ranks], problem: Exception | None
) -> None:
    placed = {name: _placement(param.grad) for name, param in params}
    key = "problem" if problem else placed
    agree_on_whole(StepDigest(key, lambda: {"placements of gradients": placed}, problem), whole)


def agree_on_whole(view: StepDigest, whole: Sequence[Ranks]) -> Consensus:
    """Collective, over one set of ranks after the other: sums, and the problem of any rank, reach all ranks.

    Raises:
        Exception: this rank's own problem.
        DisagreementError: another rank's.
    """
    agreed = Consensus(view.overflow, view.nonfinite, view.limbs, bool(view.written), proposes_order=False)
    relay = Relay(view.problem)  # after an error the ranks of the next exchange wait for this one
    for ranks in whole:
        joined = StepDigest(
            view.key,
            view.describe,
            relay.problem,
            agreed.overflow,
            agreed.nonfinite,
            written=int(agreed.written),
            limbs=agreed.limbs,
        )
        agreed = relay.meet(partial(_agree_on_sums, joined, ranks)) or agreed
    relay.check()
    return agreed


def _agree_on_sums(view: StepDigest, ranks: Ranks, _: Exception | None) -> Consensus:
    return agree(view, ranks, one_copy=range(ranks.size))


def _ranks(ranks: Ranks) -> list[int]:
    """Returns the global numbers of ranks."""
    return [0] if ranks.group is None else sorted(dist.get_process_group_ranks(ranks.group))
