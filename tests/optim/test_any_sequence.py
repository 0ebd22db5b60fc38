"""Any sequence of calls on an optimizer does what it does to the torch class on whole tensors; on two ranks as well.

Steps, skipped steps, accumulation, frozen and added params, written weights and hyper-parameters, states offloaded,
saved, loaded, assigned, given to torch and taken from it, optimizers closed, copied and made anew: hypothesis draws
them, and after each act all that can be seen is compared with the model (``tests/support/acts.py``).
"""

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests.support.acts import Act, Performance, Setting, perform, perform_one
from tests.support.beside_torch import KINDS
from tests.support.cells import CELLS, SHAPES
from tests.support.ranks import Pool

ALL = (1 << CELLS) - 1

# -- what is drawn -----------------------------------------------------------------------------------------------------

SEEDS, PARAMS, ANY = st.integers(0, 99), st.integers(0, len(SHAPES) - 1), st.integers(0, 3)
MASK = st.one_of(st.just(ALL), st.integers(1, ALL))
MASKS = st.tuples(MASK, MASK)
BAD = st.one_of(st.just(-1), st.just(-1), st.integers(-1, CELLS - 1))  # cell with an Inf
TIERS = st.sampled_from(("cpu", "disk"))
ARGUMENTS: dict[str, tuple[st.SearchStrategy[Any], ...]] = {
    "backward": (SEEDS, MASKS, BAD, st.booleans()),
    "step": (),
    "closure": (SEEDS, MASKS),
    "zero_grad": (st.booleans(),),
    "scale": (st.sampled_from((0.5, 2.0)),),
    "evaluate": (SEEDS, MASK),
    "bind": (),
    "train": (PARAMS, st.booleans()),
    "add_group": (st.sampled_from((2.0**-4, 2.0**-6)),),
    "change": (ANY, ANY, ANY),
    "write": (PARAMS, st.integers(1, 4), st.sampled_from(("copy", "shown", "data"))),
    "look": (),
    "offload": (TIERS,),
    "reload": (),
    "save": (),
    "load": (ANY,),
    "keep": (),
    "put": (ANY, st.booleans()),
    "assign": (ANY, PARAMS),
    "forget": (),
    "adopt": (),
    "consolidate": (),
    "reopen": (ANY, st.one_of(st.none(), TIERS)),
    "duplicate": (),
}
# One iteration of a training: what the gradients of before become, the backwards, the step.
ITERATION = st.tuples(
    st.sampled_from((True, True, False, None)),
    st.lists(st.tuples(SEEDS, MASKS, BAD, st.booleans()), min_size=1, max_size=3),
)


def iteration(zeroing: bool | None, backwards: Iterable[tuple[Any, ...]]) -> list[Act]:
    zeroed: list[Act] = [] if zeroing is None else [("zero_grad", zeroing)]
    return [*zeroed, *(("backward", *each) for each in backwards), ("step",)]


@st.composite
def drawn_setting(draw: st.DrawFn) -> Setting:
    kind = draw(st.sampled_from(sorted(KINDS)))
    module = draw(st.booleans())
    stage = draw(st.integers(0, 3 if module else 1))
    # Masters are compared where all is exact, and where the torch class too keeps a state of each param.
    low = draw(st.booleans()) if kind in ("SGD", "Lion") else False
    return Setting(kind, stage, module, draw(st.one_of(st.none(), TIERS)), low)


def drawn_acts(lists: int) -> st.SearchStrategy[list[Act]]:
    """Of several lists, because hypothesis draws a longer one seldom; some six items each."""
    alone = [st.tuples(st.just(name), *arguments).map(lambda act: [act]) for name, arguments in ARGUMENTS.items()]
    item = st.one_of(*alone, *[ITERATION.map(lambda drawn: iteration(*drawn))] * 8)
    return st.tuples(*[st.lists(item, max_size=20)] * lists).map(
        lambda drawn: [act for items in drawn for acts in items for act in acts]
    )


