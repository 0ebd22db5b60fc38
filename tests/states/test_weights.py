"""``weights()``: whole weights by name on every rank, in bounded memory, of one step, or an error on all ranks."""

from collections.abc import Callable
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardopt import DisagreementError, ShardedOptimizer, ShardedSGD, ShardoptError, StateError
from tests.support.modules import RATES, Layers, Odd, Stack, Tied, W, made, small, square, train_step
from tests.support.ranks import Pool
from tests.support.training import raises

SMALL = 3000  # bytes: a weight of W x W in fp32 has 2304


class All(nn.Module):
    """Params of all shapes and strides, tied ones, a frozen one of integers, buffers saved and not."""

    def __init__(self) -> None:
        super().__init__()
        self.odd, self.tied, self.layers = Odd(), Tied(), Layers()
        self.codes = Parameter(torch.arange(9), requires_grad=False)
        self.frozen = Parameter(square().detach(), requires_grad=False)
        self.register_buffer("seen", torch.arange(3))
        self.register_buffer("cached", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.odd(x) @ self.frozen) + self.tied(x).mean()


def shown(model: nn.Module, opt: ShardedOptimizer, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """What the state dict of the whole model has, tied ones once."""
    found: dict[str, Tensor] = {}
    with opt.unsharded():
        seen = set()
        for name, each in model.state_dict(keep_vars=True).items():
            if each not in seen:
                seen.add(each)
                found[name] = each.detach().clone().to(dtype if dtype and each.is_floating_point() else each.dtype)
    return found


def of_one_step(folder: str) -> None:
    for stage, offload in ((0, None), (1, None), (2, None), (3, None), (3, "cpu"), (3, folder)):
        torch.manual_seed(0)
        model = All()
        opt = ShardedSGD(model, **RATES, stage=stage, offload=offload, tuning=small())
        for step in range(2):
            train_step(model, opt, step)
            for dtype, nbytes in ((None, SMALL), (torch.float16, 1 << 30)) if step else ((torch.bfloat16, 1),):
                expected = shown(model, opt, dtype)
                found = list(opt.weights(nbytes, dtype))
                assert [name for name, _ in found] == list(expected), stage
                for name, whole in found:
                    other = expected[name]
                    assert type(whole) is Tensor and not whole.requires_grad
                    assert (whole.dtype, whole.stride()) == (other.dtype, other.stride()) and whole.equal(other), name
                metadata = opt.weights_metadata(dtype)
                assert {name: (each.shape, each.dtype) for name, each in found} == {
                    name: (each.shape, each.dtype) for name, each in metadata.items()
                }
                assert list(metadata) == list(expected) and all(each.is_meta for each in metadata.values())
        some = ["tied.embed.weight", "odd.turned"]
        assert [name for name, _ in opt.weights(names=reversed(some))] == [name for name in expected if name in some]
        kept = dict(found)
        train_step(model, opt, 2)  # what was given out is the caller's, whatever comes
        assert all(kept[name].equal(other) for name, other in expected.items())
        opt.close()


def test_of_one_step(ranks: Pool, tmp_path: Path) -> None:
    for world in (1, 2, 3):
        ranks.run(of_one_step, str(tmp_path), world=world)


# -- memory ------------------------------------------------------------------------------------------------------------


class Alive(TorchDispatchMode):
    """The most bytes that live at a time, of tensors that are made meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[Any, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        before = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        for each in tree_leaves(result):
            storage = each.untyped_storage() if isinstance(each, Tensor) else None
            if storage is not None and storage._cdata not in before:
                self.made[StorageWeakRef(storage)] = storage.nbytes()
        self.made = {each: nbytes for each, nbytes in self.made.items() if not each.expired()}
        self.most = max(self.most, sum(self.made.values()))
        return result


class Large(nn.Module):
    """Weights below and above a bucket, alone and in rows."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(40, 40)] + [(16, 16)] * 9 + [(48, 48)] + [(30, 30)] * 5
        self.all = nn.ParameterList(torch.randn(*shape) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        return sum((each.mean() for each in self.all), x.mean())


def in_bounded_memory() -> None:
    model, opt = made(make=Large)
    train_step(model, opt, 0)
    sizes = [each.numel() * 4 for each in model.parameters()]
    for nbytes in (1024, 2048, 4096, 10_000):
        count = 0
        with Alive() as alive:
            for _, whole in opt.weights(nbytes):
                count += whole.nbytes
                if nbytes < max(sizes):  # what a caller keeps counts too, if it is two of the largest
                    del whole
        assert alive.most <= 2 * nbytes + max(sizes) + 256, (nbytes, alive.most)  # and the words of a meeting
        assert count == sum(sizes)


def ahead() -> None:
    """The next bucket is under way while the weights of one are used."""
    model, opt = made(make=Stack)
    train_step(model, opt, 0)
    received = torch.zeros((), dtype=torch.int64)
    totals, before = [], opt.engine.traffic()["params"]
    for _ in opt.weights(SMALL):
        received.fill_(opt.engine.traffic()["params"] - before)
        dist.all_reduce(received)  # loops may talk to each other
        totals.append(int(received))
    assert 0 < totals[0] < totals[1] < totals[-1] == totals[-2], totals
    assert sum(one < other for one, other in pairwise(totals)) >= 4, totals
    names = list(opt.weights_metadata())
    for pair in zip(names, names[2:], strict=False):
        before = opt.engine.traffic()["params"]
        some = dict(opt.weights(1 << 20, names=pair))
        received = opt.engine.traffic()["params"] - before
        assert received <= sum(each.nbytes for each in some.values()), pair  # what lies between does not travel


def test_in_bounded_memory(ranks: Pool) -> None:
    ranks.run(in_bounded_memory, world=2)
    ranks.run(ahead, world=2)


# -- the end before the end --------------------------------------------------------------------------------------------


class Oops(Exception):
    pass


def broken(opt: ShardedOptimizer) -> None:
    for _ in opt.weights(SMALL):
        break


def raising(opt: ShardedOptimizer) -> None:
    with raises(Oops):
        for _ in opt.weights(SMALL):
            raise Oops


def closed(opt: ShardedOptimizer) -> None:
    stream = opt.weights(SMALL)
    next(stream)
    stream.close()
    with raises(StateError, "weights()", "again"):
        next(stream)


def never_begun(opt: ShardedOptimizer) -> None:
    opt.weights(SMALL)


def stepping(opt: ShardedOptimizer) -> None:
    stream = opt.weights(SMALL)
    next(stream)
    with raises(StateError, "before step()", "close() it"):
        opt.step()


def loading(opt: ShardedOptimizer) -> None:
    stream = opt.weights(SMALL)
    next(stream)
    with raises(StateError, "before loading states", "close() it"):
        opt.load_state_dict(opt.state_dict())


def unsharding(opt: ShardedOptimizer) -> None:
    """An error that is kept keeps its stream open, until the next call that needs all ranks."""
    try:
        stream = opt.weights(SMALL)
        for _ in stream:
            raise Oops
    except Oops as error:
        kept = error
    with raises(StateError, "before unsharded()"), opt.unsharded():
        raise kept


ENDS: tuple[Callable[[ShardedOptimizer], None], ...] = (
    broken,
    raising,
    closed,
    never_begun,
    stepping,
    loading,
    unsharding,
)
SAYS = dict.fromkeys((stepping, loading, unsharding), "made another call")


def ended(stage: int) -> None:
    model, opt = made(stage)
    train_step(model, opt, 0)
    for number, end in enumerate(ENDS):
        if dist.get_rank() == 0:
            end(opt)
        else:  # which has read some, and reads on
            stream, count = opt.weights(SMALL), 0
            with raises(StateError, SAYS.get(end, "left its loop"), "rank 0"):
                for _ in stream:
                    count += 1
            assert count <= 6  # of two buckets at most
            with raises(StateError, "rank 0"):
                next(stream)
        opt.zero_grad()
        end(opt)  # on all ranks alike
        broken(opt)
        train_step(model, opt, number + 1)  # goes on, and the ranks agree


def left_at_a_step(stage: int) -> None:
    """One rank has dropped its stream and steps; another one steps with its own open."""
    model, opt = made(stage)
    train_step(model, opt, 0)
    stream = opt.weights(SMALL)
    next(stream)
    if dist.get_rank() == 0:
        del stream
    kind = DisagreementError if dist.get_rank() == 0 else StateError
    with raises(kind, "before step()"):
        opt.step()
    train_step(model, opt, 1)
    assert len(dict(opt.weights())) == len(model.state_dict())


def refused(stage: int) -> None:
    model, opt = made(stage)
    train_step(model, opt, 0)
    rank = dist.get_rank()
    for wrong, kind in (
        ({"bucket_bytes": 0}, ValueError),
        ({"bucket_bytes": "much"}, TypeError),
        ({"dtype": torch.int8}, TypeError),
        ({"dtype": "bf16"}, TypeError),
        ({"names": ["first.weigth"]}, ValueError),
        ({"names": "first.weight"}, TypeError),
    ):
        with raises(kind, "weights("):
            opt.weights(**wrong)
        with raises(kind if rank == 0 else DisagreementError, "weights("):
            opt.weights(**wrong if rank == 0 else {})
    with raises(DisagreementError, "bucket_bytes"):
        opt.weights(1000 + rank)
    with opt.unsharded():
        assert dict(opt.weights(SMALL)).keys() == model.state_dict().keys()


def test_the_end_before_the_end(ranks: Pool) -> None:
    for stage in (1, 3):
        ranks.run(ended, stage, world=2)
        ranks.run(left_at_a_step, stage, world=2)
        ranks.run(refused, stage, world=2)


def test_names() -> None:
    """Params without a module have the names that they were given."""
    model = nn.Linear(W, W)
    opt = ShardedSGD(model.named_parameters(), lr=0.1)
    model(data_of_one()).sum().backward()
    opt.step()
    assert [name for name, _ in opt.weights()] == ["weight", "bias"]
    with raises(ShardoptError, "named_parameters()"):
        ShardedSGD(model.parameters(), lr=0.1).weights()
    averaged = ShardedSGD(model, lr=0.1, ema=0.5)
    model(data_of_one()).sum().backward()
    averaged.step()
    averaged.step()
    plain = dict(averaged.weights())
    with averaged.unsharded(ema=True):
        shown = dict(averaged.weights())
    assert not shown["weight"].equal(plain["weight"])
    assert [name for name, _ in islice(averaged.weights(), 1)] == ["weight"]
    averaged.step()


def data_of_one() -> Tensor:
    return torch.ones(1, W)
