"""What a training will need, before it starts: bytes on a rank by kind, bytes on the wire, what fits.

The layouts are those that the optimizer makes, so padding, small params that stay whole and buckets are counted as they
will be. Activations, and what the allocator and the communication library keep, are not.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from .bucket_plan import PlannedBucket, plan_buckets
from .config import Options
from .entry import Candidate
from .optimizer import ShardedOptimizer
from .partition.layout import BLOCK, BucketLayout
from .partition.placement import Placement, Placements
from .partition.reducer import BUCKETS_UNDER_WAY, BYTES_UNDER_WAY

_FP32 = 4
KINDS = ("param", "gradient", "master", "state", "buffer", "window", "ddp")


@dataclass(frozen=True)
class Way:
    """One way to run a training.

    Attributes:
        stage: what is sharded.
        has_module: whether the module is handed over; without it DDP reduces gradients, and keeps its buckets.
        dtype: of params.
    """

    stage: int
    has_module: bool
    dtype: torch.dtype

    def __str__(self) -> str:
        name = f"stage {self.stage}" + ("" if self.has_module else ", params only")
        return f"{name}, {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class Need:
    """What one way needs on one rank.

    Attributes:
        bytes: by kind: those of ``opt.memory()`` between steps, at most (``buffer``: as many as can be under way);
            ``window``: params gathered while modules run; ``ddp``: the buckets of DistributedDataParallel.
        formula: bytes a param for N ranks, without padding, buffers and window.
        moved: bytes that one rank receives in a step of one backward.
    """

    way: Way
    bytes: dict[str, int]
    formula: str
    moved: int

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


WAYS = tuple(
    Way(stage, has_module, dtype)
    for dtype in (torch.float32, torch.bfloat16)
    for stage, has_module in ((0, False), (0, True), (1, False), (1, True), (2, True), (3, True))
)


def plan(module: nn.Module, optimizer: ShardedOptimizer, ranks: int, way: Way, options: Options | None = None) -> Need:
    """Args:
    module: on any device, the meta device too; its params' dtypes are those of ``way`` instead.
    optimizer: any instance of the class, for its rule and hyper-parameters; it is not touched.
    options: tuning and ``reduce_dtype`` are read from them.
    """
    given = options or Options()
    module_or_none = module if way.has_module else None
    asked = Options(module=module_or_none, stage=way.stage, reduce_dtype=given.reduce_dtype, tuning=given.tuning)
    params = [nn.Parameter(torch.empty(param.shape, dtype=way.dtype, device="meta")) for param in module.parameters()]
    candidates: list[Candidate] = [("", param, optimizer.defaults) for param in params]
    placements = Placements.of_stage(way.stage)
    shards = ranks if placements.state is Placement.SHARD else 1

    def bucket_bytes(_: torch.device) -> int:
        return given.tuning.bucket_bytes_of(next(module.parameters()).device, way.has_module)

    buckets = plan_buckets(candidates, optimizer.rule, asked, shards, bucket_bytes)
    kinds = dict.fromkeys(KINDS, 0)
    for bucket in buckets:
        for kind, nbytes in _of_bucket(bucket, way, ranks // shards).items():
            kinds[kind] += nbytes
    numel = sum(param.numel() for param in params)
    if not way.has_module:
        kinds["gradient"] = kinds["ddp"] = numel * way.dtype.itemsize
        kinds["ddp"] *= ranks > 1
    else:
        kinds["buffer"] += _under_way(buckets, given.reduce_dtype or way.dtype, ranks)
    released = [bucket.layout.numel * way.dtype.itemsize for bucket in buckets if bucket.is_released]
    kinds["window"] = min(sum(released), given.tuning.live_bytes + max(released, default=0))
    return Need(way, kinds, _formula(way, len(buckets[0].states) if buckets else 0), _moved(numel, ranks, way, given))


def _of_bucket(bucket: PlannedBucket, way: Way, copies: int) -> dict[str, int]:
    """Between steps. ``copies`` of one shard sum its gradients in equal parts."""
    shard, whole = bucket.layout.shard_numel, bucket.layout.numel
    summed = BucketLayout((shard,), copies).numel
    return {
        "param": (shard if bucket.is_released else whole) * way.dtype.itemsize,
        "gradient": summed * _FP32 if way.has_module else 0,
        "master": 0 if way.dtype is torch.float32 else shard * _FP32,
        "state": shard * _FP32 * len(bucket.states),
        "buffer": shard // BLOCK * 4,  # the row of each block
    }


def _under_way(buckets: Sequence[PlannedBucket], dtype: torch.dtype, ranks: int) -> int:
    """Most bytes of buffers that gradients are reduced in: some are filled while others travel."""
    layouts = [BucketLayout(bucket.layout.numels, ranks) for bucket in buckets]
    # A lone gradient that needs no padding is its own buffer.
    sizes = [each.numel * dtype.itemsize for each in layouts if each.numels != (each.numel,)]
    largest = max(sizes, default=0)
    most = max(BUCKETS_UNDER_WAY, BYTES_UNDER_WAY // max(largest, 1)) + 1
    return min(len(sizes), most) * largest


def _formula(way: Way, num_states: int) -> str:
    sharded_kinds = Placements.of_stage(way.stage)
    sizes = {
        "param": (way.dtype.itemsize, sharded_kinds.param),
        "gradient": (_FP32, Placement.SHARD if way.stage else Placement.REPLICATE),
        "master": (0 if way.dtype is torch.float32 else _FP32, sharded_kinds.state),
        "state": (_FP32 * num_states, sharded_kinds.state),
    }
    if not way.has_module:
        sizes["gradient"] = (2 * way.dtype.itemsize, Placement.REPLICATE)  # and DDP's buckets
    whole = sum(size for size, placement in sizes.values() if placement is Placement.REPLICATE)
    parts = sum(size for size, placement in sizes.values() if placement is Placement.SHARD)
    return " + ".join([str(whole)] * bool(whole) + [f"{parts}/N"] * bool(parts))


def _moved(numel: int, ranks: int, way: Way, options: Options) -> int:
    """In units of (ranks - 1) / ranks of the params: an all-reduce is two."""
    travels = (options.reduce_dtype or way.dtype).itemsize
    if not way.has_module:
        gradients, params = 2 * way.dtype.itemsize, way.stage and way.dtype.itemsize
    elif way.stage == 0:
        gradients, params = travels + _FP32, 0  # sums come back in fp32
    else:
        gradients, params = travels, way.dtype.itemsize * (2 if way.stage == 3 else 1)
    return numel * (ranks - 1) * (gradients + params) // ranks


def cheapest(needs: Sequence[Need], device_bytes: int) -> Need | None:
    """Of those that fit, the one that moves least, then the one that needs least; None if none fits."""
    fitting = [need for need in needs if need.total <= device_bytes]
    return min(fitting, key=lambda need: (need.moved, need.total), default=None)


class _Shapes(nn.Module):
    """Params without values, by shape."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]):
        super().__init__()
        self.values = nn.ParameterList(nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes)


def transformer(numel: int) -> nn.Module:
    """A decoder of about this many params (the embedding takes what is left), on the meta device."""
    if numel < 1:
        raise ValueError(f"a model has at least one param, found {numel}.")
    layers = max(1, round((numel / (12 * 128**2)) ** (1 / 3)))  # width 128 x depth, as is usual
    width = max(1, int((0.95 * numel / (12 * layers)) ** 0.5) // 16 * 16) if numel > 10_000 else 0
    shapes = [shape for _ in range(layers) for shape in _layer(width)] if width else []
    left = numel - sum(rows * columns for rows, columns in shapes)
    return _Shapes([(left, 1), *shapes])


def _layer(width: int) -> Iterator[tuple[int, int]]:
    yield from ((width, 1), (3 * width, width), (width, width), (width, 1), (4 * width, width), (width, 4 * width))
