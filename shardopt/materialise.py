"""Models that were built on the meta device: values, and memory for them, come bucket by bucket.

A model too large for one rank is built under ``with torch.device("meta")``. At binding its params become views of
buckets that have no memory yet; then every module that owns some is initialised in turn, by its own
``reset_parameters()`` or from a state dict, on all ranks with rank 0's random numbers. At stage 3 each rank keeps its
slice and gives the bucket's memory back before the next one is needed.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from .binding import Binding
from .errors import BindingError
from .partition.collectives import Ranks


def meta_params(module: nn.Module) -> list[nn.Parameter]:
    return [param for param in module.parameters() if param.is_meta]


def check_materialisable(module: nn.Module, state_dict: Mapping[str, torch.Tensor] | None) -> None:
    """Raises BindingError if some module could not be given values. Changes nothing."""
    for name, each in module.named_modules():
        tensors = {**dict(each.named_parameters(name, recurse=False)), **dict(each.named_buffers(name, recurse=False))}
        on_meta = [key for key, tensor in tensors.items() if tensor.is_meta]
        if not on_meta:
            continue
        if state_dict is not None:
            lacking = [key for key in on_meta if key not in state_dict]
            wrong = [key for key in on_meta if key in state_dict and state_dict[key].shape != tensors[key].shape]
            if lacking or wrong:
                raise BindingError(
                    f"the state dict does not fit the module on the meta device: missing {lacking}, of other shapes "
                    f"{wrong}. They would start from random memory. Give one that was saved from the same model."
                )
        elif not hasattr(each, "reset_parameters"):
            raise BindingError(
                f"{on_meta} are on the meta device and {type(each).__name__} has no reset_parameters(): nobody knows "
                "their values. Define it, or call optimizer.bind(state_dict=...) with the values before the first "
                "forward."
            )


def give_devices(module: nn.Module, world: Ranks) -> list[nn.Parameter]:
    """Turns params on the meta device into ones on the device to train on, still without memory or values."""
    fresh = meta_params(module)
    others = [param.device for param in module.parameters() if not param.is_meta]
    device = others[0] if others else _device_to_train_on(world)
    for param in fresh:
        empty = torch.empty(param.size(), dtype=param.dtype, device=device)
        empty.untyped_storage().resize_(0)
        # In place, so that optimizers, tied modules and hooks go on holding the same object.
        torch.utils.swap_tensors(param, nn.Parameter(empty, requires_grad=param.requires_grad))
    for each in module.modules():
        for name, buffer in each.named_buffers(recurse=False):
            if buffer.is_meta:
                each.register_buffer(name, torch.empty_like(buffer, device=device), name not in each.state_dict())
    return fresh


def _device_to_train_on(world: Ranks) -> torch.device:
    if torch.cuda.is_available() and (world.group is None or world.carries(torch.device("cuda"))):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@torch.no_grad()
def give_values(
    module: nn.Module, fresh: list[nn.Parameter], binding: Binding, state_dict: Mapping[str, torch.Tensor] | None
) -> None:
    """Collective: initialises the modules that own ``fresh`` params, one after the other."""
    waiting = set(fresh)
    where = {} if binding.sharded is None else binding.sharded.where
    with _random_numbers_of_rank_0(binding.mesh.world):
        for prefix, each in module.named_modules():
            own = {param for param in each.parameters(recurse=False) if param in waiting}
            buckets = {where[param]: None for param in own if param in where}
            for bucket in buckets:
                binding.gatherer.need(bucket)
            if own or (state_dict is None and any(True for _ in each.buffers(recurse=False))):
                _initialise(each, prefix, own, state_dict)
            for bucket in buckets:
                binding.gatherer.write_back(bucket)
                binding.gatherer.done(bucket, drop=True)
            waiting -= own
    if where:
        binding.gatherer.settle()
    for shard in binding.shards:
        if shard.master is not None and any(param in fresh for param in shard.bucket.params):
            shard.master.copy_(shard.param)


def _initialise(
    module: nn.Module, prefix: str, own: set[nn.Parameter], state_dict: Mapping[str, torch.Tensor] | None
) -> None:
    if state_dict is None:
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()
        return
    for name, param in module.named_parameters(prefix, recurse=False):
        if param in own:
            param.copy_(state_dict[name])
    for name, buffer in module.named_buffers(prefix, recurse=False):
        if name in state_dict:
            buffer.copy_(state_dict[name])


@contextmanager
def _random_numbers_of_rank_0(world: Ranks) -> Iterator[None]:
    """Every rank draws what rank 0 would have drawn, and then goes on with its own numbers; rank 0 behind them."""
    before = torch.get_rng_state()
    state = before.clone()
    world.broadcast([state], "sharing rank 0's random numbers")
    torch.set_rng_state(state)
    try:
        yield
    finally:
        if world.rank != 0:
            torch.set_rng_state(before)
