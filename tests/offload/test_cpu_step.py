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

from shardopt import BindingError, Offload, ShardedAdafactor, ShardedAdamW, ShardedLAMB, ShardedOptimizer, Tuning
from shardopt.domain.tiers import check_offload, for_updates
from shardopt.kernels import pool
from shardopt.offload.measured import MeasuredStore
from shardopt.offload.pinned import Pages
from shardopt.offload.store import Chunk, Fetched
from tests.offload.test_offload_faults import FAULTS, disturbed, undisturbed
from tests.offload.test_params_on_disk import goes_through_everything
from tests.step.test_stages import STAGES
from tests.support.cases import CASES, Case
from tests.support.late_copies import AsLateAsAllowed, AtOnce, as_on_a_gpu
from tests.support.offloaded import CHUNK, advance, at_rest, bits, check_trainings, make, on_a_gpu
from tests.support.ranks import Pool
from tests.support.sweep import Row, sweep, sweep_at_once
from tests.support.training import raw


def ways(root: Path) -> dict[str, Offload]:
    return {
        "cpu": Offload(step="cpu"),
        "auto": Offload(),
        "disk": Offload(root),
        "part": Offload(fraction=0.5),
        "part on disk": Offload(root, fraction=0.5),
    }


# -- one rank ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_every_rule_leaves_the_same_bits(case: Case, tmp_path: Path) -> None:
    whole, parts = (
        [Offload(step="cpu"), Offload(tmp_path)],
        [Offload(step="gpu", fraction=0.4), Offload(tmp_path, fraction=0.6)],
    )
    for number, dtype in enumerate((torch.float32, torch.bfloat16)):
        ends, turn = [], (CASES.index(case) + number) % 2  # over all cases every tier meets every dtype
        for offload in (None, whole[turn], parts[1 - turn]):
            with nullcontext() if offload is None else on_a_gpu():
                params, optimizer = make(case.ours, offload, dtype, **case.keywords[-1])
                found = []
                for step in range(5):
                    advance(params, optimizer, range(step, step + 1))
                    if step in (2, 4):  # reading waits for what is on its way
                        found.append(bits(params, optimizer))
                ends.append(found)
                optimizer.close()
        assert ends[0] == ends[1] == ends[2], (dtype, turn)


FORMATS = [
    {},
    {"master": "split", "state_format": "int8"},
    {"master": "split24", "state_format": "bf16", "ema": 0.9},
    {"master": "none", "state_format": "int8"},
]


@sweep({"formats": FORMATS, "streams": (AsLateAsAllowed, AtOnce)}, strength=1)
def test_every_way_to_write_params_is_followed(formats: dict[str, Any], streams: Any, tmp_path: Path) -> None:
    """What the CPU knows of the params must never be put over what others wrote to them."""
    ends: dict[str, list[list[bytes]]] = {}
    for name, offload in ({"still": None} | ways(tmp_path)).items():
        with nullcontext() if offload is None else as_on_a_gpu(streams):
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
            advance(params, optimizer, range(10, 11))
            found.append(bits(params, optimizer))
            saved = copy.deepcopy((params, optimizer.state_dict()))
            advance(params, optimizer, range(11, 13))
            for param, before in zip(params, saved[0], strict=True):
                param.data.copy_(before.data)
            optimizer.load_state_dict(saved[1])
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
    assert os.listdir(tmp_path) == ["elsewhere"] and not os.listdir(tmp_path / "elsewhere")


@pytest.mark.parametrize("kind", [ShardedAdafactor, ShardedLAMB])
def test_all_passes_of_a_step_run_in_one_place(kind: type[ShardedOptimizer]) -> None:
    """Three whole steps run on the device, three on the CPU, and then those of the faster one."""
    places, fetch = set[bool](), MeasuredStore.fetch

    def noting(store: MeasuredStore, chunk: Chunk) -> Fetched:
        places.add(chunk.home.updates_on_host)
        return fetch(store, chunk)

    found = []
    with on_a_gpu(), patch.object(MeasuredStore, "fetch", noting):
        params, optimizer = make(kind, Offload(), torch.bfloat16)
        for step in range(8):
            places.clear()
            advance(params, optimizer, [step])
            found.append(set(places))
        optimizer.close()
    assert found[:6] == [{False}] * 3 + [{True}] * 3
    assert len(found[6]) == 1 and found[7] == found[6]