def made_folder() -> "tempfile.TemporaryDirectory[str]":
    """Files in memory, where there are such: what is synced some hundred times waits for no disk."""
    in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    return tempfile.TemporaryDirectory(prefix="shardopt-acts-", dir=in_memory)


# -- one process -------------------------------------------------------------------------------------------------------


class AnySequence(RuleBasedStateMachine):
    """One optimizer. A failure shrinks to a list of acts, for ``perform``."""

    @initialize(setting=drawn_setting())
    def begin(self, setting: Setting) -> None:
        self.setting, self.acts = setting, list[Act]()
        self.folder = made_folder()
        self.performance = Performance(setting, Path(self.folder.name))

    def act(self, *act: Any) -> None:
        self.acts.append(act)
        try:
            perform_one(self.performance, act)
        except Exception:
            note(f"perform({self.setting}, {self.acts}, folder)")
            raise

    @rule(drawn=ITERATION)
    def iterate(self, drawn: tuple[Any, Any]) -> None:
        for act in iteration(*drawn):
            self.act(*act)

    @rule(drawn=ITERATION)
    def iterate_more(self, drawn: tuple[Any, Any]) -> None:
        self.iterate(drawn)

    @precondition(lambda self: self.performance.checkpoints)
    @rule(which=ANY)
    def load(self, which: int) -> None:
        self.act("load", which)

    @precondition(lambda self: self.performance.dicts)
    @rule(which=ANY, from_torch=st.booleans())
    def put(self, which: int, from_torch: bool) -> None:
        self.act("put", which, from_torch)

    @precondition(lambda self: self.performance.dicts)
    @rule(which=ANY, index=PARAMS)
    def assign(self, which: int, index: int) -> None:
        self.act("assign", which, index)

    def teardown(self) -> None:
        if hasattr(self, "performance"):
            self.performance.optimizer.close()
            self.folder.cleanup()


def _rule_of(name: str, arguments: tuple[st.SearchStrategy[Any], ...]) -> Any:
    def perform_it(self: AnySequence, drawn: tuple[Any, ...]) -> None:
        self.act(name, *drawn)

    perform_it.__name__ = name
    return rule(drawn=st.tuples(*arguments))(perform_it)


for _name, _arguments in ARGUMENTS.items():
    if _name not in ("load", "put", "assign"):
        setattr(AnySequence, _name, _rule_of(_name, _arguments))

QUIET = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}


def any_sequence(examples: int, acts: int, derandomize: bool) -> None:
    """In a process of the pool: memory there is NaN at first, and a crash is that process's alone."""
    profile = settings(max_examples=examples, stateful_step_count=acts, derandomize=derandomize, **QUIET)
    run_state_machine_as_test(AnySequence, settings=profile)


def test_any_sequence(ranks: Pool) -> None:
    ranks.run(any_sequence, 100, 25, True, world=1, group=False)


@pytest.mark.slow
def test_any_sequence_of_many(ranks: Pool) -> None:
    ranks.run(any_sequence, 600, 50, False, world=1, group=False, deadline=3600.0)


# -- ranks -------------------------------------------------------------------------------------------------------------


def on_ranks(ranks: Pool, setting: Setting, acts: list[Act]) -> None:
    with made_folder() as folder:
        done = ranks.run(perform, setting, acts, folder, world=2)
    assert done[0] == done[1]


@settings(max_examples=20, derandomize=True, **QUIET)
@given(drawn_setting(), drawn_acts(3))
def test_any_sequence_on_ranks(ranks: Pool, setting: Setting, acts: list[Act]) -> None:
    on_ranks(ranks, setting, acts)


@pytest.mark.slow
@settings(max_examples=200, **QUIET)
@given(drawn_setting(), drawn_acts(6))
def test_any_sequence_of_many_on_ranks(ranks: Pool, setting: Setting, acts: list[Act]) -> None:
    on_ranks(ranks, setting, acts)
