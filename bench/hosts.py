"""Hosts on one machine, and a network between them of a given rate and delay. Linux, as root.

A host is a network, a PID and a mount namespace. Its first process waits for the end of a pipe from here, and takes all
other processes of the host with it: however this process ends, nothing is left. No namespace has a name or a file, and
no packet leaves the machine.

Without delays hosts are joined by a bridge, and the kernel limits their rate, each way. Packets that are delayed pass
through this process, which holds them: it does not need the kernel's netem, but takes a part of a core.
"""

import contextlib
import ctypes
import fcntl
import os
import select
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

DEVICE = "wire"  # the name of a host's end of the network, in its namespace
TOOLS = ("ip", "tc", "unshare", "nsenter")
MOST_HOSTS = 200

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
# No packet is lost here. So TCP need not start slowly after each pause, nor remember how fast an earlier delay let it
# be, and a whole message may be under way at once: a delay makes each message late, and not slow.
_SYSCTLS = {
    "ipv4/tcp_slow_start_after_idle": "0",
    "ipv4/tcp_congestion_control": "reno",
    "ipv4/tcp_rmem": f"4096 {16 << 20} {32 << 20}",
    "ipv4/tcp_wmem": f"4096 {16 << 20} {32 << 20}",
}
_PACKETS_AT_ONCE = 500  # without an acknowledgment
_BURST = 128 << 10  # bytes that pass at full speed after a pause: 1 ms of 1 Gbit/s, and more than one packet
_MOST_PACKET = 65_000  # bytes; who takes each packet by itself wants few of them


class CannotLink(Exception):
    """What this machine lacks."""


