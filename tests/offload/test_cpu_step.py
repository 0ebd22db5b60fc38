"""States in host memory or on a disk, params on a GPU: the update runs on the CPU, or where it is faster.

A GPU of CPU tensors (``late_copies.py``): gradients come down and params go up as late as the stores allow.
"""

import copy
import gc
import logging
import os
import weakref
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from shardopt import BindingError, Offload, ShardedAdamW, Tuning
from shardopt.offload.lanes import AtOnce
from shardopt.offload.pinned import Pages
from shardopt.tiers import check_offload
from tests.offload.test_offload import CHUNK, RECIPES, Resting, advance, bits, make
from tests.offload.test_offload_faults import FAULTS, disturbed, undisturbed
from tests.offload.test_params_on_disk import goes_through_everything
from tests.step.test_stages import Setting, train
from tests.support.cases import CASES, Case
from tests.support.late_copies import AsLateAsAllowed, as_on_a_gpu
from tests.support.ranks import Pool
from tests.support.training import raw


def ways(root: Path | str) -> dict[str, Offload]:
    return {
        "cpu": Offload(step="cpu"),
        "auto": Offload(),
        "disk": Offload(root),
        "half": Offload(step="cpu", fraction=0.5),
        "half on disk": Offload(root, fraction=0.5),
    }


# -- one rank ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_every_rule_leaves_the_same_bits(case: Case, tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        ends = []
        for offload in (None, Offload(step="cpu"), Offload(tmp_path)):
            with nullcontext() if offload is None else as_on_a_gpu(AsLateAsAllowed):
                params, optimizer = make(case.ours, offload, dtype, **case.keywords[-1])
                found = []
                for step in range(5):
                    advance(params, optimizer, range(step, step + 1))
                    found.append(bits(params, optimizer))
                ends.append(found)
                optimizer.close()
        assert ends[0] == ends[1] == ends[2], dtype


FORMATS = [
    {},
    {"master": "split", "state_format": "int8"},
    {"master": "split24", "state_format": "bf16", "ema": 0.9},
    {"master": "none", "state_format": "int8"},
]


@pytest.mark.parametrize("lanes", [AtOnce, AsLateAsAllowed])
@pytest.mark.parametrize("formats", FORMATS, ids=repr)
def test_every_way_to_write_params_is_followed(formats: dict[str, Any], lanes: Any, tmp_path: Path) -> None:
    """What the CPU knows of the params must never be put over what others wrote to them."""
    ends: dict[str, list[list[bytes]]] = {}
    for name, offload in ({"still": None} | ways(tmp_path)).items():
        with nullcontext() if offload is None else as_on_a_gpu(lanes):
            params, optimizer = make(ShardedAdamW, offload, torch.bfloat16, **formats)
            found = ends[name] = []
            for step in range(7):  # "auto" goes from one way to the other behind the third
                advance(params, optimizer, range(step, step + 1))
                if step in (0, 4, 6):  # reading waits for what is on its way
                    found.append(bits(params, optimizer))
            with torch.no_grad():
                params[-1][1000:1100] = 0.25
            advance(params, optimizer, range(7, 8))  # without a gradient for the last one
            advance(params, optimizer, range(8, 9))
            found.append(bits(params, optimizer))
            params[-1].data[10:20] = 0.5
            optimizer.refresh_masters()
            advance(params, optimizer, range(10, 11))
            found.append(bits(params, optimizer))
            saved = copy.deepcopy((params, optimizer.state_dict()))
            advance(params, optimizer, range(11, 13))
            for param, before in zip(params, saved[0], strict=True):
                param.data.copy_(before.data)
            optimizer.load_state_dict(saved[1])
            optimizer.refresh_masters()
            advance(params, optimizer, range(13, 15))
            found.append(bits(params, optimizer))
            if offload is not None:  # every move, to every other place
                for to in ("cpu", tmp_path / "elsewhere", None):
                    optimizer.reload() if to is None else optimizer.offload(to)
                    advance(params, optimizer, range(15, 16))
            else:
                advance(params, optimizer, (15, 15, 15))
            if formats.get("ema"):
                with optimizer.unsharded(ema=True):
                    found.append([raw(param) for param in params])
            advance(params, optimizer, range(16, 17))
            found.append(bits(params, optimizer))
            optimizer.close()
    for name, found in ends.items():
        assert [mine == theirs for mine, theirs in zip(found, ends["still"], strict=True)] == [True] * len(found), name
    assert not any(os.listdir(each) for each in (tmp_path, tmp_path / "elsewhere") if each != tmp_path)


@pytest.mark.parametrize("lanes", [AtOnce, AsLateAsAllowed])
def test_params_without_a_whole_master_are_what_the_device_says(lanes: Any, tmp_path: Path) -> None:
    """A write through ``.data`` leaves no trace, and counts where the update begins with the param."""
    for dtype, master in ((torch.float32, "fp32"), (torch.bfloat16, "split"), (torch.bfloat16, "none")):
        ends: dict[str, list[bytes]] = {}
        for name, offload in ({"still": None} | ways(tmp_path)).items():
            with nullcontext() if offload is None else as_on_a_gpu(lanes):
                params, optimizer = make(ShardedAdamW, offload, dtype, master=master)
                for step in range(8):
                    advance(params, optimizer, range(step, step + 1))
                    for param in params:
                        param.data.clamp_(-0.1, 0.1)
                ends[name] = bits(params, optimizer)
                optimizer.close()
        assert [name for name, end in ends.items() if end != ends["still"]] == [], (dtype, master)


