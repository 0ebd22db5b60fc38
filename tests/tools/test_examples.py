"""Every recipe under examples/ runs as its docstring says, in one process and on ranks, and its page names it.

Training itself is compared with torch's elsewhere (``tests/integrations``).
"""

import re
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.launch import launch
from tests.support.paths import ROOT
from tests.support.scripts import run_script

# File -> the library that it needs, and what it prints.
RECIPES = {
    "plain_ddp": (None, "step 15: loss"),
    "pretrain": (None, "step 7: loss"),
    "hf_trainer": ("transformers", "train_loss"),
    "accelerate_loop": ("accelerate", "loss 0."),
    "lightning_module": ("lightning", "loss 0."),
}
PAGE = ROOT / "docs" / "recipes.md"


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs(name: str, tmp_path: Path) -> None:
    library, prints = RECIPES[name]
    if library is not None and find_spec(library) is None:
        pytest.skip(f"needs the extra 'frameworks' ({library}): pip install .[frameworks]")
    done = run_script(ROOT / "examples" / f"{name}.py", tmp_path / "out", cwd=tmp_path, frameworks=library is not None)
    assert done.returncode == 0 and prints in done.stdout, done.stderr


def example(name: str, folder: str) -> None:
    sys.argv = [name, folder]
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")


def test_the_loops_run_on_ranks_and_resume(tmp_path: Path) -> None:
    """What two ranks saved, one process takes up: its first step is the one after their last."""
    launch(example, "plain_ddp", str(tmp_path / "ddp"))
    alone = run_script(ROOT / "examples" / "plain_ddp.py", tmp_path / "ddp", cwd=tmp_path)
    assert alone.returncode == 0 and alone.stdout.startswith("step 20: loss"), alone.stderr
    launch(example, "pretrain", str(tmp_path / "pretrain"))
    assert len(list((tmp_path / "pretrain").glob("*-step*"))) == 2


def test_the_page_has_every_file_and_no_other() -> None:
    linked = set(re.findall(r"\(\.\./examples/(\w+)\.py\)", PAGE.read_text()))
    assert linked == {path.stem for path in (ROOT / "examples").glob("*.py")} == {*RECIPES, "train_gpt"}