@sweep({"master": ("split", "fp32", "none"), "streams": (AsLateAsAllowed, AtOnce)}, strength=1)
def test_params_without_a_whole_master_are_what_the_device_says(master: Any, streams: Any, tmp_path: Path) -> None:
    """A write through ``.data`` leaves no trace, and counts where the update begins with the param."""
    dtype = torch.float32 if master == "fp32" else torch.bfloat16  # an fp32 param is its own master
    ends: dict[str, list[bytes]] = {}
    for name, offload in ({"still": None} | ways(tmp_path)).items():
        with nullcontext() if offload is None else as_on_a_gpu(streams):
            params, optimizer = make(ShardedAdamW, offload, dtype, master=master)
            for step in range(8):
                advance(params, optimizer, [step])
                for param in params:
                    param.data.clamp_(-0.1, 0.1)
            ends[name] = bits(params, optimizer)
            optimizer.close()
    assert [name for name, end in ends.items() if end != ends["still"]] == []


@pytest.mark.parametrize("streams", [AtOnce, AsLateAsAllowed])
def test_params_that_get_no_gradient_are_let_alone(streams: Any, tmp_path: Path) -> None:
    """What is written to them through ``.data`` stays, in whatever chunk of others they lie."""
    ends: dict[str, list[bytes]] = {}
    for name, offload in ({"still": None} | ways(tmp_path)).items():
        with nullcontext() if offload is None else as_on_a_gpu(streams):
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
            (streams,) = [each for each in made if each.last]  # sums of gradients would have streams of their own
            assert streams.uploads and not streams.last["in"].is_over
            made.clear()
            optimizer.close()
            assert streams.last["in"].is_over


def test_a_step_that_fails_leaves_params_on_the_device_as_they_were(tmp_path: Path) -> None:
    expected = undisturbed()
    for kind, fault in [each for each in FAULTS if each[1] in ("EIO", "ENOSPC", "flip")]:
        with on_a_gpu():
            count = disturbed(str(tmp_path), kind, fault, 5, expected)
        assert count >= (5 if kind in ("read", "write") else 1), (kind, fault)
    assert not os.listdir(tmp_path)


