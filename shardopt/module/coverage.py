"""Which params of a module are whose: of this optimizer, of others that share the module, of each rank, of nobody.

A module may be passed to several optimizers, each with some of its params. Every param that trains must have one, or
nobody would average its gradient.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import stateless

from ..domain.dtensors import is_dtensor
from ..domain.param_names import without_wrappers
from ..errors import BindingError
from .averaged_params import average, trained_elsewhere
from .ddp import ignored_by_ddp
from .running import runs
from .tree import ModuleTree

if TYPE_CHECKING:
    from ..config import Options
    from ..domain.called import CalledModule
    from ..domain.domain import Domain
    from ..domain.param import Candidate, ParamRecord


class Bound(NamedTuple):
    """A param as it was when it was bound."""

    name: str
    shape: tuple[int, ...]


def names_of(module: nn.Module) -> dict[nn.Parameter, str]:
    """Returns the name of each param of a module: the first one, if it is tied."""
    return {param: without_wrappers(name) for name, param in module.named_parameters()}


class Coverage:
    """The params of a module, as one of the optimizers that it was passed to knows them.

    Attributes:
        module: without DDP around it.
        domains: those that params are bound to, the main one first, then those of experts; empty before.
        averaged: by name, the params that optimizers other than shardopt's train.
        bound: the params that are bound, as they were when they were bound.
    """

    def __init__(
        self,
        module: nn.Module,
        called: Sequence[CalledModule],
        options: Options,
        groups: Callable[[], Sequence[Mapping[str, Any]]],
        everyones: Callable[[], Sequence[Coverage]],
    ):
        """
        Args:
            called: the modules that a script calls.
            groups: returns the param groups of the optimizer.
            everyones: returns the coverages of all optimizers that are in use.
        """
        self.module, self._called, self._options = module, called, options
        self._groups, self._everyones = groups, everyones
        self.domains: list[Domain] = []
        self.averaged: dict[str, nn.Parameter] = {}
        self._frozen: list[nn.Parameter] = []  # in no param group, when this was last looked at
        self._tree: ModuleTree | None = None  # of the last binding or check
        # The sharers at the same time. Weak: one optimizer must not keep another one of the same module.
        self._covered_by: frozenset[weakref.ref[Coverage]] = frozenset()
        self.bound: dict[nn.Parameter, Bound] = {}
        self._numel = 0  # of all of these
        self._has_stepped = False  # since the last forward

    # -- whose -----------------------------------------------------------------------------------------------------

    def _sharers(self) -> list[Coverage]:
        """Returns those of all optimizers of the module. This one is listed while its optimizer is in use."""
        return [each for each in self._everyones() if each.module is self.module]

    @property
    def is_shared(self) -> bool:
        """True if another optimizer of shardopt trains params of the module."""
        return any(each is not self for each in self._sharers())

    @property
    def leads(self) -> bool:
        """True if this one does what is done once for a module that several optimizers share."""
        return next((each for each in self._sharers() if each.has_reducer), None) is self

    @property
    def has_reducer(self) -> bool:
        """True if params are bound that train. Gradients of other modules may come through one of which none is."""
        return bool(self.domains) and self.domains[0].reducer is not None

    def _grouped(self) -> set[torch.Tensor]:
        """Returns the params in groups of the optimizers that share the module."""
        every = dict.fromkeys((self, *self._sharers()))
        return {param for each in every for group in each._groups() for param in group["params"]}

    def of_each_rank(self) -> set[torch.Tensor]:
        """Returns the params and buffers that options leave to each rank, and no param group has."""
        grouped = self._grouped()
        found = {tensor for called in self._called for tensor in ignored_by_ddp(called.module) if tensor not in grouped}
        return found if self._options.tuning.broadcast_buffers else found.union(self.module.buffers())

    def exclude_experts(self) -> None:
        """Says that experts in param groups of other optimizers are not shared by all ranks either."""
        others = (group for each in self._sharers() if each is not self for group in each._groups())
        experts = (param for group in others if group.get("process_group") is not None for param in group["params"])
        members = self.domains[0].members
        self.domains[0].members = replace(members, params=members.params.union(experts))

    # -- checks ----------------------------------------------------------------------------------------------------

    def check_in_place(self) -> None:
        """Raises BindingError if a binding would find other tensors in the params' places, or may not write to them."""
        is_swapped = False
        if runs(stateless._functional_call):
            there = {*self.module.parameters(), *_outers(self)}
            own = {param for group in self._groups() for param in group["params"]}
            is_swapped = not own <= there or not all(isinstance(each, nn.Parameter) for each in there)
        if is_swapped or torch._C._functorch.get_interpreter_stack():
            raise BindingError(
                "call optimizer.bind() on every rank before the first functional_call(), grad() or vmap() of "
                "torch.func: the first forward binds the module's params, and this one ran with other tensors in their "
                "places, or in a transform that allows no write to memory. Nothing was bound."
            )

    def check_covers(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raises BindingError if an unbound param of these groups is not the module's."""
        own = {*self.module.parameters(), *_outers(self)}
        for number, group in enumerate(groups):
            for index, param in enumerate(group["params"]):
                if param not in own:
                    raise BindingError(
                        "pass the module that contains all params, or give this param to an optimizer of its own: its "
                        f"gradient would not be reduced. param {index} of group {number} (shape {tuple(param.shape)}) "
                        "is not a param of the module that was handed over."
                    )

    def check_free(self, candidates: Sequence[Candidate]) -> None:
        """Raises BindingError if another optimizer takes the gradient of a candidate, whatever module it took over."""
        taken = {outer for each in self._everyones() if each is not self for outer in _outers(each)}
        for name, param, _ in candidates:
            if self.domains[0].locals.outer_of(param) in taken:
                raise BindingError(
                    "give a param to one optimizer, or close() the other one first: another optimizer already takes "
                    f"the gradient of {name}, and each would see some of its gradients."
                )

    def check_covered(self) -> None:
        """Raises BindingError if a trainable param of the module is in no optimizer that the module was passed to.

        Params that another optimizer has are averaged from now on, and those on DDP's ignore list left to each rank.
        """
        known = self._grouped() | self.of_each_rank()
        left = {name: param for name, param in self.module.named_parameters() if param not in known}
        trainable = {name: param for name, param in left.items() if param.requires_grad}
        elsewhere = trained_elsewhere() if trainable else set()
        has_others = len(self.domains) > 1 or self._options.precision is not None
        for name, param in trainable.items():
            if param not in elsewhere:
                self._check_not_replaced(name, param)
                raise BindingError(
                    "freeze it (requires_grad_(False)), add it to a group (optimizer.add_param_group({'params': "
                    "...}), or of a changed layer optimizer.rebind()), or give it to a torch.optim optimizer before "
                    f"the first forward: {name} is trainable but in no param group of an optimizer that took the "
                    "module over. Nobody would average its gradient, and nobody train it."
                )
            if is_dtensor(param) or param.is_meta or has_others:
                raise BindingError(
                    f"add {name} to a group (optimizer.add_param_group({{'params': ...}})), or build another optimizer "
                    "of shardopt with module=: it is trainable but in no param group of an optimizer that took the "
                    "module over, and gradients of DTensors, of params on the meta device, and of models with experts "
                    "or compute_dtype are not averaged for other optimizers."
                )
        self.averaged, self._frozen = trainable, [each for each in left.values() if not each.requires_grad]

    def _check_not_replaced(self, name: str, param: nn.Parameter) -> None:
        """Raises BindingError if a param of the module stands where a bound one was, and none of these is left.

        Where some are left, a script has exchanged a layer: it adds the new one to a group.
        """
        present = set(self.module.parameters())
        for domain in self.domains:
            entries = domain.entries.values()
            is_left = any(entry.outer in present for entry in entries)
            if not is_left and any(entry.shape == tuple(param.shape) for entry in entries):
                raise BindingError(
                    "load without assign=True (module.load_state_dict(state_dict)), or write to the param (param.copy_("
                    f"tensor) under no_grad()): {name} is a new Parameter in place of one that the optimizer trains, "
                    "as load_state_dict(assign=True) makes them, and no step would reach it. To train the new one, "
                    "call optimizer.rebind()."
                )

    def averages_for_others(self) -> bool:
        """True if another optimizer trains a param of the module; raises BindingError as ``check_covered`` does."""
        self.check_covered()
        return bool(self.averaged)

    def check_still_covered(self) -> None:
        """Does ``check_covered`` if modules, params or the optimizers that share the module changed since the last."""
        sharers = frozenset(map(weakref.ref, self._sharers()))
        if self._tree is not None and not (self._tree.is_current and sharers == self._covered_by):
            self.check_covered()
            self._tree, self._covered_by = ModuleTree(self.module), sharers

    def average_others(self) -> None:
        """Collective at the end of a round: averages the gradients that other optimizers use."""
        if any(param.requires_grad for param in self._frozen):  # thawed, perhaps for such an optimizer
            self.check_covered()
        if self.averaged and self.leads:
            average(self.averaged, self.domains[0].mesh.world)

    # -- as they were bound ----------------------------------------------------------------------------------------

    def note_bound(self, entries: Sequence[ParamRecord]) -> None:
        """Notes params that were just bound."""
        self._tree, names = ModuleTree(self.module), names_of(self.module)
        for entry in entries:
            self.bound[entry.outer] = Bound(names.get(entry.outer, entry.name), tuple(entry.outer.shape))
        self._numel = sum(math.prod(each.shape) for each in self.bound.values())

    def forget_bound(self) -> None:
        """No param is bound any more."""
        self.domains.clear()
        self.bound, self._tree, self._numel, self._has_stepped = {}, None, 0, False

    def step_ended(self) -> None:
        """The next forward looks at sizes: between two steps a script may change a model."""
        self._has_stepped = True

    def check_sizes(self) -> None:
        """Raises BindingError if a param was enlarged or cut since it was bound; looks in a step's first forward."""
        if not self._has_stepped:
            return
        with torch._C.DisableTorchFunctionSubclass():  # released params check every attribute that is read
            if sum(map(torch.numel, self.bound)) != self._numel:
                param, was = next(each for each in self.bound.items() if tuple(each[0].shape) != each[1].shape)
                raise BindingError(
                    "call optimizer.rebind() on every rank, once the model is changed and before this forward: "
                    f"{was.name} has the shape {tuple(param.shape)}, and had {was.shape} when the optimizer bound it "
                    "(resize_token_embeddings() gives a param other data, say). Its gradient would not fit."
                )
        self._has_stepped = False

    def trained(self) -> set[torch.Tensor]:
        """Returns the params that some optimizer trains, or that are left to each rank."""
        return self._grouped() | self.of_each_rank() | trained_elsewhere()


def _outers(coverage: Coverage) -> set[nn.Parameter]:
    """Returns the params that are bound, as the module has them."""
    return {entry.outer for domain in coverage.domains for entry in domain.entries.values()}
