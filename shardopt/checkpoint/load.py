"""Loading: match the checkpoint with the model, verify every byte that is needed, and only then change anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..arguments import flag
from ..domain.param_state import ParamState
from ..domain.residual import residuals_of
from ..errors import CheckpointError, ShardoptError
from ..rules.rule import EMA
from . import gradients, rng, values
from .arguments import check_module, directory_of, engines_of
from .check_groups import check_groups
from .match import ModelMatch
from .model import Model
from .model_ranks import collectives_of, collectives_of_parts, data_ranks_of
from .names import read_names
from .plan_load import LoadPlan
from .publish import find
from .reader import Checkpoint
from .records import TensorKey
from .turns import in_turn, turns_of

if TYPE_CHECKING:
    from ..domain.param import ParamRecord
    from ..engine import Engine
    from ..optim.optimizer import ShardedOptimizer
    from .collectives import Collectives
    from .model_param import ModelParam


class Loaded(dict[str, Any]):
    """What was saved as ``extra``.

    Attributes:
        path: of the checkpoint that was loaded.
        step: that it was saved with.
        mismatches: with ``strict=False``, what does not fit and was not loaded, in words; empty if all was loaded.
        losses: masters and states whose format here is shorter than the saved one, in words; empty if every bit was
            restored.
    """

    def __init__(self, extra: dict[str, Any], path: Path, step: int, mismatches: Sequence[str], losses: Sequence[str]):
        super().__init__(extra)
        self.path, self.step, self.mismatches, self.losses = path, step, tuple(mismatches), tuple(losses)


def load_checkpoint(
    directory: str | Path,
    module: nn.Module,
    optimizer: ShardedOptimizer | Sequence[ShardedOptimizer] | None = None,
    *,
    strict: bool = True,
    names: Mapping[Any, str] | None = None,
) -> Loaded:
    """Loads what :func:`save_checkpoint` wrote, at whatever number of ranks, stage and cut of the model. Collective.

    Each rank reads the ranges that it needs, and verifies their checksums before the first value changes. Training then
    continues with the exact bits of the saved run. An optimizer that has not bound its params binds them here: move,
    cast and wrap the model before.

    Args:
        directory: that of all checkpoints (the newest is loaded), or one checkpoint's own.
        module: with the names, shapes and dtypes of the one that was saved.
        optimizer: as given to ``save_checkpoint``; None loads params and buffers only.
        strict: False loads what fits and lists the rest in ``mismatches``.
        names: what modules are called in the whole model, as in ``save_checkpoint``.

    Returns:
        What was saved as ``extra``, as a dict with attributes: see :class:`Loaded`.

    Raises:
        CheckpointError: on every rank; nothing was changed: the checkpoint is damaged, or that of another model.
        StateError: a signal handler, say, makes the call in the middle of a step.
        TypeError, ValueError: an argument is of another type, by its name.
    """
    check_module(module)
    engines = engines_of(optimizer)
    turns = turns_of("load_checkpoint()", module, engines)
    return in_turn(turns, lambda: _load_from(directory, module, engines, strict, names))


def _load_from(
    directory: str | Path, module: nn.Module, engines: list[Engine], strict: bool, names: Mapping[Any, str] | None
) -> Loaded:
    """Collective, with the turns of all optimizers."""
    for each in engines:
        each.end_stream("load_checkpoint()")
    collectives = collectives_of(engines)
    root, strict, given = collectives.together(
        lambda: (directory_of(directory), flag(strict, "strict"), read_names(names)), "reading the arguments"
    )
    if _are_apart(root, engines, collectives):
        collectives = collectives_of_parts(engines)
    checkpoint = _open(root, collectives)
    with checkpoint, torch.no_grad():
        return _load(checkpoint, lambda: Model(module, engines, given), engines, strict, collectives)


def _are_apart(directory: Path, engines: Sequence[Engine], collectives: Collectives) -> bool:
    """Collective: True if each part of the model has its own checkpoint, as older versions wrote them."""
    phase = "opening a checkpoint"
    is_first = data_ranks_of(engines).rank == 0
    paths = collectives.all_gather(str(directory.resolve()) if is_first else None, phase)
    if len({path for path in paths if path is not None}) == 1:
        return False

    def look() -> str | None:  # one directory may have several paths
        if not is_first:
            return None
        with Checkpoint(find(directory)) as checkpoint:
            return checkpoint.digest

    digests = collectives.all_gather(collectives.together(look, phase), phase)
    return len({digest for digest in digests if digest is not None}) > 1


def _open(directory: Path, collectives: Collectives) -> Checkpoint:
    """Collective: opens the same checkpoint on all ranks."""
    phase = "opening a checkpoint"

    def newest() -> str | None:
        """Returns the name of the checkpoint on rank 0; None if the directory itself is one, and on other ranks."""
        found = directory if collectives.world.rank else find(directory)
        return None if found == directory else found.name

    name = collectives.broadcast(collectives.together(newest, phase), phase)
    checkpoint = collectives.together(lambda: Checkpoint(directory if name is None else directory / name), phase)
    collectives.compare({"the manifest's digest": checkpoint.digest}, phase)
    step = checkpoint.manifest.info.step
    collectives.compare_parts({"the step of the checkpoint of each part of the model": step}, phase)
    return checkpoint


def _load(
    checkpoint: Checkpoint,
    look: Callable[[], Model],
    engines: list[Engine],
    strict: bool,
    collectives: Collectives,
) -> Loaded:
    """Loads into the model, which ``look`` reads both before and after its params are bound."""
    manifest, path = checkpoint.manifest, checkpoint.path
    phase = "comparing the checkpoint with the model"

    def match_names() -> ModelMatch:
        model.check_loadable()
        return ModelMatch(manifest, model)

    def compare() -> None:
        match.compare(summaries)
        if strict and match.mismatches:
            raise CheckpointError(
                f"give the model and optimizers that were saved, or strict=False to load what fits: {path} does not "
                f"fit this model: {match.describe()}. Nothing was loaded."
            )
        check_groups(manifest, match, engines)

    def bind() -> Model:
        for engine in engines:
            engine.ensure_bound()
        bound = look()  # params have shards now
        bound.take_names_of(model)
        return bound

    model = collectives.together(look, phase)
    model.learn_names(collectives, phase)
    match = collectives.together(match_names, phase)
    summaries = collectives.all_gather_records(match.summary(), phase)
    collectives.together(compare, phase)
    bound = collectives.together(bind, "binding params")
    loading = collectives.together(lambda: Loading(checkpoint, bound, match, collectives), "checking the checkpoint")
    loading.change()
    return Loaded(loading.extra, path, manifest.info.step, match.mismatches, loading.plan.losses())


class Loading:
    """The last two phases of a load on one rank: read and verify everything, then change the model."""

    def __init__(self, checkpoint: Checkpoint, model: Model, match: ModelMatch, collectives: Collectives):
        """Reads and verifies all that this rank needs.

        Raises:
            CheckpointError: a byte differs from what was saved.
        """
        self._checkpoint, self._manifest, self._collectives = checkpoint, checkpoint.manifest, collectives
        self._model, self._match = model, match
        self.plan = LoadPlan(self._manifest, model, match, collectives.world)
        for name in self._manifest.files:
            checkpoint.check_file(name)
        for item in self.plan.items:
            for chunk in item.assembly.chunks():
                checkpoint.read(chunk)
        own_rng = sorted(key for key, _ in self._manifest.of("rng") if key.name == str(collectives.world.rank))
        # Extra values and random numbers are small: they are kept from here on.
        self._small = {
            key: checkpoint.whole(key) for key in [*(key for key, _ in self._manifest.of("extra")), *own_rng]
        }
        rng.check(self._saved_rng(), model.device)
        self.extra = values.decode_dict(self._manifest.info.extra, self._find)
        self._module_extra = values.decode_dict(self._manifest.info.module_extra, self._find)

    def _saved_rng(self) -> dict[str, torch.Tensor]:
        return {key.kind: tensor for key, tensor in self._small.items() if key.section == "rng"}

    def _find(self, name: str) -> torch.Tensor:
        return self._small[TensorKey("extra", name, "value")]

    def change(self) -> None:
        """Collective: writes all that was planned, then counters, groups and random numbers.

        Raises:
            CheckpointError: the files changed since they were verified, or a rank died; the optimizers then refuse to
                step.
        """
        domains = self._model.domains
        try:
            self._collectives.together(self._write, "loading a checkpoint")
            for domain in domains:
                if domain.links is not None and domain.codes_updates:
                    from ..domain.shown_params import show_loaded  # no more is loaded than is used

                    show_loaded(domain)
        except ShardoptError as error:
            for domain in domains:
                domain.mark_broken(f"while loading a checkpoint: {error}", by_load=True)
            raise
        if not self._match.mismatches:  # everything was replaced
            for domain in domains:
                domain.mark_repaired()

    def _write(self) -> None:
        try:
            with ExitStack() as stores:
                for engine in self._model.engines:
                    _before_writing(engine)
                for domain in self._model.domains:
                    stores.enter_context(domain.epoch.loading())
                    if domain.shards:
                        stores.enter_context(domain.all_or_nothing())
                for each in (each for domain in self._model.domains for each in residuals_of(domain)):
                    each.zero()  # before the planned parts are written
                for item in self.plan.items:
                    for before, read in item.assembly.values(self._checkpoint):
                        item.write(before, read)
                self._commit()
        except ShardoptError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"load a checkpoint again: loading {self._checkpoint.path} failed half-way ({type(error).__name__}: "
                f"{error}). Params and states belong to different steps, so the optimizers refuse to step until then."
            ) from error

    def _commit(self) -> None:
        model, match = self._model, self._match
        for name in match.params:
            param = model.params[name]
            if param.entry is not None:
                self._commit_param(param, param.entry, match.states.get(name))
                if param.entry.gradient_slice is not None or gradients.accumulates_alone(param.domain):
                    about = self.plan.sums.get(param.param)
                    own = self.plan.gradients.get(param.param)
                    gradients.restore(param.entry, param.entry.gradient_slice, about, own, model.data_ranks.size)
        for number, engine in enumerate(model.engines):
            engine.states.consolidated = None
            owned = {param for group in engine.local_groups() for param in group["params"]}
            engine.states.waiting = {p: state for p, state in self.plan.waiting.items() if p in owned}
            for index, group in enumerate(engine.groups):
                if (number, index) in match.groups:
                    _update_group(group, values.decode_dict(match.groups[number, index], self._find))
        for saved_as, own_name in match.modules.items():
            model.module.get_submodule(own_name).set_extra_state(self._module_extra[saved_as])
        rng.restore(self._saved_rng(), model.device)

    def _commit_param(self, param: ModelParam, entry: ParamRecord, saved: str | None) -> None:
        """Sets the counters that belong to the loaded weights and, where they fit, to the states of ``saved``."""
        shard, index = entry.shard, entry.index
        kinds = {} if saved is None else self._manifest.kinds[saved]
        # The next step rebuilds the master from the param, if the master does not round to the param.
        entry.note_replaced()
        if shard.exact_slice is not None:
            where = shard.slice_of(index).local
            shard.exact_slice.load(where.start, where.stop)
        if "master" not in kinds and shard.masters and shard.exact == "param":
            # The checkpoint has no master, and the low bits of the present master belong to other weights.
            where = shard.slice_of(index).local
            shard.write_chunk("master", where.start, shard.read_chunk("param", where.start, where.stop).float())
        if saved is None:
            return
        about = self._manifest.params[saved]
        if not about.has_state:  # as before the param's first step
            entry.forget()
            shard.zero(index)
            entry.write_initial()
            return
        margins = self.plan.margins.get(param.param, {})
        entry.load_counters(ParamState(about.step, about.carried, margins=margins))
        if EMA in shard.formats.states and EMA not in kinds:
            shard.begin_average(index)


def _before_writing(engine: Engine) -> None:
    """Collective: waits until no rank gathers params that will be overwritten, and frees gathered params."""
    for domain in engine.ensure_domains().domains:
        if domain.sharded is not None:
            domain.gatherer.before_writes()


def _update_group(group: dict[str, Any], saved: dict[str, Any]) -> None:
    """Updates a param group in place: schedulers hold the dict, and compiled code holds tensor learning rates."""
    for key, value in saved.items():
        own = group.get(key)
        if isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor) and own.shape == value.shape:
            own.copy_(value)
        else:
            group[key] = value
