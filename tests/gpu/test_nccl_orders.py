"""Stage 3 over NCCL, whose collectives know their order alone: ranks that go apart are told, and none trains on."""

import pytest

from tests.partition.test_collective_wire import a_step_in_these_orders
from tests.support.ranks import Pool

pytestmark = pytest.mark.gpu


def test_one_order_is_no_error(ranks: Pool) -> None:
    for told in ranks.run(a_step_in_these_orders, ((1, 2, 3), (1, 2, 3)), "cuda", world=2, backend="nccl"):
        assert told.error is None and not any(told.misread.values()) and not told.is_unchanged


def test_another_order_on_one_rank_is_an_error_on_all(ranks: Pool) -> None:
    for told in ranks.run(a_step_in_these_orders, ((1, 2, 3), (2, 1, 3)), "cuda", world=2, backend="nccl"):
        assert told.error is not None, f"no error; doors, and the weights of others that they read: {told.misread}"
        assert told.is_typed and told.is_unchanged, told.error
