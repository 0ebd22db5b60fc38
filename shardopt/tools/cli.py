"""The command line: ``shardopt <command>``, or ``python -m shardopt <command>``."""

import argparse
from collections.abc import Sequence

import shardopt

from .checkpoint_commands import add_commands
from .completion import add_completion
from .doctor import add_doctor
from .import_command import add_import
from .plan_command import add_plan
from .terminal import EXIT_CODES, run
from .top import add_top
from .twins_command import add_twins


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; its exit code is one of those that ``--help`` lists."""
    parser = argparse.ArgumentParser(
        prog="shardopt",
        description=shardopt.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"shardopt {shardopt.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (add_twins, add_commands, add_import, add_plan, add_doctor, add_top):
        add(commands)
    add_completion(commands, parser)
    for command in commands.choices.values():
        command.add_argument("--json", action="store_true", help="print the answer as JSON")
    return run(parser.parse_args(arguments))
