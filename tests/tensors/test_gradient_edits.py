"""What people do to ``param.grad`` between backward and step: the step is that of the whole gradient, so edited."""

import hashlib
import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

from shardopt import DisagreementError, Part, ShardedAdamW, StateError
from shardopt.tensors.noise import Noise
from tests.support.comparing import raw
from tests.support.number_formats import hashed
from tests.support.ranks import Pool
from tests.support.training import raises

from .test_gradient_questions import OTHER, W, backward, model_of, started

MASK = OTHER.sin().mul(40).sin() > 0
NOISE = torch.randn(W, W, generator=torch.Generator().manual_seed(3))


def index(grad: Any) -> None:
    grad[3] = 0
    grad[5:7, 2:] = 2.5
    grad[MASK] = -1
    grad[torch.tensor([1, 20])] = OTHER[:2]


def attribute(grad: Any) -> None:
    grad.data = NOISE.clone()


def by_list(grad: Any) -> None:
    torch._foreach_add_([grad, torch.zeros(2)], 0.5)
    torch._foreach_add_([grad], [NOISE], alpha=2)
    torch._foreach_mul_([grad], [OTHER])
    torch._foreach_addcmul_([grad], [OTHER], [NOISE], value=0.1)
    torch._foreach_lerp_([grad], [NOISE], 0.1)


EDITS: dict[str, Callable[[Any], Any]] = {
    "numbers": lambda g: g.mul_(3).div_(7).add_(0.1).sub_(0.3).neg_(),
    "a number in a tensor": lambda g: g.add_(torch.tensor(0.25)).mul_(torch.tensor(1.5)),
    "operators": lambda g: (g.__imul__(2), g.__itruediv__(3), g.__iadd__(1), g.__isub__(0.1)),
    "powers": lambda g: g.abs_().pow_(2).sqrt_(),
    "sign": lambda g: g.sign_(),
    "clamp": lambda g: g.clamp_(-0.01, 0.02),
    "clamp by tensors": lambda g: g.clamp_(min=-OTHER.abs(), max=OTHER.abs()),
    "a mask": lambda g: g.mul_(MASK),
    "a mask of numbers": lambda g: g.mul_(MASK.float()).add_(OTHER),
    "filled": lambda g: g.masked_fill_(MASK, 0.5),
    "noise": lambda g: g.add_(NOISE, alpha=0.3),
    "itself": lambda g: g.mul_(g).add_(g),
    "a copy of it": lambda g: g.add_(g.clone(), alpha=2),
    "an expression of it": lambda g: g.sub_(g * 0.25),
    "lerp": lambda g: g.lerp_(NOISE, 0.1).lerp_(OTHER, MASK.float()),
    "products": lambda g: g.addcmul_(OTHER, NOISE, value=0.1).addcdiv_(NOISE, OTHER.abs() + 1),
    "copied": lambda g: g.copy_(NOISE),
    "copied, of other strides": lambda g: g.copy_(NOISE.t()),
    "filled whole": lambda g: g.fill_(0.5),
    "rows": lambda g: g.mul_((OTHER[:, :1] > 0).float()),
    "index": index,
    "index of rows": lambda g: g.index_fill_(0, torch.tensor([2, 5]), 0.0),
    "nan_to_num": lambda g: g.nan_to_num_(),
    "out": lambda g: torch.nan_to_num(g, out=g),
    "added out": lambda g: torch.add(g, OTHER, out=g),
    "where": lambda g: torch.where(g > 0, g, OTHER, out=g),
    "centralised": lambda g: g.sub_(g.mean(dim=1, keepdim=True)),
    "weight decay": lambda g: g.add_(OTHER, alpha=0.01),
    "data": attribute,
    "set": lambda g: g.set_(NOISE.clone()),
    "through data": lambda g: g.data.add_(1).mul_(OTHER),
    "lists": by_list,
    "a view": lambda g: g.view(-1).mul_(2),
    "views of views": lambda g: (g.t()[1:].unbind()[0].zero_(), g[3].add_(OTHER[0]), g.data[:, 2:5].neg_()),
    "a mask of a view": lambda g: g.flatten().__setitem__(MASK.flatten(), 0.5),
    "a view, by a whole and itself": lambda g: g.t().mul_(OTHER).add_(g.t()[0, 0] * 0 + 1),
    "a view in a list": lambda g: torch._foreach_mul_([g.split(5)[1]], 3.0),
    "out of a view": lambda g: torch.add(OTHER[0], 1, out=g[1]),
    "clipped by itself": lambda g: g.mul_((0.1 * OTHER.norm() / g.norm()).clamp(max=1.0)),
}


