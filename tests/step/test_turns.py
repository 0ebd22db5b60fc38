"""Promise: a public call in the middle of a step, from wherever, is right or a StateError, and the step stays whole.

Moments are made by a profile function, which runs on the same thread in the middle of the package's own functions, as a
signal handler does; by real signals on several ranks; and for threads by events.
"""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardopt
from shardopt import Part, ShardedAdamW, StateError, Tuning
from shardopt.checkpoint.write import RankWriter
from shardopt.domain.turn import Turn
from shardopt.step import step as phases
from tests.optim.test_every_method import methods
from tests.support.ranks import Pool
from tests.support.training import raises

SMALL = Tuning(bucket_bytes=3000, keep_below=100)
Call = Callable[[nn.Module, ShardedAdamW, Path], Any]


def made(stage: int | None, **options: Any) -> tuple[nn.Module, ShardedAdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(17, 40), nn.Tanh(), nn.Linear(40, 3))
    given, keywords = (model.parameters(), {}) if stage is None else (model, {"stage": stage})
    return model, ShardedAdamW(given, lr=0.01, tuning=options.pop("tuning", SMALL), **keywords, **options)


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    found: torch.Tensor = model(torch.full((2, 17), 0.5 + number)).square().sum()  # the same on all ranks
    return found


def take_step(model: nn.Module, opt: ShardedAdamW, number: int) -> None:
    opt.zero_grad()
    loss_of(model, number).backward()
    opt.step()


def values(model: nn.Module, opt: ShardedAdamW) -> list[torch.Tensor]:
    """Params, states and step counts, to compare bits."""
    with opt.unsharded():
        found = [param.detach().clone() for param in model.parameters()]
    states = [value for state in opt.state_dict()["state"].values() for value in state.values()]
    whole = [value.full_tensor() if isinstance(value, Part) else torch.as_tensor(value) for value in states]
    return found + [value.clone() for value in whole]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def loaded(folder: Path, stage: int | None, **options: Any) -> list[torch.Tensor]:
    model, opt = made(stage, **options)
    shardopt.load_checkpoint(folder, model, opt)
    found = values(model, opt)
    opt.close()
    return found


# -- on the same thread ------------------------------------------------------------------------------------------------


def enter(context: Any) -> None:
    with context:
        pass


def param_of(opt: ShardedAdamW) -> Any:
    return opt.param_groups[0]["params"][0]


def nothing(opt: ShardedAdamW) -> dict[str, Any]:
    """A state dict from before the first step."""
    return {"state": {}, "param_groups": [{**opt.param_groups[0], "params": [0, 1, 2, 3]}]}


def forget(opt: ShardedAdamW) -> None:
    opt.state = {}  # type: ignore[assignment]


