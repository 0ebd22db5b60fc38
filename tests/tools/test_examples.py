"""Every recipe under examples/ runs as its docstring says, in one process and on ranks, and its page names it.

Training itself is compared with torch's elsewhere (``tests/integrations``).
"""

import io
import re
import runpy
import shutil
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.support.launch import launch
from tests.support.paths import ROOT
from tests.support.scripts import run_script

# File -> the library that it needs, and what it prints.
RECIPES: dict[str, tuple[str | None, str]] = {
    "plain_ddp": (None, "step 15: loss"),
    "pretrain": (None, "step 7: loss"),
    "hf_trainer": ("transformers", "train_loss"),
    "accelerate_loop": ("accelerate", "loss 0."),
    "lightning_module": ("lightning", "loss 0."),
    "lightning_cli": ("jsonargparse", "stage 2: loss 0."),
}
CLI = ("fit", "--config", ROOT / "examples" / "lightning_cli.yaml", "--trainer.accelerator", "cpu")
PAGE = ROOT / "docs" / "recipes.md"


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs(name: str, tmp_path: Path) -> None:
    library, prints = RECIPES[name]
    if library is not None and find_spec(library) is None:
        pytest.skip(f"needs {library}: pip install '.[frameworks]' 'jsonargparse[signatures]'")
    arguments = CLI if name == "lightning_cli" else (tmp_path / "out",)
    done = run_script(ROOT / "examples" / f"{name}.py", *arguments, cwd=tmp_path, frameworks=library is not None)
    assert done.returncode == 0 and prints in done.stdout, done.stderr


def test_blocks_of_the_page_run() -> None:
    """An agent without a forward; one rank that evaluates alone, an average and surgery."""
    text = PAGE.read_text()
    for heading in ("## An agent without a forward", "## Rank 0 evaluates alone"):
        section = text[text.index(heading) :]
        exec(section.split("```python\n")[1].split("```")[0], {})


def example(name: str, folder: str, *changes: str) -> None:
    sys.argv = [name, folder, *changes]
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")


def test_the_loops_run_on_ranks_and_resume(tmp_path: Path) -> None:
    """What two ranks saved, one process takes up: its first step is the one after their last."""
    launch(example, "plain_ddp", str(tmp_path / "ddp"))
    alone = run_script(ROOT / "examples" / "plain_ddp.py", tmp_path / "ddp", cwd=tmp_path)
    assert alone.returncode == 0 and alone.stdout.startswith("step 20: loss"), alone.stderr
    launch(example, "pretrain", str(tmp_path / "pretrain"))
    assert len(list((tmp_path / "pretrain").glob("*-step*"))) == 2


@pytest.mark.skipif(find_spec("accelerate") is None, reason="needs the extra 'frameworks'")
def test_accelerate_on_ranks(tmp_path: Path) -> None:
    """By a config that Accelerate reads; what the main process saves, all ranks load."""
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.utils import DistributedType

    config = load_config_from_file(str(ROOT / "examples" / "accelerate.yaml"))
    assert (config.distributed_type, config.num_processes) == (DistributedType.MULTI_GPU, 2)
    launch(example, "accelerate_loop", str(tmp_path / "checkpoint"), frameworks=True)


# -- a model that is cut -----------------------------------------------------------------------------------------------

Cut = tuple[int, str]  # ranks, and what is said on the command line
# A gate that likes two experts alike chooses by rounding: at a width of 64 two are within 2e-7 of each other in step 5.
# At this one the closest are 3e-5 apart.
WIDE = " width=96"
ALONE = {"three_dimensions": "pp=1 dp=1 tp=1", "experts": "copies=1 ranks=1" + WIDE}
STEPS, SAVED, KILLED_AT = 8, 3, 4  # a checkpoint is published after three steps; the step of this number is never taken
# Ranks add in another order than one process does: the farthest loss was at 2e-7 of it.
CLOSE = 1e-5


class Reached(BaseException):
    """The step that is never taken."""


_held: list[Reached] = []


def losses(name: str, folder: str, changes: str) -> dict[int, float]:
    """What an example prints, by step; as far as it comes."""
    with redirect_stdout(io.StringIO()) as printed:
        try:
            example(name, folder, *changes.split())
        except Reached as reached:
            _held.append(reached)  # with all that the example has: the kill finds it as it was
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss (\S+)", printed.getvalue())}


def losses_until_killed(name: str, folder: str, changes: str) -> dict[int, float]:
    def stops(optimizer: Any, *_: Any) -> None:
        if optimizer.updates == KILLED_AT:
            raise Reached

    register_optimizer_step_pre_hook(stops)
    return losses(name, folder, changes)


SOME = ("experts", (2, "copies=1 ranks=2" + WIDE), [(2, "copies=2 ranks=1" + WIDE)])
EIGHT: list[tuple[str, Cut, list[Cut]]] = [
    ("three_dimensions", (8, ""), [(8, "pp=1 dp=4"), (2, "pp=1 tp=1")]),
    ("experts", (8, WIDE), [(4, "ranks=2" + WIDE), (2, "copies=1 ranks=2" + WIDE), (1, ALONE["experts"])]),
]


@pytest.mark.parametrize(
    ("name", "cut", "others"), [SOME, *(pytest.param(*each, marks=pytest.mark.slow) for each in EIGHT)]
)
def test_killed_in_one_cut_it_goes_on_in_others(name: str, cut: Cut, others: Sequence[Cut], tmp_path: Path) -> None:
    """Killed when its gradients are there and its step is not: each loss is that of one process nobody interrupts."""
    (whole,) = launch(losses, name, str(tmp_path / "whole"), ALONE[name], world=1)
    assert whole.keys() == {*range(STEPS)} and whole[STEPS - 1] < 0.5 * whole[SAVED] < 0.5 * whole[0], whole
    world, changes = cut
    killed = launch(losses_until_killed, name, str(tmp_path / "runs"), changes, world=world, killed=True)[0]
    assert killed == pytest.approx({step: whole[step] for step in range(KILLED_AT)}, rel=CLOSE)
    for world, changes in others:
        folder = tmp_path / changes
        shutil.copytree(tmp_path / "runs", folder, symlinks=True)
        found = launch(losses, name, str(folder), changes, world=world)[0]
        assert found == pytest.approx({step: whole[step] for step in range(SAVED, STEPS)}, rel=CLOSE), changes


# -- weights to another group of ranks ---------------------------------------------------------------------------------


def printed(name: str) -> str:
    with redirect_stdout(io.StringIO()) as text:
        example(name, "")
    return text.getvalue()


def test_an_engine_gets_the_weights_of_each_round() -> None:
    trained, _, *engines = launch(printed, "rl_engine", world=4)
    answers = [re.findall(r"answers (\S+)", each) for each in engines]
    assert answers[0] == answers[1] and len(set(answers[0])) == len(answers[0]) == 3, answers
    assert trained.count("log-probability") == 3


def test_the_page_has_every_file_and_no_other() -> None:
    linked = set(re.findall(r"\(\.\./examples/(\w+)\.py\)", PAGE.read_text()))
    assert (
        linked
        == {path.stem for path in (ROOT / "examples").glob("*.py")}
        == {*RECIPES, *ALONE, "train_gpt", "rl_engine"}
    )
