"""How much of the memory's bandwidth the fused updates reach, beside torch's own optimizers and other libraries.

An update is bound by memory, so its yardstick is a large copy: `dst.copy_(src)`, bytes read plus written over time, by
the same threads. Every number is the median over pairs of runs, one of shardopt and one of its rival right after the
other, so that a machine that is slow for a minute is slow for both; in brackets stands its 95 % interval.

    python bench/kernels.py                             every rule, the GPU where there is one
    python bench/kernels.py --rules AdamW Lion          only these
    python bench/kernels.py --quick --elements 4194304  does it run?

Reading the table:

* `of copy`: above 100 % is possible on a CPU, as a copy has to read the cache lines that it is about to overwrite,
  which the count of its bytes leaves out; an update in place does not.
* `kernel`: one launch over one shard, tables ready. `step()`: all of `optimizer.step()` in one process, with the look
  for non-finite gradients that torch's optimizers do not take; `propagate` is `step()` without that look.
* `x torch fused` and the like: time of the rival over that of shardopt; above 1 shardopt is faster. It is the kernel
  that is compared, and in the rows `step()` the whole step.
* bf16 and fp16: the gradient comes and the param leaves in 16 bits; masters and states are fp32.
"""

import argparse
import gc
import importlib
import importlib.util
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from common import (
    Median,
    bytes_per_element,
    describe_machine,
    median_of,
    parser_of,
    pick_device,
    ratios,
    show,
    write_result,
)
from torch import Tensor
from torch.nn import Parameter
from tqdm import tqdm

import shardopt
from shardopt.kernels.formats import format_of
from shardopt.kernels.launch import backend_of
from shardopt.kernels.reductions import new_totals
from shardopt.kernels.spec import Spec
from shardopt.kernels.tables import BLOCK, Factors, Gradients, Streams, Tables
from shardopt.rules.passes import passes_of

Run = Callable[[], Any]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SETTLE = 0.01  # seconds before each timed run on a CPU
STEP = 10  # whose scalars the kernel is timed with: RAdam divides by the second moment from step 6 on


@dataclass(frozen=True)
class Case:
    """One optimizer with the flags that decide what its kernel reads and writes."""

    name: str
    ours: type[shardopt.ShardedOptimizer]
    keywords: Mapping[str, Any] = field(default_factory=dict)
    has_fused: bool = False  # whether torch offers fused=True on the CPU

    @property
    def torch_class(self) -> Any:
        """torch's class of the same name; None where it has none."""
        return getattr(torch.optim, self.ours.__name__.removeprefix("Sharded"), None)


