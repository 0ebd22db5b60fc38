"""The plan of a step: the tables of its launches, and which params each one updates, with which scalars and noise.

A GPU takes longer to be told of a kernel than to update a small shard. There, launches of several shards are made as
one. The shards lie one behind the other, as do the rows of their tables::

    shard          |  A A A A | B B | C C C |        one character a block
    row_of_block   |  0 0 1 2 | 3 4 | 5 5 6 |
    gradients      |  A's rows, B's, C's |           addresses of what would be element 0, were all one shard
    streams        |  likewise |

All shards that are kept alike take part, also those that nothing is updated in: their rows are skipped. So the table of
blocks, the only long one, is the same in every step.
"""

from __future__ import annotations

import hashlib
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ..domain.shard_tables import joined_table
from ..kernels.formats import ROOT2, format_of
from ..kernels.launch import backend_of
from ..kernels.products import COLUMNS as PRODUCT_COLUMNS
from ..kernels.reductions import LIMBS
from ..kernels.tables import BLOCK, Factors, Gradients, JoinedStreams, Streams, noise_from
from .matrix_passes import plan_apply, spec_of
from .op import Program
from .variants import Variants, param_geometry

if TYPE_CHECKING:
    from ..domain.domain import Domain
    from ..domain.history import History
    from ..domain.param import ParamRecord
    from ..domain.shard import Shard
    from ..kernels.products import Products
    from ..kernels.spec import Pass, Spec
    from ..rules import Variant
    from ..rules.matrix import MatrixScalars
    from .alike import AlikeParams, ParamScalars, StepScalars
    from .matrix_passes import Apply
    from .param_update import ParamUpdate


# By shard, the chunks that the last step updated, and what they were made of; see ``update.chunks_of``.
KeptChunks = dict["Shard", tuple[Any, ...]]


@dataclass(frozen=True, eq=False)
class Launch:
    """One kernel launch over one shard: one pass of a rule.

    Its params share one variant of the rule. Their gradients share dtype, divisor and device: they stay where backward
    left them. Their masters were all loaded since the last update, or none. The tables are in host memory until the
    launch.
    """

    shard: Shard
    spec: Spec
    number: int  # of the pass: the last one, unless `launch_of_pass` made it
    gradients: Gradients
    scalars: torch.Tensor  # 2D [num_rows, len(spec.scalars)] fp32; `NormSums` fills in results of reductions
    updates: Mapping[int, ParamUpdate]  # row -> param
    divisor: int  # of every gradient: how many were added up
    noise: torch.Tensor | None  # 2D [num_rows, 4] int32; None if everything is rounded to nearest
    is_on_host: bool  # true if the gradients are in host memory and the shard is on a device
    apply: Apply | None = None  # of a rule of whole matrices: the pass that follows
    products: Products | None = None  # of a factored rule
    # Of a rule of whole matrices, row -> the scalars of the matrices of its param, where they differ.
    runs: Mapping[int, tuple[MatrixScalars, ...]] = field(default_factory=dict)
    blocks: torch.Tensor | None = None  # 1D [num_blocks] bool in host memory: all that it updates; None: every one
    ties: bool = False  # of the masters, see ``Tables``
    # Of a pass that measures: 3D [measured values, num_rows, COLUMNS] int64, where the kernel runs.
    totals: torch.Tensor | None = None

    @property
    def part(self) -> Pass:
        """The pass that it runs."""
        return self.spec.passes[self.number]

    def divided(self) -> Launch:
        """Returns a launch whose divisor a kernel can fold into its factors: a power of two.

        Sums with another divisor are divided in place: one more pass over this rank's slices.
        """
        if Factors(self.divisor).folded() is not None:
            return self
        for each in self.updates.values():
            assert each.gradient_slice is not None
            each.gradient_slice.divide()
        return replace(self, divisor=1)


class GradientStats(NamedTuple):
    """What the gradients hold, as far as the decision needs it."""

    nonfinite: int = 0  # Inf and NaN in this rank's shards
    limbs: tuple[int, ...] = (0,) * LIMBS  # sum of squares of this rank's shards
    witness: int = 0  # bits of a float64: a sample that must be alike on all ranks, see survey.py
    norm: float | None = None  # 2-norm of all gradients, where every rank knows it


_NO_GRADIENTS = GradientStats()


@dataclass
class StepPlan:
    """What this rank would do in one domain."""

    domain: Domain
    numbers: Sequence[dict[str, Any]] = ()  # hyper-parameters of each group, as plain numbers
    updates: Sequence[ParamUpdate] = ()
    launches: list[Launch] = field(default_factory=list)
    # Each history of the params that are updated, with the scalars that it carries on.
    advances: Sequence[tuple[History, ParamScalars]] = ()
    facts: Sequence[Any] = ()  # of all params, JSON-able: their steps and gradients must be alike on all ranks
    is_replayed: bool = False  # True if the records of the params already say all that an update changes in them
    states: dict[Shard, dict[str, None]] = field(default_factory=dict)  # names each shard needs, the same on all ranks
    written: list[ParamRecord] = field(default_factory=list)  # params that others wrote since the last step
    sources: Sequence[ParamRecord] = ()  # those of them whose ``data`` is a tensor that is not taken yet
    stats: GradientStats = _NO_GRADIENTS
    margins: dict[ParamRecord, dict[str, torch.Tensor]] = field(default_factory=dict)  # new ones, from the update on
    program: Program = field(default_factory=Program)  # of its update
    kept: KeptChunks | None = None  # the chunks that the last step updated; None: they are not kept


