"""The step kernels: Triton's, the native one and NumPy give the same bits, and touch nothing else.

Triton's interpreter takes its time for each program, so a program takes eight blocks here and a shard has two programs;
test_any_shard and test_programs_of_any_size have as many as a GPU would.
"""

import dataclasses
import gc
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

import llvmlite.binding
import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardopt.compilers.native import COMPILE_OPTIONS
from shardopt.config import Options
from shardopt.domain.formats import formats_for
from shardopt.kernels import native_backend, native_step, pool, triton_backend, triton_step
from shardopt.kernels.formats import (
    BF16,
    BF16_DITHERED,
    BF16_RANDOM,
    FP16,
    FP32,
    SIGNED8,
    SPLIT,
    SPLIT24,
    UNSIGNED8,
    Format,
)
from shardopt.kernels.launch import Backend
from shardopt.kernels.spec import Spec
from shardopt.kernels.tables import BLOCK, Factors, Gradients, Streams, Tables
from shardopt.kernels.translate import function_from_source
from shardopt.rules import rule
from shardopt.rules.passes import passes_of
from shardopt.rules.rule import Rule
from tests.support.cases import CASES, GRADIENTS, KEPT_IN, Case, Keywords
from tests.support.shards import BACKENDS, SCALES, HandmadeShard, Member, Shape, assert_same_bits, lone
from tests.support.sweep import sweep

Formats = tuple[Format, Format, Format | None, tuple[Format, ...]]  # of param, gradient, master and each state
FORMATS = [(param, grad) for param in (FP32, BF16, FP16) for grad in (FP32, BF16, FP16)]
# Of AdamW without amsgrad: every format of a master with every one of a state, and states that differ.
KEPT: list[Formats] = [
    (FP32, FP32, FP32, (SIGNED8, UNSIGNED8)),
    (FP32, BF16, FP32, (BF16, BF16_DITHERED)),
    (BF16, BF16, FP32, (SIGNED8, BF16_DITHERED)),
    (BF16, FP16, SPLIT, ()),
    (BF16, BF16, SPLIT, (SIGNED8, UNSIGNED8)),
    (BF16, FP32, SPLIT, (BF16, BF16_DITHERED)),
    (BF16, BF16, SPLIT24, (BF16_DITHERED, UNSIGNED8)),
    (BF16, FP32, SPLIT24, (SIGNED8, FP32)),
    (BF16_RANDOM, BF16, None, (SIGNED8, UNSIGNED8)),
    (BF16_RANDOM, FP32, None, (BF16_DITHERED, BF16)),
    (BF16_RANDOM, FP32, None, ()),
    (FP16, FP16, FP32, (UNSIGNED8, SIGNED8)),
]
# A block and its neighbours, one element, no element, a piece of a larger param, groups and steps of their own, a
# gradient of odd alignment: in the middle of the shard.
NASTY = Shape(
    members=(
        Member(BLOCK + 1, step=3),
        Member(1, step=1, lr_factor=0.5),
        Member(0),
        Member(2 * BLOCK, step=1000, lr_factor=3.0, before=5),
        Member(BLOCK - 1, skipped=True),
        Member(251, step=2**24 + 1),
        Member(4 * BLOCK, step=2),
        Member(7, step=1),
    ),
    empty_blocks=2,
    factors=Factors(unscale=1 / 3, clip=0.7),
)


def group_of(case: Case, keywords: Keywords) -> dict[str, Any]:
    """The param group that the class makes of its arguments, as plain numbers."""
    group = case.ours([torch.nn.Parameter(torch.zeros(1))], **keywords).param_groups[0]
    return {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in group.items()}


def variants() -> dict[Any, tuple[Case, dict[str, Any], Keywords]]:
    """Every variant once, with the last of its keywords: they turn most on."""
    found = {}
    for case in CASES:
        for keywords in case.keywords:
            group = group_of(case, keywords)
            found[case.rule.variant(group)] = (case, group, keywords)
    return found


