"""``shardopt import``: turns checkpoints of other libraries into ours."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint.foreign.from_dcp import INDEX, read_dcp
from ..checkpoint.foreign.from_deepspeed import find_tag, read_deepspeed
from ..checkpoint.foreign.from_torch import Hints, read_torch
from ..checkpoint.foreign.import_foreign import plan_import, write_import
from ..checkpoint.foreign.recognise import recognise
from ..checkpoint.inspect import size
from ..errors import CheckpointError
from ..optim.like import recipe
from .optimizers import named, names
from .progress import progress
from .terminal import CommandResult

if TYPE_CHECKING:
    from ..checkpoint.foreign.source import Foreign

KINDS = ("torch", "dcp", "deepspeed")


def add_import(commands: Any) -> None:
    """Adds the command to the subparsers of the command line."""
    command = commands.add_parser(
        "import",
        help="turn a checkpoint of torch, FSDP2 or DeepSpeed into one of shardopt",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Writes what another library saved as a checkpoint that load_checkpoint() reads at any number of\n"
        "ranks and stage: params, masters, moments, step counts, param groups, buffers. SOURCE is\n\n"
        "  torch      an optimizer's state dict and a model's, as torch.save wrote them (the model's may be a\n"
        "             safetensors file), or one file with both; ZeroRedundancyOptimizer's consolidated dict is one\n"
        "  dcp        a folder of torch.distributed.checkpoint: FSDP2, and what else saves there\n"
        "  deepspeed  a folder of DeepSpeed's ZeRO stage 1, 2 or 3, of any number of ranks\n\n"
        "These files are pickles. This command alone reads such files, with restricted loaders: tensors, numbers and\n"
        "text come through, classes of torch's and DeepSpeed's formats as inert stand-ins, anything else is an error.\n"
        "No code of a file is run. Schedulers, loss scalers and random numbers are not taken over.",
    )
    command.add_argument("sources", metavar="SOURCE", type=Path, nargs="+", help="files or a folder, as above")
    command.add_argument("output", metavar="OUT", type=Path, help="a directory of checkpoints; made if missing")
    command.add_argument("--from", dest="kind", choices=KINDS, help="what SOURCE is; found out where it is not given")
    command.add_argument(
        "--optimizer",
        choices=names(),
        metavar="NAME",
        help="which class it was, by torch's name where it has one, where that is not clear",
    )
    command.add_argument(
        "--names", metavar="FILE", type=Path, help="names of the optimizer's params, in its order, one a line"
    )
    for option, words in (
        ("--frozen", "tensors of the model that are params without an optimizer"),
        ("--buffers", "tensors of the model that are buffers"),
        ("--drop", "tensors of the model to leave out: second names of tied params"),
    ):
        command.add_argument(
            option, metavar="PATTERN", action="append", default=[], help=f"{words}: a name or 'layer.*'"
        )
    command.set_defaults(run=_import)


def _import(options: argparse.Namespace) -> CommandResult:
    """Raises CheckpointError if the source cannot be imported; nothing was written."""
    foreign = _read(options)
    every = {name: recipe(named(name)) for name in names()}
    plan = plan_import(foreign, *recognise(foreign, every, options.optimizer))
    total = sum(item.nbytes for item in plan.items)
    with progress(f"writing {options.output}", total) as advance:
        path = write_import(plan, options.output, advance)
    return CommandResult(
        {"path": str(path), "bytes": total, "from": str(foreign.origin)}, f"{path}: {size(total)} from {foreign.origin}"
    )


def _read(options: argparse.Namespace) -> Foreign:
    sources: Sequence[Path] = options.sources
    absent = [path for path in sources if not path.exists()]
    if absent:
        raise CheckpointError(f"give what was saved, then OUT: {absent[0]} is not there. Nothing was imported.")
    kind = options.kind or _kind(sources)
    hints = Hints(_names(options.names), options.frozen, options.buffers, options.drop)
    if kind == "torch":
        return read_torch(sources, hints)
    if len(sources) != 1 or not sources[0].is_dir():
        raise CheckpointError(f"give one folder to --from {kind}, found {len(sources)} sources. Nothing was imported.")
    return read_dcp(sources[0], hints) if kind == "dcp" else read_deepspeed(sources[0])


def _kind(sources: Sequence[Path]) -> str:
    if all(path.is_file() for path in sources):
        return "torch"
    folder = sources[0]
    kinds = {"dcp": (folder / INDEX).is_file(), "deepspeed": find_tag(folder) is not None}
    found = [kind for kind, is_it in kinds.items() if is_it and len(sources) == 1]
    if len(found) != 1:
        raise CheckpointError(
            f"give --from, one of {', '.join(KINDS)}: {folder} is "
            f"{' and '.join(found) or f'not a folder with {INDEX} or *_optim_states.pt files'}. Nothing was imported."
        )
    return found[0]


def _names(path: Path | None) -> list[str] | None:
    if path is None:
        return None
    try:
        return [line.strip() for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"give a text file with one name a line as --names {path}: {error}.") from error
