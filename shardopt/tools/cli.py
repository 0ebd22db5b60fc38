"""The command line: ``python -m shardopt <command>``."""

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import shardopt

from ..config import Options
from ..errors import UnsupportedVersionError
from ..optim import classes
from ..option import choices_of, planned
from .checkpoint_commands import EXIT_CODES, add_commands, run
from .import_command import add_import
from .values import chart_file, memory, params, positive, seed

_OPTIMIZERS = {name.removeprefix("Sharded"): getattr(classes, name) for name in classes.__all__}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; its exit code is one of those that ``--help`` lists."""
    parser = argparse.ArgumentParser(
        prog="python -m shardopt",
        description=shardopt.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"shardopt {shardopt.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    twins = commands.add_parser(
        "twins",
        help="take a step with the Triton kernel and one with the native kernel, and compare every bit",
        description="Takes a few steps of one rule twice, with the Triton kernel (compiled where there is a GPU, in "
        "Triton's interpreter elsewhere) and with the native CPU kernel, and compares every bit of params, masters and "
        "states. Exit code 1 if any differs.",
    )
    twins.add_argument("--optimizer", default="AdamW", choices=sorted(_OPTIMIZERS), help="default: %(default)s")
    twins.add_argument(
        "--dtype", default="bf16", choices=sorted(_DTYPES), help="of params and gradients (default: %(default)s)"
    )
    twins.add_argument("--steps", type=positive, default=3, help="default: %(default)s")
    twins.add_argument("--seed", type=seed, default=0, help="default: %(default)s")
    twins.set_defaults(run=lambda options: _twins(options.optimizer, options.dtype, options.steps, options.seed))
    add_commands(commands)
    add_import(commands)
    _add_plan(commands)
    doctor = commands.add_parser(
        "doctor",
        help="print versions, devices, limits: what a report of a bug needs",
        description="Prints versions, devices, backends, limits of memory, and whether direct I/O works in a folder.",
    )
    doctor.add_argument("path", nargs="?", type=Path, default=Path(), help="to try direct I/O in (default: here)")
    doctor.set_defaults(run=_doctor)
    return run(parser.parse_args(arguments))


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        help="what each stage would need: bytes on a rank by kind, bytes that move, what fits",
        description="Prints, for each stage and dtype, the bytes on one rank by kind, the formula behind them, and the "
        "bytes that move in a step: those that a rank receives (wire), those of states in host memory that stream "
        "through a GPU (bus), and the disk's. Of all combinations of stage, master, formats and tier, "
        "whether shown or not, the cheapest that fits is named: the one that keeps all of fp32, then moves least. "
        "Activations are not counted. From Python, shardopt.plan.plan() takes your own module, on the meta device too.",
    )
    plan.add_argument("--params", required=True, type=params, help="of the model, such as 7B or 7e9")
    plan.add_argument("--ranks", type=positive, default=1, help="default: %(default)s")
    plan.add_argument("--device-memory", type=memory, help="of one rank, such as 80G")
    plan.add_argument("--host-memory", type=memory, help="for one rank, such as 200G (default: any)")
    plan.add_argument("--optimizer", default="AdamW", choices=sorted(_OPTIMIZERS), help="default: %(default)s")
    plan.add_argument("--dtype", choices=("fp32", "bf16"), help="of params (default: both)")
    for field, told in planned(Options):
        flag, choices, default = f"--{field.name.replace('_', '-')}", choices_of(field.type), field.default
        if choices:
            plan.add_argument(flag, choices=choices, default=default, help=f"{told.help} (default: %(default)s)")
        else:
            plan.add_argument(flag, action="store_const", const=told.value, default=default, help=told.help)
    plan.add_argument("--offload", choices=("cpu", "disk"), help="where masters and states rest (default: the device)")
    plan.add_argument(
        "--offload-gradients",
        action="store_true",
        help="rest their sums in host memory, where that can be: at stage 2 and 3, beside --offload",
    )
    plan.add_argument("--all", action="store_true", help="show every master, format and tier")
    plan.add_argument(
        "--plot", type=chart_file, help="a file for a stacked bar chart of what is shown (.png, .svg, .pdf)"
    )
    plan.set_defaults(run=_plan)


def _doctor(options: argparse.Namespace) -> int:
    from .doctor import report

    print(report(options.path))
    if options.path.is_dir():
        return 0
    print(f"error: {options.path} is not a directory, so direct I/O was not tried", file=sys.stderr)
    return 1


def _plan(options: argparse.Namespace) -> int:
    from .plan import WAYS, Planner, Tier, every_way, possible, transformer
    from .plan_report import advice, chart, table

    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise UnsupportedVersionError("--plot draws with Matplotlib, which is missing: pip install matplotlib.")
    planner = Planner(transformer(options.params), *classes.recipe(_OPTIMIZERS[options.optimizer]), options.ranks)
    ways = [way for way in WAYS if options.dtype is None or way.dtype is _DTYPES[options.dtype]]
    given: dict[str, Any] = {field.name: getattr(options, field.name) for field, _ in planned(Options)}
    tier: Tier = "device" if options.offload is None else "host" if options.offload == "cpu" else "disk"
    asked = [possible(replace(way, **given, tier=tier, sums_rest=options.offload_gradients)) for way in ways]
    # Formats and tiers are searched; what else was asked for is kept.
    kept = {field.name: given[field.name] for field, _ in planned(Options) if not choices_of(field.type)}
    ways = [replace(way, **kept) for way in ways]
    is_searched = options.all or options.device_memory is not None
    every = list(map(planner.need, every_way(ways))) if is_searched else []
    shown = every if options.all else list(map(planner.need, asked))
    print(f"{options.optimizer}, {options.params:,} params, {options.ranks} ranks; GB on one rank\n")
    print(table(shown, options.params, options.device_memory, options.host_memory))
    if options.plot is not None:
        chart(shown, options.device_memory, options.plot)
    if options.device_memory is None:
        return 0
    text, is_found = advice(every, options.optimizer, options.device_memory, options.host_memory)
    print(f"\n{text}")
    return int(not is_found)


def _twins(optimizer: str, dtype: str, steps: int, seed: int) -> int:
    from .twins import compare, triton_device

    where = "compiled for this GPU" if triton_device().type == "cuda" else "in Triton's interpreter"
    rule, defaults = classes.recipe(_OPTIMIZERS[optimizer])
    groups = [defaults, {**defaults, "lr": 0.5 * float(defaults["lr"])}]
    start = time.perf_counter()
    compared = compare(rule, groups, _DTYPES[dtype], steps, seed)
    print(
        f"{optimizer}, {dtype} params and gradients, {steps} steps: the Triton kernel {where} beside the native kernel"
    )
    for name, (elements, different) in compared.items():
        print(f"  {name:<16} {elements:>6} elements   {different or 'no'} bits differ")
    equal = not any(different for _, different in compared.values())
    verdict = "all bits are equal" if equal else "BITS DIFFER: please report this with the output of this command"
    print(f"{verdict} ({time.perf_counter() - start:.1f} s)")
    return 0 if equal else 1
