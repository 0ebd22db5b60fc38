"""The ring of slots that streams states through a device: on CPU tensors, with copies made early and late."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch

from shardopt import Offload, ShardedAdamW, Tuning
from shardopt.domain.relocate import relocate
from shardopt.kernels import native_backend
from shardopt.kernels.tables import Tables
from shardopt.offload.host import HostStore
from shardopt.offload.pinned import Pages
from shardopt.offload.ring import SLOTS, RingStore
from shardopt.offload.store import Chunk, Plane
from shardopt.offload.streams import CopyStreams
from shardopt.partition.memory import zeros
from tests.offload.test_offload import CHUNK, advance, bits, make
from tests.support.cases import CASES, Case
from tests.support.late_copies import AsLateAsAllowed, AtOnce, as_on_a_gpu


def on_cpu(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return zeros(numel, dtype, torch.device("cpu"))


def ring(copies: CopyStreams, register: Callable[[int, int], bool] | None = None) -> RingStore:
    return RingStore(torch.device("cpu"), copies, HostStore(Pages(on_cpu, register), CHUNK))


@pytest.mark.parametrize("copies", [AtOnce, AsLateAsAllowed])
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_every_rule_leaves_the_same_bits(case: Case, copies: Any) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        ends = []
        for streams in (False, True):
            params, optimizer = make(case.ours, None, dtype, **case.keywords[-1])
            advance(params, optimizer, range(1))
            assert optimizer.engine.domain is not None
            if streams:
                relocate(optimizer.engine.domain, "host", lambda: ring(copies()))
            found = []
            for step in range(1, 5):
                advance(params, optimizer, range(step, step + 1))
                if step % 2:  # between other steps nobody waits for what was written back
                    found.append(bits(params, optimizer))
            with torch.no_grad():
                params[-1][1000:1100] = 0.25
            advance(params, optimizer, range(5, 6))
            ends.append([*found, bits(params, optimizer)])
            optimizer.close()
        assert ends[0] == ends[1], dtype


@pytest.mark.parametrize("formats", [{"master": "split"}, {"state_format": "int8"}, {"state_format": "bf16"}], ids=repr)
def test_every_format_leaves_the_same_bits(formats: dict[str, str]) -> None:
    ends = []
    for copies in (None, AtOnce(), AsLateAsAllowed()):
        params, optimizer = make(ShardedAdamW, None, torch.bfloat16, **formats)
        advance(params, optimizer, range(1))
        if copies is not None:
            assert optimizer.engine.domain is not None
            relocate(optimizer.engine.domain, "host", lambda copies=copies: ring(copies))
        advance(params, optimizer, range(1, 5))
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        ends.append(bits(params, optimizer))
    assert ends[0] == ends[1] == ends[2]


def test_slots_are_all_that_the_device_holds() -> None:
    params, optimizer = make(ShardedAdamW, None, torch.bfloat16)
    advance(params, optimizer, range(1))
    assert optimizer.engine.domain is not None
    before = optimizer.memory()["buffer"]["device"]
    relocate(optimizer.engine.domain, "host", lambda: ring(AtOnce()))
    advance(params, optimizer, range(1, 3))
    assert 0 < optimizer.memory()["buffer"]["device"] - before <= SLOTS * 3 * CHUNK


@pytest.mark.parametrize("step", ["gpu", "cpu"])
def test_no_chunk_takes_another_kernel(step: Any) -> None:
    """Triton compiles one for tables whose addresses are multiples of 16 bytes, and one for others, at their launch."""
    addresses: list[int] = []

    def watched(spec: Any, number: int, streams: Any, tables: Tables) -> None:
        addresses.append(tables.gradients.row_of_block.data_ptr())
        launch(spec, number, streams, tables)

    launch, params = native_backend.run, [torch.nn.Parameter(torch.zeros(5 * 256)) for _ in range(2)]
    with as_on_a_gpu(AtOnce), patch.object(native_backend, "run", watched):
        optimizer = ShardedAdamW(params, offload=Offload(step=step), tuning=Tuning(chunk_bytes=1024))
        for _ in range(2):
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer.step()
    assert len(addresses) == 20 and not any(address % 16 for address in addresses)


def test_pages_are_registered_within_the_limit_and_given_back() -> None:
    registered: list[tuple[int, int]] = []

    def register(address: int, nbytes: int) -> bool:
        registered.append((address, nbytes))
        return len(registered) < 3

    pages = Pages(on_cpu, register)
    tensors = [pages.zeros(1 << 20, torch.float32) for _ in range(2)]
    assert pages.pinned_bytes == 8 << 20 and registered == [(each.data_ptr(), each.nbytes) for each in tensors]
    with pytest.warns(UserWarning, match="could not be pinned"):
        pages.zeros(1 << 20, torch.float32)
    pages.zeros(1 << 20, torch.float32)  # said once
    assert pages.pinned_bytes == 8 << 20
    others = Pages(on_cpu, lambda *_: True)  # of another optimizer, or of sums of gradients
    with patch("shardopt.offload.pinned.memory_limit", lambda: 15 << 20):
        others.zeros(1 << 18, torch.float32)
        with pytest.warns(UserWarning, match=f"beside {9 << 20} that are"):
            others.zeros(5 << 18, torch.float32)
    for each in (pages, others):
        each._registered.clear()  # there is no CUDA here to forget them


def test_what_is_written_behind_a_step_is_not_overwritten_by_it() -> None:
    store = ring(AsLateAsAllowed())
    home = store.home(1024, torch.float32, torch.device("cpu"))
    home.ensure({"exp_avg": Plane(torch.float32)})
    chunks = [Chunk(home, start, stop, ("exp_avg",), torch.empty(0)) for start, stop in home.chunks()]
    store.prefetch(chunks)
    for chunk in chunks:
        (stream,) = store.fetch(chunk).streams
        stream.fill_(1.0)
        store.write_back(chunk)
    store.flush()
    home.write("exp_avg", 0, torch.full((1024,), 2.0))
    assert home.read("exp_avg", 0, 1024).eq(2.0).all()