# Calls that no backward can be in the middle of.
ALONE: dict[str, Call] = {
    "bind": lambda model, opt, folder: opt.bind(),
    "close": lambda model, opt, folder: opt.close(),
    "consolidate_state_dict": lambda model, opt, folder: opt.consolidate_state_dict(),
    "gradient_weight": lambda model, opt, folder: opt.gradient_weight(1),
    "gradient_statistics": lambda model, opt, folder: opt.gradient_statistics("absmax"),
    "offload": lambda model, opt, folder: opt.offload(),
    "rebind": lambda model, opt, folder: opt.rebind(),
    "reduce_gradients": lambda model, opt, folder: opt.reduce_gradients(),
    "reload": lambda model, opt, folder: opt.reload(),
    "step": lambda model, opt, folder: opt.step(),
    "sum_tied": lambda model, opt, folder: opt.sum_tied(param_of(opt), None),  # type: ignore[arg-type]
    "unsharded": lambda model, opt, folder: enter(opt.unsharded()),
    "unsharded alone": lambda model, opt, folder: enter(opt.unsharded(alone=True)),
    "weights": lambda model, opt, folder: dict(opt.weights()),
    "save_checkpoint": lambda model, opt, folder: shardopt.save_checkpoint(folder, model, opt),
    "save_weights": lambda model, opt, folder: shardopt.save_weights(folder, opt),
    "saved alone": lambda model, opt, folder: shardopt.save_checkpoint(folder, model),
    "saved later": lambda model, opt, folder: shardopt.save_checkpoint(folder, model, opt, asynchronous=True).wait(),
    "load_checkpoint": lambda model, opt, folder: shardopt.load_checkpoint(folder, model, opt),
    "prepare_states": lambda model, opt, folder: shardopt.prepare_states(opt),
    "join": lambda model, opt, folder: enter(opt.join()),
    "join_hook": lambda model, opt, folder: opt.join_hook(True),
}
ANY: dict[str, Call] = {
    "add_param_group": lambda model, opt, folder: opt.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
    "load_state_dict": lambda model, opt, folder: opt.load_state_dict(nothing(opt)),
    "memory": lambda model, opt, folder: opt.memory(),
    "refresh_masters": lambda model, opt, folder: opt.refresh_masters(),
    "state_dict": lambda model, opt, folder: opt.state_dict(),
    "timings": lambda model, opt, folder: opt.timings(),
    "schedule": lambda model, opt, folder: opt.schedule(),
    "program": lambda model, opt, folder: opt.program(),
    "weights_metadata": lambda model, opt, folder: opt.weights_metadata(),
    "zero_grad": lambda model, opt, folder: opt.zero_grad(set_to_none=False),
    "units": lambda model, opt, folder: opt.units,
    "a state": lambda model, opt, folder: opt.state[param_of(opt)],
    "states": lambda model, opt, folder: list(opt.state.items()),
    "a state assigned": lambda model, opt, folder: opt.state.__setitem__(param_of(opt), {}),
    "states forgotten": lambda model, opt, folder: forget(opt),
}
UNTOUCHED = {"log", "monitor", "no_sync"}  # they look at nothing before the next step or backward

IN_A_STEP = ("FrozenStep.holds", "agree", "update_chunks", "_launch", "commit")
IN_BACKWARD = ("Rounds.open_round", "Rounds.take_all", "RoundGradients.show")
IN_RELEASED = ("UpdateInBackward._prepare", "UpdateInBackward.take_sum", "UpdateInBackward.take_step")
IN_FORWARD = ("Gatherer.use", "Gatherer.done", "Passes.end")


def test_the_tables_know_every_method() -> None:
    assert set(methods()) - UNTOUCHED <= {*ALONE, *ANY}


@contextmanager
def within(names: tuple[str, ...], act: Callable[[str], None]) -> Iterator[set[str]]:
    """Calls ``act`` at the beginning and at the end of the package's functions of these names; yields what came."""
    came: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_qualname
        if name in names and event in ("call", "return") and "/shardopt/" in frame.f_code.co_filename:
            came.add(name)
            act(f"{event} of {name}")

    sys.setprofile(note)
    try:
        yield came
    finally:
        sys.setprofile(None)


WAYS: dict[str, tuple[int | None, dict[str, Any]]] = {
    "params alone": (None, {}),
    "stage 2": (2, {}),
    "stage 3": (3, {}),
    "released": (1, {"release_gradients": True}),
}


@pytest.mark.parametrize("way", WAYS)
def test_calls_in_the_middle_of_a_step(way: str, tmp_path: Path) -> None:
    stage, options = WAYS[way]
    model, opt = made(stage, **options)
    twin, other = made(stage, **options)
    for number in range(2):
        take_step(model, opt, number)
        take_step(twin, other, number)
    ends: list[str] = []

    def call_all(when: str) -> None:
        for name, call in {**ALONE, **ANY}.items():
            try:
                call(model, opt, tmp_path)
                ends.append(f"{name} at {when}: it returned")
            except StateError as error:
                if "has returned" not in str(error):
                    ends.append(f"{name} at {when}: {error}")
            except Exception as error:
                ends.append(f"{name} at {when}: {type(error).__name__}: {error}")
        if "in the middle of" not in repr(opt):
            ends.append(f"repr at {when}: {opt!r}")

    names = IN_A_STEP if way != "released" else ("update_chunks", "_launch", "agree", "commit")
    names += () if stage is None else IN_BACKWARD if way != "released" else IN_RELEASED
    names += IN_FORWARD if stage == 3 else ()
    with within(names, call_all) as came:
        take_step(model, opt, 2)
    assert not ends, "\n".join(ends)
    assert came == set(names)
    assert not list(tmp_path.iterdir())
    take_step(twin, other, 2)
    assert same(values(model, opt), values(twin, other)) and opt.updates == other.updates == 3
    opt.close()
    other.close()