@dataclass(frozen=True, eq=False)
class LaunchForm:
    """What of a launch stays as long as the same params take part, with gradients of one kind at other addresses.

    Attributes:
        whole: the variant of the rule, all passes of it.
        reads_sums: True if the gradients are all of the shard's, in the memory of the reducer's sums.
        entries: the params, by row.
        starts: of each row, which element of the param is the gradient's first.
        alike: numbers of alike params, and the rows that have each one's scalars.
        ties: of the masters, see ``Tables``.
    """

    shard: Shard
    whole: Variant
    spec: Spec
    divisor: int
    is_on_host: bool
    reads_sums: bool
    entries: Mapping[int, ParamRecord]
    starts: Sequence[int]
    alike: Sequence[tuple[int, list[int]]]
    ties: bool

    def launch(self, updates: Mapping[int, ParamUpdate], scalars: StepScalars, seed: int) -> Launch:
        """Returns the launch of a step.

        Args:
            updates: row -> param, the rows of this form in their order.
        """
        shard, spec, whole = self.shard, self.spec, self.whole
        if self.reads_sums:
            gradients = shard.sum_table  # of the reducer, which lie where they lay at every step
        else:
            grads = [each.grad for each in updates.values()]
            gradients = shard.tables.gradients_of(list(updates), grads, self.starts, self.is_on_host)
        backend_of(shard.home.device).prepare(spec, shard.home.device, gradients.aligned)
        table = np.zeros((shard.tables.num_rows, len(spec.scalars)), dtype=np.float32)
        self.fill(table, scalars)
        noise = _noise(seed, shard, updates) if spec.needs_noise else None
        apply = None
        if whole.around is not None:
            values = [(scalars.of_alike[number].values, rows) for number, rows in self.alike]
            apply = plan_apply(shard, whole.around, values, partial(_noise, seed, shard, updates))
        last, runs = len(spec.passes) - 1, scalars.runs
        runs_of_rows = {row: runs[entry] for row, entry in self.entries.items() if entry in runs} if runs else {}
        return Launch(
            shard,
            spec,
            last,
            gradients,
            torch.from_numpy(table),
            updates,
            self.divisor,
            noise,
            self.is_on_host,
            apply,
            runs=runs_of_rows,
            ties=self.ties,
        )

    def fill(self, table: np.ndarray[Any, Any], scalars: StepScalars) -> None:
        """Fills a table with the scalars of a step: few are evaluated, and the rows of each are filled together."""
        width = table.shape[1]
        for number, rows in self.alike:
            # Of a matrix rule, the first pass's; results of reductions are not known.
            own = scalars.of_alike[number].values[:width]
            table[rows, : len(own)] = own


def forms_of(
    shard: Shard, variants: Variants, updates: Mapping[int, ParamUpdate], alike: AlikeParams
) -> Iterator[tuple[LaunchForm, dict[int, ParamUpdate]]]:
    """Yields the forms of the launches that update params of one shard, and the updates of each one's rows.

    Args:
        updates: index of the param in its bucket -> its update.
    """
    rows: dict[tuple[int, torch.dtype, int, bool, bool], dict[int, ParamUpdate]] = defaultdict(dict)
    first_with: dict[Variant, int] = {}
    numbers: dict[int, int] = {}  # of variants, by group: params of one bucket give one answer
    for row, piece in enumerate(shard.pieces):
        each = updates.get(piece.param)
        if each is not None:
            if each.group not in numbers:
                variant = variants(each.group, each.entry.shape)
                numbers[each.group] = first_with.setdefault(variant, len(first_with))
            ties = each.entry.index in shard.loaded_masters
            rows[numbers[each.group], each.grad.dtype, each.divisor, each.is_on_host, ties][row] = each
    kinds = list(first_with)
    for (kind, dtype, divisor, is_on_host, ties), members in rows.items():
        whole, format = kinds[kind], format_of(dtype, "a gradient")
        spec = spec_of(shard, whole, format)
        is_whole = not is_on_host and len(members) == len(shard.pieces)
        reads_sums = is_whole and all([each.gradient_slice is not None for each in members.values()])
        if whole.margins:
            for grad_device in {each.grad.device for each in members.values()}:
                backend_of(grad_device).prepare_margin_sums(format, grad_device)
            for each in members.values():
                param_geometry(each.entry)
        rows_of: dict[int, list[int]] = {}
        for row, each in members.items():
            rows_of.setdefault(alike.number_of[each.entry], []).append(row)
        entries = {row: each.entry for row, each in members.items()}
        starts = [each.start for each in members.values()]
        alike_rows = list(rows_of.items())
        yield (
            LaunchForm(shard, whole, spec, divisor, is_on_host, reads_sums, entries, starts, alike_rows, ties),
            members,
        )


