"""The moving average of the weights in the place of the weights, for a while."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from .binding import Binding
from .entry import Entry
from .errors import ShardoptError
from .rules.rule import EMA
from .shard import Shard


@contextmanager
def averaged(binding: Binding) -> Iterator[None]:
    """Collective, both ends: inside, every param is its average; behind it what it was, whatever was written.

    Params that were never updated (frozen, unused) have none and stay what they are. Takes memory for one copy of this
    rank's slices.

    Raises:
        ShardoptError: no average is kept, or none yet.
        OffloadError: a rank cannot read its own; nothing changed.
    """
    if binding.rule.average is None:
        raise ShardoptError(
            "unsharded(ema=True) was called and no average of the weights is kept: construct the optimizer with "
            "ema=0.999, say; it begins with the next step."
        )
    if not any(entry.has_state for entry in binding.entries.values()):
        raise ShardoptError("unsharded(ema=True) was called before the first step: there is no average yet.")
    averages = {shard: _averages(binding, shard) for shard in binding.shards if EMA in shard.states}
    weights = {shard: shard.params(0, shard.numel).clone() for shard in averages}
    followed = [entry for entry in binding.entries.values() if entry.version == entry.param._version]
    _put(binding, averages)
    try:
        with binding.sharded.unsharded() if binding.sharded is not None else nullcontext():
            yield
    finally:
        _put(binding, weights)
        for entry in followed:  # what was written inside is gone: masters have nothing to follow
            entry.version = entry.param._version


def _averages(binding: Binding, shard: Shard) -> torch.Tensor:
    """1D, as long as the shard and of its params' dtype."""
    own = binding.read_together(shard, EMA, binding.mesh.world)
    shown = shard.params(0, shard.numel).clone()
    for entry in _updated(binding, shard):
        where = shard.slice_of(entry.index).local
        shown[where] = own[where].to(shown.dtype)
    return shown


def _updated(binding: Binding, shard: Shard) -> list[Entry]:
    return [entry for entry in binding.entries.values() if entry.shard is shard and entry.has_state]


def _put(binding: Binding, values: dict[Shard, torch.Tensor]) -> None:
    """Collective: every rank's slices become these, and travel wherever params are whole."""
    if binding.sharded is not None:
        binding.gatherer.write_slice(lambda: None)  # nobody still gathers what is about to be overwritten
    for shard, own in values.items():
        shard.write_chunk("param", 0, own)
    if binding.sharded is not None:
        binding.gatherer.settle()  # until all ranks have written theirs
    assert binding.wires is not None
    gather = binding.wires.shards.gather("gathering averaged params")
    for shard in values:
        if shard.gathered is None:
            gather.start(shard.window)
    gather.finish()
    binding.wires.shards.traffic.params += gather.received
