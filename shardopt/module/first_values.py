"""The values that training begins with: all ranks take rank 0's, and what is on the meta device gets some.

A model too large for one rank is built under ``with torch.device("meta")``. At binding its params become views of
buckets that have no memory yet. Then all ranks initialize every module that owns some of the params in turn, by the
module's own ``reset_parameters()`` or by the user's ``init_fn`` with rank 0's random numbers, or from a state dict. At
stage 3 each rank keeps its slice and frees the bucket's memory before the next bucket is needed. An initializer
that omits a tensor is noticed: tensors hold NaN before it.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..arguments import by_name
from ..domain.agreement import agree_on, checksum
from ..domain.dtensors import is_dtensor
from ..domain.members import plain_tensors, tensors_of
from ..domain.precision import filled_in_fp32
from ..errors import BindingError
from ..partition.comm.together import Relay
from ..tensors.unsharded_guard import is_sharded
from .running import in_backward

if TYPE_CHECKING:
    from ..domain.called import CalledModule
    from ..domain.domain import Domain
    from ..partition.comm.group import Ranks
    from .coverage import Coverage

_STATE_DICT = "bind(state_dict=)"


@dataclass(frozen=True, eq=False)
class DeferredInit:
    """The source of values for params and buffers on the meta device.

    Attributes:
        state_dict: whole tensors by name, of all params and of buffers that are saved; others may be in it.
        init_fn: takes a module and fills its own params and buffers in place; None: ``reset_parameters()``.
    """

    state_dict: Mapping[str, torch.Tensor] | None = None
    init_fn: Callable[[nn.Module], object] | None = None

    def describe(self) -> dict[str, bool]:
        """Returns what must be the same on all ranks."""
        return {"state_dict is given": self.state_dict is not None, "init_fn is given": self.init_fn is not None}

    def can_initialize(self, module: nn.Module) -> bool:
        return self.init_fn is not None or hasattr(module, "reset_parameters")

    def initialize(self, module: nn.Module) -> None:
        if self.init_fn is not None:
            self.init_fn(module)
        else:
            module.reset_parameters()  # type: ignore[operator]


def meta_params(module: nn.Module) -> list[nn.Parameter]:
    """Returns the params on the meta device."""
    return [param for param in module.parameters() if param.is_meta]


def check_materializable(module: nn.Module, init: DeferredInit, fresh: Collection[torch.Tensor]) -> None:
    """Raises BindingError if some module cannot be given values. Changes nothing.

    Args:
        fresh: tensors that were on the meta device and still have no values: an earlier attempt failed.

    Raises:
        TypeError: the state dict is not a mapping of names, or holds something other than tensors with values; the
            initializer is not a function.
    """
    if init.init_fn is not None and not callable(init.init_fn):
        raise TypeError(f"bind(init_fn=) takes a function of a module, found {type(init.init_fn).__name__}.")
    placed = next((name for name, param in module.named_parameters() if param.is_meta and is_dtensor(param)), None)
    if placed is not None:
        raise BindingError(
            "call module.to_empty(device=...) and give the params values before the first forward, or parallelize the "
            f"module after its params have values: {placed} is a DTensor on the meta device, and only plain params get "
            "memory and values bucket by bucket."
        )
    state_dict = init.state_dict
    if state_dict is not None:
        _check_names(module, by_name(state_dict, _STATE_DICT))
    for name, each in module.named_modules():
        tensors = {**dict(each.named_parameters(name, recurse=False)), **dict(each.named_buffers(name, recurse=False))}
        on_meta = [key for key, tensor in tensors.items() if tensor.is_meta or tensor in fresh]
        if not on_meta:
            continue
        unnamed = on_meta
        if state_dict is not None:
            unsaved = {f"{name}.{key}" if name else key for key in each._non_persistent_buffers_set}
            unnamed = [key for key in on_meta if key not in state_dict and key in unsaved]
            _check_values(each, {key: tensors[key] for key in on_meta}, state_dict, unsaved, init)
        if unnamed and not init.can_initialize(each):
            raise BindingError(
                "define reset_parameters(), or give the values in optimizer.bind(state_dict=...) or "
                f"bind(init_fn=...) before the first forward: {unnamed} are on the meta device and "
                f"{type(each).__name__} has no reset_parameters(), so their values are unknown."
            )


def _check_values(
    module: nn.Module,
    on_meta: Mapping[str, torch.Tensor],
    state_dict: Mapping[str, torch.Tensor],
    unsaved: Collection[str],
    init: DeferredInit,
) -> None:
    """Raises an error unless the state dict has what ``on_meta`` needs.

    Args:
        unsaved: names of buffers that a state dict of the module lacks.
    """
    lacking = [key for key in on_meta if key not in state_dict]
    if init.can_initialize(module):
        lacking = [key for key in lacking if key not in unsaved]
    given = [key for key in on_meta if key in state_dict]
    for key in given:
        _check_value(key, state_dict[key], on_meta[key])
    wrong = [key for key in given if state_dict[key].shape != on_meta[key].shape]
    if lacking or wrong:
        only_unsaved = bool(lacking) and not wrong and all(key in unsaved for key in lacking)
        what = (
            "add bind(init_fn=...), which fills buffers that are not saved"
            if only_unsaved
            else ("give a state dict that was saved from the same model")
        )
        raise BindingError(
            f"{what}: params would start from random memory. The state dict does not fit the module on the meta "
            f"device: missing {lacking}, of other shapes {wrong}."
        )


def check_unused(init: DeferredInit) -> None:
    """Raises BindingError if values are given and nothing is on the meta device: they would be dropped."""
    if init.init_fn is not None:
        raise BindingError(
            "call module.apply(...) with the function, before bind(): init_fn= gives values to params and buffers on "
            "the meta device, and none is on it, so that the function would never be called."
        )
    if init.state_dict is not None:
        by_name(init.state_dict, _STATE_DICT)
        raise BindingError(
            "call module.load_state_dict(...), before or after bind(): state_dict= gives values to params and buffers "
            "on the meta device, and none is on it, so that these values would be dropped."
        )


def _check_names(module: nn.Module, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Raises BindingError for names that the module does not have; extra state of submodules is allowed."""
    params = module.named_parameters(remove_duplicate=False)
    known = {name for name, _ in (*params, *module.named_buffers(remove_duplicate=False))}
    unknown = [name for name in state_dict if name not in known and not name.endswith("_extra_state")]
    if unknown:
        raise BindingError(
            f"give a state dict with the names of the module (remove a prefix), such as {sorted(known)[:3]}: "
            f"{_STATE_DICT} holds {unknown[:8]}, which the module does not have, and these values would be dropped."
        )