@pytest.mark.parametrize("lanes", [AtOnce, AsLateAsAllowed])
def test_params_that_get_no_gradient_are_let_alone(lanes: Any, tmp_path: Path) -> None:
    """What is written to them through ``.data`` stays, in whatever chunk of others they lie."""
    ends: dict[str, list[bytes]] = {}
    for name, offload in ({"still": None} | ways(tmp_path)).items():
        with nullcontext() if offload is None else as_on_a_gpu(lanes):
            params = [Parameter(torch.linspace(-1, 1, n).to(torch.bfloat16)) for n in (300, 5, 256, 1, 2500, 0, 700)]
            optimizer = ShardedAdamW(params, lr=1e-2, offload=offload, tuning=Tuning(chunk_bytes=CHUNK))
            for step in range(8):
                for index, param in enumerate(params):
                    param.grad = torch.ones_like(param) if not step or index % 3 != step % 3 else None
                    if param.grad is None:
                        param.data.fill_(step)
                optimizer.step()
            ends[name] = bits(params, optimizer)
            optimizer.close()
    assert [name for name, end in ends.items() if end != ends["still"]] == []


def test_a_step_does_not_wait_for_params_on_their_way_up(tmp_path: Path) -> None:
    made: list[AsLateAsAllowed] = []

    class Watched(AsLateAsAllowed):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    for offload in (Offload(step="cpu"), Offload(tmp_path)):
        with as_on_a_gpu(Watched):
            params, optimizer = make(ShardedAdamW, offload, torch.bfloat16)
            advance(params, optimizer, range(3))
            (lanes,) = [each for each in made if each.last]  # sums of gradients would have lanes of their own
            assert lanes.uploads and not lanes.last["in"].is_over
            made.clear()
            optimizer.close()
            assert lanes.last["in"].is_over


@pytest.mark.parametrize(("kind", "fault"), [each for each in FAULTS if each[1] in ("EIO", "ENOSPC", "flip")])
def test_a_step_that_fails_leaves_params_on_the_device_as_they_were(kind: str, fault: str, tmp_path: Path) -> None:
    expected, calls = undisturbed(), 0
    with as_on_a_gpu(AsLateAsAllowed):
        while True:
            failed = disturbed(str(tmp_path), kind, fault, 5 * calls, expected)
            if failed < 0:
                break
            assert failed == (fault != "flip")
            calls += 1
    assert calls >= (2 if kind in ("read", "write") else 1)
    assert not os.listdir(tmp_path)


def test_only_gradients_come_down_and_only_params_go_up() -> None:
    moved = {"down": 0, "up": 0}

    class Counting(AtOnce):
        def bring(self, copies: Any, behind: Any) -> None:
            moved["up"] += sum(each.source.nbytes for each in copies)
            super().bring(copies, behind)

        def take(self, copies: Any, behind: Any) -> None:
            moved["down"] += sum(each.source.nbytes for each in copies)
            AtOnce.bring(self, copies, behind)

    numel = 40 * 1024
    params = [Parameter(torch.ones(1024, dtype=torch.bfloat16)) for _ in range(40)]
    tuning = Tuning(chunk_bytes=8 * CHUNK)
    with as_on_a_gpu(Counting):
        optimizer = ShardedAdamW(params, offload=Offload(step="cpu"), tuning=tuning)
        for used in (params, params[3:7], params[1:]):
            for param in params:
                param.grad = torch.ones_like(param) if any(param is each for each in used) else None
            moved.update(down=0, up=0)
            optimizer.step()
            assert moved == {"down": 2 * 1024 * len(used), "up": 2 * 1024 * len(used)}
        memory = optimizer.memory()
    assert memory["master"] == {"host": 4 * numel} and memory["state"] == {"host": 8 * numel}
    assert memory["buffer"]["host"] <= 2 * numel + 3 * 8 * CHUNK // 2


