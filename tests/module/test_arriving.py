"""Params arrive during the next forward: ``Tuning(overlap_gather=True)``.

Rank 0 holds messages back until rank 1 has come to some moment, so the order of events is the test's. Each read runs
beside a twin whose steps wait for their gathers, and must find the same bits.
"""

import copy
import ctypes
import io
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import util
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import shardopt
from shardopt import CommunicationError, ShardedSGD, ShardoptError, Tuning
from shardopt.partition.comm.async_gather import AsyncGather
from shardopt.partition.comm.tags import FIRST_TAG
from shardopt.step import update
from shardopt.tensors.arriving_guard import ArrivingParameter
from tests.support.compiled import nothing_compiled
from tests.support.moments import Moments, until
from tests.support.ranks import Pool
from tests.support.training import raises

WIDTH = 16


@torch.jit.script
def scaled(x: Tensor, scale: Tensor) -> Tensor:
    """Runs in C++, where no guard sees that it reads a param."""
    return x * scale


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = scaled(x, self.scale)
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """The head is tied, and a scale of the model's own is read by no module.

    Attributes:
        reads_ahead: the model's own code reads the head before the head is called.
    """

    reads_ahead = False

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.reads_ahead:
            x = x * self.head.weight.mean()
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) @ self.embed.weight.t()


TOKENS = torch.arange(8)


def loss_of(model: nn.Module) -> Tensor:
    loss: Tensor = model(TOKENS).square().mean()
    return loss


def made(
    overlaps: bool = True, wrap: bool = False, stage: int = 2, shares_buffers: bool = True, **options: Any
) -> tuple[nn.Module, ShardedSGD]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Model()) if wrap else Model()
    tuning = Tuning(bucket_bytes=2200, neighbours=False, overlap_gather=overlaps, broadcast_buffers=shares_buffers)
    return model, ShardedSGD(model, lr=0.1, momentum=0.9, stage=stage, tuning=tuning, **options)


def backward(model: nn.Module, optimizer: ShardedSGD) -> None:
    optimizer.zero_grad()
    loss_of(model).backward()


def arriving(model: nn.Module) -> int:
    return sum(isinstance(param, ArrivingParameter) for param in model.parameters())


# -- messages that wait ------------------------------------------------------------------------------------------------


class Held:
    """A message that is sent once it is let go, or waited for."""

    def __init__(self, send: Callable[[], Any]):
        self._send, self._work = send, None

    def let_go(self) -> None:
        if self._work is None:
            self._work = self._send()

    def wait(self, *arguments: Any) -> Any:
        self.let_go()
        assert self._work is not None
        return self._work.wait(*arguments)


@contextmanager
def holding(is_held: Callable[[int], bool]) -> Iterator[list[Held]]:
    """Within, this rank holds the shards of these windows back; all that are held are in the list."""
    send, held = dist.isend, list[Held]()

    def sent(message: Tensor, *arguments: Any, tag: int = 0, **keywords: Any) -> Any:
        if tag < FIRST_TAG or not is_held(tag - FIRST_TAG):
            return send(message, *arguments, tag=tag, **keywords)
        held.append(Held(lambda: send(message, *arguments, tag=tag, **keywords)))
        return held[-1]

    with patch.object(dist, "isend", sent):
        yield held


# -- the overlap -------------------------------------------------------------------------------------------------------


