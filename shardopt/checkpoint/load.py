"""Loading: find out what fits, prove every byte that is needed, and only then change anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..arguments import flag
from ..domain.param_state import ParamState
from ..errors import CheckpointError, ShardoptError
from ..rules.rule import EMA
from . import gradients, rng, values
from .call import check_module, directory_of, engines_of
from .fit import Fit, check_groups
from .model import Model, home_of, meeting_of, meeting_of_parts
from .names import read_names
from .plan_load import LoadPlan
from .publish import find
from .reader import Checkpoint
from .records import Key

if TYPE_CHECKING:
    from ..domain.param import ParamRecord
    from ..engine import Engine
    from ..optim.optimizer import ShardedOptimizer
    from .meeting import Meeting, Problem
    from .model import ModelParam


class Loaded(dict[str, Any]):
    """What was saved as ``extra``.

    Attributes:
        path: of the checkpoint that was loaded.
        step: that it was saved with.
        mismatches: with ``strict=False``, what was left out, in words; empty where all was loaded.
        losses: masters and states that are kept in shorter formats here than they were saved in, in words; empty where
            every bit is that which was saved.
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

    Each rank reads the ranges that it needs. All of them are proven by their checksums before the first value changes.
    Training then goes on with the very bits of the run that was saved. An optimizer that has not bound its params does
    so here: move, cast and wrap the model before.

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
        TypeError, ValueError: an argument is of another type, by its name.
    """
    check_module(module)
    engines = engines_of(optimizer)
    meeting = meeting_of(engines)
    root, strict, given = meeting.together(
        lambda: (directory_of(directory), flag(strict, "strict"), read_names(names)), "reading the arguments"
    )
    if _are_apart(root, engines, meeting):
        meeting = meeting_of_parts(engines)
    checkpoint = _open(root, meeting)
    with checkpoint, torch.no_grad():
        return _load(checkpoint, lambda: Model(module, engines, given), engines, strict, meeting)


def _are_apart(directory: Path, engines: Sequence[Engine], meeting: Meeting) -> bool:
    """Collective: True if each part of the model has a checkpoint of its own, as before there was one of all ranks."""
    phase = "opening a checkpoint"
    is_first = home_of(engines).rank == 0
    paths = meeting.everyones(str(directory.resolve()) if is_first else None, phase)
    if len({path for path in paths if path is not None}) == 1:
        return False

    def look() -> str | None:  # one directory may have several paths
        if not is_first:
            return None
        with Checkpoint(find(directory)) as checkpoint:
            return checkpoint.digest

    digests = meeting.everyones(meeting.together(look, phase), phase)
    return len({digest for digest in digests if digest is not None}) > 1


def _open(directory: Path, meeting: Meeting) -> Checkpoint:
    """Collective: opens the same checkpoint on all ranks."""
    phase = "opening a checkpoint"

    def newest() -> str | None:
        """Returns the name of rank 0's, or None if the directory itself is a checkpoint."""
        found = directory if meeting.world.rank else find(directory)
        return None if found == directory else found.name

    name = meeting.from_rank_0(meeting.together(newest, phase), phase)
    checkpoint = meeting.together(lambda: Checkpoint(directory if name is None else directory / name), phase)
    meeting.compare({"the manifest's digest": checkpoint.digest}, phase)
    step = int(checkpoint.manifest.info["step"])
    meeting.compare_beyond({"the step of the checkpoint of each part of the model": step}, phase)
    return checkpoint


def _load(
    checkpoint: Checkpoint, look: Callable[[], Model], engines: list[Engine], strict: bool, meeting: Meeting
) -> Loaded:
    """Loads into the model that ``look`` finds, both before and after its params are bound."""
    manifest, path = checkpoint.manifest, checkpoint.path
    phase = "comparing the checkpoint with the model"

    def fit() -> Fit:
        model.check_loadable()
        return Fit(manifest, model)

    def compare() -> None:
        fitting.compare(told)
        if strict and fitting.mismatches:
            raise CheckpointError(
                f"give the model and optimizers that were saved, or strict=False to load what fits: {path} does not "
                f"fit this model: {fitting.describe()}. Nothing was loaded."
            )
        check_groups(manifest, fitting, engines)

    def bind() -> Model:
        for engine in engines:
            engine.ensure_bound()
        bound = look()  # params have shards now
        bound.settle_as(model)
        return bound

    model = meeting.together(look, phase)
    model.settle(meeting, phase)
    fitting = meeting.together(fit, phase)
    told = meeting.everyones(fitting.told(), phase)
    meeting.together(compare, phase)
    bound = meeting.together(bind, "binding params")
    loading = meeting.together(lambda: Loading(checkpoint, bound, fitting, meeting), "checking the checkpoint")
    loading.change()
    return Loaded(loading.extra, path, int(manifest.info["step"]), fitting.mismatches, loading.plan.losses())


