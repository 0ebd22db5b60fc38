"""Any sequence of calls on an optimizer does what it does to the torch class on whole tensors; on two ranks as well.

Steps, skipped steps, accumulation, frozen and added params, written weights and hyper-parameters, states offloaded,
saved, loaded, assigned, given to torch and taken from it, optimizers closed, copied and made anew: hypothesis draws
them, and after each act all that can be seen is compared with the model (``tests/support/acts.py``).
"""

import os
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests.support.acts import Act, Performance, Setting, perform, perform_one
from tests.support.beside_torch import KINDS
from tests.support.cells import CELLS, SHAPES
from tests.support.ranks import Pool

ALL = (1 << CELLS) - 1

# -- what is drawn -----------------------------------------------------------------------------------------------------

SEEDS, PARAMS, ANY = st.integers(0, 99), st.integers(0, len(SHAPES) - 1), st.integers(0, 3)
MASK = st.one_of(st.just(ALL), st.integers(1, ALL))
MASKS = st.tuples(MASK, MASK)
BAD = st.integers(-1, 60).map(lambda cell: cell if cell < CELLS else -1)  # cell with an Inf, in one of six
SYNCED = st.sampled_from((True, True, True, False))
TIERS = st.sampled_from(("cpu", "disk"))
ARGUMENTS: dict[str, tuple[st.SearchStrategy[Any], ...]] = {
    "backward": (SEEDS, MASKS, BAD, SYNCED),
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
# One iteration of a training: what becomes of gradients that are there, the backwards, the step. Or none.
ITERATION = st.tuples(
    st.sampled_from((True, True, False, None)),
    st.lists(st.tuples(SEEDS, MASKS, BAD, SYNCED), min_size=1, max_size=3),
)
TRAINING = st.one_of(st.none(), ITERATION)


def training(drawn: tuple[bool | None, Iterable[tuple[Any, ...]]] | None) -> list[Act]:
    if drawn is None:
        return []
    zeroing, backwards = drawn
    zeroed: list[Act] = [] if zeroing is None else [("zero_grad", zeroing)]
    return [*zeroed, *(("backward", *each) for each in backwards), ("step",)]


@st.composite
def drawn_setting(draw: st.DrawFn, kinds: tuple[str, ...] = tuple(sorted(KINDS))) -> Setting:
    kind, stage = draw(st.sampled_from(kinds)), draw(st.integers(0, 3))
    module = stage >= 2 or draw(st.booleans())
    # Masters are compared to the bit, and torch's SGD without momentum has no state to tell who has one.
    low = draw(st.booleans()) if "param" in KINDS[kind].exact and kind != "plain SGD" else False
    return Setting(kind, stage, module, draw(st.one_of(st.none(), TIERS)), low)


@st.composite
def drawn_acts(draw: st.DrawFn, lists: int) -> list[Act]:
    """Of several lists, because hypothesis seldom draws a long one."""
    item = st.sampled_from(sorted(ARGUMENTS)).flatmap(lambda name: st.tuples(st.just(name), *ARGUMENTS[name]))
    items = [each for _ in range(lists) for each in draw(st.lists(st.tuples(item, TRAINING), max_size=20))]
    return [act for one, drawn in items for act in (one, *training(drawn))]


def made_folder() -> "tempfile.TemporaryDirectory[str]":
    """Of files in memory, where there are such: what is synced some hundred times waits for no disk."""
    in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    return tempfile.TemporaryDirectory(prefix="shardopt-acts-", dir=in_memory)


QUIET = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}

# -- one process -------------------------------------------------------------------------------------------------------


class AnySequence(RuleBasedStateMachine):
    """One optimizer. A failure shrinks to a list of acts, for ``perform``."""

    kind: str

    @initialize(setting=drawn_setting(("SGD",)))
    def begin(self, setting: Setting) -> None:
        low = setting.low and self.kind in ("SGD", "Lion")
        self.setting, self.acts = replace(setting, kind=self.kind, low=low), list[Act]()
        self.folder = made_folder()
        self.performance = Performance(self.setting, Path(self.folder.name))

    def act(self, name: str, arguments: tuple[Any, ...], drawn: Any) -> None:
        for act in ((name, *arguments), *training(drawn)):
            self.acts.append(act)
            try:
                perform_one(self.performance, act)
            except Exception:
                note(f"perform({self.setting}, {self.acts}, folder)")
                raise

    def teardown(self) -> None:
        if hasattr(self, "performance"):
            self.performance.optimizer.close()
            self.folder.cleanup()


