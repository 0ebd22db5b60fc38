"""Models that were built on the meta device get the values that they would have had, bucket by bucket."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from shardopt import BindingError, DisagreementError, ShardedSGD
from shardopt.partition.bucket import Bucket
from shardopt.partition.memory import Memory
from shardopt.units.unit import GatheredBucket
from tests.support.modules import KEPT, RATES, Block, W, plain, poisoned, small, train_step
from tests.support.ranks import Pool
from tests.support.training import raises, raw


class Table(nn.Module):
    """Buffers, one of which is not saved, and a param that is initialised behind a child's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.norm = Parameter(torch.empty(W, W)), nn.BatchNorm1d(W)
        self.register_buffer("saved", torch.empty(4))
        self.register_buffer("unsaved", torch.empty(3), persistent=False)
        self.inner = nn.Linear(W, W)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.2)
        self.saved.copy_(torch.arange(4.0))
        self.unsaved.fill_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.inner(x).transpose(1, 2)).transpose(1, 2)
        return x @ self.weight * self.saved[1] * self.unsaved[0]


class Large(nn.Module):
    """All that a model on the meta device may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.table = nn.Embedding(11, W), Table()
        self.lstm, self.blocks = nn.LSTM(W, W, batch_first=True), nn.ModuleList(Block() for _ in range(2))
        self.head, self.last = nn.Linear(W, 11), nn.Linear(11, W)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.lstm(self.table(self.embed((x[..., 0].abs() * 3).long().clamp(max=10))))
        for block in self.blocks:
            x = block(x)
        return self.last(self.head(x))


@contextmanager
def resident() -> Iterator[Callable[[], int]]:
    """Tells the most bytes of buckets that were there at once, of those that stage 3 releases."""
    buckets: list[Bucket] = []
    most = 0
    init, take = Bucket.__init__, Memory.allocate

    def note() -> None:
        nonlocal most
        most = max(most, sum(each.resident_bytes for each in buckets))

    def inits(bucket: Bucket, *arguments: Any, **keywords: Any) -> None:
        init(bucket, *arguments, **keywords)
        if min(bucket.layout.numels) >= KEPT:
            buckets.append(bucket)
        note()

    def takes(memory: Memory, freed: Memory | None = None) -> None:
        take(memory, freed)
        note()

    with patch.object(Bucket, "__init__", inits), patch.object(Memory, "allocate", takes):
        yield lambda: most


@contextmanager
def default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def largest_module(model: nn.Module, where: dict[Parameter, GatheredBucket]) -> int:
    """Bytes of all buckets of the module that needs most."""
    owned = [{where[param] for param in each.parameters(recurse=False) if param in where} for each in model.modules()]
    return max(sum(each.bucket.nbytes for each in buckets) for buckets in owned)


def materialised(stage: int, dtype: torch.dtype, neighbours: bool) -> None:
    """The values of a model that was built the usual way on rank 0; never more there than what one module needs."""
    with default(dtype):
        torch.manual_seed(70)
        usual = Large().state_dict()
        saved = {name: value + 1 for name, value in Large().state_dict().items()}
        with torch.device("meta"):
            models = Large(), Large()
    for model, expected in zip(models, (usual, saved), strict=True):
        opt = ShardedSGD(model, **RATES, stage=stage, tuning=small(neighbours=neighbours))
        torch.manual_seed(70 + dist.get_rank())
        before = torch.get_rng_state()
        with poisoned(), resident() as most:  # what poisons takes the place of allocate()
            opt.bind(None if expected is usual else {**saved, "table.unsaved": torch.full((3,), 0.5)})
        assert stage < 3 or 0 < most() == largest_module(model, opt.engine.domain.sharded.where)
        assert dist.get_rank() == 0 or torch.equal(torch.get_rng_state(), before)
        with opt.unsharded():
            found = model.state_dict()
            assert list(found) == list(expected) and model.head.weight is model.embed.weight
            for name, value in found.items():
                assert value.dtype == expected[name].dtype and raw(value) == raw(expected[name]), name
        assert model.table.unsaved.eq(0.5).all()
        masters = [(shard.whole("master"), shard.param) for shard in opt.engine.domain.shards if shard.masters]
        assert bool(masters) == (dtype is not torch.float32)
        assert all(torch.equal(master, param.float()) for master, param in masters)
        if dtype is torch.float32:
            train_step(model, opt, 0)


def half_on_meta() -> None:
    """What has values keeps them."""
    torch.manual_seed(0)
    model = Large()
    for each in (model.table.norm, model.blocks[0].up):
        for tensor in each.state_dict().values():
            tensor.copy_(torch.full_like(tensor, 3))
    with torch.device("meta"):
        model.blocks[1], model.table.inner = Block(), nn.Linear(W, W)
    expected = {name: value.clone() for name, value in model.state_dict().items() if not value.is_meta}
    opt = ShardedSGD(model, **RATES, stage=3, tuning=small())
    opt.bind()
    with opt.unsharded():
        found = model.state_dict()
        assert all(raw(found[name]) == raw(value) for name, value in expected.items())
        assert all(value.isfinite().all() for value in found.values()) and len(expected) < len(found)


class Unready(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.own = nn.Linear(W, W), Parameter(torch.empty(W, W))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) @ self.own


def not_materialised() -> None:
    """Errors, before anything changed; then with all that it takes."""
    with torch.device("meta"):
        model = Unready()
    opt = ShardedSGD(model, **RATES, stage=3, tuning=small())
    values = {name: torch.full(param.shape, 0.1) for name, param in model.named_parameters()}
    with raises(BindingError, "own", "reset_parameters()", "bind(state_dict="):
        plain(model, 0)
    for wrong, words in (
        ({name: value for name, value in values.items() if name != "layer.bias"}, ("missing", "layer.bias")),
        ({**values, "own": torch.ones(W, 1)}, ("other shapes", "own")),
    ):
        with raises(BindingError, *words):
            opt.bind(wrong)
    for value, found in (
        ([1.0], "a list"),
        (torch.empty(W, W, device="meta"), "on the meta device"),
        (torch.eye(W).to_sparse(), "sparse"),
        (torch.eye(W) * 1j, "complex64"),
    ):
        with raises(TypeError, "bind(state_dict=)", "own (torch.float32)", found):
            opt.bind({**values, "own": value})  # type: ignore[dict-item]
    for container in (list(values.items()), "values", {1: torch.ones(1)}):
        with raises(TypeError, "bind(state_dict=)", "tensors by name"):
            opt.bind(container)  # type: ignore[arg-type]
    with raises(BindingError, "module.own", "prefix"):
        opt.bind({f"module.{name}": value for name, value in values.items()})
    with raises(BindingError, "nobody", "such as ['layer.bias', "):
        opt.bind({**values, "nobody": torch.ones(1)})
    with raises(DisagreementError if dist.get_rank() else BindingError, "nobody"):
        opt.bind(values if dist.get_rank() else {**values, "nobody": torch.ones(1)})
    assert all(param.is_meta for param in model.parameters())
    opt.bind(values)
    with opt.unsharded():
        assert all((param == 0.1).all() for param in model.parameters())
    with raises(BindingError, "module.load_state_dict"):  # what is bound has its values
        opt.bind(values)
    opt.bind()
    train_step(model, opt, 0)
    # Where nothing is on the meta device, and where some ranks alone were given values.
    model = nn.Linear(W, W)  # type: ignore[assignment]
    other = ShardedSGD(model, **RATES, stage=1)
    with raises(BindingError, "module.load_state_dict"):
        other.bind(model.state_dict())
    with torch.device("meta"):
        model = nn.Linear(W, W)  # type: ignore[assignment]
    other = ShardedSGD(model, **RATES, stage=1)
    with raises(DisagreementError, "state_dict is given"):
        other.bind(
            {name: torch.ones(each.shape) for name, each in model.named_parameters()} if dist.get_rank() else None
        )


class Rotary(nn.Module):
    """A buffer that is not saved, and no reset_parameters(), as in the Llamas of Hugging Face."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 10.0 ** -torch.arange(W // 2), persistent=False)
        self.register_buffer("ids", torch.arange(W), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.outer(self.ids.float()[: x.shape[1]], self.inv_freq)
        return x * torch.cat((angles.cos(), angles.sin()), dim=-1)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(torch.ones(W))

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * self.weight


class Llama(nn.Module):
    """A model whose modules know nothing of how they are initialised; its own method does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rotary, self.norm, self.up = nn.Embedding(11, W), Rotary(), Norm(), nn.Linear(W, 4 * W, False)
        self.down, self.head = nn.Linear(4 * W, W, False), nn.Linear(W, 11, False)
        self.head.weight = self.embed.weight
        self.apply(self.init_weights)

    def init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, Norm):
            nn.init.ones_(module.weight)
        elif isinstance(module, Rotary):
            module.inv_freq.copy_(10.0 ** -torch.arange(W // 2))
            module.ids = torch.arange(W)  # anew, as many do: a buffer lies in no bucket

    def forward(self, x: Tensor) -> Tensor:
        x = self.rotary(self.embed((x[..., 0].abs() * 3).long().clamp(max=10)))
        return self.head(x + self.down(self.up(self.norm(x)).relu()))


def by_a_function() -> None:
    """The values that ``module.apply(function)`` gives on rank 0; or a state dict's, with the function's buffers."""
    torch.manual_seed(70)
    usual, buffers = Llama(), dict(Llama().named_buffers())
    usual.head = nn.Linear(W, 11, False)  # numbers are drawn for a tied weight, too, but it keeps the first ones
    saved = {name: value + 1 for name, value in usual.state_dict().items()}
    assert not saved.keys() & buffers.keys()
    for stage in (1, 3):
        for state_dict in (None, saved):
            with torch.device("meta"):
                model = Llama()
            opt = ShardedSGD(model, **RATES, stage=stage, tuning=small())
            torch.manual_seed(71 + dist.get_rank())
            with poisoned():
                opt.bind(state_dict, model.init_weights)
            torch.manual_seed(71)
            usual.apply(usual.init_weights)
            with opt.unsharded():
                assert model.head.weight is model.embed.weight
                for name, value in list(model.named_parameters()):
                    assert raw(value) == raw((state_dict or usual.state_dict())[name]), name
            for name, value in model.named_buffers():
                assert raw(value) == raw(buffers[name]), name
            train_step(model, opt, 0)


def not_by_a_function() -> None:
    """What nobody fills is an error on all ranks, and no model of zeros or of other memory."""
    with torch.device("meta"):
        model = Llama()
    opt = ShardedSGD(model, **RATES, stage=3, tuning=small())
    saved = {name: torch.ones(param.shape) for name, param in model.state_dict().items()}
    with raises(BindingError, "rotary.inv_freq", "reset_parameters()", "bind(init_fn=...)"):
        opt.bind()
    with raises(BindingError, "bind(init_fn=...)", "rotary.inv_freq"):
        opt.bind(saved)
    with raises(BindingError, "missing", "norm.weight"):
        opt.bind({name: value for name, value in saved.items() if name != "norm.weight"}, model.init_weights)
    with raises(TypeError, "init_fn", "str"):
        opt.bind(init_fn="normal")  # type: ignore[arg-type]
    with torch.device("meta"):
        layer = nn.Linear(W, W)
    other = ShardedSGD(layer, **RATES, stage=1)
    with raises(DisagreementError, "init_fn is given"):
        other.bind(init_fn=model.init_weights if dist.get_rank() else None)
    assert all(param.is_meta for param in model.parameters())

    def forgets(kind: type[nn.Module]) -> Callable[[nn.Module], None]:
        return lambda module: None if isinstance(module, kind) else model.init_weights(module)

    for kind, name in ((Norm, "norm.weight"), (Rotary, "rotary.inv_freq"), (nn.Linear, "up.weight")):
        with raises(BindingError, "in place", name, "init_fn"):
            opt.bind(init_fn=forgets(kind))
    with raises(DisagreementError if dist.get_rank() else BindingError, "norm.weight"):
        opt.bind(init_fn=model.init_weights if dist.get_rank() else forgets(Norm))
    opt.bind(init_fn=model.init_weights)
    train_step(model, opt, 0)
    with raises(BindingError, "module.apply"):  # what is bound has its values
        opt.bind(init_fn=model.init_weights)


class Failing(nn.Linear):
    """Cannot be initialised while ``fails`` says so."""

    fails = False

    def reset_parameters(self) -> None:
        if Failing.fails:
            raise OSError("no numbers today")
        super().reset_parameters()


def failing_at_first() -> None:
    """What one rank could not initialise has values on no rank: it is tried again, and never computed with."""
    torch.manual_seed(70)
    usual = nn.Sequential(nn.Linear(W, W), Failing(W, W), nn.Linear(W, W)).state_dict()
    for stage in (1, 3):
        for others in (False, True):
            torch.manual_seed(70 + dist.get_rank())
            with torch.device("meta"):
                model = nn.Sequential(nn.Linear(W, W), Failing(W, W), nn.Linear(W, W))
            opt = ShardedSGD(model, **RATES, stage=stage, tuning=small())
            Failing.fails = others or dist.get_rank() == 1
            for again in (opt.bind, opt.bind, lambda model=model: plain(model, 0)):
                with raises(OSError if Failing.fails else DisagreementError, "no numbers today"):
                    again()
            with raises(BindingError, "optimizer.bind() again"), torch.no_grad():
                model(torch.ones(2, W))
            with raises(BindingError, "missing", "1.weight"):
                opt.bind({name: value for name, value in usual.items() if name != "1.weight"})
            Failing.fails = False
            opt.bind()
            with opt.unsharded():
                assert all(raw(value) == raw(usual[name]) for name, value in model.state_dict().items())
            train_step(model, opt, 0)


def test_meta_device(ranks: Pool) -> None:
    for stage, dtype, neighbours, world in (
        (0, torch.float32, True, 2),
        (2, torch.bfloat16, True, 2),
        (3, torch.float32, True, 2),
        (3, torch.bfloat16, False, 2),
        (3, torch.float32, False, 3),
    ):
        ranks.run(materialised, stage, dtype, neighbours, world=world)
    for function in (half_on_meta, not_materialised, failing_at_first, by_a_function, not_by_a_function):
        ranks.run(function, world=2)
