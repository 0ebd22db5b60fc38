"""Reports of a training to a logger, or to a file that ``shardopt top`` shows.

Both are step post hooks of torch, so an optimizer without reports has no cost.
"""

import json
import os
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from ..engine import Engine

Facts = dict[str, float]
Handle = torch.utils.hooks.RemovableHandle


class SummaryWriter(Protocol):
    """TensorBoard's writer, or any object with its method."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object: ...


Writer = SummaryWriter | Callable[[Facts], object]


class Reporter:
    """Counts steps, and reads the facts of a report.

    Facts are numbers by name: ``step`` (calls of ``step()`` since this began), ``updates`` (those that changed params),
    ``skipped`` (the others), ``grad_norm`` where it is known, ``seconds/<phase>``, ``memory/<kind>/<tier>`` and
    ``traffic/<kind>`` (bytes that this rank received, a step).
    """

    def __init__(self, engine: "Engine"):
        self.steps = 0
        self._engine, self._updates = engine, engine.updates
        self._received: Mapping[str, int] = engine.traffic()
        self._read_at = 0  # number of steps at the last read of the traffic

    def read(self) -> Facts:
        """Returns the facts after this step."""
        from ..calls import reports

        engine = self._engine
        updates, norm = engine.updates - self._updates, engine.grad_norm
        facts: Facts = {"step": self.steps, "updates": updates, "skipped": self.steps - updates}
        facts |= {} if norm is None else {"grad_norm": norm}
        facts |= {f"seconds/{phase}": seconds for phase, seconds in reports.timings(engine).items()}
        for kind, tiers in reports.memory(engine).items():
            facts |= {f"memory/{kind}/{tier}": nbytes for tier, nbytes in tiers.items()}
        received, steps = engine.traffic(), max(self.steps - self._read_at, 1)
        for kind, nbytes in received.items():
            facts[f"traffic/{kind}"] = (nbytes - self._received.get(kind, 0)) / steps
        self._received, self._read_at = received, self.steps
        return facts


def log(optimizer: torch.optim.Optimizer, engine: "Engine", writer: Writer, every: int) -> Handle:
    """See :meth:`ShardedOptimizer.log`."""
    reporter, add_scalar = Reporter(engine), getattr(writer, "add_scalar", None)
    if add_scalar is None and not callable(writer):
        raise TypeError(
            f"writer takes a TensorBoard SummaryWriter or a function of a dict of numbers, found a "
            f"{type(writer).__name__}."
        )

    def after_step(*_: object) -> None:
        reporter.steps += 1
        if reporter.steps % every:
            return
        facts = reporter.read()
        if add_scalar is None:
            assert callable(writer)
            writer(facts)
            return
        for name, value in facts.items():
            add_scalar(f"shardopt/{name}", value, reporter.steps)

    return optimizer.register_step_post_hook(after_step)


def monitor(optimizer: torch.optim.Optimizer, engine: "Engine", directory: Path, seconds: float) -> Handle:
    """See :meth:`ShardedOptimizer.monitor`."""
    directory = directory.absolute()  # a script may change its working directory
    directory.mkdir(parents=True, exist_ok=True)
    reporter, last = Reporter(engine), -float("inf")

    def after_step(*_: object) -> None:
        nonlocal last
        reporter.steps += 1
        now = time.monotonic()
        if now - last < seconds:
            return
        last = now
        # Ranks of the whole training, so that each rank has a file of its own.
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        found = {"rank": rank, "ranks": ranks, "time": time.time(), "optimizer": type(optimizer).__name__}
        text = json.dumps({**found, "facts": reporter.read()})
        try:
            _replace(directory / f"rank{rank}.json", text)
        except OSError as error:  # raised, it would leave the other ranks waiting in their next step
            warnings.warn(
                f"opt.monitor() could not write to {directory} ({error}). Training goes on; shardopt top shows older "
                "numbers.",
                stacklevel=3,
            )

    return optimizer.register_step_post_hook(after_step)


def _replace(file: Path, text: str) -> None:
    """Replaces the file atomically: a reader finds the old text or the new one."""
    new = file.with_suffix(f".{os.getpid()}")
    new.unlink(missing_ok=True)
    # Readable by this user alone, and never written through a link that somebody else made.
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as opened:
        opened.write(text)
    new.replace(file)