def edited(stage: int, neighbours: bool) -> dict[str, bytes]:
    found = {}
    model, opt = started(stage, neighbours)
    for name, edit in EDITS.items():
        opt.zero_grad()
        backward(model, 0)
        grad: Any = model[0].weight.grad
        mean, reads = grad.full_tensor(), grad.norm()
        if name == "clipped by itself":
            mean.mul_((0.1 * OTHER.norm() / reads).clamp(max=1.0))
        else:
            edit(mean)
        with torch.no_grad():
            edit(grad)
        assert model[0].weight.grad is grad, name
        after = grad.full_tensor()
        assert raw(after) == raw(mean), (name, after, mean)
        # What is known of it is of what is there now.
        torch.testing.assert_close(grad.norm(), mean.norm())
        assert grad.norm(math.inf) == mean.abs().max() and grad.isfinite().all(), name
        found[name] = raw(after)
    # All of it is in the step, and clipping follows.
    means = [param.grad.full_tensor() for param in model.parameters()]  # type: ignore[union-attr]
    torch.testing.assert_close(clip_grad_norm_(model.parameters(), 0.1), get_total_norm(means))
    plain = model_of()
    for param, other in zip(plain.parameters(), model.parameters(), strict=True):
        param.grad = other.grad.full_tensor()  # type: ignore[union-attr]
    by_hand = ShardedAdamW(plain.parameters(), lr=0.01, stage=0)
    by_hand.step()
    opt.step()
    with opt.unsharded():
        for param, other in zip(plain.parameters(), model.parameters(), strict=True):
            assert raw(param.detach()) == raw(other.detach().clone())
    opt.close()
    return found


def test_edits(ranks: Pool) -> None:
    for world, stage, neighbours in ((1, 2, True), (2, 1, False), (2, 3, True), (3, 2, True)):
        found = ranks.run(edited, stage, neighbours, world=world)
        assert all(each == found[0] for each in found)


ASSIGNED: dict[str, Callable[[Any], Any]] = {
    "scaled": lambda g: g * 0.25,
    "divided": lambda g: g / 3,
    "nan_to_num": lambda g: torch.nan_to_num(g),
    "whole": lambda g: NOISE.clone(),
    "other strides": lambda g: NOISE.t().clone(),
}


def assigned(stage: int) -> None:
    """A gradient in place of the mean takes effect, if it is the same on all ranks."""

    def whole(grad: Any) -> Any:
        return grad.full_tensor() if isinstance(grad, Part) else grad

    model, opt = started(stage, True)
    for name, made in ASSIGNED.items():
        opt.zero_grad()
        backward(model, 0)
        weight = model[0].weight
        held: Any = weight.grad
        mean = made(held.full_tensor())
        weight.grad = made(held)
        opt.step()
        with raises(StateError, "stale"):  # its memory has the values that were assigned
            held.norm()
        assert raw(weight.grad.full_tensor()) == raw(mean.contiguous()), name
    # With clipping in between, and with another backward on top.
    opt.zero_grad()
    backward(model, 0)
    model[0].weight.grad = made(model[0].weight.grad)
    backward(model, 0)
    clip_grad_norm_(model.parameters(), 0.1)
    opt.step()
    # In lists, as a GradScaler and a script's own clipping change it; one element alone, of one rank, may be bad.
    for bad in (1.0, math.inf):
        opt.zero_grad()
        backward(model, 0)
        factor = torch.ones_like(NOISE)
        factor[0, 0] = bad
        model[0].weight.grad = model[0].weight.grad * factor  # type: ignore[operator]
        grads: list[Any] = [each.grad for each in model.parameters()]
        means = [whole(each) * 0.125 for each in grads]
        torch._foreach_mul_(grads, 0.5)
        found = torch.zeros(())
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, torch.tensor(0.25))
        assert [raw(whole(each)) for each in grads] == list(map(raw, means)), bad
        assert found == (bad != 1)
    if dist.get_world_size() > 1:
        opt.zero_grad()
        backward(model, 0)
        model[0].weight.grad = NOISE + dist.get_rank()
        with raises(DisagreementError, "changes in place of gradients", "param 0 of group 0", "copy_"):
            opt.step()
        for way in (lambda g, rank: g * (2.0 + rank), lambda g, rank: (g + (OTHER + 1e-6 * rank)).abs()):
            opt.zero_grad()
            backward(model, 0)
            model[0].weight.grad = way(model[0].weight.grad, dist.get_rank())
            with raises(DisagreementError, "changes in place of gradients", "copy_"):
                opt.step()
    opt.close()


