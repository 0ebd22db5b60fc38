"""Saving: all ranks plan together, each rank writes its own ranges, then rank 0 publishes the checkpoint."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ..domain.residual import settle
from ..errors import CheckpointError, ShardoptError, warn
from . import files, publish
from .arguments import SaveArguments, check_module, engines_of, read_save_arguments
from .background import Background, Saving
from .join import join
from .model import Model
from .model_ranks import collectives_of
from .names import unwrapped
from .plan_save import plan_save
from .publish import NewCheckpoint
from .turns import in_turn, turns_of
from .typed_json import Count, from_json, to_json
from .write import RankWriter, as_checkpoint_error

if TYPE_CHECKING:
    from ..engine import Engine
    from ..optim.optimizer import ShardedOptimizer
    from .collectives import Collectives, Result

_PLANNING = "planning a checkpoint"
# By module: its thread and staging memory, for which a later save waits. Freed with the module.
_BACKGROUNDS: weakref.WeakKeyDictionary[nn.Module, Background] = weakref.WeakKeyDictionary()


def save_checkpoint(
    directory: str | Path,
    module: nn.Module,
    optimizer: ShardedOptimizer | Sequence[ShardedOptimizer] | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    step: int | None = None,
    keep: int | None = None,
    asynchronous: bool = False,
    allow_nonfinite: bool = False,
    full_precision: bool = False,
    names: Mapping[Any, str] | None = None,
) -> Saving:
    """Saves params, buffers, optimizer states, param groups and random numbers as a new checkpoint. Collective.

    Each rank writes what it holds; nothing is gathered. All ranks of a model make one checkpoint, for any mix of data,
    tensor, pipeline and expert parallelism. It loads at any number of ranks, any stage, and any other mix. Whenever the
    machine stops, the checkpoint exists whole or not at all.

    Args:
        directory: for all checkpoints of this training, on a file system that all ranks see. It is made if missing.
            One save at a time writes there. All ranks of the model give the same directory.
        module: plain, DDP or compiled; the checkpoint has its names. Buffers that are not persistent are omitted, as
            in ``module.state_dict()``.
        optimizer: one or a list of several, or None for the module alone (an empty list is refused).
        extra: other values to save: tensors, numbers, strings, None, lists, tuples, dicts with strings or
            integers as keys (a scheduler's or scaler's ``state_dict()``, say). Those of rank 0 are saved.
        step: for the checkpoint's name; None: the largest step count of any param.
        keep: number of checkpoints to keep: older ones are removed once this one was read back and verified. None: all.
        allow_nonfinite: save although a param, master or state holds an Inf or a NaN. False: an error.
        full_precision: save masters and states of shorter formats in fp32: larger, and readable by all that reads
            safetensors. False: as they are kept. Both load into any format.
        asynchronous: return as soon as the present values are copied to host memory, and write in the background.
        names: the names of modules in the whole model, where ``module`` is a part of it and numbers its layers from 0:
            ``{module: "layers.3"}`` saves its ``"weight"`` as ``"layers.3.weight"``. Submodules may have names of their
            own; the innermost name counts. Loading takes the same argument.

    Returns:
        A handle: ``wait()`` returns the checkpoint's path, or raises the error. Unless ``asynchronous``, the checkpoint
        is already published.

    Raises:
        CheckpointError: on every rank; no checkpoint was published, and earlier ones are whole.
        StateError: a signal handler, say, makes the call in the middle of a step, or on one of several ranks. Another
            thread waits for the step instead, and the next step for the copies.
        TypeError, ValueError: an argument has another type or is out of range; the message names it.
    """
    check_module(module)
    engines = engines_of(optimizer)
    background = _BACKGROUNDS.setdefault(unwrapped(module), Background())
    turns = turns_of("save_checkpoint()", module, engines)
    background.wait()  # before the turns: no step waits for what is written in the background

    def read() -> SaveArguments:
        for engine in engines:
            engine.settle_states()
            _warn_of_notes(engine)
        return read_save_arguments(directory, extra, step, keep, asynchronous, allow_nonfinite, full_precision, names)

    return in_turn(turns, lambda: _save(module, engines, background, read))


def _warn_of_notes(engine: Engine) -> None:
    keys = sorted({str(key) for notes in engine.states.notes.values() for key in notes})
    if keys:
        warn(
            f"save optimizer.state_dict() beside the checkpoint, or save {keys} in extra=: these entries of "
            "optimizer.state are the script's own, and the checkpoint holds what the optimizer keeps, without them."
        )


def _save(
    module: nn.Module, engines: Sequence[Engine], background: Background, read: Callable[[], SaveArguments]
) -> Saving:
    """Collective, with the turns of all optimizers: their next step begins once this has returned."""
    background.wait()  # for a save of another thread, which came before
    collectives = collectives_of(engines)
    arguments = collectives.together(read, _PLANNING)
    model = collectives.together(lambda: Model(module, engines, arguments.names), _PLANNING)
    model.learn_names(collectives, _PLANNING)
    # Of all ranks: one may have been interrupted in a backward, another one just before.
    lost = any(lost for (lost,) in collectives.world.exchange([model.has_lost_gradients], _PLANNING))
    for domain in model.domains:
        settle(domain)
    plan = collectives.together(lambda: plan_save(model, collectives.world, arguments, not lost), _PLANNING)
    join(plan, model, collectives, _PLANNING)
    compared = ("step", "keep", "asynchronous", "full_precision", "allow_nonfinite")
    collectives.compare({name: getattr(arguments, name) for name in compared}, _PLANNING)
    target = _begin(arguments.root, plan.step, collectives)
    writer = RankWriter(target, plan, arguments.keep)
    if arguments.asynchronous:
        phase = "copying what is to be saved"
        plan.items = _or_abandon(collectives, lambda: background.copy(plan.items, model.device), target, phase)
        return background.start(writer)
    _or_abandon(collectives, writer.run, target, "saving a checkpoint")
    return Saving(target.published)


@dataclass(frozen=True)
class Begun:
    """The directory that rank 0 made, as it tells the other ranks."""

    path: str
    sequence: Count
    step: Count
    token: str


def _begin(root: Path, step: int, collectives: Collectives) -> NewCheckpoint:
    """Collective: returns the directory to write in, which rank 0 makes and all ranks see."""
    phase = "making the checkpoint's directory"

    def make() -> NewCheckpoint | None:
        if collectives.world.rank:
            return None
        try:
            return publish.begin(root, step)
        except Exception as error:
            raise as_checkpoint_error(error, root)  # noqa: B904 (it has its cause)

    made = collectives.together(make, phase)
    sent = None if made is None else to_json(Begun(str(made.saving), made.sequence, made.step, made.token))
    begun = from_json(Begun, collectives.broadcast(sent, phase))
    target = NewCheckpoint(root, begun.sequence, begun.step, begun.token) if made is None else made

    def check_visible() -> None:
        if not files.is_file(target.owner):
            raise CheckpointError(
                "give all ranks of the model one directory, on a file system that all of them see: rank 0 made "
                f"{begun.path}, which is not there on rank {collectives.world.rank} (it looked for {target.saving}), "
                "so no rank could read the ranges of the others."
            )

    _or_abandon(collectives, check_visible, target, phase)
    return target


def _or_abandon(collectives: Collectives, work: Callable[[], Result], target: NewCheckpoint, phase: str) -> Result:
    """Collective: does ``work`` on all ranks; removes the checkpoint's directory after an error on any of them."""
    try:
        return collectives.together(work, phase)
    except BaseException as error:
        target.release()
        # After an interrupt the directory stays, for the next save to collect: other ranks may be writing there.
        if collectives.world.rank == 0 and isinstance(error, Exception):
            with suppress(OSError, ShardoptError):  # what is left is collected by the next save
                publish.abandon(target)
        raise
