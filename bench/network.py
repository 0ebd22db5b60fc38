"""Steps of a GPT over a link of limited rate, beside the link itself; and what a delay in each message costs a pass.

    python bench/network.py                                 bf16, 1 Gbit/s
    python bench/network.py --dtype fp32 --rate 2.5
    python bench/network.py --ways wire ddp messages-2 messages-2-late --burst 4    gathers in the next forward
    python bench/network.py --delay 5                       each message 5 ms late: how much longer is a pass?
    python bench/network.py --hosts 2 --ranks 2             two hosts, two ranks on each
    python bench/network.py --grid --dtype fp32 --minutes 8 every stage at 10, 1, 0.2 Gbit/s and 0.1 to 20 ms of delay
    python bench/network.py --quick --layers 2 --width 128  does it run?

Hosts are network, PID and mount namespaces of this machine (`bench/hosts.py`), and gloo knows no device but their
network. This needs Linux, `ip`, `tc`, `unshare`, `nsenter` and root, and says what is missing. Ranks of different hosts
send each other messages, those of one host read each other's memory. All of them share this machine's processors.

* `wire alone`: as many bytes as 3 units, sent and received at once, all asked for before the first is waited for. A
  unit is (N-1)/N of the params of N ranks, sent by each. `alone`: the ranks compute side by side and exchange nothing.
* Engines take turns as in `bench/train.py`; a step lasts from when all ranks have begun until all have ended.
* `--grid`: see `bench/network_grid.py`.
* `--burst`: steps of a turn. What the last one leaves under way counts, so that the gathers of all but it may hide.
* `units`: bytes that a host's end of the network sent, by its own counters, headers included, in a step; in units of
  (H-1)/H of the params of H hosts. `CPU s`: of the busier rank, all threads. `gathered`: the most bytes of params that
  the schedule has gathered at once; a part of all.
* `wire idle`: a step without the seconds that the wire needs for as many bytes, as it carried 3 units in that round.
* `--delay`: packets wait in this process, half of the delay each way, as gloo asks the receiver before it sends. The
  rate is not limited then. `message` is one number, by which a delay is checked. A pass is a forward or a backward; a
  backward ends with two exchanges that nothing can hide: the last sum, and then the norms of the sums.
* `others`: what other processes took of the machine meanwhile: unless it is small, the numbers are of little use.
"""

import argparse
import functools
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import Median, describe_machine, median_of, parser_of, ratios, show, write_result
from engines import ENGINES, is_offered
from gpt import DTYPES, Settings
from hosts import DEVICE, MOST_HOSTS, CannotLink, Network, bytes_moved, joined
from teams import BATCHES, EngineFailed, Rank, Team, run_rank
from tqdm import tqdm

UNITS = 3
STAGE_3 = "messages-3"
WIRES = {"wire": f"wire alone, {UNITS} units", "message": "one message"}
COMPARED = ("wire", STAGE_3, "ddp", "fsdp2", "alone")
GRID = (
    "ddp", "zero", "fsdp2", "module-0", "module-1", "module-2", "messages-2-late", "module-3", "int8-2", "int4-2",
    "int8-3", "alone",
)  # fmt: skip


# ---- In a rank's process ---------------------------------------------------------------------------------------------


class LinkedRank(Rank):
    """Steps an engine, and counts what its end of the link carried meanwhile."""

    def take_turn(self) -> dict[str, float]:
        """Moments, on the clock that all processes share, in seconds; bytes and CPU seconds of the step."""
        dist.barrier()
        (received, sent), cpu = bytes_moved(), time.process_time()
        begin, steps = time.perf_counter(), self.settings.burst
        for _ in range(steps):
            self.engine.zero_grad()
            loss = self.engine.forward(self.batches[len(self.losses) % BATCHES])
            forward = time.perf_counter()
            self.engine.backward(loss)
            backward = time.perf_counter()
            self.engine.update()
        if self.engine.settle is not None:
            self.engine.settle()
        step = begin + (time.perf_counter() - begin) / steps
        cpu = time.process_time() - cpu
        now_received, now_sent = bytes_moved()
        self.engine.zero_grad()
        self.losses.append(self._mean_over_ranks(loss.detach()))
        moments = {"begin": begin, "step": step, **({"forward": forward, "backward": backward} if steps == 1 else {})}
        moved = {"received": (now_received - received) / steps, "sent": (now_sent - sent) / steps}
        return {**moments, "cpu s": cpu / steps, **moved}

    def report(self) -> dict[str, Any]:
        gathered = self.engine.gathered() if self.engine.gathered is not None else None
        return {"gathered": gathered, "losses": self.losses}