def _check_value(name: str, value: object, target: torch.Tensor) -> None:
    """Raises TypeError unless ``value`` can fill the param or buffer ``target``."""
    if not isinstance(value, torch.Tensor):
        found = f"a {type(value).__name__}"
    elif value.is_meta:
        found = "a tensor on the meta device, which has no values"
    elif value.layout is not torch.strided:
        found = f"one of layout {value.layout}"
    elif value.is_complex() and not target.is_complex():
        found = f"{value.dtype}, whose imaginary part would be dropped"
    else:
        return
    raise TypeError(f"{_STATE_DICT} takes a dense tensor with values for {name} ({target.dtype}), found {found}.")


def _with_values(param: nn.Parameter, values: torch.Tensor) -> torch.Tensor:
    """Returns a param with these values and the class and attributes of ``param``: ``swap_tensors`` swaps all three."""
    new: torch.Tensor = torch.Tensor._make_subclass(type(param), values, param.requires_grad)
    new.__dict__.update(param.__dict__)
    for name in copyreg._slotnames(type(param)):  # type: ignore[attr-defined]
        if hasattr(param, name):
            setattr(new, name, getattr(param, name))
    return new


def device_to_train_on(world: Ranks) -> torch.device:
    """Returns the current GPU if there is one and the process group can use it, else the CPU."""
    if torch.cuda.is_available() and (world.group is None or world.carries(torch.device("cuda"))):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@torch.no_grad()
