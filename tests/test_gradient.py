"""``param.grad`` as a part: what torch's own tools do with it on N ranks is what they do with the whole mean gradient.

The ranks are simulated in one process: each has params of its own, whose parts show slices of the same gradients.
"""

import copy
import io
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.utils.checkpoint import checkpoint
from training import raises, raw

from shardopt import StateError
from shardopt.gradient import GradientPart, Norms, Slot
from shardopt.part import Part

DIVISOR = 3  # not a power of two: dividing early, late or twice shows
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FOREACH = (None, True, False)
SPECIAL = (0.0, -0.0, 1.0, -1.0, 1e-45, 1e-38, 3e-20, 1e19, 3e38, math.inf, -math.inf, math.nan)


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
    """Params with parts on each of N ranks, and with the whole mean, in fp32, on none.

    Attributes:
        whole: fp32 params with plain gradients, for torch to work on.
        ranks: by rank, params of their own dtype, with parts.
        slots: by param, then by rank.
        gathers: how often a rank asked the others.
    """

    def __init__(self, size: int, sums: Sequence[Tensor] | None = None, like: Sequence[Parameter] | None = None):
        torch.manual_seed(size)
        like = params() if like is None else like
        sums = [5 * torch.randn_like(param, dtype=FP32) for param in like] if sums is None else sums
        self.gathers = 0
        self.received: list[Tensor] = []
        self.whole, self.slots = [], []
        self.ranks = [[Parameter(param.detach().clone()) for param in like] for _ in range(size)]
        for index, (param, total) in enumerate(zip(like, sums, strict=True)):
            reference = Parameter(torch.zeros_like(param, dtype=FP32))
            reference.grad = total / DIVISOR
            self.whole.append(reference)
            self.slots.append(self.shared(total, reference.grad, index))

    def shared(self, total: Tensor, mean: Tensor, index: int) -> list[Slot]:
        """The slots of all ranks, of uneven lengths; some are empty."""
        ends = sorted(int(torch.randint(0, total.numel() + 1, ())) for _ in self.ranks[1:]) + [total.numel()]
        slots: list[Slot] = []

        def gather(_: Tensor) -> Tensor:
            self.gathers += 1
            for slot in slots:
                slot.settle()
            return torch.cat([slot.total for slot in slots]).as_strided(mean.size(), mean.stride())

        for rank, (start, end) in enumerate(itertools.pairwise([0, *ends])):
            memory = torch.full((end - start + 2,), math.nan)  # what lies beside a slice must never be read
            memory[1:-1] = flat(total)[start:end]
            slot = Slot(memory[1:-1], start, self.received.append, gather if len(self.ranks) > 1 else None)
            slot.divisor, slot.norms = DIVISOR, norms_of(mean)
            self.ranks[rank][index].grad = GradientPart(slot, self.ranks[rank][index])
            slots.append(slot)
        return slots

    def check(self, expected: Sequence[Tensor] | None = None) -> None:
        """Slices hold the bits of the whole gradients; norms, where known, are theirs."""
        for index, slots in enumerate(self.slots):
            mean = self.whole[index].grad if expected is None else expected[index]
            assert mean is not None
            for rank, slot in enumerate(slots):
                part = self.ranks[rank][index].grad
                assert isinstance(part, GradientPart) and part.slot is slot
                slot.settle()
                assert raw(slot.total) == raw(flat(mean)[slot.start : slot.start + slot.total.numel()])
                if slot.norms is not None:
                    true = norms_of(mean)
                    assert (slot.norms.largest, slot.norms.nonfinite) == (true.largest, true.nonfinite)
                    assert slot.norms.two == pytest.approx(true.two, rel=2**-23, abs=1e-43)


def grads(each: Sequence[Parameter]) -> list[Tensor]:
    return [param.grad for param in each if param.grad is not None]


