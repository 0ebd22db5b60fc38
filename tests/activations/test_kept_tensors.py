"""Promise: each kind of tensor that autograd saves comes back bit for bit, with its strides, from slices of it.

What differs between ranks, is small, is a param or has overlapping elements stays the tensor itself.
"""

from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardopt
from shardopt.activations.tensor_meta import TensorMeta
from shardopt.offload.checksum import checksum
from shardopt.offload.sum_of_products import sum_of_products
from tests.support.live_bytes import LiveBytes
from tests.support.ranks import Pool


class Saves(torch.autograd.Function):
    """Saves tensors as they are, and hands over what backward finds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, found: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.found = found
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.found.extend(ctx.saved_tensors)
        return gradient, None, *([None] * len(ctx.saved_tensors))


def same_bits(found: Tensor, expected: Tensor) -> None:
    assert type(found) is type(expected)
    if isinstance(found, DTensor):
        assert isinstance(expected, DTensor) and found.placements == expected.placements
        assert found.shape == expected.shape and found.stride() == expected.stride()
        found, expected = found.to_local(), expected.to_local()
    assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype)
    align = 512 // expected.element_size()
    assert found.storage_offset() % align == expected.storage_offset() % align
    assert found.is_conj() == expected.is_conj()
    ours, theirs = (
        each.resolve_conj().clone(memory_format=torch.contiguous_format).view(-1) for each in (found, expected)
    )
    assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def tensors(seed: int) -> dict[str, Tensor]:
    """As many kinds as autograd may meet, each of 128 elements or more but for the two that say so."""
    draw = torch.Generator().manual_seed(seed)
    base = torch.randn(40, 30, generator=draw)
    base[0, :3] = torch.tensor([float("nan"), float("inf"), -0.0])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "plain": base.clone(),
        "odd": base[:7, :29].reshape(-1).clone(),
        "transposed": base.clone().t(),
        "channels last": torch.randn(3, 5, 4, 6, generator=draw).contiguous(memory_format=torch.channels_last),
        "slice": base[1:, 3:],
        "every second": base[::2, ::3],
        "at an offset": base.view(-1)[5:],
        "expanded": torch.randn(1, 150, generator=draw).expand(8, 150),
        "expanded slice": base[:, :1].expand(40, 9)[::2],
        "bf16": base.bfloat16().view(-1)[1:],
        "float64": base.double(),
        "bool": base > 0,
        "int8": (base * 9).nan_to_num().to(torch.int8),
        "int64": (base * 9).nan_to_num().long(),
        "complex": torch.complex(base, base.flip(0)),
        "float8": base.to(torch.float8_e4m3fn),
        "replicated": DTensor.from_local(base.clone(), mesh, [Replicate()]),
        "conjugate": torch.complex(base, base).conj(),  # whole
        "windows": torch.arange(200.0).unfold(0, 8, 1),  # whole: elements overlap
        "small": torch.randn(99, generator=draw),  # whole
        "empty": torch.empty(0, 7),  # whole
        "sharded": DTensor.from_local(torch.full((30, 30), float(dist.get_rank())), mesh, [Shard(0)]),  # whole
        "rank's own": torch.full((30, 30), float(dist.get_rank())),  # whole
        "rank's shape": torch.ones(130 + dist.get_rank()),  # whole
    }


def kinds(check: bool) -> None:
    size = dist.get_world_size()
    for step in range(3):
        given = tensors(step)
        param = torch.nn.Parameter(torch.randn(30, 40))
        given |= {"param": param, "view of a param": param.t()}
        found: list[Tensor] = []
        x = torch.zeros(1, requires_grad=True)
        with shardopt.partition_activations(keep_below=128, check=check) as context:
            y = Saves.apply(x, found, *given.values())
            before = context.memory()
            # The same again, in another operation: nothing more is kept.
            y = Saves.apply(y, found, given["plain"], given["expanded"])
            assert context.memory() == before
        names = list(given)
        whole = names[names.index("conjugate") : names.index("param")]
        values = {name: each._local_tensor if isinstance(each, DTensor) else each for name, each in given.items()}
        halves = names[: names.index("conjugate")]
        numel = {name: values[name].numel() for name in halves} | {"expanded": 150, "expanded slice": 20}
        sizes = [numel[name] * values[name].element_size() for name in halves if numel[name] >= 128]
        expected = sum(-(-each // (16 * size)) * 16 for each in sizes)
        assert before["partitioned"] == {"device": expected}, (before, expected)
        kept = sum(values[each].nbytes for each in whole) + 4 * numel["expanded slice"]
        assert before["whole"] == {"device": kept}, (before, kept)
        y.backward()
        assert len(found) == len(given) + 2
        wanted = [given["plain"], given["expanded"], *given.values()]  # in the order of backward
        for ours, theirs in zip(found, wanted, strict=True):
            same_bits(ours.detach(), theirs.detach())
        for name in (*whole, "param", "view of a param"):
            ours, theirs = (
                each._local_tensor if isinstance(each, DTensor) else each
                for each in (found[2 + names.index(name)], given[name])
            )
            assert ours.data_ptr() == theirs.data_ptr(), name
        del found, y
        assert context.memory() == {"partitioned": {}, "whole": {}}


def test_every_kind_comes_back(ranks: Pool) -> None:
    for world, check in ((2, False), (3, True)):
        ranks.run(kinds, check, world=world)


def changing() -> None:
    """Memory that is written to, or taken by another tensor, between two savings of it."""
    x, found = torch.zeros(1, requires_grad=True), list[Tensor]()
    for _ in range(2):
        written = torch.zeros(300)
        expected = []
        with shardopt.partition_activations(keep_below=1):
            y = x
            for turn in range(3):
                y = Saves.apply(y, found, written)
                expected.append(written.clone())
                written.add_(turn + 1)
            for turn in range(3):  # each takes the memory that the one before has left
                y = Saves.apply(y, found, torch.full((500,), float(turn)))
        y.backward()
        for ours, turn in zip(found[:3], (2, 1, 0), strict=True):
            same_bits(ours, torch.full((500,), float(turn)))
        for ours, theirs in zip(found[3:], expected[::-1], strict=True):
            same_bits(ours, theirs)
        found.clear()
    # A recomputation in backward, which the `with` may be around, uses what it saves at once: no slice is cut.
    again, inner = torch.zeros(1, requires_grad=True), list[Tensor]()
    recomputed = torch.ones(300)

    def recompute(gradient: Tensor) -> None:
        with torch.enable_grad():
            Saves.apply(again, inner, recomputed).backward()

    with shardopt.partition_activations(keep_below=1):
        y = Saves.apply(x, found, torch.ones(300))
        y.register_hook(recompute)
        y.backward()
    assert inner[0].data_ptr() == recomputed.data_ptr() != found[0].data_ptr()
    sparse, dense = torch.eye(20).to_sparse(), torch.zeros(1, requires_grad=True)  # which has no bytes to speak of
    with shardopt.partition_activations(keep_below=1):
        y = torch.sparse.mm(sparse, dense.expand(20, 20))
    y.sum().backward()
    assert dense.grad is not None and dense.grad.item() == 400
    # What stays whole is refused after a write, as torch refuses it without hooks.
    own = torch.full((300,), float(dist.get_rank()))
    with shardopt.partition_activations(keep_below=1):
        y = Saves.apply(x, found, own)
    own.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*version 1"):
        y.backward()


def test_values_are_those_of_the_moment(ranks: Pool) -> None:
    ranks.run(changing, world=2)


def test_bytes_are_counted_as_they_are() -> None:
    """The measure itself: what nobody holds is not counted, what is a view is counted once."""
    with LiveBytes() as live:
        first = torch.zeros(100) + 1
        second, dropped = first.view(10, 10), first * 2
        assert live.now() == 800
        del dropped
        assert live.now() == 400 and second.numel() == 100


def test_a_with_is_known_by_its_place_behind_an_exit_stack() -> None:
    """Not by that of contextlib: two would share what is known of their tensors, and count each other's bytes."""
    x = torch.ones(300, requires_grad=True)
    with ExitStack() as stack:
        first = stack.enter_context(shardopt.partition_activations(offload="cpu"))
        (2 * x).square().sum().backward()
    with ExitStack() as stack:
        second = stack.enter_context(shardopt.partition_activations(offload="cpu"))
        loss = (2 * x).square().sum()
    assert first.memory() == {"partitioned": {}, "whole": {}}
    assert second.memory()["whole"] == {"device": 4 * 300}
    loss.backward()