def give_values(module: nn.Module, fresh: list[torch.Tensor], domain: Domain, init: DeferredInit) -> None:
    """Collective: initializes the modules that own ``fresh`` tensors, one by one, on all ranks or none.

    A module follows the modules that it holds, as in constructors. After an error all tensors are still fresh.
    """
    relay = Relay()  # after an error the other ranks go on gathering, and need this rank
    without, waiting = set(fresh), set(fresh)
    where = {} if domain.sharded is None else domain.sharded.where
    for tensor in fresh:
        if tensor not in domain.entries and tensor not in where:  # frozen and small: no bucket gave it memory
            tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
    with _random_numbers_of_rank_0(domain.mesh.world, domain.device):
        for prefix, each in _inside_out(module, "", set()):
            own = [*each.parameters(recurse=False), *each.buffers(recurse=False)]
            if without.isdisjoint(own):
                continue
            units = list(dict.fromkeys(where[param].unit for param in each.parameters(recurse=False) if param in where))
            if units:
                domain.gatherer.need_all(units)
            for unit in units:
                domain.gatherer.writes.before_write(unit.transport)
            with filled_in_fp32(domain, [param for param in each.parameters(recurse=False) if param in waiting]):
                relay.attempt(_initialize, each, prefix, own, waiting, init)
            for unit in units:
                domain.gatherer.write_back(unit)
                domain.gatherer.done(unit, reshard=True)
            waiting -= set(own)
        if where:
            domain.gatherer.writes.after_writes()
        agree_on("values", domain.mesh.world, relay.problem)
    for shard in domain.shards:
        if not shard.is_cast and any(param in without for param in shard.bucket.params):
            shard.restart_masters()


