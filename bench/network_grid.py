"""Every engine at every rate and delay, beside the floor: `python bench/network.py --grid`.

In each round all engines take a turn at each rate and delay, one right after the other, and no round begins after
`--minutes`. A rank that does not answer in a minute ends its engine, and the others go on.

* `floor`: the larger of `alone`, where ranks compute and exchange nothing, and of the bytes that the engine must send
  over a host's rate: 2 units at stages 0 to 2 and for DDP, 3 at stage 3 and for FSDP2, and what is quantized in its own
  size. A unit is (H-1)/H of the params of H hosts. With several ranks a host this is what a hierarchy would send.
* Packets pass through a process that holds them, at every delay. It takes its part of a core, at 10 Gbit/s most of one.
* Rates are of what a host sends. Ranks of one host share its rate.
"""

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch
from common import describe_machine, median_of, ratios, show, write_result
from gpt import DTYPES, Settings
from hosts import Network, joined
from network import Others, build_teams, durations, in_turn, model_numel, title_of
from teams import EngineFailed, Team
from tqdm import tqdm

ANSWER_LIMIT = 60.0  # seconds
_INT8, _INT4 = 1 + 4 / 256, 1 / 2 + 4 / 256
# Bytes of each element that an engine must send, where they are not 2 of the dtype.
CODED = {
    "int8-2": 2 * _INT8, "int4-2": _INT4 + _INT8, "int8-3": 3 * _INT8, "int8-3-near": 2 * _INT8, "alone": 0.0,
}  # fmt: skip
THREE_UNITS = ("wire", "fsdp2", "module-3", "messages-3")

Cell = tuple[float, float]  # Gbit/s, ms
Turns = dict[Cell, dict[str, list[dict[str, float]]]]


def bytes_an_element(name: str, itemsize: int) -> float:
    """What an engine must send of each element of a unit."""
    return CODED.get(name.removesuffix("-late"), itemsize * (3.0 if name in THREE_UNITS else 2.0))


def wire_floor(name: str, numel: int, itemsize: int, hosts: int, gigabits: float) -> float:
    """Seconds that a host's end of the network needs for what an engine must send in a step."""
    return bytes_an_element(name, itemsize) * numel * (hosts - 1) / hosts * 8 / (gigabits * 1e9)


def summary_of(
    turns: Mapping[str, Sequence[Mapping[str, float]]], numel: int, itemsize: int, hosts: int, gigabits: float
) -> dict[str, dict[str, Any]]:
    """Returns what is told of each engine in one cell, by pairs of turns of the same round."""
    rows: dict[str, dict[str, Any]] = {}
    seconds = {name: [turn["step s"] for turn in found] for name, found in turns.items()}
    compute = seconds.get("alone")
    for name, own in seconds.items():
        wire = wire_floor(name, numel, itemsize, hosts, gigabits)
        floors = [max(wire, 0.0 if compute is None else compute[at]) for at in range(len(own))]
        rows[name] = {
            "title": title_of(name),
            "step s": median_of(own),
            "x DDP": ratios(own, seconds["ddp"]) if "ddp" in seconds else None,
            "x floor": ratios(own, floors) if all(floors) else None,
            "wire floor s": wire,
            "MB sent": median_of([turn["sent"] for turn in turns[name]]).median / 1e6,
        }
    return rows


def measure_grid(args: argparse.Namespace, settings: Settings) -> None:
    """Measures, shows and writes the grid."""
    cells = [*product(args.rates, args.delays)]
    with joined(args.hosts, delays=True) as network:
        turns, failed, others = _rounds(args, settings, network, cells)
    numel, itemsize = model_numel(settings), DTYPES[args.dtype].itemsize
    found = [
        {"Gbit/s": rate, "ms": delay, "ways": summary_of(turns[rate, delay], numel, itemsize, args.hosts, rate)}
        for rate, delay in cells
        if turns[rate, delay]
    ]
    where = f"{describe_machine(torch.device('cpu'))['device']}, {args.threads} threads a rank"
    for cell in found:
        show(
            f"{where}; GPT of {numel / 1e6:.1f}M params, {args.dtype}; {args.hosts} hosts x "
            f"{settings.ranks // args.hosts} ranks, {cell['Gbit/s']:g} Gbit/s, {cell['ms']:g} ms",
            ("what", "ms", "x DDP", "x floor", "wire's floor ms", "MB sent"),
            [
                [
                    row["title"],
                    f"{1e3 * row['step s'].median:.0f}",
                    str(row["x DDP"] or ""),
                    str(row["x floor"] or ""),
                    f"{1e3 * row['wire floor s']:.0f}",
                    f"{row['MB sent']:.1f}",
                ]
                for row in cell["ways"].values()
            ],
        )
    for name, reason in failed.items():
        print(f"{title_of(name)}: {reason}")
    print(f"others took {100 * others:.0f} % of the machine meanwhile")
    results = {
        "params": numel,
        "cells": found,
        "not run": {name: reason.splitlines()[-1] for name, reason in failed.items()},
        "others' share of the machine": others,
    }
    write_result(
        f"network-grid-{args.dtype}-{args.hosts}x{settings.ranks // args.hosts}", args, torch.device("cpu"), results
    )


def _rounds(
    args: argparse.Namespace, settings: Settings, network: Network, cells: Sequence[Cell]
) -> tuple[Turns, dict[str, str], float]:
    """Returns each engine's turns by rate and delay, why some have none, and what others took of the machine."""
    until = time.monotonic() + 60 * args.minutes
    teams: list[Team] = []
    failed: dict[str, str] = {}
    turns: Turns = {cell: {} for cell in cells}
    with tempfile.TemporaryDirectory() as directory:
        try:
            build_teams(network, settings, args.ways, directory, teams, failed, ANSWER_LIMIT)
            others = Others(teams)
            for number in tqdm(range(args.rounds), desc="rounds", unit="round", disable=None):
                for rate, delay in cells:
                    if time.monotonic() < until:
                        network.limit(rate)
                        network.delay = delay / 1e3
                        _take_turns(in_turn(number, teams), teams, turns[rate, delay], failed)
            return turns, failed, others.share()
        finally:
            network.delay = 0.0
            for team in teams:
                team.dismiss()
            for team in teams:
                team.join()


def _take_turns(
    order: Sequence[tuple[float, Team]],
    teams: list[Team],
    turns: dict[str, list[dict[str, float]]],
    failed: dict[str, str],
) -> None:
    for _, team in order:
        try:
            team.take_turn()
        except EngineFailed as error:
            failed[team.name] = str(error)
            teams.remove(team)
            team.dismiss()
            team.join()
        else:
            turns.setdefault(team.name, []).append(durations(team.turns[-1]))
    for name in failed:  # all rows of a cell are of the same rounds
        turns.pop(name, None)
