"""The command line: ``python -m shardopt <command>``."""

import argparse
import inspect
import sys
import time
from collections.abc import Callable, Sequence

import torch

import shardopt
from shardopt.checkpoint.commands import add_commands, run


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; the exit code is 0 when all is well."""
    parser = argparse.ArgumentParser(prog="python -m shardopt", description=shardopt.__doc__)
    parser.add_argument("--version", action="version", version=f"shardopt {shardopt.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    twins = commands.add_parser(
        "twins",
        help="take a step with the Triton kernel and one with the native kernel, and compare every bit",
        description="Takes a few steps of one rule twice, with the Triton kernel (compiled where there is a GPU, in "
        "Triton's interpreter elsewhere) and with the native CPU kernel, and compares every bit of params, masters and "
        "states. Exit code 1 if any differs.",
    )
    twins.add_argument("--optimizer", default="AdamW", choices=sorted(_optimizers()), help="default: %(default)s")
    twins.add_argument(
        "--dtype", default="bf16", choices=sorted(_DTYPES), help="of params and gradients (default: %(default)s)"
    )
    twins.add_argument("--steps", type=int, default=3, help="default: %(default)s")
    twins.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    twins.set_defaults(run=lambda options: _twins(options.optimizer, options.dtype, options.steps, options.seed))
    add_commands(commands)
    return run(parser.parse_args(arguments))


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _optimizers() -> dict[str, Callable[..., shardopt.ShardedOptimizer]]:
    classes = (getattr(shardopt, name) for name in shardopt.__all__)
    return {
        each.__name__.removeprefix("Sharded"): each
        for each in classes
        if inspect.isclass(each)
        and issubclass(each, shardopt.ShardedOptimizer)
        and each is not shardopt.ShardedOptimizer
    }


def _twins(optimizer: str, dtype: str, steps: int, seed: int) -> int:
    from .twins import compare, triton_device

    where = "compiled for this GPU" if triton_device().type == "cuda" else "in Triton's interpreter"
    instance = _optimizers()[optimizer]([torch.zeros(1)])
    groups = [dict(instance.defaults), {**instance.defaults, "lr": 0.5 * float(instance.defaults["lr"])}]
    start = time.perf_counter()
    compared = compare(instance.rule, groups, _DTYPES[dtype], steps, seed)
    print(
        f"{optimizer}, {dtype} params and gradients, {steps} steps: the Triton kernel {where} beside the native kernel"
    )
    for each in compared:
        print(f"  {each.tensor:<16} {each.elements:>6} elements   {each.different or 'no'} bits differ")
    equal = not any(each.different for each in compared)
    verdict = "all bits are equal" if equal else "BITS DIFFER: please report this with the output of this command"
    print(f"{verdict} ({time.perf_counter() - start:.1f} s)")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
