"""``param.grad`` as a part: what torch's own tools do with it on N ranks is what they do with the whole mean gradient.

The ranks are simulated in one process: each has params of its own, whose parts show slices of the same gradients.
"""

import copy
import io
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.utils.checkpoint import checkpoint

from shardopt import StateError
from shardopt.tensors.expressions import PartResult
from shardopt.tensors.gradient import GradientPart
from shardopt.tensors.gradient_slice import GradientSlice, Home
from shardopt.tensors.norm_table import Norms, NormTable
from tests.support.training import raises, raw

DIVISOR = 3  # not a power of two: dividing early, late or twice shows
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FOREACH = (None, True, False)
SPECIAL = (0.0, -0.0, 1.0, -1.0, 1e-45, 1e-38, 3e-20, 1e19, 3e38, math.inf, -math.inf, math.nan)
OTHER = torch.ones(16, 16)


def params() -> list[Parameter]:
    """Every shape that has gone wrong somewhere, in three dtypes."""
    shapes = [(), (0, 3), (1,), (257,), (16, 16), (5, 51), (2, 3, 4, 5)]
    found = [torch.zeros(shape) for shape in shapes]
    found += [torch.zeros(7, 5).t(), torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)]
    found += [torch.zeros(33, dtype=BF16), torch.zeros(9, 4, dtype=FP16)]
    return [Parameter(each) for each in found]


def flat(tensor: Tensor) -> Tensor:
    """1D, in storage order, not a copy."""
    return tensor.as_strided((tensor.numel(),), (1,))


def norms_of(mean: Tensor) -> Norms:
    exact = mean.double().flatten()
    exact = exact[exact.isfinite()]
    largest = exact.abs().max().item() if exact.numel() else 0.0
    return Norms(exact.square().sum().sqrt().item(), largest, mean.numel() - exact.numel())


class World:
    """Params with parts on each of N ranks, and the whole mean gradients for torch to work on.

    Where slices are kept in less than fp32, whoever changes the whole has to round it.

    Attributes:
        whole: fp32 params with plain gradients.
        ranks: by rank, params of their own dtype, with parts.
        slices: by param, then by rank.
        gathers: how often a rank asked the others.
        received: what autograd added to parts.
    """

    def __init__(
        self,
        size: int,
        sums: Sequence[Tensor] | None = None,
        like: Sequence[Parameter] | None = None,
        kept: torch.dtype = FP32,
    ):
        torch.manual_seed(size)
        like = params() if like is None else like
        sums = [5 * torch.randn_like(param, dtype=FP32) for param in like] if sums is None else sums
        self.gathers, self.received = 0, []
        self.whole: list[Parameter] = []
        self.slices: list[list[GradientSlice]] = []
        self.ranks = [[Parameter(param.detach().clone()) for param in like] for _ in range(size)]
        # One buffer a rank, as in a shard. What lies between two slices must never be read.
        numel = sum(total.numel() + 1 for total in sums)
        self.buffers, self.used = torch.full((size, numel), math.nan, dtype=kept), [0] * size
        self.homes = [Home(buffer, len(sums)) for buffer in self.buffers]
        self.tables = [NormTable(kept, [total.numel() for total in sums]) for _ in self.ranks]
        for index, (param, total) in enumerate(zip(like, sums, strict=True)):
            self.whole.append(Parameter(torch.zeros_like(param, dtype=FP32)))
            total = total.to(kept).float()
            self.whole[-1].grad = (total / DIVISOR).to(kept).float()
            self.slices.append(self.shared(total, index))

    def shared(self, total: Tensor, index: int) -> list[GradientSlice]:
        """The slices of all ranks, of uneven lengths; some are empty."""
        mean, slices = (total / DIVISOR).to(self.buffers.dtype).float(), []

        def gather(mine: Tensor) -> Tensor:
            self.gathers += 1
            assert next(gradient_slice for gradient_slice in slices if gradient_slice.total is mine).divisor == 1
            for gradient_slice in slices:
                gradient_slice.divide()
            return torch.cat([gradient_slice.total for gradient_slice in slices]).as_strided(mean.size(), mean.stride())

        cuts = sorted(int(torch.randint(0, total.numel() + 1, ())) for _ in self.ranks[1:])
        for rank, (start, end) in enumerate(itertools.pairwise([0, *cuts, total.numel()])):
            memory = self.buffers[rank][self.used[rank] : self.used[rank] + end - start]
            self.used[rank] += end - start + 1
            memory.copy_(flat(total)[start:end])
            shared = gather if len(self.ranks) > 1 else None
            place = self.tables[rank], index
            gradient_slice = GradientSlice(memory, start, place, self.received.append, shared, home=self.homes[rank])
            gradient_slice.divisor, gradient_slice.norms = DIVISOR, norms_of(mean)
            self.ranks[rank][index].grad = GradientPart(gradient_slice, self.ranks[rank][index])
            slices.append(gradient_slice)
        return slices

    def pairs(self) -> list[tuple[Any, Parameter]]:
        """Every part with the param that has the whole of its gradient."""
        return [pair for rank in self.ranks for pair in zip(grads(rank), self.whole, strict=True)]

    def check(self) -> None:
        """Slices hold the bits of the whole gradients; norms, where known, are theirs; no rank asked another."""
        for index, (param, slices) in enumerate(zip(self.whole, self.slices, strict=True)):
            true = norms_of(param.grad)
            for rank, gradient_slice in enumerate(slices):
                assert self.ranks[rank][index].grad.gradient_slice is gradient_slice
                gradient_slice.divide()
                assert raw(gradient_slice.total) == raw(
                    flat(param.grad)[gradient_slice.start : gradient_slice.start + gradient_slice.total.numel()]
                )
                if gradient_slice.norms is not None:
                    assert (gradient_slice.norms.largest, gradient_slice.norms.nonfinite) == (
                        true.largest,
                        true.nonfinite,
                    )
                    assert gradient_slice.norms.two == pytest.approx(true.two, rel=2**-23, abs=1e-43)
        assert not self.gathers