def test_assigned_gradients(ranks: Pool) -> None:
    for world, stage in ((1, 2), (2, 1), (2, 2), (2, 3)):
        ranks.run(assigned, stage, world=world)


def projected(saved: Any, grad: Any) -> Any:
    """PCGrad: the gradient of one loss, without what contradicts that of another one."""
    return grad - torch.clamp((grad * saved).sum(), max=0) / (saved * saved).sum() * saved


COMBINED: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda saved, grad: grad + saved,
    "mean": lambda saved, grad: (saved + grad) / 2,
    "projected": projected,
    "projected the other way": lambda saved, grad: projected(grad, -saved),
    "of one average": lambda saved, grad: torch.lerp(saved, grad, 0.1),
    "stacked": lambda saved, grad: torch.stack([saved, grad]).median(dim=0).values,
}


def combined(stage: int) -> None:
    """Gradients of two backwards, one of which was cloned, make a third."""
    for name, way in COMBINED.items():
        model, opt = started(stage, name != "sum")
        weight = model[0].weight
        saved, first = weight.grad.clone(), weight.grad.full_tensor()  # type: ignore[union-attr,operator]
        clip_grad_norm_(model.parameters(), 0.1)  # of which the copy is nothing
        opt.zero_grad()
        backward(model, 1)
        mean = way(first, weight.grad.full_tensor())  # type: ignore[union-attr]
        with torch.no_grad():
            weight.grad = way(saved, weight.grad)
        opt.step()
        assert raw(weight.grad.full_tensor()) == raw(mean), name  # type: ignore[union-attr]
        opt.close()


def test_gradients_of_two_backwards(ranks: Pool) -> None:
    for world, stage in ((1, 2), (2, 1), (3, 3)):
        ranks.run(combined, stage, world=world)


DRAWN: dict[str, Callable[[Any], Any]] = {
    "rand_like": lambda g: torch.rand_like(g),
    "randn_like": lambda g: torch.randn_like(g),
    "in bf16": lambda g: torch.randn_like(g, dtype=torch.bfloat16).float(),
    "added": lambda g: torch.zeros_like(g).add_(torch.randn_like(g) * 0.1 + 1),
    "integers": lambda g: torch.randint_like(g, 3, 1000),
    "dropout": lambda g: (torch.nn.functional.dropout(g, 0.25) != 0).float(),
    "normal_": lambda g: g.normal_(2, 3),
    "uniform_": lambda g: g.uniform_(-1, 4),
    "bernoulli_": lambda g: g.bernoulli_(0.25).add_(g.bernoulli_(OTHER.abs())),
    "exponential_": lambda g: g.exponential_(2.0),
    "random_": lambda g: g.random_(5, 10_000),
    "noise added": lambda g: g.zero_().add_(torch.randn_like(g), alpha=0.1),
    "of a result": lambda g: torch.bernoulli(torch.full_like(g, 0.3)) + torch.zeros_like(g).bernoulli_(0.5),
}
# The mean and the standard deviation of each, of the whole.
OF_NOISE = {
    "rand_like": (0.5, 0.289),
    "randn_like": (0, 1),
    "in bf16": (0, 1),
    "added": (1, 0.1),
    "dropout": (0.75, 0.433),
    "normal_": (2, 3),
    "uniform_": (1.5, 1.443),
    "exponential_": (0.5, 0.5),
    "noise added": (0, 0.1),
}