def mixed() -> Iterator[Any]:
    """Every variant in one of the mixed formats by turns: of each case the last one, the others in the slow run."""
    for index, (case, group, keywords) in enumerate(VARIANTS.values()):
        is_last = group == group_of(case, case.keywords[-1])
        marks = () if is_last else pytest.mark.slow
        yield pytest.param(case.rule, group, FORMATS[1 + index % 8], id=f"{case}-{keywords}", marks=marks)


VARIANTS = variants()
ADAMW = next(group_of(case, {"weight_decay": 0.1}) for case in CASES if case.name == "AdamW")
ADAM_RULE = next(case.rule for case in CASES if case.name == "AdamW")


def check(
    shape: Shape,
    of: Rule,
    group: dict[str, Any],
    param: Format = FP32,
    grad: Format = FP32,
    master: Format | None = FP32,
    states: tuple[Format, ...] = (),
) -> None:
    """Both kernels against NumPy."""
    shard = HandmadeShard(shape, of, group, Spec(passes_of(of.variant(group)), param, grad, master, states), GRADIENTS)
    expected = shard.expected()
    for backend, device in BACKENDS:
        shard.assert_same(shard.launch(backend, device), expected, type(backend).__name__)


# -- bits --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of", "group"), [pytest.param(case.rule, group, id=f"{case}-{kw}") for case, group, kw in VARIANTS.values()]
)
def test_every_variant(of: Rule, group: dict[str, Any]) -> None:
    """All fp32; values of every magnitude, then those that are none."""
    check(NASTY, of, group)
    check(dataclasses.replace(NASTY, grads="special", seed=1), of, group)


@pytest.mark.parametrize(("of", "group", "formats"), list(mixed()))
def test_every_rule_in_mixed_formats(of: Rule, group: dict[str, Any], formats: tuple[Format, Format]) -> None:
    check(dataclasses.replace(NASTY, seed=2), of, group, *formats)


NAMED = {each.name: each for each in (FP32, BF16, FP16)}


@sweep({"param": list(NAMED), "grad": list(NAMED), "grads": list(GRADIENTS), "misaligned": [0, 1, 3]})
def test_every_format(param: str, grad: str, grads: str, misaligned: int) -> None:
    members = tuple(dataclasses.replace(member, misaligned=misaligned) for member in NASTY.members)
    check(dataclasses.replace(NASTY, members=members, grads=grads, seed=3), ADAM_RULE, ADAMW, NAMED[param], NAMED[grad])


@sweep({"kept": KEPT, "grads": tuple(GRADIENTS)}, strength=1)
def test_every_format_of_masters_and_states(kept: Formats, grads: str) -> None:
    members = tuple(
        dataclasses.replace(member, misaligned=index % 3, before=index) for index, member in enumerate(NASTY.members)
    )
    check(dataclasses.replace(NASTY, members=members, grads=grads, seed=5), ADAM_RULE, ADAMW, *kept)


def formats_in(kept: Formats) -> list[Format]:
    param, grad, master, states = kept
    return [each for each in (param, grad, master, *states) if each is not None]


