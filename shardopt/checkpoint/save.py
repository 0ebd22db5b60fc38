"""Saving: a plan, then every rank writes its own ranges, then rank 0 publishes what all have written."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import CheckpointError, ShardoptError
from ..optim.optimizer import ShardedOptimizer
from . import files, publish
from .background import Background, Saving
from .call import check_module, engines_of, read_request
from .meeting import Meeting, Result
from .model import Model, meeting_of, unwrapped
from .plan_save import plan_save
from .publish import Site
from .write import RankWriter, as_checkpoint_error

_PLANNING = "planning a checkpoint"
# Each module's own thread and staging memory, which a later save waits for. Goes with the module.
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
) -> Saving:
    """Saves params, buffers, optimizer states, param groups and random numbers as a new checkpoint. Collective.

    Each rank writes what it holds; nothing is gathered. The checkpoint loads at any number of ranks and any stage. It
    is there whole or not at all, whenever the machine stops.

    Args:
        directory: of all checkpoints of this training, on a file system that all ranks see. It is made if missing. One
            save at a time writes there.
        module: whose names the checkpoint goes by; plain, DDP or compiled. Buffers that are not persistent are left
            out, as in ``module.state_dict()``.
        optimizer: one or a list of several, or None for the module alone (an empty list is refused).
        extra: what else is to be found again: tensors, numbers, strings, None, lists, tuples, dicts with string keys
            (a scheduler's or scaler's ``state_dict()``, say). That of rank 0 is saved.
        step: for the checkpoint's name; None: the most steps that a param has taken.
        keep: remove all but this many of the newest checkpoints once this one was read back and proven. None: none.
        allow_nonfinite: save although a param, master or state holds an Inf or a NaN. False: an error.
        full_precision: save masters and states in fp32 where they are kept in shorter formats: larger, and readable by
            whatever reads safetensors. False: as they are kept. Either loads into any format.
        asynchronous: return as soon as the values of now are copied to host memory, and write in the background.

    Returns:
        A handle: ``wait()`` gives the checkpoint's path, or raises what went wrong. Unless ``asynchronous``, all is
        done by then.

    Raises:
        CheckpointError: on every rank; no checkpoint was published, those before it are whole.
        TypeError, ValueError: an argument is of another type or out of range, by its name.
    """
    check_module(module)
    engines = engines_of(optimizer)
    background = _BACKGROUNDS.setdefault(unwrapped(module), Background())
    background.wait()
    meeting = meeting_of(engines, module)
    request = meeting.together(
        lambda: read_request(directory, extra, step, keep, asynchronous, allow_nonfinite, full_precision), _PLANNING
    )
    meeting.check_apart(request.root)
    plan = meeting.together(lambda: plan_save(Model(module, engines), request), _PLANNING)
    plan.join(meeting.everyones(plan.of_this_rank(), _PLANNING))
    options = {name: getattr(request, name) for name in ("keep", "asynchronous", "full_precision", "allow_nonfinite")}
    meeting.compare({**plan.skeleton(), **options}, _PLANNING)
    site, lock = _begin(request.root, plan.step, meeting)
    writer = RankWriter(site, lock, plan, request.keep)
    if request.asynchronous:
        phase = "copying what is to be saved"
        plan.pieces = _or_abandon(meeting, lambda: background.copy(plan.pieces, _device_of(module)), site, lock, phase)
        return background.start(writer)
    _or_abandon(meeting, writer.run, site, None, "saving a checkpoint")
    return Saving(site.published)


def _device_of(module: nn.Module) -> torch.device:
    return next((param.device for param in module.parameters()), torch.device("cpu"))


def _begin(root: Path, step: int, meeting: Meeting) -> tuple[Site, int | None]:
    """Collective: returns the directory to write in, which rank 0 makes and all ranks see, and rank 0's lock of it."""
    phase = "making the checkpoint's directory"

    def make() -> tuple[list[Any], int | None]:
        if meeting.world.rank:
            return [], None
        try:
            site, lock = publish.begin(root, step)
        except Exception as error:
            raise as_checkpoint_error(error, root)  # noqa: B904 (it has its cause)
        return [site.sequence, site.step, site.token], lock

    told, lock = meeting.together(make, phase)
    site = Site(root, *meeting.from_rank_0(told, phase))

    def look() -> None:
        if not files.is_file(site.owner):
            raise CheckpointError(
                f"give a directory on a file system that all ranks see: rank 0 made {site.saving}, which is not there "
                f"on rank {meeting.world.rank}, so each machine would keep ranges of its own."
            )

    _or_abandon(meeting, look, site, lock, phase)
    return site, lock


def _or_abandon(meeting: Meeting, work: Callable[[], Result], site: Site, lock: int | None, phase: str) -> Result:
    """Collective: does ``work`` on all ranks; after an error on any of them the checkpoint's directory goes."""
    try:
        return meeting.together(work, phase)
    except BaseException as error:
        if lock is not None:
            files.release(lock)
        # After an interrupt the directory stays, for the next save to collect: other ranks may be writing there.
        if meeting.world.rank == 0 and isinstance(error, Exception):
            with suppress(OSError, ShardoptError):  # what is left is collected by the next save
                publish.abandon(site)
        raise
