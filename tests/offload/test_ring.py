"""The ring of slots that streams states through a device: on CPU tensors, with copies made early and late."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
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
from shardopt.step.update_in_backward import UpdateInBackward
from tests.offload.test_offload import CHUNK, advance, bits, make
from tests.support.cases import CASES, Case
from tests.support.late_copies import AsLateAsAllowed, AtOnce, as_on_a_gpu
from tests.support.ranks import Pool
from tests.support.training import raw


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


def test_what_is_written_behind_a_copy_to_the_host_is_not_overwritten_by_it() -> None:
    store = HostStore(Pages(on_cpu, None), CHUNK, AsLateAsAllowed(), torch.device("cpu"))  # type: ignore[arg-type]
    home = store.home(1024, torch.float32, torch.device("cpu"))
    home.ensure({"exp_avg": Plane(torch.float32)})
    store.copy_in(torch.ones(1024), home.streams["exp_avg"])
    home.write("exp_avg", 0, torch.full((512,), 2.0))
    assert home.read("exp_avg", 0, 1024).tolist() == [2.0] * 512 + [1.0] * 512


# -- the first chunks of a step are loaded when the step before it ends ------------------------------------------------


class Numbered(AsLateAsAllowed):
    """Notes how many copies to the device had been asked for when kernels waited for one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.number_of: dict[Any, int] = {}
        self.waits: list[int] = []
        numbered.append(self)

    def to_device(self, copies: Any, after: Any) -> Any:
        mark = super().to_device(copies, after)
        self.number_of[mark] = self.asked
        self.asked += 1
        return mark

    def wait(self, mark: Any) -> None:
        if mark in self.number_of:
            self.waits.append(self.number_of[mark])
        super().wait(mark)


numbered: list[Numbered] = []


def test_the_first_chunks_are_under_way_before_the_step_begins() -> None:
    numbered.clear()
    params = [torch.nn.Parameter(torch.zeros(6 * 1024))]
    with as_on_a_gpu(Numbered):
        optimizer = ShardedAdamW(params, offload=Offload(step="gpu"), tuning=Tuning(chunk_bytes=4096))
        counts = []
        for _ in range(4):
            params[0].grad = torch.ones_like(params[0])
            (streams,) = numbered or [None]
            before = streams.asked if streams else 0
            first = len(streams.waits) if streams else 0
            optimizer.step()
            (streams,) = numbered
            early = sum(number < before for number in streams.waits[first:])
            counts.append((early, streams.asked - before))
        assert counts == [(0, 6 + SLOTS), (SLOTS, 6), (SLOTS, 6), (SLOTS, 6)]
        optimizer.close()


def load(params: list[torch.nn.Parameter], optimizer: Any) -> None:
    optimizer.load_state_dict(optimizer.state_dict())
    for state in optimizer.state.values():
        state["exp_avg"].mul_(2)


def write_to_what_is_read(params: list[torch.nn.Parameter], optimizer: Any) -> None:
    for shard in optimizer.engine.domain.shards:
        shard.home.read("exp_avg", 0, 256).mul_(2)


def zero_states(params: list[torch.nn.Parameter], optimizer: Any) -> None:
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        state["exp_avg"] = torch.zeros_like(state["exp_avg"])
    optimizer.load_state_dict(saved)


def write_params(params: list[torch.nn.Parameter], optimizer: Any) -> None:
    with torch.no_grad():
        for param in params:
            param.mul_(0.5)
    optimizer.refresh_masters()


def write_alone(params: list[torch.nn.Parameter], optimizer: Any) -> None:
    for shard in optimizer.engine.domain.shards:
        shard.home.write("exp_avg", 0, torch.full((256,), 0.5))


@pytest.mark.parametrize("act", [load, write_to_what_is_read, write_alone, zero_states, write_params])
def test_what_is_written_before_the_step_is_loaded_anew(act: Any) -> None:
    ends = []
    for copies in (None, AsLateAsAllowed):
        with nullcontext() if copies is None else as_on_a_gpu(copies):
            offload = None if copies is None else Offload(step="gpu")
            params, optimizer = make(ShardedAdamW, offload, torch.bfloat16)
            advance(params, optimizer, range(6))
            act(params, optimizer)
            advance(params, optimizer, range(6, 8))
            ends.append(bits(params, optimizer))
            optimizer.close()
    assert [mine == theirs for mine, theirs in zip(*ends, strict=True)] == [True] * len(ends[0])


def test_chunks_are_loaded_ahead_again_once_nobody_holds_what_was_read() -> None:
    streams = AtOnce()
    store = ring(streams)
    home = store.home(1024, torch.float32, torch.device("cpu"))
    home.ensure({"exp_avg": Plane(torch.float32)})
    held = home.read("exp_avg", 0, 256)
    assert home.is_shown
    view = held.view(2, 128)
    del held
    assert home.is_shown
    del view
    assert not home.is_shown
    home.read_into("exp_avg", 0, torch.empty(256))
    assert not home.is_shown


