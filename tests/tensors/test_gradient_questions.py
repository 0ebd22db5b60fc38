"""What people read of ``param.grad`` between backward and step: each rank gets the numbers of the whole mean gradient.

The table is executed at 1, 2 and 3 ranks, over shared memory and messages, at stages 1 to 3, and compared with the
gradient that DDP leaves.
"""

import io
import math
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

from shardopt import DisagreementError, Part, ShardedAdamW, ShardedOptimizer, StateError, Tuning
from shardopt.remote.peers import Peers
from tests.support.comparing import raw
from tests.support.ranks import Pool
from tests.support.training import raises

W = 24
OTHER = torch.linspace(-1, 1, W * W).view(W, W)


def through_a_file(grad: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(grad, file)
    file.seek(0)
    return torch.load(file)  # type: ignore[no-any-return]


Question = Callable[[Any], Any]
QUESTIONS: dict[str, Question] = {
    "sum": lambda g: g.sum(),
    "mean": lambda g: g.mean(),
    "largest": lambda g: g.abs().max(),
    "mean of magnitudes": lambda g: g.abs().mean(),
    "min, max": lambda g: (g.min(), g.max()),
    "aminmax": lambda g: tuple(g.aminmax()),
    "std, var": lambda g: (g.std(), g.var()),
    "isnan": lambda g: g.isnan().any(),
    "isnan, counted": lambda g: g.isnan().sum(),
    "isfinite": lambda g: g.isfinite().all(),
    "isfinite, averaged": lambda g: torch.isfinite(g).float().mean(),
    "isinf": lambda g: (~torch.isinf(g)).sum(),
    "norms": lambda g: [g.norm(p) for p in (1, 3, 0.5, -math.inf, 0)],
    "vector norms": lambda g: [torch.linalg.vector_norm(g, p) for p in (1, 3, -math.inf)],
    "norms of rows": lambda g: (g.norm(dim=1), g.norm(2, dim=1, keepdim=True)),
    "squares": lambda g: (g.pow(2).sum(), g.square().mean(), (g * g).sum()),
    "histc": lambda g: g.histc(bins=16),
    "quantile": lambda g: torch.quantile(g, 0.9),
    "topk": lambda g: g.flatten().topk(5).values,
    "zeros": lambda g: (g == 0).sum(),
    "nonzero": lambda g: torch.count_nonzero(g),
    "small": lambda g: (g.abs() < 1e-3).float().mean(),
    "dot": lambda g: torch.dot(g.flatten(), g.view(-1)),
    "cosine": lambda g: torch.nn.functional.cosine_similarity(g.flatten(), OTHER.flatten(), dim=0),
    "singular values": lambda g: torch.linalg.svdvals(g)[:4].div(100).round(decimals=4),
    "allclose": lambda g: torch.tensor([torch.allclose(g, g), torch.allclose(g, OTHER), torch.equal(g, g)]),
    "numpy": lambda g: torch.from_numpy(g.numpy().copy()),
    "tolist": lambda g: torch.tensor(g.tolist()),
    "item": lambda g: torch.tensor(g[2, 3].item()),
    "rows": lambda g: g[3:5],
    "clone": lambda g: (g.clone().norm(1), g.clone().sum()),
    "casts": lambda g: (g.double().norm(), g.float().sum(), g.bfloat16().float().sum()),
    "views": lambda g: (g.view(-1).norm(), g.reshape(-1).sum(), g.t().contiguous()),
    "cat": lambda g: torch.cat([g.flatten(), g.view(-1)]).norm(),
    "stack": lambda g: torch.stack([g, g]).std(),
    "copies in host memory": lambda g: [
        torch.tensor(each.tolist()).add_(torch.tensor(each.numpy())) for each in (g.clone(), g * 1)
    ],
    "detach": lambda g: (g.detach().mean(), g.data.mean(), g.cpu().mean()),
    "file": through_a_file,
    "norms of lists": lambda g: [torch._foreach_norm([g, g], p)[1] for p in (1, 3)],
    "total norms": lambda g: [get_total_norm([g, g], p) for p in (1.0, 3.0, 0.5)],
    "arithmetic": lambda g: (g * 2 + OTHER, OTHER - g / 3, g @ OTHER),
    "where": lambda g: torch.where(g > 0, g, OTHER).sum(),
    "chosen": lambda g: g[torch.isfinite(g)].sum(),
}


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(W, W), nn.Tanh(), nn.Linear(W, W), nn.LayerNorm(W))