class Wire:
    """Exchanges messages, and does nothing else."""

    def __init__(self, name: str, rank: int, settings: Settings):
        with torch.device("meta"):
            numel = sum(param.numel() for param in settings.model().parameters())
        # Of each unit as many messages as the model has units to gather.
        pieces = UNITS * (settings.layers + 2) if name == "wire" else 1
        each = UNITS * numel // settings.ranks // pieces if name == "wire" else 1
        own = torch.ones(each, dtype=DTYPES[settings.dtype])
        peers = [peer for peer in range(settings.ranks) if peer != rank]
        self._messages = [(peer, tag, own, torch.empty_like(own)) for tag in range(pieces) for peer in peers]
        self.take_turn()  # opens connections

    def take_turn(self) -> dict[str, float]:
        dist.barrier()
        (received, sent), cpu = bytes_moved(), time.process_time()
        begin = time.perf_counter()
        works = [dist.irecv(into, peer, tag=tag) for peer, tag, _, into in self._messages]
        works += [dist.isend(own, peer, tag=tag) for peer, tag, own, _ in self._messages]
        for work in works:
            assert work is not None
            work.wait()
        step = time.perf_counter()
        now_received, now_sent = bytes_moved()
        cpu = time.process_time() - cpu
        return {
            "begin": begin, "step": step, "cpu s": cpu, "received": now_received - received, "sent": now_sent - sent,
        }  # fmt: skip

    def report(self) -> dict[str, Any]:
        return {"gathered": None, "losses": []}


def run_linked(name: str, rank: int, settings: Settings, store: str, pipe: Connection) -> None:
    """The process of one rank, in the namespaces of its host."""
    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
    run_rank(name, rank, settings, store, pipe, Wire if name in WIRES else LinkedRank)


# ---- Rounds ----------------------------------------------------------------------------------------------------------


