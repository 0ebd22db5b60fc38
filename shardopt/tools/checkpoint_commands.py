"""``python -m shardopt inspect | verify | export``: checkpoints on the command line."""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from ..checkpoint.export import export_states, export_weights
from ..checkpoint.inspect import data_bytes, describe, size, verify
from ..checkpoint.publish import find, published
from ..checkpoint.reader import Checkpoint
from ..errors import ShardoptError
from .progress import progress
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
        "optimizer, which torch.optim classes load with torch.load(OUT, weights_only=True).",
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


EXIT_CODES = """exit codes:
  0    done, and all is well
  1    the answer is no (bits differ, damaged, nothing fits), or what was asked for could not be done
  2    the command line is wrong; nothing was done
  3    a bug in shardopt: `python -X dev -m shardopt ...` shows where
  130  interrupted"""


def run(options: argparse.Namespace) -> int:
    """Runs the command that was given; prints errors on one line, without a traceback."""
    try:
        code = int(options.run(options))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `| head` has ended; without devnull Python fails again when it flushes at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (ShardoptError, OSError, MemoryError) as error:
        print(f"error: {str(error) or type(error).__name__}", file=sys.stderr)
        return 1
    except Exception as error:
        if sys.flags.dev_mode:
            raise
        print(
            f"error: a bug in shardopt, please report it ({type(error).__name__}: {error}). python -X dev -m shardopt "
            "shows where.",
            file=sys.stderr,
        )
        return 3


def _inspect(options: argparse.Namespace) -> int:
    for line in describe(options.directory):
        print(line)
    return 0


def _verify(options: argparse.Namespace) -> int:
    paths = published(options.directory) if options.all else [find(options.directory)]
    if not paths:
        print(f"error: {options.directory} holds no checkpoint", file=sys.stderr)
    failed = not paths
    for path in paths:
        total = sum(each.stat().st_size for each in path.glob("*.safetensors"))
        start = time.monotonic()
        with progress(f"reading {path.name}", total) as advance:
            problems = verify(path, advance)
        for problem in problems:
            print(f"DAMAGED  {problem}")
        if not problems:
            print(f"whole    {path}: {size(total)} in {time.monotonic() - start:.1f} s")
        failed = failed or bool(problems)
    return int(failed)


def _export(options: argparse.Namespace) -> int:
    with Checkpoint(find(options.directory)) as checkpoint:
        start = time.monotonic()
        with progress(f"writing {options.output}", data_bytes(checkpoint.manifest)) as advance:
            if options.to == "torch":
                export_states(checkpoint, options.output, options.optimizer, advance)
            else:
                export_weights(checkpoint, options.output, advance)
        seconds = time.monotonic() - start
        print(f"{options.output}: {size(options.output.stat().st_size)} from {checkpoint.path} in {seconds:.1f} s")
    return 0
