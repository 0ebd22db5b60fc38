"""What an editor tells of the public calls: types of the pages' blocks, and meanings of keywords."""

import pydoc
from pathlib import Path

import shardopt
from shardopt.config import Options
from shardopt.option import options_of
from tests.support.paths import ROOT
from tests.support.scripts import run_script

# "type: ignore" says that there must be an error: a strict mypy refuses one that is of no use.
CALLS = """
import torch
from shardopt import ShardedAdamW, ShardedOptimizer, ShardedSGD
from shardopt.rules.lion import lion

model = torch.nn.Linear(3, 3)
groups = [{"params": model.parameters(), "lr": 1e-3}]
stage: int = 2
ShardedAdamW(model, stage=2)
ShardedAdamW(torch.nn.DataParallel(model), lr=1e-3, stage=3, state_format={"exp_avg": "bf16"})
ShardedSGD(model.named_parameters(), module=model, offload="cpu")
ShardedOptimizer(groups, {"lr": 1e-4}, rule=lion, master="split")
ShardedAdamW(model, stage=4)  # type: ignore[arg-type]
ShardedAdamW(model, stage=stage)  # type: ignore[arg-type]
ShardedAdamW(model, master="fp8")  # type: ignore[arg-type]
ShardedAdamW(model, stge=2)  # type: ignore[call-arg]
ShardedAdamW(3)  # type: ignore[arg-type]
ShardedOptimizer(torch.ones(3, 3).shape, {}, rule=lion)  # type: ignore[arg-type]
"""


def test_blocks_of_the_pages_and_calls_are_typed(tmp_path: Path) -> None:
    """By a strict mypy, whose first run reads all of torch for 30 s; scripts/snippets.py takes pyright as well."""
    calls = tmp_path / "calls.py"
    calls.write_text(CALLS)
    done = run_script(ROOT / "scripts" / "snippets.py", "--and", str(calls))
    assert done.returncode == 0, done.stdout + done.stderr


def test_help_tells_every_keyword() -> None:
    """Of each optimizer: the names with their defaults in its own docstring, the meanings with its arguments."""
    for name in (name for name in shardopt.__all__ if name.startswith("Sharded")):
        kind = getattr(shardopt, name)
        shown = " ".join(pydoc.render_doc(kind, renderer=pydoc.plaintext).replace("|", " ").split())
        own = " ".join((kind.__doc__ or "").split())
        for field, said in options_of(Options):
            assert f" {field.name}=" in own, (name, field.name)
            assert said.meaning.split("`")[0].split("[")[0].strip(" (")[1:] in shown, (name, field.name)