# -- torch's tools -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_clipping_by_norm(size: int, norm_type: float) -> None:
    for foreach, max_norm, plain_dtype in itertools.product(FOREACH, (0.7, 1e4), (FP32, BF16)):
        world = World(size)
        world.check()
        plain = torch.randn(4, 4).to(plain_dtype)  # of a param that somebody else reduces
        others = [Parameter(torch.zeros_like(plain)) for _ in range(size + 1)]
        for other in others:
            other.grad = plain.clone()
        by_torch = [param for param in world.whole if param.numel()]  # torch has no largest of nothing
        expected = get_total_norm([plain, *grads(by_torch)], norm_type)
        for rank, other in zip(world.ranks, others[1:], strict=True):
            # The plain one once in front, once behind: torch looks at the first for device and dtype.
            mixed = [other, *rank] if foreach else [*rank, other]
            norm = clip_grad_norm_(mixed, max_norm, norm_type, error_if_nonfinite=True, foreach=foreach)
            assert norm.dtype == FP32 and type(norm) is Tensor
            torch.testing.assert_close(norm, expected, rtol=0 if norm_type == math.inf else 5e-7, atol=0)
            assert get_total_norm(grads(mixed), norm_type) <= max_norm * (1 + 1e-6) or plain_dtype is BF16
        before = [grad.clone() for grad in grads(world.whole)]
        clip_grads_with_norm_([*world.whole, others[0]], max_norm, norm, foreach)
        world.check()  # to the bit what torch makes of the whole with the same norm
        assert all(raw(other.grad) == raw(others[0].grad) for other in others)
        assert all(torch.equal(*pair) for pair in zip(before, grads(world.whole), strict=True)) == (max_norm == 1e4)
        assert not world.gathers


@pytest.mark.parametrize("size", [1, 3])
def test_clipping_by_value(size: int) -> None:
    for foreach in FOREACH:
        world = World(size)
        clip_grad_value_(world.whole, 0.5, foreach)
        for rank in world.ranks:
            clip_grad_value_([rank[0], with_plain(), *rank[1:]], 0.5, foreach)
        world.check()
        for rank, whole in itertools.product(world.ranks, [world.whole]):
            for param, reference in zip(rank, whole, strict=True):
                if size == 1:
                    torch.testing.assert_close(param.grad.norm(), reference.grad.norm(), rtol=1e-2, atol=0)
                    continue
                with raises(StateError, "clamped", "full_tensor", "every rank"):
                    param.grad.norm()
                with raises(StateError, "clamped"):
                    torch.isfinite(param.grad)
                with raises(StateError, "clamped"):
                    unscaled(param.grad)
                param.grad.zero_()
                assert param.grad.norm() == 0  # known again
        assert not world.gathers


def with_plain() -> Parameter:
    param = Parameter(torch.zeros(3))
    param.grad = torch.ones(3)
    return param


def unscaled(*tensors: Tensor) -> float:
    found_inf = torch.zeros(())
    torch._amp_foreach_non_finite_check_and_unscale_(list(tensors), found_inf, torch.tensor(0.3))
    return found_inf.item()