@pytest.mark.parametrize("device", [False, True])
def test_the_checksum_sees_what_ranks_may_differ_in(device: bool) -> None:
    def sum_of(values: Tensor) -> int:
        data = values.view(torch.uint8)
        return int(sum_of_products(data.view(torch.int32)) if device else checksum(data, values.element_size()))

    row = 1 << 16
    for numel in (1, 8, 9, 77, row - 1, row, row + 1, 16 * row, 16 * row + 3, 33 * row + 5):
        values = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
        expected = sum_of(values)
        assert sum_of(values.clone()) == expected
        seen = {expected}
        for place in {0, numel // 2, numel - 1}:
            for changed in (-values[place], torch.nextafter(values[place], torch.tensor(9.0))):
                other = values.clone()
                other[place] = changed
                seen.add(sum_of(other))
        assert len(seen) == 1 + 2 * len({0, numel // 2, numel - 1})
        if numel > 1:
            swapped = values.roll(1)
            signs = values.clone()
            signs[[0, -1]] *= -1
            seen |= {sum_of(swapped), sum_of(signs), sum_of(torch.zeros(numel))}
            assert len(seen) == 4 + 2 * len({0, numel // 2, numel - 1})
    unaligned = torch.arange(100, dtype=torch.uint8)
    assert checksum(unaligned[3:80], 1) == checksum(unaligned[3:80].clone(), 1)


def test_a_tensor_is_laid_out_as_it_was() -> None:
    base = torch.arange(4096.0)
    drawn = np.random.default_rng(0)
    count = 0
    for _ in range(400):
        ndim = int(drawn.integers(1, 5))
        shape = tuple(int(each) for each in drawn.integers(1, 5, ndim))
        stride = tuple(int(each) for each in drawn.choice([0, 1, 2, 3, 4, 5, 12, 20, 60], ndim))
        given = base.as_strided(shape, stride, int(drawn.integers(0, 200)))
        meta = TensorMeta.of(given)
        if meta is None:
            continue
        count += 1
        values = meta.bytes_of(given)
        assert values.numel() == meta.nbytes == meta.numel * 4
        memory = torch.full((meta.lead_bytes + meta.nbytes + 7,), 255, dtype=torch.uint8)
        memory[meta.lead_bytes : meta.lead_bytes + meta.nbytes] = values
        same_bits(meta.restore(memory), given)
    assert count > 100