def backward(model: nn.Module, number: int) -> None:
    x = torch.randn(4, W, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
    (model(x) - x).square().sum().backward()


def by_hand(number: int, of: Callable[[Tensor], Tensor] = torch.clone) -> Tensor:
    """The mean gradient of the first weight, as DDP averages it, or that of a function of each rank's."""
    model = model_of()
    backward(model, number)
    grad: Any = of(model[0].weight.grad)  # type: ignore[arg-type]
    dist.all_reduce(grad)
    return grad / dist.get_world_size()  # type: ignore[no-any-return]


def started(stage: int, neighbours: bool) -> tuple[nn.Sequential, ShardedOptimizer]:
    model = model_of()
    tuning = Tuning(bucket_bytes=2000, keep_below=20, neighbours=neighbours)
    opt = ShardedAdamW(model, lr=0.01, stage=stage, tuning=tuning)
    backward(model, 0)
    return model, opt


def leaves(found: Any) -> list[Tensor]:
    if isinstance(found, Part):
        return [found.read_whole()]
    return [found] if isinstance(found, Tensor) else [each for some in found for each in leaves(some)]


def asked(stage: int, neighbours: bool) -> dict[str, list[bytes]]:
    model, opt = started(stage, neighbours)
    grad: Any = model[0].weight.grad
    mean = grad.full_tensor()
    # The order in which ranks are summed, and the division, round this much at most, of the sum of their magnitudes.
    assert ((mean - by_hand(0)).abs() <= 6 * 2**-24 * by_hand(0, torch.abs)).all()
    found = {}
    for name, question in QUESTIONS.items():
        found[name] = [raw(each) for each in leaves(question(grad))]
        expected = [raw(each) for each in leaves(question(mean))]
        assert found[name] == expected, (name, question(grad), question(mean))
    # After a change in place, also one that leaves no norm known.
    clip_grad_norm_(model.parameters(), 0.1, norm_type=1)
    grad.clamp_(-0.001, 0.001)
    mean = grad.full_tensor()
    assert grad.norm().item() == 0 or abs(grad.norm() / mean.norm() - 1) < 1e-6
    assert grad.norm(math.inf) == mean.abs().max() and grad.isfinite().all() and not grad.isnan().any()
    for name in ("sum", "std, var", "numpy", "norms"):
        assert [raw(each) for each in leaves(QUESTIONS[name](grad))] == [
            raw(each) for each in leaves(QUESTIONS[name](mean))
        ]
    opt.step()
    assert raw(grad.sum()) == raw(mean.sum())  # a step changes no gradient
    opt.close()
    return found


def test_questions(ranks: Pool) -> None:
    for world, stage, neighbours in (
        (1, 2, True), (2, 1, True), (2, 2, False), (2, 3, True), (3, 1, False), (3, 2, True), (3, 3, False)
    ):  # fmt: skip
        found = ranks.run(asked, stage, neighbours, world=world)
        assert all(each == found[0] for each in found)


# Of a gradient, another one of its shape and a state of its param.
EXPRESSIONS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "numbers": lambda g, h, v: g * 2 + 1,
    "two": lambda g, h, v: g + h,
    "functions": lambda g, h, v: g.abs().log1p(),
    "a state": lambda g, h, v: g / (v.sqrt() + 1e-8),
    "where": lambda g, h, v: torch.where(g > 0, g, h),
    "clamp": lambda g, h, v: g.clamp(-0.1, 0.2).clamp(max=OTHER),
    "masks": lambda g, h, v: ((g > h) & ~torch.isnan(g)) | (g == 0),
    "a whole": lambda g, h, v: OTHER - g * (OTHER > 0) + OTHER[:1],
    "a number in a tensor": lambda g, h, v: g * torch.tensor(0.5) + torch.tensor([2.0]),
    "casts": lambda g, h, v: (g.double() * 2).to(torch.bfloat16) + 1,
    "like it": lambda g, h, v: torch.ones_like(g) * 3 - torch.zeros_like(g, dtype=torch.float64),
    "in place": lambda g, h, v: torch.zeros_like(g).add_(g, alpha=2).mul_(0.5).clamp_(max=0.1),
    "again and again": lambda g, h, v: doubled(g, 20),
    "copies": lambda g, h, v: g.clone().mul_(2).add_(h.clone()).detach(),
    "nothing left": lambda g, h, v: nn.functional.dropout(g, 1.0).abs(),
    "lerp": lambda g, h, v: torch.lerp(g, h, 0.3).masked_fill(g > 0, -1.0),
}


