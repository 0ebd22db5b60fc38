"""Plans a training before it starts: bytes on a rank by kind and tier, bytes that move, what fits.

The layouts are those that the optimizer makes, so padding, small params that stay whole and buckets are counted as they
will be. Activations, and the memory of the allocator and the communication library, are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from ..arguments import whole
from ..config import Options
from ..domain.block_code import message_bytes
from ..domain.bucket_plan import NO_MATRICES
from ..domain.formats import TRAFFIC_FORMATS, itemsize_of
from ..optim.like import recipe
from ..optim.optimizer import ShardedOptimizer
from .cut import Cut
from .need import Need
from .plan_bytes import bytes_of, formula
from .plan_layout import ModelLayout
from .plan_traffic import moved_of, wire_of
from .ways import Way

if TYPE_CHECKING:
    from ..domain.param import Group
    from ..rules import Rule
    from .plan_layout import StageLayout


def plan(
    module: nn.Module,
    optimizer: ShardedOptimizer,
    ranks: int,
    way: Way,
    options: Options | None = None,
    cut: Cut | None = None,
) -> Need:
    """Returns what one way needs on one rank; of a pipeline, on a rank of the stage that needs most.

    Args:
        module: on any device, the meta device too; its params' dtypes are those of ``way`` instead. Of DTensors, what
            this rank has of them.
        optimizer: any instance of the class, for its rule and hyper-parameters; it is not touched.
        ranks: all those of the model.
        options: tuning and ``reduce_dtype`` are read from them.
        cut: divides the module; None: all ranks have all of it. Bytes that these ranks exchange to compute
            (activations, tokens, sums of partial results) are not counted.

    Raises:
        TypeError, ValueError: no module, no optimizer of shardopt's, no way, a model without params, no rank; ranks or
            a model that the cut cannot divide.
    """
    _check_optimizer(optimizer, is_instance=True)
    if not isinstance(way, Way):
        raise TypeError(f"way takes a Way, as Way(2, has_module=True, dtype=torch.bfloat16), found {way!r}.")
    if cut is not None and not isinstance(cut, Cut):
        raise TypeError(f"cut takes a Cut or None, found {cut!r}.")
    if options is not None and not isinstance(options, Options):
        raise TypeError(f"options takes shardopt's Options or None, found {options!r}.")
    return Planner(module, optimizer.rule, groups_for(module, optimizer), ranks, options, cut).need(way)


def groups_for(module: nn.Module, optimizer: ShardedOptimizer | type[ShardedOptimizer]) -> Sequence[Group]:
    """Returns the param groups that an optimizer, or one of its class with default arguments, makes of a module.

    Raises:
        TypeError: no module, or no optimizer of shardopt's.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module takes an nn.Module, found {type(module).__name__}.")
    _check_optimizer(optimizer)
    if isinstance(optimizer, type):
        return optimizer._groups_of(module, recipe(optimizer)[1], {})
    return optimizer._groups_of(module, optimizer.defaults, optimizer._given)


def _check_optimizer(optimizer: object, is_instance: bool = False) -> None:
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    if not issubclass(kind, ShardedOptimizer) or (is_instance and kind is optimizer):
        taken = "an instance of a class" if is_instance else "a class, or an instance,"
        found = f"the class {kind.__qualname__}" if kind is optimizer else f"a {kind.__qualname__}"
        raise TypeError(f"optimizer takes {taken} of shardopt's, such as ShardedAdamW(module), found {found}.")


class Planner:
    """Plans for one model, optimizer and number of ranks. Ways with the same buckets share one layout."""

    def __init__(
        self,
        module: nn.Module,
        rule: Rule,
        groups: Sequence[Group],
        ranks: int,
        options: Options | None = None,
        cut: Cut | None = None,
    ):
        """
        Args:
            rule: of the optimizer.
            groups: its param groups, see :func:`groups_for`; the rest as for :func:`plan`.

        Raises:
            TypeError, ValueError: a model without params, no rank; ranks or a model that the cut cannot divide.
        """
        self._rule, self._options, self._cut = rule, options or Options(), cut or Cut()
        data_parallel = self._cut.data_parallel(whole(ranks, "ranks", least=1))
        self._layout = ModelLayout(module, rule, groups, data_parallel, self._options, self._cut)

    @property
    def numel(self) -> int:
        """The number of params of a rank that has most."""
        return max(sum(local.shape.numel() for local in params.values()) for params in self._layout.stages)

    def need(self, way: Way) -> Need:
        """Returns what this way needs on one rank, of the stage that needs most.

        A rule that looks at whole params releases no gradients.
        """
        return max(self.needs(way), key=lambda need: (need.on("device"), need.moved["wire"]))

    def needs(self, way: Way) -> list[Need]:
        """Returns what this way needs on one rank of each stage of the pipeline."""
        if self._layout.updates_matrices or self._rule.takes_norms:
            way = replace(way, release_gradients=False)
        return [self._need(way, stage) for stage in range(len(self._layout.stages))]

    def _need(self, way: Way, stage: int) -> Need:
        laid, asked = self._layout.stage(way, stage), self._options.reduce_dtype
        reduced = way.seen if asked is None or isinstance(asked, str) else asked  # in buffers
        coded = itemsize_of(TRAFFIC_FORMATS[asked]) if isinstance(asked, str) else None
        sent = reduced.itemsize if coded is None else coded
        packed = self._options.gather_dtype
        gathered = way.seen.itemsize if packed is None else itemsize_of(TRAFFIC_FORMATS[packed])
        owed = way.has_module and self._options.feeds_back_at(way.stage)
        kinds = bytes_of(laid, way, reduced, coded, gathered, self._options.tuning, owed)
        if packed is not None:  # messages lie beside what they will fill until they are decoded
            kinds["window"]["device"] += int(laid.window / way.seen.itemsize * gathered)
            if way.stage in (1, 2):
                _add_exact(kinds, laid, way, TRAFFIC_FORMATS[packed].bits)
        wire = wire_of(laid, way, sent, gathered, self._cut)
        numel = sum(domain.numel for domain in laid.domains.values())
        matrices = sum((domain.matrices for domain in laid.domains.values() if way.stage), NO_MATRICES)
        kept = 0.0 if packed is None or way.stage not in (1, 2) else way.seen.itemsize + gathered
        return Need(
            way, kinds, formula(way, laid, owed, kept), moved_of(kinds, way, wire), wire, numel, self._cut, matrices
        )


def _add_exact(kinds: dict[str, dict[str, int]], laid: StageLayout, way: Way, bits: int) -> None:
    """Adds the exact slices that stay beside whole params, each with its message, and the messages of a step."""
    for domain in laid.domains.values():
        for bucket, count in domain.buckets if domain.ranks > 1 else ():
            shard = bucket.layout.shard_numel
            message = message_bytes(shard, bits)
            kinds["param"]["device"] += count * (shard * way.seen.itemsize + message)
            kinds["window"]["device"] += count * domain.ranks * message
