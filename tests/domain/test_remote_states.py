"""What a rank on a GPU does when another rank reads its states while NCCL waits: it copies, on a stream apart.

There is no GPU here: the params say that they are on one, and their memory lets itself be copied and no more.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import PropertyMock, patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from shardopt import ShardedAdamW, Tuning
from shardopt.domain import remote_states
from shardopt.domain.remote_states import RemoteStates
from shardopt.domain.shard import Shard
from shardopt.offload.store import ResidentStorage
from shardopt.partition.comm.group import Ranks
from tests.support.training import raw

GPU = torch.device("cuda", 1)
LOOKS = {Tensor.__getitem__, Tensor.device.__get__, Tensor.dtype.__get__, Tensor.shape.__get__}  # type: ignore[attr-defined]


class OnDevice(Tensor):
    """Memory of a GPU."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), keywords: Any = None) -> Any:
        if function in (Tensor.to, Tensor.cpu):
            return args[0].as_subclass(Tensor).clone()
        assert function in LOOKS or function is Tensor.as_subclass, f"{function} would run on the device"
        return super().__torch_function__(function, types, args, keywords)


class Stream:
    """Takes the place of torch.cuda.Stream."""

    made: ClassVar[list["Stream"]] = []
    entered: ClassVar[list["Stream"]] = []
    greatest: ClassVar[int] = -3

    def __init__(self, device: torch.device, priority: int = 0):
        self.device, self.priority = device, priority
        self.made.append(self)

    @classmethod
    def priority_range(cls) -> tuple[int, int]:
        return 0, cls.greatest

    @classmethod
    @contextmanager
    def enter(cls, stream: "Stream") -> Iterator[None]:
        cls.entered.append(stream)
        yield


@contextmanager
def on_a_gpu() -> Iterator[None]:
    """Within, shards are on a GPU, of which nothing is known yet."""
    read, params = ResidentStorage.read, Shard.params
    Stream.made.clear()
    Stream.entered.clear()
    with ExitStack() as stack:
        stack.enter_context(patch.object(Shard, "device", PropertyMock(return_value=GPU)))
        stack.enter_context(patch.object(Shard, "params", lambda *call: params(*call).as_subclass(OnDevice)))
        stack.enter_context(patch.object(ResidentStorage, "read", lambda *call: read(*call).as_subclass(OnDevice)))
        stack.enter_context(patch("torch.cuda.Stream", Stream))
        stack.enter_context(patch("torch.cuda.stream", Stream.enter))
        stack.enter_context(patch.dict(remote_states._STREAMS, clear=True))
        yield


def trained(**formats: Any) -> Any:
    torch.manual_seed(0)
    param = Parameter(torch.randn(3000).bfloat16())
    optimizer = ShardedAdamW([param], lr=0.01, tuning=Tuning(compress_from=256), **formats)
    for _ in range(2):
        param.grad = torch.randn(3000).bfloat16()
        optimizer.step()
    return optimizer


def asked(domain: Any, name: str) -> Tensor:
    with RemoteStates(domain).slice_at(domain.epoch.now(name), 0, name, 256, 2000) as found:
        return found


FORMATS: list[dict[str, str]] = [
    {"master": "fp32", "state_format": "fp32"},
    {"master": "split", "state_format": "bf16"},
    {"master": "split24", "state_format": "int8"},
]


@pytest.mark.parametrize("formats", FORMATS, ids=lambda each: each["master"])
def test_only_copies_run_on_the_device(formats: dict[str, str]) -> None:
    domain = trained(**formats).engine.domain
    (shard,) = domain.shards
    for unmatched in (False, True):
        if unmatched:
            shard.unmatched_masters[0] = torch.full((3000,), 0.3)
        for name in ("param", "master", "exp_avg", "exp_avg_sq"):
            expected = shard.read_chunk(name, 256, 2000)
            with on_a_gpu():
                found = asked(domain, name)
            assert type(found) is Tensor and found.dtype == expected.dtype and raw(found) == raw(expected), name


def test_all_questions_have_one_stream() -> None:
    domain = trained().engine.domain
    with on_a_gpu():
        for _ in range(100):
            asked(domain, "exp_avg")
    assert len(Stream.made) == 1 and Stream.entered == 100 * Stream.made
    assert Stream.made[0].device == GPU


class Event:
    """Takes the place of torch.cuda.Event."""

    made: ClassVar[list["Event"]] = []

    def __init__(self) -> None:
        self.recorded: list[Any] = []
        self.waits = 0
        self.made.append(self)

    def record(self, stream: Any = None) -> None:
        self.recorded.append(stream)

    def wait(self) -> None:
        assert Stream.entered, "the current stream waits, not the reader's"
        self.waits += 1


def test_a_reader_waits_for_the_kernels_of_the_step() -> None:
    """On the stream of their own device, whatever device is the current one."""
    domain = trained().engine.domain
    Event.made.clear()
    with (
        on_a_gpu(),
        patch("torch.cuda.Event", Event),
        patch.object(remote_states, "current_stream", lambda device: ("of", device)),
    ):
        remote = RemoteStates(domain)
        remote.end_step()
        with remote.slice_at(domain.epoch.now("master"), 0, "master", 0, 256):
            pass
    (event,) = Event.made
    assert event.recorded == [("of", GPU)] and event.waits == 1


@pytest.mark.parametrize(
    ("greatest", "takes_priority", "priority"), [(-3, False, -1), (-3, True, -1), (-1, False, -1), (-1, True, 0)]
)
def test_the_stream_is_of_no_pool_of_nccl(greatest: int, takes_priority: bool, priority: int) -> None:
    domain = trained().engine.domain
    with (
        on_a_gpu(),
        patch.object(Stream, "greatest", greatest),
        patch.object(Ranks, "takes_priority", lambda *_: takes_priority),
    ):
        asked(domain, "exp_avg")
    assert [stream.priority for stream in Stream.made] == [priority]


def test_what_nccl_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group(SimpleNamespace):
        __hash__ = object.__hash__  # a key

    def takes(options: Any) -> bool:
        backend = SimpleNamespace(options=options)
        group: Any = Group(size=lambda: 2, rank=lambda: 0, _get_backend=lambda _: backend)
        return Ranks(group, None).takes_priority(GPU)

    assert not dist.is_initialized() and not Ranks(None, None).takes_priority(GPU)
    assert not takes(None) and not takes(SimpleNamespace(is_high_priority_stream=False))
    assert takes(SimpleNamespace(is_high_priority_stream=True))
    monkeypatch.setenv("TORCH_NCCL_HIGH_PRIORITY", "0")
    assert not takes(None)
    monkeypatch.setenv("TORCH_NCCL_HIGH_PRIORITY", "1")
    assert takes(None)
