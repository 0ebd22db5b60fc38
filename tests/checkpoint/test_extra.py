"""What is saved as ``extra`` comes back to the bit: small values, and the states of torch's schedulers."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import shardopt
from shardopt import CheckpointError, ShardedAdamW
from shardopt.checkpoint.values import decode, encode
from tests.optim.test_drop_in import SCHEDULERS
from tests.support.checkpoints import save
from tests.support.training import raises


def test_values_come_back_to_the_bit_and_others_are_refused() -> None:
    value = {
        "a": [1, 2.5, None, True, "x", (1, (2,)), 1 << 80],
        "$tensor": {"$float": 1},
        "f": [0.1, 1e-320, -0.0, float("inf")],
        "by number": {3: (4,), "3": {-1: [5]}, "counted": Counter({30: 1, 10: 2})},
    }
    assert repr(decode(json.loads(json.dumps(encode(value, str, ""))), str)) == repr(value)
    for wrong in ({1.5: 2}, {"a": {(1, 2): 3}}, {"a": {3}}, [object()], {"a": [b"x"]}):
        with raises(CheckpointError, "extra", "strings or integers as keys"):
            encode(wrong, str, "extra")


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_of_torch_go_on(name: str, tmp_path: Path) -> None:
    """A scheduler's state, saved as extra, gives the next learning rates bit by bit."""

    def made() -> tuple[nn.Module, ShardedAdamW]:
        model = nn.Linear(3, 2)
        return model, ShardedAdamW(model, lr=0.1)

    def walked(scheduler: Any, optimizer: ShardedAdamW, steps: range) -> list[float]:
        rates = []
        for step in steps:
            optimizer.step()
            scheduler.step(*([float(step)] if name == "ReduceLROnPlateau" else []))
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    model, optimizer = made()
    scheduler = SCHEDULERS[name](optimizer)
    begun = walked(scheduler, optimizer, range(1))
    path = save(tmp_path, model, optimizer, extra={"scheduler": scheduler.state_dict()})
    expected = walked(scheduler, optimizer, range(1, 5))
    assert len({*begun, *expected}) > 1
    model, optimizer = made()
    again = SCHEDULERS[name](optimizer)
    again.load_state_dict(shardopt.load_checkpoint(path, model, optimizer)["scheduler"])
    assert walked(again, optimizer, range(1, 5)) == expected
    assert repr(again.state_dict()) == repr(scheduler.state_dict())
