"""``shardopt twins``: compares the two kernels of a rule on this machine."""

import argparse
import time
from typing import Any

from ..optim.like import recipe
from .optimizers import named, names
from .plan_command import DTYPES
from .terminal import CommandResult
from .values import positive, seed


def add_twins(commands: Any) -> None:
    """Adds the command to the subparsers of the command line."""
    twins = commands.add_parser(
        "twins",
        help="take a step with the Triton kernel and one with the native kernel, and compare every bit",
        description="Takes a few steps of one rule twice, with the Triton kernel (compiled where there is a GPU, in "
        "Triton's interpreter elsewhere) and with the native CPU kernel, and compares every bit of params, masters and "
        "states. Exit code 1 if any differs.",
    )
    twins.add_argument("--optimizer", default="AdamW", choices=names(), help="default: %(default)s")
    twins.add_argument(
        "--dtype", default="bf16", choices=sorted(DTYPES), help="of params and gradients (default: %(default)s)"
    )
    twins.add_argument("--steps", type=positive, default=3, help="default: %(default)s")
    twins.add_argument("--seed", type=seed, default=0, help="default: %(default)s")
    twins.set_defaults(run=_twins)


def _twins(options: argparse.Namespace) -> CommandResult:
    from .progress import progress
    from .twins import compare, triton_device

    where = "compiled for this GPU" if triton_device().type == "cuda" else "in Triton's interpreter"
    rule, defaults = recipe(named(options.optimizer))
    groups = [defaults, {**defaults, "lr": 0.5 * float(defaults["lr"])}]
    start = time.perf_counter()
    with progress("comparing steps", options.steps, is_bytes=False) as advance:
        compared = compare(rule, groups, DTYPES[options.dtype], options.steps, options.seed, advance)
    seconds = time.perf_counter() - start
    lines = [
        f"{options.optimizer}, {options.dtype} params and gradients, {options.steps} steps: the Triton kernel {where} "
        "beside the native kernel"
    ]
    for name, (elements, different) in compared.items():
        lines.append(f"  {name:<16} {elements:>6} elements   {different or 'no'} bits differ")
    equal = not any(different for _, different in compared.values())
    verdict = "all bits are equal" if equal else "BITS DIFFER: please report this with the output of this command"
    lines.append(f"{verdict} ({seconds:.1f} s)")
    data = {
        **{name: getattr(options, name) for name in ("optimizer", "dtype", "steps", "seed")},
        "triton": where,
        "equal": equal,
        "seconds": seconds,
        "tensors": {name: {"elements": all_, "different": some} for name, (all_, some) in compared.items()},
    }
    return CommandResult(data, "\n".join(lines), equal)
