"""``shardopt inspect | verify | export``: checkpoints on the command line."""

import argparse
import time
from pathlib import Path
from typing import Any

from ..checkpoint.export import export_states, export_weights
from ..checkpoint.inspect import as_data, data_bytes, describe, size, verify
from ..checkpoint.publish import find, published
from ..checkpoint.reader import Checkpoint
from ..errors import CheckpointError
from .progress import progress
from .terminal import CommandResult
from .values import index

_DIRECTORY = "a directory that save_checkpoint() was given (its newest checkpoint is taken), or one checkpoint in it"


def add_commands(commands: Any) -> None:
    """Adds them to the subparsers of the command line."""
    inspect = commands.add_parser(
        "inspect",
        help="print what a checkpoint holds, as a table",
        description="Prints step, versions, optimizers, param groups and a table of all tensors of a checkpoint, with "
        "the element ranges that each rank's file holds. Reads the manifest only.",
    )
    check = commands.add_parser(
        "verify",
        help="read a checkpoint whole and compare every byte with its checksum",
        description="Reads a checkpoint whole and compares every byte with the checksums taken when it was written. "
        "Names file, param and range of whatever differs. Exit code 1 if anything does.",
    )
    check.add_argument("--all", action="store_true", help="every checkpoint in the directory, not only the newest")
    export = commands.add_parser(
        "export",
        help="write a checkpoint as one file for torch or safetensors",
        description="Writes one file out of all ranks' files, a chunk at a time, whatever the number of ranks was. "
        "'safetensors': the weights by name in full precision, and the buffers. 'torch': the state dict of an "
        "optimizer, which torch.optim classes load with torch.load(OUT, weights_only=True); of one with several rules, "
        "as ShardedMuon, a dict of one state dict for each class: {'Muon': ..., 'AdamW': ...}.",
    )
    for command in (inspect, check, export):
        command.add_argument("directory", metavar="DIR", type=Path, help=_DIRECTORY)
    export.add_argument("output", metavar="OUT", type=Path, help="the file to write; replaced once it is whole")
    export.add_argument("--to", choices=["torch", "safetensors"], required=True, help="the form to write")
    export.add_argument(
        "--optimizer", type=index, default=0, metavar="N", help="with --to torch: which one (default: %(default)s)"
    )
    inspect.set_defaults(run=_inspect)
    check.set_defaults(run=_verify)
    export.set_defaults(run=_export)


def _inspect(options: argparse.Namespace) -> CommandResult:
    return CommandResult(as_data(options.directory), "\n".join(describe(options.directory)))


def _verify(options: argparse.Namespace) -> CommandResult:
    paths = published(options.directory) if options.all else [find(options.directory)]
    if not paths:
        raise CheckpointError(
            f"give the directory that save_checkpoint() was given: {options.directory} holds no checkpoint."
        )
    lines, read = [], []
    for path in paths:
        total = sum(each.stat().st_size for each in path.glob("*.safetensors"))
        start = time.monotonic()
        with progress(f"reading {path.name}", total) as advance:
            problems = verify(path, advance)
        seconds = time.monotonic() - start
        lines += [f"DAMAGED  {problem}" for problem in problems]
        lines += [] if problems else [f"whole    {path}: {size(total)} in {seconds:.1f} s"]
        read.append({"path": str(path), "bytes": total, "seconds": seconds, "problems": problems})
    is_whole = not any(each["problems"] for each in read)
    return CommandResult({"whole": is_whole, "checkpoints": read}, "\n".join(lines), is_whole)


def _export(options: argparse.Namespace) -> CommandResult:
    with Checkpoint(find(options.directory)) as checkpoint:
        start = time.monotonic()
        with progress(f"writing {options.output}", data_bytes(checkpoint.manifest)) as advance:
            if options.to == "torch":
                export_states(checkpoint, options.output, options.optimizer, advance)
            else:
                export_weights(checkpoint, options.output, advance)
        seconds, nbytes = time.monotonic() - start, options.output.stat().st_size
        data = {"path": str(options.output), "bytes": nbytes, "from": str(checkpoint.path), "seconds": seconds}
        return CommandResult(data, f"{options.output}: {size(nbytes)} from {checkpoint.path} in {seconds:.1f} s")
