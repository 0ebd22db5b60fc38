"""The bytes that one rank needs for a layout, by kind and tier, and their formula."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..domain.formats import itemsize_of
from ..domain.staying import bytes_of_states, num_staying
from ..kernels.formats import BlockFormat
from ..offload import gradients as landing
from ..offload.disk.file_io import PAGE, padded
from ..offload.disk.pipeline import SLOTS
from ..partition.layout import BLOCK, BucketLayout
from ..partition.reducer import BUCKETS_UNDER_WAY, BYTES_UNDER_WAY
from ..partition.zero_stage import ZeroStage
from .need import KINDS
from .ways import TIERS

if TYPE_CHECKING:
    import torch

    from ..config import Tuning
    from ..domain.bucket_plan import PlannedBucket
    from ..kernels.formats import Format
    from .plan_layout import DomainLayout, EqualBuckets, StageLayout
    from .ways import Tier, Way

_FP32, _RESIDUAL = 4, 2


def bytes_of(
    laid: StageLayout,
    way: Way,
    reduced: torch.dtype,
    coded: float | None,
    travels: float,
    tuning: Tuning,
    feeds_back: bool,
) -> dict[str, dict[str, int]]:
    """Returns the bytes by kind and tier.

    Args:
        reduced: the dtype of buffers of gradients.
        coded: bytes of an element of them that travels, where they are encoded; None: they travel as they are.
        travels: bytes of an element of a param on its way, at stage 3.
        feeds_back: what quantizing takes from gradients is kept.
    """
    kinds: dict[str, dict[str, int]] = {kind: {} for kind in KINDS}

    def add(kind: str, tier: str, nbytes: int) -> None:
        kinds[kind][tier] = kinds[kind].get(tier, 0) + nbytes

    for domain in laid.domains.values():
        ranks, buckets = domain.ranks, domain.buckets
        copies = 1 if ZeroStage(way.stage).shards_states else ranks
        is_lone, stay = sum(count for _, count in buckets) == 1, _staying(domain, way)
        for number, (bucket, count) in enumerate(buckets):
            tiers = {"device": stay[number], way.tier: count - stay[number]} if stay[number] else {way.tier: count}
            shard = bucket.layout.shard_numel
            held = shard if bucket.shards_params else bucket.layout.numel
            states = sum(int(shard * itemsize_of(bucket.formats.states[each])) for each in bucket.states)
            add("param", "device", count * held * _of_param(bucket, way))
            if domain.parts and bucket.shards_params:  # of what travels
                add("param", "device", int(count * bucket.layout.numel // domain.parts * travels))
            for tier, those in tiers.items():
                add("master", tier, those * int(shard * itemsize_of(bucket.formats.master)))
                add("state", tier, those * states)
            # The row of each block: of a shard, and of shards that one launch takes.
            add("buffer", "device", count * shard // BLOCK * 4 * (1 if is_lone else 2))
            if way.has_module:
                # Copies of one shard sum its gradients in equal parts.
                sums = BucketLayout((shard,), copies).numel * bucket.formats.gradient.itemsize
                add("gradient", _tier_of_sums(way), 0 if way.release_gradients else count * sums)
                if feeds_back and ranks > 1:
                    # Of the buffer: at stage 0 a sum that is used at once is not cut into slices.
                    slices = 1 if way.release_gradients and copies > 1 else ranks
                    add("gradient", "device", count * bucket.layout.over(slices).numel * _RESIDUAL)
        if way.has_module:
            slots = _slots(buckets, reduced, ranks) if way.sums_rest else 0
            # By host, ranks of a host read each other's buffers, and encode the sums.
            under_way = _under_way(buckets, reduced, ranks, None if tuning.by_host else coded, way)
            add("buffer", "device", under_way + slots)
            layouts = [bucket.layout for bucket, _ in buckets]
            resting = max(sum(each.numels[index] for index in each.resting) for each in layouts)
            kinds["arriving"]["device"] = max(kinds["arriving"].get("device", 0), resting * way.dtype.itemsize)
        else:
            add("gradient", "device", domain.numel * way.dtype.itemsize)
            add("ddp", "device", domain.numel * way.dtype.itemsize * (ranks > 1))
        for bucket in _early(domain, way):
            add("buffer", "device", 2 * bucket.layout.shard_numel * _of_param(bucket, way))
            add("buffer", way.tier, int(bytes_of_states(bucket)))
        if way.tier == "disk":
            away = [(bucket, count - stay[number]) for number, (bucket, count) in enumerate(buckets)]
            add("buffer", "host", _staging([each for each in away if each[1]], way, tuning))
    add("state", "device", laid.margins)
    add("window", "device", laid.window)
    return kinds


def formula(way: Way, laid: StageLayout, feeds_back: bool, exact: float = 0.0) -> str:
    """Returns "2 + 4/N, host 12/N": bytes a param of the device, then of other tiers that keep something.

    Args:
        exact: bytes a param of slices that stay beside whole params.
    """
    stage, kept = ZeroStage(way.stage), laid.kept
    gradient = 0 if way.release_gradients else kept.gradient.itemsize, way.stage > 0
    if not way.has_module:
        gradient = 2 * way.dtype.itemsize, False  # and DDP's buckets
    # Tier, bytes a param, whether they are sharded.
    sizes: list[tuple[str, float, bool]] = [
        ("device", _FP32 if stage.shards_params and way.compute_dtype else way.seen.itemsize, stage.shards_params)
    ]
    sizes += [(_tier_of_sums(way), *gradient), ("device", _RESIDUAL if feeds_back else 0, False)]
    sizes += [("device", exact, True)]
    states = sum(laid.shares[name] * itemsize_of(format) for name, format in kept.states.items())
    for tier, share in ((way.tier, way.fraction), ("device", 1 - way.fraction)):
        sizes.append((tier, share * (itemsize_of(kept.master) + states), stage.shards_states))

    def of(tier: str) -> str:
        whole = sum(size for where, size, is_sharded in sizes if where == tier and not is_sharded)
        parts = sum(size for where, size, is_sharded in sizes if where == tier and is_sharded)
        whole, parts = round(whole, 2), round(parts, 2)
        return " + ".join([f"{whole:g}"] * bool(whole) + [f"{parts:g}/N"] * bool(parts))

    others = [tier for tier in TIERS[1:] if tier == way.tier or (way.sums_rest and tier == "host")]
    return ", ".join([of("device"), *(f"{tier} {of(tier) or 0}" for tier in others)])


def _of_param(bucket: PlannedBucket, way: Way) -> int:
    """Returns the bytes of an element that a rank keeps."""
    return _FP32 if bucket.keeps_exact else way.seen.itemsize


def _staying(domain: DomainLayout, way: Way) -> Counter[int]:
    """Returns how many of each of the domain's equal buckets keep their states on the device of those that offload."""
    if way.fraction == 1:
        return Counter()
    nbytes = [bytes_of_states(bucket) for bucket, _ in domain.buckets]
    return Counter(domain.order[: num_staying([nbytes[number] for number in domain.order], way.fraction)])


