"""``shardopt plan``: prints what a training would need."""

import argparse
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config import Options
from ..errors import ShardoptError, UnsupportedVersionError
from ..option import choices_of, planned
from .optimizers import named, names
from .terminal import CommandResult
from .values import chart_file, memory, params, positive

# The fields of Cut.
_CUT = {
    "tensor": "ranks that share each matrix",
    "pipeline": "stages, on other ranks each",
    "experts": "ranks that share the experts of a layer",
    "micro_batches": "backwards of a step",
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def add_plan(commands: Any) -> None:
    """Adds the command to the subparsers of the command line."""
    plan = commands.add_parser(
        "plan",
        help="what each stage would need: bytes on a rank by kind, bytes that move, what fits",
        description="Prints a row for each stage and dtype: bytes on one rank by kind, with their formula, and bytes "
        "that move in a step. Those are what a rank receives (wire), states in host memory that stream "
        "through a GPU (bus), and the disk's. It also names the cheapest combination of stage, master, "
        "formats and tier that fits, shown or not: the one that keeps all of fp32, then moves least. "
        "Activations are not counted. With Muon, matrices of hidden layers take it and all else AdamW. "
        "From Python, shardopt.plan.plan() takes your own module, on the meta device too.",
    )
    model = plan.add_mutually_exclusive_group(required=True)
    model.add_argument(
        "config", metavar="CONFIG", nargs="?", type=Path, help="a Hugging Face config.json, or a folder that holds one"
    )
    model.add_argument("--params", type=params, help="of the model, such as 7B or 7e9, in place of CONFIG")
    plan.add_argument("--ranks", type=positive, default=1, help="of the whole model (default: %(default)s)")
    for name, words in _CUT.items():
        plan.add_argument(_flag(name), type=positive, default=1, help=f"{words} (default: %(default)s)")
    plan.add_argument(
        "--reduce-at-once",
        action="store_true",
        help="at stages 0 and 1, micro-batches run under no_sync(), and reduce_gradients() follows",
    )
    plan.add_argument("--device-memory", type=memory, help="of one rank, such as 80G")
    plan.add_argument("--host-memory", type=memory, help="for one rank, such as 200G (default: any)")
    plan.add_argument("--optimizer", default="AdamW", choices=names(), help="default: %(default)s")
    plan.add_argument("--dtype", choices=("fp32", "bf16"), help="of params (default: both)")
    plan.add_argument(
        "--compute-dtype", choices=("bf16", "fp16"), help="of forward and backward, of fp32 params that are handed over"
    )
    for field, flag in planned(Options):
        choices, default = choices_of(field.type), field.default
        if choices:
            plan.add_argument(
                _flag(field.name), choices=choices, default=default, help=f"{flag.help} (default: %(default)s)"
            )
        else:
            plan.add_argument(
                _flag(field.name), action="store_const", const=flag.value, default=default, help=flag.help
            )
    plan.add_argument(
        "--offload", choices=("cpu", "disk"), help="where masters and states are kept (default: the device)"
    )
    plan.add_argument(
        "--offload-gradients",
        action="store_true",
        help="keep sums of gradients in host memory, where that is possible: stages 2 and 3 with --offload",
    )
    plan.add_argument(
        "--offload-fraction",
        type=_fraction,
        default=1.0,
        metavar="PART",
        help="of masters and states that is offloaded, above 0 and up to 1 (default: %(default)s)",
    )
    plan.add_argument(
        "--offload-early-bytes",
        type=_bytes,
        default=0,
        metavar="BYTES",
        help="of copies that a backward updates for the step to take, with --offload cpu (default: %(default)s)",
    )
    plan.add_argument("--all", action="store_true", help="show every master, format and tier")
    plan.add_argument(
        "--plot", type=chart_file, help="a file for a stacked bar chart of what is shown (.png, .svg, .pdf)"
    )
    plan.set_defaults(run=_plan)


def _fraction(text: str) -> float:
    found = float(text)
    if not 0 < found <= 1:
        raise ValueError
    return found


def _bytes(text: str) -> int:
    found = int(float(text))
    if found < 0:
        raise ValueError
    return found


def _flag(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def _model(options: argparse.Namespace) -> tuple[nn.Module, str]:
    """Returns the model to plan for, on the meta device, and its name."""
    if options.config is None:
        from .decoder import transformer

        return transformer(options.params), ""
    from .hub_config import model_of

    model = model_of(options.config)
    return model, f"{type(model).__name__}, "


def _plan(options: argparse.Namespace) -> CommandResult:
    from ..optim.like import recipe
    from .cut import Cut
    from .plan import Planner, groups_for
    from .plan_report import as_data, chart, found, in_words, table
    from .progress import each_of
    from .ways import WAYS, Tier, every_way, possible

    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise UnsupportedVersionError("--plot draws with Matplotlib, which is missing: pip install matplotlib.")
    model, name = _model(options)
    numel = sum(param.numel() for param in model.parameters())
    kind = named(options.optimizer)
    try:
        cut = Cut(**{field: getattr(options, field) for field in _CUT}, at_once=options.reduce_at_once)
        planner = Planner(model, recipe(kind)[0], groups_for(model, kind), options.ranks, cut=cut)
    except ValueError as error:  # these numbers cannot divide this model
        raise ShardoptError(str(error)) from None
    ways = [way for way in WAYS if options.dtype is None or way.dtype is DTYPES[options.dtype]]
    if options.compute_dtype is not None:
        compute_dtype = DTYPES[options.compute_dtype]
        ways = [way for way in ways if way.has_module and way.dtype is torch.float32]
        ways = [replace(way, compute_dtype=compute_dtype) for way in ways]
        if not ways:
            raise ShardoptError(
                f"omit --dtype {options.dtype}: --compute-dtype {options.compute_dtype} is of params that are handed "
                "over in fp32."
            )
    given: dict[str, Any] = {field.name: getattr(options, field.name) for field, _ in planned(Options)}
    tier: Tier = "device" if options.offload is None else "host" if options.offload == "cpu" else "disk"
    moved: dict[str, Any] = {"fraction": options.offload_fraction, "early_bytes": options.offload_early_bytes}
    moved["sums_rest"] = options.offload_gradients
    asked = [possible(replace(way, **given, **moved, tier=tier)) for way in ways]
    # Formats and tiers are searched; other options are kept as given.
    kept = {field.name: given[field.name] for field, _ in planned(Options) if not choices_of(field.type)}
    ways = [replace(way, **kept) for way in ways]
    is_searched = options.all or options.device_memory is not None
    every = [planner.need(way) for way in each_of(every_way(ways), "laying out")] if is_searched else []
    shown = every if options.all else [planner.need(way) for way in each_of(asked, "laying out")]
    limits = options.device_memory, options.host_memory
    text = f"{options.optimizer}, {name}{numel:,} params, {options.ranks} ranks"
    text += f" ({cut}; {planner.numel:,} params on one)" if str(cut) else ""
    text += f"; GB on one rank\n\n{table(shown, planner.numel, *limits)}"
    if options.plot is not None:
        chart(shown, options.device_memory, options.plot)
        print(f"wrote {options.plot}", file=sys.stderr)
    data = {"optimizer": options.optimizer, "params": numel, "ranks": options.ranks}
    data |= {"params on a rank": planner.numel}
    data |= {"ways": [as_data(need, options.optimizer, *limits) for need in shown]}
    if options.device_memory is None:
        return CommandResult(data, text)
    best = found(every, *limits)
    data |= {"found": {title: as_data(need, options.optimizer, *limits) for title, need in best.items()}}
    return CommandResult(data, f"{text}\n\n{in_words(best, every, options.optimizer, limits[0])}", is_yes=bool(best))
