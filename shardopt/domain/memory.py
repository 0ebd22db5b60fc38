"""The memory of an optimizer on this rank: bytes by kind and tier."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from ..tensors.part import Part
from .members import plain_tensors

if TYPE_CHECKING:
    from ..config import Offload
    from .domain import Domain

Memory = dict[str, dict[str, int]]
KINDS = ("param", "gradient", "buffer", "master", "state")


def memory_of(
    domains: Sequence[Domain],
    params: Collection[torch.nn.Parameter],
    grads: Iterable[torch.Tensor | None],
    offload: Offload | None,
    tier: str,
) -> Memory:
    """Returns bytes by kind and tier (device, host, disk).

    Args:
        params: those of the groups and the module.
        grads: the gradients of these params.
        offload: says if sums of gradients and slices of params are in host memory.
        tier: of masters and states; listed even if there are none yet.
    """
    found: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    own = (grad for grad in grads if grad is not None and not isinstance(grad, Part))
    found["gradient"]["device"] = sum(grad.nbytes for grad in own)
    free = (param for param in params if not any(_is_bound(domain, param) for domain in domains))
    found["param"]["device"] = sum(each.nbytes for param in free for each in plain_tensors(param))
    found["master"][tier] = found["state"][tier] = found["buffer"]["device"] = 0
    for domain in domains:
        _add_shards(found, domain, "host" if offload is not None and offload.params == "cpu" else "device")
        _add_reducer(found, domain, "host" if offload is not None and offload.gradients == "cpu" else "device")
        if domain.shards:
            found["buffer"].update(domain.store.buffer_bytes)
            if domain.early is not None:
                found["buffer"].update(domain.early.nbytes)
            if domain.kept.spare_bytes:
                found["buffer"]["host"] += domain.kept.spare_bytes
    return {kind: dict(tiers) for kind, tiers in found.items()}


def memory_in_words(memory: Memory) -> str:
    """Returns "device: 1.50 MB (param 1.00, master 0.50), host: 2.00 GB (state 2.00)"; MB are 10^6 bytes."""
    parts = []
    for tier in dict.fromkeys(tier for each in memory.values() for tier in each):
        kinds = {kind: each[tier] for kind, each in memory.items() if each.get(tier)}
        total = sum(kinds.values())
        unit, name = (1e9, "GB") if total >= 1e9 else (1e6, "MB") if total >= 1e6 else (1e3, "kB")
        listed = ", ".join(f"{kind} {nbytes / unit:.2f}" for kind, nbytes in kinds.items())
        parts += [f"{tier}: {total / unit:.2f} {name} ({listed})"] * bool(kinds)
    return ", ".join(parts)


def _is_bound(domain: Domain, param: torch.nn.Parameter) -> bool:
    return param in domain.entries or (
        domain.sharded is not None and domain.locals.outer_of(param) in domain.sharded.where
    )


def _add_shards(found: dict[str, Counter[str]], domain: Domain, slices: str) -> None:
    found["buffer"]["device"] += sum(shard.tables.nbytes for shard in domain.shards)
    of_margins = sum(each.nbytes for entry in domain.entries.values() for each in entry.margins.values())
    if of_margins:
        found["state"]["device" if domain.device.type == "cpu" else "host"] += of_margins
    for shard in (*domain.shards, *domain.frozen_shards):
        found["param"]["device"] += shard.bucket.resident_bytes
        if shard.gathered is not None and shard.gathered.secondary is not None:
            found["param"]["device"] += shard.gathered.secondary.nbytes
        if shard.param_bytes:
            is_asleep = domain.sharded is not None and domain.sharded.is_asleep
            found["param"][domain.sharded.sleeps_in if is_asleep and domain.sharded else slices] += shard.param_bytes
        for name, nbytes in shard.home.nbytes.items():
            found[name if name in ("master", "param") else "state"][shard.home.tier] += nbytes


def _add_reducer(found: dict[str, Counter[str]], domain: Domain, sums: str) -> None:
    reducer = domain.reducer
    if reducer is not None:
        found["gradient"][sums] += sum(each.nbytes for bucket in reducer.buckets for each in bucket.sink.tensors)
        codes = (bucket.code for bucket in reducer.buckets if bucket.code is not None)
        found["gradient"]["device"] += sum(each.nbytes for code in codes for each in code.tensors)
        found["buffer"]["device"] += sum(each.nbytes for each in reducer.buffers)
    if domain.landing is not None:
        found["buffer"]["device"] += domain.landing.slot_bytes