@pytest.mark.parametrize("ends", ["moved", "dropped"])
@pytest.mark.parametrize("step", ["gpu", "cpu", "auto"])
def test_no_page_stays_registered_that_is_gone(step: Any, ends: str, tmp_path: Path) -> None:
    """Without the garbage collector: whoever gets the same address before that could not register it."""
    there: dict[int, list[weakref.ref[Tensor]]] = {}  # registered address -> what lies there
    freed: list[int] = []  # before they were unregistered

    class Watched(Pages):
        def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
            tensor = super().zeros(numel, dtype)
            if tensor.data_ptr() in there:
                there[tensor.data_ptr()].append(weakref.ref(tensor))
            return tensor

    def unregister(registered: dict[int, int]) -> None:
        for address in list(registered):
            freed.extend([address] * (there.pop(address)[0]() is None))
            del registered[address]

    gc.disable()
    try:
        with ExitStack() as stack:
            stack.enter_context(as_on_a_gpu(AsLateAsAllowed))
            stack.enter_context(patch("shardopt.tiers.Pages", Watched))
            stack.enter_context(patch("shardopt.tiers.register_with_cuda", lambda at, _: not there.setdefault(at, [])))
            stack.enter_context(patch("shardopt.offload.pinned._unregister", unregister))
            param = Parameter(torch.zeros(1 << 17))
            optimizer = ShardedAdamW([param], offload=Offload(step=step))
            for _ in range(5):  # "auto" is on the CPU by then
                param.grad = torch.ones_like(param)
                optimizer.step()
            assert len(there) >= 2
            if ends == "moved":
                optimizer.offload(tmp_path)
                assert not there and not freed
            del optimizer
            assert not there
    finally:
        gc.enable()


def test_measured_steps_say_which_way_they_took_and_why(caplog: pytest.LogCaptureFixture) -> None:
    with as_on_a_gpu(AtOnce), caplog.at_level(logging.INFO, "shardopt"):
        params, optimizer = make(ShardedAdamW, "cpu", torch.bfloat16)
        advance(params, optimizer, range(5))
        assert "step=" not in repr(optimizer.timings())
        advance(params, optimizer, range(5, 8))
        (said,) = [each.getMessage() for each in caplog.records]
        told = repr(optimizer.timings())
    for text in (said, told):
        assert ("step='gpu'" in text or "step='cpu'" in text) and "gpu " in text and "cpu " in text and " ms" in text


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    gpu = torch.device("cuda")
    for offload, told in (
        (Offload(tmp_path, step="gpu"), "updated by the CPU"),
        (Offload(tmp_path, params="cpu"), "params="),
    ):
        with pytest.raises(BindingError, match=told):
            check_offload(offload, gpu)
    for offload in (Offload(tmp_path), Offload(step="cpu"), Offload(params="cpu"), Offload(tmp_path, params=tmp_path)):
        check_offload(offload, gpu)


# -- several ranks -----------------------------------------------------------------------------------------------------


def ends(stage: int, offload: Any, neighbours: bool) -> list[Tensor]:
    """Params on each rank, and states on rank 0, of all recipes."""
    where: dict[str, Any] = {"stage": stage, "neighbours": neighbours, "wrapped": stage % 2 == 0, "live_bytes": 6000}
    setting = Setting(**where) if offload is None else Resting(**where, offload=offload)
    found = []
    for recipe in RECIPES.values():
        with nullcontext() if offload is None else as_on_a_gpu(AsLateAsAllowed):
            ended = train(recipe, setting)
        found += [*ended.params, *(value for state in ended.states for value in state.values())]
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_leaves_the_same_bits(stage: int, ranks: Pool, tmp_path: Path) -> None:
    grid = [(each, True) for each in ways(str(tmp_path)).values()]
    if stage == 3:  # without reading each other's memory, as what rests elsewhere is in none
        expected = ranks.run(ends, stage, None, False, world=2)
        away = [Offload(params="cpu", step=step) for step in ("cpu", "gpu", "auto")]
        for offload in (*away, Offload(params="cpu", fraction=0.5), Offload(str(tmp_path), params=str(tmp_path))):
            compare(ranks.run(ends, stage, offload, False, world=2), expected, offload)
    expected = ranks.run(ends, stage, None, True, world=2)
    for offload, neighbours in grid:
        compare(ranks.run(ends, stage, offload, neighbours, world=2), expected, offload)
    # Nothing was closed; at stage 3 a sharded module keeps its optimizer until it is.
    assert stage == 3 or not os.listdir(tmp_path)


def compare(found: list[list[Tensor]], expected: list[list[Tensor]], offload: Offload) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert len(mine) == len(theirs) > 10
        assert all(raw(one) == raw(other) for one, other in zip(mine, theirs, strict=True)), offload


def everything(offload: Offload | None, runs: str, low: bool) -> list[list[bytes]]:
    with nullcontext() if offload is None else as_on_a_gpu(AsLateAsAllowed):
        return goes_through_everything(offload, f"{runs} {dist.is_initialized()}", low)


@pytest.mark.parametrize("world", [1, 2])
def test_every_way_to_params_at_stage_3_leaves_the_same_bits(world: int, ranks: Pool, tmp_path: Path) -> None:
    swap = str(tmp_path / "swap")
    for low in (True, False):
        expected = ranks.run(everything, None, str(tmp_path / f"runs {low}"), low, world=world)
        for number, offload in enumerate(
            (Offload(params="cpu"), Offload(step="cpu"), Offload(swap), Offload(swap, params=swap))
        ):
            found = ranks.run(everything, offload, str(tmp_path / f"away {low} {number}"), low, world=world)
            for mine, theirs in zip(found, expected, strict=True):
                assert [a == b for a, b in zip(mine, theirs, strict=True)] == [True] * len(theirs), offload
    assert not os.listdir(swap)
