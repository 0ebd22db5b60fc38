"""Programs: what the updates of a domain do, as a list of ops that is made with the plan of a step and run in each.

::

    AdamW                  Run
    LAMB                   Run 0, AddUp 0, Run
    Adafactor              AddMargins, Run 0, AddUp 0, Run
    Muon beside AdamW      Accumulate, ToOwners, Run, Matrix, Back, Apply

A rank that fails keeps its error in the update's relay. It comes to all further ops, as the other ranks wait for it
there, and does no work of its own in them. ``opt.program()`` shows the first line of each op's docstring.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..kernels.tables import Factors
from .launches import Op, Program
from .margins import MarginSums
from .matrices import MatrixUpdate, MatrixWork
from .norms import NormSums, launch_of_pass

if TYPE_CHECKING:
    from ..domain.domain import Domain
    from ..partition.comm.together import Relay
    from .params import ParamUpdate
    from .update import Update


@dataclass(frozen=True)
class Run:
    """Runs a pass of the rule over all shards; the last one writes params, and each shard is sent once it is updated.

    A pass that has a number is an earlier one, which measures what the rule takes norms of. Shards of matrices have
    ops of their own.
    """

    number: int | None = None

    def run(self, update: Update, relay: Relay) -> None:
        number = self.number
        if number is None:
            update.run_pass(update.launches, relay, is_last=True)
            return
        first = {
            shard: [launch_of_pass(each, number) for each in its if number < each.number]
            for shard, its in update.launches.items()
        }
        update.run_pass(first, relay)
        relay.attempt(update.flush)  # the next pass reads the states that this one wrote


@dataclass(frozen=True)
class AddUp:
    """Adds up what the pass measured, by one all-reduce: the next pass reads norms of whole params."""

    sums: NormSums
    number: int

    def run(self, update: Update, relay: Relay) -> None:
        with update.domain.clock.phase("agree"):
            self.sums.add_up(self.number, [each for its in update.ran.values() for each in its], relay)


@dataclass(frozen=True)
class AddMargins:
    """Adds up squares over rows and columns, by one all-reduce: all ranks make the same factors of them."""

    sums: MarginSums

    def run(self, update: Update, relay: Relay) -> None:
        def divide() -> None:
            update.launches = {shard: [each.divided() for each in its] for shard, its in update.launches.items()}

        with update.domain.clock.phase("margins"):
            relay.attempt(divide)
            update.launches = self.sums.with_products(update.plan, update.launches, update.factors, relay)


@dataclass(frozen=True)
class Accumulate:
    """Runs the first pass over shards of matrices, which writes updates in bf16 beside the params."""

    work: MatrixWork

    def run(self, update: Update, relay: Relay) -> None:
        update.slices = MatrixUpdate(self.work, update.plan)
        relay.attempt(update.slices.make_room)
        update.run_pass(update.matrices, relay, upon=update.slices.made)


class ToOwners:
    """Starts to send the slices of each matrix to the rank that makes it whole."""

    def run(self, update: Update, relay: Relay) -> None:
        update.slices.send(relay)


class Matrix:
    """Makes each matrix whole on one rank, and calls the rule's function."""

    def run(self, update: Update, relay: Relay) -> None:
        update.slices.make_whole(relay)


class Back:
    """Sends slices of the results back."""

    def run(self, update: Update, relay: Relay) -> None:
        update.slices.send_back(relay)


class Apply:
    """Runs the second pass over shards of matrices: the results are its gradients, and each shard is sent."""

    def run(self, update: Update, relay: Relay) -> None:
        # After an error too, the other ranks wait for these shards.
        applied = relay.attempt(update.slices.second_pass, update.matrices) or {shard: [] for shard in update.matrices}
        update.run_pass(applied, relay, factors=Factors(), is_last=True)


def program_of(domain: Domain, numbers: Sequence[Mapping[str, Any]], updates: Sequence[ParamUpdate]) -> Program:
    """Returns the program of steps that update these params, the same on all ranks.

    Args:
        numbers: the hyper-parameters of each group, as plain numbers.
    """
    ops: list[Op] = []
    norms, margins = NormSums(domain, numbers, updates), MarginSums(domain, numbers, updates)
    work = MatrixWork(domain, numbers, updates)
    if margins.updates:
        ops.append(AddMargins(margins))
    for number in range(norms.cuts):
        ops += [Run(number), AddUp(norms, number)]
    if work.shards:
        ops += [Accumulate(work), ToOwners()]
    ops.append(Run())
    if work.shards:
        ops += [Matrix(), Back(), Apply()]
    return Program(tuple(ops), tuple(work.shards))
