"""Models that were built on the meta device get memory and values, bucket by bucket.

A model too large for one rank is built under ``with torch.device("meta")``. At binding its params become views of
buckets that have no memory yet. Then all ranks initialize every module that owns some of the params in turn, by the
module's own ``reset_parameters()`` with rank 0's random numbers, or from a state dict. At stage 3 each rank keeps its
slice and frees the bucket's memory before the next bucket is needed.
"""

import copyreg
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from ..arguments import by_name
from ..domain.agreement import StepDigest, agree
from ..domain.domain import Domain
from ..errors import BindingError
from ..partition.comm.group import Ranks

_STATE_DICT = "bind(state_dict=)"


def meta_params(module: nn.Module) -> list[nn.Parameter]:
    """Returns the params on the meta device."""
    return [param for param in module.parameters() if param.is_meta]


def check_materializable(
    module: nn.Module, state_dict: Mapping[str, torch.Tensor] | None, fresh: Collection[torch.Tensor]
) -> None:
    """Raises BindingError if some module cannot be given values. Changes nothing.

    Args:
        fresh: tensors that were on the meta device and still have no values: an earlier attempt failed.

    Raises:
        TypeError: ``state_dict`` is no mapping of names, or holds something other than tensors with values.
    """
    if state_dict is not None:
        _check_names(module, by_name(state_dict, _STATE_DICT))
    for name, each in module.named_modules():
        tensors = {**dict(each.named_parameters(name, recurse=False)), **dict(each.named_buffers(name, recurse=False))}
        on_meta = [key for key, tensor in tensors.items() if tensor.is_meta or tensor in fresh]
        if not on_meta:
            continue
        if state_dict is not None:
            lacking = [key for key in on_meta if key not in state_dict]
            for key in on_meta:
                if key in state_dict:
                    _check_value(key, state_dict[key], tensors[key])
            wrong = [key for key in on_meta if key in state_dict and state_dict[key].shape != tensors[key].shape]
            if lacking or wrong:
                raise BindingError(
                    "give a state dict that was saved from the same model: params would start from random memory. The "
                    f"state dict does not fit the module on the meta device: missing {lacking}, of other shapes "
                    f"{wrong}."
                )
        elif not hasattr(each, "reset_parameters"):
            raise BindingError(
                "define reset_parameters(), or call optimizer.bind(state_dict=...) with the values before the first "
                f"forward: {on_meta} are on the meta device and {type(each).__name__} has no reset_parameters(), so "
                "their values are unknown."
            )


def check_unused(state_dict: object) -> None:
    """Raises BindingError if there is a state dict, but nothing on the meta device: its values would be dropped."""
    if state_dict is not None:
        by_name(state_dict, _STATE_DICT)
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


def give_devices(module: nn.Module, world: Ranks) -> list[torch.Tensor]:
    """Moves params and buffers from the meta device to the training device, and returns them.

    The params still have no memory. Neither params nor buffers have values.
    """
    fresh: list[torch.Tensor] = [*meta_params(module)]
    others = [param.device for param in module.parameters() if not param.is_meta]
    device = others[0] if others else device_to_train_on(world)
    recurrent = [each for each in module.modules() if isinstance(each, nn.RNNBase)]
    for layers in recurrent:
        layers._flat_weight_refs = []  # swap_tensors() refuses tensors that have weak references
    for param in meta_params(module):
        empty = torch.empty(param.size(), dtype=param.dtype, device=device)
        empty.untyped_storage().resize_(0)
        # In place: optimizers, tied modules and hooks hold this object.
        torch.utils.swap_tensors(param, _with_values(param, empty))
    for layers in recurrent:
        layers._init_flat_weights()
    for each in module.modules():
        for name, buffer in each.named_buffers(recurse=False):
            if buffer.is_meta:
                fresh.append(torch.empty_like(buffer, device=device))
                each._buffers[name] = fresh[-1]
    return fresh


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
def give_values(
    module: nn.Module, fresh: list[torch.Tensor], domain: Domain, state_dict: Mapping[str, torch.Tensor] | None
) -> None:
    """Collective: initializes the modules that own ``fresh`` tensors, one by one, on all ranks or none.

    A module follows the modules that it holds, as in constructors. After an error all tensors are still fresh.
    """
    problem: Exception | None = None
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
            buckets = list(dict.fromkeys(where[param] for param in each.parameters(recurse=False) if param in where))
            if buckets:
                domain.gatherer.need_all(buckets)
            try:
                if problem is None:
                    _initialize(each, prefix, own, waiting, state_dict)
            except Exception as error:  # raised below: the other ranks go on gathering, and need this rank
                problem = error
            for bucket in buckets:
                domain.gatherer.write_back(bucket)
                domain.gatherer.done(bucket, drop=True)
            waiting -= set(own)
        if where:
            domain.gatherer.settle()
        agree(StepDigest("values", dict, problem), domain.mesh.world, domain.device)
    for shard in domain.shards:
        if any(param in without for param in shard.bucket.params):
            shard.restart_masters()


def _inside_out(module: nn.Module, prefix: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yields the name and module of all submodules once, each after the modules that it holds."""
    if module not in seen:
        seen.add(module)
        for name, child in module.named_children():
            yield from _inside_out(child, f"{prefix}.{name}" if prefix else name, seen)
        yield prefix, module


def _initialize(
    module: nn.Module,
    prefix: str,
    own: list[torch.Tensor],
    waiting: set[torch.Tensor],
    state_dict: Mapping[str, torch.Tensor] | None,
) -> None:
    if state_dict is None:
        # Tensors that have values keep them: they are tied to another module's, or were never on the meta device.
        kept = [(tensor, tensor.clone()) for tensor in own if tensor not in waiting]
        module.reset_parameters()  # type: ignore[operator]
        for tensor, value in kept:
            tensor.copy_(value)
        return
    named = [*module.named_parameters(prefix, recurse=False), *module.named_buffers(prefix, recurse=False)]
    for name, tensor in named:
        if tensor in waiting:
            tensor.copy_(state_dict[name])


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