def grads(each: Sequence[Parameter]) -> list[Any]:
    return [param.grad for param in each if param.grad is not None]


def plain(dtype: torch.dtype = FP32) -> Parameter:
    """A param whose gradient somebody else reduces."""
    param = Parameter(torch.zeros(3, dtype=dtype))
    param.grad = torch.tensor([1.0, -2.0, 3.0], dtype=dtype)
    return param


def unscale(*tensors: Tensor, inverse: float = 0.3) -> float:
    found_inf = torch.zeros(())
    torch._amp_foreach_non_finite_check_and_unscale_(list(tensors), found_inf, torch.tensor(inverse))
    return found_inf.item()


# -- torch's tools -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_clipping_by_norm(size: int, norm_type: float) -> None:
    for foreach, max_norm, dtype in itertools.product(FOREACH, (0.7, 1e4), (FP32, BF16)):
        world, theirs = World(size), plain(dtype)
        by_torch = [param for param in world.whole if param.numel()]  # torch has no largest of nothing
        before = [grad.clone() for grad in grads(world.whole)]
        expected = get_total_norm(grads([theirs, *by_torch]), norm_type)
        for rank in world.ranks:
            # The plain one in front, then behind: torch looks at the first for a device and a dtype.
            mixed = [plain(dtype), *rank] if foreach else [*rank, plain(dtype)]
            norm = clip_grad_norm_(mixed, max_norm, norm_type, error_if_nonfinite=True, foreach=foreach)
            assert type(norm) is Tensor and norm.dtype == FP32
            torch.testing.assert_close(norm, expected, rtol=0 if norm_type == math.inf else 5e-7, atol=0)
            clipped = get_total_norm(grads(rank), norm_type, foreach=foreach)
            assert clipped <= max_norm * (1 + 1e-6)
        clip_grads_with_norm_([*world.whole, theirs], max_norm, norm, foreach)
        world.check()  # to the bit what torch makes of the whole with the same norm
        assert all(torch.equal(*pair) for pair in zip(before, grads(world.whole), strict=True)) == (max_norm == 1e4)


def test_clipping_reads_its_factor_once() -> None:
    """On a GPU the host waits for the device at each read."""
    for foreach in FOREACH:
        rank = World(2).ranks[0]
        with torch.autograd.profiler.profile() as profile:
            clip_grad_norm_(rank, 0.7, foreach=foreach)
        assert [event.name for event in profile.function_events].count("aten::item") == 1, foreach


def test_a_factor_that_changes_is_read_again() -> None:
    world = World(2)
    factor, other = torch.tensor(0.5), torch.tensor(0.25)
    for each in (world.whole, *world.ranks):
        for by in (factor, other, factor):
            for grad in grads(each):
                grad.mul_(by)
        factor.mul_(0.5)
        for grad in grads(each):
            grad.mul_(factor)
        factor.data.fill_(0.75)  # which leaves the version as it is, as a collective does
        for grad in grads(each):
            grad.mul_(factor)
        factor.fill_(0.5)
    with torch.inference_mode():
        factor = torch.tensor(0.5)
    for each in (world.whole, *world.ranks):
        for grad in grads(each):
            grad.mul_(factor)
    world.check()


