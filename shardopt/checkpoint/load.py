"""Loading: find out what fits, prove every byte that is needed, and only then change anything."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..arguments import flag
from ..errors import CheckpointError, ShardoptError
from ..optim.optimizer import ShardedOptimizer
from ..rules.rule import EMA
from . import gradients, rng, values
from .call import as_list, check_module, directory_of
from .fit import Fit, fit
from .hyper import check_groups
from .manifest import Manifest
from .meeting import Meeting, Problem
from .model import Model, ModelParam, meeting_of
from .plan_load import LoadPlan, carried_of, plan_load
from .publish import find
from .reader import Checkpoint
from .records import Key


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
) -> Loaded:
    """Loads what :func:`save_checkpoint` wrote, at whatever number of ranks and stage. Collective.

    Each rank reads the ranges that it needs. All of them are proven by their checksums before the first value changes.
    Training then goes on with the very bits of the run that was saved. An optimizer that has not bound its params does
    so here: move, cast and wrap the model before.

    Args:
        directory: that of all checkpoints (the newest is loaded), or one checkpoint's own.
        module: with the names, shapes and dtypes of the one that was saved.
        optimizer: as given to ``save_checkpoint``; None loads params and buffers only.
        strict: False loads what fits and lists the rest in ``mismatches``.

    Returns:
        What was saved as ``extra``, as a dict with attributes: see :class:`Loaded`.

    Raises:
        CheckpointError: on every rank; nothing was changed: the checkpoint is damaged, or that of another model.
        TypeError, ValueError: an argument is of another type, by its name.
    """
    check_module(module)
    optimizers = as_list(optimizer)
    meeting = meeting_of(optimizers, module)
    problem: Problem = None
    root = Path()
    try:
        root, strict = directory_of(directory), flag(strict, "strict")
    except Exception as error:
        problem = error
    meeting.share(problem, "reading the arguments")
    checkpoint = _open(root, meeting)
    with checkpoint, torch.no_grad():
        return _load(checkpoint, module, optimizers, strict, meeting)


def _open(directory: Path, meeting: Meeting) -> Checkpoint:
    """Collective: the same checkpoint on all ranks."""
    phase = "opening a checkpoint"
    problem: Problem = None
    name: str | None = None
    try:
        if meeting.world.rank == 0:
            found = find(directory)
            name = None if found == directory else found.name
    except Exception as error:
        problem = error
    meeting.share(problem, phase)
    name = meeting.from_rank_0(name, phase)
    checkpoint: Checkpoint | None = None
    try:
        checkpoint = Checkpoint(directory if name is None else directory / name)
    except Exception as error:
        problem = error
    meeting.share(problem, phase)
    assert checkpoint is not None
    digest = checkpoint.digest
    meeting.compare(lambda: {"the manifest's digest": digest}, phase)
    step = int(checkpoint.manifest.info["step"])
    meeting.compare_beyond({"the step of the checkpoint of each part of the model": step}, phase)
    return checkpoint


def _load(
    checkpoint: Checkpoint, module: nn.Module, optimizers: list[ShardedOptimizer], strict: bool, meeting: Meeting
) -> Loaded:
    manifest, path = checkpoint.manifest, checkpoint.path
    problem: Problem = None
    fitting, loading = Fit(), Loading(checkpoint, meeting)
    try:
        model = Model(module, optimizers)
        model.check_loadable()
        fitting = fit(manifest, model)
        if strict and fitting.mismatches:
            raise CheckpointError(
                f"{path} does not fit this model: {fitting.describe()}. Nothing was loaded. Give the model and "
                "optimizers that it was saved with; strict=False loads what fits and lists the rest."
            )
        check_groups(manifest, fitting, optimizers)
    except Exception as error:
        problem = error
    meeting.share(problem, "comparing the checkpoint with the model")
    try:
        for each in optimizers:
            each.engine.ensure_bound()
    except Exception as error:
        problem = error
    meeting.share(problem, "binding params")
    try:
        model = Model(module, optimizers)  # params have shards now
        loading.prepare(model, fitting)
    except Exception as error:
        problem = error
    meeting.share(problem, "checking the checkpoint")
    loading.change(model, fitting, optimizers)
    return Loaded(loading.extra, path, int(manifest.info["step"]), fitting.mismatches, loading.losses)


class Loading:
    """The last two phases on one rank: proof, and change."""

    def __init__(self, checkpoint: Checkpoint, meeting: Meeting):
        self._checkpoint, self._meeting = checkpoint, meeting
        self.extra: dict[str, Any] = {}
        self._plan = LoadPlan()
        self._small: dict[Key, torch.Tensor] = {}  # read whole while they are proven: extra, random numbers
        self._module_extra: dict[str, Any] = {}
        self._kinds: dict[str, list[str]] = {}
        for key, _ in checkpoint.manifest.of("params"):
            self._kinds.setdefault(key.name, []).append(key.kind)

    @property
    def losses(self) -> tuple[str, ...]:
        return self._plan.losses()

    @property
    def _manifest(self) -> Manifest:
        return self._checkpoint.manifest

    def prepare(self, model: Model, fitting: Fit) -> None:
        """Reads and proves all that this rank needs.

        Raises:
            CheckpointError: some byte is not what was saved.
        """
        self._plan = plan_load(self._manifest, model, fitting)
        for name in self._manifest.files:
            self._checkpoint.check_file(name)
        for target in self._plan.targets:
            for chunk in target.chunks(self._manifest):
                self._checkpoint.read(chunk)
        own_rng = {key for key, _ in self._manifest.of("rng") if key.name == str(self._meeting.world.rank)}
        for key in [key for key, _ in self._manifest.of("extra")] + sorted(own_rng):
            self._small[key] = self._checkpoint.whole(key)
        rng.check(self._saved_rng(), model.device)
        self.extra = values.decode(self._manifest.info["extra"], self._find)
        self._module_extra = values.decode(self._manifest.info["module_extra"], self._find)

    def _saved_rng(self) -> dict[str, torch.Tensor]:
        return {key.kind: tensor for key, tensor in self._small.items() if key.section == "rng"}

    def _find(self, name: str) -> torch.Tensor:
        return self._small[Key("extra", name, "value")]

    def change(self, model: Model, fitting: Fit, optimizers: Sequence[ShardedOptimizer]) -> None:
        """Collective: fills every target, then counters, groups, random numbers.

        Raises:
            CheckpointError: the files changed since they were proven, or a rank died; the optimizers then refuse to
                step.
        """
        problem: Problem = None
        try:
            with ExitStack() as stores:
                for optimizer in optimizers:
                    _before_writing(optimizer)
                    for domain in optimizer.engine.domains:
                        stores.enter_context(domain.epoch.loading())
                        if domain.shards:
                            stores.enter_context(domain.all_or_nothing())
                for target in self._plan.targets:
                    target.fill(self._checkpoint)
                self._commit(model, fitting, optimizers)
        except ShardoptError as error:
            problem = error
        except Exception as error:
            problem = CheckpointError(
                f"loading {self._checkpoint.path} failed half-way ({type(error).__name__}: {error}): params and states "
                "belong to different steps by now, so the optimizers refuse to step. Mend the cause and load again."
            )
            problem.__cause__ = error
        try:
            self._meeting.share(problem, "loading a checkpoint")
        except ShardoptError as error:
            for optimizer in optimizers:
                for domain in optimizer.engine.domains:
                    domain.break_off(f"while loading a checkpoint: {error}", by_load=True)
            raise
        if not fitting.mismatches:  # everything was replaced
            for optimizer in optimizers:
                for domain in optimizer.engine.domains:
                    domain.make_good()

    def _commit(self, model: Model, fitting: Fit, optimizers: Sequence[ShardedOptimizer]) -> None:
        for name, home in model.homes.items():
            saved = fitting.states.get(name)
            if home.entry is not None and name in fitting.params:
                # Its master follows at the next step, where it does not round to it.
                home.entry.await_weights()
                if "master" not in self._kinds.get(saved or "", ()):
                    _renew_master(home)
            if home.entry is None or saved is None:
                continue
            about = self._manifest.params[saved]
            if about["has_state"]:
                home.entry.step, home.entry.carried, home.entry.has_state = about["step"], carried_of(about), True
                if home.shard is not None and EMA in home.shard.kept.states and EMA not in self._kinds[saved]:
                    home.shard.begin_average(home.index)
            else:
                _forget(home)
        for name, saved_as in fitting.params.items():
            home = model.homes[name]
            if home.entry is not None and home.entry.gradient_slice is not None:
                about = self._manifest.info.get("gradients", {}).get(saved_as)
                own = self._plan.gradients.get(home.param)
                gradients.restore(home.param, home.entry.gradient_slice, about, own, self._meeting.world.size)
        for number, optimizer in enumerate(optimizers):
            optimizer.engine.states.consolidated = None
            owned = {param for group in optimizer.engine.local_groups() for param in group["params"]}
            optimizer.engine.states.wait({p: state for p, state in self._plan.waiting.items() if p in owned})
            for index, group in enumerate(optimizer.param_groups):
                if (number, index) in fitting.groups:
                    _update_group(group, values.decode(fitting.groups[number, index], self._find))
        for saved_as, own_name in fitting.modules.items():
            model.module.get_submodule(own_name).set_extra_state(self._module_extra[saved_as])
        rng.restore(self._saved_rng(), model.device)


def _renew_master(home: ModelParam) -> None:
    """From the param: the checkpoint has none, and the low bits of the one that is here belong to other weights."""
    shard = home.shard
    if shard is not None and shard.masters:
        where = shard.slice_of(home.index).local
        shard.write_chunk("master", where.start, shard.read_chunk("param", where.start, where.stop).float())


def _forget(home: ModelParam) -> None:
    """Back to before the param's first step."""
    assert home.entry is not None and home.shard is not None
    home.entry.forget()
    home.shard.zero(home.index)
    home.entry.write_initial()


def _before_writing(optimizer: ShardedOptimizer) -> None:
    """Collective: no rank still gathers what is about to be overwritten, and nothing gathered stays."""
    domain = optimizer.engine.compose().main
    if domain.sharded is not None:
        domain.gatherer.write_slice(lambda: None)


def _update_group(group: dict[str, Any], saved: dict[str, Any]) -> None:
    """In place: schedulers hold the dict, and compiled code a learning rate that is a tensor."""
    for key, value in saved.items():
        own = group.get(key)
        if isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor) and own.shape == value.shape:
            own.copy_(value)
        else:
            group[key] = value