def _early(domain: DomainLayout, way: Way) -> Iterator[PlannedBucket]:
    """Yields the buckets whose states and params are copied for updates in backward: the first ones that fit."""
    room = way.early_bytes
    for number in domain.order[sum(_staying(domain, way).values()) :] if room else ():
        bucket, _ = domain.buckets[number]
        nbytes = int(bytes_of_states(bucket)) + 2 * bucket.layout.shard_numel * _of_param(bucket, way)
        if nbytes <= room:
            room -= nbytes
            yield bucket


def _tier_of_sums(way: Way) -> Tier:
    return "host" if way.sums_rest else "device"


def _under_way(buckets: EqualBuckets, dtype: torch.dtype, ranks: int, coded: float | None, way: Way) -> int:
    """Returns the most bytes of buffers that gradients are reduced in: some are filled while others are sent.

    Of encoded ones messages are sent, and the buffers are free at once.
    """
    layouts = [(bucket.layout.over(ranks), count) for bucket, count in buckets]
    # A lone gradient that needs no padding is its own buffer.
    sizes = [(each.numel * dtype.itemsize, count) for each, count in layouts if each.numels != (each.numel,)]
    largest = max((size for size, _ in sizes), default=0)
    buffers = sum(count for _, count in sizes)
    if coded is None or ranks == 1:
        return min(buffers, _most_under_way(largest)) * largest
    # What a rank sends to each, its own slice too, and what each sends to it.
    most = max(each.numel for each, _ in layouts)
    messages = int(most * coded / ranks * (2 * ranks - 1))
    # A sum that does not stay takes the memory of a buffer, and counts as one.
    stays = not way.release_gradients and not way.sums_rest
    number = _most_under_way(messages if stays else most * dtype.itemsize)
    return min(buffers, BUCKETS_UNDER_WAY) * largest + min(sum(count for _, count in layouts), number) * messages


def _most_under_way(nbytes: int) -> int:
    """Returns how many buckets of so many bytes can be in use at once."""
    return max(BUCKETS_UNDER_WAY, BYTES_UNDER_WAY // max(nbytes, 1)) + 1


def _slots(buckets: EqualBuckets, dtype: torch.dtype, ranks: int) -> int:
    """Returns the most bytes of slots in which offloaded sums are made; one more slot is being copied."""
    least = min((bucket.layout.over(ranks).numel * dtype.itemsize for bucket, _ in buckets), default=0)
    largest = max((bucket.layout.shard_numel * bucket.formats.gradient.itemsize for bucket, _ in buckets), default=0)
    number = sum(count for _, count in buckets)
    return max(landing.SLOTS, min(number, _most_under_way(least) + 1)) * largest


def _staging(buckets: EqualBuckets, way: Way, tuning: Tuning) -> int:
    """Returns the bytes of memory that states on a disk take: slots, and params as before the step."""
    chunk_bytes = padded(max(tuning.chunk_bytes, PAGE))
    turns, slot, kept = 0, 0, 0
    for bucket, count in buckets:
        shard = bucket.layout.shard_numel
        elements = min(chunk_bytes // _FP32, shard)
        streams = [bucket.formats.master, *(bucket.formats.states[name] for name in bucket.states)]
        planes = [nbytes for format in streams if format is not None for nbytes in _plane_bytes(format, elements)]
        slot = max(slot, sum(map(padded, planes)))
        turns += count * -(-shard // max(elements, 1)) * bool(planes)
        kept += count * shard * _of_param(bucket, way)
    return kept + min(SLOTS, turns) * slot


def _plane_bytes(format: Format, elements: int) -> list[int]:
    scales = [elements // BLOCK * _FP32] if isinstance(format, BlockFormat) else []
    return [elements * format.itemsize, *scales]