def test_norms_are_scaled_under_any_error_mode_of_numpy() -> None:
    """Clipping has changed the gradients by then: norms that end as subnormals, zeros or beyond fp32 raise nothing."""
    for factor in (1e-12, 1e-38, 1e38):
        table, rows = NormTable(torch.float32, [4, 4]), slice(None)
        table.fill(rows, np.full(2, 1e-30), np.array([1e-30, 1e20], np.float32), np.zeros(2, np.int64))
        with np.errstate(all="raise"):
            table.multiply(rows, factor)
        expected = torch.tensor([1e-30, 1e20]) * torch.tensor(factor)
        found = [each.largest if (each := table[row]) else math.inf for row in range(2)]
        assert found == expected.tolist(), factor


def test_a_bucket_is_clipped_at_once() -> None:
    """A list of all its gradients is changed by one operation on its memory, other lists gradient by gradient."""
    world = World(2)
    with torch.autograd.profiler.profile() as profile:
        torch._foreach_mul_(grads(world.ranks[0]), 0.5)
    names = [event.name for event in profile.function_events]
    assert [names.count("aten::div_"), names.count("aten::mul_")] == [1, 1]
    world = World(2)
    for each in (world.whole, *world.ranks):
        every = grads(each)
        torch._foreach_mul_([*every[1:], every[1]], 0.25)  # sums yet; as many as there are, one of them twice
        torch._foreach_mul_(every, 0.75)
        torch._foreach_mul_(every[1:], 0.5)
        torch._foreach_neg_([*every, every[2], every[2]])
    world.check()


@pytest.mark.parametrize("size", [1, 3])
def test_clipping_by_value(size: int) -> None:
    for foreach in FOREACH:
        world = World(size)
        clip_grad_value_(world.whole, 0.5, foreach)
        for rank in world.ranks:
            clip_grad_value_([rank[0], plain(), *rank[1:]], 0.5, foreach)
        world.check()
        for part, reference in world.pairs():
            if size == 1:
                torch.testing.assert_close(part.norm(), reference.grad.norm(), rtol=1e-6, atol=0)
                continue
            for look in (lambda g: g.norm(), torch.isfinite, torch.isnan, unscale):
                with raises(StateError, "clamped", "full_tensor", "every rank"):
                    look(part)
            assert part.zero_().norm() == 0  # known again


class Steps(torch.optim.Optimizer):
    """Moves params by their slices, as SGD at a rate of 1 does, and counts."""

    def __init__(self, params: Sequence[Parameter], **defaults: Any):
        super().__init__(params, defaults)
        self.steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for param in self.param_groups[0]["params"]:
            is_part = isinstance(param.grad, GradientPart)
            local, start = (param.grad.local, param.grad.start) if is_part else (flat(param.grad), 0)
            flat(param.data)[start : start + local.numel()].sub_(local)