def doubled(grad: Any, count: int) -> Any:
    for _ in range(count):
        grad = (grad + grad.neg().abs() * grad.sign()) / 2
    return grad


def expressions(stage: int, neighbours: bool) -> dict[str, list[bytes]]:
    model, opt = started(stage, neighbours)
    opt.step()
    opt.zero_grad()
    backward(model, 1)
    weight, found = model[0].weight, {}
    arguments: list[Any] = [weight.grad, model[0].weight.grad.neg(), opt.state[weight]["exp_avg"].abs()]  # type: ignore[union-attr]
    wholes = [each.full_tensor() for each in arguments]
    made, read = {}, Peers.read
    with patch.object(Peers, "read", autospec=True, side_effect=read) as reading:
        for name, way in EXPRESSIONS.items():
            made[name] = way(*arguments)
            assert isinstance(made[name], Part), name
        assert not reading.call_count
        for name, part in made.items():
            expected = EXPRESSIONS[name](*wholes)
            assert part.dtype is expected.dtype, name
            reading.reset_mock()
            whole = part.read_whole()
            # Of each peer, each of the two records that a gradient and a state are; one was read last.
            assert reading.call_count <= 2 * (dist.get_world_size() - 1), (name, reading.call_count)
            assert raw(whole) == raw(expected), (name, whole, expected)
            found[name] = [raw(whole), raw(part.sum())]
            flat = expected.as_strided((W * W,), (1,))[part.start : part.start + part.local.numel()]
            torch.testing.assert_close(part.local, flat), name
    assert raw(made["a whole"].full_tensor()) == raw(EXPRESSIONS["a whole"](*wholes))
    # Of values that are not there any more it says so, and has its own slice still.
    given = OTHER.clone()
    late = arguments[0] * given
    given.zero_()
    with raises(StateError, "full_tensor() on every rank", "was written to since"):
        late.sum()
    assert raw(late.full_tensor()) == raw(wholes[0] * OTHER)
    # A result outlives its gradient, and edits of it.
    arguments[0].mul_(3)
    assert raw(made["two"].read_whole()) == raw(wholes[0] + wholes[1])
    # What is written is read anew: a mask that knew its answers, and an alias whose memory was asked for.
    mask = weight.grad.isfinite()
    assert mask.all() and not mask.logical_not_().any() and not mask.all()
    doubled_now = weight.grad * 2
    alias = doubled_now.detach()
    assert alias.data_ptr()
    doubled_now.add_(1)
    assert raw(alias.read_whole()) == raw(weight.grad.read_whole() * 2 + 1)
    average = made["two"]
    del made, late, arguments, mask, doubled_now, alias
    for number in range(4):
        opt.step()
        opt.zero_grad()
        backward(model, number + 2)
        average = average * 0.5 + weight.grad
    kept = [len(each.gradient_slice.kept) for each in opt.engine.domain.entries.values() if each.param is weight]
    assert kept <= [1]  # a history that grows is given up
    with raises(StateError, "full_tensor() on every rank"):
        average.sum()
    assert isinstance(average, Part) and average.full_tensor().isfinite().all()
    last = torch.zeros_like(weight.grad)
    for number in range(4):
        opt.step()
        opt.zero_grad()
        backward(model, number)
        last.copy_(weight.grad)
    assert raw(last.read_whole()) == raw(weight.grad.read_whole())  # what was overwritten is no part of its history
    opt.close()
    return found


def test_expressions(ranks: Pool) -> None:
    for world, stage, neighbours in ((2, 1, False), (2, 3, True), (3, 2, False)):
        found = ranks.run(expressions, stage, neighbours, world=world)
        assert all(each == found[0] for each in found)


EXPECTED: dict[str, Question] = {
    "sum": lambda g: g.sum(),
    "mean": lambda g: g.mean(),
    "absmean": lambda g: g.abs().mean(),
    "min": lambda g: g.min(),
    "max": lambda g: g.max(),
    "absmax": lambda g: g.abs().max(),
    "var": lambda g: g.var(),
    "std": lambda g: g.std(),
    "norm": lambda g: g.norm(),
    "zeros": lambda g: (g == 0).sum(),
    "nonfinite": lambda g: (~g.isfinite()).sum(),
}