def bytes_moved() -> tuple[int, int]:
    """Received and sent by this host's end of the network so far, as its counters say."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == DEVICE:
            numbers = [int(each) for each in counters.split()]
            return numbers[0], numbers[8]
    raise CannotLink(f"this namespace has no device {DEVICE!r}")


def check_tools() -> None:
    """Raises CannotLink if the machine has no tools for it."""
    if sys.platform != "linux":
        raise CannotLink("network namespaces are Linux's, and this is another system")
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise CannotLink(f"there is no `{'`, no `'.join(missing)}`: install iproute2 and util-linux")


# ---- Hosts -----------------------------------------------------------------------------------------------------------


class Host:
    """The namespaces of one host, and its first process."""

    def __init__(self) -> None:
        line = ["unshare", "--net", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc", "sh", "-c"]
        self._process = subprocess.Popen(
            [*line, "echo ready; exec cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        if self._process.stdout.readline() != b"ready\n":
            told = self._process.stderr.read().decode().strip()
            self.close()
            raise CannotLink(f"{told}. It takes root, or `unshare --user --map-root-user` before the command")
        self.pid = self._process.pid  # of a process in its network and mount namespaces

    @property
    def entry(self) -> list[str]:
        """The words in front of a command that shall run in the host."""
        of = f"/proc/{self.pid}/ns"
        return ["nsenter", f"--net={of}/net", f"--mount={of}/mnt", f"--pid={of}/pid_for_children", "--"]

    def command(self, line: str) -> None:
        """Runs a command in the host."""
        done = subprocess.run([*self.entry, *line.split()], capture_output=True, text=True)
        if done.returncode:
            raise CannotLink(f"`{line}` failed: {done.stderr.strip() or done.stdout.strip()}")

    def write_python(self, path: Path) -> str:
        """Writes a script that is this Python in the host, to be the executable of a process."""
        words = " ".join(f"'{each}'" for each in (*self.entry, sys.executable))
        path.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        path.chmod(0o755)
        return str(path)

    def tunnel(self) -> int:
        """Makes the network device of the host one whose packets this process reads and writes."""
        found: list[int | OSError] = []

        def make() -> None:  # in a thread, which moves into the namespace and ends
            try:
                with open(f"/proc/{self.pid}/ns/net") as file:
                    if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
                        raise OSError(ctypes.get_errno(), "setns")
                found.append(_tunnel())
            except OSError as error:
                found.append(error)

        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        if isinstance(found[0], OSError):
            raise CannotLink(f"{found[0]}. Delays take /dev/net/tun") from found[0]
        return found[0]

    def close(self) -> None:
        """Ends the host and all that runs in it."""
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        self._process.wait()


def _tunnel() -> int:
    tunnel = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(tunnel, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
    except BaseException:
        os.close(tunnel)
        raise
    return tunnel


# ---- The network between them ----------------------------------------------------------------------------------------


class Network:
    """Hosts, joined.

    Attributes:
        delay: seconds that each packet is held, of a network that was made with ``delays``.
    """

    def __init__(self, hosts: int, delays: bool):
        """
        Args:
            delays: packets pass through this process, which holds them.
        """
        check_tools()
        assert 2 <= hosts <= MOST_HOSTS
        self.delay, self._delays = 0.0, delays
        self.hosts: list[Host] = []
        self._switch: Host | None = None
        self._relay: Relay | None = None
        try:
            for _ in range(hosts):
                self.hosts.append(Host())
            if delays:
                self._relay = Relay([each.tunnel() for each in self.hosts], self)
            else:
                self._switch = _bridge(self.hosts)
            for number, host in enumerate(self.hosts, 1):
                for name, value in _SYSCTLS.items():
                    _set(host, name, value)
                host.command("ip link set lo up")
                host.command(f"ip address add 10.77.0.{number}/24 dev {DEVICE}")
                host.command(f"ip link set {DEVICE} {f'mtu {_MOST_PACKET} ' if delays else ''}up")
                host.command(
                    f"ip route change 10.77.0.0/24 dev {DEVICE} initcwnd {_PACKETS_AT_ONCE} initrwnd {_PACKETS_AT_ONCE}"
                )
        except BaseException:
            self.close()
            raise

    def limit(self, gigabits: float) -> None:
        """Sets the rate of each host, in Gbit/s: of what it sends, and without delays of what it receives too."""
        burst = max(_BURST, int(gigabits * 1e9 / 8 / 1000))
        rule = f"root tbf rate {1000 * gigabits:g}mbit burst {burst} limit {burst + (64 << 20)}"
        for number, host in enumerate(self.hosts, 1):
            host.command(f"tc qdisc replace dev {DEVICE} {rule}")
            if self._switch is not None and len(self.hosts) > 2:  # of two hosts what one receives the other sends
                self._switch.command(f"tc qdisc replace dev port{number} {rule}")

    def close(self) -> None:
        """Ends the hosts, with all that runs in them."""
        if self._relay is not None:
            self._relay.close()
        for host in (*self.hosts, *([] if self._switch is None else [self._switch])):
            host.close()


def _set(host: Host, name: str, value: str) -> None:
    done = subprocess.run([*host.entry, "tee", f"/proc/sys/net/{name}"], input=value, capture_output=True, text=True)
    if done.returncode:
        raise CannotLink(f"net/{name} cannot be set: {done.stderr.strip()}")


def _bridge(hosts: Sequence[Host]) -> Host:
    switch = Host()
    try:
        switch.command("ip link add switch type bridge")
        switch.command("ip link set switch up")
        for number, host in enumerate(hosts, 1):
            # The number of a process in the switch's own PID namespace would be another one.
            line = f"ip link add port{number} type veth peer name {DEVICE} netns {host.pid}"
            entry = ["nsenter", f"--net=/proc/{switch.pid}/ns/net", "--"]
            done = subprocess.run([*entry, *line.split()], capture_output=True, text=True)
            if done.returncode:
                raise CannotLink(f"`{line}` failed: {done.stderr.strip()}")
            switch.command(f"ip link set port{number} master switch up")
    except BaseException:
        switch.close()
        raise
    return switch


class Relay:
    """Takes packets from each host, holds them, and gives them to the host that they are for."""

    def __init__(self, tunnels: Sequence[int], network: Network):
        self._tunnels, self._network = list(tunnels), network
        self._closing = False
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing = True
        self._thread.join()
        for each in self._tunnels:
            os.close(each)

    def _carry(self) -> None:
        held: deque[tuple[float, bytes]] = deque()  # the delay changes only while nothing is under way
        while not self._closing:
            now = time.monotonic()
            while held and held[0][0] <= now:
                packet = held.popleft()[1]
                to = host_of(packet, len(self._tunnels))
                if to is not None:
                    with contextlib.suppress(OSError):  # that host is going away
                        os.write(self._tunnels[to], packet)
            due = held[0][0] if held else now + 0.1
            ready, _, _ = select.select(self._tunnels, [], [], max(0.0, due - time.monotonic()))
            for origin in ready:
                held.extend(self._arrived(origin))

    def _arrived(self, origin: int) -> Iterator[tuple[float, bytes]]:
        for _ in range(16):
            try:
                packet = os.read(origin, 1 << 16)
            except OSError:  # no more of them
                return
            yield time.monotonic() + self._network.delay, packet


def host_of(packet: bytes, hosts: int) -> int | None:
    """Returns the index of the host that an IPv4 packet is for; None for any other packet."""
    is_ours = len(packet) >= 20 and packet[0] >> 4 == 4 and packet[16:19] == bytes((10, 77, 0))
    return packet[19] - 1 if is_ours and 1 <= packet[19] <= hosts else None


@contextlib.contextmanager
def joined(hosts: int, delays: bool = False) -> Iterator[Network]:
    """A :class:`Network`, closed in the end.

    Raises:
        CannotLink: with what is missing.
    """
    network = Network(hosts, delays)
    try:
        yield network
    finally:
        network.close()