class Others:
    """What other processes take of this machine's processors, in parts of it."""

    def __init__(self, teams: Sequence[Team]):
        own = [process.pid for team in teams for process in team.processes]
        self._pids = [pid for each in own for pid in (each, *_children(each))]  # who entered the host, and its Python
        self._start = self._now()

    def share(self) -> float:
        """Since this was made."""
        (busy, ours, passed), (busy_then, ours_then, then) = self._now(), self._start
        cores = os.cpu_count() or 1
        return max(0.0, (busy - busy_then) - (ours - ours_then)) / ((passed - then) * cores)

    def _now(self) -> tuple[float, float, float]:
        tick = os.sysconf("SC_CLK_TCK")
        # user, nice, system, idle, iowait, irq, softirq, steal: proc(5). What the link takes in a softirq counts, as a
        # process that is interrupted is charged for it.
        counted = [int(each) for each in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        ours = 0.0
        for pid in self._pids:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ours += (int(fields[11]) + int(fields[12])) / tick
        own = resource.getrusage(resource.RUSAGE_SELF)
        busy = (sum(counted[:3]) + sum(counted[5:])) / tick
        return busy, ours + own.ru_utime + own.ru_stime, time.perf_counter()


def _children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


Turns = dict[str, list[dict[str, float]]]
Plan = Callable[[int, Sequence[Team]], Sequence[tuple[float, Team]]]  # of a round: delays, and whose turn it is


def run_rounds(
    args: argparse.Namespace, settings: Settings, link: Network, names: Sequence[str], plan: Plan
) -> tuple[dict[float, Turns], dict[str, Team], dict[str, str], float]:
    """Every engine's turns by delay, the engines, why some have none, and what others took of the machine."""
    teams: list[Team] = []
    failed: dict[str, str] = {}
    turns: dict[float, Turns] = {}
    with tempfile.TemporaryDirectory() as directory:
        try:
            build_teams(link, settings, names, directory, teams, failed)
            others = Others(teams)
            for number in tqdm(range(args.rounds), desc="rounds", unit="round", disable=None):
                for delay, team in plan(number, teams):
                    link.delay = delay
                    team.take_turn()
                    turns.setdefault(delay, {}).setdefault(team.name, []).append(durations(team.turns[-1]))
            share = others.share()
            link.delay = 0.0
            for team in teams:
                team.reports = team.ask("report")
        finally:
            for team in teams:
                team.dismiss()
            for team in teams:
                team.join()
    return turns, {team.name: team for team in teams}, failed, share


def build_teams(
    link: Network,
    settings: Settings,
    names: Sequence[str],
    directory: str,
    teams: list[Team],
    failed: dict[str, str],
    limit: float | None = None,
) -> None:
    """Starts the ranks of every engine on the hosts, and fills ``teams``, or ``failed`` with why not.

    Args:
        limit: seconds that a rank may take for an answer.
    """
    pythons = [host.write_python(Path(directory, f"python{number}")) for number, host in enumerate(link.hosts)]
    each = settings.ranks // len(link.hosts)
    for name in tqdm(names, desc="building", unit="engine", disable=None):
        team = Team(name, run_linked, [pythons[rank // each] for rank in range(settings.ranks)], limit)
        teams.append(team)
        try:
            team.start(settings, directory)
            team.build()
        except EngineFailed as error:
            teams.remove(team)
            team.dismiss()
            team.join()
            failed[name] = str(error)


def durations(moments: dict[str, float]) -> dict[str, float]:
    """Seconds of the step and its parts, from the moments when the last rank came to their ends."""
    found = {key: value for key, value in moments.items() if key not in ("begin", "forward", "backward", "step")}
    found["step s"] = moments["step"] - moments["begin"]
    if "forward" in moments:
        found["forward s"] = moments["forward"] - moments["begin"]
        found["backward s"] = moments["backward"] - moments["forward"]
        found["update s"] = moments["step"] - moments["backward"]
    return found


def in_turn(number: int, teams: Sequence[Team]) -> Sequence[tuple[float, Team]]:
    """Each engine comes first as often as any other."""
    return [(0.0, teams[(number + index) % len(teams)]) for index in range(len(teams))]


def with_and_without(delay: float, number: int, teams: Sequence[Team]) -> Sequence[tuple[float, Team]]:
    delays = (0.0, delay / 2) if number % 2 else (delay / 2, 0.0)
    return [(each, team) for each in delays for team in teams]


# ---- Reports ---------------------------------------------------------------------------------------------------------


def values(turns: Sequence[dict[str, float]], key: str) -> list[float]:
    return [turn[key] for turn in turns]


def carrying(turn: dict[str, float], wire: dict[str, float]) -> float:
    """Seconds that the link needs for what a step sent, as the wire alone was carried in the same round."""
    return turn["sent"] / wire["sent"] * wire["step s"]


def growth(late: Sequence[dict[str, float]], soon: Sequence[dict[str, float]], key: str) -> list[float]:
    return [one - other for one, other in zip(values(late, key), values(soon, key), strict=True)]


def title_of(name: str) -> str:
    return WIRES.get(name) or ENGINES[name].title


def plain(turns: Any) -> Any:
    """With as many digits as are worth keeping."""
    return json.loads(json.dumps(turns), parse_float=lambda x: float(f"{float(x):.6g}"))


def compare(args: argparse.Namespace, settings: Settings) -> None:
    numel = model_numel(settings)
    unit = numel * DTYPES[args.dtype].itemsize * (args.hosts - 1) / args.hosts
    names = [name for name in args.ways if name in WIRES or is_offered(name, args.dtype)]
    with joined(args.hosts) as link:
        if args.rate is not None:
            link.limit(args.rate)
        by_delay, teams, failed, others = run_rounds(args, settings, link, names, in_turn)
    if "wire" not in teams:
        sys.exit(f"the wire alone did not run: {failed['wire']}")
    turns = by_delay[0.0]
    rows: dict[str, dict[str, Any]] = {}
    for name, found in turns.items():
        gathered = [report["gathered"] for report in teams[name].reports]
        seconds = values(found, "step s")
        rows[name] = {
            "title": title_of(name),
            "step s": median_of(seconds),
            "step x wire": ratios(seconds, values(turns["wire"], "step s")),
            "step x DDP": ratios(seconds, values(turns["ddp"], "step s")) if "ddp" in turns else None,
            **{key: median_of(values(found, key)) for key in found[0] if key in PARTS},
            "CPU s": median_of(values(found, "cpu s")),
            "MB sent": median_of(values(found, "sent")).median / 1e6,
            "MB received": median_of(values(found, "received")).median / 1e6,
            "units": median_of(values(found, "sent")).median / unit,
            "wire idle s": median_of(
                [each - carrying(turn, wire) for each, turn, wire in zip(seconds, found, turns["wire"], strict=True)]
            ),
            "MB gathered at most": None if None in gathered else max(gathered) / 1e6,
            "last loss": teams[name].reports[0]["losses"][-1:],
        }
    where = f"{describe_machine(torch.device('cpu'))['device']}, {args.threads} threads a rank"
    show(
        f"{where}; GPT of {numel / 1e6:.1f}M params, {args.dtype}, {args.rate:g} Gbit/s",
        (
            "what",
            "ms",
            "x wire alone",
            "x DDP",
            "forward, backward, update ms",
            "CPU ms",
            "MB sent",
            "units",
            "wire idle ms",
            "gathered",
        ),
        [compared_row(row, numel * DTYPES[args.dtype].itemsize / 1e6) for row in rows.values()],
    )
    say(failed, others)
    results = {
        "params": numel,
        "unit MB": unit / 1e6,
        "ways": rows,
        "not run": {name: reason.splitlines()[-1] for name, reason in failed.items()},
        "others' share of the machine": others,
        "rounds": plain(turns),
    }
    write_result(f"network-{args.dtype}", args, torch.device("cpu"), results)


PARTS = ("forward s", "backward s", "update s")


def compared_row(row: dict[str, Any], whole: float) -> list[str]:
    gathered = row["MB gathered at most"]
    return [
        row["title"],
        milliseconds(row["step s"]),
        str(row["step x wire"]),
        str(row["step x DDP"] or ""),
        ", ".join(milliseconds(row[part]) for part in PARTS if part in row),
        milliseconds(row["CPU s"]),
        f"{row['MB sent']:.1f}",
        f"{row['units']:.2f}",
        milliseconds(row["wire idle s"]),
        "" if gathered is None else f"{gathered:.1f} MB, {100 * gathered / whole:.0f} %",
    ]


def delayed(args: argparse.Namespace, settings: Settings) -> None:
    delay = args.delay / 1e3
    with joined(args.hosts, delays=True) as link:
        if args.rate is not None:
            link.limit(args.rate)
        plan = functools.partial(with_and_without, delay)
        by_delay, _, failed, others = run_rounds(args, settings, link, ("message", STAGE_3), plan)
    if failed:
        sys.exit("\n".join(f"{name} did not run: {reason}" for name, reason in failed.items()))
    soon, late = by_delay[0.0], by_delay[delay / 2]
    message = median_of(growth(late["message"], soon["message"], "step s"))
    rows: dict[str, dict[str, Any]] = {}
    for title, name, key in (
        ("message", "message", "step s"),
        *((part.removesuffix(" s"), STAGE_3, part) for part in PARTS),
        ("forward and backward", STAGE_3, "pass s"),
    ):
        for turn in (*soon[name], *late[name]):
            if name == STAGE_3:
                turn["pass s"] = turn["forward s"] + turn["backward s"]
        more = growth(late[name], soon[name], key)
        rows[title] = {
            "s": median_of(values(soon[name], key)),
            "s, late": median_of(values(late[name], key)),
            "grows by s": median_of(more),
            "delays": median_of([each / delay for each in more]),
        }
    show(
        f"{describe_machine(torch.device('cpu'))['device']}; GPT of {model_numel(settings) / 1e6:.1f}M params, "
        f"{args.dtype}; {args.delay:g} ms of delay in each message",
        ("what", "ms", "ms, late", "longer by ms", "in delays"),
        [
            [title, milliseconds(row["s"]), milliseconds(row["s, late"]), milliseconds(row["grows by s"], 1),
             str(row["delays"])]
            for title, row in rows.items()
        ],
    )  # fmt: skip
    say(failed, others)
    results = {
        "a message grows by s": message,
        "parts": rows,
        "others' share of the machine": others,
        "rounds": plain({str(1e3 * each): turns for each, turns in by_delay.items()}),
    }
    write_result(f"network-delay-{args.dtype}", args, torch.device("cpu"), results)


def milliseconds(seconds: Median, digits: int = 0) -> str:
    return f"{1e3 * seconds.median:.{digits}f}"


def say(failed: dict[str, str], others: float) -> None:
    for name, reason in failed.items():
        print(f"{title_of(name)}: {reason}")
    print(f"others took {100 * others:.0f} % of the machine meanwhile")


def model_numel(settings: Settings) -> int:
    with torch.device("meta"):
        return sum(param.numel() for param in settings.model().parameters())


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__ or "")
    parser.add_argument("--dtype", choices=[*DTYPES], default="bf16", help="of params, gradients and activations")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1, help="of each host")
    parser.add_argument("--grid", action="store_true", help="all rates and delays, within --minutes")
    parser.add_argument("--rates", type=float, nargs="+", default=[10.0, 1.0, 0.2], help="of the grid, Gbit/s each way")
    parser.add_argument("--delays", type=float, nargs="+", default=[0.1, 2.0, 20.0], help="of the grid, ms each way")
    parser.add_argument("--minutes", type=float, default=10.0, help="of the grid: no round begins after them")
    parser.add_argument("--rate", type=float, default=None, help="Gbit/s each way (default: 1; with --delay unlimited)")
    parser.add_argument("--delay", type=float, default=None, help="ms that each message is late, in turn with none")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--ways", nargs="+", default=None, choices=[*WIRES, *ENGINES], help="what takes turns")
    parser.add_argument("--burst", type=int, default=1, help="steps in a turn")
    parser.add_argument("--rounds", type=int, default=20, help="turns of each engine")
    parser.add_argument("--layers", type=int, default=8, help="blocks of the GPT")
    parser.add_argument("--width", type=int, default=512, help="channels")
    parser.add_argument("--heads", type=int, default=8, help="attention heads")
    parser.add_argument("--vocab", type=int, default=8192, help="tokens")
    parser.add_argument("--batch", type=int, default=1, help="sequences a rank")
    parser.add_argument("--context", type=int, default=64, help="tokens in a sequence")
    parser.add_argument("--seed", type=int, default=0, help="of the model and the data")
    args = parser.parse_args()
    if args.quick:
        args.rounds = min(args.rounds, 4)
    for name in ("ranks", "threads", "burst", "rounds", "layers", "width", "heads", "vocab", "batch", "context"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if args.width % args.heads:
        parser.error(f"--width {args.width} must be a multiple of --heads {args.heads}")
    for name in ("rate", "delay", "rates", "delays", "minutes"):
        given = getattr(args, name)
        if not all(each > 0 for each in (given if isinstance(given, list) else [given]) if each is not None):
            parser.error(f"--{name} must be above 0")
    if not 2 <= args.hosts <= MOST_HOSTS:
        parser.error(f"--hosts must be 2 to {MOST_HOSTS}")
    if args.rate is None and args.delay is None:
        args.rate = 1.0
    args.ways = args.ways or (GRID if args.grid else COMPARED)
    args.ranks, args.device = args.hosts * args.ranks, "cpu"
    return args


def main() -> None:
    args = parse_args()
    settings = Settings(**{name: getattr(args, name) for name in Settings.__dataclass_fields__})
    try:
        if args.grid:
            from network_grid import measure_grid

            measure_grid(args, settings)
        else:
            (compare if args.delay is None else delayed)(args, settings)
    except CannotLink as error:
        print(f"skipped: hosts cannot be made of namespaces here: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