def _noise(seed: int, shard: Shard, members: Mapping[int, ParamUpdate]) -> torch.Tensor:
    """Makes a key for each param (each slice of a DTensor) and step, the same on whichever rank and shard it is."""
    counters = {}
    for row, each in members.items():
        step = each.entry.step + 1
        told = struct.pack("<qqq", seed, each.number, step)
        key, other_key = struct.unpack("<ii", hashlib.blake2b(told, digest_size=8).digest())
        counters[row] = (key, other_key, step * ROOT2 % 2**32)
    return shard.tables.noise(counters)


class JoinedLaunch(NamedTuple):
    """Launches that share spec, pass, divisor and ``ties``, of one shard or of all that are kept alike."""

    shards: Sequence[Shard]
    launches: Sequence[Launch | None]  # of each shard; None: nothing of it is updated
    gradients: Gradients  # of all, with rows in host memory

    @property
    def one(self) -> Launch:
        """One of the launches: what they share is what it has."""
        return next(each for each in self.launches if each is not None)

    @property
    def scalars(self) -> torch.Tensor:
        """2D [num_rows, len(spec.scalars)] fp32, in host memory."""
        return self._stacked(lambda launch, _: launch.scalars, len(self.one.spec.scalars), np.float32)

    @property
    def noise(self) -> torch.Tensor | None:
        """2D [num_rows, 4] int32, in host memory; None if everything is rounded to nearest."""
        if self.one.noise is None:
            return None

        def of(launch: Launch, first: int) -> torch.Tensor | None:
            return None if launch.noise is None else noise_from(launch.noise, -first)

        return self._stacked(of, 4, np.int32)

    @property
    def products(self) -> torch.Tensor | None:
        """2D [num_rows, products.COLUMNS] int64, in host memory; None for a rule that reads none."""
        if self.one.products is None:
            return None

        def of(launch: Launch, first: int) -> torch.Tensor | None:
            return None if launch.products is None else launch.products.part(-first)

        return self._stacked(of, PRODUCT_COLUMNS, np.int64)

    def streams(self, of_shard: Mapping[Shard, Streams]) -> JoinedStreams:
        """Returns the streams of all; of shards that are not named nothing is updated."""
        num_blocks = [shard.numel // BLOCK for shard in self.shards]
        num_rows = [shard.tables.num_rows for shard in self.shards]
        return JoinedStreams([of_shard.get(shard) for shard in self.shards], num_blocks, num_rows)

    def new_totals(self) -> torch.Tensor | None:
        """Returns totals of nothing for the rows of all, where the kernel runs; None if nothing is measured."""
        like = self.one.totals
        if like is None or len(self.launches) == 1:
            return like
        return like.new_zeros(len(like), sum(shard.tables.num_rows for shard in self.shards), like.shape[2])

    def hand_out(self, totals: torch.Tensor | None) -> None:
        """Gives each launch the totals of its rows."""
        if totals is None or len(self.launches) == 1:
            return
        its = totals.split([shard.tables.num_rows for shard in self.shards], dim=1)
        for launch, own in zip(self.launches, its, strict=True):
            if launch is not None and launch.totals is not None:
                launch.totals.copy_(own)

    def _stacked(self, table_of: Callable[[Launch, int], torch.Tensor | None], width: int, kind: type) -> torch.Tensor:
        """Returns the tables of all launches, one above the other, with zeros for shards that have none.

        Args:
            table_of: takes a launch, and the first element of its shard among those of all.
        """
        found, first = [], 0
        for shard, launch in zip(self.shards, self.launches, strict=True):
            table = None if launch is None else table_of(launch, first)
            found.append(np.zeros((shard.tables.num_rows, width), kind) if table is None else table.numpy())
            first += shard.numel
        return torch.from_numpy(found[0] if len(found) == 1 else np.concatenate(found))


def joined(shards: Sequence[Shard], launches: Sequence[Launch]) -> Iterator[JoinedLaunch]:
    """Yields the launches, joined where the backend takes several shards at a time.

    Args:
        shards: all of the domain.
    """
    alike: dict[tuple[Spec, int, int, bool], dict[Shard, Launch]] = {}
    for each in launches:
        device = each.gradients.row_of_block.device
        if each.blocks is None and device == each.shard.device and backend_of(device).joins_shards:
            alike.setdefault((each.spec, each.number, each.divisor, each.ties), {})[each.shard] = each
        else:
            table = each.gradients if each.blocks is None else each.gradients.only(each.blocks)
            yield JoinedLaunch([each.shard], [each], table)
    for (spec, *_), found in alike.items():
        like = next(iter(found))
        kept = [each for each in shards if (each.device, each.format) == (like.device, like.format)]
        kept = [each for each in kept if each in found or each.formats == like.formats]
        members = [found.get(each) for each in kept]
        pairs = zip(kept, members, strict=True)
        tables = [shard.tables.gradients({}) if each is None else each.gradients for shard, each in pairs]
        yield JoinedLaunch(kept, members, joined_table([each.tables for each in kept], tables, spec.grad.itemsize))
