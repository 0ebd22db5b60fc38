"""Promise: one rank's error becomes the error of all: it waits for the next exchange, and every rank raises there. What
the failed rank says of it is better than what others saw from outside."""

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch.distributed as dist

from shardopt.domain.agreement import agreed
from shardopt.errors import CommunicationError, DisagreementError
from shardopt.partition.comm.group import Ranks
from shardopt.partition.comm.together import Relay, riding_on, together
from tests.support.ranks import Pool


def fails(error: Exception) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


def test_a_failed_rank_does_no_more_work_and_comes_to_every_exchange() -> None:
    relay, came, first = Relay(), list[Exception | None](), ValueError("first")
    assert relay.attempt(lambda value: value + 1, 2) == 3
    assert relay.attempt(fails(first)) is None
    assert relay.attempt(came.append, None) is None
    assert relay.meet(lambda problem: came.append(problem) or "met") == "met"
    relay.meet(riding_on(fails(CommunicationError("a rank failed"))))
    assert came == [first]
    with pytest.raises(ValueError, match="first"):
        relay.check()


def test_an_exchange_chooses_what_is_raised() -> None:
    """An agreement knows what another rank says of its error; where only flags travel, this rank's own says more."""
    seen, said, own = CommunicationError("rank 1 is late"), DisagreementError("rank 1 says: no room"), ValueError()
    for problem, exchange, kept in (
        (seen, fails(said), said),
        (own, riding_on(fails(seen)), own),
        (None, riding_on(fails(seen)), seen),
    ):
        relay = Relay(problem)
        relay.meet(exchange)
        assert relay.problem is kept
    flags: list[bool] = []
    for problem in (None, own):
        Relay(problem).meet(riding_on(flags.append))
    assert flags == [False, True]


def on_one_rank() -> int:
    """How many exchanges a block without an error takes. Then rank 1 fails in one, inside of another block."""
    ranks, rows, odd = Ranks(dist.group.WORLD, None), list[object](), dist.get_rank() == 1
    with patch.object(ranks, "exchange", side_effect=ranks.exchange) as exchange:
        with agreed("nothing fails", ranks):
            pass
        calls = exchange.call_count
    with (
        pytest.raises(MemoryError if odd else DisagreementError, match="no room"),
        agreed("one fails", ranks),
        together(rows.append),
    ):
        if odd:
            raise MemoryError("no room")
    assert [repr(each) for each in rows] == ["MemoryError('no room')" if odd else "None"]
    return calls


def test_all_ranks_raise(ranks: Pool) -> None:
    assert ranks.run(on_one_rank, world=2) == [1, 1]