def noises(stage: int, neighbours: bool) -> dict[str, bytes]:
    """Each rank draws its slice of one noise, wherever its own generator is."""
    model, opt = started(stage, neighbours)
    torch.manual_seed(dist.get_rank())
    found = {}
    for number in (0, 2):
        grad: Any = model[number].weight.grad
        for name, way in DRAWN.items():
            made = way(grad)
            drawn = made.full_tensor() if isinstance(made, Part) else made
            assert not isinstance(made, Part) or raw(made.read_whole()) == raw(drawn), name
            if name in OF_NOISE:
                mean, deviation = OF_NOISE[name]
                assert abs(drawn.mean() - mean) < 5 * deviation / W, (name, drawn.mean())
                assert abs(drawn.std() - deviation) < 0.15 * deviation, (name, drawn.std())
            if name != "of a result" or grad.gradient_slice.gather is not None:  # else it is a plain tensor's
                found[f"{name} {number}"] = raw(drawn)
    assert len({*found.values()}) == len(found)
    opt.step()
    if dist.get_world_size() > 1:
        opt.zero_grad()
        backward(model, 1)
        grad = model[2].weight.grad
        torch.rand_like(grad if dist.get_rank() else OTHER)
        grad.add_(torch.randn_like(grad))
        with raises(DisagreementError, "changes in place of gradients", "randn_like {} of draw"):
            opt.step()
    opt.close()
    return found


def test_noise(ranks: Pool) -> None:
    settings = ((1, 2, True), (1, 0, True), (2, 1, False), (2, 3, True), (3, 2, False))
    found = [each for world, *its in settings for each in ranks.run(noises, *its, world=world)]
    assert len(found[0]) == 2 * len(DRAWN) - 2
    for each in found:
        assert not [name for name in each if each[name] != found[-1][name]]


def test_noise_is_that_of_stochastic_rounding() -> None:
    noise = Noise(torch.ops.aten.random_, {"to": 2**32}, "", "a key", torch.int64)
    keys = struct.unpack("<ii", hashlib.blake2b(b"a key", digest_size=8).digest())
    expected = hashed(np.arange(250, 300), *keys, 0)
    assert noise.slice(250, 50, torch.device("cpu")).tolist() == expected.tolist()


def apart(stage: int) -> None:
    """Ranks that edit differently learn so in the step, before anything changes."""
    rank = dist.get_rank()
    ways: dict[str, Callable[[Any], Any]] = {
        "mul_ 2": lambda g: g.neg_().mul_(2 if rank else 1),
        "add_": lambda g: g.add_(0.5) if rank else None,
        "masked_fill_": lambda g: g.masked_fill_(MASK if rank else MASK.t(), 0.0),
        "copy_": lambda g: g.copy_(NOISE + 1e-6 * rank),
        "setitem": lambda g: g.__setitem__(rank, 0.0),
        "neg_": lambda g: g.neg_() if rank else None,
        "clamp_max_": lambda g: g.clamp_(max=1.0 + rank),
        "a view: aten.fill_": lambda g: g.view(-1)[rank : rank + 2].fill_(1.0),
        "mul_.Tensor": lambda g: g.t().mul_(OTHER + rank),
    }
    model, opt = started(stage, False)
    with opt.unsharded():
        before = [param.detach().clone() for param in model.parameters()]
    for words, way in ways.items():
        opt.zero_grad()
        backward(model, 0)
        with torch.no_grad():
            way(model[0].weight.grad)
        with raises(DisagreementError, words, "so no rank took the step"):
            opt.step()
        with opt.unsharded():
            assert all(map(torch.equal, before, model.parameters()))
    opt.zero_grad()
    backward(model, 0)
    opt.step()
    opt.close()


def test_ranks_that_differ(ranks: Pool) -> None:
    ranks.run(apart, 2, world=2)
    ranks.run(apart, 3, world=3)


REFUSED: dict[str, Callable[[Any], Any]] = {
    "cumsum_": lambda g: g.cumsum_(0),
    "the param's own shape": lambda g: setattr(g, "data", NOISE[:3]),
    "set_() of a storage": lambda g: g.set_(NOISE.untyped_storage()),
    "t_": lambda g: g.t_(),
    "resize_": lambda g: g.resize_(3),
}


def refused() -> None:
    model, opt = started(2, False)
    grad: Any = model[0].weight.grad
    before = grad.full_tensor()
    for words, way in REFUSED.items():
        with raises(StateError, words), torch.no_grad():
            way(grad)
    with raises(RuntimeError, "expand"), torch.no_grad():
        grad.mul_(torch.ones(3, 7))
    clip_grad_value_(model.parameters(), 1e9)
    clip_grads_with_norm_(model.parameters(), 1.0, torch.tensor(0.5))
    assert raw(grad.full_tensor()) == raw(before)
    opt.step()
    opt.close()


def test_refused_by_name(ranks: Pool) -> None:
    ranks.run(refused, world=2)
