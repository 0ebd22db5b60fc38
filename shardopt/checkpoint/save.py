"""Saving: a plan, then every rank writes its own ranges, then rank 0 publishes what all have written."""

import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import CheckpointError, ShardoptError
from ..optim.optimizer import ShardedOptimizer
from . import files, publish
from .background import Background, Saving
from .call import Request, check_module, engines_of, read_request
from .meeting import Desk, Meeting, Problem
from .model import Model, meeting_of, unwrapped
from .plan_save import SavePlan, plan_save
from .publish import Site
from .write import Run, as_checkpoint_error

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
    background.settle()
    meeting = meeting_of(engines, module)
    request: Request | None = None
    plan: SavePlan | None = None
    problem: Problem = None
    try:
        request = read_request(directory, extra, step, keep, asynchronous, allow_nonfinite, full_precision)
    except Exception as error:  # told to all ranks, which come to the same meetings
        problem = error
    meeting.check_apart(Path() if request is None else request.root)
    if request is not None:
        try:
            plan = plan_save(Model(module, engines), request.extra, request.step, request.full_precision)
            plan = replace(plan, must_be_finite=not request.allow_nonfinite)
        except Exception as error:
            problem = error
    meeting.share(problem, "planning a checkpoint")
    assert plan is not None and request is not None
    plan = plan.joined(meeting.everyones(plan.of_this_rank(), "planning a checkpoint"))
    skeleton = {
        **plan.skeleton(),
        "keep": request.keep,
        "asynchronous": request.asynchronous,
        "full_precision": request.full_precision,
        "allow_nonfinite": request.allow_nonfinite,
    }
    meeting.compare(lambda: skeleton, "planning a checkpoint")
    site, lock = _begin(request.root, plan.step, meeting)
    world = meeting.world
    desk = Desk(site, world.rank, world.size, world.seconds)
    if request.asynchronous:
        try:
            plan = replace(plan, pieces=tuple(background.staging.copy(plan.pieces)))
        except Exception as error:
            problem = error
        _share_or_abandon(meeting, problem, site, lock, "copying what is to be saved")
        return background.start(Run(site, lock, plan, desk, request.keep, world.rank, world.size))
    try:
        Run(site, lock, plan, desk, request.keep, world.rank, world.size).run()
    except Exception as error:
        problem = error
    _share_or_abandon(meeting, problem, site, None, "saving a checkpoint")
    return Saving(site.published)


def _begin(root: Path, step: int, meeting: Meeting) -> tuple[Site, int | None]:
    """Collective: the directory to write in, made by rank 0 and seen by all."""
    phase = "making the checkpoint's directory"
    problem: Problem = None
    lock: int | None = None
    told: list[Any] = []
    if meeting.world.rank == 0:
        try:
            site, lock = publish.begin(root, step)
            told = [site.sequence, site.step, site.token]
        except Exception as error:
            problem = as_checkpoint_error(error, root)
    meeting.share(problem, phase)
    site = Site(root, *meeting.from_rank_0(told, phase))
    if not files.is_file(site.owner):
        problem = CheckpointError(
            f"rank 0 made {site.saving}, which is not there on rank {meeting.world.rank}: each machine would keep "
            "ranges of its own. Give a directory on a file system that all ranks see."
        )
    _share_or_abandon(meeting, problem, site, lock, phase)
    return site, lock


def _share_or_abandon(meeting: Meeting, problem: Problem, site: Site, lock: int | None, phase: str) -> None:
    try:
        meeting.share(problem, phase)
    except BaseException:
        if lock is not None:
            files.release(lock)
        if meeting.world.rank == 0:
            with suppress(OSError, ShardoptError):  # what is left is collected by the next save
                publish.abandon(site)
        raise
