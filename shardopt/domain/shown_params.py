"""Lets whole buckets show the exact values of all ranks, or what 8 bits hold of them: stages 1 and 2, ``gather_dtype``.

See :mod:`.exact_slice`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .domain import Domain
    from .shard import Shard


def coded_shards(domain: Domain) -> list[Shard]:
    """Returns the shards whose buckets show what 8 bits hold of them."""
    return [each for each in domain.shards if each.exact_slice is not None and not each.exact_slice.is_shown]


def show(domain: Domain, shards: Sequence[Shard], exact: bool, phase: str = "gathering params") -> None:
    """Collective: lets buckets show the exact values of all ranks; or again what 8 bits hold of them, if any."""
    gather = domain.transport.gather(phase, is_coded=domain.codes_updates and not exact)
    for shard in shards:
        gather.start(shard.exact_window() if exact else shard.window)
    gather.finish()
    domain.transport.traffic.params += gather.received


def show_loaded(domain: Domain) -> None:
    """Collective: lets buckets show what a training shows that has come so far: their params were loaded exactly."""
    found = {entry.shard: None for entry in domain.entries.values() if entry.step}
    with torch.no_grad():
        show(domain, list(found), exact=False, phase="gathering loaded params")


@contextmanager
def shown_exactly(domain: Domain) -> Iterator[None]:
    """A context of ``unsharded()``, collective at both ends: params are exact inside, and what is written counts."""
    shards = coded_shards(domain)
    with torch.no_grad():
        show(domain, shards, exact=True)
    try:
        yield
    finally:
        with torch.no_grad():
            show(domain, shards, exact=False)