def test_calls_of_the_scripts_own_code(tmp_path: Path) -> None:
    """In a backward between two gradients, in a closure, and between the passes: what is there is whole, or refused."""
    for stage in (None, 2, 3):
        model, opt = made(stage)
        take_step(model, opt, 0)
        before = values(model, opt)
        seen: list[bool] = []

        def in_backward(_: object, model: Any = model, opt: ShardedAdamW = opt, seen: Any = seen) -> None:
            for name, call in ALONE.items():
                if name != "bind" and opt.engine.turn.is_round_open:
                    with raises(StateError, "backward()", "has returned"):
                        call(model, opt, tmp_path / "refused")
            seen.append(len(opt.state_dict()["state"]) == 4 and bool(opt.memory()))

        opt.zero_grad()
        hidden = model[1](model[0](torch.ones(2, 17))) if stage != 3 else None
        loss = loss_of(model, 1)
        shardopt.save_checkpoint(tmp_path / f"passes {stage}", model, opt)
        assert same(loaded(tmp_path / f"passes {stage}", stage), before)
        del hidden
        handles = [param.register_post_accumulate_grad_hook(in_backward) for param in model.parameters()]
        loss.backward()
        for handle in handles:
            handle.remove()
        assert len(seen) == 4 and all(seen) and not (tmp_path / "refused").exists()

        def closure(model: Any = model, opt: ShardedAdamW = opt, stage: Any = stage) -> torch.Tensor:
            opt.zero_grad()
            shardopt.save_checkpoint(tmp_path / f"closure {stage}", model, opt)
            loss = loss_of(model, 1)
            loss.backward()
            return loss

        opt.step(closure)
        assert same(loaded(tmp_path / f"closure {stage}", stage), before)
        assert not same(values(model, opt), before)
        opt.close()


HELD = "holding.<locals>.decorate.<locals>.held"


def test_an_interrupt_gives_the_turn_back() -> None:
    """Ctrl-C at any call of the turn's own functions: what the script then calls is not refused."""
    for name in ("_Taken.__enter__", "_Taken.__exit__", "Turn.lend", HELD):
        for event in ("call", "return"):
            model, opt = made(2)
            take_step(model, opt, 0)

            def interrupt(when: str, event: str = event) -> None:
                if when.startswith(event):
                    sys.setprofile(None)
                    raise KeyboardInterrupt

            with pytest.raises(KeyboardInterrupt), within((name,), interrupt):
                opt.zero_grad()
                loss_of(model, 1).backward()
                opt.step(lambda: None)
            assert len(opt.state_dict()["state"]) == 4, (name, event)
            errors: list[BaseException] = []
            call_in_thread(opt.memory, errors).join()
            assert not errors, (name, event, errors)
            opt.close()


# -- from another thread -----------------------------------------------------------------------------------------------


