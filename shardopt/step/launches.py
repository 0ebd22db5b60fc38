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
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from ..domain.shard_tables import joined_table
from ..kernels.formats import BF16, ROOT2, format_of
from ..kernels.launch import backend_of
from ..kernels.products import COLUMNS as PRODUCT_COLUMNS
from ..kernels.reductions import LIMBS
from ..kernels.spec import Spec
from ..kernels.tables import BLOCK, Factors, Gradients, JoinedStreams, Streams, noise_from
from ..rules.passes import passes_of
from .params import AlikeParams, ParamUpdate, Variants, param_geometry

if TYPE_CHECKING:
    from ..domain.domain import Domain
    from ..domain.history import History
    from ..domain.param import ParamRecord
    from ..domain.shard import Shard
    from ..kernels.formats import Format
    from ..kernels.products import Products
    from ..kernels.spec import Pass
    from ..partition.comm.together import Relay
    from ..rules import Variant
    from ..rules.matrix import MatrixScalars
    from ..tensors.gradient_slice import GradientSlice


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
    # Of a rule of whole matrices: the pass that follows, but for where its updates lie.
    apply: Launch | None = None
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


class Op(Protocol):
    """One part of an update, to which all ranks come in the same order; what it works on is an ``Update``."""

    def run(self, update: Any, relay: Relay) -> None:
        """Does this rank's part; collective where other ranks wait for it, also if this rank has failed.

        Raises:
            Exception: an error that all ranks of the domain know of. Any other one goes into the relay.
        """


@dataclass(frozen=True)
class Program:
    """What the updates of one domain do, in order; frozen with the plan of its steps, see ``program.py``.

    Attributes:
        of_matrices: the shards whose rule is one of whole matrices, in the order of their updates.
    """

    ops: tuple[Op, ...] = ()
    of_matrices: tuple[Shard, ...] = ()

    def __str__(self) -> str:
        return "\n".join(map(_told, self.ops))


def _told(op: Op) -> str:
    what, number = (type(op).__doc__ or "").partition("\n")[0], getattr(op, "number", None)
    return f"{type(op).__name__}{'' if number is None else f' {number}'}: {what}"


@dataclass
class StepPlan:
    """What this rank would do in one domain."""

    domain: Domain
    numbers: Sequence[dict[str, Any]] = ()  # hyper-parameters of each group, as plain numbers
    updates: Sequence[ParamUpdate] = ()
    launches: list[Launch] = field(default_factory=list)
    # Each history of the params that are updated, with the scalars that it carries on.
    advances: Sequence[tuple[History, tuple[tuple[float, ...], dict[str, float]]]] = ()
    facts: Sequence[Any] = ()  # of all params, JSON-able: their steps and gradients must be alike on all ranks
    is_replayed: bool = False  # True if the records of the params already say all that an update changes in them
    states: dict[Shard, dict[str, None]] = field(default_factory=dict)  # names each shard needs, the same on all ranks
    written: list[ParamRecord] = field(default_factory=list)  # params that others wrote since the last step
    sources: Sequence[ParamRecord] = ()  # those of them whose ``data`` is a tensor that is not taken yet
    slices: Sequence[GradientSlice] = ()  # of the updates, if all read sums
    # What the gradients hold, as far as the decision needs it.
    nonfinite: int = 0  # Inf and NaN in this rank's shards
    limbs: tuple[int, ...] = (0,) * LIMBS  # sum of squares of this rank's shards
    witness: int = 0  # bits of a float64: a sample that must be alike on all ranks, see survey.py
    norm: float | None = None  # 2-norm of all gradients, where every rank knows it
    margins: dict[ParamRecord, dict[str, torch.Tensor]] = field(default_factory=dict)  # new ones, from the update on
    program: Program = field(default_factory=Program)  # of its update
    kept: KeptChunks | None = None  # the chunks that the last step updated; None: they are not kept


