"""The benchmark between hosts, ``bench/network.py``: its arithmetic, its hosts, and what it says without them."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.scripts import run_script

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the hosts; benchmarks import each other as scripts do."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCH))
    import hosts

    yield hosts
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCH)):
            del sys.modules[name]


def test_floors_and_ratios(hosts: Any) -> None:
    pytest.importorskip("rich")
    pytest.importorskip("tqdm")
    import network_grid as grid

    million = 1_000_000
    # Of 4 MB half crosses between 2 hosts: twice in a step, at 1 Gbit/s.
    assert grid.wire_floor("module-2", million, 4, 2, 1.0) == pytest.approx(2 * 4e6 / 2 * 8 / 1e9)
    assert grid.wire_floor("fsdp2", million, 4, 4, 0.2) == pytest.approx(3 * 4e6 * 3 / 4 * 8 / 0.2e9)
    coded = grid.wire_floor("int8-2", million, 4, 2, 1.0)
    assert coded == pytest.approx(grid.wire_floor("module-2", million, 4, 2, 1.0) * (1 + 1 / 64) / 4)
    turns = {
        name: [{"step s": each, "sent": 2e6} for each in seconds]
        for name, seconds in {"ddp": (2.0, 4.0, 3.0), "module-2": (1.0, 3.0, 2.4), "alone": (0.5, 0.5, 2.0)}.items()
    }
    rows = grid.summary_of(turns, 125 * million, 4, 2, 4.0)  # 1 s on the wire
    assert rows["module-2"]["wire floor s"] == pytest.approx(1.0)
    assert rows["module-2"]["x DDP"].median == pytest.approx(0.75)  # of pairs of one round: 0.5, 0.75, 0.8
    assert rows["module-2"]["x floor"].median == pytest.approx(1.2)  # the third floor is compute: 1, 3, 1.2
    assert (rows["alone"]["wire floor s"], rows["alone"]["MB sent"]) == (0.0, 2.0)


def test_packets_go_to_their_host(hosts: Any) -> None:
    header = bytes([0x45, *[0] * 15])
    assert hosts.host_of(header + bytes([10, 77, 0, 3]), 3) == 2
    assert hosts.host_of(header + bytes([10, 77, 0, 3]), 2) is None
    assert hosts.host_of(header + bytes([10, 0, 0, 1]), 3) is None
    assert hosts.host_of(bytes([0x60, *[0] * 39]), 3) is None  # IPv6: neighbour discovery


_SERVES = """
import socket
server = socket.create_server(("10.77.0.1", 5000))
print("ready", flush=True)
taken, _ = server.accept()
print(sum(len(each) for each in iter(lambda: taken.recv(1 << 20), b"")), flush=True)
taken.sendall(b"all")
"""
_SENDS = """
import os, socket, sys
sys.path.insert(0, sys.argv[1])
from hosts import bytes_moved
server = socket.create_connection(("10.77.0.1", 5000))
server.sendall(bytes(3_000_000))
server.shutdown(socket.SHUT_WR)
assert server.recv(3, socket.MSG_WAITALL) == b"all"
print(os.getpid(), bytes_moved()[1])
"""


def test_hosts_are_apart_and_leave_nothing(hosts: Any) -> None:
    """Bytes go over the network that counts them; a process has another number in its host; all ends with the hosts."""
    for delays in (False, True):
        try:
            network = hosts.Network(2, delays)
        except hosts.CannotLink as error:
            pytest.skip(str(error))
        try:
            network.limit(1.0)
            network.delay = 1e-3
            first, second = network.hosts
            server = subprocess.Popen([*first.entry, sys.executable, "-c", _SERVES], stdout=subprocess.PIPE, text=True)
            assert server.stdout is not None and server.stdout.readline() == "ready\n"
            sender = subprocess.Popen(
                [*second.entry, sys.executable, "-c", _SENDS, str(BENCH)], stdout=subprocess.PIPE, text=True
            )
            told, _ = sender.communicate(timeout=60)
            number, sent = map(int, told.split())
            assert number < 50 and number != sender.pid and 3_000_000 < sent < 3_300_000
            assert server.communicate(timeout=60)[0] == "3000000\n"
            left = subprocess.Popen([*first.entry, "sleep", "600"])
        finally:
            network.close()
        assert left.wait(60)  # ended with its host
        assert not any(Path(f"/proc/{each.pid}").exists() for each in network.hosts)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    """Without its tools the benchmark skips, and says so."""
    pytest.importorskip("rich")
    pytest.importorskip("tqdm")
    done = run_script(BENCH / "network.py", "--grid", "--quick", env={"PATH": str(tmp_path)})
    expected = "skipped: hosts cannot be made of namespaces here: there is no `ip`, no `tc`, no `unshare`, no `nsenter`"
    assert expected in done.stdout, done
    assert done.returncode == 0