def call_in_thread(call: Callable[[], Any], errors: list[BaseException]) -> threading.Thread:
    def run() -> None:
        try:
            call()
        except BaseException as error:  # what a thread raises nobody sees
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize("stage", [None, 2, 3])
def test_another_thread_waits_for_the_step_and_the_next_step_for_its_copies(stage: int | None, tmp_path: Path) -> None:
    model, opt = made(stage)
    take_step(model, opt, 0)
    waits = {name: threading.Event() for name in ("save_checkpoint()", "step()", "zero_grad()", "state_dict()")}
    wait, commit, run = Turn._wait, phases.commit, RankWriter.run
    errors: list[BaseException] = []
    threads: list[threading.Thread] = []
    writes = threading.Event()

    def waited(turn: Turn, call: str) -> None:
        waits.setdefault(call, threading.Event()).set()
        wait(turn, call)

    def committed(*given: Any) -> None:
        if not threads:  # a save begins in the middle of this step
            save = lambda: shardopt.save_checkpoint(tmp_path, model, opt)  # noqa: E731
            threads.append(call_in_thread(save, errors))
            assert waits["save_checkpoint()"].wait(60)
        commit(*given)

    def written(writer: RankWriter) -> None:
        writes.set()
        assert waits["zero_grad()"].wait(60)  # the next step is about to begin
        run(writer)

    with (
        patch.object(Turn, "_wait", waited),
        patch.object(phases, "commit", committed),
        patch.object(RankWriter, "run", written),
    ):
        take_step(model, opt, 1)
        assert writes.wait(60)
        opt.zero_grad()  # it waits, and all that comes after it
        threads[0].join()
        assert not errors, errors
        take_step(model, opt, 2)
    twin, other = made(stage)
    for number in range(2):
        take_step(twin, other, number)
    assert same(loaded(tmp_path, stage), values(twin, other))
    take_step(twin, other, 2)
    assert same(values(model, opt), values(twin, other))
    opt.close()
    other.close()


def test_a_thread_waits_for_a_backward(tmp_path: Path) -> None:
    """A save that finds sums of gradients half made waits for the rest of them."""
    model, opt = made(2)
    take_step(model, opt, 0)
    waits, errors, threads = threading.Event(), list[BaseException](), list[threading.Thread]()
    wait = Turn._wait_for_round

    def waited(turn: Turn, call: str) -> None:
        waits.set()
        wait(turn, call)

    def begin(_: object) -> None:
        if not threads and opt.engine.turn.is_round_open:
            threads.append(call_in_thread(lambda: shardopt.save_checkpoint(tmp_path, model, opt), errors))
            assert waits.wait(60)

    opt.zero_grad()
    loss = loss_of(model, 1)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(begin)
    with patch.object(Turn, "_wait_for_round", waited):
        loss.backward()
        threads[0].join()
    assert not errors, errors
    again, other = made(2)
    shardopt.load_checkpoint(tmp_path, again, other)
    other.step()  # with the whole sums
    opt.step()
    assert same(values(again, other), values(model, opt))
    opt.close()
    other.close()


def test_a_wait_has_a_deadline() -> None:
    model, opt = made(None, tuning=Tuning(timeout=0.05))
    take_step(model, opt, 0)
    errors: list[BaseException] = []
    opt.step(lambda: call_in_thread(opt.state_dict, errors).join())
    assert isinstance(errors[0], StateError) and "Tuning(timeout=" in str(errors[0])
    assert opt.updates == 2


# -- on several ranks --------------------------------------------------------------------------------------------------


def handlers(stage: int | None, folder: str) -> None:
    """A handler on all ranks, each at another point: rank 0 in a step, rank 1 in its forward."""
    rank, errors, root = dist.get_rank(), list[BaseException](), Path(folder)
    model, opt = made(stage)
    twin, other = made(stage)
    flags: list[int] = []

    def handle(number: int, _: object) -> None:
        flags.append(number)
        try:
            shardopt.save_checkpoint(root, model, opt)
        except BaseException as error:
            errors.append(error)

    def signalled(_: str) -> None:
        if not flags:
            signal.raise_signal(signal.SIGUSR2)

    for number in range(2):
        take_step(twin, other, number)
    take_step(model, opt, 0)
    before = signal.signal(signal.SIGUSR2, handle)
    try:
        if rank == 0:
            with within(("commit",), signalled):
                take_step(model, opt, 1)
        else:
            handle_in_forward = model[1].register_forward_hook(lambda *_: signalled(""))
            take_step(model, opt, 1)
            handle_in_forward.remove()
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert len(flags) == 1 and isinstance(errors[0], StateError) and "set a flag" in str(errors[0]), errors
    assert not root.exists()
    shardopt.save_checkpoint(root, model, opt)  # as the message says
    expected = values(twin, other)
    assert same(values(model, opt), expected) and same(loaded(root, stage), expected)
    opt.close()
    other.close()


def test_handlers_on_all_ranks(ranks: Pool, tmp_path: Path) -> None:
    for stage in (None, 3):
        ranks.run(handlers, stage, str(tmp_path / str(stage)), world=2)