class Loading:
    """The last two phases of a load on one rank: read and prove everything, then change the model."""

    def __init__(self, checkpoint: Checkpoint, model: Model, fitting: Fit, meeting: Meeting):
        """Reads and proves all that this rank needs.

        Raises:
            CheckpointError: some byte is not what was saved.
        """
        self._checkpoint, self._manifest, self._meeting = checkpoint, checkpoint.manifest, meeting
        self._model, self._fitting = model, fitting
        self.plan = LoadPlan(self._manifest, model, fitting, meeting.world)
        for name in self._manifest.files:
            checkpoint.check_file(name)
        for assembly, _ in self.plan.targets:
            for chunk in assembly.chunks():
                checkpoint.read(chunk)
        own_rng = sorted(key for key, _ in self._manifest.of("rng") if key.name == str(meeting.world.rank))
        # Read whole while they are proven: extra, random numbers.
        self._small = {
            key: checkpoint.whole(key) for key in [*(key for key, _ in self._manifest.of("extra")), *own_rng]
        }
        rng.check(self._saved_rng(), model.device)
        self.extra: dict[str, Any] = values.decode(self._manifest.info["extra"], self._find)
        self._module_extra: dict[str, Any] = values.decode(self._manifest.info["module_extra"], self._find)

    def _saved_rng(self) -> dict[str, torch.Tensor]:
        return {key.kind: tensor for key, tensor in self._small.items() if key.section == "rng"}

    def _find(self, name: str) -> torch.Tensor:
        return self._small[Key("extra", name, "value")]

    def change(self) -> None:
        """Collective: fills every target, then counters, groups, random numbers.

        Raises:
            CheckpointError: the files changed since they were proven, or a rank died; the optimizers then refuse to
                step.
        """
        problem: Problem = None
        domains = [domain for engine in self._model.engines for domain in engine.domains]
        try:
            with ExitStack() as stores:
                for engine in self._model.engines:
                    _before_writing(engine)
                for domain in domains:
                    stores.enter_context(domain.epoch.loading())
                    if domain.shards:
                        stores.enter_context(domain.all_or_nothing())
                for assembly, write in self.plan.targets:
                    for before, read in assembly.values(self._checkpoint):
                        write(before, read)
                self._commit()
        except ShardoptError as error:
            problem = error
        except Exception as error:
            problem = CheckpointError(
                f"load a checkpoint again: loading {self._checkpoint.path} failed half-way ({type(error).__name__}: "
                f"{error}). Params and states belong to different steps, so the optimizers refuse to step until then."
            )
            problem.__cause__ = error
        try:
            self._meeting.share(problem, "loading a checkpoint")
        except ShardoptError as error:
            for domain in domains:
                domain.mark_broken(f"while loading a checkpoint: {error}", by_load=True)
            raise
        if not self._fitting.mismatches:  # everything was replaced
            for domain in domains:
                domain.mark_repaired()

    def _commit(self) -> None:
        model, fitting = self._model, self._fitting
        for name in fitting.params:
            param = model.params[name]
            if param.entry is not None:
                self._commit_param(param, param.entry, fitting.states.get(name))
                if param.entry.gradient_slice is not None:
                    about = self.plan.sums.get(param.param)
                    own = self.plan.gradients.get(param.param)
                    gradients.restore(param.entry, param.entry.gradient_slice, about, own, model.home.size)
        for number, engine in enumerate(model.engines):
            engine.states.consolidated = None
            owned = {param for group in engine.local_groups() for param in group["params"]}
            engine.states.wait({p: state for p, state in self.plan.waiting.items() if p in owned})
            for index, group in enumerate(engine.groups):
                if (number, index) in fitting.groups:
                    _update_group(group, values.decode(fitting.groups[number, index], self._find))
        for saved_as, own_name in fitting.modules.items():
            model.module.get_submodule(own_name).set_extra_state(self._module_extra[saved_as])
        rng.restore(self._saved_rng(), model.device)

    def _commit_param(self, param: ModelParam, entry: ParamRecord, saved: str | None) -> None:
        """Makes the counters those of the loaded weights and, where they fit, of the states saved as ``saved``."""
        shard, index = entry.shard, entry.index
        kinds = {} if saved is None else self._manifest.kinds[saved]
        # The next step writes the master anew from the param, if the master does not round to it.
        entry.note_replaced()
        if "master" not in kinds and shard.masters:
            # The checkpoint has no master, and the low bits of the present one belong to other weights.
            where = shard.slice_of(index).local
            shard.write_chunk("master", where.start, shard.read_chunk("param", where.start, where.stop).float())
        if saved is None:
            return
        about = self._manifest.params[saved]
        if not about["has_state"]:  # back to before the param's first step
            entry.forget()
            shard.zero(index)
            entry.write_initial()
            return
        margins = self.plan.margins.get(param.param, {})
        entry.load_counters(ParamState(about["step"], self._manifest.carried(saved), margins=margins))
        if EMA in shard.formats.states and EMA not in kinds:
            shard.begin_average(index)


def _before_writing(engine: Engine) -> None:
    """Collective: waits until no rank gathers what is about to be overwritten; nothing gathered stays."""
    for domain in engine.compose().domains:
        if domain.sharded is not None:
            domain.gatherer.before_writes()


def _update_group(group: dict[str, Any], saved: dict[str, Any]) -> None:
    """In place: schedulers hold the dict, and compiled code a learning rate that is a tensor."""
    for key, value in saved.items():
        own = group.get(key)
        if isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor) and own.shape == value.shape:
            own.copy_(value)
        else:
            group[key] = value
