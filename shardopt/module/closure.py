"""The closure of a step: what one rank's raises must reach the others, who may wait for it in a backward.

A closure runs forward and backward, and backward waits for all ranks. Where one rank's closure fails before its
backward, or in the middle of it, three ways tell the others at once:

* ranks that read each other's memory see on its board that it gave up the round;
* by messages, ranks meet ahead of each round of a closure (as they do where they bind), in an exchange like that at the
  beginning of a step, to which the rank that failed goes; in the middle of a round it adds zeros to the rest, and says
  so at the end;
* a backend's own collectives (NCCL) cannot be told, and to meet would let the host wait for the device in every
  backward. Nor can forwards at stage 3 by messages. The error is then raised without telling: the end of the process is
  what the others hear of.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch


class Failing(Protocol):
    """The backwards of a module that was handed over, as a closure sees them."""

    @property
    def rounds(self) -> int:
        """How many backwards were reduced."""

    def fail(self, error: Exception, rounds: int) -> bool:
        """Tells ranks that wait in a backward; whether all know of the error, or will."""


class Settled(Exception):
    """The error is one that all ranks know of, or that no rank can be told of: it is to be raised as it is."""

    def __init__(self, error: Exception):
        super().__init__(str(error))
        self.error = error


class ClosureRun:
    """Of a module that was handed over.

    Attributes:
        is_on: a closure runs.
        number: of the last one that began, counted from 1; the same on all ranks.
        heard: what a meeting of all ranks inside of it raised, on all of them.
    """

    def __init__(self) -> None:
        self.is_on, self.number = False, 0
        self.heard: Exception | None = None

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """What is raised inside is raised on all ranks."""
        try:
            yield
        except Exception as error:
            if self.is_on:
                self.heard = error
            raise


def run_closure(closure: Callable[[], Any], run: ClosureRun | None, backward: Callable[[], Failing | None]) -> Any:
    """What the closure returns.

    Args:
        run: of the module that was handed over.
        backward: gives that of the module, or None as long as it is not bound, which the closure itself may do.

    Raises:
        Settled: the ranks need not, or must not, be told at the beginning of the step.
        Exception: what the closure raised. The ranks will meet at the beginning of the step.
    """
    if run is None:
        with torch.enable_grad():
            return closure()
    begun = backward()
    rounds = 0 if begun is None else begun.rounds
    run.is_on, run.number, run.heard = True, run.number + 1, None
    try:
        with torch.enable_grad():
            loss = closure()
    except Exception as error:
        if run.heard is not None:
            raise Settled(run.heard) from error
        bound = backward()
        if bound is not None and not bound.fail(error, rounds):
            raise Settled(error) from error
        raise
    finally:
        run.is_on = False
    if run.heard is not None:  # the closure has caught it
        raise Settled(run.heard)
    return loss