def test_nobody_passes_by_a_copy_that_another_thread_waits_for() -> None:
    """A thread that answers other ranks waits for the copy; what comes meanwhile on the main thread waits too."""

    waited_for: list[str] = []

    class Nested(AtOnce):
        def to_host(self, copies: Any, after: Any) -> Any:
            return "stored"

        def now(self) -> Any:
            return "now"

        def synchronize(self, mark: Any) -> None:
            waited_for.append(mark)
            if len(waited_for) == 1:
                home.read("exp_avg", 0, 256)

    store = ring(Nested())
    home = store.home(256, torch.float32, torch.device("cpu"))
    home.ensure({"exp_avg": Plane(torch.float32)})
    chunk = Chunk(home, 0, 256, ("exp_avg",), None)
    store.prefetch([chunk])
    store.fetch(chunk)
    store.write_back(chunk)
    home.read("exp_avg", 0, 256)
    assert waited_for == ["stored", "stored"]


def test_the_first_copy_to_a_new_slot_waits_for_kernels() -> None:
    """Its memory may be another's that kernels still use: also where an earlier step has made fewer slots."""
    waited_for: list[str] = []

    class Told(AtOnce):
        def now(self) -> Any:
            return "kernels"

        def to_device(self, copies: Any, after: Any) -> Any:
            waited_for.append(after)
            return "loaded"

        def to_host(self, copies: Any, after: Any) -> Any:
            return "stored"

    store = ring(Told())
    home = store.home(512, torch.float32, torch.device("cpu"))
    home.ensure({"exp_avg": Plane(torch.float32)})
    one, other = (Chunk(home, start, start + 256, ("exp_avg",), None) for start in (0, 256))
    store.prefetch([one])
    store.fetch(one)
    store.write_back(one)
    store.prefetch([one, other])
    assert waited_for == ["kernels", "stored", "kernels"]


# -- buckets that are updated in backward ------------------------------------------------------------------------------

WIDTH, LAYERS = 48, 6  # of a bucket each: two chunks and a piece


def stack() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).bfloat16()


def wrap(model: torch.nn.Module, **options: Any) -> ShardedAdamW:
    tuning = Tuning(bucket_bytes=2 * WIDTH * WIDTH, chunk_bytes=4096, keep_below=0, compress_from=256, timeout=60)
    return ShardedAdamW(model, lr=1e-2, tuning=tuning, **options)


def backward(model: torch.nn.Module, step: int) -> None:
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    x = torch.sin(torch.arange(4.0 * WIDTH) + 7 * step + 3 * rank).view(4, WIDTH).bfloat16()
    model(x).float().square().mean().backward()


def ends_of(copies: Any, **options: Any) -> list[bytes]:
    """Params and states after some steps; in between states are loaded, and weights written."""
    with nullcontext() if copies is None else as_on_a_gpu(copies):
        model = stack()
        optimizer = wrap(model, **options)
        for step in range(6):
            if step == 3:
                optimizer.load_state_dict(optimizer.state_dict())
            if step == 4:
                with torch.no_grad(), optimizer.unsharded():
                    model[2].weight.mul_(0.5)  # type: ignore[operator, union-attr]
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        states = [value for state in optimizer.state.values() for _, value in sorted(state.items())]
        with optimizer.unsharded():
            found = [raw(each) for each in (*model.parameters(), *states)]
        optimizer.close()
    return found


def leave_the_same_bits(stages: Sequence[int]) -> None:
    for stage in stages:
        expected = ends_of(None, stage=stage)
        rests = [Offload(step="gpu"), Offload(step="gpu", fraction=0.5)]
        rests += [Offload(step="gpu", params="cpu")] if stage == 3 else []
        for number, offload in enumerate(rests):
            copies = (AsLateAsAllowed, AtOnce)[(stage + number) % 2]
            assert ends_of(copies, stage=stage, offload=offload, release_gradients=True) == expected, (stage, offload)
    if 2 in stages:
        options = {"stage": 2, "state_format": "int8", "max_grad_norm": 0.01, "clip_by": "previous"}
        expected = ends_of(None, **options)
        assert ends_of(AsLateAsAllowed, **options, offload=Offload(step="gpu"), release_gradients=True) == expected


@pytest.mark.parametrize(("world", "stages"), [(1, (0, 3)), (2, (1, 2, 3))])
def test_buckets_that_are_updated_in_backward_leave_the_same_bits(
    world: int, stages: Sequence[int], ranks: Pool
) -> None:
    ranks.run(leave_the_same_bits, stages, world=world)


def test_a_bucket_finds_its_states_in_slots_when_its_sum_arrives_in_mid_backward() -> None:
    numbered.clear()
    events: list[Any] = []
    use = UpdateInBackward.take_sum

    def noted(backward: Any, *given: Any) -> None:
        events.append(("sum", numbered[0].asked, len(numbered[0].waits)))
        use(backward, *given)

    model = stack()
    with as_on_a_gpu(Numbered), patch.object(UpdateInBackward, "take_sum", noted):
        optimizer = wrap(model, stage=2, release_gradients=True, offload=Offload(step="gpu"))
        for layer in model:
            layer.weight.register_post_accumulate_grad_hook(lambda _: events.append("gradient"))
        for step in range(4):
            events.clear()
            backward(model, 2 * step)
            waits = numbered[0].waits
            optimizer.step()
            optimizer.zero_grad()
        sums = [each for each in events if each != "gradient"]
        assert events.index(sums[0]) < events.index("gradient") + LAYERS / 2  # backward goes on meanwhile
        assert len(sums) == LAYERS
        assert [waits[first] < asked for _, asked, first in sums] == [True] * LAYERS
        optimizer.close()