CASES = (
    Case("AdamW", shardopt.ShardedAdamW, has_fused=True),
    Case("Adam", shardopt.ShardedAdam, has_fused=True),
    Case("AdamW amsgrad", shardopt.ShardedAdamW, {"amsgrad": True}, has_fused=True),
    Case("SGD", shardopt.ShardedSGD, has_fused=True),
    Case("SGD momentum", shardopt.ShardedSGD, {"momentum": 0.9}, has_fused=True),
    Case("Adagrad", shardopt.ShardedAdagrad, has_fused=True),
    Case("RMSprop", shardopt.ShardedRMSprop),
    Case("RMSprop centered", shardopt.ShardedRMSprop, {"centered": True, "momentum": 0.9}),
    Case("NAdam", shardopt.ShardedNAdam),
    Case("RAdam", shardopt.ShardedRAdam),
    Case("Adamax", shardopt.ShardedAdamax),
    Case("Adadelta", shardopt.ShardedAdadelta),
    Case("ASGD", shardopt.ShardedASGD),
    Case("Rprop", shardopt.ShardedRprop),
    Case("Lion", shardopt.ShardedLion),
)


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__ or "")
    names = [case.name for case in CASES]
    parser.add_argument("--rules", nargs="+", choices=names, default=names, metavar="RULE", help=", ".join(names))
    parser.add_argument(
        "--dtypes", nargs="+", choices=tuple(DTYPES), default=list(DTYPES), help="of param and gradient"
    )
    parser.add_argument("--elements", type=int, default=1 << 26, help="of all params together")
    parser.add_argument("--param-elements", type=int, default=1 << 20, help="of one param: a 1024 x 1024 layer")
    parser.add_argument("--pairs", type=int, default=30, help="pairs of runs behind each ratio")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch and of shardopt")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where the update runs")
    args = parser.parse_args()
    if args.quick:
        args.pairs = min(args.pairs, 5)
    for name in ("elements", "param_elements", "pairs", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return args


# ---- Clocks ----------------------------------------------------------------------------------------------------------


class Clock:
    """Times runs on one device."""

    def __init__(self, device: torch.device):
        self.device = device
        # A GPU is handed several runs at once: it would otherwise wait for Python between two short kernels.
        self.repeats = 10 if device.type == "cuda" else 1

    def seconds(self, run: Run) -> float:
        """One run's time."""
        if self.device.type != "cuda":
            # OpenMP's threads spin for some milliseconds after torch's last operation, and would take a core from
            # whatever is timed next; now everyone starts from threads that sleep.
            time.sleep(SETTLE)
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        before.record()
        for _ in range(self.repeats):
            run()
        after.record()
        after.synchronize()
        return float(before.elapsed_time(after)) / 1000 / self.repeats

    def pairs(self, ours: Run, rival: Run, count: int) -> tuple[list[float], list[float]]:
        """Times both, one right after the other, ``count`` times; they take turns in going first."""
        for run in (ours, rival):
            for _ in range(2):  # compiles, allocates states, touches pages
                run()
        times: tuple[list[float], list[float]] = ([], [])
        for pair in range(count):
            for index in (0, 1) if pair % 2 else (1, 0):
                times[index].append(self.seconds((ours, rival)[index]))
        return times


@dataclass(frozen=True)
class Timed:
    """A subject against one rival."""

    seconds: Median
    rival_seconds: Median
    speedup: Median  # the rival's time over the subject's


@dataclass(frozen=True)
class Subject:
    """What is measured: a run, the bytes that it has to move, and its rivals, made when their turn comes."""

    name: str
    run: Run
    nbytes: int
    rivals: Iterable[tuple[str, Callable[[], Run]]] = ()


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    case: str
    dtype: str
    subject: str
    seconds: Median
    gigabytes_per_second: float
    of_copy: Median  # 1.0 is the copy's bandwidth
    speedups: dict[str, Timed]


class Bench:
    """The yardstick, and how a subject is held against it."""

    def __init__(self, args: argparse.Namespace, device: torch.device):
        self.args = args
        self.clock = Clock(device)
        # Large enough that no cache holds it, however small the run.
        numel = (1 << 30) // 4
        self.source, self.target = (torch.full((numel,), value, device=device) for value in (1.0, 2.0))
        self.copy_bytes = 2 * self.source.nbytes
        self.copy_seconds: list[float] = []
        self.failed: dict[str, str] = {}  # rivals that could not run, and why

    def copy(self) -> None:
        self.target.copy_(self.source)

    def measure(self, case: str, dtype: str, subject: Subject) -> Row:
        mine, copies = self.clock.pairs(subject.run, self.copy, self.args.pairs)
        self.copy_seconds += copies
        seconds = median_of(mine)
        per_byte = [time / subject.nbytes for time in mine]
        of_copy = ratios([time / self.copy_bytes for time in copies], per_byte)
        speedups = {}
        for name, make in subject.rivals:
            try:
                run = make()
                run()
            except Exception as error:  # a form that this device lacks, a library that does not work here
                self.failed[f"{case} {dtype}: {name}"] = f"{type(error).__name__}: {error}".splitlines()[0]
                continue
            ours, theirs = self.clock.pairs(subject.run, run, self.args.pairs)
            speedups[name] = Timed(median_of(ours), median_of(theirs), ratios(theirs, ours))
            del run
            gc.collect()  # a rival's states are as large as ours
        return Row(case, dtype, subject.name, seconds, subject.nbytes / seconds.median / 1e9, of_copy, speedups)


# ---- Subjects --------------------------------------------------------------------------------------------------------


def make_params(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> list[Parameter]:
    """Params of one size with gradients; the same values for everyone who asks."""
    torch.manual_seed(0)
    count = math.ceil(args.elements / args.param_elements)
    params = []
    for index in range(count):
        numel = min(args.param_elements, args.elements - index * args.param_elements)
        param = Parameter(torch.randn(numel, device=device).mul_(0.02).to(dtype))
        param.grad = torch.randn(numel, device=device).mul_(1e-3).to(dtype)
        params.append(param)
    return params


def grads_of(params: Sequence[Parameter]) -> list[Tensor]:
    return [param.grad for param in params if param.grad is not None]


@dataclass(frozen=True)
class Kernel:
    """One launch over one shard, with its tables ready: what a user of ``kernels.launch`` has in hand."""

    spec: Spec
    grads: list[Tensor]  # kept alive: the tables only point to them
    launch: Run
    add_totals: Run
    count_nonfinite: Run

    @staticmethod
    def of(case: Case, params: Sequence[Parameter]) -> "Kernel":
        """A shard that holds copies of these params, and reads their gradients where they are."""
        device, dtype = params[0].device, params[0].dtype
        grads = grads_of(params)
        optimizer = case.ours(params, **case.keywords)
        group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
        variant = optimizer.rule.variant(group)
        spec = Spec(passes_of(variant), format_of(dtype, "a param"), format_of(grads[0].dtype, "a gradient"))
        values, _ = optimizer.rule.evaluate(variant, group, STEP, carried_before(optimizer, group))
        scalars = torch.tensor([values] * len(params), dtype=torch.float32)
        flat = torch.cat([F.pad(param.detach(), (0, -param.numel() % BLOCK)) for param in params])
        states = tuple(torch.zeros_like(flat, dtype=torch.float32) for _ in variant.states)
        streams = Streams(flat, flat.float() if spec.has_master else None, states)
        gradients = table_of(grads)
        backend = backend_of(device)
        backend.prepare(spec, device, gradients.aligned)
        return Kernel(
            spec,
            grads,
            partial(backend.run, spec, 0, streams, Tables(gradients, scalars)),
            partial(backend.add_totals, spec.grad, gradients, Factors(), new_totals(gradients.num_rows, device)),
            partial(backend.count_nonfinite, spec.grad, gradients, torch.zeros(1, dtype=torch.int64, device=device)),
        )


def table_of(grads: Sequence[Tensor]) -> Gradients:
    """The kernels' table for params that lie one behind the other, each from a block on."""
    blocks, rows, start = [], [], 0
    for row, grad in enumerate(grads):
        num_blocks = math.ceil(grad.numel() / BLOCK)
        blocks.append(torch.full((num_blocks,), row, dtype=torch.int32))
        rows.append((grad.data_ptr() - start * grad.element_size(), start + grad.numel()))
        start += num_blocks * BLOCK
    device = grads[0].device
    aligned = all(address % 16 == 0 for address, _ in rows)
    return Gradients(torch.cat(blocks).to(device), torch.tensor(rows, dtype=torch.int64, device=device), aligned)


def carried_before(optimizer: shardopt.ShardedOptimizer, group: Mapping[str, Any]) -> dict[str, float]:
    """What a param carries into ``STEP``."""
    carried: dict[str, float] = {}
    for step in range(1, STEP):
        _, carried = optimizer.rule.evaluate(optimizer.rule.variant(group), group, step, carried)
    return carried


def torch_forms(case: Case, args: argparse.Namespace, device: torch.device) -> Iterator[tuple[str, Callable[[], Run]]]:
    """Every form in which torch offers this optimizer, on fp32 params of its own."""
    forms: dict[str, dict[str, bool]] = {"torch foreach": {"foreach": True}, "torch loop": {"foreach": False}}
    if case.has_fused:
        forms = {"torch fused": {"fused": True}, **forms}
    for name, form in forms.items():
        if case.torch_class is not None:
            yield name, partial(torch_step, case, args, device, form)


def torch_step(case: Case, args: argparse.Namespace, device: torch.device, form: Mapping[str, Any]) -> Run:
    step: Run = case.torch_class(make_params(args, device, torch.float32), **case.keywords, **form).step
    return step


def with_casts(
    make_step: Callable[[list[Parameter]], Run], args: argparse.Namespace, device: torch.device, dtype: torch.dtype
) -> Run:
    """What others do for 16-bit params: widen the gradients, step on fp32 masters, narrow into the params.

    The fp32 gradients are allocated once, which is kinder than what a training loop does.
    """
    params = make_params(args, device, dtype)
    masters = [Parameter(param.detach().float()) for param in params]
    for master in masters:
        master.grad = torch.zeros_like(master)
    step = make_step(masters)
    wide, narrow = grads_of(masters), grads_of(params)
    sources, targets = [master.detach() for master in masters], [param.detach() for param in params]

    def run() -> None:
        torch._foreach_copy_(wide, narrow)
        step()
        torch._foreach_copy_(targets, sources)

    return run


def deepspeed_step(params: list[Parameter]) -> Run:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it says of its own insides
        adam = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
        step: Run = adam(params, lr=1e-3, weight_decay=1e-2, adamw_mode=True).step
    return step


def flashoptim_step(params: list[Parameter]) -> Run:
    step: Run = importlib.import_module("flashoptim").FlashAdamW(params, lr=1e-3, master_weight_bits=32).step
    return step


def bitsandbytes_step(bits: int, params: list[Parameter]) -> Run:
    optim = importlib.import_module("bitsandbytes").optim
    step: Run = optim.AdamW(params, lr=1e-3, optim_bits=bits).step
    return step


def is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def other_libraries(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Iterator[Any]:
    """AdamW of other libraries, where they are installed."""
    own = partial(make_params, args, device, dtype)
    if device.type == "cpu" and is_installed("deepspeed"):
        if dtype == torch.float32:
            yield "DeepSpeed", lambda: deepspeed_step(own())
        else:
            yield "casts + DeepSpeed", partial(with_casts, deepspeed_step, args, device, dtype)
    if device.type == "cuda" and is_installed("flashoptim"):
        yield "FlashOptim (int8 states)", lambda: flashoptim_step(own())
    if device.type == "cuda" and is_installed("bitsandbytes"):
        yield "bitsandbytes 32-bit", lambda: bitsandbytes_step(32, own())
        yield "bitsandbytes 8-bit", lambda: bitsandbytes_step(8, own())


def rivals_of(case: Case, args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Iterator[Any]:
    if dtype == torch.float32:
        yield from torch_forms(case, args, device)
    elif case.has_fused:

        def fused(masters: list[Parameter]) -> Run:
            step: Run = case.torch_class(masters, **case.keywords, fused=True).step
            return step

        yield "casts + torch fused", partial(with_casts, fused, args, device, dtype)
    if case.name == "AdamW":
        yield from other_libraries(args, device, dtype)


def subjects(case: Case, args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Iterator[Subject]:
    """The kernel of one rule; for AdamW also the whole step and the passes that look at gradients."""
    params = make_params(args, device, dtype)
    kernel = Kernel.of(case, params)
    nbytes = bytes_per_element(kernel.spec) * args.elements
    yield Subject("kernel", kernel.launch, nbytes, rivals_of(case, args, device, dtype))
    if case.name != "AdamW":
        return
    norm = partial(torch.nn.utils.get_total_norm, grads_of(params))
    grad_bytes = kernel.spec.grad.itemsize * args.elements
    yield Subject("block sums", kernel.add_totals, grad_bytes, [("torch norm", lambda: norm)])
    yield Subject("count non-finite", kernel.count_nonfinite, grad_bytes)
    del kernel
    gc.collect()
    optimizer = case.ours(params, **case.keywords)
    form = "torch fused" if dtype == torch.float32 else "casts + torch fused"
    fused = [(name, make) for name, make in rivals_of(case, args, device, dtype) if name == form]
    yield Subject("step()", optimizer.step, nbytes, fused)
    optimizer.close()
    tuning = shardopt.Tuning(nonfinite="propagate")
    optimizer = case.ours(params, **case.keywords, tuning=tuning)
    yield Subject("step() propagate", optimizer.step, nbytes, fused)
    optimizer.close()


# ---- Launches --------------------------------------------------------------------------------------------------------


def kernels_launched(run: Run) -> list[str]:
    """Names of the GPU kernels that one run launches."""
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        run()
        torch.cuda.synchronize()
    return [
        event.name
        for event in trace.events()
        if str(event.device_type).endswith("CUDA") and not event.name.startswith(("Memcpy", "Memset"))
    ]


def count_launches(args: argparse.Namespace, device: torch.device) -> dict[str, list[str]]:
    """What the update of one shard, and a whole step, put on the GPU."""
    params = make_params(args, device, torch.float32)
    kernel = Kernel.of(CASES[0], params)
    launched = {"kernel": kernels_launched(kernel.launch)}
    optimizer = shardopt.ShardedAdamW(params)
    launched["step()"] = kernels_launched(optimizer.step)
    optimizer.close()
    return launched


# ---- Report ----------------------------------------------------------------------------------------------------------


def columns_of(row: Row) -> list[str]:
    speedups = [f"{timed.speedup}x {name}" for name, timed in row.speedups.items()]
    median, low, high = (100 * value for value in (row.of_copy.median, row.of_copy.low, row.of_copy.high))
    return [
        row.case,
        row.dtype,
        row.subject,
        f"{row.seconds.median * 1e3:.3g}",
        f"{row.gigabytes_per_second:.3g}",
        f"{median:.0f} % [{low:.0f}, {high:.0f}]",
        "\n".join(speedups),
    ]


def as_json(row: Row) -> dict[str, Any]:
    return {
        "rule": row.case,
        "dtype": row.dtype,
        "what": row.subject,
        "seconds": row.seconds,
        "GB/s": round(row.gigabytes_per_second, 2),
        "of copy": row.of_copy,
        "speedups": {
            name: {"x": timed.speedup, "seconds": timed.rival_seconds, "shardopt seconds": timed.seconds}
            for name, timed in row.speedups.items()
        },
    }


def planned(args: argparse.Namespace) -> Iterator[tuple[Case, str]]:
    """fp16 is AdamW's alone: it differs from bf16 in two conversions, whatever the rule."""
    for dtype in args.dtypes:
        for case in CASES:
            if case.name in args.rules and (dtype != "fp16" or case.name == "AdamW"):
                yield case, dtype


def main() -> None:
    args = parse_args()
    device = pick_device(args.device)
    torch.set_num_threads(args.threads)
    bench = Bench(args, device)
    rows: list[Row] = []
    progress = tqdm(list(planned(args)), unit="rule", disable=None)
    for case, dtype in progress:
        progress.set_description(f"{case.name} {dtype}")
        for subject in subjects(case, args, device, DTYPES[dtype]):
            rows.append(bench.measure(case.name, dtype, subject))
        gc.collect()
    copy = median_of([bench.copy_bytes / seconds / 1e9 for seconds in bench.copy_seconds])
    results: dict[str, Any] = {"copy GB/s": copy, "rows": [as_json(row) for row in rows], "not run": bench.failed}
    title = (
        f"{describe_machine(device)['device']}, {args.threads} threads, {args.elements:,} elements; copy: {copy} GB/s"
    )
    columns = ("rule", "dtype", "what", "ms", "GB/s", "of copy", "time of others over shardopt's")
    show(title, columns, [columns_of(row) for row in rows])
    for rival, reason in bench.failed.items():
        print(f"not run: {rival}: {reason}")
    if device.type == "cuda":
        results["launches"] = count_launches(args, device)
        for what, names in results["launches"].items():
            print(f"GPU kernels launched by one {what}: {len(names)}: {', '.join(names)}")
    else:
        print(f"DeepSpeed's CPU Adam: {'measured' if is_installed('deepspeed') else 'not installed'}")
    write_result("kernels", args, device, results)


if __name__ == "__main__":
    main()
