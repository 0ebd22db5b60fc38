"""What a training will need, before it starts: bytes on a rank by kind and tier, bytes that move, what fits.

The layouts are those that the optimizer makes, so padding, small params that stay whole and buckets are counted as they
will be. Activations, and what the allocator and the communication library keep, are not.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, get_args

import torch
from torch import nn

from .bucket_plan import PlannedBucket, plan_buckets
from .config import GradientFormat, Master, Options, StateFormat, Tuning
from .entry import Candidate
from .kept import Kept, kept_for
from .kernels.formats import BlockFormat, Format
from .offload import landing
from .offload.file_io import PAGE, padded
from .offload.pipeline import SLOTS
from .optimizer import ShardedOptimizer
from .param_names import matching
from .partition.layout import BLOCK, BucketLayout
from .partition.placement import Placement, Placements
from .partition.reducer import BUCKETS_UNDER_WAY, BYTES_UNDER_WAY

_FP32 = 4
KINDS = ("param", "gradient", "master", "state", "buffer", "window", "ddp")
Tier = Literal["device", "host", "disk"]
TIERS: tuple[Tier, ...] = get_args(Tier)
# Of the average: which one changes no byte.
_SOME_DECAY = 0.999


@dataclass(frozen=True)
class Way:
    """One way to run a training.

    Attributes:
        stage: what is sharded.
        has_module: whether the module is handed over; without it DDP reduces gradients, and keeps its buckets.
        dtype: of params.
        master, state_format, gradient_format: as the options of these names.
        tier: where masters and states rest: "device", "host" (``offload="cpu"``) or "disk".
        has_average: whether a moving average of the weights is kept (``ema=``).
        releases: whether gradients are released as they are used (``release_gradients=``).
        sums_rest: whether their sums rest in host memory (``Offload(gradients="cpu")``).
    """

    stage: int
    has_module: bool
    dtype: torch.dtype
    master: Master = "fp32"
    state_format: StateFormat = "fp32"
    tier: Tier = "device"
    has_average: bool = False
    gradient_format: GradientFormat = "fp32"
    releases: bool = False
    sums_rest: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether all of fp32 is kept of masters, states and sums of gradients."""
        if self.dtype is torch.float32:
            return self.state_format == "fp32"
        return (self.state_format, self.gradient_format) == ("fp32", "fp32") and self.master in ("fp32", "split")

    def __str__(self) -> str:
        name = f"stage {self.stage}" + ("" if self.has_module else ", params only")
        parts = [f"{name}, {str(self.dtype).removeprefix('torch.')}"]
        parts += [f"master {self.master}"] * (self.master != "fp32" and self.dtype is not torch.float32)
        parts += [f"states {self.state_format}"] * (self.state_format != "fp32")
        parts += [f"gradients {self.gradient_format}"] * (self.gradient_format != "fp32")
        parts += ["ema"] * self.has_average
        parts += ["released gradients"] * self.releases
        parts += [f"on {self.tier}"] * (self.tier != "device")
        parts += ["gradients on host"] * self.sums_rest
        return ", ".join(parts)


@dataclass(frozen=True)
class Need:
    """What one way needs on one rank.

    Attributes:
        bytes: by kind and tier: those of ``opt.memory()`` between steps, at most (``buffer``: as many as can be under
            way); ``window``: params gathered while modules run; ``ddp``: the buckets of DistributedDataParallel.
        formula: bytes a param for N ranks, without padding, buffers and window; small params keep fp32 states.
        moved: bytes in a step of one backward: that one rank receives ("wire"), that stream through a GPU and back
            where states or sums of gradients rest in host memory ("bus"; between CPUs and their memory none does), that
            its disk reads and writes ("disk").
    """

    way: Way
    bytes: dict[str, dict[str, int]]
    formula: str
    moved: dict[str, int]

    def on(self, tier: str) -> int:
        """Bytes of all kinds on a tier."""
        return sum(tiers.get(tier, 0) for tiers in self.bytes.values())

    @property
    def file(self) -> int:
        """Bytes of the file on the disk, which holds masters and states twice."""
        return 2 * self.on("disk")