class Steps(torch.optim.Optimizer):
    """Counts its steps, and moves params by their slices as SGD at a rate of 1 does."""

    def __init__(self, params: Sequence[Parameter], **defaults: Any):
        super().__init__(params, defaults)
        self.steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for param in self.param_groups[0]["params"]:
            part = param.grad
            local = part.local if isinstance(part, GradientPart) else flat(part)
            start = part.start if isinstance(part, GradientPart) else 0
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
        for kind, each in enumerate([world.whole, *world.ranks]):
            scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1)
            optimizer = Steps([*each, with_plain()])
            scaler.scale(torch.ones(()))  # a scaler makes its scale at its first use
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert optimizer.steps == (bad is None), (index, place, kind)
            assert scaler.get_scale() == (scale * 2 if bad is None else scale / 2)
        world.check()
        if bad is None:
            for index, param in enumerate(world.whole):
                taken = torch.stack([rank[index].detach().float() for rank in world.ranks]).sum(0)
                torch.testing.assert_close(taken, param.detach(), rtol=1e-2 if index > 8 else 0, atol=0)
                assert param.numel() == 0 or param.detach().abs().sum() > 0
        assert not world.gathers


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_nonfinite(bad: float) -> None:
    """Inf and NaN are seen on every rank, whoever holds them; the norm is then NaN."""
    for index in (0, 3, 9, 10):
        sums = [torch.randn_like(param, dtype=FP32) for param in params()]
        flat(sums[index])[-1] = bad
        for foreach, size in itertools.product(FOREACH, (1, 4)):
            world = World(size, sums)
            for rank in world.ranks:
                with raises(RuntimeError, "non-finite"):
                    clip_grad_norm_(rank, 1.0, 2.0, error_if_nonfinite=True, foreach=foreach)
                part = rank[index].grad
                assert part.norm().isnan() and part.norm(math.inf).isnan()
                assert (
                    not torch.isfinite(part).all() and (~part.isfinite()).any() and part.isfinite().logical_not().any()
                )
                assert torch.isfinite(part).any() == (part.numel() > 1)
                if size > 1:
                    with raises(StateError, "isnan", "torch.isfinite"):
                        torch.isnan(part).any()
                    with raises(StateError, "isinf", "torch.isfinite"):
                        part.isinf().any()
                for other in rank[:index] + rank[index + 1 :]:
                    assert torch.isfinite(other.grad).all() and other.grad.isfinite().all()
                    assert not torch.isnan(other.grad).any() and not torch.isinf(other.grad).any()
                    assert torch.isfinite(other.grad).any() == (other.numel() > 0)
                    assert other.grad.isnan().all() == (other.numel() == 0)
            world.check()  # nothing was changed
            for rank in world.ranks:
                assert clip_grad_norm_(rank, 1.0, foreach=foreach).isnan()
            for param in (param for rank in world.ranks for param in rank):
                assert not param.grad.slot.total.isfinite().any()
                assert param.grad.isfinite().all() == (param.numel() == 0)
            assert not world.gathers


def test_zeroing() -> None:
    ways: list[Callable[[list[Parameter], bool], None]] = [
        lambda each, to_none: Steps(each).zero_grad(to_none),
        lambda each, to_none: Steps(each, foreach=True).zero_grad(to_none),
        lambda each, to_none: nn.ParameterList(each).zero_grad(to_none),
    ]
    for way in ways:
        world = World(3)
        for rank in world.ranks:
            way([*rank, with_plain()], False)
            assert all(part.norm() == 0 and part.isfinite().all() for part in grads(rank))
        world.check([torch.zeros_like(grad) for grad in grads(world.whole)])
        for rank in world.ranks:
            way(rank, True)
            assert not grads(rank)


# -- one part ----------------------------------------------------------------------------------------------------------


def test_description() -> None:
    """What a part says of itself is what a plain gradient would, but for the dtype of fp16."""
    world = World(3)
    for rank, slots in zip(world.ranks, zip(*world.slots, strict=True), strict=True):
        for param, slot in zip(rank, slots, strict=True):
            part = param.grad
            assert part is not None and part is slot.part and not part.is_sparse and not part.requires_grad
            assert (part.shape, part.stride(), part.device) == (param.shape, param.stride(), param.device)
            assert part.dtype == (FP32 if param.dtype is FP16 else param.dtype)
            assert part.layout == torch.strided and part.is_leaf and part.grad_fn is None
            assert f"shape={tuple(param.shape)}" in repr(part) and f"[{slot.start}:" in f"{part}"
            assert part.start == slot.start and part.local.dtype == FP32 and part.local.dim() == 1
            part.requires_grad_(False).detach_()