def _inside_out(module: nn.Module, prefix: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yields the name and module of all submodules once, each after the modules that it holds."""
    if module not in seen:
        seen.add(module)
        for name, child in module.named_children():
            yield from _inside_out(child, f"{prefix}.{name}" if prefix else name, seen)
        yield prefix, module


def _initialize(
    module: nn.Module, prefix: str, own: list[torch.Tensor], waiting: set[torch.Tensor], init: DeferredInit
) -> None:
    named = {
        **dict(module.named_parameters(prefix, recurse=False)),
        **dict(module.named_buffers(prefix, recurse=False)),
    }
    state_dict = {} if init.state_dict is None else init.state_dict
    # Without a state dict it is called for each, that random numbers are drawn as when the model is built.
    if init.state_dict is None or any(tensor in waiting and n not in state_dict for n, tensor in named.items()):
        # Tensors that have values keep them: they are tied to another module's, or were never on the meta device.
        kept = [(tensor, tensor.clone()) for tensor in own if tensor not in waiting]
        for tensor in own:
            if tensor in waiting:
                _poison(tensor)
        init.initialize(module)
        for tensor, value in kept:
            tensor.copy_(value)
        # An initializer may assign a buffer anew, but a param lies in its bucket.
        now = {**named, **dict(module.named_buffers(prefix, recurse=False))}
        left = [n for n, tensor in named.items() if tensor in waiting and n not in state_dict and _is_poisoned(now[n])]
        if left:
            how = "reset_parameters()" if init.init_fn is None else "init_fn"
            raise BindingError(
                f"fill {left} of {type(module).__name__} in place in {how}, or give them in bind(state_dict=...): they "
                f"were on the meta device, and {how} left them without values, so that training would start from NaN."
            )
    for name, tensor in named.items():
        if tensor in waiting and name in state_dict:
            tensor.copy_(state_dict[name])


def _poison(tensor: torch.Tensor) -> None:
    """Marks a tensor as one without values."""
    mark = _mark_of(tensor)
    if mark is not None:
        tensor.fill_(mark)


def _is_poisoned(tensor: torch.Tensor) -> bool:
    """True if a tensor has no values, or not all: an integer may be the least one by chance."""
    mark = _mark_of(tensor)
    if mark is None or not tensor.numel():
        return False
    return bool((tensor == mark).all() if isinstance(mark, int) else tensor.isnan().any())


def _mark_of(tensor: torch.Tensor) -> float | int | None:
    """Returns what an element without a value holds; None: its dtype shows none, as a bool or a float of 8 bits."""
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.nan if tensor.element_size() > 1 else None
    return None if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).min


@contextmanager
def _random_numbers_of_rank_0(world: Ranks, device: torch.device) -> Iterator[None]:
    """Lets every rank draw rank 0's random numbers. Afterwards rank 0 goes on from there, the others with their own.

    After an error every rank goes on as if no number had been drawn.
    """
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(
            torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
        )
    before = [generator.get_state() for generator in generators]
    states = [state.clone() for state in before]
    world.broadcast(states, "sharing rank 0's random numbers")
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)
    failed = True
    try:
        yield
        failed = False
    finally:
        if failed or world.rank != 0:
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)


class FirstValues:
    """The values of a module's params and buffers while it is bound.

    Attributes:
        fresh: params and buffers that were on the meta device and have no values yet.
    """

    def __init__(self, called: Sequence[CalledModule], coverage: Coverage):
        self._module, self._called, self._coverage = coverage.module, called, coverage
        self.fresh: frozenset[torch.Tensor] = frozenset()

    def give_devices(self, world: Ranks) -> None:
        """Moves params and buffers from the meta device to the training device; they are fresh from now on.

        The params still have no memory. Neither params nor buffers have values.
        """
        fresh: list[torch.Tensor] = [*meta_params(self._module)]
        others = [param.device for param in self._module.parameters() if not param.is_meta]
        device = others[0] if others else device_to_train_on(world)
        recurrent = [each for each in self._module.modules() if isinstance(each, nn.RNNBase)]
        for layers in recurrent:
            layers._flat_weight_refs = []  # swap_tensors() refuses tensors that have weak references
        for param in meta_params(self._module):
            empty = torch.empty(param.size(), dtype=param.dtype, device=device)
            empty.untyped_storage().resize_(0)
            # In place: optimizers, tied modules and hooks hold this object.
            torch.utils.swap_tensors(param, _with_values(param, empty))
        for layers in recurrent:
            layers._init_flat_weights()
        for each in self._module.modules():
            for name, buffer in each.named_buffers(recurse=False):
                if buffer.is_meta:
                    fresh.append(torch.empty_like(buffer, device=device))
                    each._buffers[name] = fresh[-1]
        self.fresh |= frozenset(fresh)

    def give(self, init: DeferredInit) -> None:
        """Collective: gives fresh tensors their values, on all ranks or none. See :func:`give_values`."""
        give_values(self._module, list(self.fresh), self._coverage.domains[0], init)
        self.fresh = frozenset()

    def check_given(self) -> None:
        """Raises BindingError if a forward would use what has no values."""
        if self.fresh:
            raise BindingError(
                "call optimizer.bind() again, on every rank: it failed before all params that were on the meta device "
                "had values, and this forward would compute with zeros."
            )

    def describe(self) -> dict[str, Any]:
        """Returns what ranks must have in common before values are shared; JSON-able."""
        named = (*self._module.named_parameters(), *self._module.named_buffers())
        experts = self._coverage.domains[1:]
        apart = {tensor for domain in experts for tensor in tensors_of(self._module, domain.members)}
        apart |= self._coverage.of_each_rank()
        shown = ((name, tensor) for name, tensor in named if tensor not in apart and not is_sharded(tensor))
        return {name: [list(tensor.shape), str(tensor.dtype)] for name, tensor in shown}

    def describe_bits(self) -> dict[str, int]:
        """Returns what ranks must have in common if a backward binds: no rank may get other values in it."""
        if not in_backward() or all(called.ddp for called in self._called):
            return {}
        own = tensors_of(self._module, self._coverage.domains[0].members)
        params = {tensor for tensor in own if isinstance(tensor, nn.Parameter) and not is_sharded(tensor)}
        named = ((name, param) for name, param in self._module.named_parameters() if param in params)
        shown = ((name, [each for each in plain_tensors(param) if each.element_size() > 1]) for name, param in named)
        return {name: sum(checksum(each.detach().reshape(-1)) for each in inner) for name, inner in shown}

    def share(self) -> None:
        """Collective: broadcasts rank 0's params and buffers, as DDP does when it wraps a module.

        Those of experts are broadcast by the first rank that holds them.
        """
        if in_backward() or all(called.ddp for called in self._called):
            return
        apart = self._coverage.of_each_rank()
        for domain in self._coverage.domains:
            # Another optimizer may have sharded some params at stage 3: their values agree already.
            tensors = tensors_of(self._module, domain.members)
            own = [tensor for tensor in tensors if not is_sharded(tensor) and tensor not in apart]
            inner = [each for tensor in own for each in plain_tensors(tensor)]
            domain.mesh.world.broadcast(inner, "sharing rank 0's params")