WAYS = tuple(
    Way(stage, has_module, dtype)
    for dtype in (torch.float32, torch.bfloat16)
    for stage, has_module in ((0, False), (0, True), (1, False), (1, True), (2, True), (3, True))
)


def possible(way: Way) -> Way:
    """The same where it can be. Gradients are released at stage 0 and 1, with the module, and states on the device
    (host memory is another place for params on a GPU only, where binding refuses both); of those that are, no sum is
    kept in any format. Sums rest elsewhere at stage 2 and 3, beside states that do."""
    releases = way.releases and way.has_module and way.stage < 2 and way.tier == "device"
    sums_rest = way.sums_rest and way.has_module and way.stage >= 2 and way.tier != "device"
    gradient_format: GradientFormat = "fp32" if releases else way.gradient_format
    return replace(way, releases=releases, gradient_format=gradient_format, sums_rest=sums_rest)


def every_way(ways: Sequence[Way] = WAYS) -> list[Way]:
    """These in every combination of master, formats of states and gradients, and tiers."""
    choices = (get_args(Master), get_args(StateFormat), get_args(GradientFormat), TIERS, (False, True))
    combined = (
        possible(replace(way, master=master, state_format=state, gradient_format=gradient, tier=tier, sums_rest=rest))
        for way in ways
        for master, state, gradient, tier, rest in product(*choices)
        if master == "fp32" or way.dtype is torch.bfloat16  # of others there is no upper half
        if gradient == "fp32" or (way.dtype is torch.bfloat16 and way.has_module)
    )
    return list(dict.fromkeys(combined))