def test_same_gradient_and_copies() -> None:
    """detach() and .data are the same gradient, to be written through; clones and casts are not."""
    world = World(3)
    whole = grads(world.whole)
    for index, param in enumerate(world.ranks[1]):
        part = param.grad
        kept = [part.clone(), copy.deepcopy(part), part.double(), part.data.to(BF16, copy=True), part.detach().clone()]
        part.data.mul_(0.3)
        part.detach().detach().neg_()
        part.data.div_(7)
        here = slice(part.start, part.start + part.local.numel())
        assert raw(part.local) == raw(-flat(whole[index])[here] * 0.3 / 7)
        assert part.norm(dtype=torch.float64).item() == pytest.approx(norms_of(whole[index] * 0.3 / 7).two, rel=1e-6)
        for other, dtype in zip(kept, (part.dtype, part.dtype, torch.float64, BF16, part.dtype), strict=True):
            assert type(other) is Part and other.dtype == dtype and other.stride() == part.stride()
            local = flat(whole[index])[here]
            assert raw(other.local) == raw(local if dtype is part.dtype else local.to(dtype))
            with raises(StateError, "a copy"):
                other.full_tensor()
    assert not world.gathers


def test_full_tensor() -> None:
    for size in (1, 3):
        world = World(size)
        for rank in world.ranks:
            for param, reference in zip(rank, world.whole, strict=True):
                full = param.grad.full_tensor()
                assert type(full) is Tensor and full.dtype == param.grad.dtype and full.stride() == reference.stride()
                assert raw(full) == raw(reference.grad.to(full.dtype))
                full.zero_()
        world.check()


def test_norms_and_their_dtypes() -> None:
    """A known norm is the exact one, rounded once, in the dtype asked for."""
    world = World(2)
    for rank, dtype in itertools.product(world.ranks, (None, FP32, torch.float64)):
        for param, reference in zip(rank, world.whole, strict=True):
            part, exact = param.grad, norms_of(reference.grad)
            for order, value in ((2, exact.two), (math.inf, exact.largest)):
                expected = torch.tensor(value, dtype=dtype or FP32)
                found = [torch.norm(part, order, dtype=dtype), part.norm(order, dtype=dtype)]
                found += torch._foreach_norm([part, torch.ones(4)], order, dtype)[:1]
                found += [torch.linalg.vector_norm(part, order, dtype=dtype), part.data.norm(p=order, dtype=dtype)]
                for norm in found:
                    assert type(norm) is Tensor and norm.shape == () and norm.dtype == expected.dtype
                    assert raw(norm) == raw(expected)
            assert part.norm() == torch.linalg.norm(part) == part.norm("fro") == torch.norm(part)
            for refused in (lambda g: g.norm(1), lambda g: g.norm(2, keepdim=True), lambda g: g.norm(2, dim=())):
                if refused(torch.ones(2, 2)).shape == () and part.dim() < 2:
                    continue
            with raises(StateError, "norm", "full_tensor"):
                part.norm(1)
            with raises(StateError, "norm", "full_tensor"):
                part.norm(2, keepdim=True)
    with raises(StateError, "norm", "full_tensor"):
        world.ranks[0][4].grad.norm(2, dim=0)
    assert not world.gathers


@given(
    st.lists(st.sampled_from(SPECIAL) | st.floats(width=32), max_size=7),
    st.lists(
        st.tuples(
            st.sampled_from(
                ["mul", "mul0d", "mul1e", "div", "divd", "neg", "zero", "clamp", "alias", "lists", "unscale"]
            ),
            st.sampled_from(SPECIAL) | st.floats(width=32) | st.floats(0.01, 100),
        ),
        max_size=6,
    ),
    st.integers(2, 4),
)
@settings(max_examples=400, deadline=None)
def test_any_sequence(values: list[float], steps: list[tuple[str, float]], size: int) -> None:
    """After any changes in place: the bits of each slice are those of the whole, norms are right or not known."""
    world = World(size, [torch.tensor(values, dtype=FP32)], [Parameter(torch.zeros(len(values)))])
    mean = world.whole[0].grad
    slack, is_known = 0.0, True  # how far the norm may be off; whether it must be known
    for name, number in steps:
        before, found = norms_of(mean), []
        for each in [mean, *(rank[0].grad for rank in world.ranks)]:
            found.append(change(each, name, number) if name != "unscale" or is_known else None)
        assert len(set(found)) == 1, "ranks that disagree whether to skip"
        slack = slack * growth(name, number) + norms_of(mean).two * 2**-23 + math.sqrt(len(values)) * 2**-149
        overflowed = norms_of(mean).nonfinite not in (before.nonfinite, len(values))
        is_known = name == "zero" or (is_known and name != "clamp" and not overflowed)
        if name == "zero":
            slack = 0.0
        true = norms_of(mean)
        for slot in world.slots[0]:
            assert raw_numbers(slot) == raw_numbers_of(mean, slot)
            if slot.norms is None:
                assert not is_known or true.nonfinite == len(values)
                continue
            assert (slot.norms.largest, slot.norms.nonfinite) == (true.largest, true.nonfinite)
            assert abs(slot.norms.two - true.two) <= slack