def statistics(stage: int) -> dict[str, dict[str, float]]:
    model, opt = started(stage, True)
    model[2].bias.grad.mul_(0.5)  # type: ignore[union-attr, operator]
    with torch.no_grad():
        model[2].weight.grad[3:] = 0  # type: ignore[index]
    found = opt.gradient_statistics(*EXPECTED)
    assert found.keys() == dict(model.named_parameters()).keys()
    for name, param in model.named_parameters():
        mean: Tensor = param.grad.full_tensor().double()  # type: ignore[union-attr]
        for each, expected in EXPECTED.items():
            assert math.isclose(found[name][each], expected(mean).item(), rel_tol=1e-12, abs_tol=1e-15), (name, each)
    rank = dist.get_rank()
    for wrong in ((), ("median",)):
        with raises(ValueError, "ask for some of", "'absmax'"):
            opt.gradient_statistics(*wrong)
    if dist.get_world_size() > 1:
        with raises(DisagreementError, "gradient_statistics"):
            opt.gradient_statistics("max" if rank else "min")
    opt.zero_grad()
    assert opt.gradient_statistics("max") == {}
    backward(model, 1)
    if rank == 0:
        model[0].weight.grad.local[:1].fill_(math.nan)  # type: ignore[union-attr]
    spoilt = opt.gradient_statistics("sum", "nonfinite", "max")["0.weight"]
    assert math.isnan(spoilt["sum"]) and spoilt["nonfinite"] == 1 and math.isnan(spoilt["max"])
    opt.close()
    return found


def test_statistics(ranks: Pool) -> None:
    for world, stage in ((1, 2), (2, 1), (2, 3), (3, 2)):
        found = ranks.run(statistics, stage, world=world)
        assert all(each == found[0] for each in found)


def alone(stage: int) -> None:
    """One rank alone asks; another one is ahead."""
    model, opt = started(stage, False)
    rank, grad = dist.get_rank(), model[0].weight.grad
    assert isinstance(grad, Tensor)
    expected = by_hand(0)
    if rank == 0:  # no other rank makes a call for it
        torch.testing.assert_close(grad.std(), expected.std())
    dist.barrier()
    copied: Any = grad.clone()
    # A rank that has asked, too, keeps its slice as it changes it: who comes later gets what was there.
    if rank == 1:
        grad.sum()
        clip_grad_norm_(model.parameters(), 1e-3)
        grad.mul_(2)
    dist.barrier()
    if rank == 0:
        torch.testing.assert_close(grad.sum(), expected.sum())
        torch.testing.assert_close(copied.sum(), expected.sum())
        clip_grad_norm_(model.parameters(), 1e-3)
        grad.mul_(2)
    dist.barrier()
    # A rank that has not asked has changed it: the reader learns that at once, and may go on.
    if rank == 1:
        grad.mul_(0.5)
    dist.barrier()
    if rank == 0:
        try:
            grad.sum()
        except StateError as error:
            assert "full_tensor() on every rank" in str(error) and "changed" in str(error)
        else:
            raise AssertionError("what one rank has changed was read as one gradient")
        grad.mul_(0.5)
    opt.step()
    # The next round: a copy of the last gradient can be read still, alone; what nobody has a copy of is gone.
    opt.zero_grad()
    backward(model, 1)
    entries = opt.engine.domain.entries.values()
    assert [len(each.gradient_slice.kept) for each in entries if each.param is model[0].weight] == [1]
    assert sum(len(each.gradient_slice.kept) for each in entries) == 1
    if rank == 0:
        torch.testing.assert_close(copied.sum(), expected.sum())
    dist.barrier()
    torch.testing.assert_close(model[0].weight.grad.norm(1), model[0].weight.grad.full_tensor().norm(1))
    del copied
    # A rank that waits in its step changes no gradient any more.
    if rank == 0:
        model[0].weight.grad.mul_(2)
        try:
            model[0].weight.grad.sum()
        except StateError as error:
            assert "round 1 with 0 changes" in str(error)
        else:
            raise AssertionError("a gradient that one rank changed alone was read")
        model[0].weight.grad.mul_(0.5)
    opt.step()
    opt.zero_grad()
    backward(model, 2)
    assert not any(each.gradient_slice.kept for each in entries)
    opt.close()


def test_one_rank_alone(ranks: Pool) -> None:
    for stage in (1, 3):
        ranks.run(alone, stage, world=2)
