"""Which ranks hold gathered units between their uses, as ``Tuning(reshard_after_forward=)`` says it."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from ..errors import BindingError
from ..partition.comm.peer_memory import namespaces

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..partition.comm.group import Ranks

HOST = "host"


def members_of(asked: object, ranks: Ranks, of_experts: bool) -> Sequence[int] | None:
    """Collective for ``"host"``: returns the ranks that hold units together with this one; None: no rank holds parts.

    Raises:
        BindingError: the ranks cannot be divided so; on all of them.
    """
    number = parts_of(asked, ranks.size, of_experts)
    if number:
        first = ranks.rank // number * number
        return range(first, first + number)
    if asked != HOST or ranks.size == 1:
        return None
    hosts = ranks.exchange_json(_own_host(), "telling hosts apart")
    members = [rank for rank, host in enumerate(hosts) if host == hosts[ranks.rank]]
    if not of_experts:
        _check_hosts(hosts)
    is_even = len({hosts.count(host) for host in hosts}) == 1
    return members if is_even and 1 < len(members) < ranks.size else None


def parts_of(asked: object, ranks: int, of_experts: bool = False) -> int:
    """Returns in how many parts ranks hold each unit between its uses; 0: they hold none.

    Args:
        of_experts: these are fewer ranks than those of the model, and may be no more than hold a unit.

    Raises:
        BindingError: the ranks cannot be divided by the number that was asked for.
    """
    if not isinstance(asked, int) or asked <= 1 or (of_experts and asked >= ranks):  # a bool too
        return 0
    if ranks % asked:
        raise BindingError(
            f"give a number that divides the {ranks} ranks that share params: Tuning(reshard_after_forward={asked}) "
            "says how many of them hold a unit between forward and backward, and some would have too few others."
        )
    return asked if asked < ranks else 0


def _check_hosts(hosts: Sequence[str]) -> None:
    numbers = [hosts.count(host) for host in dict.fromkeys(hosts)]
    if len(set(numbers)) > 1:
        raise BindingError(
            "start as many ranks on each host, or give a number that divides the ranks: "
            f"Tuning(reshard_after_forward={HOST!r}) found hosts of {numbers} ranks, and all hosts must hold a unit in "
            "as many parts."
        )
    if numbers[0] == 1:
        raise BindingError(
            "give reshard_after_forward=False if whole units are to stay on each rank, else True: "
            f"Tuning(reshard_after_forward={HOST!r}) found {len(hosts)} hosts of one rank, which would hold all of a "
            "unit. Ranks in PID, mount or network namespaces of their own count as hosts."
        )


def _own_host() -> str:
    """Returns a text that is equal in processes of one kernel and in the same namespaces."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            kernel = file.read().strip()
    except OSError:
        kernel = socket.gethostname()
    return f"{kernel} {namespaces()}"
