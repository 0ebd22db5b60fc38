"""Memory of buckets that is freed and allocated again: the pages of what was freed serve what is gathered next."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from shardopt import ShardedSGD, huge_pages
from shardopt.huge_pages import HUGE_PAGE
from shardopt.partition.memory import Memory, return_free_memory

NBYTES = 2 * HUGE_PAGE + 3 * 4096 + 100


def filled(nbytes: int, value: int) -> Memory:
    memory = Memory(nbytes, torch.uint8, torch.device("cpu"))
    memory.tensor.fill_(value)
    return memory


@pytest.mark.parametrize(("before", "after"), [(NBYTES, NBYTES), (NBYTES, HUGE_PAGE), (HUGE_PAGE, NBYTES)])
def test_pages_move_to_what_is_allocated_next(before: int, after: int) -> None:
    """They hold what they held, which shows that the system did not zero others; what does not fit is given back."""
    one, other, bystander = filled(before, 7), filled(after, 9), filled(NBYTES, 5)
    views = one.tensor[10:], other.tensor[10:]
    other.free()
    one.free(keeps_pages=True)
    assert one.tensor[0] == 7 and not other.tensor.any()
    other.allocate(one)
    moved = min(before, after) // 4096 * 4096
    assert (other.tensor[:moved] == 7).all() and not other.tensor[moved:].any()
    assert not one.tensor.any()
    one.allocate()
    for memory, view, value in ((one, views[0], 1), (other, views[1], 2)):
        memory.tensor.fill_(value)
        assert (view == value).all()
    assert (one.tensor == 1).all() and (other.tensor == 2).all() and (bystander.tensor == 5).all()


def mappings() -> list[tuple[int, int]]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [(int(start, 16), int(end, 16)) for start, end in (line.split()[0].split("-") for line in lines)]


@pytest.mark.parametrize(("before", "after"), [(NBYTES, NBYTES), (NBYTES, HUGE_PAGE), (HUGE_PAGE, NBYTES)])
def test_pages_move_from_one_mapping_at_a_time(before: int, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux before 6.17 moves no others. Huge pages and the rest of a memory are two mappings."""
    moves: list[tuple[int, int]] = []
    move = huge_pages._move

    def moved(mremap: Any, source: int, target: int, nbytes: int) -> bool:
        assert any(start <= source and source + nbytes <= end for start, end in mappings())
        moves.append((source, nbytes))
        return move(mremap, source, target, nbytes)

    monkeypatch.setattr(huge_pages, "_move", moved)
    one, other = filled(before, 7), filled(after, 9)
    one.free(keeps_pages=True)
    other.free()
    other.allocate(one)
    assert sum(nbytes for _, nbytes in moves) == min(before, after) // 4096 * 4096


def test_pages_in_use_are_not_taken() -> None:
    one, other = filled(NBYTES, 7), filled(NBYTES, 9)
    with pytest.raises(AssertionError):
        other.allocate(one)
    assert (one.tensor == 7).all() and (other.tensor == 9).all()


def test_pages_that_nobody_takes_go_back() -> None:
    one = filled(NBYTES, 7)
    one.free(keeps_pages=True)
    one.give_pages_back()
    assert not one.tensor.any()
    one.allocate(one)
    one.tensor.fill_(3)
    one.give_pages_back()  # not while it is allocated
    assert (one.tensor == 3).all()


def test_binding_returns_what_params_leave() -> None:
    """The device's blocks too, once for all params that are bound together."""
    asked: list[torch.device] = []
    params = [torch.nn.Parameter(torch.zeros(5)) for _ in range(3)]
    optimizer = ShardedSGD(params, lr=0.1)
    with patch("shardopt.domain.bind.return_free_memory", asked.append):
        for _ in range(2):
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer.step()
    assert asked == [torch.device("cpu")]
    with patch("torch.cuda.empty_cache") as empty_cache:
        return_free_memory(torch.device("cpu"))
        assert not empty_cache.called
        return_free_memory(torch.device("cuda", 1))
        assert empty_cache.call_count == 1


def test_small_memory_may_move() -> None:
    """``share_memory_()`` gives a tensor other memory: what is freed afterwards is there."""
    memory = Memory(100, torch.float32, torch.device("cpu"))
    memory.free()
    memory.allocate()
    memory.tensor.fill_(1).share_memory_()
    memory.free()
    assert memory.tensor.isnan().all()