def change(tensor: Tensor, name: str, number: float) -> float | None:
    match name:
        case "mul":
            assert tensor.mul_(number) is tensor
        case "mul0d":
            tensor.mul_(torch.tensor(number))
        case "mul1e":
            tensor.mul_(torch.tensor([number]))
        case "div":
            assert tensor.div_(number) is tensor
        case "divd":
            tensor.div_(torch.tensor(number, dtype=torch.float64))
        case "neg":
            assert tensor.neg_() is tensor
        case "zero":
            assert tensor.zero_() is tensor
        case "clamp":
            assert tensor.clamp_(-abs(number), abs(number)) is tensor
            tensor.clamp_min_(-2).clamp_max_(2.5)
        case "alias":
            tensor.data.mul_(number)
        case "lists":
            torch._foreach_mul_([torch.ones(2), tensor], number)
            torch._foreach_neg_([tensor])
        case "unscale":
            found_inf = torch.zeros(())
            torch._amp_foreach_non_finite_check_and_unscale_([tensor], found_inf, torch.tensor(number))
            return found_inf.item()
    return None


def growth(name: str, number: float) -> float:
    number = torch.tensor(number, dtype=FP32).abs().item()
    if not 0 < number < math.inf or name in ("neg", "zero", "clamp"):
        return 1.0
    return 1 / number if name.startswith("div") else number


def raw_numbers(slot: Slot) -> bytes:
    slot.settle()
    return raw(slot.total.nan_to_num(12345.0))  # a NaN's sign is nobody's business


def raw_numbers_of(mean: Tensor, slot: Slot) -> bytes:
    return raw(mean[slot.start : slot.start + slot.total.numel()].nan_to_num(12345.0))


# -- accumulation ------------------------------------------------------------------------------------------------------


def test_second_backward() -> None:
    """Autograd's add_ hands the full local gradient over and leaves the part where it is."""
    for size in (1, 3):
        world = World(size)
        for param in world.ranks[0]:
            part, before = param.grad, raw(param.grad.slot.total)
            x = torch.randn_like(param)
            (param * x).sum().backward()
            checkpoint(lambda param=param, x=x: (param * x).sum(), use_reentrant=False).backward()
            assert param.grad is part and raw(part.slot.total) == before
            assert len(world.received) == 2
            for grad in world.received:
                assert type(grad) is Tensor and grad.dtype == param.dtype and raw(grad) == raw(x)
            world.received.clear()
        world.check()


def test_only_autograd_adds() -> None:
    for size in (1, 3):
        world = World(size)
        param = world.ranks[0][4]
        part, other = param.grad, torch.ones(16, 16)
        with torch.no_grad():
            for add in (
                lambda: part.add_(other),
                lambda: part.add_(other, alpha=0.1),
                lambda: part.add_(1.0),
                lambda: part.add_(world.ranks[-1][4].grad),
                lambda: part.sub_(other),
                lambda: torch._foreach_add_([part], [other]),
            ):
                with raises(StateError, "backward" if "add_(" in raw_source(add) else "spread over ranks"):
                    add()

        def hook(grad: Tensor, part: Tensor = part) -> None:
            for wrong in (lambda: part.add_(grad, alpha=2), lambda: part.add_(grad[:1]), lambda: part.add_(part)):
                with raises(StateError, "backward"):
                    wrong()

        param.register_hook(hook)
        param.sum().backward()
        assert len(world.received) == 1  # by autograd, behind the hook
        if size > 1:
            with pytest.warns(UserWarning, match="create_graph"), raises(StateError, "add.Tensor"):
                param.square().sum().backward(create_graph=True)
        world.check()