def runs_ahead(stage: int, folder: Path) -> tuple[int, int, int]:
    """How many params were on their way after the step, when a block ran in the next forward, and after that."""
    moments, is_sender = Moments(folder), dist.get_rank() == 0
    # Shared buffers would hold rank 1's forward until rank 0, which waits for that forward, begins its own.
    model, optimizer = made(stage=stage, shares_buffers=False)
    backward(model, optimizer)
    last = optimizer.engine.domain.shards[0].window.number  # type: ignore[union-attr]
    with nothing_compiled(), holding(lambda number: is_sender and number == last) as held:
        optimizer.step()
    seen = []

    def ran(*_: Any) -> None:
        seen.append(arriving(model))
        moments.say(f"rank {dist.get_rank()} ran a block")

    model.blocks[0].register_forward_hook(ran)  # type: ignore[union-attr, operator, index]
    if is_sender:
        moments.wait("rank 1 ran a block")
        assert len(held) == 1
        held[0].let_go()
    before = arriving(model)
    loss_of(model)
    return before, seen[0], arriving(model)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_module_runs_while_the_bucket_of_another_one_travels(stage: int, ranks: Pool, tmp_path: Path) -> None:
    _, (before, at_block, after) = ranks.run(runs_ahead, stage, tmp_path, world=2)
    assert before == len(list(Model().parameters())) and 0 < at_block < before and after == 0


# -- what reads params -------------------------------------------------------------------------------------------------

Read = Callable[[nn.Module, ShardedSGD, Path], list[Tensor]]


def memory_of(param: Tensor) -> Tensor:
    at, numel = param.data_ptr(), param.numel()
    return torch.tensor((ctypes.c_float * numel).from_address(at)[:])


def in_a_fork(model: nn.Module, _: ShardedSGD, folder: Path) -> list[Tensor]:
    child, file = os.fork(), folder / f"fork{dist.get_rank()}"
    if not child:
        torch.save(model.state_dict(), file)
        os._exit(0)
    os.waitpid(child, 0)
    return list(torch.load(file).values())


def in_a_checkpoint(model: nn.Module, optimizer: ShardedSGD, folder: Path) -> list[Tensor]:
    where = folder / f"checkpoint of {optimizer.options.tuning.overlap_gather}"
    shardopt.save_checkpoint(where, model, optimizer)
    fresh, other = made(overlaps=False)
    shardopt.load_checkpoint(where, fresh, other)
    return [*fresh.state_dict().values()]


def saved(what: Any) -> list[Tensor]:
    file = io.BytesIO()
    torch.save(what, file)
    file.seek(0)
    found = torch.load(file, weights_only=False)
    return list(found.values()) if isinstance(found, dict) else [each.detach() for each in found.parameters()]


def averaged(model: nn.Module) -> list[Tensor]:
    average = [torch.zeros_like(param) for param in model.parameters()]
    torch._foreach_lerp_(average, list(model.parameters()), 0.5)
    return average


def written(model: nn.Module, *_: Any) -> list[Tensor]:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    return [param.detach() for param in model.parameters()]


def loaded(model: nn.Module, optimizer: ShardedSGD, _: Path) -> list[Tensor]:
    model.load_state_dict({name: each + 1 for name, each in model.state_dict().items()})
    return [each.detach() for each in model.parameters()]


def closed(model: nn.Module, optimizer: ShardedSGD, _: Path) -> list[Tensor]:
    optimizer.close()
    return [torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(each)) for each in model.parameters()]


