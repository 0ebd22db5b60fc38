"""Where the time of a run goes: processor and wall-clock seconds of each test, ranks and programs included.

::

    python -m pytest -p tests.support.processor_time --processor-time FILE ...
    python -m tests.support.processor_time FILE          # a table by file, most first

FILE gets a line of JSON for each test. Processor time is that of the pytest process and of all its descendants while
the test runs, which the load of other processes changes little; wall-clock time is the machine's of that moment.
"""

import collections
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processor-time", metavar="FILE", help="append each test's processor seconds to FILE")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    path = item.config.getoption("--processor-time")
    if path is None:
        return (yield)
    processor, wall = _processor_seconds(), time.monotonic()
    result = yield
    spent = {"cpu": round(_processor_seconds() - processor, 2), "wall": round(time.monotonic() - wall, 2)}
    # One write a line: two workers append to the same file.
    with open(path, "a") as file:
        file.write(json.dumps({"test": item.nodeid, **spent}) + "\n")
    return result


def _processor_seconds() -> float:
    """Of this process and all its descendants, those that have ended and were waited for included."""
    children, ticks = collections.defaultdict(list), {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = Path("/proc", pid, "stat").read_text()
        except OSError:  # it has ended since
            continue
        fields = stat[stat.rindex(")") + 2 :].split()
        children[int(fields[1])].append(int(pid))
        ticks[int(pid)] = sum(map(int, fields[11:15]))
    total, todo = 0, [os.getpid()]
    while todo:
        pid = todo.pop()
        total += ticks.get(pid, 0)
        todo += children[pid]
    return total / os.sysconf("SC_CLK_TCK")


def main(path: str) -> None:
    spent: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0, 0])
    for line in Path(path).read_text().splitlines():
        found = json.loads(line)
        each = spent[found["test"].partition("::")[0]]
        each[0], each[1], each[2] = each[0] + found["cpu"], each[1] + found["wall"], each[2] + 1
    for name, (cpu, wall, count) in sorted(spent.items(), key=lambda item: -item[1][0]):
        print(f"{cpu:8.1f} s of processor {wall:8.1f} s wall {count:5} tests  {name}")
    print(f"{sum(each[0] for each in spent.values()):8.1f} s of processor in all")


if __name__ == "__main__":
    main(sys.argv[1])