def raw_source(function: Callable[..., Any]) -> str:
    return " ".join(f"{name}(" for name in function.__code__.co_names if "foreach" not in name)


# -- what is refused ---------------------------------------------------------------------------------------------------

OTHER = torch.ones(16, 16)
READS: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda g: g.sum(),
    "mean": lambda g: g.mean(),
    "abs": lambda g: g.abs().max(),
    "add": lambda g: g + 1,
    "sub": lambda g: OTHER - g,
    "mul": lambda g: g * OTHER,
    "view": lambda g: g.view(-1).clone(),
    "select": lambda g: g[3].clone(),
    "transpose": lambda g: g.t().contiguous(),
    "mm": lambda g: g @ g,
    "cat": lambda g: torch.cat([g, OTHER]),
    "copy_": lambda g: torch.zeros(16, 16).copy_(g),
    "add_": lambda g: torch.zeros(16, 16).add_(g, alpha=-0.1),
    "_foreach_add_": lambda g: foreach_added(g),
    "eq": lambda g: g == g,
    "histc": lambda g: g.float().histc(5),
    "_local_scalar_dense": lambda g: torch.tensor(g[2, 3].item()),
    "tolist": lambda g: torch.tensor(g.tolist()),
    "numpy": lambda g: torch.from_numpy(g.float().numpy().copy()),
    "zeros_like": lambda g: torch.zeros_like(g),
    "clamp": lambda g: g.clamp(-1, 1),
}
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "fill_": lambda g: g.fill_(1),
    "copy_": lambda g: g.copy_(OTHER),
    "mul_": lambda g: g.mul_(OTHER),
    "div_": lambda g: g.div_(OTHER[0]),
    "mul_.Tensor": lambda g: g.mul_(g),
    "div_.Tensor_mode": lambda g: g.div_(2, rounding_mode="floor"),
    "sqrt_": lambda g: g.sqrt_(),
    "clamp_.Tensor": lambda g: g.clamp_(-OTHER, OTHER),
    "masked_fill_": lambda g: g.masked_fill_(OTHER > 0, 0),
    "index_put_": lambda g: g.__setitem__(OTHER > 0, 0),
    "normal_": lambda g: g.normal_(),
    "add.out": lambda g: torch.add(OTHER, OTHER, out=g),
    "_foreach_mul_": lambda g: torch._foreach_mul_([g], [OTHER]),
    "_foreach_sqrt_": lambda g: torch._foreach_sqrt_([g]),
}


def foreach_added(grad: Tensor) -> Tensor:
    sums = [torch.zeros(16, 16), torch.ones(16, 16)]
    torch._foreach_add_(sums, [grad, grad], alpha=2)
    return torch.cat(sums)


def test_refusals_and_whole_gradients() -> None:
    """What a slice cannot answer is refused by name; a rank that holds everything answers all reads as torch does."""
    for dtype in (FP32, BF16, FP16):
        like, sums = [Parameter(torch.zeros(16, 16, dtype=dtype))], [torch.randn(16, 16)]
        sharded, alone = World(3, sums, like), World(1, sums, like)
        for name, read in READS.items():
            with raises(StateError, "" if name in ("numpy", "histc", "transpose") else name, "full_tensor"):
                read(sharded.ranks[1][0].grad)
            part = alone.ranks[0][0].grad
            plain = alone.whole[0].grad.to(part.dtype)
            found, expected = read(part), read(plain)
            if name in ("view", "select", "transpose", "_local_scalar_dense"):  # of the slot's own memory, in fp32
                expected = read(alone.whole[0].grad)
            assert type(found) is Tensor and found.dtype == expected.dtype and raw(found) == raw(expected), name
        for world in (sharded, alone):
            for name, write in WRITES.items():
                part = world.ranks[0][0].grad
                with raises(StateError, name, "spread over ranks"):
                    write(part)
            with raises(StateError, "full_tensor"):
                torch.save(world.ranks[0][0].grad, io.BytesIO())
            world.check()