def test_only_gradients_and_written_chunks_come_down_and_only_params_go_up() -> None:
    moved = {"down": 0, "up": 0}

    class Counting(AtOnce):
        def to_device(self, copies: Any, after: Any) -> None:
            moved["up"] += sum(source.nbytes for _, source in copies)
            super().to_device(copies, after)

        def to_host(self, copies: Any, after: Any) -> None:
            moved["down"] += sum(source.nbytes for _, source in copies)
            AtOnce.to_device(self, copies, after)

    numel = 40 * 1024
    params = [Parameter(torch.ones(1024, dtype=torch.bfloat16)) for _ in range(40)]
    tuning = Tuning(chunk_bytes=8 * CHUNK)
    with as_on_a_gpu(Counting):
        optimizer = ShardedAdamW(params, offload=Offload(step="cpu"), tuning=tuning)
        chunk = 2 * CHUNK  # elements
        # Used params, chunks with some of them, and how many of these something else has written: all, as it begins.
        for used, chunks, written in ((params, 5, 5), (params[3:7], 1, 0), (params[1:], 5, 0), (params, 5, 2)):
            for param in params:
                param.grad = torch.ones_like(param) if any(param is each for each in used) else None
            if written == 2:
                params[0].data[1], params[39].data[-1] = 0.25, 0.5
            moved.update(down=0, up=0)
            optimizer.step()
            flags = 1 * chunks  # True for one that was written
            assert moved == {"down": 2 * (1024 * len(used) + chunk * written) + flags, "up": 2 * 1024 * len(used)}
        memory = optimizer.memory()
    assert memory["master"] == {"host": 4 * numel} and memory["state"] == {"host": 8 * numel}
    assert memory["buffer"]["host"] <= 2 * numel + 3 * (8 * CHUNK // 2 + 256)


def test_the_cpu_step_has_the_ranks_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun gives one thread to each of several ranks; a number that somebody else gave stays."""
    used: set[int] = set()
    run_in_turn, before = pool._run_in_turn, torch.get_num_threads()
    monkeypatch.setattr(pool, "BLOCKS_PER_RANGE", 1)
    monkeypatch.setattr(pool, "_run_in_turn", lambda *given: used.add(given[-1]) or run_in_turn(*given))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(13)))
    rows: list[tuple[Any, int, str | None, int]] = [
        ("cpu", 1, "4", 3),
        ("cpu", 1, "99", 1),
        ("cpu", 2, "4", 2),
        ("cpu", 1, None, 1),
        ("gpu", 1, "4", 1),  # its kernel is the native one here
    ]
    try:
        for step, threads, ranks, expected in rows:
            used.clear()
            torch.set_num_threads(threads)
            with monkeypatch.context() as local:
                local.delenv("LOCAL_WORLD_SIZE", raising=False)
                if ranks is not None:
                    local.setenv("LOCAL_WORLD_SIZE", ranks)
                param = Parameter(torch.zeros(20 * 256))
                with as_on_a_gpu(AtOnce):
                    optimizer = ShardedAdamW([param], offload=Offload(step=step))
                    param.grad = torch.ones_like(param)
                    optimizer.step()
                    update = set(used)
            assert max(update) == expected and update <= {threads, expected}, (step, threads, ranks)
    finally:
        torch.set_num_threads(before)


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
            stack.enter_context(on_a_gpu())
            stack.enter_context(patch("shardopt.domain.tiers.Pages", Watched))
            stack.enter_context(
                patch("shardopt.domain.tiers.register_with_cuda", lambda at, _: not there.setdefault(at, []))
            )
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
    for offload in (Offload(tmp_path), Offload(step="cpu")):
        with pytest.raises(BindingError, match="which would wait for the CPU"):
            check_offload(offload, gpu, in_backward=True)
    check_offload(Offload(), gpu, in_backward=True)
    ways = [
        for_updates(Offload(), torch.device(device), released)
        for device in ("cuda", "cpu")
        for released in (True, False)
    ]
    assert [each and each.step for each in ways] == ["gpu", "auto", "auto", "auto"]


# -- several ranks -----------------------------------------------------------------------------------------------------


RECIPES = ("clips in the step", "SGD", "overflows")


@sweep_at_once({"stage": STAGES, "neighbours": (True, False), "way": tuple(ways(Path())), "recipe": RECIPES})
def test_every_stage_leaves_the_same_bits(rows: list[Row], ranks: Pool, tmp_path: Path) -> None:
    calls = [
        (recipe, at_rest(stage, neighbours, stage % 2 == 0, live_bytes=6000, offload=ways(tmp_path / str(stage))[way]))
        for stage, neighbours, way, recipe in rows
    ]
    check_trainings(calls, ranks, 2, on_a_gpu)
    # Nothing was closed; at stage 3 a sharded module keeps its optimizer until it is.
    assert not any(os.listdir(tmp_path / stage) for stage in "012")


def with_params(root: Path) -> dict[str, Offload]:
    away = {step: Offload(params="cpu", step=step) for step in ("cpu", "gpu", "auto")}
    part = {"part": Offload(params="cpu", fraction=0.5), "part on disk": Offload(root, params=root, fraction=0.5)}
    return {**away, **part, "disk": Offload(root, params=root)}


@sweep_at_once({"way": tuple(with_params(Path())), "live_bytes": (6000, 1 << 20), "recipe": RECIPES}, strength=1)
def test_params_elsewhere_leave_the_same_bits(rows: list[Row], ranks: Pool, tmp_path: Path) -> None:
    """At stage 3, without reading each other's memory, as what rests elsewhere is in none."""
    calls = [
        (recipe, at_rest(3, neighbours=False, live_bytes=live, offload=with_params(tmp_path)[way]))
        for way, live, recipe in rows
    ]
    check_trainings(calls, ranks, 2, on_a_gpu)


def everything(offload: Offload | None, runs: str, low: bool) -> list[list[bytes]]:
    with nullcontext() if offload is None else on_a_gpu():
        return goes_through_everything(offload, f"{runs} {dist.is_initialized()}", low)


EVERYTHING = {"world": (2, 1), "low": (True, False), "way": ("cpu", "params", "disk", "params on disk", "part")}


@sweep_at_once(EVERYTHING, strength=1)
def test_every_way_to_params_at_stage_3_leaves_the_same_bits(rows: list[Row], ranks: Pool, tmp_path: Path) -> None:
    swap = tmp_path / "swap"
    offloads = {
        "cpu": Offload(step="cpu"),
        "params": Offload(params="cpu"),
        "disk": Offload(swap),
        "params on disk": Offload(swap, params=swap),
        "part": Offload(swap, fraction=0.5),
    }
    for world, low in dict.fromkeys(row[:2] for row in rows):
        expected = ranks.run(everything, None, str(tmp_path / f"runs {world} {low}"), low, world=world)
        for way in [row[2] for row in rows if row[:2] == (world, low)]:
            found = ranks.run(everything, offloads[way], str(tmp_path / f"{world} {low} {way}"), low, world=world)
            for mine, theirs in zip(found, expected, strict=True):
                assert [a == b for a, b in zip(mine, theirs, strict=True)] == [True] * len(theirs), (world, low, way)
    assert not os.listdir(swap)