@dataclass(eq=False)
class LaunchForm:
    """What of a launch stays as long as the same params take part, with gradients of one kind at other addresses.

    Attributes:
        whole: the variant of the rule, all passes of it.
        members: the updates of the step that was planned, by row; empty unless its gradients lie where they always do.
        reads_sums: True if the gradients are all of the shard's, in the memory of the reducer's sums: the updates of
            all steps are the same.
        alike: numbers of alike params, and the rows that have each one's scalars.
        ties: of the masters, see ``Tables``.
        stays: True if all of it but the scalars is the same in each step.
    """

    shard: Shard
    whole: Variant
    spec: Spec
    divisor: int
    is_on_host: bool
    members: Mapping[int, ParamUpdate]
    reads_sums: bool
    alike: Sequence[tuple[int, list[int]]]
    ties: bool

    def __post_init__(self) -> None:
        whole, members = self.whole, self.members
        self._starts = [each.start for each in members.values()]
        self._entries = {row: each.entry for row, each in members.items()}
        # Is the launch known before the gradients have come? And are scalars all that a step tells the kernel?
        self.is_ahead = self.reads_sums and len(self.spec.passes) == 1 and whole.around is None and not whole.margins
        self.stays = self.is_ahead and not self.spec.needs_noise
        self._kept: tuple[torch.device, Launch, np.ndarray[Any, Any]] | None = None
        if not self.reads_sums:
            self.members = {}  # gradients are let go

    def launch(self, updates: Mapping[ParamRecord, ParamUpdate], alike: AlikeParams, seed: int) -> Launch:
        """Returns the launch of the step whose scalars were evaluated last.

        Args:
            updates: of the step.
        """
        shard = self.shard
        if self._kept is not None:
            device, launch, table = self._kept
            if device == shard.home.device and launch.gradients is shard.sum_table:
                self._fill(table, alike)
                return launch
        rows = self.members if self.reads_sums else {row: updates[entry] for row, entry in self._entries.items()}
        launch = self._made(rows, alike, seed)
        if self.stays:
            self._kept = shard.home.device, launch, launch.scalars.numpy()
        return launch

    def _made(self, updates: Mapping[int, ParamUpdate], alike: AlikeParams, seed: int) -> Launch:
        shard, spec, runs = self.shard, self.spec, alike.runs
        if self.reads_sums:
            gradients = shard.sum_table  # of the reducer, which lie where they lay at every step
        else:
            grads = [each.grad for each in updates.values()]
            gradients = shard.tables.gradients_of(list(updates), grads, self._starts, self.is_on_host)
        backend_of(shard.home.device).prepare(spec, shard.home.device, gradients.aligned)
        table = np.zeros((shard.tables.num_rows, len(spec.scalars)), dtype=np.float32)
        self._fill(table, alike)
        launch = Launch(
            shard,
            spec,
            len(spec.passes) - 1,
            gradients,
            torch.from_numpy(table),
            updates,
            self.divisor,
            _noise(seed, shard, updates) if spec.needs_noise else None,
            self.is_on_host,
            runs={row: runs[entry] for row, entry in self._entries.items() if entry in runs} if runs else {},
            ties=self.ties,
        )
        return launch if self.whole.around is None else replace(launch, apply=self._apply(launch, alike, seed))

    def _apply(self, launch: Launch, alike: AlikeParams, seed: int) -> Launch:
        """Returns the second pass of a rule of whole matrices, its kernel compiled, with its scalars and noise."""
        assert self.whole.around is not None
        shard, (accumulate, apply) = self.shard, self.whole.around
        spec, device = shard.spec(apply, BF16), shard.home.device
        backend_of(device).prepare(spec, device, True)
        table = np.zeros((shard.tables.num_rows, len(apply.scalars)), dtype=np.float32)
        for number, rows in self.alike:
            table[rows] = alike.scalars[number][0][len(accumulate.scalars) :]
        noise = _noise(seed, shard, launch.updates) if spec.needs_noise else None
        scalars = torch.from_numpy(table)
        return replace(launch, spec=spec, number=0, scalars=scalars, noise=noise, divisor=1, is_on_host=False, runs={})

    def _fill(self, table: np.ndarray[Any, Any], alike: AlikeParams) -> None:
        """Fills a table with the scalars of a step: few are evaluated, and the rows of each are filled together."""
        width = table.shape[1]
        for number, rows in self.alike:
            # Of a matrix rule, the first pass's; results of reductions are not known.
            own = alike.scalars[number][0][:width]
            table[rows, : len(own)] = own


def forms_of(
    shard: Shard, variants: Variants, updates: Mapping[int, ParamUpdate], alike: AlikeParams
) -> Iterator[LaunchForm]:
    """Yields the forms of the launches that update params of one shard.

    Args:
        updates: index of the param in its bucket -> its update.
    """
    rows: dict[tuple[Variant, torch.dtype, int, bool, bool], dict[int, ParamUpdate]] = defaultdict(dict)
    variant_of: dict[int, Variant] = {}  # by group: params of one bucket give one answer
    for row, piece in enumerate(shard.pieces):
        each = updates.get(piece.param)
        if each is not None:
            if each.group not in variant_of:
                variant_of[each.group] = variants(each.group, each.entry.shape)
            ties = each.entry.index in shard.loaded_masters
            rows[variant_of[each.group], each.grad.dtype, each.divisor, each.is_on_host, ties][row] = each
    for (whole, dtype, divisor, is_on_host, ties), members in rows.items():
        format = format_of(dtype, "a gradient")
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
        spec, of_alike = _spec_of(shard, whole, format), list(rows_of.items())
        yield LaunchForm(shard, whole, spec, divisor, is_on_host, members, reads_sums, of_alike, ties)


def _spec_of(shard: Shard, variant: Variant, grad: Format) -> Spec:
    """Returns what a launch runs on gradients of this format; of a rule of matrices the first pass, in bf16.

    The update of a shard then lies in a buffer of its own, 1D [shard_numel] bf16, at the places of its params::

        accumulate   gradient, states       -> states, update       the update stands where the param would
        apply        param, states, update  -> param, states        the function's result stands for the gradient
    """
    if variant.around is None:
        return shard.spec(variant, grad)
    accumulate, _ = variant.around
    states = tuple(shard.formats.states[name] for name in accumulate.states)
    return Spec(passes_of(accumulate), BF16, grad, None, states)


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
