"""Predict when each engine of a GPU's machine works in a training step. Nothing is measured: a prediction.

    PYTHONPATH=. python bench/timeline.py                             an H100 on PCIe 5; no GPU is needed
    PYTHONPATH=. python bench/timeline.py --machine h200              or h100-nvlink, a100, 4090
    PYTHONPATH=. python bench/timeline.py --training stage-2-ring --trace step.json --svg step.svg

The step runs on the stand-ins of CUDA and NCCL (``tests/support/streams``), which record each operation, copy and
collective with its bytes and what it waits for. A work then takes its bytes over a rate of the machine, or the flops of
its product over another, and each engine does one at a time (``tests/support/timeline``). The model is smaller than the
one that is predicted by the same factor on each side of each matrix, so bytes grow by the square of it.

* ``step ms``: from one step's end to the next one's. ``over the bound``: over the busiest engine of that step.
* ``critical path``: what the end waited for, by name; a share of the step.
* on an H100, beside each committed result of one, the prediction and its error. Rates of the machine come from the
  results of the bus and the kernels alone; training steps, moves and steps with states in host memory are held out.
  The host's time of a training's phases is that of ``bench/host.py`` on a null device of another machine, times one
  factor, which was fitted to one result: the step of stage 2.

The H100 ran earlier commits. ``--record FILE`` writes what stand-ins record of the commit at hand, and ``--held-out``
predicts each result from the record of its own commit, and from the times of ``bench/host.py`` of that commit: both
are made by ``bench/earlier.py``. All times are to come from one machine that did nothing else.
"""

import argparse
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import RESULTS, parser_of, show, write_result
from gpt import GPT
from host import DDP, seconds_of_driver
from svg import Picture
from torch import nn
from torch.nn import Parameter

from shardopt import Offload, ShardedAdamW, Tuning
from tests.support.streams import Machine
from tests.support.streams.record import ENGINES, Cost, Work
from tests.support.timeline.hardware import MACHINES, Hardware
from tests.support.timeline.schedule import Schedule
from tests.support.timeline.trainings import Calls, Round, drawn, record, timed
from tests.support.training import one_thread

LARGER = 32
MI = 1 << 20
CHUNKS = 64  # of an update of bench/host.py
BLOCKS = 12  # of the model of bench/host.py that has as many params as this one
Make = Callable[[Machine], Calls]