def test_writes_past_the_part_are_noticed() -> None:
    """Whoever writes to ``.local``, or to a view of a whole gradient, leaves no norm that is silently wrong."""
    sharded, alone = World(3), World(1)
    for rank in sharded.ranks:
        for param in rank[3:]:
            part = param.grad
            part.local.sum(), part.local[:1].clone()
            assert part.norm() > 0
            part.mul_(2)
            assert part.norm() > 0  # the part's own writes are followed
            part.local[:1].mul_(2)
            with raises(StateError, "written to through .local"):
                part.norm()
            part.zero_()
            part.local.add_(1)
            with raises(StateError, "written to through .local"):
                part.isfinite()
    for param in alone.ranks[0][3:]:
        part = param.grad
        view = part.view(-1) if part.is_contiguous() else part[0]
        part.zero_()
        view[:1] = 5
        assert part.norm() == 5 and part.sum() == 5
        view[:1] = math.inf
        assert unscaled(part) == 1 and not torch.isfinite(part).all()


def test_stale() -> None:
    """A part that its reducer replaced or dropped answers nothing: its memory holds another step's gradient."""
    for size, replace in itertools.product((1, 3), (True, False)):
        world = World(size)
        for param, slots in zip(world.ranks[0], world.slots, strict=True):
            part, alias, slot = param.grad, param.grad.detach(), slots[0]
            if replace:
                newer = param.grad = GradientPart(slot, param)
                assert slot.part is newer and not newer.is_stale and not newer.data.is_stale
            else:
                slot.part = None
            for each, use in itertools.product((part, alias), STALE_USES):
                with raises(StateError, "stale", "Read param.grad again"):
                    use(each)
            assert "stale" in repr(part)
            if not replace:
                with raises(StateError, "stale"):
                    param.sum().backward()
                param.grad = GradientPart(slot, param)
        assert not world.gathers and not world.received
        world.check()


STALE_USES: tuple[Callable[[Any], Any], ...] = (
    lambda g: g.norm(),
    lambda g: g.mul_(2),
    lambda g: g.div_(2),
    lambda g: g.neg_(),
    lambda g: g.zero_(),
    lambda g: g.clamp_(-1, 1),
    lambda g: torch._foreach_mul_([g], 2.0),
    lambda g: torch._foreach_norm([g]),
    lambda g: unscaled(g),
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


def test_lists_change_all_or_nothing() -> None:
    """One stale part in a list, and nothing of the list is changed."""
    world = World(2)
    old = world.ranks[0][5].grad
    world.ranks[0][5].grad = GradientPart(old.slot, world.ranks[0][5])
    mixed = [torch.ones(3), *grads(world.ranks[0]), old]
    for change_all in (
        lambda: torch._foreach_mul_(mixed, 2.0),
        lambda: torch._foreach_zero_(mixed),
        lambda: unscaled(*mixed),
    ):
        with raises(StateError, "stale"):
            change_all()
    assert mixed[0].sum() == 3
    world.check()


def test_compiled_model_accumulates() -> None:
    """Compiling looks at a param's gradient as well."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    like = list(model.parameters())
    world = World(3, None, like)
    for param, mine in zip(like, world.ranks[0], strict=True):
        param.grad = mine.grad
    compiled = torch.compile(model, backend="aot_eager")
    for rows in (3, 5):
        compiled(torch.randn(rows, 8)).sum().backward()
    assert len(world.received) == 2 * len(like)
    world.check()