def plan(module: nn.Module, optimizer: ShardedOptimizer, ranks: int, way: Way, options: Options | None = None) -> Need:
    """Args:
    module: on any device, the meta device too; its params' dtypes are those of ``way`` instead.
    optimizer: any instance of the class, for its rule and hyper-parameters; it is not touched.
    options: tuning and ``reduce_dtype`` are read from them.
    """
    given = options or Options()
    asked = Options(
        module=module if way.has_module else None,
        stage=way.stage,
        master=way.master,
        state_format=way.state_format,
        gradient_format=way.gradient_format,
        reduce_dtype=given.reduce_dtype if way.has_module else None,
        release_gradients=way.releases,
        tuning=given.tuning,
    )
    rule = optimizer.rule
    if way.has_average and rule.average is None:
        rule = rule.averaging(_SOME_DECAY)
    params = [nn.Parameter(torch.empty(param.shape, dtype=way.dtype, device="meta")) for param in module.parameters()]
    candidates: list[Candidate] = [("", param, optimizer.defaults) for param in params]
    placements = Placements.of_stage(way.stage)
    shards = ranks if placements.state is Placement.SHARD else 1

    def bucket_bytes(_: torch.device) -> int:
        return given.tuning.bucket_bytes_of(next(module.parameters()).device, way.has_module)

    named = matching(module, given.tuning.keep) if way.stage == 3 else ()
    kept_whole = {mine for mine, theirs in zip(params, module.parameters(), strict=True) if theirs in named}
    buckets = plan_buckets(candidates, rule, asked, shards, bucket_bytes, kept_whole)
    kinds: dict[str, dict[str, int]] = {kind: {} for kind in KINDS}
    for bucket in buckets:
        for kind, tier, nbytes in _of_bucket(bucket, way, ranks // shards):
            kinds[kind][tier] = kinds[kind].get(tier, 0) + nbytes
    numel = sum(param.numel() for param in params)
    if way.has_module:
        kinds["buffer"]["device"] += _under_way(buckets, given.reduce_dtype or way.dtype, ranks)
        if way.sums_rest:
            kinds["buffer"]["device"] += _slots(buckets, given.reduce_dtype or way.dtype, ranks)
    else:
        kinds["gradient"]["device"] = numel * way.dtype.itemsize
        kinds["ddp"]["device"] = numel * way.dtype.itemsize * (ranks > 1)
    if way.tier == "disk":
        kinds["buffer"]["host"] = _staging(buckets, way, given.tuning)
    released = [bucket.layout.numel * way.dtype.itemsize for bucket in buckets if bucket.is_released]
    kinds["window"]["device"] = min(sum(released), given.tuning.live_bytes + max(released, default=0))
    kept = kept_for(rule, asked, way.dtype, given.tuning.compress_from)
    moved = {
        "wire": _on_the_wire(buckets, ranks, way, kept, given),
        # Masters and states come and go; sums go, and come where the GPU has the states.
        "bus": 2 * sum(kinds[kind].get("host", 0) for kind in ("master", "state"))
        + kinds["gradient"].get("host", 0) * (2 if way.tier == "host" else 1),
        "disk": 2 * sum(kinds[kind].get("disk", 0) for kind in ("master", "state")),
    }
    return Need(way, kinds, _formula(way, kept, rule.variant(optimizer.defaults).states), moved)


def _itemsize(format: Format | None) -> float:
    """Bytes an element, its share of a block's scale included."""
    if format is None:
        return 0
    return format.itemsize + (_FP32 / BLOCK if isinstance(format, BlockFormat) else 0)


def _of_bucket(bucket: PlannedBucket, way: Way, copies: int) -> Iterator[tuple[str, str, int]]:
    """(kind, tier, bytes) between steps. ``copies`` of one shard sum its gradients in equal parts."""
    shard, whole = bucket.layout.shard_numel, bucket.layout.numel
    summed = BucketLayout((shard,), copies).numel
    yield "param", "device", (shard if bucket.is_released else whole) * way.dtype.itemsize
    is_kept = way.has_module and not way.releases
    yield "gradient", _sums_tier(way), summed * bucket.kept.gradient.itemsize if is_kept else 0
    yield "master", way.tier, int(shard * _itemsize(bucket.kept.master))
    yield "state", way.tier, sum(int(shard * _itemsize(bucket.kept.states[name])) for name in bucket.states)
    yield "buffer", "device", shard // BLOCK * 4  # the row of each block


def _sums_tier(way: Way) -> Tier:
    return "host" if way.sums_rest else "device"


def _under_way(buckets: Sequence[PlannedBucket], dtype: torch.dtype, ranks: int) -> int:
    """Most bytes of buffers that gradients are reduced in: some are filled while others travel."""
    layouts = [BucketLayout(bucket.layout.numels, ranks) for bucket in buckets]
    # A lone gradient that needs no padding is its own buffer.
    sizes = [each.numel * dtype.itemsize for each in layouts if each.numels != (each.numel,)]
    largest = max(sizes, default=0)
    return min(len(sizes), _most_under_way(largest)) * largest


def _most_under_way(nbytes: int) -> int:
    """Buckets of so many bytes."""
    return max(BUCKETS_UNDER_WAY, BYTES_UNDER_WAY // max(nbytes, 1)) + 1


def _slots(buckets: Sequence[PlannedBucket], dtype: torch.dtype, ranks: int) -> int:
    """Most bytes of slots that sums are made in which rest elsewhere; one more of them is on its way up."""
    least = min((BucketLayout(bucket.layout.numels, ranks).numel * dtype.itemsize for bucket in buckets), default=0)
    largest = max((bucket.layout.shard_numel * bucket.kept.gradient.itemsize for bucket in buckets), default=0)
    return max(landing.SLOTS, min(len(buckets), _most_under_way(least) + 1)) * largest


def _staging(buckets: Sequence[PlannedBucket], way: Way, tuning: Tuning) -> int:
    """Bytes of memory that states on a disk take: slots, and params as before the step."""
    chunk_bytes = padded(max(tuning.chunk_bytes, PAGE))
    turns, slot = 0, 0
    for bucket in buckets:
        shard = bucket.layout.shard_numel
        elements = min(chunk_bytes // _FP32, shard)
        streams = [bucket.kept.master, *(bucket.kept.states[name] for name in bucket.states)]
        planes = [nbytes for format in streams if format is not None for nbytes in _plane_bytes(format, elements)]
        slot = max(slot, sum(map(padded, planes)))
        turns += -(-shard // max(elements, 1)) * bool(planes)
    kept = sum(bucket.layout.shard_numel for bucket in buckets) * way.dtype.itemsize
    return kept + min(SLOTS, turns) * slot


def _plane_bytes(format: Format, elements: int) -> list[int]:
    scales = [elements // BLOCK * _FP32] if isinstance(format, BlockFormat) else []
    return [elements * format.itemsize, *scales]


def _formula(way: Way, kept: Kept, states: Sequence[str]) -> str:
    """ "2 + 4/N, host 12/N": that of the device, then those of other tiers which keep something."""
    placed = Placements.of_stage(way.stage)
    gradient = (0 if way.releases else kept.gradient.itemsize, Placement.SHARD if way.stage else Placement.REPLICATE)
    if not way.has_module:
        gradient = (2 * way.dtype.itemsize, Placement.REPLICATE)  # and DDP's buckets
    sizes: list[tuple[str, float, Placement]] = [("device", way.dtype.itemsize, placed.param)]
    sizes += [(_sums_tier(way), *gradient)]
    sizes += [(way.tier, _itemsize(kept.master), placed.state)]
    sizes += [(way.tier, _itemsize(kept.states[name]), placed.state) for name in states]

    def of(tier: str) -> str:
        whole = sum(size for where, size, placement in sizes if (where, placement) == (tier, Placement.REPLICATE))
        parts = sum(size for where, size, placement in sizes if (where, placement) == (tier, Placement.SHARD))
        return " + ".join([f"{round(whole, 2):g}"] * bool(whole) + [f"{round(parts, 2):g}/N"] * bool(parts))

    others = [tier for tier in TIERS[1:] if tier == way.tier or (way.sums_rest and tier == "host")]
    return ", ".join([of("device"), *(f"{tier} {of(tier) or 0}" for tier in others)])


def _on_the_wire(buckets: Sequence[PlannedBucket], ranks: int, way: Way, kept: Kept, options: Options) -> int:
    """In units of (ranks - 1) / ranks of the params: an all-reduce is two.

    At stage 3 that of modules that fill their buckets: one that several share is gathered again for each of them.
    """
    travels = (options.reduce_dtype or way.dtype).itemsize
    numel = sum(sum(bucket.layout.numels) for bucket in buckets)
    # At stage 3 forward and backward gather, in place of the one gathering behind the update.
    again = sum(sum(bucket.layout.numels) for bucket in buckets if bucket.is_released) * way.dtype.itemsize
    if not way.has_module:
        gradients, params = 2 * way.dtype.itemsize, way.stage and way.dtype.itemsize
    elif way.stage == 0 and way.releases:
        gradients, params = travels * ranks, 0  # every rank receives all that the others have
    elif way.stage == 0:
        gradients, params = travels + kept.gradient.itemsize, 0  # sums come back as they are kept
    else:
        gradients, params = travels, way.dtype.itemsize
    return (numel * (gradients + params) + again) * (ranks - 1) // ranks


def cheapest(needs: Sequence[Need], device_bytes: int, host_bytes: int | None = None) -> Need | None:
    """Of those that fit, the one of least :func:`cost`, but what keeps all of fp32 before what does not; None if none
    fits."""
    fitting = [need for need in needs if fits(need, device_bytes, host_bytes)]
    return min(fitting, key=lambda need: (not need.way.is_exact, *cost(need), need.on("device")), default=None)


def cost(need: Need) -> tuple[int, int, int]:
    """Bytes of a step by how slow they are: of the disk, the bus, the wire."""
    return need.moved["disk"], need.moved["bus"], need.moved["wire"]


def fits(need: Need, device_bytes: int, host_bytes: int | None = None) -> bool:
    return need.on("device") <= device_bytes and (host_bytes is None or need.on("host") <= host_bytes)


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