# ---- What is timed ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """Calls on a machine.

    Attributes:
        host: the row of ``bench/host.py`` that its host's time is taken from; None: its updates and moves have one.
        chunks: the update there whose chunks its own are; None: states lie on the device.
        waits: True if the measurement waits for the device after each call.
    """

    make: Make
    world: int = 1
    host: str | None = None
    chunks: str | None = None
    waits: bool = False


def tuning(**more: Any) -> Tuning:
    usual = Tuning()
    bucket = usual.bucket_bytes_of(torch.device("cuda"), True)
    return Tuning(bucket_bytes=bucket // LARGER**2, chunk_bytes=usual.chunk_bytes // LARGER**2, **more)


def gpt(stage: int | None, **keywords: Any) -> Make:
    """The GPT of 219M params that the H100 trained, of 4 times 512 tokens; ``stage=None``: torch's fused AdamW."""

    def make(machine: Machine) -> Calls:
        torch.manual_seed(0)
        model: nn.Module = machine.move(GPT(12, 1024 // LARGER, 16, 32768 // LARGER, 512 // LARGER).bfloat16())
        if stage is None:
            optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        else:
            group = {} if machine.group is None else {"process_group": machine.group}
            optimizer = ShardedAdamW(model, lr=1e-3, stage=stage, tuning=tuning(), **group, **keywords)
        tokens = machine.tensor(torch.randint(32768 // LARGER, (4, 512 // LARGER + 1)))
        kept: list[torch.Tensor] = []

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()

        return [
            ("forward", lambda: kept.append(model(tokens))),
            ("backward", lambda: kept.pop().backward()),
            ("step", update),
        ]

    return make


def flat(moves: bool = False, **keywords: Any) -> Make:
    """64M elements in 4 params, as ``bench/bus.py`` and ``bench/offload.py`` update and move them."""

    def make(machine: Machine) -> Calls:
        params = [Parameter(machine.tensor(torch.ones(16 * MI // LARGER**2).bfloat16())) for _ in range(4)]
        for param in params:
            param.grad = machine.tensor(torch.ones(param.numel()).bfloat16())
        optimizer = ShardedAdamW(params, lr=1e-3, tuning=tuning(nonfinite="propagate"), **keywords)
        if not moves:
            return [("step", optimizer.step)]
        return [
            ("step, states on the device", optimizer.step),
            ("offload", lambda: optimizer.offload("cpu")),
            ("step, states offloaded", optimizer.step),
            ("reload", optimizer.reload),
        ]

    return make


RING, CPU_STEP = Offload(step="gpu"), Offload(step="cpu")
TRAININGS = {
    "ddp": Training(gpt(None), host=DDP),
    **{f"stage-{stage}": Training(gpt(stage), host=f"stage {stage}") for stage in (0, 1, 2)},
    "stage-3": Training(gpt(3), host="stage 3, keep_below=0"),
    "stage-2-ring": Training(gpt(2, offload=RING), host="stage 2", chunks="update-ring"),
    "stage-2-cpu-step": Training(gpt(2, offload=CPU_STEP), host="stage 2", chunks="update-cpu-step"),
    **{f"stage-{stage}-of-8": Training(gpt(stage), 8, host=f"stage {stage}") for stage in (1, 2)},
    "stage-3-of-8": Training(gpt(3), 8, host="stage 3, keep_below=0"),
    "stage-2-ring-of-8": Training(gpt(2, offload=RING), 8, host="stage 2", chunks="update-ring"),
    "update-ring": Training(flat(offload=RING), waits=True),
    "update-cpu-step": Training(flat(offload=CPU_STEP), waits=True),
    "moves": Training(flat(moves=True), waits=True),
}

# What an H100 measured: file, path in it, and the training and call that predict it ("": the whole round).
_TRAININGS = "train-bf16-1-ranks-quick"
# To one of them the host's speed is fitted. Not to DDP: its host runs C++ for the most part, that of a stage Python,
# and machines differ in how fast they are at each.
FITTED = (_TRAININGS, ("engines", "module-2", "step s", "median"))
HELD_OUT = [
    *(
        (_TRAININGS, ("engines", engine, "step s", "median"), training, "")
        for engine, training in (
            ("ddp", "ddp"),
            ("module-0", "stage-0"),
            ("module-1", "stage-1"),
            ("module-3", "stage-3"),
            ("module-2-cpu", "stage-2-ring"),
        )
    ),
    ("bus", ("ways", "step='gpu'", "s", "median"), "update-ring", ""),
    ("bus", ("ways", "step='cpu'", "s", "median"), "update-cpu-step", ""),
    *(
        ("offload-moves", ("moves", "s", call, "median"), "moves", call)
        for call in ("step, states on the device", "offload", "step, states offloaded", "reload")
    ),
]
NOT_PREDICTED = {
    "FSDP2, DDP's own reducer": "they run in C++ of torch, which the stand-ins do not see: DDP is the plain "
    "model, with the host's time of DDP",
    "DDP + shardopt stage 1": "likewise, and its host's time was not measured apart",
    "the host of the H100": "its time is that of another CPU on a null device (bench/host.py), times one factor; what "
    "cuBLAS and cuDNN take on the host for each call is not in it",
    "step='cpu'": "the native kernel is taken to move bytes as fast as a copy in host memory, on all cores",
    "reload()": "the commit that was measured gave registered memory back, which takes no time here",
    "commits": "beside results of an H100 stand the commit at hand, or with --held-out the commits that it ran",
    "registering memory": "its rate (GB/s of pinning) is assumed: no result tells it apart from the move that it is in",
    "pageable copies": "a copy from memory that is not pinned is as fast here as one from pinned memory",
    "two kernels at a time": "kernels of several streams run one after the other",
    "trials": 'step="auto" tries both ways in its first steps; shown is step="gpu"',
}


def host_times(name: str, found: Round, hardware: Hardware, commit: str = "") -> dict[str, int]:
    """Nanoseconds of the host by call, as ``bench/host.py`` measured them for a GPU.

    A training whose states come and go in chunks takes for each of them what an update without a model takes.

    Args:
        name: of a training; of one with a model, the times are those of a model of as many params.
        found: what was recorded of it.
        commit: an earlier one that they are of.
    """
    of, training = f"host-of-{commit}-" if commit else "host-", TRAININGS[name]
    moves = {
        key: value["least seconds"] + value["driver"]
        for key, value in _newest(f"{of}moves-null").items()
        if "driver" in value
    }
    if training.host is None:
        times = {key.partition(", ")[2]: seconds for key, seconds in moves.items() if key.startswith(f"{name}, ")}
    else:
        row, phases = _newest(f"{of}null-1-ranks")[training.host], ("forward", "backward", "step")
        seconds, calls = row["least seconds"][0], row["calls"][f"{BLOCKS} blocks"]
        times = {phase: seconds[phase] + seconds_of_driver({phase: calls[phase]}) for phase in phases}
        if training.chunks and moves:
            away, here = moves[f"{training.chunks}, step"], moves["moves, step, states on the device"]
            times["step"] += (away - here) * _num_chunks(found) / CHUNKS
    return {call: int(1e9 * each * hardware.host) for call, each in times.items()}


def _num_chunks(found: Round) -> int:
    """Those that the second round updates."""
    works = found.works[found.ends[len(found.names) - 1] :]
    return sum(each.what in ("step_kernel", "an update on the CPU") for each in works)


def _newest(name: str) -> dict[str, Any]:
    """Results of this benchmark; none: calls take what the machine says of each."""
    paths = sorted(RESULTS.glob(f"*-{name}-*.json"))
    found: dict[str, Any] = json.loads(paths[-1].read_text())["results"] if paths else {}
    return found


def recorded(name: str) -> Round:
    training = TRAININGS[name]
    with one_thread(), Machine(training.world) as machine:
        return record(machine, training.make(machine), larger=LARGER)


# ---- What is printed -------------------------------------------------------------------------------------------------


def predict(name: str, found: Round, hardware: Hardware, commit: str = "") -> dict[str, Any]:
    """Returns a training's times; ``commit``: an earlier one, which was recorded."""
    training = TRAININGS[name]
    host = host_times(name, found, hardware, commit)
    steps = timed(found, hardware, training.waits, host)
    nanoseconds = sum(each.nanoseconds for each in steps.values())
    busy: Counter[str] = Counter()
    for each in steps.values():
        busy.update(each.busy)
    plan = drawn(found, hardware, host)
    share: Counter[str] = Counter()
    for number in plan.critical_path():
        share[f"{plan.works[number].engine}: {plan.works[number].name}"] += plan.works[number].nanoseconds
    return {
        "seconds": nanoseconds / 1e9,
        "over the bound": nanoseconds / max(busy.values()),
        "calls": {call: each.nanoseconds / 1e9 for call, each in steps.items()},
        "busy": {engine: busy[engine] / nanoseconds for engine in ENGINES if busy[engine]},
        "critical path": {of: time / plan.makespan for of, time in share.most_common(5)},
    }


def measured(kind: str, where: Sequence[str]) -> tuple[float, str]:
    """Returns what an H100 measured, and the commit that it ran."""
    content: Any = json.loads(sorted(RESULTS.glob(f"*-{kind}-nvidia-h100*.json"))[-1].read_text())
    found, commit = content["results"], content["machine"]["commit"][:7]
    for key in where:
        found = found[key]
    return found, commit


def fitted(hardware: Hardware, stage_2: Round, commit: str = "") -> Hardware:
    """Returns the machine with the factor of its host's time by which stage 2 takes what an H100 measured."""
    seconds, _ = measured(*FITTED)
    low, high = 0.1, 10.0
    for _ in range(30):
        middle = replace(hardware, host=(low + high) / 2)
        if predict("stage-2", stage_2, middle, commit)["seconds"] < seconds:
            low = middle.host
        else:
            high = middle.host
    return replace(hardware, host=round(low, 4))


def beside_results(prediction_of: Callable[[str, str], dict[str, Any]]) -> list[dict[str, Any]]:
    """``prediction_of``: takes a training and the commit that was measured."""
    rows = []
    for kind, where, training, call in HELD_OUT:
        seconds, commit = measured(kind, where)
        found = prediction_of(training, commit)
        predicted = found["calls"][call] if call else found["seconds"]
        rows.append(
            {
                "result": f"{kind}: {where[1] if kind != 'offload-moves' else call}",
                "commit": commit,
                "measured s": seconds,
                "predicted s": predicted,
                "error": predicted / seconds - 1,
                "busy": found["busy"],
            }
        )
    return rows


def read_records(path: Path) -> dict[str, Round]:
    """Returns what ``--record`` wrote, by training."""

    def work(what: str, where: str | None, cost: dict[str, Any], after: list[int], pinned: int) -> Work:
        return Work(what, where, Cost(**cost), tuple(after), pinned)

    return {
        name: Round(tuple(found["names"]), [work(**each) for each in found["works"]], tuple(found["ends"]))
        for name, found in json.loads(path.read_text()).items()
    }


def held_out(directory: Path) -> dict[str, Any]:
    """Predicts each result of the H100 from the record of the commit that it ran, and from that commit's host times."""

    @cache
    def records_of(commit: str) -> dict[str, Round]:
        return read_records(directory / f"{commit}.json")

    _, commit = measured(*FITTED)
    hardware = fitted(MACHINES["h100-pcie5"], records_of(commit)["stage-2"], commit)
    rows = beside_results(lambda training, of: predict(training, records_of(of)[training], hardware, of))
    return {"hardware": asdict(hardware), **compared(rows)}


def chrome_trace(plan: Schedule) -> dict[str, Any]:
    """For chrome://tracing and Perfetto: microseconds, a row for each engine."""
    return {
        "traceEvents": [
            {
                "name": work.name,
                "ph": "X",
                "pid": 0,
                "tid": work.engine,
                "ts": start / 1e3,
                "dur": work.nanoseconds / 1e3,
            }
            for work, start in zip(plan.works, plan.starts, strict=True)
            if work.nanoseconds
        ]
    }


def picture(name: str, machine: str, plan: Schedule) -> str:
    """A row for each engine; works that follow each other at once are one box, those of the critical path another."""
    rows = [engine for engine in ENGINES if any(work.engine == engine for work in plan.works)]
    drawing = Picture(960, 70 + 34 * len(rows), f"Prediction: {name} on {machine}")
    drawing.text(16, 26, f"{name} on {machine}: {plan.makespan / 1e6:.2f} ms, predicted", bold=True)
    on_path = set(plan.critical_path())
    for index, engine in enumerate(rows):
        top = 44 + 34 * index
        drawing.text(16, top + 16, engine, "quiet", 12)
        for start, end, is_critical, words in _boxes(plan, engine, on_path):
            left, right = (170 + 774 * each / plan.makespan for each in (start, end))
            drawing.box(left, top, max(right - left, 0.4), 24, "reduce" if is_critical else "compute", words)
    return drawing.svg()


def _boxes(plan: Schedule, engine: str, on_path: set[int]) -> list[tuple[int, int, bool, str]]:
    boxes: list[tuple[int, int, bool, str]] = []
    works = (number for number, work in enumerate(plan.works) if work.engine == engine and work.nanoseconds)
    for number in sorted(works, key=plan.starts.__getitem__):
        start, end, is_critical = plan.starts[number], plan.ends[number], number in on_path
        if boxes and boxes[-1][2] == is_critical and start - boxes[-1][1] < plan.makespan // 1000:
            boxes[-1] = boxes[-1][0], end, is_critical, boxes[-1][3]
        else:
            boxes.append((start, end, is_critical, plan.works[number].name))
    return boxes


def main() -> None:
    args = parse_args()
    if args.held_out:
        write_result("timeline-held-out", args, torch.device("cpu"), held_out(args.held_out))
        return
    records = {name: recorded(name) for name in args.training}
    if args.record:
        args.record.write_text(json.dumps({name: asdict(found) for name, found in records.items()}))
        return
    for name in MACHINES if args.machine == "all" else [args.machine]:
        args.machine = name
        of_machine(args, records)


def of_machine(args: argparse.Namespace, records: dict[str, Round]) -> None:
    """Predicts, prints and writes what was recorded on one machine."""
    hardware = replace(MACHINES[args.machine], host=_newest("timeline-held-out")["hardware"]["host"])
    predictions = {name: predict(name, found, hardware) for name, found in records.items()}
    show(
        f"{hardware.name}: predicted, not measured",
        ("training", "step ms", "over the bound", "busy", "critical path"),
        [
            (
                name,
                f"{1e3 * each['seconds']:.2f}",
                f"{each['over the bound']:.2f}",
                ", ".join(f"{engine} {share:.0%}" for engine, share in each["busy"].items()),
                ", ".join(f"{of} {share:.0%}" for of, share in list(each["critical path"].items())[:2]),
            )
            for name, each in predictions.items()
        ],
    )
    results: dict[str, Any] = {
        "prediction": "scheduled from what stand-ins recorded; no GPU was used",
        "hardware": asdict(hardware),
        "trainings": predictions,
    }
    if hardware.name.startswith("h100") and set(TRAININGS) == set(records):
        results.update(compared(beside_results(lambda training, _: predictions[training])))
    first = args.training[0]
    plan = drawn(records[first], hardware, host_times(first, records[first], hardware))
    if args.trace:
        args.trace.write_text(json.dumps(chrome_trace(plan)))
    if args.svg:
        args.svg.write_text(picture(first, hardware.name, plan))
    if set(TRAININGS) == set(records):
        write_result(f"timeline-{hardware.name}", args, torch.device("cpu"), results)


def compared(rows: list[dict[str, Any]]) -> dict[str, Any]:
    errors = [abs(each["error"]) for each in rows]
    worst = max(rows, key=lambda each: abs(each["error"]))
    show(
        "beside what an H100 measured",
        ("held out", "measured ms", "predicted ms", "error"),
        [
            (
                each["result"],
                f"{1e3 * each['measured s']:.2f}",
                f"{1e3 * each['predicted s']:.2f}",
                f"{each['error']:+.0%}",
            )
            for each in rows
        ],
    )
    print(f"median error {median(errors):.0%}, the worst {worst['error']:+.0%} ({worst['result']})")
    for what, why in NOT_PREDICTED.items():
        print(f"not in it: {what}: {why}")
    return {
        "beside measured": rows,
        "median error": median(errors),
        "worst": worst["result"],
        "usable": median(errors) <= 0.15,
        "not predicted": NOT_PREDICTED,
    }


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__ or "")
    parser.add_argument("--machine", choices=[*MACHINES, "all"], default="h100-pcie5", help="what it is predicted for")
    parser.add_argument("--training", nargs="+", choices=[*TRAININGS], default=[*TRAININGS], metavar="TRAINING")
    parser.add_argument("--trace", type=Path, help="a Chrome trace of the first training")
    parser.add_argument("--record", type=Path, metavar="FILE", help="only write what is recorded of the trainings")
    parser.add_argument("--held-out", type=Path, metavar="DIRECTORY", help="only compare: of records COMMIT.json")
    parser.add_argument("--svg", type=Path, help="a picture of the first training")
    return parser.parse_args()


if __name__ == "__main__":
    main()