def called(model: nn.Module, call: Callable[[nn.Module], Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return [call(model)]


def alone(model: nn.Module, _: ShardedSGD, __: Path) -> list[Tensor]:
    """Params that belong to no module's forward."""
    return called(model, lambda model: model.blocks[1](torch.ones(1, WIDTH)))  # type: ignore[index, operator]


def functional(model: nn.Module) -> Tensor:
    named = dict(model.named_parameters())
    found: Tensor = torch.func.functional_call(model, named, (TOKENS,))
    return found


def of_examples(model: nn.Module) -> list[Tensor]:
    """In torch.func wrappers hide params from their guards; the hook of the module waits."""
    model.eval()
    model.reads_ahead = True  # type: ignore[assignment]
    named = dict(model.named_parameters())

    def loss(named: dict[str, Tensor]) -> Tensor:
        found: Tensor = torch.func.functional_call(model, named, (TOKENS,)).square().mean()
        return found

    return [*torch.func.grad(loss)(named).values()]


READS: dict[str, Read] = {
    "state_dict": lambda model, *_: [*model.state_dict().values()],
    "keep_vars": lambda model, *_: [each.clone() for each in model.state_dict(keep_vars=True).values()],
    "data": lambda model, *_: [each.data for each in model.parameters()],
    "a sum": lambda model, *_: [each.sum() for each in model.parameters()],
    "numpy": lambda model, *_: [torch.from_numpy(each.detach().numpy()) for each in model.parameters()],
    "data_ptr": lambda model, *_: [memory_of(each) for each in model.parameters()],
    "storage": lambda model, *_: [torch.tensor(each.untyped_storage().tolist()) for each in model.parameters()],
    "repr": lambda model, *_: [torch.frombuffer(bytearray(repr([*model.parameters()]), "ascii"), dtype=torch.uint8)],
    "deepcopy": lambda model, *_: [each.detach() for each in copy.deepcopy(model).parameters()],
    "torch.save": lambda model, *_: saved(model.state_dict()),
    "torch.save of the model": lambda model, *_: saved(model),
    "the optimizer's": lambda _, optimizer, __: saved({"0": optimizer.state_dict()["state"][0]["momentum_buffer"]}),
    "in one vector": lambda model, *_: [nn.utils.parameters_to_vector(model.parameters())],
    "a moving average": lambda model, *_: averaged(model),
    "a norm": lambda model, *_: torch._foreach_norm(list(model.parameters())),
    "a message": lambda model, *_: [dist.broadcast(each, 1) or each.detach() for each in model.parameters()],
    "gradients of examples": lambda model, *_: of_examples(model),
    "a submodule": alone,
    "an evaluation": lambda model, *_: called(model.eval(), lambda model: model(TOKENS)),
    "functional_call": lambda model, *_: called(model, functional),
    "autograd": lambda model, *_: list(torch.autograd.grad(loss_of(model), list(model.parameters()))),
    "a forward": lambda model, *_: [loss_of(model)],
    "a thread": lambda model, *_: in_a_thread(model),
    "a write": written,
    "load_state_dict": loaded,
    "a checkpoint": in_a_checkpoint,
    "a fork": in_a_fork,
    "closed": closed,
}  # fmt: skip


def in_a_thread(model: nn.Module) -> list[Tensor]:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: [each.detach().clone() for each in model.parameters()]).result()


def reads(folder: Path) -> dict[str, str]:
    """What was wrong about each read, by its name."""
    found: dict[str, str] = {}
    with nothing_compiled():
        for number, (name, read) in enumerate(READS.items()):
            wrong = read_under_way(Moments(folder / str(number)), read, folder, name)
            if wrong:
                found[name] = wrong
    return found


@contextmanager
def saying_waits(moments: Moments, is_held: Callable[[int], bool] = lambda _: True) -> Iterator[None]:
    """Within, a rank says that it waits for a bucket that is held back."""
    wait = AsyncGather._wait

    def waited(gather: AsyncGather, number: int) -> None:
        if is_held(number):
            moments.say(f"rank {dist.get_rank()} waits")
        wait(gather, number)

    with patch.object(AsyncGather, "_wait", waited):
        yield


def await_a_read(moments: Moments) -> None:
    until(lambda: moments.was_said("rank 1 waits") or moments.was_said("rank 1 has read"), "rank 1 to read")


def read_under_way(moments: Moments, read: Read, folder: Path, name: str) -> str:
    is_sender, is_of_head = dist.get_rank() == 0, name == "gradients of examples"  # all but the head arrives
    twin, of_twin = made(overlaps=False, shares_buffers=False)
    model, optimizer = made(shares_buffers=False)
    for each in ((twin, of_twin), (model, optimizer)):
        backward(*each)
    of_twin.step()
    last = optimizer.engine.domain.shards[0].window.number  # type: ignore[union-attr]

    def is_held(number: int) -> bool:
        return not is_of_head or number == last

    with holding(lambda number: is_sender and is_held(number)) as held, saying_waits(moments, is_held):
        optimizer.step()
        under_way = arriving(model)
        if is_sender:
            if read is not in_a_checkpoint:  # whose ranks meet before they read
                await_a_read(moments)
            for each in held:
                each.let_go()
        values = read(model, optimizer, folder)
        moments.say(f"rank {dist.get_rank()} has read")
    expected = read(twin, of_twin, folder)
    if under_way != len(list(model.parameters())) or (not held and is_sender):
        return "nothing was under way"
    pairs = zip(values, expected, strict=True)
    return "" if all(torch.equal(each, other) for each, other in pairs) else "other values"


def test_whatever_reads_a_param_finds_its_values(ranks: Pool, tmp_path: Path) -> None:
    assert ranks.run(reads, tmp_path, world=2) == [{}, {}]


def squared(weight: Tensor) -> Tensor:
    return weight.square().sum()


# Reads in C++ that Python hears nothing of: made before the step, and run while params are under way.
Unseen = Callable[[nn.Module], Callable[[], list[Tensor]]]


def elsewhere(model: nn.Module) -> Callable[[], list[Tensor]]:
    """A module without hooks computes with the params of a layer, as wrappers."""
    other, layer = nn.Linear(WIDTH, WIDTH, bias=False, device="meta"), model.get_submodule("head")

    def loss(named: dict[str, Tensor]) -> Tensor:
        found: Tensor = torch.func.functional_call(other, named, (torch.ones(1, WIDTH),)).square().sum()
        return found

    return lambda: [*torch.func.grad(loss)(dict(layer.named_parameters())).values()]


def scripted_module(model: nn.Module) -> Callable[[], list[Tensor]]:
    other = nn.Linear(WIDTH, WIDTH, bias=False)
    other.weight = model.get_parameter("head.weight")  # type: ignore[assignment]
    scripted = torch.jit.script(other)
    return lambda: [scripted(torch.ones(1, WIDTH))]


def extension(model: nn.Module) -> Callable[[], list[Tensor]]:
    """As one that takes a tensor and asks it for its memory."""
    params = list(model.parameters())
    return lambda: [torch._C._from_dlpack(torch._C._to_dlpack(each)) for each in params]


UNSEEN: dict[str, Unseen] = {
    "func.grad": lambda model: lambda: [torch.func.grad(squared)(each) for each in model.parameters()],
    "func.vmap": lambda model: lambda: [torch.func.vmap(torch.sum)(each) for each in model.parameters()],
    "functional_call of another module": elsewhere,
    "a scripted function": lambda model: lambda: [scaled(torch.ones(1), each) for each in model.parameters()],
    "a scripted module": scripted_module,
    "an extension": extension,
}


def unseen_reads(folder: Path) -> dict[str, str]:
    """What was wrong about each read of C++, by its name: it finds NaN, and in ``unsharded()`` the values."""
    found: dict[str, str] = {}
    with nothing_compiled():
        for number, (name, make) in enumerate(UNSEEN.items()):
            found[name] = unseen_under_way(Moments(folder / str(number)), make)
    return {name: wrong for name, wrong in found.items() if wrong}


def unseen_under_way(moments: Moments, make: Unseen) -> str:
    is_sender, wrong = dist.get_rank() == 0, ""
    (twin, of_twin), (model, optimizer) = (made(overlaps, shares_buffers=False) for overlaps in (False, True))
    expects, read = make(twin), make(model)
    for each in ((twin, of_twin), (model, optimizer)):
        backward(*each)
    of_twin.step()
    with holding(lambda _: is_sender) as held, saying_waits(moments):
        optimizer.step()
        if not is_sender:
            if not any(each.isnan().any() for each in read()) or not arriving(model):
                wrong = "it was seen"
            moments.say("rank 1 has read")
        else:
            await_a_read(moments)
        for each in held:
            each.let_go()
        with optimizer.unsharded():
            values = read()
    if not all(map(torch.equal, values, expects())):
        wrong += " other values"
    return wrong


def test_what_no_guard_sees_finds_nan(ranks: Pool, tmp_path: Path) -> None:
    assert ranks.run(unseen_reads, tmp_path, world=2) == [{}, {}]


def kept_addresses(folder: Path) -> tuple[list[Tensor], list[Tensor], int]:
    """What lies where params are on their way, what arrives, and how many do while something shows their memory."""
    moments, is_sender = Moments(folder), dist.get_rank() == 0
    model, optimizer = made()
    found = []
    backward(model, optimizer)
    kept = [(each.data_ptr(), each.shape) for each in model.parameters()]
    with nothing_compiled(), holding(lambda _: is_sender) as held:
        optimizer.step()
        if not is_sender:
            found = [torch.tensor((ctypes.c_float * shape.numel()).from_address(at)[:]) for at, shape in kept]
            moments.say("rank 1 has read")
        moments.wait("rank 1 has read")
        for each in held:
            each.let_go()
        values = [param.detach() for param in model.parameters()]
    arrived = [each.clone() for each in values]
    backward(model, optimizer)
    with nothing_compiled():
        optimizer.step()  # beside ``values``
    under_way = arriving(model)
    assert all(torch.equal(each, param) for each, param in zip(values, model.parameters(), strict=True))
    return found, arrived, under_way


def test_what_has_not_arrived_is_nan_and_never_older(ranks: Pool, tmp_path: Path) -> None:
    _, (found, arrived, under_way) = ranks.run(kept_addresses, tmp_path, world=2)
    assert under_way == 0
    assert sum(each.isnan().float().mean() for each in found) > 0.3 * len(found)  # rank 0's
    torch.manual_seed(0)
    # The bias before the norm has a gradient of rounding alone: on some processors its step changes no bit.
    rows = list(zip(found, arrived, Model().parameters(), strict=True))
    changed = [(each, old) for each, new, old in rows if not torch.equal(new, old)]
    assert len(changed) >= len(rows) - 1
    assert not any(torch.equal(each, old.flatten()) for each, old in changed)


# -- a training --------------------------------------------------------------------------------------------------------


def trained(overlaps: bool, wrap: bool, stage: int) -> list[Tensor]:
    model, optimizer = made(overlaps, wrap, stage, ema=0.9)
    for step in range(4):
        backward(model, optimizer)
        if step == 1:
            loss_of(model).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        assert arriving(model) == (len(list(model.parameters())) if overlaps else 0)
        if step == 2:
            with optimizer.unsharded(ema=True):
                assert arriving(model) == 0
    del optimizer  # what was under way arrives
    return [*model.state_dict().values()]


def joined(overlaps: bool) -> list[Tensor]:
    """Rank 0 runs out of batches first, and goes on with steps alone."""
    model, optimizer = made(overlaps)
    with optimizer.join():
        for _ in range(1 + 2 * dist.get_rank()):
            backward(model, optimizer)
            optimizer.step()
    return [each.detach() for each in model.parameters()]


def trainings() -> None:
    with nothing_compiled():
        pairs = zip(joined(True), joined(False), strict=True)
        assert all(torch.equal(each, other) for each, other in pairs)
        for wrap, stage in ((False, 1), (True, 2)):
            pairs = zip(trained(True, wrap, stage), trained(False, wrap, stage), strict=True)
            assert all(torch.equal(each, other) for each, other in pairs), (wrap, stage)


def test_a_training_has_the_same_bits(ranks: Pool) -> None:
    ranks.run(trainings, world=2)


# -- ranks that fail ---------------------------------------------------------------------------------------------------

# Each rank keeps its buffers here. Where they are shared, the next message after the step is theirs, and it ends at the
# deadline, or with the connection, before a forward asks for params.


def beside_a_rank_that_dies(folder: Path) -> None:
    moments = Moments(folder)
    model, optimizer = made(shares_buffers=False)
    backward(model, optimizer)
    with nothing_compiled(), holding(lambda _: dist.get_rank() == 1):
        optimizer.step()
        if dist.get_rank() == 1:
            moments.wait("rank 0 stepped")
            os._exit(0)
    moments.say("rank 0 stepped")
    for _ in range(2):
        with raises(CommunicationError, "gathering updated params", "restart from a checkpoint"):
            loss_of(model)
        with raises(CommunicationError, "restart from a checkpoint"):
            model.state_dict()
    with raises(ShardoptError, "earlier step failed half-way"):
        optimizer.step()
    optimizer.close()


def test_a_forward_tells_that_a_rank_died(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(beside_a_rank_that_dies, tmp_path, world=2, doomed=[1])


def beside_a_rank_that_fails() -> None:
    model, optimizer = made(shares_buffers=False)
    backward(model, optimizer)
    updated = []

    def fails(*arguments: Any) -> None:
        updated.append(arguments)
        if len(updated) == 2:
            raise ArithmeticError("no update")
        run(*arguments)

    run = update.update_chunks
    if dist.get_rank() == 1:
        with nothing_compiled(), patch.object(update, "update_chunks", fails), raises(ArithmeticError, "no update"):
            optimizer.step()
    else:
        with nothing_compiled():
            optimizer.step()
        with raises(CommunicationError, "rank 1 could not go on"):
            loss_of(model)
    with raises(ShardoptError, "earlier step failed half-way"):
        optimizer.step()


def test_a_forward_tells_that_an_update_failed(ranks: Pool) -> None:
    ranks.run(beside_a_rank_that_fails, world=2)


def ends_early(folder: Path) -> list[Tensor]:
    """Rank 0 leaves the group and ends behind its last step."""
    moments = Moments(folder)
    model, optimizer = made(shares_buffers=False)
    backward(model, optimizer)
    with nothing_compiled(), holding(lambda _: dist.get_rank() == 0):
        optimizer.step()
    if dist.get_rank() == 0:
        dist.destroy_process_group()
        util._exit_function()  # what a process of multiprocessing, and any interpreter, calls at its end
        moments.say("rank 0 ended")
        os._exit(0)
    moments.wait("rank 0 ended")
    return [each.detach().clone() for each in model.parameters()]


def ends_with_the_others() -> list[Tensor]:
    """The same step, which waits for what it gathers."""
    model, optimizer = made(overlaps=False, shares_buffers=False)
    backward(model, optimizer)
    optimizer.step()
    return [each.detach().clone() for each in model.parameters()]


def test_a_rank_that_ends_has_sent_its_shards(ranks: Pool, tmp_path: Path) -> None:
    _, values = ranks.run(ends_early, tmp_path, world=2, doomed=[0])
    _, expected = ranks.run(ends_with_the_others, world=2)
    assert all(map(torch.equal, values, expected)) and len(values) == len(expected)


# -- where steps wait --------------------------------------------------------------------------------------------------


def after_torch_compile() -> int:
    import torch._dynamo.convert_frame as frames

    model, optimizer = made()
    backward(model, optimizer)
    with patch.object(frames, "FRAME_COUNTER", 0):
        torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(1))
        optimizer.step()
    return arriving(model)


def test_a_step_waits_where_compiled_code_reads_params(ranks: Pool) -> None:
    assert ranks.run(after_torch_compile, world=2) == [0, 0]


def test_it_is_refused_where_no_step_gathers_params() -> None:
    for stage in (0, 3):
        with pytest.raises(ValueError, match=r"omit Tuning\(overlap_gather=True\): at stage .* no effect"):
            ShardedSGD(nn.Linear(2, 2), lr=0.1, stage=stage, tuning=Tuning(overlap_gather=True))
    late = Tuning(overlap_gather=True)
    with pytest.raises(ValueError, match=r"hand the module over, or omit .* no effect"):
        ShardedSGD(nn.Linear(2, 2).parameters(), lr=0.1, tuning=late)
    with pytest.raises(ValueError, match=r"or release_gradients: .* no effect"):
        ShardedSGD(nn.Linear(2, 2), lr=0.1, release_gradients=True, tuning=late)
