"""All-to-all: what the ranks must have alike is compared before anything travels."""

import pytest
import torch
import torch.distributed as dist

from shardopt.errors import DisagreementError
from shardopt.partition.comm.group import Ranks
from shardopt.partition.comm.transport import Transport
from tests.support.ranks import Pool
from tests.support.training import raises


def exchange(neighbours: bool) -> list[list[float]]:
    """Of ranks with one key, after ranks with different keys."""
    transport = Transport.of(Ranks(None, None), torch.device("cpu"), neighbours)
    rank, size = dist.get_rank(), dist.get_world_size()
    own = [torch.full((3,), 10.0 * rank + peer) for peer in range(size)]
    others = [own[rank] if peer == rank else torch.empty(3) for peer in range(size)]
    way = transport.all_to_all("a test")
    with raises(DisagreementError, "give the same params a gradient on all ranks", "a test"):
        way.start(own, others, "a test", key=7 * rank)
    way.start(own, others, "a test", key=7)()
    return [each.tolist() for each in others]


@pytest.mark.parametrize("neighbours", [True, False])
def test_ranks_with_other_keys_exchange_nothing(ranks: Pool, neighbours: bool) -> None:
    for rank, found in enumerate(ranks.run(exchange, neighbours, world=2)):
        assert found == [[10.0 * peer + rank] * 3 for peer in range(2)]