@pytest.mark.parametrize("bad", [None, math.inf, math.nan])
def test_grad_scaler(bad: float | None) -> None:
    """Every rank unscales as torch does the whole; one bad element anywhere makes all ranks skip."""
    numels = [param.numel() for param in params()]
    places = [(i, at) for i, numel in enumerate(numels) if numel for at in {0, numel // 2, numel - 1}]
    for index, place in places if bad is not None else [(0, 0)]:
        sums = [1000 * torch.randn_like(param, dtype=FP32) for param in params()]
        if bad is not None:
            flat(sums[index])[place] = bad
        world, scale = World(3, sums), 3.0 * 2**10  # whose inverse rounds
        others = []
        for each in (world.whole, *world.ranks):
            others.append(plain())
            scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1)
            optimizer = Steps([*each, others[-1]])
            scaler.scale(torch.ones(()))  # a scaler makes its scale at its first use
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert optimizer.steps == (bad is None) and scaler.get_scale() == scale * (2 if bad is None else 0.5)
        world.check()
        assert all(raw(other.grad) == raw(plain().grad * (1 / scale)) for other in others)
        if bad is None:
            for rank_params, reference in zip(zip(*world.ranks, strict=True), world.whole, strict=True):
                low = rank_params[0].dtype != FP32
                moved = torch.stack([param.detach().float() for param in rank_params]).sum(0)
                torch.testing.assert_close(moved, reference.detach(), rtol=1e-2 if low else 0, atol=1e-6 if low else 0)
                assert moved.any() or not moved.numel()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_nonfinite(bad: float) -> None:
    """Inf and NaN are seen on every rank, whoever holds them; the norm is then NaN."""
    for index, foreach, size in itertools.product((0, 3, 9, 10), FOREACH, (1, 4)):
        sums = [torch.randn_like(param, dtype=FP32) for param in params()]
        flat(sums[index])[-1] = bad
        world = World(size, sums)
        for rank in world.ranks:
            with raises(RuntimeError, "non-finite"):
                clip_grad_norm_(rank, 1.0, 2.0, error_if_nonfinite=True, foreach=foreach)
            part = rank[index].grad
            assert part.norm().isnan() and part.norm(math.inf).isnan()
            assert not torch.isfinite(part).all() and (~part.isfinite()).any()
            assert type(part.isfinite().any()) is type(part.norm()) is Tensor
            assert part.isfinite().any() == part.isfinite().logical_not().logical_not().any() == (part.numel() > 1)
            for ask in (torch.isnan, torch.isinf):
                if size > 1:
                    with raises(StateError, ask.__name__, "call torch.isfinite"):
                        ask(part)
                else:
                    assert ask(part).any() == ask(torch.tensor(bad))
            for other in grads(rank[:index] + rank[index + 1 :]):
                assert torch.isfinite(other).all() and other.isfinite().all() and not (~other.isfinite()).any()
                assert not torch.isnan(other).any() and not other.isinf().any()
                assert other.isfinite().any() == (~other.isnan()).any() == (other.numel() > 0)
                assert other.isinf().all() == (other.numel() == 0)
        world.check()  # nothing was changed
        for rank in world.ranks:
            assert clip_grad_norm_(rank, 1.0, foreach=foreach).isnan()
            for part in grads(rank):
                assert not part.gradient_slice.total.isfinite().any() and part.isfinite().all() == (part.numel() == 0)


def test_zeroing() -> None:
    ways: list[Callable[[list[Parameter], bool], None]] = [
        lambda each, to_none: Steps(each).zero_grad(to_none),
        lambda each, to_none: Steps(each, foreach=True).zero_grad(to_none),
        lambda each, to_none: nn.ParameterList(each).zero_grad(to_none),
    ]
    for way in ways:
        world = World(3)
        way(world.whole, False)
        for rank in world.ranks:
            way([*rank, plain()], False)
            assert all(part.norm() == 0 and part.isfinite().all() for part in grads(rank))
        world.check()
        for rank in world.ranks:
            way(rank, True)
            assert not grads(rank)


# -- one part ----------------------------------------------------------------------------------------------------------


def test_description() -> None:
    """What a part says of itself is what a plain gradient would, but for the dtype of fp16."""
    world = World(3)
    for part, reference in world.pairs():
        assert raw(part.local) == raw(flat(reference.grad)[part.start : part.start + part.gradient_slice.total.numel()])
    for rank, slices in zip(world.ranks, zip(*world.slices, strict=True), strict=True):
        for param, gradient_slice in zip(rank, slices, strict=True):
            part = param.grad
            assert part is not None and part is gradient_slice.part and not part.is_sparse and not part.requires_grad
            assert (part.shape, part.stride(), part.device) == (param.shape, param.stride(), param.device)
            assert part.dtype == (FP32 if param.dtype is FP16 else param.dtype)
            assert part.layout == torch.strided and part.is_leaf and part.grad_fn is None
            assert f"shape={tuple(param.shape)}" in repr(part) and f"[{gradient_slice.start}:" in f"{part}"
            assert part.start == gradient_slice.start and part.local.dtype == FP32 and part.local.dim() == 1
            part.requires_grad_(False).detach_()
            param.grad = part.detach()  # as may be done with any gradient
            assert param.grad.norm() == part.norm()


def test_same_gradient_and_copies() -> None:
    """detach() and .data are the same gradient, to be written through; clones and casts are not."""
    world = World(3)
    for part, reference in world.pairs():
        mean = reference.grad
        kept = [part.clone(), copy.deepcopy(part), part.double(), part.data.to(BF16, copy=True), part.detach().clone()]
        part.data.mul_(0.3)
        part.detach().detach().neg_()
        part.data.div_(7)
        here = slice(part.start, part.start + part.local.numel())
        assert raw(part.local) == raw(-(flat(mean) * 0.3)[here] / 7)
        exact = norms_of(mean * 0.3 / 7)
        assert part.norm(dtype=torch.float64).item() == pytest.approx(exact.two, rel=2**-23)
        assert part.norm(math.inf) == exact.largest
        for other, dtype in zip(kept, (None, None, torch.float64, BF16, None), strict=True):
            assert type(other) is PartResult and other.dtype == (dtype or part.dtype)
            assert other.stride() == part.stride()
            assert raw(other.local) == raw(flat(mean)[here].to(part.dtype).to(other.dtype))


def test_full_tensor() -> None:
    for size in (1, 3):
        world = World(size)
        for part, reference in world.pairs():
            full = part.full_tensor()
            assert type(full) is Tensor and full.dtype == part.dtype and full.stride() == reference.stride()
            assert raw(full) == raw(reference.grad.to(full.dtype))
            full.zero_()
        assert world.gathers == (0 if size == 1 else size * len(world.whole))
        world.gathers = 0
        world.check()


def test_norms_and_their_dtypes() -> None:
    """A known norm is the exact one, rounded once, in the dtype asked for; any other is refused."""
    world = World(2)
    for rank, dtype in itertools.product(world.ranks, (None, FP32, torch.float64)):
        for part, reference in zip(grads(rank), world.whole, strict=True):
            exact = norms_of(reference.grad)
            for order, value in ((2, exact.two), (math.inf, exact.largest)):
                expected = torch.tensor(value, dtype=dtype or FP32)
                found = [torch.norm(part, order, dtype=dtype), part.norm(order, dtype=dtype)]
                found += torch._foreach_norm([part, torch.ones(4)], order, dtype)[:1]
                found += [torch.linalg.vector_norm(part, order, dtype=dtype), part.data.norm(p=order, dtype=dtype)]
                for norm in found:
                    assert type(norm) is Tensor and norm.shape == () and norm.dtype == expected.dtype
                    assert raw(norm) == raw(expected)
            assert part.norm() == torch.linalg.norm(part) == part.norm("fro") == torch.norm(part)
            for wrong in (lambda g: g.norm(1), lambda g: g.norm(2, keepdim=True), lambda g: g.norm(dtype=torch.int)):
                with raises(StateError, "norms of order", "order 2 and inf", "full_tensor"):
                    wrong(part)
            with raises(StateError, "new 0-d tensors"):
                torch.linalg.vector_norm(part, out=torch.zeros(()))
    with raises(StateError, "dim [0]", "over all elements"):
        world.ranks[0][4].grad.norm(2, dim=0)
    world.check()


def in_bf16(bound: float) -> float:
    """A bound that gradients of any format can be at: of -0 and one that rounds to 0, which is larger is open."""
    return torch.tensor(bound, dtype=BF16).item()


CHANGES: dict[str, Callable[[Any, float], Any]] = {
    "mul": lambda g, x: g.mul_(x),
    "mul by 0-d": lambda g, x: g.mul_(torch.tensor(x)),
    "mul by 1x1": lambda g, x: g.mul_(torch.tensor([x])),
    "mul of alias": lambda g, x: g.data.mul_(x),
    "mul in list": lambda g, x: torch._foreach_mul_([torch.ones(2), g], x),
    "mul in lists": lambda g, x: torch._foreach_mul_([torch.ones(2), g], [3.0, x]),
    "mul by unscale": lambda g, x: unscale(g, inverse=x),
    "div": lambda g, x: g.div_(x),
    "div by 0-d": lambda g, x: g.div_(torch.tensor(x, dtype=torch.float64)),
    "div in list": lambda g, x: torch._foreach_div_([g, torch.ones(2)], torch.tensor(x)),
    "neg": lambda g, x: g.neg_(),
    "neg in list": lambda g, x: torch._foreach_neg_([g]),
    "zero": lambda g, x: g.zero_(),
    "clamp": lambda g, x: g.clamp_(-abs(in_bf16(x)), abs(in_bf16(x))),
    "clamp from below": lambda g, x: g.clamp_min_(in_bf16(x)),
    "clamp from above": lambda g, x: g.clamp_max_(in_bf16(x)),
}
NUMBERS = st.sampled_from(SPECIAL) | st.floats(width=32) | st.floats(0.01, 100)


@example([1e-30, -1e-38], [("mul", 1e-38), ("mul", 3e38)], 2, FP32)  # to nothing, and not back
@example([1.0], [("div", 1e-45), ("neg", 0.0)], 2, FP32)  # out of range, all of it
@example([3e38, 1.0, math.nan], [("mul in list", 2.0), ("zero", 0.0), ("div", 2.0)], 3, FP32)  # some of it
@example([3.0, -6.0], [("mul by 0-d", 1.001), ("div by 0-d", 1.003), ("mul by 1x1", 257.0)], 2, BF16)
@example([0.0], [("div", -math.inf), ("clamp from below", 1e-45)], 2, BF16)  # a bound that bf16 does not hold
@given(
    st.lists(st.sampled_from(SPECIAL) | st.floats(width=32), max_size=7),
    st.lists(st.tuples(st.sampled_from(sorted(CHANGES)), NUMBERS), max_size=6),
    st.integers(2, 4),
    st.sampled_from([FP32, BF16]),
)
@settings(max_examples=1000)
def test_any_sequence(values: list[float], steps: list[tuple[str, float]], size: int, kept: torch.dtype) -> None:
    """After any changes in place: the bits of each slice are those of the whole, norms are right or not known.

    Kept in bf16, those of the whole that is computed with in fp32 and rounded after each change.
    """
    ulp, least = (2**-23, 2**-149) if kept is FP32 else (2**-8, 2**-133)
    world = World(size, [torch.tensor(values, dtype=FP32)], [Parameter(torch.zeros(len(values)))], kept)
    mean, parts = world.whole[0].grad, [rank[0].grad for rank in world.ranks]
    off, is_known = 0.0, True  # how far the norm may be off; whether it must be known
    for name, number in steps:
        if name == "mul by unscale" and not is_known:
            continue
        before = norms_of(mean)
        found = [CHANGES[name](each, number) for each in (mean, *parts)]
        if "list" not in name and "unscale" not in name and "alias" not in name:
            assert all(result is each for result, each in zip(found, (mean, *parts), strict=True))
        elif "unscale" in name:
            assert len(set(found)) == 1, "ranks that disagree whether to skip"
        mean.copy_(mean.to(kept))
        true, factor = norms_of(mean), torch.tensor(number, dtype=FP32).abs().item()
        if name.startswith("div"):
            factor = 1 / factor if factor else math.inf
        if not name.startswith(("mul", "div")):
            factor = 1.0
        off = 0.0 if name == "zero" else off * (factor if factor < math.inf else 1)
        off += true.two * ulp + math.sqrt(len(values)) * least
        overflowed = true.nonfinite > before.nonfinite and factor < math.inf
        is_known = name == "zero" or (is_known and not name.startswith("clamp") and not overflowed)
        for part in parts:
            part.gradient_slice.divide()
            # A NaN's sign and payload are nobody's business.
            here = mean[part.start : part.start + part.gradient_slice.total.numel()]
            assert raw(part.gradient_slice.total.nan_to_num(1.25)) == raw(here.to(kept).nan_to_num(1.25))
            norms = part.gradient_slice.norms
            assert (norms is not None) == is_known
            if norms is not None:
                assert (norms.largest, norms.nonfinite) == (true.largest, true.nonfinite)
                assert abs(norms.two - true.two) <= off and (norms.two == 0) == (norms.largest == 0)


# -- accumulation ------------------------------------------------------------------------------------------------------


def test_second_backward() -> None:
    """Autograd's add_ hands the full local gradient over and leaves the part where it is."""
    for size in (1, 3):
        world = World(size)
        for param in world.ranks[-1]:
            part, x = param.grad, torch.randn_like(param)
            (param * x).sum().backward()
            checkpoint(lambda param=param, x=x: (param * x).sum(), use_reentrant=False).backward()
            assert param.grad is part and not part.is_stale and len(world.received) == 2
            for grad in world.received:
                assert type(grad) is Tensor and grad.dtype == param.dtype and raw(grad) == raw(x)
            world.received.clear()
        world.check()


def test_only_autograd_adds_in_backward() -> None:
    for size in (1, 3):
        world = World(size)
        param = world.ranks[0][4]

        def hook(grad: Tensor, part: Any = param.grad) -> None:
            for add in (lambda g: g.add_(grad, alpha=2), lambda g: g.add_(grad[:1]), lambda g: g.add_(g)):
                with raises(StateError, "only autograd"):
                    add(part)
            with raises(StateError, "in backward"):
                part.sub_(grad)

        param.register_hook(hook)
        param.sum().backward()
        assert len(world.received) == 1  # by autograd, behind the hook
        if size > 1:
            with pytest.warns(UserWarning, match="create_graph"), raises(StateError, "add.Tensor"):
                param.square().sum().backward(create_graph=True)
        world.check()


def test_compiled_model_accumulates() -> None:
    """Compiling looks at a param's gradient as well."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    world = World(3, None, list(model.parameters()))
    for param, other in zip(model.parameters(), world.ranks[0], strict=True):
        param.grad = other.grad
    compiled = torch.compile(model, backend="aot_eager")
    for rows in (3, 5):
        compiled(torch.randn(rows, 8)).sum().backward()
    assert len(world.received) == 2 * len(world.whole)
    world.check()


# -- what is refused ---------------------------------------------------------------------------------------------------


def foreach_added(grad: Tensor) -> Tensor:
    sums = [torch.zeros(16, 16), torch.ones(16, 16)]
    torch._foreach_add_(sums, [grad, grad], alpha=2)
    return torch.cat(sums)


READS: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda g: g.sum(),
    "mean": lambda g: g.mean(),
    "max": lambda g: g.abs().max(),
    "add": lambda g: (g + 1).sum(),
    "sub": lambda g: OTHER - g,
    "mul": lambda g: g * OTHER,
    "mm": lambda g: g @ g,
    "cat": lambda g: torch.cat([g, OTHER]),
    "copy_": lambda g: torch.zeros(16, 16).copy_(g),
    "add_": lambda g: torch.zeros(16, 16).add_(g, alpha=-0.1),
    "mul_": lambda g: torch.ones(16, 16).mul_(g),
    "_foreach_add_": foreach_added,
    "eq": lambda g: g == g,
    "clamp": lambda g: g.clamp(-1, 1),
    "zeros_like": lambda g: torch.zeros_like(g),
    "tolist": lambda g: torch.tensor(g.tolist()),
    # Views are of the slice's own memory, in fp32.
    "view": lambda g: g.view(-1).clone(),
    "aten.t.": lambda g: g.t().contiguous(),
    "select": lambda g: g[2, 3].clone(),
}
VIEWS = ("view", "aten.t.", "select")
BY_ELEMENT = ("sub", "mul", "eq", "clamp", "zeros_like")  # a slice can answer
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "fill_": lambda g: g.fill_(1),
    "copy_": lambda g: g.copy_(OTHER),
    "mul_": lambda g: g.mul_(OTHER),
    "mul_ itself": lambda g: g.mul_(g),
    "div_": lambda g: g.div_(OTHER[0]),
    "div_.Tensor_mode": lambda g: g.div_(2, rounding_mode="floor"),
    "sub_": lambda g: g.sub_(OTHER),
    "abs_": lambda g: g.abs_(),
    "clamp_.Tensor": lambda g: g.clamp_(-OTHER, OTHER),
    "masked_fill_": lambda g: g.masked_fill_(OTHER > 0, 0),
    "index_put_": lambda g: g.__setitem__(OTHER > 0, 0),
    "add.out": lambda g: torch.add(OTHER, OTHER, out=g),
    "_foreach_add_": lambda g: torch._foreach_add_([g], [OTHER]),
    "_foreach_abs_": lambda g: torch._foreach_abs_([g]),
    "div_ of lists": lambda g: torch._foreach_div_([g], [OTHER]),
    "a write to .data": lambda g: setattr(g, "data", OTHER.to(g.dtype)),
}


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_refusals_and_whole_gradients(dtype: torch.dtype) -> None:
    """What a slice cannot answer is refused by name; a rank that holds everything answers all reads as torch does."""
    like, sums = [Parameter(torch.zeros(16, 16, dtype=dtype))], [torch.randn(16, 16)]
    sharded, alone = World(3, sums, like), World(1, sums, like)
    part, mean = alone.ranks[0][0].grad, alone.whole[0].grad
    for name, read in READS.items():
        found, expected = read(part), read(mean if name in VIEWS else mean.to(part.dtype))
        if name in BY_ELEMENT:
            result: Any = read(sharded.ranks[1][0].grad)
            here = flat(expected)[result.start : result.start + result.local.numel()]
            assert type(result) is PartResult and result.dtype == expected.dtype and raw(result.local) == raw(here)
        if name != "zeros_like":
            with raises(StateError, "" if name in (*BY_ELEMENT, *VIEWS, "add") else name, "full_tensor"):
                read(sharded.ranks[1][0].grad).sum()
        assert type(found) is Tensor and found.dtype == expected.dtype and raw(found) == raw(expected), name
    if dtype is not BF16:
        np.testing.assert_array_equal(np.asarray(part), mean.numpy())
    with raises(StateError, "numpy"):
        sharded.ranks[0][0].grad.numpy()
    for name, write in WRITES.items():
        for world in (World(3, sums, like), World(1, sums, like)):
            slices, expected = world.slices[0], world.whole[0].grad.to(part.dtype)
            write(expected)
            for rank in world.ranks:
                write(rank[0].grad)
            found = torch.cat([each.total for each in slices]).to(part.dtype)
            assert raw(found) == raw(flat(expected)), (name, found, expected)
            assert all(each.norms is None for each in slices)
    for world in (sharded, alone):
        for refused in (lambda g: g.cumsum_(0), lambda g: g.t_(), lambda g: setattr(g, "data", OTHER[:1])):
            with raises(StateError, "sharded over ranks"):
                refused(world.ranks[0][0].grad)
        world.check()
    with raises(StateError, "full_tensor"):
        torch.save(sharded.ranks[0][0].grad, io.BytesIO())


def test_writes_past_the_part_are_noticed() -> None:
    """Whoever writes to ``.local``, or to a view of a whole gradient, leaves no norm that is silently wrong."""
    sharded, alone = World(3), World(1)
    for part in (part for rank in sharded.ranks for part in grads(rank[3:])):
        part.local.sum(), part.local[:1].clone()
        assert part.mul_(2).norm() > 0  # the part's own writes are followed
        part.local[:1].mul_(2)
        with raises(StateError, "written to through .local"):
            part.norm()
        assert part.zero_().norm() == 0
        part.local.add_(1)
        with raises(StateError, "written to through .local"):
            part.isfinite()
    for part in grads(alone.ranks[0][3:]):
        view = part[(0,) * (part.dim() - 1)][:1]
        part.zero_()
        view.fill_(5)
        assert part.norm() == 5 and part.sum() == 5
        view.fill_(3.4e38)  # Inf if rounded to bf16, which the slice does not do
        assert torch.isfinite(part).all() and not torch.isinf(part).any() and unscale(part, inverse=1.0) == 0
        view.fill_(math.inf)
        assert unscale(part) == 1 and not torch.isfinite(part).all()
    part = World(1).ranks[0][3].grad
    part.numpy()[:] = 0
    assert part.norm() == 0


STALE_USES: tuple[Callable[[Any], Any], ...] = (
    lambda g: g.norm(),
    lambda g: g.mul_(2),
    lambda g: g.div_(2),
    lambda g: g.neg_(),
    lambda g: g.zero_(),
    lambda g: g.clamp_(-1, 1),
    lambda g: torch._foreach_mul_([g], 2.0),
    lambda g: torch._foreach_norm([g]),
    lambda g: unscale(g),
    lambda g: torch.isfinite(g),
    lambda g: torch.isnan(g),
    lambda g: g.local,
    lambda g: g.full_tensor(),
    lambda g: g.clone(),
    lambda g: copy.deepcopy(g),
    lambda g: g.data,
    lambda g: g.sum(),
    lambda g: g.tolist(),
)


def test_stale() -> None:
    """A part that its reducer replaced or dropped answers nothing: its memory holds another step's gradient."""
    for size, is_replaced in itertools.product((1, 3), (True, False)):
        world = World(size)
        for param, slices in zip(world.ranks[0], world.slices, strict=True):
            part, alias, gradient_slice = param.grad, param.grad.detach(), slices[0]
            if is_replaced:
                newer = param.grad = GradientPart(gradient_slice, param)
                assert gradient_slice.part is newer and not newer.is_stale and not newer.data.is_stale
            else:
                gradient_slice.part = None
                with raises(StateError, "stale"):
                    param.sum().backward()
            for each, use in itertools.product((part, alias), STALE_USES):
                with raises(StateError, "stale", "read param.grad again"):
                    use(each)
            assert "stale" in repr(part)
        assert not world.received
        world.check()


STALE_OPERANDS: tuple[Callable[[Tensor, Tensor], object], ...] = (
    lambda new, old: new.add_(old),
    lambda new, old: new.copy_(old),
    lambda new, old: new.lerp_(old.detach(), 0.5),
    lambda new, old: new.mul_(old),
    lambda new, old: new.masked_fill_(old > 0, 0.0),
    lambda new, old: setattr(new, "data", old),
    lambda new, old: torch._foreach_add_([new], [old]),
    lambda new, old: new + old,
    lambda new, old: torch.where(new > 0, new, old),
)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("edit", STALE_OPERANDS)
def test_a_stale_part_in_an_edit_of_the_new_one(edit: Callable[[Tensor, Tensor], object], size: int) -> None:
    """It would be the new gradient itself, whose memory is the same."""
    world = World(size)
    old = world.ranks[0][0].grad
    assert old is not None
    new = world.ranks[0][0].grad = GradientPart(old.gradient_slice, world.ranks[0][0])
    before = new.local.clone()
    with raises(StateError, "stale", "read param.grad again"):
        edit(new, old)
    assert torch.equal(new.local, before)


def test_lists_change_all_or_nothing() -> None:
    """One stale part in a list, and nothing of the list is changed."""
    world = World(2)
    old = world.ranks[0][5].grad
    world.ranks[0][5].grad = GradientPart(old.gradient_slice, world.ranks[0][5])
    mixed = [plain().grad, *grads(world.ranks[0]), old]
    scale, zero = (lambda: torch._foreach_mul_(mixed, 2.0)), (lambda: torch._foreach_zero_(mixed))
    for change in (scale, zero, lambda: unscale(*mixed)):
        with raises(StateError, "stale"):
            change()
    assert mixed[0].tolist() == [1, -2, 3]
    world.check()