@pytest.mark.parametrize("is_averaged", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_every_rule_in_the_formats_it_is_given(case: Case, is_averaged: bool) -> None:
    """With most flags on; in the slow run, and of AdamW, with an average of the weights as well."""
    of = case.rule.averaging(0.9) if is_averaged or case.name == "AdamW" else case.rule
    group, (master, states_in) = group_of(case, case.keywords[-1]), KEPT_IN[case]
    options = Options(master=master, state_format=states_in)  # type: ignore[arg-type]
    kept = formats_for(of, options, torch.bfloat16, 10**6)
    states = tuple(kept.states[name] for name in of.variant(group).states)
    for seed, grads in enumerate(("heavy_tailed", "special")):
        shape = dataclasses.replace(NASTY, grads=grads, seed=seed)
        check(shape, of, group, BF16 if kept.master else BF16_RANDOM, BF16, kept.master, states)


def test_a_rule_that_only_encodes_at_last() -> None:
    """Lion's param follows from the old average: the loop that stores codes has nothing else to do."""
    case = next(each for each in CASES if each.name == "Lion")
    check(dataclasses.replace(NASTY, seed=6), case.rule, group_of(case, case.keywords[-1]), states=(SIGNED8,))


MEMBERS = st.builds(
    Member,
    numel=st.sampled_from([0, 1, 2, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK]) | st.integers(0, 5 * BLOCK),
    step=st.sampled_from([1, 2, 10, 10**6]),
    lr_factor=st.sampled_from([0.0, 0.1, 1.0, 100.0]),
    skipped=st.sampled_from([False, False, True]),
    before=st.sampled_from([0, 0, 1, 2**23 - 1, 2**24 + 3]),
    misaligned=st.sampled_from([0, 0, 0, 1, 8]),
)
SHAPES = st.builds(
    Shape,
    members=st.lists(MEMBERS, max_size=7).map(tuple),
    empty_blocks=st.integers(0, 5),
    factors=st.builds(
        Factors,
        divisor=st.just(1.0),
        unscale=st.sampled_from([1.0, 1 / 65536, 1 / 3, 1e-30]),
        clip=st.sampled_from([1.0, 0.3, 1e-3]),
    ),
    grads=st.sampled_from(list(GRADIENTS)),
    seed=st.integers(0, 2**32),
)


@settings(max_examples=40)
@given(shape=SHAPES, formats=st.sampled_from([*FORMATS, *KEPT]))
def test_any_shard(shape: Shape, formats: Any) -> None:
    check(shape, ADAM_RULE, ADAMW, *formats)


@pytest.mark.parametrize("formats", [(FP32, FP32), (BF16, BF16), (FP16, FP32), *KEPT[4:10]])
def test_padding_stays_zero(formats: Any) -> None:
    """What surrounds a gradient, NaN here, is not read even for the padding, where nothing would notice."""
    shape = dataclasses.replace(NASTY, padding=0.0)
    shard = HandmadeShard(shape, ADAM_RULE, ADAMW, Spec(passes_of(ADAM_RULE.variant(ADAMW)), *formats), GRADIENTS)
    for backend, device in BACKENDS:
        for name, stream in shard.launch(backend, device).streams().items():
            if name.endswith(SCALES):
                continue
            for member, start in zip(shape.members, shard.starts, strict=True):
                end = start + member.numel
                assert not bool(stream.inner[end : -(-end // BLOCK) * BLOCK].any()), f"{type(backend).__name__}: {name}"


def nothing(group: Any, step: int, carried: Any) -> dict[str, float]:
    return {}


@rule(scalars=nothing)
def bare(param, grad, state, s):
    return param - grad


def test_rule_without_states_and_scalars() -> None:
    check(NASTY, bare, {"lr": 1.0}, BF16, FP16)


@rule(scalars=nothing)
def take_gradient(param, grad, state, s):
    return grad


@sweep({"fmt": (FP32, BF16, FP16), "divisor": (1, 2, 4.0, 8, 1024)}, strength=1)
def test_a_folded_divisor_gives_the_bits_of_the_division(fmt: Format, divisor: float) -> None:
    """Of numpy's, for quotients of normal magnitude; where there is no unscale, for all."""
    generator = torch.Generator().manual_seed(0)
    grad = torch.cat([GRADIENTS[kind](torch.Size([1000]), generator) for kind in GRADIENTS]).to(fmt.dtype)
    wide = grad.float().numpy()
    spec = Spec(passes_of(take_gradient.variant({})), FP32, fmt)
    for factors in (Factors(divisor), Factors(divisor, clip=0.7), Factors(divisor, 1 / 3, 0.7), Factors(divisor, 7)):
        folded = factors.folded()
        assert folded is not None and folded.divisor == 1
        number, unscale, clip = map(np.float32, factors)
        with np.errstate(all="ignore"):
            quotient = wide / number
            expected = quotient * unscale * clip
        assert expected.dtype == np.float32
        subnormal = (wide != 0) & (np.abs(quotient) < np.finfo(np.float32).tiny)
        compared = torch.from_numpy(~subnormal | (unscale == 1))
        assert compared.sum() > 0.7 * len(grad)
        for backend, device in BACKENDS:
            gradients, _grad = lone(grad.to(device), fmt)
            param = torch.zeros(gradients.num_blocks * BLOCK, device=device)
            with np.errstate(all="ignore"):
                tables = Tables(gradients, torch.empty((1, 0), device=device), folded)
                backend.run(spec, 0, Streams(param, None, ()), tables)
            found = param[: len(grad)].cpu()[compared]
            assert_same_bits(found, torch.from_numpy(expected)[compared], f"{type(backend).__name__} {factors}")


@pytest.mark.parametrize("divisor", [0, 3, 6.0, 7, 1000, float("inf")])
def test_no_other_divisor_is_folded(divisor: float) -> None:
    assert Factors(divisor).folded() is None


@pytest.mark.parametrize("backend", [native_backend, triton_backend], ids=["native", "triton"])
def test_a_step_does_not_divide(backend: Backend) -> None:
    spec = Spec(passes_of(take_gradient.variant({})), FP32, FP32)
    gradients, _grad = lone(torch.ones(1))
    param, other = torch.zeros(BLOCK), torch.zeros(BLOCK)
    backend.run(spec, 0, Streams(other, None, ()), Tables(gradients, torch.empty((1, 0)), Factors(divisor=1)))
    assert float(other[0]) == 1  # so it is the divisor that the next call is refused for
    with pytest.raises(AssertionError):
        backend.run(spec, 0, Streams(param, None, ()), Tables(gradients, torch.empty((1, 0)), Factors(divisor=2)))
    assert not bool(param.any())


def test_a_wrong_bit_is_seen() -> None:
    """The comparison itself can fail: -0 for 0, one ulp, a number for NaN."""
    zero, one, nan = torch.zeros(3), torch.ones(3), torch.full((3,), torch.nan)
    assert_same_bits(nan, -nan, "any NaN")
    for found, expected in ((-zero, zero), (one.nextafter(zero), one), (one, nan), (nan, one)):
        with pytest.raises(AssertionError, match="3 of 3 differ"):
            assert_same_bits(found, expected, "")


# -- threads -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    torch.set_flush_denormal(False)


def test_threads_and_flush_mode_change_no_bit(threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Subnormals are kept though the caller's thread flushes them, on one thread or on many."""
    monkeypatch.setattr(pool, "BLOCKS_PER_RANGE", 2)  # several ranges
    members = tuple(Member(BLOCK * 5 + index, step=index) for index in range(1, 6))
    shape = Shape(members, factors=Factors(unscale=1e-30), grads="log_uniform")
    group = group_of(next(case for case in CASES if case.name == "SGD"), {"momentum": 0.9})
    sgd = next(case.rule for case in CASES if case.name == "SGD")
    shard = HandmadeShard(shape, sgd, group, Spec(passes_of(sgd.variant(group)), FP32, FP32), GRADIENTS)
    expected = shard.expected()
    moments = expected.states["momentum_buffer"].inner
    assert bool(((moments != 0) & (moments.abs() < torch.finfo(torch.float32).tiny)).any())
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        for flush in (True, False):
            assert torch.set_flush_denormal(flush)
            found = shard.launch(native_backend, torch.device("cpu"))
            torch.set_flush_denormal(False)
            shard.assert_same(found, expected, f"{count} threads, flush {flush}")


def test_steps_after_the_main_thread(threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python lets no thread begin any more: in a thread that outlives the script's last line, and in atexit."""
    monkeypatch.setattr(pool, "BLOCKS_PER_RANGE", 2)
    torch.set_num_threads(2)
    ran: list[int] = []

    def kernel(first: int, last: int) -> None:
        assert np.float32(2.0**-149) * np.float32(1) > 0
        ran.extend(range(first, last))

    for had_threads in (False, True):
        child = os.fork()  # which has none of this process's threads
        if not child:
            with suppress(BaseException):
                if had_threads:
                    pool.run_over_blocks(kernel, 100)
                threading._shutdown()  # type: ignore[attr-defined]
                torch.set_flush_denormal(True)
                ran.clear()
                pool.run_over_blocks(kernel, 100)
                assert sorted(ran) == list(range(100))
                assert np.float32(2.0**-149) * np.float32(1) == 0, "the caller's mode was not given back"
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0


def test_one_thread_is_the_callers(threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """To wake another takes longer than short work, and one that is long is not done sooner there."""
    monkeypatch.setattr(pool, "BLOCKS_PER_RANGE", 2)
    monkeypatch.setattr(pool, "_pool", lambda num_threads: pytest.fail("another thread was asked"))
    ran: list[tuple[int, int]] = []
    for num_threads, num_blocks in ((1, 100), (5, 2)):
        torch.set_num_threads(num_threads)
        ran.clear()
        pool.run_over_blocks(lambda first, last: ran.append((first, last)), num_blocks)
        assert [block for each in ran for block in range(*each)] == list(range(num_blocks))


class Asleep:
    """A pool whose threads never wake."""

    def __init__(self) -> None:
        self.tasks: list[Future[None]] = []

    def submit(self, work: Callable[[], None]) -> Future[None]:
        self.tasks.append(Future())
        return self.tasks[-1]


def test_the_caller_does_not_wait_for_a_thread_to_wake(threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asleep = Asleep()
    monkeypatch.setattr(pool, "BLOCKS_PER_RANGE", 2)
    monkeypatch.setattr(pool, "_pool", lambda num_threads: asleep)
    torch.set_num_threads(3)
    ran: list[int] = []
    pool.run_over_blocks(lambda first, last: ran.extend(range(first, last)), 100)
    assert ran == list(range(100))
    assert len(asleep.tasks) == 2 and all(task.cancelled() for task in asleep.tasks)


def _note_thread(ran: list[int], first: int, last: int) -> None:
    ran.append(threading.get_ident())


def test_a_caller_that_flushes_subnormals_does_nothing(threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "BLOCKS_PER_RANGE", 2)
    assert torch.set_flush_denormal(True)
    for num_threads in (1, 3):
        torch.set_num_threads(num_threads)
        ran: list[int] = []
        pool.run_over_blocks(partial(_note_thread, ran), 100)
        assert ran and threading.get_ident() not in ran


def test_an_error_of_any_thread_is_raised_when_all_have_stopped(threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's, while another still runs a kernel; and another's."""
    monkeypatch.setattr(pool, "BLOCKS_PER_RANGE", 2)
    torch.set_num_threads(2)
    caller = threading.get_ident()
    for of_caller in (True, False):
        ends, began = list[str](), threading.Barrier(2)

        def run(first: int, last: int, of_caller: bool = of_caller, ends: Any = ends, began: Any = began) -> None:
            began.wait(60)  # both threads are in a kernel
            if (threading.get_ident() == caller) == of_caller:
                raise ArithmeticError("of a kernel")
            time.sleep(0.1)
            ends.append("late")

        with pytest.raises(ArithmeticError, match="of a kernel"):
            pool.run_over_blocks(run, 4)
        assert ends == ["late"]


# -- what is compiled --------------------------------------------------------------------------------------------------


def test_new_numbers_compile_nothing() -> None:
    """Learning rate, step, factors, number of blocks, which params are there: data. (Compiled: test_compiled.py.)"""
    pass_function = triton_step.pass_function
    check(NASTY, ADAM_RULE, ADAMW, BF16, FP32)
    before = native_step.compile_step.cache_info().misses, pass_function.cache_info().misses
    changed = {**ADAMW, "lr": 0.125, "betas": (0.0, 0.5), "eps": 1e-3, "weight_decay": 7.0}
    others = tuple(
        dataclasses.replace(member, step=member.step + 1, lr_factor=2, skipped=not member.skipped)
        for member in reversed(NASTY.members)
    )
    check(Shape(others[:3]), ADAM_RULE, changed, BF16, FP32)
    check(Shape((), 1), ADAM_RULE, changed, BF16, FP32)
    check(Shape(()), ADAM_RULE, changed, BF16, FP32)
    assert (native_step.compile_step.cache_info().misses, pass_function.cache_info().misses) == before

    @rule(scalars=nothing)
    def another(param, grad, state, s):
        return param - grad * 0.5

    check(NASTY, another, {"lr": 1.0}, BF16, FP32)
    assert (native_step.compile_step.cache_info().misses, pass_function.cache_info().misses) == (
        before[0] + 1,
        before[1] + 1,
    )


# -- more than 2**31 elements ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", [2**31 - 300, 2**31 + 300])
def test_elements_beyond_31_bits(numel: int) -> None:
    """Streams of 8 GiB of which only the last pages exist: every param but the last, 555 elements long, is skipped.

    An index that wraps at 32 bits reads a page that holds zeros, or crashes, and leaves the last elements as they were.
    """
    num_blocks, count = -(-numel // BLOCK), 555
    start = (num_blocks - 3) * BLOCK
    end = start + count
    spec = Spec(passes_of(ADAM_RULE.variant(ADAMW)), BF16, FP32)
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(count, generator=generator)
    param = sparse(num_blocks * BLOCK, torch.bfloat16)
    master, *states = (sparse(num_blocks * BLOCK, torch.float32) for _ in range(3))
    small = [torch.randn(count, generator=generator).abs() for _ in range(3)]
    for stream, values in zip((master, *states), small, strict=True):
        stream[start:end] = values
    param[start:end] = small[0].bfloat16()
    row_of_block = sparse(num_blocks, torch.int32)  # row 0: skipped
    row_of_block[start // BLOCK :] = 1
    rows = torch.tensor([[0, 0], [grad.data_ptr() - 4 * start, end]], dtype=torch.int64)
    scalars = torch.tensor([[0.0] * len(spec.scalars), ADAM_RULE.evaluate(ADAM_RULE.variant(ADAMW), ADAMW, 1, {})[0]])
    tables = Gradients(row_of_block, rows, False)
    native_backend.run(spec, 0, Streams(param, master, tuple(states)), Tables(tables, scalars))

    near = [torch.zeros(3 * BLOCK) for _ in range(3)]
    for stream, values in zip(near, small, strict=True):
        stream[:count] = values
    near_param = torch.zeros(3 * BLOCK, dtype=torch.bfloat16)
    near_param[:count] = small[0].bfloat16()
    rows = torch.tensor([[grad.data_ptr(), count]], dtype=torch.int64)
    tables = Gradients(torch.zeros(3, dtype=torch.int32), rows, False)
    native_backend.run(spec, 0, Streams(near_param, near[0], tuple(near[1:])), Tables(tables, scalars[1:]))
    for name, far, expected in zip(
        ("param", "master", *spec.names), (param, master, *states), (near_param, *near), strict=True
    ):
        assert_same_bits(far[start:end], expected[:count], name)
    assert bool((near_param[:count] != 0).any())
    del param, master, states, row_of_block, stream, far
    gc.collect()


def test_vectors_are_of_512_bits_where_that_is_no_slower() -> None:
    """LLVM takes 256 on Intel's processors unless it is asked."""
    features = llvmlite.binding.get_host_cpu_features()
    names = native_step._words()
    text = "def double(count, at):\n    WIDE\n    for i in range(count):\n        x = load_f32(at, i, 0)\n"
    text += "        store_f32(at, i, x + x, 0)\n"
    found = {}
    for word in ("in_wide_vectors()", "pass"):
        function = function_from_source(text.replace("WIDE", word), "native", names)
        compiled = numba.njit("void(int64, int64)", **COMPILE_OPTIONS)(function)
        found[word] = "zmm" in next(iter(compiled.inspect_asm().values()))
    if features.get("avx512vbmi2"):
        assert found["in_wide_vectors()"]
    else:
        assert found["in_wide_vectors()"] == found["pass"]
    spec = Spec(passes_of(ADAM_RULE.variant(ADAMW)), FP32, FP32, None, (FP32, FP32))
    assert native_step.step_source(spec, 0).splitlines()[1].strip() == "in_wide_vectors()"


def sparse(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take no memory until they are written."""
    no_reserve = 0x4000  # MAP_NORESERVE, which the mmap module does not name
    size = numel * torch.empty((), dtype=dtype).element_size()
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    return torch.frombuffer(pages, dtype=dtype)