def _rule_of(name: str) -> Any:
    def perform_it(self: AnySequence, arguments: tuple[Any, ...], then: Any) -> None:
        self.act(name, arguments, then)

    perform_it.__name__ = name
    return rule(arguments=st.tuples(*ARGUMENTS[name]), then=TRAINING)(perform_it)


for _name in ARGUMENTS:
    setattr(AnySequence, _name, _rule_of(_name))


def any_sequence(examples: int, acts: int, derandomize: bool) -> None:
    """In a process of the pool: memory there is NaN at first, and a crash is that process's alone.

    A machine for each kind: of its first examples each is drawn afresh, of many most are changed but a little.
    """
    profile = settings(max_examples=examples, stateful_step_count=acts, derandomize=derandomize, **QUIET)
    for kind in KINDS:
        run_state_machine_as_test(type(f"AnySequenceOf{kind}", (AnySequence,), {"kind": kind}), settings=profile)


def test_any_sequence(ranks: Pool) -> None:
    ranks.run(any_sequence, 10, 15, True, world=1, group=False)


@pytest.mark.slow
def test_any_sequence_of_many(ranks: Pool) -> None:
    ranks.run(any_sequence, 100, 40, False, world=1, group=False, deadline=3600.0)


# -- what was found ----------------------------------------------------------------------------------------------------

LOW_SGD = Setting("SGD", stage=0, low=True)
# A state is loaded whose master is half-way between two weights, and the param is the one that is not even.
TIES_OF_LOADED_MASTERS: list[tuple[int, list[Act]]] = [
    (
        1,
        [
            ("backward", 81, (ALL, 98), -1, True),
            ("step",),
            ("zero_grad", True),
            ("backward", 0, (ALL, ALL), 1, True),
            ("step",),
            ("step",),
            ("step",),
            ("assign", 0, 0),
            ("step",),
            ("assign", 0, 4),
            ("step",),
        ],
    ),
    (
        2,
        [
            ("backward", 59, (ALL, 202), -1, True),
            ("step",),
            ("step",),
            ("reopen", 1, "cpu"),
            ("backward", 60, (103, ALL), -1, True),
            ("step",),
            ("step",),
            ("assign", 1, 5),
            ("backward", 7, (ALL, ALL), -1, True),
            ("step",),
            ("put", 1, False),
            ("step",),
        ],
    ),
]


@pytest.mark.parametrize("world,acts", TIES_OF_LOADED_MASTERS, ids=["one process", "ranks"])
def test_a_loaded_master_that_is_a_tie(ranks: Pool, world: int, acts: list[Act]) -> None:
    with made_folder() as folder:
        ranks.run(perform, LOW_SGD, acts, folder, world=world, group=world > 1)


# -- ranks -------------------------------------------------------------------------------------------------------------


def on_ranks(ranks: Pool, setting: Setting, acts: list[Act]) -> None:
    with made_folder() as folder:
        done = ranks.run(perform, setting, acts, folder, world=2)
    assert done[0] == done[1]


@pytest.mark.parametrize("number", [1, 2])  # of which each draws others
@settings(max_examples=10, derandomize=True, **QUIET)
@given(drawn_setting(), drawn_acts(3))
def test_any_sequence_on_ranks(ranks: Pool, number: int, setting: Setting, acts: list[Act]) -> None:
    on_ranks(ranks, setting, acts)


@pytest.mark.slow
@settings(max_examples=300, **QUIET)
@given(drawn_setting(), drawn_acts(5))
def test_any_sequence_of_many_on_ranks(ranks: Pool, setting: Setting, acts: list[Act]) -> None:
    on_ranks(ranks, setting, acts)
